"""Times candidates of one product side by side, after comparing their results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from ..candidate import CANDIDATES, RULES, Candidate, allowed, as_measured
from ..features import MatrixFeatures
from ..functional import spmm
from ..graph import Graph
from ..kernels import KERNELS
from ..plan import Plan, build_candidate
from ..schedule import layout_by_rule
from .problem import BOUNDS
from .timer import Timing, estimate, time_side_by_side

#: A candidate that takes so many times as long as the best at first is not timed again; where it takes so many
#: milliseconds that it was not the host that took them.
HOPELESS, HOST_MS = 2.0, 0.3
#: The note of a candidate that is not worth measuring.
SKIPPED = "not for such a graph"

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
                found[candidate] = Measured(candidate, None, SKIPPED)
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
        if ms > max(HOPELESS * best, HOST_MS) and candidate != RULES:
            found[candidate] = Measured(candidate, ms, "timed once")
        else:
            ready.append((candidate, call, ms))
    hopeless = [r for r in ready if r[2] > max(HOPELESS * best, HOST_MS) and r[0] != RULES]
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
