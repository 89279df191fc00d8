"""What a partition would cost: rows, edges, halo and traffic of each rank, without any rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..graph import Graph
from .blocks import ORDERS, Blocks, check_square


def partition_cost(
    graph: Graph,
    parts: int,
    order: str | Tensor | Blocks = "community",
    widths: Sequence[int] = (128,),
    dtype: torch.dtype = torch.float32,
    balance: str = "rows",
) -> list[dict[str, int]]:
    """What each rank would own, hold and move, if `graph` was sharded over `parts` ranks.

    Args:
        graph: its sources and destinations are the same nodes.
        parts: how many ranks.
        order: as in `Blocks.of`; or `Blocks`.
        widths: columns of what each layer exchanges, first layer first.
        dtype: of the features.
        balance: as in `Blocks.of`.

    Returns:
        A row for each rank: ``rank``; ``rows``, nodes that it owns; ``edges`` into them, and ``cut_edges``, those that
        come from other ranks; ``halo_rows``, nodes of others that it needs, and ``sent_rows``, own rows that others
        need, once for each. In bytes: ``index_bytes`` of the rank's `ShardedGraph` on a GPU, in training with overlap;
        ``input_bytes`` of the own rows of all layers' inputs, which are kept for the backward; ``buffer_bytes`` of the
        widest exchange; and what comes in during a training step, ``step_bytes``: the halo for each layer, and backward
        the gradients of the sent rows for each but the first, whose input needs none.

    Raises:
        TypeError, ValueError: as `Blocks.of`.
    """
    check_square(graph)
    blocks = order.validate() if isinstance(order, Blocks) else Blocks.of(graph, parts, order, balance)
    if (blocks.parts, blocks.num_nodes) != (parts, graph.num_dst):
        raise ValueError(
            f"the blocks are {blocks.parts} of {blocks.num_nodes} nodes, expected {parts} of {graph.num_dst}"
        )
    if not widths or min(widths) < 0:
        raise ValueError(f"widths must be one number for each layer, 0 or more, got {list(widths)}")
    place = blocks.place(torch.arange(graph.num_dst, device=graph.device))
    part = blocks.owner(place)
    edges = torch.zeros(parts, dtype=torch.int64, device=part.device).index_add_(0, part, graph.in_degree())
    to = torch.repeat_interleave(part, graph.in_degree(), output_size=graph.num_edges)
    source = graph.col.long()
    cut = part[source] != to
    needed = torch.unique(to[cut] * max(graph.num_src, 1) + source[cut])  # (rank, row) pairs
    of, row = needed // max(graph.num_src, 1), needed % max(graph.num_src, 1)
    cut_edges, halo, sent = (t.bincount(minlength=parts).tolist() for t in (to[cut], of, part[row]))
    element = dtype.itemsize
    found = []
    for rank in range(parts):
        rows, e = blocks.rows(rank), int(edges[rank])
        found.append(
            {
                "rank": rank,
                "rows": rows,
                "edges": e,
                "cut_edges": cut_edges[rank],
                "halo_rows": halo[rank],
                "sent_rows": sent[rank],
                "index_bytes": _index_bytes(rows, halo[rank], e) + 8 * sent[rank],
                "input_bytes": rows * sum(widths) * element,
                "buffer_bytes": (halo[rank] + sent[rank]) * max(widths) * element,
                "step_bytes": (halo[rank] * sum(widths) + sent[rank] * sum(widths[1:])) * element,
            }
        )
    return found


def compare_orders(
    graph: Graph,
    parts: int,
    orders: Sequence[str] = ORDERS,
    widths: Sequence[int] = (128,),
    dtype: torch.dtype = torch.float32,
) -> list[dict[str, Any]]:
    """`partition_cost` of all ranks together, for each order of the nodes.

    Returns:
        A row for each: ``order``; ``cut``, the share of the edges that come from another rank; ``halo``, rows that are
        fetched over own rows; ``of_all``, the same over what ``all_gather`` would move; ``busiest_edges`` and
        ``busiest_bytes``, the largest of a rank over the mean; ``step_bytes`` on all ranks together; ``rank_bytes``,
        the most that one rank holds of graph, inputs and buffers; ``seconds`` that it took to find the order.
    """
    found = []
    for order in orders:
        start = time.perf_counter()
        blocks = Blocks.of(graph, parts, order)
        seconds = time.perf_counter() - start
        rows = partition_cost(graph, parts, blocks, widths, dtype)
        total = {key: sum(row[key] for row in rows) for key in rows[0]}
        most = {key: max(row[key] for row in rows) * parts / max(total[key], 1) for key in ("edges", "step_bytes")}
        found.append(
            {
                "order": order,
                "cut": round(total["cut_edges"] / max(graph.num_edges, 1), 4),
                "halo": round(total["halo_rows"] / max(graph.num_dst, 1), 4),
                "of_all": round(total["halo_rows"] / max((parts - 1) * graph.num_dst, 1), 4),
                "busiest_edges": round(most["edges"], 3),
                "busiest_bytes": round(most["step_bytes"], 3),
                "step_bytes": total["step_bytes"],
                "rank_bytes": max(row["index_bytes"] + row["input_bytes"] + row["buffer_bytes"] for row in rows),
                "seconds": round(seconds, 2),
            }
        )
    return found


def _index_bytes(rows: int, halo: int, edges: int) -> int:
    """Of one graph of all edges, of both directions of its two halves, and of where each edge was passed."""
    size = 4 if max(rows + halo, edges) < 2**31 else 8
    return size * (4 * (rows + 1) + halo + 1 + 4 * edges) + 8 * edges
