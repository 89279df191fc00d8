"""What there is to say about a graph: its structure, its plans, and products timed here against gather and scatter."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..bench.breakeven import wins_back
from ..bench.contenders import MESSAGE_BYTES
from ..bench.memory import peak_memory
from ..bench.timer import Timing, own_stream, time_side_by_side
from ..csr import Csr
from ..distributed.cost import compare_orders
from ..features import GraphFeatures
from ..functional import spmm
from ..graph import Graph
from ..plan import CONFIG, Plan
from ..plan import plan as make_plan
from ..schedule import SCHEDULES

CELLS = 80  # of a picture of the matrix, along each side
SAMPLED = 4_000_000  # edges that a picture looks at, at most
CLUSTERED = {"cpu": 5_000_000, "cuda": 200_000_000}  # edges of graphs whose communities are looked for
COPIED = 256 << 20  # bytes of the copy that says how fast memory is: more than any cache holds
#: Largest difference from gather and scatter, over the largest result, that is still timed.
AGREE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}


@dataclasses.dataclass(frozen=True)
class Asked:
    """The products to look at: widths, and what `gnn_spmm_plugin.plan` takes besides; milliseconds for each.

    ``parts``: over how many ranks to share the graph, each number a case.
    """

    widths: Sequence[int]
    dtype: torch.dtype = torch.float32
    reduce: str = "sum"
    policy: str = "auto"
    budget_ms: float = 60.0
    parts: Sequence[int] = ()


def describe(name: str, edge_index: Tensor, sizes: tuple[int, int], asked: Asked) -> dict[str, Any]:
    """Facts about one graph, as JSON takes them.

    Args:
        name: what to call it.
        edge_index: ``[2, E]`` integers on the device where it is to be measured, row 0 sources.
        sizes: number of sources, number of destinations.
        asked: the products.

    Returns:
        ``features``, ``degrees``, ``picture``, ``plans`` and, side by side with gather and scatter, ``products``;
        ``partition``, a row of `gnn_spmm_plugin.distributed.cost.compare_orders` for each of ``parts`` and order, where
        both ends of an edge are of the same nodes.
        ``wrong`` names the products whose results differed; these have no times.
    """
    device = edge_index.device.type
    graph = Graph.from_edge_index(edge_index, sizes)
    plans = [make_plan(graph, w, asked.dtype, asked.reduce, policy=asked.policy) for w in asked.widths]
    facts: dict[str, Any] = {
        "name": name,
        "device": str(graph.device),
        "num_src": graph.num_src,
        "num_dst": graph.num_dst,
        "num_edges": graph.num_edges,
        "index_bytes": graph.nbytes(),
        "features": dataclasses.asdict(GraphFeatures.of(graph._csr)),
        "degrees": {
            "in": degree_points(graph._csr.degree()),
            "out": degree_points(torch.bincount(edge_index[0], minlength=graph.num_src)),
        },
        "picture": _picture(graph, plans[0]),
        "plans": [{"width": w, **plan_facts(p)} for w, p in zip(asked.widths, plans, strict=True)],
        "products": [],
        "preparation_ms": None,
        "partition": _partition(graph, asked),
    }
    if graph.num_edges:
        with own_stream(device):
            facts["preparation_ms"] = _preparation_ms(edge_index, sizes, asked)
            measured = [_product(graph, edge_index, p, asked, facts["preparation_ms"]) for p in plans]
        facts["products"] = measured
    return facts


def _partition(graph: Graph, asked: Asked) -> list[dict[str, Any]]:
    if graph.num_src != graph.num_dst:
        return []
    return [
        {"parts": parts} | row
        for parts in asked.parts
        for row in compare_orders(graph, parts, widths=asked.widths, dtype=asked.dtype)
    ]


def plan_facts(plan: Plan) -> dict[str, Any]:
    """A plan, as JSON takes it."""
    return {
        "kernel": plan.kernel.name,
        "mode": plan.mode,
        "schedule": plan.schedule,
        "config": dict(zip(CONFIG, plan.config, strict=True)),
        "features": None if plan.features is None else dataclasses.asdict(plan.features),
        "reasons": list(plan.reasons),
        "build_seconds": plan.build_seconds,
        "bytes": plan.nbytes(),
        "explain": plan.explain(),
    }


def degree_points(degree: Tensor) -> list[tuple[int, int]]:
    """(degree, rows that have at least so many), at most about 60 of them, evenly on a logarithmic axis."""
    counts = torch.bincount(degree.cpu().long())
    at_least = counts.flip(0).cumsum(0).flip(0)
    last = len(counts) - 1
    steps = {round(last ** (i / 60)) for i in range(61)} if last > 0 else set()
    return [(d, int(at_least[d])) for d in sorted(steps)]


# ---------------------------------------------------------------------- the picture


def _picture(graph: Graph, plan: Plan) -> dict[str, Any]:
    """Counts of edges in a raster of rows and columns: as they are, and in the order of a schedule."""
    csr = graph._csr
    shown: dict[str, Any] = {"before": _raster(csr, None), "after": None, "schedule": plan.schedule, "followed": True}
    if plan.schedule == "natural":
        shown |= {"schedule": "community", "followed": False}
    square, most = csr.num_rows == csr.num_cols, CLUSTERED.get(graph.device.type, 0)
    if not square or not csr.num_rows or csr.col.shape[0] > most:
        why = "its sources and destinations are different nodes" if not square else "looking for it would take long"
        return shown | {"note": f"no other order is shown: {why}"}
    make = SCHEDULES.get(str(shown["schedule"]))
    order = None if make is None else make(csr)
    return shown if order is None else shown | {"after": _raster(csr, order)}


def _raster(csr: Csr, order: Tensor | None) -> list[list[int]]:
    edges, down, across = csr.col.shape[0], min(CELLS, csr.num_rows), min(CELLS, csr.num_cols)
    if edges == 0 or not down or not across:
        return []
    at = torch.arange(0, edges, max(1, -(-edges // SAMPLED)), device=csr.col.device)
    row = torch.searchsorted(csr.rowptr.long(), at, right=True) - 1
    col = csr.col[at].long()
    if order is not None:  # of a square matrix: both are numbered anew
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        row, col = place[row], place[col]
    cell = row * down // csr.num_rows * across + col * across // csr.num_cols
    found: list[list[int]] = torch.bincount(cell, minlength=down * across).view(down, across).tolist()
    return found


# ---------------------------------------------------------------------- the products


def copy_speed(device: str, budget_ms: float = 60.0) -> float:
    """Bytes a second that a copy in memory reads and writes, measured here."""
    source = torch.empty(COPIED, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    target.copy_(source)  # the pages are there
    with own_stream(device):
        found = time_side_by_side([lambda: target.copy_(source)], device, "eager", budget_ms)[0]
    assert isinstance(found, Timing)
    return 2 * COPIED / (found.median_ms / 1e3)


def _preparation_ms(edge_index: Tensor, sizes: tuple[int, int], asked: Asked) -> float:
    """Median of three: the graph from its edge list, and the plan, descriptors included."""

    def wait() -> None:
        if edge_index.is_cuda:
            torch.cuda.synchronize()

    times = []
    for _ in range(3):
        wait()
        start = time.perf_counter()
        graph = Graph.from_edge_index(edge_index, sizes)
        make_plan(graph, asked.widths[0], asked.dtype, asked.reduce, policy=asked.policy)
        wait()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def gather_scatter(x: Tensor, edge_index: Tensor, num_dst: int, reduce: str) -> Tensor:
    """The product as PyG computes it from an edge_index: a message for each edge, then a scatter."""
    source, target = edge_index
    message = x.index_select(0, source)
    index = target.view(-1, 1).expand_as(message)
    out = x.new_zeros(num_dst, x.shape[1])
    if reduce in ("max", "min"):
        return out.scatter_reduce_(0, index, message, f"a{reduce}", include_self=False)
    out.scatter_add_(0, index, message)
    if reduce == "sum":
        return out
    count = out.new_zeros(num_dst).scatter_add_(0, target, out.new_ones(len(target)))
    return out / count.clamp_(min=1).view(-1, 1)


def _product(graph: Graph, edge_index: Tensor, plan: Plan, asked: Asked, preparation_ms: float) -> dict[str, Any]:
    """One product, timed side by side with gather and scatter, after their results have been compared."""
    assert plan.request is not None
    width, device = plan.request[0], graph.device.type
    x = torch.randn(graph.num_src, width, device=graph.device, generator=_generator(graph.device)).to(asked.dtype)
    row = width * x.element_size()
    used = int(torch.bincount(edge_index[0], minlength=1).count_nonzero())
    facts: dict[str, Any] = {
        "width": width,
        "gathered_bytes": graph.num_edges * row,
        "compulsory_bytes": (graph.num_dst + 1) * 4 + graph.num_edges * 4 + (used + graph.num_dst) * row,
    } | dict.fromkeys(("before_ms", "after_ms", "before_bytes", "after_bytes", "break_even"))
    facts["note"] = ""
    ours: Callable[[], Any] = partial(spmm, graph, x, reduce=asked.reduce, plan=plan)
    theirs: Callable[[], Any] = partial(gather_scatter, x, edge_index.long(), graph.num_dst, asked.reduce)
    calls = [ours]
    if 2 * facts["gathered_bytes"] > _free_bytes(device):  # the messages, and some room
        facts["note"] = "gather and scatter were left out: their messages would not fit"
    else:
        try:
            wanted = theirs()
            calls.append(theirs)
            apart = float((ours().double() - wanted.double()).abs().max()) / max(float(wanted.abs().max()), 1e-30)
            if not apart <= AGREE[asked.dtype]:
                return facts | {"note": f"wrong: results differ by {apart:.0e} of the largest"}
        except RuntimeError as e:  # out of memory; or a dtype that it lacks
            facts["note"] = f"gather and scatter were left out: {str(e).splitlines()[0]}"
    ours()
    facts["after_bytes"] = peak_memory(ours, device)
    if len(calls) > 1:
        facts["before_bytes"] = peak_memory(theirs, device)
    times = [t.median_ms for t in time_side_by_side(calls, device, "eager", asked.budget_ms) if isinstance(t, Timing)]
    facts["after_ms"] = times[0]
    if len(times) > 1:
        facts["before_ms"] = times[1]
        paid = wins_back(preparation_ms, times[1], times[0])
        facts["break_even"] = None if math.isinf(paid) else math.ceil(paid)
    return facts


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def _free_bytes(device: str) -> int:
    if device == "cuda":
        return min(torch.cuda.mem_get_info()[0], MESSAGE_BYTES)
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # no such thing here
        return MESSAGE_BYTES


def wrong(graphs: Sequence[dict[str, Any]]) -> list[str]:
    """The products whose results differed, in words."""
    bad = [(g["name"], p) for g in graphs for p in g["products"] if p["note"].startswith("wrong")]
    return [f"{name}, width {p['width']}: {p['note']}" for name, p in bad]


__all__ = ["Asked", "copy_speed", "degree_points", "describe", "gather_scatter", "plan_facts", "wrong"]
