"""Draws measurements: a panel for each graph, time over ours against the width."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

from .results import Row

OURS = "ours:auto"
NO_OPPONENTS = (OURS, "write_arg", "torch.mm")
#: (graph, product) -> contender -> width -> time over ours
Panels: TypeAlias = "dict[tuple[str, str], dict[str, dict[int, float]]]"


def require_matplotlib() -> Any:
    """matplotlib; ValueError where it is missing."""
    try:
        import matplotlib
    except ImportError as e:
        raise ValueError("--plot needs matplotlib; pip install 'gnn-spmm-plugin[bench]'") from e
    return matplotlib


def plot(rows: Sequence[Row], path: str, gpu: str) -> None:
    """Writes a picture of the product that was measured most; the file's name says in which format.

    Raises:
        ValueError: matplotlib is missing, or there is nothing to draw.
    """
    require_matplotlib().use("Agg")
    import matplotlib.pyplot as plt

    found = panels(rows)
    if not found:
        raise ValueError("there is nothing to draw: no contender was measured beside ours:auto")
    product = Counter(p for _, p in found).most_common(1)[0][0]
    chosen = {graph: lines for (graph, p), lines in found.items() if p == product}
    across = min(len(chosen), 5)
    down = math.ceil(len(chosen) / across)
    figure, axes = plt.subplots(
        *(down, across), figsize=(2.8 * across, 2.2 * down + 0.6), squeeze=False, sharey=True, layout="constrained"
    )
    names = sorted({name for lines in chosen.values() for name in lines})
    colours = {name: f"C{i}" for i, name in enumerate(names)}
    for panel in axes.flat[len(chosen) :]:
        panel.set_visible(False)
    for panel, (graph, lines) in zip(axes.flat, chosen.items(), strict=False):
        for name, values in lines.items():
            points = sorted(values.items())
            style = "--" if name == "speed_of_light" else "-"
            panel.plot(*zip(*points, strict=True), style, marker="o", markersize=2.5, color=colours[name], label=name)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set(xscale="log", yscale="log", title=graph)
        panel.title.set_fontsize(8)
        widths = sorted({w for values in lines.values() for w in values})
        panel.set_xticks(widths, map(str, widths), fontsize=6)
        panel.minorticks_off()
        panel.grid(axis="y", linewidth=0.3)
    handles: dict[str, Any] = {}
    for panel in axes.flat:
        handles |= {text: handle for handle, text in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4, fontsize=7)
    figure.suptitle(f"{gpu}, {product}: time / time of ours:auto, by width; above 1, ours is faster", fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def panels(rows: Sequence[Row]) -> Panels:
    """What is drawn: in each case inside CUDA graphs where that was measured; of cuSPARSE the best algorithm."""
    times: dict[tuple[str, str, int], dict[str, dict[str, float]]] = {}  # case -> mode -> contender -> ms
    for row in rows:
        if not row["ms_median"] or row["mode"] not in ("graph", "eager") or row["setting"]:
            continue
        product = f"{'weighted ' if row['weighted'] == '1' else ''}{row['reduce']}, {row['dtype']}"
        product += "" if row["order"] == "natural" else f", {row['order']}"
        here = times.setdefault((row["graph"], product, int(row["width"])), {}).setdefault(row["mode"], {})
        name = "best cuSPARSE" if row["contender"].startswith("cusparse:") else row["contender"]
        here[name] = min(float(row["ms_median"]), here.get(name, math.inf))
    found: Panels = {}
    for (graph, product, width), modes in times.items():
        here = modes["graph"] if OURS in modes.get("graph", {}) else modes.get("eager", {})
        for name, ms in here.items():
            if OURS in here and name not in NO_OPPONENTS:
                found.setdefault((graph, product), {}).setdefault(name, {})[width] = ms / here[OURS]
    return found
