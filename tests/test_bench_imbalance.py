"""How evenly blocks share the work: the measure, and what holds however long the longest row is."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch

from gnn_spmm_plugin.bench.imbalance import COLUMNS, busiest, main, measure, power_law
from gnn_spmm_plugin.features import GraphFeatures
from gnn_spmm_plugin.schedule import layout_of, list_items


def test_busiest_of_known_shares() -> None:
    work = torch.tensor([4, 1, 1, 1, 1, 8])
    assert busiest(work, 3, even=False) == (1 + 8) / (16 / 3)  # 4 + 1, 1 + 1, 1 + 8
    assert busiest(work, 2, even=True) == 1.0  # pieces that begin below 8, and the rest
    assert busiest(torch.tensor([16, 0, 0, 0]), 4, even=True) == 4.0
    assert busiest(torch.ones(12).long(), 4, even=False) == busiest(torch.ones(12).long(), 4, even=True) == 1.0


@pytest.mark.parametrize("longest", [30, 1000, 20_000, 200_000])
def test_no_piece_is_long_however_long_the_longest_row(longest: int) -> None:
    """At most a chunk, or of a hub the root of an eighth of it; then no block has much over the mean."""
    csr = power_law(20_000, longest)
    layout = layout_of(GraphFeatures.of(csr))
    for order in (None, csr.degree().long().argsort(descending=True, stable=True)):
        items, splits, _ = list_items(csr, layout, order)
        pieces = (items[:, 2] - items[:, 1])[: len(items) - splits].long()
        most = max(layout.chunk, math.ceil(math.sqrt(longest / 8)))
        assert int(pieces.sum()) == len(csr.col) and int(pieces.max()) <= most
        for blocks in (64, 1024):
            assert busiest(pieces, blocks, even=True) <= 1 + most * blocks / len(csr.col)


def test_sorting_gathers_the_long_rows() -> None:
    """What theorem 2 of DualGCN expects of sorted rows does not hold where blocks have as many rows each."""
    for row in measure(power_law(1500, 300), 32):
        if row["order"] != "as it is":
            assert row["equal_rows"] > 2 * row["long_rows_split"]  # type: ignore[operator]
        assert 1 <= row["long_rows_split"] <= row["equal_edges"] <= row["equal_rows"]  # type: ignore[operator]


def test_command(tmp_path: Path) -> None:
    file = tmp_path / "imbalance.csv"
    assert main(["--rows", "1000", "--longest", "20", "500", "--blocks", "32", "--csv", str(file)]) == 0
    rows = list(csv.DictReader(line for line in file.read_text().splitlines() if not line.startswith("#")))
    assert list(rows[0]) == COLUMNS and [r["longest"] for r in rows] == ["20"] * 3 + ["500"] * 3
