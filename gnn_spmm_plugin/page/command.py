"""``gnn-spmm report`` and ``gnn-spmm doctor``."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gnn_spmm_plugin as gsp

from .._table import bytes_text, show
from ..kernels import DTYPE_OF
from .graphs import Asked, copy_speed, describe, wrong
from .script import Options, Trials, try_both
from .sections import SHARED, render, shared_rows
from .verdict import judge

SHOWN = 4  # graphs of a script that are looked at, the largest
WIDTHS = (16, 64, 256)
MOST_PARTS = 4096

#: Edges and number of nodes of a graph that ships or is in a file.
Load = Callable[[str], tuple[Tensor, int]]


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``report`` beyond those that say which product."""
    _script_arguments(parser, nargs="?")
    parser.add_argument("--html", metavar="FILE", default="report.html", help="where the page goes (report.html)")
    parser.add_argument(
        "--partition",
        metavar="N",
        type=_parts,
        nargs="+",
        default=[],
        help="what sharing a graph over N ranks would cost",
    )


def _parts(text: str) -> int:
    parts = int(text)
    if not 1 <= parts <= MOST_PARTS:
        raise argparse.ArgumentTypeError(f"it takes 1 to {MOST_PARTS} ranks, got {parts}")
    return parts


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``doctor``."""
    _script_arguments(parser, nargs=None)
    parser.add_argument("--html", metavar="FILE", help="also write the page of `gnn-spmm report`")


def _script_arguments(parser: argparse.ArgumentParser, nargs: str | None) -> None:
    defaults = Options("")
    parser.usage = f"gnn-spmm {parser.prog.split()[-1]} [options] SCRIPT [-- arguments of the script]"
    parser.add_argument("script", metavar="SCRIPT", nargs=nargs, help="your training script, or a module as python -m")
    parser.add_argument(
        "--steps", type=int, default=defaults.steps, help=f"optimizer steps to watch ({defaults.steps})"
    )
    parser.add_argument(
        "--limit-seconds", type=float, default=defaults.limit_seconds, help="for each run of the script (900)"
    )
    parser.add_argument("--seed", type=int, default=0, help="set before the script begins (0)")


def report_graph(args: argparse.Namespace, device: str, load: Load) -> dict[str, Any]:
    """Looks at one graph; writes the page, prints the table, returns the result."""
    edge_index, num_nodes = load(args.graph)
    asked = Asked(args.width or WIDTHS, DTYPE_OF[args.dtype], args.reduce, args.policy, parts=args.partition)
    name = Path(args.graph).name
    graph = describe(name, edge_index.to(device), (num_nodes, num_nodes), asked)
    result = _result(args, args.graph, device, [graph]) | {"asked": {"dtype": args.dtype, "reduce": args.reduce}}
    if args.json != "-":
        _print_graph(graph)
    return _finish(args, result)


def report_script(args: argparse.Namespace) -> dict[str, Any]:
    """Runs a script twice; writes the page, prints what follows, returns the result."""
    _check_script(args.script)
    asked = Asked(WIDTHS[:2])
    if args.command == "report":
        dtype = DTYPE_OF[args.dtype]
        asked = Asked(args.width or asked.widths, dtype, args.reduce, args.policy, parts=args.partition)
    trials = try_both(
        Options(
            args.script,
            args.script_args,
            args.steps,
            limit_seconds=args.limit_seconds,
            seed=args.seed,
            policy=asked.policy,
        )
    )
    verdict = judge(trials)
    if args.json != "-":
        _print_verdict(verdict)
    command = shlex.join([args.script, *args.script_args])
    graphs, left_out = _graphs_of(trials, verdict, asked) if args.html else ([], 0)
    result = _result(args, command, trials.before["device"], graphs) | {
        "verdict": verdict,
        "graphs_left_out": left_out,
        "steps": trials.before["steps"],
        "libraries": trials.before["libraries"],
        "runs": {"before": trials.before, "after": trials.after},
    }
    return _finish(args, result)


def _check_script(script: str) -> None:
    path = Path(script)
    if path.is_file() or (path / "__main__.py").is_file():
        return
    if path.exists():
        raise ValueError(f"{script} is a folder without a __main__.py: name the script in it that trains")
    if not all(part.isidentifier() for part in script.split(".")) or script.endswith(".py"):
        raise ValueError(f"there is no file {script}; for a graph: gnn-spmm report --graph GRAPH")
    import importlib.util
    import os
    import sys

    kept = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(script)
    except (ImportError, ValueError):
        found = None
    finally:
        sys.path[:] = kept
    if found is None:
        raise ValueError(
            f"{script} is neither a file nor a module that can be imported from here; for a graph: "
            f"gnn-spmm report --graph {script}"
        )


def _graphs_of(trials: Trials, verdict: dict[str, Any], asked: Asked) -> tuple[list[dict[str, Any]], int]:
    """Facts about the largest graphs of a script, at the widths that its layers had there; and how many more it has."""
    order = sorted(range(len(trials.graphs)), key=lambda i: -trials.graphs[i][0].shape[1])
    # Layers say which graph they ran on by its place on the page.
    place = {old: new for new, old in enumerate(order)}
    for row in verdict["layers"]:
        row["graph"] = None if row["graph"] is None else place[row["graph"]]
    device = "cuda" if torch.cuda.is_available() and not trials.before["device"].startswith("CPU") else "cpu"
    facts = []
    for number, i in enumerate(order[:SHOWN]):
        edge_index, sizes = trials.graphs[i]
        here = {r["width"] for r in verdict["layers"] if r["graph"] == number and r["width"]}
        product = dataclasses.replace(asked, widths=sorted(here)[:4] or asked.widths)
        try:
            facts.append(describe(f"graph {number + 1}", edge_index.to(device), sizes, product))
        except (RuntimeError, ValueError) as e:  # it does not fit, or what was called a graph is none
            verdict["notes"].append(f"Graph {number + 1} is not shown: {str(e).splitlines()[0]}")
            break
    return facts, max(len(order) - SHOWN, 0)


def _result(args: argparse.Namespace, source: str, device: str, graphs: list[dict[str, Any]]) -> dict[str, Any]:
    on_gpu = bool(graphs) and graphs[0]["device"].startswith("cuda")
    if device in ("cpu", "cuda"):
        device = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    return {
        "source": source,
        "device": device,
        "version": gsp.__version__,
        "torch": torch.__version__,
        "command": shlex.join(["gnn-spmm", args.command, *args.argv]),
        "copy_bytes_per_s": copy_speed("cuda" if on_gpu else "cpu") if graphs else None,
        "graphs": graphs,
        "graphs_left_out": 0,
        "verdict": None,
        "wrong": wrong(graphs),
    }


def _finish(args: argparse.Namespace, result: dict[str, Any]) -> dict[str, Any]:
    """Writes the page; what was found wrong is gathered under ``wrong``."""
    if result["verdict"] is not None and result["verdict"]["wrong"]:
        result["wrong"] = [*result["wrong"], result["verdict"]["wrong"]]
    if args.html:
        Path(args.html).write_text(render(result), encoding="utf-8")
        if args.json != "-":
            print(f"\npage: {args.html}")
    return result


# ---------------------------------------------------------------------- on a terminal


def _print_graph(g: dict[str, Any]) -> None:
    print(f"{g['name']} on {g['device']}, index bytes {g['index_bytes']:,}")
    for name, value in g["features"].items():
        print(f"  {name.ljust(12)} {value:,.3f}" if isinstance(value, float) else f"  {name.ljust(12)} {value:,}")
    products = {p["width"]: p for p in g["products"]}
    rows = []
    for p in g["plans"]:
        measured = products.get(p["width"], {})
        why = "; ".join(" ".join(r.split()) for r in p["reasons"] if not r.startswith("decider   saw"))
        rows.append(
            [
                str(p["width"]),
                p["kernel"],
                p["mode"],
                f"{p['bytes']:,}",
                _ms(measured.get("before_ms")),
                _ms(measured.get("after_ms")),
                str(measured.get("break_even") or "-"),
                why or f"the kernel for {g['device']}",
            ]
        )
    show(["width", "kernel", "mode", "bytes", "gather, scatter", "product", "paid after", "why"], rows)
    if g["partition"]:
        print()
        show(SHARED, shared_rows(g["partition"]))


def _print_verdict(v: dict[str, Any]) -> None:
    rows = []
    for r in v["layers"]:
        rows.append(
            [
                f"{r['layer']} ({r['kind']})",
                "-" if r["share"] is None else f"{r['share']:.0%}",
                str(r["calls"]),
                _ms(r["before_ms"]),
                _ms(r["after_ms"]),
                bytes_text(r["before_bytes"]),
                bytes_text(r["after_bytes"]),
                r["status"] if not r["error"] else f"not timed: {r['error'].splitlines()[0]}"[:60],
            ]
        )
    show(["layer", "of a step", "calls", "before", "after", "memory before", "after", "status"], rows)
    s, step, peak = v["shares"], v["step_ms"], v["peak_bytes"]
    print(f"\na step: {_ms(step['before'])} as it is, {_ms(step['after'])} patched; ", end="")
    print(f"peak memory {bytes_text(peak['before'])} and {bytes_text(peak['after'])}")
    if s is not None:
        print(
            f"of a step as it is: message passing {s['aggregation']:.0%}, dense products in its layers "
            f"{s['dense']:.0%}, everything else {s['outside']:.0%}"
        )
    print(f"\n{v['headline']}")
    for line in [*v["advice"], *v["notes"]]:
        print(f"- {line}")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"


__all__ = ["add_doctor_arguments", "add_report_arguments", "report_graph", "report_script"]
