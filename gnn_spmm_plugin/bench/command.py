"""``gnn-spmm bench``: its options, the graphs they name, and what is printed."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import data
from .._table import show
from ..data.edges import SUFFIXES, read_edges
from ..kernels import DTYPE_OF, REDUCES, for_device
from . import run, suites
from .contenders import OPPONENTS, SETTINGS
from .graphs import SPECS, Csr, named
from .plot import plot, require_matplotlib
from .problem import Subject
from .results import CONFIGURATION, Row, Store, environment
from .summary import print_summary, summarise
from .timer import MODES

TINY = 1 / 512
_YES_NO = {"no": False, "yes": True}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""

    def add(flag: str, text: str, **options: Any) -> None:
        parser.add_argument(flag, help=text, **options)

    many: dict[str, Any] = {"nargs": "+", "default": None}
    add("--suite", "a fixed set of measurements; the options below then pick out of it", choices=suites.SUITES)
    add("--graph", f"names, files ({', '.join(SUFFIXES)}), or random:NODES:EDGES", metavar="GRAPH", **many)
    add("--graph-dir", "a folder whose .npz files are graphs too", metavar="DIR")
    add("--width", "feature columns, default 16 64 256", type=_positive, **many)
    add("--dtype", "default float32", choices=DTYPE_OF, **many)
    add("--reduce", "default sum mean max", choices=REDUCES, **many)
    add("--weighted", "with edge weights or without, default no", choices=_YES_NO, **many)
    add(
        "--order",
        "order of the rows, default natural; community: as found; schedule: the generator's; auto: a plan's choice",
        choices=("natural", "community", "schedule", "auto"),
        **many,
    )
    add(
        "--setting",
        "ways in which this package is used, measured besides the plain one (a name may have a comma)",
        choices=[s for s in SETTINGS if s],
        **many,
    )
    add("--mode", "how calls are timed, default eager graph", choices=MODES, **many)
    add("--kernel", "measure these kernels too", metavar="NAME", **many)
    add("--contender", "only these, default all", choices=["ours", *(k.name for k in OPPONENTS)], **many)
    add("--tiny", "synthetic graphs of 1/512 of their size", action="store_true")
    add("--device", "default: the GPU if there is one", choices=["cpu", "cuda"], default=None)
    add(
        "--budget",
        "milliseconds to time each contender in each mode, default 30",
        type=_milliseconds,
        default=30.0,
        metavar="MS",
    )
    add("--summary", "measure nothing: compare the measurements in these files with the goals", metavar="FILE", **many)
    add("--plot", "draw time / ours; the name says in which format", metavar="FILE")
    add("--csv", "keep the measurements here; what the file has already is not measured again", metavar="FILE")


def _positive(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, got {value!r}")
    return int(value)


def _milliseconds(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number, more than 0, got {value!r}")
    return number


def random_edges(name: str) -> tuple[Tensor, int]:
    """The edges of ``random:NODES:EDGES``: uniform sources, skewed destinations, in random order.

    Raises:
        ValueError: that is not what `name` looks like.
    """
    try:
        num_nodes, num_edges = (int(part) for part in name.split(":")[1:])
    except ValueError:
        num_nodes = num_edges = 0
    if num_nodes < 1 or num_edges < 1:
        raise ValueError(f"a random graph is written random:NODES:EDGES, both 1 or more, got {name!r}")
    generator = torch.Generator().manual_seed(0)
    src = torch.randint(num_nodes, (num_edges,), generator=generator)
    dst = (torch.rand(num_edges, generator=generator) ** 2 * num_nodes).long().clamp_(max=num_nodes - 1)
    return torch.stack([src, dst]), num_nodes


def load(name: str, device: str, scale: float = 1.0, folder: str | None = None) -> Subject:
    """The graph of that name: one of `folder`, a synthetic one, one that ships, ``random:NODES:EDGES``, or a file.

    Raises:
        ValueError: there is none; or the file is none (`EdgeFileError`).
    """
    inside = None if folder is None else Path(folder) / f"{name}.npz"
    if inside is not None and inside.exists():  # first: a file of a drawn graph's name is not to be drawn instead
        edges, n = read_edges(inside)
    elif name in SPECS:
        return Subject(name, named(name, device, scale=scale))
    elif name in data.names():
        dataset = data.load(name)
        edges, n = dataset.edge_index, dataset.num_nodes
    elif name.startswith("random:"):
        edges, n = random_edges(name)
    elif Path(name).suffix or Path(name).exists():
        edges, n = read_edges(name)
    else:
        known = ", ".join([*data.names(), *SPECS])
        raise ValueError(f"unknown graph {name!r}: neither a file nor one of {known}")
    return Subject(name, _csr(edges.to(device), n))


def _csr(edge_index: Tensor, n: int) -> Csr:
    src, dst = edge_index
    order = (dst * n + src).argsort()  # by row, then by column, as published matrices come
    rowptr = torch.zeros(n + 1, dtype=torch.int32, device=src.device)
    rowptr[1:] = torch.bincount(dst, minlength=n).cumsum(0)
    return Csr(rowptr, src[order].int())


def jobs_of(args: argparse.Namespace, device: str) -> list[run.Job]:
    """What the options ask for."""
    files = [] if args.graph_dir is None else sorted(p.stem for p in Path(args.graph_dir).glob("*.npz"))
    if args.graph_dir is not None and not files:
        raise ValueError(f"there is no .npz file in {args.graph_dir}")
    kernels = ("auto", *(args.kernel or ()))
    for name in kernels[1:]:
        for_device(torch.device(device), name)
    plain = [args.graph, args.width, args.dtype, args.reduce, args.weighted, args.order, args.setting]
    suite = args.suite
    if suite is None and not files and all(v is None for v in plain):
        suite = "quick"
    if suite is not None:
        if args.setting is not None:
            raise ValueError("--setting does not go with --suite, which has settings of its own")
        jobs = suites.SUITES[suite](device, files, kernels)

        def keep(c: Any) -> bool:
            text = c.columns()
            wanted = {"graph": args.graph, "width": args.width and [str(w) for w in args.width]}
            wanted |= {"dtype": args.dtype, "reduce": args.reduce, "order": args.order}
            wanted |= {"weighted": args.weighted and [str(int(_YES_NO[w])) for w in args.weighted]}
            return all(v is None or text[k] in v for k, v in wanted.items())
    else:
        jobs = suites.grid(
            [*(args.graph or ()), *files] or list(suites.CPU_GRAPHS),
            args.width or [16, 64, 256],
            [DTYPE_OF[d] for d in args.dtype or ["float32"]],
            args.reduce or ["sum", "mean", "max"],
            [_YES_NO[w] for w in args.weighted or ["no"]],
            args.order or ["natural"],
            ["", *(args.setting or ())],
            args.mode or ["eager", "graph"],
            kernels,
        )

        def keep(c: Any) -> bool:
            return True

    jobs = suites.only(jobs, keep, args.contender)
    if args.mode is not None:
        jobs = [run.Job(j.configuration, j.kinds, tuple(args.mode)) for j in jobs]
    return jobs


def bench(args: argparse.Namespace, device: str, arguments: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """Runs the command.

    Returns:
        What ``--json`` writes, and whether every result was right.

    Raises:
        ValueError: the options ask for what there is not; the message says what.
    """
    if args.summary is not None:
        summary = summarise(args.summary)
        if args.json != "-":
            print_summary(summary)
        return summary, True
    if args.plot is not None:
        require_matplotlib()  # before all that is to be drawn is measured
    jobs = jobs_of(args, device)
    if not jobs:
        raise ValueError("no product of the suite fits all of these options; leave one out, or leave --suite out")
    for kind in {k.name: k for job in jobs for k in job.kinds}.values():
        why = kind.unavailable(device)
        if why is not None and args.json != "-":
            print(f"without {kind.name}: {why}")
    if device != "cuda" and args.mode is not None:
        left_out = [m for m in args.mode if m in ("graph", "cold")]
        if len(left_out) == len(args.mode):
            raise ValueError(
                f"--mode {' '.join(left_out)} takes a GPU, and this is for {device}; eager and host do not"
            )
        if left_out and args.json != "-":
            print(f"without mode {' and '.join(left_out)}: it takes a GPU")
    bandwidth = run.copy_bandwidth(device)
    ceiling = run.gather_ceiling(device)
    facts = {"copy_bandwidth": f"{bandwidth / 1e12:.3f} TB/s, read and written, measured in this run"}
    if ceiling is not None:
        facts["gather_ceiling"] = f"{ceiling / 1e12:.3g} TB/s, a constant (bench/run.py)"
    store = Store(args.csv, shlex.join(["gnn-spmm", "bench", *arguments]), facts)
    scale = TINY if args.tiny else 1.0

    def loader(name: str) -> Subject:
        return load(name, device, scale, args.graph_dir)

    right = run.run(jobs, loader, store, device, args.budget, bandwidth)
    asked = {tuple(job.configuration.columns()[k] for k in CONFIGURATION) for job in jobs}
    rows = [row for row in store.rows if tuple(row[k] for k in CONFIGURATION) in asked]
    if args.json != "-":
        report(rows)
    if args.plot is not None:
        plot(rows, args.plot, environment()["gpu"])
    return {**environment(), **facts, "rows": rows}, right


def report(rows: Sequence[Row]) -> None:
    """Prints the measurements; then, for each opponent, the geometric mean and the worst of its time over ours."""
    ours = {
        _case(r): float(r["ms_median"])
        for r in rows
        if (r["contender"], r["setting"]) == ("ours:auto", "") and r["ms_median"]
    }
    ratios: dict[tuple[str, str], list[float]] = {}
    cells = []
    for row in rows:
        mine, ratio = ours.get(_case(row)), ""
        timed = bool(row["ms_median"]) and row["mode"] != "analytic"
        if timed and mine is not None and (row["contender"], row["setting"]) != ("ours:auto", ""):
            value = float(row["ms_median"]) / mine
            ratio = f"{value:.2f}"
            ratios.setdefault((_who(row), row["mode"]), []).append(value)
        times = [f"{float(row[k]):.4f}" if row[k] else "-" for k in ("ms_median", "ms_p20", "ms_p80")]
        share = f"{float(row['roofline_share']):.2f}" if row["roofline_share"] else ""
        where = row["graph"] if row["order"] == "natural" else f"{row['graph']}, {row['order']}"
        what = f"{'weighted ' if row['weighted'] == '1' else ''}{row['reduce']}"
        cells.append(
            [where, row["width"], row["dtype"], what, row["mode"], _who(row), *times, share, ratio, row["note"]]
        )
    headers = "graph width dtype product mode contender|median ms|p20|p80|share|time / ours|note"
    head, *tail = headers.split("|")
    show([*head.split(), *tail], cells)
    for (who, mode), values in ratios.items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        print(f"{who}, {mode}: {mean:.2f} times our time (geometric mean of {len(values)}), at worst {min(values):.2f}")


def _who(row: Row) -> str:
    return f"{row['contender']} {row['setting']}".strip()


def _case(row: Row) -> tuple[str, ...]:
    return (*(row[name] for name in CONFIGURATION), row["mode"])
