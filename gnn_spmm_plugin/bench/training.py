"""Training steps of PyG models, plain and accelerated: time, peak memory, kernel calls, and whether they agree.

    python -m gnn_spmm_plugin.bench.training --graphs arxivlike sbm1M_sorted --models gcn sage_max --csv out.csv

Each model has three layers (128 -> 128 -> 128 -> 40), Adam, float32. A step is forward, loss, backward and update,
timed from the host between two synchronisations.
"""

from __future__ import annotations

import argparse
import csv
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _native
from .._table import show
from ..cache import clear_cache
from ..integrations.pyg import accelerate
from .graphs import SPECS, named
from .results import environment

WIDTHS = (128, 128, 128, 40)


def _layers() -> dict[str, Callable[[int, int], torch.nn.Module]]:
    from torch_geometric.nn import GCNConv, GINConv, SAGEConv

    return {
        "gcn": GCNConv,
        "gcn_cached": lambda a, b: GCNConv(a, b, cached=True),
        "sage_mean": SAGEConv,
        "sage_max": lambda a, b: SAGEConv(a, b, aggr="max"),
        "gin": lambda a, b: GINConv(torch.nn.Linear(a, b)),
    }


MODELS = ("gcn", "gcn_cached", "sage_mean", "sage_max", "gin")


class Net(torch.nn.Module):
    """Three layers of one kind with ReLU between."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        make = _layers()[kind]
        self.layers = torch.nn.ModuleList(make(a, b) for a, b in itertools.pairwise(WIDTHS))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Logits, ``[N, 40]``."""
        for i, layer in enumerate(self.layers):
            x = layer(x, edge_index) if i == 0 else layer(F.relu(x), edge_index)
        return x


def measure(graph: str, model: str, accelerated: bool, device: str, steps: int) -> dict[str, Any]:
    """One row: ``graph, model, path, ms_median, ms_min, peak_bytes, kernel_calls, loss_first, loss_last, status``.

    `peak_bytes` counts what the model and its training step allocate on the GPU beyond features and edges; on the CPU
    it is not measured. Steps begin to count when plans are warm.
    """
    cuda = device == "cuda"
    row: dict[str, Any] = {"graph": graph, "model": model, "path": "accelerated" if accelerated else "pyg"}
    structure = named(graph, device)
    n, edge_index = structure.num_nodes, structure.edge_index()
    del structure
    torch.manual_seed(0)
    x, y = torch.randn(n, WIDTHS[0], device=device), torch.randint(WIDTHS[-1], (n,), device=device)
    net = Net(model).to(device)
    if accelerated:
        accelerate(net)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    clear_cache()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    base, calls = torch.cuda.memory_allocated() if cuda else 0, _native.kernel_calls()
    times: list[float] = []
    losses: list[float] = []
    try:
        for _ in range(steps):
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x, edge_index), y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))  # waits for the device
            if cuda:
                torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
    except torch.OutOfMemoryError:
        return {**row, "status": "out of memory"}
    finally:
        peak = torch.cuda.max_memory_allocated() - base if cuda else None
        del net, optimizer, x, y, edge_index
        clear_cache()
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    steady = times[steps // 2 :]
    return {
        **row,
        "ms_median": round(statistics.median(steady), 3),
        "ms_min": round(min(steady), 3),
        "peak_bytes": peak,
        "kernel_calls": _native.kernel_calls() - calls,
        "loss_first": round(losses[0], 6),
        "loss_last": round(losses[-1], 6),
        "status": "ok",
    }


COLUMNS = "graph model path ms_median ms_min peak_bytes kernel_calls loss_first loss_last status".split()


def main(arguments: list[str] | None = None) -> int:
    """The command; returns an exit code: 1 where plain and accelerated training differ."""
    parser = argparse.ArgumentParser(
        prog="python -m gnn_spmm_plugin.bench.training", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--graphs", nargs="+", choices=list(SPECS), default=["arxivlike"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gcn", "sage_max"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", metavar="FILE")
    options = parser.parse_args(arguments)
    rows, failed = [], False
    for graph in options.graphs:
        for model in options.models:
            pair = [measure(graph, model, a, options.device, options.steps) for a in (False, True)]
            rows += pair
            if all(r["status"] == "ok" for r in pair):
                failed |= any(
                    abs(pair[0][k] - pair[1][k]) > 1e-3 * abs(pair[0][k]) for k in ("loss_first", "loss_last")
                )
    show(COLUMNS, [["" if r.get(c) is None else str(r[c]) for c in COLUMNS] for r in rows])
    if options.csv:
        with open(options.csv, "w", newline="") as f:
            for key, value in environment().items():
                f.write(f"# {key}: {value}\n")
            f.write(f"# command: python -m gnn_spmm_plugin.bench.training {' '.join(arguments or sys.argv[1:])}\n")
            writer = csv.DictWriter(f, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    if failed:
        print("plain and accelerated training differ", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
