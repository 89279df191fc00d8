"""Times a function: the median of many calls, and how far they spread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median, 20th and 80th percentile, and how many calls were timed."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    calls: int


def time_calls(fn: Callable[[], Any], device: str, repeat: int, warmup: int = 3, patience: float = 2.0) -> Timing:
    """Times `repeat` calls of `fn` one by one after `warmup` others; CUDA by events, the CPU by the clock.

    Slow calls are repeated less: at least 3 are timed, and no more begun after `patience` seconds.
    """
    start_of_all = time.perf_counter()
    for _ in range(warmup):
        fn()
        if time.perf_counter() - start_of_all > patience:
            break
    times: list[float] = []
    start_of_all = time.perf_counter()
    while len(times) < repeat and (len(times) < 3 or time.perf_counter() - start_of_all < patience):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            fn()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            fn()
            times.append((time.perf_counter() - begin) * 1e3)
    times.sort()
    return Timing(_quantile(times, 0.5), _quantile(times, 0.2), _quantile(times, 0.8), len(times))


def _quantile(ordered: list[float], q: float) -> float:
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])
