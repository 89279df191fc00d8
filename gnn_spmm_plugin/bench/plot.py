"""Draws measurements: time over ours, graph by graph and width by width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .results import CONFIGURATION, Row

OURS = "ours:auto"


def plot(rows: Sequence[Row], path: str, gpu: str) -> None:
    """Writes a picture of each product's times relative to ours; the file's name says in which format.

    Raises:
        ValueError: matplotlib is missing, or there is nothing to draw.
    """
    try:
        import matplotlib
    except ImportError as e:
        raise ValueError("--plot needs matplotlib; pip install 'gnn-spmm-plugin[bench]'") from e
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    speedups, labels = _speedups(rows)
    if not speedups:
        raise ValueError("there is nothing to draw: no contender was measured beside ours:auto")
    figure, axes = plt.subplots(figsize=(max(6.0, 0.16 * len(labels)), 4.5), layout="constrained")
    for contender, values in speedups.items():
        axes.plot(list(values), list(values.values()), marker="o", markersize=3, linewidth=0.8, label=contender)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_yscale("log")
    axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=6)
    axes.set_ylabel("time / time of ours:auto")
    axes.set_title(f"{gpu}: above the line, ours is faster", fontsize=9)
    axes.grid(axis="y", which="both", linewidth=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path)
    plt.close(figure)


def _speedups(rows: Sequence[Row]) -> tuple[dict[str, dict[int, float]], list[str]]:
    """Of each contender: position -> time over ours; and what stands at each position."""
    times: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows:
        if not row["ms_median"] or row["mode"] not in ("graph", "eager") or row["setting"]:
            continue
        full = (*(row[name] for name in CONFIGURATION), row["mode"])
        times.setdefault(full, {})[row["contender"]] = float(row["ms_median"])
    # Inside CUDA graphs where that was measured: the kernels themselves.
    chosen: dict[Any, dict[str, float]] = {}
    for full, here in times.items():
        if OURS in here and (full[-1] == "graph" or (*full[:-1], "graph") not in times):
            chosen[full[:-1]] = here
    result: dict[str, dict[int, float]] = {}
    labels = []
    for position, (case, here) in enumerate(sorted(chosen.items(), key=lambda item: (item[0][0], int(item[0][2])))):
        kind = "" if case[3:] == ("float32", "sum", "1") else f" {case[4]} {case[3]}"
        labels.append(f"{case[0]} {case[2]}{kind}")
        for contender, ms in here.items():
            if contender != OURS:
                result.setdefault(contender, {})[position] = ms / here[OURS]
    return result, labels
