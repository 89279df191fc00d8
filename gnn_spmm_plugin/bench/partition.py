"""What sharding a graph would cost, by the order in which its nodes are cut into blocks; no ranks are needed.

    python -m gnn_spmm_plugin.bench.partition cora arxivlike_shuf mine.npz --parts 2 8 64 --csv out.csv

A graph is one that ships, one of `gnn_spmm_plugin.bench.graphs`, or a file. Blocks have as many nodes each, in the
order of their ids, of communities, or of hashed ids; what the columns mean says
`gnn_spmm_plugin.distributed.cost.compare_orders`.
"""

from __future__ import annotations

import argparse
import sys

import torch

from .. import data
from .._table import progress, show
from ..data.edges import read_edges
from ..distributed.blocks import ORDERS
from ..distributed.cost import compare_orders
from ..graph import Graph
from .graphs import SPECS, named
from .results import write_table

COLUMNS = (
    *("graph", "nodes", "edges", "parts", "order", "cut", "halo", "of_all", "busiest_edges", "busiest_bytes"),
    *("step_bytes", "rank_bytes", "seconds"),
)


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
        base: dict[str, object] = {"graph": name, "nodes": graph.num_dst, "edges": graph.num_edges}
        for parts in options.parts:
            found = compare_orders(graph, parts, options.orders, options.widths)
            rows += [base | {"parts": parts} | row for row in found]
    show(COLUMNS, [[str(row[c]) for c in COLUMNS] for row in rows])
    if options.csv:
        command = f"python -m gnn_spmm_plugin.bench.partition {' '.join(arguments or sys.argv[1:])}"
        write_table(options.csv, COLUMNS, rows, command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
