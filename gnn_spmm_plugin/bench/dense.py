"""Dense graphs: one GEMM against every other kernel, by size, density, width and dtype, and what is chosen.

    python -m gnn_spmm_plugin.bench.dense --csv docs/benchmarks/dense_h200.csv

Drawn graphs whose pairs are joined at random, bands, blocks on the diagonal, power laws and bipartite ones. `other_us`
is the time of the fastest of some candidates of the kernels that read edges, `dense_us` that of the matrix, `chosen`
says whether a plan that is left to itself takes it (`gnn_spmm_plugin.dense.pays`). Medians inside CUDA graphs, side by
side; weights are constant. float32 is rounded to tf32 by the GEMM alone, as torch is told that this will do.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import dense
from .._table import progress, show
from ..candidate import Candidate
from ..functional import spmm
from ..graph import Graph
from ..kernels import dtype_name
from ..plan import Plan
from ..plan import plan as make_plan
from . import graphs
from .candidates import Problem
from .results import write_table
from .timer import Timing, estimate, own_stream, time_side_by_side

COLUMNS = tuple(
    "graph rows cols edges density width dtype reduce weighted other other_us dense_us times chosen".split()
)
OTHERS = tuple("rules csr blocks c64.w1024.l64 c256.w1024.l64 W4.F1.V1.S1 W4.F2.V1.S1 W4.F2.V2.S0".split())
WIDTHS = (16, 32, 64, 96, 128, 256, 512)
DTYPES = (torch.bfloat16, torch.float32)
SIZES = (701, 1203, 2405, 4811, 9607, 15001)
DENSITIES = (0.02, 0.04, 0.07, 0.15, 0.3, 0.6)
#: Larger ones are left out.
MOST_EDGES = 30_000_000


def _joined(rows: Tensor, cols: Tensor, n: int, m: int) -> Graph:
    rowptr, col = graphs.compress(rows, cols, n, m)
    return Graph.from_csr(rowptr, col, m)


def random_pairs(g: torch.Generator, n: int, m: int, density: float) -> Graph:
    """Each pair is an edge with that probability."""
    rows, cols = (torch.rand(n, m, generator=g, device=g.device) < density).nonzero(as_tuple=True)
    return _joined(rows, cols, n, m)


def band(g: torch.Generator, n: int, reach: int) -> Graph:
    """Each node with those up to `reach` numbers away."""
    rows = torch.arange(n, device=g.device).repeat_interleave(2 * reach + 1)
    cols = rows + torch.arange(-reach, reach + 1, device=g.device).repeat(n)
    inside = (cols >= 0) & (cols < n)
    return _joined(rows[inside], cols[inside], n, n)


def blocks(g: torch.Generator, count: int, size: int) -> Graph:
    """Cliques that follow one another."""
    rows = torch.arange(count * size, device=g.device).repeat_interleave(size)
    cols = rows // size * size + torch.arange(size, device=g.device).repeat(count * size)
    return _joined(rows, cols, count * size, count * size)


def power_law(g: torch.Generator, n: int, exponent: float) -> Graph:
    """Rows of 50 to n edges."""
    made = graphs.powerlaw_rows(n, exponent, 50, n, g)
    return Graph.from_csr(made.rowptr, made.col, made.num_nodes)


def _spec(g: torch.Generator, name: str) -> Graph:
    made = graphs.SPECS[name](g, 1.0)
    return Graph.from_csr(made.rowptr, made.col, made.num_nodes)


def drawn(scale: float = 1.0) -> Iterator[tuple[str, Callable[[torch.Generator], Graph]]]:
    """Names, and how to draw them; `scale` of the nodes."""

    def nodes(n: int) -> int:
        return max(int(n * scale), 8)

    if scale == 1:
        for name in ("ddi_like", "ra_dense_small_d90"):
            yield name, lambda g, name=name: _spec(g, name)  # type: ignore[misc]
    for n in map(nodes, SIZES):
        for p in DENSITIES:
            if n * n * p < MOST_EDGES:
                yield f"random_{n}_{p}", lambda g, n=n, p=p: random_pairs(g, n, n, p)  # type: ignore[misc]
    for n, reach in ((8000, 150), (4000, 150), (15_000, 300)):
        yield f"band_{nodes(n)}_{reach}", lambda g, n=n, r=reach: band(g, nodes(n), r)  # type: ignore[misc]
    for count, size in ((10, 500), (20, 400), (5, 1000), (30, 500)):
        name = f"blocks_{count}_{nodes(size)}"
        yield name, lambda g, c=count, s=size: blocks(g, c, nodes(s))  # type: ignore[misc]
    for n, exponent in ((3000, 3.0), (6000, 4.0)):
        yield f"powerlaw_{nodes(n)}", lambda g, n=n, e=exponent: power_law(g, nodes(n), e)  # type: ignore[misc]
    for n, m in ((20_000, 2000), (2000, 20_000)):
        name = f"bipartite_{nodes(n)}_{nodes(m)}"
        yield name, lambda g, n=n, m=m: random_pairs(g, nodes(n), nodes(m), 0.04)  # type: ignore[misc]


def _contenders(graph: Graph, width: int, dtype: torch.dtype, reduce: str) -> dict[str, Plan]:
    """The matrix, and who reads edges."""
    asked = {"dense": make_plan(graph, width, dtype, reduce, kernel="dense")}
    if graph.device.type == "cpu":
        return {"csr_cpu": make_plan(graph, width, dtype, reduce, kernel="csr_cpu")} | asked
    problem = Problem(graph)
    made = {text: problem.plan(Candidate.parse(text), width, dtype) for text in OTHERS}
    return {text: replace(plan, request=(width, dtype, reduce)) for text, plan in made.items()} | asked


def measure(
    graph: Graph, name: str, width: int, dtype: torch.dtype, weight: Tensor | None, budget_ms: float
) -> dict[str, Any]:
    """One row: of a weighted sum, or of a mean where there is no weight."""
    device, reduce = graph.device.type, "mean" if weight is None else "sum"
    x = (torch.rand(graph.num_src, width, device=device) * 2 - 1).to(dtype)
    w = None if weight is None else weight.to(dtype)
    plans = _contenders(graph, width, dtype, reduce)
    calls = [partial(spmm, graph, x, w, reduce, plan=plan) for plan in plans.values()]
    for call in calls:
        call()
    guesses = [estimate(call) for call in calls] if device == "cuda" else None
    times = time_side_by_side(calls, device, "graph", budget_ms, guesses)
    us = {n: t.median_ms * 1e3 for n, t in zip(plans, times, strict=True) if isinstance(t, Timing)}
    matrix = us.pop("dense")
    other = min(us, key=lambda n: us[n])
    return {
        "graph": name,
        "rows": graph.num_dst,
        "cols": graph.num_src,
        "edges": graph.num_edges,
        "density": f"{graph.num_edges / (graph.num_dst * graph.num_src):.3f}",
        "width": width,
        "dtype": "tf32" if dtype == torch.float32 else dtype_name(dtype),
        "reduce": reduce,
        "weighted": int(weight is not None),
        "other": other,
        "other_us": f"{us[other]:.1f}",
        "dense_us": f"{matrix:.1f}",
        "times": f"{us[other] / matrix:.2f}",
        "chosen": int(dense.pays(graph._csr, width, dtype)),
    }


def main(arguments: list[str] | None = None) -> int:
    """The command; returns an exit code: 1 where what is chosen is slower by more than a twentieth."""
    parser = argparse.ArgumentParser(prog="python -m gnn_spmm_plugin.bench.dense", description=__doc__.split("\n")[0])
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--scale", type=float, default=1.0, help="part of the nodes (default: 1)")
    parser.add_argument("--budget", type=float, default=2.0, help="milliseconds for each candidate (default: 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", metavar="FILE")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with own_stream(options.device), torch.no_grad():
            todo = list(drawn(options.scale))
            for name, make in progress(todo, len(todo), "dense"):
                graph = make(torch.Generator(options.device).manual_seed(1))
                weights = torch.rand(graph.num_edges, device=options.device) + 0.5, None
                for dtype, width, weight in itertools.product(DTYPES, options.widths, weights):
                    rows.append(measure(graph, name, width, dtype, weight, options.budget))
    finally:
        torch.set_float32_matmul_precision(before)
    chosen = [float(row["times"]) for row in rows if row["chosen"]]
    show(COLUMNS, [[str(row[c]) for c in COLUMNS] for row in rows])
    if chosen:
        mean = math.exp(sum(map(math.log, chosen)) / len(chosen))
        print(
            f"chosen: {len(chosen)} of {len(rows)}, {mean:.2f} times as fast (geometric mean), at worst {min(chosen)}"
        )
    if options.csv:
        command = f"python -m gnn_spmm_plugin.bench.dense {' '.join(arguments or sys.argv[1:])}"
        write_table(options.csv, COLUMNS, rows, command)
    return int(any(t < 0.95 for t in chosen))


if __name__ == "__main__":
    sys.exit(main())
