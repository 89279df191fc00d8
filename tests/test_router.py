"""`route` against every pick that RA-SpMM published, each rule on both sides of each threshold; the policy `ra`."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import close, expect_spmm
from strategies import NAMED, REDUCES, values
from test_tiles import close as close_to_tiles

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.router import AUTO_RULES, RA_RULES, TILES, auto_rule, ra_route

PICKS = Path(__file__).parent / "data" / "ra_picks.csv"


def test_all_published_picks() -> None:
    lines = [line for line in PICKS.read_text().splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    assert len(rows) == 192
    for row in rows:
        got = gsp.route(
            num_rows=int(row["M"]),
            mean_degree=float(row["mean_degree"]),
            degree_cv=float(row["cv"]),
            width=int(row["width"]),
            policy="ra",
        )
        assert got == (row["family"], row["precision"]), row
    assert {row["family"] for row in rows} == {r.family for r in RA_RULES}


#: rows, mean degree, cv, width; the pick, and the line of the table that makes it.
BOTH_SIDES = (
    ((1000, 10, 5.0, 64), "ZERO_OVERHEAD_CSR", "fp32", 0),
    ((1000, 10, 4.99, 64), "SEGMENT_HYBRID", "fp16", 7),
    ((1000, 4.49, 0.69, 256), "CSR_DIRECT", "fp32", 1),
    ((1000, 4.49, 0.69, 257), "TC_DIRECT", "tf32", 2),
    ((1000, 4.5, 0.19, 257), "TC_DIRECT", "tf32", 5),
    ((1000, 4.5, 0.2, 128), "CSR_DIRECT", "fp32", 3),
    ((1000, 4.5, 0.2, 129), "TC_DIRECT", "tf32", 4),
    ((10**6, 6.99, 0.2, 129), "TC_DIRECT", "tf32", 4),
    ((10**6, 7.0, 0.2, 129), "TC_DIRECT", "fp16", 5),
    ((1000, 4.49, 0.7, 64), "TC_DIRECT", "tf32", 14),
    ((249_999, 30, 3.0, 64), "SEGMENT_HYBRID", "fp16", 7),
    ((250_000, 30, 3.0, 64), "COMMUNITY_TC", "fp16", 6),
    ((250_000, 30, 2.99, 64), "COMMUNITY_TC", "fp16", 12),
    ((250_000, 39.9, 1.0, 64), "TC_DIRECT", "fp16", 14),
    ((250_000, 40, 1.0, 64), "COMMUNITY_TC", "fp16", 8),
    ((19_999, 25, 1.0, 95), "CUSPARSE", "fp32", 9),
    ((19_999, 25, 1.0, 96), "SEGMENT_HYBRID", "fp16", 10),
    ((19_999, 25, 1.0, 255), "SEGMENT_HYBRID", "fp16", 10),
    ((19_999, 25, 1.0, 256), "COMMUNITY_TC", "fp16", 11),
    ((20_000, 25, 1.0, 95), "TC_DIRECT", "fp16", 14),
    ((19_999, 24.9, 1.0, 95), "TC_DIRECT", "fp16", 14),
    ((250_000, 25, 1.8, 64), "COMMUNITY_TC", "fp16", 12),
    ((250_000, 25, 1.79, 64), "TC_DIRECT", "fp16", 14),
    ((250_000, 24.9, 1.8, 64), "TC_DIRECT", "fp16", 14),
    ((250_000, 8.99, 1.1, 64), "COMMUNITY_TC", "tf32", 13),
    ((250_000, 8.99, 1.45, 64), "COMMUNITY_TC", "tf32", 13),
    ((250_000, 8.99, 1.451, 64), "TC_DIRECT", "fp16", 14),
    ((250_000, 8.99, 1.09, 64), "TC_DIRECT", "fp16", 14),
    ((250_000, 9, 1.1, 64), "TC_DIRECT", "fp16", 14),
    ((249_999, 8.99, 1.1, 64), "TC_DIRECT", "fp16", 14),
    # the precision of tiles
    ((25_000, 8.99, 1.0, 64), "TC_DIRECT", "tf32", 14),
    ((25_001, 8.99, 1.0, 64), "TC_DIRECT", "fp16", 14),
    ((25_000, 9, 1.0, 64), "TC_DIRECT", "fp16", 14),
    ((25_001, 4.99, 1.0, 64), "TC_DIRECT", "tf32", 14),
    # no tiles for narrow features, and for very many edges
    ((250_000, 40, 1.49, 15), "CSR_DIRECT", "fp32", 8),
    ((250_000, 40, 1.5, 15), "ZERO_OVERHEAD_CSR", "fp32", 8),
    ((250_000, 40, 1.49, 16), "COMMUNITY_TC", "fp16", 8),
    ((10**7, 100, 1.0, 64), "COMMUNITY_TC", "fp16", 8),
    ((10**7, 100.01, 1.0, 64), "CSR_DIRECT", "fp32", 8),
    # nothing at all
    ((0, 0, 0, 0), "CSR_DIRECT", "fp32", 1),
)


@pytest.mark.parametrize(("given", "family", "precision", "line"), BOTH_SIDES, ids=str)
def test_both_sides_of_each_threshold(
    given: tuple[int, float, float, int], family: str, precision: str, line: int
) -> None:
    found = ra_route(*given)
    assert (found.family, found.precision) == (family, precision)
    assert found.reason.startswith(RA_RULES[line].name + ":")
    first = next(i for i, r in enumerate(RA_RULES) if _holds(r, given))
    assert first == line


def _holds(rule: Any, given: tuple[int, float, float, int]) -> bool:
    rows, degree, cv, width = given
    pairs = ((rule.rows, rows), (rule.degree, degree), (rule.cv, cv), (rule.width, width))
    return all(low <= value < high for (low, high), value in pairs)


def test_every_line_decides_somewhere() -> None:
    assert {line for *_, line in BOTH_SIDES} == set(range(len(RA_RULES)))


#: columns, edges, mean degree, cv, longest row; the line of our own table that decides.
OURS = (
    ((10**6, 3 * 10**6, 3, 0.3, 16), 0),
    ((10**6, 10**7, 10, 0.36, 17), 5),
    ((12_000, 10**6, 64, 0.1, 200), 1),
    ((12_001, 10**6, 64, 0.1, 200), 2),
    ((12_000, 10**6, 63.9, 0.1, 200), 2),
    ((10**6, 10**7, 10, 0.35, 256), 2),
    ((10**6, 10**7, 10, 0.3501, 256), 5),
    ((10**6, 10**7, 10, 0.35, 257), 5),
    ((50_000, 99_999, 2, 1.0, 100), 3),
    ((50_000, 100_000, 2, 1.0, 100), 5),
    ((50_000, 99_999, 2, 1.0, 101), 5),
    ((5000, 11_999, 2.4, 1.0, 256), 4),
    ((5000, 12_000, 2.4, 1.0, 256), 5),
    ((5000, 11_999, 2.4, 1.0, 257), 5),
    ((0, 0, 0, 0, 0), 0),
)


@pytest.mark.parametrize(("given", "line"), OURS, ids=str)
def test_both_sides_of_our_own_thresholds(given: tuple[int, int, float, float, int], line: int) -> None:
    assert auto_rule(*given) is AUTO_RULES[line]


def test_every_line_of_ours_decides_somewhere_and_says_what_it_asks_for() -> None:
    assert {line for _, line in OURS} == set(range(len(AUTO_RULES)))
    assert AUTO_RULES[0].says() == "longest row < 17" and AUTO_RULES[-1].says() == "nothing else"
    assert AUTO_RULES[1].says() == "mean degree >= 64 and columns < 12001"


def test_route_by_our_own_rules() -> None:
    """From descriptors alone the longest row is taken for four deviations above the mean."""
    for rows, degree, cv, family in (
        (10**6, 3.0, 1.0, "CSR_DIRECT"),  # 15
        (10**6, 3.5, 1.0, "CSR_ITEMS"),  # 17.5
        (10**6, 100.0, 0.35, "CSR_DIRECT"),
        (10**6, 100.0, 0.4, "CSR_ITEMS"),
        (10_000, 100.0, 0.1, "CSR_ITEMS"),  # small and dense
    ):
        for policy in ({}, {"policy": "auto"}):
            assert gsp.route(num_rows=rows, mean_degree=degree, degree_cv=cv, width=64, **policy) == (family, "fp32")


def test_bad_descriptors() -> None:
    good: dict[str, Any] = {"num_rows": 10, "mean_degree": 2.0, "degree_cv": 1.0, "width": 64}
    for name, value in (("num_rows", -1), ("mean_degree", math.nan), ("degree_cv", math.inf), ("width", "64")):
        with pytest.raises(ValueError, match=f"{name} must be a number of 0 or more, got"):
            gsp.route(**{**good, name: value})
    with pytest.raises(ValueError, match="policy must be 'auto' or 'ra', got 'best'"):
        gsp.route(**good, policy="best")


@pytest.mark.parametrize("name", sorted(NAMED))
@pytest.mark.parametrize("reduce", REDUCES)
def test_policy_ra(device: str, name: str, reduce: str) -> None:
    """The same numbers, and a plan that says which rule held, what it picked, and what runs."""
    g = NAMED[name].graph(device)
    for width in (3, 64):
        x = values((g.num_src, width), torch.float32, 1, device=device)
        out = gsp.spmm(g, x, reduce=reduce, policy="ra")
        plan = gsp.plan(g, width, reduce=reduce, policy="ra")
        assert plan is gsp.plan(g, width, reduce=reduce, policy="ra")
        f = plan.features or gsp.plan(g, width, reduce=reduce).features
        assert f is not None
        found = ra_route(f.num_rows, f.mean_degree, f.degree_cv, width)
        text = plan.explain()
        assert f"{found.reason} -> {found.family} in {found.precision}" in text
        tiles = found.family in TILES and device == "cuda" and reduce in ("sum", "mean")
        assert ("here: no tiles for" in text) == (found.family in TILES and not tiles)
        assert (plan.kernel.name == "tile") == tiles
        (close_to_tiles if tiles else close)(out, expect_spmm(g, x, None, torch.zeros_like(out), reduce).out)
        assert plan.mode == ("cold" if found.family in ("CSR_DIRECT", "CUSPARSE") else "warm")
        if device == "cuda" and g.num_dst:
            assert plan.schedule == ("degree" if found.family == "ZERO_OVERHEAD_CSR" else "natural")


def test_policy_ra_leaves_what_was_asked_for(device: str) -> None:
    """A mode and a schedule that are given stay; ZERO_OVERHEAD_CSR sorts rows by length."""
    n = 400
    dst = torch.cat([torch.zeros(3000), torch.arange(n)]).long()
    g = gsp.Graph.from_edge_index(torch.stack([torch.arange(len(dst)) % n, dst]).to(device), n)
    plan = gsp.plan(g, 64, policy="ra")
    assert "R1: degree_cv >= 5 -> ZERO_OVERHEAD_CSR" in plan.explain()
    assert plan.schedule == ("degree" if device == "cuda" else "natural")
    assert gsp.plan(g, 64, policy="ra", schedule="natural").schedule == "natural"
    assert gsp.plan(g, 64, policy="ra", mode="cold").mode == "cold"
    ring = gsp.Graph.from_edge_index(torch.stack([torch.arange(n), (torch.arange(n) + 1) % n]).to(device), n)
    assert gsp.plan(ring, 64, policy="ra").mode == "cold"
    assert gsp.plan(ring, 64, policy="ra", mode="warm").mode == "warm"
    with pytest.raises(ValueError, match="a schedule has to be prepared"):
        gsp.plan(g, 64, policy="ra", mode="cold", schedule="degree")
