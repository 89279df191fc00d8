"""Tiles: the format on any graph, how windows are cut, the kernel, the families of RA-SpMM; and dense matrices.

Where there is no GPU, twins of the kernels in plain torch stand in for them (see tile_twin.py).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from checks import Expected, expect_spmm, same_bits
from checks import close as close_to
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import LAYOUTS, NAMED, Edges, edges, lay_out, values
from test_aggregate import DIFFERENTIABLE, leaves, parts, without
from test_aggregate import close as close_parts
from test_errors import raw_arguments
from test_pcsr import Kernels
from tile_twin import MENDED, on_cpu
from twins import POLICY

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import _native, dense, tiles
from gnn_spmm_plugin.candidate import Candidate
from gnn_spmm_plugin.csr import Csr
from gnn_spmm_plugin.dense import Dense
from gnn_spmm_plugin.functional_aggregate import aggregate
from gnn_spmm_plugin.plan import Plan
from gnn_spmm_plugin.tiles import GROUP, TileConfig, TileFeatures, Tiles, choose_tiles

CONFIGS = [TileConfig(height, most) for height, most in itertools.product((8, 16), (0, 1, 4))]
DTYPES = tiles.DTYPES
BOTH = ("tile", "dense")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GSP_KERNEL", "GSP_MODE", "GSP_LOG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def place(device: str) -> Iterator[str]:
    """A device that has the kernels tile and dense: the GPU, or the CPU with the twins."""
    if device == "cpu":
        with on_cpu():
            yield device
    else:
        yield device


@pytest.fixture
def tf32(place: str) -> Iterator[bool]:
    """Whether one pass in tf32 really rounds: while it lasts, torch allows it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield place != "cpu"
    torch.set_float32_matmul_precision(before)


def close(got: torch.Tensor, expected: Expected, roundings: int = 1, lost: float = 2**-20) -> None:
    """`lost`: what each term loses, of itself; two parts of a float32 have 22 bits."""
    if got.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        lost = 0.0
    slack = lost / torch.finfo(torch.float32).eps / 32
    close_to(got, Expected(expected.value, (4 + slack) * expected.size), roundings)


def format_of(csr: Csr, config: TileConfig, schedule: torch.Tensor | None = None) -> Tiles:
    return tiles.build(tiles.pack(csr, config.height, schedule), config)


def plan_of(g: gsp.Graph, config: TileConfig, schedule: torch.Tensor | None = None) -> Plan:
    """A plan for whatever comes, whose windows are cut as we choose."""
    return replace(any_plan(g, "tile"), format=format_of(g._csr, config, schedule))


def any_plan(g: gsp.Graph, kernel: str) -> Plan:
    """A plan for whatever comes, as default plans are."""
    return replace(gsp.plan(g, 64, kernel=kernel), request=None)


# ---------------------------------------------------------------------- the format


def test_by_hand(device: str) -> None:
    """Three rows, of which one has parallel edges: a vector for each, in the order of their columns."""
    dst = torch.tensor([0, 0, 0, 2, 2, 1], device=device)
    src = torch.tensor([4, 1, 4, 4, 2, 1], device=device)
    g = gsp.Graph.from_edge_index(torch.stack([src, dst]), 5)
    packed = tiles.pack(g._csr, 8)
    assert packed.features == TileFeatures(8, 1, 4, 1, 1, 6)
    assert packed.features.edges_a_vector == 1.5 and packed.features.fill == 6 / 128
    assert packed.vectors.tolist() == [1, 2, 4, 4] + [4] * 12
    assert packed.bits.tolist() == [[0b1101, 0b0001, 0b0110, 0, 0, 0, 0, 0]]
    found = tiles.build(packed, TileConfig(8))
    weight = torch.arange(1.0, 7.0, device=device)  # in row order: 0 -> 4, 1, 4; 1 -> 1; 2 -> 4, 2
    tile = found.values(weight)[0] * ((found.bits[0].int().unsqueeze(1) >> torch.arange(16, device=device)) & 1)
    assert tile[:3, :4].tolist() == [[2, 0, 1, 3], [4, 0, 0, 0], [0, 6, 5, 0]]
    assert found.ptr.tolist() == [0, 1] and found.target is None and found.merges is None


def check_format(csr: Csr, found: Tiles, order: torch.Tensor | None) -> None:
    """Every edge has one place, in its row and at its column; nothing else is anywhere."""
    f, height = found.features, found.config.height
    groups = len(found.vectors) // GROUP
    assert f.groups == groups and f.windows == -(-csr.num_rows // height)
    slot = found.slot.long()
    assert len(slot.unique()) == f.edges == csr.col.shape[0]
    group, rest = slot // (height * GROUP), slot % (height * GROUP)
    assert torch.equal(found.vectors[group * GROUP + rest % GROUP], csr.col)
    bits = (found.bits.int().unsqueeze(2) >> torch.arange(GROUP, device=slot.device)) & 1
    assert int(bits.sum()) == f.edges and bool(bits.view(-1)[slot].all())
    used = bits.any(1).view(-1)
    assert int(used.sum()) == f.vectors
    # Of a group, the vectors that no row has come last, and name a column that the window has.
    assert bool((used.view(groups, GROUP).int().diff(dim=1) <= 0).all())
    window_of_piece = torch.arange(len(found.ptr) - 1, device=slot.device)
    if found.target is not None:
        assert found.merges is not None
        window_of_piece = found.target.long()
        for window, begin, end, zero in found.merges.tolist():
            window_of_piece[(found.target < 0) & (~found.target >= begin) & (~found.target < end)] = window
            assert zero == 0 and end - begin > 1
        assert int((found.target < 0).sum()) == found.slots
    length = found.ptr.diff()
    assert int(found.ptr[0]) == 0 and int(found.ptr[-1]) == groups
    assert not found.config.most or not found.slots or int(length.max()) <= found.config.most
    window = window_of_piece.repeat_interleave(length)  # of each group
    at = window[group] * height + rest // GROUP
    rows = torch.arange(csr.num_rows, device=slot.device) if order is None else order
    assert torch.equal(rows[at], csr.rows().long())
    assert int(torch.bincount(window, minlength=1).max()) == f.longest if groups else f.longest == 0
    key = window.repeat_interleave(GROUP) * csr.num_cols + found.vectors
    assert bool((key.diff() >= 0).all()), "columns ascend within a window"


@given(edges(), st.sampled_from(CONFIGS), st.booleans(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_any_graph(e: Edges, config: TileConfig, scheduled: bool, random: Any) -> None:
    csr = e.graph("cpu", torch.int32)._csr
    order = torch.tensor(random.sample(range(e.num_dst), e.num_dst), dtype=torch.int64) if scheduled else None
    check_format(csr, format_of(csr, config, order), order)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_named_graphs(device: str, name: str, config: TileConfig) -> None:
    csr = NAMED[name].graph(device)._csr
    order = torch.arange(csr.num_rows, device=device).flip(0)
    for schedule in (None, order):
        found = format_of(csr, config, schedule)
        check_format(csr, found, schedule)
        again = format_of(csr, config, schedule)
        for a, b in zip(vars(found).values(), vars(again).values(), strict=True):
            assert not isinstance(a, torch.Tensor) or torch.equal(a, b)


def test_refused(device: str) -> None:
    csr = NAMED["shuffled"].graph(device)._csr
    with pytest.raises(ValueError, match="windows of 8 or 16 rows, got 4"):
        tiles.pack(csr, 4)
    with pytest.raises(ValueError, match=r"got tiles of 8 rows for T16\.S0"):
        tiles.build(tiles.pack(csr, 8), TileConfig(16))
    wide = Csr(csr.rowptr.long(), csr.col.long(), None, csr.num_cols)
    with pytest.raises(ValueError, match="tiles need int32 indices"):
        tiles.pack(wide, 8)
    with pytest.raises(ValueError, match="'dense' needs int32 indices"):
        dense.prepare(wide, torch.float32)


def test_choice() -> None:
    """By what is loaded, and by what there is to do at once."""
    low = TileFeatures(8, 1000, 100_000, 6500, 10, 200_000)
    high = TileFeatures(16, 500, 90_000, 5700, 20, 200_000)
    assert choose_tiles(low, high, 128, torch.bfloat16) == TileConfig(8)
    assert choose_tiles(low, replace(high, vectors=79_000), 128, torch.bfloat16).height == 16
    few = replace(low, windows=10, longest=650)
    assert choose_tiles(few, high, 64, torch.bfloat16) == TileConfig(8, 8)
    assert choose_tiles(few, high, 512, torch.float32).most == -(-6500 * 16 // 4224)
    for width, dtype in itertools.product((0, 1, 5000), DTYPES):
        assert choose_tiles(TileFeatures(8, 0, 0, 0, 0, 0), TileFeatures(16, 0, 0, 0, 0, 0), width, dtype).most == 0
    for config in CONFIGS:
        assert Candidate.parse(f"degree/{config}") == Candidate(config, "degree")
        assert Candidate(config).kernel == "tile" and str(Candidate(config)) == str(config)
    assert (
        Candidate.parse("dense") == Candidate("dense")
        and str(Candidate("dense")) == Candidate("dense").kernel == "dense"
    )


# ---------------------------------------------------------------------- products


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_against_float64(place: str, name: str, dtype: torch.dtype) -> None:
    """Every way to cut windows, weights or none, and the dense matrix; on every named graph."""
    e = NAMED[name]
    g = e.graph(place)
    x = values((e.num_src, 12), dtype, 1, device=place)
    nothing = torch.zeros(e.num_dst, 12, device=place)
    plans = [*(plan_of(g, config) for config in CONFIGS), any_plan(g, "dense")]
    for weighted, reduce in itertools.product((False, True), ("sum", "mean")):
        weight = values((e.num_edges,), dtype, 2, device=place) if weighted else None
        expected = expect_spmm(g, x, weight, nothing, reduce).out
        for plan in plans:
            before = _native.kernel_calls()
            close(gsp.spmm(g, x, weight, reduce, plan=plan), expected)
            assert place == "cpu" or _native.kernel_calls() == before + 1


@given(edges(), st.sampled_from(CONFIGS), st.sampled_from(DTYPES), st.booleans(), st.sampled_from([1, 5, 8, 20]))
@settings(deadline=None)
def test_products_of_any_graph(e: Edges, config: TileConfig, dtype: torch.dtype, weighted: bool, width: int) -> None:
    with on_cpu():
        g = e.graph()
        x = values((e.num_src, width), dtype, 1)
        weight = values((e.num_edges,), dtype, 2) if weighted else None
        expected = expect_spmm(g, x, weight, torch.zeros(e.num_dst, width), "sum").out
        close(gsp.spmm(g, x, weight, plan=plan_of(g, config)), expected)
        assert sum(MENDED) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [0, 1, 3, 8, 16, 31, 50, 64, 100, 128, 132, 256, 257, 300, 602])
def test_widths(width: int, dtype: torch.dtype) -> None:
    """Every width, dtype and cut, with all factors."""
    g = NAMED["hub"].graph("cuda")
    x = values((60, width), dtype, 1, device="cuda")
    weight = values((g.num_edges,), dtype, 2, device="cuda")
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0)).cuda()
    for config, schedule, w in itertools.product(CONFIGS, (None, order), (None, weight)):
        expected = expect_spmm(g, x, w, torch.zeros(60, width, device="cuda"), "mean").out
        close(gsp.spmm(g, x, w, "mean", plan=plan_of(g, config, schedule)), expected)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(place: str, layout: str, dtype: torch.dtype, kernel: str) -> None:
    e = NAMED["shuffled"]
    g = e.graph(place)
    for width in (16, 33):
        x = lay_out(values((37, width), dtype, 1, device=place), layout)
        expected = expect_spmm(g, x, None, torch.zeros(37, width, device=place), "mean").out
        close(gsp.spmm(g, x, reduce="mean", plan=gsp.plan(g, width, dtype, "mean", kernel=kernel)), expected)


@pytest.mark.parametrize("kernel", BOTH)
def test_tf32(place: str, tf32: bool, kernel: str) -> None:
    """Where torch allows it, float32 is rounded to 11 bits; of what is left to the CSR arrays nothing is."""
    e = NAMED["shuffled"]
    g = e.graph(place)
    x, weight = values((37, 16), torch.float32, 1, device=place), values((211,), torch.float32, 2, device=place)
    expected = expect_spmm(g, x, weight, torch.zeros(37, 16, device=place), "sum").out
    plan = any_plan(g, kernel)
    out = gsp.spmm(g, x, weight, plan=plan)
    close(out, expected, lost=2**-9)
    assert tiles.passes(torch.float32) == 1
    exact = Expected(expected.value, expected.size)
    if tf32 and kernel == "tile":  # torch.mm may do better than it was asked to
        with pytest.raises(AssertionError, match="off by"):
            close(out, exact)
    torch.set_float32_matmul_precision("highest")
    assert tiles.passes(torch.float32) == 3 and tiles.passes(torch.float16) == 1
    close(gsp.spmm(g, x, weight, plan=plan), exact)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_stays_where_it_belongs(place: str, reduce: str, dtype: torch.dtype, kernel: str) -> None:
    """NaN and inf reach the rows that have an edge from there, not the others of the window, whose weights are 0."""
    edge_index = torch.tensor([[0, 1, 2, 2, 3], [0, 0, 1, 3, 3]])
    g = gsp.Graph.from_edge_index(edge_index.to(place), 5)
    x = torch.ones(5, 8, device=place, dtype=dtype)
    x[0], x[2], x[4] = torch.inf, torch.nan, torch.nan
    x[3, 1] = -torch.inf
    weight = torch.ones(5, device=place, dtype=dtype)
    for w in (None, weight):
        out = gsp.spmm(g, x, w, reduce, plan=gsp.plan(g, 8, dtype, reduce, kernel=kernel))
        assert bool((out[0] == torch.inf).all() and out[1].isnan().all() and out[3].isnan().all())
        assert bool((out[2] == 0).all() and (out[4] == 0).all())
    assert place != "cpu" or sum(MENDED) > 0


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["none", "edge", "head"])
def test_what_there_are_no_tiles_of(place: str, kind: str, dtype: torch.dtype, kernel: str) -> None:
    """float64 and weights by head, under a plan of tiles: from the CSR arrays, with gradients."""
    e = NAMED["bipartite"]
    g = e.graph(place)
    x = values((e.num_src, 2, 3) if kind == "head" else (e.num_src, 6), dtype, 1, device=place).requires_grad_()
    weight = None
    if kind != "none":
        shape = (e.num_edges, 2) if kind == "head" else (e.num_edges,)
        weight = values(shape, dtype, 2, device=place).requires_grad_()
    with Kernels() as ran:
        out = gsp.spmm(g, x, weight, "mean", plan=any_plan(g, kernel))
    plain = kind == "head" or dtype == torch.float64 or (kernel == "dense" and kind == "edge")
    assert ran.names[-1] == ("spmm" if plain else {"tile": "tile_spmm", "dense": "tile_end"}[kernel])
    grad = values(tuple(out.shape), dtype, 3, device=place)
    expected = expect_spmm(g, x, weight, grad, "mean")
    close(out, expected.out)
    out.backward(grad)
    close(x.grad, expected.grad_x)
    if weight is not None:
        close(weight.grad, expected.grad_weight, 2)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_both_ways(place: str, reduce: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GSP_KERNEL: the default plans of both directions, at any width and dtype; a mean backward has scales."""
    monkeypatch.setenv("GSP_KERNEL", kernel)
    e = NAMED["shuffled"]
    g = e.graph(place)
    for width, dtype in itertools.product((3, 64), DTYPES):
        x = values((37, width), dtype, 1, device=place).requires_grad_()
        with Kernels() as ran:
            out = gsp.spmm(g, x, reduce=reduce)
            grad = values((37, width), dtype, 2, device=place)
            expected = expect_spmm(g, x, None, grad, reduce)
            close(out, expected.out)
            out.backward(grad)
        close(x.grad, expected.grad_x, 2)
        name = {"tile": "tile_spmm", "dense": "tile_end"}[kernel]
        assert ran.names.count(name) == 2, ran.names
    assert g._csr.plan.kernel.name == g._csr_t.plan.kernel.name == kernel


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_aggregate(place: str, dtype: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales, self term, bias, ReLU and another result type: as with the default kernel, up to the rounded scales."""
    e = NAMED["shuffled"]
    cases = itertools.product((False, True), (False, True), ("none", "x", "other"), (0, 1), ("sum", "mean"))
    for weight, scaled, own, by_row, reduce in cases:
        p = parts(e, 12, dtype, place, weight, scaled, own, bool(by_row))
        found = []
        for name in ("", kernel):
            monkeypatch.setenv("GSP_KERNEL", name)
            g, q = e.graph(place), leaves(p)
            with Kernels() as ran:
                out = aggregate(
                    *(g, q["x"], q.get("weight"), reduce), **without(q), relu=bool(by_row), dtype=torch.float32
                )
            csr = weight and kernel == "dense"  # the graph has parallel edges
            wanted = {"": "spmm", "tile": "tile_spmm", "dense": "spmm" if csr else "tile_end"}[name]
            assert ran.names[-1] == wanted, ran.names
            names = [n for n in DIFFERENTIABLE if n in q and not (n == "self_x" and own == "x")]
            # Where rounding decides about a sign, ReLU's gradient may be either.
            grads = () if by_row else torch.autograd.grad(out.sum(), [q[n] for n in names])
            found.append((out, *grads))
        for got, want in zip(*reversed(found), strict=True):
            where = (weight, scaled, own, by_row, reduce)
            close_parts(got, want.detach().double(), torch.bfloat16 if dtype != torch.float32 else dtype, where)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("shape", [(0, 8, 0), (5, 0, 4), (5, 8, 0), (1, 1, 0), (0, 0, 8)], ids=str)
def test_nothing_to_do(place: str, shape: tuple[int, int, int], kernel: str) -> None:
    """No columns, no sources, no destinations; rows of features that lie anyhow."""
    num_src, num_dst, width = shape
    g = gsp.Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64, device=place), (num_src, num_dst))
    for dtype in DTYPES:
        x = torch.ones(num_src, 2 * width + 3, dtype=dtype, device=place)[:, 1 : 1 + width]
        out = gsp.spmm(g, x, plan=any_plan(g, kernel))
        assert out.shape == (num_dst, width) and out.dtype == dtype and not bool(out.any())


@pytest.mark.parametrize("kernel", BOTH)
def test_second_derivatives(place: str, kernel: str) -> None:
    g = NAMED["parallel"].graph(place)
    x = values((3, 2), torch.float64, 1, device=place).requires_grad_()
    weight = values((13,), torch.float64, 2, device=place).requires_grad_()
    plan = any_plan(g, kernel)
    torch.autograd.gradgradcheck(lambda x, w: gsp.spmm(g, x, w, "mean", plan=plan), (x, weight))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_same_bits(place: str, config: TileConfig) -> None:
    g = NAMED["hub"].graph(place)
    x = values((60, 48), torch.float32, 1, device=place)
    weight = values((g.num_edges,), torch.float32, 2, device=place)
    plan = plan_of(g, config)
    first = gsp.spmm(g, x, weight, plan=plan)
    assert all(same_bits(first, gsp.spmm(g, x, weight, plan=plan)) for _ in range(10))
    again = NAMED["hub"].graph(place)
    assert same_bits(first, gsp.spmm(again, x, weight, plan=plan_of(again, config)))


@pytest.mark.parametrize("kernel", BOTH)
def test_where_torch_is_told_to_be_deterministic(place: str, kernel: str) -> None:
    """Nothing that is built, laid out or run asks torch for what it refuses then."""
    e = NAMED["sorted"]
    unique = torch.unique(e.edge_index.flip(0), dim=1).flip(0)
    x = values((37, 12), torch.bfloat16, 1, device=place)
    weight = values((unique.shape[1],), torch.bfloat16, 2, device=place)
    found = []
    for asked in (False, True):
        torch.use_deterministic_algorithms(asked)
        try:
            g = gsp.Graph.from_edge_index(unique.to(place), 37)
            plan = gsp.plan(g, 12, torch.bfloat16, kernel=kernel)
            found.append(gsp.spmm(g, x, weight, plan=plan))
        finally:
            torch.use_deterministic_algorithms(False)
    assert same_bits(*found)


@pytest.mark.parametrize("kernel", BOTH)
def test_weights_are_laid_out_once(place: str, kernel: str) -> None:
    """A constant weight, a scale; a changed or a learned one, each time."""
    e = NAMED["sorted"]
    unique = torch.unique(e.edge_index.flip(0), dim=1).flip(0)  # no parallel edges, in row order
    g = gsp.Graph.from_edge_index(unique.to(place), 37)
    x = values((37, 5), torch.float32, 1, device=place)
    weight = values((g.num_edges,), torch.float32, 2, device=place)
    plan = gsp.plan(g, 5, kernel=kernel)

    def laid_out(w: torch.Tensor, calls: int) -> int:
        before = gsp.stats()["weight_permutes"]
        for _ in range(calls):
            out = gsp.spmm(g, x, w, plan=plan)
            close(out.detach(), expect_spmm(g, x, w, torch.zeros(37, 5, device=place), "sum").out)
        return gsp.stats()["weight_permutes"] - before

    assert laid_out(weight, 4) == 1
    weight.mul_(2)
    assert laid_out(weight, 2) == 1
    assert laid_out(weight.clone(), 2) == 1
    assert laid_out(weight.clone().requires_grad_(), 3) == 3


# ---------------------------------------------------------------------- plans


def test_plan(place: str) -> None:
    """What it is, says and shares."""
    g = NAMED["hub"].graph(place)
    plan = gsp.plan(g, 64, kernel="tile")
    assert plan is gsp.plan(g, 64, kernel="tile") and isinstance(plan.format, Tiles)
    other = gsp.plan(g, 65, torch.bfloat16, kernel="tile")
    assert isinstance(other.format, Tiles) and other.format.vectors is plan.format.vectors
    assert plan.nbytes() == plan.format.nbytes() > 4 * g.num_edges
    f, text = plan.format.features, plan.explain()
    for part in (
        "Plan  tile  width=64 float32 sum  mode=warm",
        f"tiles     {plan.format.config}  {f.windows} windows of {f.height} rows",
        f"{f.edges_a_vector:.2f} edges a vector",
        f"{f.fill:.1%} of the tiles are edges",
    ):
        assert part in text, (part, text)
    matrix = gsp.plan(g, 64, kernel="dense")
    assert isinstance(matrix.format, Dense) and "dense     60 x 60" in matrix.explain()
    assert matrix.nbytes() == 60 * 64 * 4 + 8 * g.num_edges
    assert "weighted sums straight from the CSR arrays" in matrix.explain()
    assert "schedule  not followed" in gsp.plan(g, 64, kernel="dense", schedule="degree").explain()
    assert gsp.plan(g, 64).kernel.name not in BOTH


@pytest.mark.parametrize("kernel", BOTH)
def test_plan_of_other_kinds(place: str, kernel: str) -> None:
    g = NAMED["shuffled"].graph(place)
    with pytest.raises(ValueError, match=rf"'{kernel}' computes sum and mean, not max"):
        gsp.plan(g, 5, reduce="max", kernel=kernel)
    with pytest.raises(ValueError, match=f"'{kernel}' reads a format that has to be built"):
        gsp.plan(g, 5, kernel=kernel, mode="cold")


def test_dense_where_there_is_none(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    g = NAMED["hub"].graph(place)
    with pytest.raises(ValueError, match=r"takes float32, float16 or bfloat16, got torch\.float64"):
        gsp.plan(g, 5, torch.float64, kernel="dense")
    monkeypatch.setattr(dense, "MOST_BYTES", 60 * 64 * 4)
    assert gsp.plan(g, 5, torch.float16, kernel="dense").kernel.name == "dense"
    monkeypatch.setattr(dense, "MOST_BYTES", 60 * 64 * 4 - 1)
    with pytest.raises(ValueError, match="takes 15,360 bytes to make, at most 15,359 are used"):
        gsp.plan(g, 6, kernel="dense")
    many = gsp.Graph.from_edge_index(torch.zeros(2, 300, dtype=torch.int64, device=place), 1)
    with pytest.raises(ValueError, match=r"300 edges join one pair of nodes, torch.bfloat16 counts to 256"):
        gsp.plan(many, 5, torch.bfloat16, kernel="dense")
    x, plan = torch.ones(1, 8, device=place), any_plan(many, "dense")
    assert float(gsp.spmm(many, x, plan=plan)[0, 0]) == 300
    assert float(gsp.spmm(many, x.bfloat16(), plan=plan)[0, 0]) == 300  # which bfloat16 holds; counted one by one


@pytest.mark.parametrize("schedule", ["degree", "community", "the caller's"])
def test_schedules(place: str, schedule: str) -> None:
    e = NAMED["shuffled"]
    g = e.graph(place)
    x = values((37, 16), torch.float32, 1, device=place)
    expected = expect_spmm(g, x, None, torch.zeros(37, 16, device=place), "sum").out
    order = torch.randperm(37, generator=torch.Generator().manual_seed(3)).to(place)
    plan = gsp.plan(g, 16, kernel="tile", schedule=order if schedule == "the caller's" else schedule)
    assert isinstance(plan.format, Tiles) and plan.format.rows is not None and plan.schedule == schedule
    close(gsp.spmm(g, x, plan=plan), expected)


def _graph(num_rows: int, degree: list[int], device: str) -> gsp.Graph:
    """Rows of these degrees in turn; sources spread over all."""
    dst = torch.repeat_interleave(torch.arange(num_rows), torch.tensor(degree).repeat(num_rows)[:num_rows])
    src = torch.randint(num_rows, dst.shape, generator=torch.Generator().manual_seed(0))
    return gsp.Graph.from_edge_index(torch.stack([src, dst]).to(device), num_rows)


@pytest.mark.parametrize(
    ("family", "degree", "width", "kernel", "config"),
    [
        ("CSR_DIRECT", [3, 3, 2], 64, "", None),
        ("TC_DIRECT", [20, 21], 128, "tile", "T8.S0"),
        ("COMMUNITY_TC", [5, 90], 128, "tile", "T8.S0"),
        ("SEGMENT_HYBRID", [0] * 19 + [100], 64, "tile", "T8.S32"),
        ("ZERO_OVERHEAD_CSR", [0] * 49 + [100], 64, "", None),
        ("CUSPARSE", [5, 25, 60], 64, "", None),
    ],
)
def test_families_of_ra(
    place: str,
    family: str,
    degree: list[int],
    width: int,
    kernel: str,
    config: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The policy runs tiles where the rules name a family of them; what comes out is right."""
    g = _graph(1000, degree, place)
    plan = gsp.plan(g, width, policy="ra")
    text = plan.explain()
    assert f"-> {family}" in text
    assert plan.kernel.name == (kernel or gsp.plan(g, width, policy="csr").kernel.name), text
    x = values((1000, width), torch.bfloat16, 1, device=place)
    with Kernels() as ran:
        out = gsp.spmm(g, x, policy="ra")
    plan = gsp.plan(g, width, torch.bfloat16, policy="ra")
    close(out, expect_spmm(g, x, None, torch.zeros(1000, width, device=place), "sum").out)
    if config is None:
        assert ran.names[-1] in ("spmm", "row_sum")
        return
    assert isinstance(plan.format, Tiles) and ran.names[-1] == "tile_spmm"
    assert str(plan.format.config) == config and "in the dtype of the features" in text
    assert (plan.schedule == "community") == (family == "COMMUNITY_TC")
    for reduce, dtype, what in (("max", torch.float32, "max"), ("sum", torch.float64, "float64")):
        other = gsp.plan(g, width, dtype, reduce, policy="ra")
        assert other.format is None and f"no tiles for {what}" in other.explain()
    cold = gsp.plan(g, width, policy="ra", mode="cold") if family != "COMMUNITY_TC" else None
    assert cold is None or (cold.format is None and "no tiles for mode cold" in cold.explain())


def test_ra_without_tiles(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy takes none where there is no kernel for them."""
    g = _graph(1000, [20, 21], place)
    monkeypatch.setattr(POLICY, "KERNELS", ())
    plan = gsp.plan(g, 128, policy="ra")
    assert plan.kernel.name not in BOTH and f"no tiles for sum on {place}" in plan.explain()


def test_auto_takes_no_tiles(place: str) -> None:
    """Where they won, a matrix won by more (test_dense.py)."""
    for name, width in itertools.product(NAMED, (16, 256)):
        for dtype in DTYPES:
            assert gsp.plan(NAMED[name].graph(place), width, dtype).kernel.name not in BOTH


@pytest.mark.parametrize("kernel", BOTH)
def test_plans_hang_on_the_graph(place: str, kernel: str, no_gc: None) -> None:
    g = NAMED["hub"].graph(place)
    plan = gsp.plan(g, 16, kernel=kernel)
    held = weakref.ref(plan.format.vectors if kernel == "tile" else plan.format.place)
    csr = weakref.ref(g._csr)
    del g
    assert held() is not None and csr() is None
    del plan
    assert held() is None


@pytest.mark.parametrize("kernel", BOTH)
def test_out_of_memory(
    place: str, kernel: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(tiles if kernel == "tile" else dense, "prepare", fail)
    g = NAMED["shuffled"].graph(place)
    with caplog.at_level("WARNING", logger="gnn_spmm_plugin"):
        plan = gsp.plan(g, 5, kernel=kernel)
    assert plan.format is None and "out of memory" in plan.explain() and caplog.records
    x = values((37, 5), torch.float32, 1, device=place)
    assert torch.allclose(gsp.spmm(g, x, plan=plan), gsp.spmm(g, x), atol=1e-5)


def test_where_there_is_none() -> None:
    g = NAMED["shuffled"].graph("cpu")
    for name in BOTH:
        with pytest.raises(ValueError, match=rf"unknown kernel '{name}' for cpu \(it is one for cuda\)"):
            gsp.plan(g, 5, kernel=name)
        (listed,) = (k for k in gsp.kernels() if k["name"] == name)
        assert listed["device"] == "cuda" and listed["reduces"] == ["sum", "mean"]


# ---------------------------------------------------------------------- compile, capture, metadata


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", [6, 8])
def test_compile(place: str, width: int, weighted: bool, kernel: str) -> None:
    """Rows of features that have to be padded, and that have not."""
    torch._dynamo.reset()
    g = NAMED["shuffled"].graph(place)
    leaves_ = [values((37, width), torch.float32, 1, device=place).requires_grad_()]
    if weighted:
        leaves_.append(values((211,), torch.float32, 2, device=place).requires_grad_())
    plan = gsp.plan(g, width, reduce="mean", kernel=kernel)

    def fn(x: torch.Tensor, w: torch.Tensor | None = None) -> torch.Tensor:
        return gsp.spmm(g, x * 2, w, "mean", plan=plan) + 1

    found, wanted = torch.compile(fn, fullgraph=True, backend="aot_eager")(*leaves_), fn(*leaves_)
    assert torch.allclose(found, wanted, atol=1e-5)
    grad = values(tuple(wanted.shape), torch.float32, 3, device=place)
    pairs = zip(torch.autograd.grad(found, leaves_, grad), torch.autograd.grad(wanted, leaves_, grad), strict=True)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)
    with torch.no_grad():  # views: apart, and begun anywhere
        wide = values((38, 4 * width), torch.float32, 1, device=place)
        for x in (
            wide[1:, :width],
            wide[1:, 1 : width + 1],
            wide[:, ::3][1:, :width],
            wide.view(-1)[1 : 1 + 37 * width].view(37, -1),
        ):
            compiled = torch.compile(
                lambda x: gsp.spmm(g, x, reduce="mean", plan=plan), fullgraph=True, backend="aot_eager"
            )
            if x.data_ptr() % 16 == 0 or not x.is_contiguous():
                assert torch.allclose(compiled(x), gsp.spmm(g, x, reduce="mean", plan=plan), atol=1e-5)


def test_compiled_precision() -> None:
    """That of then, told in either way, with or without compiling."""
    read = torch.compile(lambda x: x + tiles.passes(x.dtype), fullgraph=True, backend="eager")
    matmul, before = torch.backends.cuda.matmul, torch.get_float32_matmul_precision()
    try:
        for told, wanted in (("tf32", 1), ("ieee", 3)):
            torch._dynamo.reset()
            matmul.fp32_precision = told
            assert tiles.passes(torch.float32) == wanted == float(read(torch.zeros(())))
    finally:
        torch.set_float32_matmul_precision(before)
    for told, wanted in (("high", 1), ("medium", 1), ("highest", 3)):
        torch._dynamo.reset()
        torch.set_float32_matmul_precision(told)
        assert tiles.passes(torch.float32) == wanted == float(read(torch.zeros(())))
    assert tiles.passes(torch.bfloat16) == 1
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("name", ["tile_spmm", "tile_end"])
def test_opcheck(place: str, name: str) -> None:
    op, args = getattr(torch.ops.gnn_spmm_plugin, f"_{name}").default, list(raw_arguments(place)[name])
    torch.library.opcheck(op, tuple(args))
    optional = (2, 6, 11, 14, 15, 16, 18) if name == "tile_spmm" else (2, 5, 7, 8, 9, 11)
    for i in optional:
        args[i] = None
    torch.library.opcheck(op, tuple(args))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", BOTH)
def test_capture(kernel: str) -> None:
    """In a CUDA graph, with kept and with learned weights; nothing is built there."""
    g = gsp.Graph.from_edge_index(torch.unique(NAMED["hub"].edge_index, dim=1).cuda(), 60)
    x = values((60, 32), torch.float32, 1, device="cuda")
    weight = values((g.num_edges,), torch.float32, 2, device="cuda")
    plan = gsp.plan(g, 32, kernel=kernel)
    for w in (weight, weight.clone().requires_grad_()):
        wanted = gsp.spmm(g, x, w, plan=plan).detach().clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = gsp.spmm(g, x, w, plan=plan).detach()
        out.zero_()
        graph.replay()
        assert same_bits(out, wanted)
    with pytest.raises(RuntimeError, match="during CUDA graph capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        gsp.plan(NAMED["hub"].graph("cuda"), 32, kernel=kernel)


@pytest.mark.gpu
def test_large_random_graph() -> None:
    """More blocks than the GPU holds at once, every cut and dtype, against float64."""
    generator = torch.Generator().manual_seed(0)
    dst = (torch.rand(2_000_000, generator=generator) ** 3 * 100_000).long()
    src = torch.randint(80_000, (2_000_000,), generator=generator)
    g = Edges(torch.stack([src, dst]), 80_000, 100_000).graph("cuda")
    weight = values((2_000_000,), torch.float32, 2, device="cuda")
    for width, dtype in itertools.product((16, 100, 256), DTYPES):
        x, w = values((80_000, width), dtype, 1, device="cuda"), weight.to(dtype)
        exact, size = gsp.spmm(g, x.double(), w.double()), gsp.spmm(g, x.double().abs(), w.double().abs())
        for config in CONFIGS:
            out = gsp.spmm(g, x, w, plan=plan_of(g, config))
            last = torch.finfo(dtype)  # and the smallest step there is
            bound = last.eps * exact.abs() + 1e-5 * size + last.tiny * last.eps
            over = float(((out - exact).abs() / bound).max())
            assert over <= 1, (width, dtype, config, over)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("mode", ["float32", "tf32", "bfloat16", "float16"])
def test_accuracy_of_a_gcn(kernel: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers on planted communities learn as well in every mode as with the default kernel in float32."""
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(8, (2000,), generator=generator)
    src, dst = torch.randint(2000, (2, 200_000), generator=generator)
    same = (label[src] == label[dst]) | (torch.rand(200_000, generator=generator) < 0.2)
    edge_index = torch.unique(torch.stack([src[same], dst[same]]), dim=1).cuda()
    noise = torch.randn(2000, 64, generator=generator)
    x, y = (torch.nn.functional.one_hot(label, 64) * 0.7 + noise).cuda(), label.cuda()
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(mode, torch.float32)

    def accuracy(name: str, dtype: torch.dtype) -> float:
        monkeypatch.setenv("GSP_KERNEL", name)
        torch.manual_seed(0)
        g = gsp.Graph.from_edge_index(edge_index, 2000)
        first, second = gsp.nn.GCNConv(64, 32).cuda(), gsp.nn.GCNConv(32, 8).cuda()
        optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=0.01)

        def forward() -> torch.Tensor:
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):  # it keeps what it casts until its end
                return second(first(x, g).relu(), g).float()

        for _ in range(60):
            loss = torch.nn.functional.cross_entropy(forward()[:1000], y[:1000])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert g._csr.plan.kernel.name == (name or "csr_dual")
        return float((forward()[1000:].argmax(1) == y[1000:]).float().mean())

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if mode == "tf32" else "highest")
    try:
        assert accuracy(kernel, dtype) >= accuracy("", torch.float32) - 0.02
    finally:
        torch.set_float32_matmul_precision(before)
