"""Draws the pictures of the documentation from the files that are measured: one command, nothing in between.

    python -m gnn_spmm_plugin.bench.figures docs/benchmarks docs/figures

Each picture is drawn if the folder has its file: products against the best cuSPARSE and against the speed of light as
heat maps, gathers against the limits of memory, choices of each policy against the best that was found, imbalance of
orders and cuts, layers of PyG.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from .plot import require_matplotlib
from .results import Row, table_of

#: (graph, width) -> contender -> the row of a weighted float32 sum.
Products: TypeAlias = "dict[tuple[str, int], dict[str, Row]]"
OURS = "ours:auto"


def products(rows: Sequence[Row]) -> Products:
    """Weighted sums in natural order, inside CUDA graphs where both were measured so; the best cuSPARSE algorithm."""
    found: Products = {}
    for mode in ("eager", "graph"):
        here: Products = {}
        for r in rows:
            plain = (r["order"], r["dtype"], r["reduce"], r["weighted"], r["setting"], r["mode"])
            if plain != ("natural", "float32", "sum", "1", "", mode) or not r["ms_median"]:
                continue
            name = "cusparse" if r["contender"].startswith("cusparse:") else r["contender"]
            cell = here.setdefault((r["graph"], int(r["width"])), {})
            if name not in cell or float(r["ms_median"]) < float(cell[name]["ms_median"]):
                cell[name] = r
        found |= {key: cell for key, cell in here.items() if OURS in cell and ("cusparse" in cell or key not in found)}
    return found


def _axes(width: float, height: float) -> tuple[Any, Any]:
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _heat_map(cells: dict[tuple[str, int], float], title: str, limits: tuple[float, float], middle: float) -> Any:
    """Rows are graphs, columns widths; what is under `middle` is red."""
    from matplotlib.colors import TwoSlopeNorm

    graphs = list(dict.fromkeys(g for g, _ in cells))
    widths = sorted({w for _, w in cells})
    table = [[cells.get((g, w), float("nan")) for w in widths] for g in graphs]
    figure, axes = _axes(1.6 + 0.75 * len(widths), 0.9 + 0.27 * len(graphs))
    axes.imshow(table, cmap="RdYlGn", aspect="auto", norm=TwoSlopeNorm(middle, *limits))
    axes.set_xticks(range(len(widths)), [str(w) for w in widths], fontsize=8)
    axes.set_yticks(range(len(graphs)), graphs, fontsize=8)
    axes.set_xlabel("columns of features", fontsize=8)
    for y, line in enumerate(table):
        for x, value in enumerate(line):
            if value == value:
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7)
    axes.set_title(title, fontsize=9)
    return figure


def speed_up(rows: Sequence[Row]) -> Any:
    """Time of the best cuSPARSE over ours."""
    cells = {
        key: float(cell["cusparse"]["ms_median"]) / float(cell[OURS]["ms_median"])
        for key, cell in products(rows).items()
        if "cusparse" in cell
    }
    return _heat_map(cells, "best cuSPARSE / ours, weighted sum, float32 (above 1: ours is faster)", (0.5, 3.0), 1.0)


def speed_of_light(rows: Sequence[Row]) -> Any:
    """Time of a kernel that gathers the same rows and knows no structure, over ours."""
    found = products(rows).items()
    cells = {k: float(cell[OURS]["roofline_share"]) for k, cell in found if cell[OURS]["roofline_share"]}
    return _heat_map(cells, "speed of light / ours, weighted sum, float32 (0.7 and less: red)", (0.3, 1.1), 0.7)


def roofline(rows: Sequence[Row]) -> Any:
    """Gathered bytes a second against the most that the bytes which must come from memory allow."""
    limits: dict[tuple[str, int], dict[str, float]] = {}
    for r in rows:
        if r["mode"] == "analytic" and (r["order"], r["dtype"], r["weighted"]) == ("natural", "float32", "1"):
            limits.setdefault((r["graph"], int(r["width"])), {})[r["contender"]] = float(r["gbps"])
    found = [(limits[key], cell) for key, cell in products(rows).items() if "limit:copy" in limits.get(key, {})]
    figure, axes = _axes(7, 4.5)
    for name, label, style in (("cusparse", "best cuSPARSE", "x"), (OURS, "ours", "o")):
        points = [(limit["limit:copy"], float(cell[name]["gbps"])) for limit, cell in found if name in cell]
        axes.plot(*zip(*points, strict=True), style, markersize=4, label=label, alpha=0.7)
    roof = max(limit["limit:gather"] for limit, _ in found)
    ends = axes.get_xlim()
    axes.plot([ends[0], roof, ends[1]], [ends[0], roof, roof], "--", linewidth=0.8, color="black", label="limits")
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("gathered bytes / time of a copy of the compulsory bytes, GB/s", fontsize=8)
    axes.set_ylabel("gathered bytes / time, GB/s", fontsize=8)
    axes.legend(fontsize=7)
    axes.set_title("weighted sums, float32: a point for each graph and width", fontsize=9)
    return figure


def choices(rows: Sequence[Row]) -> Any:
    """Time of the best candidate over that of each policy, sorted."""
    figure, axes = _axes(7, 4)
    for policy in ("auto", "default", "csr", "ra", "paramspmm"):
        shares = sorted(min(float(r["oracle"]) / float(r[policy]), 1.2) for r in rows)
        label = "auto, calls without a plan" if policy == "default" else policy
        axes.plot([i / len(shares) for i in range(len(shares))], shares, label=label, linewidth=1.2)
    for goal in (0.85, 1.0):
        axes.axhline(goal, linewidth=0.6, color="black", linestyle=":")
    axes.set(ylim=(0.3, 1.2), xlim=(0, 1))
    axes.set_xlabel(f"share of {len(rows)} products of graphs that no decider was trained on", fontsize=8)
    axes.set_ylabel("time of the best candidate / time of the choice", fontsize=8)
    axes.legend(fontsize=7)
    return figure


def imbalance(rows: Sequence[Row]) -> Any:
    """The most work of a block over the mean, by the longest row."""
    figure, axes = _axes(7, 4)
    orders = list(dict.fromkeys(r["order"] for r in rows))
    for cut, style in (("equal_rows", "-"), ("equal_edges", "--"), ("long_rows_split", ":")):
        for i, order in enumerate(orders):
            points = [(int(r["longest"]), float(r[cut])) for r in rows if r["order"] == order]
            label = f"{order}, {cut.replace('_', ' ')}"
            axes.plot(*zip(*points, strict=True), style, color=f"C{i}", marker="o", markersize=2.5, label=label)
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("edges of the longest row", fontsize=8)
    axes.set_ylabel("most work of a block / mean", fontsize=8)
    axes.legend(fontsize=7, ncols=3)
    return figure


def layers(rows: Sequence[Row]) -> Any:
    """How many times as fast each layer of PyG is; those that are not are at the end."""
    found = sorted((float(r["speedup"]), r["layer"], r["status"]) for r in rows if r["speedup"])
    figure, axes = _axes(7, 0.6 + 0.16 * len(found))
    colours = {"fused": "C2", "partly": "C1", "not": "C7"}
    axes.barh([n for _, n, _ in found], [s for s, _, _ in found], color=[colours.get(k, "C7") for _, _, k in found])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.tick_params(axis="y", labelsize=6)
    axes.margins(y=0.01)
    axes.set_xlabel(
        "stock PyG / accelerated, forward and backward (green: fused, orange: partly, grey: not)", fontsize=8
    )
    return figure


#: Picture, the file that it is drawn from, how.
FIGURES: dict[str, tuple[str, Callable[[Sequence[Row]], Any]]] = {
    "speed_up.png": ("spmm_h200.csv", speed_up),
    "speed_of_light.png": ("spmm_h200.csv", speed_of_light),
    "roofline.png": ("spmm_h200.csv", roofline),
    "choices.png": ("decider_evaluation_h200.csv", choices),
    "imbalance.png": ("imbalance.csv", imbalance),
    "layers.png": ("pyg_layers_h200.csv", layers),
}


def main(arguments: list[str] | None = None) -> int:
    """The command; returns an exit code: 2 where the folder has none of the files."""
    parser = argparse.ArgumentParser(prog="python -m gnn_spmm_plugin.bench.figures", description=__doc__.split("\n")[0])
    parser.add_argument("files", metavar="FOLDER", type=Path, help="of CSV files, such as docs/benchmarks")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder for the pictures")
    options = parser.parse_args(arguments)
    try:
        require_matplotlib().use("Agg")
    except ValueError:
        parser.error("this needs matplotlib; pip install 'gnn-spmm-plugin[bench]'")
    import matplotlib.pyplot as plt

    there = {name: how for name, how in FIGURES.items() if (options.files / how[0]).exists()}
    if not there:
        parser.error(f"{options.files} has none of {', '.join(sorted({file for file, _ in FIGURES.values()}))}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name, (file, draw) in there.items():
        _, rows = table_of(options.files / file)
        figure = draw(rows)
        figure.savefig(options.out / name, dpi=110, metadata={"Software": None})
        plt.close(figure)
        print(options.out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
