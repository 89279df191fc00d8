"""PyG's `softmax` over the edges into each node, as one kernel, for layers that compute attention in `message`."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import softmax as pyg_softmax

from ..._native import autocasts
from ...cache import graph_of
from ...functional import edge_softmax
from ...kernels import DTYPES
from . import aggregate, exchange
from .lazy import PLAIN

_local = threading.local()


def note(index: Tensor, rows: int) -> None:
    """Features of `rows` nodes were gathered by `index`: perhaps the other end of the edges of a softmax to come."""
    latest = getattr(_local, "latest", (None, None))
    if latest[1] is None or latest[1][0]() is not index:
        _local.latest = latest[1], (weakref.ref(index), rows)


def replacements(active: Callable[[], bool]) -> list[tuple[Any, Callable[..., Any]]]:
    """PyG's function and what is to be called with it and its arguments, for `exchange`.

    Args:
        active: whether to use the kernel, asked at each call.
    """
    return [(pyg_softmax, functools.partial(_call, active))]


def _call(
    active: Callable[[], bool], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`softmax` of torch_geometric.utils by `edge_softmax`, where `active` and where that does the same."""
    if active():
        out = _fused(*args, **kwargs)
        if out is not None:
            return out
    return function(*args, **kwargs)


def _fused(
    src: Any = None, index: Any = None, ptr: Any = None, num_nodes: Any = None, dim: Any = 0, **unknown: Any
) -> Tensor | None:
    if type(src) not in PLAIN or src.dim() == 0 or src.dtype not in DTYPES or src.layout != torch.strided:
        return None
    index = None if index is None else aggregate.plain_index(index)
    if index is None or ptr is not None or unknown or dim not in (0, -src.dim()) or src.numel() == 0:
        return None
    if index.shape != src.shape[:1] or index.device != src.device or index.dtype not in (torch.int32, torch.int64):
        return None
    if num_nodes is None:
        num_nodes = int(index.max()) + 1
    source, rows = _other_end(index) or (index, num_nodes)
    try:
        graph = graph_of(index, source, num_nodes, rows)
    except (IndexError, ValueError):
        return None
    if autocasts(src.device.type):
        src = src.to(src[:0].exp().dtype)  # which has a dtype of its own for it, on some devices
    flat = src if src.dim() <= 2 else src.flatten(1)
    return edge_softmax(graph, flat).view_as(src)


def _other_end(index: Tensor) -> tuple[Tensor, int] | None:
    """The latest gather by other ends of the same edges: its graph is the one that the aggregation will use."""
    for entry in getattr(_local, "latest", ()):
        other = None if entry is None else entry[0]()
        if other is not None and other is not index and other._base is not None and other._base is index._base:
            if other.shape == index.shape and other.dtype == index.dtype:
                return other, entry[1]
    return None


def is_own(module: Any) -> bool:
    """Whether what a module of PyG calls softmax is PyG's, or stands in its place."""
    found = getattr(module, "softmax", None)
    return found is pyg_softmax or (found is not None and found is exchange.replacement(pyg_softmax))


# ---------------------------------------------------------------------- layers of the user's own

_adopted: dict[type, None] = {}
_exchanged: list[tuple[dict[str, Any], str, Any]] = []  # (globals of a module, name, ours)


def adopt(cls: type) -> None:
    """Puts what stands in place of PyG's function where the methods of a layer class that is not PyG's look it up."""
    if cls in _adopted:
        return
    wrapper = exchange.replacement(pyg_softmax)
    if wrapper is None:
        return
    _adopted[cls] = None
    for base in cls.__mro__:
        if base.__module__.startswith(("torch_geometric.", "torch.", "gnn_spmm_plugin.")):
            continue
        for method in list(vars(base).values()):
            names = getattr(method, "__globals__", {})
            for name in [n for n, value in names.items() if value is pyg_softmax]:
                names[name] = wrapper
                _exchanged.append((names, name, wrapper))


def restore() -> None:
    """Undoes `adopt`."""
    _adopted.clear()
    while _exchanged:
        names, name, wrapper = _exchanged.pop()
        if names.get(name) is wrapper:
            names[name] = pyg_softmax
