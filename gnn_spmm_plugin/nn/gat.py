"""`GATConv`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..functional_attention import attend, coefficients
from ..functional_attention_edge_index import attend_edge_index, with_loops
from ..graph import Graph
from .conv import SpMMConv
from .host import Linear


class GATConv(SpMMConv):
    """Graph attention, with PyG's arguments and parameters.

    ``sum over the neighbours j, and i itself, of a_ij W x_j``, where ``a_ij`` is the softmax over them of
    ``leaky_relu(<att_src, W x_j> + <att_dst, W x_i>)``, for each head. Nothing larger than a number per edge and head
    is kept. (Velickovic et al., Graph Attention Networks, 2018.)

    Args:
        in_channels: width of the input (-1: taken from the first input), or a pair (source, destination).
        out_channels: width of each head of the output.
        heads: number of heads.
        concat: put the heads side by side; else their mean is taken.
        negative_slope: of the leaky ReLU.
        dropout: probability with which an attention coefficient is 0 in training.
        add_self_loops: give each node one self loop, in place of those that there are.
        edge_dim: must be None: there are no edge features.
        fill_value: of no consequence, since it is of edge features.
        bias: whether to add a learned bias.
        residual: whether to add a linear function of the node's own input.
        policy: how a kernel is chosen, see `gnn_spmm_plugin.plan`.
        **kwargs: as `SpMMConv`.

    Raises:
        ValueError: `edge_dim` is not None.
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: Any = "mean",
        bias: bool = True,
        residual: bool = False,
        policy: str = "auto",
        **kwargs: Any,
    ) -> None:
        if edge_dim is not None:
            raise ValueError(
                f"{type(self).__name__} has no edge features, got edge_dim={edge_dim}; use torch_geometric.nn.GATConv"
            )
        kwargs.setdefault("aggr", "add")
        super().__init__(policy=policy, node_dim=0, **kwargs)
        self.in_channels, self.out_channels, self.heads, self.concat = in_channels, out_channels, heads, concat
        self.negative_slope, self.dropout, self.add_self_loops = negative_slope, dropout, add_self_loops
        self.edge_dim, self.fill_value, self.residual = None, fill_value, residual
        self.lin = self.lin_src = self.lin_dst = self.res = None
        width = heads * out_channels
        glorot: Any = {"bias": False, "weight_initializer": "glorot"}
        if isinstance(in_channels, int):
            self.lin = Linear(in_channels, width, **glorot)
            own = in_channels
        else:
            self.lin_src = Linear(in_channels[0], width, **glorot)
            self.lin_dst = Linear(in_channels[1], width, **glorot)
            own = in_channels[1]
        self.att_src = torch.nn.Parameter(torch.empty(1, heads, out_channels))
        self.att_dst = torch.nn.Parameter(torch.empty(1, heads, out_channels))
        total = width if concat else out_channels
        if residual:
            self.res = Linear(own, total, **glorot)
        self.bias = torch.nn.Parameter(torch.empty(total)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new start values."""
        super().reset_parameters()
        for lin in (self.lin, self.lin_src, self.lin_dst, self.res):
            if lin is not None:
                lin.reset_parameters()
        bound = math.sqrt(6.0 / (self.heads + self.out_channels))
        for att in (self.att_src, self.att_dst):
            torch.nn.init.uniform_(att, -bound, bound)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Any,
        edge_index: Any,
        edge_attr: None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Convolves.

        Args:
            x: ``[N, F]``, or (source features, destination features or None) for a bipartite graph.
            edge_index: a `Graph`, ``[2, E]`` int32 or int64, or a sparse matrix whose rows are destinations. Weights
                that it carries are not used.
            edge_attr: must be None.
            size: numbers of nodes (sources, destinations), where the features do not say it.
            return_attention_weights: also return ``(edge_index, coefficients [E', H])``, of the edges that messages
                went along, self loops last.

        Returns:
            ``[number of destinations, heads * out_channels]``, or without `concat` ``[..., out_channels]``.

        Raises:
            IndexError: an index is out of range.
            TypeError, ValueError: arguments that do not fit; the message says how.
        """
        if edge_attr is not None:
            raise ValueError(f"{type(self).__name__} has no edge features; pass edge_attr=None")
        pair = isinstance(x, (tuple, list))
        source, own = x if pair else (x, x)
        if not isinstance(source, Tensor) or source.dim() != 2:
            raise ValueError(f"{type(self).__name__} takes features of shape [num_nodes, channels]")
        if not isinstance(edge_index, Graph):
            edge_index = self._adjacency(edge_index, keep_values=False)
        adjacency, _, num_dst = self._operands(edge_index, size, x)
        res = None if self.res is None or own is None else self.res(own)
        src, dst = self._transformed(source, own, pair)
        given: tuple[Tensor, ...] = ((src * self.att_src).sum(-1),)
        if dst is not None:
            given = (*given, (dst * self.att_dst).sum(-1))
        how: Any = {"slope": self.negative_slope, "policy": self.policy}
        p = self.dropout if self.training else 0.0
        whole = not return_attention_weights and self._one("sum")
        weights = None
        if isinstance(adjacency, Graph) or not whole or not torch.compiler.is_compiling():
            graph = adjacency if isinstance(adjacency, Graph) else self._find(adjacency, source.shape[0], num_dst)
            graph = with_loops(graph) if self.add_self_loops else graph.with_weight(None)
            if whole:
                out = attend(graph, src, "sum", given, dropout=p, **how)
            else:
                weights = coefficients(graph, "sum", given, slope=self.negative_slope, dropout=p)
                out = self.propagate(graph, x=(src, dst), edge_weight=weights)
        else:
            keep = None
            if p > 0:
                loops = min(source.shape[0], num_dst) if self.add_self_loops else 0
                keep = F.dropout(given[0].new_ones(adjacency.shape[1] + loops, self.heads), p)
            out = attend_edge_index(
                *(src, given, adjacency, source.shape[0], num_dst),
                score="sum",
                reverse=self.flow == "target_to_source",
                loops=self.add_self_loops,
                keep=keep,
                **how,
            )
        out = out.flatten(1) if self.concat else out.mean(1)
        for other in (res, self.bias):
            out = out if other is None else out + other
        if not return_attention_weights:
            return out
        edges = graph.edge_index()
        return out, (edges.flip(0) if self.flow == "target_to_source" else edges, weights)

    def _transformed(self, source: Tensor, own: Tensor | None, pair: bool) -> tuple[Tensor, Tensor | None]:
        """``[N, heads, out_channels]`` of the sources and, where there are any, of the destinations."""

        def heads(lin: Any, t: Tensor) -> Tensor:
            out: Tensor = lin(t)
            return out.view(-1, self.heads, self.out_channels)

        if self.lin is not None:
            src = heads(self.lin, source)
            return src, src if not pair else None if own is None else heads(self.lin, own)
        return heads(self.lin_src, source), None if own is None else heads(self.lin_dst, own)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, heads={self.heads})"
