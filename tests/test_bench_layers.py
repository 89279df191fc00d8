"""The table of layers: what it says is what ran."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.pyg

SMALL = ["--scale", "0.002", "--width", "8", "--repeats", "1", "--device", "cpu"]


@pytest.fixture(autouse=True)
def threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rows_of(path: Path) -> list[dict[str, str]]:
    lines = path.read_text().splitlines()
    assert any(line.startswith("# command: python -m gnn_spmm_plugin.bench.layers --layers") for line in lines)
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def test_rows_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gnn_spmm_plugin.bench.layers import COLUMNS, main

    names = ["GCNConv", "GINEConv", "RGCNConv", "GATConv", "CGConv", "HeteroConv"]
    path = tmp_path / "layers.csv"
    assert main(["--layers", *names, *SMALL, "--csv", str(path)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in table[2:]] == names
    assert main(["--table", str(path), str(path)]) == 0
    both = capsys.readouterr().out.splitlines()
    assert [line.count("|") for line in both] == [8] * len(table)  # a column more
    rows = {row["layer"]: row for row in rows_of(path)}
    assert list(rows) == names and list(rows["GCNConv"]) == list(COLUMNS)
    for name, row in rows.items():
        assert float(row["error"]) < 1e-8 and float(row["ms"]) > 0 and float(row["stock_ms"]) > 0
        assert int(row["peak_bytes"]) > 0 and int(row["stock_peak_bytes"]) > 0
        assert (int(row["kernel_calls"]) > 0) == (name != "CGConv")
    assert [rows[n]["status"] for n in ("GCNConv", "GINEConv", "RGCNConv", "HeteroConv", "CGConv")] == [
        *["fused"] * 4,
        "not",
    ]
    assert rows["GINEConv"]["ops"] == "sum of relu(x + e)" and "cat needs" in rows["CGConv"]["reasons"]


def test_layers_that_compute_something_else_are_found(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from gnn_spmm_plugin.bench.layers import main
    from gnn_spmm_plugin.integrations.pyg.lazy import Pending

    right = Pending.aggregated
    monkeypatch.setattr(Pending, "aggregated", lambda *args: right(*args) * (1 + 1e-6))
    assert main(["--layers", "LGConv", *SMALL]) == 1
    assert "other results than stock: LGConv" in capsys.readouterr().err


def test_unknown_layers_are_refused(capsys: Any) -> None:
    from gnn_spmm_plugin.bench.layers import main

    with pytest.raises(SystemExit):
        main(["--layers", "NoConv"])
    assert "no layer is called 'NoConv'; there are GCNConv" in capsys.readouterr().err


def test_every_layer_runs() -> None:
    """On a graph of a few nodes: all can be made and called, so the table leaves none out."""
    from gnn_spmm_plugin.bench.layers import Problem, layers

    problem = Problem("cora_like", 0.02, 8, "cpu")
    for name, (make, inputs) in layers().items():
        found = problem.call(make(8), inputs, torch.float32)()
        assert all(bool(t.isfinite().all()) for t in found), name
