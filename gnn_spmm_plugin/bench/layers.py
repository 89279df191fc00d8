"""Every PyG layer as PyG runs it and accelerated: agreement, time, memory, what was fused and why not.

    python -m gnn_spmm_plugin.bench.layers --csv docs/benchmarks/pyg_layers_cpu.csv

A step is forward and backward of one layer, float32, with gradients for the features, the edge features and the
parameters. Both ways take turns, and medians are compared: of the time until the GPU is done, on the CPU of the CPU
time of one thread, which other users of the machine do not change. Values and gradients are compared in float64. With
``--csv`` the rows are written; the table for ``docs/pyg.md`` is printed in either case.
"""

from __future__ import annotations

import argparse
import copy
import csv
import gc
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import _native, report
from ..cache import clear_cache
from ..integrations.pyg import accelerate
from .graphs import SPECS, named
from .memory import peak_memory
from .results import write_table

RELATIONS = 3

#: name: (how it is made for a width, the inputs it is called with).
Layer = tuple[Callable[[int], nn.Module], tuple[str, ...]]
_PLAIN = ("x", "edge_index")
_WEIGHTED = ("x", "edge_index", "edge_weight")
_FEATURES = ("x", "edge_index", "edge_attr")
_TYPED = ("x", "edge_index", "edge_type")
_MANY = ["sum", "mean", "max", "min", "std", "var"]


def _pna(width: int) -> nn.Module:
    from torch_geometric import nn as tg

    scalers = ["identity", "amplification", "attenuation"]
    aggr = tg.aggr.DegreeScalerAggregation(["mean", "min", "max", "std"], scalers, torch.tensor([0, 4, 8, 2]))
    layer: nn.Module = tg.SAGEConv((12 * width, width), width, aggr=aggr)
    return layer


def layers() -> dict[str, Layer]:
    """All layers of PyG that run on a drawn graph, by name."""
    from torch_geometric import nn as tg

    def mlp(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b))

    degrees = torch.tensor([0, 4, 8, 2])
    metadata = (["n"], [("n", "to", "n")])
    return {
        "GCNConv": (lambda f: tg.GCNConv(f, f), _WEIGHTED),
        "GCNConv cached": (lambda f: tg.GCNConv(f, f, cached=True), _PLAIN),
        "GCN2Conv": (lambda f: tg.GCN2Conv(f, 0.1), ("x", "x0", "edge_index")),
        "APPNP": (lambda f: tg.APPNP(3, 0.1), _PLAIN),
        "SGConv": (lambda f: tg.SGConv(f, f, 2), _PLAIN),
        "SSGConv": (lambda f: tg.SSGConv(f, f, 0.1, 2), _PLAIN),
        "TAGConv": (lambda f: tg.TAGConv(f, f), _PLAIN),
        "LGConv": (lambda f: tg.LGConv(), _PLAIN),
        "MixHopConv": (lambda f: tg.MixHopConv(f, f), _PLAIN),
        "GatedGraphConv": (lambda f: tg.GatedGraphConv(f, 2), _WEIGHTED),
        "ARMAConv": (lambda f: tg.ARMAConv(f, f, num_stacks=2), _PLAIN),
        "ChebConv": (lambda f: tg.ChebConv(f, f, 3), _PLAIN),
        "ClusterGCNConv": (lambda f: tg.ClusterGCNConv(f, f), _PLAIN),
        "PDNConv": (lambda f: tg.PDNConv(f, f, f, 8), _FEATURES),
        "GINConv": (lambda f: tg.GINConv(mlp(f, f)), _PLAIN),
        "GINEConv": (lambda f: tg.GINEConv(mlp(f, f)), _FEATURES),
        "SAGEConv mean": (lambda f: tg.SAGEConv(f, f), _PLAIN),
        "SAGEConv max": (lambda f: tg.SAGEConv(f, f, aggr="max"), _PLAIN),
        "SAGEConv six": (lambda f: tg.SAGEConv(f, f, aggr=_MANY), _PLAIN),
        "SAGEConv scalers": (_pna, _PLAIN),
        "SAGEConv softmax": (lambda f: tg.SAGEConv(f, f, aggr="softmax"), _PLAIN),
        "SAGEConv median": (lambda f: tg.SAGEConv(f, f, aggr="median"), _PLAIN),
        "GraphConv": (lambda f: tg.GraphConv(f, f), _WEIGHTED),
        "MFConv": (lambda f: tg.MFConv(f, f, 4), _PLAIN),
        "SignedConv": (lambda f: tg.SignedConv(f, f, True), ("x", "edge_index", "edge_index")),
        "SimpleConv": (lambda f: tg.SimpleConv("mean", "sum"), _WEIGHTED),
        "WLConvContinuous": (lambda f: tg.WLConvContinuous(), _WEIGHTED),
        "EGConv": (lambda f: tg.EGConv(f, f, ["sum", "mean", "max", "symnorm", "std"], 4, 2), _PLAIN),
        "RGCNConv": (lambda f: tg.RGCNConv(f, f, RELATIONS), _TYPED),
        "RGCNConv blocks": (lambda f: tg.RGCNConv(f, f, RELATIONS, num_blocks=4), _TYPED),
        "FastRGCNConv": (lambda f: tg.FastRGCNConv(f, f, RELATIONS, num_bases=2), _TYPED),
        "HypergraphConv": (lambda f: tg.HypergraphConv(f, f), _PLAIN),
        "LEConv": (lambda f: tg.LEConv(f, f), _WEIGHTED),
        "FiLMConv": (lambda f: tg.FiLMConv(f, f), _PLAIN),
        "FiLMConv linear": (lambda f: tg.FiLMConv(f, f, RELATIONS, act=None), _TYPED),
        "GENConv": (lambda f: tg.GENConv(f, f, aggr="add"), _PLAIN),
        "GENConv edges": (lambda f: tg.GENConv(f, f, aggr="mean"), _FEATURES),
        "GENConv softmax": (lambda f: tg.GENConv(f, f), _PLAIN),
        "GeneralConv": (lambda f: tg.GeneralConv(f, f, heads=2), _PLAIN),
        "GeneralConv edges": (lambda f: tg.GeneralConv(f, f, in_edge_channels=f), _FEATURES),
        "AGNNConv": (lambda f: tg.AGNNConv(), _PLAIN),
        "FAConv": (lambda f: tg.FAConv(f), ("x", "x0", "edge_index")),
        "GATConv": (lambda f: tg.GATConv(f, f // 4, heads=4), _PLAIN),
        "GATv2Conv": (lambda f: tg.GATv2Conv(f, f // 4, heads=4), _PLAIN),
        "SuperGATConv": (lambda f: tg.SuperGATConv(f, f // 4, heads=4), _PLAIN),
        "TransformerConv": (lambda f: tg.TransformerConv(f, f // 4, heads=4), _PLAIN),
        "TransformerConv edges": (lambda f: tg.TransformerConv(f, f // 4, heads=4, edge_dim=f), _FEATURES),
        "GeneralConv attention": (lambda f: tg.GeneralConv(f, f, heads=2, attention=True), _PLAIN),
        "HANConv": (lambda f: tg.HANConv(f, f, metadata, heads=4), ("x_dict", "edge_index_dict")),
        "HGTConv": (lambda f: tg.HGTConv(f, f, metadata, heads=4), ("x_dict", "edge_index_dict")),
        "HEATConv": (
            lambda f: tg.HEATConv(f, f, 1, RELATIONS, 8, f, 8),
            ("x", "edge_index", "zeros", "edge_type", "edge_attr"),
        ),
        "ResGatedGraphConv": (lambda f: tg.ResGatedGraphConv(f, f), _PLAIN),
        "CGConv": (lambda f: tg.CGConv(f), _PLAIN),
        "EdgeConv": (lambda f: tg.EdgeConv(mlp(2 * f, f)), _PLAIN),
        "PNAConv": (lambda f: tg.PNAConv(f, f, ["mean", "max", "std"], ["identity", "amplification"], degrees), _PLAIN),
        "PointNetConv": (lambda f: tg.PointNetConv(mlp(f + 3, f)), ("x", "pos", "edge_index")),
        "PointTransformerConv": (lambda f: tg.PointTransformerConv(f, f), ("x", "pos", "edge_index")),
        "NNConv": (lambda f: tg.NNConv(f, 4, nn.Linear(4, 4 * f)), ("x", "edge_index", "edge_attr4")),
        "GMMConv": (lambda f: tg.GMMConv(f, f, 4, 2), ("x", "edge_index", "edge_attr4")),
        "FeaStConv": (lambda f: tg.FeaStConv(f, f, 2), _PLAIN),
        "DNAConv": (lambda f: tg.DNAConv(f, 2), ("history", "edge_index")),
        "HeteroConv": (lambda f: tg.HeteroConv({("n", "to", "n"): tg.SAGEConv(f, f)}), ("x_dict", "edge_index_dict")),
        "DirGNNConv": (lambda f: tg.DirGNNConv(tg.SAGEConv(f, f)), _PLAIN),
        "AntiSymmetricConv": (lambda f: tg.AntiSymmetricConv(f), _PLAIN),
        # last: it writes a matrix for each edge
        "RGATConv": (lambda f: tg.RGATConv(f, f, RELATIONS), _TYPED),
    }


class Problem:
    """A drawn graph with everything that a layer may be called with."""

    def __init__(self, graph: str, scale: float, width: int, device: str) -> None:
        structure = named(graph, device, scale=scale)
        n, self.edge_index = structure.num_nodes, structure.edge_index()
        order = torch.randperm(self.edge_index.shape[1], generator=torch.Generator().manual_seed(1))
        self.edge_index = self.edge_index[:, order.to(device)].contiguous()  # as data come: in no order
        e = self.edge_index.shape[1]
        self.num_nodes, self.num_edges, self.width, self.device = n, e, width, device
        g = torch.Generator().manual_seed(2)
        self._tensors = {
            "x": torch.randn(n, width, generator=g),
            "x0": torch.randn(n, width, generator=g),
            "pos": torch.randn(n, 3, generator=g),
            "history": torch.randn(n, 2, width, generator=g),
            "edge_weight": torch.rand(e, generator=g),
            "edge_attr": torch.randn(e, width, generator=g),
            "edge_attr4": torch.rand(e, 4, generator=g),
            "edge_type": torch.randint(RELATIONS, (e,), generator=g),
            "zeros": torch.zeros(n, dtype=torch.long),
        }

    def call(self, layer: nn.Module, names: tuple[str, ...], dtype: torch.dtype) -> Callable[[], list[Tensor]]:
        """A function that runs `layer` forward and backward and returns its output and all gradients."""
        made: dict[str, Any] = {"edge_index": self.edge_index, "edge_index_dict": {("n", "to", "n"): self.edge_index}}
        leaves = []
        for name in ("x" if n == "x_dict" else n for n in names):
            if name in self._tensors:
                t = self._tensors[name].to(self.device)
                if t.is_floating_point():
                    # Edge weights are part of the graph; edge features come out of a layer, like those of nodes.
                    t = t.to(dtype, copy=True).requires_grad_(name != "edge_weight")
                    leaves += [t] if t.requires_grad else []
                made[name] = t
        if "x_dict" in names:
            made["x_dict"] = {"n": made["x"]}
        arguments = [made[name] for name in names]
        g: list[Tensor] = []

        def step() -> list[Tensor]:
            for leaf in (*leaves, *layer.parameters()):
                leaf.grad = None
            out = layer(*arguments)
            while not isinstance(out, Tensor):
                out = next(iter(out.values())) if isinstance(out, dict) else out[0]
            if not g:
                g.append(torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out))
            out.backward(g[0])
            return [out.detach(), *(t.grad for t in (*leaves, *layer.parameters()) if t.grad is not None)]

        return step


def measure(problem: Problem, name: str, layer: Layer, repeats: int) -> dict[str, Any]:
    """One row, see `COLUMNS`.

    ``peak_bytes`` is the most that one step holds beyond what was there before it; ``error`` the largest difference
    of an output or gradient, relative to the largest element of the output or any gradient.
    """
    make, inputs = layer
    row: dict[str, Any] = {"layer": name, "nodes": problem.num_nodes, "edges": problem.num_edges}
    row |= {"width": problem.width, "device": problem.device}
    clear_cache()
    try:
        torch.manual_seed(0)
        stock = make(problem.width).to(problem.device).eval()
        with torch.no_grad():
            problem.call(stock, inputs, torch.float32)  # parameters that are made lazily
        row |= _compared(problem, stock, inputs)
        fast = accelerate(copy.deepcopy(stock))
        steps = [problem.call(m, inputs, torch.float32) for m in (stock, fast)]
        for _ in range(3):
            for step in steps:
                step()
        before = _native.kernel_calls()
        steps[1]()
        row["kernel_calls"] = _native.kernel_calls() - before
        times = _interleaved(steps, repeats, problem.device)
        row["stock_ms"], row["ms"] = (round(statistics.median(t), 3) for t in times)
        row["speedup"] = round(statistics.median(a / b for a, b in zip(*times, strict=True)), 3)
        row["stock_peak_bytes"], row["peak_bytes"] = (_peak(step, problem.device) for step in steps)
        row |= _said(fast)
    except (RuntimeError, ImportError, NotImplementedError, ValueError, TypeError) as e:
        row["status"] = f"not done: {str(e).splitlines()[0]}"
    finally:
        clear_cache()
        gc.collect()
        if problem.device == "cuda":
            torch.cuda.empty_cache()
    return row


def _compared(problem: Problem, stock: nn.Module, inputs: tuple[str, ...]) -> dict[str, Any]:
    double = copy.deepcopy(stock).double()
    expected = problem.call(double, inputs, torch.float64)()
    fast = accelerate(copy.deepcopy(stock).double())
    got = problem.call(fast, inputs, torch.float64)()
    if [t.shape for t in got] != [t.shape for t in expected]:
        raise RuntimeError("the accelerated layer has other outputs or gradients")
    scale = max(float(t.abs().max()) for t in expected)
    return {"error": max(float((a - b).abs().max()) for a, b in zip(got, expected, strict=True)) / scale}


def _said(layer: nn.Module) -> dict[str, Any]:
    rows = [r for r in report(layer).rows if r["status"] != "not called"]
    statuses = {r["status"] for r in rows}
    found = {
        "status": statuses.pop() if len(statuses) == 1 else "partly" if statuses else "not",
        "ops": sorted({op for r in rows for op in r["ops"]}),
        "reasons": sorted({reason for r in rows for reason in r["reasons"]}),
    }
    return found | {"ops": "; ".join(found["ops"]), "reasons": "; ".join(found["reasons"])}


def _interleaved(steps: list[Callable[[], Any]], repeats: int, device: str) -> list[list[float]]:
    clock = time.perf_counter if device == "cuda" else time.process_time
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats):
        for step, found in zip(steps, times, strict=True):
            if device == "cuda":
                torch.cuda.synchronize()
            start = clock()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            found.append((clock() - start) * 1e3)
    return times


def _peak(step: Callable[[], Any], device: str) -> int:
    if device == "cuda":
        step()  # what is built once is there then
    found = peak_memory(step, device)
    assert found is not None
    return found


COLUMNS = (
    "layer status ops stock_ms ms speedup stock_peak_bytes peak_bytes error kernel_calls nodes edges width device "
    "reasons"
).split()


def markdown(tables: list[list[dict[str, Any]]]) -> str:
    """The table of ``docs/pyg.md``: how much faster on each device, and the share of memory on the last."""
    devices = [next((str(row["device"]) for row in rows if row.get("device")), "?") for rows in tables]
    head = ["layer", "fused", "operations", *(f"times, {device}" for device in devices), "memory", "why not"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    others = [{row["layer"]: row for row in rows} for rows in tables]
    for row in tables[0]:
        same = [rows.get(row["layer"], {}) for rows in others]
        times = [f"{float(r['speedup']):.2f}" if r.get("speedup") else "" for r in same]
        last = next((r for r in reversed(same) if r.get("stock_peak_bytes")), None)
        memory = "" if last is None else f"{float(last['peak_bytes']) / float(last['stock_peak_bytes']):.0%}"
        cells = [row["layer"], row["status"], row.get("ops", ""), *times, memory, row.get("reasons", "")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _read(path: str) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as f:
        lines = f.read().splitlines()
    gpu = next((line.split(": ", 1)[1] for line in lines if line.startswith("# gpu: ")), "none")
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return [{**row, "device": gpu if row["device"] == "cuda" else row["device"]} for row in rows]


def main(arguments: list[str] | None = None) -> int:
    """The command; returns an exit code: 1 where a layer gives other results than stock."""
    parser = argparse.ArgumentParser(prog="python -m gnn_spmm_plugin.bench.layers", description=__doc__.split("\n")[0])
    parser.add_argument("--layers", nargs="+", metavar="NAME", help="all, unless given")
    parser.add_argument("--graph", choices=list(SPECS), default="arxivlike")
    parser.add_argument("--scale", type=float, help="of the graph; 1 on a GPU, 0.1 on the CPU")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", metavar="FILE")
    parser.add_argument("--table", nargs="+", metavar="CSV", help="instead: print the table of such files")
    options = parser.parse_args(arguments)
    if options.table:
        print(markdown([_read(path) for path in options.table]))
        return 0
    everything = layers()
    unknown = [name for name in options.layers or () if name not in everything]
    if unknown:
        parser.error(f"no layer is called {unknown[0]!r}; there are {', '.join(everything)}")
    if options.device == "cpu":
        torch.set_num_threads(1)
    scale = options.scale or (1.0 if options.device == "cuda" else 0.1)
    problem = Problem(options.graph, scale, options.width, options.device)
    rows: list[dict[str, Any]] = []
    command = f"python -m gnn_spmm_plugin.bench.layers {shlex.join(sys.argv[1:] if arguments is None else arguments)}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of stock PyG about torch-scatter
        for name in options.layers or everything:
            rows.append(measure(problem, name, everything[name], options.repeats))
            said = {k: rows[-1].get(k) for k in ("layer", "status", "speedup", "error", "reasons")}
            print(" ".join(str(v) for v in said.values()), file=sys.stderr, flush=True)
            if options.csv:  # each time: an interrupted run has measured something too
                write_table(options.csv, COLUMNS, rows, command)
    print(markdown([rows]))
    wrong = [row["layer"] for row in rows if row.get("error", 0.0) > 1e-8]
    if wrong:
        print(f"other results than stock: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
