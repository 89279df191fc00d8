"""``gnn-spmm demo``: a stock PyG GCN on a real graph, trained as it is and accelerated, side by side.

The recipe is the one that the data sets came with: two layers of 16 hidden units, dropout 0.5, Adam with learning rate
0.01 and weight decay 5e-4, 200 epochs, row-normalised features; accuracy after the last epoch.
"""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import gnn_spmm_plugin as gsp

from ._config import disabled
from ._table import bytes_text, progress, show
from .bench.memory import peak_memory
from .data import Dataset

#: Steps whose memory is looked at: the first builds graph and plan, the second warms the plan, the third is steady.
_MEMORY_STEPS = 3

#: Steps that one training takes before it is the other's turn: what else the machine does then slows both.
_TURN = 10


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        accelerated: whether `gnn_spmm_plugin.accelerate` was called on the model.
        accuracy: on the test nodes, after the last epoch.
        ms_per_step: median over the steps after the first three: forward, backward and update.
        peak_bytes: most memory that tensors held at once in the first three steps, beyond the model and the data.
        kernel_calls: calls of this package's kernels.
        seconds: of the whole training.
    """

    device: str
    accelerated: bool
    accuracy: float
    ms_per_step: float
    peak_bytes: int | None
    kernel_calls: int
    seconds: float


def run(dataset: Dataset, devices: list[str], epochs: int = 200, seed: int = 0, hidden: int = 16) -> dict[str, Any]:
    """Trains the model plain and accelerated on each device, and compares.

    Returns:
        What ``--json`` writes: ``runs``, ``logits_max_abs_difference`` by device, and the circumstances.

    Raises:
        ImportError: torch_geometric is not installed.
    """
    if epochs <= _MEMORY_STEPS:
        raise ValueError(f"epochs must be more than {_MEMORY_STEPS}, got {epochs}")
    load = os.getloadavg()[0]  # of the minute before: what this command adds itself is not in it
    runs: list[Run] = []
    differences = {}
    for device in devices:
        batch = _Batch(dataset, device)
        gsp.clear_cache()
        pair = [_Training(batch, device, accelerated, seed, hidden) for accelerated in (False, True)]
        for training in pair:
            training.first_steps()
        done = _MEMORY_STEPS
        for _ in progress(range(done, epochs, _TURN), -(-(epochs - done) // _TURN), f"both on {device}"):
            for training in pair:
                training.timed_steps(min(_TURN, epochs - done))
            done = min(done + _TURN, epochs)
        runs += [training.result() for training in pair]
        gsp.restore(pair[1].model)
        differences[device] = _difference(pair[0].model, batch)
    return {
        "dataset": dataset.name,
        "real_features": dataset.real,
        "nodes": dataset.num_nodes,
        "edges": dataset.edge_index.shape[1],
        "features": dataset.x.shape[1],
        "classes": dataset.num_classes,
        "epochs": epochs,
        "seed": seed,
        "hidden": hidden,
        "threads": torch.get_num_threads(),
        "cpus": len(os.sched_getaffinity(0)),
        "load": load,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if "cuda" in devices else None,
        "logits_max_abs_difference": differences,
        "runs": [asdict(r) for r in runs],
    }


class _Batch:
    """A data set on a device, with the features of each node scaled to sum 1, as PyG's NormalizeFeatures does."""

    def __init__(self, dataset: Dataset, device: str) -> None:
        x = dataset.x - dataset.x.min()
        self.x = (x / x.sum(1, keepdim=True).clamp(min=1)).to(device)
        self.edge_index, self.y = dataset.edge_index.to(device), dataset.y.to(device)
        self.train = (dataset.split == 1).nonzero().flatten().to(device)
        self.test = (dataset.split == 3).nonzero().flatten().to(device)
        self.num_classes = dataset.num_classes


def _model(width: int, hidden: int, classes: int) -> torch.nn.Module:
    from torch_geometric.nn import GCNConv

    class GCN(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = GCNConv(width, hidden), GCNConv(hidden, classes)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            x = F.dropout(x, 0.5, self.training)
            x = F.dropout(self.conv1(x, edge_index).relu(), 0.5, self.training)
            out: Tensor = self.conv2(x, edge_index)
            return out

    return GCN()


class _Training:
    """One of the two trainings. It draws from random numbers of its own, so that both may take turns."""

    def __init__(self, batch: _Batch, device: str, accelerated: bool, seed: int, hidden: int) -> None:
        torch.manual_seed(seed)
        self.batch, self.device, self.accelerated = batch, device, accelerated
        self.model = _model(batch.x.shape[1], hidden, batch.num_classes).to(device)
        if accelerated:
            gsp.accelerate(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01, weight_decay=5e-4)
        self.model.train()
        self.times: list[float] = []
        self.calls, self.seconds = 0, 0.0
        self._random = self._random_state()

    def _random_state(self) -> tuple[Tensor, Tensor | None]:
        return torch.get_rng_state(), torch.cuda.get_rng_state() if self.device == "cuda" else None

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        cpu, cuda = self._random
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        calls, start = gsp.stats()["kernel_calls"], time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start
        self.calls += gsp.stats()["kernel_calls"] - calls
        self._random = self._random_state()

    def _step(self) -> None:
        self.optimizer.zero_grad()
        out = self.model(self.batch.x, self.batch.edge_index)
        F.cross_entropy(out[self.batch.train], self.batch.y[self.batch.train]).backward()
        self.optimizer.step()

    def first_steps(self) -> None:
        """Those whose memory is looked at; they are not timed."""

        def steps() -> None:
            for _ in range(_MEMORY_STEPS):
                self._step()

        with self._turn():
            self.peak = peak_memory(steps, self.device)

    def timed_steps(self, count: int) -> None:
        """`count` more steps."""
        with self._turn():
            for _ in range(count):
                _synchronize(self.device)
                begin = time.perf_counter()
                self._step()
                _synchronize(self.device)
                self.times.append(time.perf_counter() - begin)

    def result(self) -> Run:
        """What was measured."""
        batch = self.batch
        right = _logits(self.model, batch).argmax(1)[batch.test] == batch.y[batch.test]
        median = statistics.median(self.times) * 1e3
        accuracy = float(right.float().mean())
        return Run(self.device, self.accelerated, accuracy, median, self.peak, self.calls, self.seconds)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _logits(model: torch.nn.Module, batch: _Batch) -> Tensor:
    model.eval()
    with torch.no_grad():
        out: Tensor = model(batch.x, batch.edge_index)
    return out


def _difference(model: torch.nn.Module, batch: _Batch) -> float:
    """The largest difference of a logit between the plain and the accelerated model of the same weights."""
    plain = _logits(model, batch)
    gsp.accelerate(model)
    try:
        return float((_logits(model, batch) - plain).abs().max())
    finally:
        gsp.restore(model)


def report(result: dict[str, Any]) -> None:
    """Prints the table, and what it does and does not say."""
    noise = "" if result["real_features"] else ", random features and labels"
    print(
        f"{result['dataset']}: {result['nodes']:,} nodes, {result['edges']:,} edges, {result['features']:,} features, "
        f"{result['classes']} classes{noise}\n"
        f"2-layer GCN, {result['hidden']} hidden units, {result['epochs']} epochs, seed {result['seed']}; torch "
        f"{result['torch']}, {result['threads']} CPU threads" + (f", {result['gpu']}" if result["gpu"] else "")
    )
    rows = [
        [
            f"{r['device']} {'accelerated' if r['accelerated'] else 'plain PyG'}",
            f"{r['accuracy']:.3f}",
            f"{r['ms_per_step']:.2f}",
            bytes_text(r["peak_bytes"]),
            f"{r['kernel_calls']:,}",
        ]
        for r in result["runs"]
    ]
    show(["model", "test accuracy", "ms per step", "peak memory", "kernel calls"], rows)
    if _is_busy(result):
        print(f"times are rough: the machine is busy (load {result['load']:.1f}, {result['cpus']} CPUs)")
    for device, difference in result["logits_max_abs_difference"].items():
        print(f"largest difference of a logit on {device}, same weights: {difference:.1e}")
    print(
        "memory: most bytes in tensors in the first 3 steps beyond model and data, building of graph and plan included"
    )
    for plain, fast in zip(result["runs"][::2], result["runs"][1::2], strict=True):
        print(_verdict(result, plain, fast))
    if not result["real_features"]:
        print("accuracy means nothing here: features and labels are random")


def _is_busy(result: dict[str, Any]) -> bool:
    """Whether others want the cores that this command takes: threads that wait for one another then take far longer."""
    load, threads, cpus = result["load"], result["threads"], result["cpus"]
    return bool(load + min(threads, cpus) > 1.25 * cpus)


def _verdict(result: dict[str, Any], plain: dict[str, Any], fast: dict[str, Any]) -> str:
    device, gain = plain["device"], plain["ms_per_step"] / fast["ms_per_step"]
    if fast["kernel_calls"] == 0:
        why = "GSP_DISABLE is set" if disabled() else "a warning says why"
        return f"{device}: nothing was accelerated, no kernel of this package ran: {why}"
    if gain >= 1.2:
        return f"{device}: a step is {gain:.1f} times as fast" + (", roughly: see above" if _is_busy(result) else "")
    why = "the time goes elsewhere: into the dense layers and the optimizer"
    if result["edges"] < 100_000:
        why = "the graph is so small that starting operations, and the dense layers, take the time"
    change = "no faster" if gain < 1.05 else f"{gain:.2f} times as fast"
    other = "" if result["dataset"] == "tolokers" else ". Try --dataset tolokers"
    return f"{device}: a step is {change}. Little to gain on this graph: {why}{other}"


__all__ = ["Run", "report", "run"]
