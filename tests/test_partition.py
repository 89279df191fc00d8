"""The dual metric: densities that are known, the formula, reproducible walks, and the schedule that it makes."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
import torch
from checks import close, expect_spmm
from hypothesis import given, settings
from strategies import NAMED, edges, values

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import partition
from gnn_spmm_plugin.partition import dual_metric, neighbour_density
from gnn_spmm_plugin.schedule import by_rcm


def graph(pairs: list[tuple[int, int]], n: int, device: str = "cpu") -> gsp.Graph:
    """Edges source -> destination."""
    return gsp.Graph.from_edge_index(torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t().to(device), n)


def test_densities_that_are_known(device: str) -> None:
    ring = graph([((i + 1) % 40, i) for i in range(40)], 40, device)  # from row i to row i + 1, and so on
    assert neighbour_density(ring._csr).tolist() == [31.0] * 40
    assert neighbour_density(ring._csr, length=100).tolist() == [40.0] * 40
    pair = graph([(0, 1), (1, 0)], 2, device)
    assert neighbour_density(pair._csr).tolist() == [2.0, 2.0]
    alone = graph([(1, 1)], 3, device)  # a loop, and rows without edges
    assert neighbour_density(alone._csr).tolist() == [1.0] * 3
    assert neighbour_density(graph([], 3, device)._csr).tolist() == [1.0] * 3
    assert neighbour_density(ring._csr, length=0).tolist() == [1.0] * 40
    end = graph([(1, 0), (2, 1)], 3, device)  # 0 -> 1 -> 2, where it stays
    assert neighbour_density(end._csr).tolist() == [3.0, 2.0, 1.0]


def test_density_is_the_mean_over_walks(device: str) -> None:
    """Against walks one by one, in plain Python, of a graph in which rows differ."""
    n, dice = 30, random.Random(0)
    pairs = [(dice.randrange(n), dice.randrange(1 + i % n)) for i in range(120)]
    g = graph(pairs, n, device)
    columns = [[s for s, d in pairs if d == row] for row in range(n)]
    expected = []
    for row in range(n):
        total = 0
        for _ in range(3000):
            at, met = row, {row}
            for _ in range(8):
                at = dice.choice(columns[at]) if columns[at] else at
                met.add(at)
            total += len(met)
        expected.append(total / 3000)
    got = neighbour_density(g._csr, walks=3000, length=8).cpu()
    assert torch.allclose(got, torch.tensor(expected), atol=0.2)
    assert got.max() - got.min() > 1


def test_walks_are_reproducible_and_in_parts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    g = NAMED["hub"].graph(device)
    csr = (g if g.num_src == g.num_dst else graph([(i, i // 2) for i in range(50)], 50, device))._csr
    first = neighbour_density(csr)
    assert torch.equal(first, neighbour_density(csr, seed=0))
    assert csr.col.shape[0] == 0 or not torch.equal(first, neighbour_density(csr, seed=1))
    monkeypatch.setattr(partition, "_AT_ONCE", 7)
    assert torch.allclose(first, neighbour_density(csr), atol=4)  # other walks of the same kind


@settings(max_examples=30)
@given(e=edges(max_edges=200))
def test_bounds(device, e: Any) -> None:  # type: ignore[no-untyped-def]
    g = e.graph(device)
    if g.num_src != g.num_dst:
        with pytest.raises(ValueError, match=r"a walk needs a graph whose sources and destinations are the same nodes"):
            neighbour_density(g._csr)
        return
    density = neighbour_density(g._csr, walks=3, length=5)
    assert density.shape == (g.num_dst,) and density.dtype == torch.float32
    assert ((density >= 1) & (density <= min(6, max(g.num_dst, 1)))).all()


def test_the_formula() -> None:
    g = graph([(i, i // 4) for i in range(64)] + [(0, i) for i in range(64)], 64)
    density, degree = neighbour_density(g._csr).double(), g._csr.degree().double()
    of_degree, of_density = degree.var(correction=0), density.var(correction=0)
    for alpha in (None, 0.0, 0.3, 1.0):
        found = dual_metric(g._csr, alpha)
        share = float(of_degree / (of_degree + of_density)) if alpha is None else alpha
        hybrid = share * (density - density.mean()) / of_density.sqrt()
        hybrid += (1 - share) * (degree - degree.mean()) / of_degree.sqrt()
        assert found.alpha == pytest.approx(share)
        assert torch.allclose(found.hybrid.double(), hybrid, atol=1e-5)
        assert found.threshold == pytest.approx(float(hybrid.mean() + 0.5 * hybrid.std(correction=0)), abs=1e-6)
    flat = dual_metric(graph([((i + 1) % 40, i) for i in range(40)], 40)._csr)
    assert flat.alpha == 0.5 and flat.hybrid.abs().max() == 0
    for bad in (-0.1, 1.1):
        with pytest.raises(ValueError, match=r"alpha must be in \[0, 1\]"):
            dual_metric(g._csr, bad)
    with pytest.raises(ValueError, match="expected at least 1 walk"):
        dual_metric(g._csr, walks=0)


def test_it_is_a_schedule_and_a_policy(device: str) -> None:
    g = graph([(i % 60, i * i % 60) for i in range(900)], 60, device)
    x = values((60, 24), torch.float32, 1, device=device)
    expected = expect_spmm(g, x, None, torch.zeros_like(x), "sum")
    close(gsp.spmm(g, x, policy="dualgcn"), expected.out)
    for plan in (gsp.plan(g, 24, policy="dualgcn"), gsp.plan(g, 24, schedule="dual_metric")):
        close(gsp.spmm(g, x, plan=plan), expected.out)
        assert plan.schedule == ("dual_metric" if device == "cuda" else "natural")
    assert "rows by falling density and degree" in gsp.plan(g, 24, policy="dualgcn").explain()
    assert gsp.plan(g, 24, policy="dualgcn") is gsp.plan(g, 24, policy="dualgcn")
    if device == "cuda":
        hybrid = dual_metric(g._csr).hybrid
        items = gsp.plan(g, 24, schedule="dual_metric").items
        assert items is not None and sorted(set(items[:, 0].tolist())) == list(range(60))
        assert torch.equal(g._csr.plans["dual_metric"], hybrid.argsort(descending=True, stable=True))
    else:
        assert "dual_metric" not in g._csr.plans, "no one walks for what no one reads"
    wide = gsp.Graph.from_edge_index(torch.tensor([[0, 1, 2], [0, 1, 1]], device=device), (3, 2))
    y = values((3, 24), torch.float32, 1, device=device)
    gsp.spmm(wide, y, policy="dualgcn")
    assert "rows as they are" in gsp.plan(wide, 24, policy="dualgcn").explain()
    if device == "cuda":
        with pytest.raises(ValueError, match="the same nodes, got 3 sources and 2 destinations"):
            gsp.plan(wide, 24, schedule="dual_metric")


def test_rcm(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds the band of a shuffled path again; what it cannot do it says."""
    pytest.importorskip("scipy")
    n = 200
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    path = torch.stack([order[:-1], order[1:]]).to(device)
    g = gsp.Graph.from_edge_index(torch.cat([path, path.flip(0)], 1), n)
    found = by_rcm(g._csr)
    assert found.device.type == device and sorted(found.tolist()) == list(range(n))
    banded, _, _ = g.reorder("rcm")
    source, target = banded.edge_index()
    assert (source - target).abs().max() == 1
    assert by_rcm(graph([], 3, device)._csr).tolist() == [0, 1, 2]
    wide = gsp.Graph.from_edge_index(torch.tensor([[0, 1, 2], [0, 1, 1]], device=device), (3, 2))
    with pytest.raises(ValueError, match="the schedule rcm needs a graph whose sources and destinations are the same"):
        by_rcm(wide._csr)
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with pytest.raises(ImportError, match="schedule 'rcm' needs scipy; pip install scipy"):
        by_rcm(g._csr)


@pytest.mark.parametrize("schedule", ["natural", "degree", "dual_metric", "given"])
def test_reorder(device: str, schedule: str) -> None:
    """The same products in another order, forward and transposed, with weights."""
    n = 50
    g = graph([(i % n, (i * i + 3) % n) for i in range(400)], n, device)
    weight = values((400,), torch.float32, 3, device=device)
    g = g.with_weight(weight)
    given = torch.randperm(n, generator=torch.Generator().manual_seed(1)).to(device)
    moved, order, inverse = g.reorder(given if schedule == "given" else schedule)
    assert torch.equal(order[inverse], torch.arange(n, device=device)) and order.dtype == torch.int64
    assert schedule != "given" or torch.equal(order, given)
    x = values((n, 7), torch.float32, 1, device=device)
    for old, new in ((g, moved), (g.T, moved.T)):
        assert torch.allclose(gsp.spmm(new, x[order])[inverse], gsp.spmm(old, x), atol=1e-5)
    assert torch.equal(moved.edge_index(), inverse[g.edge_index()])
    wide = gsp.Graph.from_edge_index(torch.tensor([[0, 1, 2], [0, 1, 1]], device=device), (3, 2))
    with pytest.raises(ValueError, match="reorder needs a graph whose sources and destinations are the same nodes"):
        wide.reorder("degree")
    with pytest.raises(ValueError, match="schedule must be one of"):
        g.reorder("best")
