"""Plans: their life, what they say, what they refuse; the registry of kernels; features."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import Expected, close, expect_spmm
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, NAMED, REDUCES, edges, values

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import _config
from gnn_spmm_plugin.candidate import Candidate
from gnn_spmm_plugin.features import GraphFeatures
from gnn_spmm_plugin.functional_aggregate import aggregate
from gnn_spmm_plugin.kernels import for_device
from gnn_spmm_plugin.plan import WARM_AFTER, build_candidate, default_plan
from gnn_spmm_plugin.schedule import (
    Layout,
    by_degree,
    layout_by_rule,
    layout_of,
    list_items,
    move_edges,
    rows_at_once,
)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GSP_KERNEL", "GSP_MODE", "GSP_LOG"):
        monkeypatch.delenv(name, raising=False)


def use(g: gsp.Graph, reduce: str = "sum") -> torch.Tensor:
    out = gsp.spmm(g, values((g.num_src, 5), torch.float32, 1, device=str(g.device)), reduce=reduce)
    assert isinstance(out, torch.Tensor)
    return out


def test_life(device: str) -> None:
    """Cold first, warm at use `WARM_AFTER`, the same plan from then on, and then for the transpose too."""
    g = NAMED["hub"].graph(device)
    csr = g._csr
    assert csr.plan is None
    results = [use(g)]
    cold = csr.plan
    assert cold.mode == "cold" and cold.features is None and cold.nbytes() == 0
    for _ in range(WARM_AFTER):
        results.append(use(g))
    warm = csr.plan
    assert warm.mode == "warm" and warm.features.max_degree >= 4500
    for _ in range(5):
        results.append(use(g))
    assert csr.plan is warm and all(torch.allclose(results[0], r, rtol=1e-4, atol=1e-4) for r in results)
    for part in (results[: WARM_AFTER - 1], results[WARM_AFTER - 1 :]):  # the upgrade may change last digits
        assert all(torch.equal(part[0], r) for r in part)
    assert g._core.transpose is None  # inference needs none
    use(g.T)
    assert g._csr_t.plan.mode == "warm" and g._csr_t.plan.owner() is g._csr_t
    assert warm.owner() is csr and csr.plan is warm


def test_counters(device: str) -> None:
    g = NAMED["shuffled"].graph(device)
    before = gsp.stats()["plans_built"]
    for _ in range(WARM_AFTER):
        use(g, "max")
        use(g, "sum")
    assert gsp.stats()["plans_built"] - before == 2  # one cold, one warm
    x = values((37, 5), torch.float32, 1, device=device).requires_grad_()
    for _ in range(WARM_AFTER):
        gsp.spmm(g, x).sum().backward()
    assert gsp.stats()["plans_built"] - before == 3  # the transposed graph's is warm at once


@pytest.mark.parametrize("mode", ["cold", "warm"])
def test_mode_from_the_environment(device: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSP_MODE", mode)
    g = NAMED["shuffled"].graph(device)
    for _ in range(4):
        use(g)
        assert g._csr.plan.mode == mode


def test_the_environment_is_read_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for raw, read in (("  Warm ", "warm"), ("cold", "cold"), ("", "")):
        monkeypatch.setenv("GSP_MODE", raw)
        assert _config.env("GSP_MODE") == read
    monkeypatch.delenv("GSP_MODE")
    assert _config.env("GSP_MODE") == ""
    for raw, verify in (("verify", True), ("info,verify", True), ("info", False), ("", False)):
        monkeypatch.setenv("GSP_LOG", raw)
        assert _config.verify_always() is verify
    monkeypatch.setattr(_config, "_environment", os.environb)  # where os.environ keeps its values elsewhere
    monkeypatch.setenv("GSP_MODE", "Cold")
    assert _config.env("GSP_MODE") == "cold" and _config.env("GSP_KERNEL") == ""


def test_bad_environment(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSP_MODE", "hot")
    with pytest.raises(ValueError, match=r"GSP_MODE must be one of auto, cold, warm.*'hot'"):
        use(NAMED["shuffled"].graph(device))
    monkeypatch.setenv("GSP_MODE", "")
    monkeypatch.setenv("GSP_KERNEL", "magic")
    with pytest.raises(ValueError, match=r"unknown kernel 'magic' for .*csr"):
        use(NAMED["shuffled"].graph(device))
    name = {"cpu": "csr_cpu", "cuda": "csr_dual"}[device]
    monkeypatch.setenv("GSP_KERNEL", f" {name.upper()} ")
    use(NAMED["shuffled"].graph(device))


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("reduce", REDUCES)
def test_explicit_plans(device: str, reduce: str, name: str) -> None:
    """Every mode and policy gives what the reference gives."""
    e = NAMED[name]
    g = e.graph(device)
    x = values((e.num_src, 5), torch.float32, 1, device=device)
    weight = values((e.num_edges,), torch.float32, 2, device=device)
    expected = expect_spmm(g, x, weight, torch.zeros(e.num_dst, 5, device=device), reduce)
    for mode in ("auto", "cold", "warm"):
        for policy in ("auto", "csr", "paramspmm"):
            plan = gsp.plan(g, 5, reduce=reduce, mode=mode, policy=policy)
            assert plan is gsp.plan(g, 5, reduce=reduce, mode=mode, policy=policy)
            close(gsp.spmm(g, x, weight, reduce, plan=plan), expected.out)
            leaf = x.clone().requires_grad_()
            gsp.spmm(g, leaf, weight, reduce, plan=plan).sum().backward()
            assert leaf.grad is not None
    close(gsp.spmm(g, x, weight, reduce, policy="csr"), expected.out)


def test_explain(device: str) -> None:
    g = NAMED["hub"].graph(device)
    text = gsp.plan(g, 64, torch.float16, "max").explain()
    for part in (
        {"cpu": "csr_cpu", "cuda": "csr_dual"}[device],
        "width=64 float16 max",
        "mode=warm",
        "60 rows, 60 columns, 4,800 edges, index int32",
        "longest row 4,5",
        "empty rows",
        "built     in",
        "GSP_KERNEL=",
    ):
        assert part in text, (part, text)
    cold = gsp.plan(NAMED["shuffled"].graph(device), 8, mode="cold").explain()
    assert "mode=cold" in cold and "as asked" in cold


@settings(max_examples=60)
@given(
    e=edges(max_edges=400),
    chunk=st.sampled_from([1, 3, 8, 64]),
    window=st.sampled_from([0, 1, 4, 1024]),
    long=st.sampled_from([0, 3, 1000]),
    order=st.sampled_from([None, "degree", "random"]),
    bundle=st.sampled_from([1, 4]),
    moves=st.booleans(),
)
def test_work_items(device, e, chunk, window, long, order, bundle, moves) -> None:  # type: ignore[no-untyped-def]
    """Every row once, or its pieces in order; each of at most `chunk` edges; slots and merges that belong together."""
    csr = e.graph(device)._csr
    if csr.num_rows == 0:
        return
    rows = None if order is None else by_degree(csr) if order == "degree" else torch.randperm(csr.num_rows).to(device)
    items, num_split, num_slots = list_items(csr, Layout(chunk, window, long, bundle), rows, moves)
    assert items.dtype == torch.int32 and items.is_contiguous()
    pieces, merges = items[: len(items) - num_split].tolist(), items[len(items) - num_split :].tolist()
    if bundle > 1:
        assert all(slot >= 0 for *_, slot in pieces[:num_slots]), "pieces come first"
    lengths = [end - begin for _, begin, end, slot in pieces if bundle == 1 or slot < 0]
    assert [n > long for n in lengths] == sorted((n > long for n in lengths), reverse=True)
    if window == 0:
        assert lengths == sorted(lengths, reverse=True)
    if long == 1000 and window == 4 and chunk == 64:  # whole windows, no row split: sorted in each
        for start in range(0, len(lengths), 4):
            assert max(csr.degree().tolist()) > 64 or lengths[start : start + 4] == sorted(
                lengths[start : start + 4], reverse=True
            )
    order = list(range(csr.num_rows)) if rows is None else rows.tolist()
    degree, rowptr, col = csr.degree().tolist(), csr.rowptr.tolist(), csr.col.tolist()
    moved = csr if rows is None or not moves else move_edges(csr, rows)
    order = list(range(csr.num_rows)) if moved is csr else order
    assert moved.col.tolist() == [c for row in order for c in col[rowptr[row] : rowptr[row + 1]]]
    if moved is not csr:
        perm = list(range(len(col))) if csr.perm is None else csr.perm.tolist()
        assert moved.perm.tolist() == [e for row in order for e in perm[rowptr[row] : rowptr[row + 1]]]
    ends = dict(zip(order, itertools.accumulate(degree[row] for row in order), strict=True))
    by_row: dict[int, list[list[int]]] = {}
    for piece in pieces:
        by_row.setdefault(piece[0], []).append(piece)
    assert sorted(by_row) == list(range(csr.num_rows))
    slots = []
    for row, parts in by_row.items():
        parts.sort(key=lambda piece: piece[1])
        assert parts[-1][2] == ends[row] and parts[-1][2] - parts[0][1] == degree[row]
        assert all(a[2] == b[1] for a, b in itertools.pairwise(parts))
        most = max(chunk, math.ceil(math.sqrt((parts[-1][2] - parts[0][1]) / 8)))
        assert all(end - begin <= most for _, begin, end, _ in parts)
        if len(parts) == 1:
            assert parts[0][3] == -1
        else:
            slots += [part[3] for part in parts]
            assert [row, parts[0][3], parts[-1][3] + 1, 0] in merges
            assert [part[3] for part in parts] == list(range(parts[0][3], parts[-1][3] + 1))
    assert sorted(slots) == list(range(num_slots)) and len(merges) == num_split


def test_a_schedule_does_without_a_copy_of_the_edges(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no memory for one, the plan follows the schedule all the same."""
    module: Any = sys.modules["gnn_spmm_plugin.plan"]  # the package has a function of this name

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(module, "move_edges", fail)
    g = NAMED["shuffled"].graph(device)
    order = torch.arange(g.num_dst, device=device).flip(0)
    assert module._move(g._csr, order) is None
    x = values((g.num_src, 24), torch.float32, 1, device=device)
    plan = gsp.plan(g, 24, schedule=order)
    assert plan.moved is None and (plan.items is not None) == (device == "cuda")
    close(gsp.spmm(g, x, plan=plan), expect_spmm(g, x, None, torch.zeros(g.num_dst, 24, device=device), "sum").out)


@pytest.mark.parametrize("mean_degree", [3, 80])
def test_schedules_with_weights_and_winners(device: str, mean_degree: int) -> None:
    """Edges that lie in the order of a schedule, and those that do not, keep their weights, numbers and gradients."""
    generator = torch.Generator().manual_seed(0)
    n, edges = 300, 300 * mean_degree
    g = gsp.Graph.from_edge_index(torch.randint(n, (2, edges), generator=generator).to(device), n)
    x = values((n, 24), torch.float32, 1, device=device).requires_grad_()
    weight = values((edges,), torch.float32, 2, device=device).requires_grad_()
    grad = values((n, 24), torch.float32, 3, device=device)
    order = torch.randperm(n, generator=generator).to(device)
    for reduce in REDUCES:
        plan = gsp.plan(g, 24, reduce=reduce, schedule=order)
        assert (plan.moved is not None) == (device == "cuda" and mean_degree == 3)
        expected = expect_spmm(g, x, weight, grad, reduce)
        for w in (weight, weight.detach(), weight.detach()):  # what is constant is kept
            out = gsp.spmm(g, x, w, reduce, plan=plan)
            close(out, expected.out)
            (grad_x,) = torch.autograd.grad(out, x, grad)
            close(grad_x, expected.grad_x)
        if reduce in ("max", "min"):
            arg = gsp.spmm(g, x, weight, reduce, return_arg=True, plan=plan)[1]
            assert torch.equal(arg, gsp.spmm(g, x, weight, reduce, return_arg=True)[1])
        (grad_weight,) = torch.autograd.grad(gsp.spmm(g, x, weight, reduce, plan=plan), weight, grad)
        close(grad_weight, expected.grad_weight, 2)


def test_schedules(device: str) -> None:
    """No order of rows changes a result, and what is no permutation is refused."""
    g = NAMED["hub"].graph(device)
    x = values((g.num_src, 24), torch.float32, 1, device=device)
    expected = expect_spmm(g, x, None, torch.zeros(g.num_dst, 24, device=device), "sum")
    order = torch.randperm(g.num_dst, generator=torch.Generator().manual_seed(0)).to(device)
    for schedule in ("natural", "degree", "dual_metric", "rcm", "community", order, order.int()):
        plan = gsp.plan(g, 24, schedule=schedule)
        close(gsp.spmm(g, x, plan=plan), expected.out)
        name = schedule if isinstance(schedule, str) else "the caller's"
        assert plan.schedule == (name if device == "cuda" else "natural")
    for bad, error in (
        ("rabbit", r"schedule must be one of natural, degree, dual_metric, rcm, community; got 'rabbit'"),
        (order[:-1], r"schedule must hold each row once, \[60\] int32 or int64, got \[59\]"),
        (order.float(), r"torch.float32"),
        (torch.zeros_like(order), r"schedule must hold each row from 0 to 59 once"),
        (order + 1, r"schedule must hold each row from 0 to 59 once"),
    ):
        with pytest.raises(ValueError, match=error):
            gsp.plan(g, 24, schedule=bad)
    with pytest.raises(ValueError, match=r"a schedule has to be prepared: use mode='auto' or 'warm', not 'cold'"):
        gsp.plan(g, 24, mode="cold", schedule=order)
    with pytest.raises(TypeError, match=r"schedule must be None"):
        gsp.plan(g, 24, schedule=[1, 2])  # type: ignore[arg-type]


def test_plans_are_checked(device: str) -> None:
    g = NAMED["shuffled"].graph(device)
    other = NAMED["shuffled"].graph(device)
    x = values((37, 5), torch.float32, 1, device=device)
    plan = gsp.plan(g, 5)
    with pytest.raises(ValueError, match=r"made for another graph"):
        gsp.spmm(other, x, plan=plan)
    with pytest.raises(ValueError, match=r"made for another graph"):
        gsp.spmm(g.T, x, plan=plan)
    with pytest.raises(ValueError, match=r"\(5, torch.float32, 'sum'\), but used with \(5, torch.float32, 'max'\)"):
        gsp.spmm(g, x, reduce="max", plan=plan)
    with pytest.raises(ValueError, match=r"but used with \(3, "):
        gsp.spmm(g, x[:, :3], plan=plan)
    with pytest.raises(ValueError, match=r"but used with \(5, torch.float64"):
        gsp.spmm(g, x.double(), plan=plan)
    with pytest.raises(TypeError, match=r"plan must come from gnn_spmm_plugin.plan, got str"):
        gsp.spmm(g, x, plan="warm")  # type: ignore[arg-type]
    assert torch.equal(gsp.spmm(g.with_weight(None), x, plan=plan), gsp.spmm(g, x))  # shares its preparation
    wide = values((37, 5, 1), torch.float32, 1, device=device)
    assert torch.equal(gsp.spmm(g, wide, plan=plan)[..., 0], gsp.spmm(g, x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": -1}, "width must be"),
        ({"width": 2.5}, "width must be"),
        ({"width": 3, "dtype": torch.int64}, r"dtype must be one of torch.float32.*got torch.int64"),
        ({"width": 3, "reduce": "prod"}, r"reduce must be one of sum, mean, max, min; got 'prod'"),
        ({"width": 3, "mode": "hot"}, r"mode must be one of auto, cold, warm"),
        ({"width": 3, "policy": "magic"}, r"policy must be one of auto, ra, paramspmm, dualgcn, csr"),
        ({"width": 3, "kernel": "magic"}, r"unknown kernel 'magic'"),
    ],
)
def test_arguments(device: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gsp.plan(NAMED["shuffled"].graph(device), **arguments)  # type: ignore[arg-type]


def test_plans_hang_on_the_graph(device: str, no_gc: None) -> None:
    g = NAMED["hub"].graph(device)
    plans = [weakref.ref(gsp.plan(g, width)) for width in (1, 2, 3)]
    for _ in range(WARM_AFTER + 1):
        use(g)
        use(g.T)
    plans += [weakref.ref(g._csr.plan), weakref.ref(g._csr_t.plan)]
    assert all(p() is not None for p in plans)
    kept = plans[0]()
    del g
    assert kept is not None and kept.owner() is None and "built" in kept.explain()  # a plan keeps no graph alive
    assert all(p() is None for p in plans[1:])


def test_out_of_memory_while_planning(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Falls back to the cold kernel, once, with a warning."""
    calls = []

    def fail(csr: object) -> None:
        calls.append(csr)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(GraphFeatures, "of", fail)
    g = NAMED["shuffled"].graph(device)
    expected = use(NAMED["shuffled"].graph(device))
    with caplog.at_level("WARNING", logger="gnn_spmm_plugin"):
        for _ in range(WARM_AFTER + 3):
            assert torch.equal(use(g), expected)
    assert len(calls) == 1
    assert [r.message for r in caplog.records if "out of memory" in r.message] != []
    assert "out of memory" in g._csr.plan.explain()


def test_kernels() -> None:
    listed = gsp.kernels()
    assert {k["name"] for k in listed} == {"csr_cpu", "csr_dual", "pcsr", "tile", "dense", "cusparse"}
    for k in listed:
        assert set(k) >= {"name", "device", "summary", "reduces", "available", "reasons"}
        assert k["available"] == (not k["reasons"]) and isinstance(k["reasons"], list)
    assert next(k for k in listed if k["device"] == "cpu")["available"]
    assert all(k["available"] for k in listed if k["device"] == "cuda") or not torch.cuda.is_available()


@settings(max_examples=40)
@given(e=edges())
def test_features(device, e) -> None:  # type: ignore[no-untyped-def]
    g = e.graph(device)
    f = GraphFeatures.of(g._csr)
    degree = torch.bincount(e.edge_index[1], minlength=e.num_dst).double()
    assert (f.num_rows, f.num_cols, f.num_edges) == (e.num_dst, e.num_src, e.num_edges)
    if e.num_edges:
        assert f.max_degree == degree.max() and f.empty_rows == (degree == 0).sum()
        assert f.mean_degree == pytest.approx(degree.mean().item())
        assert f.degree_cv == pytest.approx((degree.std(correction=0) / degree.mean()).item())
    else:
        assert (f.max_degree, f.mean_degree, f.degree_cv, f.empty_rows) == (0, 0, 0, e.num_dst)


def test_stats_are_integers() -> None:
    stats = gsp.stats()
    assert {"kernel_calls", "plans_built", "plan_hits", "fallbacks"} <= set(stats)
    assert all(type(v) is int for v in stats.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_default_plan_serves_every_kind_of_call(device: str, dtype: torch.dtype) -> None:
    g = NAMED["hub"].graph(device)
    plan = None
    for reduce in REDUCES:
        for width in (1, 64):
            gsp.spmm(g, values((60, width), dtype, 1, device=device), reduce=reduce)
            current = default_plan(g._core, g._csr)
            assert plan is None or plan.mode == "cold" or current is plan
            plan = current
    gc.collect()


def test_layouts() -> None:
    """Which graphs get which layout: both sides of each threshold of `layout_of`."""

    def of(edges: int, mean: float, cols: int = 10**6, locality: float = 0.0) -> tuple[int, int, int]:
        layout = layout_of(GraphFeatures(int(edges / mean), cols, edges, mean, 10**4, 1.0, 0, locality))
        return layout.chunk, layout.window, layout.long

    assert of(10**6, 64, 99_999) == (256, 0, 256)
    assert of(10**6, 64, 100_000) == (256, 1024, 256) == of(10**6, 64, 99_999, locality=0.3)
    assert of(999_999, 64, 99_999) == (128, 1024, 64)
    assert of(3_999_999, 63.9) == (64, 1024, 32)
    assert of(4_000_000, 63.9, locality=0.3) == (64, 1024, 64)
    assert of(4_000_000, 63.9, locality=0.29) == (256, 1024, 64)


def test_which_graphs_need_no_list() -> None:
    """Both sides of each threshold of `layout_by_rule`."""

    def listed(edges: int, longest: int, cv: float = 1.0, mean: float = 8.0, cols: int = 10**6) -> bool:
        layout, why = layout_by_rule(GraphFeatures(int(edges / mean), cols, edges, mean, longest, cv, 0, 0.0))
        assert why.endswith("from a list" if layout.chunk else "straight from the CSR arrays") and layout.bundle == 1
        return layout.chunk > 0

    assert not listed(10**6, 16) and listed(10**6, 17)
    assert not listed(10**6, 256, 0.35) and listed(10**6, 257, 0.35) and listed(10**6, 256, 0.36)
    assert listed(10**6, 256, 0.1, 64.0, 12_000)  # staged
    assert not listed(10**6, 256, 0.1, 63.9, 12_000) and not listed(10**6, 256, 0.1, 64.0, 12_001)
    assert not listed(99_999, 100) and listed(99_999, 101) and listed(100_000, 100)
    assert not listed(11_999, 256) and listed(11_999, 257) and listed(12_000, 256)


def test_locality(device: str) -> None:
    n = 640
    ring = torch.stack([torch.arange(n), (torch.arange(n) + 1) % n])
    far = torch.stack([torch.arange(n), (torch.arange(n) + n // 2) % n])
    for edge_index, size, expected in ((ring, n, (n - 1) / n), (far, n, 0.0), (ring, (n, n + 1), 0.0)):
        g = gsp.Graph.from_edge_index(edge_index.to(device), size)
        assert GraphFeatures.of(g._csr).locality == pytest.approx(expected)


def backwards(g: gsp.Graph) -> dict[str, Callable[[Any], Any]]:
    """Every operator whose backward sweeps over the transposed graph; all but `aggregate` take a plan."""
    x = values((g.num_src, 5), torch.float32, 1, device=str(g.device)).requires_grad_()
    weight = values((g.num_edges,), torch.float32, 2, device=str(g.device))
    return {
        "sum": lambda plan: gsp.spmm(g, x, plan=plan),
        "weighted": lambda plan: gsp.spmm(g, x, weight, plan=plan),
        "mean": lambda plan: gsp.spmm(g, x, reduce="mean", plan=plan),
        "max": lambda plan: gsp.spmm(g, x, weight, "max", plan=plan),
        "split": lambda plan: gsp.spmm(g, x, reduce="min", tie="split", plan=plan),
        "aggregate": lambda plan: aggregate(g, x, weight, self_x=x),
    }


OPERATORS = ("sum", "weighted", "mean", "max", "split", "aggregate")


@pytest.mark.parametrize("name", OPERATORS)
def test_backward_is_planned_as_forward(device: str, name: str) -> None:
    """Warm plans, asked for or made in the course of use, have their like for the transposed graph; cold ones not."""
    reduce = {"mean": "mean", "max": "max", "split": "min"}.get(name, "sum")
    for mode in ("auto", "warm", "cold"):
        g = NAMED["hub"].graph(device)
        run = backwards(g)[name]
        plan = None if mode == "auto" else gsp.plan(g, 5, reduce=reduce, mode=mode)
        for _ in range(WARM_AFTER if mode == "auto" else 1):
            out = run(plan)
        before = gsp.stats()["plans_built"]
        out.sum().backward()
        assert g._csr_t.plan.mode == ("cold" if mode == "cold" else "warm")
        # At the first use, none before; a tie counts its winners with the graph's own plan. The forward of a sum over a
        # small graph on a GPU has prepared its backward.
        prepared = name == "sum" and device == "cuda"
        assert gsp.stats()["plans_built"] - before == (not prepared) + (name == "split" and plan is not None)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_mini_batch_stays_cold(device: str, name: str) -> None:
    g = NAMED["hub"].graph(device)
    run = backwards(g)[name]
    for _ in range(2):
        run(None).sum().backward()
    assert g._csr.plan.mode == g._csr_t.plan.mode == "cold"


def test_forward_is_planned_as_backward(device: str) -> None:
    """The rule knows no forward: each direction warms the other, unless torch's flag pins what there is."""
    for flag in (False, True):
        g = NAMED["hub"].graph(device)
        use(g)
        for _ in range(WARM_AFTER):
            use(g.T)
        torch.use_deterministic_algorithms(flag)
        try:
            use(g)
        finally:
            torch.use_deterministic_algorithms(False)
        assert g._csr_t.plan.mode == "warm" and g._csr.plan.mode == ("cold" if flag else "warm")


@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_warm_plans_of_any_width(device: str, dtype: torch.dtype, reduce: str) -> None:
    """On a graph that is large enough for items: vectors of 16 bytes, of fewer, of one element; short rows, hubs."""
    generator = torch.Generator().manual_seed(0)
    nodes, edges = 3000, 120_000
    src = torch.randint(nodes, (edges,), generator=generator)
    dst = (torch.rand(edges, generator=generator) ** 4 * nodes).long()
    g = gsp.Graph.from_edge_index(torch.stack([src, dst]).to(device), nodes)
    weight = torch.rand(edges, generator=generator).to(device, dtype)
    for width in (1, 2, 8, 33, 34):
        x = values((nodes, width), dtype, 1, device=device)
        plan = gsp.plan(g, width, dtype, reduce)
        assert device == "cpu" or plan.items is not None
        for w in (None, weight):
            expected = expect_spmm(g, x, w, torch.zeros(nodes, width, dtype=dtype, device=device), reduce)
            close(gsp.spmm(g, x, w, reduce, plan=plan), expected.out)


@pytest.mark.parametrize("reduce", REDUCES)
def test_short_rows_need_no_items(device: str, reduce: str) -> None:
    """A grid, whose rows have five edges at most; one with a row of three hundred is listed again."""
    side = 200
    node = torch.arange(side * side).view(side, side)
    pairs = [(node[:, 1:], node[:, :-1]), (node[1:], node[:-1])]
    half = torch.cat([torch.stack([a.flatten(), b.flatten()]) for a, b in pairs], 1)
    edge_index = torch.cat([half, half.flip(0)], 1).to(device)
    g = gsp.Graph.from_edge_index(edge_index, side * side)
    assert g.num_edges >= 100_000
    hub = torch.stack([torch.arange(300), torch.full((300,), side)]).to(device)
    listed = gsp.plan(gsp.Graph.from_edge_index(torch.cat([edge_index, hub], 1), side * side), 8)
    assert (listed.items is not None) == (device == "cuda")
    for width in (1, 6, 8, 64, 100):
        x = values((side * side, width), torch.float32, 1, device=device)
        plan = gsp.plan(g, width, reduce=reduce)
        assert plan.items is None
        assert device == "cpu" or "rows      short rows: longest row < 17: straight" in plan.explain()
        expected = expect_spmm(g, x, None, torch.zeros_like(x), reduce)
        close(gsp.spmm(g, x, reduce=reduce, plan=plan), expected.out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hubs", [0, 4])
@pytest.mark.gpu
def test_rows_at_once(dtype: torch.dtype, hubs: int) -> None:
    """Rows of up to four edges, empty ones among them, and rows that are split: several at a time, the same bits."""
    generator = torch.Generator().manual_seed(0)
    nodes, device = 60_001, "cuda"
    degree = torch.randint(5, (nodes,), generator=generator)
    degree[torch.tensor([0, 7, 8, nodes - 1])[:hubs]] = 500
    degree[:: nodes // 3] += 40 * bool(hubs)  # long, but not split
    dst = torch.arange(nodes).repeat_interleave(degree)
    src = torch.randint(nodes, dst.shape, generator=generator)
    g = gsp.Graph.from_edge_index(torch.stack([src, dst]).to(device), nodes)
    weight = torch.rand(len(dst), generator=generator).to(device, dtype)
    for width in (32, 36, 100, 264):
        x = values((nodes, width), dtype, 1, device=device)
        for w, reduce in itertools.product((None, weight), ("sum", "mean")):
            rows = Layout(64, 1024, 32, 2) if hubs else Layout(0, 0, 0, 2)
            plan = build_candidate(g._csr, for_device(g.device), Candidate(rows), width, dtype)
            assert plan.config[-1] == 2 and (plan.items is not None) == bool(hubs)
            assert "take 2 rows at once" in plan.explain()
            expected = expect_spmm(g, x, w, torch.zeros_like(x), reduce)
            out = gsp.spmm(g, x, w, reduce, plan=plan)
            close(out, expected.out)
            for bundle in (1, 3):
                other = dataclasses.replace(plan, config=[*plan.config[:-1], bundle])
                assert torch.equal(out, gsp.spmm(g, x, w, reduce, plan=other))


def test_which_graphs_take_several_rows_at_once() -> None:
    """Both sides of each threshold."""
    for rows, mean, longest, expected in (
        (10**6, 2.5, 4, 4),
        (10**6, 4.0, 16, 4),
        (10**6, 4.0, 17, 1),
        (10**6, 4.1, 8, 3),
        (10**6, 6.0, 8, 3),
        (10**6, 6.1, 8, 1),
        (10**6, 4.1, 9, 1),
        (89_999, 3.0, 8, 2),
        (90_000, 3.0, 8, 3),
        (120_000, 3.0, 8, 4),
        (40_000, 2.5, 8, 2),
        (39_999, 2.5, 8, 1),
    ):
        f = GraphFeatures(rows, rows, int(rows * mean), mean, longest, 1.0, 0, 0.3)
        assert rows_at_once(f) == expected, (rows, mean, longest)
        far = dataclasses.replace(f, locality=0.29)
        assert rows_at_once(far) == (expected if mean <= 4 else 1)


def test_small_graphs_share_only_long_rows(device: str) -> None:
    """In a tiny graph up to 256 edges a row are left to a warp, in one launch and without items."""
    for longest, unsplit in ((256, True), (257, False)):
        dst = torch.cat([torch.zeros(longest, dtype=torch.int64), torch.arange(2000 - longest) % 299 + 1])
        g = gsp.Graph.from_edge_index(torch.stack([torch.arange(2000) % 300, dst]).to(device), 300)
        for width in (1, 4, 16, 30, 64, 200):
            plan = gsp.plan(g, width)
            assert device == "cpu" or (plan.items is None) == (plan.config[0] == 0) == unsplit, plan.explain()
            x = values((300, width), torch.float32, 1, device=device)
            expected = expect_spmm(g, x, None, torch.zeros_like(x), "sum")
            close(gsp.spmm(g, x, plan=plan), expected.out)


@pytest.mark.gpu
@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize(
    ("rows", "length"),
    [(40, 50), (40, 12_000), (20_000, 50), (12_000, 280)],
    ids=["few", "few, long", "more than a GPU has threads", "many, long"],
)
def test_pieces_are_merged(rows: int, length: int, reduce: str) -> None:
    """By one thread a vector of columns, or by eight: row by row as the rule of cuda/row_sweep_launch.cuh has it."""
    device = torch.device("cuda")
    draw = torch.Generator(device).manual_seed(0)
    degree = torch.randint(length - 10, length, (rows,), device=device, generator=draw)
    rowptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    col = torch.randint(500, (int(rowptr[-1]),), device=device, generator=draw)
    g = gsp.Graph.from_csr(rowptr, col, num_src=500)
    candidate = Candidate(Layout(16, 1024, 16))
    plan = build_candidate(g._csr, for_device(device), candidate, 16, torch.float32)
    splits, slots = plan.config[3:5]
    assert splits == rows and slots >= 3 * rows
    x = torch.randn(500, 16, device=device, generator=draw)
    message = x.double()[col.long()]
    row = torch.arange(rows, device=device).repeat_interleave(degree)
    zeros = message.new_zeros(rows, 16)
    if reduce == "max":
        out, arg = gsp.spmm(g, x, reduce="max", return_arg=True, plan=plan)
        assert torch.equal(message.gather(0, arg), out.double())
        expected = zeros.scatter_reduce(0, row.unsqueeze(1).expand_as(message), message, "amax", include_self=False)
        assert torch.equal(out.double(), expected)
    else:
        out = gsp.spmm(g, x, plan=plan)
        close(out, Expected(zeros.index_add(0, row, message), zeros.index_add(0, row, message.abs())))
        assert torch.equal(out, gsp.spmm(g, x, plan=plan))
