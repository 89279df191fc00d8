"""Layers together with their linear layers, where nobody has to do with these: one step of autograd."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.dense.linear import Linear

from ..._native import autocasts
from ...functional import LINEAR
from ...functional_convolution import convolve
from ...graph import Graph
from ...nn.conv import calls_replaced, transforms_first
from . import aggregate
from .lazy import PLAIN

#: Where a module keeps what has to do with its calls.
CALLS = tuple(f"_{way}_{when}" for way in ("forward", "backward") for when in ("hooks", "pre_hooks"))
_WATCHERS = operator.itemgetter(*CALLS)
_FORWARDS = {cls: cls.forward for cls in (Linear, torch.nn.Linear)}


def watched(module: Any) -> bool:
    """Whether somebody has to do with calls of a module."""
    attributes = module.__dict__
    return any(_WATCHERS(attributes)) or "forward" in attributes


def weight_of(lin: Any, x: Tensor) -> Tensor | None:
    """The weight of a linear layer as torch or PyG have it, if it fits `x`; None where the layer has to be called."""
    cls = type(lin)
    if cls.forward is not _FORWARDS.get(cls) or calls_replaced():
        return None
    attributes = lin.__dict__
    if any(_WATCHERS(attributes)) or "forward" in attributes:
        return None
    weight = attributes["_parameters"].get("weight")
    if type(weight) is not torch.nn.Parameter:  # one that is shared out, or still to be made
        return None
    return weight if weight.dtype is x.dtype and weight.device == x.device else None


def fits(bias: Tensor | None, weight: Tensor) -> bool:
    """Whether `bias`, if there is one, goes with the result of `weight`."""
    if bias is None:
        return True
    return type(bias) in PLAIN and bias.dtype is weight.dtype and bias.shape == weight.shape[:1]


def convolved(
    graph: Graph | None,
    num_dst: int,
    x: Tensor,
    lin: Any,
    bias: Tensor | None,
    reduce: str,
    root: Any = None,
    own: Tensor | None = None,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor | None, bool]:
    """A layer as one step, where nobody looks at its linear layers, else None; and whether `lin` came first.

    Args:
        graph: where messages go; None while torch.compile traces.
        num_dst: number of its destinations.
        x: features of the sources.
        lin: what multiplies them, before or after the aggregation.
        bias: of the result.
        reduce: the reduction.
        root: the linear layer of `own`; none unless both are given.
        own: features of the destinations.
        scales: of a normalised sum: factor of each node, and of its own features.
    """
    if graph is None or aggregate.policy() != "auto" or autocasts(x.device.type):
        return None, False
    weight, root_weight = weight_of(lin, x), None
    if weight is None or not fits(bias, weight):
        return None, False
    if root is None or own is None:
        own = None
    else:
        root_weight = weight_of(root, own)
        if root_weight is None or root.bias is not None or root_weight.shape[0] != weight.shape[0]:
            return None, False
        if own.shape[0] != num_dst or own.dtype != x.dtype:
            return None, False
    first = reduce in LINEAR and transforms_first(weight, x)
    tie = "first" if reduce in LINEAR else aggregate.tie_rule(x, x.requires_grad)
    scale, loop = scales
    ends: dict[str, Any] = {"own": own, "root": root_weight, "scale": scale, "loop": loop, "tie": tie}
    return convolve(graph, x, weight, bias, reduce, first=first, **ends), first
