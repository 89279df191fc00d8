"""Processes that make up a group, for tests: each waits for a function and its arguments, and sends the result back.

A spawned process imports what it runs by name, which it cannot do with a test's own file: it is in `rank_work`.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 60


def _serve(rank: int, size: int, folder: str, backend: str, seconds: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=seconds),
    )
    while (given := pipe.recv()) is not None:
        function, arguments = given
        try:
            pipe.send((True, function(*arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Ranks:
    """`size` processes in a group."""

    def __init__(self, size: int, backend: str = "gloo", seconds: float = SECONDS) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, str(Path(self._folder.name)), backend, seconds, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def send(self, rank: int, function: Callable[..., Any], *arguments: Any) -> None:
        """Has one rank begin something."""
        self._pipes[rank].send((function, arguments))

    def answer(self, rank: int) -> tuple[bool, Any]:
        """Whether that went well, and its result, or the error as text."""
        assert self._pipes[rank].poll(SECONDS), f"rank {rank} does not answer"
        try:
            done: tuple[bool, Any] = self._pipes[rank].recv()
        except (EOFError, OSError):
            return False, "it ended"
        return done

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What each rank returns."""
        answers = self.answers(function, *arguments)
        for rank, (well, result) in enumerate(answers):
            assert well, f"rank {rank}: {result}"
        return [result for _, result in answers]

    def answers(self, function: Callable[..., Any], *arguments: Any) -> list[tuple[bool, Any]]:
        """The same, with errors as text."""
        for rank in range(self.size):
            self.send(rank, function, *arguments)
        return [self.answer(rank) for rank in range(self.size)]

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # one that has ended
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()
