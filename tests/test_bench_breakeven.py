"""`gnn_spmm_plugin.bench.breakeven`."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from gnn_spmm_plugin.bench import breakeven


def test_wins_back() -> None:
    assert breakeven.wins_back(6.0, 2.0, 1.0) == 6
    assert breakeven.wins_back(6.0, 1.0, 1.0) == breakeven.wins_back(6.0, 1.0, 2.0) == math.inf
    assert breakeven.wins_back(6.0, 1.0, 0.995) == math.inf, "a difference that is none"


def test_command(tmp_path: Path, device: str) -> None:
    out = tmp_path / "out.csv"
    arguments = "--graphs arxivlike road1M --scale 0.01 --widths 8 --budget-ms 2 --device".split()
    assert breakeven.main([*arguments, device, "--csv", str(out)]) == 0
    rows = list(csv.DictReader(line for line in out.read_text().splitlines() if not line.startswith("#")))
    assert [row["graph"] for row in rows] == ["arxivlike", "road1M"]
    for row in rows:
        saved = float(row["cold_ms"]) - float(row["warm_ms"])
        if math.isfinite(float(row["warm_after"])):
            assert math.isclose(float(row["warm_after"]) * saved, float(row["warm_build_ms"]), rel_tol=0.2)
        assert float(row["warm_build_ms"]) > 0 and float(row["community_build_ms"]) > 0
    assert breakeven.main([*arguments, device, "--most-edges", "1"]) == 0
