"""``gnn-spmm tune``: its options, and what each form of it does."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from .bench import collect
from .bench.command import _milliseconds as _seconds
from .graph import Graph


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("--collect", metavar="CSV", help="measure candidates on the training graphs; what the file has is kept")
    add("--graph-dir", metavar="DIR", help="of .npz files that --collect measures too")
    add("--limit-seconds", type=_seconds, default=math.inf, metavar="S", help="--collect begins nothing after so long")
    add("--holdout", type=int, default=collect.HOLDOUT, metavar="N", help="graphs to mark as none to train on")
    add("--device", choices=["cpu", "cuda"], default=None, help="default: the GPU if there is one")


def tune_command(
    args: argparse.Namespace, device: str, arguments: Sequence[str], graph: Callable[[], Graph]
) -> dict[str, Any]:
    """Runs the command; returns what ``--json`` writes.

    Raises:
        ValueError: the options ask for what there is not; the message says what.
    """
    command = shlex.join(["gnn-spmm", "tune", *arguments])
    if device != "cuda":
        raise ValueError("--collect measures kernels of a GPU, and torch sees none")
    missing = collect.collect(
        args.collect, command, folder=args.graph_dir, limit_seconds=args.limit_seconds, holdout=args.holdout
    )
    print(f"{args.collect}: {missing} products are still to be measured")
    return {"missing": missing}
