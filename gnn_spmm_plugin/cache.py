"""Graphs of plain index tensors: found again by identity, else by content, else built.

A model is called with the same ``edge_index`` step after step. `graph_of` gives the `Graph` made from it the first
time, without keeping the tensor alive. Addresses are never compared: freed memory is reused.

Level 1 asks whether this is the same tensor, unchanged: the root of a view, by weak reference, with its version counter and
the offsets, strides and lengths of the two index vectors. On the CPU, where writes through NumPy pass by the version
counter, a hit is also compared with the copy that the graph was made from; on CUDA only under ``GSP_LOG=verify``, since
the answer would have to be waited for. Level 2 asks whether a graph of the same size that was in use lately has the same
content, by an exact comparison: models that write the same ``edge_index`` anew in every step hit here.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from ._config import counters, log, verify_always
from .graph import Graph, capturing

#: Level 2 holds at most this many graphs whose index tensors are gone or changed ...
MAX_GRAPHS = 8
#: ... and at most this share of a GPU's memory, or this many bytes on the CPU.
MAX_SHARE = 1 / 16
MAX_BYTES = 1 << 30


class _Entry:
    """A graph and the index vectors it was made from, in the graph's index dtype: a copy, never the caller's."""

    __slots__ = ("__weakref__", "copy", "graph")

    def __init__(self, graph: Graph, dst: Tensor, src: Tensor) -> None:
        self.graph = graph
        dtype = graph.col.dtype
        # Sorted edges are stored as they came.
        kept_src = graph.col if graph.perm is None else src.to(dtype, copy=True)
        self.copy = (dst.to(dtype, copy=True), kept_src)

    def equals(self, dst: Tensor, src: Tensor) -> bool:
        """Exact comparison; on CUDA one read back."""
        same = (dst == self.copy[0]).all() & (src == self.copy[1]).all()
        return bool(same)

    def nbytes(self) -> int:
        return self.graph.nbytes() + sum(t.numel() * t.element_size() for t in self.copy)


class _Root:
    """The graphs made from views of one tensor, as long as it lives unchanged."""

    __slots__ = ("entries", "ref", "version")

    def __init__(self, ref: weakref.ref[Tensor], version: int) -> None:
        self.ref, self.version = ref, version
        self.entries: dict[Any, _Entry] = {}


_lock = threading.RLock()
_roots: dict[int, _Root] = {}
_recent: OrderedDict[int, tuple[Any, _Entry]] = OrderedDict()
_pinned: dict[int, _Entry] = {}  # read by a captured CUDA graph


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def _place(t: Tensor) -> tuple[int, int, int]:
    return t.storage_offset(), t.stride(0), t.shape[0]


def _identity(dst: Tensor, src: Tensor) -> tuple[Tensor, Any] | None:
    """The tensor whose life and version decide, and where in it the vectors lie; None where identity says nothing."""
    root = dst if dst._base is None else dst._base
    other = src if src._base is None else src._base
    if root is not other or root.is_inference():
        return None  # an inference tensor has no version
    return root, (_place(dst), _place(src), root.data_ptr(), dst.dtype)


def graph_of(dst: Tensor, src: Tensor, num_dst: int, num_src: int) -> Graph:
    """The graph with an edge ``src[e] -> dst[e]`` for each e, made now or found again.

    Args:
        dst, src: ``[E]`` int32 or int64 on one device, of any stride; rows of one ``edge_index`` are found by identity.
        num_dst, num_src: numbers of nodes.

    Raises:
        IndexError, TypeError: as `Graph.from_edge_index`.
        RuntimeError: the graph would have to be built during a CUDA graph capture.
    """
    identity = _identity(dst, src)
    size = (dst.shape[0], num_dst, num_src, dst.device)
    if identity is not None:
        root, place = identity
        key = (place, num_dst, num_src)
        with _lock:
            seen = _roots.get(id(root))
            entry = None
            if seen is not None:
                if seen.ref() is root and seen.version == root._version:
                    entry = seen.entries.get(key)
                else:
                    _drop(id(root))
        if entry is not None and (_trusted(dst.device) or entry.equals(dst, src)):
            counters["plan_hits"] += 1
            return _use(entry)
    entry = _lookup_content(size, dst, src)
    if entry is None:
        counters["plan_misses"] += 1
        entry = _Entry(Graph._from_pair(dst, src, num_dst, num_src), dst, src)
    with _lock:
        if identity is not None:
            _remember(root, key, entry)
        _recent[id(entry)] = (size, entry)
        _recent.move_to_end(id(entry))
        _evict(dst.device)
    return _use(entry)


def _trusted(device: torch.device) -> bool:
    return device.type == "cuda" and not verify_always()


def _use(entry: _Entry) -> Graph:
    if capturing(entry.graph.device):
        with _lock:
            _pinned[id(entry)] = entry
    return entry.graph


def _lookup_content(size: Any, dst: Tensor, src: Tensor) -> _Entry | None:
    with _lock:
        candidates = [e for s, e in reversed(_recent.values()) if s == size]
    if not candidates or capturing(dst.device):
        return None
    for entry in candidates:
        counters["l2_syncs"] += dst.is_cuda
        if entry.equals(dst, src):
            counters["l2_hits"] += 1
            return entry
    return None


def _remember(root: Tensor, key: Any, entry: _Entry) -> None:
    number = id(root)
    seen = _roots.get(number)
    if seen is None or seen.ref() is not root or seen.version != root._version:

        def gone(ref: weakref.ref[Tensor]) -> None:
            with _lock:
                current = _roots.get(number)
                if current is not None and current.ref is ref:
                    _drop(number)

        seen = _roots[number] = _Root(weakref.ref(root, gone), root._version)
    seen.entries[key] = entry


def _drop(number: int) -> None:
    """Forgets a root. What it was used for lately stays in level 2, for a tensor of the same content."""
    _roots.pop(number, None)


def _evict(device: torch.device) -> None:
    budget = float(MAX_BYTES)
    if device.type == "cuda":
        budget = torch.cuda.get_device_properties(device).total_memory * MAX_SHARE
    mine = [(number, e) for number, (_, e) in _recent.items() if e.graph.device == device]
    total = sum(e.nbytes() for _, e in mine)
    for number, entry in mine:
        if len(mine) <= MAX_GRAPHS and total <= budget:
            return
        total -= entry.nbytes()
        mine = mine[1:]
        del _recent[number]


def clear_cache() -> None:
    """Frees the graphs and plans that were made for plain ``edge_index`` tensors; they are made anew when needed.

    What a captured CUDA graph reads is kept, and a warning says so: freeing it would let a replay read freed memory.
    """
    with _lock:
        _roots.clear()
        _recent.clear()
        if _pinned:
            log.warning("clear_cache: %d graphs are read by captured CUDA graphs and stay", len(_pinned))


def cached_graphs() -> int:
    """Number of graphs that the cache keeps alive."""
    with _lock:
        held = {id(e) for seen in _roots.values() for e in seen.entries.values()}
        return len(held | _recent.keys() | _pinned.keys())
