"""Dense graphs as a dense matrix: one GEMM by torch, whose library knows the matrix units better than anyone.

Of a graph in which most nodes are neighbours, the zeros cost less than looking up where they are not. They are
multiplied, too, and 0 * inf is NaN: sums that come out as NaN are made anew from the edges (cuda/tile_spmm.cuh).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import _native
from ._native import autocasts
from .csr import Csr, KeptWeight, capturing, is_cacheable
from .tiles import DTYPES, passes

#: Largest matrix of float32 that is made; of others, counts take as much for a moment.
MOST_BYTES = 1 << 30
#: Rows are multiples of so many columns, zeros at the end, and features get as many rows: with another number of terms
#: a GEMM is up to five times slower (docs/benchmarks/tiles_h200.csv).
_STEP = 8
#: Parallel edges that a dtype can count.
_COUNTS = {torch.float32: 1 << 24, torch.float16: 1 << 11, torch.bfloat16: 1 << 8}


@dataclass(frozen=True, eq=False)
class Dense:
    """A graph as a matrix.

    Attributes:
        shape: (rows, columns).
        stride: columns with those that fill up.
        parallel: the most edges that join one pair of nodes.
        place: ``[E]`` int64, where in the storage of a matrix each edge is, in row order.
    """

    shape: tuple[int, int]
    stride: int
    parallel: int
    place: Tensor
    _counts: dict[torch.dtype, Tensor] = field(default_factory=dict, repr=False)
    _matrix: KeptWeight = field(default_factory=KeptWeight, repr=False)

    def takes(self, csr: Csr, weight: Tensor | None, x: Tensor) -> bool:
        """Whether there is a matrix for these operands: not of float64, nor of what does not add up in the dtype."""
        if x.dtype not in DTYPES:
            return False
        return self.parallel <= _COUNTS[x.dtype] if weight is None else weight.dim() == 1 and self.parallel <= 1

    def counts(self, dtype: torch.dtype) -> Tensor:
        """``[rows, stride]`` of `dtype`, the number of edges of each pair of nodes."""
        found = self._counts.get(dtype)
        if found is None:
            count = torch.zeros(self.shape[0] * self.stride, dtype=torch.int32, device=self.place.device)
            one = torch.ones((), dtype=torch.int32, device=self.place.device)
            found = count.scatter_add_(0, self.place, one.expand(self.place.shape)).to(dtype).view(-1, self.stride)
            if not capturing(self.place.device):  # what a capture computes is there only after a replay
                self._counts[dtype] = found
        return found

    def matrix(self, weight: Tensor) -> Tensor:
        """``[rows, stride]`` of `weight`, ``[E]`` in row order."""
        return weight.new_zeros(self.shape[0] * self.stride).scatter_(0, self.place, weight).view(-1, self.stride)

    def product(
        self,
        csr: Csr,
        weight: Tensor | None,
        x: Tensor,
        src_scale: Tensor | None,
        dst_scale: Tensor | None,
        mean: bool,
        *end: Any,
    ) -> Tensor:
        """The sum or mean over the edges into each row, and its end, as ``_spmm``; `weight` in the caller's order.

        A `src_scale` multiplies the rows of `x` beforehand, in their dtype.
        """
        if src_scale is not None:
            x = (x * src_scale.unsqueeze(1)).to(x.dtype)
        factor = None if weight is None else csr.in_row_order(weight)
        matrix = self.counts(x.dtype) if factor is None else self._matrix.made(lambda: self.matrix(factor), factor)
        return _native.tile_end(  # type: ignore[no-any-return]
            csr.rowptr, csr.col, factor, x, self._times(matrix, x), dst_scale, mean, *end
        )

    def recurs(self, csr: Csr, weight: Tensor) -> bool:
        """Whether `weight` was there before, and so does not change with every call; then its matrix is kept."""
        if not is_cacheable(weight) or torch.compiler.is_compiling():
            return False
        factor = csr.in_row_order(weight)
        return self._matrix.recurring(lambda: self.matrix(factor), factor) is not None

    def _times(self, matrix: Tensor, x: Tensor) -> Tensor:
        if autocasts(x.device.type):  # the precision is that of the features, as of every kernel
            with torch.autocast(x.device.type, enabled=False):
                return self._times(matrix, x)
        missing = self.stride - x.shape[0]
        return _mm(matrix, torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x)

    def nbytes(self) -> int:
        """Bytes of the arrays."""
        matrices = sum(self.shape[0] * self.stride * t.element_size() for t in self._counts.values())
        return matrices + self.place.numel() * 8


def _mm(matrix: Tensor, x: Tensor) -> Tensor:
    """Their product, rounded to float32; of float32 in tf32 where torch is told so."""
    return torch.mm(matrix, x) if x.dtype == torch.float32 else torch.mm(matrix, x, out_dtype=torch.float32)


def prepare(csr: Csr, dtype: torch.dtype) -> tuple[Dense, tuple[str, ...]]:
    """`csr` as a matrix, for features of `dtype`, and what to say about it; waits for the device once.

    Raises:
        ValueError: there is no such matrix: float64, int64 indices, over `MOST_BYTES`, or more parallel edges than the
            dtype counts.
    """
    if dtype not in DTYPES:
        raise ValueError(f"kernel 'dense' takes float32, float16 or bfloat16, got {dtype}; use another kernel")
    if csr.col.dtype != torch.int32:
        raise ValueError("kernel 'dense' needs int32 indices, the graph has int64 ones; use another kernel")
    rows, columns = csr.num_rows, csr.num_cols
    stride = max(-(-columns // _STEP), 1) * _STEP
    size = rows * stride * 4
    if size > MOST_BYTES:
        raise ValueError(
            f"as a dense matrix the graph takes {size:,} bytes to make, at most {MOST_BYTES:,} are used; use another "
            "kernel"
        )
    kept: Dense | None = csr.plans.get("dense")
    if kept is None:
        place = csr.rows().long() * stride + csr.col
        counts = Dense((rows, columns), stride, 0, place).counts(torch.float32)
        kept = Dense((rows, columns), stride, int(counts.max()) if counts.numel() else 0, place)
        csr.plans["dense"] = kept
    if kept.parallel > _COUNTS[dtype]:
        raise ValueError(
            f"{kept.parallel} edges join one pair of nodes, {dtype} counts to {_COUNTS[dtype]}; use another kernel"
        )
    kept.counts(dtype)
    density = csr.col.shape[0] / max(rows * columns, 1)
    parallel = "; weighted sums straight from the CSR arrays: edges are parallel" if kept.parallel > 1 else ""
    return kept, (f"dense     {rows:,} x {columns:,}, {density:.1%} of it edges{parallel}",)


# ---------------------------------------------------------------------- the choice

#: From this part of the pairs of nodes on that edges join, a GEMM wins: by bytes of an element, (columns of features or
#: more, part). Measured on an H200 (docs/benchmarks/dense_h200.csv). float32: where tf32 will do.
_LEAST = {2: ((128, 0.035), (64, 0.07), (32, 0.1)), 4: ((256, 0.05), (128, 0.1), (64, 0.18))}
_LEAST_DENSITY = min(least for rows in _LEAST.values() for _, least in rows)
#: Edges below which nothing was won.
_LEAST_EDGES = 100_000
#: And from so many products of an edge and a column on, below which starting takes the time.
_WORK = {2: 80_000_000, 4: 100_000_000}


def least_density(width: int, dtype: torch.dtype) -> float | None:
    """From which part of the pairs of nodes on a GEMM is faster for such features; None: it never is."""
    if dtype not in DTYPES or passes(dtype) > 1 or width * dtype.itemsize % 16:
        return None
    return next((least for columns, least in _LEAST[dtype.itemsize] if width >= columns), None)


def pays(csr: Csr, width: int, dtype: torch.dtype) -> bool:
    """Whether a GEMM is faster than every other kernel, as far as size and density say."""
    least = least_density(width, dtype)
    if least is None or not might_pay(csr):
        return False
    edges = csr.col.shape[0]
    return edges / (csr.num_rows * csr.num_cols) >= least and edges * width >= _WORK[dtype.itemsize]


def might_pay(csr: Csr) -> bool:
    """Whether there are features for which it `pays`."""
    edges, pairs = csr.col.shape[0], csr.num_rows * csr.num_cols
    small = pairs * 4 <= MOST_BYTES and csr.col.dtype == torch.int32
    return small and edges >= _LEAST_EDGES and edges / pairs >= _LEAST_DENSITY


@dataclass(frozen=True, eq=False)
class WhereItPays:
    """The format of a plan for any product: a matrix where that `pays`, made at the first such product.

    Learned weights would take a new matrix at every step, and GEMMs of several streams promise no bits
    (``torch.use_deterministic_algorithms``): both run on the CSR arrays.
    """

    _made: dict[torch.dtype, Dense | None] = field(default_factory=dict, repr=False)

    def takes(self, csr: Csr, weight: Tensor | None, x: Tensor) -> bool:
        """Whether these operands are for the matrix, which is there then."""
        if not pays(csr, x.shape[1], x.dtype) or torch.are_deterministic_algorithms_enabled():
            return False
        made = self._matrix(csr, x.dtype)
        if made is None or not made.takes(csr, weight, x):
            return False
        return weight is None or made.recurs(csr, weight)

    def _matrix(self, csr: Csr, dtype: torch.dtype) -> Dense | None:
        if dtype not in self._made and not (torch.compiler.is_compiling() or capturing(csr.col.device)):
            try:
                self._made[dtype] = prepare(csr, dtype)[0]
            except (ValueError, torch.OutOfMemoryError):  # parallel edges, or no room: as before
                self._made[dtype] = None
        return self._made.get(dtype)

    def product(self, csr: Csr, weight: Tensor | None, x: Tensor, *rest: Any) -> Tensor:
        """As `Dense.product`."""
        made = self._made[x.dtype]
        assert made is not None
        return made.product(csr, weight, x, *rest)

    def nbytes(self) -> int:
        """Bytes of what was made."""
        return max((made.nbytes() for made in self._made.values() if made is not None), default=0)
