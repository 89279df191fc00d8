"""`GCNConv`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..functional_edge_index import spmm_edge_index
from ..graph import Graph
from ..normalize import Normalized, gcn_norm
from .conv import SpMMConv, swaps, transforms_first
from .host import Linear


class GCNConv(SpMMConv):
    """Graph convolution, ``D^-1/2 (A + I) D^-1/2 x W + b``, with PyG's arguments and parameters.

    The normalised graph is kept with the `Graph` (or with the ``edge_index``, for as long as it lives and does not
    change), so `cached` saves nothing here; it only fixes the graph of the first call, as it does in PyG. The product
    with the graph comes before the transformation of the features where it is cheaper there.

    Args:
        in_channels: width of the input, or -1 to take it from the first input.
        out_channels: width of the output.
        improved: self loops of weight 2. As in PyG, they weigh 1 all the same where the edges have no weights.
        cached: use the graph of the first call in all others.
        add_self_loops: whether to add self loops; by default where `normalize`.
        normalize: whether to normalise; else the product is with the graph and weights as they are.
        bias: whether to add a learned bias.
        policy: how a kernel is chosen, see `gnn_spmm_plugin.plan`.
        **kwargs: as `SpMMConv`.

    Raises:
        ValueError: self loops without normalisation.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        improved: bool = False,
        cached: bool = False,
        add_self_loops: bool | None = None,
        normalize: bool = True,
        bias: bool = True,
        policy: str = "auto",
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("aggr", "add")
        super().__init__(policy=policy, **kwargs)
        if add_self_loops is None:
            add_self_loops = normalize
        if add_self_loops and not normalize:
            raise ValueError(f"{type(self).__name__} adds self loops only where it normalises; pass normalize=True")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.improved, self.cached = improved, cached
        self.add_self_loops, self.normalize = add_self_loops, normalize
        self._cached_graph: Normalized | None = None
        self.lin = Linear(in_channels, out_channels, bias=False, weight_initializer="glorot")
        self.bias = torch.nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new start values, and forgets a cached graph."""
        super().reset_parameters()
        self.lin.reset_parameters()
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)
        self._cached_graph = None

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """Convolves.

        Args:
            x: ``[N, in_channels]``.
            edge_index: a `Graph`, DGLGraph, ``[2, E]`` int32 or int64, or a sparse matrix whose rows are destinations.
            edge_weight: ``[E]`` in the order of the edges; None: those of the `Graph` or matrix, or ones.

        Returns:
            ``[N, out_channels]``.

        Raises:
            IndexError: an index is out of range.
            TypeError, ValueError: a pair of features (the graph must not be bipartite), or shapes that do not fit.
        """
        if isinstance(x, (tuple, list)):
            raise ValueError(
                f"{type(self).__name__} takes one tensor of features, not a pair: it does not support bipartite "
                "graphs; use SAGEConv or GraphConv"
            )
        if not isinstance(edge_index, Graph):
            edge_index = self._adjacency(edge_index)
        if self._transforms_first(x):
            return self._product(self.lin(x), x.dtype, edge_index, edge_weight, self.bias)
        return F.linear(self._product(x, x.dtype, edge_index, edge_weight, None), self.lin.weight, self.bias)

    def _transforms_first(self, x: Tensor) -> bool:
        return not self._one("sum", "mean") or not swaps(self.lin, x) or transforms_first(self.lin.weight, x)

    def _product(
        self, x: Tensor, dtype: torch.dtype, adjacency: Any, edge_weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        if not self.normalize:
            out = self.propagate(adjacency, x=x, edge_weight=edge_weight)
            return out if bias is None else out + bias
        if self.cached and self._cached_graph is not None:
            return self._propagate_normalized(self._cached_graph, x, dtype, bias)
        num_nodes = x.shape[self.node_dim]
        if not isinstance(adjacency, Graph):
            if torch.compiler.is_compiling() and self._fused is not None and x.dim() == 2:
                out = self._opaque(x, dtype, adjacency, edge_weight)
                return out if bias is None else out + bias
            adjacency = self._find(adjacency, num_nodes, num_nodes)
        norm = gcn_norm(adjacency, edge_weight, dtype, self.add_self_loops, self.improved)
        if self.cached and not torch.compiler.is_compiling():
            self._cached_graph = norm
        return self._propagate_normalized(norm, x, dtype, bias)

    def _opaque(self, x: Tensor, dtype: torch.dtype, edge_index: Tensor, edge_weight: Tensor | None) -> Tensor:
        assert self._fused is not None
        if edge_weight is not None and edge_weight.requires_grad:
            return self._opaque_learned(x, edge_index, edge_weight)
        outs = [
            spmm_edge_index(
                x,
                edge_index,
                edge_weight,
                x.shape[0],
                x.shape[0],
                reverse=self.flow == "target_to_source",
                reduce=reduce,
                tie=tie,
                policy=self.policy,
                norm=True,
                loops=self.add_self_loops,
                improved=self.improved,
                dtype=dtype,
            )
            for reduce, tie in self._fused
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs, -1)

    def _opaque_learned(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        """The same with learned weights: the normalisation is compiled too, in shapes that do not depend on data."""
        if self._fused is None or [reduce for reduce, _ in self._fused] != ["sum"]:
            raise NotImplementedError(
                f"{type(self).__name__}(aggr={self.aggr!r}) with learned edge weights does not compile on a plain "
                "edge_index; pass a gnn_spmm_plugin.Graph"
            )

        def product(features: Tensor) -> Tensor:
            return self._aggregate_plain(edge_index, features, weight, x.shape[0], "sum", "first")

        weight, loops = edge_weight, edge_weight.new_zeros(x.shape[0])
        if self.add_self_loops:
            src, is_loop = edge_index[0].long(), edge_index[0] == edge_index[1]
            edge = torch.arange(src.shape[0], device=src.device)
            last = torch.full_like(loops, -1, dtype=torch.long)
            last = last.scatter_reduce(0, src, torch.where(is_loop, edge, -1), "amax")
            fill = torch.full_like(loops, 2.0 if self.improved else 1.0)
            if src.shape[0]:
                loops = torch.where(last >= 0, edge_weight[last.clamp(min=0)], fill)
                weight = edge_weight.masked_fill(is_loop, 0)
            else:
                loops = fill
        degree = product(x.new_ones(x.shape[0], 1)) + loops.unsqueeze(1)
        root = degree.pow(-0.5)
        scaled = x * root.masked_fill(root == torch.inf, 0)
        return (product(scaled) + scaled * loops.unsqueeze(1)) * root.masked_fill(root == torch.inf, 0)
