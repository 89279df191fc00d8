"""What sharding a graph would cost, by the order in which its nodes are cut into blocks; no ranks are needed.

    python -m gnn_spmm_plugin.bench.partition cora arxivlike_shuf mine.npz --parts 2 8 64 --csv out.csv

A graph is one that ships, one of `gnn_spmm_plugin.bench.graphs`, or a file. Blocks have as many nodes each, in the
order of their ids, of communities, or of hashed ids. Of all ranks together: `cut`, the share of the edges that come
from another rank; `halo`, rows of others that are fetched, over own rows; `of_all`, the same over what ``all_gather``
would move. `busiest_edges` and `busiest_bytes` are the largest of a rank over the mean; `step_bytes` what comes in
during a training step with `--widths`, on all ranks together.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from .. import data
from .._table import progress, show
from ..data.edges import read_edges
from ..distributed.blocks import ORDERS, Blocks
from ..distributed.cost import partition_cost
from ..graph import Graph
from .graphs import SPECS, named
from .results import write_table

COLUMNS = "graph nodes edges parts order cut halo of_all busiest_edges busiest_bytes step_bytes seconds".split()


def graph_of(name: str, device: str, scale: float = 1.0) -> Graph:
    """The graph that ships, is generated, or is read, by that name."""
    if name in SPECS:
        made = named(name, device, scale=scale)
        return Graph.from_csr(made.rowptr, made.col, made.num_nodes)
    if name in data.names():
        shipped = data.load(name)
        return Graph.from_edge_index(shipped.edge_index.to(device), shipped.num_nodes)
    edge_index, nodes = read_edges(name)
    return Graph.from_edge_index(edge_index.to(device), nodes)


def measure(name: str, graph: Graph, parts: int, order: str, widths: list[int]) -> dict[str, object]:
    """One row, see `COLUMNS`."""
    start = time.perf_counter()
    blocks = Blocks.of(graph, parts, order)
    seconds = time.perf_counter() - start
    rows = partition_cost(graph, parts, blocks, widths)
    total = {key: sum(row[key] for row in rows) for key in rows[0]}

    def busiest(key: str) -> float:
        return round(max(row[key] for row in rows) * parts / max(total[key], 1), 3)

    return {
        "graph": name,
        "nodes": graph.num_dst,
        "edges": graph.num_edges,
        "parts": parts,
        "order": order,
        "cut": round(total["cut_edges"] / max(graph.num_edges, 1), 4),
        "halo": round(total["halo_rows"] / max(graph.num_dst, 1), 4),
        "of_all": round(total["halo_rows"] / max((parts - 1) * graph.num_dst, 1), 4),
        "busiest_edges": busiest("edges"),
        "busiest_bytes": busiest("step_bytes"),
        "step_bytes": total["step_bytes"],
        "seconds": round(seconds, 2),
    }


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m gnn_spmm_plugin.bench.partition", description=__doc__.split("\n")[0]
    )
    parser.add_argument("graphs", nargs="+", metavar="GRAPH")
    parser.add_argument("--parts", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=ORDERS)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 256], help="columns that a layer fetches")
    parser.add_argument("--scale", type=float, default=1.0, help="share of a generated graph (default: 1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", metavar="FILE")
    options = parser.parse_args(arguments)
    if min(options.parts) < 1 or min(options.widths) < 0:
        parser.error("it takes 1 or more parts, and widths of 0 or more")
    rows: list[dict[str, object]] = []
    for name in progress(options.graphs, len(options.graphs), "graphs"):
        graph = graph_of(name, options.device, options.scale)
        rows += [measure(name, graph, p, order, options.widths) for p in options.parts for order in options.orders]
    show(COLUMNS, [[str(row[c]) for c in COLUMNS] for row in rows])
    if options.csv:
        command = f"python -m gnn_spmm_plugin.bench.partition {' '.join(arguments or sys.argv[1:])}"
        write_table(options.csv, COLUMNS, rows, command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
