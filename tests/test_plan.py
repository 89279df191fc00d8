"""Plans: their life, what they say, what they refuse; the registry of kernels; features."""

from __future__ import annotations

import gc
import itertools
import os
import weakref

import pytest
import torch
from checks import close, expect_spmm
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, NAMED, REDUCES, edges, values

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import _config
from gnn_spmm_plugin.features import GraphFeatures
from gnn_spmm_plugin.plan import WARM_AFTER, _list_long_rows, default_plan


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GSP_KERNEL", "GSP_MODE", "GSP_LOG"):
        monkeypatch.delenv(name, raising=False)


def use(g: gsp.Graph, reduce: str = "sum") -> torch.Tensor:
    out = gsp.spmm(g, values((g.num_src, 5), torch.float32, 1, device=str(g.device)), reduce=reduce)
    assert isinstance(out, torch.Tensor)
    return out


def test_life(device: str) -> None:
    """Cold first, warm at the second use, the same plan from then on; the transpose has a life of its own."""
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
    assert csr.plan is warm and all(torch.equal(results[0], r) for r in results)
    assert g._core.transpose is None  # inference needs none
    use(g.T)
    assert g._csr_t.plan.mode == "cold"
    assert warm.owner() is csr


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
    assert gsp.stats()["plans_built"] - before == 4


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
        for policy in ("auto", "csr"):
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


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["hub", "shuffled"])
def test_long_rows_are_listed(name: str) -> None:
    """Every row above the limit, each edge of it in one chunk, in order; then a merge for each row of several."""
    g = NAMED[name].graph("cuda")
    long_row, chunk, num_items, num_merges, num_slots, listed = gsp.plan(g, 64).config
    assert listed == 1
    items = gsp.plan(g, 64).items
    degree = g.in_degree().tolist()
    expected = {row: length for row, length in enumerate(degree) if length > long_row}
    rows = [] if items is None else items.tolist()
    assert len(rows) == num_items + num_merges
    covered: dict[int, list[list[int]]] = {}
    for row, begin, end, slot in rows[:num_items]:
        covered.setdefault(row, []).append([begin, end, slot])
    assert covered.keys() == expected.keys()
    slots = []
    for row, pieces in covered.items():
        assert pieces[0][0] == int(g.rowptr[row]) and pieces[-1][1] == int(g.rowptr[row + 1])
        assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
        assert all(0 < end - begin <= chunk for begin, end, _ in pieces)
        if len(pieces) == 1:
            assert pieces[0][2] == -1
        else:
            slots += [p[2] for p in pieces]
            assert [row, pieces[0][2], pieces[-1][2] + 1, 0] in rows[num_items:]
    assert slots == list(range(num_slots))
    assert name != "hub" or num_merges == 1


@settings(max_examples=40)
@given(e=edges(max_edges=400), long_row=st.sampled_from([0, 1, 3, 8]), times=st.sampled_from([1, 2, 4]))
def test_work_items(device, e, long_row, times) -> None:  # type: ignore[no-untyped-def]
    """The same on any graph, with limits that small ones reach."""
    csr = e.graph(device)._csr
    chunk = max(long_row, 1) * times
    long_rows = [r for r, n in enumerate(csr.degree().tolist()) if n > long_row]
    if not long_rows:
        return
    items, num_long, num_split = _list_long_rows(csr, long_row, chunk)
    assert items.dtype == torch.int32 and items.is_contiguous() and num_long == len(long_rows)
    chunks, merges = items[: len(items) - num_split].tolist(), items[len(items) - num_split :].tolist()
    slots = 0
    for row, group in itertools.groupby(chunks, key=lambda item: item[0]):
        assert row == long_rows.pop(0)
        parts = list(group)
        assert parts[0][1] == csr.rowptr[row] and parts[-1][2] == csr.rowptr[row + 1]
        assert all(a[2] == b[1] for a, b in itertools.pairwise(parts))
        assert all(0 < end - begin <= chunk for _, begin, end, _ in parts)
        if len(parts) == 1:
            assert parts[0][3] == -1
        else:
            assert [p[3] for p in parts] == list(range(slots, slots + len(parts)))
            assert merges.pop(0) == [row, slots, slots + len(parts), 0]
            slots += len(parts)
    assert not long_rows and not merges


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
        ({"width": 3, "policy": "magic"}, r"policy must be one of auto, csr"),
        ({"width": 3, "kernel": "magic"}, r"unknown kernel 'magic'"),
        ({"width": 3, "schedule": [0, 1]}, r"schedule must be None"),
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
    assert {k["name"] for k in listed} == {"csr_cpu", "csr_dual"}
    for k in listed:
        assert set(k) >= {"name", "device", "summary", "available", "reasons"}
        assert k["available"] == (not k["reasons"]) and isinstance(k["reasons"], list)
    assert next(k for k in listed if k["device"] == "cpu")["available"]
    assert next(k for k in listed if k["device"] == "cuda")["available"] or not torch.cuda.is_available()


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
