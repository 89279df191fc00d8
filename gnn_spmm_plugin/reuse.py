from __future__ import annotations
import torch
from torch import Tensor
from .csr import Csr
WINDOWS=8
SPAN=16
def miss_share(csr: Csr, cached: int, order: Tensor | None = None) -> float:
    edges, device = csr.col.shape[0], csr.col.device
    span = min(SPAN * cached, edges)
    windows = max(1, min(WINDOWS, edges // span))
    start = torch.arange(windows, device=device) * ((edges - span) // max(windows - 1, 1))
    at = (start.unsqueeze(1) + torch.arange(span, device=device)).flatten()
    if order is not None:
        ends = csr.degree().long()[order].cumsum(0)
        position = torch.searchsorted(ends, at, right=True)
        at = csr.rowptr[1:].long()[order[position]] - (ends[position] - at)
    window = torch.arange(windows, device=device).repeat_interleave(span)
    key, by = (window * csr.num_cols + csr.col[at]).sort(stable=True)
    new = torch.ones_like(key, dtype=torch.bool)
    new[by[1:]] = key[1:] != key[:-1]
    distinct = new.view(windows, span).cumsum(1)
    reached = (distinct < cached).sum(1)
    low, high = reached * 3 // 4, (reached * 5 // 4).clamp(max=span)
    padded = torch.cat([distinct.new_zeros(windows, 1), distinct], 1)
    rise = (padded.gather(1, high[:, None]) - padded.gather(1, low[:, None]))[:, 0]
    return float((rise.double() / (high - low)).mean())
