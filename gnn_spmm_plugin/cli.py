"""The command line, ``gnn-spmm``. Exit codes: 0, 1 for a failed check, 2 for a mistake in what was asked for."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import gnn_spmm_plugin as gsp

from . import _config, _native, _platform, data
from ._table import bytes_text, write_json
from .bench.command import add_arguments as add_bench_arguments
from .bench.command import bench
from .data.edges import SUFFIXES, EdgeFileError, read_edges
from .graph import Graph
from .kernels import DTYPE_OF, REDUCES
from .page.command import add_doctor_arguments, add_report_arguments, report_graph, report_script
from .page.graphs import plan_facts
from .page.script import CheckFailed
from .plan import MODES
from .policy import POLICIES
from .schedule import SCHEDULES
from .tune_command import add_arguments as add_tune_arguments
from .tune_command import tune_command

_OPTIONAL = ("torch_geometric", "torch_sparse", "pyg_lib", "dgl", "scipy", "tqdm", "rich")


class UsageError(Exception):
    """What was asked for cannot be done; the message says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    args = parse(list(sys.argv[1:] if argv is None else argv))
    try:
        for name in ("json", "csv", "plot", "out", "report_csv", "collect", "html"):
            _writable(getattr(args, name, None))
        return int(args.run(args) or 0)
    except (UsageError, EdgeFileError) as e:
        print(f"gnn-spmm {args.command}: {e}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def parse(given: list[str]) -> argparse.Namespace:
    """The options of a command line, without the program's name; as argparse does, it ends where there is a mistake."""
    own = given.index("--") if given[:1] in (["report"], ["doctor"]) and "--" in given else len(given)
    parser = _parser()
    args, unknown = parser.parse_known_args(given[:own])
    if unknown:
        where = "; those of the script come after --" if hasattr(args, "script") else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{where}")
    args.argv, args.script_args = given[1:], given[own + 1 :]  # the former for the heads of files
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gnn-spmm",
        description="Aggregation for graph neural networks: what is installed, what it chooses, what it gains.",
    )
    parser.add_argument("--version", action="version", version=f"gnn_spmm_plugin {gsp.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--json", metavar="FILE", help="write the result as JSON (- for stdout)")
        sub.set_defaults(run=run)
        return sub

    command("info", _info, "versions, how it was built, the GPU, and each kernel: available, or why not")

    demo = command("demo", _demo, "train a stock PyG GCN, plain and accelerated, and compare")
    _graph_source(demo)
    demo.add_argument("--epochs", type=_positive, default=200, help="4 or more, default 200")
    demo.add_argument("--hidden", type=_positive, default=16, help="hidden units, default 16")
    demo.add_argument("--seed", type=int, default=0, help="default 0")
    demo.add_argument(
        "--device", choices=["all", "cpu", "cuda"], default="all", help="default: CPU, and GPU if there is one"
    )

    explain = command("explain", _explain, "how a product with this graph would run, and why")
    report = command("report", _report, "a page about a training script, or a graph: what is slow, and what is gained")
    which = f"{', '.join(data.names())}, or a file ({', '.join(SUFFIXES)})"
    explain.add_argument("graph", metavar="GRAPH", help=which)
    add_report_arguments(report)
    report.add_argument("--graph", metavar="GRAPH", help=f"a graph instead of a script: {which}; for it:")
    for sub in (explain, report):
        sub.add_argument("--dtype", choices=DTYPE_OF, default="float32")
        sub.add_argument("--reduce", choices=REDUCES, default="sum")
        sub.add_argument("--policy", choices=POLICIES, default="auto")
        sub.add_argument("--device", choices=["cpu", "cuda"], default=None, help="default: the GPU if there is one")
    explain.add_argument("--width", type=_positive, default=128, help="feature columns, default 128")
    explain.add_argument("--mode", choices=MODES, default="auto")
    explain.add_argument(
        "--schedule", choices=list(SCHEDULES), default=None, help="this order of the rows instead of a choice"
    )
    explain.add_argument("--kernel", default=None, help="this kernel instead of a choice, see `gnn-spmm info`")
    report.add_argument("--width", type=_positive, nargs="+", help="default 16 64 256")
    doctor = command("doctor", _examine, "which layers of a training script are slow, and what would help")
    add_doctor_arguments(doctor)

    sub = command("bench", _bench, "time products against cuSPARSE, torch.sparse, PyG and others, after checking them")
    add_bench_arguments(sub)
    sub = command("tune", _tune, "measure what is fastest for a graph and remember it, or train the decider anew")
    sub.add_argument("graph", metavar="GRAPH", nargs="?", help="as for explain")
    sub.add_argument("--dtype", choices=DTYPE_OF, default="float32")
    add_tune_arguments(sub)
    return parser


def _graph_source(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--dataset", choices=data.names(), default=None, help="default cora")
    source.add_argument(
        "--edges-file", metavar="FILE", help=f"your own edge list ({', '.join(SUFFIXES)}), random features"
    )


def _positive(value: str) -> int:
    try:
        number = int(value)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, got {value!r}")
    return number


def _writable(path: str | None) -> None:
    """Complains about an output before the work starts instead of after it."""
    if path is None or path == "-":
        return
    folder = Path(path).parent
    if not folder.is_dir():
        raise UsageError(f"{path} cannot be written: there is no folder {folder}")
    if Path(path).is_dir() or not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise UsageError(f"{path} cannot be written")


def _device(name: str | None) -> str:
    if name is None:
        name = "cuda" if torch.cuda.is_available() and _native.cuda_error is None else "cpu"
    _require(name)
    return name


def _require(device: str) -> None:
    if device == "cuda" and (missing := _platform.no_gpu()) is not None:
        raise UsageError(f"{missing.removesuffix(', or use the CPU')}; or use --device cpu")
    try:
        _native.require(torch.device(device))
    except RuntimeError as e:
        raise UsageError(str(e)) from e


def _edges(name: str) -> tuple[torch.Tensor, int]:
    """The edges and number of nodes of a shipped graph or a file."""
    if name in data.names():
        dataset = data.load(name)
        return dataset.edge_index, dataset.num_nodes
    if not Path(name).suffix and not Path(name).exists():
        raise UsageError(f"unknown graph {name!r}: neither a file nor one of {', '.join(data.names())}")
    return read_edges(name)


def _graph(name: str, device: str) -> Graph:
    edge_index, num_nodes = _edges(name)
    return Graph.from_edge_index(edge_index.to(device), num_nodes)


# ---------------------------------------------------------------------- commands


def _version(module: str) -> str | None:
    try:
        return metadata.version(module.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return None


def info() -> dict[str, Any]:
    """What ``gnn-spmm info`` shows."""
    gpus = []
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            gpus.append(
                {
                    "name": p.name,
                    "capability": f"{p.major}.{p.minor}",
                    "memory": p.total_memory,
                    "sms": p.multi_processor_count,
                }
            )
    driver = _platform.driver()
    return {
        "gnn_spmm_plugin": gsp.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "driver_cuda": None if driver is None else f"{driver[0]}.{driver[1]}",
        "threads": torch.get_num_threads(),
        "optional": {name: _version(name) for name in _OPTIONAL},
        "build": _native.build_info(),
        "libraries": {"cpu": _native.cpu_error or "loaded", "cuda": _native.cuda_error or "loaded"},
        "gpus": gpus,
        "kernels": gsp.kernels(),
        "environment": {name: os.environ[name] for name in _config.ENVIRONMENT if name in os.environ},
    }


def _info(args: argparse.Namespace) -> None:
    result = info()
    if args.json == "-":
        write_json("-", result)
        return
    facts = [
        ("gnn_spmm_plugin", result["gnn_spmm_plugin"]),
        ("python", f"{result['python']}, {result['platform']}"),
        ("torch", f"{result['torch']}, CUDA {result['torch_cuda'] or 'none'}, {result['threads']} threads"),
        *((name, version or "not installed") for name, version in result["optional"].items()),
        ("CPU library", result["libraries"]["cpu"]),
        ("CUDA library", result["libraries"]["cuda"]),
        *((f"build: {key}", str(value)) for key, value in result["build"].items()),
        ("NVIDIA driver", f"serves CUDA {result['driver_cuda']}" if result["driver_cuda"] else "none"),
        *(
            ("GPU", f"{g['name']}, compute capability {g['capability']}, {bytes_text(g['memory'])}, {g['sms']} SMs")
            for g in result["gpus"]
        ),
        *([] if result["gpus"] else [("GPU", "torch sees none")]),
        *result["environment"].items(),
    ]
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name.ljust(width)}  {value}")
    print()
    print("kernels")
    said = {error: f"see {name.upper()} library" for name, error in result["libraries"].items()}
    for kernel in result["kernels"]:
        why = "; ".join(said.get(reason, reason) for reason in kernel["reasons"])
        state = "available" if kernel["available"] else f"not available ({why})"
        print(f"  {kernel['name']}  {kernel['device']}, {state}")
        print(f"    {kernel['summary']}")
    write_json(args.json, result)


def _demo(args: argparse.Namespace) -> None:
    from . import demo

    devices = ["cpu", "cuda"] if args.device == "all" else [args.device]
    if args.device == "all" and (not torch.cuda.is_available() or _native.cuda_error is not None):
        devices = ["cpu"]
        if torch.cuda.is_available():
            print(f"CPU only: {_native.cuda_error}", file=sys.stderr)
    for device in devices:
        _require(device)
    if args.edges_file is not None:
        dataset = data.with_noise(Path(args.edges_file).name, *read_edges(args.edges_file))
    else:
        dataset = data.load(args.dataset or data.names()[0])
    try:
        import torch_geometric  # noqa: F401
    except ImportError as e:
        raise UsageError(
            f"the demo trains a model of torch_geometric, which does not import ({e}); pip install torch_geometric"
        ) from e
    with _usage():
        result = demo.run(dataset, devices, args.epochs, args.seed, args.hidden)
    if args.json != "-":
        demo.report(result)
    write_json(args.json, result)


@contextlib.contextmanager
def _usage() -> Iterator[None]:
    """A ValueError inside is about what the options ask for."""
    try:
        yield
    except ValueError as e:
        raise UsageError(str(e)) from e


def _explain(args: argparse.Namespace) -> None:
    graph = _graph(args.graph, _device(args.device))
    with _usage():
        plan = gsp.plan(
            graph, args.width, DTYPE_OF[args.dtype], args.reduce, args.mode, args.policy, args.kernel, args.schedule
        )
    text = plan.explain()
    if args.json != "-":
        print(text)
    asked = {key: getattr(args, key) for key in ("graph", "width", "dtype", "reduce", "policy")}
    write_json(args.json, {**asked, "device": str(graph.device), **plan_facts(plan)})


def _report(args: argparse.Namespace) -> int:
    if (args.script is None) == (args.graph is None):
        raise UsageError("name a training script, or a graph with --graph GRAPH; one of them")
    if args.graph is None:
        return _examine(args)
    with _usage():
        result = report_graph(args, _device(args.device), _edges)
    return _checked(args, result)


def _examine(args: argparse.Namespace) -> int:
    try:
        with _usage():
            result = report_script(args)
    except CheckFailed as e:
        print(f"gnn-spmm {args.command}: {e}", file=sys.stderr)
        return 1
    return _checked(args, result)


def _checked(args: argparse.Namespace, result: dict[str, Any]) -> int:
    write_json(args.json, result)
    for line in result["wrong"]:
        print(f"gnn-spmm {args.command}: {line}", file=sys.stderr)
    return 1 if result["wrong"] else 0


def _bench(args: argparse.Namespace) -> int:
    with _usage():
        result, right = bench(args, _device(args.device), args.argv)
    write_json(args.json, result)
    return 0 if right else 1


def _tune(args: argparse.Namespace) -> None:
    device = _device(args.device)
    with _usage():
        result = tune_command(args, device, DTYPE_OF[args.dtype], lambda: _graph(args.graph, device))
    write_json(args.json, result)


__all__ = ["UsageError", "info", "main", "parse"]
