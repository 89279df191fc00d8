"""How often a row of features comes from memory when rows are processed in a given order: a judge of schedules.

A gather misses a cache of C rows that forgets what was used longest ago if C others were read since the last time. Of a
piece of the sweep that lasts until C distinct columns were read, the *time* T of a cache, this is nearly: if the last
time was over T gathers ago (Denning 1968, "The working set model for program behavior"). So a sample of pieces says it,
for a thousandth of the work. Rows in flight at the same time, some thousands, count as one after the other: the
distances that decide are far longer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .csr import Csr

#: Bytes of a row of features that decisions go by, for all widths and dtypes share a schedule: 128 of float32.
ROW_BYTES = 512

#: Pieces of the sweep that are looked at, and how many gathers each has for a row that fits the cache.
PIECES, LENGTH = 16, 8

#: Features of fewer times what the cache holds are left alone: a product takes so little time that one of at most a
#: tenth less in hundreds pays no clustering.
LARGE = 3

#: A schedule is looked for if a perfect one would leave at most this share of the time, and kept if it leaves at most
#: that one: the estimates are off by a few hundredths, and a copy of the edges is not for nothing.
WORTH_A_TRY, WORTH_KEEPING = 0.8, 0.9

#: Rows that a cache serves in the time of one from memory: 8 to 10 against 4.2 TB/s on an H200 (docs/benchmarks.md).
CACHE_SPEED = 2


def cached_rows(device: torch.device) -> int:
    """Rows of features that the L2 of a GPU holds; half of it is left to what is written and read once. 0 elsewhere."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size) // 2 // ROW_BYTES


def miss_share(csr: Csr, cached: int, order: Tensor | None = None) -> float:
    """Estimate of the share of gathers that come from memory; waits for the device once.

    Args:
        csr: the graph.
        cached: rows of features that the cache holds, 1 or more.
        order: int64 permutation of the rows; None: as they are.

    Returns:
        A number in [0, 1]; 0 without edges. Against a simulation it is off by 0.007 on average, seldom by 0.02; where
        the cache holds all that a piece reads it says how much is read the first time, at most 1 in `LENGTH`.
    """
    edges, device = csr.col.shape[0], csr.col.device
    if edges == 0:
        return 0.0
    length = min(LENGTH * cached, edges)
    pieces = max(1, min(PIECES, edges // length))
    start = torch.arange(pieces, device=device) * ((edges - length) // max(pieces - 1, 1))
    inside = torch.arange(length, device=device)
    at = (start.unsqueeze(1) + inside).flatten()
    if order is not None:
        ends = csr.degree().long()[order].cumsum(0)
        position = torch.searchsorted(ends, at, right=True)
        at = csr.rowptr[1:].long()[order[position]] - (ends[position] - at)
    piece = torch.arange(pieces, device=device).repeat_interleave(length)
    key, by = (piece * csr.num_cols + csr.col[at]).sort(stable=True)
    again = key[1:] == key[:-1]
    since = torch.full_like(key, length)  # gathers since the last one of the column; at the first of a piece, long ago
    since[by[1:]] = torch.where(again, by[1:] - by[:-1], length)
    since = since.view(pieces, length)
    time = ((since == length).cumsum(1) < cached).sum(1, keepdim=True).clamp(max=length * 3 // 4)
    later = inside >= time
    return float((((since > time) & later).sum(1) / later.sum(1)).double().mean())


def sweep_cost(csr: Csr, share: float) -> float:
    """Time of a product, in rows that go through memory, where so large a share of the gathers comes from there.

    Memory and cache work at the same time, so the slower of them counts.
    """
    edges = csr.col.shape[0]
    return max(share * edges + csr.num_rows, edges / CACHE_SPEED)


def can_pay(csr: Csr, cached: int, share: float = 1.0) -> bool:
    """Whether a schedule could be worth looking for.

    Args:
        csr: the graph. The answer is no unless sources and destinations are the same nodes.
        cached: rows of features that the cache holds; 0: there is none, and the answer is no.
        share: `miss_share` in the natural order. Without it, an answer that takes no look at the graph.
    """
    edges = csr.col.shape[0]
    if not 0 < LARGE * cached <= csr.num_cols or csr.num_rows != csr.num_cols or edges == 0:
        return False
    perfect = sweep_cost(csr, min(1.0, csr.num_cols / edges))  # each row of features comes once
    return perfect <= WORTH_A_TRY * sweep_cost(csr, share)


def pays(csr: Csr, natural: float, found: float) -> bool:
    """Whether an order whose `miss_share` is `found` is clearly better than the natural one."""
    return sweep_cost(csr, found) <= WORTH_KEEPING * sweep_cost(csr, natural)
