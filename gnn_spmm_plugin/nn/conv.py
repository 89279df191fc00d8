"""`SpMMConv`: message passing whose messages are never written, for this package's layers and for a user's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from .._config import counters
from .._native import autocasts
from ..cache import graph_of
from ..csr import Csr
from ..dgl_index import graph_of_dgl, is_dgl
from ..functional import TIES, spmm
from ..functional_aggregate import aggregate
from ..functional_edge_index import spmm_edge_index
from ..graph import Graph, shape_advice
from ..normalize import Normalized, outside_transforms
from ..policy import POLICIES
from .aggregation import fused_reduction
from .host import HAS_PYG, Linear, MessagePassing

#: Where PyG keeps its message-passing hooks; a hook must see messages, so there must be some.
_HOOKS = tuple(
    f"_{where}_forward_{when}"
    for where in ("propagate", "message", "aggregate", "message_and_aggregate")
    for when in ("pre_hooks", "hooks")
)
_OVERRIDABLE = ("message", "aggregate", "update", "message_and_aggregate")
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)

# PyG's own propagate. When somebody makes an object of MessagePassing itself, PyG replaces it, and keeps this one.
_host_propagate: Any = getattr(MessagePassing, "_orig_propagate", getattr(MessagePassing, "propagate", None))


class SpMMConv(MessagePassing):
    """Base class of layers that aggregate the features of neighbours, weighted or not, in one kernel.

    Where PyG is installed it is a `torch_geometric.nn.MessagePassing`, to be used in the same way::

        class MyConv(gsp.nn.SpMMConv):
            def __init__(self, in_channels, out_channels):
                super().__init__(aggr="mean")
                self.lin = torch.nn.Linear(in_channels, out_channels)

            def forward(self, x, edge_index, edge_weight=None):
                return self.propagate(edge_index, x=self.lin(x), edge_weight=edge_weight)

    The message is fixed: the features of the source node, times the edge weight. A subclass that overrides `message`,
    `aggregate` or `update`, an aggregation that is no kernel, message-passing hooks and explainers take PyG's own
    path, with the same result; ``gsp.stats()["fallbacks"]`` counts them.

    Args:
        aggr: ``"sum"`` (or ``"add"``), ``"mean"``, ``"max"``, ``"min"``, an `SpMMAggregation`, a list of these (results
            are concatenated), or, with PyG, any other aggregation.
        tie: for max and min, who gets the gradient where several neighbours attain the extremum: ``"first"`` or
            ``"split"``.
        policy: how a kernel is chosen, see `gnn_spmm_plugin.plan`.
        **kwargs: as PyG's `MessagePassing`: flow, node_dim, aggr_kwargs, decomposed_layers.

    Raises:
        ValueError: an argument is none of its choices.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # PyG replaces an inherited `propagate` on the class, at the first object and again whenever one is copied or
        # loaded; it leaves alone what is in the class's own __dict__.
        if "propagate" not in cls.__dict__:
            setattr(cls, "propagate", cls.propagate)  # noqa: B010 (mypy: a method)

    def __init__(self, aggr: Any = "sum", *, tie: str = "first", policy: str = "auto", **kwargs: Any) -> None:
        for name, value, choices in (("tie", tie, TIES), ("policy", policy, POLICIES)):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
        super().__init__(aggr, **kwargs)
        self.tie, self.policy = tie, policy
        many = isinstance(aggr, (list, tuple))
        fused = [fused_reduction(a, tie) for a in (aggr if many else [aggr])]
        self._fused: list[tuple[str, str]] | None = None
        overridden = [n for n in _OVERRIDABLE if getattr(type(self), n, None) is not getattr(SpMMConv, n, None)]
        if all(f is not None for f in fused) and not kwargs.get("aggr_kwargs") and not overridden:
            self._fused = [f for f in fused if f is not None]
        elif not HAS_PYG:
            raise ValueError(
                f"{type(self).__name__} needs torch_geometric, because it overrides {', '.join(overridden)}; "
                "install it, or leave the message to SpMMConv"
            )

    def message(self, x_j: Tensor, edge_weight: Tensor | None) -> Tensor:
        """The message along each edge; only PyG's own path asks for it."""
        if edge_weight is None:
            return x_j
        by_head = edge_weight.dim() == 2 and x_j.dim() == 3 and self.node_dim == 0
        return (edge_weight.unsqueeze(-1) if by_head else edge_weight.view(-1, 1)) * x_j

    def propagate(
        self,
        edge_index: Any,
        size: tuple[int | None, int | None] | None = None,
        *,
        x: Any,
        edge_weight: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Aggregates ``edge_weight * x[source]`` into each destination.

        Args:
            edge_index: a `Graph`, a DGLGraph with one relation, ``[2, E]`` int32 or int64, or a sparse matrix whose
                rows are destinations. A `Graph` or DGLGraph knows its direction, so `flow` says nothing about it;
                weights that a `Graph` or a matrix carries are used.
            size: ``(number of nodes of edge_index[0], of edge_index[1])`` where the features do not say it.
            x: ``[N, F]``, or for a bipartite graph the pair (source features, destination features or None).
            edge_weight: ``[E]``, or None; or ``[E, H]`` where `x` is ``[N, H, F]`` and ``node_dim`` 0.
            **kwargs: further arguments, for a subclass with a message of its own.

        Returns:
            ``[number of destinations, F]``.

        Raises:
            IndexError: an index is out of range.
            TypeError, ValueError: arguments that do not fit; the message says how.
        """
        if self._fused is None or not self._may_fuse():
            return self._propagate_unfused(edge_index, size, x=x, edge_weight=edge_weight, **kwargs)
        adjacency, features, num_dst = self._operands(edge_index, size, x)
        if edge_weight is not None and edge_weight.dim() == 2 and edge_weight.shape[1] == 1:
            edge_weight = edge_weight.squeeze(1)
        if isinstance(adjacency, Graph):
            outs = [self._aggregate(adjacency, features, edge_weight, *f) for f in self._fused]
        else:
            outs = [self._aggregate_plain(adjacency, features, edge_weight, num_dst, *f) for f in self._fused]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, -1)
        move = out.dim() != 2 or self.node_dim not in (-2, 0)
        return out.movedim(0, self.node_dim).contiguous() if move else out

    def _operands(self, edge_index: Any, size: Any, x: Any) -> tuple[Any, Tensor, int]:
        """The graph or edge_index, the features of the sources with the nodes first, and how many destinations."""
        if not isinstance(edge_index, Graph):
            edge_index = self._adjacency(edge_index)
        pair = isinstance(x, (tuple, list))
        x_j, x_i = x if pair else (x, None)
        if not isinstance(x_j, Tensor):
            raise TypeError(
                f"{type(self).__name__}: the source features must be a torch.Tensor, got {type(x_j).__name__}"
            )
        move = x_j.dim() != 2 or self.node_dim not in (-2, 0)
        features = x_j.movedim(self.node_dim, 0) if move else x_j
        if isinstance(edge_index, Graph):
            if isinstance(x_i, Tensor) and x_i.shape[self.node_dim] != edge_index.num_dst:
                raise ValueError(
                    f"{type(self).__name__}: the graph has {edge_index.num_dst} destination nodes, but their features "
                    f"{x_i.shape[self.node_dim]} rows"
                )
            return edge_index, features, edge_index.num_dst
        i, j = (1, 0) if self.flow == "source_to_target" else (0, 1)
        # A pair is (nodes of edge_index[0], nodes of edge_index[1]), one tensor the sources: as PyG has it.
        num: list[int | None] = [None, None] if size is None else list(size)
        _set_size(num, 0 if pair else j, features.shape[0])
        if isinstance(x_i, Tensor):
            _set_size(num, 1, x_i.shape[self.node_dim])
        given = num[i]
        return edge_index, features, features.shape[0] if given is None else given

    def _may_fuse(self) -> bool:
        if torch.compiler.is_compiling():  # PyG runs no hooks there either
            return True
        return not self.explain and not any(getattr(self, name, None) for name in _HOOKS)

    def _one(self, *reduces: str) -> bool:
        """Whether all that aggregates is one of `reduces`, and nobody looks at the messages."""
        fused = self._fused is not None and len(self._fused) == 1 and self._fused[0][0] in reduces
        return fused and type(self).propagate is _own_propagate and self._may_fuse()

    def _propagate_and_add(
        self,
        edge_index: Any,
        size: Any,
        x: Any,
        self_x: Tensor | None = None,
        self_scale: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """``propagate(edge_index, size, x=x) + self_scale * self_x + bias``, in one kernel where that can be."""
        opaque = torch.compiler.is_compiling() and not isinstance(edge_index, Graph)
        flat = isinstance(x[0], Tensor) and x[0].dim() == 2 and self.node_dim in (-2, 0)
        if self._one("sum", "mean") and flat and not opaque:
            graph, features, num_dst = self._operands(edge_index, size, x)
            if not isinstance(graph, Graph):
                graph = self._find(graph, features.shape[0], num_dst)
            weight = graph.weight
            fits = self_x is None or self_x.shape == (num_dst, features.shape[1])
            if fits and (weight is None or weight.dim() == 1):
                assert self._fused is not None
                dtype = features.dtype if weight is None else torch.promote_types(features.dtype, weight.dtype)
                for t in (self_x, self_scale, bias):
                    dtype = dtype if t is None else torch.promote_types(dtype, t.dtype)
                return aggregate(
                    *(graph, features, weight, self._fused[0][0]),
                    self_x=self_x,
                    self_scale=self_scale,
                    bias=bias,
                    dtype=dtype,
                    policy=self.policy,
                )
        out = self.propagate(edge_index, x=x, size=size)
        if self_x is not None:
            out = out + (self_x if self_scale is None else self_scale * self_x)
        return out if bias is None else out + bias

    def _aggregate(self, graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, tie: str) -> Tensor:
        out = spmm(graph, x, weight, reduce, tie=tie, policy=self.policy)
        assert isinstance(out, Tensor)
        return out

    def _aggregate_plain(
        self, edge_index: Tensor, x: Tensor, weight: Tensor | None, num_dst: int, reduce: str, tie: str
    ) -> Tensor:
        num_src = x.shape[0]
        reverse = self.flow == "target_to_source"
        if torch.compiler.is_compiling():
            out = spmm_edge_index(
                x.flatten(1),
                edge_index,
                weight,
                num_src,
                num_dst,
                reverse=reverse,
                reduce=reduce,
                tie=tie,
                policy=self.policy,
            )
            return out.view(num_dst, *x.shape[1:])
        return self._aggregate(self._find(edge_index, num_src, num_dst), x, weight, reduce, tie)

    def _find(self, edge_index: Tensor, num_src: int, num_dst: int) -> Graph:
        reverse = self.flow == "target_to_source"
        with outside_transforms():
            return graph_of(edge_index[int(not reverse)], edge_index[int(reverse)], num_dst, num_src)

    def _adjacency(self, adjacency: Any, keep_values: bool = True) -> Any:
        """A sparse matrix or DGLGraph as a `Graph`; an ``edge_index`` as a plain tensor, shape and dtype checked."""
        if hasattr(adjacency, "as_tensor"):  # PyG's EdgeIndex
            adjacency = adjacency.as_tensor()
        if is_dgl(adjacency):
            return graph_of_dgl(adjacency)
        sparse = isinstance(adjacency, Tensor) and adjacency.layout in _SPARSE
        if sparse or hasattr(adjacency, "sparse_sizes"):
            if self.flow == "target_to_source":
                raise ValueError(
                    'flow="target_to_source" does not go with a sparse matrix (its rows are destinations): transpose it'
                )
            if not sparse:
                graph = Graph.from_sparse_tensor(adjacency)
                return graph if keep_values else graph.with_weight(None)
            return _of_sparse(adjacency)
        if not isinstance(adjacency, Tensor):
            advice = "; see Graph.from_scipy" if hasattr(adjacency, "tocoo") else ""
            raise TypeError(
                f"edge_index must be a gnn_spmm_plugin.Graph, a DGLGraph, a [2, num_edges] tensor or a torch sparse "
                f"matrix, got {type(adjacency).__name__}{advice}"
            )
        if adjacency.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"edge_index must have dtype torch.int32 or torch.int64, got {adjacency.dtype}; use .long(), or "
                f".to_sparse() if it is a dense adjacency matrix"
            )
        if adjacency.dim() != 2 or adjacency.shape[0] != 2:
            raise ValueError(f"edge_index must have shape [2, num_edges], got {shape_advice(adjacency)}")
        return adjacency

    def _propagate_unfused(self, edge_index: Any, size: Any, **kwargs: Any) -> Tensor:
        """PyG's path: writes the messages, runs hooks, multiplies by an explainer's mask."""
        counters["fallbacks"] += 1
        if not isinstance(edge_index, Graph):
            edge_index = self._adjacency(edge_index)
        if isinstance(edge_index, Graph):
            graph = edge_index
            edge_index, size = graph.edge_index(), (graph.num_src, graph.num_dst)
            if kwargs.get("edge_weight") is None:
                kwargs["edge_weight"] = graph.weight
            if self.flow == "target_to_source":
                edge_index, size = edge_index.flip(0), size[::-1]
                if isinstance(kwargs["x"], (tuple, list)):
                    kwargs["x"] = tuple(kwargs["x"][::-1])
        out: Tensor = _host_propagate(self, edge_index, size=size, **kwargs)
        return out

    def _propagate_normalized(self, norm: Normalized, x: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        """The product of a normalised adjacency with `x`, as if its weights were of `dtype`, plus `bias`."""
        if self._one("sum") and x.dim() == 2:
            return norm.product(x, bias, dtype, self.policy)
        graph, weight = norm.as_edges(dtype)
        out = self.propagate(graph, x=x, edge_weight=weight)
        return out if bias is None else out + bias


_own_propagate = SpMMConv.propagate
_own_linear = Linear.forward
_Module: Any = torch.nn.Module


def calls_replaced() -> bool:
    """Whether somebody has replaced what calls modules, as profilers and tracers do to see all calls."""
    return _Module.__call__ is not _Module._wrapped_call_impl


def swaps(lin: Any, x: Tensor) -> bool:
    """Whether nobody can tell if the linear layer `lin` comes before the product with a graph or after it."""
    if type(lin) is not Linear or x.dim() != 2:
        return False
    weight = lin.weight
    if isinstance(weight, UninitializedParameter) or weight.dtype != x.dtype:
        return False
    if lin._forward_hooks or lin._forward_pre_hooks or lin._backward_hooks or lin._backward_pre_hooks:
        return False
    if "forward" in lin.__dict__:
        return False
    if not torch.compiler.is_compiling() and (Linear.forward is not _own_linear or calls_replaced()):
        return False
    return not autocasts(x.device.type)


def transforms_first(weight: Tensor, x: Tensor) -> bool:
    """Whether the product with a graph is cheaper after `x` is multiplied by `weight` than before: by its columns.

    Those of both directions: what comes out has a gradient in training, what goes in perhaps not.
    """
    width_out, width_in = weight.shape
    if torch.is_grad_enabled() and not x.requires_grad and weight.requires_grad:
        width_out *= 2
    return bool(width_out <= width_in)


def _set_size(size: list[int | None], side: int, rows: int) -> None:
    if size[side] not in (None, rows):
        raise ValueError(f"size says {size[side]} nodes on side {side}, but their features have {rows} rows")
    size[side] = rows


def _of_sparse(A: Tensor) -> Graph:
    """The graph of a sparse matrix, its structure found again by content, with the matrix's values as weights."""
    num_dst, num_src = A.shape
    if A.layout == torch.sparse_coo:
        dst, src = A._indices()
        return graph_of(dst, src, num_dst, num_src).with_weight(A.values() if A.is_coalesced() else A._values())
    if A.layout == torch.sparse_csr:
        csr = Csr(A.crow_indices(), A.col_indices(), None, num_src)
        return graph_of(csr.rows(), csr.col, num_dst, num_src).with_weight(A.values())
    csr = Csr(A.ccol_indices(), A.row_indices(), None, num_dst)
    return graph_of(csr.col, csr.rows(), num_dst, num_src).with_weight(A.values())
