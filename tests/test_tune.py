"""``tune``: what is measured and remembered, by one process and by many; what the decider is trained on."""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from measurements import GPU, Stopwatch, graph, quick_unsplit, tune_many, write_csv

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import cli, tune
from gnn_spmm_plugin.bench import candidates, collect, evaluate, regimes
from gnn_spmm_plugin.bench.collect import Collection
from gnn_spmm_plugin.bench.graphs import named
from gnn_spmm_plugin.bench.timer import own_stream
from gnn_spmm_plugin.candidate import CANDIDATES, RULES, Candidate
from gnn_spmm_plugin.kernels import KERNELS_VERSION
from gnn_spmm_plugin.tune import Tuned, cache_folder, fingerprint, recall, remember, tuned

PLAN = importlib.import_module("gnn_spmm_plugin.plan")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("GSP_KERNEL", "GSP_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tune.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(PLAN, "shared_bytes", lambda device: 227 << 10)
    yield


def found(**given: object) -> Tuned:
    values = {"graph": "abc", "width": 64, "dtype": "float32", "reduce": "sum", "gpu": "Test GPU"}
    more = {"version": KERNELS_VERSION, "candidate": "csr.b2", "ms": 1.0, "rules_ms": 1.5}
    return Tuned(**{**values, **more, "measured": {"rules": 1.5, "csr.b2": 1.0}, "complete": True, **given})  # type: ignore[arg-type]


# ---------------------------------------------------------------------- the cache


def test_remembered(tmp_path: Path) -> None:
    one = found()
    assert recall(one.key()) is None
    remember(one)
    assert recall(one.key()) == one and cache_folder() == tmp_path / "cache" / "gnn_spmm_plugin" / "tuned"
    better = found(ms=0.5)
    remember(better)
    assert recall(one.key()) == better and len(list(cache_folder().iterdir())) == 1
    for key in ("graph", "width", "dtype", "reduce", "gpu", "version"):
        other = dataclasses.replace(one, **{key: 7 if key in ("width", "version") else "other"})
        assert recall(other.key()) is None


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", staticmethod(lambda: Path("/home/me")))
    assert cache_folder() == Path("/home/me/.cache/gnn_spmm_plugin/tuned")
    monkeypatch.setattr(tune.sys, "platform", "darwin")
    assert cache_folder() == Path("/home/me/Library/Caches/gnn_spmm_plugin/tuned")
    monkeypatch.setattr(tune.sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    assert cache_folder() == Path("/local/gnn_spmm_plugin/tuned")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[]",
        b"null",
        b'{"format": 1}',
        b'{"format": 2}',
        json.dumps({"format": 1, **dataclasses.asdict(found(width=65))}).encode(),
        json.dumps({"format": 1, **dataclasses.asdict(found(candidate="magic"))}).encode(),
        json.dumps({"format": 1, **dataclasses.asdict(found(candidate=3))}).encode(),
        json.dumps({"format": 1, **dataclasses.asdict(found(measured=[]))}).encode(),
        json.dumps({"format": 1, **dataclasses.asdict(found(ms="1"))}).encode(),
        json.dumps({"format": 1, **dataclasses.asdict(found(ms=10**400))}).encode(),
        json.dumps({"format": 1, **dataclasses.asdict(found(candidate="csr.b999"))}).encode(),
        json.dumps({"format": 1, **dataclasses.asdict(found(candidate="community/rules"))}).encode(),
        b"[" * 200_000,
    ],
)
def test_corrupt_and_foreign_files(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Left aside with a warning, and replaced by the next measurement."""
    one = found()
    path = tune._path(one.key())
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert recall(one.key()) is None
    assert path.name in caplog.text
    remember(one)
    assert recall(one.key()) == one


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored
    if sys.platform == "linux":
        with caplog.at_level(logging.WARNING):
            remember(found())
            assert recall(found().key()) is None
        assert "is not remembered" in caplog.text and "home directory" in caplog.text


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names here")
def test_what_is_no_regular_file(caplog: pytest.LogCaptureFixture) -> None:
    path = tune._path(found().key())
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    with caplog.at_level(logging.WARNING):
        assert recall(found().key()) is None
    assert "no regular file" in caplog.text


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        remember(found())
    assert "cannot be written" in caplog.text and recall(found().key()) is None


def test_an_interrupted_write_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    one = found()
    remember(one)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tune.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        remember(found(ms=0.1))
    assert [p.suffix for p in cache_folder().iterdir()] == [".json"] and recall(one.key()) == one


def test_many_processes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost, torn, or left over."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    numbers = (40, 48, 56)
    folder = str(tmp_path / "shared")
    running = [context.Process(target=tune_many, args=(n, folder, barrier)) for n in numbers]
    for process in running:
        process.start()
    for process in running:
        process.join(300)
        assert process.exitcode == 0
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    files = list(cache_folder().iterdir())
    assert len(files) == 1 + len(numbers) and {p.suffix for p in files} == {".json"}
    mark = fingerprint(graph()._csr)
    for width in (16, *numbers):
        again = recall((mark, width, "float32", "sum", GPU.name, KERNELS_VERSION))
        assert again is not None and again.candidate == "csr"


def test_fingerprint(device: str) -> None:
    edges = torch.tensor([[0, 1, 2, 2, 3], [1, 0, 1, 3, 3]])

    def of(e: torch.Tensor, n: int = 4) -> str:
        return fingerprint(gsp.Graph.from_edge_index(e.to(device), n)._csr)

    mark = of(edges)
    assert mark == of(edges.clone()) and len(mark) == 32
    assert mark == fingerprint(gsp.Graph.from_edge_index(edges, 4)._csr), "the same on every device"
    others = [of(edges, 5), of(edges.flip(0)), of(edges[:, 1:]), of(torch.cat([edges, edges[:, :1]], 1))]
    changed = edges.clone()
    changed[0, 0] = 3
    assert len({mark, of(changed), *others}) == 6


# ---------------------------------------------------------------------- the search


def test_search() -> None:
    """The fastest is found, remembered, and not measured again; nothing of it stays with the graph."""
    g = graph()
    watch = Stopwatch(quick_unsplit)
    made = tuned(g, 64, watch=watch, device=GPU)
    assert made is not None and (made.candidate, made.ms, made.rules_ms, made.complete) == ("csr", 0.5, 1.0, True)
    assert set(made.measured) >= {str(c) for c in CANDIDATES if c.kernel == "pcsr"} | {"rules", "blocks", "csr"}
    assert not g._csr.plans and g._csr.plan is None
    calls = watch.timed
    assert tuned(g, 64, watch=watch, device=GPU) == made and watch.timed == calls
    assert tuned(g, 64, watch=watch, device=GPU, again=True) == made and watch.timed > calls
    decision = tune.decision(made)
    assert (
        decision.candidate == Candidate.parse("csr") and "csr: 0.5 ms measured, the rules 1 ms" in decision.reasons[0]
    )
    most = tuned(g, 64, reduce="max", watch=Stopwatch(quick_unsplit), device=GPU)
    assert most is not None and not any(name.startswith("W") for name in most.measured)


@pytest.mark.parametrize(("share", "expected"), [(0.981, "rules"), (0.979, "csr")])
def test_what_is_worth_it(share: float, expected: str) -> None:
    made = tuned(graph(), 64, watch=Stopwatch(lambda p: share if quick_unsplit(p) < 1 else 1.0), device=GPU)
    assert made is not None and made.candidate == expected


def test_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without time the rules and the first candidates are measured, and the result says that it is not all."""
    made = tuned(graph(), 64, watch=Stopwatch(quick_unsplit), device=GPU, seconds=0.0)
    assert made is not None and not made.complete and 2 <= len(made.measured) <= 1 + tune.BATCH
    assert "did not suffice" in tune.decision(made).reasons[0]


def test_failures_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that raises, runs out of memory, or computes something else is never chosen, and is noted."""
    g = graph()

    class Odd(Stopwatch):
        def first(self, call):  # type: ignore[no-untyped-def]
            out, ms = super().first(call)
            plan = call.__defaults__[0]
            if plan.format is not None:
                if plan.format.config.V == 2:
                    raise torch.OutOfMemoryError("no room")
                raise RuntimeError("not today\nat all")
            return (out * 2 if quick_unsplit(plan) < 1 else out), ms

    rows = candidates.measure(
        candidates.Problem(g), torch.rand(g.num_src, 8), torch.rand(g.num_edges), Odd(quick_unsplit)
    )
    notes = {str(m.candidate): m.note for m in rows}
    assert notes["W4.F1.V1.S0"] == "not today" and notes["W4.F1.V2.S0"] == "out of memory"
    assert notes["csr"].startswith("wrong: 1.0e+00") and notes["rules"] == ""
    assert all((m.ms is None) == (m.note.split(":")[0] in ("not today", "out of memory", "wrong")) for m in rows)
    made = tuned(g, 8, watch=Odd(quick_unsplit), device=GPU)
    assert made is not None and made.candidate == "rules" and "csr" not in made.measured

    class Never(Stopwatch):
        def first(self, call):  # type: ignore[no-untyped-def]
            raise RuntimeError("the rules fail")

    with pytest.raises(RuntimeError, match="the rules fail"):
        tuned(g, 8, watch=Never(), device=GPU, again=True)


def test_hopeless_ones_are_timed_once() -> None:
    g = graph()

    class Counting(Stopwatch):
        def all(self, calls, estimates):  # type: ignore[no-untyped-def]
            self.last = len(calls)
            return [ms / 2 for ms in estimates]

    quick = Counting(lambda p: 0.1 if p.items is not None else 0.29)  # that may be the host
    rows = candidates.measure(candidates.Problem(g), torch.rand(g.num_src, 8), None, quick)
    assert not [m for m in rows if m.note == "timed once"] and quick.last == quick.timed
    watch = Counting(lambda p: 1.0 if p.items is not None else 2.1)
    rows = candidates.measure(candidates.Problem(g), torch.rand(g.num_src, 8), None, watch)
    slow = [m for m in rows if m.note == "timed once"]
    assert {str(m.candidate) for m in slow} >= {"csr", "blocks", "W4.F1.V1.S0"} and {m.ms for m in slow} == {2.1}
    assert watch.last < watch.timed and all(m.ms == 0.5 for m in rows if m.ms is not None and m not in slow)


def test_on_the_cpu_there_is_nothing_to_choose(capsys: pytest.CaptureFixture[str]) -> None:
    g = graph()
    assert tuned(g, 64) is None
    plan = gsp.plan(g, 64, mode="tune")
    assert plan.mode == "warm" and plan.kernel.name == "csr_cpu" and "nothing to choose from" in plan.explain()
    assert gsp.plan(g, 64, mode="tune") is plan and not cache_folder().exists()
    assert cli.main(["tune", "cora", "--device", "cpu", "--width", "16", "32"]) == 0
    text = capsys.readouterr().out
    assert "width 16: there is one way to run this on cpu" in text and "csr_cpu  width=32" in text


@pytest.mark.parametrize(
    "given", [{"policy": "ra"}, {"kernel": "csr_cpu"}, {"schedule": "degree"}, {"schedule": torch.arange(3)}]
)
def test_tune_leaves_nothing_to_say(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="leave policy, kernel, GSP_KERNEL and schedule open"):
        gsp.plan(graph(), 64, mode="tune", **given)  # type: ignore[arg-type]


def test_mode_is_none_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSP_MODE", "tune")
    g = graph()
    with pytest.raises(ValueError, match="GSP_MODE must be one of auto, cold, warm; got 'tune'"):
        gsp.spmm(g, torch.rand(g.num_src, 4))


@pytest.mark.parametrize("arguments", [[], ["--collect", "x.csv"], ["--evaluate", "x.csv"], ["nothing_of_that_name"]])
def test_mistakes(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [str(tmp_path / a) if a == "x.csv" else a for a in arguments]
    assert cli.main(["tune", "--device", "cpu", *given]) == 2
    assert "gnn-spmm tune:" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Every candidate computes what the rules do; a plan takes what was found, and finds it again."""
    c = named("arxivlike", "cuda", scale=1 / 4)
    g = gsp.Graph.from_csr(c.rowptr, c.col)
    x, weight = torch.rand(g.num_src, 64, device="cuda"), torch.rand(g.num_edges, device="cuda")
    with torch.no_grad(), own_stream("cuda"):
        rows = candidates.measure(candidates.Problem(g), x, weight, candidates.GpuStopwatch())
    assert {m.candidate for m in rows} >= set(CANDIDATES)
    assert all(m.ms is not None or m.note == candidates.SKIPPED for m in rows), rows
    g = gsp.Graph.from_csr(c.rowptr, c.col)
    plan = gsp.plan(g, 64, mode="tune")
    made = tuned(g, 64)
    assert (
        made is not None
        and f"tune      {made.candidate}:" in plan.explain()
        and len(list(cache_folder().iterdir())) == 1
    )
    assert torch.allclose(gsp.spmm(g, x, weight, plan=plan), gsp.spmm(g, x, weight), rtol=1e-4, atol=1e-4)
    assert (
        cli.main(["tune", "cora", "--width", "16", "--budget", "2"]) == 0 and "remembered in" in capsys.readouterr().out
    )


# ---------------------------------------------------------------------- the collection

SMALL = ("er_1k_4", "dense_500_0.5", "knn_2k_2_10", "batch_100_20_3", "bipartite_5k_50k_300k_1_2", "rmat_10_8192")


def some(count: int = 3) -> list[regimes.Regime]:
    by_name = {r.name: r for r in regimes.regimes()}
    return [by_name[name] for name in SMALL[:count]]


def test_suite() -> None:
    every = regimes.regimes()
    assert len(every) >= 150 and len({r.name for r in every}) == len(every)
    assert {r.family for r in every} >= set(
        "er rmat sbm road mesh banded bipartite regular stars dense batch knn".split()
    )
    assert not {r.name for r in every} & set(collect.graphs.SPECS)
    assert all("," not in r.name for r in every)
    names = [(r.name, r.family) for r in every]
    held = regimes.held_out(names, 20)
    assert len(held) == 20 and held == regimes.held_out(names[::-1], 20)
    assert len({r.family for r in every if r.name in held}) == len({r.family for r in every})
    assert len(collect.suite(None)) == len(every) + len(collect.graphs.SPECS) - len(collect._LARGE)


@pytest.mark.parametrize(
    "name", [*SMALL, "mesh_30x30x30_1", "banded_20k_10_1", "stars_10k_3_3_9k_True", "hot_20k_10_4"]
)
def test_drawn_graphs(device: str, name: str) -> None:
    regime = next(r for r in regimes.regimes() if r.name == name)
    rowptr, col, num_cols = regime.draw(device)
    assert all(torch.equal(a, b) for a, b in zip((rowptr, col), regime.draw(device)[:2], strict=True))
    g = gsp.Graph.from_csr(rowptr, col, num_cols)
    assert g.num_edges > 1000 and g.num_edges < 2e6
    key = g._csr.rows().long() * num_cols + col
    assert bool((key[1:] > key[:-1]).all()), "columns ascend, and none comes twice"


def test_collection(tmp_path: Path) -> None:
    """A run that is cut short is gone on with; nothing is measured twice; what it wrote can be read and trained on."""
    path = str(tmp_path / "out.csv")
    watch = Stopwatch(quick_unsplit)

    def go(**given: object) -> int:
        return collect.collect(path, "test", device="cpu", stopwatch=watch, chosen=some(), holdout=1, **given)  # type: ignore[arg-type]

    assert go(limit_seconds=0.0, widths=(8,)) == 5 and watch.timed == 0  # one graph in three has float16 too
    assert go(widths=(8,)) == 0
    calls = watch.timed
    assert go(widths=(8,)) == 0 and watch.timed == calls
    with open(path, "a") as f:
        f.write("er_1k_4,er,0,16,float32,ru")  # torn
    assert go(widths=(8, 16)) == 0 and watch.timed > calls
    made = Collection.read(path)
    assert made.head["command"] == "test" and made.head["kernels_version"] == str(KERNELS_VERSION)
    assert set(made.features()) == set(SMALL[:3]) and made.features()["er_1k_4"].num_rows == 1000
    products = {k for k in made.rows if k[1]}
    assert {(g, w, "float32") for g in SMALL[:3] for w in (8, 16)} <= products and len(products) == 8
    rows = (
        made.rows["bipartite_5k_50k_300k_1_2", 8, "float32"]
        if ("bipartite_5k_50k_300k_1_2", 8, "float32") in products
        else made.rows["er_1k_4", 8, "float32"]
    )
    assert rows["rules"]["ms"] and set(rows) <= {str(c) for c in CANDIDATES} | {
        "c64.w1024.l32.b2",
        "c64.w1024.l32.b4",
        "degree/c64.w1024.l32",
    }
    assert {r["holdout"] for by in made.rows.values() for r in by.values()} == {"0", "1"}
    assert len({g for (g, *_), by in made.rows.items() if next(iter(by.values()))["holdout"] == "1"}) == 1


def test_a_graph_that_fails_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(generator: torch.Generator) -> regimes.Drawn:
        raise RuntimeError("cannot be drawn")

    path = str(tmp_path / "out.csv")
    chosen = [regimes.Regime("broken", "er", broken), *some(1)]
    assert collect.collect(path, "test", device="cpu", stopwatch=Stopwatch(), chosen=chosen, widths=(8,)) == 3
    assert "broken is left out: RuntimeError: cannot be drawn" in capsys.readouterr().err
    assert {g for g, *_ in Collection.read(path).rows} == {"er_1k_4"}


def test_graphs_in_files(tmp_path: Path) -> None:
    import numpy as np

    np.savez(tmp_path / "mine.npz", row=np.array([0, 1, 2, 2]), col=np.array([1, 0, 0, 1]), num_nodes=3)
    with pytest.raises(ValueError, match=r"no \.npz file"):
        collect.suite(str(tmp_path / "cache"))
    regime = next(r for r in collect.suite(str(tmp_path)) if r.name == "mine")
    rowptr, col, num_cols = regime.draw("cpu")
    assert regime.family == "file" and num_cols == 3 and rowptr.tolist()[-1] == 4 and len(col) == 4


def test_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the graphs that were held out: the pick of the file against what is chosen now."""
    path = str(tmp_path / "out.csv")
    collect.collect(path, "t", device="cpu", stopwatch=Stopwatch(quick_unsplit), chosen=some(2), holdout=1, widths=(8,))

    class Fixed(Stopwatch):
        def first(self, call):  # type: ignore[no-untyped-def]
            return None, 1.0

        def all(self, calls, estimates):  # type: ignore[no-untyped-def]
            return [1.0, 2.0, 1.25, *([1.0] * (len(calls) - 3))]

    rows = evaluate.evaluate(path, device="cpu", stopwatch=Fixed(), chosen=some(2))
    assert rows and len({r["graph"] for r in rows}) == 1
    assert {r["pick"] for r in rows} <= {str(c) for c in CANDIDATES} and rows[0]["oracle"] == "1"
    summary = evaluate.print_picks(rows, print)
    assert summary["default"]["geomean"] == 0.5 and summary["auto"]["worst"] == 0.8
    assert "0.800 of the oracle" in capsys.readouterr().out
    assert evaluate.evaluate(path, device="cpu", stopwatch=Fixed(), chosen=some(2), limit_seconds=-1) == []


def test_made_up_measurements_are_a_collection(tmp_path: Path) -> None:
    """What the other tests train on is what a collection looks like."""
    made = Collection.read(write_csv(tmp_path / "m.csv"))
    assert made.device() == GPU and set(made.rows["g0", 16, "float32"]) == {str(c) for c in CANDIDATES}
    assert str(RULES) == "rules"
