"""Runs a user's training script, as it is and then patched, each in a process of its own (`trial`), and compares."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._table import progress
from .trial import FEWEST

#: Losses of the first ten steps may differ by this part of them; under autocast by more.
ALIKE, ALIKE_ROUGHLY, EARLY = 1e-3, 5e-2, 10
LINES = 12  # of what a script printed, in a message
PATIENCE = 20  # seconds for a script to end by itself after it has been told to


class ScriptError(ValueError):
    """The script is none that can be looked at; the message says why, and what to do."""


class CheckFailed(Exception):
    """The script runs as it is, and not, or not to the same end, with its library patched."""


@dataclass(frozen=True)
class Options:
    """How a script is run.

    Attributes:
        script, args: a file, or a module as ``python -m`` takes it; its arguments.
        steps: optimizer steps to watch; fewer where they take over `seconds` together.
        limit_seconds: a run that has not come to its end then is given up.
        seed: of Python, NumPy and torch, set before the script begins.
        budget_ms: for timing each layer.
        policy: how plans are chosen, see `gnn_spmm_plugin.plan`.
    """

    script: str
    args: Sequence[str] = ()
    steps: int = 40
    seconds: float = 60.0
    limit_seconds: float = 900.0
    seed: int = 0
    budget_ms: float = 300.0
    policy: str = "auto"


@dataclass
class Trials:
    """Both runs of a script.

    Attributes:
        before, after: what `trial` wrote, as it is and patched.
        graphs: the graphs that layers ran on: ``[2, E]`` int64, and numbers of sources and destinations.
        notes: what to know when reading the numbers.
        wrong: why the results are not the same; empty where they are.
    """

    before: dict[str, Any]
    after: dict[str, Any]
    graphs: list[tuple[Tensor, tuple[int, int]]]
    notes: list[str] = field(default_factory=list)
    wrong: str = ""


def try_both(options: Options) -> Trials:
    """Runs the script twice; three times where it takes fewer steps than asked for, or other losses than before.

    Raises:
        ScriptError: as it is, it cannot be looked at.
        CheckFailed: it fails only when patched.
    """
    if options.steps < FEWEST:
        raise ScriptError(f"--steps {options.steps}: {FEWEST} or more are needed")
    with tempfile.TemporaryDirectory(prefix="gnn_spmm_") as folder:
        before, steps = _as_it_is(options, folder)
        name, libraries = options.script, before["libraries"]
        if not before["layers"]:
            raise ScriptError(_no_layers(name, before))
        graphs = _read_graphs(Path(folder))
        after = _run(options, folder, steps, libraries, "patched")
        if after["ended"] != "stopped" or not after.get("layers"):
            raise CheckFailed(
                f"{name} runs as it is, but not with {' and '.join(libraries)} patched: {_how(after)}; please report "
                f"it with this{_printed(folder)}"
            )
        trials = Trials(before, after, graphs, _notes(options, before, steps))
        bound = ALIKE_ROUGHLY if before["low_precision"] else ALIKE
        apart = _apart(before["losses"], after["losses"])
        if apart > bound:
            again = _run(options, folder, steps, [], "once more as it is")
            if _apart(before["losses"], again.get("losses", [])) > bound:
                trials.notes.append(
                    "Losses were not compared: the script as it is does not repeat its own, although Python, NumPy and "
                    "torch were seeded."
                )
            else:
                trials.wrong = (
                    f"losses differ by {apart:.0e} of them in the first {EARLY}, at most {bound:.0e} is expected"
                )
        return trials


def _as_it_is(options: Options, folder: str) -> tuple[dict[str, Any], int]:
    """What the plain run wrote, and its number of steps."""
    name, steps = options.script, options.steps
    found = _run(options, folder, steps, [], "as it is")
    taken = int(found.get("steps", 0))
    if FEWEST <= taken < steps and found["ended"] in ("ended early", "returned", "exit"):
        steps = taken
        found = _run(options, folder, steps, [], f"as it is, {steps} steps")
    if found["ended"] == "stopped":
        return found, steps
    if found["ended"] == "timeout":
        raise ScriptError(f"{name} {_how(found)}{_printed(folder)}")
    if found["ended"] in ("error", "signal", "interrupted") or _failed(found):
        raise ScriptError(
            f"{name} did not get through, run as it is (with this plugin switched off): it {_how(found)}, after "
            f"{taken} optimizer steps{_printed(folder)}"
        )
    if taken:
        raise ScriptError(
            f"{name} took {taken} optimizer steps and {_how(found)}; {FEWEST} or more are needed: train longer"
        )
    seen = (
        f"It called layers of {' and '.join(found['libraries'])} {found['called']} times, but trained nothing: give a "
        "script that trains."
        if found.get("called")
        else "It called no layer of PyG or DGL either."
        if found.get("modules") or not found.get("libraries")
        else ""
    )
    raise ScriptError(
        f"{name} {_how(found)} without a step of an optimizer of torch.optim in its own process. {seen} Steps of "
        "processes that it starts (torchrun, torch.multiprocessing, several devices in Lightning) are not seen: let it "
        f"train in one{_printed(folder)}"
    )


def _failed(found: dict[str, Any]) -> bool:
    return found["ended"] == "exit" and found["message"] not in ("", "0", "None", "False")


def _how(found: dict[str, Any]) -> str:
    message = str(found.get("message", ""))
    return {
        "error": f"stopped with {message}",
        "exit": f"called sys.exit({message if message.isdigit() else repr(message)})",
        "returned": "came to its end",
        "ended early": "went on to another optimizer",
        "stopped": "called no layer of PyG or DGL",
        "interrupted": "was interrupted",
    }.get(found["ended"], message)


def _printed(folder: str) -> str:
    """The last lines that the script printed, for the end of a message."""
    text = Path(folder, "printed.txt").read_text(encoding="utf-8", errors="replace")
    lines = [line.rpartition("\r")[2] for line in text.splitlines() if line.strip()][-LINES:]
    return "." if not lines else ". The end of what it printed:\n" + "\n".join(f"  | {line[:300]}" for line in lines)


def _no_layers(name: str, found: dict[str, Any]) -> str:
    others = f" Modules that were called: {', '.join(found['modules'])}." if found["modules"] else ""
    if not found["libraries"]:
        return f"{name} imports neither torch_geometric nor dgl, so there is nothing that could be accelerated.{others}"
    return (
        f"{name} trains for {found['steps']} steps without calling a message passing layer of "
        f"{' or '.join(found['libraries'])} as a module, so there is nothing to look at.{others} Layers inside "
        "torch.jit.script, and functions outside of modules, are not seen."
    )


def _notes(options: Options, before: dict[str, Any], steps: int) -> list[str]:
    notes = []
    if before["compiled"]:
        notes.append(
            "The script uses torch.compile; it was left out in both runs, for layers inside compiled code cannot be "
            "told apart. Compiled, the rest of a step may take less time."
        )
    if steps < options.steps:
        notes.append(f"The script trains for {steps} steps; {options.steps} were asked for.")
    elif before["steps"] < steps:
        notes.append(f"{before['steps']} steps were watched: after {options.seconds:.0f} seconds it was enough.")
    if any(row["batches"] for row in before["layers"]):
        notes.append(
            "Mini-batches: each step has a graph of its own, so preparing it is part of a layer's time. The graph "
            "shown is that of one step."
        )
    return notes


def _apart(a: Sequence[float], b: Sequence[float]) -> float:
    """Largest relative difference of the first losses; infinity where there are other ones."""
    pairs = list(zip(a[:EARLY], b[:EARLY], strict=False))
    if not pairs:
        return 0.0 if not a and not b else float("inf")
    x, y = np.array(pairs).T
    same = np.isnan(x) & np.isnan(y) | (x == y)
    apart = np.where(same, 0.0, np.abs(x - y) / np.maximum(np.abs(x), 1e-12))
    return float(np.nan_to_num(apart, nan=np.inf).max())


def _read_graphs(folder: Path) -> list[tuple[Tensor, tuple[int, int]]]:
    with np.load(folder / "graphs.npz", allow_pickle=False) as z:
        count = len(z.files) // 2
        return [
            (torch.from_numpy(z[f"edges{i}"]), (int(z[f"sizes{i}"][0]), int(z[f"sizes{i}"][1]))) for i in range(count)
        ]


# ---------------------------------------------------------------------- one process


def _run(options: Options, folder: str, steps: int, patch: Sequence[str], label: str) -> dict[str, Any]:
    """One run; what it wrote, or how it ended without."""
    place = Path(folder)
    (place / "result.json").unlink(missing_ok=True)
    request = {
        "script": options.script,
        "args": list(options.args),
        "steps": steps,
        "seconds": options.seconds,
        "seed": options.seed,
        "budget_ms": options.budget_ms,
        "policy": options.policy,
        "patch": list(patch),
    }
    (place / "request.json").write_text(json.dumps(request), encoding="utf-8")
    ending: list[str] = []
    with open(place / "printed.txt", "w", encoding="utf-8") as printed:
        code = _watch(folder, printed, options.limit_seconds, steps, label, ending)
    if (place / "result.json").exists():
        found: dict[str, Any] = json.loads((place / "result.json").read_text(encoding="utf-8"))
        return found
    if ending:
        return {"ended": "timeout", "message": ending[0]}
    what = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    hint = "; the system kills what takes too much memory" if code == -signal.SIGKILL else ""
    return {"ended": "signal", "message": f"was ended by {what}{hint}"}


def _watch(folder: str, printed: Any, limit: float, steps: int, label: str, ending: list[str]) -> int:
    """Starts the process and sees it to its end, or ends it; its exit code."""
    root = str(Path(__file__).resolve().parents[2])
    reading, writing = os.pipe()
    code = (
        f"import sys; sys.path[0] = {root!r}\nfrom gnn_spmm_plugin.page.trial import main\n"
        f"sys.path[1:].count({root!r}) or sys.path.append({root!r})\nmain({folder!r}, {writing})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,  # nobody is there to answer
        stdout=printed,
        stderr=subprocess.STDOUT,
        pass_fds=[writing],
        start_new_session=True,  # its workers end with it
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    os.close(writing)
    try:
        for _ in progress(_steps(reading, process, limit, ending), steps, label):
            pass
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(PATIENCE if not ending else 0)
        return 0
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _steps(reading: int, process: subprocess.Popen[bytes], limit: float, ending: list[str]) -> Iterator[int]:
    """The numbers of the steps as they come, until the process is done or has had its time."""
    until, rest, last = time.monotonic() + limit, b"", 0
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, min(until - time.monotonic(), 1.0)))
        if ready:
            got = os.read(reading, 4096)
            if not got:
                return  # it has ended
            *lines, rest = (rest + got).split(b"\n")
            for line in lines:
                if int(line) < 0:
                    return  # it is done
                last = int(line)
                yield last
        elif process.poll() is not None:
            return
        if time.monotonic() > until:
            ending.append(f"was given up after {limit:g} seconds (--limit-seconds) and {last} optimizer steps")
            return


__all__ = ["CheckFailed", "Options", "ScriptError", "Trials", "try_both"]
