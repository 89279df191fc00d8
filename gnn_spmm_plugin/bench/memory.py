"""How much memory a piece of code holds at most."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch


def peak_memory(fn: Callable[[], Any], device: str) -> int | None:
    """Runs `fn`; the most bytes that tensors held at once meanwhile, beyond what they held before.

    On CUDA the allocator says so; on the CPU the profiler's record of every allocation does. None where there is no
    such record.
    """
    peak = PeakMemory(device)
    peak.start()
    try:
        fn()
    finally:
        found = peak.stop()
    return found


class PeakMemory:
    """What `peak_memory` says, of what happens between `start` and `stop`."""

    def __init__(self, device: str) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._before = 0
        self._stack = contextlib.ExitStack()
        self._profile: Any = None

    def start(self) -> None:
        """From here on."""
        if self._cuda:
            torch.cuda.synchronize()
            self._before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        self._profile = torch.profiler.profile(activities=activities, profile_memory=True)
        with quiet():
            self._stack.enter_context(self._profile)

    def stop(self) -> int | None:
        """Until here."""
        if self._cuda:
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - self._before
        with quiet():
            self._stack.close()
        try:
            events = self._profile.profiler.kineto_results.events()
            changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        except AttributeError:  # another torch
            return None
        held = peak = 0
        for _, change in changes:
            held += change
            peak = max(peak, held)
        return peak if changes else None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what the profiler's library writes to stderr, past Python."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
