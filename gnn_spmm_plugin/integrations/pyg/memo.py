"""`gcn_norm` and the self-loop functions of PyG's layers, remembered from one step to the next.

An uncached GCNConv writes the same normalised ``edge_index`` and weights anew in every step; a tensor that is another
object each time can be found again only by comparing its content. While the patch is on, these functions return the
very tensors that they returned last time for the same, unchanged arguments, so that the graph made from them is found
by identity.

Arguments are compared as `gnn_spmm_plugin.cache` compares an ``edge_index``: by weak reference and version, on the CPU
also by content. Nothing that requires a gradient is remembered, nor anything made in inference mode. A result that
somebody wrote into, or asked a gradient of, is not returned again.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import cache
from ..._config import counters, verify_always
from ..._native import autocasts
from ...csr import capturing, unchanged

#: At most this many results are kept, and at most as many bytes as `cache` keeps of graphs.
MAX_ENTRIES = 32

_CONSTANTS = (type(None), bool, int, float, str, torch.dtype)


class _Argument:
    """A tensor argument: what it was a view of, its version then, and on the CPU a copy."""

    __slots__ = ("copy", "ref", "version")

    def __init__(self, t: Tensor, forget: Callable[[Any], None]) -> None:
        root = _root(t)
        self.ref = weakref.ref(root, forget)
        self.version = root._version
        self.copy = t.detach().clone() if _compared(t) else None

    def unchanged(self, t: Tensor) -> bool:
        root = _root(t)
        if self.ref() is not root or self.version != root._version:
            return False
        return self.copy is None or unchanged(self.copy, t)


class _Result:
    """A returned tensor with its version, or the position of the argument that was returned."""

    __slots__ = ("position", "tensor", "version")

    def __init__(self, value: Tensor | None, arguments: list[Tensor]) -> None:
        self.position = next((i for i, a in enumerate(arguments) if a is value), None)
        self.tensor = value if self.position is None else None  # a memo must not keep its own key alive
        self.version = 0 if self.tensor is None else self.tensor._version

    def untouched(self) -> bool:
        t = self.tensor
        return t is None or (t._version == self.version and not t.requires_grad and t._backward_hooks is None)

    def value(self, arguments: list[Tensor]) -> Tensor | None:
        return self.tensor if self.position is None else arguments[self.position]


class _Entry:
    __slots__ = ("arguments", "nbytes", "results")

    def __init__(self, arguments: list[_Argument], results: list[_Result]) -> None:
        self.arguments, self.results = arguments, results
        kept = [a.copy for a in arguments] + [r.tensor for r in results]
        self.nbytes = sum(t.numel() * t.element_size() for t in kept if t is not None)


_lock = threading.Lock()  # around _entries
_entries: OrderedDict[Any, _Entry] = OrderedDict()
_dead: deque[Any] = deque()  # keys whose arguments died
_local = threading.local()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def clear() -> None:
    """Forgets all results."""
    with _lock:
        gone = list(_entries.values())  # freed outside of the lock
        _entries.clear()
    del gone


cache.on_clear.append(clear)


def _root(t: Tensor) -> Tensor:
    return t if t._base is None else t._base


def _compared(t: Tensor) -> bool:
    return t.device.type == "cpu" or verify_always()


def _key(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[Tensor]] | None:
    """What two calls of the same result have in common, and the tensor arguments; None: do not remember."""
    tensors: list[Tensor] = []
    parts: list[Any] = [function, torch.get_default_dtype()]
    for name, value in [*enumerate(args), *sorted(kwargs.items())]:
        if type(value) in (Tensor, torch.nn.Parameter):
            root = _root(value)
            if value.requires_grad or value.layout != torch.strided or root.is_inference() or value.is_inference():
                return None
            place = (value.storage_offset(), value.stride(), value.shape, value.dtype, root.data_ptr())
            parts.append((name, id(root), id(value) if value is root else 0, place))
            tensors.append(value)
        elif isinstance(value, _CONSTANTS):
            parts.append((name, type(value), value))
        else:
            return None
    if not tensors:
        return None
    device = tensors[0].device.type
    parts.append(autocasts(device) and torch.get_autocast_dtype(device))
    return tuple(parts), tensors


def _call(
    active: Callable[[], bool], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if getattr(_local, "busy", False) or not active() or capturing(_device(args)):
        return function(*args, **kwargs)
    found = _key(function, args, kwargs)
    if found is None:
        return function(*args, **kwargs)
    key, tensors = found
    with _lock:
        entry = _entries.get(key)
    if (
        entry is not None
        and all(r.untouched() for r in entry.results)
        and all(a.unchanged(t) for a, t in zip(entry.arguments, tensors, strict=True))
    ):
        with _lock:
            if key in _entries:
                _entries.move_to_end(key)
        counters["memo_hits"] += 1
        return tuple(r.value(tensors) for r in entry.results)
    _local.busy = True  # what it calls itself needs no entries of its own
    try:
        with torch.inference_mode(False):
            results = function(*args, **kwargs)
    finally:
        _local.busy = False
    _remember(key, tensors, results)
    return results


def remembered(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, which returns a tuple of new tensors; for the same, unchanged arguments the very same."""
    return _call(_always, function, args, {})


def _always() -> bool:
    return True


def _forget_dead() -> None:
    gone = []
    while _dead and _lock.acquire(blocking=False):  # whoever holds it looks here afterwards
        try:
            gone.append(_entries.pop(_dead.popleft(), None))  # freed outside of the lock
        except IndexError:
            pass  # another thread was faster
        finally:
            _lock.release()


def _device(args: tuple[Any, ...]) -> torch.device:
    return next((a.device for a in args if isinstance(a, Tensor)), torch.device("cpu"))


def _remember(key: Any, tensors: list[Tensor], results: Any) -> None:
    if type(results) is not tuple or not all(r is None or type(r) is Tensor for r in results):
        return
    roots = [_root(t) for t in tensors]
    for r in results:
        if r is None or any(r is t for t in tensors):
            continue
        if r.requires_grad or r.is_inference() or any(_root(r) is root for root in roots):
            return  # a view of an argument would keep it alive

    def forget(_: Any) -> None:
        # Called wherever a tensor dies, perhaps by the garbage collector while this very thread holds the lock.
        _dead.append(key)
        _forget_dead()

    entry = _Entry([_Argument(t, forget) for t in tensors], [_Result(r, tensors) for r in results])
    device = tensors[0].device
    if entry.nbytes > cache.budget(device):
        return
    gone = []  # freed outside of the lock
    with _lock:
        gone.append(_entries.pop(key, None))
        _entries[key] = entry
        while len(_entries) > MAX_ENTRIES or sum(e.nbytes for e in _entries.values()) > cache.budget(device):
            gone.append(_entries.popitem(last=False)[1])
    _forget_dead()


def replacements(active: Callable[[], bool]) -> list[tuple[Any, Callable[..., Any]]]:
    """PyG's functions and what is to be called with them and their arguments, for `exchange`.

    Args:
        active: whether to remember, asked at each call.
    """
    from torch_geometric.nn.conv import gcn_conv
    from torch_geometric.utils import add_remaining_self_loops, add_self_loops, get_laplacian, remove_self_loops

    functions = (gcn_conv.gcn_norm, add_remaining_self_loops, add_self_loops, get_laplacian, remove_self_loops)
    return [(f, functools.partial(_call, active)) for f in functions]
