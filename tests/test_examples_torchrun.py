"""The examples for several processes, and the command that measures them, under torchrun with two."""

from __future__ import annotations

import csv
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gnn_spmm_plugin
from gnn_spmm_plugin import data
from gnn_spmm_plugin.bench import partition, ranks

pytest.importorskip("torch_geometric")
pytestmark = pytest.mark.pyg

ROOT = Path(__file__).parents[1]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    where = os.pathsep.join([str(Path(gnn_spmm_plugin.__path__[0]).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": where, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)


def torchrun(name: str, options: str, file: Path) -> list[dict[str, Any]]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run(*launcher, f"examples/{name}.py", *options.split(), "--tiny", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("kernel calls") == 1, "one process prints"
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows


def test_a_whole_graph_on_two_ranks_trains_as_on_one(tmp_path: Path) -> None:
    """Losses, step by step, and accuracies; of PyG's layers on what is fetched, and of products with overlap."""
    options = "--stand-in --model sage --dropout 0 --epochs 12 --device cpu"
    plain, fast = torchrun("full_batch_sharded", f"{options} --compare", tmp_path / "two.json")
    argv = [*options.split(), "--tiny", "--json", str(tmp_path / "one.json")]
    assert importlib.import_module("full_batch_sharded").main(argv) == 0
    (one,) = json.loads((tmp_path / "one.json").read_text())["rows"]
    for row in (plain, fast):
        assert row["losses"][0] == pytest.approx(one["losses"][0], rel=1e-3)
        assert row["test"] == pytest.approx(one["test"], abs=0.02)
    assert fast["kernel_calls"] > plain["kernel_calls"]


def test_mini_batches_on_two_ranks(tmp_path: Path) -> None:
    plain, fast = torchrun("ogbn_products_ddp", "--stand-in --compare --device cpu", tmp_path / "two.json")
    assert plain["kernel_calls"] == 0 < fast["kernel_calls"]
    assert plain["losses"][0][:10] == pytest.approx(fast["losses"][0][:10], rel=1e-3)
    assert fast["test"] > 0.1 and fast["last_loss"] < 0.97 * fast["losses"][0][0]
    assert len(fast["losses"][0]) == 20 * 2  # of 196 nodes 98 for each, 64 at a time


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["full_batch_sharded", "ogbn_products_ddp"])
def test_on_gpus(name: str, tmp_path: Path) -> None:
    """One for each process, or one for both."""
    (row,) = torchrun(name, "--stand-in --device cuda", tmp_path / "two.json")
    assert row["test"] > 0.1 and row["kernel_calls"] > 0


def test_shares_are_equal_and_reach_every_node() -> None:
    processes = importlib.import_module("processes")
    nodes = torch.arange(100, 111)
    shares = [processes.Processes(rank, 4).share(nodes, seed=1) for rank in range(4)]
    assert {len(share) for share in shares} == {3} and torch.cat(shares).unique().equal(nodes)
    assert processes.Processes(0, 1).share(nodes, 1).sort().values.equal(nodes)


def test_compiled_layers_do_not_fetch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        importlib.import_module("full_batch_sharded").main(["--stand-in", "--tiny", "--compile"])
    assert end.value.code == 2 and "--compile" in capsys.readouterr().err


# What measures them.


def read(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(line for line in file.read_text().splitlines() if not line.startswith("#")))


def test_measured_on_two_ranks(tmp_path: Path) -> None:
    """Bytes that are handed over are those computed; what comes through the network's interfaces is a little more."""
    file = tmp_path / "ranks.csv"
    options = "--ranks 2 --tasks sharded limit --orders community --scale 0.002 --warm 2 --steps 3 --widths 64 64 8"
    done = run("-m", "gnn_spmm_plugin.bench.ranks", *options.split(), "--device", "cpu", "--csv", str(file))
    assert done.returncode == 0, done.stderr
    assert "limit: needs a GPU" in done.stderr
    two = read(file)
    assert list(two[0]) == list(ranks.COLUMNS) and [row["ranks"] for row in two] == ["2", "2"]
    for row in two:
        assert row["status"] == "ok" and row["times"] and row["halo"] == two[0]["halo"]
        assert row["computed_bytes"] == row["counted_bytes"] and int(row["counted_bytes"]) > 1_000_000
        assert row["wire_bytes"] in ("", "0") or int(row["wire_bytes"]) > int(row["counted_bytes"])  # who counts


def test_partitions(tmp_path: Path) -> None:
    file = tmp_path / "partition.csv"
    options = ["cora", "arxivlike_shuf", "--scale", "0.02", "--parts", "2", "4", "--device", "cpu", "--csv", str(file)]
    assert partition.main(options) == 0
    rows = read(file)
    assert list(rows[0]) == list(partition.COLUMNS) and len(rows) == 2 * 2 * 3
    cora = {(row["parts"], row["order"]): row for row in rows if row["graph"] == "cora"}
    assert int(cora["2", "hash"]["edges"]) == data.load("cora").edge_index.shape[1]
    for parts in ("2", "4"):  # what communities are for
        assert float(cora[parts, "community"]["halo"]) < 0.5 * float(cora[parts, "hash"]["halo"])
        assert float(cora[parts, "hash"]["cut"]) == pytest.approx(1 - 1 / int(parts), abs=0.03)
    with pytest.raises(SystemExit):
        partition.main(["cora", "--parts", "0"])
