"""Sums over messages with a feature vector of their own: ``relu(x[s] + e)`` for each edge (s -> d).

What belongs to an edge has a row for each edge, and nothing spares reading it. What is spared is everything else of
that size: the gathered features, the sums, their ReLU and the gradients of these are made for one piece of the graph
at a time, small enough to stay in the cache, and added up there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _native
from .csr import Core, Csr, capturing
from .derivatives import _half, _hides_grad
from .functional import _check_features, _check_graph, spmm
from .graph import Graph, check_weight
from .plan import default_plan

#: Elements of a message tensor that are made at a time: 1 MB of float32 on the CPU, 32 MB on CUDA, by their caches.
PIECE = {"cpu": 1 << 18, "cuda": 1 << 23}


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
        ones = x.new_ones(graph.num_src, 1)
        out = out + shift * spmm(graph, ones, weight, reduce)  # type: ignore[operator]
    return out  # type: ignore[no-any-return]


def _piece_elements(core: Core) -> int:
    return PIECE["cuda" if core.device.type == "cuda" else "cpu"]


def _pieces(core: Core, flipped: bool, width: int) -> list[tuple[int, int, int, int]]:
    """(first row, row after the last, first entry, entry after the last) of pieces of whole rows."""
    csr = _half(core, flipped)
    limit = max(_piece_elements(core) // width, 1)
    edges = csr.col.shape[0]
    if edges <= limit:
        return [(0, csr.num_rows, 0, edges)]
    name = f"pieces{flipped:d}_{limit}"
    found: list[tuple[int, int, int, int]] | None = core.derived.get(name)
    if found is None:
        if capturing(core.device):
            raise RuntimeError(
                "gnn_spmm_plugin would have to read the graph during CUDA graph capture: run the model once before"
            )
        rowptr = csr.rowptr.cpu()
        found, row = [], 0
        while row < csr.num_rows:
            start = int(rowptr[row])
            stop = int(torch.searchsorted(rowptr, start + limit, right=True)) - 1
            stop = min(max(stop, row + 1), csr.num_rows)
            found.append((row, stop, start, int(rowptr[stop])))
            row = stop
        setattr(core.derived, name, found)
    return found


class _Piece:
    """Some rows of one direction of a graph, whose entries are ``a`` to ``b - 1``."""

    def __init__(self, csr: Csr, place: tuple[int, int, int, int], lengths: int) -> None:
        self.csr, self.lengths = csr, lengths
        self.first, self.last, self.a, self.b = place

    def columns(self) -> Tensor:
        return self.csr.col[self.a : self.b]

    def rows(self) -> Tensor:
        degree = self.csr.rowptr[self.first + 1 : self.last + 1] - self.csr.rowptr[self.first : self.last]
        return torch.repeat_interleave(
            torch.arange(self.first, self.last, dtype=degree.dtype, device=degree.device),
            degree,
            output_size=self.b - self.a,
        )

    def of_edges(self, per_edge: Tensor) -> Tensor:
        """The rows of `per_edge` (caller's order) that belong here; perhaps a view."""
        if self.csr.perm is None:
            return per_edge[self.a : self.b]
        return per_edge.index_select(0, self.csr.perm[self.a : self.b])

    def store(self, per_edge: Tensor, values: Tensor) -> None:
        if self.csr.perm is None:
            per_edge[self.a : self.b] = values
        else:
            per_edge.index_copy_(0, self.csr.perm[self.a : self.b].long(), values)

    def add_up(self, messages: Tensor, mean: bool = False) -> Tensor:
        rowptr = self.csr.rowptr[self.first : self.last + 1] - self.a
        ids = torch.arange(self.b - self.a, dtype=rowptr.dtype, device=rowptr.device)
        return _native.row_sum(rowptr, ids, messages.contiguous(), self.lengths, mean)  # type: ignore[no-any-return]


def _each(core: Core, flipped: bool, width: int) -> list[_Piece]:
    csr = _half(core, flipped)
    lengths = default_plan(core, csr).lengths
    return [_Piece(csr, place, lengths) for place in _pieces(core, flipped, width)]


class _ReluSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, e: Tensor, weight: Tensor | None, core: Core, flipped: bool, mean: bool) -> Tensor:
        ctx.save_for_backward(x, e, weight)
        ctx.form = core, flipped, mean
        out = x.new_empty(_half(core, flipped).num_rows, x.shape[1])
        for piece in _each(core, flipped, x.shape[1]):
            messages = x.index_select(0, piece.columns()).add_(piece.of_edges(e)).relu_()
            if weight is not None:
                messages *= piece.of_edges(weight).unsqueeze(1)
            out[piece.first : piece.last] = piece.add_up(messages, mean)
        return out

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
    grad_weight = None if weight is None or not needs[2] else torch.empty_like(weight)
    if needs[1]:  # in the caller's order, in which e is read and its gradient written
        grad_e = torch.empty_like(e)
        src, dst = _ends(core, flipped)
        step = max(_piece_elements(core) // x.shape[1], 1)
        for a in range(0, core.num_edges, step):
            here = slice(a, a + step)
            messages = x.index_select(0, src[here]).add_(e[here])
            back = grad.index_select(0, dst[here])
            if grad_weight is not None:
                grad_weight[here] = (messages.relu() * back).sum(1)
            torch.ops.aten.threshold_backward.grad_input(back, messages, 0, grad_input=grad_e[here])
            if weight is not None:
                grad_e[here] *= weight[here].unsqueeze(1)
        grad_x: Any = spmm(edges_of(Graph._make(core, not flipped)), grad_e) if needs[0] else None
        return grad_x, grad_e, grad_weight
    # By source, to be added up there.
    grad_x = torch.empty_like(x) if needs[0] else None
    for piece in _each(core, not flipped, x.shape[1]):
        messages = x.index_select(0, piece.rows()).add_(piece.of_edges(e))
        back = grad.index_select(0, piece.columns())
        if grad_weight is not None:
            piece.store(grad_weight, (messages.relu() * back).sum(1))
        if grad_x is not None:
            back = torch.ops.aten.threshold_backward.grad_input(back, messages, 0, grad_input=messages)
            if weight is not None:
                back *= piece.of_edges(weight).unsqueeze(1)
            grad_x[piece.first : piece.last] = piece.add_up(back)
    return grad_x, None, grad_weight


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
