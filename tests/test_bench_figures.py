"""`gnn_spmm_plugin.bench.figures`: what is drawn of the measured files, and that each picture is written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gnn_spmm_plugin.bench.figures import FIGURES, OURS, main, products

FILES = Path(__file__).parent.parent / "docs" / "benchmarks"


def row(contender: str, mode: str, ms: str, **others: str) -> dict[str, str]:
    plain = {"order": "natural", "dtype": "float32", "reduce": "sum", "weighted": "1", "setting": ""}
    return {"graph": "g", "width": "16", **plain, "contender": contender, "mode": mode, "ms_median": ms, **others}


def test_what_is_compared() -> None:
    """The best algorithm of cuSPARSE, inside CUDA graphs; called eagerly where one of the two was measured only so."""
    eager = [row(OURS, "eager", "3"), row("cusparse:csr_alg1", "eager", "5"), row("cusparse:csr_alg2", "eager", "4")]
    graph = [row(OURS, "graph", "2"), row("cusparse:csr_alg2", "graph", "6")]
    others = [row(OURS, "eager", "1", weighted="0"), row(OURS, "eager", "1", setting="x"), row(OURS, "cold", "1")]

    def times(rows: list[dict[str, str]]) -> dict[str, str]:
        (cell,) = products(rows).values()
        return {name: r["ms_median"] for name, r in cell.items()}

    assert times(eager + others) == {OURS: "3", "cusparse": "4"}
    assert times(eager + graph) == {OURS: "2", "cusparse": "6"}
    assert times(eager + graph[:1]) == {OURS: "3", "cusparse": "4"}
    assert products(graph[1:]) == {}


def test_every_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main([str(FILES), str(tmp_path)]) == 0
    assert {p.name for p in tmp_path.iterdir()} == set(FIGURES)
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in tmp_path.iterdir())


def test_of_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path), str(tmp_path / "out")])
    assert stopped.value.code == 2 and "has none of" in capsys.readouterr().err
    shutil.copy(FILES / "imbalance.csv", tmp_path)
    assert main([str(tmp_path), str(tmp_path / "out")]) == 0
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["imbalance.png"]
