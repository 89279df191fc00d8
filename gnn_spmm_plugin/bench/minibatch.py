"""Training steps of PyG models on sampled neighbourhoods, new ones in every step: as PyG runs them, and accelerated.

    python -m gnn_spmm_plugin.bench.minibatch --graphs arxivlike --models gcn sage_mean sage_max --csv out.csv

The models are those of `gnn_spmm_plugin.bench.training`. Batches of 1024 nodes with 15, 10 and 5 neighbours are drawn
beforehand, edges grouped by destination as PyG's loaders have them; a step is forward, loss on the 1024, backward and
update. Both ways take turns, a batch each; its edge list is an object that neither has seen. So does a third, the stub:
the model with every aggregation replaced by an output that nobody writes, which is what no aggregation can beat.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _native
from .._table import show
from ..integrations.pyg import accelerate
from .graphs import SPECS, Csr, named
from .results import write_table
from .training import ATTENTION, MODELS, WIDTHS, Net, _stub

BATCH, NEIGHBOURS = 1024, (15, 10, 5)
PATHS = ("edge_index", "accelerated", "stub")
#: A layer that keeps its first graph is not for batches.
SAMPLED = tuple(m for m in MODELS if m != "gcn_cached")


class Batch(NamedTuple):
    """Features of all nodes of a sample, its edges, and classes of the first nodes, whose neighbourhoods they are."""

    x: Tensor
    edge_index: Tensor
    y: Tensor


def sample(
    structure: Csr, seeds: Tensor, neighbours: Sequence[int], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Neighbourhoods of some nodes: some sources of edges into each, some of edges into each of those, and so on.

    Args:
        structure: the graph.
        seeds: ``[B]`` different nodes.
        neighbours: how many draws, with replacement, at each distance; what comes up twice counts once.
        generator: of the graph's device.

    Returns:
        ``[n]`` int64 nodes, seeds first, and ``[2, E]`` int64 edges between their places, destinations ascending.
    """
    number = torch.full((structure.num_nodes,), -1, device=seeds.device)
    number[seeds] = torch.arange(len(seeds), device=seeds.device)
    nodes, edges, front = seeds, [], seeds
    for count in neighbours:
        begin, end = structure.rowptr[front].long(), structure.rowptr[front + 1].long()
        draw = torch.rand(len(front), count, generator=generator, device=seeds.device)
        at = begin.unsqueeze(1) + (draw * (end - begin).unsqueeze(1)).long()
        source = structure.col[at.clamp(max=max(len(structure.col) - 1, 0))].long().sort(1).values
        taken = (end > begin).unsqueeze(1) & torch.cat(
            [torch.ones_like(source[:, :1], dtype=torch.bool), source[:, 1:] != source[:, :-1]], 1
        )
        to = number[front].unsqueeze(1).expand_as(source)[taken]
        source = source[taken]
        front = source[number[source] < 0].unique()
        number[front] = torch.arange(len(nodes), len(nodes) + len(front), device=seeds.device)
        nodes = torch.cat([nodes, front])
        edges.append(torch.stack([number[source], to]))
    return nodes, torch.cat(edges, 1)


def batches(graph: str, count: int, device: str, scale: float = 1.0) -> list[Batch]:
    """`count` of them, seeded."""
    structure = named(graph, device, scale=scale)
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(structure.num_nodes, WIDTHS[0], generator=generator, device=device)
    y = torch.randint(WIDTHS[-1], (structure.num_nodes,), generator=generator, device=device)
    made = []
    for _ in range(count):
        seeds = torch.randperm(structure.num_nodes, generator=generator, device=device)[:BATCH]
        nodes, edge_index = sample(structure, seeds, NEIGHBOURS, generator)
        made.append(Batch(x[nodes], edge_index, y[seeds]))
    return made


def measure(given: list[Batch], model: str, device: str) -> dict[str, Any]:
    """One row, see `COLUMNS`: medians over the batches but the first five."""
    nets = []
    for path in PATHS[: 2 if model in ATTENTION else 3]:
        torch.manual_seed(0)
        net = Net(model).to(device)
        if path == "accelerated":
            accelerate(net)
        elif path == "stub":
            _stub(net)
        nets.append((path, net, torch.optim.Adam(net.parameters(), 1e-3)))
    times: dict[str, list[float]] = {path: [] for path, _, _ in nets}
    losses: dict[str, list[float]] = {path: [] for path, _, _ in nets}
    calls = 0
    for batch in given:
        for path, net, optimizer in nets:
            edge_index, before = batch.edge_index.clone(), _native.kernel_calls()
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = F.cross_entropy(net(batch.x, edge_index)[: len(batch.y)], batch.y)
            loss.backward()
            optimizer.step()
            losses[path].append(loss.item())  # waits for the device
            times[path].append((time.perf_counter() - start) * 1e3)
            calls += (_native.kernel_calls() - before) * (path == "accelerated")
    medians = {path: statistics.median(t[5:] if len(t) > 5 else t) for path, t in times.items()}
    apart = max(abs(a - b) / abs(a) for a, b in zip(losses["edge_index"], losses["accelerated"], strict=True))
    return {
        "model": model,
        "nodes": round(statistics.mean(len(b.x) for b in given)),
        "edges": round(statistics.mean(b.edge_index.shape[1] for b in given)),
        **{f"{path}_ms": round(medians[path], 3) if path in medians else "" for path in PATHS},
        "times": round(medians["edge_index"] / medians["accelerated"], 3),
        "kernel_calls": calls,
        "losses_apart": f"{apart:.1e}",
    }


COLUMNS = (
    "graph",
    "model",
    "nodes",
    "edges",
    "edge_index_ms",
    "accelerated_ms",
    "stub_ms",
    "times",
    "kernel_calls",
    "losses_apart",
)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns an exit code: 1 where losses differ by more than a thousandth."""
    parser = argparse.ArgumentParser(
        prog="python -m gnn_spmm_plugin.bench.minibatch", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--graphs", nargs="+", choices=list(SPECS), default=["arxivlike"])
    parser.add_argument("--models", nargs="+", choices=SAMPLED, default=SAMPLED)
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the graph's nodes and edges (default: 1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", metavar="FILE")
    options = parser.parse_args(arguments)
    rows = []
    for graph in options.graphs:
        given = batches(graph, options.batches, options.device, options.scale)
        rows += [{"graph": graph, **measure(given, model, options.device)} for model in options.models]
    show(COLUMNS, [[str(row[c]) for c in COLUMNS] for row in rows])
    if options.csv:
        command = f"python -m gnn_spmm_plugin.bench.minibatch {' '.join(arguments or sys.argv[1:])}"
        write_table(options.csv, COLUMNS, rows, command)
    return int(any(float(row["losses_apart"]) > 1e-3 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
