"""Rules that pick a kernel family from a few numbers about a graph: our own, and those that were published.

The published ones are RA-SpMM's (github.com/tariqaf/RA-SpMM, commit a605b3b, `router/router_dispatch.cpp`), numbers
and all: they were fitted to an RTX 3090 and to kernels of its own, so they are here to be compared with, and to show
what a graph looks like to them. `gnn_spmm_plugin.plan` says what runs of it here. Ours say how a warm plan takes rows
(`gnn_spmm_plugin.schedule.layout_by_rule`); they were fitted to docs/benchmarks/decider_h200.csv.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

INF = math.inf


@dataclass(frozen=True)
class Rule:
    """A line of the table: what it asks for, and what it then picks. Ranges are half open, [from, to).

    Attributes:
        name: what the paper calls it; one of its rules may take several lines.
        family: what it picks.
        width: columns of the features.
        degree: mean of the row lengths.
        cv: their population standard deviation over their mean.
        rows: number of rows.
        cols: number of columns, sources.
        edges: number of edges.
        longest: edges of the longest row.
        tf32: its tile kernel runs in TF32 whatever the graph.
    """

    name: str
    family: str
    width: tuple[float, float] = (0, INF)
    degree: tuple[float, float] = (0, INF)
    cv: tuple[float, float] = (0, INF)
    rows: tuple[float, float] = (0, INF)
    cols: tuple[float, float] = (0, INF)
    edges: tuple[float, float] = (0, INF)
    longest: tuple[float, float] = (0, INF)
    tf32: bool = False

    def holds(self, seen: dict[str, float]) -> bool:
        """Whether all that is in `seen`, by the names above, lies in its ranges."""
        return all(low <= value < high for name, value in seen.items() for low, high in (getattr(self, name),))

    def says(self) -> str:
        """What it asks for, in words."""
        parts = []
        for name, what in _WORDS.items():
            low, high = getattr(self, name)
            if low > 0:
                parts.append(f"{what} >= {low:g}")
            if high < INF:
                parts.append(f"{what} < {high:g}")
        return " and ".join(parts) or "nothing else"


_WORDS = {
    "width": "width",
    "degree": "mean degree",
    "cv": "degree_cv",
    "rows": "rows",
    "cols": "columns",
    "edges": "edges",
    "longest": "longest row",
}

#: Where no row is longer, all take about as long: a few rounds of gathers. A list of them would only be one more read.
SHORT_ROWS = 16
#: A graph of fewer edges leaves most of a GPU idle.
SMALL_EDGES = 100_000
#: Graphs of more columns are never staged, whatever the GPU (`gnn_spmm_plugin.schedule.stage_of`).
STAGED_COLS = 12_000
STAGED_DEGREE = 64

#: Ours, the first that holds decides: rows straight from the CSR arrays, or from a list that has long ones in pieces.
AUTO_RULES = (
    Rule("short rows", "CSR_DIRECT", longest=(0, SHORT_ROWS + 1)),
    Rule("small and dense", "CSR_ITEMS", degree=(STAGED_DEGREE, INF), cols=(0, STAGED_COLS + 1)),
    Rule("even rows", "CSR_DIRECT", cv=(0, math.nextafter(0.35, 1)), longest=(0, 257)),
    Rule("small", "CSR_DIRECT", edges=(0, SMALL_EDGES), longest=(0, 101)),
    Rule("tiny", "CSR_DIRECT", edges=(0, 12_000), longest=(0, 257)),  # a second launch takes longer than such a row
    Rule("default", "CSR_ITEMS"),
)

#: The first that holds decides.
RA_RULES = (
    Rule("R1", "ZERO_OVERHEAD_CSR", cv=(5, INF)),
    Rule("R2", "CSR_DIRECT", cv=(0, 0.7), degree=(0, 4.5), width=(0, 257)),
    Rule("R2", "TC_DIRECT", cv=(0, 0.7), degree=(0, 4.5)),
    Rule("R2", "CSR_DIRECT", cv=(0.2, 0.7), degree=(0, 7), width=(0, 129)),
    Rule("R2", "TC_DIRECT", cv=(0.2, 0.7), degree=(0, 7), tf32=True),
    Rule("R2", "TC_DIRECT", cv=(0, 0.7)),
    Rule("R3", "COMMUNITY_TC", cv=(3, INF), rows=(250_000, INF)),
    Rule("R3", "SEGMENT_HYBRID", cv=(3, INF)),
    Rule("R4", "COMMUNITY_TC", degree=(40, INF)),
    Rule("R5", "CUSPARSE", rows=(0, 20_000), degree=(25, INF), width=(0, 96)),
    Rule("R5", "SEGMENT_HYBRID", rows=(0, 20_000), degree=(25, INF), width=(0, 256)),
    Rule("R5", "COMMUNITY_TC", rows=(0, 20_000), degree=(25, INF)),
    Rule("R6", "COMMUNITY_TC", degree=(25, INF), cv=(1.8, INF)),
    Rule("R7", "COMMUNITY_TC", degree=(0, 9), cv=(1.1, math.nextafter(1.45, 2)), rows=(250_000, INF), tf32=True),
    Rule("default", "TC_DIRECT"),
)

#: Families that multiply tiles on tensor cores; the others compute in float32.
TILES = ("TC_DIRECT", "COMMUNITY_TC", "SEGMENT_HYBRID")

#: Tiles are built on the host at 20 ms for a million edges, and for 20 s at most.
MOST_TILED_EDGES = 1e9

POLICIES = ("auto", "ra")


@dataclass(frozen=True)
class Route:
    """What the rules pick, and why.

    Attributes:
        family: name of the kernel family.
        precision: ``"fp32"``, ``"tf32"`` or ``"fp16"``, of its products.
        reason: the rule with its numbers.
    """

    family: str
    precision: str
    reason: str


def auto_rule(cols: int, edges: int, mean_degree: float, degree_cv: float, longest: float) -> Rule:
    """The first of `AUTO_RULES` that holds."""
    seen = {"cols": cols, "edges": edges, "degree": mean_degree, "cv": degree_cv, "longest": longest}
    return next(r for r in AUTO_RULES if r.holds(seen))


def ra_route(num_rows: int, mean_degree: float, degree_cv: float, width: int) -> Route:
    """RA-SpMM's pick and its reason; arguments as of `route`, which checks them."""
    seen = {"width": width, "degree": mean_degree, "cv": degree_cv, "rows": num_rows}
    rule = next(r for r in RA_RULES if r.holds(seen))
    reason = f"{rule.name}: {rule.says()}"
    if rule.family not in TILES:
        return Route(rule.family, "fp32", reason)
    if width < 16 or num_rows * mean_degree > MOST_TILED_EDGES:
        family = "CSR_DIRECT" if degree_cv < 1.5 else "ZERO_OVERHEAD_CSR"
        what = "widths under 16" if width < 16 else f"over {MOST_TILED_EDGES:g} edges"
        return Route(family, "fp32", f"{reason}: {rule.family}, but no tiles for {what}")
    tf32 = rule.tf32 or mean_degree < 5 or (num_rows <= 25_000 and mean_degree < 9)
    return Route(rule.family, "tf32" if tf32 else "fp16", reason)


def route(*, num_rows: int, mean_degree: float, degree_cv: float, width: int, policy: str = "auto") -> tuple[str, str]:
    """The kernel family that a set of rules picks, from descriptors alone.

    Args:
        num_rows: rows of the matrix, destinations.
        mean_degree: edges per row.
        degree_cv: population standard deviation of the row lengths over their mean, 0 without edges.
        width: number of feature columns.
        policy: ``"auto"``, our own; or ``"ra"``, the seven rules of RA-SpMM.

    Returns:
        (family, precision). Ours are CSR_DIRECT, rows straight from the CSR arrays, and CSR_ITEMS, rows from a list
        that has long ones in pieces, in ``"fp32"``: whatever the width, and taking columns for as many as rows and the
        longest row for four deviations above the mean, where a plan looks. RA-SpMM's are CSR_DIRECT,
        ZERO_OVERHEAD_CSR, TC_DIRECT, COMMUNITY_TC, SEGMENT_HYBRID and CUSPARSE; precision is ``"fp32"``, or ``"tf32"``
        or ``"fp16"`` of those with tiles.

    Raises:
        ValueError: a descriptor is negative or not finite, or there is no such policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy must be {' or '.join(map(repr, POLICIES))}, got {policy!r}")
    given = {"num_rows": num_rows, "mean_degree": mean_degree, "degree_cv": degree_cv, "width": width}
    for name, value in given.items():
        if not (isinstance(value, (int, float)) and 0 <= value < INF):
            raise ValueError(f"{name} must be a number of 0 or more, got {value!r}")
    if policy == "auto":
        longest = mean_degree * (1 + 4 * degree_cv)
        return auto_rule(num_rows, round(num_rows * mean_degree), mean_degree, degree_cv, longest).family, "fp32"
    found = ra_route(num_rows, mean_degree, degree_cv, width)
    return found.family, found.precision
