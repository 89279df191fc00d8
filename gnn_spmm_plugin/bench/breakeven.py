"""After how many products a warm plan, and then a schedule, have paid for themselves.

    python -m gnn_spmm_plugin.bench.breakeven --csv docs/benchmarks/breakeven_h200.csv

For each graph: milliseconds of a product without preparation, under a warm plan as calls without a plan get one, and
under communities; what it takes to build these, descriptors and looking for communities included, once the device is
warmed up; and the number of products after which that is won back. What the numbers of uses in `gnn_spmm_plugin.plan`,
`WARM_AFTER` and `COMMUNITY_AFTER`, are to be compared with.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .._table import show
from ..candidate import RULES
from ..functional import spmm
from ..graph import Graph
from ..kernels import for_device
from ..plan import Plan, build_candidate, plan
from .collect import MOST_EDGES
from .graphs import SPECS, Csr, named
from .results import write_table
from .timer import estimate, own_stream, time_side_by_side

COLUMNS = (
    "graph width edges cold_ms warm_ms warm_build_ms warm_after community_ms community_build_ms community_after"
).split()


def wins_back(build_ms: float, before_ms: float, after_ms: float) -> float:
    """Products after which a build has paid for itself; infinity where it never does (or saves under a hundredth)."""
    saved = before_ms - after_ms
    return build_ms / saved if saved > 0.01 * before_ms else math.inf


def _built(structure: Csr, build: Callable[[Graph], Plan], device: str) -> tuple[Plan, Graph, float]:
    """A plan of a graph that has none yet, and the median milliseconds of three builds."""
    times = []
    for _ in range(4):
        graph = Graph.from_csr(structure.rowptr, structure.col, structure.num_nodes)
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        made = build(graph)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return made, graph, statistics.median(times[1:])


def measure(name: str, structure: Csr, width: int, device: str, budget_ms: float) -> dict[str, Any]:
    """One row of `COLUMNS`."""
    kernel = for_device(torch.device(device))

    def warm(graph: Graph) -> Plan:
        return build_candidate(graph._csr, kernel, RULES, width, torch.float32)

    def community(graph: Graph) -> Plan:
        return plan(graph, width, schedule="community")

    x = torch.randn(structure.num_nodes, width, device=device)
    calls: list[Callable[[], Any]] = []
    builds = []
    graph = Graph.from_csr(structure.rowptr, structure.col, structure.num_nodes)
    cold = plan(graph, width, mode="cold", policy="csr")
    calls.append(partial(spmm, graph, x, plan=cold))
    for build in (warm, community):
        made, of, ms = _built(structure, build, device)
        calls.append(partial(spmm, of, x, plan=made))
        builds.append(ms)
    estimates = [estimate(call) if device == "cuda" else 1.0 for call in calls]
    found = time_side_by_side(calls, device, "graph" if device == "cuda" else "eager", budget_ms, estimates)
    times = [math.nan if isinstance(t, str) else t.median_ms for t in found]
    return {
        "graph": name,
        "width": width,
        "edges": structure.col.numel(),
        "cold_ms": f"{times[0]:.4g}",
        "warm_ms": f"{times[1]:.4g}",
        "warm_build_ms": f"{builds[0]:.3g}",
        "warm_after": f"{wins_back(builds[0], times[0], times[1]):.3g}",
        "community_ms": f"{times[2]:.4g}",
        "community_build_ms": f"{builds[1]:.3g}",
        "community_after": f"{wins_back(builds[1], times[1], times[2]):.3g}",
    }


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m gnn_spmm_plugin.bench.breakeven", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--graphs", nargs="+", choices=list(SPECS), default=list(SPECS))
    parser.add_argument("--widths", nargs="+", type=int, default=[64])
    parser.add_argument("--most-edges", type=int, default=MOST_EDGES, help="larger graphs are left out")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the graphs' nodes and edges (default: 1)")
    parser.add_argument("--budget-ms", type=float, default=20.0, help="for timing each product")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", metavar="FILE")
    options = parser.parse_args(arguments)
    rows = []
    with own_stream(options.device):
        for name in options.graphs:
            structure = named(name, options.device, scale=options.scale)
            if structure.col.numel() > options.most_edges:
                continue
            rows += [measure(name, structure, width, options.device, options.budget_ms) for width in options.widths]
    show(COLUMNS, [[str(row[c]) for c in COLUMNS] for row in rows])
    if options.csv:
        command = f"python -m gnn_spmm_plugin.bench.breakeven {' '.join(arguments or sys.argv[1:])}"
        write_table(options.csv, COLUMNS, rows, command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
