"""Measures configurations: every contender is checked against float64, then all are timed in turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._table import progress
from .contenders import Contender, Kind, Names
from .problem import BOUNDS, Configuration, Problem, Subject, relative_error
from .results import Row, Store
from .timer import GRAPH_BELOW_MS, Timing, own_stream, time_side_by_side

#: Bytes per second that gathers of feature rows have reached in the best kernels seen, by GPU: the analytic limit.
#: H200: 10 TB/s, where L1 and L2 serve them (a model of Reddit, width 16 to 64, several kernels).
GATHER_CEILING = {"H200": 10e12}


@dataclass(frozen=True)
class Job:
    """One configuration and who takes part."""

    configuration: Configuration
    kinds: tuple[Kind, ...]
    modes: tuple[str, ...]

    def names(self, device: str) -> Names:
        """(contender, setting) of all that can run here."""
        return [n for k in self.kinds if k.unavailable(device) is None for n in k.names(self.configuration, device)]


def copy_bandwidth(device: str) -> float:
    """Bytes per second, read and written, of a copy within the device's memory."""
    size = (1 << 30) if device == "cuda" else (1 << 26)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    with own_stream(device):
        for _ in range(50 if device == "cuda" else 1):  # clocks come up
            target.copy_(source)
        (timing,) = time_side_by_side([lambda: target.copy_(source)], device, "eager", 50)
    assert isinstance(timing, Timing)
    return 2 * size / (timing.median_ms / 1e3)


def gather_ceiling(device: str) -> float | None:
    """The constant of `GATHER_CEILING` for this GPU, or None."""
    if device != "cuda":
        return None
    name = torch.cuda.get_device_name()
    return next((v for k, v in GATHER_CEILING.items() if k in name), None)


def run(
    jobs: Sequence[Job],
    load: Callable[[str], Subject],
    store: Store,
    device: str,
    budget_ms: float = 30.0,
    bandwidth: float | None = None,
) -> bool:
    """Does what of `jobs` is not in `store` yet.

    Args:
        jobs: in any order; those of a graph next to each other spare making it twice.
        load: makes a graph by its name.
        store: where the measurements go.
        device: ``"cpu"`` or ``"cuda"``.
        budget_ms: time on the device for each contender and mode.
        bandwidth: see `copy_bandwidth`; None leaves the analytic limits out.

    Returns:
        Whether every result was right.
    """
    todo = [job for job in jobs if not store.has(job.configuration.columns(), job.names(device))]
    right = True
    subject: Subject | None = None
    with own_stream(device), torch.no_grad():
        for job in progress(todo, len(todo), "bench"):
            if subject is None or subject.name != job.configuration.graph:
                subject = None  # its memory goes before the next comes
                subject = load(job.configuration.graph)
            rows = measure(Problem(subject, job.configuration), job, device, budget_ms, bandwidth)
            store.add(rows)
            right &= not any(row["note"].startswith("wrong") for row in rows)
    return right


def measure(problem: Problem, job: Job, device: str, budget_ms: float, bandwidth: float | None) -> list[dict[str, Any]]:
    """The rows of one configuration."""
    base: dict[str, Any] = {**job.configuration.columns(), "note": ""}
    rows: list[dict[str, Any]] = []
    ready: list[tuple[Contender, float | None]] = []
    for kind in job.kinds:
        if kind.unavailable(device) is not None:
            continue
        for name, setting in kind.names(job.configuration, device):
            try:
                contender = kind.prepare(problem, name, setting)
                error = check(problem, contender)
            except Exception as e:  # whatever an opponent raises says that it cannot do this
                if device == "cuda":
                    torch.cuda.synchronize()  # raises where the device itself has failed: nothing can be measured then
                note = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
                rows.append({**base, "contender": name, "setting": setting, "mode": "none", "note": note[:200]})
                continue
            bound = BOUNDS[job.configuration.dtype] if contender.bound is None else contender.bound
            if error is not None and not error <= bound:
                rows.append(
                    {
                        **{**base, "contender": name, "setting": setting, "mode": "none", "rel_err": error},
                        "note": f"wrong: relative error {error:.1e}, at most {bound:.0e}",
                    }
                )
                continue
            ready.append((contender, error))
    estimates: list[float] | None = None
    for mode in job.modes:
        if mode != "eager" and device == "cpu" and mode != "host":
            continue
        some = [i for i, _ in enumerate(ready) if mode != "graph" or not estimates or estimates[i] < GRAPH_BELOW_MS]
        known = [estimates[i] for i in some] if estimates else None
        timings = time_side_by_side([ready[i][0].call for i in some], device, mode, budget_ms, known)
        if mode == "eager":
            estimates = [t.median_ms if isinstance(t, Timing) else math.inf for t in timings]
        found = [
            {
                **base,
                "contender": ready[i][0].name,
                "setting": ready[i][0].setting,
                "mode": mode,
                "rel_err": ready[i][1],
            }
            | _facts(problem, timing)
            for i, timing in zip(some, timings, strict=True)
        ]
        limit = next((row.get("ms_median") for row in found if row["contender"] == "speed_of_light"), None)
        for row in found:
            if limit is not None and "ms_median" in row:
                row["roofline_share"] = limit / row["ms_median"]
        rows += found
    return rows + [{**base, **row} for row in _analytic(problem, device, bandwidth)]


def check(problem: Problem, contender: Contender) -> float | None:
    """Calls it once, into memory that holds NaN; returns the relative error, None where there is nothing to check."""
    if not contender.checked:
        contender.call()
        return None
    problem.out.fill_(math.nan)
    poison = torch.full_like(problem.out, math.nan)
    del poison  # the allocator hands its memory to the next who asks for that much
    result = contender.call()
    wanted = problem.exact if contender.wanted is None else contender.wanted()
    return relative_error(result.detach(), wanted)


def _facts(problem: Problem, timing: Timing | str) -> dict[str, Any]:
    if isinstance(timing, str):
        return {"note": timing[:200]}
    return {
        "ms_median": timing.median_ms,
        "ms_p20": timing.p20_ms,
        "ms_p80": timing.p80_ms,
        "gbps": problem.gathered_bytes / max(timing.median_ms, 1e-9) / 1e6,
    }


def _analytic(problem: Problem, device: str, bandwidth: float | None) -> Iterable[dict[str, Any]]:
    """Rows for what the memory system alone would take."""
    if bandwidth is None:
        return
    ceiling = gather_ceiling(device)
    for name, size, rate in (
        ("limit:copy", problem.compulsory_bytes, bandwidth),
        ("limit:gather", problem.gathered_bytes, ceiling),
    ):
        if rate is not None:
            ms = size / rate * 1e3
            yield {
                **{"contender": name, "setting": "", "mode": "analytic", "ms_median": ms},
                "gbps": problem.gathered_bytes / max(ms, 1e-9) / 1e6,
            }


__all__ = ["GATHER_CEILING", "Job", "Row", "check", "copy_bandwidth", "gather_ceiling", "measure", "run"]
