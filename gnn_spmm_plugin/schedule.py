"""In which order rows are processed, and what a plan lists of it.

A schedule is a permutation of the rows. It changes which rows are swept at the same time, never where their results go
nor the order of summation inside a row, so features stay where they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .graph import Csr

#: Items are sorted by length among this many neighbours in the schedule: the lane groups of a warp then end together,
#: while rows that lie together are still swept together. Sorting all of them costs more locality than it saves.
WINDOW = 1024


def check_schedule(csr: Csr, schedule: Tensor) -> Tensor:
    """`schedule` as an int64 permutation of the rows of `csr`.

    Raises:
        TypeError, ValueError: it is not one.
    """
    if not isinstance(schedule, Tensor):
        raise TypeError(f"schedule must be None, 'natural', 'degree' or a torch.Tensor, got {schedule!r}")
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


def by_degree(csr: Csr) -> Tensor:
    """Longest rows first, equal ones in their order."""
    return csr.degree().argsort(descending=True, stable=True)


def list_items(csr: Csr, chunk: int, order: Tensor | None = None, window: int = WINDOW) -> tuple[Tensor, int, int]:
    """What the CUDA kernel walks through: every row once, those of more than `chunk` edges in pieces.

    Args:
        csr: int32 indices.
        chunk: edges that a piece may have.
        order: int64 permutation of the rows; None: as they are.
        window: items that are sorted by length together, longest first.

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
    pieces = ((degree + chunk - 1) // chunk).clamp(min=1)
    ends = pieces.cumsum(0)
    total = int(ends[-1])
    owner = torch.arange(csr.num_rows, device=device).repeat_interleave(pieces, output_size=total)
    start = begin[owner] + (torch.arange(total, device=device) - (ends - pieces)[owner]) * chunk
    stop = torch.minimum(start + chunk, (begin + degree)[owner])
    split = (pieces > 1).nonzero().flatten()
    slot = torch.full_like(start, -1)
    if len(split):
        is_split = (pieces > 1)[owner]
        slot[is_split] = torch.arange(int(pieces[split].sum()), device=device)
    items = torch.stack([rows[owner], start, stop, slot], 1)
    if window > 1:
        # In windows of the schedule, and there by falling length; the sort is stable.
        key = torch.arange(total, device=device) // window * (chunk + 1) + (chunk - (stop - start))
        items = items[key.argsort(stable=True)]
    slots_end = pieces[split].cumsum(0)
    merges = torch.stack([rows[split], slots_end - pieces[split], slots_end, torch.zeros_like(slots_end)], 1)
    num_slots = int(slots_end[-1]) if len(split) else 0
    return torch.cat([items, merges]).to(torch.int32).contiguous(), len(split), num_slots
