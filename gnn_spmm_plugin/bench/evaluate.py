"""What is chosen against the best that was found, timed once more: on graphs that no decider was trained on."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._table import progress
from ..candidate import Candidate
from ..functional import spmm
from ..graph import Graph
from ..kernels import DTYPE_OF
from ..plan import WARM_AFTER, Plan
from ..plan import plan as make_plan
from ..policy import POLICIES
from .candidates import Call, GpuStopwatch, Problem, Stopwatch
from .collect import Collection, suite
from .regimes import Regime
from .timer import own_stream

#: Uses of a graph after which its own plan is warm.
_USES = WARM_AFTER + 2


def evaluate(
    path: str,
    folder: str | None = None,
    limit_seconds: float = math.inf,
    *,
    device: str = "cuda",
    stopwatch: Stopwatch | None = None,
    chosen: Sequence[Regime] | None = None,
) -> list[dict[str, Any]]:
    """Times the oracle's pick, that of each policy and that of a call without a plan, side by side.

    The oracle takes the candidate that is fastest in the file. It does not know this run, so it can be beaten.

    Args:
        path: written by ``gnn-spmm tune --collect``; its held-out graphs are taken.
        folder: of graphs in files, as then.
        limit_seconds: nothing is begun after so long.
        device: where graphs are drawn.
        stopwatch: instead of that of a GPU.
        chosen: instead of the whole suite.

    Returns:
        For each product the oracle's pick and milliseconds of each.
    """
    end = time.monotonic() + limit_seconds
    collection = Collection.read(path)
    by_name = {r.name: r for r in (suite(folder) if chosen is None else chosen)}
    wanted: dict[str, list[tuple[int, str, str]]] = {}
    for (graph, width, dtype), rows in collection.rows.items():
        timed = {c: float(row["ms"]) for c, row in rows.items() if row["ms"]}
        if width and timed and next(iter(rows.values()))["holdout"] == "1" and graph in by_name:
            wanted.setdefault(graph, []).append((width, dtype, min(timed, key=lambda c: timed[c])))
    watch = GpuStopwatch(10.0) if stopwatch is None else stopwatch
    found: list[dict[str, Any]] = []
    with own_stream(device), torch.no_grad():
        for name, products in progress(wanted.items(), len(wanted), "evaluate"):
            if time.monotonic() > end:
                break
            try:
                found += _evaluate_graph(by_name[name], products, watch, device)
            except Exception as e:
                if device == "cuda":
                    torch.cuda.synchronize()
                print(f"{name} is left out: {type(e).__name__}: {str(e)[:200]}", file=sys.stderr)
    return found


def _evaluate_graph(
    regime: Regime, products: Sequence[tuple[int, str, str]], watch: Stopwatch, device: str
) -> list[dict[str, Any]]:
    rowptr, col, num_cols = regime.draw(device)
    graph = Graph.from_csr(rowptr, col, num_cols)
    oracle = Problem(Graph.from_csr(rowptr, col, num_cols))
    generator = torch.Generator(device).manual_seed(11)
    weight = torch.rand(graph.num_edges, generator=generator, device=device) + 0.5
    found = []
    for width, dtype_name, best in products:
        dtype = DTYPE_OF[dtype_name]
        x = (torch.rand(num_cols, width, generator=generator, device=device) * 2 - 1).to(dtype)
        w = weight.to(dtype)
        plans: dict[str, Plan | None] = {"default": None}
        plans |= {p: make_plan(graph, width, dtype, policy=p) for p in POLICIES if p != "dualgcn"}
        calls: dict[str, Call] = {"oracle": _call(oracle.graph, x, w, oracle.plan(Candidate.parse(best), width, dtype))}
        calls |= {name: _call(graph, x, w, p) for name, p in plans.items()}
        for _ in range(_USES):
            calls["default"]()
        estimates = [watch.first(call)[1] for call in calls.values()]
        times = watch.all(list(calls.values()), estimates)
        row: dict[str, Any] = {"graph": regime.name, "family": regime.family, "width": width, "dtype": dtype_name}
        row["pick"] = best
        row |= {name: "" if isinstance(t, str) else f"{t:.5g}" for name, t in zip(calls, times, strict=True)}
        found.append(row)
    return found


def _call(graph: Graph, x: torch.Tensor, weight: torch.Tensor, plan: Plan | None) -> Call:
    return lambda: spmm(graph, x, weight, plan=plan)


def print_picks(rows: Sequence[dict[str, Any]], out: Callable[[str], None] | None) -> dict[str, dict[str, float]]:
    """For each way to choose, the time of the oracle's pick over its own: geometric mean, and the worst product."""
    found: dict[str, dict[str, float]] = {}
    for who in ("auto", "default", "csr", "ra", "paramspmm"):
        pairs = [(float(r["oracle"]) / float(r[who]), r) for r in rows if r["oracle"] and r.get(who)]
        if not pairs:
            continue
        worst, row = min(pairs, key=lambda pair: pair[0])
        mean = math.exp(sum(math.log(share) for share, _ in pairs) / len(pairs))
        found[who] = {"geomean": mean, "worst": worst, "products": len(pairs)}
        if out is not None:
            where = f"{row['graph']} {row['width']} {row['dtype']}, where the best is {row['pick']}"
            out(f"{who.ljust(10)} {mean:.3f} of the oracle over {len(pairs)} products, at worst {worst:.3f} ({where})")
    return found
