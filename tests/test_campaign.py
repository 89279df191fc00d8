"""A short piece of the campaign, and that it would notice."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import campaign
import pytest
import torch
from campaign_cases import KINDS

from gnn_spmm_plugin import _native

pytestmark = pytest.mark.pyg


def test_a_piece(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of every kind some."""
    counts, wrong = campaign.run(1, device, cases=250)
    assert wrong == 0, capsys.readouterr().out
    assert counts.keys() == KINDS.keys()


def test_a_case_follows_from_its_number() -> None:
    first, second, other = (campaign.run_case(c, "cpu") for c in (12, 12, 13))
    assert first == second and first[1] is None and other[2] != first[2]


@pytest.mark.parametrize("fault", ["a row too few", "last edge of a row", "writes its input"])
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of sums of unweighted features, where it shows."""
    derivatives = importlib.import_module("gnn_spmm_plugin.derivatives")
    right = derivatives._sum_raw

    def broken(csr, p, x, *rest):  # type: ignore[no-untyped-def]
        if fault == "writes its input":
            out = right(csr, p, x, *rest)
            x.view(-1)[:1] += 1
            return out
        out = right(csr, p, x, *rest)
        if fault == "a row too few":
            out[-1:] = 0
        elif csr.col.shape[0] and x.shape[0]:
            row = int(csr.rows()[-1])
            out[row] -= x[int(csr.col[-1])]
        return out

    monkeypatch.setattr(derivatives, "_sum_raw", broken)
    _, wrong = campaign.run(1, "cpu", cases=150, most_wrong=1)
    out = capsys.readouterr().out
    assert wrong == 1 and "python tests/campaign.py --device cpu --case 1000" in out


def test_the_command() -> None:
    command = [sys.executable, str(Path(campaign.__file__)), "--minutes", "0.002", "--seed", "5"]
    if sys.platform == "linux":
        command.append("--guard")
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed 5 on CPU" in done.stdout and "cases, 0 wrong" in done.stdout


def test_nothing_of_torch_stays_changed() -> None:
    before = torch.get_num_threads()
    campaign.run_case(7, "cpu")
    assert torch.get_num_threads() == before and not torch.are_deterministic_algorithms_enabled()
    assert _native.cpu_error is None
