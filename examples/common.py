"""What the examples share: options, trainings that are timed and counted, and the table of before and after."""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch_geometric import seed_everything
from tqdm import tqdm

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin._table import bytes_text, show, write_json
from gnn_spmm_plugin.bench.memory import peak_memory

#: Steps whose memory is looked at; the graph is prepared in them, so they are not timed.
FIRST_STEPS = 3

#: Losses of the first ten steps may differ by this part of them: later, what rounding did has been amplified. By more
#: under autocast, and compiled: code for attention draws dropout's masks where it is compiled, and not where it is one
#: operator.
ALIKE, ALIKE_ROUGHLY = 1e-3, 5e-2


def parser(doc: str | None, *, epochs: int, lr: float, hidden: int, compare: bool = False) -> argparse.ArgumentParser:
    """The options that every example has."""
    made = argparse.ArgumentParser(
        description=(doc or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--epochs", type=int, default=epochs)
    made.add_argument("--lr", type=float, default=lr)
    made.add_argument("--hidden", type=int, default=hidden, help="hidden channels")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--runs", type=int, default=1, help="trainings, each with the next seed")
    made.add_argument(
        "--accelerate", action=argparse.BooleanOptionalAction, default=True, help="train with the plugin, or without"
    )
    made.add_argument(
        "--compare", action=argparse.BooleanOptionalAction, default=compare, help="train as it is, then accelerated"
    )
    made.add_argument("--tiny", action="store_true", help="seconds: a small model, few epochs, little generated data")
    made.add_argument("--json", metavar="FILE", help="also write the table there, with all losses")
    return made


def parse(made: argparse.ArgumentParser, argv: Sequence[str] | None, tiny: dict[str, Any]) -> argparse.Namespace:
    """The options given; `tiny` has the defaults under ``--tiny``."""
    if made.parse_args(argv).tiny:
        made.set_defaults(**tiny)
    options = made.parse_args(argv)
    for name in ("epochs", "runs", "hidden"):
        if getattr(options, name) < 1:
            made.error(f"--{name} {getattr(options, name)}: must be 1 or more")
    if options.compare and not options.accelerate:
        made.error("--no-accelerate trains one model, --compare two: give --no-compare with it")
    if options.json == "-":
        made.error("--json - would mix with what is printed: give a file")
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        made.error("--device cuda: torch sees no GPU")
    seed_everything(options.seed)  # for what is drawn before the trainings
    return options


def run(
    options: argparse.Namespace,
    make: Callable[[bool], Module],
    epoch: Callable[[Module, Optimizer], Iterator[Tensor]],
    evaluate: Callable[[Module], dict[str, float]],
) -> int:
    """Trains, once or (``--compare``) without and with the plugin, and prints the table.

    Args:
        options: of `parser`; ``eval_steps``, where there is one, says after how many epochs to evaluate.
        make: a new model on the device; True: accelerated.
        epoch: trains for an epoch and yields the loss of each step.
        evaluate: what is reported of the model, in evaluation mode and without gradients; the best epoch is the one
            with the largest ``"valid"``.

    Returns:
        The exit code: 1 where losses differ, or no kernel of the plugin ran though it was on.
    """
    ways = (False, True) if options.compare else (options.accelerate,)
    rows = []
    for accelerate in ways:
        trainings = []
        for seed in range(options.seed, options.seed + options.runs):
            trainings.append(_train(options, make, epoch, evaluate, accelerate, seed))
            if "error" in trainings[-1]:
                break
        rows.append(_summary(accelerate, trainings))
    _print(rows)
    write_json(options.json, {"options": vars(options), "rows": rows})
    roughly = getattr(options, "amp", None) or getattr(options, "compile", False)
    return _verdict(rows, ALIKE_ROUGHLY if roughly else ALIKE)


def _train(
    options: argparse.Namespace, make: Any, epoch: Any, evaluate: Any, accelerate: bool, seed: int
) -> dict[str, Any]:
    """One training; ``{"error": ...}`` where memory did not suffice."""
    seed_everything(seed)
    gsp.clear_cache()
    cuda = torch.device(options.device).type == "cuda"
    calls, before = gsp.stats()["kernel_calls"], torch.cuda.memory_allocated() if cuda else 0
    training = _Training(options, epoch, evaluate, accelerate)
    steps = training.steps()
    try:
        training.model = make(accelerate)
        training.optimizer = torch.optim.Adam(training.model.parameters(), lr=options.lr)
        peak = peak_memory(lambda: list(itertools.islice(steps, FIRST_STEPS)), options.device)
        for _ in steps:
            pass
        if cuda:  # the allocator has counted all the while
            peak = training.peak - before
        result = training.result() | {"peak_bytes": peak, "kernel_calls": gsp.stats()["kernel_calls"] - calls}
    except torch.OutOfMemoryError:
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise  # the others wait for this process: torchrun ends them
        result = {"error": "out of memory"}
    if training.model is not None:
        gsp.restore(training.model)
    training.model = training.optimizer = None
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return result


class _Training:
    """A model, and what was seen while it trained."""

    def __init__(self, options: argparse.Namespace, epoch: Any, evaluate: Any, accelerate: bool) -> None:
        self.options, self.epoch, self.evaluate = options, epoch, evaluate
        self.label = "accelerated" if accelerate else "PyG"
        self.model: Module | None = None
        self.optimizer: Optimizer | None = None
        self.times: list[float] = []
        self.losses: list[float] = []
        self.last = float("nan")
        self.peak = 0  # on CUDA, evaluation left out
        self.best: dict[str, float] = {}

    def steps(self) -> Iterator[None]:
        """Trains step by step, and evaluates in between, which is not timed."""
        options, assess_every = self.options, getattr(self.options, "eval_steps", 1)
        bar = tqdm(range(1, options.epochs + 1), desc=self.label, file=sys.stderr, leave=False, disable=None)
        for number in bar:
            self.model.train()
            losses, begun = self.epoch(self.model, self.optimizer), len(self.losses)
            while True:
                _wait(options.device)
                start = time.perf_counter()
                loss = next(losses, None)
                if loss is None:
                    break
                self.losses.append(float(loss.detach()))  # waits for the device
                self.times.append((time.perf_counter() - start) * 1e3)
                yield
            if number % assess_every == 0 or number == options.epochs:
                found = self._assess()
                if not self.best or found["valid"] > self.best["valid"]:
                    self.best = found
            self.last = statistics.mean(self.losses[begun:])
            bar.set_postfix_str(", ".join([f"loss {self.last:.3f}", *(f"{k} {v:.3f}" for k, v in self.best.items())]))

    def _assess(self) -> dict[str, float]:
        cuda = torch.device(self.options.device).type == "cuda"
        if cuda:
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())
        assert self.model is not None
        self.model.eval()
        with torch.no_grad():
            found: dict[str, float] = self.evaluate(self.model)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        return found

    def result(self) -> dict[str, Any]:
        """Losses, milliseconds of a step (median of the second half: plans are warm), metrics of the best epoch."""
        steady = self.times[max(len(self.times) // 2, min(FIRST_STEPS, len(self.times) - 1)) :]
        return {"losses": self.losses, "last_loss": self.last, "ms_per_step": statistics.median(steady), **self.best}


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def _summary(accelerated: bool, trainings: list[dict[str, Any]]) -> dict[str, Any]:
    """One row: means over the trainings, and with several the standard deviations of the metrics."""
    last = trainings[-1]
    row: dict[str, Any] = {"model": "accelerated" if accelerated else "PyG", "accelerated": accelerated}
    if "error" in last:
        return row | last
    fixed = {"losses", "last_loss", "ms_per_step", "peak_bytes", "kernel_calls"}
    for name in [k for k in last if k not in fixed]:
        values = [t[name] for t in trainings]
        row[name] = statistics.mean(values)
        if len(values) > 1:
            row[f"{name} std"] = statistics.stdev(values)
    row["last_loss"] = statistics.mean(t["last_loss"] for t in trainings)
    row["ms_per_step"] = statistics.median(t["ms_per_step"] for t in trainings)
    row["peak_bytes"] = max((t["peak_bytes"] for t in trainings if t["peak_bytes"] is not None), default=None)
    row["kernel_calls"] = sum(t["kernel_calls"] for t in trainings)
    return row | {"losses": [t["losses"] for t in trainings]}


def _print(rows: list[dict[str, Any]]) -> None:
    fixed = ("model", "accelerated", "losses", "last_loss", "ms_per_step", "peak_bytes", "kernel_calls", "error")
    metrics = list(dict.fromkeys(k for row in rows for k in row if k not in fixed and not k.endswith(" std")))

    def cells(row: dict[str, Any]) -> list[str]:
        if "error" in row:
            return [row["model"], *["-"] * (len(metrics) + 2), row["error"], "-", "-"]
        shown = [f"{row[m]:.4f}" + (f" ± {row[f'{m} std']:.4f}" if f"{m} std" in row else "") for m in metrics]
        losses = [f"{row['losses'][0][0]:.4f}", f"{row['last_loss']:.4f}"]
        cost = [f"{row['ms_per_step']:.2f}", bytes_text(row["peak_bytes"]), f"{row['kernel_calls']:,}"]
        return [row["model"], *shown, *losses, *cost]

    header = ["model", *metrics, "first loss", "last loss", "ms per step", "peak memory", "kernel calls"]
    show(header, [cells(row) for row in rows])


def _verdict(rows: list[dict[str, Any]], alike: float) -> int:
    """Prints what the comparison says; the exit code."""
    done = {row["accelerated"]: row for row in rows if "error" not in row}
    if not all(row["accelerated"] in done for row in rows if row["accelerated"]) or not done:
        print("not enough memory: try a smaller --hidden or, where there is one, --loader neighbor", file=sys.stderr)
        return 1
    if True in done and done[True]["kernel_calls"] == 0:
        print("nothing was accelerated: is GSP_DISABLE set?", file=sys.stderr)
        return 1
    if len(done) < 2:
        return 0
    apart = [
        [abs(a - b) / max(abs(a), 1e-12) for a, b in zip(*losses, strict=True)]
        for losses in zip(done[False]["losses"], done[True]["losses"], strict=True)
    ]
    early = max(max(d[:10]) for d in apart)
    print(
        f"a step is {done[False]['ms_per_step'] / done[True]['ms_per_step']:.2f} times as fast; losses differ by at "
        f"most {early:.0e} of them in the first 10 steps, {max(max(d) for d in apart):.0e} in all"
    )
    if early > alike:
        print(f"that is too much: at most {alike:.0e} is expected", file=sys.stderr)
        return 1
    return 0
