"""`gnn_spmm_plugin.bench.minibatch`: what it samples, and that both ways train alike."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from gnn_spmm_plugin.bench import minibatch
from gnn_spmm_plugin.bench.graphs import named


def test_sample(device: str) -> None:
    """Edges of the graph, each once, as many as asked for; every node is a seed or the source of one."""
    graph = named("arxivlike", device, scale=1 / 100)
    generator = torch.Generator(device).manual_seed(0)
    seeds = torch.randperm(graph.num_nodes, generator=generator, device=device)[:20]
    nodes, edges = minibatch.sample(graph, seeds, (4, 3), generator)
    assert torch.equal(nodes[:20], seeds) and len(nodes.unique()) == len(nodes)
    assert torch.equal(edges[1], edges[1].sort().values), "destinations ascend"
    assert len(edges.unique(dim=1)[0]) == edges.shape[1]
    assert torch.equal(edges[0].unique(), torch.arange(len(nodes), device=device)[edges[0].unique()])
    assert set(range(20, len(nodes))) <= set(edges[0].tolist())
    source, destination = nodes[edges[0]], nodes[edges[1]]
    exist = set(zip(*(t.tolist() for t in graph.edge_index()), strict=True))
    assert set(zip(source.tolist(), destination.tolist(), strict=True)) <= exist
    degree = (graph.rowptr[1:] - graph.rowptr[:-1]).long()[nodes]
    drawn = edges[1].bincount(minlength=len(nodes))
    assert bool((drawn[:20] <= degree[:20].clamp(max=4)).all()) and bool((drawn[20:] <= 3).all())
    assert bool(((drawn[:20] > 0) == (degree[:20] > 0)).all())


@pytest.mark.pyg
def test_command(tmp_path: Path, device: str) -> None:
    out = tmp_path / "out.csv"
    arguments = ["--scale", "0.02", "--batches", "6", "--models", "gcn", "sage_max", "--device", device]
    assert minibatch.main([*arguments, "--csv", str(out)]) == 0
    rows = list(csv.DictReader(line for line in out.read_text().splitlines() if not line.startswith("#")))
    assert [r["model"] for r in rows] == ["gcn", "sage_max"]
    # The first layer sees constant features: a step of GCN is 3 forward and 2 backward, of SAGE max 3 and 2 x 2.
    assert [int(r["kernel_calls"]) for r in rows] == [6 * 5, 6 * 7]
    assert all(float(r["accelerated_ms"]) > 0 for r in rows)
