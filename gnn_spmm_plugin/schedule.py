"""In which order rows are processed, and what a plan lists of it.

A schedule is a permutation of the rows. It changes which rows are swept at the same time, never where their results go
nor the order of summation inside a row, so features stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from ._config import counters, log
from .community import community_order
from .csr import Csr
from .features import GraphFeatures
from .partition import check_square, dual_metric
from .reuse import ROW_BYTES, can_pay, miss_share, pays, sweep_cost
from .router import SHORT_ROWS, SMALL_EDGES, auto_rule


@dataclass(frozen=True)
class Layout:
    """How rows are cut and ordered.

    Attributes:
        chunk: edges that a piece of a row has at most, 2 or more; but see `piece_length`. 0: no list of pieces, rows
            come straight from the CSR arrays; long ones whole, or, where `long` is not 0, shared by blocks as in a
            cold plan.
        window: items that are sorted by length together, longest first, so that the lane groups of a warp end
            together while rows that lie together are still swept together. 0: all of them.
        long: items of more edges go ahead of all others: what is begun last decides when the whole is done.
        bundle: rows that the kernel for sums takes at a time, see `rows_at_once`. Over 1, pieces go ahead of all.
    """

    chunk: int
    window: int
    long: int
    bundle: int = 1


#: Rows straight from the CSR arrays, none split; and the same, but blocks of threads share long ones.
UNSPLIT, BLOCKS = Layout(0, 0, 0), Layout(0, 0, 1)


def layout_by_rule(f: GraphFeatures) -> tuple[Layout, str]:
    """How a warm plan takes rows in their own order, by rules alone, and which of `gnn_spmm_plugin.router` held."""
    rule = auto_rule(f.num_cols, f.num_edges, f.mean_degree, f.degree_cv, f.max_degree)
    said = f"{rule.name}: {rule.says()}"
    if rule.family == "CSR_DIRECT":
        return replace(UNSPLIT, bundle=rows_at_once(f)), f"{said}: straight from the CSR arrays"
    return layout_of(f), f"{said}: from a list"


def layout_of(f: GraphFeatures) -> Layout:
    """The list that was fastest on an H200 on graphs like this one (docs/benchmarks.md).

    A piece is a chain of dependent gathers. Where most rows are long, short pieces only mean more partial results;
    where neighbours have columns in common, long pieces keep a warp away from them, and so does sorting all of them.
    """
    near = f.locality >= 0.3
    if f.mean_degree >= 64:
        if f.num_edges < 1_000_000:
            return Layout(128, 1024, 64)
        return Layout(256, 0 if f.num_cols < 100_000 and not near else 1024, 256)
    if f.num_edges < 4_000_000:  # soon over: the last pieces count most
        return Layout(64, 1024, 32)
    return Layout(64, 1024, 64) if near else Layout(256, 1024, 64)


def rows_at_once(f: GraphFeatures) -> int:
    """Consecutive rows that a lane group of cuda/row_sweep.cuh, `stream_sweep`, takes at a time; 1: it is not for them.

    Measured on an H200: 1.05 to 1.29 times faster on road networks; of rows of 6 edges 1.1 to 1.27 times, where these
    lead to neighbours. Of 8 edges to anywhere, 0.7 times; 0.75 to 1 where there are long rows besides, and on graphs of
    fewer than 100,000 edges as often slower as faster.
    """
    if f.max_degree > SHORT_ROWS or f.num_edges < SMALL_EDGES:
        return 1
    if f.mean_degree <= 4:
        most = 4
    elif f.mean_degree <= 6 and f.max_degree <= 8 and f.locality >= 0.3:
        most = 3
    else:
        return 1
    return max(2, min(most, f.num_rows // 30_000))  # there are threads to occupy


def check_schedule(csr: Csr, schedule: Tensor) -> Tensor:
    """`schedule` as an int64 permutation of the rows of `csr`.

    Raises:
        TypeError, ValueError: it is not one.
    """
    if not isinstance(schedule, Tensor):
        raise TypeError(f"schedule must be None, a name or a torch.Tensor, got {schedule!r}")
    if schedule.dtype not in (torch.int32, torch.int64) or schedule.shape != (csr.num_rows,):
        raise ValueError(
            f"schedule must hold each row once, [{csr.num_rows}] int32 or int64, got {list(schedule.shape)} "
            f"{schedule.dtype}"
        )
    if schedule.device != csr.col.device:
        raise ValueError(f"schedule is on {schedule.device} but the graph on {csr.col.device}; move one of them")
    order = schedule.long()
    if not torch.equal(order.sort().values, torch.arange(csr.num_rows, device=order.device)):
        raise ValueError(f"schedule must hold each row from 0 to {csr.num_rows - 1} once")
    return order


def order_of(csr: Csr, schedule: str | Tensor | None, *, read: bool = True) -> tuple[str, Tensor | None]:
    """What a schedule is called, and its int64 permutation of the rows; None: as they are, or no one will read it.

    Raises:
        TypeError, ValueError: it is none.
    """
    if schedule is None or isinstance(schedule, str):
        name = schedule or "natural"
        if name not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}; got {name!r}")
        make = SCHEDULES[name]
        if name in SQUARE:
            check_square(csr, f"the schedule {name}")
        return name, make(csr) if make is not None and read and csr.num_rows > 0 else None
    return "the caller's", check_schedule(csr, schedule)


def by_dual_metric(csr: Csr) -> Tensor:
    """Rows by falling hybrid of neighbour density and degree, equal ones in their order; square matrices only."""
    kept: Tensor | None = csr.plans.get("dual_metric")  # walks take much longer than whatever is made of them
    if kept is None:
        kept = csr.plans["dual_metric"] = dual_metric(csr).hybrid.argsort(descending=True, stable=True)
    return kept


def by_degree(csr: Csr) -> Tensor:
    """Longest rows first, equal ones in their order."""
    return csr.degree().argsort(descending=True, stable=True)


def by_rcm(csr: Csr) -> Tensor:
    """Reverse Cuthill-McKee: neighbours close together, on the host, by scipy; square matrices only.

    Raises:
        ImportError: scipy is not installed.
        ValueError: the matrix is not square.
    """
    try:
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import reverse_cuthill_mckee
    except ImportError as e:
        raise ImportError("schedule 'rcm' needs scipy; pip install scipy") from e
    check_square(csr, "the schedule rcm")
    if csr.col.shape[0] == 0:
        return torch.arange(csr.num_rows, device=csr.col.device)
    rowptr, col = csr.rowptr.cpu().numpy(), csr.col.cpu().numpy()
    pattern = csr_matrix((np.ones(len(col), np.int8), col, rowptr), (csr.num_rows, csr.num_cols))
    found = reverse_cuthill_mckee(pattern, symmetric_mode=False)
    return torch.from_numpy(found.astype(np.int64)).to(csr.col.device)


def by_community(csr: Csr) -> Tensor:
    """Rows by communities of communities, see `gnn_spmm_plugin.community`; square matrices only."""
    kept: Tensor | None = csr.plans.get("community")  # finding them takes as long as many products
    if kept is None:
        kept = csr.plans["community"] = community_order(csr)
        counters["communities_found"] += 1
    return kept


def schedule_that_pays(csr: Csr, cached: int) -> tuple[str | None, tuple[str, ...]]:
    """``"community"`` where its order is clearly better than the natural one, else None, and what there is to say.

    The graph keeps the answer, and the order if it is good.

    Args:
        csr: the graph.
        cached: rows of features that the cache of the device holds, 0 where there is none.
    """
    kept: tuple[str | None, tuple[str, ...]] | None = csr.plans.get("pays")
    if kept is None:
        kept = csr.plans["pays"] = _look_for_one(csr, cached)
    return kept


def _look_for_one(csr: Csr, cached: int) -> tuple[str | None, tuple[str, ...]]:
    if not can_pay(csr, cached):
        return None, ()
    before = miss_share(csr, cached)
    of = f"of {ROW_BYTES} bytes, {cached:,} of which fit half the L2: estimated from memory {before:.0%} of the gathers"
    if not can_pay(csr, cached, before):
        return None, (f"community not tried. Rows {of}: no order could be much better",)
    had = "community" in csr.plans  # then someone asked for it
    try:
        after = miss_share(csr, cached, by_community(csr))
    except torch.OutOfMemoryError:
        log.warning("out of memory while looking for communities of %d nodes: rows as they are", csr.num_rows)
        return None, ("community not tried: out of memory",)
    times = sweep_cost(csr, before) / sweep_cost(csr, after)
    what = f"Rows {of}, in this order {after:.0%}; a product {times:.2f} times as fast"
    if pays(csr, before, after):
        return "community", (f"community {what}",)
    if not had:
        del csr.plans["community"]
    return None, (f"community not kept. {what}",)


#: Those that are of graphs whose sources are their destinations.
SQUARE = ("dual_metric", "rcm", "community")

#: The schedules that have a name, and what makes them; others are given as permutations.
SCHEDULES: dict[str, Callable[[Csr], Tensor] | None] = {
    "natural": None,
    "degree": by_degree,
    "dual_metric": by_dual_metric,
    "rcm": by_rcm,
    "community": by_community,
}


class Stage(TypedDict, total=False):
    """What the CUDA kernel for small dense graphs (cuda/staged_spmm.cuh) needs of a plan; all of it or nothing.

    Attributes:
        stage: ``[blocks + 2, M]`` int32. The rows, longest first, and for each of them where its edges from each block
            of sources begin, and where the last end.
        sources: columns of a block.
    """

    stage: Tensor
    sources: int


def stage_of(csr: Csr, f: GraphFeatures, shared: int) -> tuple[Stage, str]:
    """A `Stage` where it pays, and what there is to say about it.

    Sources go to `shared` bytes of shared memory 128 bytes of a row at a time, a fifth of which is for sums. On an
    H200 that is 1.6 to 2 times faster than gathers from the L2, where each block of sources is read much more often
    than it is written, and has long pieces of rows; the bounds are estimates from there.

    Args:
        csr: int32 indices.
        f: its features.
        shared: bytes of shared memory that a block of threads may have.
    """
    blocks = -(-f.num_cols * 128 * 5 // (shared * 4))
    if not 1 <= blocks <= 8 or f.num_edges < 64 * f.num_rows * blocks:
        return Stage(), ""
    sources = -(-f.num_cols // blocks)
    blocks = -(-f.num_cols // sources)
    if f.num_edges < 512 * sources or f.max_degree > f.num_cols:  # which only a multigraph has
        return Stage(), ""
    key = csr.rows().long() * blocks + csr.col // sources
    if bool((key[1:] < key[:-1]).any()):
        return Stage(), "not: columns do not ascend within rows: sort the edges to have small dense graphs faster"
    order = by_degree(csr)
    ends = torch.arange(blocks + 1, device=order.device).unsqueeze(1)
    cut = torch.searchsorted(key, order * blocks + ends)
    stage = torch.cat([order.unsqueeze(0), cut]).to(torch.int32)
    how = f"sums from shared memory, but of float64, {sources:,} of {f.num_cols:,} sources at a time"
    return Stage(stage=stage, sources=sources), how


def move_edges(csr: Csr, order: Tensor) -> Csr:
    """`csr` with `col` and `perm` in an order of the rows, so that what is swept together is read together.

    Its `rowptr` stays that of the rows as they are: the kernels that follow a list of items look up lengths alone.
    """
    degree = csr.degree().long()[order]
    shift = csr.rowptr[:-1].long()[order] - (degree.cumsum(0) - degree)
    edges = csr.col.shape[0]
    at = shift.repeat_interleave(degree, output_size=edges) + torch.arange(edges, device=order.device)
    perm = at.to(csr.col.dtype) if csr.perm is None else csr.perm[at]
    return Csr(csr.rowptr, csr.col[at], perm, csr.num_cols)


def piece_length(degree: Tensor, chunk: int) -> Tensor:
    """Edges that a piece of a row of `degree` edges has at most: `chunk`, and of a hub more.

    One piece is a chain of gathers, and `merge_pieces` a chain over the pieces, eight at a time: both are equally long
    where pieces have ``sqrt(degree / 8)`` edges.
    """
    return (degree.double() / 8).sqrt().ceil().long().clamp(min=chunk)


def list_items(csr: Csr, layout: Layout, order: Tensor | None = None, moved: bool = False) -> tuple[Tensor, int, int]:
    """What the CUDA kernel walks through: every row once, long ones in pieces.

    Args:
        csr: int32 indices, at least one row.
        layout: how rows are cut and ordered.
        order: int64 permutation of the rows; None: as they are.
        moved: edges are in this order too, see `move_edges`.

    Returns:
        ``[n + m, 4]`` int32, with m and the number of scratch slots. First n items {row, begin, end, slot}: a slot of
        -1 where the piece is the whole row, else where its partial result goes. Then {row, first slot, end slot, 0} for
        each of m split rows.
    """
    device = csr.col.device
    begin, degree = csr.rowptr[:-1].long(), csr.degree().long()
    rows = torch.arange(csr.num_rows, device=device)
    if order is not None:
        begin, degree, rows = begin[order], degree[order], order
        begin = degree.cumsum(0) - degree if moved else begin
    length = piece_length(degree, layout.chunk)
    pieces = ((degree + length - 1) // length).clamp(min=1)
    ends = pieces.cumsum(0)
    total = int(ends[-1])
    number = torch.arange(total, device=device)
    owner = torch.arange(csr.num_rows, device=device).repeat_interleave(pieces, output_size=total)
    start = begin[owner] + (number - (ends - pieces)[owner]) * length[owner]
    stop = torch.minimum(start + length[owner], (begin + degree)[owner])
    split = (pieces > 1).nonzero().flatten()
    slot = torch.full_like(start, -1)
    if len(split):
        is_split = (pieces > 1)[owner]
        slot[is_split] = torch.arange(int(pieces[split].sum()), device=device)
    items = torch.stack([rows[owner], start, stop, slot], 1)
    # Long ones first; then in windows of the schedule, and there by falling length. The sort is stable.
    size = stop - start
    most = int(length.max()) + 1
    window = number // (layout.window or total)
    window += (size <= layout.long) * (total + 1)
    if layout.bundle > 1:
        window += (slot < 0) * 2 * (total + 1)
    items = items[(window * most - size).argsort(stable=True)]
    slots_end = pieces[split].cumsum(0)
    merges = torch.stack([rows[split], slots_end - pieces[split], slots_end, torch.zeros_like(slots_end)], 1)
    num_slots = int(slots_end[-1]) if len(split) else 0
    return torch.cat([items, merges]).to(torch.int32).contiguous(), len(split), num_slots
