"""Tiles for tensor cores: windows of rows, whose distinct columns are multiplied sixteen at a time.

Rows are taken in windows of H = 8 or 16 that follow one another in a schedule. The distinct columns of a window are its
*vectors*, 16 of them a *group*: a tile of H x 16 weights, mostly zeros, that the tensor cores multiply with 16 rows of
features (cuda/tile_spmm.cuh). A row of features is loaded once a window that has its column instead of once an edge, so
edges a vector, not the arithmetic, say what can be gained.

Method: row windows with packed columns are TC-GNN's (Wang et al., 2023), windows of 8 FlashSparse's (Shi et al., 2025);
RA-SpMM's families TC_DIRECT, COMMUNITY_TC and SEGMENT_HYBRID are such windows in natural order, in another one, and
with long windows cut. Different here: weights have the precision of the features, duplicate edges stay (each a vector
of its own), everything is built on the graph's device, and what is not finite stays in the rows of its own edges.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _native
from .csr import Csr, KeptWeight
from .schedule import order_of

#: Vectors of a group.
GROUP = 16
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_INT32_MAX = 2**31 - 1


class TileConfig(NamedTuple):
    """How windows are cut; as text ``T8.S0``."""

    height: int = 8  #: H, rows of a window: 8 or 16
    most: int = 0  #: groups that a piece of a window has at most; 0: windows stay whole

    def __str__(self) -> str:
        return f"T{self.height}.S{self.most}"


@dataclass(frozen=True)
class TileFeatures:
    """What the rows of a graph are like as windows of one height under one schedule.

    Attributes:
        height: H.
        windows: how many.
        vectors: distinct columns of each window, added up; those of parallel edges several times.
        groups: of 16 of them.
        longest: groups of the longest window.
        edges: of the graph.
    """

    height: int
    windows: int
    vectors: int
    groups: int
    longest: int
    edges: int

    @property
    def edges_a_vector(self) -> float:
        """How many times less often rows of features are loaded than once an edge; 1 where there are none."""
        return self.edges / self.vectors if self.vectors else 1.0

    @property
    def fill(self) -> float:
        """Part of the weights of all tiles that are edges."""
        return self.edges / (self.groups * GROUP * self.height) if self.groups else 0.0


class _Packed(NamedTuple):
    """The edges of a graph by windows: what every way to cut these has in common."""

    features: TileFeatures
    rows: Tensor | None  # [windows * H] int32, as `Tiles.rows`
    first: Tensor  # [windows + 1] int64 first group of each window
    vectors: Tensor
    bits: Tensor
    slot: Tensor


def pack(csr: Csr, height: int, order: Tensor | None = None) -> _Packed:
    """Arranges the edges of `csr` in tiles; waits for the device once.

    Args:
        csr: the graph, with int32 indices.
        height: H, 8 or 16.
        order: int64 permutation of the rows, in which they form windows; None: as they are.

    Raises:
        ValueError: another height, int64 indices, or too many groups for 32-bit indices.
    """
    if height not in (8, 16):
        raise ValueError(f"tiles have windows of 8 or 16 rows, got {height}")
    if csr.col.dtype != torch.int32:
        raise ValueError("tiles need int32 indices, the graph has int64 ones: it is too large; use another kernel")
    device, num_edges = csr.col.device, csr.col.shape[0]
    windows = -(-csr.num_rows // height)
    place = torch.arange(csr.num_rows, dtype=torch.int32, device=device)
    rows = None
    if order is not None:
        rows = torch.cat([order.int(), place.new_full((windows * height - csr.num_rows,), -1)])
        place = torch.empty_like(place).scatter_(0, order, place)
    place = torch.repeat_interleave(place, csr.degree(), output_size=num_edges)
    # By window, then by column; of one pair, a row's edges one after the other.
    _, place, position = _native.transpose(place, csr.col, csr.num_cols)
    ends, position, by_window = _native.transpose(position, place // height, windows)
    place = place[by_window]
    col, window = csr.col[position], place // height
    number = torch.arange(num_edges, device=device)
    opens = torch.ones(num_edges, dtype=torch.bool, device=device)
    opens[1:] = (window[1:] != window[:-1]) | (col[1:] != col[:-1])  # a column of a window
    again = torch.zeros_like(opens)
    again[1:] = ~opens[1:] & (place[1:] == place[:-1])  # an edge parallel to the one before
    opened = opens.cumsum(0)
    run = opened - 1
    # How many such edges precede each: its number less that of the last that is none.
    alone = torch.where(again, number.new_zeros(()), number).cummax(0).values if num_edges else number
    nth = number - alone
    columns = torch.cat([opened.new_zeros(1), opened])[ends.long()]  # before each window
    size = number.new_zeros(num_edges).scatter_reduce_(0, run, nth + 1, "amax")  # of each run; then nothing
    before = torch.cat([size.new_zeros(1), size.cumsum(0)])
    first_vector = before[columns]
    groups = (first_vector.diff() + GROUP - 1) // GROUP
    first = torch.cat([groups.new_zeros(1), groups.cumsum(0)])
    longest = groups.max() if windows else first[-1]
    num_vectors, num_groups, most = torch.stack([first_vector[-1], first[-1], longest]).tolist()
    if num_groups > _INT32_MAX - 64:
        raise ValueError(f"tiles need fewer than 2^31 groups, the graph has {num_groups}; use another kernel")
    vector = before[run] + nth - first_vector[window] + first[window.long()] * GROUP
    slot = (vector // GROUP * height + place % height) * GROUP + vector % GROUP
    # A window's last column fills up its last group.
    last = col[(ends.long()[1:] - 1).clamp(min=0)] if num_edges else col.new_zeros(windows)
    vectors = last.repeat_interleave(groups * GROUP, output_size=num_groups * GROUP).scatter_(0, vector, col)
    bits = col.new_zeros(num_groups * height)
    bits.scatter_add_(0, slot // GROUP, torch.ones_like(col) << (slot % GROUP).int())  # integers: any order will do
    in_row_order = torch.empty_like(slot).scatter_(0, position.long(), slot)
    if num_groups * height * GROUP <= _INT32_MAX:
        in_row_order = in_row_order.int()
    features = TileFeatures(height, windows, num_vectors, num_groups, most, num_edges)
    return _Packed(features, rows, first, vectors, bits.view(-1, height).to(torch.int16), in_row_order)


# ---------------------------------------------------------------------- the choice

#: Warps that keep a large GPU busy: 16 of each of 132 multiprocessors, twice over.
_WARPS = 4224
#: What a window of 16 rows has to save of the rows of features that are loaded, for tiles twice as high.
_HIGHER = 0.8


def choose_tiles(low: TileFeatures, high: TileFeatures, width: int, dtype: torch.dtype) -> TileConfig:
    """How windows are cut for features of `width` columns: a pure function of its arguments; estimates, not measured.

    16 rows where that saves a fifth of the loads of features; pieces where windows are too few, or some too long, to
    occupy a GPU to the end.

    Args:
        low: the graph's features for windows of 8 rows.
        high: those for windows of 16.
        width: columns of features.
        dtype: of features.
    """
    found = high if high.vectors < _HIGHER * low.vectors else low
    slabs = max(-(-width * dtype.itemsize // 128), 1)
    fair = max(-(-found.groups * slabs // _WARPS), 8)  # groups of a warp, if all had as many
    return TileConfig(found.height, fair if found.longest > 2 * fair else 0)


# ---------------------------------------------------------------------- the format


@dataclass(frozen=True, eq=False)
class Tiles:
    """A graph in tiles.

    Attributes:
        config: what it was made for.
        features: of its windows.
        ptr: ``[pieces + 1]`` int32, where each piece begins, in groups.
        vectors: ``[groups * 16]`` int32, the column of each vector, ascending within a window.
        bits: ``[groups, H]`` int16; bit k of a row: it has an edge at vector k of the group.
        slot: ``[E]`` int32 or int64, where in the tiles the weight of each edge is, in row order.
        rows: ``[windows * H]`` int32, the row of each place, -1 past the last one; None: as they are.
        target: ``[pieces]`` int32, the window that a piece is, or ``~slot`` of its partial sums; None: piece p is
            window p.
        merges: ``[n, 4]`` int32 {window, first slot, end slot, 0} of each window in several pieces, or None.
        slots: number of partial sums.
    """

    config: TileConfig
    features: TileFeatures
    ptr: Tensor
    vectors: Tensor
    bits: Tensor
    slot: Tensor
    rows: Tensor | None
    target: Tensor | None
    merges: Tensor | None
    slots: int
    _weights: KeptWeight = field(default_factory=KeptWeight, repr=False)
    _values: KeptWeight = field(default_factory=KeptWeight, repr=False)

    def takes(self, csr: Csr, weight: Tensor | None, x: Tensor) -> bool:
        """Whether there are tiles for these operands: none of float64, of weights by heads, of no columns."""
        return x.dtype in DTYPES and x.shape[1] > 0 and (weight is None or weight.dim() == 1)

    def values(self, weight: Tensor) -> Tensor:
        """`weight`, ``[E]`` in row order, in tiles: ``[groups, H, 16]``, 0 where no edge is."""
        tiles = weight.new_zeros(self.bits.numel() * GROUP)
        return tiles.scatter_(0, self.slot.long(), weight).view(*self.bits.shape, GROUP)

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

        A `src_scale` is rounded to the dtype of `x`: it is a weight here.
        """
        factor, values = factors(csr, weight, src_scale, x.dtype, self._weights), None
        if factor is not None:
            values = self._values.made(lambda: self.values(factor), factor)
        config = [self.config.height, self.slots, passes(x.dtype), x.shape[1]]
        arrays = (self.ptr, self.vectors, self.bits, values, self.rows, self.target, self.merges)
        return _native.tile_spmm(  # type: ignore[no-any-return]
            csr.rowptr, csr.col, factor, *arrays, in_16_bytes(x), dst_scale, config, mean, *end
        )

    def nbytes(self) -> int:
        """Bytes of the arrays."""
        arrays = (self.ptr, self.vectors, self.bits, self.slot, self.rows, self.target, self.merges)
        return sum(t.numel() * t.element_size() for t in arrays if t is not None)


def passes(dtype: torch.dtype) -> int:
    """Products by the tensor cores for one: 3 for float32, unless torch is told that tf32 will do."""
    return 1 if dtype != torch.float32 or _tf32_will_do() else 3


def _tf32_will_do() -> bool:
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")  # it knows both ways to tell torch


# Compiled, it is what it was while compiling; as `torch.compiler.assume_constant_result` does, which imports dynamo.
_tf32_will_do._dynamo_marked_constant = True  # type: ignore[attr-defined]


def factors(
    csr: Csr, weight: Tensor | None, src_scale: Tensor | None, dtype: torch.dtype, kept: KeptWeight
) -> Tensor | None:
    """What each edge is multiplied by, ``[E]`` in row order and of `dtype`: its weight, the scale of its column, both.

    Kept in `kept` for as long as both are what they were.
    """
    if weight is None and src_scale is None:
        return None
    if src_scale is None:
        assert weight is not None
        return csr.in_row_order(weight)

    def make() -> Tensor:
        scale = src_scale.index_select(0, csr.col)
        return (scale if weight is None else scale * csr.in_row_order(weight)).to(dtype)

    given = (src_scale,) if weight is None else (src_scale, weight)
    found = kept.made(make, *given)
    return found if found.dtype == dtype else make()


def in_16_bytes(x: Tensor) -> Tensor:
    """`x` ``[N, F]``, or a copy with columns of zeros besides, whose rows begin and end at multiples of 16 bytes."""
    step = 16 // x.element_size()
    missing = -x.shape[1] % step
    if missing:
        return torch.nn.functional.pad(x, (0, missing))
    # An address is nothing that can be traced: then only what begins in the middle of a tensor can begin anywhere.
    begins = x.is_contiguous() if torch.compiler.is_compiling() else x.data_ptr() % 16 == 0
    return x if begins and x.stride(0) % step == 0 else x.clone(memory_format=torch.contiguous_format)


def build(packed: _Packed, config: TileConfig) -> Tiles:
    """Cuts windows into pieces; waits for the device twice where that is asked for."""
    f = packed.features
    if config.height != f.height or config.most < 0:
        raise ValueError(f"got tiles of {f.height} rows for {config}")
    common = (packed.vectors, packed.bits, packed.slot, packed.rows)
    if not config.most or f.longest <= config.most:
        return Tiles(config, f, packed.first.int(), *common, None, None, 0)
    groups = packed.first.diff()
    pieces = ((groups + config.most - 1) // config.most).clamp(min=1)  # an empty window has one too, for its zeros
    ends = pieces.cumsum(0)
    total = int(ends[-1])
    window = torch.arange(f.windows, device=groups.device).repeat_interleave(pieces, output_size=total)
    at = torch.arange(total, device=groups.device) - (ends - pieces)[window]
    ptr = torch.cat([packed.first[:-1][window] + at * config.most, packed.first[-1:]])
    part = (pieces > 1)[window]
    target = torch.where(part, -part.cumsum(0), window)  # -1 - slot
    split = (pieces > 1).nonzero().flatten()
    slots = pieces[split].cumsum(0)
    merges = torch.stack([split, slots - pieces[split], slots, torch.zeros_like(slots)], 1).int()
    return Tiles(config, f, ptr.int(), *common, target.int(), merges, int(slots[-1]))


def prepare(
    csr: Csr, width: int, dtype: torch.dtype, schedule: str | Tensor | None = None, config: TileConfig | None = None
) -> tuple[Tiles, str, tuple[str, ...]]:
    """The format of `csr` for features of `width` columns, the name of the schedule, and what to say about it.

    Tiles are shared between widths, and kept with the graph where the schedule has a name.

    Args:
        csr: the graph, with int32 indices.
        width: columns of features.
        dtype: of features.
        schedule: in which order rows form windows, see `gnn_spmm_plugin.schedule.order_of`.
        config: instead of what `choose_tiles` says.
    """
    name, order = order_of(csr, schedule)
    kept = {} if isinstance(schedule, Tensor) else csr.plans
    packed: dict[int, _Packed] = {}

    def of_height(height: int) -> _Packed:
        if height not in packed:
            packed[height] = pack(csr, height, order)
        return packed[height]

    def seen(height: int) -> TileFeatures:
        found: TileFeatures | None = kept.get(("windows", name, height))
        if found is None:
            found = kept["windows", name, height] = of_height(height).features
        return found

    if config is None:
        config = choose_tiles(seen(8), seen(16), width, dtype)
    made: Tiles | None = kept.get(("tiles", name, config))
    if made is None:
        made = kept["tiles", name, config] = build(of_height(config.height), config)
    f = made.features
    how = f"cut at {config.most} groups into {made.ptr.shape[0] - 1:,} pieces" if made.slots else "whole"
    reasons = (
        f"tiles     {config}  {f.windows:,} windows of {f.height} rows and at most {f.longest:,} groups, {how}",
        f"reuse     {f.edges_a_vector:.2f} edges a vector: a row of features is loaded for so many at once; "
        f"{f.fill:.1%} of the tiles are edges",
    )
    return made, name, reasons
