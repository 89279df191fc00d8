"""What the operators are made of: products as their plans say, and derivatives of them.

The linear ones are partial derivatives of one trilinear form, the sum over edges e = (s -> d) of
``<g[d], w[e] * x[s]>``: its derivative by g is the weighted sum over neighbours, by x the same on the transposed graph,
and by w a dot product per edge. So each is the backward of the others, to any order. Maximum and minimum pick one edge
for each output element; with the picks fixed, the same holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import _native, reference
from .csr import Core, Csr, capturing
from .graph import Graph
from .kernels import check_reduce
from .plan import COMMUNITY_AFTER, Plan, default_plan
from .plan import plan as make_plan

#: For the integrations only: as ``torch.Tensor.scatter_reduce_`` into zeros, which splits evenly, and where the
#: extremum is 0 counts the zero that it started from as one more winner.
SCATTER_TIE = "scatter"


def _prepare(core: Core) -> bool:
    """Under torch.compile: build, while tracing, whatever the compiled code will read."""
    with _disable_current_modes():  # torch.export runs this among fake tensors
        for flipped in (False, True):
            csr = core.half(flipped)
            csr.uses += COMMUNITY_AFTER  # compiled code runs more than once
            default_plan(core, csr)
            for dtype in (torch.float32, torch.float64):
                csr.inverse_degree(dtype)
    return True


def _half(core: Core, flipped: bool) -> Csr:
    if torch.compiler.is_compiling():
        core.while_tracing(_prepare)
    return core.half(flipped)


def _plan_by_policy(core: Core, flipped: bool, width: int, dtype: torch.dtype, reduce: str, policy: str) -> Plan:
    if not torch.compiler.is_compiling():
        return make_plan(Graph._make(core, flipped), width, dtype, reduce, policy=policy)
    name = f"plan{flipped:d}_{width}_{str(dtype)[6:]}_{reduce}_{policy}"
    core.while_tracing(_prepare_policy, name, flipped, width, dtype, reduce, policy)
    return core.derived.get(name)  # type: ignore[no-any-return]


def _prepare_policy(
    core: Core, name: str, flipped: bool, width: int, dtype: torch.dtype, reduce: str, policy: str
) -> bool:
    with _disable_current_modes():
        setattr(core.derived, name, make_plan(Graph._make(core, flipped), width, dtype, reduce, policy=policy))
    return True


def _planned(core: Core, flipped: bool, plan: Plan | None) -> tuple[Csr, Plan]:
    """The CSR of that direction, as its plan reads it, and the plan, unless there is another."""
    if torch.compiler.is_compiling():
        core.while_tracing(_prepare)
        csr = core.half(flipped)
        found: Plan = csr.plan if plan is None else plan
        return found.moved or csr, found
    csr = core.half(flipped)
    if plan is None:
        plan = csr.plan
        if plan is None or not plan.settled:
            plan = default_plan(core, csr)
    return plan.moved or csr, plan


def _operands(
    core: Core, flipped: bool, weight: Tensor | None, plan: Plan | None = None
) -> tuple[Csr, Plan, Tensor | None]:
    """What every sweep over rows needs: the CSR of that direction, its plan, and the weights in its row order."""
    csr, plan = _planned(core, flipped, plan)
    return csr, plan, None if weight is None else csr.in_row_order(weight)


def _heads(weight: Tensor | None) -> int:
    return 0 if weight is None or weight.dim() == 1 else weight.shape[1]


def _rows_first(x: Tensor) -> Tensor:
    """`x` [N, F] as the kernels read it: columns adjacent, any distance between rows that they can count."""
    if x.is_contiguous() or ((x.stride(1) == 1 or x.shape[1] <= 1) and x.stride(0) < 2**28):
        return x
    return x.contiguous()


def _needs_grad(a: Tensor, b: Tensor | None) -> bool:
    return (a.requires_grad or (b is not None and b.requires_grad)) and torch.is_grad_enabled()


_is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def _hides_grad(a: Tensor, b: Tensor | None = None) -> bool:
    """Whether a backward that is to be differentiated again runs for many gradients at once.

    That is ``is_grads_batched``, or vmap around ``torch.autograd.grad``, with ``create_graph``. The wrappers of such
    gradients say that they need none, and what an operator makes of them has none: plain torch has to do it.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return _is_batched(a) or (b is not None and _is_batched(b)) or _transformed()


# ---------------------------------------------------------------------- the trilinear form


def _linear(
    core: Core,
    flipped: bool,
    x: Tensor,
    weight: Tensor | None,
    mean: str | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """Weighted sum over the entries of each row, ``[num_rows, F]``.

    `mean` divides by the number of entries of each row ("rows"), or of the column that a term comes from ("cols"): the
    transposed operation.
    """
    if not torch.is_grad_enabled():  # as in most backwards, whose thread has to fetch all that this one read
        return _linear_raw(core, flipped, x, weight, mean, plan)
    if _hides_grad(x, weight):
        return _linear_plain(core, flipped, x, weight, mean)
    if _needs_grad(x, weight):
        if torch.compiler.is_compiling():
            return _Linear.apply(x, weight, core, flipped, mean, plan)  # type: ignore[no-any-return]
        weight = None if weight is None else _unwrap(weight)
        return _apply_linear(_unwrap(x), weight, core, flipped, mean, plan)
    return _linear_raw(core, flipped, x, weight, mean, plan)


def _linear_plain(core: Core, flipped: bool, x: Tensor, weight: Tensor | None, mean: str | None) -> Tensor:
    heads, wide = _heads(weight), x.to(_native.accumulation_dtype(x.dtype))
    if mean == "cols":
        wide = wide * _half(core, not flipped).inverse_degree(wide.dtype).unsqueeze(1)
    wide = _by_head(wide, heads)
    out, _ = _plain(reference.spmm, Graph._make(core, flipped), wide, weight, "mean" if mean == "rows" else "sum")
    return out.reshape(out.shape[0], x.shape[1]).to(x.dtype)  # type: ignore[no-any-return]


def _by_head(x: Tensor, heads: int) -> Tensor:
    """``[N, F]`` as it is, or, where heads > 0, as ``[N, heads, F / heads]``."""
    return x.reshape(x.shape[0], heads, x.shape[1] // heads) if heads else x


def _row_sum(csr: Csr, plan: Plan, x: Tensor, mean: bool) -> Tensor:
    if not x.is_contiguous():
        x = _rows_first(x)
    if plan.items is None and plan.format is None:
        return _native.row_sum(csr.rowptr, csr.col, x, plan.lengths, mean)  # type: ignore[no-any-return]
    return _sum_raw(csr, plan, x, None, None, None, mean)


def _linear_raw(
    core: Core, flipped: bool, x: Tensor, weight: Tensor | None, mean: str | None, plan: Plan | None
) -> Tensor:
    csr, p = _planned(core, flipped, plan)
    scale = None
    if mean == "cols":
        scale = _half(core, not flipped).inverse_degree(_native.accumulation_dtype(x.dtype))
    if weight is None and scale is None:
        return _row_sum(csr, p, x, mean == "rows")
    return _sum_raw(csr, p, _rows_first(x), weight, scale, None, mean == "rows")


def _scales_rows_first(csr: Csr, x: Tensor) -> bool:
    """Whether multiplying the rows of `x` beforehand takes less than reading a weight for each edge; not on the CPU.

    On an H200 a pass over x writes 0.3 G elements of float32 a ms, and a million weights take 1.5 to 3 us to read:
    worth it from about two edges an element of x on, if there are enough of them (docs/benchmarks.md).
    """
    edges = csr.col.shape[0]
    return edges >= 4_000_000 and edges > 2 * csr.num_cols * x.shape[1]


def _sum_raw(
    csr: Csr,
    p: Plan,
    x: Tensor,
    weight: Tensor | None,
    src_scale: Tensor | None,
    dst_scale: Tensor | None,
    mean: bool,
    *end: Any,
) -> Tensor:
    """The kernel of a plan; `weight` in the caller's order, otherwise as ``_native.spmm``."""
    if p.format is not None and p.format.takes(csr, weight, x):
        return p.format.product(csr, weight, x, src_scale, dst_scale, mean, *end)
    w = None if weight is None else csr.in_row_order(weight)
    if p.mode == "cold":
        return _native.spmm(csr.rowptr, csr.col, w, x, src_scale, dst_scale, None, p.config, mean, *end)  # type: ignore[no-any-return]
    warm = p.items is not None or (p.mode == "warm" and x.is_cuda)
    if warm and w is None and src_scale is not None and src_scale.dtype == x.dtype:  # half features would round it
        if x.is_cuda and _scales_rows_first(csr, x):
            x, src_scale = x * src_scale.unsqueeze(1), None
        else:
            # Read in order instead of gathered by column: with the same bits, and where these need not be the same as
            # before, together with that of the row. (The rows of a moved graph are elsewhere.)
            pinned = p.moved is not None or torch.are_deterministic_algorithms_enabled()
            row_scale = None if pinned else dst_scale
            w = csr.scale_in_row_order(src_scale, row_scale)
            if w is not None:
                src_scale, dst_scale = None, dst_scale if row_scale is None else None
    common = (csr.rowptr, csr.col, w, x, src_scale, dst_scale, p.items, p.config, mean)
    return _native.spmm(*common, *end, **p.stage)  # type: ignore[no-any-return]


#: Edges up to which a GPU transposes a graph by counting: a few launches, so it is the host's time that counts.
_QUICK_TRANSPOSE = 1 << 18


def _transposes_quickly(core: Core, x: Tensor) -> bool:
    """Whether to make what a gradient takes in the forward's thread.

    On a GPU a backward runs in another, to whose core all that it reads has to move: for a small graph that takes
    longer than the work.
    """
    if not x.is_cuda or core.num_edges > _QUICK_TRANSPOSE or torch.compiler.is_compiling():
        return False
    return core.transpose is not None or not capturing(core.device)


_TRANSPOSED = {"rows": "cols", "cols": "rows", None: None}  # which mean the gradient of one takes


class _Linear(torch.autograd.Function):
    # ctx-style on purpose: setup_context costs 18 us more a call (and would only add vmap and jvp).
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        core: Core,
        flipped: bool,
        mean: str | None,
        plan: Plan | None,
    ) -> Tensor:
        ctx.form = core, flipped, mean, weight is not None
        if weight is not None:
            ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.prepared = None
        # Of weighted sums, means and what `functional_aggregate` adds, it gains nothing: measured.
        if weight is None and mean is None and ctx.needs_input_grad[0] and _transposes_quickly(core, x):
            csr, p = _planned(core, not flipped, None)
            ctx.prepared = None if p.items is not None or p.format is not None else (csr.rowptr, csr.col, p.lengths)
        return _linear_raw(core, flipped, x, weight, mean, plan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.prepared is not None and not torch.is_grad_enabled():
            rowptr, col, lengths = ctx.prepared
            grad_x = _native.row_sum(rowptr, col, grad if grad.is_contiguous() else _rows_first(grad), lengths, False)
            return grad_x, None, None, None, None, None
        core, flipped, mean, weighted = ctx.form
        saved: Any = ctx.saved_tensors if weighted else (None, None)
        x, weight = saved
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _linear(core, not flipped, grad, weight, _TRANSPOSED[mean])
        if ctx.needs_input_grad[1]:
            if mean is not None:  # the count belongs to the rows of one side; scale that side
                side = _half(core, flipped == (mean == "rows"))
                inverse = side.inverse_degree(_native.accumulation_dtype(grad.dtype))
                scaled = (grad if mean == "rows" else x) * inverse.unsqueeze(1)
                grad, x = (scaled.to(x.dtype), x) if mean == "rows" else (grad, scaled.to(x.dtype))
            grad_weight = _dot(core, flipped, grad, x, _heads(weight))
        return grad_x, grad_weight, None, None, None, None


# What `Function.apply` comes down to where no transform is on (see `_transformed`): 2 us less.
_unwrap: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead  # what a transform has left behind
_apply_linear: Callable[..., Tensor] = super(torch.autograd.Function, _Linear).apply


def _dot(core: Core, flipped: bool, a: Tensor, b: Tensor, heads: int) -> Tensor:
    """Dot product of a[row] and b[column] for each entry, in the caller's order: [E], or [E, heads] where heads > 0."""
    if _hides_grad(a, b):
        graph = Graph._make(core, flipped)
        return _plain(reference.sddmm, graph, _by_head(a, heads), _by_head(b, heads)).to(a.dtype)  # type: ignore[no-any-return]
    if _needs_grad(a, b):
        if a is b and torch.compiler.is_compiling():
            b = b.view_as(b)  # dynamo wants no tensor twice
        return _Dot.apply(a, b, core, flipped, heads)  # type: ignore[no-any-return]
    return _dot_raw(core, flipped, a, b, heads)


def _dot_raw(core: Core, flipped: bool, a: Tensor, b: Tensor, heads: int) -> Tensor:
    csr = _half(core, flipped)
    out: Tensor = _native.sddmm(csr.rowptr, csr.col, csr.perm, _rows_first(a), _rows_first(b), heads)
    return out


class _Dot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, core: Core, flipped: bool, heads: int) -> Tensor:
        ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, b if ctx.needs_input_grad[0] else None)
        ctx.core, ctx.flipped = core, flipped
        return _dot_raw(core, flipped, a, b, heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b = ctx.saved_tensors
        grad_a = _linear(ctx.core, ctx.flipped, b, grad) if ctx.needs_input_grad[0] else None
        grad_b = _linear(ctx.core, not ctx.flipped, a, grad) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b, None, None, None


# ---------------------------------------------------------------------- maximum and minimum


def _extremum_raw(
    core: Core, flipped: bool, x: Tensor, weight: Tensor | None, minimum: bool, plan: Plan | None, with_arg: bool
) -> tuple[Tensor, Tensor]:
    """The extrema, and the edge that wins each of them; none of these where no one will ask."""
    csr, p, w = _operands(core, flipped, weight, plan)
    check_reduce(p.kernel, "min" if minimum else "max")
    return _native.spmm_arg(  # type: ignore[no-any-return]
        csr.rowptr, csr.col, csr.perm, w, _rows_first(x), p.items, p.config, minimum, with_arg
    )


class _Extremum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        core: Core,
        flipped: bool,
        minimum: bool,
        tie: str,
        plan: Plan | None,
        with_arg: bool,
    ) -> tuple[Tensor, Tensor]:
        out, arg = _extremum_raw(core, flipped, x, weight, minimum, plan, with_arg)
        if ctx.needs_input_grad[0] and _transposes_quickly(core, x):
            core.half(not flipped)
        if tie != "first":
            ctx.save_for_backward(x, weight, out)
        else:
            ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, arg)
        ctx.core, ctx.flipped, ctx.tie = core, flipped, tie
        ctx.mark_non_differentiable(arg)
        ctx.set_materialize_grads(False)  # or every backward writes zeros of the size of arg
        return out, arg

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        if grad is None:
            return (None,) * 8
        x, weight, picks = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        grads = _extremum_gradients(ctx.core, ctx.flipped, x, weight, picks, grad, needs, ctx.tie)
        return *grads, None, None, None, None, None, None


def _extremum_gradients(
    core: Core,
    flipped: bool,
    x: Tensor | None,
    weight: Tensor | None,
    picks: Tensor,
    grad: Tensor,
    needs: tuple[bool, bool],
    tie: str,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `x` and `weight`, those of them that are needed.

    `picks` are the winning edges where tie is "first", and then `x` is there for the weights alone; else the result.
    """
    if tie == "first":
        grad_x = _picked_x(core, flipped, grad, weight, picks) if needs[0] else None
        if not needs[1]:
            return grad_x, None
        assert x is not None
        return grad_x, _picked_weight(core, flipped, grad, x, picks, _heads(weight))
    assert x is not None
    dense = _needs_grad(grad, x) or (weight is not None and _needs_grad(weight, None)) or _hides_grad(grad)
    split = _split_gradients_dense if dense else _split_gradients
    return split(core, flipped, x, weight, picks, grad, needs, tie == SCATTER_TIE)


def _split_gradients(
    core: Core,
    flipped: bool,
    x: Tensor,
    weight: Tensor | None,
    out: Tensor,
    grad: Tensor,
    needs: tuple[bool, bool],
    zero_wins: bool,
) -> tuple[Tensor | None, Tensor | None]:
    csr, p, w = _operands(core, flipped, weight)
    x, out, grad = _rows_first(x), out.contiguous(), _rows_first(grad)
    # Divided by 0 in a row without edges, whose share nobody asks for.
    share = _native.spmm_tie_count(csr.rowptr, csr.col, w, x, out, p.items, p.config, grad, zero_wins)
    grad_x = grad_weight = None
    if needs[0]:
        other, q, w_other = _operands(core, not flipped, weight)
        grad_x = _native.spmm_tie_backward(other.rowptr, other.col, w_other, share, x, out, q.items, q.config)
    if needs[1]:
        half = _half(core, flipped)  # that kernel follows no schedule
        w = None if weight is None else half.in_row_order(weight)
        grad_weight = _native.sddmm_tie(half.rowptr, half.col, half.perm, w, share, x, out, _heads(weight))
    return grad_x, grad_weight


def _split_gradients_dense(
    core: Core,
    flipped: bool,
    x: Tensor,
    weight: Tensor | None,
    out: Tensor,
    grad: Tensor,
    needs: tuple[bool, bool],
    zero_wins: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The same in plain torch, of size E x F, for second derivatives, which are rare."""
    csr = _half(core, flipped)
    src, dst = csr.in_caller_order(csr.col).long(), csr.in_caller_order(csr.rows()).long()
    factor = _per_column(weight, x.shape[1])
    message = x[src] if factor is None else x[src] * factor
    best = out[dst]
    tied = ((message == best) | (message.isnan() & best.isnan())).to(grad.dtype)
    count = torch.zeros_like(out).index_add_(0, dst, tied)
    count = (count + (out == 0) if zero_wins else count).clamp(min=1)
    share = (grad / count)[dst] * tied.detach()
    grad_x = grad_weight = None
    if needs[0]:
        grad_x = torch.zeros_like(x).index_add(0, src, share if factor is None else share * factor)
    if needs[1]:
        assert weight is not None
        heads = max(_heads(weight), 1)
        grad_weight = (share * x[src]).reshape(len(src), heads, x.shape[1] // heads).sum(-1).view_as(weight)
    return grad_x, grad_weight


def _per_column(weight: Tensor | None, width: int) -> Tensor | None:
    """``[E]`` or ``[E, H]`` as ``[E, 1]`` or ``[E, width]``."""
    if weight is None:
        return None
    return weight.unsqueeze(1) if weight.dim() == 1 else weight.repeat_interleave(width // weight.shape[1], 1)


def _picked_x(core: Core, flipped: bool, grad: Tensor, weight: Tensor | None, arg: Tensor) -> Tensor:
    if _hides_grad(grad, weight):
        return _picked_x_plain(core, flipped, grad, weight, arg)
    if _needs_grad(grad, weight):
        return _PickedX.apply(grad, weight, core, flipped, arg)  # type: ignore[no-any-return]
    return _picked_x_raw(core, flipped, grad, weight, arg)


def _picked_x_plain(core: Core, flipped: bool, grad: Tensor, weight: Tensor | None, arg: Tensor) -> Tensor:
    zeros = grad.new_zeros(core.half(not flipped).num_rows, grad.shape[1])
    if core.num_edges == 0:
        return zeros
    _, src, factor = _winners(core, flipped, arg, weight)
    picked = grad if factor is None else grad * factor
    return zeros.scatter_add(0, src, picked.masked_fill(arg < 0, 0))


def _picked_x_raw(core: Core, flipped: bool, grad: Tensor, weight: Tensor | None, arg: Tensor) -> Tensor:
    csr, p, w = _operands(core, not flipped, weight)
    return _native.spmm_arg_backward(  # type: ignore[no-any-return]
        csr.rowptr, csr.col, csr.perm, w, _rows_first(grad), arg, p.items, p.config
    )


def _picked_weight(core: Core, flipped: bool, grad: Tensor, x: Tensor, arg: Tensor, heads: int) -> Tensor:
    if _hides_grad(grad, x):
        return _picked_weight_plain(core, flipped, grad, x, arg, heads)
    if _needs_grad(grad, x):
        return _PickedWeight.apply(grad, x, core, flipped, arg, heads)  # type: ignore[no-any-return]
    return _picked_weight_raw(core, flipped, grad, x, arg, heads)


def _picked_weight_plain(core: Core, flipped: bool, grad: Tensor, x: Tensor, arg: Tensor, heads: int) -> Tensor:
    each = grad.new_zeros(core.num_edges, grad.shape[1])
    if core.num_edges:
        edge, src, _ = _winners(core, flipped, arg, None)
        each = each.scatter_add(0, edge, (grad * x.gather(0, src)).masked_fill(arg < 0, 0))
    return _by_head(each, heads).sum(-1)


def _picked_weight_raw(core: Core, flipped: bool, grad: Tensor, x: Tensor, arg: Tensor, heads: int) -> Tensor:
    csr = _half(core, flipped)
    return _native.sddmm_arg(  # type: ignore[no-any-return]
        csr.rowptr, csr.col, csr.perm, _rows_first(grad), _rows_first(x), arg, heads
    )


def _pick(core: Core, flipped: bool, x: Tensor, weight: Tensor | None, arg: Tensor) -> Tensor:
    """The message of the winning edge of each output element; plain torch, for second derivatives."""
    csr = _half(core, flipped)
    if csr.col.shape[0] == 0:
        return x.new_zeros(arg.shape) + x[:0].sum()
    _, src, factor = _winners(core, flipped, arg, weight)
    picked = x.gather(0, src)
    return (picked if factor is None else picked * factor).masked_fill(arg < 0, 0)


def _winners(core: Core, flipped: bool, arg: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Winning edge, its source and its weight of each output element; anything where there is none."""
    csr = _half(core, flipped)
    edge = arg.clamp(min=0).long()
    src = csr.in_caller_order(csr.col).long()
    factor = _per_column(weight, arg.shape[1])
    return edge, src[edge], None if factor is None else factor.expand(-1, arg.shape[1]).gather(0, edge)


class _PickedX(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, weight: Tensor | None, core: Core, flipped: bool, arg: Tensor) -> Tensor:
        ctx.save_for_backward(grad if ctx.needs_input_grad[1] else None, weight, arg)
        ctx.core, ctx.flipped = core, flipped
        return _picked_x_raw(core, flipped, grad, weight, arg)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        first, weight, arg = ctx.saved_tensors
        core, flipped = ctx.core, ctx.flipped
        by_first = _pick(core, flipped, grad, weight, arg) if ctx.needs_input_grad[0] else None
        by_weight = None
        if ctx.needs_input_grad[1]:
            by_weight = _picked_weight(core, flipped, first, grad, arg, _heads(weight))
        return by_first, by_weight, None, None, None


class _PickedWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor, core: Core, flipped: bool, arg: Tensor, heads: int) -> Tensor:
        ctx.save_for_backward(grad if ctx.needs_input_grad[1] else None, x if ctx.needs_input_grad[0] else None, arg)
        ctx.core, ctx.flipped = core, flipped
        return _picked_weight_raw(core, flipped, grad, x, arg, heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        first, x, arg = ctx.saved_tensors
        by_first = _pick(ctx.core, ctx.flipped, x, grad, arg) if ctx.needs_input_grad[0] else None
        by_x = _picked_x(ctx.core, ctx.flipped, first, grad, arg) if ctx.needs_input_grad[1] else None
        return by_first, by_x, None, None, None, None


# ---------------------------------------------------------------------- softmax over the edges into a node


class _EdgeSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, core: Core, flipped: bool) -> Tensor:
        csr = _half(core, flipped)
        p = _native.edge_softmax(csr.rowptr, csr.perm, logits)
        ctx.save_for_backward(p)
        ctx.core, ctx.flipped = core, flipped
        return p  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (p,) = ctx.saved_tensors
        core, flipped = ctx.core, ctx.flipped
        csr = _half(core, flipped)
        if not (_needs_grad(grad, p) or _hides_grad(grad)):
            return (
                _native.edge_softmax_backward(csr.rowptr, csr.perm, p, grad.contiguous()),
                None,
                None,
            )
        # For second derivatives: the sum over each row and its way back to the edges, in operators that have one.
        weighted = (p * grad).reshape(p.shape[0], p.shape[1] if p.dim() == 2 else 1)
        ones = p.new_ones(csr.num_cols, weighted.shape[1])
        total = _linear(core, flipped, ones, weighted)
        back = _dot(core, flipped, total, ones, weighted.shape[1]).view_as(p)
        return p * grad - p * back, None, None


# ---------------------------------------------------------------------- under functional transforms


# A constant to torch.compile, which enters transforms while tracing and guards on them.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _transformed() -> bool:
    """Whether vmap, torch.func.grad, jvp or forward-mode differentiation is under way: kernels see none of them."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def _plain(operator: Any, graph: Graph, *args: Any) -> Any:
    """An operator of `reference`, with the accumulation and the dtype that kernels have."""
    dtype = args[0].dtype
    wide = (a.to(_native.accumulation_dtype(dtype)) if isinstance(a, Tensor) else a for a in args)
    return operator(graph, *wide)
