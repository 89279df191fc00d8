"""Graphs of plain index tensors: found again by identity, else by content, else built.

A model is called with the same ``edge_index`` step after step. `graph_of` gives the `Graph` made from it the first
time, without keeping the tensor alive. Addresses are never compared: freed memory is reused.

Level 1 asks whether this is the same tensor, unchanged: the root of a view, by weak reference, with its version counter
and the offsets, strides and lengths of the two index vectors. On the CPU, where writes through NumPy pass by the
version counter, a hit is also compared with the copy that the graph was made from; on CUDA only under
``GSP_LOG=verify``, since the answer would have to be waited for. Level 2 asks whether a graph of the same size that was
in use lately has the same content, by an exact comparison: models that write the same ``edge_index`` anew in every step
hit here.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _native
from ._config import counters, log, verify_always
from .csr import Core, _from_coo, capturing, state
from .graph import Graph, _as_index

#: At most this many graphs are kept whose index tensors are gone or changed; as many are compared by content.
MAX_GRAPHS = 8
#: All graphs together take at most this share of a GPU's memory, or this many bytes on the CPU.
MAX_SHARE = 1 / 16
MAX_BYTES = 1 << 30


class _Entry:
    """A graph, and its own copy of the index vectors it was made from; None where the graph itself says them."""

    __slots__ = ("__weakref__", "copy", "graph", "nbytes", "roots", "size")

    def __init__(self, graph: Graph, size: Any) -> None:
        self.graph, self.size = graph, size
        csr = graph._csr
        self.copy = csr.coo
        self.roots = 0  # living, unchanged tensors that it is the graph of
        # The first backward adds the transpose; where nothing had to be sorted, the columns are part of the copy.
        arrays = 3 if self.copy is None else 4 if csr.perm is None else 6
        numbers = csr.num_rows + csr.num_cols + 2 + csr.col.shape[0] * arrays
        self.nbytes = numbers * csr.col.element_size()

    def equals(self, dst: Tensor, src: Tensor) -> bool:
        """Exact comparison; on CUDA one read back."""
        csr = self.graph._csr
        return _native.same_coo(dst, src, *(self.copy or (csr.rows(), csr.col)))  # type: ignore[no-any-return]


class _Ref(weakref.ref[Tensor]):
    """A weak reference that knows, after its tensor died, under which number that was kept."""

    __slots__ = ("number",)
    number: int

    def __new__(cls, root: Tensor) -> _Ref:
        self = super().__new__(cls, root, _died)
        self.number = id(root)
        return self


class _Root:
    """The graphs made from views of one tensor, as long as it lives unchanged."""

    __slots__ = ("entries", "ref", "version")

    def __init__(self, root: Tensor) -> None:
        self.ref, self.version = _Ref(root), root._version
        self.entries: dict[Any, weakref.ref[_Entry]] = {}


_lock = threading.Lock()  # around everything below
_roots: dict[int, _Root] = {}
_entries: OrderedDict[int, _Entry] = OrderedDict()  # all that is kept, least recently used first
_orphans: OrderedDict[int, _Entry] = OrderedDict()  # those whose tensors are gone or changed, first to go first
_by_size: dict[Any, OrderedDict[int, _Entry]] = {}  # candidates of level 2, least recently used first
_bytes: dict[torch.device, int] = {}
_pinned: dict[int, _Entry] = {}  # read by a captured CUDA graph
_dead: deque[_Ref] = deque()  # roots that died, still to be forgotten

#: Called by `clear_cache`: what else was kept for the sake of finding graphs again.
on_clear: list[Callable[[], None]] = []


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _identity(dst: Tensor, src: Tensor) -> tuple[Tensor, Any] | None:
    """The tensor whose life and version decide, and where in it the vectors lie; None where identity says nothing."""
    base, other = dst._base, src._base
    root = dst if base is None else base
    if root is not (src if other is None else other) or root.is_inference():
        return None  # an inference tensor has no version
    place = (dst.data_ptr(), dst.stride(), dst.shape, dst.dtype, src.data_ptr(), src.stride(), src.shape, src.dtype)
    return root, place


def graph_of(dst: Tensor, src: Tensor, num_dst: int, num_src: int) -> Graph:
    """The graph with an edge ``src[e] -> dst[e]`` for each e, made now or found again.

    Args:
        dst: ``[E]`` int32 or int64 destinations, of any stride.
        src: ``[E]`` sources, on the same device; found by identity where both are rows of one ``edge_index``.
        num_dst: number of destination nodes.
        num_src: number of source nodes.

    Raises:
        IndexError, TypeError, ValueError: as `Graph.from_edge_index`.
        RuntimeError: the graph would have to be built during a CUDA graph capture.
    """
    return _entry_of(dst, src, num_dst, num_src).graph


def _entry_of(dst: Tensor, src: Tensor, num_dst: int, num_src: int) -> _Entry:
    identity = _identity(dst, src)
    root = key = None
    if identity is not None:
        root, place = identity
        key = (place, num_dst, num_src)
        with _lock:
            entry = _find(root, key)
        if entry is not None and (_trusted(dst.device) or entry.equals(dst, src)):
            counters["plan_hits"] += 1
            if _dead:
                _forget_dead()
            _use(entry)
            return entry
    dst, src = _as_index(dst, "dst"), _as_index(src, "src")
    size = (dst.shape, src.shape, num_dst, num_src, dst.device, src.device)
    entry = _lookup_content(size, dst, src)
    if entry is None:
        counters["plan_misses"] += 1
        entry = _build(dst, src, num_dst, num_src, size)
    with _lock:
        _keep(entry)
        if root is not None:
            _link(root, key, entry)
        _evict(entry)
    if _dead:
        _forget_dead()
    return entry  # of a capture there is nothing to keep: it may neither build nor compare


#: The graph that was built last: whether a backward went through it says what the next one will be for.
_newest: weakref.ref[Core] | None = None


def _build(dst: Tensor, src: Tensor, num_dst: int, num_src: int, size: Any) -> _Entry:
    global _newest
    before = None if _newest is None or not torch.is_grad_enabled() else _newest()
    # Used, not only made: a guess that was wrong is not made again.
    both = before is not None and before.transpose is not None and before.transpose.uses > 0
    core = _from_coo(dst, src, num_dst, num_src, both)
    _newest = weakref.ref(core)
    entry = _Entry(Graph._make(core), size)
    if core.transpose is not None:
        core.csr.coo = None  # of which it is made
    return entry


#: What `graph_of_edge_index` was asked for last, and where its answer is: (tensor, its state, sizes, entry), weakly.
_latest: tuple[weakref.ref[Tensor], Any, tuple[int, int, bool], weakref.ref[_Entry]] | None = None


def graph_of_edge_index(edge_index: Tensor, num_dst: int, num_src: int, reverse: bool = False) -> Graph:
    """`graph_of` the rows of an edge list: sources first, or, if `reverse`, destinations.

    The layers of a model ask for the same one after the other; that takes a look at the tensor, not at its rows.

    Args:
        edge_index: ``[2, E]`` int32 or int64.
        num_dst: number of destination nodes.
        num_src: number of source nodes.
        reverse: messages go from row 1 to row 0.

    Raises:
        IndexError, ValueError, RuntimeError: as `graph_of`.
    """
    global _latest
    found = latest(edge_index, num_dst, num_src, reverse)
    if found is not None:
        return found
    first, second = edge_index.unbind(0)
    dst, src = (first, second) if reverse else (second, first)
    entry = _entry_of(dst, src, num_dst, num_src)
    if _trusted(edge_index.device) and not edge_index.is_inference() and edge_index.grad_fn is None:
        sizes = num_dst, num_src, reverse
        _latest = weakref.ref(edge_index), state(edge_index), sizes, weakref.ref(entry)
    return entry.graph


def latest(edge_index: Tensor, num_dst: int, num_src: int, reverse: bool) -> Graph | None:
    """`graph_of_edge_index` where that was the last one asked for, of any thread, else None."""
    last = _latest
    if last is None:
        return None
    ref, then, sizes, found = last
    if ref() is not edge_index or sizes != (num_dst, num_src, reverse) or then != state(edge_index):
        return None
    entry = found()
    if entry is None:
        return None
    counters["plan_hits"] += 1
    return _use(entry)


def _trusted(device: torch.device) -> bool:
    return device.type == "cuda" and not verify_always()


def _use(entry: _Entry) -> Graph:
    if capturing(entry.graph.device):
        with _lock:
            _pinned[id(entry)] = entry
    return entry.graph


def _find(root: Tensor, key: Any) -> _Entry | None:
    seen = _roots.get(id(root))
    if seen is None:
        return None
    if seen.ref() is not root or seen.version != root._version:
        _drop(id(root))
        return None
    ref = seen.entries.get(key)
    entry = None if ref is None else ref()
    if entry is not None and id(entry) in _entries:
        _entries.move_to_end(id(entry))
    return entry


def _lookup_content(size: Any, dst: Tensor, src: Tensor) -> _Entry | None:
    if size not in _by_size:
        return None
    with _lock:
        candidates = list(reversed(_by_size.get(size, {}).values()))[:MAX_GRAPHS]
    if not candidates or capturing(dst.device):
        return None
    for entry in candidates:
        counters["l2_syncs"] += dst.is_cuda
        if entry.equals(dst, src):
            counters["l2_hits"] += 1
            return entry
    return None


def _keep(entry: _Entry) -> None:
    number = id(entry)
    alike = _by_size.setdefault(entry.size, OrderedDict())
    if number not in _entries:
        _entries[number] = alike[number] = entry
        device = entry.graph.device
        _bytes[device] = _bytes.get(device, 0) + entry.nbytes
        if entry.roots <= 0:
            _orphans[number] = entry
        return
    for order in (_entries, alike, _orphans):
        if number in order:
            order.move_to_end(number)


def _link(root: Tensor, key: Any, entry: _Entry) -> None:
    seen = _roots.get(id(root))
    if seen is None or seen.ref() is not root or seen.version != root._version:
        _drop(id(root))
        seen = _roots[id(root)] = _Root(root)
    if len(seen.entries) > 4 * MAX_GRAPHS:  # many views of one tensor: those whose graphs were evicted
        seen.entries = {k: ref for k, ref in seen.entries.items() if ref() is not None}
    ref = seen.entries.get(key)
    old = None if ref is None else ref()
    if old is not None:
        _unlink(old)
    seen.entries[key] = weakref.ref(entry)
    entry.roots += 1
    _orphans.pop(id(entry), None)


def _unlink(entry: _Entry) -> None:
    entry.roots -= 1
    if entry.roots <= 0 and id(entry) in _entries:
        _orphans[id(entry)] = entry


def _died(ref: _Ref) -> None:
    # Called wherever a tensor dies, perhaps by the garbage collector while this very thread holds the lock.
    _dead.append(ref)
    _forget_dead()


def _forget_dead() -> None:
    while _dead and _lock.acquire(blocking=False):  # whoever holds it looks here afterwards
        try:
            ref = _dead.popleft()
            seen = _roots.get(ref.number)
            if seen is not None and seen.ref is ref:
                _drop(ref.number)
                _evict_orphans()
        except IndexError:
            pass  # another thread was faster
        finally:
            _lock.release()


def _drop(number: int) -> None:
    """Forgets a root. What it was used for lately is kept, for a tensor of the same content."""
    seen = _roots.pop(number, None)
    for ref in () if seen is None else seen.entries.values():
        entry = ref()
        if entry is not None:
            _unlink(entry)


def _evict(latest: _Entry) -> None:
    _evict_orphans()
    device = latest.graph.device
    most = budget(device)
    if _bytes[device] > most:
        for entry in list(_entries.values()):
            if entry.graph.device == device and entry is not latest and _bytes[device] > most:
                _delete(entry)


def budget(device: torch.device) -> float:
    """Bytes that may be kept on `device`."""
    return _memory(device) * MAX_SHARE if device.type == "cuda" else float(MAX_BYTES)


@functools.cache
def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def _evict_orphans() -> None:
    while len(_orphans) > MAX_GRAPHS:
        _delete(next(iter(_orphans.values())))


def _delete(entry: _Entry) -> None:
    number = id(entry)
    del _entries[number]
    _orphans.pop(number, None)
    alike = _by_size[entry.size]
    del alike[number]
    if not alike:
        del _by_size[entry.size]
    _bytes[entry.graph.device] -= entry.nbytes


def clear_cache() -> None:
    """Frees the graphs and plans that were made for plain ``edge_index`` tensors; they are made anew when needed.

    What a captured CUDA graph reads is kept, and a warning says so: freeing it would let a replay read freed memory.
    """
    _empty()
    if _pinned:
        log.warning("clear_cache: %d graphs are read by captured CUDA graphs and stay", len(_pinned))


# At exit too: a tensor that dies while the interpreter takes modules apart would call what is no longer there.
@atexit.register
def _empty() -> None:
    global _latest, _newest
    _latest = _newest = None
    for clear in on_clear:
        clear()
    with _lock:
        for kept in (_roots, _entries, _orphans, _by_size, _bytes):
            kept.clear()


def cached_graphs() -> int:
    """Number of graphs that the cache keeps alive."""
    _forget_dead()
    with _lock:
        return len(_entries.keys() | _pinned.keys())
