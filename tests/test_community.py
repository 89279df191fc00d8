"""Communities of communities: valid, reproducible, bounded orders; what judges orders; when a plan follows one."""

from __future__ import annotations

import importlib
import sys
from collections import OrderedDict
from typing import Any

import pytest
import torch
from checks import close, expect_spmm
from hypothesis import given, settings
from strategies import NAMED, edges, values
from torch import Tensor

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import community, reuse, schedule
from gnn_spmm_plugin.community import FIRST_SIZE, GROWTH, community_levels, community_order
from gnn_spmm_plugin.csr import Csr
from gnn_spmm_plugin.plan import COMMUNITY_AFTER, WARM_AFTER
from gnn_spmm_plugin.reuse import LARGE, can_pay, miss_share, pays, sweep_cost
from gnn_spmm_plugin.schedule import by_degree, layout_of, move_edges

plans: Any = sys.modules["gnn_spmm_plugin.plan"]  # the package has a function of this name


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GSP_KERNEL", "GSP_MODE", "GSP_LOG"):
        monkeypatch.delenv(name, raising=False)


def both_ways(src: Tensor, dst: Tensor, n: int, device: str = "cpu", shuffle: bool = False) -> tuple[gsp.Graph, Tensor]:
    """The graph, and where its nodes went: node i of what was given is node ``[i]`` now."""
    place = torch.randperm(n, generator=torch.Generator().manual_seed(5)) if shuffle else torch.arange(n)
    src, dst = place[src], place[dst]
    edge_index = torch.stack([torch.cat([src, dst]), torch.cat([dst, src])]).to(device)
    return gsp.Graph.from_edge_index(edge_index, n), place.to(device)


def planted(device: str = "cpu", n: int = 20_000, size: int = 250, degree: int = 8) -> tuple[gsp.Graph, Tensor]:
    """Communities of `size`, four of five edges inside, under random numbers; and the order of communities."""
    random = torch.Generator().manual_seed(1)
    src = torch.randint(n, (n * degree,), generator=random)
    inside = src // size * size + torch.randint(size, src.shape, generator=random)
    anywhere = torch.randint(n, src.shape, generator=random)
    dst = torch.where(torch.rand(src.shape, generator=random) < 0.8, inside, anywhere)
    return both_ways(src, dst, n, device, shuffle=True)


def grid(side: int, keep: float, diagonals: bool) -> tuple[Tensor, Tensor]:
    ids = torch.arange(side * side).view(side, side)
    pairs = [(ids[:, :-1], ids[:, 1:]), (ids[:-1], ids[1:])]
    if diagonals:
        pairs += [(ids[:-1, :-1], ids[1:, 1:]), (ids[:-1, 1:], ids[1:, :-1])]
    src, dst = (torch.cat([p[i].flatten() for p in pairs]) for i in (0, 1))
    kept = torch.rand(src.shape, generator=torch.Generator().manual_seed(2)) < keep
    return src[kept], dst[kept]


def nearest(n: int = 4000, k: int = 10) -> tuple[Tensor, Tensor]:
    """The nearest of points in a square, which are numbered strip by strip."""
    points = torch.rand(n, 2, generator=torch.Generator().manual_seed(3))
    points = points[((points[:, 0] * 30).floor() + points[:, 1] * 0.99).argsort()]
    near = torch.cdist(points, points).topk(k + 1, largest=False).indices[:, 1:]
    return near.flatten(), torch.arange(n).repeat_interleave(k)


def simulate(csr: Csr, cached: int, order: Tensor | None = None) -> float:
    """Share of the gathers that miss a cache of that many rows, which forgets what was used longest ago."""
    held: OrderedDict[int, None] = OrderedDict()
    columns = (csr if order is None else move_edges(csr, order)).col.tolist()
    missed = 0
    for column in columns:
        if column in held:
            held.move_to_end(column)
            continue
        missed += 1
        held[column] = None
        if len(held) > cached:
            held.popitem(last=False)
    return missed / len(columns)


def is_order(order: Tensor, n: int) -> bool:
    return order.dtype == torch.int64 and torch.equal(order.sort().values, torch.arange(n, device=order.device))


# ---------------------------------------------------------------------- the order


@settings(max_examples=60)
@given(e=edges())
def test_any_square_graph_has_one(device, e) -> None:  # type: ignore[no-untyped-def]
    csr = e.graph(device)._csr
    if e.num_src != e.num_dst:
        with pytest.raises(
            ValueError, match=r"the schedule community needs a graph whose sources and destinations are"
        ):
            community_order(csr)
        return
    order = community_order(csr)
    assert is_order(order, e.num_dst) and str(order.device.type) == device
    wide = Csr(csr.rowptr.long(), csr.col.long(), csr.perm, csr.num_cols)
    assert torch.equal(community_order(wide), order)


@pytest.mark.parametrize("name", [name for name, e in NAMED.items() if e.num_src == e.num_dst])
def test_special_graphs_have_one(device: str, name: str) -> None:
    e = NAMED[name]
    g = e.graph(device)
    assert is_order(community_order(g._csr), e.num_dst) and is_order(community_order(g.T._csr), e.num_dst)
    order = g.reorder("community")[1]
    assert torch.equal(order, community_order(g._csr))


def test_components_stay_together(device: str) -> None:
    """Cliques without a link between them, and nodes without any."""
    clique = torch.arange(12).unsqueeze(1) * 20
    pairs = torch.combinations(torch.arange(20))
    src, dst = (clique + pairs[:, 0]).flatten(), (clique + pairs[:, 1]).flatten()
    g, place = both_ways(src, dst, 300, device, shuffle=True)  # 60 nodes are alone
    was = torch.empty_like(place)
    was[place] = torch.arange(300, device=place.device)
    of = was[community_order(g._csr)] // 20
    changes = (of[1:] != of[:-1]) & ((of[1:] < 12) | (of[:-1] < 12))
    assert int(changes.sum()) <= 24


def test_the_same_in_every_run(device: str) -> None:
    threads = torch.get_num_threads()
    first = community_order(planted(device, 5000)[0]._csr)
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.equal(community_order(planted(device, 5000)[0]._csr), first)
        torch.use_deterministic_algorithms(True)
        assert torch.equal(community_order(planted(device, 5000)[0]._csr), first)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)


def test_chunks_change_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    csr = planted(device, 2000)[0]._csr
    order = community_order(csr)
    monkeypatch.setattr(community, "_AT_ONCE", 1)
    assert torch.equal(community_order(csr), order)


def test_planted_communities_are_found(device: str) -> None:
    g, place = planted(device)
    csr, order = g._csr, community_order(g._csr)
    for cached in (600, 1250, 4000):
        wanted = miss_share(csr, cached, place)
        assert miss_share(csr, cached) > 1.5 * wanted
        assert miss_share(csr, cached, order) <= 1.05 * wanted


@pytest.mark.parametrize("name", ["mesh", "road", "nearest"])
def test_locality_comes_back(device: str, name: str) -> None:
    """Under random numbers, at least 90% of what an order by place brings."""
    src, dst = {"mesh": lambda: grid(90, 1.0, True), "road": lambda: grid(120, 0.7, False), "nearest": nearest}[name]()
    n = int(torch.maximum(src, dst).max()) + 1
    g, place = both_ways(src, dst, n, device, shuffle=True)
    order = community_order(g._csr)
    for cached in (n // 30, n // 10):
        shuffled, by_place, found = (miss_share(g._csr, cached, o) for o in (None, place, order))
        assert shuffled - found >= 0.9 * (shuffled - by_place)


def test_communities_are_bounded(device: str) -> None:
    """Where labels alone would flood everything, too."""
    n = 3 * FIRST_SIZE
    random = torch.Generator().manual_seed(4)
    src = (torch.rand(20 * n, generator=random) ** 3 * n).long()  # hubs
    g, _ = both_ways(src, torch.randint(n, (20 * n,), generator=random), n, device)
    levels = community_levels(g._csr)
    of = torch.arange(n, device=g.device)
    for depth, label in enumerate(levels):
        of = label[of]
        sizes = torch.bincount(of)
        assert int(sizes.min()) >= 1 and int(sizes.max()) <= FIRST_SIZE * GROWTH**depth
    assert len(torch.bincount(community_levels(g._csr)[0])) < n // 20  # and not left apart


def test_a_bound_is_met_in_one_round(device: str) -> None:
    """All want the label of the hub at once; as many get it as fit."""
    n = 1001
    near = torch.zeros(1, n, dtype=torch.int32, device=device)
    size = torch.ones(n, dtype=torch.int64, device=device)
    label = community._settle(near, None, size, 100, 1, 1)
    counts = torch.bincount(label.long(), minlength=n)
    assert int(counts[0]) == 100 and int(counts.max()) == 100


def test_sampled_neighbours(device: str) -> None:
    """Of short rows all, of long ones one of each part."""
    g, _ = both_ways(torch.zeros(400, dtype=torch.int64), torch.arange(1, 401), 20_000, device)
    extra = torch.arange(1000, 19_000, device=device)
    g = gsp.Graph.from_edge_index(torch.cat([g.edge_index(), torch.stack([extra, extra + 7])], 1), 20_000)
    near = community._some_neighbours(g._csr)
    assert near.dtype == torch.int32 and near.shape[1] == 20_000
    hub = near[:, 0].sort().values.tolist()
    part = 400 / near.shape[0]
    assert all(i * part < column <= (i + 1) * part + 1 for i, column in enumerate(hub))
    assert near[:, 5].tolist() == [0] + [5] * (near.shape[0] - 1)


# ---------------------------------------------------------------------- the judge


def test_the_judge_agrees_with_a_cache(device: str) -> None:
    """With an exact simulation, over graphs, orders and sizes of the cache."""
    graphs = [planted(device, 5000)]
    for src, dst in (grid(50, 1.0, True), grid(80, 0.7, False), nearest(3000)):
        n = int(torch.maximum(src, dst).max()) + 1
        graphs += [both_ways(src, dst, n, device, shuffle) for shuffle in (False, True)]
    errors = []
    for g, place in graphs:
        csr = g._csr
        for order in (None, place, by_degree(csr), community_order(csr)):
            for cached in (csr.num_rows // 40, csr.num_rows // 8):
                errors.append(abs(miss_share(csr, cached, order) - simulate(csr, cached, order)))
    assert sum(errors) / len(errors) < 0.02 and max(errors) < 0.1


def test_the_judge_at_its_ends(device: str) -> None:
    empty = NAMED["no_edges"].graph(device)._csr
    assert miss_share(empty, 10) == 0
    ring = torch.arange(1000)
    csr = both_ways(ring, (ring + 1) % 1000, 1000, device)[0]._csr
    assert miss_share(csr, 1) == pytest.approx(1.0, abs=0.05)  # two columns in turn
    assert miss_share(csr, 50) == pytest.approx(0.5, abs=0.05)  # each of two gathers is new
    assert miss_share(csr, 50, torch.arange(1000, device=device)) == miss_share(csr, 50)
    dense = gsp.Graph.from_edge_index(torch.randint(50, (2, 10_000), device=device), 50)._csr
    assert miss_share(dense, 100) == 0  # all fits


def sizes(rows: int, edges: int, cols: int | None = None) -> Csr:
    return Csr(torch.empty(rows + 1, device="meta"), torch.empty(edges, device="meta"), None, cols or rows)


def test_what_can_pay() -> None:
    """Both sides of each bound."""
    assert can_pay(sizes(LARGE * 1000, 30_000), 1000)
    assert not can_pay(sizes(LARGE * 1000 - 1, 30_000), 1000)  # features nearly fit
    assert not can_pay(sizes(3000, 30_000, 3001), 1000) and not can_pay(sizes(3000, 0), 1000)
    assert not can_pay(sizes(3000, 30_000), 0)  # no cache
    assert can_pay(sizes(10_000, 15_000), 1000)  # 2.5 rows through memory, of which a perfect order would leave 2
    assert not can_pay(sizes(10_000, 14_900), 1000)
    few = sizes(10_000, 100_000)  # the cache takes half of 10 gathers; at best 0.8 of what takes 6.25
    assert can_pay(few, 1000, 0.526) and not can_pay(few, 1000, 0.524)


def test_what_pays() -> None:
    csr = sizes(10_000, 40_000)
    assert sweep_cost(csr, 1.0) == 50_000 and sweep_cost(csr, 0.5) == 30_000 and sweep_cost(csr, 0.1) == 20_000
    assert pays(csr, 1.0, 0.874) and not pays(csr, 1.0, 0.876)
    assert not pays(csr, 0.3, 0.3)


def test_no_cache_on_the_cpu() -> None:
    assert reuse.cached_rows(torch.device("cpu")) == 0


@pytest.mark.gpu
def test_cache_of_a_gpu() -> None:
    size = torch.cuda.get_device_properties(0).L2_cache_size
    assert reuse.cached_rows(torch.device("cuda", 0)) == size // 1024


# ---------------------------------------------------------------------- plans


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if features of 1250 rows filled the cache, on any device."""
    monkeypatch.setattr(plans, "cached_rows", lambda device: 1250)


def use(g: gsp.Graph, times: int = 1) -> Tensor:
    x = values((g.num_src, 5), torch.float32, 1, device=str(g.device))
    for _ in range(times):
        out = gsp.spmm(g, x)
    assert isinstance(out, Tensor)
    return out


def name_on(device: str) -> str:
    return "community" if device == "cuda" else "natural"  # the CPU sweeps rows as they are


def test_an_explicit_plan_follows_what_pays(device: str, small_cache: None) -> None:
    g, _ = planted(device)
    before = gsp.stats()["communities_found"]
    for width in (16, 64):
        plan = gsp.plan(g, width)
        text = plan.explain()
        assert plan.schedule == name_on(device) and "of this order" not in text
        assert "community Rows of 512 bytes, 1,250 of which fit half the L2: estimated from memory" in text
        assert "times as fast" in text
    assert gsp.stats()["communities_found"] - before == 1  # found once for all widths
    x = values((g.num_src, 16), torch.float32, 1, device=device)
    wanted = expect_spmm(g, x, None, torch.zeros(g.num_dst, 16, device=device), "sum")
    close(gsp.spmm(g, x, plan=gsp.plan(g, 16)), wanted.out)
    natural = gsp.plan(g, 16, schedule="natural")
    assert natural.schedule == "natural" and "L2" not in natural.explain()
    assert "L2" not in gsp.plan(g, 16, policy="csr").explain() and "L2" not in gsp.plan(g, 16, mode="cold").explain()


def test_without_a_cache_nothing_is_looked_for() -> None:
    g, _ = planted()
    before = gsp.stats()["communities_found"]
    assert "L2" not in gsp.plan(g, 16).explain() and g._csr.plans["pays"] == (None, ())
    use(g, COMMUNITY_AFTER + 1)
    assert g._csr.plan.settled and gsp.stats()["communities_found"] == before


def test_a_bad_order_is_not_kept(device: str, small_cache: None) -> None:
    """No order helps a random graph; the estimate says so, and nothing remains of the try."""
    g, _ = both_ways(*torch.randint(20_000, (2, 200_000), generator=torch.Generator().manual_seed(1)), 20_000, device)
    plan = gsp.plan(g, 64)
    assert plan.schedule == "natural" and "community not kept" in plan.explain() and "community" not in g._csr.plans
    asked = gsp.plan(g, 64, schedule="community")  # who asks gets it
    assert asked.schedule == name_on(device) and gsp.plan(g, 64) is plan
    assert ("community" in g._csr.plans) == (device == "cuda")  # where it is not followed, it is not looked for


def test_a_good_natural_order_is_left_alone(device: str, small_cache: None) -> None:
    src, dst = grid(150, 1.0, True)
    g, _ = both_ways(src, dst, 150 * 150, device)
    before = gsp.stats()["communities_found"]
    plan = gsp.plan(g, 64)
    assert plan.schedule == "natural" and "no order could be much better" in plan.explain()
    assert gsp.stats()["communities_found"] == before


def test_no_memory_for_communities(
    device: str, small_cache: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(csr: Csr) -> Tensor:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(schedule, "community_order", fail)
    g, _ = planted(device)
    with caplog.at_level("WARNING", logger="gnn_spmm_plugin"):
        plan = gsp.plan(g, 64)
        use(g, COMMUNITY_AFTER + 2)
    assert plan.schedule == "natural" and "out of memory" in plan.explain() and g._csr.plan.settled
    assert len([r for r in caplog.records if "communities" in r.message]) == 1  # and not again


def test_the_second_upgrade_comes_at_the_same_use(
    device: str, small_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a list of rows, though they are even: what is replaced has arrays
    monkeypatch.setattr(importlib.import_module("gnn_spmm_plugin.plan"), "layout_by_rule", lambda f: (layout_of(f), ""))
    for _ in range(2):
        g, _ = planted(device)
        csr, before = g._csr, gsp.stats()
        first = use(g, WARM_AFTER - 1)
        assert csr.plan.mode == "cold" and not csr.plan.settled
        use(g, COMMUNITY_AFTER - WARM_AFTER)
        warm = csr.plan
        assert warm.mode == "warm" and not warm.settled and csr.uses == COMMUNITY_AFTER - 1
        assert gsp.stats()["communities_found"] == before["communities_found"]
        last = use(g)
        plan = csr.plan
        assert plan is not warm and plan.settled and plan.schedule == name_on(device) and "fit half the L2" in str(plan)
        assert gsp.stats()["communities_found"] - before["communities_found"] == 1
        assert gsp.stats()["plans_built"] - before["plans_built"] == 3  # cold, warm, and with a schedule
        if device == "cuda":
            assert warm.items is not None and any(t is warm.items for t in csr._weights.pinned)
        use(g, 3)
        assert csr.plan is plan and csr.uses == COMMUNITY_AFTER  # nobody counts any more
        torch.testing.assert_close(first, last)


def test_a_graph_of_good_order_is_looked_at_once(device: str, small_cache: None) -> None:
    src, dst = grid(150, 1.0, True)
    g, _ = both_ways(src, dst, 150 * 150, device)
    use(g, COMMUNITY_AFTER)
    assert g._csr.plan.settled and g._csr.plan.schedule == "natural" and "no order could be" in str(g._csr.plan)


@pytest.mark.parametrize("pin", ["GSP_MODE=warm", "GSP_MODE=cold", "flag at first", "flag later"])
def test_pins_hold(device: str, small_cache: None, monkeypatch: pytest.MonkeyPatch, pin: str) -> None:
    """A mode of choice, and torch's flag, keep what there is; the flag for as long as it is set."""
    if pin.startswith("GSP_MODE"):
        monkeypatch.setenv(*pin.split("="))
    g, _ = planted(device)
    before = gsp.stats()["communities_found"]
    try:
        torch.use_deterministic_algorithms(pin == "flag at first")
        use(g, WARM_AFTER)
        torch.use_deterministic_algorithms(pin.startswith("flag"))
        kept = g._csr.plan
        use(g, COMMUNITY_AFTER)
        assert g._csr.plan is kept and gsp.stats()["communities_found"] == before
    finally:
        torch.use_deterministic_algorithms(False)
    use(g)
    assert (g._csr.plan is not kept) == (pin == "flag later")


def test_every_operator_before_and_after(device: str, small_cache: None) -> None:
    """Plans of a graph's own may follow a schedule: results, winners and gradients stay what they are."""
    g, _ = planted(device, 4000, 200, 3)
    weight = values((g.num_edges,), torch.float32, 2, device=device).requires_grad_()
    x = values((g.num_src, 8), torch.float32, 1, few=True, device=device).requires_grad_()
    grad = values((g.num_dst, 8), torch.float32, 3, device=device)

    def everything() -> list[Tensor]:
        found = []
        for reduce in ("sum", "mean", "max", "min"):
            for w in (None, weight, weight.detach()):
                for tie in ("first", "split"):
                    out = gsp.spmm(g, x, w, reduce, tie=tie)
                    assert isinstance(out, Tensor)
                    leaves = [t for t in (x, w) if t is not None and t.requires_grad]
                    found += [out.detach(), *torch.autograd.grad(out, leaves, grad)]
            with torch.no_grad():
                found.append(gsp.spmm(g, x, None, reduce))  # type: ignore[arg-type]
        return found

    first = everything()
    while not (g._csr.plan.settled and g._csr_t.plan.settled):
        last = everything()
    assert g._csr.plan.schedule == g._csr_t.plan.schedule == name_on(device)
    assert (g._csr.plan.moved is not None) == (device == "cuda")
    for a, b in zip(first, everything(), strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(last, everything(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
def test_a_captured_product_survives_the_second_upgrade(small_cache: None) -> None:
    """What the replaced plan held is read by replays, and no upgrade happens while capturing."""
    g, _ = planted("cuda")
    x = values((g.num_src, 32), torch.float32, 1, device="cuda")
    for _ in range(COMMUNITY_AFTER - 1):
        expected = gsp.spmm(g, x)
    assert isinstance(expected, Tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gsp.spmm(g, x)
    assert g._csr.plan.schedule == "natural" and not g._csr.plan.settled
    gsp.spmm(g, x)
    assert g._csr.plan.schedule == "community"
    fill = [torch.full((1 << 20,), -1, dtype=torch.int32, device="cuda") for _ in range(64)]  # what was freed
    x.mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, 2 * expected)
    del fill


def test_compiled_code_gets_it_at_once(device: str, small_cache: None) -> None:
    g, _ = planted(device)
    g.T._csr  # noqa: B018
    plans_of = [g._csr, g.T._csr]
    from gnn_spmm_plugin.derivatives import _prepare

    assert _prepare(g._core)
    assert all(csr.plan.settled and csr.plan.schedule == name_on(device) for csr in plans_of)
