"""The training benchmark on a tiny graph, and the synthetic graphs."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from gnn_spmm_plugin.bench import graphs

pytestmark = pytest.mark.pyg


@pytest.mark.parametrize("shuffle", [False, True])
def test_communities(shuffle: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    g = graphs.communities(1000, 12_000, generator, 100, 0.9, shuffle=shuffle)
    assert g.num_nodes == 1000 and g.rowptr[-1] == len(g.col)
    src, dst = g.edge_index()
    assert len(torch.unique(src * 1000 + dst)) == len(src)  # no parallel edges
    assert torch.equal(torch.unique(src * 1000 + dst), torch.unique(dst * 1000 + src))  # symmetric
    if shuffle:
        assert g.order is not None and torch.equal(g.order.long().sort().values, torch.arange(1000))
        place = torch.empty(1000, dtype=torch.int64)
        place[g.order.long()] = torch.arange(1000)
        src, dst = place[src], place[dst]
    near = ((src - dst).abs() < 300).double().mean()
    assert near > 0.8  # communities are neighbours in the order


def test_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="arxivlike"):
        graphs.named("nothing", "cpu")
    for name, make in {
        "uniform": lambda g: graphs.uniform(100, 5, g),
        "rmat": lambda g: graphs.rmat(7, 900, g),
        "road": lambda g: graphs.road(10, g),
    }.items():
        monkeypatch.setitem(graphs.SPECS, name, make)
        first, again = graphs.named(name, "cpu"), graphs.named(name, "cpu")
        assert torch.equal(first.col, again.col) and int(first.col.max()) < first.num_nodes


def test_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gnn_spmm_plugin.bench import training

    monkeypatch.setitem(graphs.SPECS, "tiny", lambda g: graphs.communities(200, 2000, g, 40, 0.7))
    out = tmp_path / "out.csv"
    arguments = [
        "--graphs",
        "tiny",
        "--models",
        "gcn",
        "sage_max",
        "--steps",
        "10",
        "--device",
        "cpu",
        "--csv",
        str(out),
    ]
    assert training.main(arguments) == 0
    lines = out.read_text().splitlines()
    head = [line for line in lines if line.startswith("#")]
    assert any("commit" in line for line in head) and any(line.startswith("# command:") for line in head)
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert [(r["model"], r["path"]) for r in rows] == [
        (m, p) for m in ("gcn", "sage_max") for p in ("pyg", "accelerated")
    ]
    calls = [int(r["kernel_calls"]) for r in rows]
    # The first layer sees constant features: a step of GCN is 3 forward and 2 backward, of SAGE max 3 and 2 x 2.
    assert calls == [0, 50, 0, 70] and all(r["status"] == "ok" for r in rows)
