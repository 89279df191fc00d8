"""The differentiable operators: `spmm`, `sddmm` and `edge_softmax`. What they compute is in `derivatives`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import _native, reference
from .derivatives import (
    SCATTER_TIE,
    _apply_linear,
    _dot,
    _EdgeSoftmax,
    _Extremum,
    _extremum_raw,
    _half,
    _is_batched,
    _linear,
    _needs_grad,
    _plain,
    _plan_by_policy,
    _row_sum,
    _transformed,
    _unwrap,
)
from .graph import Graph, check_weight
from .kernels import DTYPES, REDUCES
from .plan import Plan, default_plan
from .policy import POLICIES

TIES = ("first", "split")
LINEAR = ("sum", "mean")


def _plain_spmm(
    graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, tie: str, return_arg: bool
) -> Tensor | tuple[Tensor, Tensor]:
    if weight is None:
        graph = graph.with_weight(None)
    out, arg = _plain(reference.spmm, graph, x, weight, reduce, tie)
    out = out.to(x.dtype)
    return (out, arg) if return_arg else out


def _check_graph(graph: Any, what: str) -> None:
    if not isinstance(graph, Graph):
        how = (
            "from_dgl(graph)" if type(graph).__module__.startswith("dgl.") else "from_edge_index(edge_index, num_nodes)"
        )
        raise TypeError(
            f"{what}: the first argument must be a gnn_spmm_plugin.Graph, got {type(graph).__name__}; make one with "
            f"Graph.{how}"
        )


def _check_features(graph: Graph, x: Any, rows: int, what: str, side: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in DTYPES:
        raise TypeError(
            f"{what} must be float32, float64, float16 or bfloat16, got {x.dtype}; "
            + ("use its real and imaginary parts" if x.is_complex() else "convert it with .float() or .double()")
        )
    if x.dim() == 0 or x.shape[0] != rows:
        hint = ""
        if side != "edges" and x.dim() and x.shape[0] == graph.num_src + graph.num_dst - rows:
            hint = "; did you mean the transposed graph, graph.T?"
        raise ValueError(f"{what} must have one row for each of the graph's {rows} {side}, got {list(x.shape)}{hint}")
    if x.device != graph.device:
        raise ValueError(f"{what} is on {x.device} but the graph on {graph.device}; use graph.to(x.device)")
    if x.layout != torch.strided:
        raise TypeError(f"{what} must be a dense tensor, got layout {x.layout}; convert it with .to_dense()")


def spmm(
    graph: Graph,
    x: Tensor,
    weight: Tensor | None = None,
    reduce: str = "sum",
    *,
    tie: str = "first",
    return_arg: bool = False,
    plan: Plan | None = None,
    policy: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Aggregates the features of each destination's neighbours, without writing a message for each edge.

    ``out[d] = reduce over edges e = (s -> d) of weight[e] * x[s]``; a destination without edges gets 0. Equal, for
    ``reduce="sum"``, to ``torch.zeros(num_dst, F).index_add(0, dst, weight[:, None] * x[src])``. Differentiable by `x`
    and `weight`, any number of times; bitwise reproducible.

    Args:
        graph: the graph; rows are destinations.
        x: ``[num_src, *F]`` features (any number of trailing dimensions, any strides), float32, float64, float16 or
            bfloat16. Sums are accumulated in float32 at least and rounded once.
        weight: ``[E]`` or, one for each head, ``[E, H]`` with ``x.shape[1] == H``; edge order as the graph was made.
            None: the graph's own weights, where it has any.
        reduce: ``"sum"``, ``"mean"`` (divides by the number of edges, not by the sum of their weights), ``"max"`` or
            ``"min"`` (NaN wins, in its own column).
        tie: for max and min, who gets the gradient where several edges attain the extremum: ``"first"`` in the caller's
            order, or ``"split"`` evenly.
        return_arg: for max and min, also return the winning edge.
        plan: what `gnn_spmm_plugin.plan` prepared for this graph; None: the graph's own, kept with it.
        policy: how a plan is chosen where none is given, see `gnn_spmm_plugin.plan`.

    Returns:
        ``[num_dst, *F]`` of dtype ``torch.result_type(x, weight)``. With `return_arg`, also ``[num_dst, *F]`` int64:
        the first winning edge in the caller's order, -1 where a row is empty.

    Raises:
        TypeError: integer, boolean or complex features, or something that is no tensor.
        ValueError: shapes or devices do not fit, or an argument is none of its choices.
    """
    # The commonest call in as few steps as Python allows; all others, wrong ones too, go the long way.
    if (
        plan is None
        and weight is None
        and isinstance(graph, Graph)
        and isinstance(x, Tensor)
        and not torch.compiler.is_compiling()
    ):
        core, flipped = graph._core, graph._flipped
        csr = core.transpose if flipped else core.csr
        shape = x.shape
        if (
            csr is not None
            and len(shape) == 2
            and shape[0] == csr.num_cols
            and x.dtype in DTYPES
            and x.device == core.device
            and x.layout is torch.strided
            and reduce in LINEAR
            and policy == "auto"
            and tie in TIES
            and not return_arg
            and graph._weight is None
            and not _transformed()
            and not _is_batched(x)
        ):
            p = csr.plan
            if p is None or not p.settled:
                p = default_plan(core, csr)
            if x.requires_grad and torch.is_grad_enabled():
                return _apply_linear(_unwrap(x), None, core, flipped, "rows" if reduce == "mean" else None, p)
            if p.items is None and p.format is None and x.is_contiguous():
                try:
                    return _native.row_sum_eager(csr.rowptr, csr.col, x, p.lengths, reduce == "mean")  # type: ignore[no-any-return]
                except RuntimeError as error:
                    raise _native.translated(error) from None
            return _row_sum(p.moved or csr, p, x, reduce == "mean")
    _check_graph(graph, "spmm")
    _check_features(graph, x, graph.num_src, "x", "source nodes")
    if weight is None:
        weight = graph._weight
    elif weight is not graph._weight:
        check_weight(graph, weight)
    if reduce not in REDUCES:
        raise ValueError(f"reduce must be one of {', '.join(REDUCES)}; got {reduce!r}")
    if tie not in TIES and tie != SCATTER_TIE:
        raise ValueError(f"tie must be one of {', '.join(TIES)}; got {tie!r}")
    if return_arg and reduce not in ("max", "min"):
        raise ValueError(f"return_arg needs reduce='max' or 'min', got {reduce!r}")
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}; got {policy!r}")
    if weight is not None:
        if weight.dim() == 2 and (x.dim() < 2 or x.shape[1] != weight.shape[1]):
            raise ValueError(
                f"weight of shape [num_edges, heads] = {list(weight.shape)} needs x of shape [num_src, heads, ...], "
                f"got {list(x.shape)}"
            )
        if weight.dtype != x.dtype:
            dtype = torch.promote_types(x.dtype, weight.dtype)
            x, weight = x.to(dtype), weight.to(dtype)
        if weight.dim() == 2 and weight.shape[1] == 0:
            x, weight = x + weight.sum().to(x.dtype), None  # no heads, no columns: a gradient, though empty, flows
    if _transformed():
        return _plain_spmm(graph, x, weight, reduce, tie, return_arg)
    shape = x.shape[1:]
    flat = x if x.dim() == 2 else (x.unsqueeze(1) if x.dim() == 1 else x.reshape(x.shape[0], math.prod(x.shape[1:])))
    core, flipped = graph._core, graph._flipped
    if plan is not None:
        _check_plan(plan, graph, flat, reduce)
    elif policy != "auto":
        plan = _plan_by_policy(core, flipped, flat.shape[1], flat.dtype, reduce, policy)
    if reduce in ("sum", "mean"):
        return _shaped(_linear(core, flipped, flat, weight, "rows" if reduce == "mean" else None, plan), shape)
    if _needs_grad(flat, weight):
        out, arg = _Extremum.apply(
            flat, weight, core, flipped, reduce == "min", tie, plan, return_arg or tie == "first"
        )
    else:
        out, arg = _extremum_raw(core, flipped, flat, weight, reduce == "min", plan, return_arg)
    return (_shaped(out, shape), _shaped(arg, shape).long()) if return_arg else _shaped(out, shape)


def _shaped(out: Tensor, shape: torch.Size) -> Tensor:
    """``[N, F]`` as ``[N, *shape]``; no view where it has that shape: a view changed in place costs autograd copies."""
    return out if len(shape) == 1 else out.view(out.shape[0], *shape)


def _check_plan(plan: Plan, graph: Graph, x: Tensor, reduce: str) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must come from gnn_spmm_plugin.plan, got {type(plan).__name__}")
    if plan.owner() is not graph._csr:
        raise ValueError("the plan was made for another graph; make one with gnn_spmm_plugin.plan(graph, width)")
    made, used = plan.request, (x.shape[1], x.dtype, reduce)
    if made is not None and made != used:
        raise ValueError(f"the plan was made for (width, dtype, reduce) = {made}, but used with {used}")


def sddmm(graph: Graph, a_dst: Tensor, b_src: Tensor) -> Tensor:
    """Dot product of the features at the two ends of each edge: ``out[e] = <a_dst[d], b_src[s]>`` for e = (s -> d).

    Args:
        graph: the graph.
        a_dst: ``[num_dst, F]``, or ``[num_dst, H, F]`` for one product per head.
        b_src: ``[num_src, F]`` or ``[num_src, H, F]``.

    Returns:
        ``[E]`` or ``[E, H]`` in the caller's edge order, of dtype ``torch.result_type(a_dst, b_src)``, accumulated in
        float32 at least. Differentiable any number of times.

    Raises:
        TypeError, ValueError: as `spmm`.
    """
    _check_graph(graph, "sddmm")
    _check_features(graph, a_dst, graph.num_dst, "a_dst", "destination nodes")
    _check_features(graph, b_src, graph.num_src, "b_src", "source nodes")
    if a_dst.dim() not in (2, 3) or a_dst.shape[1:] != b_src.shape[1:]:
        raise ValueError(
            "a_dst and b_src must have shapes [num_dst, F] and [num_src, F], or [num_dst, H, F] and [num_src, H, F]; "
            f"got {list(a_dst.shape)} and {list(b_src.shape)}"
        )
    dtype = torch.promote_types(a_dst.dtype, b_src.dtype)
    a_dst, b_src = a_dst.to(dtype), b_src.to(dtype)
    if _transformed():
        return _plain(reference.sddmm, graph, a_dst, b_src).to(dtype)  # type: ignore[no-any-return]
    if a_dst.dim() == 2:
        return _dot(graph._core, graph._flipped, a_dst, b_src, 0)
    heads = a_dst.shape[1]
    if heads == 0:
        return a_dst.new_zeros(graph.num_edges, 0) + (a_dst.sum() + b_src.sum())
    return _dot(graph._core, graph._flipped, a_dst.flatten(1), b_src.flatten(1), heads)


def edge_softmax(graph: Graph, logits: Tensor) -> Tensor:
    """Softmax over the edges into each destination.

    Args:
        graph: the graph.
        logits: ``[E]`` or ``[E, H]`` in the caller's edge order.

    Returns:
        The same shape and dtype; the entries of each destination (and head) add up to 1. Differentiable any number of
        times.

    Raises:
        TypeError, ValueError: `logits` is not floating point, not on the graph's device, or of another length.
    """
    _check_graph(graph, "edge_softmax")
    _check_features(graph, logits, graph.num_edges, "logits", "edges")
    if logits.dim() not in (1, 2):
        raise ValueError(f"logits must have shape [num_edges] or [num_edges, heads], got {list(logits.shape)}")
    if _transformed():
        return _plain(reference.edge_softmax, graph, logits).to(logits.dtype)  # type: ignore[no-any-return]
    if logits.dim() == 2 and logits.shape[1] == 0:
        return logits.softmax(0)
    logits = logits.contiguous()
    if _needs_grad(logits, None):
        return _EdgeSoftmax.apply(logits, graph._core, graph._flipped)  # type: ignore[no-any-return]
    csr = _half(graph._core, graph._flipped)
    return _native.edge_softmax(csr.rowptr, csr.perm, logits)  # type: ignore[no-any-return]
