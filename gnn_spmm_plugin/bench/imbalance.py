"""How evenly blocks share the work, by the order of rows and by the way they are cut.

    python -m gnn_spmm_plugin.bench.imbalance --csv docs/benchmarks/imbalance.csv

Rows of power-law graphs of growing longest row are handed to blocks in their own order, longest first, or by DualGCN's
hybrid of density and degree; as many rows to each block, as many edges as whole rows allow, or as many edges with long
rows in pieces, as `gnn_spmm_plugin.schedule.list_items` cuts them. The imbalance factor is the work of the busiest
block over the mean, work being edges. Theorem 2 of the paper expects it to fall where rows are sorted by the hybrid.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

from .._table import progress, show
from ..csr import Csr
from ..features import GraphFeatures
from ..partition import dual_metric
from ..schedule import layout_of, list_items
from .results import write_table

ORDERS = ("as it is", "degree", "hybrid")
COLUMNS = "longest edges order equal_rows equal_edges long_rows_split".split()


def power_law(rows: int, longest: int, seed: int = 0, exponent: float = 2.1) -> Csr:
    """A graph whose row lengths follow a power law from 2 to `longest`, one of them exactly that.

    Long rows are met as columns as often as they have edges.
    """
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(rows, generator=generator, dtype=torch.float64)
    tail = (longest / 2) ** (1 - exponent)  # what is left of the distribution beyond the longest
    degree = (2 * (1 - u * (1 - tail)) ** (1 / (1 - exponent))).long().clamp(max=longest)
    degree[int(torch.randint(rows, (1,), generator=generator))] = longest
    ends = degree.cumsum(0)
    edges = int(ends[-1])
    col = torch.searchsorted(ends, torch.randint(edges, (edges,), generator=generator), right=True)
    return Csr(torch.cat([ends.new_zeros(1), ends]).int(), col.int(), None, rows)


def busiest(work: Tensor, blocks: int, even: bool) -> float:
    """Work of the busiest of `blocks` over their mean.

    Args:
        work: of pieces, ``[n]``, in the order in which blocks take them.
        blocks: how many there are.
        even: each takes the pieces that begin in its share of the whole work, instead of as many as the others.
    """
    total = work.sum()
    if even:
        owner = ((work.cumsum(0) - work) * blocks // total).clamp(
            max=blocks - 1
        )  # those without work come after the end
    else:
        owner = torch.arange(len(work)) * blocks // len(work)
    return float(torch.zeros(blocks, dtype=work.dtype).index_add(0, owner, work).max() * blocks / total)


def measure(csr: Csr, blocks: int) -> list[dict[str, object]]:
    """A row of `COLUMNS` for each order of the rows of a square `csr`."""
    degree = csr.degree().long()
    orders = {
        "as it is": torch.arange(csr.num_rows),
        "degree": degree.argsort(descending=True, stable=True),
        "hybrid": dual_metric(csr).hybrid.argsort(descending=True, stable=True),
    }
    layout = layout_of(GraphFeatures.of(csr))
    found: list[dict[str, object]] = []
    for name in ORDERS:
        order = orders[name]
        whole = degree[order]
        items, splits, _ = list_items(csr, layout, order)
        pieces = items[: len(items) - splits].long()
        pieces = pieces[:, 2] - pieces[:, 1]
        found.append(
            {
                "longest": int(degree.max()),
                "edges": len(csr.col),
                "order": name,
                "equal_rows": round(busiest(whole, blocks, False), 2),
                "equal_edges": round(busiest(whole, blocks, True), 2),
                "long_rows_split": round(busiest(pieces, blocks, True), 2),
            }
        )
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m gnn_spmm_plugin.bench.imbalance", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--blocks", type=int, default=1024)
    parser.add_argument("--longest", type=int, nargs="+", default=[30, 100, 300, 1000, 3000, 10_000, 30_000])
    parser.add_argument("--csv", metavar="FILE")
    options = parser.parse_args(arguments)
    if options.blocks < 1 or options.rows < options.blocks or min(options.longest) < 2:
        parser.error("it takes at least one block, as many rows as blocks, and longest rows of 2 edges or more")
    rows: list[dict[str, object]] = []
    for longest in progress(options.longest, len(options.longest), "graphs"):
        rows += measure(power_law(options.rows, longest), options.blocks)
    show(COLUMNS, [[str(r[c]) for c in COLUMNS] for r in rows])
    if options.csv:
        command = f"python -m gnn_spmm_plugin.bench.imbalance {' '.join(arguments or sys.argv[1:])}"
        write_table(options.csv, COLUMNS, rows, command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
