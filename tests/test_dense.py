"""When products of dense graphs go by a matrix, without being asked to: which, and at what sizes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest
import torch
from checks import close, expect_spmm
from strategies import Edges, values
from test_pcsr import Kernels
from tile_twin import on_cpu

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.dense import Dense, WhereItPays, least_density, might_pay, pays

DENSE = import_module("gnn_spmm_plugin.dense")  # to replace what is in it
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GSP_KERNEL", "GSP_MODE", "GSP_LOG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def place(device: str) -> Iterator[str]:
    """A device that has the kernel: the GPU, or the CPU with its twin."""
    if device == "cpu":
        with on_cpu():
            yield device
    else:
        yield device


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of a few edges are large enough."""
    monkeypatch.setattr(DENSE, "_WORK", {2: 1, 4: 1})
    monkeypatch.setattr(DENSE, "_LEAST_EDGES", 1)


@pytest.fixture
def tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def block(rows: int, cols: int, edges: int, seed: int = 0) -> Edges:
    """So many of the pairs of two sets of nodes, drawn, in any order."""
    generator = torch.Generator().manual_seed(seed)
    pair = torch.randperm(rows * cols, generator=generator)[:edges]
    return Edges(torch.stack([pair % cols, pair // cols]), cols, rows)


def use(g: gsp.Graph, x: torch.Tensor, weight: torch.Tensor | None = None, times: int = 10) -> list[str]:
    """The operators of the last of some calls."""
    for _ in range(times):
        with Kernels() as ran:
            gsp.spmm(g, x, weight)
    return ran.names


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_widths_of_halves(dtype: torch.dtype) -> None:
    found = {w: least_density(w, dtype) for w in (8, 24, 32, 56, 64, 120, 128, 4096)}
    assert found == {8: None, 24: None, 32: 0.1, 56: 0.1, 64: 0.07, 120: 0.07, 128: 0.035, 4096: 0.035}
    assert least_density(100, dtype) is None  # rows of no whole 16 bytes


def test_widths_of_float32(tf32: None) -> None:
    found = {w: least_density(w, torch.float32) for w in (32, 60, 64, 124, 128, 252, 256, 258)}
    assert found == {32: None, 60: None, 64: 0.18, 124: 0.18, 128: 0.1, 252: 0.1, 256: 0.05, 258: None}
    assert least_density(256, torch.float64) is None
    torch.set_float32_matmul_precision("highest")
    assert least_density(256, torch.float32) is None


def test_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides of each: density, edges times columns, bytes of the matrix."""
    monkeypatch.setattr(DENSE, "_WORK", {2: 128 * 1400, 4: 1})
    monkeypatch.setattr(DENSE, "_LEAST_EDGES", 100)
    bf16 = torch.bfloat16
    sparse, dense = (block(200, 200, n).graph()._csr for n in (1399, 1400))  # 3.5% of the pairs
    assert pays(dense, 128, bf16) and might_pay(dense)
    assert not pays(sparse, 128, bf16) and not might_pay(sparse)
    assert not pays(dense, 64, bf16)  # takes 7%
    monkeypatch.setattr(DENSE, "_WORK", {2: 128 * 1400 + 1, 4: 1})
    assert not pays(dense, 128, bf16)
    assert pays(dense, 136, bf16)
    monkeypatch.setattr(DENSE, "MOST_BYTES", 200 * 200 * 4 - 1)
    assert not pays(dense, 136, bf16) and not might_pay(dense)
    monkeypatch.setattr(DENSE, "MOST_BYTES", 200 * 200 * 4)
    assert might_pay(dense)
    monkeypatch.setattr(DENSE, "_LEAST_EDGES", 1401)
    assert not might_pay(dense)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_calls_that_ask_for_nothing(place: str, small: None, reduce: str, dtype: torch.dtype) -> None:
    """From the use on at which a plan is upgraded, forward and backward; right, and with the operator that runs."""
    e = block(60, 44, 600)
    g = e.graph(place)
    x = values((44, 32), dtype, 1, device=place).requires_grad_()
    grad = values((60, 32), dtype, 3, device=place)
    expected = expect_spmm(g, x, None, grad, reduce)
    seen = []
    for _ in range(10):
        x.grad = None
        with Kernels() as ran:
            out = gsp.spmm(g, x, reduce=reduce)
            out.backward(grad)
        seen.append(ran.names.count("tile_end"))
        close(out, expected.out, 2)
        close(x.grad, expected.grad_x, 2)
    assert seen[0] == 0 and seen[-1] == 2
    assert g._csr.plan.kernel.name != "dense" and "as a matrix" not in repr(g._csr.plan.kernel)
    assert "so go by a matrix, one GEMM: 22.7% of the pairs" in g._csr.plan.explain()
    assert g._csr.plan.nbytes() >= 60 * 48 * 2


def test_float32_where_tf32_will_do(place: str, small: None, tf32: None) -> None:
    g = block(60, 44, 600).graph(place)
    x = values((44, 64), torch.float32, 1, device=place)
    assert use(g, x) == ["tile_end"]
    torch.set_float32_matmul_precision("highest")
    assert "tile_end" not in use(g, x, times=1)
    assert "tile_end" not in use(g, x.double(), times=1)


def test_weights(place: str, small: None) -> None:
    """Constant ones have a matrix from their second use on; learned ones, and others each time, have none."""
    e = block(60, 44, 600)
    g = e.graph(place)
    x, weight = (values(s, torch.bfloat16, i, device=place) for i, s in enumerate([(44, 128), (600,)]))
    use(g, x)
    assert "tile_end" not in use(g, x, weight, times=1)
    assert "tile_end" in use(g, x, weight, times=1)
    close(gsp.spmm(g, x, weight), expect_spmm(g, x, weight, torch.zeros(60, 128, device=place), "sum").out)
    weight.mul_(2)
    assert "tile_end" not in use(g, x, weight, times=1)
    close(gsp.spmm(g, x, weight), expect_spmm(g, x, weight, torch.zeros(60, 128, device=place), "sum").out)
    for _ in range(3):
        assert "tile_end" not in use(g, x, weight.clone(), times=1)
        assert "tile_end" not in use(g, x, weight.clone().requires_grad_(), times=1)
    assert "tile_end" not in use(g, x.view(44, 2, 64), weight.view(-1, 1).repeat(1, 2), times=3)


def test_whoever_asks_for_something_else_gets_it(place: str, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    e = block(60, 60, 900)
    x = values((60, 128), torch.bfloat16, 1, device=place)
    g = e.graph(place)
    use(g, x)
    for policy in ("csr", "dualgcn", "paramspmm"):
        with Kernels() as ran:
            gsp.spmm(g, x, policy=policy)
        assert "tile_end" not in ran.names, policy
    torch.use_deterministic_algorithms(True)
    try:
        assert "tile_end" not in use(g, x, times=2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "tile_end" in use(g, x, times=1)
    monkeypatch.setenv("GSP_KERNEL", "csr_dual" if place == "cuda" else "csr_cpu")
    assert "tile_end" not in use(e.graph(place), x)


def test_plans(place: str, small: None) -> None:
    """A plan for one product says what it is, and why."""
    g = block(60, 44, 400).graph(place)  # 15%
    plan = gsp.plan(g, 128, torch.bfloat16)
    assert isinstance(plan.format, WhereItPays)
    assert (
        "as a matrix, one GEMM: 15.2% of the pairs of nodes are edges, it is faster from 3.5% on for bfloat16 of 128"
        in plan.explain()
    )
    x = values((44, 128), torch.bfloat16, 1, device=place)
    with Kernels() as ran:
        out = gsp.spmm(g, x, plan=plan)
    assert ran.names == ["tile_end"]
    close(out, expect_spmm(g, x, None, torch.zeros(60, 128, device=place), "sum").out)
    left = {
        (128, torch.float32): "for float32 it takes torch.set_float32_matmul_precision('high')",
        (16, torch.bfloat16): "for bfloat16 of 16 columns a GEMM is slower",
        (128, torch.float64): "for float64 of 128 columns a GEMM is slower",
    }
    for (width, dtype), why in left.items():
        plan = gsp.plan(g, width, dtype)
        assert not isinstance(plan.format, WhereItPays) and why in plan.explain()
    assert "left out" not in gsp.plan(g, 128, torch.bfloat16, "max").explain()
    assert gsp.plan(g, 128, torch.bfloat16, policy="csr").format is None
    assert isinstance(gsp.plan(g, 128, torch.bfloat16, schedule="natural").format, WhereItPays)
    assert not isinstance(gsp.plan(g, 128, torch.bfloat16, schedule="degree").format, WhereItPays)
    asked = gsp.plan(g, 128, torch.bfloat16, kernel="dense")
    assert isinstance(asked.format, Dense) and asked.kernel.name == "dense"


def test_too_few_of_the_pairs(place: str, small: None) -> None:
    g = block(60, 44, 160).graph(place)  # 6%
    said = gsp.plan(g, 64, torch.bfloat16).explain()
    assert "6.1% of the pairs of nodes are edges; for bfloat16 of 64 columns a GEMM is faster from 7.0% on" in said
    assert isinstance(gsp.plan(g, 128, torch.bfloat16).format, WhereItPays)
    sparse = block(60, 44, 70).graph(place)  # 2.7%
    assert "dense" not in gsp.plan(sparse, 128, torch.bfloat16).explain().split("override")[0]


@pytest.mark.parametrize("what", ["parallel", "memory"])
def test_no_matrix_no_harm(place: str, small: None, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More parallel edges than the dtype counts, or no memory: the CSR arrays, and nothing is tried again."""
    e = block(60, 44, 600)
    if what == "parallel":
        e = Edges(torch.cat([e.edge_index, e.edge_index[:, :1].expand(2, 300)], 1), 44, 60)
    else:
        tried = []

        def fail(*_: object) -> None:
            tried.append(1)
            raise torch.OutOfMemoryError("no memory")

        monkeypatch.setattr(DENSE, "prepare", fail)
    g = e.graph(place)
    x = values((44, 128), torch.bfloat16, 1, device=place)
    assert "tile_end" not in use(g, x, times=12)
    close(gsp.spmm(g, x), expect_spmm(g, x, None, torch.zeros(60, 128, device=place), "sum").out, terms=300)
    assert what == "parallel" or tried == [1]


def test_autocast(place: str, small: None) -> None:
    """float32 stays what it is under autocast, which casts what torch.mm is given."""
    g = block(60, 44, 600).graph(place)
    x = values((44, 128), torch.bfloat16, 1, device=place)
    use(g, x)
    wanted = gsp.spmm(g, x)
    plan = gsp.plan(g, 128, kernel="dense")
    exact = gsp.spmm(g, x.float(), plan=plan)
    with torch.autocast(place, torch.bfloat16):
        with Kernels() as ran:
            assert torch.equal(gsp.spmm(g, x), wanted)
        assert ran.names == ["tile_end"]
        assert torch.equal(gsp.spmm(g, x.float(), plan=plan), exact)


def test_compiled(place: str, small: None) -> None:
    """By the matrix if it was there before; a plan is what it was when it was traced."""
    g = block(60, 44, 600).graph(place)
    x = values((44, 128), torch.bfloat16, 1, device=place)
    use(g, x)
    torch._dynamo.reset()
    out = torch.compile(lambda x: gsp.spmm(g, x), fullgraph=True, backend="aot_eager")(x)
    close(out, expect_spmm(g, x, None, torch.zeros(60, 128, device=place), "sum").out)
    torch._dynamo.reset()
    fresh = block(60, 44, 600).graph(place)
    out = torch.compile(lambda x: gsp.spmm(fresh, x), fullgraph=True, backend="aot_eager")(x)
    close(out, expect_spmm(g, x, None, torch.zeros(60, 128, device=place), "sum").out)


@pytest.mark.gpu
def test_at_their_real_sizes() -> None:
    """A graph that the table says yes to, unaided, in a CUDA graph too."""
    e = block(4096, 4096, 1_000_000)
    g = e.graph("cuda")
    x = values((4096, 128), torch.bfloat16, 1, device="cuda")
    assert use(g, x) == ["tile_end"]
    out = gsp.spmm(g, x)
    close(out, expect_spmm(g, x, None, torch.zeros(4096, 128, device="cuda"), "sum").out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gsp.spmm(g, x)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, out)
