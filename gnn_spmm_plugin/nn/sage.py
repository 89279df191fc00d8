"""`SAGEConv`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..graph import Graph
from .conv import SpMMConv, swaps, transforms_first
from .host import Linear


class SAGEConv(SpMMConv):
    """GraphSAGE, ``W_l aggregate(neighbours' x) + W_r x``, with PyG's arguments and parameters.

    Where the aggregation is linear, the features are transformed before it or after it, whichever is cheaper.

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
            edge_index: a `Graph`, DGLGraph, ``[2, E]`` int32 or int64, or a sparse matrix whose rows are destinations.
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
        lin, root = self.lin_l, self.lin_r(root) if self.root_weight and root is not None else None
        if self._one("sum", "mean") and swaps(lin, x[0]) and transforms_first(lin.weight, x[0]):
            x = (F.linear(x[0], lin.weight), x[1])
            out = self._propagate_and_add(edge_index, size, x, root, bias=lin.bias)
        else:
            out = lin(self.propagate(edge_index, x=x, size=size))
            out = out if root is None else out + root
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, aggr={self.aggr})"
