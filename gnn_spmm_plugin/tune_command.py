"""``gnn-spmm tune``: its options, and what each form of it does."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable
from typing import Any

import torch

from ._table import show
from .bench.collect import HOLDOUT, collect
from .bench.command import _milliseconds as _seconds
from .bench.command import _positive
from .bench.evaluate import evaluate, print_picks
from .bench.learn import fit, print_rows
from .bench.results import write_table
from .graph import Graph
from .kernels import REDUCES
from .plan import plan
from .tune import SECONDS, cache_folder, decision, tuned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command, but the graph and the dtype."""
    add = parser.add_argument
    add("--width", type=_positive, nargs="+", default=[64], help="feature columns, default 64")
    add("--reduce", choices=REDUCES, default="sum")
    add("--budget", type=_seconds, default=SECONDS, metavar="S", help=f"seconds for each width, default {SECONDS:g}")
    add("--again", action="store_true", help="measure even what is remembered")
    add("--device", choices=["cpu", "cuda"], default=None, help="default: the GPU if there is one")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument(
        "--collect", metavar="CSV", help="instead: measure on the training graphs; what the file has is left out"
    )
    forms.add_argument("--train", metavar="CSV", help="instead: train the decider from such a file")
    forms.add_argument(
        "--evaluate", metavar="CSV", help="instead: time what auto takes against the best in such a file, once more"
    )
    add("--graph-dir", metavar="DIR", help="of .npz files that --collect and --evaluate measure too")
    add("--limit-seconds", type=_seconds, default=math.inf, metavar="S", help="they begin nothing after so long")
    add("--holdout", type=int, default=HOLDOUT, metavar="N", help=f"graphs not to train on, default {HOLDOUT}")
    add("--out", metavar="FILE", help="of --train: the decider, .npz; of --evaluate: its rows, .csv")
    add("--report-csv", metavar="FILE", help="of --train: how well it chooses")


def tune_command(
    args: argparse.Namespace, device: str, dtype: torch.dtype, graph: Callable[[], Graph]
) -> dict[str, Any]:
    """Runs the command; returns what ``--json`` writes.

    Raises:
        ValueError: the options ask for what there is not; the message says what.
    """
    command = shlex.join(["gnn-spmm", "tune", *args.argv])
    quiet = args.json == "-"
    if args.train is not None:
        return _train(args, command, quiet)
    if args.collect is not None or args.evaluate is not None:
        if device != "cuda":
            raise ValueError("only kernels of a GPU have candidates to measure, and torch sees no GPU")
        if args.collect is not None:
            missing = collect(
                args.collect, command, folder=args.graph_dir, limit_seconds=args.limit_seconds, holdout=args.holdout
            )
            if not quiet:
                print(f"{args.collect}: {missing} products are still to be measured")
            return {"missing": missing}
        picks = evaluate(args.evaluate, args.graph_dir, args.limit_seconds)
        if args.out is not None and picks:
            write_table(args.out, list(picks[0]), picks, command)
        return {"picks": picks, "summary": print_picks(picks, None if quiet else print)}
    if args.graph is None:
        raise ValueError("name a graph, or one of --collect, --train and --evaluate")
    return _tune(args, graph(), dtype, quiet)


def _tune(args: argparse.Namespace, graph: Graph, dtype: torch.dtype, quiet: bool) -> dict[str, Any]:
    found = []
    for width in args.width:
        made = tuned(graph, width, dtype, args.reduce, seconds=args.budget, again=args.again)
        if made is None:
            if not quiet:
                print(f"width {width}: there is one way to run this on {graph.device.type}")
                print(plan(graph, width, dtype, args.reduce).explain())
            continue
        found.append(made)
        if not quiet:
            print(f"width {width}: {made.candidate} {made.ms:.4g} ms, by the rules {made.rules_ms:.4g} ms")
            print(*decision(made).reasons, sep="\n")
    if not quiet and found:
        print(f"remembered in {cache_folder()}; gsp.plan(..., mode='tune') uses it")
    return {"tuned": [vars(t) for t in found]}


def _train(args: argparse.Namespace, command: str, quiet: bool) -> dict[str, Any]:
    if args.out is None or not args.out.endswith(".npz"):
        raise ValueError("--train needs --out FILE.npz, the decider to write")
    decider, rows = fit(args.train)
    decider.save(args.out)
    if args.report_csv is not None:
        write_table(args.report_csv, list(rows[0]), rows, command)
    facts = {
        "gpu": decider.gpu,
        "kernels_version": decider.version,
        "margin": decider.margin,
        "implicit": decider.implicit,
        "products": len(decider.products),
    }
    if not quiet:
        print_rows(rows, show)
        print(", ".join(f"{k} {v}" for k, v in facts.items()))
    return {**facts, "rows": rows}
