"""Results as `gnn-spmm report` makes them, of runs that did not happen: quick, and with names as hostile as it gets."""

from __future__ import annotations

from typing import Any

import torch

from gnn_spmm_plugin.page.graphs import Asked, describe
from gnn_spmm_plugin.page.script import Trials
from gnn_spmm_plugin.page.verdict import judge

HOSTILE = "</style><script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&\x07"


def layer(name: str, forward: float, backward: float, **more: Any) -> dict[str, Any]:
    """A layer as `replay` describes it."""
    row = {
        "name": name,
        "kind": "GCNConv",
        "module": "torch_geometric.nn",
        "training_calls": 1,
        "evaluating_calls": 0,
        "graph": 0,
        "batches": False,
        "forward_ms": forward,
        "backward_ms": backward,
        "peak_bytes": 5_000_000,
        "dense_share": 0.25,
        "message_bytes": 4000,
        "width": 16,
        "error": None,
        "report": None,
    }
    return row | more


def seen(status: str, reasons: tuple[str, ...] = (), hints: tuple[str, ...] = ()) -> dict[str, Any]:
    """What `gnn_spmm_plugin.report` says of a layer."""
    return {"status": status, "reasons": dict.fromkeys(reasons, 3), "hints": list(hints), "ops": {}, "calls": 9}


def run(layers: list[dict[str, Any]], ms: float | None, **more: Any) -> dict[str, Any]:
    """What `trial` writes."""
    made = {"ended": "stopped", "steps": 40, "ms_per_step": ms, "peak_bytes": 9_000_000, "layers": layers}
    fixed = {"libraries": ["torch_geometric"], "losses": [1.0], "device": "CPU, 2 threads", "compiled": False}
    return made | fixed | more


def trials(before: dict[str, Any], after: dict[str, Any], edges: int = 400) -> Trials:
    """Both runs, on a graph of 100 nodes."""
    edge_index = torch.randint(100, (2, edges), generator=torch.Generator().manual_seed(0))
    return Trials(before, after, [(edge_index, (100, 100))], ["A note."])


def result(name: str = HOSTILE) -> dict[str, Any]:
    """Two layers, one of them fused, and a graph; `name` wherever a name may be."""
    before = [layer("conv1", 4.0, 6.0), layer(name, 2.0, 3.0, kind=name, peak_bytes=None)]
    after = [
        layer("conv1", 1.0, 2.0, report=seen("fused")),
        layer(name, 2.0, 3.0, kind=name, report=seen("not", (name,), (name,))),
    ]
    both = trials(run(before, 20.0), run(after, 13.0))
    graph = describe(name, both.graphs[0][0], (100, 100), Asked([4, 16], budget_ms=1, parts=[2]))
    return {
        "source": name,
        "device": name,
        "version": "0",
        "torch": "0",
        "command": f"gnn-spmm report {name}",
        "copy_bytes_per_s": 5e9,
        "graphs": [graph],
        "graphs_left_out": 1,
        "verdict": judge(both),
        "wrong": [],
        "steps": 40,
        "libraries": ["torch_geometric"],
        "asked": {"dtype": "float32", "reduce": "sum"},
    }
