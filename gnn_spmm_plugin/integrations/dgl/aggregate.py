"""DGL's ``gspmm``: messages of source nodes and edges, reduced at their destinations, without writing them.

Shapes are DGL's: the first dimension
counts nodes or edges, the others are broadcast as NumPy does.
"""

from __future__ import annotations

import functools
import math
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _native
from ...derivatives import _picked_x
from ...dgl_index import Relation, relation_of
from ...functional import spmm
from ...graph import Graph
from ...kernels import DTYPES

REDUCES = ("sum", "mean", "max", "min")
OPS = ("copy_lhs", "copy_rhs", "mul", "add", "div", "sub")
_LIMIT = {"max": -math.inf, "min": math.inf}

#: How plans are chosen; set by `switch`.
policy = "auto"


def aggregate(gidx: Any, op: str, reduce: str, x: Tensor | None, w: Tensor | None) -> Tensor | str:
    """``out[v] = reduce over e = (u -> v) of x[u] op w[e]``; destinations without edges get what DGL gives them.

    Args:
        gidx: an index with one edge type.
        op: one of `OPS`.
        reduce: one of `REDUCES`.
        x: ``[number of sources, *X]``, not used by ``copy_rhs``.
        w: ``[number of edges, *W]``, not used by ``copy_lhs``.

    Returns:
        ``[number of destinations, *broadcast(X, W)]``, or why it is left to DGL.
    """
    if op == "copy_lhs":
        w = None
    elif op == "copy_rhs":
        x = None
    first = w if x is None else x
    if not isinstance(first, Tensor) or not (w is None or isinstance(w, Tensor)):
        return "a feature is no tensor"
    if torch.is_autocast_enabled():
        x, w = autocast(x), autocast(w)
    device = first.device
    if device != _CPU:
        reason = no_kernels(device)
        if reason is not None:
            return reason
    relation = relation_of(gidx, device)
    if relation is None:
        return "several relations at once"
    reason = _unsuitable(relation.graph, op, reduce, x, w)
    return _run(gidx, relation, op, reduce, x, w) if reason is None else reason


_CPU = torch.device("cpu")


def no_kernels(device: torch.device) -> str | None:
    """Why no kernel can run on `device`, or None."""
    if device.type == "cpu":
        return None
    return _native.cuda_error if device.type == "cuda" else f"there are no kernels for {device.type}"


def autocast(t: Tensor | None) -> Tensor | None:
    """`t` as DGL's operators take it under CUDA's autocast: its only one."""
    if t is None or not t.is_cuda or not t.is_floating_point() or t.dtype == torch.float64:
        return t
    return t.to(torch.get_autocast_dtype("cuda"))


def _unsuitable(graph: Graph, op: str, reduce: str, x: Tensor | None, w: Tensor | None) -> str | None:
    if op not in OPS or reduce not in REDUCES:
        return "no such operation here"
    for t, rows in ((x, graph.num_src), (w, graph.num_edges)):
        if t is None:
            continue
        if t.dtype not in DTYPES:
            return f"the features are {t.dtype}"
        if t.dim() == 0 or t.shape[0] != rows:
            return "the features have another number of rows than the graph"
        if t.layout is not torch.strided:
            return "the features are no dense tensor"
        if t.device != graph.device:
            return "the features are on several devices"
    if x is not None and w is not None and x.dtype != w.dtype:
        return "the features are of several dtypes"
    return None


def _run(gidx: Any, r: Relation, op: str, reduce: str, x: Tensor | None, w: Tensor | None) -> Tensor | str:
    if w is None:
        assert x is not None
        return _limits(r, reduce, _spmm(r.graph, x, None, reduce))
    if x is None:
        return _limits(r, reduce, _spmm(r.edges, w, None, reduce))
    if op == "sub":
        op, w = "add", -w
    elif op == "div":
        op, w = "mul", 1.0 / w
    if op == "mul":
        out = _product(r, reduce, x, w)
        return out if isinstance(out, str) else _limits(r, reduce, out)
    shape = broadcast(x.shape[1:], w.shape[1:])
    if shape is None:
        return "the shapes do not broadcast"
    if reduce in ("sum", "mean"):  # of sums: the two parts, each in its own shape
        a, b = _spmm(r.graph, x, None, reduce), _spmm(r.edges, w, None, reduce)
        return _padded(a, len(shape)) + _padded(b, len(shape))
    return _added(gidx, r, reduce, x, w, shape)


def _spmm(graph: Graph, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
    return spmm(graph, x, weight, reduce, policy=policy)  # type: ignore[return-value]


def _limits(r: Relation, reduce: str, out: Tensor) -> Tensor:
    """DGL's extremum of nothing: an infinity, unless the graph has no edges at all. `update_all` makes it 0."""
    limit = _LIMIT.get(reduce)
    if limit is None:
        return out
    empty = r.empty
    if empty is not None:
        global _latest
        out = _Limits.apply(out, empty, limit)
        _latest = weakref.ref(out), empty
    return out


#: The latest result with rows that are infinite because they are empty, and these: `update_all` asks for it at once.
_latest: tuple[weakref.ref[Tensor], Tensor] | None = None


def without_infinities(x: Tensor) -> Tensor | None:
    """`x` with 0 for every infinity, in place where these are of empty rows; None where others have to be looked for.

    A sum that is finite has no infinite terms, and takes a fifth of the time of what DGL does, backward included.
    """
    if not isinstance(x, Tensor) or x.device.type != "cpu":
        return None
    latest = _latest
    if latest is not None and latest[0]() is x:
        x = _Limits.apply(x, latest[1], 0.0)
    return x if bool(x.detach().sum().isfinite()) else None


class _Limits(torch.autograd.Function):
    """``out.index_fill_(0, empty, limit)``, but the gradient passes uncopied: that of an empty row goes nowhere."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, empty: Tensor, limit: float) -> Tensor:
        ctx.mark_dirty(out)
        return out.index_fill_(0, empty, limit)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None


def broadcast(a: Any, b: Any) -> tuple[int, ...] | None:
    """The shape that NumPy broadcasts `a` and `b` to, or None."""
    if a == b:
        return tuple(a)
    n = max(len(a), len(b))
    a, b = (1,) * (n - len(a)) + tuple(a), (1,) * (n - len(b)) + tuple(b)
    if any(p != q and p != 1 and q != 1 for p, q in zip(a, b, strict=True)):
        return None
    return tuple(q if p == 1 else p for p, q in zip(a, b, strict=True))


def _padded(t: Tensor, dims: int) -> Tensor:
    """``[N, *F]`` with 1s before F, until F has `dims` dimensions."""
    missing = dims - (t.dim() - 1)
    return t if missing <= 0 else t.reshape(t.shape[0], *(1,) * missing, *t.shape[1:])


class _Heads(NamedTuple):
    """How a product of node and edge features becomes one with a weight for each head.

    Attributes:
        shape: of the messages.
        heads: number of weights of an edge; 0 for one that all columns share.
        order: the dimensions, those in which weights differ first; None where they are so already.
        back: the way back from that order.
    """

    shape: tuple[int, ...]
    heads: int
    order: tuple[int, ...] | None
    back: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def _heads(a: tuple[int, ...], b: tuple[int, ...]) -> _Heads | None:
    """The form of a product of ``[N, *a]`` and ``[E, *b]``; None where they do not broadcast."""
    shape = broadcast(a, b)
    if shape is None:
        return None
    dims = len(shape)
    b = (1,) * (dims - len(b)) + tuple(b)
    different = [i for i in range(dims) if b[i] != 1]
    order = [*different, *(i for i in range(dims) if b[i] == 1)]
    back = sorted(range(dims), key=lambda i: order[i])
    heads = math.prod(b) if different else 0
    return _Heads(shape, heads, tuple(order) if order != sorted(order) else None, tuple(back))


def _product(r: Relation, reduce: str, x: Tensor, w: Tensor) -> Tensor | str:
    form = _heads(x.shape[1:], w.shape[1:])
    if form is None:
        return "the shapes do not broadcast"
    graph, shape = r.graph, form.shape
    if x.shape[1:] != shape:
        x = _padded(x, len(shape)).expand(-1, *shape)
    if form.heads == 0:
        return _spmm(graph, x, w.reshape(-1), reduce)
    if form.order is not None:
        x = x.permute(0, *(1 + i for i in form.order))
    width = math.prod(shape) // form.heads if form.heads else 0
    out = _spmm(graph, x.reshape(graph.num_src, form.heads, width), w.reshape(-1, form.heads), reduce)
    if form.order is None:
        return out.view(graph.num_dst, *shape)
    out = out.view(graph.num_dst, *(shape[i] for i in form.order))
    return out.permute(0, *(1 + i for i in form.back)).contiguous()


def _added(gidx: Any, r: Relation, reduce: str, x: Tensor, w: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The extrema of ``x[u] + w[e]``, which no kernel of ours takes."""
    x, w = _padded(x, len(shape)), _padded(w, len(shape))
    large = r.graph.num_edges * math.prod(shape) > _SMALL
    if large and x.device.type == "cpu" and x.dtype in _HOST_DTYPES:
        # DGL's kernel writes no messages either, but passes NaN over.
        if bool((x.detach().sum() + w.detach().sum()).isfinite()):
            return _HostExtremum.apply(gidx, r, reduce, x, w)  # type: ignore[no-any-return]
    return _limits(r, reduce, _spmm(r.edges, x.index_select(0, r.ends(False)) + w, None, reduce))


_HOST_DTYPES = (torch.float32, torch.float64)
_SMALL = 1 << 16  # messages that are written faster than they are avoided


class _HostExtremum(torch.autograd.Function):
    """DGL's kernel for ``x[u] + w[e]``, with gradients of ours: none for the infinities of empty destinations."""

    @staticmethod
    def forward(ctx: Any, gidx: Any, r: Relation, reduce: str, x: Tensor, w: Tensor) -> Tensor:
        from dgl._sparse_ops import _gspmm

        out, (_, edge) = _gspmm(gidx, "add", reduce, x.detach(), w.detach())
        arg = edge.reshape(edge.shape[0], -1).to(r.graph.col.dtype)
        if r.empty is not None:
            arg.index_fill_(0, r.empty, -1)
        ctx.relation, ctx.shapes = r, (x.shape, w.shape)
        ctx.save_for_backward(arg)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (arg,) = ctx.saved_tensors
        flat, r = grad.reshape(grad.shape[0], -1), ctx.relation
        grads: list[Tensor | None] = [None, None]
        for i, shape in enumerate(ctx.shapes):
            if ctx.needs_input_grad[3 + i]:
                graph = r.graph if i == 0 else r.edges
                each = _picked_x(graph._core, graph._flipped, flat, None, arg)
                grads[i] = each.reshape(-1, *grad.shape[1:]).sum_to_size(shape)
        return None, None, None, *grads


__all__ = ["OPS", "REDUCES", "aggregate", "autocast", "broadcast"]
