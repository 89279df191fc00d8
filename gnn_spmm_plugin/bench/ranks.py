"""Training on one GPU and on several: speed, traffic against what was computed, and a graph that does not fit one.

    python -m gnn_spmm_plugin.bench.ranks --ranks 1 2 --csv docs/benchmarks/ranks_h200.csv

For each number of ranks this starts torchrun with as many processes on this machine, which run one of these:

- ``sharded``: SAGE (mean, three layers) on a whole graph, `gnn_spmm_plugin.distributed.ShardedGraph`, for each order
  and with and without overlap;
- ``ddp``: the same model of PyG's layers, accelerated, on sampled neighbourhoods of 1024 nodes a rank, under
  DistributedDataParallel;
- ``limit``: as ``sharded``, but no rank may use more memory than lies half way between what the smallest and the
  largest number of ranks took, so that fewer do not fit. Needs a GPU.

`times` is the speed over the first number of ranks: of steps, for ``ddp`` of nodes. Bytes are those of a step, all
ranks together: computed beforehand; counted where tensors are handed over; and on the wire, by NVLink's counters, or
through gloo by those of the network interfaces, where there are some.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .. import _config
from .._table import show
from ..distributed import ShardedGraph, all_reduce_gradients
from ..integrations.pyg import accelerate
from .graphs import SPECS, named
from .minibatch import BATCH, NEIGHBOURS, sample
from .results import write_table
from .training import Net

COLUMNS = (
    "task",
    "graph",
    "order",
    "overlap",
    "ranks",
    "backend",
    "status",
    "ms",
    "times",
    "halo",
    "computed_bytes",
    "counted_bytes",
    "wire_bytes",
    "peak_bytes",
    "limit_bytes",
    "loss",
)
#: Steps before plans are as they stay, and measured ones.
WARM, STEPS = 30, 10


class Sage(torch.nn.Module):
    """Three layers of GraphSAGE's mean on a share of a graph; exchanged is what is narrower, input or output."""

    def __init__(self, widths: list[int], sharded: ShardedGraph, overlap: bool) -> None:
        super().__init__()
        self.widths, self.sharded, self.overlap = widths, sharded, overlap
        self.near = torch.nn.ModuleList(torch.nn.Linear(a, b) for a, b in pairwise(widths))
        self.own = torch.nn.ModuleList(torch.nn.Linear(a, b, bias=False) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the own nodes."""
        layer: Any
        for i, (layer, own) in enumerate(zip(self.near, self.own, strict=True)):
            x = F.relu(x) if i else x
            if layer.out_features < layer.in_features:
                near = self._mean(F.linear(x, layer.weight)) + layer.bias
            else:
                near = layer(self._mean(x))
            x = near + own(x)
        return x

    def _mean(self, x: Tensor) -> Tensor:
        return self.sharded.spmm(x, reduce="mean", overlap=self.overlap)  # type: ignore[no-any-return]

    def computed_bytes(self) -> int:
        """What a step brings to this rank, gradients of parameters left out."""
        total = 0
        for i, (a, b) in enumerate(pairwise(self.widths)):
            total += self.sharded.bytes_received(min(a, b))
            if i or b < a:  # the first layer's input has no gradient
                total += self.sharded.bytes_sent(min(a, b))
        return total


# ---------------------------------------------------------------------- in each rank


def _wire_bytes(device: torch.device) -> int | None:
    """What has come to this GPU over NVLink so far, or without one to this machine's network interfaces."""
    try:
        if device.type != "cuda":
            lines = Path("/proc/net/dev").read_text().splitlines()[2:]
            return sum(int(line.split(":")[1].split()[0]) for line in lines)
        command = ["nvidia-smi", "nvlink", "-gt", "d", "-i", str(device.index)]
        said = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
        words = [line.split() for line in said.splitlines() if "Data Rx" in line]
        return sum(int(w[-2]) * 1024 for w in words) if words else None
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return None


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _add_up(number: int | None, device: torch.device) -> int | None:
    if number is None:
        return None
    total = torch.tensor(number, dtype=torch.int64, device=device)
    dist.all_reduce(total)
    return int(total)


def _timed(step: Callable[[], Tensor], warm: int, steps: int, device: torch.device) -> dict[str, Any]:
    """Median milliseconds of a step, bytes of one, the memory that steps took, and the last loss."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(warm):
        step()
    _sync(device)
    times = []
    dist.barrier()
    wire, counted = _wire_bytes(device), _config.counters["exchanged_bytes"]
    dist.barrier()
    for _ in range(steps):
        start = time.perf_counter()
        loss = step()
        _sync(device)
        times.append((time.perf_counter() - start) * 1e3)
    dist.barrier()
    wire_after, counted = _wire_bytes(device), _config.counters["exchanged_bytes"] - counted
    moved = None if wire is None or wire_after is None else (wire_after - wire) // steps
    if device.type == "cuda":
        moved = _add_up(moved, device)  # on the CPU the interfaces are everyone's
    dist.all_reduce(loss)
    return {
        "ms": round(statistics.median(times), 3),
        "counted_bytes": _add_up(counted // steps, device),
        "wire_bytes": moved,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "loss": round(float(loss), 5),
    }


def _sharded(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    graph = named(options.graph, device, scale=options.scale)
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(graph.num_nodes, options.widths[0], generator=generator, device=device)
    y = torch.randint(options.widths[-1], (graph.num_nodes,), generator=generator, device=device)
    edge_index = graph.edge_index()
    nodes = graph.num_nodes
    del graph
    found = []
    for order in options.orders:
        sharded = ShardedGraph.from_edge_index(edge_index, nodes, order=order)
        own_x, own_y = sharded.shard(x), sharded.shard(y)
        if options.limit:  # from here on, a rank has its share alone
            del edge_index, x, y
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(options.limit / torch.cuda.mem_get_info(device)[1], device)
        for overlap in (True, False) if dist.get_world_size() > 1 and not options.limit else (True,):
            torch.manual_seed(0)
            model = Sage(options.widths, sharded, overlap).to(device)
            optimizer = torch.optim.Adam(model.parameters(), 1e-3)

            def step(model: Sage = model, optimizer: Any = optimizer, x: Tensor = own_x, y: Tensor = own_y) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y, reduction="sum") / nodes
                loss.backward()
                all_reduce_gradients(model)
                optimizer.step()
                return loss.detach()

            row = {"order": order, "overlap": overlap if dist.get_world_size() > 1 else ""}
            row["halo"] = _add_up(sharded.num_halo, device)
            row["computed_bytes"] = _add_up(model.computed_bytes(), device)
            found.append({**row, **_timed(step, options.warm, options.steps, device)})
    return found


def _ddp(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    structure, rank, size = named(options.graph, device, scale=options.scale), dist.get_rank(), dist.get_world_size()
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(structure.num_nodes, 128, generator=generator, device=device)
    y = torch.randint(40, (structure.num_nodes,), generator=generator, device=device)
    own = torch.randperm(structure.num_nodes, generator=generator, device=device)[rank::size]
    generator.manual_seed(rank)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(accelerate(Net("sage_mean").to(device)))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step() -> Tensor:
        seeds = own[torch.randint(len(own), (BATCH,), generator=generator, device=device).unique()]
        nodes, edges = sample(structure, seeds, NEIGHBOURS, generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[nodes], edges)[: len(seeds)], y[seeds])
        loss.backward()
        optimizer.step()
        return loss.detach() / size

    return [_timed(step, options.warm, options.steps, device)]


def _work(options: argparse.Namespace) -> None:
    """What a rank does; the first writes the rows."""
    local = int(os.environ["LOCAL_RANK"])
    device, backend = torch.device("cpu"), "gloo"
    if options.device == "cuda":
        gpus = torch.cuda.device_count()
        device = torch.device("cuda", local % gpus)
        torch.cuda.set_device(device)
        # NCCL wants a GPU for each rank
        backend = "cpu:gloo,cuda:nccl" if int(os.environ["LOCAL_WORLD_SIZE"]) <= gpus else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=3))
    base = {"task": options.task, "graph": options.graph, "ranks": dist.get_world_size(), "backend": backend}
    if options.limit:
        base["limit_bytes"] = options.limit
    try:
        rows = (_ddp if options.task == "ddp" else _sharded)(options, device)
        rows = [{**base, "status": "ok", **row} for row in rows]
    except torch.OutOfMemoryError:
        if dist.get_world_size() > 1:
            raise  # others wait for this one: torchrun ends them
        rows = [{**base, "order": options.orders[0], "status": "out of memory"}]
    if dist.get_rank() == 0:
        Path(options.out).write_text(json.dumps(rows))
    dist.destroy_process_group()


# ---------------------------------------------------------------------- outside


def _launch(task: str, ranks: int, options: argparse.Namespace, **more: str) -> list[dict[str, Any]]:
    """Rows of one task, in as many processes; one that says so, where they failed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        given = {"graph": options.graph, "scale": options.scale, "device": options.device, "out": out, "task": task}
        given |= {"warm": options.warm, "steps": options.steps, **more}
        words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
        words += ["--widths", *map(str, options.widths)]
        words += ["--orders", *(options.orders if task != "limit" else options.orders[-1:])]
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, "-m", *launcher, "-m", "gnn_spmm_plugin.bench.ranks", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            rows: list[dict[str, Any]] = json.loads(out.read_text())
            return rows
        why = "out of memory" if "OutOfMemoryError" in done.stderr else "failed"
        print(done.stderr, file=sys.stderr)
        return [{"task": task, "graph": options.graph, "ranks": ranks, "status": why, **more}]


def _limit(rows: list[dict[str, Any]], order: str) -> int | None:
    """Half way between the memory of the fewest ranks and that of the most."""
    peaks = {r["ranks"]: r["peak_bytes"] for r in rows if r.get("order") == order and r.get("peak_bytes")}
    return (peaks[min(peaks)] + peaks[max(peaks)]) // 2 if len(peaks) > 1 else None


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows."""
    rows: list[dict[str, Any]] = []
    for task in options.tasks:
        more = {}
        if task == "limit":
            limit = _limit(rows, options.orders[-1])
            if limit is None:
                print("limit: needs a GPU, the task sharded, and two numbers of ranks", file=sys.stderr)
                continue
            more["limit"] = str(limit)
        for ranks in options.ranks:
            rows += _launch(task, ranks, options, **more)
    for row in rows:
        first = [r for r in rows if r["task"] == row["task"] and r.get("ms") and r["ranks"] == options.ranks[0]]
        # in any order, whatever was fastest on the first number of ranks
        if first and row.get("ms"):
            nodes = row["ranks"] / options.ranks[0] if row["task"] == "ddp" else 1
            row["times"] = round(min(r["ms"] for r in first) / row["ms"] * nodes, 3)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """The command; returns an exit code: 1 where something failed that had enough memory."""
    tasks = ("sharded", "ddp", "limit")
    parser = argparse.ArgumentParser(prog="python -m gnn_spmm_plugin.bench.ranks", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=tasks)
    parser.add_argument("--graph", choices=list(SPECS), default="productslike_shuf")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the graph (default: 1)")
    parser.add_argument(
        "--orders", nargs="+", choices=("natural", "community", "hash"), default=["natural", "community"]
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 256, 48], help="of all layers, and classes")
    parser.add_argument("--warm", type=int, default=WARM)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", metavar="FILE")
    for inner in ("--task", "--out"):  # what a rank is given
        parser.add_argument(inner, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if min(options.ranks) < 1 or min(options.warm, options.steps) < 1 or len(options.widths) < 2:
        parser.error("it takes 1 or more ranks and steps, and widths of an input and an output")
    if options.out:
        _work(options)
        return 0
    rows = measure(options)
    rows = [{column: "" if row.get(column) is None else row[column] for column in COLUMNS} for row in rows]
    show(COLUMNS, [[str(row[c]) for c in COLUMNS] for row in rows])
    if options.csv:
        command = f"python -m gnn_spmm_plugin.bench.ranks {' '.join(arguments or sys.argv[1:])}"
        write_table(options.csv, COLUMNS, rows, command)
    return int(any(row["status"] == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
