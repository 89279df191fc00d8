"""The operators against torch.sparse and PyG's gather and scatter. What is wrong is not timed."""

from __future__ import annotations

import csv
import importlib.metadata
import math
import platform
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from .. import reference
from .._table import progress, show
from ..functional import spmm
from ..graph import Graph
from .timer import time_calls

Case = tuple[str, Tensor, int]
Contender = Callable[[Tensor], Tensor]


def default_graphs() -> list[str]:
    """What is measured where nothing is asked for."""
    return ["cora", "tolokers", "random:100000:1000000"]


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


def _contenders(graph: Graph, edge_index: Tensor, reduce: str, dtype: torch.dtype) -> Iterator[tuple[str, Contender]]:
    yield "gnn_spmm", lambda x: cast(Tensor, spmm(graph, x, reduce=reduce))
    if reduce == "sum" or edge_index.device.type == "cpu":
        ones = torch.ones(graph.num_edges, dtype=dtype, device=edge_index.device)
        size = (graph.num_dst, graph.num_src)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that sparse CSR is in beta
            matrix = torch.sparse_csr_tensor(graph.rowptr.long(), graph.col.long(), ones, size, check_invariants=False)
        if reduce == "sum":
            yield "torch.sparse.mm", lambda x: torch.sparse.mm(matrix, x)
        else:
            name = {"mean": "mean", "max": "amax", "min": "amin"}[reduce]
            yield "torch.sparse.mm", lambda x: torch.sparse.mm(matrix, x, reduce=name)
    try:
        from torch_geometric.utils import scatter
    except ImportError:
        return
    src, dst = edge_index
    yield "PyG scatter", lambda x: scatter(x.index_select(0, src), dst, 0, graph.num_dst, reduce)


def run(
    cases: list[Case], widths: list[int], reduces: list[str], dtype: torch.dtype, device: str, repeat: int
) -> dict[str, Any]:
    """Checks and times every contender on every combination, forward and forward with backward.

    Returns:
        ``rows``, one for each measurement, and the circumstances. Rows whose result is wrong, or that a contender does
        not do, carry no times.
    """
    work = [(case, width, reduce) for case in cases for width in widths for reduce in reduces]
    rows: list[dict[str, Any]] = []
    for (name, edge_index, num_nodes), width, reduce in progress(work, len(work), "bench"):
        edge_index = edge_index.to(device)
        graph = Graph.from_edge_index(edge_index, num_nodes)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(num_nodes, width, generator=generator).to(device, dtype)
        exact, _ = reference.spmm(graph, x.double(), reduce=reduce)
        # What the longest row may lose in float32, and one rounding.
        eps = torch.finfo(torch.float32 if dtype != torch.float64 else dtype).eps
        bound = eps * graph.in_degree().clamp(min=1).unsqueeze(1) * 8 + torch.finfo(dtype).eps * exact.abs() * 2
        for contender, fn in _contenders(graph, edge_index, reduce, dtype):
            facts = {
                "graph": name,
                "nodes": num_nodes,
                "edges": graph.num_edges,
                "width": width,
                "dtype": str(dtype).removeprefix("torch."),
                "reduce": reduce,
                "device": device,
                "contender": contender,
            }
            try:
                error = (fn(x).double() - exact).abs()
                match = bool((error <= bound).all())
                largest = float(error.max()) if error.numel() else 0.0
            except (RuntimeError, NotImplementedError) as e:
                rows.append({**facts, "pass": "forward", "match": True, "error": None, "why": str(e).splitlines()[0]})
                continue
            for which in ("forward", "forward+backward"):
                row = {**facts, "pass": which, "match": match, "error": largest, "why": ""}
                if match:
                    timing = time_calls(_call(fn, x, which), device, repeat)
                    row |= {
                        "median_ms": timing.median_ms,
                        "p20_ms": timing.p20_ms,
                        "p80_ms": timing.p80_ms,
                        "calls": timing.calls,
                    }
                rows.append(row)
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "rows": rows,
    }


def environment() -> dict[str, str]:
    """What a measurement depends on besides its command: for the head of a CSV file."""
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "threads": str(torch.get_num_threads()),
        "package": f"gnn_spmm_plugin {importlib.metadata.version('gnn-spmm-plugin')}"
        if _installed()
        else "source tree",
        "commit": _commit(),
    }
    try:
        import torch_geometric

        found["torch_geometric"] = torch_geometric.__version__
    except ImportError:
        pass
    return found


def _installed() -> bool:
    try:
        importlib.metadata.version("gnn-spmm-plugin")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _commit() -> str:
    folder = Path(__file__).parent
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _call(fn: Contender, x: Tensor, which: str) -> Callable[[], Any]:
    if which == "forward":
        return lambda: fn(x)
    x = x.detach().clone().requires_grad_()
    grad = torch.ones_like(fn(x))
    return lambda: torch.autograd.grad(fn(x), x, grad)


def report(result: dict[str, Any]) -> None:
    """Prints the measurements, and the geometric mean of the ratios to ours."""
    ours = {_key(r): r["median_ms"] for r in result["rows"] if r["contender"] == "gnn_spmm" and "median_ms" in r}
    cells: list[list[str]] = []
    ratios: dict[tuple[str, str], list[float]] = {}
    for r in result["rows"]:
        ratio = ""
        if "median_ms" in r and r["contender"] != "gnn_spmm" and _key(r) in ours:
            value = r["median_ms"] / ours[_key(r)]
            ratio = f"{value:.2f}"
            ratios.setdefault((r["contender"], r["pass"]), []).append(value)
        times = [f"{r[k]:.3f}" if k in r else "-" for k in ("median_ms", "p20_ms", "p80_ms")]
        match = "not done" if r["error"] is None else "yes" if r["match"] else f"NO ({r['error']:.1e})"
        cells.append([r["graph"], str(r["width"]), r["reduce"], r["pass"], r["contender"], *times, match, ratio])
    show(["graph", "width", "reduce", "pass", "contender", "median ms", "p20", "p80", "match", "time / ours"], cells)
    print(f"torch {result['torch']}, {result['gpu'] or str(result['threads']) + ' CPU threads'}")
    for (contender, which), values in ratios.items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        print(
            f"{contender}, {which}: {mean:.2f} times our time (geometric mean of {len(values)}), "
            f"at worst {min(values):.2f}"
        )


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["graph"], row["width"], row["dtype"], row["reduce"], row["pass"]


def write_csv(path: str, result: dict[str, Any]) -> None:
    """Writes the measurements, with the circumstances in each line."""
    around = {k: v for k, v in result.items() if k != "rows"}
    columns = list(dict.fromkeys([*(k for r in result["rows"] for k in r), *around]))
    with open(path, "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, columns)
        writer.writeheader()
        writer.writerows({**r, **around} for r in result["rows"])
