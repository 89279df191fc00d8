"""The benchmark of what the host spends."""

from __future__ import annotations

import csv
from pathlib import Path

import torch

from gnn_spmm_plugin.bench import host


def test_rows(device: str, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    code = host.main(["--device", device, "--quick", "--csv", str(out)])
    lines = out.read_text().splitlines()
    assert any(line.startswith("# command: python -m gnn_spmm_plugin.bench.host --device") for line in lines)
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert {r["what"] for r in rows} >= {"spmm", "spmm, gradient needed", "mini-batch, edges in order"}
    missed = False
    for r in rows:
        ratio = float(r["us_ours"]) / float(r["us_other"])
        assert 0 < ratio and abs(ratio - float(r["ratio"])) < 0.05 * ratio
        missed |= r["bar"] != "" and float(r["ratio"]) > float(r["bar"])
    assert code == int(missed)


def test_what_is_measured() -> None:
    """Each call as often as it should be, all in turns."""
    made: list[str] = []
    calls = {name: lambda name=name: made.append(name) for name in "ab"}
    us = host.host_us(calls, "cpu", repeat=3, batch=2)
    assert made == list("aabb" * 3) and us.keys() == {"a", "b"}
    slow = host.host_us(
        {"slow": lambda: torch.rand(200, 200) @ torch.rand(200, 200), "fast": lambda: None}, "cpu", 5, 5
    )
    assert slow["slow"] > 3 * slow["fast"] > 0
