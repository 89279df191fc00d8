"""The benchmarks on tiny graphs: what they draw, check, time, keep and print."""

from __future__ import annotations

import csv
import ctypes
import importlib.util
import itertools
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gnn_spmm_plugin import cli, reference
from gnn_spmm_plugin.bench import contenders, cusparse, graphs, problem, results, run, suites, summary, timer
from gnn_spmm_plugin.bench.contenders import Contender, Kind
from gnn_spmm_plugin.bench.plot import panels, plot
from gnn_spmm_plugin.bench.problem import BOUNDS, Configuration, Problem, Subject, relative_error
from gnn_spmm_plugin.kernels import REDUCES

TINY = 1 / 512


@pytest.mark.parametrize("shuffle", [False, True])
def test_communities(shuffle: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    g = graphs.communities(1000, 12_000, generator, 100, 0.9, shuffle=shuffle)
    assert g.num_nodes == 1000 and g.rowptr[-1] == len(g.col)
    src, dst = g.edge_index()
    assert len(torch.unique(src * 1000 + dst)) == len(src)  # no parallel edges
    assert torch.equal(torch.unique(src * 1000 + dst), torch.unique(dst * 1000 + src))  # symmetric
    if shuffle:
        assert g.order is not None and torch.equal(g.order.long().sort().values, torch.arange(1000))
        place = torch.empty(1000, dtype=torch.int64)
        place[g.order.long()] = torch.arange(1000)
        src, dst = place[src], place[dst]
    near = ((src - dst).abs() < 300).double().mean()
    assert near > 0.8  # communities are neighbours in the order


def test_named() -> None:
    with pytest.raises(ValueError, match="arxivlike"):
        graphs.named("nothing", "cpu")
    for name in graphs.SPECS:
        first, again = (graphs.named(name, "cpu", scale=1 / 512) for _ in range(2))
        assert torch.equal(first.col, again.col) and torch.equal(first.rowptr, again.rowptr)
        assert int(first.col.max()) < first.num_nodes and int(first.rowptr[-1]) == len(first.col)
        assert (first.order is not None) == name.endswith("_shuf")


@pytest.mark.pyg
def test_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gnn_spmm_plugin.bench import training

    monkeypatch.setitem(graphs.SPECS, "tiny", lambda g, scale: graphs.communities(200, 2000, g, 40, 0.7))
    out = tmp_path / "out.csv"
    models = ("gcn", "sage_max", "gat", "gatv2", "transformer")
    arguments = f"--graphs tiny --models {' '.join(models)} --steps 10 --device cpu --csv".split()
    assert training.main([*arguments, str(out)]) == 0
    lines = out.read_text().splitlines()
    head = [line for line in lines if line.startswith("#")]
    assert any("commit" in line for line in head) and any(line.startswith("# command:") for line in head)
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert [(r["model"], r["path"]) for r in rows] == [(m, p) for m in models for p in training.PATHS]
    plain = [r for r in rows if r["model"] not in training.ATTENTION or r["path"] in ("edge_index", "accelerated")]
    assert all(r["status"] == "ok" for r in plain)
    # The first layer sees constant features: a step of GCN is 3 forward and 2 backward, of SAGE max 3 and 2 x 2.
    assert [int(r["kernel_calls"]) for r in rows[:8]] == [0, 0, 50, 0, 0, 0, 70, 0]
    assert all((int(r["kernel_calls"] or 0) > 100) == (r["path"] == "accelerated") for r in rows[8:])
    accelerated = [r for r in rows if r["path"] == "accelerated"]
    assert all(0 < float(r["products_ms"]) and int(r["graph_bytes"]) > 2 * 4 * 1000 for r in accelerated)
    assert results.table_of(out)[1] == rows


# ---------------------------------------------------------------------- what is right


def _cpu_problem(reduce: str = "sum", weighted: bool = True, dtype: torch.dtype = torch.float32) -> Problem:
    subject = Subject("arxivlike", graphs.named("arxivlike", "cpu", scale=TINY))
    return Problem(subject, Configuration("arxivlike", "natural", 8, dtype, reduce, weighted))


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("weighted", [False, True])
def test_exact(reduce: str, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of rows, of which the longest rows are larger than a block, give what the reference gives."""
    monkeypatch.setattr(problem, "_BLOCK_BYTES", 8 * 8 * 10)
    p = _cpu_problem(reduce, weighted)
    weight = None if p.weight is None else p.weight.double()
    wanted, _ = reference.spmm(p.subject.graph, p.x.double(), weight, reduce)
    if reduce in ("max", "min"):
        wanted = wanted.float().double()
    assert (p.subject.degree == 0).any() and p.subject.degree.max() > 10
    torch.testing.assert_close(p.exact, wanted)


def test_relative_error() -> None:
    wanted = torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    assert relative_error(wanted.float(), wanted) == 0
    assert relative_error(wanted + torch.tensor([[0.0, 0.5], [0.0, 0.0]]), wanted) == pytest.approx(0.1)
    assert math.isnan(relative_error(wanted.masked_fill(wanted == 4, math.nan), wanted))
    assert math.isnan(relative_error(wanted[:1], wanted))


def _job(*others: Kind, modes: tuple[str, ...] = ("eager",)) -> tuple[Problem, run.Job]:
    p = _cpu_problem()
    return p, run.Job(p.configuration, others, modes)


def _kind(name: str, call: Callable[[Problem], Tensor]) -> Kind:
    return Kind(
        name, lambda c, device: [(name, "")], lambda p, name, setting: Contender(name, setting, lambda: call(p))
    )


def test_only_what_is_right_is_timed() -> None:
    def right(p: Problem) -> Tensor:
        return p.exact.float()

    def fails(p: Problem) -> Tensor:
        raise RuntimeError("not for me\nsecond line")

    kinds = {
        "right": right,
        "a little off": lambda p: right(p) * (1 + 1e-4),
        "one element missing": lambda p: right(p).index_put((torch.tensor([5]), torch.tensor([3])), torch.tensor(9.0)),
        "what was there before": lambda p: p.out,
        "another shape": lambda p: right(p)[1:],
        "fails": fails,
    }
    p, job = _job(*(_kind(name, call) for name, call in kinds.items()))
    rows = {r["contender"]: r for r in run.measure(p, job, "cpu", 0.1, 1e9)}
    assert {name for name in kinds if "ms_median" in rows[name]} == {"right"}
    assert rows["fails"]["note"] == "not for me"
    assert all(rows[name]["note"].startswith("wrong") for name in kinds if name not in ("right", "fails"))
    compulsory = (p.subject.num_nodes + 1) * 4 + p.subject.num_edges * 8
    compulsory += (p.subject.num_nodes + len(p.subject.csr.col.unique())) * 8 * 4
    assert rows["limit:copy"]["ms_median"] == pytest.approx(compulsory / 1e9 * 1e3)
    assert rows["right"]["gbps"] == pytest.approx(p.subject.num_edges * 32 / rows["right"]["ms_median"] / 1e6)


@pytest.mark.parametrize("reduce", REDUCES)
def test_settings(reduce: str) -> None:
    """Every way of use is compared with the right thing, and is right."""
    for weighted in (False, True):
        p = _cpu_problem(reduce, weighted, torch.float64)
        kind = contenders.ours(tuple(contenders.SETTINGS))
        names = kind.names(p.configuration, "cpu")
        assert len(names) > 2
        for name, setting in names:
            error = run.check(p, kind.prepare(p, name, setting))
            assert error is not None and error <= BOUNDS[torch.float64], (setting, error)


def test_scheduled_columns() -> None:
    csr = graphs.named("sbm1M_shuf", "cpu", scale=TINY)
    assert csr.order is not None
    position, col = Subject("sbm1M_shuf", csr).scheduled
    rows = [torch.arange(int(csr.rowptr[r]), int(csr.rowptr[r + 1])) for r in csr.order.tolist()]
    assert torch.equal(position, torch.cat(rows)) and torch.equal(col, csr.col[position])


def test_timer_takes_turns() -> None:
    seen: list[int] = []
    calls = [lambda: seen.append(0), lambda: (seen.append(1), time.sleep(2e-3))]
    fast, slow = timer.time_side_by_side(calls, "cpu", "eager", 20)
    assert isinstance(fast, timer.Timing) and isinstance(slow, timer.Timing)
    assert slow.p20_ms >= 2 > fast.median_ms and fast.count == 60 and 5 <= slow.count <= 10
    turns = sum(a != b for a, b in itertools.pairwise(seen))
    assert turns >= 8  # 5 rounds
    with pytest.raises(ValueError, match="mode must be one of"):
        timer.time_side_by_side(calls, "cpu", "warm")


# ---------------------------------------------------------------------- the file


def _row(**changed: Any) -> dict[str, Any]:
    base = {"graph": "arxivlike", "order": "natural", "width": 64, "dtype": "float32", "reduce": "sum", "weighted": 1}
    return {**base, "contender": "ours:auto", "setting": "", "mode": "graph", "ms_median": 1.0, "note": "", **changed}


def test_store(tmp_path: Path) -> None:
    file = tmp_path / "out.csv"
    first = results.Store(str(file), "gnn-spmm bench", {"copy_bandwidth": "4 TB/s"})
    first.add([_row(), _row(contender="pyg.scatter", mode="none", ms_median=None, note="too large, they say")])
    lines = file.read_text().splitlines()
    head = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    assert {"gpu", "torch", "commit", "command", "copy_bandwidth"} <= set(head)
    assert lines[len(head)] == ",".join(results.COLUMNS)

    again = results.Store(str(file), "another command")
    configuration = {k: str(v) for k, v in _row().items() if k in results.CONFIGURATION}
    assert again.has(configuration, [("ours:auto", ""), ("pyg.scatter", "")])
    assert not again.has(configuration, [("ours:auto", "scales")])
    assert not again.has({**configuration, "width": "32"}, [("ours:auto", "")])
    again.add([_row(ms_median=2.0), _row(width=32)])
    rows = results.read(file)
    assert [(r["contender"], r["width"], r["ms_median"]) for r in rows] == [
        *(("ours:auto", "64", "2"), ("pyg.scatter", "64", ""), ("ours:auto", "32", "1"))
    ]
    assert "# command: another command" in file.read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [("a,b\n1,2\n", "has no columns"), (",".join(results.COLUMNS) + "\n1,2\n", "row 1"), (None, "cannot be read")],
)
def test_no_measurements(content: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=message):
        results.read(file)


def test_a_file_that_ends_anywhere(tmp_path: Path) -> None:
    """What a killed run leaves is resumed: whole rows count, a torn one is measured again."""
    file = tmp_path / "b.csv"
    row = {**dict.fromkeys(results.COLUMNS, ""), "graph": "g", "contender": "ours:auto", "ms_median": 0.5}
    rows = [{**row, "width": str(i), "note": 'out of memory, "so far"'} for i in range(3)]
    results.Store(str(file), "first").add(rows)
    text = file.read_bytes()
    header = text.index(b"graph,")
    header += text[header:].index(b"\n") + 1
    for end in range(header, len(text) + 1):
        file.write_bytes(text[:end])
        store = results.Store(str(file), "second")
        kept = [r["width"] for r in store.rows]
        assert kept == ["0", "1", "2"][: len(kept)] and len(kept) >= text[header:end].count(b"\n")
        store.add([*rows[len(kept) :], {**row, "width": "3"}])
        assert [r["width"] for r in results.read(file)] == ["0", "1", "2", "3"]
    for other in (b"a,b\n1,2", b"no file of measurements"):
        file.write_bytes(other)
        with pytest.raises(ValueError, match="no file of measurements"):
            results.Store(str(file), "")
        assert file.read_bytes() == other
    file.write_bytes(text.replace(b"0.5", b"fast"))
    with pytest.raises(ValueError, match=r"row 1 has 'fast' as ms_median, expected a number"):
        results.read(file)
    for number in (b"0", b"-1", b"nan", b"inf"):
        file.write_bytes(text.replace(b"0.5", number))
        with pytest.raises(ValueError, match=r"row 1 has '.*' as ms_median, expected a number"):
            summary.summarise([str(file)])
    file.write_bytes(text + b"x" * 200_000)
    with pytest.raises(ValueError, match="cannot be read"):
        summary.summarise([str(file)])
    file.write_bytes(b"\xef\xbb\xbf" + text)
    assert len(results.read(file)) == len(rows)


def test_resume(tmp_path: Path) -> None:
    """What the file has is not measured again; what it lacks is."""
    made: list[str] = []

    def load(name: str) -> Subject:
        made.append(name)
        return Subject(name, graphs.named(name, "cpu", scale=TINY))

    def jobs(*settings: str) -> list[run.Job]:
        cs = [Configuration(g, "natural", 4, torch.float32, "sum", True) for g in ("road1M", "arxivlike")]
        return [run.Job(c, (contenders.ours(settings),), ("eager",)) for c in cs]

    file = str(tmp_path / "out.csv")
    assert run.run(jobs("")[:1], load, results.Store(file, ""), "cpu", 0.1)
    assert run.run(jobs(""), load, results.Store(file, ""), "cpu", 0.1)
    assert made == ["road1M", "arxivlike"] and len(results.read(file)) == 2
    assert run.run(jobs(""), load, results.Store(file, ""), "cpu", 0.1)
    assert len(made) == 2
    assert run.run(jobs("", "shuffled"), load, results.Store(file, ""), "cpu", 0.1)
    assert len(made) == 4 and len(results.read(file)) == 4


# ---------------------------------------------------------------------- the summary


def _text(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [{name: results._text(row.get(name)) for name in results.COLUMNS} for row in rows]


def _line(rows: list[dict[str, Any]], what: str) -> dict[str, str]:
    goal = next(g for g in summary.GOALS if g.what == what)
    cells = goal.judge(summary.Times(_text(rows)))
    assert cells is not None
    return dict(zip(summary.HEADERS, cells, strict=True))


def test_goal_against_cusparse() -> None:
    rows = [
        *(_row(width=64), _row(width=128), _row(width=128, mode="eager", ms_median=9.0)),
        *(_row(width=64, contender="cusparse:csr_alg2", ms_median=3.0),),
        *(_row(width=64, contender="cusparse:csr_alg3", ms_median=2.0),),
        *(_row(width=128, contender="cusparse:default", mode="eager", ms_median=72.0),),  # no CUDA graph: eager
        *(_row(width=256, contender="cusparse:default"),),  # ours is missing
        *(_row(width=64, order="schedule", ms_median=0.01), _row(width=64, weighted=0, ms_median=0.01)),
    ]
    line = _line(rows, "weighted sum, best cuSPARSE / ours")
    assert line["cases"] == "2" and line["geomean"] == "4" and line["worst"] == "2"  # 2 and 8
    assert line["where"] == "arxivlike 64" and line["met"] == "stretch"
    slower = [*rows, _row(width=64, ms_median=2.1)]
    line = _line(slower, "weighted sum, best cuSPARSE / ours")
    assert float(line["geomean"]) > 1.75 and line["met"] == "NO"  # one under 0.97


def test_other_goals() -> None:
    arg = [_row(reduce="max", weighted=0, setting="arg", ms_median=2.0), _row(weighted=0, ms_median=1.5)]
    arg += [_row(reduce="max", weighted=0, contender="write_arg", ms_median=0.4)]
    assert _line(arg, "(max with arg - sum) / writing arg")["met"] == "NO"  # 1.25
    road = [_row(graph="road1M"), _row(graph="road1M", contender="limit:copy", mode="analytic", ms_median=0.8)]
    assert _line(road, "low degree: share of the copy limit, widths of 32 and more")["worst"] == "0.8"
    peer = [_row(graph="er1M_d10"), _row(graph="er1M_d10", contender="cusparse:default", ms_median=1.5)]
    line = _line(peer, "best fp32 peer / ours, through cuSPARSE")
    assert float(line["worst"]) == pytest.approx(1.5 / (1.018 / 0.730), rel=1e-2)
    host = [_row(mode="host", ms_median=0.012), _row(mode="host", contender="torch.mm", ms_median=0.01)]
    assert _line(host, "host time / torch.mm's, without gradients")["met"] == "yes"
    halves = [_row(width=128), _row(width=128, dtype="float16", ms_median=0.5), _row(width=256, ms_median=0.04)]
    halves += [_row(width=256, dtype="float16", ms_median=0.04)]  # too short to count
    assert _line(halves, "fp32 / fp16, widths of 128 and more, over 50 us")["geomean"] == "2"
    shuffled = [_row(setting="shuffled", ms_median=1.1), _row()]
    assert _line(shuffled, "shuffled weights / kernel order")["met"] == "yes"
    alone = summary.Times(_text([_row()]))
    assert all(g.judge(alone) is None for g in summary.GOALS)


def test_full_suite_covers_every_goal() -> None:
    """If everything that it asks for is measured, only atomics, which no kernel uses, stay without a line."""
    rows = []
    for job in suites.full("cuda", summary.REAL):
        for kind in job.kinds:
            for name, setting in kind.names(job.configuration, "cuda"):
                rows += [
                    {**job.configuration.columns(), "contender": name, "setting": setting, "mode": mode}
                    | {"ms_median": 1.0}
                    for mode in job.modes
                ]
        rows.append({**job.configuration.columns(), "contender": "limit:copy", "mode": "analytic", "ms_median": 1.0})
    times = summary.Times(_text(rows))
    assert [g.what for g in summary.GOALS if g.judge(times) is None] == ["deterministic / atomics"]
    line = _line(rows, "weighted sum, best cuSPARSE / ours")
    assert int(line["cases"]) == 19 * 7
    assert int(_line(rows, "best fp32 peer / ours, through cuSPARSE")["cases"]) == 51


def test_training_summary() -> None:
    def trained(path: str, ms: float | str, **more: Any) -> dict[str, str]:
        facts = {"graph": "arxivlike", "model": "gcn", "path": path, "ms_median": ms, "status": "ok"}
        return {k: str(v) for k, v in {**facts, **more}.items()}

    rows = [
        trained("edge_index", 20.0, peak_bytes=1000),
        trained("csr", 6.0, peak_bytes=300),
        trained("accelerated", 4.0, products_ms=2.0, peak_bytes=260, graph_bytes=50),
        trained("stub", 1.8, peak_bytes=200),
    ]
    lines = {line[0]: line for line in summary.training_lines(rows)}
    assert lines["step time, csr / accelerated: arxivlike gcn"][2] == "1.5"
    assert lines["step time, csr / accelerated: arxivlike gcn"][-1] == "NO"
    assert lines["step time, edge_index / accelerated: arxivlike gcn"][-1] == "yes"
    assert lines["step time / (stub + products): arxivlike gcn"][2:] == [
        *("1.05", "1.05", "arxivlike gcn", "-", "1.1", "stretch")
    ]
    assert lines["peak memory / edge_index: arxivlike gcn"][-1] == "NO"
    assert lines["peak memory / csr: arxivlike gcn"][-1] == "yes"
    rows[0] |= {"ms_median": "", "status": "out of memory"}
    assert any("out of memory" in line for line in summary.training_lines(rows))


def test_panels() -> None:
    rows = [
        _row(),
        _row(contender="cusparse:default", ms_median=3.0),
        _row(contender="cusparse:csr_alg3", ms_median=2.0),
    ]
    rows += [_row(mode="eager", ms_median=9.0), _row(contender="pyg.scatter", mode="eager", ms_median=18.0)]
    rows += [_row(width=128, mode="eager"), _row(width=128, contender="pyg.scatter", mode="eager", ms_median=4.0)]
    assert panels(_text(rows)) == {
        ("arxivlike", "weighted sum, float32"): {"best cuSPARSE": {64: 2.0}, "pyg.scatter": {128: 4.0}}
    }


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = _text([_row(), _row(contender="cusparse:default", ms_median=2.0), _row(mode="eager", ms_median=5.0)])
    plot(rows, str(tmp_path / "out.png"), "a GPU")
    assert (tmp_path / "out.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="nothing to draw"):
        plot(rows[:1], str(tmp_path / "out.png"), "a GPU")


# ---------------------------------------------------------------------- cuSPARSE's header


def _header(name: str) -> str | None:
    nvcc = shutil.which("nvcc")
    roots = [os.environ.get(v) for v in ("CUDA_HOME", "CUDA_PATH")]
    roots += [str(Path(nvcc).resolve().parents[1])] if nvcc else []
    spec = importlib.util.find_spec("nvidia")
    wheels = spec.submodule_search_locations or [] if spec is not None else []
    folders = [Path(r) / "include" for r in roots if r] + [p for w in wheels for p in Path(w).glob("*/include")]
    return next(((f / name).read_text(errors="replace") for f in folders if (f / name).exists()), None)


def test_cusparse_binding_follows_the_header() -> None:
    header, types = _header("cusparse.h"), _header("library_types.h")
    if header is None or types is None:
        pytest.skip("no cusparse.h in CUDA_HOME, beside nvcc or in torch's wheels")
    found = dict(re.findall(r"\b(CUSPARSE_\w+|CUDA_R_\w+)\s*=\s*(\d+)", header + types))
    assert {name: int(found[name]) for name in cusparse.ENUMS} == cusparse.ENUMS

    def ctype(declaration: str) -> Any:
        words = declaration.replace("const ", "").replace("*", " * ").split()
        pointers, name = words.count("*"), words[0]
        if re.fullmatch(r"cusparseHandle_t|cudaStream_t|cusparse(Const)?(SpMat|DnMat)Descr_t", name):
            kind: Any = ctypes.c_void_p
        elif name == "void":
            kind, pointers = ctypes.c_void_p, pointers - 1
        else:
            known = {"int64_t": ctypes.c_int64, "size_t": ctypes.c_size_t, "int": ctypes.c_int}
            kind = known[name] if name in known else ctypes.c_int  # an enum
            assert name in known or re.fullmatch(r"cusparse\w+_t|cudaDataType", name), name
        return ctypes.POINTER(kind) if pointers else kind

    for name, arguments in cusparse.SIGNATURES.items():
        match = re.search(rf"\b{name}\(([^)]*)\)", header)
        assert match is not None, name
        assert [ctype(p) for p in match[1].split(",")] == arguments, name


# ---------------------------------------------------------------------- on a GPU: run this part first


def _problem(name: str = "arxivlike", width: int = 32, dtype: torch.dtype = torch.float32, **options: Any) -> Problem:
    c = Configuration(name, options.pop("order", "natural"), width, dtype, "sum", options.pop("weighted", True))
    return Problem(Subject(name, graphs.named(name, "cuda", scale=1 / 16)), c)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("algorithm", list(cusparse.ALGORITHMS))
def test_cusparse(algorithm: str, dtype: torch.dtype) -> None:
    """Right eagerly and inside a CUDA graph, with features that change between replays."""
    p = _problem(dtype=dtype)
    with timer.own_stream("cuda"):
        product = cusparse.Product(p.subject.csr.rowptr, p.subject.csr.col, p.values, p.x, p.out, algorithm)
        p.out.fill_(float("nan"))
        assert relative_error(product(), p.exact) <= BOUNDS[dtype]
        graph = torch.cuda.CUDAGraph()
        with timer._capture(graph):
            product()
        p.out.fill_(float("nan"))
        p.x.mul_(2)
        graph.replay()
        torch.cuda.synchronize()
        assert relative_error(p.out, p.exact * 2) <= BOUNDS[dtype]


@pytest.mark.gpu
def test_cusparse_version() -> None:
    major, minor, patch = map(int, cusparse.version().split("."))
    assert major >= 11 and minor >= 0 and patch >= 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("width", [1, 30, 64, 100, 600])
def test_speed_of_light(width: int, dtype: torch.dtype) -> None:
    """Every thread writes what it has gathered at its own place first: together, the sum of all gathers."""
    n, edges, run_length = 500, 4096, 16
    vector = next(v for v in (8, 4, 2, 1) if v * dtype.itemsize <= 16 and width % v == 0)
    lanes = min(width // vector, 256)
    blocks = -(-edges // (256 // lanes * run_length)) * -(-width // (lanes * vector))
    rows = -(-blocks * 256 * vector // width) + 1
    x = torch.randint(4, (n, width), device="cuda").to(dtype)
    col = torch.randint(n, (edges,), device="cuda", dtype=torch.int32)
    op = torch.ops.gnn_spmm_plugin._speed_of_light.default
    for weight in (None, torch.randint(2, (edges,), device="cuda").to(dtype)):
        out = op(col, weight, x, rows, run_length)
        assert out.shape == (rows, width) and out.dtype == dtype
        message = x[col.long()].double() * (1 if weight is None else weight.double().unsqueeze(1))
        assert float(out.flatten()[: blocks * 256 * vector].double().sum()) == float(message.sum())


@pytest.mark.gpu
def test_speed_of_light_refuses() -> None:
    op = torch.ops.gnn_spmm_plugin._speed_of_light.default
    x, col = torch.ones(4, 8, device="cuda"), torch.zeros(64, dtype=torch.int32, device="cuda")
    with pytest.raises(RuntimeError, match="multiple of 8"):
        op(col, None, x, 4, 12)
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        op(col[1:], None, x, 4, 16)
    with pytest.raises(RuntimeError, match="expected"):
        op(col.long(), None, x, 4, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", timer.MODES)
def test_modes(mode: str) -> None:
    a = torch.ones(256, 256, device="cuda")
    with timer.own_stream("cuda"):
        calls = [lambda: a @ a, lambda: torch.sort(a)]
        for call in calls:
            call()
        for found in timer.time_side_by_side(calls, "cuda", mode, 5):
            assert isinstance(found, timer.Timing) and 0 < found.p20_ms <= found.median_ms <= found.p80_ms < 50


@pytest.mark.gpu
def test_what_cannot_be_captured_is_said() -> None:
    a = torch.ones(8, device="cuda")
    with timer.own_stream("cuda"):
        reason, found = timer.time_side_by_side([lambda: a.sum().item(), lambda: a + 1], "cuda", "graph", 5)
    assert isinstance(reason, str) and "captured" in reason and isinstance(found, timer.Timing)


@pytest.mark.gpu
def test_suites_on_a_gpu(tmp_path: Path) -> None:
    """Every kind of job of the full suite on graphs of 1/512: none is wrong, and only what is known to fail does."""
    store = results.Store(str(tmp_path / "out.csv"), "test")
    some = ("arxivlike", "sbm1M_shuf", "cora_like")
    jobs = suites.only(suites.full("cuda"), lambda c: c.graph in some and c.width in (2, 16, 128), None)
    assert run.run(jobs, lambda name: Subject(name, graphs.named(name, scale=TINY)), store, "cuda", 1.0, 4e12)
    failed = {(r["contender"], r["order"], r["dtype"]): r["note"] for r in store.rows if r["note"]}
    print(*failed.items(), sep="\n")
    expected: set[tuple[str, str, str]] = set()
    theirs = {"pyg.scatter", "torch_sparse", "dgl"}  # what others cannot do is theirs
    assert {key for key in failed if key[0] not in theirs} <= expected


def test_modes_that_take_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Named where they are left out; nothing is printed as if it had been measured where none is left."""
    bench = ["bench", "--device", "cpu", "--graph", "random:50:200", "--width", "4", "--reduce", "sum", "--budget", "1"]
    assert cli.main([*bench, "--mode", "graph", "cold"]) == 2
    assert "--mode graph cold takes a GPU" in capsys.readouterr().err
    assert cli.main([*bench, "--mode", "graph", "eager"]) == 0
    assert "without mode graph: it takes a GPU" in capsys.readouterr().out


def test_suite_of_tiles(capsys: pytest.CaptureFixture[str]) -> None:
    """Every kernel at each precision: float32 in its own and, of those for tensor cores, in tf32; none on the CPU."""
    jobs = suites.tiles("cuda")
    for dtype, expected in (
        (torch.bfloat16, {("ours:tile", ""), ("ours:dense", ""), ("ours:pcsr", ""), ("ours:auto", "")}),
        (torch.float32, {("ours:tile", "tf32"), ("ours:dense", "tf32"), ("ours:auto", "tf32"), ("ours:auto", "")}),
    ):
        (job,) = (j for j in jobs if j.configuration == Configuration("ddi_like", "natural", 256, dtype, "sum", True))
        found = {n for kind in job.kinds for n in kind.names(job.configuration, "cuda")}
        assert expected <= found and (("ours:tile", "tf32") in found) == (dtype == torch.float32)
        assert ("ours:pcsr", "tf32") not in found
    orders = {j.configuration.order for j in jobs if j.configuration.graph == "redditlike_shuf"}
    assert orders == {"natural", "schedule", "community"}
    assert cli.main(["bench", "--suite", "tiles", "--device", "cpu"]) == 2
    assert "suite tiles is of kernels for CUDA" in capsys.readouterr().err


def test_in_tf32_only_while_it_lasts() -> None:
    told: list[str] = []
    call = contenders._in_tf32(lambda: told.append(torch.get_float32_matmul_precision()))
    before = torch.get_float32_matmul_precision()
    call()
    assert told == ["high"] and torch.get_float32_matmul_precision() == before
