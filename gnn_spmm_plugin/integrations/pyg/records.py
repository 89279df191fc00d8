"""What happened to each layer's messages, for `gnn_spmm_plugin.report`. Holds no layer alive; needs no PyG."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from ..._config import counters, log

#: A layer's gathers of one shape stop being lazy after this many that something looked at and none that was fused.
PATIENCE = 8


class Gathers:
    """How the gathers of one shape ended.

    Attributes:
        fused: how many went into a sparse product.
        missed: how many were written.
        reason: why the last one was.
    """

    __slots__ = ("fused", "missed", "reason")

    def __init__(self) -> None:
        self.fused, self.missed, self.reason = 0, 0, ""

    def hopeless(self) -> bool:
        """Whether it does not pay to try again."""
        return self.missed >= PATIENCE and self.fused == 0


class Record:
    """One layer's history.

    Attributes:
        name: where the layer sits in the model that was accelerated or reported, else its class name.
        calls: forward calls while the layer was accelerated.
        fused: how often an aggregation ran without messages, by operation.
        missed: how often a message tensor was written as PyG does, by reason.
        strict: True: raise instead of leaving an operation to PyG; "warn": warn once for each reason.
        gathers: how they ended, by the shape of a message and its dimension.
        one_plus: 1 + eps of a GIN, with the eps that it was made of and its state.
        trusted: whether all code that sees the messages is PyG's own, between what that was found for; None while
            unknown.
    """

    __slots__ = ("__weakref__", "calls", "fused", "gathers", "missed", "name", "one_plus", "strict", "trusted")

    def __init__(self, name: str, strict: bool | str = False) -> None:
        self.name, self.strict = name, strict
        self.calls = 0
        self.fused: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.gathers: dict[Any, Gathers] = {}
        self.trusted: tuple[Any, bool] | None = None
        self.one_plus: tuple[weakref.ref[Any], Any, Any] | None = None

    def miss(self, reason: str) -> None:
        """Counts an operation that is left to PyG.

        Raises:
            RuntimeError: the layer was accelerated with ``strict=True``.
        """
        if self.strict is True:
            raise RuntimeError(
                f"{self.name} was accelerated with strict=True, but one of its operations cannot be fused: {reason}; "
                "use accelerate(model, strict=False) to leave such operations to PyG"
            )
        if reason not in self.missed:
            say = log.warning if self.strict == "warn" else log.info
            say("%s: left to PyG: %s", self.name, reason)
        self.missed[reason] += 1
        counters["fallbacks"] += 1

    def gathers_of(self, shape: Any, dim: int) -> Gathers:
        """The tally of gathers from features of `shape` along `dim`."""
        key = (shape[:dim], shape[dim + 1 :])
        found = self.gathers.get(key)
        if found is None:
            if len(self.gathers) > 64:  # a shape that is new in each step says nothing
                self.gathers.clear()
            found = self.gathers[key] = Gathers()
        return found


_records: weakref.WeakKeyDictionary[Any, Record] = weakref.WeakKeyDictionary()


def record_of(layer: Any) -> Record:
    """The record of a layer, made at first use."""
    record = _records.get(layer)
    if record is None:
        record = Record(type(layer).__name__, layer.__dict__.get("_gsp_strict", False))
        _records[layer] = record
    return record


def known(layer: Any) -> Record | None:
    """The record of a layer, if it has one."""
    return _records.get(layer)
