"""A graph convolution with its linear layers, forward and backward, as one step of autograd.

``out = A x W' + own R' + b``, with A a reduction over neighbours, for layers of integrations. Of a small graph, a
mini-batch above all, the host decides how long a step takes: one node in place of six, whose backward adds up the two
ways back to the features in the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ._native import accumulation_dtype
from .csr import Core
from .derivatives import (
    _TRANSPOSED,
    _extremum_gradients,
    _extremum_raw,
    _is_batched,
    _linear,
    _row_sum,
    _rows_first,
    _sum_raw,
    _transformed,
    _transposes_quickly,
    _unwrap,
)
from .functional_aggregate import _aggregate, _Form, _vector
from .graph import Graph
from .plan import default_plan

_O = Tensor | None


class _Shape(NamedTuple):
    """What a convolution is besides its tensors.

    Attributes:
        core, flipped: the graph, or its transpose.
        mean: what `_Form` calls it; None for sums and extrema.
        extremum: ``"max"`` or ``"min"``, or None.
        tie: as in `gnn_spmm_plugin.spmm`, for maxima and minima.
        first: multiply by the weight before the aggregation, which must be linear then.
    """

    core: Core
    flipped: bool
    mean: str | None
    extremum: str | None
    tie: str
    first: bool

    def aggregated(self, x: Tensor, scale: _O, loop: _O, added: _O = None, bias: _O = None) -> Tensor:
        """``scale * A (scale * x) + loop * x + added + bias``, for a linear A, where nobody differentiates it."""
        return _sum_raw_of(self.core, self.flipped, self.mean, x, scale, loop, added, bias)

    def back(self, grad: Tensor, scale: _O, loop: _O, added: _O = None) -> Tensor:
        """The same by the transpose of A, without a bias; differentiable."""
        mean, flipped = _TRANSPOSED[self.mean], not self.flipped
        if not torch.is_grad_enabled():
            return _sum_raw_of(self.core, flipped, mean, grad, scale, loop, added, None)
        if scale is None and loop is None and added is None:
            return _linear(self.core, flipped, grad, None, mean)
        form = _Form(self.core, flipped, loop is not None, mean, False, grad.dtype, None)
        return _aggregate(form, (grad, None, added, loop, None, scale, scale))


def _sum_raw_of(
    core: Core, flipped: bool, mean: str | None, x: Tensor, scale: _O, loop: _O, added: _O, bias: _O
) -> Tensor:
    csr = core.half(flipped)
    plan = csr.plan
    if plan is None or not plan.settled:
        plan = default_plan(core, csr)
    csr = plan.moved or csr
    x, src_scale = _rows_first(x), scale
    if mean == "cols":
        src_scale = core.half(not flipped).inverse_degree(accumulation_dtype(x.dtype))
    own = added if loop is None else x
    if own is None and bias is None and src_scale is None:
        return _row_sum(csr, plan, x, mean == "rows")
    return _sum_raw(csr, plan, x, None, src_scale, scale, mean == "rows", own, loop, bias, False, x.dtype)


def convolve(
    graph: Graph,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    reduce: str,
    *,
    own: Tensor | None = None,
    root: Tensor | None = None,
    scale: Tensor | None = None,
    loop: Tensor | None = None,
    tie: str = "first",
    first: bool = False,
) -> Tensor | None:
    """``(scale * reduce(scale * x) + loop * x) @ weight.t() + own @ root.t() + bias``, each part where it is given.

    Differentiable by all but `scale` and `loop`, any number of times. For callers that know that their arguments fit,
    and under no functional transform, nor while torch.compile traces: then, None.

    Args:
        graph: the graph; weights that it carries are not used.
        x: ``[num_src, F]``.
        weight: ``[G, F]`` of the dtype of `x`, as every tensor here but `scale` and `loop`.
        bias: ``[G]``.
        reduce: as in `gnn_spmm_plugin.spmm`.
        own: ``[num_dst, F']``, which may be `x`.
        root: ``[G, F']``; given if `own` is.
        scale: ``[N]`` constants, for a sum over a square graph.
        loop: ``[N]`` or ``[1]`` constants; not together with `root`.
        tie: as in `gnn_spmm_plugin.spmm`.
        first: multiply by `weight` before the aggregation, a sum or mean.

    Returns:
        ``[num_dst, G]``.
    """
    if torch.compiler.is_compiling() or _transformed() or _is_batched(x):
        return None
    own = None if own is None or own is x else _unwrap(own)
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    scale, loop = _vector(scale, acc), _vector(loop, acc)
    return convolve_unchecked(
        graph, x, weight, bias, reduce, own=own, root=root, scale=scale, loop=loop, tie=tie, first=first
    )


def convolve_unchecked(
    graph: Graph,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    reduce: str,
    *,
    own: Tensor | None = None,
    root: Tensor | None = None,
    scale: Tensor | None = None,
    loop: Tensor | None = None,
    tie: str = "first",
    first: bool = False,
) -> Tensor:
    """`convolve` for callers that know that it does not return None; `own` is None also where it is `x`.

    `scale` and `loop` are of the dtype of sums.
    """
    mean, extremum = _REDUCES[reduce]
    shape = _Shape(graph._core, graph._flipped, mean, extremum, tie, first)
    if torch.is_grad_enabled():
        trains = weight.requires_grad or x.requires_grad  # as nearly always
        for t in () if trains else (bias, own, root):
            trains |= t is not None and t.requires_grad
        if trains:
            return _apply_convolution(shape, _unwrap(x), weight, bias, own, root, scale, loop)[0]
    return _convolve_raw(shape, x, weight, bias, own, root, scale, loop, False)[0]


#: What `_Shape` calls a reduction.
_REDUCES = {"sum": (None, None), "mean": ("rows", None), "max": (None, "max"), "min": (None, "min")}


def _convolve_raw(
    shape: _Shape, x: Tensor, weight: Tensor, bias: _O, own: _O, root: _O, scale: _O, loop: _O, trains_x: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The result; where the aggregation came first, its own; and where that is an extremum, the winning edges."""
    if shape.first:
        added = None if root is None else torch.mm(x if own is None else own, root.t())
        if bias is not None and bias.dtype != torch.float32 and bias.dtype != torch.float64:
            bias = bias.to(torch.float32)
        return shape.aggregated(torch.mm(x, weight.t()), scale, loop, added, bias), None, None
    arg = None
    if shape.extremum is None:
        aggregated = shape.aggregated(x, scale, loop)
    else:
        by_first = trains_x and shape.tie == "first"
        found = _extremum_raw(shape.core, shape.flipped, x, None, shape.extremum == "min", None, by_first)
        aggregated, arg = found[0], found[1] if by_first else None
    out = F.linear(aggregated, weight, bias)
    return out if root is None else out.addmm_(x if own is None else own, root.t()), aggregated, arg


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shape: _Shape, x: Tensor, weight: Tensor, bias: _O, own: _O, root: _O, scale: _O, loop: _O
    ) -> tuple[Tensor, Tensor | None]:
        _, by_x, by_weight, _, by_own, by_root, _, _ = ctx.needs_input_grad
        if (by_x or (shape.first and by_weight)) and _transposes_quickly(shape.core, x):
            shape.core.half(not shape.flipped)
        out, aggregated, arg = _convolve_raw(shape, x, weight, bias, own, root, scale, loop, by_x)
        extremum = shape.extremum is not None
        needs_x = (by_weight and shape.first) or (by_root and own is None) or (by_x and extremum and arg is None)
        ctx.save_for_backward(
            x if needs_x else None,
            weight if by_x else None,
            own if by_root else None,
            root if by_x or by_own else None,
            scale,
            loop,
            aggregated if by_weight or extremum else None,
            arg,
        )
        ctx.shape, ctx.own = shape, own is not None
        ctx.set_materialize_grads(False)
        return out, aggregated

    # The aggregation is a result, though nobody sees it: so second derivatives find their way through it.
    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, by_aggregated: Tensor | None) -> Any:
        _, by_x, by_weight, by_bias, by_own, by_root, _, _ = ctx.needs_input_grad
        x, weight, own, root, scale, loop, aggregated, arg = ctx.saved_tensors
        shape: _Shape = ctx.shape
        grads: list[Tensor | None] = [None] * 8
        if grad is None:
            if by_aggregated is not None and by_x:
                grads[1] = _back(shape, by_aggregated, x, scale, loop, aggregated, arg, None)
            return tuple(grads)
        of_own = torch.mm(grad, root) if root is not None and (by_own or (by_x and not ctx.own)) else None
        through = None if ctx.own else of_own  # comes back to x
        if shape.first:
            if by_x or by_weight:
                h = shape.back(grad, scale, loop)
                if by_x:
                    grads[1] = torch.mm(h, weight) if through is None else _plus_product(through, h, weight)
                if by_weight:
                    grads[2] = torch.mm(h.t(), x)
        else:
            if by_x:
                a = torch.mm(grad, weight)
                a = a if by_aggregated is None else a + by_aggregated
                grads[1] = _back(shape, a, x, scale, loop, aggregated, arg, through)
            if by_weight:
                grads[2] = torch.mm(grad.t(), aggregated)
        if by_bias:
            grads[3] = grad.sum(0)
        if by_own:
            grads[4] = of_own
        if by_root:
            grads[5] = torch.mm(grad.t(), own if ctx.own else x)
        return tuple(grads)


# As `derivatives._apply_linear`.
_apply_convolution: Callable[..., tuple[Tensor, Tensor | None]] = super(torch.autograd.Function, _Convolution).apply


def _plus_product(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``out + a @ b``, in the place of `out`, which is ours, where nobody differentiates that."""
    if torch.is_grad_enabled() or _is_batched(out):
        return torch.addmm(out, a, b)
    return out.addmm_(a, b)


def _back(
    shape: _Shape,
    grad: Tensor,
    x: Tensor | None,
    scale: Tensor | None,
    loop: Tensor | None,
    aggregated: Tensor | None,
    arg: Tensor | None,
    added: Tensor | None,
) -> Tensor:
    """From the gradient of an aggregation to that of what was aggregated, plus `added`."""
    if shape.extremum is None:
        return shape.back(grad, scale, loop, added)
    picks = aggregated if arg is None else arg
    assert picks is not None
    found, _ = _extremum_gradients(shape.core, shape.flipped, x, None, picks, grad, (True, False), shape.tie)
    assert found is not None
    if added is None:
        return found
    return found + added if torch.is_grad_enabled() or _is_batched(found) else found.add_(added)


__all__ = ["convolve", "convolve_unchecked"]
