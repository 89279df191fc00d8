"""PCSR: the paper's examples, the format on any graph, the choice of a configuration, and the kernel.

Where there is no GPU, a twin of the kernel in plain torch stands in for it (see pcsr_twin.py).
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from checks import Expected, expect_spmm, same_bits
from checks import close as close_to
from hypothesis import given, settings
from hypothesis import strategies as st
from pcsr_twin import on_cpu
from strategies import DTYPES, LAYOUTS, NAMED, Edges, edges, lay_out, values
from test_aggregate import DIFFERENTIABLE, leaves, parts, without
from test_aggregate import close as close_parts
from test_errors import raw_arguments
from torch.utils._python_dispatch import TorchDispatchMode

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import _native, pcsr
from gnn_spmm_plugin.csr import Csr
from gnn_spmm_plugin.functional_aggregate import aggregate
from gnn_spmm_plugin.pcsr import Config, PanelFeatures, Pcsr, PcsrFeatures, choose_config
from gnn_spmm_plugin.plan import Plan

CONFIGS = [Config(W, F, V, S) for W, F, V, S in itertools.product((4, 8), (1, 2), (1, 2), (False, True))]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GSP_KERNEL", "GSP_MODE", "GSP_LOG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def place(device: str) -> Iterator[str]:
    """A device that has a kernel pcsr: the GPU, or the CPU with the twin."""
    if device == "cpu":
        with on_cpu():
            yield device
    else:
        yield device


def close(got: torch.Tensor, expected: Expected, roundings: int = 1) -> None:
    """V = 2 adds the terms of one column one after the other, so partial sums, and their errors, grow larger."""
    close_to(got, Expected(expected.value, 4 * expected.size), roundings)


def format_of(
    csr: Csr, config: Config, granularity: int = 32, schedule: torch.Tensor | None = None, align: int = pcsr.FOUR
) -> Pcsr:
    return pcsr.build(csr, pcsr.vectors(csr, config.V, schedule), config, granularity, align)


def plan_of(
    g: gsp.Graph, width: int, dtype: torch.dtype, reduce: str, config: Config, schedule: torch.Tensor | None = None
) -> Plan:
    """A plan under a configuration of our choice, long panels split at 32."""
    plan = gsp.plan(g, width, dtype, reduce, kernel="pcsr")
    made = format_of(g._csr, config, 32, schedule)
    return replace(plan, format=made)


# ---------------------------------------------------------------------- the paper's Figure 3

A, B, C, D, E, F, G, H, I, J = range(1, 11)  # noqa: E741


@pytest.mark.parametrize(
    ("config", "granularity", "row_ptr", "col_idx", "val", "t_row"),
    [
        (
            Config(S=False, V=1),
            2,
            [0, 4, 6, 8, 10],
            [0, 1, 2, 3, 0, 1, 0, 2, 0, 3],
            [A, B, C, D, E, F, G, H, I, J],
            [0, 1, 2, 3],
        ),
        (
            Config(S=False, V=2),
            3,
            [0, 4, 7],
            [0, 1, 2, 3, 0, 2, 3],
            [A, E, B, F, C, 0, D, 0, G, I, H, 0, 0, J],
            [0, 1],
        ),
        (
            Config(S=True, V=1),
            2,
            [0, 2, 4, 6, 8, 10],
            [0, 1, 2, 3, 0, 1, 0, 2, 0, 3],
            [A, B, C, D, E, F, G, H, I, J],
            [0, 0, 1, 2, 3],
        ),
        (
            Config(S=True, V=2),
            3,
            [0, 3, 4, 7],
            [0, 1, 2, 3, 0, 2, 3],
            [A, E, B, F, C, 0, D, 0, G, I, H, 0, 0, J],
            [0, 0, 1],
        ),
    ],
    ids=["1", "2", "3", "4"],
)
def test_figure_3(
    device: str,
    config: Config,
    granularity: int,
    row_ptr: list[int],
    col_idx: list[int],
    val: list[int],
    t_row: list[int],
) -> None:
    """The four worked examples of the paper: one matrix under <S, V> and SG."""
    rowptr, col = torch.tensor([0, 4, 6, 8, 10]), torch.tensor([0, 1, 2, 3, 0, 1, 0, 2, 0, 3])
    g = gsp.Graph.from_csr(rowptr.to(device), col.to(device), 4)
    found = format_of(g._csr, config, granularity, align=1)
    assert found.ptr.tolist() == row_ptr
    assert found.columns().tolist() == col_idx
    weight = torch.arange(1, 11, device=device)
    assert found.values(weight).masked_fill(~found.present(), 0).flatten().tolist() == val
    assert [rows[0] // config.V for rows in piece_rows(found, 4)] == t_row


# ---------------------------------------------------------------------- the format


def piece_rows(p: Pcsr, num_rows: int) -> list[list[int]]:
    """The rows of each piece, -1 for none."""
    height, pieces = p.config.V, p.ptr.shape[0] - 1
    if p.target is None:
        return [[r if r < num_rows else -1 for r in range(i * height, (i + 1) * height)] for i in range(pieces)]
    of_slot = {
        slot: [first, second][:height]
        for first, second, begin, end in ([] if p.merges is None else p.merges.tolist())
        for slot in range(begin, end)
    }
    return [rows if rows[0] >= 0 else of_slot[~rows[0]] for rows in p.target.tolist()]


@settings(max_examples=60)
@given(
    e=edges(),
    height=st.sampled_from([1, 2]),
    split=st.booleans(),
    granularity=st.sampled_from([1, 2, 4, 6, 32]),
    align=st.sampled_from([1, 4]),
    scheduled=st.booleans(),
    seed=st.integers(0, 100),
)
def test_every_edge_once(device, e, height, split, granularity, align, scheduled, seed) -> None:  # type: ignore[no-untyped-def]
    """Each edge is a value of a piece of its row, in order; pieces are short, panels whole, vectors few."""
    g = e.graph(device)
    order = torch.randperm(e.num_dst, generator=torch.Generator().manual_seed(seed))
    schedule = order.to(device) if scheduled else None
    p = format_of(g._csr, Config(V=height, S=split), granularity, schedule, align)
    names = order.tolist() if scheduled else list(range(e.num_dst))
    panels = [[*names[i : i + height], -1][:height] for i in range(0, e.num_dst, height)]
    rows, present, columns, ids = piece_rows(p, e.num_dst), p.present().tolist(), p.columns().tolist(), p.edge.tolist()
    begins = [b * align for b in p.ptr.tolist()]
    assert begins[0] == 0 and begins[-1] == len(columns) and len(rows) == len(begins) - 1
    assert p.nbytes() > 0 and p.granularity == (granularity if split else 0)

    found: dict[int, list[int]] = {row: [] for row in names}
    vectors = 0
    for piece, (begin, end) in enumerate(itertools.pairwise(begins)):
        real = [v for v in range(begin, end) if any(present[v])]
        assert real == list(range(begin, begin + len(real)))  # what fills up comes last
        assert end - begin == -(-len(real) // align) * align
        assert not split or len(real) <= granularity
        vectors += len(real)
        for v, lane in itertools.product(real, range(height)):
            if present[v][lane]:
                assert e.edge_index[:, ids[v][lane]].tolist() == [columns[v], rows[piece][lane]]
                found[rows[piece][lane]].append(ids[v][lane])
    assert [r for r, _ in itertools.groupby(rows)] == panels
    if not split:
        assert len(rows) == len(panels)
    degree = Counter(e.edge_index[1].tolist())
    for row, got in found.items():
        assert len(set(got)) == len(got) == degree[row]
        want = [i for i in range(e.num_edges) if e.edge_index[1, i] == row]
        if height == 2:
            want.sort(key=lambda i: (int(e.edge_index[0, i]), i))
        assert got == want
    counts = Counter(zip(e.edge_index[1].tolist(), e.edge_index[0].tolist(), strict=True))
    fewest = sum(max(counts[row, col] for row in panel) for panel in panels for col in range(e.num_src))
    assert vectors == (fewest if height == 2 else e.num_edges)


def test_slots_and_merges(device: str) -> None:
    """Each part of a split panel has a slot of its own, those of one panel follow one another."""
    g = NAMED["hub"].graph(device)
    for height in (1, 2):
        p = format_of(g._csr, Config(V=height, S=True), 32)
        assert p.target is not None and p.merges is not None
        parts = [~rows[0] for rows in p.target.tolist() if rows[0] < 0]
        assert parts == list(range(p.slots)) and p.slots > 40
        assert [m[2] for m in p.merges.tolist()] == [0, *(m[3] for m in p.merges.tolist()[:-1])]
        assert p.merges[-1, 3] == p.slots and bool((p.merges[:, 3] - p.merges[:, 2] > 1).all())
        whole = format_of(g._csr, Config(V=height, S=False), 32)
        assert whole.target is None and whole.merges is None and whole.slots == 0
        short = format_of(g._csr, Config(V=height, S=True), 10_000)  # nothing to split
        assert short.target is None and short.merges is None


def test_arguments_of_the_format(device: str) -> None:
    csr = NAMED["shuffled"].graph(device)._csr
    with pytest.raises(ValueError, match=r"V = 1 or 2 rows, got 3"):
        pcsr.vectors(csr, 3)
    with pytest.raises(ValueError, match=r"got vectors of V = 1 and SG = 32 for <W=4, F=1, V=2, S=False>"):
        pcsr.build(csr, pcsr.vectors(csr, 1), Config(V=2), 32)
    huge = Csr(csr.rowptr, csr.col, csr.perm, 2**30)
    assert format_of(huge, Config(V=1)).columns().equal(format_of(csr, Config(V=1)).columns())
    with pytest.raises(ValueError, match=r"pcsr needs fewer than 2\^30 columns for V = 2.*use another kernel"):
        pcsr.build(huge, pcsr.vectors(csr, 2), Config(V=2), 32)


def test_columns_use_all_bits(device: str) -> None:
    """A large id is a negative number in `col`."""
    rowptr = torch.tensor([0, 2, 3], device=device)
    for height in (1, 2):
        top = 2 ** (32 - height) - 2
        col = torch.tensor([top, 5, top], device=device)
        csr = Csr(rowptr.int(), col.int() if height == 2 else col, None, top + 1)
        position = torch.arange(3, device=device)
        arranged = pcsr.vectors(csr, 1)
        if height == 2:  # by hand: sorting by column would count all columns
            lane, pair = torch.tensor([0, 0, 1], device=device), torch.tensor([0, 1, 0], device=device)
            arranged = pcsr.Vectors(2, None, torch.tensor([0, 2], device=device), position, pair, lane)
        p = pcsr.build(csr, arranged, Config(V=height), 32, 1)
        assert bool((p.col < 0).any()) and p.columns().tolist() == [top, 5, top][: len(p.col)]
        assert p.present().sum() == 3


@settings(max_examples=40)
@given(e=edges(max_edges=400))
def test_features(device, e) -> None:  # type: ignore[no-untyped-def]
    """PR, SR and SG as the paper defines them."""
    g = e.graph(device)
    counts = Counter(zip(e.edge_index[1].tolist(), e.edge_index[0].tolist(), strict=True))
    for height in (1, 2):
        f = pcsr.panel_features(pcsr.vectors(g._csr, height))
        lengths = [0] * -(-e.num_dst // height)
        for (row, col), count in counts.items():
            other = counts.get((row ^ 1, col), 0) if height == 2 else 0
            if row % 2 == 0 or height == 1 or not other:
                lengths[row // height] += max(count, other)
        filled = [n for n in lengths if n]
        assert (f.vectors, f.panels, f.longest) == (sum(filled), len(filled), max(filled, default=0))
        if filled:
            mean = sum(filled) / len(filled)
            assert f.granularity % 32 == 0 and f.granularity - 32 < mean <= f.granularity
            assert f.padding_ratio == pytest.approx(1 - e.num_edges / (height * sum(filled)))
            assert f.pieces == sum(-(-n // f.granularity) for n in filled)
            assert f.split_ratio == pytest.approx(f.pieces / len(filled))
            assert 0 <= f.padding_ratio <= 1 - 1 / height and f.split_ratio >= 1


# ---------------------------------------------------------------------- the choice


def described(rows: int, mean: int, longest: int, padding: float) -> PcsrFeatures:
    def panels(height: int) -> PanelFeatures:
        count = int(rows * mean / height / (1 - padding)) if height == 2 else rows * mean
        sg = -(-count // (rows // height) // 32) * 32
        return PanelFeatures(count, rows // height, longest, sg, 0, padding if height == 2 else 0.0, 1.0)

    return PcsrFeatures(rows, rows * mean, panels(1), panels(2))


def test_choice_by_padding_and_skew() -> None:
    """V by the padding ratio, S by what the longest panel would take of the whole."""
    even = described(1_000_000, 20, 60, 0.48)
    assert choose_config(even, 128) == Config(4, 1, 1, False)
    assert choose_config(described(1_000_000, 20, 60, 0.2), 128) == Config(4, 1, 2, False)
    assert choose_config(described(1_000_000, 20, 50_000, 0.48), 128).S
    assert choose_config(described(1_000_000, 20, 50_000, 0.2), 128) == Config(4, 1, 2, True)
    assert not choose_config(described(10_000_000, 20, 400, 0.48), 128).S
    assert choose_config(described(2_000, 4, 170, 0.48), 16).S  # a small graph has little else to do
    assert not choose_config(described(2_000, 4, 30, 0.48), 16).S  # nothing to split
    empty = PanelFeatures(0, 0, 0, 32, 0, 0.0, 1.0)
    assert choose_config(PcsrFeatures(5, 0, empty, empty), 16) == Config(4, 1, 1, False)


@pytest.mark.parametrize(
    ("width", "dtype", "fold"),
    [
        (0, torch.float32, 1),
        (4, torch.float32, 1),
        (128, torch.float32, 1),
        (160, torch.float32, 2),
        (256, torch.float32, 2),
        (512, torch.float32, 2),
        (31, torch.float32, 1),
        (33, torch.float32, 4),
        (257, torch.float32, 4),
        (256, torch.float16, 1),
        (512, torch.bfloat16, 2),
        (50, torch.float16, 1),
        (602, torch.float16, 4),
        (64, torch.float64, 1),
        (128, torch.float64, 2),
    ],
)
def test_choice_by_width(width: int, dtype: torch.dtype, fold: int) -> None:
    assert choose_config(described(1000, 4, 20, 0.48), width, dtype).F == fold


# ---------------------------------------------------------------------- products


@pytest.mark.parametrize("config", CONFIGS[:8], ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_graphs(place: str, name: str, config: Config) -> None:
    """Every kind of graph, reduction and weight."""
    e = NAMED[name]
    g = e.graph(place)
    x = values((e.num_src, 12), torch.float32, 1, device=place)
    nothing = torch.zeros(e.num_dst, 12, device=place)
    for kind, reduce in itertools.product(("none", "edge", "head"), ("sum", "mean")):
        weight = None
        if kind != "none":
            weight = values((e.num_edges, *([3] if kind == "head" else [])), torch.float32, 2, device=place)
        shaped = x.view(-1, 3, 4) if kind == "head" else x
        expected = expect_spmm(g, shaped, weight, nothing.view(e.num_dst, *shaped.shape[1:]), reduce)
        plan = plan_of(g, 12, torch.float32, reduce, config)
        close(gsp.spmm(g, shaped, weight, reduce, plan=plan), expected.out)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [0, 1, 2, 3, 8, 16, 31, 33, 50, 64, 100, 128, 132, 256, 257, 264, 300, 602, 1030])
def test_widths(width: int, dtype: torch.dtype) -> None:
    """Every width, dtype and configuration, with all factors."""
    g = NAMED["hub"].graph("cuda")
    csr, acc = g._csr, _native.accumulation_dtype(dtype)
    x = values((60, width), dtype, 1, device="cuda")
    src_scale, dst_scale = (values((60,), acc, seed, device="cuda") for seed in (3, 4))
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0)).cuda()
    one, several = values((g.num_edges,), dtype, 2, device="cuda"), values((g.num_edges, 2), dtype, 2, device="cuda")
    for config, schedule in itertools.product(CONFIGS, (None, order)):
        p = format_of(csr, config, 64, schedule)
        for weight, scaled in itertools.product((None, one, several), (False, True)):
            if weight is several and width % 2:
                continue
            shaped = x.view(60, 2, -1) if weight is several else x
            wide = shaped.double() * (src_scale.double().view(60, *[1] * (shaped.dim() - 1)) if scaled else 1)
            expected = expect_spmm(g, wide, None if weight is None else weight.double(), wide * 0, "sum").out
            factor = dst_scale.double().unsqueeze(1) if scaled else 1
            expected.value = expected.value.reshape(60, width) * factor
            expected.size = expected.size.reshape(60, width) * abs(factor)
            launch = [config.W, config.F, config.V, p.slots]
            laid_out = None if weight is None else p.values(weight)
            scales = (src_scale, dst_scale) if scaled else (None, None)
            arrays = (csr.rowptr, p.ptr, p.col, p.target, p.merges, laid_out)
            close(_native.pcsr_spmm(*arrays, x, *scales, launch, False), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(place: str, layout: str, dtype: torch.dtype) -> None:
    e = NAMED["shuffled"]
    g = e.graph(place)
    for width, config in itertools.product((16, 33), (Config(V=1), Config(V=2, S=True, F=2))):
        x = lay_out(values((37, width), dtype, 1, device=place), layout)
        expected = expect_spmm(g, x, None, torch.zeros(37, width, device=place), "mean")
        close(gsp.spmm(g, x, reduce="mean", plan=plan_of(g, width, dtype, "mean", config)), expected.out)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_what_is_not_finite_stays_where_it_belongs(place: str, reduce: str) -> None:
    """NaN and inf reach the rows that have an edge from there, not the other row of the panel, which has padding."""
    edge_index = torch.tensor([[0, 1, 2, 2, 3], [0, 0, 1, 3, 3]])
    g = gsp.Graph.from_edge_index(edge_index.to(place), 5)
    x = torch.ones(5, 8, device=place)
    x[0], x[2], x[4] = torch.inf, torch.nan, torch.nan
    weight = torch.ones(5, device=place)
    weight[4] = torch.inf  # of 3 -> 3; x[3] of row 2's padding
    for height, w in itertools.product((1, 2), (None, weight)):
        out = gsp.spmm(g, x, w, reduce, plan=plan_of(g, 8, torch.float32, reduce, Config(V=height)))
        assert bool((out[0] == torch.inf).all() and out[1].isnan().all() and out[3].isnan().all())
        assert bool((out[2] == 0).all() and (out[4] == 0).all())


@pytest.mark.parametrize("policy", [None, "paramspmm"])
@pytest.mark.parametrize("kind", ["none", "edge", "head"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients(place: str, reduce: str, kind: str, policy: str | None) -> None:
    """Backward through the default plan of the transpose."""
    e = NAMED["bipartite"]
    g = e.graph(place)
    shape = (e.num_src, 2, 3) if kind == "head" else (e.num_src, 6)
    x = values(shape, torch.float64, 1, device=place).requires_grad_()
    weight = None
    if kind != "none":
        weight = values((e.num_edges, 2) if kind == "head" else (e.num_edges,), torch.float64, 2, device=place)
        weight.requires_grad_()
    kwargs = {"policy": policy} if policy else {"plan": gsp.plan(g, 6, torch.float64, reduce, kernel="pcsr")}
    before = _native.kernel_calls()
    out = gsp.spmm(g, x, weight, reduce, **kwargs)
    assert place == "cpu" or _native.kernel_calls() - before == 1
    grad = values(tuple(out.shape), torch.float64, 3, device=place)
    expected = expect_spmm(g, x, weight, grad, reduce)
    close(out, expected.out)
    out.backward(grad)
    close(x.grad, expected.grad_x)
    if weight is not None:
        close(weight.grad, expected.grad_weight, 2)


class Kernels(TorchDispatchMode):
    """Names of this package's operators that ran meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == _native.NAMESPACE:
            self.names.append(func.name().rpartition("::_")[2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_aggregate(place: str, reduce: str, dtype: torch.dtype) -> None:
    """Scales, self term, bias, ReLU and another result type, all in the kernel: as with the default one."""
    e = NAMED["hub"]
    g = e.graph(place)
    result = torch.float64 if dtype == torch.float64 else torch.float32
    gsp.plan(g, 12, dtype, reduce, policy="paramspmm")
    for weight, scaled, own, by_row in itertools.product((False, True), (False, True), ("none", "x", "other"), (0, 1)):
        p = parts(e, 12, dtype, place, weight, scaled, own, bool(by_row))
        found = []
        for policy in ("auto", "paramspmm"):
            q = leaves(p)
            with Kernels() as kernels:
                out = aggregate(
                    *(g, q["x"], q.get("weight"), reduce), **without(q), relu=bool(by_row), dtype=result, policy=policy
                )
            assert kernels.names == ["pcsr_spmm" if policy == "paramspmm" else "spmm"]
            names = [name for name in DIFFERENTIABLE if name in q and not (name == "self_x" and own == "x")]
            found.append((out, *torch.autograd.grad(out.sum(), [q[name] for name in names])))
        for got, want in zip(*reversed(found), strict=True):
            close_parts(got, want.detach().double(), dtype, (weight, scaled, own, by_row))


@pytest.mark.parametrize("compiled", [False, True])
def test_layers(place: str, compiled: bool) -> None:
    """GCN, whose normalisation are scales of both sides, and SAGE, under the policy."""
    torch._dynamo.reset()
    g = NAMED["shuffled"].graph(place)
    x = values((37, 8), torch.float32, 1, device=place)
    grad = values((37, 4), torch.float32, 2, device=place)
    for make in (gsp.nn.GCNConv, gsp.nn.SAGEConv):
        found = []
        for policy in ("auto", "paramspmm"):
            torch.manual_seed(0)
            layer = make(8, 4, policy=policy).to(place)
            leaf = x.clone().requires_grad_()
            fn = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
            out = fn(leaf, g)
            out.backward(grad)
            found.append((out.detach(), leaf.grad))
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True))
    plans = [*g._core.csr.plans.values(), *vars(g._core.derived).values()]
    assert any(isinstance(p, Plan) and p.format is not None for p in plans)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_second_derivatives(place: str, reduce: str) -> None:
    g = NAMED["parallel"].graph(place)
    x = values((3, 2), torch.float64, 1, device=place).requires_grad_()
    weight = values((13,), torch.float64, 2, device=place).requires_grad_()
    plan = gsp.plan(g, 2, torch.float64, reduce, kernel="pcsr")
    torch.autograd.gradgradcheck(lambda x, w: gsp.spmm(g, x, w, reduce, plan=plan), (x, weight))


def test_mean_overflows_no_more_than_its_result(place: str) -> None:
    g = gsp.Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [0, 0, 0, 1]], device=place), 3)
    x = torch.full((3, 8), torch.finfo(torch.float16).max, dtype=torch.float16, device=place)
    out = gsp.spmm(g, x, reduce="mean", plan=plan_of(g, 8, torch.float16, "mean", Config(V=2)))
    assert torch.equal(out[:2], x[:2]) and bool((out[2] == 0).all())


@pytest.mark.parametrize("height", [1, 2])
def test_schedules(place: str, height: int) -> None:
    """Any order of the rows gives the same; with whole panels of one row, to the bit."""
    e = NAMED["hub"]
    g = e.graph(place)
    x = values((60, 16), torch.float32, 1, device=place)
    expected = expect_spmm(g, x, None, torch.zeros(60, 16, device=place), "sum").out
    natural = gsp.spmm(g, x, plan=plan_of(g, 16, torch.float32, "sum", Config(V=height)))
    for seed in range(3):
        order = torch.randperm(60, generator=torch.Generator().manual_seed(seed)).to(place)
        for split in (False, True):
            plan = plan_of(g, 16, torch.float32, "sum", Config(V=height, S=split), order)
            out = gsp.spmm(g, x, plan=plan)
            close(out, expected)
            assert height == 2 or split or same_bits(out, natural)
        asked = gsp.plan(g, 16, kernel="pcsr", schedule=order.int())
        assert asked.format is not None and asked.format.target is not None
        assert "schedule  the caller's" in asked.explain()
        close(gsp.spmm(g, x, plan=asked), expected)
    longest = gsp.plan(g, 16, kernel="pcsr", schedule="degree")
    assert longest.format is not None and longest.format.target is not None and longest.schedule == "degree"
    assert longest is gsp.plan(g, 16, kernel="pcsr", schedule="degree") is not gsp.plan(g, 16, kernel="pcsr")
    by_row = longest.format.target if longest.format.merges is None else longest.format.merges
    assert by_row[0, 0] == g._csr.degree().argmax()
    close(gsp.spmm(g, x, plan=longest), expected)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_same_bits(place: str, config: Config) -> None:
    g = NAMED["hub"].graph(place)
    x = values((60, 48), torch.float32, 1, device=place)
    weight = values((g.num_edges,), torch.float32, 2, device=place)
    plan = plan_of(g, 48, torch.float32, "sum", config)
    first = gsp.spmm(g, x, weight, plan=plan)
    assert all(same_bits(first, gsp.spmm(g, x, weight, plan=plan)) for _ in range(10))
    again = plan_of(NAMED["hub"].graph(place), 48, torch.float32, "sum", config)
    assert again.format is not None and plan.format is not None
    for name in ("ptr", "col", "edge", "target", "merges"):
        a, b = getattr(again.format, name), getattr(plan.format, name)
        assert a is b is None or torch.equal(a, b)


# ---------------------------------------------------------------------- plans


def test_plan(place: str) -> None:
    """What it is, says and shares."""
    g = NAMED["hub"].graph(place)
    plan = gsp.plan(g, 64, kernel="pcsr")
    assert plan is gsp.plan(g, 64, kernel="pcsr") and plan is not gsp.plan(g, 256, kernel="pcsr")
    assert plan.kernel.name == "pcsr" and plan.mode == "warm" and plan.format is not None
    assert plan.nbytes() == plan.format.nbytes() > 4 * g.num_edges
    wide, by_policy = gsp.plan(g, 256, kernel="pcsr"), gsp.plan(g, 64, policy="paramspmm")
    assert wide.format is not None and by_policy.format is not None
    assert by_policy.format.config == plan.format.config != wide.format.config
    assert by_policy.format.col is plan.format.col
    assert wide.format.col is plan.format.col or wide.format.config[2:] != plan.format.config[2:]
    text = plan.explain()
    for part in (
        "Plan  pcsr  width=64 float32 sum  mode=warm",
        str(plan.format.config),
        f"SG {pcsr.panel_features(pcsr.vectors(g._csr, plan.format.config.V)).granularity}",
        "padding   ",
        "pieces each under S=True",
        "longest row 4,5",
    ):
        assert part in text, (part, text)
    assert gsp.plan(g, 64).kernel.name != "pcsr"


def test_plan_of_other_kinds(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maxima, cold plans: refused where the kernel was asked for, left to the default one under the policy."""
    g = NAMED["shuffled"].graph(place)
    x = values((37, 5), torch.float32, 1, device=place)
    default = gsp.plan(g, 5).kernel.name
    for reduce in ("max", "min"):
        with pytest.raises(ValueError, match=rf"'pcsr' computes sum and mean, not {reduce}; use {default}"):
            gsp.plan(g, 5, reduce=reduce, kernel="pcsr")
        plan = gsp.plan(g, 5, reduce=reduce, policy="paramspmm")
        assert plan.kernel.name == default and f"paramspmm has no kernel for {reduce}" in plan.explain()
        assert torch.equal(gsp.spmm(g, x, reduce=reduce, policy="paramspmm"), gsp.spmm(g, x, reduce=reduce))
    with pytest.raises(ValueError, match="'pcsr' reads a format that has to be built"):
        gsp.plan(g, 5, kernel="pcsr", mode="cold")
    assert gsp.plan(g, 5, policy="paramspmm", mode="cold").kernel.name == default
    assert "paramspmm" not in gsp.plan(g, 5, reduce="max").explain()
    with pytest.raises(ValueError, match="each row from 0 to 36 once"):
        gsp.plan(g, 5, kernel="pcsr", schedule=torch.zeros(37, dtype=torch.int32, device=place))
    monkeypatch.setenv("GSP_KERNEL", "pcsr")
    with pytest.raises(ValueError, match="'pcsr' computes sum and mean, not max"):
        gsp.spmm(NAMED["shuffled"].graph(place), x, reduce="max")
    monkeypatch.setenv("GSP_MODE", "cold")
    with pytest.raises(ValueError, match="'pcsr' reads a format that has to be built"):
        gsp.spmm(NAMED["shuffled"].graph(place), x)


def test_by_the_environment(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GSP_KERNEL=pcsr: the default plan, forward and backward, at any width."""
    monkeypatch.setenv("GSP_KERNEL", "pcsr")
    e = NAMED["hub"]
    g = e.graph(place)
    for width in (3, 64, 300):
        x = values((60, width), torch.float32, 1, device=place).requires_grad_()
        out = gsp.spmm(g, x, reduce="mean")
        grad = values((60, width), torch.float32, 2, device=place)
        expected = expect_spmm(g, x, None, grad, "mean")
        close(out, expected.out)
        out.backward(grad)
        close(x.grad, expected.grad_x)
    assert g._csr.plan.kernel.name == g._csr_t.plan.kernel.name == "pcsr"
    assert g._csr.plan.format is not None


def test_where_there_is_none() -> None:
    g = NAMED["shuffled"].graph("cpu")
    with pytest.raises(ValueError, match=r"unknown kernel 'pcsr' for cpu \(it is one for cuda\)"):
        gsp.plan(g, 5, kernel="pcsr")
    assert gsp.plan(g, 5, policy="paramspmm").kernel.name == "csr_cpu"
    (listed,) = (k for k in gsp.kernels() if k["name"] == "pcsr")
    assert listed["device"] == "cuda" and listed["reduces"] == ["sum", "mean"]


def test_weights_are_laid_out_once(place: str) -> None:
    """A constant weight; a changed or a learned one, each time."""
    g = NAMED["shuffled"].graph(place)
    x = values((37, 5), torch.float32, 1, device=place)
    weight = values((211,), torch.float32, 2, device=place)
    plan = gsp.plan(g, 5, kernel="pcsr")

    def permutes(w: torch.Tensor, calls: int) -> int:
        before = gsp.stats()["weight_permutes"]
        for _ in range(calls):
            out = gsp.spmm(g, x, w, plan=plan)
            close(out.detach(), expect_spmm(g, x, w, torch.zeros(37, 5, device=place), "sum").out)
        return gsp.stats()["weight_permutes"] - before

    assert permutes(weight, 4) == 1
    weight.mul_(2)
    assert permutes(weight, 2) == 1
    assert permutes(weight.clone(), 2) == 1
    assert permutes(weight.clone().requires_grad_(), 3) == 3
    other = gsp.plan(g, 7, kernel="pcsr")  # of the same arrays: shares what is laid out
    assert other.format is not None and plan.format is not None and other.format._kept is plan.format._kept


def test_plans_hang_on_the_graph(place: str, no_gc: None) -> None:
    g = NAMED["hub"].graph(place)
    plan = gsp.plan(g, 16, kernel="pcsr")
    assert plan.format is not None
    arrays = [weakref.ref(plan.format.col), weakref.ref(plan.format.edge), weakref.ref(g._csr)]
    del g
    assert arrays[0]() is not None and arrays[2]() is None
    del plan
    assert all(a() is None for a in arrays)


def test_out_of_memory(place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(pcsr, "build", fail)
    g = NAMED["shuffled"].graph(place)
    with caplog.at_level("WARNING", logger="gnn_spmm_plugin"):
        plan = gsp.plan(g, 5, kernel="pcsr")
    assert plan.kernel.name != "pcsr" and "out of memory" in plan.explain() and caplog.records
    x = values((37, 5), torch.float32, 1, device=place)
    assert torch.allclose(gsp.spmm(g, x, plan=plan), gsp.spmm(g, x), atol=1e-5)


# ---------------------------------------------------------------------- compile, capture, metadata


@pytest.mark.parametrize("how", ["plan", "policy"])
@pytest.mark.parametrize("kind", ["none", "edge", "head"])
def test_compile(place: str, kind: str, how: str) -> None:
    torch._dynamo.reset()
    g = NAMED["shuffled"].graph(place)
    shape = (37, 2, 3) if kind == "head" else (37, 6)
    x = values(shape, torch.float32, 1, device=place).requires_grad_()
    leaves = [x]
    if kind != "none":
        leaves.append(values((211, *([2] if kind == "head" else [])), torch.float32, 2, device=place).requires_grad_())
    kwargs = {"policy": "paramspmm"} if how == "policy" else {"plan": gsp.plan(g, 6, reduce="mean", kernel="pcsr")}

    def fn(x: torch.Tensor, w: torch.Tensor | None = None) -> torch.Tensor:
        return gsp.spmm(g, x * 2, w, "mean", **kwargs) + 1

    found, wanted = torch.compile(fn, fullgraph=True, backend="aot_eager")(*leaves), fn(*leaves)
    assert torch.allclose(found, wanted, atol=1e-6)
    grad = values(tuple(wanted.shape), torch.float32, 3, device=place)
    pairs = zip(torch.autograd.grad(found, leaves, grad), torch.autograd.grad(wanted, leaves, grad), strict=True)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)


def test_opcheck(place: str) -> None:
    op, args = torch.ops.gnn_spmm_plugin._pcsr_spmm.default, list(raw_arguments(place)["pcsr_spmm"])
    torch.library.opcheck(op, tuple(args))
    for i in (5, 7, 8, 11, 12, 13, 15):
        args[i] = None
    torch.library.opcheck(op, tuple(args))
    args[6] = args[6].half()
    torch.library.opcheck(op, tuple(args))


@pytest.mark.gpu
def test_capture() -> None:
    """In a CUDA graph, with kept and with learned weights; nothing is built there."""
    g = NAMED["hub"].graph("cuda")
    x = values((60, 32), torch.float32, 1, device="cuda")
    weight = values((g.num_edges,), torch.float32, 2, device="cuda")
    plan = gsp.plan(g, 32, kernel="pcsr")
    for w in (weight, weight.clone().requires_grad_()):
        wanted = gsp.spmm(g, x, w, plan=plan).detach().clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = gsp.spmm(g, x, w, plan=plan).detach()
        out.zero_()
        graph.replay()
        assert same_bits(out, wanted)
    with pytest.raises(RuntimeError, match="during CUDA graph capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        gsp.plan(NAMED["hub"].graph("cuda"), 32, kernel="pcsr")


@pytest.mark.gpu
def test_large_random_graph() -> None:
    """More blocks than the GPU holds at once, every configuration, against the default kernel in float64."""
    generator = torch.Generator().manual_seed(0)
    dst = (torch.rand(2_000_000, generator=generator) ** 3 * 100_000).long()
    src = torch.randint(80_000, (2_000_000,), generator=generator)
    e = Edges(torch.stack([src, dst]), 80_000, 100_000)
    g = e.graph("cuda")
    for width in (16, 100, 256):
        x = values((80_000, width), torch.float32, 1, device="cuda")
        exact = gsp.spmm(g, x.double())
        size = gsp.spmm(g, x.double().abs())
        for config in CONFIGS:
            out = gsp.spmm(g, x, plan=plan_of(g, width, torch.float32, "sum", config))
            assert bool(((out - exact).abs() <= 1e-5 * size).all())


def test_the_default_kernel_of_a_plain_call(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without weights and gradients `spmm` takes its shortest way, which must ask the plan too."""
    monkeypatch.setenv("GSP_KERNEL", "pcsr")
    g = NAMED["hub"].graph(place)
    x = values((g.num_src, 8), torch.float32, 1, device=place)
    ran: list[object] = []
    product = pcsr.Pcsr.product
    monkeypatch.setattr(pcsr.Pcsr, "product", lambda self, *args: ran.append(self) or product(self, *args))
    gsp.spmm(g, x)
    gsp.spmm(g, x, reduce="mean")
    assert len(ran) == 2 and ran[0] is g._csr.plan.format
