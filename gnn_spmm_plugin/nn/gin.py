"""`GINConv`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..graph import Graph
from .conv import SpMMConv
from .host import reset


class GINConv(SpMMConv):
    """Graph isomorphism operator, ``nn((1 + eps) * x + sum of neighbours' x)``, with PyG's arguments and parameters.

    Args:
        nn: a module that maps the sum to the output.
        eps: start value of eps.
        train_eps: whether eps is learned.
        policy: how a kernel is chosen, see `gnn_spmm_plugin.plan`.
        **kwargs: as `SpMMConv`.
    """

    eps: Tensor

    def __init__(self, nn: Any, eps: float = 0.0, train_eps: bool = False, policy: str = "auto", **kwargs: Any) -> None:
        kwargs.setdefault("aggr", "add")
        super().__init__(policy=policy, **kwargs)
        self.nn = nn
        self.initial_eps = eps
        if train_eps:
            self.eps = torch.nn.Parameter(torch.empty(1))
        else:
            self.register_buffer("eps", torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new start values for `nn`, and resets eps."""
        super().reset_parameters()
        reset(self.nn)
        self.eps.data.fill_(self.initial_eps)

    def forward(self, x: Any, edge_index: Any, size: tuple[int | None, int | None] | None = None) -> Tensor:
        """Convolves.

        Args:
            x: ``[N, F]``, or (source features, destination features or None) for a bipartite graph.
            edge_index: a `Graph`, DGLGraph, ``[2, E]`` int32 or int64, or a sparse matrix whose rows are destinations.
            size: numbers of nodes (sources, destinations), where the features do not say it.

        Returns:
            what `nn` makes of ``[number of destinations, F]``.
        """
        if isinstance(x, Tensor):
            x = (x, x)
        if not isinstance(edge_index, Graph):
            edge_index = self._adjacency(edge_index, keep_values=False)
        scale = None if x[1] is None else 1 + self.eps
        result: Tensor = self.nn(self._propagate_and_add(edge_index, size, x, x[1], scale))
        return result

    def __repr__(self) -> str:
        return f"{type(self).__name__}(nn={self.nn})"
