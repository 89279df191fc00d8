"""One opaque operator for ``torch.compile``: aggregation over a plain ``edge_index``.

Compiled code cannot look a graph up, so the look-up happens inside: the operator takes the index tensor itself, finds
or builds its `Graph` through `cache.graph_of`, and so does its backward. It must not be recorded in a CUDA graph,
whose replay would skip the look-up; it is tagged so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._native import accumulation_dtype
from .cache import graph_of
from .derivatives import _extremum_gradients, _heads
from .functional import sddmm, spmm
from .graph import Graph
from .normalize import gcn_norm

_NAME = "gnn_spmm_plugin::spmm_edge_index"
_COMMON = (
    "SymInt num_src, SymInt num_dst, bool reverse, str reduce, str tie, str policy, "
    "bool norm, bool loops, bool improved, ScalarType dtype"
)
_TAGS = tuple(t for t in (getattr(torch.Tag, "cudagraph_unsafe", None),) if t is not None)


def spmm_edge_index(
    x: Tensor,
    edge_index: Tensor,
    weight: Tensor | None,
    num_src: int,
    num_dst: int,
    *,
    reverse: bool = False,
    reduce: str = "sum",
    tie: str = "first",
    policy: str = "auto",
    norm: bool = False,
    loops: bool = False,
    improved: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`gnn_spmm_plugin.spmm` over ``edge_index``, as one operator that ``torch.compile`` and ``torch.export`` can see.

    Args:
        x: ``[num_src, F]``.
        edge_index: ``[2, E]`` int32 or int64; row 0 holds the sources, row 1 if `reverse`.
        weight: ``[E]``, or ``[E, H]``, or None; without gradient where `norm`.
        num_src: number of source nodes.
        num_dst: number of destination nodes.
        reverse: messages go from row 1 to row 0.
        reduce: as in `gnn_spmm_plugin.spmm`.
        tie: as there.
        policy: as there.
        norm: normalise as `gcn_norm` does.
        loops: its `add_self_loops`.
        improved: as there.
        dtype: dtype of the normalised weights; that of `x` unless given.

    Returns:
        ``[num_dst, F]``. Differentiable once, by `x` and `weight`.
    """
    args = (num_src, num_dst, reverse, reduce, tie, policy, norm, loops, improved, dtype or x.dtype)
    out: Tensor = _forward(x, edge_index, weight, *args)[0]
    return out


def _graph(edge_index: Tensor, num_src: int, num_dst: int, reverse: bool) -> Graph:
    src, dst = edge_index[int(reverse)], edge_index[int(not reverse)]
    return graph_of(dst, src, num_dst, num_src)


def _run(x: Tensor, weight: Tensor | None, graph: Graph, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    reduce, tie, policy, norm, loops, improved, dtype = args
    if norm:
        a = gcn_norm(graph, weight, dtype, loops, improved)
        if reduce == "sum":
            return a.product(x, dtype=dtype, policy=policy), x.new_empty(0, dtype=torch.int64)
        graph, weight = a.as_edges(dtype)
    if reduce in ("max", "min"):
        out, arg = spmm(graph, x, weight, reduce, tie=tie, policy=policy, return_arg=True)
        return out, arg
    out = spmm(graph, x, weight, reduce, policy=policy)
    assert isinstance(out, Tensor)
    return out, x.new_empty(0, dtype=torch.int64)


@torch.library.custom_op(
    _NAME,
    mutates_args=(),
    schema=f"(Tensor x, Tensor edge_index, Tensor? weight, {_COMMON}) -> (Tensor, Tensor)",
    tags=_TAGS,
)
def _forward(
    x: Tensor, edge_index: Tensor, weight: Tensor | None, num_src: int, num_dst: int, reverse: bool, *args: Any
) -> tuple[Tensor, Tensor]:
    return _run(x, weight, _graph(edge_index, num_src, num_dst, reverse), args)


@_forward.register_fake
def _(
    x: Tensor, edge_index: Tensor, weight: Tensor | None, num_src: int, num_dst: int, reverse: bool, *args: Any
) -> tuple[Tensor, Tensor]:
    reduce, _tie, _policy, norm, _loops, _improved, dtype = args
    if norm:
        dtype = torch.promote_types(x.dtype, dtype)
    else:
        dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    shape = (num_dst, x.shape[1])
    return (
        x.new_empty(shape, dtype=dtype),
        x.new_empty(shape if reduce in ("max", "min") else (0,), dtype=torch.int64),
    )


@torch.library.custom_op(
    f"{_NAME}_backward",
    mutates_args=(),
    schema=(
        "(Tensor grad, Tensor x, Tensor edge_index, Tensor? weight, Tensor? picks, bool need_x, bool need_weight, "
        f"{_COMMON}) -> (Tensor, Tensor)"
    ),
    tags=_TAGS,
)
def _backward(
    grad: Tensor,
    x: Tensor,
    edge_index: Tensor,
    weight: Tensor | None,
    picks: Tensor | None,
    need_x: bool,
    need_weight: bool,
    num_src: int,
    num_dst: int,
    reverse: bool,
    *args: Any,
) -> tuple[Tensor, Tensor]:
    graph = _graph(edge_index, num_src, num_dst, reverse)
    reduce, tie, _policy, norm, loops, improved, dtype = args
    wide, factor = x, weight
    if norm:  # its weights are constants
        need_weight = False
        a = gcn_norm(graph, weight, dtype, loops, improved)
        if reduce == "sum":
            back = a.transposed.product(grad, dtype=dtype).to(x.dtype) if need_x else x.new_empty(0)
            return back, x.new_empty(0)
        graph, factor = a.as_edges(dtype)
    if factor is not None and factor.dtype != x.dtype:
        common = torch.promote_types(x.dtype, factor.dtype)
        wide, factor = x.to(common), factor.to(common)
    gx: Tensor | None
    if reduce in ("sum", "mean"):
        gx, gw = _linear_gradients(graph, grad, wide, factor, reduce, need_x, need_weight)
    else:
        assert picks is not None
        if tie == "first":
            picks = picks.to(graph.col.dtype)
        needs = need_x, need_weight
        gx, gw = _extremum_gradients(graph._core, graph._flipped, wide, factor, picks, grad, needs, tie)
    return (
        x.new_empty(0) if gx is None else gx.to(x.dtype),
        x.new_empty(0) if gw is None or weight is None else gw.to(weight.dtype),
    )


def _linear_gradients(
    graph: Graph, grad: Tensor, x: Tensor, weight: Tensor | None, reduce: str, need_x: bool, need_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    if reduce == "mean":
        inverse = graph._csr.inverse_degree(accumulation_dtype(grad.dtype))
        grad = (grad * inverse.unsqueeze(1)).to(grad.dtype)
    gx: Any = None
    gw = None
    if need_x:
        gx = spmm(graph.T, grad, weight)
    if need_weight:
        heads = _heads(weight)
        a, b = (t.view(t.shape[0], heads, -1) if heads else t for t in (grad.contiguous(), x.contiguous()))
        gw = sddmm(graph, a, b)
    return gx, gw


@_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    edge_index: Tensor,
    weight: Tensor | None,
    picks: Tensor | None,
    need_x: bool,
    need_weight: bool,
    *args: Any,
) -> tuple[Tensor, Tensor]:
    return (
        x.new_empty(x.shape if need_x else (0,)),
        x.new_empty(0) if weight is None or not need_weight else weight.new_empty(weight.shape),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, edge_index, weight, *rest = inputs
    out, arg = output
    reduce, tie = rest[3], rest[4]
    picks = None
    if reduce in ("max", "min"):
        picks = arg if tie == "first" else out
    ctx.save_for_backward(x, edge_index, weight, picks)
    ctx.mark_non_differentiable(arg)
    ctx.rest = rest


def _autograd(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    x, edge_index, weight, picks = ctx.saved_tensors
    need_x, _, need_weight = ctx.needs_input_grad[:3]
    norm = ctx.rest[6]
    if norm and need_weight:
        raise RuntimeError("spmm_edge_index has no gradient for weights that it normalises; normalise them outside")
    gx, gw = _backward(grad, x, edge_index, weight, picks, need_x, need_weight, *ctx.rest)
    return gx if need_x else None, None, gw if need_weight else None, *[None] * len(ctx.rest)


_forward.register_autograd(_autograd, setup_context=_setup)

__all__ = ["spmm_edge_index"]
