"""What happened to DGL's operations while they were patched, by operation and by layer. Holds no layer alive."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from typing import Any

from torch.nn import Module

from ..._config import counters, log

_DEPTH = 12  # frames between a layer's forward and DGL's operator; there are five


class Record:
    """One layer's operations.

    Attributes:
        fused: how often each ran in this package.
        missed: how often which reason left which to DGL.
    """

    __slots__ = ("__weakref__", "fused", "missed")

    def __init__(self) -> None:
        self.fused: Counter[str] = Counter()
        self.missed: Counter[tuple[str, str]] = Counter()


#: All operations, whoever called them, those of backwards too.
total = Record()
_records: weakref.WeakKeyDictionary[Any, Record] = weakref.WeakKeyDictionary()


def known(layer: Any) -> Record | None:
    """The record of a layer, if it called an operation while DGL was patched."""
    return _records.get(layer)


def _caller() -> Record | None:
    """The record of the layer whose ``forward`` is running, or None."""
    frame = sys._getframe(2)
    for _ in range(_DEPTH):
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount and code.co_varnames[0] == "self":
            layer = frame.f_locals.get("self")
            if isinstance(layer, Module):
                record = _records.get(layer)
                if record is None:
                    record = _records[layer] = Record()
                return record
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def hit(operation: str) -> None:
    """Counts an operation that ran here."""
    total.fused[operation] += 1
    record = _caller()
    if record is not None:
        record.fused[operation] += 1


def miss(operation: str, reason: str) -> None:
    """Counts an operation that is left to DGL."""
    key = operation, reason
    if key not in total.missed:
        log.info("%s is left to DGL: %s", operation, reason)
    counters["fallbacks"] += 1
    total.missed[key] += 1
    record = _caller()
    if record is not None:
        record.missed[key] += 1


__all__ = ["Record", "hit", "known", "miss", "total"]
