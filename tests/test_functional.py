"""The operators against the float64 reference: every reduction, weight, dtype, width, layout and kind of graph."""

from __future__ import annotations

import itertools

import pytest
import torch
from checks import Expected, check_spmm, close, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, LAYOUTS, NAMED, REDUCES, WIDTHS, Edges, edges, heads_of, lay_out, values

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import reference
from gnn_spmm_plugin.plan import WARM_AFTER

WEIGHTS = ("none", "edge", "head")


def operands(
    e: Edges, width: int, kind: str, dtype: torch.dtype, device: str, few: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x of `width` columns in all and a weight of a `kind` of `WEIGHTS`."""
    if kind == "head":
        heads = heads_of(width)
        x = values((e.num_src, heads, width // heads), dtype, 1, few, device)
        return x, values((e.num_edges, heads), dtype, 2, few, device)
    x = values((e.num_src, width), dtype, 1, few, device)
    return x, values((e.num_edges,), dtype, 2, few, device) if kind == "edge" else None


def named(width: int) -> list[Edges]:
    # the reference writes 4800 messages for a hub, in float64; beyond 64 columns that is slow and says nothing new
    return [e for name, e in NAMED.items() if width <= 64 or "hub" not in name]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("reduce", REDUCES)
def test_spmm(device: str, reduce: str, kind: str, dtype: torch.dtype, width: int) -> None:
    for e in named(width):
        check_spmm(e.graph(device), *operands(e, width, kind, dtype, device), reduce)


@pytest.mark.parametrize("few", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("tie", ["first", "split"])
def test_ties(device: str, tie: str, reduce: str, kind: str, dtype: torch.dtype, few: bool) -> None:
    for e, width in itertools.product(NAMED.values(), (1, 5, 64)):
        check_spmm(e.graph(device), *operands(e, width, kind, dtype, device, few), reduce, tie)


@pytest.mark.parametrize("tie", ["first", "split"])
def test_ties_after_relu(device: str, tie: str) -> None:
    """Most of a rectified feature is zero: -0.0, 0.0 and weights of either sign tie."""
    for e in NAMED.values():
        x = values((e.num_src, 16), torch.float32, 1, device=device).relu()
        weight = values((e.num_edges,), torch.float32, 2, device=device)
        check_spmm(e.graph(device), x, None, "max", tie)
        check_spmm(e.graph(device), x, weight, "max", tie)
        check_spmm(e.graph(device), x * -1, weight, "min", tie)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(7,), (64,), (33,), (2, 3), (4, 1, 5), ()], ids=str)
@pytest.mark.parametrize("reduce", REDUCES)
def test_layouts(device: str, reduce: str, shape: tuple[int, ...], layout: str) -> None:
    e = NAMED["shuffled"]
    weight = values((e.num_edges,), torch.float32, 2, device=device)
    for dtype in DTYPES:
        x = lay_out(values((e.num_src, *shape), dtype, 1, device=device), layout)
        w = lay_out(weight.to(dtype), layout)
        check_spmm(e.graph(device), x, w, reduce)
        check_spmm(e.graph(device), x, None, reduce, tie="split")


@pytest.mark.parametrize("reduce", REDUCES)
def test_expanded(device: str, reduce: str) -> None:
    """Strides of zero, along rows and along columns, and overlapping rows."""
    e = NAMED["shuffled"]
    g = e.graph(device)
    row = values((1, 12), torch.float32, 1, device=device)
    column = values((e.num_src, 1), torch.float32, 1, device=device)
    sliding = values((e.num_src + 12,), torch.float32, 1, device=device).unfold(0, 12, 1)[: e.num_src]
    weight = values((1,), torch.float32, 2, device=device).expand(e.num_edges)
    for x in (row.expand(e.num_src, 12), column.expand(e.num_src, 12), sliding, row[:, :1].expand(e.num_src, 12)):
        check_spmm(g, x, weight, reduce)
        check_spmm(g, x, None, reduce)


@pytest.mark.parametrize("reduce", REDUCES)
def test_lazy_negation(device: str, reduce: str) -> None:
    """Memory that torch has yet to negate, as the imaginary part of a conjugate has."""
    e = NAMED["shuffled"]
    x = torch.view_as_complex(values((37, 3, 2), torch.float32, 1, device=device)).conj().imag
    weight = torch.view_as_complex(values((211, 2), torch.float32, 2, device=device)).conj().imag
    assert x.is_neg() and weight.is_neg()
    g = e.graph(device)
    for _ in range(3):
        assert torch.equal(gsp.spmm(g, x, weight, reduce), gsp.spmm(g, x.clone(), weight.clone(), reduce))


def test_expanded_gradient_reaches_the_leaf(device: str) -> None:
    leaf = torch.ones(1, 3, device=device, requires_grad=True)
    g = NAMED["shuffled"].graph(device)
    gsp.spmm(g, leaf.expand(g.num_src, 3)).sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [[211.0] * 3]


@settings(max_examples=60)
@given(
    e=edges(),
    width=st.sampled_from([0, 1, 2, 3, 4, 5, 8, 17, 40]),
    kind=st.sampled_from(WEIGHTS),
    dtype=st.sampled_from(DTYPES),
    reduce=st.sampled_from(REDUCES),
    tie=st.sampled_from(["first", "split"]),
    few=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
    transposed=st.booleans(),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_any_graph(device, e, width, kind, dtype, reduce, tie, few, layout, transposed, index) -> None:  # type: ignore[no-untyped-def]
    g = e.graph(device, index)
    if transposed:
        g, e = g.T, Edges(e.edge_index.flip(0), e.num_dst, e.num_src)
    x, weight = operands(e, width, kind, dtype, device, few)
    check_spmm(g, lay_out(x, layout), weight, reduce, tie)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("reduce", REDUCES)
def test_nan_and_infinity(device: str, reduce: str, kind: str, dtype: torch.dtype) -> None:
    """NaN wins in its own column, infinities are values, in every position of short and of long rows."""
    for name in ("shuffled", "hub", "parallel", "reverse_hub"):
        e = NAMED[name]
        g = e.graph(device)
        x, weight = operands(e, 6, kind, dtype, device)
        generator = torch.Generator().manual_seed(3)
        for special in (torch.nan, torch.inf, -torch.inf):
            x.flatten()[torch.randint(x.numel(), (max(x.numel() // 20, 1),), generator=generator).to(device)] = special
        expected, arg = reference.spmm(g, x, weight, reduce)
        if reduce in ("max", "min"):
            out, found = gsp.spmm(g, x, weight, reduce, return_arg=True)
            assert torch.equal(found, arg)
            assert same_bits(out.nan_to_num(nan=-7.0) + 0, expected.nan_to_num(nan=-7.0) + 0)
        else:
            expected, _ = reference.spmm(g, x.double(), None if weight is None else weight.double(), reduce)
            out = gsp.spmm(g, x, weight, reduce)
            assert torch.equal(out.isnan(), expected.isnan())
            assert torch.equal(out.isposinf(), expected.isposinf())
            assert torch.equal(out.isneginf(), expected.isneginf())
            finite = expected.isfinite()
            assert torch.allclose(out[finite].double(), expected[finite], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("tie", ["first", "split"])
@pytest.mark.parametrize("position", range(4))
def test_nan_wins_wherever_it_stands(device: str, position: int, tie: str) -> None:
    x = torch.tensor([[1.0, 2.0], [5.0, 4.0], [3.0, -1.0], [9.0, -9.0]], device=device)
    x[position, 0] = torch.nan
    g = gsp.Graph.from_edge_index(torch.tensor([[0, 1, 2, 3], [0, 0, 0, 0]], device=device), (4, 2))
    for reduce, other in (("max", 4.0), ("min", -9.0)):
        leaf = x.clone().requires_grad_()
        out, arg = gsp.spmm(g, leaf, reduce=reduce, tie=tie, return_arg=True)
        assert out[0, 0].isnan() and out[0, 1] == other and out[1].tolist() == [0, 0]
        assert arg[0, 0] == position and arg[1].tolist() == [-1, -1]
        out.sum().backward()
        assert leaf.grad is not None and leaf.grad[position, 0] == 1 and leaf.grad[:, 0].sum() == 1


def test_several_nans_are_a_tie(device: str) -> None:
    x = torch.tensor([[torch.nan], [1.0], [torch.nan]], device=device)
    g = gsp.Graph.from_edge_index(torch.tensor([[1, 2, 0], [0, 0, 0]], device=device), 3)
    for tie, expected in (("first", [0, 0, 1]), ("split", [0.5, 0, 0.5])):
        leaf = x.clone().requires_grad_()
        out, arg = gsp.spmm(g, leaf, reduce="max", tie=tie, return_arg=True)
        out.sum().backward()
        assert arg[0, 0] == 1  # the edge from node 2 is the caller's second
        assert leaf.grad is not None and leaf.grad.flatten().tolist() == expected


def test_minus_infinity_is_not_empty(device: str) -> None:
    x = torch.full((3, 2), -torch.inf, device=device)
    g = gsp.Graph.from_edge_index(torch.tensor([[0, 1], [2, 2]], device=device), 3)
    out, arg = gsp.spmm(g, x, reduce="max", return_arg=True)
    assert out.tolist() == [[0, 0], [0, 0], [-torch.inf] * 2]
    assert arg.tolist() == [[-1, -1], [-1, -1], [0, 0]]


@pytest.mark.parametrize("reduce", REDUCES)
def test_empty_rows_do_not_read_infinity(device: str, reduce: str) -> None:
    """0 * inf would be NaN: a row without edges is 0 whatever the features are, and gets no gradient."""
    x = torch.full((3, 2), torch.inf, device=device, requires_grad=True)
    for graph in (NAMED["no_edges"].edge_index, torch.tensor([[0], [0]])):
        g = gsp.Graph.from_edge_index(graph.to(device), (3, 3))
        out = gsp.spmm(g, x, reduce=reduce)
        assert out[1:].tolist() == [[0, 0], [0, 0]]
        (grad,) = torch.autograd.grad(out[1:].sum(), x)
        assert grad.tolist() == [[0, 0]] * 3


def test_overflow_in_half_precision(device: str) -> None:
    """Sums are kept in float32: a mean of large float16 values is finite."""
    x = torch.full((100, 3), 60000.0, dtype=torch.float16, device=device, requires_grad=True)
    g = gsp.Graph.from_edge_index(torch.stack([torch.arange(100), torch.zeros(100, dtype=torch.int64)]).to(device), 100)
    out = gsp.spmm(g, x, reduce="mean")
    assert out[0].tolist() == [60000.0] * 3
    (out * 64).sum().backward()
    assert x.grad is not None and x.grad[:, 0].tolist() == pytest.approx([0.64] * 100, rel=1e-3)


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_mixed_dtypes(device: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    e = NAMED["shuffled"]
    g = e.graph(device)
    x = values((e.num_src, 5), dtypes[0], 1, device=device).requires_grad_()
    weight = values((e.num_edges,), dtypes[1], 2, device=device).requires_grad_()
    common = torch.result_type(x, weight)
    for reduce in REDUCES:
        out = gsp.spmm(g, x, weight, reduce)
        assert out.dtype == common
        assert torch.equal(out, gsp.spmm(g, x.to(common), weight.to(common), reduce))
        for leaf, grad in zip((x, weight), torch.autograd.grad(out.sum(), (x, weight)), strict=True):
            assert grad.dtype == leaf.dtype and grad.shape == leaf.shape
    a = values((e.num_dst, 5), dtypes[1], 4, device=device)
    assert gsp.sddmm(g, a, x).dtype == common


@pytest.mark.parametrize("reduce", REDUCES)
def test_outside_every_autocast_list(device: str, reduce: str) -> None:
    e = NAMED["shuffled"]
    g = e.graph(device)
    x = values((e.num_src, 8), torch.float32, 1, device=device).requires_grad_()
    weight = values((e.num_edges,), torch.float32, 2, device=device).requires_grad_()
    plain = gsp.spmm(g, x, weight, reduce)
    with torch.autocast(device, torch.bfloat16):
        out = gsp.spmm(g, x, weight, reduce)
        mixed = gsp.spmm(g, x @ torch.eye(8, device=device), weight, reduce)  # bfloat16 inside
    assert out.dtype == torch.float32 and torch.equal(out, plain)
    assert mixed.dtype == torch.float32
    for found, expected in zip(
        torch.autograd.grad(out.sum(), (x, weight)), torch.autograd.grad(plain.sum(), (x, weight)), strict=True
    ):
        assert torch.equal(found, expected)
    assert {g.dtype for g in torch.autograd.grad(mixed.sum(), (x, weight))} == {torch.float32}


@pytest.mark.parametrize("name", NAMED)
def test_index_dtypes_agree(device: str, name: str) -> None:
    e = NAMED[name]
    x = values((e.num_src, 7), torch.float32, 1, device=device)
    narrow, wide = e.graph(device, torch.int32), e.graph(device, torch.int64)
    for reduce in REDUCES:
        assert torch.equal(gsp.spmm(narrow, x, reduce=reduce), gsp.spmm(wide, x, reduce=reduce))


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_wide_indices_inside(device: str, reduce: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The int64 kernels, which only graphs beyond 2^31 would meet."""
    from gnn_spmm_plugin import csr as csr_module

    e = NAMED["hub"]
    half = e.graph(device)._csr
    core = csr_module.Core(
        csr_module.Csr(half.rowptr.long(), half.col.long(), half.perm.long(), half.num_cols)  # type: ignore[union-attr]
    )
    monkeypatch.setattr(csr_module, "_index_dtype", lambda *sizes: torch.int64)
    g = gsp.Graph._make(core)
    assert g.col.dtype == torch.int64
    check_spmm(g, *operands(e, 12, kind, torch.float32, device), reduce)
    check_spmm(g, *operands(e, 12, kind, torch.float32, device, few=True), reduce, "split")


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("reduce", REDUCES)
def test_shuffled_edges_and_weights_together(device: str, reduce: str, kind: str) -> None:
    """Weights follow the caller's order: shuffling edges and weights alike changes nothing but the summation order."""
    e = NAMED["shuffled"]
    x, weight = operands(e, 8, kind, torch.float64, device, few=True)
    first = gsp.spmm(e.graph(device), x, weight, reduce)
    for seed in range(3):
        order = torch.randperm(e.num_edges, generator=torch.Generator().manual_seed(seed))
        other = Edges(e.edge_index[:, order], e.num_src, e.num_dst).graph(device)
        out = gsp.spmm(other, x, None if weight is None else weight[order.to(device)], reduce)
        assert torch.equal(first, out)  # small integers: every order gives the same sum


# ---------------------------------------------------------------------- sddmm, edge_softmax


@pytest.mark.parametrize("width", [0, 1, 3, 16, 33, 64, 257])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [0, 1, 3])
def test_sddmm(device: str, heads: int, dtype: torch.dtype, width: int) -> None:
    inner = (heads, width) if heads else (width,)
    for name, e in NAMED.items():
        if width > 64 and "hub" in name:
            continue
        for g in (e.graph(device), e.graph(device).T):
            a = values((g.num_dst, *inner), dtype, 1, device=device).requires_grad_()
            b = values((g.num_src, *inner), dtype, 2, device=device).requires_grad_()
            a64, b64 = (t.detach().double().requires_grad_() for t in (a, b))
            a_abs, b_abs = (t.detach().double().abs().requires_grad_() for t in (a, b))
            out = gsp.sddmm(g, a, b)
            expected, size = reference.sddmm(g, a64, b64), reference.sddmm(g, a_abs, b_abs)
            assert out.dtype == dtype
            close(out.detach(), Expected(expected.detach(), size.detach()))
            grad = values(tuple(out.shape), dtype, 3, device=device)
            found = torch.autograd.grad(out, (a, b), grad)
            for f, x, s in zip(
                found,
                torch.autograd.grad(expected, (a64, b64), grad.double()),
                torch.autograd.grad(size, (a_abs, b_abs), grad.double().abs()),
                strict=True,
            ):
                close(f, Expected(x, s))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(9,), (3, 4)], ids=str)
def test_sddmm_layouts(device: str, shape: tuple[int, ...], layout: str) -> None:
    g = NAMED["bipartite"].graph(device)
    a, b = values((g.num_dst, *shape), torch.float32, 1), values((g.num_src, *shape), torch.float32, 2)
    expected = gsp.sddmm(g, a.to(device), b.to(device))
    got = gsp.sddmm(g, lay_out(a.to(device), layout), lay_out(b.to(device), layout))
    # On CUDA the alignment decides how many columns a lane has, and so the order of the sum.
    torch.testing.assert_close(got, expected, rtol=0 if device == "cpu" else 1e-5, atol=0 if device == "cpu" else 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [None, 0, 1, 4, 33])
def test_edge_softmax(device: str, heads: int | None, dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    exp_error = 256 * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps  # of exp(-64)
    for e in NAMED.values():
        for g in (e.graph(device), e.graph(device).T):
            shape = (e.num_edges,) if heads is None else (e.num_edges, heads)
            logits = (values(shape, dtype, 1, device=device) * 8).requires_grad_()
            wide = logits.detach().double().requires_grad_()
            p, expected = gsp.edge_softmax(g, logits), reference.edge_softmax(g, wide)
            assert p.dtype == dtype and p.shape == shape
            assert torch.allclose(p.double(), expected, rtol=4 * eps + exp_error, atol=eps * 1e-2)
            grad = values(shape, dtype, 2, device=device)
            (found,) = torch.autograd.grad(p, logits, grad)
            (wanted,) = torch.autograd.grad(expected, wide, grad.double())
            assert torch.allclose(found.double(), wanted, rtol=8 * eps + exp_error, atol=1024 * eps)
            if e.num_edges and heads != 0:
                total = p.double().new_zeros(g.num_dst, *shape[1:]).index_add(0, g.edge_index()[1], p.detach().double())
                full = g.in_degree() > 0
                assert torch.allclose(total[full], torch.ones_like(total[full]), atol=64 * eps)


def test_edge_softmax_of_large_logits(device: str) -> None:
    g = gsp.Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 1, 1, 0]], device=device), 3)
    p = gsp.edge_softmax(g, torch.tensor([1e30, 1e30, -1e30, -1e30], device=device))
    assert p.tolist() == [0.5, 0.5, 0, 1]
    p = gsp.edge_softmax(g, torch.tensor([1.0, -torch.inf, 1.0, 5.0], device=device))
    assert p.tolist() == [0.5, 0, 0.5, 1]
    p = gsp.edge_softmax(g, torch.tensor([1.0, torch.nan, 1.0, 5.0], device=device))
    assert p[:3].isnan().all() and p[3] == 1


@settings(max_examples=40)
@given(
    e=edges(),
    heads=st.sampled_from([None, 1, 3]),
    layout=st.sampled_from([x for x in LAYOUTS if x != "padded"]),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_edge_operators_on_any_graph(device, e, heads, layout, index) -> None:  # type: ignore[no-untyped-def]
    g = e.graph(device, index)
    shape = (e.num_edges,) if heads is None else (e.num_edges, heads)
    logits = lay_out(values(shape, torch.float64, 1, device=device), layout)
    assert torch.allclose(gsp.edge_softmax(g, logits), reference.edge_softmax(g, logits))
    inner = (6,) if heads is None else (heads, 2)
    a, b = values((e.num_dst, *inner), torch.float64, 1), values((e.num_src, *inner), torch.float64, 2)
    a, b = lay_out(a.to(device), layout), lay_out(b.to(device), layout)
    assert torch.allclose(gsp.sddmm(g, a, b), reference.sddmm(g, a, b), atol=1e-12)


# ---------------------------------------------------------------------- derivatives


def small(device: str) -> tuple[gsp.Graph, Edges]:
    """Five sources, four destinations, nine edges: parallel ones, an empty row, an unused source, shuffled."""
    e = Edges(torch.tensor([[3, 0, 2, 0, 0, 4, 2, 3, 0], [1, 3, 0, 0, 1, 3, 1, 1, 0]]), 5, 4)
    return e.graph(device), e


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("tie", ["first", "split"])
@pytest.mark.parametrize("reduce", REDUCES)
def test_derivatives(device: str, reduce: str, tie: str, kind: str) -> None:
    """First and second derivatives by finite differences; those of an extremum through the fixed choice."""
    g, e = small(device)
    x, weight = operands(e, 4, kind, torch.float64, device)
    inputs = tuple(t.requires_grad_() for t in (x, weight) if t is not None)
    for graph, args in ((g, inputs), (g.T, inputs)):
        rows = graph.num_src
        args = (inputs[0].detach()[:rows].requires_grad_(), *inputs[1:])

        def run(*leaves: torch.Tensor, graph: gsp.Graph = graph) -> torch.Tensor:
            out = gsp.spmm(graph, leaves[0], leaves[1] if len(leaves) > 1 else None, reduce, tie=tie)
            assert isinstance(out, torch.Tensor)
            return out

        assert torch.autograd.gradcheck(run, args)
        assert torch.autograd.gradgradcheck(run, args)


@pytest.mark.parametrize("heads", [0, 2])
def test_derivatives_of_sddmm(device: str, heads: int) -> None:
    g, _ = small(device)
    inner = (heads, 3) if heads else (3,)
    a = values((g.num_dst, *inner), torch.float64, 1, device=device).requires_grad_()
    b = values((g.num_src, *inner), torch.float64, 2, device=device).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: gsp.sddmm(g, a, b), (a, b))
    assert torch.autograd.gradgradcheck(lambda a, b: gsp.sddmm(g, a, b), (a, b))
    assert torch.autograd.gradgradcheck(lambda a, b: gsp.sddmm(g.T, b, a), (a, b))


@pytest.mark.parametrize("heads", [None, 2])
def test_derivatives_of_edge_softmax(device: str, heads: int | None) -> None:
    g, e = small(device)
    logits = values((e.num_edges,) if heads is None else (e.num_edges, heads), torch.float64, 1, device=device)
    logits.requires_grad_()
    for graph in (g, g.T):
        assert torch.autograd.gradcheck(lambda t, graph=graph: gsp.edge_softmax(graph, t), (logits,))
        assert torch.autograd.gradgradcheck(lambda t, graph=graph: gsp.edge_softmax(graph, t), (logits,))


@pytest.mark.parametrize("name", ["no_edges", "no_nodes", "one_edge"])
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("reduce", REDUCES)
def test_second_derivatives_of_almost_nothing(device: str, reduce: str, kind: str, name: str) -> None:
    e = NAMED[name]
    for width, tie in itertools.product((0, 4), ("first", "split")):
        x, weight = operands(e, width, kind, torch.float64, device)
        leaves = [t.requires_grad_() for t in (x, weight) if t is not None]
        out = gsp.spmm(e.graph(device), x, weight, reduce, tie=tie)
        grads = torch.autograd.grad((out**2).sum(), leaves, create_graph=True)
        again = torch.autograd.grad(sum((g**2).sum() for g in grads), leaves)
        assert [t.shape for t in again] == [t.shape for t in leaves]


@pytest.mark.parametrize("heads", [None, 0, 2])
@pytest.mark.parametrize("name", ["no_edges", "no_nodes", "one_edge"])
def test_second_derivatives_of_softmax_of_almost_nothing(device: str, name: str, heads: int | None) -> None:
    e = NAMED[name]
    logits = torch.zeros((e.num_edges,) if heads is None else (e.num_edges, heads), device=device, requires_grad=True)
    (grad,) = torch.autograd.grad((gsp.edge_softmax(e.graph(device), logits) ** 2).sum(), logits, create_graph=True)
    (again,) = torch.autograd.grad((grad**2).sum(), logits)
    assert again.shape == logits.shape


@pytest.mark.parametrize("reduce", REDUCES)
def test_gradients_without_heads(device: str, reduce: str) -> None:
    """They are empty, but exist."""
    g = NAMED["shuffled"].graph(device)
    x = torch.zeros(g.num_src, 0, 4, device=device, requires_grad=True)
    y = torch.zeros(g.num_dst, 0, 4, device=device, requires_grad=True)
    weight = torch.zeros(g.num_edges, 0, device=device, requires_grad=True)
    for out, leaves in (
        (gsp.spmm(g, x, weight, reduce), (x, weight)),
        (gsp.spmm(g, x.detach(), weight, reduce), (weight,)),
        (gsp.sddmm(g, y, x), (y, x)),
        (gsp.edge_softmax(g, weight), (weight,)),
    ):
        assert isinstance(out, torch.Tensor)
        assert [t.shape for t in torch.autograd.grad(out.sum(), leaves)] == [t.shape for t in leaves]


def test_backward_twice(device: str) -> None:
    g = gsp.Graph.from_edge_index(torch.tensor([[0], [1]], device=device), 2)
    for reduce in REDUCES:
        x = torch.tensor([[2.0], [0.0]], device=device, requires_grad=True)
        weight = torch.tensor([3.0], device=device, requires_grad=True)
        out = gsp.spmm(g, x, weight, reduce).sum()
        out.backward(retain_graph=True)
        out.backward()
        assert x.grad is not None and x.grad[0, 0] == 6
        assert weight.grad is not None and weight.grad[0] == 4


@pytest.mark.parametrize("reduce", REDUCES)
def test_only_what_needs_a_gradient_gets_one(device: str, reduce: str) -> None:
    g, e = small(device)
    x, weight = operands(e, 4, "edge", torch.float64, device)
    assert weight is not None
    by_weight = weight.clone().requires_grad_()
    gsp.spmm(g, x, by_weight, reduce).sum().backward()
    by_x = x.clone().requires_grad_()
    gsp.spmm(g, by_x, weight, reduce).sum().backward()
    both = [t.clone().requires_grad_() for t in (x, weight)]
    gsp.spmm(g, *both, reduce).sum().backward()
    assert torch.equal(by_x.grad, both[0].grad) and torch.equal(by_weight.grad, both[1].grad)


def test_changing_an_input_between_forward_and_backward_is_noticed(device: str) -> None:
    g, e = small(device)
    for reduce in REDUCES:
        x = values((e.num_src, 3), torch.float32, 1, device=device).requires_grad_()
        weight = values((e.num_edges,), torch.float32, 2, device=device).requires_grad_()
        scaled = x * 1
        out = gsp.spmm(g, scaled, weight, reduce)
        scaled.mul_(2)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
            out.sum().backward()


def test_graph_weights(device: str) -> None:
    """`spmm` uses the graph's own weights unless it is given others."""
    g, e = small(device)
    x = values((e.num_src, 3), torch.float32, 1, device=device)
    own, other = (values((e.num_edges,), torch.float32, seed, device=device) for seed in (2, 3))
    gsp.plan(g, 3)  # warm, so that no upgrade changes last digits on the way
    weighted = g.with_weight(own)
    assert torch.equal(gsp.spmm(weighted, x), gsp.spmm(g, x, own))
    assert torch.equal(weighted @ x, gsp.spmm(g, x, own))
    assert torch.equal(weighted.reduce(x, "max"), gsp.spmm(g, x, own, "max"))
    assert torch.equal(gsp.spmm(weighted, x, other), gsp.spmm(g, x, other))
    assert torch.equal(weighted.with_weight(None) @ x, gsp.spmm(g, x))
    assert torch.equal(weighted.T @ x[: e.num_dst], gsp.spmm(g.T, x[: e.num_dst], own))
    learned = own.clone().requires_grad_()
    (g.with_weight(learned) @ x).sum().backward()
    assert learned.grad is not None and torch.allclose(learned.grad, x.sum(1)[e.edge_index[0].to(device)])


# ---------------------------------------------------------------------- counting


def test_kernel_calls(device: str) -> None:
    """One kernel for the forward, one for each gradient; nothing is sorted or permuted twice."""
    g, e = small(device)
    x = values((e.num_src, 3), torch.float32, 1, device=device).requires_grad_()
    weight = values((e.num_edges,), torch.float32, 2, device=device).requires_grad_()

    def spent(run) -> int:  # type: ignore[no-untyped-def]
        before = gsp.stats()["kernel_calls"]
        run()
        return gsp.stats()["kernel_calls"] - before

    for reduce in REDUCES:
        for wanted, args in (
            (2, (x,)),
            (3, (x, weight)),
            (2, (x.detach(), weight)),
            (1, (x.detach(), weight.detach())),
        ):

            def step(args=args, reduce=reduce) -> None:  # type: ignore[no-untyped-def]
                out = gsp.spmm(g, *args, reduce=reduce)
                if out.requires_grad:
                    out.sum().backward()

            assert spent(step) == wanted, (reduce, wanted)
    logits = weight.detach().clone().requires_grad_()
    assert spent(lambda: gsp.edge_softmax(g, logits).sum().backward()) == 2
    assert spent(lambda: gsp.sddmm(g, x[: e.num_dst], x).sum().backward()) == 3


def test_steady_steps_prepare_nothing(device: str) -> None:
    g, e = small(device)
    x = values((e.num_src, 3), torch.float32, 1, device=device).requires_grad_()
    constant = values((e.num_edges,), torch.float32, 2, device=device)
    learned = constant.clone().requires_grad_()

    def step() -> None:
        for reduce in REDUCES:
            gsp.spmm(g, x, reduce=reduce).sum().backward()
            gsp.spmm(g, x, constant, reduce).sum().backward()

    for _ in range(WARM_AFTER + 1):
        step()
    before = gsp.stats()
    step()
    after = gsp.stats()
    for name in before.keys() - {"kernel_calls"}:
        assert after[name] == before[name], name
    # a learned weight: one permutation per direction and forward, none of the graph
    gsp.spmm(g, x, learned).sum().backward()
    assert gsp.stats()["weight_permutes"] - after["weight_permutes"] == 2
    assert gsp.stats()["sorts"] == after["sorts"]


def test_sorted_edges_need_no_permutation(device: str) -> None:
    before = gsp.stats()
    e = NAMED["sorted"]
    g = e.graph(device)
    assert g.perm is None
    gsp.spmm(
        g, values((e.num_src, 3), torch.float32, 1, device=device), values((e.num_edges,), torch.float32, 2).to(device)
    )
    after = gsp.stats()
    assert after["sorts"] == before["sorts"] and after["weight_permutes"] == before["weight_permutes"]
    assert after["transposes_built"] == before["transposes_built"]  # inference needs none


@pytest.mark.parametrize("reduce", REDUCES)
def test_empty_features_of_any_strides(device: str, reduce: str) -> None:
    g = gsp.Graph.from_edge_index(torch.zeros(2, 0, dtype=torch.int64, device=device), (0, 3))
    for strides in ((4, 1), (1, 0), (1, 7), (0, 0)):
        for needs_grad in (False, True):
            x = torch.empty_strided((0, 4), strides, device=device).requires_grad_(needs_grad)
            out = gsp.spmm(g, x, reduce=reduce)
            assert torch.equal(out, torch.zeros(3, 4, device=device))
            if needs_grad:
                out.sum().backward()
                assert x.grad is not None and x.grad.shape == x.shape


@pytest.mark.parametrize("reduce", REDUCES)
def test_negated_constants(device: str, reduce: str) -> None:
    """Weights that are a negated view, as the imaginary part of a conjugate is, used again and again."""
    g, e = small(device)
    x = values((e.num_src, 3), torch.float32, 1, device=device)
    weight = torch.randn(e.num_edges, dtype=torch.complex64, device=device).conj().imag
    assert weight.is_neg()
    expected = gsp.spmm(g, x, weight.clone().resolve_neg(), reduce)
    for _ in range(3):
        assert torch.equal(gsp.spmm(g, x, weight, reduce), expected)


def test_a_mean_under_inference_mode_first(device: str) -> None:
    """What its backward keeps serves second derivatives later."""
    g, e = small(device)
    x = values((e.num_src, 3), torch.float32, 1, device=device).requires_grad_()
    weight = values((e.num_edges,), torch.float32, 2, device=device).requires_grad_()
    out = gsp.spmm(g, x, weight, "mean").sum()
    with torch.inference_mode():
        torch.autograd.grad(out, (x, weight))
    first = torch.autograd.grad(gsp.spmm(g, x, weight, "mean").square().sum(), (x, weight), create_graph=True)
    assert all(bool(d.isfinite().all()) for d in torch.autograd.grad(sum(t.sum() for t in first), (x, weight)))


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_functionalize(device: str, reduce: str) -> None:
    g, e = small(device)
    x = values((e.num_src, 3), torch.float32, 1, device=device)
    found = torch.func.functionalize(lambda t: gsp.spmm(g, t, reduce=reduce))(x)
    assert torch.allclose(found, gsp.spmm(g, x, reduce=reduce))


@pytest.mark.parametrize("name", ["GINConv", "GCNConv", "SAGEConv", "GATConv"])
def test_second_derivatives_of_many_at_once(name: str, device: str) -> None:
    """Of a graph whose transpose is there already; by one, and batched."""
    torch.manual_seed(0)
    g = gsp.Graph.from_edge_index(torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]], device=device), 3)
    g.T.edge_index()
    made = gsp.nn.GINConv(torch.nn.Linear(2, 2)) if name == "GINConv" else getattr(gsp.nn, name)(2, 2)
    layer = made.to(device, torch.float64)
    x = torch.randn(3, 2, dtype=torch.float64, device=device, requires_grad=True)

    def second(batched: bool) -> torch.Tensor:
        j = torch.autograd.functional.jacobian(lambda t: layer(t, g).pow(2), x, create_graph=True, vectorize=batched)
        return torch.autograd.grad(j.pow(2).sum(), x)[0]

    expected = second(False)
    for _ in range(3):
        torch.testing.assert_close(second(True), expected)
