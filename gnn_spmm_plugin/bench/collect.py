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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from .._table import progress
from ..data.edges import read_edges
from ..decider import CANDIDATES, RULES, Candidate, DeviceFacts, allowed, as_measured
from ..features import MatrixFeatures
from ..functional import spmm
from ..graph import Graph
from ..kernels import KERNELS, KERNELS_VERSION
from ..plan import Plan, build_candidate
from ..schedule import layout_by_rule
from . import graphs
from .problem import BOUNDS
from .regimes import Drawn, Regime, held_out, regimes
from .results import environment
from .timer import Timing, estimate, own_stream, time_side_by_side

WIDTHS = (16, 32, 64, 128, 256)
#: Of every `HALF_EVERY`-th graph.
HALF_WIDTHS = (64, 256)
HALF_EVERY = 3
COLUMNS = ("graph", "family", "holdout", "width", "dtype", "candidate", "ms", "note")
#: A candidate that takes so many times as long as the best at first is not timed again.
HOPELESS = 2.0
#: Graphs of `gnn_spmm_plugin.bench.graphs.SPECS` up to this size are measured too; none is trained on.
MOST_EDGES = 22_000_000
_LARGE = ("proteins_like", "redditlike_sorted", "redditlike_shuf", "productslike_sorted", "productslike_shuf")
HOLDOUT = 20
_SKIPPED = "not for such a graph"

Call: TypeAlias = Callable[[], Any]


class Stopwatch(Protocol):
    """How candidates are timed; a test brings its own."""

    def first(self, call: Call) -> tuple[Any, float]:
        """The result of a call, and roughly how many milliseconds it takes."""

    def all(self, calls: Sequence[Call], estimates: Sequence[float]) -> list[float | str]:
        """Milliseconds of each, or why not."""


@dataclass(frozen=True)
class GpuStopwatch:
    """Medians inside CUDA graphs, side by side; inside `own_stream`.

    Attributes:
        budget_ms: time for each candidate.
    """

    budget_ms: float = 5.0

    def first(self, call: Call) -> tuple[Any, float]:
        """See `Stopwatch`."""
        return call(), estimate(call)

    def all(self, calls: Sequence[Call], estimates: Sequence[float]) -> list[float | str]:
        """See `Stopwatch`."""
        found = time_side_by_side(calls, "cuda", "graph", self.budget_ms, estimates)
        return [t.median_ms if isinstance(t, Timing) else t for t in found]


@dataclass(frozen=True)
class Measured:
    """What became of a candidate: its time, or a note that says why there is none or whose it is."""

    candidate: Candidate
    ms: float | None
    note: str = ""


@dataclass
class Problem:
    """A graph, and the plans of its candidates, which all widths share.

    Attributes:
        graph: the graph, on a GPU (elsewhere with a stopwatch that makes no calls).
        kernel_device: whose kernels are planned for.
    """

    graph: Graph
    kernel_device: str = "cuda"
    plans: dict[Candidate, Plan] = field(default_factory=dict)

    def features(self) -> MatrixFeatures:
        """Of the graph."""
        return MatrixFeatures.of(self.graph._csr)

    def plan(self, candidate: Candidate, width: int, dtype: torch.dtype) -> Plan:
        """Its plan, kept for other widths."""
        made = self.plans.get(candidate)
        if made is None:
            kernel = next(k for k in KERNELS if k.name == candidate.kernel)
            made = self.plans[candidate] = build_candidate(self.graph._csr, kernel, candidate, width, dtype)
        return made

    def same_as(self, candidate: Candidate) -> Candidate | None:
        """The candidate whose time is this one's too, perhaps itself; None: not worth measuring."""
        f = self.features()
        if candidate is not RULES and candidate.layout is not None and candidate.schedule == "natural":
            rule = Candidate(layout_by_rule(f)[0])
            found = as_measured(candidate, f)
            return RULES if found == as_measured(rule, f) and not self.plans[RULES].stage else found
        return as_measured(candidate, f)


def measure(
    problem: Problem,
    x: Tensor,
    weight: Tensor | None,
    stopwatch: Stopwatch,
    candidates: Sequence[Candidate] = CANDIDATES,
    reduce: str = "sum",
    until: float = math.inf,
) -> list[Measured]:
    """Times candidates of one product; the rules come first, and every other result is compared with theirs.

    Args:
        problem: the graph.
        x: ``[num_src, F]`` features.
        weight: ``[E]``, or None.
        stopwatch: how.
        candidates: the first has to be `RULES`.
        reduce: of the product.
        until: `time.monotonic` of when nothing more is begun.

    Raises:
        RuntimeError: the rules themselves fail, or the device does.
    """
    graph, width, dtype = problem.graph, x.shape[1], x.dtype
    kernels = [k.name for k in KERNELS if reduce in k.reduces and k.device == problem.kernel_device]
    found: dict[Candidate, Measured] = {}
    ready: list[tuple[Candidate, Call, float]] = []
    same: dict[Candidate, Candidate] = {}
    wanted: Any = None
    best = math.inf
    for candidate in candidates:
        if time.monotonic() > until:
            break
        if not allowed(candidate, problem.features(), kernels):
            continue
        try:
            other = RULES if candidate == RULES else problem.same_as(candidate)
            if other is None:
                found[candidate] = Measured(candidate, None, _SKIPPED)
                continue
            if other != candidate:
                same[candidate] = other
                if other in found or any(other == c for c, *_ in ready):
                    continue
                candidate = other
            plan = problem.plan(candidate, width, dtype)

            def call(plan: Plan = plan) -> Any:
                return spmm(graph, x, weight, reduce, plan=plan)

            out, ms = stopwatch.first(call)
            wrong = None if wanted is None else _differs(out, wanted, dtype)
            if wanted is None:
                wanted = out
        except Exception as e:
            if candidate == RULES:
                raise
            if x.is_cuda:
                torch.cuda.synchronize()  # raises where the device itself has failed: nothing can be measured then
            text = str(e).strip().splitlines()
            what = "out of memory" if isinstance(e, torch.OutOfMemoryError) else text[0] if text else type(e).__name__
            found[candidate] = Measured(candidate, None, what[:150])
            continue
        if wrong is not None:
            found[candidate] = Measured(candidate, None, wrong)
            continue
        best = min(best, ms)
        if ms > HOPELESS * best and candidate != RULES:
            found[candidate] = Measured(candidate, ms, "timed once")
        else:
            ready.append((candidate, call, ms))
    hopeless = [r for r in ready if r[2] > HOPELESS * best and r[0] != RULES]
    found |= {c: Measured(c, ms, "timed once") for c, _, ms in hopeless}
    ready = [r for r in ready if r[0] not in found]
    times = stopwatch.all([call for _, call, _ in ready], [ms for *_, ms in ready]) if ready else []
    for (candidate, *_), t in zip(ready, times, strict=True):
        found[candidate] = Measured(candidate, None, t) if isinstance(t, str) else Measured(candidate, t)
    for candidate, other in same.items():
        if candidate not in found and other in found:
            ms_or_none, note = found[other].ms, found[other].note
            found[candidate] = Measured(candidate, ms_or_none, note or f"as {other}")
    return list(found.values())


def _differs(out: Any, wanted: Any, dtype: torch.dtype) -> str | None:
    """What is wrong with a result, or None."""
    a, b = out.double(), wanted.double()
    norm = float(torch.linalg.vector_norm(b))
    error = float(torch.linalg.vector_norm(a.sub_(b))) / (norm or 1.0)
    bound = 2 * BOUNDS[dtype]  # both are rounded
    return None if error <= bound else f"wrong: {error:.1e} away from the rules' result"


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
        for row in csv.DictReader(body):
            if None in row or None in row.values() or not row["width"].isdecimal():
                raise ValueError(f"{path} has a row that is none: {row}")
            rows.setdefault((row["graph"], int(row["width"]), row["dtype"]), {})[row["candidate"]] = row
        return cls(head, rows)

    def features(self) -> dict[str, MatrixFeatures]:
        """Of each graph."""
        found = {}
        for (graph, width, _), rows in self.rows.items():
            if width == 0:
                values = dict(part.split("=") for part in rows["features"]["note"].split(";"))
                kinds = {f.name: int if f.type in ("int", int) else float for f in dataclasses.fields(MatrixFeatures)}
                given: dict[str, Any] = {name: kinds[name](float(v)) for name, v in values.items()}
                found[graph] = MatrixFeatures(**given)
        return found

    def device(self) -> DeviceFacts:
        """The GPU of the measurements."""
        return DeviceFacts(self.head["gpu"], int(self.head["l2_bytes"]), int(self.head["multiprocessors"]))


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
            new = [(w, d) for w, d in products if (regime.name, w, _name(d)) not in writer.known]
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
                    "dtype": _name(dtype),
                    "candidate": str(m.candidate),
                    "ms": "" if m.ms is None else f"{m.ms:.5g}",
                    "note": m.note,
                }
                for m in found
                if m.note != _SKIPPED
            ]
        )
        done += 1
    return done


def widths_of(collection: Collection) -> Iterator[tuple[int, str]]:
    """The products that a file has, (width, dtype), in order."""
    yield from sorted({(w, d) for _, w, d in collection.rows if w}, key=lambda p: (p[1], p[0]))
