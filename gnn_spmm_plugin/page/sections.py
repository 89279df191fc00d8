"""The page: one function for each section, and `SECTIONS`, the order in which they come.

A section takes the whole result, as the commands write it with ``--json``, and returns markup; empty where there is
nothing to show. To add one, write the function and name it in `SECTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._table import bytes_text
from . import charts
from .markup import (
    Raw,
    badge,
    block,
    columns,
    details,
    escape,
    figure,
    page,
    paragraph,
    section,
    table,
    tiles,
)

Result = dict[str, Any]
_KINDS = {"fused": "good", "gsp.nn": "good", "partly": "partly"}


def render(result: Result) -> str:
    """The page of a result of ``gnn-spmm report`` or ``doctor``."""
    body = (part for make in SECTIONS for part in make(result))
    return page(f"gnn-spmm report: {result['source']}", _lead(result), body, _foot(result))


def _lead(result: Result) -> str:
    graphs = result["graphs"]
    where = f"measured on {result['device']}"
    if result["verdict"] is not None:
        return (
            f"Run as it is and with {' and '.join(result['libraries'])} patched, {result['steps']} steps each, {where}."
        )
    g = graphs[0]
    return f"{g['num_dst']:,} rows, {g['num_edges']:,} edges; products of this graph, {where}."


def _foot(result: Result) -> str:
    return f"gnn_spmm_plugin {result['version']}, torch {result['torch']}, made by: {result['command']}"


# ---------------------------------------------------------------------- a script


def verdict(result: Result) -> list[str]:
    """What follows, in a sentence and a few numbers."""
    v = result["verdict"]
    if v is None:
        return []
    step, peak = v["step_ms"], v["peak_bytes"]
    bound = "-" if v["bound"] is None else f"{v['bound']:.2f} x"
    items = [
        ("time of a step", _change(step["before"], step["after"], _ms), _times(v["gain"], "as fast")),
        (
            "memory of a step",
            _change(peak["before"], peak["after"], _size),
            "peak, beyond what is held between steps",
        ),
        ("at most possible", bound, "if message passing cost nothing"),
        ("layers fused", _fused(v["layers"]), "by patching, without a change of the script"),
    ]
    notes = "".join(paragraph(note) for note in v["notes"])
    advice = "".join(f"<li>{escape(line)}</li>" for line in v["advice"])
    return [
        section(
            "Result",
            paragraph(v["headline"], "verdict"),
            tiles(items),
            f"<h3>What to do</h3><ul>{advice}</ul>" if advice else "",
            f"<h3>About these numbers</h3>{notes}" if notes else "",
        )
    ]


def where_time_goes(result: Result) -> list[str]:
    """A step in three parts."""
    v = result["verdict"]
    if v is None or v["shares"] is None:
        return []
    s = v["shares"]
    parts = [
        ("message passing: gathering, reducing", "after", s["aggregation"]),
        ("products of dense matrices in those layers", "dense", s["dense"]),
        ("everything else: loading, other modules, optimizer", "before", s["outside"]),
    ]
    caption = (
        "A step lasts from one optimizer step to the next, an evaluation between them included. Layers are timed "
        "alone, called with what the model called them with."
    )
    picture = charts.shares(parts, "Parts of a step")
    return [section("Where a step's time goes, as it is", columns(picture, paragraph(caption, "soft")))]


def layers(result: Result) -> list[str]:
    """Each message passing layer, before and after."""
    v = result["verdict"]
    if v is None:
        return []
    rows: list[tuple[object, ...]] = []
    for r in v["layers"]:
        why = r["error"] or "; ".join(r["reasons"])
        hints = "".join(f"<br><b>Change:</b> {escape(h)}" for h in r["hints"])
        rows.append(
            (
                Raw(f"<b>{escape(r['layer'])}</b><br><small>{escape(r['kind'])}</small>"),
                badge(r["status"], _KINDS.get(r["status"], "bad")),
                Raw(escape(why) + hints),
                "-" if r["share"] is None else f"{r['share']:.0%}",
                r["calls"],
                _ms(r["before_ms"]),
                _ms(r["after_ms"]),
                _ratio(r["before_ms"], r["after_ms"]),
                "-" if r["graph"] is None else r["graph"] + 1,
            )
        )
    shown = v["layers"][:8]
    times = [(f"{r['layer']} ({r['kind']})", r["before_ms"], r["after_ms"]) for r in shown]
    memory = [(f"{r['layer']} ({r['kind']})", _mb(r["before_bytes"]), _mb(r["after_bytes"])) for r in shown]
    pictures = columns(
        figure(charts.pairs(times, "ms", "Time of each layer"), "Time in a step: all calls, forward and backward."),
        figure(charts.pairs(memory, "MB", "Memory of each layer"), "Peak memory of one call, forward and backward."),
    )
    heads = [
        "layer",
        "status",
        "why not, and what to change",
        "of a step",
        "calls",
        "before",
        "after",
        "ratio",
        "graph",
    ]
    if not any(row[2] for row in rows):  # nothing to explain
        heads, rows = [*heads[:2], *heads[3:]], [(*row[:2], *row[3:]) for row in rows]
    return [section("Layers", pictures, table(heads, rows))]


# ---------------------------------------------------------------------- a graph


def graph_at_a_glance(result: Result) -> list[str]:
    """Of a graph alone: one product, in a few numbers."""
    measured = [] if result["verdict"] is not None else result["graphs"][0]["products"]
    if not measured:
        return []
    g = result["graphs"][0]
    p = measured[len(measured) // 2]
    before, after = p["before_ms"], p["after_ms"]
    items = [
        (
            "time of a product",
            _change(before, after, _ms),
            _times(before / after if before and after else None, "as fast"),
        ),
        (
            "memory of a product",
            _change(p["before_bytes"], p["after_bytes"], _size),
            "peak, beyond features and graph",
        ),
        ("prepared once", _ms(g["preparation_ms"]), "from an edge list to a plan"),
        ("paid after", _paid(p), "preparing against what each saves"),
    ]
    about = (
        f"A {result['asked']['reduce']} over the edges, {result['asked']['dtype']}, {p['width']} columns: gather and"
    )
    return [section("Result", paragraph(f"{about} scatter before, one sparse product after.", "verdict"), tiles(items))]


def graphs(result: Result) -> list[str]:
    """Structure, plans and products of each graph."""
    made = []
    for i, g in enumerate(result["graphs"]):
        name = f"Graph {i + 1}" if len(result["graphs"]) > 1 or result["verdict"] is not None else "Graph"
        made.append(section(f"{name}: structure", *_structure(g)))
        made.append(section(f"{name}: plan, and why", *_plans(g)))
        if g["products"]:
            made.append(section(f"{name}: products", *_products(g, result["copy_bytes_per_s"])))
        if g["partition"]:
            made.append(section(f"{name}: shared between ranks", *_partition(g)))
    if result["graphs_left_out"]:
        made.append(section("More graphs", paragraph(f"{result['graphs_left_out']} smaller graphs are not shown.")))
    return made


def _structure(g: Result) -> list[str]:
    f, p = g["features"], g["picture"]
    facts = [
        ("rows (destinations)", f"{g['num_dst']:,}", f"{f['empty_rows']:,} without edges"),
        ("columns (sources)", f"{g['num_src']:,}", f"index {bytes_text(g['index_bytes'])}"),
        ("edges", f"{g['num_edges']:,}", f"mean degree {f['mean_degree']:.1f}"),
        ("longest row", f"{f['max_degree']:,}", f"degrees vary by {f['degree_cv']:.2f} of their mean"),
        ("locality", f"{f['locality']:.0%}", "of the edges within 1/64 of all columns"),
    ]
    series: list[charts.Series] = [("into a node", "after", g["degrees"]["in"])]
    if g["degrees"]["out"] != g["degrees"]["in"]:
        series.append(("out of a node", "before", g["degrees"]["out"]))
    caption = "How many nodes have as many edges, or more; both axes are logarithmic."
    degrees = charts.points(series, "edges of a node", "nodes with as many or more", "Degree distribution", show=[1])
    return [tiles(facts), columns(_figure(degrees, caption), columns(*_matrices(p), narrow=True))]


def _matrices(p: Result) -> list[str]:
    first = _figure(charts.matrix(p["before"], "Adjacency as it is"), "The adjacency as it is; rows are destinations.")
    if p["after"] is None:
        return [first, paragraph(p["note"] + ".") if p.get("note") else ""]
    use = (
        "the order in which the plan takes rows."
        if p["followed"]
        else "what a schedule could make of it; the plan here takes rows as they are."
    )
    caption = f"Rows and columns by {p['schedule']}: {use}"
    return [first, _figure(charts.matrix(p["after"], f"Adjacency by {p['schedule']}"), caption)]


def _plans(g: Result) -> list[str]:
    rows = [
        (
            p["width"],
            p["kernel"],
            p["mode"],
            p["schedule"],
            f"{p['build_seconds'] * 1e3:.2f} ms",
            bytes_text(p["bytes"]),
        )
        for p in g["plans"]
    ]
    prepared = ""
    if g["preparation_ms"] is not None:
        prepared = (
            f"From an edge list to a plan takes {_ms(g['preparation_ms'])} here, once: sorting, descriptors, the "
            f"choice itself. The graph's index holds {bytes_text(g['index_bytes'])}."
        )
    made = [
        paragraph(prepared) if prepared else "",
        table(["width", "kernel", "mode", "rows in order", "built in", "bytes"], rows),
    ]
    made.append(block(g["plans"][0]["explain"]))
    others = [block(p["explain"]) for p in g["plans"][1:]]
    return [*made, details("The same for the other widths", *others) if others else ""]


def _products(g: Result, copy: float) -> list[str]:
    rows: list[tuple[object, ...]] = []
    for p in g["products"]:
        done = p["after_ms"] is not None
        rows.append(
            (
                p["width"],
                _ms(p["before_ms"]),
                _ms(p["after_ms"]),
                _ratio(p["before_ms"], p["after_ms"]),
                bytes_text(p["before_bytes"]) if p["before_bytes"] is not None else "-",
                bytes_text(p["after_bytes"]) if p["after_bytes"] is not None else "-",
                _paid(p),
                f"{p['gathered_bytes'] / p['after_ms'] / 1e6:.1f} GB/s" if done else "-",
                p["note"],
            )
        )
    heads = ["width", "before", "after", "ratio", "memory before", "memory after", "paid after", "gathered", "note"]
    if not any(row[-1] for row in rows):
        heads, rows = heads[:-1], [row[:-1] for row in rows]

    def dots(key: str) -> list[charts.Point]:
        measured = [p for p in g["products"] if p[key]]
        return [
            (p["gathered_bytes"] / p["compulsory_bytes"], p["gathered_bytes"] / p[key] / 1e6, str(p["width"]))
            for p in measured
        ]

    roof = charts.points(
        [("gather and scatter", "before", dots("before_ms")), ("this package", "after", dots("after_ms"))],
        "bytes gathered / bytes that must move",
        "gathered, GB/s",
        "Roofline",
        [("limit by copy speed", 1.0, copy / 1e9)],
    )
    names = [f"width {p['width']}" for p in g["products"]]
    times = [(n, p["before_ms"], p["after_ms"]) for n, p in zip(names, g["products"], strict=True)]
    caption = (
        f"Each point is a width. A copy in memory moves {copy / 1e9:.1f} GB/s here. Above the line, features came from "
        "caches; far below it, a product waits for something else: latency, work per edge, or its own start."
    )
    about = (
        "Before: gather and scatter, a message for each edge, as PyG does it. After: one sparse product. Results were "
        "compared first; both are timed in turns."
    )
    bars = figure(charts.pairs(times, "ms", "Time of a product"), "Time of one product, forward.")
    return [paragraph(about), columns(bars, _figure(roof, caption)), table(heads, rows)]


SHARED = ["ranks", "order", "edges cut", "halo", "busiest rank", "held by a rank", "moved in a step"]


def shared_rows(partition: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of `gnn_spmm_plugin.distributed.cost.compare_orders` under the heads `SHARED`."""
    return [
        [
            str(p["parts"]),
            p["order"],
            f"{p['cut']:.1%}",
            f"{p['halo']:.2f}",
            f"{p['busiest_edges']:.2f} x",
            bytes_text(p["rank_bytes"]),
            bytes_text(p["step_bytes"]),
        ]
        for p in partition
    ]


def _partition(g: Result) -> list[str]:
    widths = ", ".join(str(p["width"]) for p in g["plans"])
    about = (
        f"What a ShardedGraph would take for layers that fetch {widths} columns, computed, not measured. Halo: rows "
        "that all ranks fetch, for each row that they own. Busiest rank: its edges over the mean. Held: graph, inputs "
        "that are kept for gradients, and buffers, the most of a rank. Moved: by all ranks, forward and backward."
    )
    return [paragraph(about), table(SHARED, shared_rows(g["partition"]))]


# ---------------------------------------------------------------------- words


def _figure(picture: str, caption: str) -> str:
    return figure(picture, caption) if picture else ""


def _paid(p: Result) -> str:
    if p["before_ms"] is None:
        return "-"
    return "never" if p["break_even"] is None else f"{p['break_even']:,} product{'s' if p['break_even'] != 1 else ''}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} ms" if value < 1000 else f"{value:,.0f} ms"


def _mb(count: int | None) -> float | None:
    return None if count is None else count / 1e6


def _size(count: int) -> str:
    """`bytes_text` with three digits at most."""
    number, unit = bytes_text(count).split()
    return f"{float(number):.3g} {unit}"


def _ratio(before: float | None, after: float | None) -> str:
    return "-" if not before or not after else f"{before / after:.2f} x"


def _times(value: float | None, what: str) -> str:
    return "not measured" if value is None else f"{value:.2f} times {what}"


def _change(before: Any, after: Any, text: Callable[[Any], str]) -> str:
    """``3 → 2 ms``; the unit twice where it is not the same."""
    if before is None or after is None:
        return "-"
    old, new = text(before), text(after)
    number, _, unit = old.rpartition(" ")
    return f"{number if new.endswith(f' {unit}') else old} → {new}"


def _fused(rows: list[dict[str, Any]]) -> str:
    return f"{sum(r['status'] in ('fused', 'gsp.nn') for r in rows)} of {len(rows)}"


SECTIONS: tuple[Callable[[Result], list[str]], ...] = (
    verdict,
    where_time_goes,
    layers,
    graph_at_a_glance,
    graphs,
)

__all__ = ["SECTIONS", "render"]
