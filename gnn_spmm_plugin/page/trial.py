"""Runs a user's script for some optimizer steps and watches: what `script` starts, in a process of its own.

The script is run as ``python SCRIPT`` would run it, and knows nothing. A hook after each optimizer step counts them;
the time from one to the next is the time of a step. In two steps all calls of modules are seen, and what layers are
called with is kept (`watch`); another step is looked at for its memory. After the last one each layer is called again,
alone, with what it was called with (`replay`), the result is written, and an exception that no ``except Exception``
catches ends the script.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import random
import runpy
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import _config, stats
from ..bench.memory import PeakMemory
from .replay import kind_of, replay
from .watch import Watch

#: Steps of another optimizer without one of the first: that training is over, and another has begun.
OTHERS = 50
FEWEST = 4


class _Stop(BaseException):
    """Ends the script: what was to be seen has been seen."""


class Trial:
    """One run of a script.

    Args:
        folder: where results go: ``result.json`` and ``graphs.npz``.
        request: ``script``, ``args``, ``steps``, ``seconds`` (after which fewer steps do), ``seed``, ``budget_ms``,
            ``policy``, and ``patch``, the libraries to patch.
        say: told the number of each step.
    """

    def __init__(self, folder: Path, request: dict[str, Any], say: Any) -> None:
        self.folder, self.request, self.say = folder, request, say
        self.watch = Watch()
        self.pid = os.getpid()  # workers that were forked have the hooks too
        self.optimizer: Any = None
        self.steps, self.others, self.last_step = 0, 0, int(request["steps"])
        self.began = self.since = 0.0
        self.times: list[float] = []
        self.losses: list[torch.Tensor] = []
        self.memory: PeakMemory | None = None
        self.peak: int | None = None
        self.timed = self.done = self.compiled = False

    def run(self) -> dict[str, Any]:
        """Runs the script; how it ended. The result has been written where it ended as it should."""
        self._install()
        self.watch.start()
        script, args = self.request["script"], self.request["args"]
        sys.argv = [script, *args]
        try:
            if Path(script).exists():
                sys.path[0] = str(Path(script).resolve().parent)
                runpy.run_path(script, run_name="__main__")
            else:
                sys.path[0] = os.getcwd()
                runpy.run_module(script, run_name="__main__", alter_sys=True)
        except _Stop:
            return {"ended": "stopped"}
        except SystemExit as e:
            return self._ended("exit", "" if e.code is None else str(e.code))
        except KeyboardInterrupt:
            return self._ended("interrupted", "")
        except BaseException as e:
            traceback.print_exc()
            return self._ended("error", "".join(traceback.format_exception_only(e)).strip())
        return self._ended("returned", "")

    def _ended(self, how: str, what: str) -> dict[str, Any]:
        if self.done:  # it came in the way of our exception, or fell over it
            return {"ended": "stopped"}
        return {"ended": how, "message": what, "steps": self.steps} | self._seen()

    def _seen(self) -> dict[str, Any]:
        libraries = [name for name in ("torch_geometric", "dgl") if name in sys.modules]
        return {"libraries": libraries, "called": self.watch.called, "modules": self.watch.modules}

    def _install(self) -> None:
        register_optimizer_step_post_hook(self._stepped)
        # Losses say whether both ways compute the same.
        backward = torch.autograd.backward

        def recorded(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
                self.losses.append(tensors.detach().clone())
            backward(tensors, *args, **kwargs)

        torch.autograd.backward = recorded
        # Inside compiled code there are no modules to be seen.
        torch.compiler.set_stance("force_eager")
        compile_ = torch.compile

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.compiled = True
            return compile_(*args, **kwargs)

        torch.compile = noted

    # ------------------------------------------------------------------ steps

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if os.getpid() != self.pid:
            return
        if self.done:
            raise _Stop
        if self.optimizer is None:
            self.optimizer = optimizer
        if optimizer is not self.optimizer:
            self.others += 1
            if self.others > OTHERS:
                self._finish("ended early")
            return
        self.others = 0
        _wait()
        now = time.perf_counter()
        if self.timed:
            self.times.append((now - self.since) * 1e3)
        self.steps += 1
        self.say(self.steps)
        if self.memory is not None:
            self.peak, self.memory = self.memory.stop(), None
        if self.watch.on:
            self.watch.stop(keep=self.steps > 1)  # before the first step all sorts of things may have happened
        if self.steps == 1:
            self.began = now
        if self.steps >= self.last_step:
            self._finish("stopped")
        if now - self.began > self.request["seconds"] and self.steps >= FEWEST:
            self.last_step = min(self.last_step, self.steps + 2)
        self._next()

    def _next(self) -> None:
        """What the step that begins now is for."""
        left = self.last_step - self.steps
        self.timed = False
        if self.steps == 1 or left == 1:
            self.watch.start()
        elif left == 2 and self.last_step >= FEWEST + 2:
            self.memory = PeakMemory("cuda" if _on_cuda() else "cpu")
            self.memory.start()
        else:
            self.timed = True
        self.since = time.perf_counter()

    def _finish(self, how: str) -> None:
        """Measures the layers and writes everything, here and now: what follows may tear the model down."""
        self.done = True
        self.watch.stop(keep=how == "stopped")
        half = self.times[len(self.times) // 2 :]
        seen = self.watch.best()
        first = self.watch.first_edges
        calls = stats()["kernel_calls"]
        layers, graphs = replay(seen, first, float(self.request["budget_ms"]), bool(self.request["patch"]))
        result = self._seen() | {
            "ended": how,
            "steps": self.steps,
            "optimizer": type(self.optimizer).__name__,
            "ms_per_step": float(np.quantile(half, 0.2)) if half else None,  # as `replay`
            "times_ms": half,
            "peak_bytes": self.peak,
            "losses": [float(loss) for loss in self.losses],
            "device": _device_text(),
            "kernel_calls": calls,
            "compiled": self.compiled,
            "low_precision": any(s.autocast is not None for s in seen),
            "roots": sorted({kind_of(s.root) for s in seen}),
            "layers": layers,
        }
        np.savez(self.folder / "graphs.npz", **graphs)
        (self.folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
        self.say(-1)
        raise _Stop


def _on_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _wait() -> None:
    if _on_cuda():
        torch.cuda.synchronize()


def _device_text() -> str:
    return torch.cuda.get_device_name() if _on_cuda() else f"CPU, {torch.get_num_threads()} threads"


class _SeedDgl(importlib.abc.MetaPathFinder):
    """DGL has a random generator of its own; it is seeded as soon as somebody imports DGL."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """The spec that others find for DGL, with a loader that seeds it."""
        if name != "dgl":
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # it may only have been asked for
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def seeded(module: Any) -> None:
            load(module)
            sys.meta_path.remove(self)
            module.seed(self.seed)

        spec.loader.exec_module = seeded  # type: ignore[method-assign]
        return spec


def _patch(libraries: list[str], policy: str) -> None:
    from .. import patch_dgl, patch_pyg

    for library in libraries:
        if library == "dgl":
            patch_dgl(policy)
        else:
            patch_pyg(policy)


def main(folder: str, handle: int) -> None:
    """Runs the trial that ``request.json`` in `folder` describes; writes a line for each step to the open file."""
    place = Path(folder)
    request = json.loads((place / "request.json").read_text(encoding="utf-8"))

    def say(step: int) -> None:
        os.write(handle, f"{step}\n".encode())

    seed = int(request["seed"])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    sys.meta_path.insert(0, _SeedDgl(seed))
    if not request["patch"]:
        os.environ["GSP_DISABLE"] = "1"  # as it is: what the script itself accelerates it does without
    elif _config.disabled():
        del os.environ["GSP_DISABLE"]
    warnings.filterwarnings("ignore", message=".*set_stance.*")
    _patch(request["patch"], request["policy"])
    trial = Trial(place, request, say)
    outcome = trial.run()
    if not (place / "result.json").exists():
        (place / "result.json").write_text(json.dumps(outcome), encoding="utf-8")


__all__ = ["FEWEST", "Trial", "main"]
