"""The demo: a stock model, plain and accelerated, gives the same and says what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.cli import main
from gnn_spmm_plugin.demo import report

pytestmark = pytest.mark.pyg
KEYS = {"accuracy", "ms_per_step", "peak_bytes", "kernel_calls", "device", "accelerated"}


def demo(tmp_path: Path, *argv: str) -> dict:  # type: ignore[type-arg]
    file = tmp_path / "demo.json"
    assert main(["demo", "--json", str(file), *argv]) == 0
    result: dict = json.loads(file.read_text())  # type: ignore[type-arg]
    return result


def test_a_few_epochs(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = demo(tmp_path, "--epochs", "6", "--device", device)
    plain, fast = result["runs"]
    assert set(plain) >= KEYS
    assert (plain["accelerated"], fast["accelerated"]) == (False, True)
    assert plain["device"] == fast["device"] == device
    assert plain["kernel_calls"] == 0
    assert fast["kernel_calls"] == 6 * 4  # two layers, forward and backward
    assert result["logits_max_abs_difference"][device] < 1e-5
    assert abs(plain["accuracy"] - fast["accuracy"]) < 0.05
    assert plain["peak_bytes"] > 1e6 and fast["peak_bytes"] > 1e6
    out = capsys.readouterr().out
    assert "test accuracy" in out and "kernel calls" in out and "accelerated" in out


def test_own_edges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "mine.npy", np.random.default_rng(0).integers(0, 50, (2, 300)))
    file = str(tmp_path / "mine.npy")
    result = demo(tmp_path, "--edges-file", file, "--epochs", "5", "--device", "cpu", "--hidden", "4", "--seed", "3")
    assert result["edges"] == 300 and not result["real_features"] and result["hidden"] == 4
    assert "random" in capsys.readouterr().out


def test_too_few_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--epochs", "2"]) == 2
    assert "more than 3" in capsys.readouterr().err


def test_output_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "missing" / "demo.json", tmp_path):
        assert main(["demo", "--json", str(path)]) == 2
        out, err = capsys.readouterr()
        assert not out and "cannot be written" in err  # at once, not after the training


def test_both_trainings_draw_the_same_numbers(tmp_path: Path) -> None:
    """Dropout is the same in both, though they take turns."""
    result = demo(tmp_path, "--epochs", "27", "--device", "cpu", "--dataset", "minesweeper")
    plain, fast = result["runs"]
    assert plain["kernel_calls"] == 0 and fast["kernel_calls"] == 27 * 3  # the first layer has none backward
    assert plain["accuracy"] == pytest.approx(fast["accuracy"], abs=2e-3)


def test_the_report_knows_the_layers_of_this_package() -> None:
    x, edge_index = torch.randn(3, 4), torch.tensor([[0, 1, 2], [1, 2, 0]])
    model = gsp.accelerate(torch.nn.ModuleList([gsp.nn.GCNConv(4, 2)]))
    for _ in range(2):
        (row,) = gsp.report(model).rows
        assert row["status"] == "gsp.nn" and not row["reasons"]
        model[0](x, edge_index)
    gsp.restore(model)


def test_what_did_not_run_is_not_praised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GSP_DISABLE", "1")
    result = demo(tmp_path, "--epochs", "4", "--device", "cpu")
    assert result["runs"][1]["kernel_calls"] == 0
    said = capsys.readouterr().out
    assert "cpu: nothing was accelerated, no kernel of this package ran: GSP_DISABLE is set" in said
    assert "times as fast" not in said


@pytest.mark.parametrize(("load", "rough"), [(0.4, False), (0.6, True)])
def test_a_busy_machine_is_said(load: float, rough: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = demo(tmp_path, "--epochs", "4", "--device", "cpu")
    run = {**result["runs"][0], "ms_per_step": 10.0}
    runs = [run, {**run, "ms_per_step": 2.0, "accelerated": True, "kernel_calls": 9}]
    capsys.readouterr()
    report({**result, "runs": runs, "load": load, "threads": 2, "cpus": 2})
    said = capsys.readouterr().out
    assert ("times are rough" in said) == rough == ("5.0 times as fast, roughly" in said)
    assert "5.0 times as fast" in said


def test_without_pyg(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch_geometric", None)
    assert main(["demo"]) == 2
    assert "pip install torch_geometric" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_cora_is_learned(device: str, tmp_path: Path, seed: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = demo(tmp_path, "--device", device, "--seed", str(seed))
    finally:
        torch.set_num_threads(threads)
    assert [run["accuracy"] >= 0.8 for run in result["runs"]] == [True, True]
