"""Each example runs, learns, and trains alike without and with the plugin; the OGB ones on OGB's own files too."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch

import gnn_spmm_plugin

pytest.importorskip("torch_geometric")
ogb_files = importlib.import_module("ogb_files")
stand_in = importlib.import_module("stand_in")

pytestmark = pytest.mark.pyg

ROOT = Path(__file__).parents[1]
HELPERS = {"common", "loaders", "ogb_data", "processes", "stand_in"}
OGB = ("ogbn_arxiv", "ogbn_products", "ogbn_proteins", "ogbl_ddi")
EXAMPLES = sorted({p.stem for p in (ROOT / "examples").glob("*.py")} - HELPERS - {"dgl_patch"})

#: Example, its options, and what the metric on the test set must exceed: chance is 1/40, 1/47, 0.5, 0.02 (20 of the
#: non-edges), 1/10, 1/4, and 0.5 or 1/10 again.
CASES = [
    ("ogbn_arxiv", "--stand-in", 0.2),
    ("ogbn_arxiv", "--stand-in --model sage", 0.2),
    ("ogbn_arxiv", "--stand-in --model gin", 0.08),
    ("ogbn_arxiv", "--stand-in --model gat", 0.2),
    ("ogbn_arxiv", "--stand-in --model sage --loader neighbor --epochs 4", 0.2),
    ("ogbn_arxiv", "--stand-in --amp bf16", 0.2),
    ("ogbn_products", "--stand-in", 0.15),
    ("ogbn_products", "--stand-in --model sage --loader neighbor --epochs 20", 0.15),
    ("ogbn_proteins", "--stand-in --model sage --epochs 60", 0.6),
    ("ogbl_ddi", "--stand-in --epochs 10", 0.06),
    ("ogbl_ddi", "--stand-in --model sage --amp bf16 --epochs 10", 0.03),
    ("ogbn_products_ddp", "--stand-in", 0.15),
    ("full_batch_sharded", "--stand-in", 0.15),
    ("full_batch_sharded", "--stand-in --model sage --order hash", 0.15),
    ("full_batch_sharded", "--stand-in --model gat", 0.08),
    ("full_batch_sharded", "--stand-in --amp bf16", 0.15),
    ("pyg_swap", "", 0.2),
    ("graph_classification", "", 0.5),
    ("hetero_rgcn", "", 0.3),
    ("hetero_rgcn", "--model sage", 0.3),
    ("link_prediction", "", 0.6),
    ("custom_layer", "", 0.4),
]


def run(name: str, *argv: str, file: Path) -> list[dict[str, Any]]:
    """The rows of the table."""
    assert importlib.import_module(name).main([*argv, "--tiny", "--json", str(file)]) == 0
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows


def test_all_are_tried() -> None:
    assert {name for name, _, _ in CASES} == set(EXAMPLES) and set(OGB) < set(EXAMPLES)


def test_docs_name_all() -> None:
    docs, readme = ((ROOT / p).read_text(encoding="utf-8") for p in ("docs/examples.md", "README.md"))
    for name in [*EXAMPLES, "dgl_patch"]:
        assert f"python examples/{name}.py" in docs, name
    assert "docs/examples.md" in readme


@pytest.mark.parametrize(("name", "options", "chance"), CASES, ids=[f"{n} {o}".strip() for n, o, _ in CASES])
def test_before_and_after(name: str, options: str, chance: float, device: str, tmp_path: Path) -> None:
    plain, fast = run(name, *options.split(), "--compare", "--device", device, file=tmp_path / "rows.json")
    assert plain["kernel_calls"] == 0 < fast["kernel_calls"]
    alike = 5e-2 if "bf16" in options else 1e-3
    assert plain["losses"][0][:10] == pytest.approx(fast["losses"][0][:10], rel=alike)
    for row in (plain, fast):
        assert row["test"] > chance and row["peak_bytes"] > 0 and row["ms_per_step"] > 0
        assert row["last_loss"] < 0.97 * row["losses"][0][0]


@pytest.mark.parametrize("name", EXAMPLES)
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        importlib.import_module(name).main(["--help"])
    said = capsys.readouterr().out
    assert end.value.code == 0
    for option in ("--tiny", "--device", "--seed", "--no-accelerate", "--compare"):
        assert option in said


def test_from_the_root_as_a_command(tmp_path: Path) -> None:
    where = os.pathsep.join([str(Path(gnn_spmm_plugin.__path__[0]).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "examples/custom_layer.py", "--tiny", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": where}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "accelerated" in done.stdout and "ReachConv  fused" in done.stdout


def test_seeds_and_runs(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    (first,) = run("link_prediction", "--device", "cpu", "--epochs", "4", file=file)
    (again,) = run("link_prediction", "--device", "cpu", "--epochs", "4", file=file)
    assert first["losses"] == again["losses"]
    (both,) = run("link_prediction", "--device", "cpu", "--epochs", "4", "--runs", "2", file=file)
    assert both["losses"][0] == first["losses"][0] != both["losses"][1] and both["test std"] >= 0


def test_off_is_off(tmp_path: Path) -> None:
    (row,) = run("pyg_swap", "--no-compare", "--no-accelerate", "--device", "cpu", file=tmp_path / "rows.json")
    assert row["kernel_calls"] == 0 and not row["accelerated"]


def test_what_did_not_run_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GSP_DISABLE", "1")
    assert importlib.import_module("pyg_swap").main(["--tiny", "--device", "cpu", "--epochs", "4"]) == 1
    assert "nothing was accelerated" in capsys.readouterr().err


def test_losses_that_differ_are_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = importlib.import_module("custom_layer")

    class Wrong(example.ReachConv):  # type: ignore[misc, name-defined]
        def message(self, x_j: Any, near: Any) -> Any:
            return super().message(x_j, near if type(x_j) is torch.Tensor else 1.1 * near)

    monkeypatch.setattr(example, "ReachConv", Wrong)
    assert example.main(["--tiny", "--device", "cpu", "--compare"]) == 1
    assert "too much" in capsys.readouterr().err


def test_out_of_memory_is_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Where only the plain model needs too much, the comparison goes on."""
    example = importlib.import_module("custom_layer")

    class Greedy(example.ReachConv):  # type: ignore[misc, name-defined]
        def message(self, x_j: Any, near: Any) -> Any:
            if type(x_j) is torch.Tensor:
                raise torch.OutOfMemoryError("no")
            return super().message(x_j, near)

    monkeypatch.setattr(example, "ReachConv", Greedy)
    plain, fast = run("custom_layer", "--device", "cpu", "--compare", file=tmp_path / "rows.json")
    assert plain["error"] == "out of memory" and fast["kernel_calls"] > 0
    assert "out of memory" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat"])
def test_compiled(model: str, device: str, tmp_path: Path) -> None:
    argv = f"--stand-in --compile --epochs 4 --compare --device {device} --model {model}".split()
    plain, fast = run("ogbn_arxiv", *argv, file=tmp_path / "rows.json")
    assert plain["kernel_calls"] == 0 and fast["kernel_calls"] >= 4 * 3 * 2  # each layer, forward and backward


# Stand-ins.


def test_a_stand_in_has_the_published_size() -> None:
    data, split = stand_in.nodes("ogbn-arxiv")
    degree = torch.bincount(data.edge_index[1], minlength=data.num_nodes).double()
    assert data.num_nodes == 169_343 and data.x.shape[1] == 128 and int(data.y.max()) == 39
    assert data.num_edges == pytest.approx(2_315_598, rel=0.02)
    assert 3 < degree.std() / degree.mean() < 4
    assert [len(split[part]) for part in ("train", "valid", "test")] == [90_941, 29_799, 48_603]
    assert torch.cat(list(split.values())).unique().numel() == data.num_nodes
    near = (data.y[data.edge_index[0]] == data.y[data.edge_index[1]]).double().mean()
    assert near > 0.4  # of random pairs 1 in 40
    small, _ = stand_in.nodes("ogbn-products", 0.02)
    assert small.num_edges / small.num_nodes < 60 and small.num_nodes == round(2_449_029 * 0.02)


def test_a_stand_in_of_links() -> None:
    data, split = stand_in.links("ogbl-ddi")
    assert data.num_nodes == 4267
    total = sum(len(part["edge"]) for part in split.values())
    assert total == pytest.approx(1_334_889, rel=0.05)
    assert len(split["test"]["edge"]) == pytest.approx(total / 10, rel=0.01)
    codes = [(e.min(1).values * 4267 + e.max(1).values) for part in split.values() for e in (part["edge"],)]
    assert torch.cat(codes).unique().numel() == total  # no edge twice, in whatever direction
    negative = torch.cat([split[part]["edge_neg"] for part in ("valid", "test")])
    assert not torch.isin(negative.min(1).values * 4267 + negative.max(1).values, torch.cat(codes)).any()
    assert torch.equal(data.edge_index, torch.cat([split["train"]["edge"].t(), split["train"]["edge"].t().flip(0)], 1))


def test_neighbourhoods_reach_every_node_once() -> None:
    loaders = importlib.import_module("loaders")
    data, split = stand_in.nodes("ogbn-arxiv", 0.02)
    batches = list(loaders.Neighbourhoods(data, split["train"], [5, 3], 100))
    assert len(batches) == -(-len(split["train"]) // 100)
    row = {tuple(x.tolist()): i for i, x in enumerate(data.x)}
    edges = set(map(tuple, data.edge_index.t().tolist()))
    seen = []
    for batch in batches:
        nodes = [row[tuple(x.tolist())] for x in batch.x]
        seeds = nodes[batch.seeds]
        assert torch.equal(batch.y, data.y[seeds])
        assert all((nodes[a], nodes[b]) in edges for a, b in batch.edge_index.t().tolist())
        seen += seeds
    assert sorted(seen) == sorted(split["train"].tolist())


def test_neighbourhoods_of_pyg_where_it_can_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyG's loader stands for itself: what it is given, and what is made of its batches."""
    loaders = importlib.import_module("loaders")
    data, split = stand_in.nodes("ogbn-arxiv", 0.02)

    def loader(data: Any, neighbors: list[int], nodes: torch.Tensor, batch_size: int, shuffle: bool) -> Any:
        assert neighbors == [5, 3] and batch_size == 100 and shuffle
        batch = data.subgraph(nodes[:150])
        batch.batch_size = len(nodes[:100])
        return [batch]

    monkeypatch.setattr(loaders, "WITH_PYG_LIB", True)
    monkeypatch.setattr(loaders, "NeighborLoader", loader)
    (batch,) = loaders.Neighbourhoods(data, split["train"], [5, 3], 100)
    assert batch.x[batch.seeds].shape == (100, 128) and batch.y.shape == (100, 1)
    assert batch.num_edges > 0 and data.num_nodes > 150


def test_metrics_are_those_of_ogb() -> None:
    node, link = (pytest.importorskip(f"ogb.{kind}proppred").Evaluator for kind in ("node", "link"))
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(2, (200, 112), generator=generator)
    truth[:, 5] = 1  # such a column does not count
    scores = torch.randint(9, (200, 112), generator=generator).float() + truth
    expected = node("ogbn-proteins").eval({"y_true": truth, "y_pred": scores})["rocauc"]
    assert stand_in.rocauc(truth, scores) == pytest.approx(expected, rel=1e-12)
    labels, found = torch.randint(3, (2, 50, 1), generator=generator)
    assert stand_in.accuracy(labels, found) == node("ogbn-arxiv").eval({"y_true": labels, "y_pred": found})["acc"]
    positive, negative = torch.rand(300, generator=generator), torch.rand(400, generator=generator)
    expected = link("ogbl-ddi").eval({"y_pred_pos": positive, "y_pred_neg": negative})["hits@20"]
    assert stand_in.hits(positive, negative) == pytest.approx(expected, rel=1e-12)


# OGB's files.


@pytest.mark.parametrize(
    ("name", "options", "chance"),
    [
        ("ogbn_arxiv", "", 0.15),
        ("ogbn_products", "--model sage --loader neighbor --epochs 60", 0.1),
        ("ogbn_proteins", "--model sage --epochs 60 --eval-steps 60", 0.52),
    ],
)
def test_nodes_from_files_of_ogb(name: str, options: str, chance: float, tmp_path: Path) -> None:
    pytest.importorskip("ogb")
    ogb_data, dashed = importlib.import_module("ogb_data"), name.replace("_", "-")
    data, split = stand_in.nodes(dashed, 0.0005 if name == "ogbn_products" else 0.01)
    ogb_files.write_nodes(tmp_path, dashed, data, split)
    allowed = torch.serialization.get_safe_globals()
    for _ in range(2):  # made from the archive's files, then read from OGB's own
        argv = [*options.split(), "--root", str(tmp_path), "--device", "cpu"]
        (row,) = run(name, *argv, file=tmp_path / "rows.json")
        assert row["test"] > chance and row["kernel_calls"] > 0
    assert set(torch.serialization.get_safe_globals()) == set(allowed)

    options_of = type("Options", (), {"stand_in": False, "root": str(tmp_path), "device": "cpu", "model": "gcn"})
    found, parts, _ = ogb_data.nodes(dashed, options_of)
    assert torch.equal(found.y, data.y) and found.num_nodes == data.num_nodes
    for part, nodes in split.items():
        assert torch.equal(parts[part], nodes)


def test_links_from_files_of_ogb(tmp_path: Path) -> None:
    pytest.importorskip("ogb")
    data, split = stand_in.links("ogbl-ddi", 0.1)
    ogb_files.write_ddi(tmp_path, data, split)
    (row,) = run("ogbl_ddi", "--root", str(tmp_path), "--device", "cpu", file=tmp_path / "rows.json")
    assert row["test"] > 0.06 and row["kernel_calls"] > 0
    with pytest.raises(Exception, match="weights_only"):  # as strict as ever elsewhere
        torch.load(tmp_path / "ogbl_ddi/split/target/test.pt")


@pytest.mark.parametrize("name", OGB)
def test_without_the_package(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for module in ("ogb", "ogb.nodeproppred", "ogb.linkproppred"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as end:
        importlib.import_module(name).main(["--device", "cpu"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "pip install ogb" in said and "--stand-in" in said


@pytest.mark.parametrize("name", OGB)
def test_without_the_data(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kind = "link" if name.startswith("ogbl") else "node"
    dataset = pytest.importorskip(f"ogb.{kind}proppred.dataset_pyg")

    def no_network(url: str) -> bool:
        raise URLError("no network")

    monkeypatch.setattr(dataset, "decide_download", no_network)
    for _ in range(2):  # what the first leaves must not look like an old version to the second
        with pytest.raises(SystemExit) as end:
            importlib.import_module(name).main(["--device", "cpu", "--root", str(tmp_path)])
        said = capsys.readouterr().err
        assert end.value.code == 2 and "no network" in said and "--stand-in" in said and ".zip" in said
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--epochs 0", "--epochs 0: must be 1 or more"),
        ("--runs 0", "--runs 0: must be 1 or more"),
        ("--hidden -1", "--hidden -1: must be 1 or more"),
        ("--compare --no-accelerate", "give --no-compare with it"),
        ("--json -", "give a file"),
    ],
)
def test_mistakes_in_options_are_said(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module("pyg_swap").main([*options.split(), "--device", "cpu"])
    assert stopped.value.code == 2 and said in capsys.readouterr().err
