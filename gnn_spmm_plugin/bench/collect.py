"""What the decider is trained on: times of its candidates on many graphs, and what the graphs look like.

The file has one row for each graph, width, dtype and candidate, and one of width 0 for each graph whose note holds the
features. Rows of a product are written together, and what the file has is not measured again.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._table import progress
from ..data.edges import read_edges
from ..decider import DeviceFacts
from ..features import MatrixFeatures
from ..graph import Graph
from ..kernels import KERNELS_VERSION, dtype_name
from . import graphs
from .candidates import SKIPPED, GpuStopwatch, Problem, Stopwatch, measure
from .regimes import Drawn, Regime, held_out, regimes
from .results import environment
from .timer import own_stream

WIDTHS = (16, 32, 64, 128, 256)
#: Of every `HALF_EVERY`-th graph.
HALF_WIDTHS = (64, 256)
HALF_EVERY = 3
COLUMNS = ("graph", "family", "holdout", "width", "dtype", "candidate", "ms", "note")
#: Graphs of `gnn_spmm_plugin.bench.graphs.SPECS` up to this size are measured too; none is trained on.
MOST_EDGES = 22_000_000
_LARGE = ("proteins_like", "redditlike_sorted", "redditlike_shuf", "productslike_sorted", "productslike_shuf")
HOLDOUT = 20

# ---------------------------------------------------------------------- the file


@dataclass
class Collection:
    """The rows of a file of measurements.

    Attributes:
        head: what the lines that begin with ``#`` say.
        rows: by (graph, width, dtype), by candidate.
    """

    head: dict[str, str]
    rows: dict[tuple[str, int, str], dict[str, dict[str, str]]]

    @classmethod
    def read(cls, path: str | Path) -> Collection:
        """Reads a file; the torn end that an interrupted run leaves is not read.

        Raises:
            ValueError: it cannot be read, or is no such file.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise ValueError(f"{path} cannot be read: {e}") from e
        lines = text[: text.rfind("\n") + 1].splitlines()
        head = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# ") and ": " in line)
        body = [line for line in lines if not line.startswith("#")]
        if not body or tuple(body[0].split(",")) != COLUMNS:
            raise ValueError(f"{path} is no file of `gnn-spmm tune --collect`: its columns are not {','.join(COLUMNS)}")
        rows: dict[tuple[str, int, str], dict[str, dict[str, str]]] = {}
        try:
            table = list(csv.DictReader(body))
        except csv.Error as e:
            raise ValueError(f"{path} cannot be read: {e}") from e
        for row in table:
            if None in row or None in row.values() or not row["width"].isdecimal():
                raise ValueError(f"{path} has a row that is none: {row}")
            rows.setdefault((row["graph"], int(row["width"]), row["dtype"]), {})[row["candidate"]] = row
        return cls(head, rows)

    def features(self) -> dict[str, MatrixFeatures]:
        """Of each graph.

        Raises:
            ValueError: some are missing, or no numbers.
        """
        found = {}
        kinds = {f.name: int if f.type in ("int", int) else float for f in dataclasses.fields(MatrixFeatures)}
        for (graph, width, _), rows in self.rows.items():
            if width == 0:
                try:
                    values = dict(part.split("=") for part in rows["features"]["note"].split(";"))
                    given: dict[str, Any] = {name: kinds[name](float(v)) for name, v in values.items()}
                    found[graph] = MatrixFeatures(**given)
                except (KeyError, TypeError, ValueError, OverflowError) as e:
                    raise ValueError(f"the features of graph {graph} cannot be read: {type(e).__name__}: {e}") from e
        return found

    def device(self) -> DeviceFacts:
        """The GPU of the measurements.

        Raises:
            ValueError: the head of the file does not say.
        """
        try:
            return DeviceFacts(self.head["gpu"], int(self.head["l2_bytes"]), int(self.head["multiprocessors"]))
        except (KeyError, ValueError) as e:
            raise ValueError(f"the head of the file does not say which GPU was measured: {e}") from e


class Writer:
    """Appends to a file of measurements, which it begins where there is none."""

    def __init__(self, path: str, head: dict[str, str]) -> None:
        self.path = path
        exists = os.path.exists(path) and os.path.getsize(path) > 0
        if exists:
            content = Path(path).read_bytes()
            os.truncate(path, content.rfind(b"\n") + 1)  # a torn row
        self.known = set(Collection.read(path).rows) if exists else set()
        if not exists:
            Path(path).write_text(
                "".join(f"# {k}: {v}\n" for k, v in head.items()) + ",".join(COLUMNS) + "\n", encoding="utf-8"
            )

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Writes the rows of one product, at once."""
        text = io.StringIO()
        csv.DictWriter(text, COLUMNS, lineterminator="\n").writerows(rows)
        with open(self.path, "a", encoding="utf-8") as f:
            f.write(text.getvalue())
        self.known |= {(r["graph"], int(r["width"]), r["dtype"]) for r in rows}


def suite(folder: str | None) -> list[Regime]:
    """The graphs: drawn ones, the ``.npz`` files of a folder, and those of `graphs.SPECS` that are not too large."""
    files = [] if folder is None else sorted(Path(folder).glob("*.npz"))
    if folder is not None and not files:
        raise ValueError(f"there is no .npz file in {folder}")

    def from_file(path: Path, g: torch.Generator) -> Drawn:
        (src, dst), n = read_edges(path)
        order = (dst * n + src).argsort()
        rowptr = torch.zeros(n + 1, dtype=torch.int32)
        rowptr[1:] = torch.bincount(dst, minlength=n).cumsum(0)
        return rowptr.to(g.device), src[order].int().to(g.device), n

    def from_spec(name: str, g: torch.Generator) -> Drawn:
        c = graphs.SPECS[name](g, 1.0)
        return c.rowptr, c.col, c.num_nodes

    real = [Regime(p.stem, "file", lambda g, p=p: from_file(p, g)) for p in files]  # type: ignore[misc]
    specs = [
        Regime(name, "bench", lambda g, name=name: from_spec(name, g))  # type: ignore[misc]
        for name in graphs.SPECS
        if name not in _LARGE
    ]
    drawn = regimes()
    each = max(len(drawn) // max(len(real), 1), 1)
    mixed: list[Regime] = []
    for i, regime in enumerate(drawn):
        mixed.append(regime)
        if real and i % each == each - 1:
            mixed.append(real.pop(0))
    return [*mixed, *real, *specs]


def head(command: str, device: str) -> dict[str, str]:
    """The first lines of a file."""
    facts = DeviceFacts.of(torch.device("cuda")) if device == "cuda" else DeviceFacts("none", 1, 1)
    return {
        **environment(),
        "gpu": facts.name,
        "l2_bytes": str(facts.l2_bytes),
        "multiprocessors": str(facts.multiprocessors),
        "kernels_version": str(KERNELS_VERSION),
        "what": "weighted sums, milliseconds, median inside a CUDA graph; see gnn_spmm_plugin/bench/collect.py",
        "command": command,
    }


def collect(
    path: str,
    command: str,
    *,
    folder: str | None = None,
    limit_seconds: float = math.inf,
    holdout: int = HOLDOUT,
    device: str = "cuda",
    stopwatch: Stopwatch | None = None,
    chosen: Sequence[Regime] | None = None,
    widths: Sequence[int] = WIDTHS,
) -> int:
    """Measures what of the suite is not in the file yet.

    Args:
        path: the file.
        command: for its head.
        folder: of more graphs.
        limit_seconds: nothing is begun after so long.
        holdout: how many graphs of the suite, `graphs.SPECS` aside, are marked as none to train on.
        device: where graphs are drawn.
        stopwatch: instead of that of a GPU.
        chosen: instead of the whole suite.
        widths: of float32 features.

    Returns:
        How many products are still missing.
    """
    end = time.monotonic() + limit_seconds
    todo = list(suite(folder) if chosen is None else chosen)
    held = held_out([(r.name, r.family) for r in todo if r.family != "bench"], holdout)
    writer = Writer(path, head(command, device))
    watch = GpuStopwatch() if stopwatch is None else stopwatch
    missing = 0
    with own_stream(device), torch.no_grad():
        for i, regime in enumerate(progress(todo, len(todo), "collect")):
            products = [(w, torch.float32) for w in widths]
            products += [(w, torch.float16) for w in HALF_WIDTHS if i % HALF_EVERY == 0]
            new = [(w, d) for w, d in products if (regime.name, w, dtype_name(d)) not in writer.known]
            if new and time.monotonic() < end:
                base = {
                    "graph": regime.name,
                    "family": regime.family,
                    "holdout": int(regime.family == "bench" or regime.name in held),
                }
                try:
                    new = new[_measure_graph(regime, new, base, writer, watch, device, end) :]
                except Exception as e:
                    if device == "cuda":
                        torch.cuda.synchronize()
                    print(f"{regime.name} is left out: {type(e).__name__}: {str(e)[:200]}", file=sys.stderr)
                if device == "cuda":
                    torch.cuda.empty_cache()
            missing += len(new)
    return missing


def _measure_graph(
    regime: Regime,
    products: Sequence[tuple[int, torch.dtype]],
    base: dict[str, Any],
    writer: Writer,
    watch: Stopwatch,
    device: str,
    end: float,
) -> int:
    """How many of the products were measured."""
    rowptr, col, num_cols = regime.draw(device)
    graph = Graph.from_csr(rowptr, col, num_cols)
    problem = Problem(graph)
    if (regime.name, 0, "") not in writer.known:
        values = dataclasses.asdict(problem.features())
        note = ";".join(f"{k}={v:.9g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items())
        writer.add([{**base, "width": 0, "dtype": "", "candidate": "features", "ms": "", "note": note}])
    generator = torch.Generator(device).manual_seed(7)
    weight = torch.rand(graph.num_edges, generator=generator, device=device) + 0.5
    done = 0
    for width, dtype in products:
        if time.monotonic() > end:
            break
        x = (torch.rand(num_cols, width, generator=generator, device=device) * 2 - 1).to(dtype)
        found = measure(problem, x, weight.to(dtype), watch)
        writer.add(
            [
                {
                    **base,
                    "width": width,
                    "dtype": dtype_name(dtype),
                    "candidate": str(m.candidate),
                    "ms": "" if m.ms is None else f"{m.ms:.5g}",
                    "note": m.note,
                }
                for m in found
                if m.note != SKIPPED
            ]
        )
        done += 1
    return done
