"""Sums of small dense graphs from shared memory: what a plan prepares, results, and what runs instead elsewhere."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable

import pytest
import torch
from checks import Expected, close, same_bits
from strategies import values
from torch import Tensor

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.csr import Csr
from gnn_spmm_plugin.features import GraphFeatures
from gnn_spmm_plugin.functional_aggregate import aggregate
from gnn_spmm_plugin.schedule import stage_of

ROWS, COLS = 1300, 1200
PLAN = importlib.import_module("gnn_spmm_plugin.plan")  # gsp.plan is the function
#: Shared memory that plans are told of: for all sources at once on most GPUs, and for 3 to 4 blocks of them.
SHARED = (None, 60 << 10)


@functools.cache
def adjacency(rows: int = ROWS, cols: int = COLS) -> Tensor:
    """A dense random one; one row is empty, one full."""
    dense = torch.rand(rows, cols, generator=torch.Generator().manual_seed(0)) < 0.7
    dense[3], dense[7] = False, True
    return dense


def graph_of(dense: Tensor, device: str, shuffled: bool = False) -> gsp.Graph:
    index = dense.nonzero().flip(1).t()
    if shuffled:
        index = index[:, torch.randperm(index.shape[1], generator=torch.Generator().manual_seed(1))]
    return gsp.Graph.from_edge_index(index.to(device), (dense.shape[1], dense.shape[0]))


# ---------------------------------------------------------------------- the plan


@pytest.mark.parametrize("blocks", [1, 2, 5, 7])
def test_arrays(device: str, blocks: int) -> None:
    """Rows by falling length, and where the edges into each block of sources begin."""
    g = graph_of(adjacency(90, 641), device)
    csr, f = g._csr, GraphFeatures.of(g._csr)
    f = dataclasses.replace(f, num_edges=10**9)  # whatever the rule says
    made, why = stage_of(csr, f, 641 * 160 // blocks + 159)
    stage, sources = made["stage"].cpu(), made["sources"]
    assert stage.dtype == torch.int32 and stage.is_contiguous() and stage.shape == (blocks + 2, 90)
    assert sources == -(-641 // blocks) and f"{sources} of 641 sources" in why
    rowptr, col = csr.rowptr.tolist(), csr.col.tolist()
    order = sorted(range(90), key=lambda row: rowptr[row] - rowptr[row + 1])
    assert stage[0].tolist() == order
    for i, row in enumerate(order):
        for b in range(blocks + 1):
            before = sum(c < b * sources for c in col[rowptr[row] : rowptr[row + 1]])
            assert int(stage[b + 1, i]) == rowptr[row] + before


def test_rule(device: str) -> None:
    """Both sides of each bound."""
    g = graph_of(adjacency(90, 641), device)
    few = GraphFeatures.of(g._csr)

    def chosen(shared: int = 1 << 17, of: gsp.Graph = g, **other: int) -> bool:
        return bool(stage_of(of._csr, dataclasses.replace(few, **other), shared)[0])

    assert chosen(num_edges=512 * 641) and not chosen(num_edges=512 * 641 - 1)  # one block
    assert chosen(num_rows=10**4, num_edges=640_000) and not chosen(num_rows=10**4, num_edges=639_999)
    assert chosen(641 * 160 // 8 + 1, num_edges=10**6) and not chosen(641 * 160 // 9, num_edges=10**6)
    assert chosen(num_edges=10**6, max_degree=641) and not chosen(num_edges=10**6, max_degree=642)
    assert not chosen(num_cols=0, num_edges=0)
    made, why = stage_of(
        graph_of(adjacency(90, 641), device, shuffled=True)._csr, dataclasses.replace(few, num_edges=10**6), 30_000
    )
    assert not made and "do not ascend" in why


def test_plan_off_the_gpu() -> None:
    plan = gsp.plan(graph_of(adjacency(), "cpu"), 32)
    assert not plan.stage and "staged" not in plan.explain()


# ---------------------------------------------------------------------- results


def staged_graph(monkeypatch: pytest.MonkeyPatch, shared: int | None) -> gsp.Graph:
    """One that is warm from the first use on, and staged in both directions."""
    monkeypatch.setenv("GSP_MODE", "warm")
    if shared is not None:
        monkeypatch.setattr(PLAN, "shared_bytes", lambda device: shared)
    g = graph_of(adjacency(), "cuda")
    for half in (g, g.T):
        plan = gsp.plan(half, 32)
        assert plan.stage and "  staged    sums from shared memory" in plan.explain()
        assert plan.nbytes() > plan.stage["stage"].numel() * 4
        assert shared is None or plan.stage["stage"].shape[0] > 3
    return g


def exact(dense: Tensor, x: Tensor) -> Expected:
    """``dense @ x`` in float64."""
    return Expected(dense @ x.double(), dense.abs() @ x.double().abs())


def kernels_of(run: Callable[[], object]) -> list[str]:
    """The names of the CUDA kernels that it launches."""
    run()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return [e.name for e in profile.events() if e.device_type == on_device and "gsp" in e.name]


@pytest.mark.gpu
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_sums(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, weighted: bool, reduce: str, shared: int | None
) -> None:
    """Forward and backward, of widths that are and are not multiples of a slab and of a vector."""
    g = staged_graph(monkeypatch, shared)
    dense = adjacency().double().cuda()
    weight = values((g.num_edges,), dtype, 3, device="cuda") if weighted else None
    if weight is not None:
        dense[dense != 0] = weight.double()
    if reduce == "mean":
        dense /= adjacency().cuda().sum(1, keepdim=True).clamp(min=1)
    for width in (1, 4, 30, 32, 100, 128, 256, 260):
        x = values((COLS, width), dtype, 1, device="cuda").requires_grad_()
        grad = values((ROWS, width), dtype, 2, device="cuda")
        out = gsp.spmm(g, x, weight, reduce)
        expected = exact(dense, x.detach())
        close(out, expected)
        out.backward(grad)
        assert x.grad is not None
        close(x.grad, exact(dense.t(), grad))
        apart = torch.zeros(COLS, width + 5, dtype=dtype, device="cuda")[:, 1 : width + 1].copy_(x.detach())
        close(gsp.spmm(g, apart, weight, reduce), expected)  # rows off the boundaries of vectors
        assert same_bits(gsp.spmm(g, x.detach(), weight, reduce), out.detach())


@pytest.mark.gpu
@pytest.mark.parametrize("shared", SHARED)
def test_it_is_what_runs(monkeypatch: pytest.MonkeyPatch, shared: int | None) -> None:
    """The kernel, with a second one where sources are shared out; items for whatever it does not do."""
    g = staged_graph(monkeypatch, shared)
    dense = adjacency().double().cuda()
    several = gsp.plan(g, 32).stage["stage"].shape[0] > 3
    for width, dtype in (
        *((32, torch.float32), (128, torch.float32), (132, torch.float32)),
        *((64, torch.float16), (256, torch.bfloat16), (264, torch.float16)),
    ):
        x = values((COLS, width), dtype, 1, device="cuda")
        slabs = -(-width * x.element_size() // 128)
        before = gsp.stats()["kernel_calls"]
        names = kernels_of(lambda x=x: gsp.spmm(g, x))  # type: ignore[misc]
        assert gsp.stats()["kernel_calls"] == before + 2
        assert sum("staged_spmm" in name for name in names) == 1, names
        assert sum("staged_fold" in name for name in names) == (several and slabs <= 4), names
        assert len(names) == 1 + (several and slabs <= 4), names
    heads = torch.rand(g.num_edges, 2, device="cuda")
    x = values((COLS, 64), torch.float32, 1, device="cuda")
    for run in (
        lambda: gsp.spmm(g, x.double()),
        lambda: gsp.spmm(g, x.view(COLS, 2, 32), heads),
        lambda: aggregate(g, x, src_scale=torch.rand(COLS, device="cuda")),  # which differs from call to call
        lambda: gsp.spmm(g, x, reduce="max"),
        lambda: gsp.spmm(g, x, plan=gsp.plan(g, 64, schedule="degree")),
    ):
        assert not any("staged" in name for name in kernels_of(run))
    close(gsp.spmm(g, x.half()), exact(dense, x.half()))
    close(gsp.spmm(g, x.double()), exact(dense, x))
    scale = torch.rand(COLS, device="cuda")
    for _ in range(3):  # as weights, once it is known to be constant
        close(aggregate(g, x, src_scale=scale), exact(dense, x.double() * scale.double().unsqueeze(1)), 2)
    assert any("staged" in name for name in kernels_of(lambda: aggregate(g, x, src_scale=scale)))


@pytest.mark.gpu
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("width", [33, 64, 256])
def test_ends(monkeypatch: pytest.MonkeyPatch, width: int, shared: int | None) -> None:
    g = staged_graph(monkeypatch, shared)
    x, own = (values((n, width), torch.float32, 1, device="cuda") for n in (COLS, ROWS))
    bias, scale = torch.rand(width, device="cuda"), torch.rand(ROWS, device="cuda")
    dense = adjacency().double().cuda() * scale.double().unsqueeze(1)
    plain = exact(dense, x)
    term = own.double() * scale.double().unsqueeze(1)
    for relu in (False, True):
        for dtype in (torch.float32, torch.float16):
            value = plain.value + term + bias.double()
            expected = Expected(value.relu() if relu else value, plain.size + term.abs() + bias.double())
            end = {"dst_scale": scale, "self_x": own, "self_scale": scale, "bias": bias, "relu": relu, "dtype": dtype}
            run = functools.partial(aggregate, g, x, **end)  # type: ignore[arg-type]
            close(run(), expected, 2)
            assert any("staged" in name for name in kernels_of(run))


@pytest.mark.gpu
@pytest.mark.parametrize("shared", SHARED)
def test_what_is_not_finite_follows_edges(monkeypatch: pytest.MonkeyPatch, shared: int | None) -> None:
    g = staged_graph(monkeypatch, shared)
    dense = adjacency().cuda()
    for width in (36, 160):
        x = values((COLS, width), torch.float32, 1, device="cuda")
        for bad in (torch.nan, torch.inf):
            x[700] = bad
            assert torch.equal(~gsp.spmm(g, x).isfinite(), dense[:, 700:701].expand(-1, width))


@pytest.mark.gpu
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("width", [64, 256])
def test_streams_and_captures(monkeypatch: pytest.MonkeyPatch, width: int, shared: int | None) -> None:
    """The same bits on another stream, and from a CUDA graph that finds other features."""
    g = staged_graph(monkeypatch, shared)
    x, other = (values((COLS, width), torch.float32, seed, device="cuda") for seed in (1, 2))
    wanted = gsp.spmm(g, x), gsp.spmm(g, other)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = [gsp.spmm(g, x) for _ in range(20)]
    torch.cuda.current_stream().wait_stream(stream)
    assert all(same_bits(out, wanted[0]) for out in found)
    static, recorded = x.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        out = gsp.spmm(g, static)
    for now, expected in zip((x, other, x), (*wanted, wanted[0]), strict=True):
        static.copy_(now)
        recorded.replay()
        assert same_bits(out, expected)


def test_compiled(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan with a stage passes through torch.compile, whatever the width."""
    torch._dynamo.reset()
    g = graph_of(adjacency() if device == "cuda" else adjacency(90, 641), device)
    if device == "cpu":
        warm = PLAN._warm

        def staged(csr: Csr, *rest: object) -> gsp.Plan:
            f = dataclasses.replace(GraphFeatures.of(csr), num_edges=10**9)
            return dataclasses.replace(warm(csr, *rest), stage=stage_of(csr, f, 30_000)[0])

        monkeypatch.setattr(PLAN, "_warm", staged)
    weight = values((g.num_edges,), torch.float32, 3, device=device)
    compiled = torch.compile(lambda x, w: gsp.spmm(g, x, w), fullgraph=True, dynamic=True)
    for width in (32, 48, 260):
        x = values((g.num_src, width), torch.float32, 1, device=device).requires_grad_()
        found, wanted = compiled(x, weight), gsp.spmm(g, x, weight)  # in this order: tracing makes the plan
        assert g._csr.plan.stage and same_bits(found, wanted)
        grads = [torch.autograd.grad(out.sum(), x)[0] for out in (found, wanted)]
        assert torch.allclose(*grads, atol=1e-4)
