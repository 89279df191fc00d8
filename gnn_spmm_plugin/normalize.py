"""The symmetric normalisation of graph convolutions, D^-1/2 (A + I) D^-1/2, computed once for each graph.

The graph with self loops hangs on the graph it was made from, and so do its normalised weights: a layer that is called
with the same graph again has nothing left to do. Both die with the graph.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ._config import counters, verify_always
from ._native import accumulation_dtype
from .functional import _check_features, _half, _launch, _needs_grad, _plan_by_policy, _sum_raw, _transformed, spmm
from .graph import Core, Csr, Graph, _index_dtype, _refuse_capture, _rowptr, check_weight, state, unchanged
from .plan import Plan


class Normalized(NamedTuple):
    """A normalised adjacency; the product with it is ``scale * (graph(weight) @ (scale * x))``.

    Attributes:
        graph: the structure, self loops included where they were asked for.
        weight: ``[E]`` edge weights in the graph's own edge order, or None for ones.
        scale: ``[N]`` factor of each node, or None for ones; float32, or float64 for float64, where `weight` is None.
    """

    graph: Graph
    weight: Tensor | None
    scale: Tensor | None

    def edge_weight(self, dtype: torch.dtype) -> Tensor:
        """``[E]``: weight and scale as one number for each edge, in the graph's own edge order."""
        if self.scale is None:
            assert self.weight is not None
            return self.weight.to(dtype)
        src, dst = self.graph.edge_index()
        both = self.scale[src] * self.scale[dst]
        return (both if self.weight is None else both * self.weight).to(dtype)


class _ScaledSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, core: Core, flipped: bool, plan: Plan | None) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.core, ctx.flipped = core, flipped
        return _scaled_raw(x, scale, core, flipped, plan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (scale,) = ctx.saved_tensors
        return _scaled(grad, scale, ctx.core, not ctx.flipped, None), None, None, None, None


def _scaled(x: Tensor, scale: Tensor, core: Core, flipped: bool, plan: Plan | None) -> Tensor:
    if _needs_grad(x, None):
        return _ScaledSum.apply(x, scale, core, flipped, plan)  # type: ignore[no-any-return]
    return _scaled_raw(x, scale, core, flipped, plan)


def _scaled_raw(x: Tensor, scale: Tensor, core: Core, flipped: bool, plan: Plan | None) -> Tensor:
    csr = _half(core, flipped)
    p = _launch(core, csr) if plan is None else plan
    return _sum_raw(p, csr, x, None, scale, scale, False)


def scaled_sum(graph: Graph, x: Tensor, scale: Tensor, policy: str = "auto") -> Tensor:
    """``scale * (graph @ (scale * x))`` in one kernel, without weights.

    Args:
        graph: as many source as destination nodes.
        x: ``[N, F]``.
        scale: ``[N]`` float32, or float64 where `x` is float64; a constant.
        policy: as in `gnn_spmm_plugin.spmm`.

    Returns:
        ``[N, F]`` of the dtype of `x`; differentiable by `x`, any number of times.
    """
    _check_features(graph, x, graph.num_src, "x", "source nodes")
    if _transformed():
        factor = scale.to(x.dtype).unsqueeze(1)
        out = spmm(graph, x * factor)
        assert isinstance(out, Tensor)
        return out * factor
    core, flipped, plan = graph._core, graph._flipped, None
    if policy != "auto":
        plan = _plan_by_policy(core, flipped, x.shape[1], x.dtype, "sum", policy)
    return _scaled(x, scale, core, flipped, plan)


class SelfLoops(NamedTuple):
    """A graph with exactly one self loop on each node, placed after all other edges.

    Attributes:
        graph: the graph.
        kept: ``[E']`` int64 ids of the edges that are no self loops, or None where all are kept.
        loop: ``[N]`` int64 id of the last self loop that each node had before, -1 for none; None where there was none.
    """

    graph: Graph
    kept: Tensor | None
    loop: Tensor | None

    def weights(self, weight: Tensor, fill: float) -> Tensor:
        """``[E]`` edge weights of the graph as it was, for this one; a new loop gets `fill`, an old one keeps its."""
        loops = weight.new_full((self.graph.num_dst,), fill)
        if self.kept is None or self.loop is None:
            return torch.cat([weight, loops])
        old = weight.index_select(0, self.loop.clamp(min=0))
        return torch.cat([weight.index_select(0, self.kept), torch.where(self.loop >= 0, old, loops)])


def with_self_loops(graph: Graph) -> SelfLoops:
    """`graph` with one self loop on each node, made at the first call and kept with it.

    Raises:
        ValueError: the graph is bipartite.
    """
    _check_square(graph)
    graph._core.while_tracing(_prepare_loops, graph._flipped)
    made: SelfLoops = getattr(graph._core.derived, "loops_t" if graph._flipped else "loops")
    return made


def _check_square(graph: Graph) -> None:
    if graph.num_src != graph.num_dst:
        raise ValueError(
            f"self loops and symmetric normalisation need as many source as destination nodes, got {graph.num_src} and "
            f"{graph.num_dst}; use normalize=False, or a layer for bipartite graphs such as SAGEConv"
        )


def _prepare_loops(core: Core, flipped: bool) -> bool:
    """Builds, while tracing where it is traced, what the compiled code reads from ``core.derived``."""
    key = "loops_t" if flipped else "loops"
    if core.derived.get(key) is None:
        _refuse_capture("gnn_spmm_plugin would have to add self loops")
        counters["graphs_built"] += 1
        with _building():
            setattr(core.derived, key, _add_loops(core.half(flipped)))
    return True


def _add_loops(csr: Csr) -> SelfLoops:
    # A loop is the last edge of its row, so that nothing needs sorting.
    n, device = csr.num_rows, csr.col.device
    rows, col = csr.rows(), csr.col
    ids = torch.arange(col.shape[0], device=device) if csr.perm is None else csr.perm.long()
    rowptr, kept, loop = csr.rowptr, None, None
    is_loop = rows == col
    if bool(is_loop.any()):
        mask = ~is_loop
        keep = csr.in_caller_order(mask)
        kept = keep.nonzero().flatten()
        loop = torch.full((n,), -1, device=device).scatter_reduce_(0, rows[is_loop].long(), ids[is_loop], "amax")
        rows, col, ids = rows[mask], col[mask], (keep.cumsum(0) - 1)[ids[mask]]
        rowptr = _rowptr(rows, n, rowptr.dtype)
    num_edges = col.shape[0]
    dtype = _index_dtype(n, num_edges + n)
    nodes = torch.arange(n, device=device)
    at = torch.cat([torch.arange(num_edges, device=device) + rows, rowptr[1:] + nodes])
    with_loops = torch.empty(num_edges + n, dtype=dtype, device=device)
    perm = torch.empty_like(with_loops)
    with_loops[at] = torch.cat([col.to(dtype), nodes.to(dtype)])
    perm[at] = torch.cat([ids.to(dtype), (nodes + num_edges).to(dtype)])
    steps = torch.arange(n + 1, device=device)
    graph = Graph._make(Core(Csr((rowptr + steps).to(dtype), with_loops, perm, n)))
    return SelfLoops(graph, kept, loop)


def gcn_norm(
    graph: Graph,
    weight: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    add_self_loops: bool = True,
    improved: bool = False,
) -> Normalized:
    """The normalised adjacency of graph convolutions.

    Args:
        graph: as many source as destination nodes.
        weight: ``[E]`` edge weights in the caller's order; None: the graph's own, or ones.
        dtype: dtype of the features, and of the weights of the result.
        add_self_loops: give each node a self loop, of weight 1 unless it has one already.
        improved: of weight 2 instead; as in PyG, only where the edges have weights at all.

    Raises:
        TypeError, ValueError: `weight` does not fit the graph, or the graph is bipartite.
    """
    _check_square(graph)
    if weight is None:
        weight = graph.weight
    if weight is None:
        return _unweighted(graph, dtype, add_self_loops)
    check_weight(graph, weight)
    if weight.dim() != 1:
        raise ValueError(f"weight must have shape [num_edges] to be normalised, got {list(weight.shape)}")
    learned = weight.requires_grad and torch.is_grad_enabled()
    if learned or weight.is_inference() or torch.compiler.is_compiling():
        return _weighted(graph, weight, dtype, add_self_loops, improved)
    # A constant weight: fold the scale into it, once. On the CPU, where writes through NumPy pass by the version
    # counter, it is compared with a copy, as implicit graphs are; on CUDA only under GSP_LOG=verify.
    derived, key = graph._core.derived, f"gcn_weighted{graph._flipped:d}{add_self_loops:d}{improved:d}_{str(dtype)[6:]}"
    compare = not weight.is_cuda or verify_always()
    kept: tuple[weakref.ref[Tensor], Any, Tensor, Tensor | None] | None = derived.get(key)
    same = kept is not None and kept[0]() is weight and kept[1] == state(weight)
    if kept is None or not same or (compare and (kept[3] is None or not unchanged(kept[3], weight))):
        _refuse_capture("gnn_spmm_plugin would have to normalise edge weights")
        with _building():
            constant = weight.detach()
            made = _weighted(graph, constant, dtype, add_self_loops, improved).edge_weight(dtype)
            kept = weakref.ref(weight), state(weight), made, constant.clone() if compare else None
        setattr(derived, key, kept)
    return Normalized(with_self_loops(graph).graph if add_self_loops else graph, kept[2], None)


def _weighted(graph: Graph, weight: Tensor, dtype: torch.dtype, add_self_loops: bool, improved: bool) -> Normalized:
    graph = graph.with_weight(None)
    if add_self_loops:
        loops = with_self_loops(graph)
        graph, weight = loops.graph, loops.weights(weight, 2.0 if improved else 1.0)
    ones = torch.ones(graph.num_src, 1, dtype=accumulation_dtype(dtype), device=weight.device)
    degree = spmm(graph, ones, weight)
    assert isinstance(degree, Tensor)
    return Normalized(graph, weight.to(dtype), _inverse_root(degree.squeeze(1)).to(dtype))


def _unweighted(graph: Graph, dtype: torch.dtype, add_self_loops: bool) -> Normalized:
    core, flipped, dtype = graph._core, graph._flipped, accumulation_dtype(dtype)
    structure = with_self_loops(graph).graph if add_self_loops else graph
    # The name says all that the result depends on; a string, because torch.compile reads it.
    name = f"gcn{flipped:d}{add_self_loops:d}_{str(dtype)[6:]}"
    core.while_tracing(_prepare_gcn, flipped, dtype, add_self_loops, name)
    return Normalized(structure, None, getattr(core.derived, name))


def _prepare_gcn(core: Core, flipped: bool, dtype: torch.dtype, add_self_loops: bool, name: str) -> bool:
    if core.derived.get(name) is None:
        _refuse_capture("gnn_spmm_plugin would have to normalise a graph")
        with _building():
            degree = core.half(flipped).degree()
            if add_self_loops:
                degree = core.derived.get("loops_t" if flipped else "loops").graph._csr.degree()
            setattr(core.derived, name, _inverse_root(degree.to(dtype)))
    return True


@contextlib.contextmanager
def _building() -> Iterator[None]:
    """For what is kept: plain tensors without gradients, whatever mode or functional transform is on meanwhile."""
    with _disable_current_modes(), outside_transforms(), torch.inference_mode(False), torch.no_grad():
        yield


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Where ``torch.func`` does not wrap results, which would outlive its call."""
    active = torch._C._are_functorch_transforms_active()
    return torch._C._DisableFuncTorch() if active else contextlib.nullcontext()


def _inverse_root(degree: Tensor) -> Tensor:
    root = degree.pow(-0.5)
    return root.masked_fill(root == torch.inf, 0)


__all__ = ["Normalized", "SelfLoops", "gcn_norm", "scaled_sum", "with_self_loops"]
