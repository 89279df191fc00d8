"""What files of measurements say about the goals that were set: measured value against bar, line by line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from .._table import show
from .graphs import SPECS
from .peers import PEERS
from .results import CONFIGURATION, Row, measurements, table_of

#: (what it is of, value)
Values: TypeAlias = "list[tuple[str, float]]"
Configuration: TypeAlias = "tuple[str, ...]"

OURS = "ours:auto"
SYNTHETIC = tuple(name for name in SPECS if name != "cora_like")
REAL = (
    *("com_dblp", "ego_twitter", "web_cnr2000", "road_FLA"),
    *("fmnist_knn10", "tu_reddit_binary", "tolokers", "coauthor_physics"),
)
#: On the device where both were measured so, else as called: what `Times.pairs` compares.
ON_DEVICE = ("graph", "eager")


class Times:
    """Medians of a file's rows, by configuration, contender, setting and mode."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._ms: dict[Configuration, dict[tuple[str, str, str], float]] = {}
        for row in rows:
            if row["ms_median"]:
                here = self._ms.setdefault(tuple(row[name] for name in CONFIGURATION), {})
                here[row["contender"], row["setting"], row["mode"]] = float(row["ms_median"])

    def configurations(self, **wanted: Any) -> list[Configuration]:
        """Those whose columns have the wanted values (a string, or any of several)."""

        def fits(c: Configuration) -> bool:
            columns = dict(zip(CONFIGURATION, c, strict=True))
            return all(columns[k] == v if isinstance(v, str) else columns[k] in v for k, v in wanted.items())

        return [c for c in self._ms if fits(c)]

    def ms(self, c: Configuration, contender: str, setting: str = "", modes: Sequence[str] = ON_DEVICE) -> float | None:
        """In the first of `modes` that was measured."""
        here = self._ms.get(c, {})
        return next((here[contender, setting, m] for m in modes if (contender, setting, m) in here), None)

    def cusparse(self, c: Configuration, mode: str) -> float | None:
        """The best algorithm."""
        here = self._ms.get(c, {})
        return min((t for (name, _, m), t in here.items() if name.startswith("cusparse:") and m == mode), default=None)

    def pairs(
        self,
        cases: Iterable[Configuration],
        upper: Callable[[Configuration, str], float | None],
        lower: Callable[[Configuration, str], float | None],
        modes: Sequence[str] = ON_DEVICE,
    ) -> Values:
        """``upper / lower`` of each case, in the first of `modes` that both were measured in."""
        found = []
        for c in cases:
            for mode in modes:
                a, b = upper(c, mode), lower(c, mode)
                if a is not None and b is not None:
                    found.append((f"{c[0]} {c[2]}", a / b))
                    break
        return found

    def of(
        self, contender: str = OURS, setting: str = "", **changed: str
    ) -> Callable[[Configuration, str], float | None]:
        """The time of a contender for a configuration in which some columns are changed."""

        def look(c: Configuration, mode: str) -> float | None:
            other = tuple({**dict(zip(CONFIGURATION, c, strict=True)), **changed}.values())
            return self.ms(other, contender, setting, (mode,))

        return look


@dataclass(frozen=True)
class Goal:
    """One line of the summary.

    Attributes:
        what: the line's name.
        values: the ratios (or shares, or microseconds) that it is about.
        bar: what their geometric mean should reach, where there is such a bar.
        stretch: what it should reach at best.
        worst: what none of them should fall short of.
        small: whether small values are good.
    """

    what: str
    values: Callable[[Times], Values]
    bar: float | None = None
    stretch: float | None = None
    worst: float | None = None
    small: bool = False

    def judge(self, times: Times) -> list[str] | None:
        """The cells of the line; None where nothing of it was measured."""
        return judge(self.what, self.values(times), self.bar, self.stretch, self.worst, self.small)


def judge(
    what: str, values: Values, bar: float | None, stretch: float | None, worst: float | None, small: bool = False
) -> list[str] | None:
    """A line of the summary from its values."""
    if not values:
        return None
    # A difference can be none at all, or less; then there is no geometric mean.
    mean = math.exp(sum(math.log(v) for _, v in values) / len(values)) if all(v > 0 for _, v in values) else math.nan
    where, extreme = (max if small else min)(values, key=lambda v: v[1])

    def reaches(value: float, wanted: float | None) -> bool:
        rounding = 1e-9 * value
        return wanted is None or (value - rounding <= wanted if small else value + rounding >= wanted)

    asked = [f"{bar:g}"] if bar is not None else []
    asked += [f"none {'over' if small else 'under'} {worst:g}"] if worst is not None else []
    met = "" if not asked else "yes" if reaches(mean, bar) and reaches(extreme, worst) else "NO"
    if met != "NO" and stretch is not None and reaches(mean if bar is not None else extreme, stretch):
        met = "stretch"
    return [
        *(what, str(len(values)), "-" if math.isnan(mean) else f"{mean:.3g}", f"{extreme:.3g}", where),
        *(", ".join(asked) or "-", "-" if stretch is None else f"{stretch:g}", met),
    ]


HEADERS = ("what", "cases", "geomean", "worst", "where", "bar", "stretch", "met")


def _weighted(t: Times, graphs: Sequence[str], widths: Sequence[int] | None = None, **more: Any) -> list[Configuration]:
    wanted: dict[str, Any] = {"graph": graphs, "order": "natural", "dtype": "float32", "reduce": "sum", "weighted": "1"}
    if widths is not None:
        wanted["width"] = [str(w) for w in widths]
    return t.configurations(**{**wanted, **more})


MAIN = (16, 32, 64, 100, 128, 256, 512)


def _against_cusparse(graphs: Sequence[str], widths: Sequence[int], *modes: str) -> Callable[[Times], Values]:
    return lambda t: t.pairs(_weighted(t, graphs, widths), t.cusparse, t.of(), modes or ON_DEVICE)


def _peers(t: Times) -> Values:
    found = []
    for label, ratio in t.pairs(_weighted(t, list(PEERS)), t.cusparse, t.of()):
        graph, width = label.split()
        if int(width) in PEERS[graph]:
            cusparse, peer = PEERS[graph][int(width)]
            found.append((label, ratio / (cusparse / peer)))
    return found


def _copy_share(t: Times) -> Values:
    def limit(c: Configuration, mode: str) -> float | None:
        return t.ms(c, "limit:copy", modes=("analytic",))

    cases = _weighted(t, ("road1M", "road_FLA"), [w for w in MAIN if w >= 32])
    return t.pairs(cases, limit, t.of())


def _unweighted(setting: str, narrowest: int, widest: int) -> Callable[[Times], Values]:
    def values(t: Times) -> Values:
        cases = [c for c in _weighted(t, SYNTHETIC) if narrowest <= int(c[2]) <= widest]
        return t.pairs(cases, t.of(), t.of(setting=setting, weighted="0"))

    return values


def _scheduled(t: Times) -> Values:
    graphs = [name for name in SPECS if name.endswith("_shuf") and not name.startswith("road")]
    cases = _weighted(t, graphs, (128, 256), order="natural")
    return t.pairs(cases, t.cusparse, t.of(order="schedule"))


def _mean(t: Times) -> Values:
    cases = _weighted(t, SYNTHETIC, reduce="mean", weighted="0")
    return t.pairs(cases, t.of(), t.of(reduce="sum"))


def _arg(t: Times) -> Values:
    """(max with arg - sum) / time to write arg."""
    cases = _weighted(t, SYNTHETIC, reduce="max", weighted="0")

    def more(c: Configuration, mode: str) -> float | None:
        with_arg, total = t.of(setting="arg")(c, mode), t.of(reduce="sum")(c, mode)
        return None if with_arg is None or total is None else with_arg - total

    return t.pairs(cases, more, t.of("write_arg"))


def _half(dtype: str) -> Callable[[Times], Values]:
    def values(t: Times) -> Values:
        cases = [c for c in _weighted(t, SYNTHETIC) if int(c[2]) >= 128 and (t.ms(c, OURS) or 0) > 0.05]
        return t.pairs(cases, t.of(), t.of(dtype=dtype))

    return values


def _atomics(t: Times) -> Values:
    names = {k[0] for here in t._ms.values() for k in here if k[0].startswith("ours:") and "atomic" in k[0]}
    return [v for name in sorted(names) for v in t.pairs(_weighted(t, SYNTHETIC), t.of(), t.of(name))]


def _cora(t: Times) -> Values:
    """Microseconds."""
    found = ((c, t.ms(c, OURS, modes=("graph",))) for c in _weighted(t, ("cora_like",), (16, 64)))
    return [(f"{c[0]} {c[2]}", ms * 1e3) for c, ms in found if ms is not None]


def _host(setting: str) -> Callable[[Times], Values]:
    return lambda t: t.pairs(t.configurations(), t.of(setting=setting), t.of("torch.mm"), ("host",))


def _within(a: str, b: str) -> Callable[[Times], Values]:
    return lambda t: t.pairs(_weighted(t, [*SYNTHETIC, *REAL]), t.of(setting=a), t.of(setting=b))


def _torch(t: Times) -> Values:
    return t.pairs(_weighted(t, SYNTHETIC, MAIN), t.of("torch.sparse.mm"), t.of(), ("eager",))


GOALS = (
    Goal("weighted sum, best cuSPARSE / ours", _against_cusparse(SYNTHETIC, MAIN), 1.5, 1.75, 0.97),
    Goal("the same, called eagerly", _against_cusparse(SYNTHETIC, MAIN, "eager")),
    Goal("the same, cold L2", _against_cusparse(SYNTHETIC, MAIN, "cold")),
    Goal(
        "the same on eight real graphs, widths 64 to 256, in CUDA graphs",
        _against_cusparse(REAL, (64, 100, 128, 256), "graph"),
        *(1.4, 1.7, 0.97),
    ),
    Goal("shuffled weights / kernel order", _within("shuffled", ""), None, 1.05, 1.15, True),
    Goal(
        "shuffled weights that change each call / kernel order", _within("shuffled,learned", ""), None, 1.05, 1.15, True
    ),
    Goal("torch.sparse.mm / ours, eager", _torch, 2.2, 2.6),
    Goal("best fp32 peer / ours, through cuSPARSE", _peers, 1.08, 1.2, 0.93),
    Goal("low degree: share of the copy limit, widths of 32 and more", _copy_share, None, 0.85, 0.75),
    *(
        Goal(f"weighted / {name}, widths {text}", _unweighted(setting, *widths), bar, None, worst)
        for name, setting in (("unweighted", ""), ("by scales", "scales"))
        for text, widths, bar, worst in (
            ("over 16", (17, 1 << 20), None, 0.98),
            ("8 to 16", (8, 16), 1.05, 0.98),
            ("up to 4", (1, 4), 1.2, 0.98),
        )
    ),
    Goal("shuffled communities with a schedule, best cuSPARSE / ours", _scheduled, 1.8, 2.1),
    Goal("mean / sum", _mean, None, None, 1.03, True),
    Goal("(max with arg - sum) / writing arg", _arg, None, None, 1.15, True),
    Goal("sum backward / forward on the transpose", _within("backward", "transpose"), None, None, 1.05, True),
    Goal("fp32 / fp16, widths of 128 and more, over 50 us", _half("float16"), 1.5, 1.8, 1.2),
    Goal("fp32 / bf16, widths of 128 and more, over 50 us", _half("bfloat16"), 1.5, 1.8, 1.2),
    Goal("deterministic / atomics", _atomics, None, None, 1.05, True),
    Goal(
        "ddi_like, widths 64 to 256, best cuSPARSE / ours",
        _against_cusparse(["ddi_like"], (64, 100, 128, 256)),
        1.3,
        2.0,
    ),
    Goal("cora-sized product in a CUDA graph, us", _cora, None, 3, 4, True),
    Goal("host time / torch.mm's, without gradients", _host(""), None, None, 1.2, True),
    Goal("host time / torch.mm's, with gradients", _host("grad"), None, None, 2, True),
)

# ---------------------------------------------------------------------- training

#: (graph, model) -> how many times faster than the csr row and than the edge_index row
TRAINING_BARS = {
    ("arxivlike", "gcn"): (1.7, 5.0),
    ("sbm1M_sorted", "gcn"): (2.0, 10.0),
    ("redditlike_sorted", "sage_mean"): (2.2, 20.0),
    ("productslike_sorted", "sage_mean"): (1.5, 8.0),
}


def training_lines(rows: Sequence[Row]) -> list[list[str]]:
    """The lines about training steps, from rows of `bench.training`."""
    at = {(r["graph"], r["model"], r["path"]): r for r in rows}
    lines: list[list[str] | None] = []

    def number(graph: str, model: str, path: str, column: str) -> float | None:
        text = at.get((graph, model, path), {}).get(column)
        return float(text) if text else None

    def ratio(graph: str, model: str, path: str, column: str) -> Values:
        a, b = number(graph, model, path, column), number(graph, model, "accelerated", column)
        return [] if a is None or not b else [(f"{graph} {model}", a / b)]

    for graph, model in dict.fromkeys((g, m) for g, m, _ in at):
        bars = TRAINING_BARS.get((graph, model), (None, None))
        for path, bar in zip(("csr", "edge_index"), bars, strict=True):
            what = f"step time, {path} / accelerated: {graph} {model}"
            if at.get((graph, model, path), {}).get("status") == "out of memory":
                lines.append([what, "1", "-", "-", "out of memory", "-" if bar is None else f"{bar:g}", "-", ""])
            else:
                lines.append(judge(what, ratio(graph, model, path, "ms_median"), bar, None, None))
        stub, products = number(graph, model, "stub", "ms_median"), number(graph, model, "accelerated", "products_ms")
        step = number(graph, model, "accelerated", "ms_median")
        if stub is not None and products is not None and step is not None:
            what = f"step time / (stub + products): {graph} {model}"
            lines.append(judge(what, [(f"{graph} {model}", step / (stub + products))], None, 1.1, None, True))
        peak = number(graph, model, "accelerated", "peak_bytes")
        if peak is None:
            continue
        if model in ("gcn", "sage_max"):
            other, what, bar = number(graph, model, "edge_index", "peak_bytes"), "edge_index", 0.25
        else:
            kept = number(graph, model, "stub", "peak_bytes"), number(graph, model, "accelerated", "graph_bytes")
            other, what, bar = (None if None in kept else sum(k or 0 for k in kept)), "(stub + graph)", 1.05
        if other:
            line = f"peak memory / {what}: {graph} {model}"
            lines.append(judge(line, [(f"{graph} {model}", peak / other)], None, None, bar, True))
        csr = number(graph, model, "csr", "peak_bytes")
        if csr:
            line = f"peak memory / csr: {graph} {model}"
            lines.append(judge(line, [(f"{graph} {model}", peak / csr)], None, None, 1.0, True))
    return [line for line in lines if line is not None]


# ---------------------------------------------------------------------- files


_TRAINING = {"graph", "model", "path", "ms_median", "status"}


def shares(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Share of the speed of light for weighted sums in float32, graph by width: headers and cells."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for mode in reversed(ON_DEVICE):
        for r in rows:
            plain = (r["contender"], r["setting"], r["dtype"], r["reduce"], r["weighted"], r["mode"])
            if plain == (OURS, "", "float32", "sum", "1", mode) and r["roofline_share"]:
                found.setdefault((r["graph"], r["order"]), {})[int(r["width"])] = f"{float(r['roofline_share']):.2f}"
    widths = sorted({w for line in found.values() for w in line})
    return ["graph", "order", *map(str, widths)], [
        [*key, *(line.get(w, "") for w in widths)] for key, line in found.items()
    ]


def summarise(paths: Sequence[str]) -> dict[str, Any]:
    """Every line that the files cover.

    Raises:
        ValueError: a file is neither a file of measurements nor one of training steps.
    """
    rows: list[Row] = []
    trained: list[Row] = []
    for path in paths:
        columns, found = table_of(path)
        if set(columns) >= _TRAINING:
            trained += found
        else:
            rows += measurements(path, columns, found)
    times = Times(rows)
    lines = [line for line in (goal.judge(times) for goal in GOALS) if line is not None]
    lines += training_lines(trained)
    headers, cells = shares(rows)
    return {
        "lines": [dict(zip(HEADERS, line, strict=True)) for line in lines],
        "shares": [dict(zip(headers, line, strict=True)) for line in cells],
    }


def print_summary(summary: dict[str, Any]) -> None:
    """Prints what `summarise` found."""
    for title, key in (("", "lines"), ("share of the speed of light, weighted sum, float32", "shares")):
        table = summary[key]
        if table:
            show(list(table[0]), [list(row.values()) for row in table], title)
    if not any(summary.values()):
        print("nothing in these files belongs to a goal: those are of the suite full, on a GPU")
