"""Sums over messages with a feature vector of their own: ``relu(x[s] + e)`` for each edge (s -> d).

What belongs to an edge has a row for each edge, and nothing spares reading it. What is spared is everything else of
that size: a kernel adds gathered features and those of the edge, takes the ReLU and adds up, in one sweep; another
takes all of it back in one sweep over the sources, and writes the gradient of each edge's features on the way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _native
from .csr import Core, Csr
from .derivatives import _half, _hides_grad, _operands, _rows_first
from .functional import _check_features, _check_graph, spmm
from .graph import Graph, check_weight


def edges_of(graph: Graph) -> Graph:
    """The graph from edges to destinations: a product with it reduces what each edge has, ``[E, F]``, in any way.

    It is kept with `graph` and shares its arrays.
    """
    core, flipped = graph._core, graph._flipped
    name = f"edges{flipped:d}"
    found: Core | None = core.derived.get(name)
    if found is None:
        csr = _half(core, flipped)
        ids = csr.perm
        if ids is None:
            ids = torch.arange(core.num_edges, dtype=csr.col.dtype, device=core.device)
        found = Core(Csr(csr.rowptr, ids, csr.perm, core.num_edges))
        setattr(core.derived, name, found)
    return Graph._make(found)


def sum_messages(
    graph: Graph,
    x: Tensor,
    e: Tensor,
    weight: Tensor | None = None,
    reduce: str = "sum",
    *,
    relu: bool = True,
    shift: float = 0.0,
    policy: str = "auto",
) -> Tensor:
    """``out[d] = reduce over edges i = (s -> d) of weight[i] * (relu(x[s] + e[i]) + shift)``.

    The aggregation of GINE (https://arxiv.org/abs/1905.12265) and, with a shift, of GEN
    (https://arxiv.org/abs/2006.07739). Differentiable by `x`, `e` and `weight`, any number of times; nothing of the
    size of `e` is written but the gradient of `e` itself (and second derivatives).

    Args:
        graph: the graph; weights that it carries are not used.
        x: ``[num_src, F]`` float32, float64, float16 or bfloat16.
        e: ``[E, F]`` of the same dtype, in the caller's edge order.
        weight: ``[E]``, in the caller's order.
        reduce: ``"sum"`` or ``"mean"``.
        relu: whether there is a ReLU.
        shift: a number that is added to each message.
        policy: as in `gnn_spmm_plugin.spmm`.

    Returns:
        ``[num_dst, F]`` of dtype ``torch.result_type(x, weight)``.

    Raises:
        TypeError, ValueError: arguments that do not fit; the message says how.
    """
    _check_graph(graph, "sum_messages")
    _check_features(graph, x, graph.num_src, "x", "source nodes")
    _check_features(graph, e, graph.num_edges, "e", "edges")
    if x.dim() != 2 or e.dim() != 2 or x.shape[1] != e.shape[1] or x.dtype != e.dtype:
        raise ValueError(
            "x and e must have shapes [num_src, F] and [num_edges, F] and one dtype, got "
            f"{list(x.shape)} {x.dtype} and {list(e.shape)} {e.dtype}"
        )
    if reduce not in ("sum", "mean"):
        raise ValueError(f"reduce must be sum or mean, got {reduce!r}")
    if weight is not None:
        check_weight(graph, weight)
        if weight.dim() != 1:
            raise ValueError(f"weight must have shape [num_edges], got {list(weight.shape)}")
        dtype = torch.promote_types(x.dtype, weight.dtype)
        x, e, weight = x.to(dtype), e.to(dtype), weight.to(dtype)
    graph = graph.with_weight(None)
    if not relu or graph.num_edges == 0 or x.shape[1] == 0:
        out: Any = spmm(graph, x, weight, reduce, policy=policy)
        out = out + spmm(edges_of(graph), e, weight, reduce)
    elif _hides_grad(x, e) or _hides_grad(x, weight):
        out = _plain(x, e, weight, graph._core, graph._flipped)
        out = out if reduce == "sum" else out * graph._csr.inverse_degree(out.dtype).unsqueeze(1)
    else:
        out = _ReluSum.apply(x, e, weight, graph._core, graph._flipped, reduce == "mean")
    if shift:
        if weight is None:
            degree = _half(graph._core, graph._flipped).degree()
            count: Any = (degree if reduce == "sum" else degree.clamp(max=1)).to(out.dtype).unsqueeze(1)
        else:
            count = spmm(graph, x.new_ones(graph.num_src, 1), weight, reduce)
        out = torch.add(out, count, alpha=shift)
    return out  # type: ignore[no-any-return]


class _ReluSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, e: Tensor, weight: Tensor | None, core: Core, flipped: bool, mean: bool) -> Tensor:
        ctx.save_for_backward(x, e, weight)
        ctx.form = core, flipped, mean
        csr, p, w = _operands(core, flipped, weight)
        given = (csr.rowptr, csr.col, csr.perm, w, _rows_first(x), _rows_first(e))
        return _native.edge_sum(*given, p.items, p.config, mean)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, e, weight = ctx.saved_tensors
        core, flipped, mean = ctx.form
        if mean:
            inverse = _half(core, flipped).inverse_degree(_native.accumulation_dtype(grad.dtype))
            grad = (grad * inverse.unsqueeze(1)).to(grad.dtype)
        if torch.is_grad_enabled():
            # Two may be one tensor, each with a gradient of its own.
            x, e, weight = x.view_as(x), e.view_as(e), None if weight is None else weight.view_as(weight)
            wanted = [t for t, needed in zip((x, e, weight), ctx.needs_input_grad[:3], strict=True) if needed]
            found = iter(torch.autograd.grad(_plain(x, e, weight, core, flipped), wanted, grad, create_graph=True))
            return *(next(found) if needed else None for needed in ctx.needs_input_grad[:3]), None, None, None
        return *_gradients(x, e, weight, grad, core, flipped, ctx.needs_input_grad[:3]), None, None, None


def _gradients(
    x: Tensor, e: Tensor, weight: Tensor | None, grad: Tensor, core: Core, flipped: bool, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, e, grad = _rows_first(x), _rows_first(e), _rows_first(grad)
    grad_x = grad_e = grad_weight = None
    if needs[0] or needs[1]:  # in one sweep over the sources, even where one of them is left over
        csr, p, w = _operands(core, not flipped, weight)
        given = (csr.rowptr, csr.col, csr.perm, w, x, e, grad)
        of_x, of_e = _native.edge_sum_backward(*given, p.items, p.config, needs[1])
        grad_x, grad_e = of_x if needs[0] else None, of_e if needs[1] else None
    if needs[2]:
        half = _half(core, flipped)  # that kernel follows no schedule
        grad_weight = _native.edge_sum_dot(half.rowptr, half.col, half.perm, grad, x, e)
    return grad_x, grad_e, grad_weight


def _ends(core: Core, flipped: bool) -> tuple[Tensor, Tensor]:
    """Source and destination of each edge in the caller's order."""
    csr = core.csr
    dst, src = csr.coo or (csr.in_caller_order(csr.rows()), csr.in_caller_order(csr.col))
    return (dst, src) if flipped else (src, dst)


def _plain(x: Tensor, e: Tensor, weight: Tensor | None, core: Core, flipped: bool) -> Tensor:
    """The sum in plain torch, of size E x F, for second derivatives."""
    src, dst = _ends(core, flipped)
    messages = (x[src.long()] + e).relu()
    if weight is not None:
        messages = messages * weight.unsqueeze(1)
    return messages.new_zeros(_half(core, flipped).num_rows, x.shape[1]).index_add(0, dst.long(), messages)


__all__ = ["edges_of", "sum_messages"]
