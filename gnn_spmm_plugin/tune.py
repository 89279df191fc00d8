"""What is fastest for this very graph: measured within a time budget, and remembered in the user's cache folder.

One file for each (graph, width, dtype, reduction, GPU, version of the kernels), written whole and then moved into
place, so that any number of processes can tune at once: the last to finish stays, and none is lost.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ._config import log
from ._files import read_own
from ._table import progress
from .bench.candidates import GpuStopwatch, Problem, Stopwatch, measure
from .bench.timer import own_stream
from .candidate import CANDIDATES, RULES, Candidate, allowed
from .csr import Core, Csr
from .decider import FOLDER, Decision, DeviceFacts, inputs, shipped
from .features import MatrixFeatures
from .graph import Graph
from .kernels import KERNELS, KERNELS_VERSION, dtype_name

#: Of the files.
FORMAT = 1
#: And they are shorter than this.
MOST_BYTES = 1 << 20
#: What ``mode="tune"`` may take.
SECONDS = 10.0
#: Candidates that are measured together, beside the rules, and how many of the best are compared once more.
BATCH, FINALISTS = 4, 3
#: What a candidate has to save of the time of the rules, to be remembered instead of them.
WORTH = 0.02


def cache_folder() -> Path:
    """Where results are remembered: where the platform has its users' caches.

    Raises:
        RuntimeError: this user has no home.
    """
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        given = Path(os.environ.get("XDG_CACHE_HOME", ""))
        base = given if given.is_absolute() else Path.home() / ".cache"  # others are to be ignored, says the standard
    return base / "gnn_spmm_plugin" / "tuned"


def fingerprint(csr: Csr) -> str:
    """A hash of the structure, the same on every device; one pass over the graph and one read back."""
    sums = []
    odd = ((0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9), (0x14D049BB133111EB, 0x2545F4914F6CDD1D))
    for t in (csr.rowptr, csr.col):
        total = torch.zeros(2, dtype=torch.int64, device=t.device)
        for start in range(0, len(t), 1 << 24):
            part = t[start : start + (1 << 24)].long()
            place = torch.arange(start, start + len(part), device=t.device)
            for i, (a, b) in enumerate(odd):
                mixed = (part + 1) * a + place * b
                mixed = (mixed ^ (mixed >> 29)) * b
                total[i] += (mixed ^ (mixed >> 32)).sum()
        sums.append(total)
    numbers = [csr.num_rows, csr.num_cols, len(csr.col), *torch.cat(sums).tolist()]
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Tuned:
    """What was found for a product.

    Attributes:
        graph, width, dtype, reduce, gpu, version: what it is for.
        candidate: the fastest.
        ms: its time, and of the rules.
        rules_ms: see there.
        measured: time of each candidate that was measured, in milliseconds.
        complete: whether the budget sufficed for all candidates.
    """

    graph: str
    width: int
    dtype: str
    reduce: str
    gpu: str
    version: int
    candidate: str
    ms: float
    rules_ms: float
    measured: dict[str, float]
    complete: bool

    def key(self) -> tuple[Any, ...]:
        """What it is for."""
        return self.graph, self.width, self.dtype, self.reduce, self.gpu, self.version


def _path(key: tuple[Any, ...]) -> Path:
    return cache_folder() / (hashlib.sha256(json.dumps(key).encode()).hexdigest()[:40] + ".json")


def recall(key: tuple[Any, ...]) -> Tuned | None:
    """What was remembered under a key; a file that is none of ours, or says something else, is left aside."""
    path: Path | None = None
    try:
        path = _path(key)
        content = json.loads(read_own(path, MOST_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RuntimeError) as e:  # a RecursionError is one of the last
        log.warning("%s cannot be read and is not used: %s", path or "what was tuned", e)
        return None
    try:
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, expected {FORMAT}")
        fields = {f.name: content[f.name] for f in dataclasses.fields(Tuned)}
        found = Tuned(**fields)
        if found.key() != key:
            raise ValueError("it is about another product")
        if Candidate.parse(found.candidate) not in CANDIDATES:
            raise ValueError(f"{found.candidate!r} is none of the candidates")
        decision(found)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
        log.warning("%s is not used: %s: %s", path, type(e).__name__, e)
        return None
    return found


def remember(found: Tuned) -> None:
    """Keeps a result; where that can't be written, a warning says so."""
    path: Path | None = None
    try:
        path = _path(found.key())
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as f:
                json.dump({"format": FORMAT, **dataclasses.asdict(found)}, f, indent=1)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except (OSError, RuntimeError) as e:
        log.warning("%s cannot be written, the result of tuning is not remembered: %s", path or "a file", e)


# ---------------------------------------------------------------------- measuring


def _in_order(csr: Csr, width: int, dtype: torch.dtype, reduce: str, device: DeviceFacts) -> list[Candidate]:
    """The candidates that can run, the most promising first where there is a decider; the rules left out."""
    f = MatrixFeatures.of(csr)
    kernels = [k.name for k in KERNELS if reduce in k.reduces]
    usable = [c for c in CANDIDATES if c != RULES and allowed(c, f, kernels)]
    decider, _ = shipped(FOLDER, device.name)
    if decider is not None:
        expected = dict(zip(decider.candidates, decider.foresee(inputs(f, width, dtype, device)).tolist(), strict=True))
        usable.sort(key=lambda c: expected.get(c, 0.0))
    return usable


def search(
    graph: Graph, width: int, dtype: torch.dtype, reduce: str, seconds: float, watch: Stopwatch, device: DeviceFacts
) -> Tuned:
    """Measures candidates until the time is over, then the best ones once more, and returns what was found.

    Args:
        graph: the graph.
        width: feature columns.
        dtype: of the features.
        reduce: of the product, which is weighted where it is a sum or a mean.
        seconds: when nothing new is begun any more; the rules and a few candidates are measured whatever it is.
        watch: how time is taken.
        device: the GPU.
    """
    end = time.monotonic() + seconds
    own = graph._csr
    # What is prepared for candidates goes with this copy, which shares the arrays.
    copy = Graph._make(Core(Csr(own.rowptr, own.col, own.perm, own.num_cols)), False)
    generator = torch.Generator(graph.device).manual_seed(0)
    x = (torch.rand(graph.num_src, width, generator=generator, device=graph.device) * 2 - 1).to(dtype)
    weight = None
    if reduce in ("sum", "mean"):
        weight = (torch.rand(graph.num_edges, generator=generator, device=graph.device) + 0.5).to(dtype)
    problem = Problem(copy)
    order = _in_order(copy._csr, width, dtype, reduce, device)
    parts = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
    ratio: dict[Candidate, float] = {RULES: 1.0}
    rules_ms, complete = math.inf, True
    with torch.no_grad():
        for i, part in enumerate(progress(parts, len(parts), "tune")):
            if i and time.monotonic() > end:
                complete = False
                continue
            until = end if i else math.inf
            found = measure(problem, x, weight, watch, (RULES, *part), reduce, until)
            times = {m.candidate: m.ms for m in found if m.ms is not None}
            complete &= i == 0 or time.monotonic() <= end
            if RULES in times:  # clocks change: only what was measured together is compared
                rules_ms = min(rules_ms, times[RULES])
                ratio |= {c: ms / times[RULES] for c, ms in times.items() if c != RULES}
        finalists = sorted((c for c in ratio if c != RULES), key=lambda c: ratio[c])[:FINALISTS]
        last = {m.candidate: m.ms for m in measure(problem, x, weight, watch, (RULES, *finalists), reduce) if m.ms}
    best = min(last, key=lambda c: last[c], default=RULES)
    if last.get(best, math.inf) > (1 - WORTH) * last.get(RULES, math.inf):
        best = RULES
    return Tuned(
        graph=fingerprint(own),
        width=width,
        dtype=dtype_name(dtype),
        reduce=reduce,
        gpu=device.name,
        version=KERNELS_VERSION,
        candidate=str(best),
        ms=last.get(best, 0.0),
        rules_ms=last.get(RULES, 0.0),
        measured={str(c): round(r * rules_ms, 6) for c, r in ratio.items()} if rules_ms < math.inf else {},
        complete=complete,
    )


def tuned(
    graph: Graph,
    width: int,
    dtype: torch.dtype = torch.float32,
    reduce: str = "sum",
    *,
    seconds: float = SECONDS,
    again: bool = False,
    watch: Stopwatch | None = None,
    device: DeviceFacts | None = None,
) -> Tuned | None:
    """What is fastest for a product, from the cache or measured now; None where there is nothing to choose from.

    Args:
        graph: the graph.
        width: feature columns, 1 or more.
        dtype: of the features.
        reduce: of the product.
        seconds: see `search`.
        again: measure even if it is remembered.
        watch: how time is taken, instead of on the graph's GPU.
        device: instead of that GPU.
    """
    csr = graph._csr
    if watch is None and csr.col.device.type != "cuda":
        return None
    if width == 0 or csr.col.shape[0] == 0 or csr.col.dtype != torch.int32:
        return None
    device = DeviceFacts.of(csr.col.device) if device is None else device
    key = (fingerprint(csr), width, dtype_name(dtype), reduce, device.name, KERNELS_VERSION)
    found = None if again else recall(key)
    if found is None:
        with own_stream(csr.col.device.type):
            found = search(graph, width, dtype, reduce, seconds, GpuStopwatch() if watch is None else watch, device)
        remember(found)
    return found


def decision(found: Tuned | None) -> Decision:
    """What a plan takes from that, and says about it."""
    if found is None:
        return Decision(RULES, ("tune      nothing to choose from here",))
    gain = f"{found.ms:.4g} ms measured, the rules {found.rules_ms:.4g} ms"
    part = "" if found.complete else "; the time did not suffice for all"
    lines = [f"tune      {found.candidate}: {gain}; of {len(found.measured)} candidates{part}"]
    ranked = sorted(found.measured.items(), key=lambda item: float(item[1]))[:4]
    lines.append("tune      " + ", ".join(f"{name} {ms:.4g} ms" for name, ms in ranked))
    return Decision(Candidate.parse(found.candidate), tuple(lines))
