"""Aggregation with what graph convolutions do around it, in the same kernel: for layers and integrations.

``out = act(dst_scale * A (src_scale * x) + self_scale * self_x + bias)``. Its derivative by `x` is the same form on the
transposed graph with the scales exchanged, so a layer's forward is one kernel, and so is its way back to the features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._native import accumulation_dtype
from .csr import Core
from .derivatives import (
    _TRANSPOSED,
    _dot,
    _half,
    _heads,
    _hides_grad,
    _plan_by_policy,
    _planned,
    _rows_first,
    _sum_raw,
    _transformed,
    _unwrap,
)
from .functional import _check_features, _check_graph, spmm
from .graph import Graph, check_weight
from .kernels import DTYPES
from .plan import Plan


def aggregate(
    graph: Graph,
    x: Tensor,
    weight: Tensor | None = None,
    reduce: str = "sum",
    *,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
    self_x: Tensor | None = None,
    self_scale: Tensor | None = None,
    bias: Tensor | None = None,
    relu: bool = False,
    dtype: torch.dtype | None = None,
    policy: str = "auto",
) -> Tensor:
    """``relu(dst_scale * reduce(weight * src_scale * x) + self_scale * self_x + bias)``, each part where it is given.

    Accumulated in float32 at least and rounded once. Differentiable by `x`, `weight`, `self_x`, `self_scale` and
    `bias`, any number of times; the scales are constants. Nothing of the size of the edges is written,
    save that on a GPU a `src_scale` that keeps coming is laid out by edge, once.

    Args:
        graph: the graph; weights that it carries are not used.
        x: ``[num_src, F]`` float32, float64, float16 or bfloat16.
        weight: ``[E]`` edge weights in the caller's order.
        reduce: ``"sum"`` or ``"mean"`` (divides by the number of edges).
        src_scale: ``[num_src]`` factor of each row of `x`; converted to the dtype of the accumulation, as what follows.
        dst_scale: ``[num_dst]`` factor of each sum.
        self_x: ``[num_dst, F]``, added to the sums. Where it is `x` itself, both gradients come out of one kernel.
        self_scale: its factor, ``[num_dst]`` or ``[1]``; 1 unless given.
        bias: ``[F]``.
        relu: whether to apply a ReLU in the end.
        dtype: of the result; that of `x` (with `weight` and `self_x`) unless given.
        policy: as in `gnn_spmm_plugin.spmm`.

    Returns:
        ``[num_dst, F]``.

    Raises:
        TypeError, ValueError: arguments that do not fit; the message says how.
    """
    _check_graph(graph, "aggregate")
    _check_features(graph, x, graph.num_src, "x", "source nodes")
    if x.dim() != 2:
        raise ValueError(f"x must have shape [num_src, features], got {list(x.shape)}")
    own = self_x is x
    if weight is not None:
        check_weight(graph, weight)
        if weight.dim() != 1:
            raise ValueError(f"weight must have shape [num_edges], got {list(weight.shape)}")
    if reduce not in ("sum", "mean"):
        raise ValueError(f"reduce must be 'sum' or 'mean', got {reduce!r}")
    if self_x is not None:
        if not own or graph.num_dst != graph.num_src:
            _check_features(graph, self_x, graph.num_dst, "self_x", "destination nodes")
        if self_x.shape[1:] != x.shape[1:]:
            raise ValueError(f"self_x must have as many columns as x, {x.shape[1]}, got {list(self_x.shape)}")
    elif self_scale is not None:
        raise ValueError("self_scale multiplies self_x, which is not given")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}; got {dtype}")
    if src_scale is not None:
        check_vector(graph, src_scale, "src_scale", graph.num_src)
    if dst_scale is not None:
        check_vector(graph, dst_scale, "dst_scale", graph.num_dst)
    if self_scale is not None:
        check_vector(graph, self_scale, "self_scale", graph.num_dst, 1)
    if bias is not None:
        check_vector(graph, bias, "bias", x.shape[1])
    for name, scale in (("src_scale", src_scale), ("dst_scale", dst_scale)):
        if scale is not None and scale.requires_grad:
            raise ValueError(f"{name} requires a gradient, but is a constant here: multiply x or the result with it")
    return aggregate_unchecked(
        graph, x, weight, reduce, self_x, self_scale, bias, src_scale, dst_scale, dtype, policy, relu
    )


def aggregate_unchecked(
    graph: Graph,
    x: Tensor,
    weight: Tensor | None,
    reduce: str,
    self_x: Tensor | None,
    self_scale: Tensor | None,
    bias: Tensor | None,
    src_scale: Tensor | None,
    dst_scale: Tensor | None,
    dtype: torch.dtype | None,
    policy: str,
    relu: bool = False,
) -> Tensor:
    """`aggregate` for callers that know that their arguments fit: of a small graph, to see that is half of its time."""
    own, compute = self_x is x, x.dtype
    for other in () if own and weight is None else (weight, self_x):
        if other is not None and other.dtype != compute:
            compute = torch.promote_types(compute, other.dtype)
    result = compute if dtype is None else dtype
    if result != compute and (weight is not None or result == torch.float64):
        compute = torch.promote_types(compute, result)  # the kernel stores what it multiplies weights with
    if x.dtype != compute:
        x = x.to(compute)
    if self_x is not None and (own or self_x.dtype != compute):
        self_x = x if own else self_x.to(compute)
    if weight is not None and weight.dtype != compute:
        weight = weight.to(compute)
    acc = torch.float64 if compute == torch.float64 else torch.float32
    if src_scale is not None or dst_scale is not None:
        src_scale, dst_scale = _vector(src_scale, acc), _vector(dst_scale, acc)
    if self_scale is not None:
        self_scale = _vector(self_scale, acc)
    if bias is not None:
        bias = _vector(bias, acc)
    if dst_scale is not None and dst_scale is src_scale and torch.compiler.is_compiling():
        dst_scale = dst_scale.view_as(dst_scale)  # dynamo wants no tensor twice
    given = x, weight, None if own else self_x, self_scale, bias, src_scale, dst_scale
    core, flipped, plan, transformed = graph._core, graph._flipped, None, _transformed()
    if policy != "auto" and not transformed:
        plan = _plan_by_policy(core, flipped, x.shape[1], x.dtype, reduce, policy)
    stored = compute if weight is not None or compute == torch.float64 else result
    form = _Form(core, flipped, own, "rows" if reduce == "mean" else None, relu, stored, plan)
    out = _plain(form, given) if transformed else _aggregate(form, given)
    return out if out.dtype == result else out.to(result)


def check_vector(graph: Graph, t: Tensor, name: str, *lengths: int) -> None:
    """Raises unless `t` is a dense vector of one of these lengths, where the graph is."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    if t.is_complex() or t.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor of real numbers, got {t.dtype}, layout {t.layout}")
    if t.dim() != 1 or t.shape[0] not in lengths:
        raise ValueError(f"{name} must have shape {' or '.join(f'[{n}]' for n in lengths)}, got {list(t.shape)}")
    if t.device != graph.device:
        raise ValueError(f"{name} is on {t.device} but the graph on {graph.device}; move one of them")


def _vector(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """`t` as the kernels read it."""
    return t if t is None or (t.dtype == dtype and t.is_contiguous()) else t.to(dtype).contiguous()


# x, weight, self_x (None also where it is x itself), self_scale, bias, src_scale, dst_scale. A NamedTuple takes 0.5 us.
_O = Tensor | None
_Given = tuple[Tensor, _O, _O, _O, _O, _O, _O]


class _Form(NamedTuple):
    """What an aggregation is besides its tensors.

    Attributes:
        core, flipped: the graph, or its transpose.
        own: self_x is x itself.
        mean: divide by the number of entries of each row ("rows"), or of the column that a term comes from ("cols").
        relu: apply a ReLU.
        dtype: of the result.
        plan: how it runs; None: the graph's own plan.
    """

    core: Core
    flipped: bool
    own: bool
    mean: str | None
    relu: bool
    dtype: torch.dtype
    plan: Plan | None

    def backward(self, dtype: torch.dtype) -> _Form:
        """The form that takes a gradient back to `x`, of `dtype`."""
        return _Form(self.core, not self.flipped, self.own, _TRANSPOSED[self.mean], False, dtype, None)


def _aggregate(form: _Form, given: _Given) -> Tensor:
    if not torch.is_grad_enabled():  # as in most backwards
        return _aggregate_raw(form, given)
    compiling = torch.compiler.is_compiling()
    if not compiling and _hides_grad(given[0], given[1]):
        return _plain(form, given)
    for t in given:
        if t is not None and t.requires_grad:
            if compiling:
                return _Aggregate.apply(form, *given)  # type: ignore[no-any-return]
            x, weight, own, *rest = given  # a transform's left-overs are features, or made of them; the rest is ours
            weight, own = None if weight is None else _unwrap(weight), None if own is None else _unwrap(own)
            return _apply_aggregate(form, _unwrap(x), weight, own, *rest)
    return _aggregate_raw(form, given)


def _aggregate_raw(form: _Form, given: _Given) -> Tensor:
    x, weight, own, self_scale, bias, src_scale, dst_scale = given
    csr, p = _planned(form.core, form.flipped, form.plan)
    if form.mean == "cols":
        src_scale = _with_inverse(form, src_scale, x.dtype)
    x = _rows_first(x)
    own = x if form.own else None if own is None else _rows_first(own)
    mean = form.mean == "rows"
    return _sum_raw(csr, p, x, weight, src_scale, dst_scale, mean, own, self_scale, bias, form.relu, form.dtype)


def _with_inverse(form: _Form, src_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`src_scale` times 1 / the number of entries of each column."""
    inverse = _half(form.core, not form.flipped).inverse_degree(accumulation_dtype(dtype))
    return inverse if src_scale is None else src_scale * inverse


class _Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: _Form, *tensors: Any) -> Tensor:
        x, weight, self_x, self_scale, _, src_scale, dst_scale = tensors
        out = _aggregate_raw(form, tensors)
        by_weight, by_scale = ctx.needs_input_grad[2], ctx.needs_input_grad[4]
        ctx.save_for_backward(
            x if by_weight or (by_scale and form.own) else None,
            weight,
            self_x if by_scale else None,
            self_scale,
            src_scale,
            dst_scale,
            out if form.relu else None,
        )
        ctx.form, ctx.dtype = form, x.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, self_x, self_scale, src_scale, dst_scale, out = ctx.saved_tensors
        form, dtype, needed = ctx.form, ctx.dtype, ctx.needs_input_grad[1:]
        grad_x = grad_weight = grad_self = grad_scale = grad_bias = None
        if out is not None:
            grad = torch.ops.aten.threshold_backward(grad, out, 0)
        if needed[0]:
            back = form.backward(dtype)
            own_scale = self_scale if form.own else None
            grad_x = _aggregate(back, (grad, weight, None, own_scale, None, dst_scale, src_scale))
        if needed[1]:
            count = None
            if form.mean is not None:  # it belongs to the rows of one side
                side = _half(form.core, form.flipped == (form.mean == "rows"))
                count = side.inverse_degree(accumulation_dtype(dtype))
            a = _times(grad, dst_scale, count if form.mean == "rows" else None)
            b = _times(x, src_scale, count if form.mean == "cols" else None)
            grad_weight = _dot(form.core, form.flipped, a, b, _heads(weight))
        if needed[2]:
            grad_self = (grad if self_scale is None else grad * self_scale.unsqueeze(1)).to(dtype)
        if needed[3]:
            grad_scale = _inner(grad, x if form.own else self_x, self_scale)
        if needed[4]:
            grad_bias = grad.sum(0, dtype=accumulation_dtype(dtype))
        return None, grad_x, grad_weight, grad_self, grad_scale, grad_bias, None, None


# As `derivatives._apply_linear`.
_apply_aggregate: Callable[..., Tensor] = super(torch.autograd.Function, _Aggregate).apply


def _times(rows: Tensor, *factors: Tensor | None) -> Tensor:
    """`rows` ``[N, F]`` with each row multiplied by its factors, in its own dtype."""
    for factor in factors:
        if factor is not None:
            rows = (rows * factor.unsqueeze(1)).to(rows.dtype)
    return rows


def _inner(grad: Tensor, self_x: Tensor, self_scale: Tensor) -> Tensor:
    """The gradient of `self_scale`: ``grad * self_x``, summed over what it is one factor of."""
    single = self_scale.shape[0] == 1
    plain = grad.dtype == self_x.dtype == self_scale.dtype and grad.numel() < 2**31
    if single and plain and grad.is_contiguous() and self_x.is_contiguous():
        return torch.dot(grad.view(-1), self_x.view(-1)).view(1)  # writes no products
    products = grad.to(self_scale.dtype) * self_x
    return products.sum().view(1) if single else products.sum(1)


def _plain(form: _Form, given: _Given) -> Tensor:
    """The same part by part, for functional transforms."""
    x, weight, own, self_scale, bias, src_scale, dst_scale = given
    wide = accumulation_dtype(x.dtype)
    own = x if form.own else own
    if form.mean == "cols":
        src_scale = _with_inverse(form, src_scale, wide)
    weight = None if weight is None else weight.to(wide)
    graph, reduce = Graph._make(form.core, form.flipped), "mean" if form.mean == "rows" else "sum"
    out = spmm(graph, _times(x.to(wide), src_scale), weight, reduce)
    assert isinstance(out, Tensor)
    out = _times(out, dst_scale)
    if own is not None:
        out = out + _times(own.to(wide), self_scale)
    out = out if bias is None else out + bias
    return (out.relu() if form.relu else out).to(form.dtype)


__all__ = ["aggregate", "aggregate_unchecked", "check_vector"]
