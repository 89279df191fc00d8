"""DGL's ``gsddmm`` and ``edge_softmax``: a value for each edge, of features at its ends and its own.

On the CPU only what is faster here is done here: dot products between the two ends, the softmax, and small graphs.
DGL's CPU kernels for sums, products and copies stream about as fast as memory does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...derivatives import _linear, _needs_grad
from ...dgl_index import Relation, relation_of
from ...functional import edge_softmax, sddmm
from ...graph import Graph
from ...kernels import DTYPES
from .aggregate import _padded, autocast, broadcast, no_kernels

OPS = ("add", "sub", "mul", "div", "dot", "copy_lhs", "copy_rhs")
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{"add": torch.add, "sub": torch.sub},
    **{"mul": torch.mul, "div": torch.div},
}
_HOST = "DGL's kernel is faster on the CPU"
_SMALL = 1 << 14  # values; of fewer, even DGL's calls take longer than gathers
_SIDES = {"u": "u", "src": "u", "v": "v", "dst": "v", "e": "e", "edge": "e"}


def per_edge(
    gidx: Any, op: str, lhs: Tensor | None, rhs: Tensor | None, lhs_target: str, rhs_target: str
) -> Tensor | str:
    """``out[e] = lhs op rhs``, each taken at the source ("u"), the destination ("v"), or the edge ("e").

    Args:
        gidx: an index with one edge type.
        op: one of `OPS`; ``dot`` sums over the last dimension and keeps it.
        lhs: ``[rows of its target, *L]``, not used by ``copy_rhs``.
        rhs: ``[rows of its target, *R]``, not used by ``copy_lhs``.
        lhs_target: where `lhs` is, as above or in words.
        rhs_target: where `rhs` is.

    Returns:
        ``[number of edges, *broadcast(L, R)]``, or why it is left to DGL.
    """
    sides = _SIDES[lhs_target], _SIDES[rhs_target]
    a = None if op == "copy_rhs" else lhs
    b = None if op == "copy_lhs" else rhs
    if not all(t is None or isinstance(t, Tensor) for t in (a, b)) or (a is None and b is None):
        return "a feature is no tensor"
    if torch.is_autocast_enabled():
        a, b = autocast(a), autocast(b)
    given = [t for t in (a, b) if t is not None]
    device = given[0].device
    reason = no_kernels(device)
    if reason is not None:
        return reason
    relation = relation_of(gidx, device)
    if relation is None:
        return "several relations at once"
    reason = _unsuitable(relation.graph, sides, a, b)
    if reason is not None:
        return reason
    if a is None or b is None:
        if device.type == "cpu":
            return _HOST
        return _at_edges(relation, given[0], sides[a is None])
    shape = broadcast(a.shape[1:], b.shape[1:])
    if shape is None or (op == "dot" and _last(a) != _last(b)):
        return "the shapes do not broadcast"
    if op == "dot" and shape and sides in (("u", "v"), ("v", "u")):
        src, dst = (a, b) if sides[0] == "u" else (b, a)
        return _dot(relation.graph, src, dst, shape)
    if device.type == "cpu" and relation.graph.num_edges * math.prod(shape) > _SMALL:
        return _HOST
    a, b = _at_edges(relation, _padded(a, len(shape)), sides[0]), _at_edges(relation, _padded(b, len(shape)), sides[1])
    if op == "dot":
        return (a * b).sum(-1, keepdim=True) if shape else a * b
    return _BINARY[op](a, b)


def _unsuitable(graph: Graph, sides: tuple[str, str], *features: Tensor | None) -> str | None:
    rows = {"u": graph.num_src, "v": graph.num_dst, "e": graph.num_edges}
    dtype = None
    for t, side in zip(features, sides, strict=True):
        if t is None:
            continue
        if t.dtype not in DTYPES:
            return f"the features are {t.dtype}"
        if dtype not in (None, t.dtype):
            return "the features are of several dtypes"
        dtype = t.dtype
        if t.dim() == 0 or t.shape[0] != rows[side]:
            return "the features have another number of rows than the graph"
        if t.layout is not torch.strided:
            return "the features are no dense tensor"
        if t.device != graph.device:
            return "the features are on several devices"
    return None


def _last(t: Tensor) -> int:
    return t.shape[-1] if t.dim() > 1 else 1


def _dot(graph: Graph, src: Tensor, dst: Tensor, shape: tuple[int, ...]) -> Tensor:
    if src.shape[1:] != dst.shape[1:]:
        src, dst = (_padded(t, len(shape)).expand(-1, *shape) for t in (src, dst))
    if len(shape) == 1:
        return sddmm(graph, dst, src).unsqueeze(-1)
    src, dst = src.flatten(1, -2), dst.flatten(1, -2)  # [N, H, F]
    return sddmm(graph, dst, src).view(graph.num_edges, *shape[:-1], 1)


class _Gather(torch.autograd.Function):
    """``x[index]``, whose gradient is summed in order instead of by atomic additions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, graph: Graph) -> Tensor:
        ctx.graph, ctx.shape = graph, x.shape
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        graph = ctx.graph
        if grad.numel() == 0:
            return grad.new_zeros(ctx.shape), None, None
        flat = grad.reshape(grad.shape[0], -1)
        return _linear(graph._core, graph._flipped, flat, None).view(ctx.shape), None, None


def _at_edges(r: Relation, t: Tensor, side: str) -> Tensor:
    if side == "e":
        return t
    if not _needs_grad(t, None):
        return t.index_select(0, r.ends(side == "v"))
    return _Gather.apply(t, r.ends(side == "v"), r.edges if side == "v" else r.leaving)  # type: ignore[no-any-return]


def softmax(gidx: Any, logits: Tensor, eids: Any, norm_by: str) -> Tensor | str:
    """Softmax over the edges into each destination, or, ``norm_by="src"``, out of each source.

    Args:
        gidx: an index with one edge type.
        logits: ``[number of edges, *L]``; each column for itself.
        eids: all edges; or some, which stay DGL's on the CPU.
        norm_by: ``"dst"`` or ``"src"``.

    Returns:
        The same shape, or why it is left to DGL.
    """
    if torch.is_autocast_enabled():
        logits = autocast(logits)  # type: ignore[assignment]
    reason = no_kernels(logits.device)
    if reason is not None:
        return reason
    if isinstance(eids, Tensor):
        if logits.device.type == "cpu":
            return "some of the edges"
        gidx = gidx.edge_subgraph([eids.to("cpu")], True).graph
    relation = relation_of(gidx, logits.device)
    if relation is None:
        return "several relations at once"
    graph = relation.graph
    reason = _unsuitable(graph, ("e", "e"), logits, None)
    if reason is not None:
        return reason
    flat = logits
    if logits.dim() > 1:
        flat = logits.reshape(-1) if logits.numel() == logits.shape[0] else logits.flatten(1)
    return edge_softmax(graph.T if norm_by == "src" else graph, flat).view(logits.shape)


__all__ = ["per_edge", "softmax"]
