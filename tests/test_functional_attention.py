"""`functional_attention`: against plain torch in float64, long rows and idle nodes, each dtype; its operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pyg_layers import assert_same, random_graph
from torch import Tensor

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.functional_attention import SCORES, attend, coefficients, in_row_order, scores
from gnn_spmm_plugin.functional_attention_edge_index import with_loops

SOURCES, TARGETS, HEADS, CHANNELS = 23, 17, 3, 5
SLOPE, SCALE = 0.2, 0.7


def star(device: str) -> Tensor:
    """One destination of 9000 edges, which the kernels cut into pieces, and some of few."""
    edge_index = random_graph(SOURCES, TARGETS, 9400, device=device)
    edge_index[1, 200:9200] = 4
    return edge_index


GRAPHS = {
    "any": lambda device: random_graph(SOURCES, TARGETS, 150, device=device),
    "star": star,
    "one": lambda device: torch.tensor([[2], [3]], device=device),
    "empty": lambda device: torch.empty(2, 0, dtype=torch.long, device=device),
}


def operands(score: str, device: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    src, dst = (torch.randn(n, HEADS, CHANNELS) for n in (SOURCES, TARGETS))
    a, b, att = torch.randn(SOURCES, HEADS), torch.randn(TARGETS, HEADS), torch.randn(HEADS, CHANNELS)
    given = {"sum": (a, b), "pair": (src, dst, att), "dot": (src, dst), "gated": (a, b, src, dst)}[score]
    return tuple(t.to(device, dtype).requires_grad_() for t in given)


def plain_scores(edge_index: Tensor, score: str, given: tuple[Tensor, ...]) -> Tensor:
    s, d = edge_index
    if score == "pair":
        return (F.leaky_relu(given[0][s] + given[1][d], SLOPE) * given[2]).sum(-1)
    if score == "sum":
        out = given[0][s] + given[1][d]
    elif score == "dot":
        out = (given[0][s] * given[1][d]).sum(-1) * SCALE
    else:
        out = (given[0][s] + given[1][d]) * (given[2][s] * given[3][d]).sum(-1).sigmoid()
    return F.leaky_relu(out, SLOPE)


def plain(edge_index: Tensor, x: Tensor, score: str, given: tuple[Tensor, ...], keep: Tensor) -> Tensor:
    s, d = edge_index
    logits = plain_scores(edge_index, score, given)
    e = (logits - logits.detach().amax(0) if len(logits) else logits).exp()
    p = e / e.new_zeros(TARGETS, HEADS).index_add(0, d, e)[d] * keep
    return x.new_zeros(TARGETS, HEADS, CHANNELS).index_add(0, d, p.unsqueeze(2) * x[s])


def everything(out: Tensor, x: Tensor, given: tuple[Tensor, ...]) -> list[Tensor]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(out)
    found = torch.autograd.grad(out, (x, *given), weight, allow_unused=True)
    return [out.detach(), *(torch.zeros(()) if t is None else t for t in found)]


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("score", SCORES)
def test_equals_plain_torch(score: str, graph: str, device: str) -> None:
    edge_index = GRAPHS[graph](device)
    g = gsp.Graph.from_edge_index(edge_index, (SOURCES, TARGETS)).with_weight(
        torch.rand(edge_index.shape[1], device=device)
    )
    given = operands(score, device)
    x = torch.randn(SOURCES, HEADS, CHANNELS, dtype=torch.float64, device=device, requires_grad=True)
    keep = F.dropout(torch.ones(edge_index.shape[1] + 4, HEADS, dtype=torch.float64, device=device), 0.3)
    out = attend(g, x, score, given, slope=SLOPE, scale=SCALE, keep=keep)
    expected = plain(edge_index, x, score, given, keep[: edge_index.shape[1]])
    assert_same(everything(out, x, given), everything(expected, x, given), 1e-12)
    logits = scores(g, score, given, SLOPE, SCALE)
    assert_same([logits.detach()], [plain_scores(edge_index, score, given).detach()], 1e-12)
    flipped = attend(g.T.T, x, score, given, slope=SLOPE, scale=SCALE, keep=keep)
    assert torch.equal(flipped, out)
    if len(logits):  # drawn in the order of the edges
        torch.manual_seed(1)
        one = attend(g, x, score, given, slope=SLOPE, scale=SCALE, dropout=0.5)
        torch.manual_seed(1)
        p = coefficients(g, score, given, slope=SLOPE, scale=SCALE, dropout=0.5)
        assert_same([one.detach()], [gsp.spmm(g, x, p).detach()], 1e-12)  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("score", SCORES)
def test_dtypes(score: str, dtype: torch.dtype, device: str) -> None:
    edge_index = GRAPHS["any"](device)
    g = gsp.Graph.from_edge_index(edge_index, (SOURCES, TARGETS))
    given = operands(score, device, dtype)
    x = torch.randn(SOURCES, HEADS, CHANNELS, device=device).to(dtype).requires_grad_()
    got = everything(attend(g, x, score, given, slope=SLOPE, scale=SCALE), x, given)
    assert all(t.dtype == dtype for t in got)
    wide = tuple(t.detach().double().requires_grad_() for t in given)
    x_wide = x.detach().double().requires_grad_()
    keep = torch.ones(edge_index.shape[1], HEADS, dtype=torch.float64, device=device)
    expected = everything(plain(edge_index, x_wide, score, wide, keep), x_wide, wide)
    assert_same([t.double() for t in got], expected, 16 * torch.finfo(dtype).eps)


def check_pair(edge_index: Tensor, heads: int, channels: int, dtype: torch.dtype) -> None:
    """GATv2's scores and their gradients against plain torch in float64."""
    device = str(edge_index.device)
    shapes = (SOURCES, heads, channels), (TARGETS, heads, channels), (heads, channels)
    torch.manual_seed(0)
    given = [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]
    g = gsp.Graph.from_edge_index(edge_index, (SOURCES, TARGETS))
    got = scores(g, "pair", tuple(given), SLOPE)
    weight = torch.randn(got.shape, device=device).to(dtype)
    wide = [t.detach().double().requires_grad_() for t in given]
    expected = plain_scores(edge_index, "pair", tuple(wide))
    ours = got.detach(), *torch.autograd.grad(got, given, weight)
    plain = expected.detach(), *torch.autograd.grad(expected, wide, weight.double())
    for a, b in zip(ours, plain, strict=True):  # what has long sums has larger numbers too
        assert a.dtype == dtype
        assert_same([a.double()], [b], (8 if dtype.itemsize == 2 else 64) * torch.finfo(dtype).eps)


@pytest.mark.parametrize(("heads", "channels"), [(1, 1), (2, 8), (4, 32), (6, 64), (1, 47), (2, 132), (40, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_pairs_of_any_shape(heads: int, channels: int, dtype: torch.dtype, device: str) -> None:
    check_pair(GRAPHS["star"](device), heads, channels, dtype)


@pytest.mark.gpu
def test_pairs_of_many_edges() -> None:
    """More than a GPU takes in the shortest runs, half of them of one node."""
    edge_index = random_graph(SOURCES, TARGETS, 1_500_000, device="cuda")
    edge_index[1, ::2] = 4
    check_pair(edge_index, 4, 32, torch.float32)


def test_idle_nodes_may_hold_anything(device: str) -> None:
    """Features of nodes without edges reach no output and no gradient of a parameter."""
    edge_index = GRAPHS["any"](device)  # whose last two sources and destinations have none
    g = gsp.Graph.from_edge_index(edge_index, (SOURCES, TARGETS))
    src, dst, att = operands("pair", device)
    with torch.no_grad():
        src[-1], dst[-1] = float("nan"), float("inf")
    grads = torch.autograd.grad(scores(g, "pair", (src, dst, att), SLOPE).sum(), (src, dst, att))
    assert all(bool(t.isfinite().all()) for t in grads)


def test_strided_operands(device: str) -> None:
    edge_index = GRAPHS["any"](device)
    g = gsp.Graph.from_edge_index(edge_index, (SOURCES, TARGETS))
    src, dst, att = (t.detach() for t in operands("pair", device))
    expected = scores(g, "pair", (src, dst, att), SLOPE)
    for given in (
        (src.transpose(0, 2).contiguous().transpose(0, 2), dst, att.t().contiguous().t()),
        (torch.cat([src, src], 1)[:, :HEADS], dst.expand_as(dst), att),
    ):
        assert torch.equal(scores(g, "pair", given, SLOPE), expected)


def test_rows_are_numbered_once(device: str) -> None:
    edge_index = GRAPHS["any"](device)
    g = gsp.Graph.from_edge_index(edge_index, (SOURCES, TARGETS))
    rows = in_row_order(g)
    assert rows.perm is None and rows._core is in_row_order(g)._core
    assert g.perm is not None and torch.equal(rows.edge_index(), g.edge_index()[:, g.perm.long()])
    assert in_row_order(rows)._core is rows._core


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("score", SCORES)
def test_the_opaque_operator(score: str, loops: bool, device: str) -> None:
    edge_index = random_graph(12, 12, 40, device=device)
    torch.manual_seed(0)
    x, *given = (
        t[:12].detach().clone().requires_grad_() if t.shape[0] > 12 else t
        for t in (torch.randn(12, HEADS, CHANNELS, dtype=torch.float64, device=device), *operands(score, device))
    )
    x.requires_grad_()
    keep = F.dropout(torch.ones(52, HEADS, dtype=torch.float64, device=device), 0.3)
    how: Any = (12, 12, False, loops, score, SLOPE, SCALE, None, "auto")
    op = torch.ops.gnn_spmm_plugin.attend_edge_index.default
    torch.library.opcheck(op, (x, given, edge_index, keep, *how))
    torch.library.opcheck(op, (x.detach(), [t.detach() for t in given], edge_index, None, *how))
    graph = gsp.Graph.from_edge_index(edge_index, 12)
    if loops:
        graph = with_loops(graph)
    expected = attend(graph, x, score, tuple(given), slope=SLOPE, scale=SCALE, keep=keep)
    got = op(x, given, edge_index, keep, *how)
    assert_same(everything(got, x, tuple(given)), everything(expected, x, tuple(given)))


@pytest.mark.parametrize(
    ("score", "count", "message"),
    [
        ("foo", 1, "score must be one of sum, pair, dot, gated; got 'foo'"),
        ("sum", 0, "score 'sum' takes 1 or 2 operands .*, got 0"),
        ("pair", 2, "score 'pair' takes 3 operands .*, got 2"),
        ("dot", 1, "score 'dot' takes 2 operands .*, got 1"),
        ("gated", 3, "score 'gated' takes 4 operands .*, got 3"),
    ],
)
def test_scores_that_are_none(score: str, count: int, message: str) -> None:
    g = gsp.Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2)
    with pytest.raises(ValueError, match=message):
        attend(g, torch.ones(2, 1, 3), score, (torch.ones(2, 1),) * count)
