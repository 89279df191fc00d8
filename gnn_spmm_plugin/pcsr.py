"""PCSR, the format of ParamSpMM, and the choice of its configuration <W, F, V, S>.

Rows are taken in panels of V that follow one another in a schedule. The entries of a panel are kept as vectors: one
column, and an edge or nothing for each of the V rows, so that a row of features is loaded once for both. With S, a
panel of more than `granularity` vectors is cut into pieces; each piece is one worker's. W (warps of a block) and F
(vectors of feature columns a thread) are the kernel's alone.

Method: Zhang et al., ParamSpMM (2026), section 4. Different here: duplicate edges stay, empty panels have a piece (the
kernel writes their zeros), pieces leave partial sums that are added in a fixed order, and any order of rows will do.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _native
from .csr import Csr, KeptWeight
from .schedule import order_of

#: Vectors that the kernel reads together. A piece starts at a multiple of it, and absent vectors fill it up.
FOUR = 4
_SG_STEP = 32  # the width of a warp, which SG is a multiple of in the paper
_INT32_MAX = 2**31 - 1


class Config(NamedTuple):
    """A point of ParamSpMM's space."""

    W: int = 4  #: warps of a block: 1, 2, 4 or 8
    F: int = 1  #: vectors of feature columns a thread, at most
    V: int = 1  #: rows of a panel: 1 or 2
    S: bool = False  #: whether long panels are split

    def __str__(self) -> str:
        return f"<W={self.W}, F={self.F}, V={self.V}, S={self.S}>"


@dataclass(frozen=True)
class PanelFeatures:
    """What the rows of a graph are like as panels of one height V.

    Attributes:
        vectors: number of vectors.
        panels: panels that have any.
        longest: vectors of the longest panel.
        granularity: SG, the mean vectors of a panel that has any, rounded up to a multiple of 32.
        pieces: how many pieces of at most that they are cut into.
        padding_ratio: part of the values that is padding, 0 to 1 - 1 / V (the paper's PR).
        split_ratio: pieces a panel (the paper's SR).
    """

    vectors: int
    panels: int
    longest: int
    granularity: int
    pieces: int
    padding_ratio: float
    split_ratio: float


@dataclass(frozen=True)
class PcsrFeatures:
    """What `choose_config` looks at: sizes, and the panels of height 1 and 2 under one schedule."""

    num_rows: int
    num_edges: int
    single: PanelFeatures
    double: PanelFeatures


class Vectors(NamedTuple):
    """The edges of a graph as vectors of panels: the format before anything is split or stored."""

    height: int
    rows: Tensor | None  #: [num_rows] the schedule; None: as they are
    first: Tensor  #: [panels + 1] int64 first vector of each panel
    position: Tensor  #: [E] position in the CSR of each edge ...
    vector: Tensor | None  #: [E] ... the vector that it is part of, None: the i-th edge is the i-th vector
    lane: Tensor | None  #: [E] ... and as which of its rows, None: the only one


def vectors(csr: Csr, height: int, order: Tensor | None = None) -> Vectors:
    """Arranges the edges of `csr` as vectors of `height` rows.

    Within a row, edges keep their order for V = 1 (so no schedule changes a sum's order), and are ordered by column,
    then as they were, for V = 2. Of several edges between one pair of nodes, each has a vector of its own.

    Args:
        csr: the graph.
        height: V, 1 or 2.
        order: int64 permutation of the rows, in which they form panels; None: as they are.
    """
    if height not in (1, 2):
        raise ValueError(f"PCSR has panels of V = 1 or 2 rows, got {height}")
    device, num_edges = csr.col.device, csr.col.shape[0]
    degree = csr.degree()
    if order is not None:
        degree = degree[order]
    ends = degree.cumsum(0)
    begins = ends - degree
    position = torch.arange(num_edges, device=device)
    if height == 1 and order is None:
        return Vectors(1, None, csr.rowptr.long(), position, None, None)
    place = torch.arange(csr.num_rows, device=device).repeat_interleave(degree, output_size=num_edges)
    if order is not None:
        position += (csr.rowptr[order] - begins)[place]
    if height == 1:
        return Vectors(1, order, torch.cat([ends.new_zeros(1), ends]), position, None, None)

    # By panel, then by column; the rows of a panel one after the other, and each row's edges as they were.
    panels = (csr.num_rows + 1) // 2
    _, by_column, edge = _native.transpose(place.to(csr.col.dtype), csr.col[position], csr.num_cols)
    panel_ends, edge, _ = _native.transpose(edge, by_column // 2, panels)
    place, position = place[edge], position[edge]
    col, lane = csr.col[position], place % 2
    panel = place // 2
    # A run: the edges of one panel and column. Its i-th edge of each row go together.
    opens = torch.ones(num_edges, dtype=torch.bool, device=device)
    opens[1:] = (panel[1:] != panel[:-1]) | (col[1:] != col[:-1])
    opened = opens.cumsum(0)
    run = opened - 1
    start = opens.nonzero().flatten()
    length = torch.diff(start, append=start.new_full((1,), num_edges))
    seconds = torch.cat([lane.new_zeros(1), lane.cumsum(0)])  # edges of second rows so far
    second = seconds[start + length] - seconds[start]
    size = torch.maximum(second, length - second)
    offset = torch.cat([size.new_zeros(1), size.cumsum(0)])
    within = torch.arange(num_edges, device=device) - start[run]
    vector = offset[run] + torch.where(lane == 0, within, within - (length - second)[run])
    runs = torch.cat([opened.new_zeros(1), opened])  # runs that open before each edge
    return Vectors(2, order, offset[runs[panel_ends.long()]], position, vector, lane)


def panel_features(arranged: Vectors) -> PanelFeatures:
    """The features of an arrangement; waits for the device once."""
    num_edges, length = arranged.position.shape[0], arranged.first.diff()
    if num_edges == 0:
        return PanelFeatures(0, 0, 0, _SG_STEP, 0, 0.0, 1.0)
    total, panels = arranged.first[-1], (length > 0).sum()
    granularity = (total + _SG_STEP * panels - 1) // (_SG_STEP * panels) * _SG_STEP
    pieces = ((length + granularity - 1) // granularity).sum()
    n, p, longest, sg, cut = torch.stack([total, panels, length.max(), granularity, pieces]).tolist()
    return PanelFeatures(n, p, longest, sg, cut, 1 - num_edges / (n * arranged.height), cut / p)


# ---------------------------------------------------------------------- the choice


#: V = 2 loads 1 / (2 * (1 - PR)) rows of features an edge, and computes with all that is padded. The paper's tables
#: have it win at PR = 0.27 and 0.31, and lose at 0.48.
_MOST_PADDING = 0.35
#: What a GPU gathers, in bytes per microsecond, and how long a worker waits for FOUR gathers, in microseconds.
_GATHERS, _LATENCY = 5e6, 0.5
#: Part of the time of a product that its longest row may take.
_LONGEST_SHARE = 0.05


def _vector_columns(width: int, dtype: torch.dtype) -> int:
    """Columns of one load, for rows of `width`: of 16 bytes where the width allows."""
    wide = 16 // dtype.itemsize
    return next(v for v in (wide, 2 if dtype.itemsize == 2 else 1, 1) if width % v == 0)


def _coarsening(width: int, dtype: torch.dtype) -> int:
    """F: the compiled one that reads the edges least often, then that leaves fewest threads without a column."""
    columns = _vector_columns(width, dtype)
    count = max(-(-width // columns), 1)

    def cost(fold: int) -> tuple[int, int]:
        lanes = min(1 << (-(-count // fold) - 1).bit_length(), 32)
        tiles = -(-count // (lanes * fold))
        return tiles, tiles * lanes * fold - count

    return min((1, 2 if columns * dtype.itemsize == 16 else 4), key=cost)


def choose_config(features: PcsrFeatures, width: int, dtype: torch.dtype = torch.float32) -> Config:
    """The configuration of a graph and a width: a pure function, by rules of one line each.

    V = 2 where little of it is padding; S where the longest panel alone would take a noticeable part of the product;
    F by the width, for no thread to idle; W = 4, so that small blocks free their place early.
    """
    height = 2 if features.num_edges and features.double.padding_ratio < _MOST_PADDING else 1
    panels = features.double if height == 2 else features.single
    total = (panels.vectors + features.num_rows) * width * dtype.itemsize / _GATHERS
    split = panels.longest > panels.granularity and panels.longest / FOUR * _LATENCY > _LONGEST_SHARE * total
    return Config(W=4, F=_coarsening(width, dtype), V=height, S=split)


# ---------------------------------------------------------------------- the format


@dataclass(frozen=True, eq=False)
class Pcsr:
    """A graph in PCSR.

    Attributes:
        config: what it was made for; W and F only concern the launch.
        granularity: SG, the most vectors of a piece; 0 without S.
        align: vectors that `ptr` counts in: each piece starts at a multiple of so many.
        ptr: ``[pieces + 1]`` int32, where each piece begins, in units of `align` vectors (the paper's rowPtr).
        col: ``[vectors]`` int32 bit patterns of ``column << V | a bit for each row that has an edge there``.
        edge: ``[vectors, V]`` the caller's id of the edge whose weight each value is; where there is none, that of
            another edge.
        target: ``[pieces, V]`` int32 (the paper's TRow): the rows of each piece, -1 past the last one; of a panel in
            several pieces ``~slot``, where its partial sum goes, then -1. None: piece p has rows p * V and following.
        merges: ``[n, 4]`` int32 {first row, second row or -1, first slot, end slot} of each such panel, or None.
        slots: number of partial sums.
    """

    config: Config
    granularity: int
    align: int
    ptr: Tensor
    col: Tensor
    edge: Tensor
    target: Tensor | None
    merges: Tensor | None
    slots: int
    _kept: KeptWeight = field(default_factory=KeptWeight, repr=False)

    def columns(self) -> Tensor:
        """``[vectors]`` int64: the column of each vector."""
        return (self.col.long() & 0xFFFFFFFF) >> self.config.V

    def present(self) -> Tensor:
        """``[vectors, V]`` bool: which values are edges; the others are padding."""
        return (self.col.unsqueeze(1) >> torch.arange(self.config.V, device=self.col.device)) & 1 == 1

    def values(self, weight: Tensor) -> Tensor:
        """`weight`, ``[E]`` or ``[E, H]``, in the order of the vectors: ``[vectors, V]`` or ``[vectors, V, H]``.

        What stands where no edge is means nothing. One gather; of a constant weight the result is kept.
        """
        return self._kept.permuted(weight, self.edge.view(-1)).view(-1, self.config.V, *weight.shape[1:])

    def takes(self, csr: Csr, weight: Tensor | None, x: Tensor) -> bool:
        """Whether the kernel is for these operands: it is for all."""
        return True

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
        """The sum or mean over the edges into each row, and its end, as ``_spmm``; `weight` in the caller's order."""
        config = [self.config.W, self.config.F, self.config.V, self.slots]
        values = None if weight is None else self.values(weight)
        return _native.pcsr_spmm(  # type: ignore[no-any-return]
            csr.rowptr,
            self.ptr,
            self.col,
            self.target,
            self.merges,
            values,
            x,
            src_scale,
            dst_scale,
            config,
            mean,
            *end,
        )

    def nbytes(self) -> int:
        """Bytes of the arrays."""
        arrays = (self.ptr, self.col, self.edge, self.target, self.merges)
        return sum(t.numel() * t.element_size() for t in arrays if t is not None)


def build(csr: Csr, arranged: Vectors, config: Config, granularity: int, align: int = FOUR) -> Pcsr:
    """Splits and stores an arrangement.

    Args:
        csr: the graph.
        arranged: its `vectors`, of height ``config.V``.
        config: with ``S``, panels of more than `granularity` vectors are split.
        granularity: SG; see `PanelFeatures.granularity` for the paper's.
        align: 4 for the kernel; 1 gives the paper's arrays.

    Raises:
        ValueError: the graph is too large for 32-bit indices.
    """
    device, height = csr.col.device, config.V
    if arranged.height != height or granularity < 1:
        raise ValueError(f"got vectors of V = {arranged.height} and SG = {granularity} for {config}")
    if max(csr.num_cols << height, 2 * csr.num_rows, csr.col.shape[0]) > 2**32 - 1:
        raise ValueError(
            f"pcsr needs fewer than 2^{32 - height} columns for V = {height}, 2^31 rows and 2^32 edges, the graph has "
            f"{csr.num_cols}, {csr.num_rows} and {csr.col.shape[0]}; use another kernel"
        )
    length = arranged.first.diff()
    pieces = torch.ones_like(length)  # an empty panel has one too, for its zeros
    if config.S:
        pieces = (length + granularity - 1).div(granularity, rounding_mode="floor").clamp(min=1)
    before = torch.cat([pieces.new_zeros(1), pieces.cumsum(0)])
    num_vectors, num_pieces = torch.stack([arranged.first[-1], before[-1]]).tolist()
    panels = torch.arange(length.shape[0], device=device)
    panel = panels.repeat_interleave(pieces, output_size=num_pieces)  # of each piece
    at = torch.arange(num_pieces, device=device) - before[panel]
    size = (length[panel] - at * granularity).clamp(max=granularity) if config.S else length
    ptr = torch.cat([size.new_zeros(1), (size + align - 1).div(align, rounding_mode="floor").cumsum(0)])

    # Where each vector is stored, and from there, which edge each value is.
    panel_of_vector = panels.repeat_interleave(length, output_size=num_vectors)
    rank = torch.arange(num_vectors, device=device) - arranged.first[panel_of_vector]
    piece = before[panel_of_vector]
    if config.S:
        piece = piece + rank.div(granularity, rounding_mode="floor")
        rank = rank % granularity
    place = ptr[piece] * align + rank
    stored = int(ptr[-1]) * align
    if stored // align > _INT32_MAX - 64:  # the kernel looks a few steps past the end
        raise ValueError(f"pcsr needs fewer than 2^31 * {align} vectors, the graph has {stored}; use another kernel")
    value = place if arranged.vector is None else place[arranged.vector]
    if arranged.lane is not None:
        value = value * height + arranged.lane
    entry = torch.full((stored * height,), -1, device=device)
    entry[value] = arranged.position
    entry = entry.view(stored, height)
    any_edge = entry.max(1, keepdim=True).values.clamp(min=0)
    bits = ((entry >= 0).long() << torch.arange(height, device=device)).sum(1)
    position = torch.where(entry >= 0, entry, any_edge)
    col = (csr.col[any_edge.squeeze(1)].long() << height | bits).to(torch.int32)
    edge = position.to(csr.col.dtype) if csr.perm is None else csr.perm[position]

    target = merges = None
    slots, several = 0, num_pieces > length.shape[0]
    if several or arranged.rows is not None:
        order = torch.arange(csr.num_rows, device=device) if arranged.rows is None else arranged.rows
        rows = torch.cat([order, order.new_full((-csr.num_rows % height,), -1)]).view(-1, height)
        target = rows[panel]
        if several:
            is_part = (pieces > 1)[panel]
            part = torch.full_like(target, -1)
            part[:, 0] = -is_part.cumsum(0)  # ~slot
            target = torch.where(is_part.unsqueeze(1), part, target)
            split = (pieces > 1).nonzero().flatten()
            ends = pieces[split].cumsum(0)
            second = rows[split, 1] if height == 2 else torch.full_like(split, -1)
            merges = torch.stack([rows[split, 0], second, ends - pieces[split], ends], 1).int()
            slots = int(ends[-1])
        target = target.int()
    sg = granularity if config.S else 0
    return Pcsr(config, sg, align, ptr.int(), col, edge, target, merges, slots)


def prepare(
    csr: Csr, width: int, dtype: torch.dtype, schedule: str | Tensor | None = None, config: Config | None = None
) -> tuple[Pcsr, str, tuple[str, ...]]:
    """The format of `csr` for features of `width` columns, the name of the schedule, and what to say about it.

    Arrays are shared between widths, and kept with the graph where the schedule has a name.

    Args:
        csr: the graph.
        width: columns of features, heads counted in.
        dtype: of features.
        schedule: in which order rows form panels, see `gnn_spmm_plugin.schedule.order_of`.
        config: instead of what `choose_config` says.
    """
    name, order = order_of(csr, schedule)
    kept = {} if isinstance(schedule, Tensor) else csr.plans
    arranged: dict[int, Vectors] = {}

    def panels_of(height: int) -> PanelFeatures:
        found: PanelFeatures | None = kept.get(("panels", name, height))
        if found is None:
            arranged[height] = vectors(csr, height, order)
            found = kept["panels", name, height] = panel_features(arranged[height])
        return found

    if config is None:
        features = PcsrFeatures(csr.num_rows, csr.col.shape[0], panels_of(1), panels_of(2))
        config = choose_config(features, width, dtype)
    panel = panels_of(config.V)
    made: Pcsr | None = kept.get(("pcsr", name, config.V, config.S))
    if made is None:
        from_edges = arranged.get(config.V) or vectors(csr, config.V, order)
        made = kept["pcsr", name, config.V, config.S] = build(csr, from_edges, config, panel.granularity)
    reasons = [
        f"config    {config}  SG {panel.granularity}",
        f"panels    {panel.panels:,} of {panel.vectors:,} vectors under V={config.V}, at most {panel.longest:,}; "
        f"{panel.split_ratio:.2f} pieces each under S=True",
    ]
    double: PanelFeatures | None = kept.get(("panels", name, 2))
    if double is not None:
        reasons.insert(1, f"padding   {double.padding_ratio:.1%} of the values under V=2")
    return replace(made, config=config), name, tuple(reasons)
