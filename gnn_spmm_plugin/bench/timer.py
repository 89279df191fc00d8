"""Times functions side by side: medians of many calls, and how far they spread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch

#: How a call is timed. ``eager``: as Python makes it, caches warm. ``graph``: several calls in one CUDA graph, so that
#: no launch is waited for. ``cold``: as eager, after something larger than the L2 cache was written. ``host``: how long
#: the caller is busy, whatever the device does.
MODES = ("eager", "graph", "cold", "host")
#: Calls longer than this are not timed inside CUDA graphs: launching costs them nothing.
GRAPH_BELOW_MS = 3.0

Call = Callable[[], Any]
_Pair: TypeAlias = "tuple[torch.cuda.Event, torch.cuda.Event]"


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median, 20th and 80th percentile, and how many measurements there were."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    count: int

    @classmethod
    def of(cls, times: list[float]) -> Timing:
        """The summary of `times`."""
        ordered = sorted(times)

        def quantile(q: float) -> float:
            at = q * (len(ordered) - 1)
            low = int(at)
            high = min(low + 1, len(ordered) - 1)
            return ordered[low] + (at - low) * (ordered[high] - ordered[low])

        return cls(quantile(0.5), quantile(0.2), quantile(0.8), len(times))


@cache  # the allocator keeps the memory of each stream apart
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def own_stream(device: str) -> Iterator[None]:
    """Not the default stream, on which nothing can be captured; whatever is measured together runs on one."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    with torch.cuda.stream(_stream(torch.cuda.current_device())):
        yield
    torch.cuda.synchronize()


def time_side_by_side(
    calls: Sequence[Call],
    device: str,
    mode: str = "eager",
    budget_ms: float = 30.0,
    estimates: Sequence[float] | None = None,
) -> list[Timing | str]:
    """Times `calls` in turns, each for about `budget_ms` in all, at least three times; on CUDA inside `own_stream`.

    In turns: whatever changes during the measurement (clocks, other load) changes for all of them.

    Args:
        calls: what to time; each has run before.
        device: ``"cpu"`` or ``"cuda"``.
        mode: one of `MODES`.
        budget_ms: time to spend on each.
        estimates: milliseconds of each, where they are known roughly.

    Returns:
        For each a `Timing`, or the reason why it could not be captured.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
    if device == "cpu" or mode == "host":
        return list(_by_the_clock(calls, device, mode, budget_ms))
    if estimates is None:
        estimates = [estimate(call) for call in calls]
    if mode == "graph":
        return _captured(calls, budget_ms, estimates)
    return list(_by_events(calls, budget_ms, estimates, cold=mode == "cold"))


def estimate(call: Call) -> float:
    """Milliseconds on the GPU, roughly: the least of a few calls, fewer where they take long."""
    call()
    found = _elapsed(_timed(call))
    return found if found > 2 else min(found, *(_elapsed(_timed(call)) for _ in range(4)))


def _rounds(estimates: Sequence[float], budget_ms: float, fewest: int = 3) -> Iterator[list[int]]:
    """How often each call is made in each of a few rounds."""
    counts = [min(max(round(budget_ms / max(t, 1e-6)), fewest), 60) for t in estimates]
    rounds = min(5, max(counts, default=0))
    for i in range(rounds):
        yield [n * (i + 1) // rounds - n * i // rounds for n in counts]


def _by_the_clock(calls: Sequence[Call], device: str, mode: str, budget_ms: float) -> Iterator[Timing]:
    """On the CPU, or how long the host is busy: on a GPU, that many calls are made without waiting for one."""
    batch = 100 if mode == "host" else 1
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def once(call: Call) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        return (time.perf_counter() - start) * 1e3 / batch

    estimates = [min(once(call) for _ in range(2)) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    for counts in _rounds([t * batch for t in estimates], budget_ms, fewest=5):
        for call, count, found in zip(calls, counts, times, strict=True):
            found += [once(call) for _ in range(count)]
    wait()
    return map(Timing.of, times)


def _by_events(
    calls: Sequence[Call], budget_ms: float, estimates: Sequence[float], cold: bool = False
) -> Iterator[Timing]:
    """Between two events around each call."""
    flush = torch.empty(_cache_bytes(), dtype=torch.uint8, device="cuda") if cold else None
    recorded: list[list[_Pair]] = [[] for _ in calls]
    for counts in _rounds(estimates, budget_ms):
        for call, estimate, count, found in zip(calls, estimates, counts, recorded, strict=True):
            if count and estimate < 1 and not cold:
                call()  # what ran before has filled the cache with something else
            found += [_timed(call, flush) for _ in range(count)]
        torch.cuda.synchronize()
    return (Timing.of([_elapsed(p) for p in pairs]) for pairs in recorded)


def _timed(call: Call, flush: torch.Tensor | None = None) -> _Pair:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if flush is not None:
        flush.fill_(0)
    start.record()
    call()
    end.record()
    return start, end


def _elapsed(pair: _Pair) -> float:
    pair[1].synchronize()
    return float(pair[0].elapsed_time(pair[1]))


def _captured(calls: Sequence[Call], budget_ms: float, estimates: Sequence[float]) -> list[Timing | str]:
    """Inside a CUDA graph of several calls each, so that what a replay costs is shared."""
    results: list[Timing | str] = [""] * len(calls)
    graphs: list[tuple[int, torch.cuda.CUDAGraph, int, float]] = []  # (which call, its graph, calls in it, ms a replay)
    for i, (call, estimate) in enumerate(zip(calls, estimates, strict=True)):
        inside = min(max(round(2.0 / max(estimate, 1e-6)), 1), 20)
        graph = torch.cuda.CUDAGraph()
        try:
            with _capture(graph):
                for _ in range(inside):
                    call()
            graph.replay()
            replay = _elapsed(_timed(graph.replay))
        except RuntimeError as e:
            results[i] = "cannot be captured: " + str(e.__context__ or e).strip().splitlines()[0]
            torch.cuda.synchronize()
            continue
        graphs.append((i, graph, inside, replay))
    timings = _by_events([g.replay for _, g, _, _ in graphs], budget_ms, [t for *_, t in graphs])
    for (i, _, inside, _), t in zip(graphs, timings, strict=True):
        results[i] = Timing(t.median_ms / inside, t.p20_ms / inside, t.p80_ms / inside, t.count)
    return results


@contextlib.contextmanager
def _capture(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    # torch.cuda.graph would empty the allocator's cache each time; it has to be where memory is short, since what
    # earlier pools left there cannot be freed while a capture goes on.
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    if free < total // 2:
        torch.cuda.empty_cache()
    pool = torch.cuda.graph_pool_handle()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield
    finally:
        try:
            graph.capture_end()
        except RuntimeError:
            # What failed leaves the allocator in the belief that a capture goes on, and then it frees no cached memory.
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            raise


def _cache_bytes() -> int:
    """More than the L2 cache holds."""
    return 4 * int(getattr(torch.cuda.get_device_properties(), "L2_cache_size", 64 << 20))
