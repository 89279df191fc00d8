"""The symmetric normalisation of graph convolutions, D^-1/2 (A + I) D^-1/2, computed once for each graph.

It is never written down: self loops are a factor of each node's own features, and where edges have no weights the
normalisation is a factor of each node. What is kept hangs on the graph it was made from and dies with it, so a layer
that is called with the same graph again has nothing left to do.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import _len_torch_function_stack  # type: ignore[attr-defined]
from torch.utils._python_dispatch import _disable_current_modes

from . import _native
from ._config import counters, verify_always
from ._native import accumulation_dtype
from .csr import Core, Csr, _index_dtype, _refuse_capture, _rowptr, capturing, state, unchanged
from .functional import _check_features
from .functional_aggregate import aggregate, aggregate_unchecked, check_vector
from .graph import Graph, check_weight


class Normalized(NamedTuple):
    """A normalised adjacency; its product with x is ``scale * (graph(weight) @ (scale * x)) + loop * x``.

    Attributes:
        graph: the structure. Where self loops were asked for and there are weights, without any; without weights, with
            those that it had, and `loop` is what is missing of them.
        weight: ``[E]`` edge weights in the graph's own edge order, or None for ones.
        scale: ``[N]`` factor of each node, or None for ones; float32, or float64 for float64, where `weight` is None.
        loop: ``[N]`` factor of a node's own features, or None for zeros.
    """

    graph: Graph
    weight: Tensor | None
    scale: Tensor | None
    loop: Tensor | None

    @property
    def transposed(self) -> Normalized:
        """The transposed adjacency."""
        return self._replace(graph=self.graph.T)

    def product(
        self, x: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None, policy: str = "auto"
    ) -> Tensor:
        """The product with `x`, plus `bias`; one kernel, unless the weights are learned.

        Args:
            x: ``[N, F]``.
            bias: ``[F]``.
            dtype: of the normalised weights, as far as they decide the dtype of the result; that of `x` unless given.
            policy: as in `gnn_spmm_plugin.spmm`.

        Returns:
            ``[N, F]``, differentiable any number of times.
        """
        result = x.dtype if dtype is None or dtype == x.dtype else torch.promote_types(x.dtype, dtype)
        if self.scale is not None and self.scale.requires_grad:
            scale = self.scale.unsqueeze(1)
            out = aggregate(self.graph, x.to(result) * scale, self.weight, policy=policy) * scale
            out = out if self.loop is None else out + self.loop.unsqueeze(1) * x
            return out if bias is None else out + bias
        _check_features(self.graph, x, self.graph.num_src, "x", "source nodes")
        if x.dim() != 2:
            raise ValueError(f"x must have shape [num_nodes, features], got {list(x.shape)}")
        if bias is not None:
            check_vector(self.graph, bias, "bias", x.shape[1])
            result = result if bias.dtype == result else torch.promote_types(result, bias.dtype)
        own, scales = None if self.loop is None else x, (self.scale, self.scale)
        return aggregate_unchecked(self.graph, x, self.weight, "sum", own, self.loop, bias, *scales, result, policy)

    def as_edges(self, dtype: torch.dtype) -> tuple[Graph, Tensor]:
        """The same as a graph whose edges are all there is, self loops last, and ``[E]`` weights of `dtype`."""
        graph, weight, loop = self.graph, self.weight, self.loop
        if weight is None and loop is not None:
            assert self.scale is not None
            graph, loop = without_self_loops(graph).graph, self.scale * self.scale
        if self.scale is not None:
            src, dst = graph.edge_index()
            both = self.scale[src] * self.scale[dst]
            weight = both if weight is None else both * weight
        assert weight is not None
        if loop is None:
            return graph, weight.to(dtype)
        return with_self_loops(graph), torch.cat([weight, loop.to(weight.dtype)]).to(dtype)


class SelfLoops(NamedTuple):
    """A graph without its self loops, and which those were.

    Attributes:
        graph: the graph; the very one that was asked for, where that has none.
        kept: ``[E']`` int64 ids of the edges that are no self loops, or None where all are.
        loop: ``[N]`` int64 id of the last self loop of each node, -1 for none; None where there is none at all.
    """

    graph: Graph
    kept: Tensor | None
    loop: Tensor | None

    def weights(self, weight: Tensor, fill: float) -> tuple[Tensor, Tensor]:
        """``[E']`` edge weights, and ``[N]`` those of the self loops, from the ``[E]`` of the graph as it was.

        A self loop that is new weighs `fill`, one of those before what it weighed.
        """
        loops = weight.new_full((self.graph.num_dst,), fill)
        if self.kept is None or self.loop is None:
            return weight, loops
        old = weight.index_select(0, self.loop.clamp(min=0))
        return weight.index_select(0, self.kept), torch.where(self.loop >= 0, old, loops)


def without_self_loops(graph: Graph) -> SelfLoops:
    """`graph` without its self loops, made at the first call and kept with it; in a bipartite graph: edges i -> i."""
    graph._core.while_tracing(_prepare_no_loops)
    core, kept, loop = graph._core.derived.no_loops  # type: ignore[attr-defined]
    if core is None:
        return SelfLoops(graph.with_weight(None), None, None)
    return SelfLoops(Graph._make(core, graph._flipped), kept, loop)


def with_self_loops(graph: Graph) -> Graph:
    """A graph that has no self loops with one on each node, after all other edges; made once and kept with it.

    In a bipartite graph, on each number that is a source and a destination.
    """
    graph._core.while_tracing(_prepare_loops)
    return Graph._make(graph._core.derived.loops, graph._flipped)  # type: ignore[attr-defined]


def _check_square(graph: Graph) -> None:
    if graph.num_src != graph.num_dst:
        raise ValueError(
            f"self loops and symmetric normalisation need as many source as destination nodes, got {graph.num_src} and "
            f"{graph.num_dst}; use normalize=False, or a layer for bipartite graphs such as SAGEConv"
        )


def _prepare_no_loops(core: Core) -> bool:
    """Builds, while tracing where it is traced, what the compiled code reads from ``core.derived``."""
    if core.derived.get("no_loops") is None:
        _refuse_capture("gnn_spmm_plugin would have to look for self loops")
        with _building():
            setattr(core.derived, "no_loops", _remove_loops(core.csr))  # noqa: B010
    return True


def _remove_loops(csr: Csr) -> tuple[Core | None, Tensor | None, Tensor | None]:
    """The graph without its self loops, or None where it has none (a core must not hold itself); kept and loop."""
    rows = csr.rows()
    is_loop = rows == csr.col
    at = is_loop.nonzero().flatten()  # waits for the device, once more below
    if at.shape[0] == 0:
        return None, None, None
    counters["graphs_built"] += 1
    n, device, dtype = csr.num_rows, csr.col.device, csr.col.dtype
    owner, ids = rows.index_select(0, at).long(), at if csr.perm is None else csr.perm.index_select(0, at).long()
    loop = torch.full((n,), -1, device=device).scatter_reduce_(0, owner, ids, "amax")
    stays = ~is_loop
    at = stays.nonzero().flatten()
    rowptr = _rowptr(rows.index_select(0, at), n, dtype)
    del rows, is_loop  # as long as the edges, like much of what follows
    col = csr.col.index_select(0, at)
    if csr.perm is None:
        return Core(Csr(rowptr, col, None, csr.num_cols)), at.to(dtype), loop
    keep = csr.in_caller_order(stays)
    perm = (keep.cumsum(0) - 1).index_select(0, csr.perm.index_select(0, at)).to(dtype)
    return Core(Csr(rowptr, col, perm, csr.num_cols)), keep.nonzero().flatten().to(dtype), loop


def _prepare_loops(core: Core) -> bool:
    if core.derived.get("loops") is None:
        _refuse_capture("gnn_spmm_plugin would have to add self loops")
        counters["graphs_built"] += 1
        with _building():
            setattr(core.derived, "loops", _add_loops(core.csr))  # noqa: B010
    return True


def _add_loops(csr: Csr) -> Core:
    # A loop is the last edge of its row, so that nothing needs sorting.
    n, num_edges, device = min(csr.num_rows, csr.num_cols), csr.col.shape[0], csr.col.device
    dtype = _index_dtype(csr.num_rows, csr.num_cols, num_edges + n)
    each, nodes = torch.arange(num_edges, device=device), torch.arange(n, device=device)
    ids = each if csr.perm is None else csr.perm
    before = csr.rows().clamp(max=n)  # loops in earlier rows
    at = torch.cat([each + before, csr.rowptr[1 : n + 1] + nodes])
    with_loops = torch.empty(num_edges + n, dtype=dtype, device=device)
    perm = torch.empty_like(with_loops)
    with_loops[at] = torch.cat([csr.col.to(dtype), nodes.to(dtype)])
    perm[at] = torch.cat([ids.to(dtype), (nodes + num_edges).to(dtype)])
    steps = torch.arange(csr.num_rows + 1, device=device).clamp(max=n)
    return Core(Csr((csr.rowptr + steps).to(dtype), with_loops, perm, csr.num_cols))


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
    kept: tuple[weakref.ref[Tensor], Any, tuple[Tensor, Tensor | None], Tensor | None] | None = derived.get(key)
    same = kept is not None and kept[0]() is weight and kept[1] == state(weight)
    if kept is None or not same or (compare and (kept[3] is None or not unchanged(kept[3], weight))):
        _refuse_capture("gnn_spmm_plugin would have to normalise edge weights")
        counters["norms_built"] += 1
        with _building():
            constant = weight.detach()
            made = _folded(_weighted(graph, constant, dtype, add_self_loops, improved), dtype)
            kept = weakref.ref(weight), state(weight), made, constant.clone() if compare else None
        setattr(derived, key, kept)
    if capturing(weight.device):  # read by the CUDA graph even when the weight has changed since
        graph._csr.pin(*kept[2])
    structure = without_self_loops(graph).graph if add_self_loops else graph.with_weight(None)
    return Normalized(structure, kept[2][0], None, kept[2][1])


def _weighted(graph: Graph, weight: Tensor, dtype: torch.dtype, add_self_loops: bool, improved: bool) -> Normalized:
    graph, loops = graph.with_weight(None), None
    if add_self_loops:
        without = without_self_loops(graph)
        graph = without.graph
        weight, loops = without.weights(weight, 2.0 if improved else 1.0)
    ones = torch.ones(graph.num_src, 1, dtype=accumulation_dtype(dtype), device=weight.device)
    degree = aggregate(graph, ones, weight).squeeze(1)
    scale = _inverse_root(degree if loops is None else degree + loops)
    loop = None if loops is None else (scale * loops * scale).to(dtype)
    return Normalized(graph, weight.to(dtype), scale.to(dtype), loop)


def _folded(a: Normalized, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Weight and scale as one number for each edge, and the loops."""
    weight = a._replace(loop=None).as_edges(dtype)[1]
    return weight, a.loop


def _unweighted(graph: Graph, dtype: torch.dtype, add_self_loops: bool) -> Normalized:
    core, flipped, dtype = graph._core, graph._flipped, accumulation_dtype(dtype)
    # The name says all that the result depends on; a string, because torch.compile reads it.
    name = f"gcn{flipped:d}{add_self_loops:d}_{str(dtype)[6:]}"
    core.while_tracing(_prepare_gcn, flipped, dtype, add_self_loops, name)
    scale, loop = getattr(core.derived, name)
    return Normalized(graph if graph._weight is None else graph.with_weight(None), None, scale, loop)


def _prepare_gcn(core: Core, flipped: bool, dtype: torch.dtype, add_self_loops: bool, name: str) -> bool:
    if core.derived.get(name) is None:
        _refuse_capture("gnn_spmm_plugin would have to normalise a graph")
        counters["norms_built"] += 1
        with _building():
            csr = core.half(flipped)
            scale, loop = _native.gcn_scales(csr.rowptr, csr.col, add_self_loops, dtype)
            setattr(core.derived, name, (scale, loop if add_self_loops else None))
    return True


def _building() -> contextlib.AbstractContextManager[Any]:
    """For what is kept: plain tensors without gradients, whatever mode or functional transform is on meanwhile."""
    modes = torch.is_inference_mode_enabled() or torch._C._len_torch_dispatch_stack() or _len_torch_function_stack()
    return _out_of_modes() if modes or torch._C._are_functorch_transforms_active() else torch.no_grad()


@contextlib.contextmanager
def _out_of_modes() -> Iterator[None]:
    with _disable_current_modes(), outside_transforms(), torch.inference_mode(False), torch.no_grad():
        yield


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Where ``torch.func`` does not wrap results, which would outlive its call."""
    active = torch._C._are_functorch_transforms_active()
    return torch._C._DisableFuncTorch() if active else contextlib.nullcontext()


def _inverse_root(degree: Tensor) -> Tensor:
    root = degree.pow(-0.5)
    return root.masked_fill(root == torch.inf, 0)


__all__ = ["Normalized", "SelfLoops", "gcn_norm", "with_self_loops", "without_self_loops"]
