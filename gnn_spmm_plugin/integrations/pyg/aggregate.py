"""From a lazy gather and the aggregation that follows it to one sparse product."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation, MinAggregation, SumAggregation

from ...cache import graph_of
from ...derivatives import SCATTER_TIE
from ...graph import Graph
from .lazy import Pending, version
from .shifted import Shifted

_policy = "auto"

#: Aggregations that are one kernel.
REDUCTIONS = {SumAggregation: "sum", MeanAggregation: "mean", MaxAggregation: "max", MinAggregation: "min"}


def policy() -> str:
    """How plans are chosen now."""
    return _policy


def hooked(module: Any) -> bool:
    """Whether somebody looks at what an aggregation is given, or has exchanged what it does."""
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    every = torch.nn.modules.module
    everywhere = every._global_forward_hooks or every._global_forward_pre_hooks or every._global_backward_hooks
    return bool(own or everywhere or "forward" in module.__dict__)


def set_policy(policy: str) -> None:
    """How plans are chosen from now on; see `gnn_spmm_plugin.plan`."""
    global _policy
    _policy = policy


def plain_index(index: Any) -> Any:
    """The index itself where it is a plain tensor, the one inside of PyG's `Index`, else None."""
    if type(index) is Tensor:
        return index
    inner = index.as_tensor() if hasattr(index, "as_tensor") else None
    return inner if type(inner) is Tensor else None


def index_vector(p: Pending, dim: Any, index: Any, expanded: bool) -> Tensor | None:
    """The ``[E]`` destinations in the index of a scatter; None where it is none for whole messages."""
    if type(dim) is not int or not isinstance(index, Tensor) or not -len(p.shape) <= dim < len(p.shape):
        return None
    dim %= len(p.shape)
    index = plain_index(index)
    if index is None or index.device != p.src.device or dim != p.dim:
        return None
    if not expanded:
        return index if index.dim() == 1 and index.shape[0] == p.shape[dim] else None
    if index.shape != p.shape:
        return None
    for d, (size, stride) in enumerate(zip(index.shape, index.stride(), strict=True)):
        if d != dim and size != 1 and stride != 0:
            return None
    return index.as_strided((index.shape[dim],), (index.stride(dim),), index.storage_offset())  # type: ignore[no-any-return]


def fits(p: Pending, target: Tensor, dim: int) -> bool:
    """Whether `target` has the shape of an aggregation of the messages along `dim`."""
    dim %= len(p.shape)
    return (
        target.dim() == len(p.shape)
        and target.device == p.src.device
        and all(d == dim or target.shape[d] == p.shape[d] for d in range(target.dim()))
    )


def _wrong_index(p: Pending, index: Tensor, dim_size: int) -> None:
    """Raises what PyG raises for indices that are out of range, without running a kernel on them."""
    nodes = p.src.shape[p.dim]
    low, high = int(p.index.min()), int(p.index.max())
    advice = (
        f"Please ensure that all indices in 'edge_index' point to valid indices in the interval [0, {nodes}) in your "
        "node feature matrix and try again."
    )
    if low < 0:
        raise IndexError(f"Found negative indices in 'edge_index' (got {low}). {advice}")
    if high >= nodes:
        raise IndexError(f"Found indices in 'edge_index' that are larger than {nodes - 1} (got {high}). {advice}")
    low, high = int(index.min()), int(index.max())
    if high >= dim_size:
        raise ValueError(f"Encountered invalid 'dim_size' (got '{dim_size}' but expected >= '{high + 1}')")
    raise IndexError(f"Found negative indices in 'edge_index' (got {low}); the interval is [0, {dim_size}).")


def graph_for(p: Pending, index: Tensor, dim_size: int) -> Graph:
    """The graph whose edges lead from the rows of ``src`` to `index`; raises as PyG for wrong indices."""
    source = plain_index(p.index)
    if source.dtype != index.dtype:
        index = index.to(source.dtype)
    try:
        return graph_of(index, source, dim_size, p.src.shape[p.dim])
    except IndexError:
        _wrong_index(p, index, dim_size)
        raise


def run(p: Pending, index: Tensor, dim_size: int, dim: int, reduce: str, scatter_reduce: bool = False) -> Tensor | None:
    """The messages aggregated along `dim` by `index`; None where this has to be left to PyG.

    Args:
        p: messages that nobody has looked at.
        index: ``[E]`` destination of each.
        dim_size: number of destinations.
        dim: dimension of the messages.
        reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
        scatter_reduce: for max and min, whether torch's own ``scatter_reduce_`` would have run here.
    """
    if dim % len(p.shape) != p.dim or index.dim() != 1 or index.shape[0] != p.shape[p.dim] or dim_size < 0:
        return None
    if index.dtype not in (torch.int32, torch.int64) or index.device != p.src.device:
        return None
    p.check()
    graph = graph_for(p, index, dim_size)
    tie = SCATTER_TIE if scatter_reduce else tie_rule(p.src, p.requires_grad)
    key = (reduce, tie, dim_size, index.data_ptr(), index.stride(), version(index), torch.is_grad_enabled())
    kept = p.results.get(key)
    if kept is not None and kept[1] == version(kept[0]):
        return kept[0]
    out = p.aggregated(graph, reduce, tie, _policy)
    if out is None:
        return None
    out = out if p.dim == 0 else out.movedim(0, p.dim).contiguous()
    if not out.is_inference():  # where writes are not counted
        p.results[key] = out, version(out)
    p.record.fused[p.operation(reduce)] += 1
    p.tally.fused += 1
    return out


def tie_rule(x: Tensor, requires_grad: bool) -> str:
    """Who gets the gradient of a maximum of `x`: as stock PyG has it, where torch_scatter gives it to one edge."""
    import torch_geometric.typing

    first = bool(torch_geometric.typing.WITH_TORCH_SCATTER) and x.is_cuda and requires_grad
    return "first" if first else SCATTER_TIE


# ---------------------------------------------------------------------- several at once, as PyG's FusedAggregation

_SIMPLE = {"SumAggregation": "sum", "MeanAggregation": "mean", "MaxAggregation": "max", "MinAggregation": "min"}
_SPREAD = ("VarAggregation", "StdAggregation")


def run_many(
    p: Pending, names: list[str], semi_grad: bool, index: Tensor, dim_size: int, dim: int
) -> list[Tensor] | None:
    """The aggregations called `names`, sharing what they have in common; None where one has to be left to PyG."""
    if len(p.shape) != 2 or not known(names):
        return None
    if isinstance(p, Shifted):
        outs = run_many(p.alike, names, semi_grad, index, dim_size, dim)
        if outs is None:
            return None
        graph = graph_for(p, index, dim_size)
        return [
            p.moved(out, _SIMPLE[name], graph) if name in _SIMPLE else out
            for name, out in zip(names, outs, strict=True)
        ]
    squares: Any = None
    if any(name in _SPREAD for name in names):
        p.check()
        squares = (p.constant() if semi_grad else p).squared()
        if squares is NotImplemented:
            return None
    return several(
        names,
        lambda reduce: run(p, index, dim_size, dim, reduce),
        lambda reduce: run(squares.pending, index, dim_size, dim, reduce),
        lambda dtype: graph_for(p, index, dim_size)._csr.inverse_degree(dtype),
    )


def known(names: list[str]) -> bool:
    """Whether `several` can do all of these."""
    return all(name in _SIMPLE or name in _SPREAD for name in names)


def several(
    names: list[str],
    of_messages: Callable[[str], Tensor | None],
    of_squares: Callable[[str], Tensor | None],
    inverse_degree: Callable[[torch.dtype], Tensor],
) -> list[Tensor] | None:
    """The aggregations called `names`, each part once; None where one of them is left to PyG.

    A mean follows from the sum, variance and deviation from the means of the messages and of their squares, with PyG's
    formulas.

    Args:
        names: classes of PyG's aggregations, see `known`.
        of_messages: the messages reduced by ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
        of_squares: their squares.
        inverse_degree: ``[num_dst]`` in a dtype.
    """
    done: dict[str, Tensor | None] = {}
    spread = any(name in _SPREAD for name in names)
    for name in (*names, *(["MeanAggregation"] if spread else [])):
        if name not in _SIMPLE or name in done:
            continue
        done[name] = of_messages(_SIMPLE[name])
        if done[name] is None:
            return None
        if name == "SumAggregation":
            total = done[name]
            assert total is not None
            if total.dtype in (torch.float32, torch.float64):  # shorter ones may overflow where their mean fits
                inverse = inverse_degree(total.dtype)
                done["MeanAggregation"] = total * inverse.view(-1, *[1] * (total.dim() - 1))
    if spread:
        mean, mean_of_squares = done["MeanAggregation"], of_squares("mean")
        if mean is None or mean_of_squares is None:
            return None
        variance = mean_of_squares - mean * mean
        done["VarAggregation"] = variance
        if "StdAggregation" in names:
            deviation = variance.clamp(min=1e-5).sqrt()
            done["StdAggregation"] = deviation.masked_fill(deviation <= math.sqrt(1e-5), 0.0)
    return [done[name] for name in names]  # type: ignore[misc]
