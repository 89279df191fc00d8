"""The decider: candidates, what it sees, what it foresees, its choice, and how it is trained."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from measurements import GPU, features, milliseconds, write_csv

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import cli, data, decider
from gnn_spmm_plugin.bench import learn
from gnn_spmm_plugin.bench.collect import Collection
from gnn_spmm_plugin.bench.graphs import named
from gnn_spmm_plugin.candidate import CANDIDATES, RULES, Candidate, allowed, as_measured
from gnn_spmm_plugin.decider import INPUTS, Decider, choose, inputs, select, shipped
from gnn_spmm_plugin.features import GraphFeatures, MatrixFeatures
from gnn_spmm_plugin.kernels import KERNELS, KERNELS_VERSION
from gnn_spmm_plugin.pcsr import Config, panel_features, vectors
from gnn_spmm_plugin.schedule import BLOCKS, SQUARE, UNSPLIT, Layout, layout_by_rule

PLAN = importlib.import_module("gnn_spmm_plugin.plan")
POLICY = importlib.import_module("gnn_spmm_plugin.policy")
DUAL = next(k for k in KERNELS if k.name == "csr_dual")


def known(margin: float = 0.05, **given: object) -> Decider:
    """Two products that differ in their width alone, and far enough to be alone: for 100 columns csr is best, for 101
    W4.F1.V2.S0; the rules take 1.2 and 1.5 times as long."""
    names = (RULES, Candidate(UNSPLIT), Candidate(Config(4, 1, 2, False)))
    scale = np.zeros(len(INPUTS))
    scale[INPUTS.index("width")] = 1e4
    points = np.zeros((2, len(INPUTS)), np.float32)
    points[:, INPUTS.index("width")] = np.log(np.array([100.01, 101.01])) * 1e4
    made = Decider(
        gpu=GPU.name,
        version=KERNELS_VERSION,
        names=INPUTS,
        candidates=names,
        margin=margin,
        implicit=False,
        products=("one 100 float32", "one 101 float32"),
        scale=scale,
        points=points,
        mean=np.zeros(3),
        value=np.log(np.array([[1.2, 1.0, 2.0], [1.5, 2.0, 1.0]], np.float32)),
    )
    return dataclasses.replace(made, **given)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- candidates


def test_names() -> None:
    assert len({str(c) for c in CANDIDATES}) == len(CANDIDATES) and CANDIDATES[0] == RULES
    for c in CANDIDATES:
        assert Candidate.parse(str(c)) == c
    for text, c in {
        "csr": Candidate(UNSPLIT),
        "blocks": Candidate(BLOCKS),
        "csr.b3": Candidate(Layout(0, 0, 0, 3)),
        "degree/c64.w0.l9.b2": Candidate(Layout(64, 0, 9, 2), "degree"),
        "W8.F2.V1.S1": Candidate(Config(8, 2, 1, True)),
    }.items():
        assert str(c) == text and Candidate.parse(text) == c
        assert c.kernel == ("pcsr" if c.config is not None else "csr_dual") and (c.config is None) != (c.layout is None)
    out_of_range = ("c1.w0.l1", "c0.w0.l1", "c9999999.w0.l1", "c64.w0.l1.b0", "csr.b1000", "W3.F1.V1.S1", "W4.F1.V3.S1")
    for text in (
        "",
        "c64",
        "magic/rules",
        "W4.F1.V1.S2",
        "csr.b",
        "rules.b2",
        "c\u0663.w\u0663.l\u0663",
        *out_of_range,
    ):
        with pytest.raises(ValueError, match="candidate"):
            Candidate.parse(text)


def test_what_does_the_same() -> None:
    """Candidates that can't differ on a graph are measured once."""

    def same(text: str, **given: object) -> str:
        return str(as_measured(Candidate.parse(text), features(mean_degree=8.0, **given)))

    assert same("c256.w1024.l256", max_degree=64) == "c64.w1024.l64" and same("c256.w1024.l256", max_degree=65) != same(
        "c64.w1024.l64", max_degree=65
    )
    assert same("c64.w1024.l64", max_degree=32) == "c64.w1024.l32" == same("c64.w1024.l32", max_degree=33)
    assert same("blocks", max_degree=32) == "csr" and same("blocks", max_degree=33) == "blocks"
    assert same("c64.w0.l64", num_rows=1024, max_degree=90) == "c64.w1024.l64"
    assert same("W4.F1.V1.S1", split_single=1.0) == "W4.F1.V1.S0" and same("W4.F1.V2.S1", split_single=1.0)[-1] == "1"
    bundle = Candidate.parse("csr.b2")
    assert as_measured(bundle, features(mean_degree=12.0)) == bundle
    assert as_measured(bundle, features(mean_degree=12.1)) is None


def test_which_can_run() -> None:
    f = features(num_cols=1 << 29, num_rows=9)
    wide, narrow = (Candidate(Config(4, 1, v, False)) for v in (2, 1))
    assert allowed(wide, f, ["pcsr"]) and not allowed(wide, dataclasses.replace(f, num_cols=(1 << 29) + 1), ["pcsr"])
    assert allowed(narrow, dataclasses.replace(f, num_cols=1 << 30), ["pcsr"])
    assert not allowed(narrow, f, ["csr_dual"]) and not allowed(RULES, f, ["pcsr"])
    assert not allowed(RULES, dataclasses.replace(f, num_edges=0), ["csr_dual"])


@pytest.mark.parametrize("candidate", CANDIDATES, ids=str)
def test_every_candidate_has_a_plan(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels of a GPU would be given; here from a graph on the CPU."""
    monkeypatch.setattr(PLAN, "shared_bytes", lambda device: 227 << 10)
    c = named("arxivlike", "cpu", scale=1 / 20)
    csr = gsp.Graph.from_csr(c.rowptr, c.col)._csr
    kernel = next(k for k in KERNELS if k.name == candidate.kernel)
    plan = PLAN.build_candidate(csr, kernel, candidate, 64, torch.float32)
    assert plan.mode == "warm" and plan.schedule == candidate.schedule and not csr.plans.get(("mode", candidate))
    if candidate.config is not None:
        assert plan.format.config == candidate.config and plan.items is None
        assert ("panels", "natural", 3 - candidate.config.V) not in csr.plans, "only the height that was asked for"
        return
    layout = candidate.layout
    if layout is None:
        return
    assert plan.config[8] == (layout.bundle if candidate.schedule == "natural" else 1)
    if layout.chunk:
        longest = (plan.items[: plan.config[2], 2] - plan.items[: plan.config[2], 1]).max()
        assert plan.config[1] == layout.chunk and longest <= max(
            layout.chunk, (csr.degree().max().double() / 8).sqrt().ceil()
        )
    else:
        assert plan.items is None and (plan.config[0] == 0) == (candidate.layout.long == 0)


# ---------------------------------------------------------------------- what it sees


@pytest.mark.parametrize("name", ["road1M", "arxivlike", "ra_mixed_v3", "ddi_like"])
def test_matrix_features(device: str, name: str) -> None:
    """Against what is exact, where it is estimated within a few percent."""
    c = named(name, device, scale=1 / 16)
    csr = gsp.Graph.from_csr(c.rowptr, c.col)._csr
    f = MatrixFeatures.of(csr)
    assert f is MatrixFeatures.of(csr) and csr.plans["features"] == GraphFeatures._look(csr)
    degree = csr.degree().double()
    filled = degree[degree > 0]
    assert f.mean_non_empty == pytest.approx(float(filled.mean()))
    assert f.cv_non_empty == pytest.approx(float(filled.std(correction=0) / filled.mean()), abs=1e-6)
    single, double = (panel_features(vectors(csr, height)) for height in (1, 2))
    assert f.split_single == pytest.approx(single.split_ratio)
    assert f.split_double == pytest.approx(double.split_ratio, rel=0.1)
    assert f.padding == pytest.approx(double.padding_ratio, abs=0.02)
    band = [int(r.max() - r.min()) for r in csr.col.split(csr.degree().tolist()) if len(r)]
    assert f.max_bandwidth == pytest.approx(max(band) / csr.num_cols)
    assert f.mean_bandwidth == pytest.approx(sum(band) / len(band) / csr.num_cols)
    rows, col = csr.rows(), csr.col
    assert f.near == pytest.approx(float(((col - rows).abs() <= 256).double().mean()), abs=0.02)
    assert f.wide_edges == pytest.approx(float(degree[degree > 64].sum() / degree.sum()))
    assert f.wider_edges == pytest.approx(float(degree[degree > 256].sum() / degree.sum()))
    assert f.short_rows == pytest.approx(float((degree <= 8).double().mean()))
    eights = torch.nn.functional.pad(degree, (0, -len(degree) % 8)).view(-1, 8).max(1).values
    assert f.imbalance == pytest.approx(float(eights.sum() * 8 / degree.sum()))
    assert 0 < f.distinct <= 1


@pytest.mark.parametrize(("rows", "cols"), [(0, 0), (3, 5), (5, 3)])
def test_features_of_next_to_nothing(device: str, rows: int, cols: int) -> None:
    empty = gsp.Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64, device=device), (cols, rows))
    f = MatrixFeatures.of(empty._csr)
    assert (f.num_rows, f.num_cols, f.num_edges, f.imbalance) == (rows, cols, 0, 0.0)
    assert np.isfinite(inputs(f, 0, torch.float32, GPU)).all()
    if rows:
        one = gsp.Graph.from_edge_index(torch.tensor([[cols - 1], [rows - 1]], device=device), (cols, rows))
        f = MatrixFeatures.of(one._csr)
        assert (f.split_single, f.padding, f.mean_non_empty, f.near) == (1.0, 0.5, 1.0, 0.0)


@pytest.mark.parametrize(
    ("given", "direct", "staged", "bundle"),
    [
        ({"max_degree": 16, "mean_degree": 3.0}, 1, 0, 4),
        ({"max_degree": 17, "mean_degree": 3.0}, 0, 0, 1),
        ({"max_degree": 900, "mean_degree": 64.0, "num_cols": 12_000}, 0, 1, 1),
        ({"max_degree": 900, "mean_degree": 63.9, "num_cols": 12_000}, 0, 0, 1),
        ({"max_degree": 900, "mean_degree": 64.0, "num_cols": 12_001}, 0, 0, 1),
    ],
)
def test_it_sees_what_the_rules_do(given: dict[str, float], direct: int, staged: int, bundle: int) -> None:
    """Their own thresholds are where times jump, which nothing smooth could know."""
    f = features(1, num_rows=200_000, num_edges=10**6, degree_cv=1.0, **given)
    seen = dict(zip(INPUTS, inputs(f, 64, torch.float32, GPU).tolist(), strict=True))
    assert (seen["rule_direct"], seen["rule_staged"], seen["rule_bundle"]) == (direct, staged, bundle)
    assert (seen["rule_direct"] == 1) == (layout_by_rule(f)[0].chunk == 0) and seen["rule_chunk"] >= 64


# ---------------------------------------------------------------------- what it foresees


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_csv(tmp_path_factory.mktemp("decider") / "measured.csv")


@pytest.fixture(scope="module")
def trained(measured: Path) -> tuple[Decider, learn.Data]:
    seen = learn.Data.of(Collection.read(measured))
    return learn.train(seen, learn.Scale.start(seen), GPU.name, 0.05), seen


def test_it_reads_between_what_was_measured(measured: Path) -> None:
    """Kernel ridge regression, against its definition, in loops; and without noise, what was measured comes out."""
    seen = learn.Data.of(Collection.read(measured))
    start = learn.Scale.start(seen)
    noise = 0.02
    made = learn.train(seen, learn.Scale(start.scale, noise), GPU.name)
    at = np.log(seen.x.astype(float) + 0.01) * start.scale

    def kernel(a: np.ndarray, b: np.ndarray) -> float:
        r = float(np.sqrt(((a - b) ** 2).sum()))
        return (1 + r) * float(np.exp(-r))

    k = np.array([[kernel(a, b) for b in at] for a in at])
    y = seen.target()
    weights = np.linalg.inv(k + noise * np.eye(len(k))) @ (y - y.mean(0))
    for i in (0, 7, 20):
        between = np.sqrt((seen.x[i] + 0.01) * (seen.x[i + 1] + 0.01)) - 0.01
        for x in (seen.x[i], between.astype(np.float32)):
            z = np.log(x.astype(float) + 0.01) * start.scale
            expected = y.mean(0) + np.array([kernel(z, b) for b in at]) @ weights
            np.testing.assert_allclose(made.foresee(x), expected, atol=2e-4)
    exact = learn.train(seen, learn.Scale(start.scale, 1e-6), GPU.name)
    np.testing.assert_allclose([exact.foresee(x) for x in seen.x], y, atol=1e-3)


def test_beyond_all_that_was_measured(trained: tuple[Decider, learn.Data]) -> None:
    """What is larger or smaller than anything known counts as the largest or smallest: no guess runs away."""
    made, seen = trained
    for factor in (1e3, 1e9):
        for end in (seen.x.max(0), seen.x.min(0)):
            beyond = end * np.float32(factor if end is not seen.x.min(0) else 1 / factor)
            assert np.isfinite(made.foresee(beyond)).all()
    largest, more = seen.x.max(0), seen.x.max(0) * np.float32(100)
    np.testing.assert_array_equal(made.foresee(largest), made.foresee(more))
    inside = seen.x.min(0) + np.float32(0.3) * (largest - seen.x.min(0))
    assert (made.foresee(inside) != made.foresee(largest)).any()


def test_it_chooses_what_was_fastest(trained: tuple[Decider, learn.Data]) -> None:
    made, _ = trained
    for seed in range(12):
        f = features(seed)
        taken = choose(made, f, 64, torch.float32, GPU).candidate
        if taken == RULES:  # they take some layout, whose time counts
            taken = as_measured(Candidate(layout_by_rule(f)[0]), f) or RULES
        assert milliseconds(f, 64, str(taken)) == min(milliseconds(f, 64, str(c)) for c in CANDIDATES)


def test_file(tmp_path: Path, trained: tuple[Decider, learn.Data]) -> None:
    made, seen = trained
    made.save(tmp_path / "decider_test.npz")
    again = Decider.load(tmp_path / "decider_test.npz")
    for name in ("gpu", "version", "names", "candidates", "margin", "implicit", "products"):
        assert getattr(again, name) == getattr(made, name)
    assert (again.margin, again.candidates, again.products[1]) == (0.05, CANDIDATES, "g0 64 float32")
    assert all((again.foresee(x) == made.foresee(x)).all() for x in seen.x)


def test_time(trained: tuple[Decider, learn.Data]) -> None:
    """Under 0.3 ms with 1500 products; here the best of many calls, on whatever machine this is."""
    small = trained[0]
    times = -(-1500 // len(small.products))
    made = dataclasses.replace(
        small,
        products=small.products * times,
        points=np.tile(small.points, (times, 1)),
        value=np.tile(small.value, (times, 1)),
    )
    made._check()
    f = features(1)
    best = min(_seconds(lambda: choose(made, f, 64, torch.float32, GPU)) for _ in range(200))
    assert best < 0.6e-3, best


def _seconds(call: object) -> float:
    start = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - start


def _bad_files(path: Path) -> dict[str, Path]:
    good = known()
    found = {}
    for name, made in {
        "scale": dataclasses.replace(good, scale=good.scale[1:]),
        "negative": dataclasses.replace(good, scale=-good.scale),
        "points": dataclasses.replace(good, points=good.points[:1]),
        "point_alone": dataclasses.replace(good, points=good.points[0]),
        "mean": dataclasses.replace(good, mean=good.mean[:2]),
        "value": dataclasses.replace(good, value=good.value[:, :2]),
        "nan": dataclasses.replace(good, value=good.value * np.nan),
        "infinite": dataclasses.replace(good, points=good.points + np.inf),
        "inputs": dataclasses.replace(good, names=INPUTS[1:]),
        "empty": dataclasses.replace(good, products=(), points=good.points[:0], value=good.value[:0]),
        "products": dataclasses.replace(good, products=good.products[:1]),
        "margin": dataclasses.replace(good, margin=float("nan")),
        "no_rules": dataclasses.replace(good, candidates=(Candidate(BLOCKS), *good.candidates[1:])),
    }.items():
        made.save(path / f"{name}.npz")
        found[name] = path / f"{name}.npz"
    (path / "text.npz").write_text("nothing")
    np.savez(path / "other.npz", rowptr=np.arange(3))
    np.savez(path / "pickle.npz", format=1, names=np.array([object()], dtype=object))
    whole = path / "whole.npz"
    good.save(whole)
    (path / "torn.npz").write_bytes(whole.read_bytes()[:-200])
    with np.load(whole) as z:
        arrays = dict(z)
    np.savez(path / "complex.npz", **{**arrays, "value": arrays["value"] + 1j})
    np.savez(path / "format.npz", **{**arrays, "format": 99})
    np.savez(path / "candidate.npz", **{**arrays, "candidates": np.array(["rules", "magic", "csr"])})
    return found | {
        p: path / f"{p}.npz" for p in ("text", "other", "pickle", "torn", "format", "complex", "candidate", "missing")
    }


def test_no_schedule_of_square_graphs_for_others() -> None:
    square, other = (GraphFeatures(300, n, 900, 3.0, 9, 0.5, 0, 0.0) for n in (300, 200))
    for name in SQUARE:
        assert allowed(Candidate(schedule=name), square, ("csr_dual",))  # type: ignore[arg-type]
        assert not allowed(Candidate(schedule=name), other, ("csr_dual",))  # type: ignore[arg-type]


def test_files_that_are_none(tmp_path: Path) -> None:
    for name, path in _bad_files(tmp_path).items():
        with pytest.raises(ValueError, match=rf"{path.name} is no decider"):
            Decider.load(path)
            pytest.fail(name)


def test_which_file_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert shipped(tmp_path, "Test GPU") == (None, "none for Test GPU")
    known().save(tmp_path / "decider_a.npz")
    shipped.cache_clear()
    found, said = shipped(tmp_path, "Test GPU")
    assert found is not None and said == "decider_a.npz" and shipped(tmp_path, "Test GPU")[0] is found
    found, said = shipped(tmp_path, "Other GPU")
    assert found is None and said == "none for Other GPU (decider_a.npz is for Test GPU)"
    known(version=KERNELS_VERSION + 1).save(tmp_path / "decider_a.npz")
    shipped.cache_clear()
    found, said = shipped(tmp_path, "Test GPU")
    assert found is None and f"knows version {KERNELS_VERSION + 1} of the kernels, these are {KERNELS_VERSION}" in said
    (tmp_path / "decider_b.npz").write_text("no")
    shipped.cache_clear()
    with caplog.at_level(logging.WARNING):
        found, said = shipped(tmp_path, "Test GPU")
    assert found is None and "decider_b.npz is no decider" in said and "decider_b.npz" in caplog.text
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "decider_c.npz")  # which would never end to be read
        shipped.cache_clear()
        assert "decider_c" not in shipped(tmp_path, "Test GPU")[1]


def test_what_ships() -> None:
    """Whatever decider is in the package can be read, and is no graph."""
    for path in decider.FOLDER.glob("decider_*.npz"):
        made = Decider.load(path)
        assert set(map(str, made.candidates)) <= set(map(str, CANDIDATES)) and path.stem not in data.names()
    assert not any(name.startswith("decider") for name in data.names())


# ---------------------------------------------------------------------- the choice


def test_margin() -> None:
    """The rules stay until a candidate promises to save so much of their time; without the rules, the best is taken."""
    ratio = np.array([1.0, 0.96, 0.951])
    assert select(ratio, [0, 1, 2], 0, 0.05) == 0 and select(ratio, [0, 1, 2], 0, 0.048) == 2
    assert select(ratio, [0, 1], 0, 0.04) == 1 and select(ratio, [1, 2], 0, 0.5) == 2
    assert select(np.array([1.0, 0.9, 0.9]), [0, 2, 1], 0, 0.0) == 1  # the first of equal ones
    f = features(1)
    for width, margin, expected in (
        (100, 0.1, "csr"),  # 1 / 1.2 saves 0.17
        (100, 0.2, "rules"),
        (101, 0.2, "W4.F1.V2.S0"),  # 1 / 1.5 saves 0.33
        (101, 0.4, "rules"),
    ):
        assert str(choose(known(margin=margin), f, width, torch.float32, GPU).candidate) == expected


def test_choice_among_kernels() -> None:
    f = features(1)
    for width, kernels, expected in (
        (101, ("csr_dual",), "rules"),
        (100, ("pcsr",), "W4.F1.V2.S0"),
        (100, ("csr_dual", "pcsr"), "csr"),
        (100, (), "rules"),
    ):
        decision = choose(known(), f, width, torch.float32, GPU, kernels)
        assert str(decision.candidate) == expected
        assert decision == choose(known(), f, width, torch.float32, GPU, kernels)
    short, long = (dataclasses.replace(f, mean_degree=degree) for degree in (12.0, 12.1))
    bundled = known(candidates=(RULES, Candidate.parse("csr.b2"), Candidate(Config(4, 1, 2, False))))
    assert str(choose(bundled, short, 100, torch.float32, GPU).candidate) == "csr.b2"
    assert str(choose(bundled, long, 100, torch.float32, GPU).candidate) == "rules"  # there they are not measured
    reasons = choose(known(), f, 100, torch.float16, GPU).reasons
    assert "csr, expected at 0.83 of the time of the rules, asked for 5% less" in reasons[0]
    assert "csr 0.83, rules 1.00, W4.F1.V2.S0 1.67" in reasons[1]
    assert "nearest measured one 100 float32, 0.00 away" in reasons[1]
    assert "row_bytes 200" in reasons[2] and "num_rows" in reasons[2]


def test_in_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which decider a graph on a GPU gets, without one: a stand-in, whose features are known."""
    monkeypatch.setattr(POLICY, "FOLDER", tmp_path)
    monkeypatch.setattr(POLICY.DeviceFacts, "of", staticmethod(lambda device: GPU))
    f = features(1)

    def decided(
        width: int, kernels: tuple[str, ...] = ("csr_dual", "pcsr"), kind: str = "cuda", **more: bool
    ) -> object:
        col = SimpleNamespace(device=SimpleNamespace(type=kind), dtype=torch.int32, shape=(f.num_edges,))
        shipped.cache_clear()
        return POLICY.decided(
            SimpleNamespace(col=col, plans={"matrix features": f}), width, torch.float32, kernels, **more
        )

    assert decided(100).reasons == ("decider   none for Test GPU: by the rules",)  # type: ignore[attr-defined]
    assert decided(100, implicit=True) == POLICY.BY_RULES
    known().save(tmp_path / "decider_test.npz")
    assert str(decided(100).candidate) == "csr" and str(decided(101).candidate) == "W4.F1.V2.S0"  # type: ignore[attr-defined]
    assert decided(100, implicit=True) == POLICY.BY_RULES == decided(100, kind="cpu")
    known(implicit=True).save(tmp_path / "decider_test.npz")
    assert str(decided(100, ("csr_dual",), implicit=True).candidate) == "csr"  # type: ignore[attr-defined]


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans asked for by width take what the decider says, explain it, and compute the same."""
    monkeypatch.setattr(POLICY, "FOLDER", tmp_path)
    monkeypatch.delenv("GSP_KERNEL", raising=False)
    name = torch.cuda.get_device_name()
    c = named("arxivlike", "cuda", scale=1 / 8)
    g = gsp.Graph.from_csr(c.rowptr, c.col)
    x = torch.rand(g.num_src, 128, device="cuda")
    shipped.cache_clear()
    rules = gsp.plan(g, 100)
    assert f"decider   none for {name}" in rules.explain() and rules.kernel.name == "csr_dual"
    known(gpu=name, implicit=True).save(tmp_path / "decider_test.npz")
    shipped.cache_clear()
    g = gsp.Graph.from_csr(c.rowptr, c.col)
    unsplit, panels = gsp.plan(g, 100), gsp.plan(g, 128)
    assert unsplit.items is None and unsplit.config[0] == 0 and "decider   csr, expected" in unsplit.explain()
    assert panels.kernel.name == "pcsr" and str(panels.format.config) == "<W=4, F=1, V=2, S=False>"
    assert gsp.plan(g, 128) is panels and gsp.plan(g, 128, reduce="max").kernel.name == "csr_dual"
    assert gsp.plan(g, 128, kernel="csr_dual").kernel.name == "csr_dual"
    assert gsp.plan(g, 128, policy="csr").items is not None and gsp.plan(g, 128, schedule="degree").items is not None
    assert gsp.plan(g, 100, policy="paramspmm").format.config.V == 2
    for width, plan in ((100, unsplit), (128, panels)):
        wanted = gsp.spmm(g, x[:, :width], policy="csr")
        assert torch.allclose(gsp.spmm(g, x[:, :width], plan=plan), wanted, rtol=1e-4, atol=1e-4)
    for _ in range(PLAN.WARM_AFTER + 1):
        gsp.spmm(g, x)
    assert g._csr.plan.items is None and "decider" in g._csr.plan.explain()
    shipped.cache_clear()


# ---------------------------------------------------------------------- training


def test_training(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command writes a decider that has learnt the rule behind the measurements, and a report that says so."""
    out, report = tmp_path / "decider_test.npz", tmp_path / "report.csv"
    assert cli.main(["tune", "--train", str(measured), "--out", str(out), "--report-csv", str(report)]) == 0
    made = Decider.load(out)
    assert made.gpu == GPU.name and made.version == KERNELS_VERSION and made.candidates == CANDIDATES
    text = capsys.readouterr().out
    assert "leave one graph out" in text and "held out" in text
    lines = [line for line in report.read_text().splitlines() if not line.startswith("#")]
    assert lines[0].startswith("protocol,space,choice,part,of,products,accuracy,geomean,worst")
    parts = {tuple(line.split(",")[:4]) for line in lines[1:]}
    for protocol in ("leave one graph out", "leave one family out", "held out"):
        assert {(protocol, "auto", "decider", p) for p in ("all", "width", "family")} <= parts
        assert (protocol, "csr_dual", "rules", "all") in parts and (protocol, "paramspmm", "decider", "all") in parts
    held = next(line for line in lines if line.startswith("held out,auto,decider,all")).split(",")
    assert held[5] == "8" and float(held[7]) > 0.95


@pytest.mark.parametrize("group", ["graph", "family"])
def test_unseen_means_unseen(measured: Path, monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    """Neither the scale nor the decider that foresees a graph, or a family, has seen anything of it."""
    seen = learn.Data.of(Collection.read(measured))
    groups = [getattr(p, group) for p in seen.products]
    scaled: list[set[str]] = []

    def learn_scale(data: learn.Data) -> learn.Scale:
        scaled.append({getattr(p, group) for p in data.products})
        return learn.Scale.start(data)

    def train(data: learn.Data, learnt: learn.Scale, gpu: str) -> object:
        known = {getattr(p, group) for p in data.products}
        (missing,) = set(groups) - known

        def foresee(x: np.ndarray) -> np.ndarray:
            assert any((row == x).all() for row, g in zip(seen.x, groups, strict=True) if g == missing)
            assert missing not in scaled[-1]
            return np.full(len(CANDIDATES), float(missing[-1]))

        return SimpleNamespace(foresee=foresee)

    monkeypatch.setattr(learn, "learn_scale", learn_scale)
    monkeypatch.setattr(learn, "train", train)
    found = learn.foresee_unseen(seen, lambda p: getattr(p, group))  # type: ignore[no-any-return]
    assert (found == np.array([[float(g[-1])] for g in groups])).all() and len(scaled) == min(8, len(set(groups)))


def test_learning_a_scale(measured: Path) -> None:
    """Of inputs of which one alone says what is fastest, that one comes to count; and every run learns the same."""
    draw = np.random.default_rng(3)
    seen = learn.Data.of(Collection.read(measured))
    x = draw.uniform(0.5, 2.0, seen.x.shape).astype(np.float32)
    x[1::2] = x[::2]  # both products of a graph
    at = INPUTS.index("distinct")
    ms = np.full(seen.ms.shape, 1.5)
    ms[:, 1], ms[:, -1] = np.where(np.log(x[:, at]) > 0, (1.0,), (1.4,)), np.where(np.log(x[:, at]) > 0, 1.4, 1.0)
    data = learn.Data(seen.products, x, ms)
    learnt, start = learn.learn_scale(data), learn.Scale.start(data)
    grown = learnt.scale / start.scale
    assert grown.argmax() == at and grown[at] > 1.5 * np.median(grown)
    again = learn.learn_scale(data)
    assert (again.scale == learnt.scale).all() and again.noise == learnt.noise > 0


def test_implicit_gain(measured: Path) -> None:
    """What one choice for all widths brings, counted at each of them."""
    seen = learn.Data.of(Collection.read(measured)).only(lambda p: p.graph in ("g0", "g1"))
    foreseen = np.log(seen.ms)
    gain, worst = learn.implicit_gain(seen, foreseen, 0.0)
    dual = [i for i, c in enumerate(CANDIDATES) if c.kernel == "csr_dual"]
    expected = seen.ms[:, 0] / seen.ms[:, dual].min(1)
    assert max(expected) > 1.1
    assert gain == pytest.approx(np.exp(np.mean(np.log(expected))), rel=1e-4)
    assert worst == pytest.approx(min(expected), rel=1e-4)


def test_rules_may_have_changed(measured: Path) -> None:
    """Since the measurements: then the time of what they say now counts; not where a graph may be staged."""
    for f, now in (
        (features(1, max_degree=10, mean_degree=5.0), "csr"),
        (features(1, num_edges=10**6, mean_degree=20.0, max_degree=999, degree_cv=1.0), "c64.w1024.l32"),
        (features(1, num_edges=10**6, mean_degree=64.0, max_degree=999, degree_cv=1.0, num_cols=12_000), "rules"),
    ):
        times = {str(c): float(i) for i, c in enumerate(CANDIDATES)}
        assert learn._by_rules_now(times, f) == times[now]
    assert learn._by_rules_now({"rules": 3.0}, features(1)) == 3.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.replace(f"kernels_version: {KERNELS_VERSION}", "kernels_version: 0"), "version 0 of the kernels"),
        (lambda t: t.replace("graph,family", "graph,famly"), "no file of `gnn-spmm tune --collect`"),
        (lambda t: t.replace(",rules,", ",blocks,"), "no product with a time of the rules"),
        (
            lambda t: (
                "\n".join(line for line in t.splitlines() if not line.startswith(tuple(f"g{i}," for i in range(1, 99))))
                + "\n"
            ),
            "1 graphs to train on",
        ),
        (lambda t: t + "g9,x,0,sixteen,float32,rules,1,\n", "a row that is none"),
    ],
)
def test_training_on_something_else(
    measured: Path, tmp_path: Path, change, message: str, capsys: pytest.CaptureFixture[str]
) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "changed.csv"
    path.write_text(change(measured.read_text()))
    assert cli.main(["tune", "--train", str(path), "--out", str(tmp_path / "x.npz")]) == 2
    assert message in capsys.readouterr().err
    assert cli.main(["tune", "--train", str(tmp_path / "none.csv"), "--out", str(tmp_path / "x.npz")]) == 2
    assert cli.main(["tune", "--train", str(measured)]) == 2 and "--out FILE.npz" in capsys.readouterr().err
