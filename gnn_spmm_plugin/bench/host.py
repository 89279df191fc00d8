"""What the host spends: on an eager call beside `torch.mm`, and on graphs that are used once and thrown away.

    python -m gnn_spmm_plugin.bench.host --csv out.csv

Calls are made on a problem so small that the device is always faster than the host, many of them between two
synchronisations. The loop over mini-batches aggregates twice, forward and backward, over 100 graphs (10 on the CPU)
that nobody has seen before, against `index_add` on gathered messages.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from .._table import show
from ..cache import clear_cache, graph_of
from ..functional import spmm
from ..graph import Graph
from ..plan import WARM_AFTER
from .results import write_table

COLUMNS = "what us_ours us_other ratio bar other".split()
Layer = Callable[[Tensor, Tensor], Tensor]
_spmm = cast(Callable[..., Tensor], spmm)  # no winning edges are asked for


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def host_us(calls: dict[str, Callable[[], Any]], device: str, repeat: int = 200, batch: int = 100) -> dict[str, float]:
    """Microseconds that the host spends on each call: the least of `repeat` batches, all calls in turns."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repeat):
        for name, call in calls.items():
            _wait(device)
            start = time.perf_counter()
            for _ in range(batch):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / batch * 1e6)
    return best


def eager(device: str, repeat: int = 200) -> Iterator[dict[str, Any]]:
    """`spmm` on 16 nodes, 64 edges and 8 columns, against a product of that size by a dense matrix."""
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(16, (2, 64), generator=generator).to(device)
    x = torch.rand(16, 8, generator=generator).to(device)
    dense, weight = torch.rand(16, 16, device=device), torch.rand(64, device=device)
    leaf = x.clone().requires_grad_()
    graph = Graph.from_edge_index(edge_index, 16)
    for _ in range(WARM_AFTER + 1):
        _spmm(graph, leaf, weight).sum().backward()
    ours: dict[str, tuple[Callable[[], Any], str, float | None]] = {
        "spmm": (lambda: _spmm(graph, x), "mm", 1.2),
        "spmm, gradient needed": (lambda: _spmm(graph, leaf), "mm, gradient needed", 2.0),
        "spmm, mean": (lambda: _spmm(graph, x, reduce="mean"), "mm", None),
        "spmm, max": (lambda: _spmm(graph, x, reduce="max"), "mm", None),
        "spmm, weighted": (lambda: _spmm(graph, x, weight), "mm", None),
        "spmm, forward and backward": (lambda: _spmm(graph, leaf).sum().backward(), "mm, forward and backward", None),
        "graph_of, found again": (lambda: graph_of(edge_index[1], edge_index[0], 16, 16), "mm", None),
    }
    others: dict[str, Callable[[], Any]] = {
        "mm": lambda: torch.mm(dense, x),
        "mm, gradient needed": lambda: torch.mm(dense, leaf),
        "mm, forward and backward": lambda: torch.mm(dense, leaf).sum().backward(),
    }
    us = host_us({name: call for name, (call, _, _) in ours.items()} | others, device, repeat)
    for name, (_, other, bar) in ours.items():
        yield _row(name, us[name], us[other], bar, other)


def mini_batches(device: str, count: int, nodes: int, edges: int) -> Iterator[dict[str, Any]]:
    """Microseconds a graph, everything counted, of `count` graphs of 64 columns."""

    def batches(ordered: bool) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        made = []
        for i in range(count):
            n = nodes + i * nodes // 100
            index = torch.randint(n, (2, edges), generator=generator)
            if ordered:
                index = index[:, index[1].argsort(stable=True)]
            made.append((index.to(device), torch.rand(n, 64, generator=generator).to(device)))
        return made

    def ours(index: Tensor, x: Tensor) -> Tensor:
        return _spmm(graph_of(index[1], index[0], x.shape[0], x.shape[0]), x)

    def plain(index: Tensor, x: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, index[1], x[index[0]])

    def spent(layer: Layer, ordered: bool) -> float:
        todo = batches(ordered)
        clear_cache()
        _wait(device)
        start = time.perf_counter()
        for index, x in todo:
            leaf = x.requires_grad_()
            layer(index, layer(index, leaf).relu()).sum().backward()
        _wait(device)
        return (time.perf_counter() - start) / count * 1e6

    for ordered in (False, True):
        times = [(spent(ours, ordered), spent(plain, ordered)) for _ in range(4)]
        mine, theirs = (min(column) for column in zip(*times, strict=True))
        name = f"mini-batch, edges {'' if ordered else 'not '}in order"
        yield _row(name, mine, theirs, 1.1, "index_add")


def _row(what: str, ours: float, other: float, bar: float | None, name: str) -> dict[str, Any]:
    us = [round(t, 2) for t in (ours, other)]
    return dict(zip(COLUMNS, (what, *us, round(ours / other, 3), bar or "", name), strict=True))


def main(arguments: list[str] | None = None) -> int:
    """The command; returns an exit code: 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m gnn_spmm_plugin.bench.host", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="tiny graphs and few repeats: only to see that it runs")
    parser.add_argument("--csv", metavar="FILE")
    options = parser.parse_args(arguments)
    rows = list(eager(options.device, 2 if options.quick else 200))
    count = 100 if options.device == "cuda" else 10
    rows += mini_batches(options.device, *((3, 200, 1000) if options.quick else (count, 10_000, 100_000)))
    show(COLUMNS, [[str(r[c]) for c in COLUMNS] for r in rows])
    if options.csv:
        command = f"python -m gnn_spmm_plugin.bench.host {' '.join(arguments or sys.argv[1:])}"
        write_table(options.csv, COLUMNS, rows, command)
    return int(any(r["bar"] and r["ratio"] > r["bar"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
