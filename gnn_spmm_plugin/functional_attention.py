"""Attention: a score for each edge, a softmax over the edges into each node, the weighted sum.

For layers and integrations; scores are made of what stands at the two ends of an edge.
Nothing that is made, forward or backward, has the size of the messages, ``E x H x C``: a sum of two node values is the
dot product ``<[dst, 1], [1, src]>``, whose derivatives are sums over neighbours, and what has no such form (GATv2) has
kernels of its own, which compute the messages again in the backward.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import _native
from .csr import Core, Csr, per_edge_rows
from .derivatives import _half, _hides_grad, _needs_grad, _rows_first, _transformed
from .functional import edge_softmax, sddmm, spmm
from .graph import Graph
from .plan import _lengths

#: Ways of scoring an edge s -> d, for each head; `given` holds their operands, those of the sources first:
#:
#: - ``"sum"``: ``act(src[s] + dst[d])`` of ``[num_src, H]`` and, unless there is one operand, ``[num_dst, H]``: GAT.
#: - ``"pair"``: ``<att, act(src[s] + dst[d])>`` of ``[num_src, H, C]``, ``[num_dst, H, C]``, ``[H, C]``: GATv2.
#: - ``"dot"``: ``act(scale * <src[s], dst[d]>)`` of ``[num_src, H, C]`` and ``[num_dst, H, C]``: transformers.
#: - ``"gated"``: ``act((a[s] + b[d]) * sigmoid(<src[s], dst[d]>))`` of ``[num_src, H]``, ``[num_dst, H]``, and the
#:   features as for ``"dot"``: SuperGAT.
SCORES = ("sum", "pair", "dot", "gated")
_OPERANDS = {"sum": (1, 2), "pair": (3,), "dot": (2,), "gated": (4,)}


def attend(
    graph: Graph,
    x: Tensor,
    score: str,
    given: tuple[Tensor, ...],
    *,
    slope: float | None = None,
    scale: float = 1.0,
    dropout: float = 0.0,
    keep: Tensor | None = None,
    dtype: torch.dtype | None = None,
    policy: str = "auto",
) -> Tensor:
    """``sum over e = (s -> d) of dropout(softmax(score))[e, h] * x[s, h]``, a softmax over the edges into each d.

    The one function that attention layers end in; a kernel that fuses scores, softmax and sum belongs here.

    Args:
        graph: the graph; weights that it carries are not used.
        x: ``[num_src, H, C]``.
        score: one of `SCORES`.
        given: its operands.
        slope: act is a leaky ReLU of this negative slope; None: nothing.
        scale: factor of dot products.
        dropout: probability with which an edge's coefficient becomes 0, the others grow by ``1 / (1 - dropout)``. Drawn
            as ``F.dropout`` of ``[E, H]`` coefficients in the caller's order of the edges.
        keep: instead, the factors themselves, ``[E', H]`` in that order, of which the first E are used.
        dtype: of scores and softmax; what the operands promote to, unless given.
        policy: as in `gnn_spmm_plugin.spmm`.

    Returns:
        ``[num_dst, H, C]``. Differentiable any number of times by `x` and `given`.

    Raises:
        ValueError: `score` is none of `SCORES`, or has other operands.
    """
    _check_score(score, given)
    rows = in_row_order(graph)
    p = edge_softmax(rows, scores(rows, score, given, slope, scale, dtype))
    if dropout > 0:
        keep = F.dropout(torch.ones_like(p.detach()), dropout)
    if keep is not None:
        perm = graph.perm
        p = p * (keep[: graph.num_edges] if perm is None else per_edge_rows(keep, perm))
    out = spmm(rows, x, p, policy=policy)
    assert isinstance(out, Tensor)
    return out


def coefficients(
    graph: Graph,
    score: str,
    given: tuple[Tensor, ...],
    *,
    slope: float | None = None,
    scale: float = 1.0,
    dropout: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``[E, H]``: what `attend` multiplies messages with, in the caller's order of the edges."""
    return F.dropout(edge_softmax(graph, scores(graph, score, given, slope, scale, dtype)), dropout)


def _check_score(score: str, given: tuple[Tensor, ...]) -> None:
    if score not in SCORES:
        raise ValueError(f"score must be one of {', '.join(SCORES)}; got {score!r}")
    if len(given) not in _OPERANDS[score]:
        counts = " or ".join(map(str, _OPERANDS[score]))
        raise ValueError(f"score {score!r} takes {counts} operands (see SCORES), got {len(given)}")


def scores(
    graph: Graph,
    score: str,
    given: tuple[Tensor, ...],
    slope: float | None = None,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``[E, H]`` scores, see `SCORES` and `attend`; edge order as the graph was made."""
    if dtype is None:
        dtype = functools.reduce(torch.promote_types, (t.dtype for t in given))
    given = tuple(t.to(dtype) for t in given)
    if score == "pair":
        src, dst, att = given
        assert slope is not None
        return _pair(graph, src, dst, att, slope)
    if score == "sum":
        out = sum_of_ends(graph, *given)
    elif score == "dot":
        src, dst = given
        out = sddmm(graph, dst, src)
        out = out if scale == 1.0 else out * scale
    else:
        a, b, src, dst = given
        out = sum_of_ends(graph, a, b) * sddmm(graph, dst, src).sigmoid()
    return out if slope is None else F.leaky_relu(out, slope)


def sum_of_ends(graph: Graph, src: Tensor, dst: Tensor | None = None) -> Tensor:
    """``src[s] + dst[d]`` of each edge s -> d, ``[E, H]``, from ``[num_src, H]`` and ``[num_dst, H]`` (None: zeros)."""
    if dst is None:
        return sddmm(graph, src.new_ones(graph.num_dst, src.shape[1], 1), src.unsqueeze(2))
    if torch.compiler.is_compiling() or _transformed() or _hides_grad(src, dst) or not _needs_grad(src, dst):
        return sddmm(graph, torch.stack([dst, torch.ones_like(dst)], 2), torch.stack([torch.ones_like(src), src], 2))
    return _SumOfEnds.apply(src, dst, graph._core, graph._flipped)  # type: ignore[no-any-return]


class _SumOfEnds(torch.autograd.Function):
    """The same, going back with plain sums where the general form takes weighted ones of twice the width."""

    @staticmethod
    def forward(ctx: Any, src: Tensor, dst: Tensor, core: Core, flipped: bool) -> Tensor:
        ctx.form = core, flipped, src.dtype, dst.dtype
        return sum_of_ends(Graph._make(core, flipped), src, dst)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        core, flipped, *dtypes = ctx.form
        sides = (not flipped, flipped)
        grads: list[Tensor | None] = [
            _row_sums(core, side, grad).to(dtype) if need else None
            for side, need, dtype in zip(sides, ctx.needs_input_grad, dtypes, strict=False)
        ]
        return *grads, None, None


def _row_sums(core: Core, flipped: bool, per_edge: Tensor) -> Tensor:
    """Sums of ``[E, H]`` over the entries of each row of one direction."""
    if _hides_grad(per_edge) or _needs_grad(per_edge, None):
        graph = Graph._make(core, flipped)
        out = spmm(graph, per_edge.new_ones(graph.num_src, per_edge.shape[1], 1), per_edge)
        assert isinstance(out, Tensor)
        return out.squeeze(2)
    csr = core.half(flipped)
    ids = csr.perm
    if ids is None:
        ids = torch.arange(per_edge.shape[0], dtype=csr.rowptr.dtype, device=per_edge.device)
    return _sum_rows(csr.rowptr, ids, per_edge)


def _sum_rows(rowptr: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """Sums of the `rows` that `ids` names, by the kernel of unweighted sums."""
    long_row, chunk = _lengths(rowptr.shape[0] - 1, ids.shape[0])
    return _native.row_sum(rowptr, ids, _rows_first(rows), long_row << 32 | chunk)  # type: ignore[no-any-return]


# ---------------------------------------------------------------------- edges in the order of rows


def in_row_order(graph: Graph) -> Graph:
    """`graph` with its edges numbered row by row, so that what is made per edge needs no permutation; kept with it."""
    graph._core.while_tracing(_prepare_rows, graph._flipped)
    core = graph._core.derived.get(f"rows{graph._flipped:d}")
    return graph.with_weight(None) if core is None else Graph._make(core)


def _prepare_rows(core: Core, flipped: bool) -> bool:
    name = f"rows{flipped:d}"
    csr = core.half(flipped)
    if csr.perm is not None and core.derived.get(name) is None:
        with _disable_current_modes():
            setattr(core.derived, name, Core(Csr(csr.rowptr, csr.col, None, csr.num_cols)))
    return True


# ---------------------------------------------------------------------- GATv2: <att, act(src[s] + dst[d])>


def _pair(graph: Graph, src: Tensor, dst: Tensor, att: Tensor, slope: float) -> Tensor:
    core, flipped = graph._core, graph._flipped
    if _transformed() or any(map(_hides_grad, (src, dst, att))):
        return _pair_plain(core, flipped, src, dst, att, slope)
    if any(_needs_grad(t, None) for t in (src, dst, att)):
        return _Pair.apply(src, dst, att, core, flipped, slope)  # type: ignore[no-any-return]
    return _pair_raw(core, flipped, src, dst, att, slope)


def _pair_plain(core: Core, flipped: bool, src: Tensor, dst: Tensor, att: Tensor, slope: float) -> Tensor:
    """In plain torch, of size E x H x C: for functional transforms and second derivatives."""
    s, d = Graph._make(core, flipped).edge_index()
    return (F.leaky_relu(src.index_select(0, s) + dst.index_select(0, d), slope) * att).sum(2)


def _pair_raw(core: Core, flipped: bool, src: Tensor, dst: Tensor, att: Tensor, slope: float) -> Tensor:
    if att.numel() == 0:
        return src.new_zeros(core.num_edges, att.shape[0])
    csr = _half(core, flipped)
    given = _rows_first(dst.flatten(1)), _rows_first(src.flatten(1)), att.contiguous()
    return _native.pair_score(csr.rowptr, csr.col, csr.perm, *given, slope)  # type: ignore[no-any-return]


def _pair_side(
    core: Core, flipped: bool, grad: Tensor, own: Tensor, other: Tensor, att: Tensor, slope: float
) -> tuple[Tensor, Tensor]:
    """The gradient of `own`, the rows of one direction, and the part of att's that comes of it, ``[H * C]``."""
    csr = core.half(flipped)
    given = _rows_first(own.flatten(1)), _rows_first(other.flatten(1)), att, slope
    grad_own, part = _native.pair_gradient(csr.rowptr, csr.col, csr.perm, grad, *given)
    return grad_own.view_as(own), part


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, src: Tensor, dst: Tensor, att: Tensor, core: Core, flipped: bool, slope: float) -> Tensor:
        ctx.save_for_backward(src, dst, att)
        ctx.form = core, flipped, slope
        return _pair_raw(core, flipped, src, dst, att, slope)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        core, flipped, slope = ctx.form
        given, needed = ctx.saved_tensors, ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            apart = [t.view_as(t) for t in given]  # two may be one tensor, each with a gradient of its own
            again = _pair_plain(core, flipped, apart[0], apart[1], apart[2], slope)
            wanted = [t for t, need in zip(apart, needed, strict=True) if need]
            found = iter(torch.autograd.grad(again, wanted, grad, create_graph=True))
            return *(next(found) if need else None for need in needed), None, None, None
        if given[2].numel() == 0:
            return *(torch.zeros_like(t) for t in given), None, None, None
        src, dst, att = given
        grad, att = grad.contiguous(), att.contiguous()
        grad_src = grad_dst = grad_att = None
        parts: list[Tensor] = []
        if needed[1] or needed[2]:
            grad_dst, part = _pair_side(core, flipped, grad, dst, src, att, slope)
            parts.append(part)
        if needed[0] or needed[2]:
            grad_src, part = _pair_side(core, not flipped, grad, src, dst, att, slope)
            parts.append(part)
        if needed[2]:
            # sum of grad * act(a + b) = sum of grad * act'(a + b) * (a + b), added up by a and by b
            grad_att = (parts[0] + parts[1]).view_as(att).to(att.dtype)
        return grad_src, grad_dst, grad_att, None, None, None


__all__ = ["SCORES", "attend", "coefficients", "in_row_order", "scores", "sum_of_ends"]
