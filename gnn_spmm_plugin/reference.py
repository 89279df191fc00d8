"""The operators in plain torch: what they mean, one message per edge. Slow, large, obviously right.

Tests compare every kernel with these in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .graph import Graph


def messages(graph: Graph, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """``[E, *F]``: weight[e] * x[s] for each edge, in the caller's order."""
    m = x[graph.edge_index()[0]]
    if weight is None:
        return m
    return m * weight.reshape(weight.shape + (1,) * (m.dim() - weight.dim()))


def spmm(
    graph: Graph, x: Tensor, weight: Tensor | None = None, reduce: str = "sum", tie: str = "first"
) -> tuple[Tensor, Tensor]:
    """`gnn_spmm_plugin.spmm` with `return_arg`: (out, arg); arg is all -1 for sum and mean. Differentiable."""
    weight = graph.weight if weight is None else weight
    dst = graph.edge_index()[1]
    m = messages(graph, x, weight)
    shape = (graph.num_dst, *m.shape[1:])
    no_arg = torch.full(shape, -1, dtype=torch.int64, device=x.device)
    if reduce in ("sum", "mean"):
        out = m.new_zeros(shape).index_add(0, dst, m)
        if reduce == "mean":
            out = out / graph.in_degree().clamp(min=1).to(m.dtype).view(-1, *[1] * (m.dim() - 1))
        return out, no_arg
    sign = -1 if reduce == "min" else 1
    index = dst.view(-1, *[1] * (m.dim() - 1)).expand_as(m)
    # NaN above everything: amax does that by itself.
    best = m.new_full(shape, -torch.inf).scatter_reduce(0, index, (m * sign).detach(), "amax") * sign
    wins = (m == best[dst]) | (m.isnan() & best[dst].isnan())
    edge = torch.arange(graph.num_edges, device=x.device).view(-1, *[1] * (m.dim() - 1)).expand_as(m)
    first = torch.full_like(no_arg, graph.num_edges).scatter_reduce(
        0, index, edge.masked_fill(~wins, graph.num_edges), "amin"
    )
    empty = (graph.in_degree() == 0).view(-1, *[1] * (m.dim() - 1)).expand(shape)
    arg = first.masked_fill(empty, -1)
    if graph.num_edges == 0:
        return m.new_zeros(shape) + m.sum(), arg
    if tie == "first":
        return m.gather(0, arg.clamp(min=0)).masked_fill(empty, 0), arg
    # Every winner carries the value; averaging them spreads the gradient evenly.
    share = wins.to(m.dtype)
    count = m.new_zeros(shape).index_add(0, dst, share).clamp(min=1)
    spread = m.new_zeros(shape).index_add(0, dst, m.masked_fill(~wins, 0)) / count
    return spread.masked_fill(empty, 0), arg


def sddmm(graph: Graph, a_dst: Tensor, b_src: Tensor) -> Tensor:
    """`gnn_spmm_plugin.sddmm`."""
    src, dst = graph.edge_index()
    return (a_dst[dst] * b_src[src]).sum(-1)


def edge_softmax(graph: Graph, logits: Tensor) -> Tensor:
    """`gnn_spmm_plugin.edge_softmax`."""
    dst = graph.edge_index()[1]
    index = dst.view(-1, *[1] * (logits.dim() - 1)).expand_as(logits)
    shape = (graph.num_dst, *logits.shape[1:])
    top = logits.new_full(shape, -torch.inf).scatter_reduce(0, index, logits.detach(), "amax")
    e = (logits - top[dst]).exp()
    return e / logits.new_zeros(shape).index_add(0, dst, e)[dst]
