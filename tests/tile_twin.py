"""The operators `_tile_spmm` and `_tile_end` in plain torch, the first from the arrays of the format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from twins import ended, kernels_on_cpu

from gnn_spmm_plugin import dense
from gnn_spmm_plugin.tiles import GROUP

#: Elements that were summed anew since a test has emptied it.
MENDED: list[int] = []


def mend(sums: Tensor, rowptr: Tensor, col: Tensor, weight: Tensor | None, x: Tensor) -> Tensor:
    """`sums` ``[rows, F]``, those that are NaN from the edges."""
    MENDED.append(int(sums.isnan().sum()))
    term = x.float()[col.long(), : sums.shape[1]]
    term = term if weight is None else term * weight.float().unsqueeze(1)
    row = torch.arange(len(rowptr) - 1).repeat_interleave(rowptr.diff())
    return torch.where(sums.isnan(), torch.zeros_like(sums).index_add_(0, row, term), sums)


def tile_end(
    rowptr: Tensor,
    col: Tensor,
    weight: Tensor | None,
    x: Tensor,
    sums: Tensor,
    dst_scale: Tensor | None,
    mean: bool,
    self_x: Tensor | None = None,
    self_scale: Tensor | None = None,
    bias: Tensor | None = None,
    relu: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    assert sums.dtype == torch.float32 and sums.shape == (len(rowptr) - 1, x.shape[1])
    end = (dst_scale, mean, self_x, self_scale, bias, relu, out_dtype or x.dtype)
    return ended(mend(sums, rowptr, col, weight, x), rowptr, *end)


def tile_spmm(
    rowptr: Tensor,
    col: Tensor,
    weight: Tensor | None,
    ptr: Tensor,
    vectors: Tensor,
    bits: Tensor,
    values: Tensor | None,
    rows: Tensor | None,
    target: Tensor | None,
    merges: Tensor | None,
    x: Tensor,
    dst_scale: Tensor | None,
    config: list[int],
    mean: bool,
    self_x: Tensor | None = None,
    self_scale: Tensor | None = None,
    bias: Tensor | None = None,
    relu: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    height, slots, passes, width = config
    num_rows, groups, pieces = len(rowptr) - 1, len(vectors) // GROUP, len(ptr) - 1
    windows = -(-num_rows // height)
    index = [t for t in (rowptr, col, ptr, vectors, rows, target, merges) if t is not None]
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in index)
    assert bits.dtype == torch.int16 and bits.shape == (groups, height) and passes in (1, 3)
    step = 16 // x.element_size()
    assert x.shape[1] % step == 0 and x.shape[1] - step < width <= x.shape[1]
    assert x.stride(0) % step == 0 and x.data_ptr() % 16 == 0
    assert (weight is None) == (values is None)
    tile = ((bits.int().unsqueeze(2) >> torch.arange(GROUP)) & 1).float()  # [groups, H, 16]
    if values is not None:
        assert values.dtype == x.dtype and values.shape == tile.shape
        tile = torch.where(tile == 1, values.float(), tile)
    # Written out, and not by a matrix product of whatever order: 0 * inf is NaN, as on the tensor cores.
    term = tile.unsqueeze(3) * x.float()[vectors.long(), :width].view(groups, 1, GROUP, width)
    piece = torch.arange(pieces).repeat_interleave(ptr.diff())
    sums = torch.zeros(pieces, height, width).index_add_(0, piece, term.sum(2))

    places = torch.full((windows, height, width), torch.nan)
    written = torch.zeros(windows, dtype=torch.int64)
    of = torch.arange(pieces) if target is None else target.long()
    places[of[of >= 0]] = sums[of >= 0]
    written.index_add_(0, of[of >= 0], torch.ones_like(of[of >= 0]))
    scratch = torch.full((slots, height, width), torch.nan)
    scratch[~of[of < 0]] = sums[of < 0]
    for window, begin, end, _ in [] if merges is None else merges.tolist():
        places[window] = scratch[begin:end].sum(0)
        written[window] += 1
    assert bool((written == 1).all()), "each window is written once"
    row = torch.arange(windows * height) if rows is None else rows.long()
    row = torch.where(row < num_rows, row, -1)
    assert torch.equal(row[row >= 0].sort().values, torch.arange(num_rows)), "each row has one place"
    out = torch.full((num_rows, width), torch.nan)
    out[row[row >= 0]] = places.view(windows * height, width)[row >= 0]
    end = (dst_scale, mean, self_x, self_scale, bias, relu, out_dtype or x.dtype)
    return ended(mend(out, rowptr, col, weight, x), rowptr, *end)


@contextmanager
def on_cpu() -> Iterator[None]:
    """While it lasts, there are kernels tile and dense for the CPU: these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "_mm", lambda a, b: a.float() @ b.float())
        MENDED.clear()
        with kernels_on_cpu({"tile": {"_tile_spmm": tile_spmm}, "dense": {"_tile_end": tile_end}}):
            yield
