"""`report`: which layers of a PyG or DGL model aggregate without messages, and why others do not."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

#: What a user can do about it, by a part of the reason; the first that fits.
_HINTS = {
    "sparse adjacency": "pass a plain edge_index, or a coalesced torch.sparse matrix without gradient",
    "inference mode": "use torch.no_grad() instead of torch.inference_mode()",
    "kernels exist for": "convert the features to a floating type",
    "use int64": "convert edge_index with .long()",
    "linear needs": "apply the linear layer to the nodes, before propagate()",
    "cat needs": "a linear layer of cat([x_i, x_j]) is the sum of two, one applied to the nodes of each side",
    "sub needs": "for a sum or mean, aggregate x_j alone and subtract the node's own part afterwards",
    "mul needs": "a factor that depends on the source node alone can be multiplied in before propagate(), one that "
    "depends on the destination alone after it",
    "add needs": "what depends on a node alone can be added before propagate() or after it",
    "__getitem__ needs": "take the part of the features that the message needs before propagate()",
    "sort needs": "a median or quantile needs each message; mean, max and min do not",
    "returns its messages": "let the layer aggregate; a sum, mean, max or min of x_j never writes x_j",
}

_HEADER = ("layer", "status", "op", "calls", "why not")


def _hint(reason: str) -> str | None:
    return next((hint for part, hint in _HINTS.items() if part in reason), None)


class Report:
    """What `report` found; prints as a table.

    Attributes:
        rows: for each message passing layer, a dict of ``layer``, ``kind``, ``status`` (``"fused"``, ``"partly"``,
            ``"not"``, ``"not called"``, ``"not accelerated"``; ``"gsp.nn"`` for a layer of this package, which needs no
            help), ``ops`` (how often each aggregation ran fused), ``reasons`` (how often each reason kept one from it),
            ``calls`` and ``hints``.
    """

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __str__(self) -> str:
        lines = [_HEADER]
        for row in self.rows:
            ops = ", ".join(f"{op} x{n}" for op, n in row["ops"].items()) or "-"
            why = "; ".join(f"{reason} (x{n})" for reason, n in row["reasons"].items())
            why += "".join(f" -> {hint}" for hint in row["hints"])
            lines.append((row["layer"], row["status"], ops, str(row["calls"]), why or "-"))
        widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADER))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )

    __repr__ = __str__


def report(model: Any) -> Report:
    """What happened so far in each message passing layer of a model, while it was accelerated or its library patched.

    Args:
        model: the module that was called; itself a layer of PyG or DGL, or holding some.

    Returns:
        A table to print; its `rows` hold the same as data. A layer is *fused* when every gather of its calls (in DGL:
        every operation) ended in this package, *partly* fused when some did. What compiled code does is not counted.
        ``calls`` of a DGL layer are its operations.

    Raises:
        ImportError: neither PyG nor DGL is there.
        TypeError: `model` is not a module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    rows = []
    if "dgl" in sys.modules:
        rows += _dgl_rows(model)
    if not rows or "torch_geometric" in sys.modules:
        rows += _pyg_rows(model)
    return Report(rows)


def _status(fused: Any, missed: Any, called: bool, idle: bool) -> str:
    if fused:
        return "partly" if missed else "fused"
    if called or missed:
        return "not"
    return "not accelerated" if idle else "not called"


def _row(
    name: str, layer: Any, status: str, ops: Mapping[str, int], reasons: Mapping[str, int], calls: int
) -> dict[str, Any]:
    return {
        "layer": f"{name} {type(layer).__name__}".strip(),
        "kind": type(layer).__name__,
        "status": status,
        "ops": dict(ops),
        "reasons": dict(reasons),
        "calls": calls,
        "hints": list(dict.fromkeys(h for reason in reasons if (h := _hint(reason)) is not None)),
    }


def _dgl_rows(model: Any) -> list[dict[str, Any]]:
    from .integrations.dgl import _layers, _patches
    from .integrations.dgl.records import Record, known

    layers = [(name, layer, known(layer)) for name, layer in _layers(model)]
    idle = not _patches and not any(record for _, _, record in layers)
    rows = []
    for name, layer, found in layers:
        record = found or Record()
        reasons = {f"{operation}: {reason}": n for (operation, reason), n in record.missed.items()}
        calls = sum(record.fused.values()) + sum(reasons.values())
        rows.append(_row(name, layer, _status(record.fused, reasons, False, idle), record.fused, reasons, calls))
    return rows


def _pyg_rows(model: Any) -> list[dict[str, Any]]:
    from .integrations.pyg import _layers, _require

    _require()
    from .integrations.pyg import switch
    from .integrations.pyg.records import known
    from .nn import SpMMConv

    rows = []
    layers = [(name, layer, known(layer)) for name, layer in _layers(model)]
    idle = not any(record or switch.active(layer) for _, layer, record in layers)
    for name, layer, record in layers:
        fused = {} if record is None else dict(record.fused)
        missed = {} if record is None else dict(record.missed)
        calls = 0 if record is None else record.calls
        status = _status(fused, missed, calls > 0, idle)
        if isinstance(layer, SpMMConv) and not missed and not fused:
            status = "gsp.nn"
        elif status == "not" and not missed:
            missed = {"no features were gathered by edge_index: a sparse adjacency, no edges, or 1-D features": calls}
        rows.append(_row(name, layer, status, fused, missed, calls))
    return rows
