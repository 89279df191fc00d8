"""The command line: what it prints, what it writes, and how it complains."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import _platform, data
from gnn_spmm_plugin.cli import main
from gnn_spmm_plugin.data.edges import EdgeFileError, read_edges


def run(*argv: str) -> int:
    """The exit code of a command, whichever way it ends."""
    try:
        return main(list(argv))
    except SystemExit as e:  # argparse
        return int(e.code or 0)


def test_info(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("info", "--json", str(tmp_path / "info.json")) == 0
    out = capsys.readouterr().out
    result = json.loads((tmp_path / "info.json").read_text())
    assert result["torch"] == torch.__version__ and result["gnn_spmm_plugin"] == gsp.__version__
    assert result["libraries"]["cpu"] == "loaded"
    for kernel in gsp.kernels():
        assert str(kernel["name"]) in out
        assert kernel["available"] or all(str(reason) in out for reason in kernel["reasons"])  # type: ignore[attr-defined]
    assert run("info", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out) == result


@pytest.mark.parametrize(("driver", "said", "written"), [((13, 0), "serves CUDA 13.0", "13.0"), (None, "none", None)])
def test_info_names_the_driver(
    driver: tuple[int, int] | None,
    said: str,
    written: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_platform, "driver", lambda: driver)
    assert run("info", "--json", str(tmp_path / "info.json")) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("NVIDIA driver"))
    assert line.endswith(f"  {said}")
    assert json.loads((tmp_path / "info.json").read_text())["driver_cuda"] == written


@pytest.mark.parametrize("graph", ["cora", "minesweeper"])
def test_explain(graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    assert run("explain", graph, "--width", "32", "--dtype", "float16", "--reduce", "max", "--json", str(file)) == 0
    out = capsys.readouterr().out
    result = json.loads(file.read_text())
    assert result["config"]["long_row"] >= 0 and len(result["config"]) == 9
    assert out.strip() == result["explain"].strip()
    assert result["width"] == 32 and result["kernel"] in out and "float16 max" in out


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    page = str(tmp_path / "report.html")
    assert run("report", "--graph", "cora", "--width", "16", "64", "--json", str(file), "--html", page) == 0
    (graph,) = json.loads(file.read_text())["graphs"]
    assert graph["features"]["num_edges"] == 10556 and [p["width"] for p in graph["plans"]] == [16, 64]
    out = capsys.readouterr().out
    assert "mean_degree" in out and f"page: {page}" in out


def test_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv_file, json_file = tmp_path / "b.csv", tmp_path / "b.json"
    args = ["--graph", "random:300:2000", "--width", "5", "--budget", "0.1", "--device", "cpu", "--csv", str(csv_file)]
    assert run("bench", *args, "--json", str(json_file)) == 0
    rows = json.loads(json_file.read_text())["rows"]
    assert {r["contender"] for r in rows} >= {"ours:auto", "torch.sparse.mm", "limit:copy"}
    assert {r["reduce"] for r in rows} == {"sum", "mean", "max"}
    timed = [r for r in rows if r["ms_p20"]]
    assert timed and all(float(r["ms_p20"]) <= float(r["ms_median"]) <= float(r["ms_p80"]) for r in timed)
    assert "geometric mean" in capsys.readouterr().out
    assert run("bench", "--summary", str(csv_file), "--json", str(json_file)) == 0
    assert json.loads(json_file.read_text())["lines"] == []  # none of the graphs that the goals are about


def test_bench_graphs_and_suites(tmp_path: Path) -> None:
    """Drawn graphs shrunk, those of a folder, and a suite of which a part is picked."""
    np.savez(tmp_path / "mine.npz", rowptr=np.array([0, 2, 2, 3]), col=np.array([0, 1, 2]), num_nodes=3)
    file = tmp_path / "b.json"
    common = ("--device", "cpu", "--tiny", "--budget", "0.1", "--json", str(file))
    chosen = ("--graph", "arxivlike_shuf", "--graph-dir", str(tmp_path), "--width", "4", "--weighted", "yes")
    assert run("bench", *chosen, "--reduce", "sum", "--dtype", "float32", "float64", *common) == 0
    rows = json.loads(file.read_text())["rows"]
    found = {(r["graph"], r["dtype"]) for r in rows if r["contender"] == "ours:auto" and r["ms_median"]}
    assert found == {(g, d) for g in ("arxivlike_shuf", "mine") for d in ("float32", "float64")}
    from gnn_spmm_plugin.bench.command import load

    (tmp_path / "mine.npz").rename(tmp_path / "er1M_d10.npz")
    assert load("er1M_d10", "cpu", 1.0, str(tmp_path)).num_nodes == 3  # the file, not what is drawn under its name
    assert run("bench", "--suite", "quick", "--graph", "cora", "--reduce", "max", "--contender", "ours", *common) == 0
    rows = json.loads(file.read_text())["rows"]
    assert {(r["graph"], r["reduce"], r["width"]) for r in rows} == {("cora", "max", "16"), ("cora", "max", "64")}
    assert {r["contender"] for r in rows} == {"ours:auto", "limit:copy"}


def test_bench_does_not_time_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gnn_spmm_plugin.bench import contenders

    right = contenders.spmm
    monkeypatch.setattr(contenders, "spmm", lambda *args, **kwargs: right(*args, **kwargs) + 1)
    file = tmp_path / "b.json"
    args = ("--graph", "random:30:200", "--width", "3", "--budget", "0.1", "--device", "cpu", "--json", str(file))
    assert run("bench", *args) == 1
    rows = json.loads(file.read_text())["rows"]
    ours = [r for r in rows if r["contender"] == "ours:auto"]
    assert ours and all(r["note"].startswith("wrong") and not r["ms_median"] for r in ours)
    assert any(r["contender"] == "torch.sparse.mm" and r["ms_median"] for r in rows)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["explain", "kora"], "unknown graph 'kora'"),
        (["explain", "cora", "--kernel", "fastest"], "unknown kernel 'fastest'"),
        (["explain", "cora", "--width", "0"], "1 or more"),
        (["explain", "cora", "--dtype", "int8"], "invalid choice"),
        (["bench", "--graph", "random:5"], "random:NODES:EDGES"),
        (["bench", "--graph", "kora"], "unknown graph 'kora'"),
        (["bench", "--width", "0"], "1 or more"),
        (["bench", "--budget", "0"], "more than 0"),
        (["bench", "--suite", "quick", "--setting", "scales"], "settings of its own"),
        (["bench", "--suite", "quick", "--graph", "nosuch"], "no product of the suite fits all of these options"),
        (["bench", "--suite", "full", "--graph", "cora", "--width", "77"], "leave --suite out"),
        (["bench", "--graph-dir", "nowhere"], "no .npz file in nowhere"),
        (["bench", "--summary", "missing.csv"], "missing.csv cannot be read"),
        (["bench", "--kernel", "fastest", "--graph", "cora"], "unknown kernel 'fastest'"),
        (["demo", "--dataset", "kora"], "invalid choice"),
        (["demo", "--epochs", "-1"], "1 or more"),
        (["demo", "--edges-file", "missing.npy"], "No such file"),
        (["nothing"], "invalid choice"),
        ([], "command"),
    ],
    ids=str,
)
def test_mistakes(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 2
    assert message in capsys.readouterr().err


def test_a_picture_that_cannot_be_drawn_is_said_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("bench", "--suite", "full", "--plot", "picture.svg") == 2  # not after an hour
    assert "--plot needs matplotlib" in capsys.readouterr().err


def test_a_summary_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cpu.csv"
    options = ("--graph", "random:40:90", "--width", "4", "--reduce", "sum", "--budget", "1", "--device", "cpu")
    assert run("bench", *options, "--csv", str(file)) == 0
    capsys.readouterr()
    assert run("bench", "--summary", str(file)) == 0
    assert "nothing in these files belongs to a goal" in capsys.readouterr().out


def test_no_gpu_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert run("explain", "cora", "--device", "cuda") == 2
    assert "torch sees no GPU" in capsys.readouterr().err


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "gnn_spmm_plugin", "explain", "missing.csv"]
    root = str(Path(gsp.__file__).parents[1])
    result = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert result.returncode == 2
    assert "missing.csv" in result.stderr and "Traceback" not in result.stderr


# ---------------------------------------------------------------------- edge files


def text(content: str | bytes) -> Callable[[Path], None]:
    return lambda path: (path.write_bytes(content) if isinstance(content, bytes) else path.write_text(content)) and None


def array(values: Any, dtype: Any = None) -> Callable[[Path], None]:
    return lambda path: np.save(path, np.array(values, dtype), allow_pickle=True)


def archive(**arrays: Any) -> Callable[[Path], None]:
    return lambda path: np.savez(path, **{k: np.array(v) for k, v in arrays.items()})


class Bomb:
    def __reduce__(self) -> Any:
        return pytest.fail, ("it was unpickled",)


BAD: list[tuple[str, Callable[[Path], None], str]] = [
    ("shape.npy", array([[1, 2, 3]]), "expected an array of shape"),
    ("vector.npy", array([1, 2, 3]), "expected an array of shape"),
    ("three.npy", array(np.zeros((3, 4, 5), int)), "expected an array of shape"),
    ("negative.npy", array([[0, 1, 2], [1, -1, 2]]), "edge 1 is 1 -> -1"),
    ("floats.npy", array([[0.5, 1.0, 3], [1.0, 2.0, 3]]), "must be integers"),
    ("nan.npy", array([[float("nan"), 1.0, 3], [1.0, 2.0, 3]]), "must be integers"),
    ("complex.npy", array([[1j, 1, 3], [1, 2, 3]]), "must be integers"),
    ("bool.npy", array([[True, False, True], [True, False, True]]), "must be integers"),
    ("words.npy", array([["a", "b", "c"], ["b", "c", "d"]]), "must be integers"),
    ("empty.npy", array(np.zeros((2, 0), int)), "no edges"),
    ("huge.npy", array([[0, 1, 2], [1, 10**12, 2]]), "largest node id"),
    ("unsigned.npy", array([[0, 1, 2], [1, 2**64 - 1, 2]], np.uint64), "largest node id"),
    ("objects.npy", array([[Bomb()], [Bomb()]], object), "pickled"),
    ("objects.npz", archive(edge_index=np.array([[Bomb()], [Bomb()]], object)), "pickled"),
    ("pickle.npy", text(pickle.dumps({"edge_index": 1})), "pickled"),
    ("garbage.npy", text(b"\x93NUMPY\x01\x00garbage"), "no readable NumPy file"),
    ("nothing.npy", text(b""), "no readable NumPy file"),
    ("garbage.npz", text(b"PK\x03\x04garbage"), "no readable NumPy file"),
    ("names.npz", archive(a=[1], b=[2]), "expected an array 'edge_index'"),
    ("lengths.npz", archive(row=[1, 2], col=[1]), "vectors of one length"),
    ("nodes.npz", archive(edge_index=[[0, 1, 2], [1, 2, 3]], num_nodes=3), "num_nodes is 3"),
    ("matrix.npz", archive(indptr=[0, 5], indices=[1]), "no compressed matrix"),
    ("wraps.npz", archive(indptr=np.array([0, 3, 1, 2], np.uint64), indices=[1, 0]), "no compressed matrix"),
    ("header.npy", text(b"\x93NUMPY\x01\x00\x12\x00{'descr': '<i8', ("), "no readable NumPy file"),
    ("empty.csv", text(""), "no edges"),
    ("header.csv", text("src,dst\n"), "no edges"),
    ("columns.csv", text("src,dst\n1,2\n3,4,5\n"), "line 3: expected 2 columns"),
    ("one.csv", text("1\n2\n"), "line 1: expected 2 columns"),
    ("floats.csv", text("1.5,2\n"), "line 1: node ids must be integers"),
    ("nan.csv", text("src,dst\n1,2\nnan,3\n"), "line 3: node ids must be integers"),
    ("words.csv", text("src,dst\na,b\n"), "line 2: node ids must be integers"),
    ("negative.csv", text("1,2\n-1,2\n"), "line 2: node ids start at 0"),
    ("huge.csv", text("0,99999999999999999999999\n"), "line 1: node ids start at 0 and fit"),
    ("gap.csv", text("0,999999999\n"), "number the nodes"),
    ("binary.csv", text(b"\xff\xfe\x00\x01"), "is not text"),
    ("edges.parquet", text("1,2"), "the name must end in"),
]


@pytest.mark.parametrize(("name", "write", "message"), BAD, ids=[b[0] for b in BAD])
def test_malformed_edge_files(
    name: str, write: Callable[[Path], None], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    write(path)
    for argv in (["demo", "--edges-file", str(path)], ["explain", str(path), "--device", "cpu"]):
        assert run(*argv) == 2
        error = capsys.readouterr().err
        assert message in error and str(path) in error and "Traceback" not in error


GOOD: list[tuple[str, Callable[[Path], None]]] = [
    ("a.npy", array([[0, 1, 3], [1, 2, 0]])),
    ("t.npy", array([[0, 1], [1, 2], [3, 0]], np.int32)),
    ("u.npy", array([[0, 1, 3], [1, 2, 0]], np.uint8)),
    ("e.npz", archive(edge_index=[[0, 1, 3], [1, 2, 0]])),
    ("o.npz", archive(anything=[[0, 1, 3], [1, 2, 0]])),
    ("s.npz", archive(src=[0, 1, 3], dst=[1, 2, 0], num_nodes=4)),
    ("csr.npz", archive(indptr=[0, 1, 2, 3, 3], indices=[3, 0, 1], format=b"csr", shape=[4, 4], data=[1.0, 1, 1])),
    ("rowptr.npz", archive(rowptr=[0, 1, 2, 3, 3], col=[3, 0, 1])),
    ("csc.npz", archive(indptr=[0, 1, 2, 2, 3], indices=[1, 2, 0], format=b"csc", shape=[4, 4], data=[1.0, 1, 1])),
    ("h.csv", text("source,target\n0,1\n1,2\n3,0\n")),
    ("n.csv", text("0,1\n1,2\n\n3,0")),
    ("b.csv", text(b"\xef\xbb\xbf0;1\r\n1;2\r\n3;0\r\n")),
    ("w.txt", text("# a comment\n0 1\n1\t2\n3   0\n")),
]


@pytest.mark.parametrize(("name", "write"), GOOD, ids=[g[0] for g in GOOD])
def test_edge_files(name: str, write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path / name)
    edge_index, num_nodes = read_edges(tmp_path / name)
    assert sorted(zip(*edge_index.tolist(), strict=True)) == [(0, 1), (1, 2), (3, 0)]
    assert num_nodes == 4 and edge_index.dtype == torch.int64


@pytest.mark.parametrize("suffix", [".csv", ".npy", ".npz", ".txt"])
@given(content=st.binary(max_size=200) | st.text(alphabet="0123456789,.-# \nabe", max_size=80).map(str.encode))
def test_whatever_is_in_the_file(suffix: str, content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """An edge list or an `EdgeFileError`, nothing else."""
    path = tmp_path_factory.getbasetemp() / f"fuzz{suffix}"
    path.write_bytes(content)
    try:
        edge_index, num_nodes = read_edges(path)
    except EdgeFileError as e:
        assert str(path) in str(e)
    else:
        assert edge_index.shape[0] == 2 and 0 <= int(edge_index.min()) and int(edge_index.max()) < num_nodes


def _saved_edges(save: Any) -> bytes:
    file = io.BytesIO()
    save(file, np.arange(40).reshape(2, 20) % 7)
    return file.getvalue()


@pytest.mark.parametrize(("suffix", "save"), [(".npy", np.save), (".npz", np.savez), (".npz", np.savez_compressed)])
@given(changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8))
def test_whatever_happened_to_a_file(
    suffix: str, save: Any, changes: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(_saved_edges(save))
    for where, value in changes:
        content[where % len(content)] = value
    path = tmp_path_factory.getbasetemp() / f"changed{suffix}"
    path.write_bytes(content)
    with contextlib.suppress(EdgeFileError):
        edge_index, num_nodes = read_edges(path)
        assert edge_index.shape[0] == 2 and 0 <= int(edge_index.min()) and int(edge_index.max()) < num_nodes


def test_scipy_files(tmp_path: Path) -> None:
    sp = pytest.importorskip("scipy.sparse")
    dense = np.array([[0, 1, 0], [0, 0, 0], [1, 1, 0]])
    for form in ("csr", "csc", "coo"):
        sp.save_npz(tmp_path / f"{form}.npz", sp.csr_matrix(dense).asformat(form))
        edge_index, _ = read_edges(tmp_path / f"{form}.npz")
        assert sorted(zip(*edge_index.tolist(), strict=True)) == [(0, 2), (1, 0), (1, 2)]  # rows are destinations


# ---------------------------------------------------------------------- shipped graphs

SHIPPED = {
    "cora": (2708, 10556, 1433, 7),
    "citeseer": (3327, 9104, 3703, 6),
    "digits_knn10": (1797, 24680, 64, 10),
    "minesweeper": (10000, 78804, 7, 2),
    "tolokers": (11758, 1038000, 10, 2),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_graphs(name: str) -> None:
    assert set(data.names()) == set(SHIPPED) and data.names()[0] == "cora"
    d = data.load(name)
    assert (d.num_nodes, d.edge_index.shape[1], d.x.shape[1], d.num_classes) == SHIPPED[name]
    g = gsp.Graph.from_edge_index(d.edge_index, d.num_nodes)
    assert torch.equal(g.col, g.T.col)  # undirected
    if name in ("cora", "citeseer"):
        assert [int((d.split == k).sum()) for k in (1, 2, 3)] == [20 * d.num_classes, 500, 1000]
    assert d.x.isfinite().all() and all((d.split == k).any() for k in (1, 2, 3))
    with pytest.raises(ValueError, match="there are cora"):
        data.load("kora")
