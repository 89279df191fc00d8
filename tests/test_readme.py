"""What README and docs show works."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import _config, data
from gnn_spmm_plugin.cli import _parser

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.pyg
def test_its_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    from torch_geometric.nn import GCNConv

    scope: dict[str, Any] = {"model": torch.nn.Sequential(GCNConv(4, 4))}
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, scope)
    gsp.restore(scope["model"])
    assert "torch.Size([3, 8])" in capsys.readouterr().out


def test_it_has_two_commands_to_set_up_and_run() -> None:
    section = README.split("## Set up and run")[1].split("\n## ")[0]
    assert re.findall(r"```bash\n(.*?)\n```", section, re.DOTALL) == [
        'pip install torch && pip install ".[pyg]" && gnn-spmm demo',
        'pip install ".[test]" && pytest',
    ]


def test_it_names_what_there_is() -> None:
    for name in (*_config.ENVIRONMENT, *data.names()):
        assert name in README
    commands = next(a.choices for a in _parser()._actions if a.dest == "command")
    assert commands is not None
    for name in commands:
        assert f"`gnn-spmm {name}" in README
    for name in gsp.nn.__all__:
        assert name in README


def test_files_it_names_exist() -> None:
    tree = README.split("## Where things are")[1].split("##")[0]
    for line in tree.strip().splitlines():
        for word in line.split():
            if word.endswith((".py", "/")) and not word.startswith("gnn_spmm_plugin"):
                assert any((ROOT / folder / word).exists() for folder in ("", "gnn_spmm_plugin", "cuda_src")), word


def _figures(file: str, key: str, value: str) -> dict[str, float]:
    lines = (ROOT / "docs" / "benchmarks" / file).read_text().splitlines()
    return {r[key]: float(r[value]) for r in csv.DictReader(x for x in lines if x[:1] != "#") if r[value]}


def test_when_it_does_not_help_is_what_was_measured() -> None:
    table = README.split("When it does not help")[1].split("Training steps of PyG")[0]
    layers = _figures("pyg_layers_h200.csv", "layer", "speedup")
    for name in ("CGConv", "ResGatedGraphConv", "EdgeConv", "PointNetConv"):
        assert f"{layers[name]:.2f}" in next(line for line in table.splitlines() if name in line), name
    for command, times in _figures("examples_h200.csv", "command", "times").items():
        for name in ("custom_layer", "graph_classification"):
            assert name not in command or f"{times:.2f} (`{name}`)" in table
    batches = (ROOT / "docs" / "benchmarks" / "minibatch_h200.csv").read_text().splitlines()
    rows = list(csv.DictReader(x for x in batches if x[:1] != "#"))
    for graph in ("arxivlike", "productslike_sorted"):
        times_of = [float(r["times"]) for r in rows if r["graph"] == graph]
        assert f"{min(times_of):.2f} to {max(times_of):.2f} at" in table
    dgl = _figures("dgl_cpu.csv", "what", "ratio")
    unweighted = [v for k, v in dgl.items() if k.startswith(("copy_u sum", "copy_u mean"))]
    assert f"{min(unweighted):.2f} to {max(unweighted):.2f} there" in table


def test_who_is_cited() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    for system in ("DualGCN", "ParamSpMM", "GE-SpMM", "RA-SpMM", "graph-spmm"):
        assert f'abbreviation: "{system}"' in text


def test_who_reports_a_problem_is_asked_for_what_helps() -> None:
    for name in ("bug", "performance"):
        assert "`gnn-spmm info`" in (ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text(encoding="utf-8")
