"""The measurement of dense graphs, small and on the CPU, with the twin of the kernel."""

from __future__ import annotations

import csv
from importlib import import_module
from pathlib import Path

import pytest
import torch
from tile_twin import on_cpu

from gnn_spmm_plugin.bench import dense as bench

DENSE = import_module("gnn_spmm_plugin.dense")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DENSE, "_WORK", {2: 1, 4: 1})
    monkeypatch.setattr(DENSE, "_LEAST_EDGES", 1)
    path = tmp_path / "dense.csv"
    before = torch.get_float32_matmul_precision()
    with on_cpu():
        code = bench.main(["--device", "cpu", "--scale", "0.01", "--widths", "8", "128", "--csv", str(path)])
    assert code in (0, 1) and torch.get_float32_matmul_precision() == before
    rows = list(csv.DictReader(line for line in path.read_text().splitlines() if not line.startswith("#")))
    assert tuple(rows[0]) == bench.COLUMNS and {r["dtype"] for r in rows} == {"bfloat16", "tf32"}
    for r in rows:
        assert float(r["times"]) == pytest.approx(float(r["other_us"]) / float(r["dense_us"]), rel=0.2)
        assert r["chosen"] in "01" and (r["chosen"] == "0" or r["width"] == "128")
    assert any(r["chosen"] == "1" for r in rows) and "chosen: " in capsys.readouterr().out


def test_graphs() -> None:
    """As many edges as their names say."""
    g = torch.Generator().manual_seed(0)
    band, blocks = bench.band(g, 50, 3), bench.blocks(g, 4, 5)
    assert band.num_edges == 50 * 7 - 2 * (1 + 2 + 3) and blocks.num_edges == 4 * 25
    src, dst = blocks.edge_index()
    assert bool((src // 5 == dst // 5).all())
    assert bench.random_pairs(g, 30, 20, 0.5).num_edges == pytest.approx(300, rel=0.3)
    assert int(bench.power_law(g, 200, 3.0).in_degree().min()) >= 40
    names = [name for name, _ in bench.drawn()]
    assert len(set(names)) == len(names) and "ddi_like" in names
