"""Training steps of PyG models: time, peak memory, kernel calls, and whether they agree.

    python -m gnn_spmm_plugin.bench.training --graphs arxivlike sbm1M_sorted --models gcn sage_max --csv out.csv

Each model has three layers (128 -> 128 -> 128 -> 40), Adam, float32; attention has four heads, which share the width.
A step is forward, loss, backward and update, timed from the host between two synchronisations. Each model runs on up to
four paths (`PATHS`): on a GPU one after the other, on the CPU in turns, a step each.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _native
from .._table import show
from ..cache import clear_cache
from ..graph import Graph
from ..integrations.pyg import accelerate
from .graphs import SPECS, Csr, named
from .results import write_table

WIDTHS = (128, 128, 128, 40)


def _layers() -> dict[str, Callable[[int, int], torch.nn.Module]]:
    from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv, TransformerConv

    heads = 4
    return {
        "gcn": GCNConv,
        "gcn_cached": lambda a, b: GCNConv(a, b, cached=True),
        "sage_mean": SAGEConv,
        "sage_max": lambda a, b: SAGEConv(a, b, aggr="max"),
        "gin": lambda a, b: GINConv(torch.nn.Linear(a, b)),
        "gat": lambda a, b: GATConv(a, b // heads, heads),
        "gatv2": lambda a, b: GATv2Conv(a, b // heads, heads),
        "transformer": lambda a, b: TransformerConv(a, b // heads, heads),
    }


ATTENTION = ("gat", "gatv2", "transformer")
MODELS = ("gcn", "gcn_cached", "sage_mean", "sage_max", "gin", *ATTENTION)
#: ``edge_index`` and ``csr``: as PyG users run it, with an edge list or a ``torch.sparse`` CSR matrix; ``accelerated``:
#: the former after `accelerate`; ``stub``: every aggregation replaced by an output that nobody writes, so what is left
#: is the rest of the model.
PATHS = ("edge_index", "csr", "accelerated", "stub")


class _Nothing(torch.autograd.Function):
    """An output of the size of an aggregation, and a gradient that passes through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.empty_like(grad)


def _stub(net: torch.nn.Module) -> None:
    def propagate(edge_index: Any, x: Any, **_: Any) -> Tensor:
        return _Nothing.apply(x if isinstance(x, Tensor) else x[0])  # type: ignore[no-any-return]

    layer: Any
    for layer in net.modules():
        if hasattr(layer, "propagate"):
            layer.propagate = propagate
            layer.normalize = False  # GCN's, which belongs to the aggregation


class Net(torch.nn.Module):
    """Three layers of one kind with ReLU between."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        make = _layers()[kind]
        self.layers = torch.nn.ModuleList(make(a, b) for a, b in itertools.pairwise(WIDTHS))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Logits, ``[N, 40]``; `edge_index` is an edge list or a sparse matrix."""
        for i, layer in enumerate(self.layers):
            x = layer(x, edge_index) if i == 0 else layer(F.relu(x), edge_index)
        return x


def measure(
    graph: str, model: str, paths: Sequence[str], device: str, steps: int, scale: float
) -> list[dict[str, Any]]:
    """Rows, one for each path, see `COLUMNS`.

    ``peak_bytes`` counts what the model and its training step allocate on the GPU beyond features and graph; on the CPU
    it is not measured. ``products_ms``: time in this package's operators in one step, by the profiler; ``graph_bytes``:
    what both directions of the graph take. Steps begin to count when plans are warm.
    """
    if device == "cuda":
        return [_together(graph, model, [path], device, steps, scale)[0] for path in paths]
    return _together(graph, model, paths, device, steps, scale)


def _together(
    graph: str, model: str, paths: Sequence[str], device: str, steps: int, scale: float
) -> list[dict[str, Any]]:
    clear_cache()
    rows: list[dict[str, Any]] = [{"graph": graph, "model": model, "path": path, "status": "ok"} for path in paths]
    runs: list[_Run | None] = [None] * len(paths)

    def attempt(i: int, action: Callable[[], Any]) -> Any:
        if rows[i]["status"] != "ok":
            return None
        try:
            return action()
        except torch.OutOfMemoryError:
            rows[i]["status"] = "out of memory"
        except (RuntimeError, NotImplementedError, ValueError) as e:
            rows[i]["status"] = f"not done: {str(e).splitlines()[0]}"
        return None

    def step(i: int) -> None:
        run = runs[i]
        assert run is not None
        run.step()

    for i, path in enumerate(paths):
        runs[i] = attempt(i, functools.partial(_Run, graph, model, path, device, scale))
    for _ in range(steps):
        for i in range(len(paths)):
            attempt(i, functools.partial(step, i))
    for row, run in zip(rows, runs, strict=True):
        if run is not None and row["status"] == "ok":
            row.update(run.row())
    runs.clear()
    run = None
    clear_cache()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return rows


class _Run:
    """One model on one path, in training."""

    def __init__(self, graph: str, model: str, path: str, device: str, scale: float) -> None:
        if path == "stub" and model in ATTENTION:
            raise ValueError("an attention layer is more than its aggregation")
        self.path, self.cuda = path, device == "cuda"
        structure = named(graph, device, scale=scale)
        n = structure.num_nodes
        self.adjacency = _matrix(structure) if path == "csr" else structure.edge_index()
        del structure
        torch.manual_seed(0)
        self.x, self.y = torch.randn(n, WIDTHS[0], device=device), torch.randint(WIDTHS[-1], (n,), device=device)
        self.net = Net(model).to(device)
        self.graph_bytes = None
        if path == "accelerated":
            accelerate(self.net)
            self.graph_bytes = _graph_bytes(self.adjacency, n)
        elif path == "stub":
            _stub(self.net)
        self.optimizer = torch.optim.Adam(self.net.parameters(), 1e-3)
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        self.base, self.calls = torch.cuda.memory_allocated() if self.cuda else 0, 0
        self.times: list[float] = []
        self.losses: list[float] = []

    def train(self) -> float:
        """One step; the loss."""
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.net(self.x, self.adjacency), self.y)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())  # waits for the device

    def step(self) -> None:
        """One step, timed."""
        calls = _native.kernel_calls()
        if self.cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        self.losses.append(self.train())
        if self.cuda:
            torch.cuda.synchronize()
        self.times.append((time.perf_counter() - start) * 1e3)
        self.calls += _native.kernel_calls() - calls

    def row(self) -> dict[str, Any]:
        """What was measured."""
        row: dict[str, Any] = {"kernel_calls": self.calls, "graph_bytes": self.graph_bytes}
        row["peak_bytes"] = torch.cuda.max_memory_allocated() - self.base if self.cuda else None
        if self.path == "accelerated":
            row["products_ms"] = _products_ms(self.train)
        steady = self.times[len(self.times) // 2 :]
        row |= {"ms_median": round(statistics.median(steady), 3), "ms_min": round(min(steady), 3)}
        if self.path != "stub":
            row |= {"loss_first": round(self.losses[0], 6), "loss_last": round(self.losses[-1], 6)}
        return row


def _graph_bytes(edge_index: Tensor, n: int) -> int:
    g = Graph.from_edge_index(edge_index, n)
    g._core.half(True)
    return g.nbytes()


def _matrix(structure: Csr) -> Tensor:
    """The adjacency as ``torch.sparse`` CSR, rows destinations, as PyG takes it."""
    n, ones = structure.num_nodes, torch.ones(structure.col.numel(), device=structure.col.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that sparse CSR is in beta
        return torch.sparse_csr_tensor(
            structure.rowptr.long(), structure.col.long(), ones, (n, n), check_invariants=False
        )


def _products_ms(step: Callable[[], Any]) -> float:
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as found:
        step()
    events = [e for e in found.key_averages() if e.key.startswith(f"{_native.NAMESPACE}::")]
    return round(float(sum(e.device_time_total if cuda else e.cpu_time_total for e in events)) / 1e3, 3)


COLUMNS = (
    "graph model path ms_median ms_min products_ms peak_bytes graph_bytes kernel_calls loss_first loss_last status"
).split()


def main(arguments: list[str] | None = None) -> int:
    """The command; returns an exit code: 1 where two paths do not train to the same losses."""
    parser = argparse.ArgumentParser(
        prog="python -m gnn_spmm_plugin.bench.training", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--graphs", nargs="+", choices=list(SPECS), default=["arxivlike"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gcn", "sage_max"])
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the graph's nodes and edges (default: 1)")
    parser.add_argument("--threads", type=int, help="of torch on the CPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", metavar="FILE")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    rows, failed = [], False
    for graph in options.graphs:
        for model in options.models:
            made = measure(graph, model, options.paths, options.device, options.steps, options.scale)
            rows += made
            trained = [r for r in made if "loss_last" in r]
            failed |= any(
                abs(trained[0][k] - r[k]) > 1e-3 * abs(trained[0][k])
                for r in trained[1:]
                for k in ("loss_first", "loss_last")
            )
    show(COLUMNS, [["" if r.get(c) is None else str(r[c]) for c in COLUMNS] for r in rows])
    if options.csv:
        command = f"python -m gnn_spmm_plugin.bench.training {' '.join(arguments or sys.argv[1:])}"
        write_table(options.csv, COLUMNS, rows, command)
    if failed:
        print("the paths do not train alike", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
