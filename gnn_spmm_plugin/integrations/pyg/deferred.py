"""What is made from two lazy gathers, of both ends of an edge; and joined heads.

The dot product of what an edge's ends have, ``(q_i * k_j).sum(-1)``, is how attention is scored; `product` waits for
the sum, which then takes one number per edge and head. `added` writes the sum of two numbers per head at once. `joined`
waits for the aggregation of ``(alpha * x_j).view(-1, heads * channels)``, whose heads may as well be joined after it.
Whatever else happens to these writes them, as PyG does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._native import autocasts
from ...functional import sddmm
from ...functional_attention import sum_of_ends
from ...graph import Graph
from . import aggregate
from .lazy import LazyMessage, Pending, constant, gradients


class _Product:
    """The parts of a product of two lazy gathers, in place of a `Pending`."""

    def __init__(self, a: Pending, b: Pending) -> None:
        self.ends = a, b
        self.src, self.shape, self.dtype = a.src, a.shape, torch.promote_types(a.dtype, b.dtype)
        self.requires_grad = a.requires_grad or b.requires_grad
        self.tied = False
        self.rows: Tensor | None = None

    def materialize(self) -> Tensor:
        a, b = self.ends
        if self.rows is None:
            for end in self.ends:
                if end.pristine:
                    end.miss("a product of features of both ends of an edge, which is not summed at once, needs both")
            with torch.set_grad_enabled(torch.is_grad_enabled() or self.requires_grad):
                self.rows = a.materialize() * b.materialize()
        return self.rows


class LazyProduct(LazyMessage):
    """What stands for a `_Product`."""

    pending: Any


class _Linked(torch.autograd.Function):
    """Ties a product into the autograd graph, as `lazy` ties a gather, for code that passes it on without a look."""

    @staticmethod
    def forward(ctx: Any, pending: _Product, *sources: Tensor) -> LazyProduct:
        ctx.save_for_backward(*sources)
        ctx.gathers = [(end.gather, end.index, end.dim) for end in pending.ends]
        pending.tied = True
        return LazyProduct.make(pending)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        def rows(*sources: Tensor) -> Tensor:
            a, b = (gather(t, index, dim) for t, (gather, index, dim) in zip(sources, ctx.gathers, strict=True))
            product: Tensor = a * b
            return product

        return (None, *gradients(rows, ctx.saved_tensors, grad))


def product(a: Pending, b: Pending) -> Any:
    """The product of two lazy gathers; NotImplemented unless they are those of the two ends of each edge."""
    i, j = aggregate.plain_index(a.index), aggregate.plain_index(b.index)
    if a.shape != b.shape or a.dim != 0 or b.dim != 0 or len(a.shape) not in (2, 3) or a.factors or b.factors:
        return NotImplemented
    if i is None or j is None or i._base is None or i._base is not j._base or a.src.device != b.src.device:
        return NotImplemented
    if i.dtype != j.dtype or i.storage_offset() == j.storage_offset():
        return NotImplemented
    a.check()
    b.check()
    a, b = _copy(a), _copy(b)
    pending = _Product(a, b)
    if (a.linked or b.linked) and pending.requires_grad and torch.is_grad_enabled():
        return _Linked.apply(pending, a.src, b.src)
    return LazyProduct.make(pending)


def _both_ends(a: Pending, b: Pending) -> bool:
    """Whether two gathers are of equal shape, and by the two rows of one edge_index."""
    if a.shape != b.shape or a.dim != 0 or b.dim != 0 or a.factors or b.factors or a.src.device != b.src.device:
        return False
    i, j = aggregate.plain_index(a.index), aggregate.plain_index(b.index)
    if i is None or j is None or i._base is None or i._base is not j._base or i.dtype != j.dtype:
        return False
    a.check()
    b.check()
    return bool(i.storage_offset() != j.storage_offset())


def _oriented(a: Pending, b: Pending) -> tuple[Graph, Pending, Pending]:
    """The graph that leads from the second of the gathers returned to the first."""
    i, j = aggregate.plain_index(a.index), aggregate.plain_index(b.index)
    if i.storage_offset() < j.storage_offset():  # row 1 of an edge_index holds its destinations, as a rule
        a, b, i = b, a, j
    return aggregate.graph_for(b, i, a.src.shape[0]), a, b


def _copy(p: Pending) -> Pending:
    """The same gather under the grad mode of now, which later changes of its messages in place do not reach."""
    src = p.src if torch.is_grad_enabled() else constant(p.src)
    return Pending(src, p.index, p.dim, p.gather, p.record, p.tally, p.linked)


def sum_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The sum of a product over its last dimension: a number per edge, and head."""
    call = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | kwargs
    dims = call.pop("dim", None)
    dims = [dims] if type(dims) is int else dims
    keep, x = call.pop("keepdim", False), call.pop("input")
    if call or len(args) > 3 or type(x) is not LazyProduct or type(dims) not in (list, tuple) or len(dims) != 1:
        return NotImplemented
    p: _Product = x.pending
    a, b = p.ends
    if dims[0] not in (-1, len(p.shape) - 1) or x.adopted() or p.rows is not None or not (a.pristine and b.pristine):
        return NotImplemented
    a.check()
    b.check()
    graph, a, b = _oriented(a, b)
    dtype = p.dtype
    if autocasts(p.src.device.type):  # which has a dtype of its own for sums, on some devices
        dtype = (a.src[:0] * b.src[:0]).sum(dim=-1).dtype
    out = sddmm(graph, a.src.to(dtype), b.src.to(dtype))
    a.record.fused["dot product"] += 1
    for end in (a, b):
        end.tally.fused += 1
    return out.unsqueeze(-1) if keep else out


#: Widest sum of both ends that is computed as attention scores are; wider ones are features, one of which may be idle.
MOST_HEADS = 16


def added(a: Pending, b: Pending) -> Any:
    """The sum of two lazy gathers of a number per head, at the two ends of each edge; written, being no larger."""
    if len(a.shape) != 2 or a.shape[1] > MOST_HEADS or a.dtype != b.dtype or not _both_ends(a, b):
        return NotImplemented
    graph, a, b = _oriented(a, b)
    out = sum_of_ends(graph, b.src, a.src)
    a.record.fused["sum of both ends"] += 1
    for end in (a, b):
        end.tally.fused += 1
    return out


class _Joined:
    """Lazy messages ``[E, H, C]`` as ``[E, H * C]``, in place of a `Pending`."""

    def __init__(self, heads: LazyMessage) -> None:
        p = heads.pending
        self.heads = heads
        self.src, self.shape, self.dtype = p.src, torch.Size((p.shape[0], p.shape[1:].numel())), p.dtype
        self.requires_grad, self.tied = p.requires_grad, False

    def materialize(self) -> Tensor:
        if self.heads.pending.pristine:
            self.heads.pending.miss("what follows the joining of heads needs the message of each edge")
        return self.heads.written().view(self.shape)


class LazyJoined(LazyMessage):
    """What stands for a `_Joined`."""

    pending: Any


def joined(heads: LazyMessage, sizes: tuple[int, ...]) -> Any:
    """Messages with one factor per head, their heads joined; NotImplemented where that is not what `sizes` says."""
    p = heads.pending
    if p.dim != 0 or len(p.shape) != 3 or p.linked or len(sizes) != 2 or p.shape.numel() == 0:
        return NotImplemented
    width = p.shape[1] * p.shape[2]
    if sizes not in ((p.shape[0], width), (-1, width), (p.shape[0], -1)):
        return NotImplemented
    return LazyJoined.make(_Joined(heads))


def heads_of(x: Any, dim: int) -> LazyMessage | None:
    """The ``[E, H, C]`` messages behind joined ones, where these are to be aggregated along their first dimension."""
    if type(x) is not LazyJoined or dim not in (0, -2) or x.adopted():
        return None
    return x.pending.heads if x.pending.heads.pending.pristine else None


__all__ = ["LazyJoined", "LazyProduct", "added", "heads_of", "joined", "product", "sum_product"]
