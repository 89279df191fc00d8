"""What the layers stand on: PyG's classes where PyG is installed, stand-ins with the same behaviour where it is not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from .._config import log

#: Reductions that run as one kernel, under the names that PyG knows them by.
FUSED = {"add": "sum", "sum": "sum", "mean": "mean", "max": "max", "min": "min"}


class PlainAggregation(torch.nn.Module):
    """PyG's `Aggregation` without PyG."""

    def reset_parameters(self) -> None:
        """Nothing to reset."""


class PlainMessagePassing(torch.nn.Module):
    """As much of PyG's `MessagePassing` as the layers need without PyG.

    Args:
        aggr: ``"sum"`` (or ``"add"``), ``"mean"``, ``"max"``, ``"min"``, an `SpMMAggregation`, or a list of these,
            whose results are concatenated.
        aggr_kwargs: must be empty.
        flow: ``"source_to_target"`` or ``"target_to_source"``.
        node_dim: dimension of the nodes in the features.
        decomposed_layers: accepted and ignored: there are no messages whose memory could be saved.

    Raises:
        ValueError: an aggregation or flow that is none of these.
    """

    explain = None

    def __init__(
        self,
        aggr: Any = "sum",
        *,
        aggr_kwargs: dict[str, Any] | None = None,
        flow: str = "source_to_target",
        node_dim: int = -2,
        decomposed_layers: int = 1,
    ) -> None:
        super().__init__()
        if flow not in ("source_to_target", "target_to_source"):
            raise ValueError(f"Expected 'flow' to be either 'source_to_target' or 'target_to_source' (got '{flow}')")
        every = list(aggr) if isinstance(aggr, (list, tuple)) else [aggr]
        unknown = [a for a in every if not isinstance(a, PlainAggregation) and a not in FUSED]
        if unknown or aggr_kwargs:
            raise ValueError(
                f"without torch_geometric, aggr must be one of {', '.join(FUSED)}, an SpMMAggregation, or a list of "
                f"these, got {aggr!r}{f' with {aggr_kwargs}' if aggr_kwargs else ''}; install it for others"
            )
        self.aggr = [str(a) for a in every] if isinstance(aggr, (list, tuple)) else str(aggr)
        self.aggr_module = aggr if isinstance(aggr, PlainAggregation) else None
        self.flow, self.node_dim = flow, node_dim

    def reset_parameters(self) -> None:
        """Nothing to reset."""

    def update(self, inputs: Tensor) -> Tensor:
        """What is done with the aggregated features; nothing."""
        return inputs

    def __repr__(self) -> str:
        channels = ""
        if hasattr(self, "in_channels") and hasattr(self, "out_channels"):
            channels = f"{self.in_channels}, {self.out_channels}"
        return f"{type(self).__name__}({channels})"


class PlainLinear(torch.nn.Module):
    """PyG's `Linear` without PyG: the same start values from the same seed, and lazy where ``in_channels`` is -1."""

    def __init__(
        self, in_channels: int, out_channels: int, bias: bool = True, weight_initializer: str | None = None
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.weight_initializer = in_channels, out_channels, weight_initializer
        self.weight: torch.nn.Parameter
        if in_channels > 0:
            self.weight = torch.nn.Parameter(torch.empty(out_channels, in_channels))
        else:
            self.weight = UninitializedParameter()  # type: ignore[assignment]
        self.bias = torch.nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new start values."""
        if self.in_channels <= 0:
            return
        with torch.no_grad():
            if self.weight_initializer == "glorot":
                bound = math.sqrt(6.0 / (self.weight.shape[0] + self.weight.shape[1]))
            else:
                bound = math.sqrt(6 / ((1 + math.sqrt(5) ** 2) * self.in_channels))
            self.weight.uniform_(-bound, bound)
            if self.bias is not None:
                bound = 1.0 / math.sqrt(self.in_channels)
                self.bias.uniform_(-bound, bound)

    def _materialize(self, width: int) -> None:
        assert isinstance(self.weight, UninitializedParameter)
        self.in_channels = width
        self.weight.materialize((self.out_channels, width))

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``, ``[..., in_channels]`` to ``[..., out_channels]``."""
        if isinstance(self.weight, UninitializedParameter):
            self._materialize(x.shape[-1])
            self.reset_parameters()
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if not isinstance(self.weight, UninitializedParameter):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        destination[prefix + "weight"] = self.weight
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        weight = state_dict.get(prefix + "weight")
        if weight is not None and isinstance(weight, UninitializedParameter):
            self.in_channels, self.weight = -1, UninitializedParameter()  # type: ignore[assignment]
        elif weight is not None and isinstance(self.weight, UninitializedParameter):
            self._materialize(weight.shape[-1])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __repr__(self) -> str:
        return f"Linear({self.in_channels}, {self.out_channels}, bias={self.bias is not None})"


def plain_reset(value: Any) -> None:
    """Resets a module, or its children where it cannot reset itself."""
    if hasattr(value, "reset_parameters"):
        value.reset_parameters()
        return
    for child in value.children() if hasattr(value, "children") else ():
        plain_reset(child)


HAS_PYG = False
if TYPE_CHECKING:
    from typing import TypeAlias

    Aggregation: TypeAlias = PlainAggregation
    Linear: TypeAlias = PlainLinear
    MessagePassing: TypeAlias = PlainMessagePassing
    reset = plain_reset
else:
    Aggregation, Linear, MessagePassing, reset = PlainAggregation, PlainLinear, PlainMessagePassing, plain_reset
    try:
        from torch_geometric.nn.aggr import Aggregation
        from torch_geometric.nn.conv import MessagePassing
        from torch_geometric.nn.dense.linear import Linear
        from torch_geometric.nn.inits import reset

        HAS_PYG = True
    except ImportError as error:
        if error.name != "torch_geometric":  # there, but broken: say so, and work without it
            log.warning("gsp.nn works without torch_geometric, which does not import: %s", error)

__all__ = ["FUSED", "HAS_PYG", "Aggregation", "Linear", "MessagePassing", "reset"]
