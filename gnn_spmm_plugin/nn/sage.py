"""`SAGEConv`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parameter import UninitializedParameter

from ..graph import Graph
from .conv import SpMMConv
from .host import Linear


class SAGEConv(SpMMConv):
    """GraphSAGE, ``W_l aggregate(neighbours' x) + W_r x``, with PyG's arguments and parameters.

    Where the layer narrows its input and the aggregation is linear, it transforms before it aggregates.

    Args:
        in_channels: width of the input (-1: taken from the first input), or a pair (source, destination).
        out_channels: width of the output.
        aggr: ``"mean"``, ``"max"``, ``"sum"``, ``"min"``, a list of these, an `SpMMAggregation`, with PyG any other
            aggregation; or ``"pool"``, GraphSAGE's pooling: short for ``aggr="max", project=True``.
        normalize: scale each row of the output to length 1.
        root_weight: whether to add the transformed features of the node itself.
        project: apply a linear layer and a ReLU to the features before aggregation.
        bias: whether to add a learned bias.
        policy: how a kernel is chosen, see `gnn_spmm_plugin.plan`.
        **kwargs: as `SpMMConv`.

    Raises:
        ValueError: `project` together with a width of -1, or an unknown aggregation.
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        aggr: Any = "mean",
        normalize: bool = False,
        root_weight: bool = True,
        project: bool = False,
        bias: bool = True,
        policy: str = "auto",
        **kwargs: Any,
    ) -> None:
        if aggr == "pool":
            aggr, project = "max", True
        width, root_width = (in_channels, in_channels) if isinstance(in_channels, int) else in_channels
        if aggr == "lstm":
            kwargs["aggr_kwargs"] = {"in_channels": width, "out_channels": width, **(kwargs.get("aggr_kwargs") or {})}
        super().__init__(aggr, policy=policy, **kwargs)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.normalize, self.root_weight, self.project = normalize, root_weight, project
        if project:
            if width <= 0:
                raise ValueError(
                    f"{type(self).__name__} needs to know in_channels where project=True, got {in_channels}"
                )
            self.lin = Linear(width, width, bias=True)
        self.lin_l = Linear(self._aggregated_width(width), out_channels, bias=bias)
        if root_weight:
            self.lin_r = Linear(root_width, out_channels, bias=False)
        self.reset_parameters()

    def _aggregated_width(self, width: int) -> int:
        if self._fused is not None:
            return width * len(self._fused)
        of_many: Any = getattr(self.aggr_module, "get_out_channels", None)  # PyG's MultiAggregation
        return width if of_many is None else int(of_many(width))

    def reset_parameters(self) -> None:
        """Draws new start values."""
        super().reset_parameters()
        if self.project:
            self.lin.reset_parameters()
        self.lin_l.reset_parameters()
        if self.root_weight:
            self.lin_r.reset_parameters()

    def forward(self, x: Any, edge_index: Any, size: tuple[int | None, int | None] | None = None) -> Tensor:
        """Convolves.

        Args:
            x: ``[N, F]``, or (source features, destination features or None) for a bipartite graph.
            edge_index: a `Graph`, ``[2, E]`` int32 or int64, or a sparse matrix whose rows are destinations.
            size: numbers of nodes (sources, destinations), where the features do not say it.

        Returns:
            ``[number of destinations, out_channels]``.
        """
        if isinstance(x, Tensor):
            x = (x, x)
        if not isinstance(edge_index, Graph):
            edge_index = self._adjacency(edge_index, keep_values=False)
        root = x[1]
        if self.project:
            x = (self.lin(x[0]).relu(), x[1])
        if self._narrows(x[0]):
            out = self.propagate(edge_index, x=(F.linear(x[0], self.lin_l.weight), x[1]), size=size)
            out = out if self.lin_l.bias is None else out + self.lin_l.bias
        else:
            out = self.lin_l(self.propagate(edge_index, x=x, size=size))
        if self.root_weight and root is not None:
            out = out + self.lin_r(root)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    def _narrows(self, x: Tensor) -> bool:
        """Whether to transform before aggregating: only where nobody could tell."""
        lin = self.lin_l
        if self._fused is None or len(self._fused) != 1 or self._fused[0][0] not in ("sum", "mean"):
            return False
        if (
            type(lin) is not Linear
            or isinstance(lin.weight, UninitializedParameter)
            or lin.weight.shape[0] >= lin.weight.shape[1]
        ):
            return False
        if lin._forward_hooks or lin._forward_pre_hooks or torch.is_autocast_enabled(x.device.type):
            return False
        return self._may_fuse()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, aggr={self.aggr})"
