"""What happened to each layer's messages, for `gnn_spmm_plugin.report`. Holds no layer alive; needs no PyG."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from ..._config import counters, log


class Record:
    """One layer's history.

    Attributes:
        name: where the layer sits in the model that was accelerated or reported, else its class name.
        calls: forward calls while the layer was accelerated.
        fused: how often an aggregation ran without messages, by operation.
        missed: how often a message tensor was written as PyG does, by reason.
        strict: raise instead of leaving an operation to PyG.
        trusted: whether all code that sees the messages is PyG's own; None while unknown.
    """

    __slots__ = ("__weakref__", "calls", "fused", "missed", "name", "strict", "trusted")

    def __init__(self, name: str, strict: bool = False) -> None:
        self.name, self.strict = name, strict
        self.calls = 0
        self.fused: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.trusted: tuple[Any, bool] | None = None

    def miss(self, reason: str) -> None:
        """Counts an operation that is left to PyG.

        Raises:
            RuntimeError: the layer was accelerated with ``strict=True``.
        """
        if self.strict:
            raise RuntimeError(
                f"{self.name} was accelerated with strict=True, but one of its operations cannot be fused: {reason}; "
                "use accelerate(model, strict=False) to leave such operations to PyG"
            )
        if reason not in self.missed:
            log.info("%s: left to PyG: %s", self.name, reason)
        self.missed[reason] += 1
        counters["fallbacks"] += 1


_records: weakref.WeakKeyDictionary[Any, Record] = weakref.WeakKeyDictionary()


def record_of(layer: Any) -> Record:
    """The record of a layer, made at first use."""
    record = _records.get(layer)
    if record is None:
        record = Record(type(layer).__name__, bool(layer.__dict__.get("_gsp_strict", False)))
        _records[layer] = record
    return record


def known(layer: Any) -> Record | None:
    """The record of a layer, if it has one."""
    return _records.get(layer)
