"""Made-up measurements that a decider can be trained on, and a stopwatch that calls nothing."""

from __future__ import annotations

import dataclasses
import importlib
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.bench import collect
from gnn_spmm_plugin.bench.graphs import named
from gnn_spmm_plugin.candidate import CANDIDATES
from gnn_spmm_plugin.decider import DeviceFacts
from gnn_spmm_plugin.features import MatrixFeatures
from gnn_spmm_plugin.kernels import KERNELS_VERSION
from gnn_spmm_plugin.plan import Plan
from gnn_spmm_plugin.tune import tuned

GPU = DeviceFacts("Test GPU", 50_000_000, 132)


def features(seed: int = 0, **given: Any) -> MatrixFeatures:
    """Some."""
    draw = random.Random(seed)
    values: dict[str, Any] = {f.name: draw.random() for f in dataclasses.fields(MatrixFeatures)}
    rows, mean = int(10 ** draw.uniform(3, 6)), 10 ** draw.uniform(0.3, 2)
    values |= {"num_rows": rows, "num_cols": rows, "num_edges": int(rows * mean), "mean_degree": mean, "empty_rows": 0}
    values |= {"max_degree": int(20 * mean), "split_single": 1.5, "split_double": 1.5}
    return MatrixFeatures(**{**values, **given})


def milliseconds(f: MatrixFeatures, width: int, candidate: str) -> float:
    """What a candidate takes: long rows want pieces of 64, others panels of two rows, and the rules are in between."""
    best = "c64.w1024.l32" if f.mean_degree > 20 else "W4.F1.V2.S0"
    return f.num_edges * width * 1e-8 * (1.0 if candidate == best else 1.2 if candidate == "rules" else 1.5)


def write_csv(path: Path, graphs: int = 24, **head: str) -> Path:
    """A file as ``gnn-spmm tune --collect`` writes it; every sixth graph is held out."""
    facts = {"gpu": GPU.name, "l2_bytes": GPU.l2_bytes, "multiprocessors": GPU.multiprocessors}
    lines = [f"# {k}: {v}" for k, v in {**facts, "kernels_version": KERNELS_VERSION, **head}.items()]
    lines.append(",".join(collect.COLUMNS))
    for g in range(graphs):
        f = features(g)
        note = ";".join(f"{k}={v!r}" for k, v in dataclasses.asdict(f).items())
        base = f"g{g},family{g % 3},{int(g % 6 == 5)}"
        lines.append(f"{base},0,,features,,{note}")
        for width in (16, 64):
            lines += [f"{base},{width},float32,{c},{milliseconds(f, width, str(c)):.6g}," for c in CANDIDATES]
    path.write_text("\n".join(lines) + "\n")
    return path


class Stopwatch:
    """Says what `of` says of a call's plan; calls nothing."""

    def __init__(self, of: Callable[[Plan], float] = lambda plan: 1.0) -> None:
        self.of, self.timed = of, 0

    def first(self, call: Any) -> tuple[torch.Tensor, float]:
        self.timed += 1
        plan = call.__defaults__[0] if call.__defaults__ else None
        return torch.ones(3), 1.0 if plan is None else self.of(plan)

    def all(self, calls: Sequence[Any], estimates: Sequence[float]) -> list[float | str]:
        return list(estimates)


def graph(seed: int = 1) -> gsp.Graph:
    """Some, drawn."""
    c = named("arxivlike", "cpu", seed=seed, scale=1 / 15)
    return gsp.Graph.from_csr(c.rowptr, c.col)


def quick_unsplit(plan: Plan) -> float:
    """Unsplit rows take half as long."""
    return 0.5 if plan.items is None and plan.format is None and plan.config[0] == 0 and plan.config[8] == 1 else 1.0


def tune_many(number: int, folder: str, barrier: Any) -> None:
    """What one of several processes does; here, since a process that is started anew has to find it by name."""
    os.environ["XDG_CACHE_HOME"] = folder
    importlib.import_module("gnn_spmm_plugin.plan").shared_bytes = lambda device: 227 << 10  # type: ignore[attr-defined]
    g = graph()
    barrier.wait()
    for width in (16, number):  # one that all want, and one of its own
        tuned(g, width, watch=Stopwatch(quick_unsplit), device=GPU, again=True, seconds=0.0)
