"""What README and docs show works."""

from __future__ import annotations

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
