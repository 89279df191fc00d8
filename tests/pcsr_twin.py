"""The operator `_pcsr_spmm` in plain torch, from the arrays of the format alone."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from twins import ended, kernels_on_cpu

from gnn_spmm_plugin import _native
from gnn_spmm_plugin.pcsr import FOUR


def pcsr_spmm(
    rowptr: Tensor,
    ptr: Tensor,
    col: Tensor,
    target: Tensor | None,
    merges: Tensor | None,
    weight: Tensor | None,
    x: Tensor,
    src_scale: Tensor | None,
    dst_scale: Tensor | None,
    config: list[int],
    mean: bool,
    self_x: Tensor | None = None,
    self_scale: Tensor | None = None,
    bias: Tensor | None = None,
    relu: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    _, _, height, slots = config
    num_rows, width, pieces = rowptr.shape[0] - 1, x.shape[1], ptr.shape[0] - 1
    acc = _native.accumulation_dtype(x.dtype)
    assert all(t is None or t.is_contiguous() for t in (ptr, col, target, merges, weight))
    assert all(t is None or t.dtype == torch.int32 for t in (ptr, col, target, merges))
    columns = (col.long() & 0xFFFFFFFF) >> height
    present = torch.stack([col >> r & 1 for r in range(height)], 1) == 1
    term = x.to(acc)[columns]
    if src_scale is not None:
        term = term * src_scale[columns].unsqueeze(1)
    term = term.unsqueeze(1).expand(-1, height, -1)
    if weight is not None:
        heads = weight.shape[2] if weight.dim() == 3 else 1
        term = term * weight.to(acc).view(len(col), height, heads).repeat_interleave(width // heads, 2)
    term = term.masked_fill(~present.unsqueeze(2), 0)
    piece = torch.arange(pieces).repeat_interleave(ptr.diff() * FOUR)
    sums = torch.zeros(pieces, height, width, dtype=acc).index_add_(0, piece, term)

    out = torch.full((num_rows, width), torch.nan, dtype=acc)
    written = torch.zeros(num_rows, dtype=torch.int64)

    def write(rows: Tensor, values: Tensor) -> None:
        there = rows >= 0
        out[rows[there]] = values[there]
        written.index_add_(0, rows[there], torch.ones_like(rows[there]))

    if target is None:
        rows = torch.arange(pieces * height).view(pieces, height)
        rows[rows >= num_rows] = -1
    else:
        rows = target.long()
    is_part = rows[:, 0] < 0
    for r in range(height):
        write(rows[~is_part, r], sums[~is_part, r])
    scratch = torch.full((slots, height, width), torch.nan, dtype=acc)
    scratch[~rows[is_part, 0]] = sums[is_part]
    for first, second, begin, end in [] if merges is None else merges.tolist():
        whole = scratch[begin:end].sum(0)
        for r, row in enumerate((first, second)[:height]):
            write(torch.tensor([row]), whole[r : r + 1])
    assert bool((written == 1).all()), "each row is written once"
    return ended(out, rowptr, dst_scale, mean, self_x, self_scale, bias, relu, out_dtype or x.dtype)


def on_cpu() -> AbstractContextManager[None]:
    """While it lasts, there is a kernel pcsr for the CPU: this one."""
    return kernels_on_cpu({"pcsr": {"_pcsr_spmm": pcsr_spmm}})
