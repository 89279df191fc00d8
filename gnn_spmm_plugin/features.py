"""`GraphFeatures`: what the choice of a kernel may depend on, in one O(rows) pass and one read back."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .csr import Csr


@dataclass(frozen=True)
class GraphFeatures:
    """Degree statistics of one direction of a graph.

    Attributes:
        num_rows, num_cols, num_edges: sizes.
        mean_degree: edges per row.
        max_degree: length of the longest row.
        degree_cv: population standard deviation of the row lengths over their mean; 0 without edges.
        empty_rows: rows without edges.
        locality: share of the edges whose column lies within 1/64 of all columns from the row's own number; 0 where
            rows and columns are not the same nodes.
    """

    num_rows: int
    num_cols: int
    num_edges: int
    mean_degree: float
    max_degree: int
    degree_cv: float
    empty_rows: int
    locality: float

    @classmethod
    def of(cls, csr: Csr) -> GraphFeatures:
        """The features of `csr`, which keeps them; waits for the device the first time."""
        kept: GraphFeatures | None = csr.plans.get("features")
        if kept is None:
            kept = csr.plans["features"] = cls._look(csr)
        return kept

    @classmethod
    def _look(cls, csr: Csr) -> GraphFeatures:
        rows, edges = csr.num_rows, csr.col.shape[0]
        if rows == 0 or edges == 0:
            return cls(rows, csr.num_cols, edges, 0.0, 0, 0.0, rows, 0.0)
        return cls._of_stats(csr, torch.stack(_degree_stats(csr.degree(), _locality(csr))).tolist())

    @classmethod
    def _of_stats(cls, csr: Csr, stats: list[float], *more: float) -> GraphFeatures:
        rows, edges = csr.num_rows, csr.col.shape[0]
        mean = edges / rows
        return cls(
            rows, csr.num_cols, edges, mean, int(stats[0]), stats[1] ** 0.5 / mean, int(stats[2]), stats[3], *more
        )


@dataclass(frozen=True)
class MatrixFeatures(GraphFeatures):
    """What the decider looks at besides: the features of ParamSpMM (section 5), and what matters to a GPU's caches.

    What would take a pass over all edges is estimated from some of them, at even distances.

    Attributes:
        mean_non_empty, cv_non_empty: mean and variation of the lengths of the rows that have any edge.
        split_single, split_double: pieces a panel of 1 and of 2 rows (the paper's SR), where those of over the mean,
            rounded up to a multiple of 32, are cut.
        padding: part of the values that is padding in panels of 2 rows (the paper's PR).
        mean_bandwidth, max_bandwidth: distance between the first and the last edge's columns of a row, over the number
            of columns.
        near: share of the edges whose column lies within 256 of the row's own number; 0 as for `locality`.
        distinct: different columns among the sampled edges over their number, or over that of columns.
        wide_edges, wider_edges: share of the edges in rows of over 64, of over 256.
        short_rows: share of the rows of at most 8 edges.
        imbalance: edges that 8 rows in a row take if all are as long as their longest, over those they have.
    """

    mean_non_empty: float
    cv_non_empty: float
    split_single: float
    split_double: float
    padding: float
    mean_bandwidth: float
    max_bandwidth: float
    near: float
    distinct: float
    wide_edges: float
    wider_edges: float
    short_rows: float
    imbalance: float

    @classmethod
    def of(cls, csr: Csr) -> MatrixFeatures:
        """As `GraphFeatures.of`, which then has been asked for too: both in one read back."""
        kept: MatrixFeatures | None = csr.plans.get("matrix features")
        if kept is None:
            kept = csr.plans["matrix features"] = cls._look(csr)
            if "features" not in csr.plans:
                base = {f.name: getattr(kept, f.name) for f in fields(GraphFeatures)}
                csr.plans["features"] = GraphFeatures(**base)
        return kept

    @classmethod
    def _look(cls, csr: Csr) -> MatrixFeatures:
        rows, edges = csr.num_rows, csr.col.shape[0]
        if rows == 0 or edges == 0:
            return cls(rows, csr.num_cols, edges, 0.0, 0, 0.0, rows, *[0.0] * 14)
        degree = csr.degree()
        sample = _Sample(csr)
        base = _degree_stats(degree, sample.locality(csr.num_cols // 64))
        length = degree.double()
        non_empty = (rows - base[2]).clamp(min=1)
        shared = sample.shared()
        width = torch.where(degree > 0, csr.col[csr.rowptr[1:].long() - 1] - csr.col[csr.rowptr[:-1].long() % edges], 0)
        width = width.abs().double() / csr.num_cols
        eighth = torch.nn.functional.pad(degree, (0, -rows % 8)).view(-1, 8)
        stats = torch.stack(
            [
                *base,
                non_empty,
                length.square().sum() / non_empty,
                _split_ratio(length, edges, non_empty),
                _split_ratio(_pairs(length) * (1 - shared / 2), edges * (1 - shared / 2)),
                shared,
                width.sum() / non_empty,
                width.max(),
                sample.locality(256),
                sample.distinct(),
                _share_over(length, 64, edges),
                _share_over(length, 256, edges),
                (degree <= 8).double().mean(),
                eighth.max(1).values.double().sum() * 8 / edges,
            ]
        ).tolist()
        filled, square, single, double, shared_part, *rest = stats[4:]
        mean = edges / filled
        cv = max(square - mean * mean, 0.0) ** 0.5 / mean
        padding = 1 - 1 / (2 - shared_part)
        found = cls._of_stats(csr, stats[:4], mean, cv, single, double, padding, *rest)
        assert isinstance(found, cls)
        return found


def _degree_stats(degree: Tensor, locality: Tensor) -> list[Tensor]:
    return [degree.max().double(), degree.double().var(correction=0), (degree == 0).sum().double(), locality]


def _pairs(length: Tensor) -> Tensor:
    """Edges of the panels of two rows."""
    return torch.nn.functional.pad(length, (0, len(length) % 2)).view(-1, 2).sum(1)


def _share_over(length: Tensor, bound: int, edges: int) -> Tensor:
    return (length * (length > bound)).sum() / edges


def _split_ratio(length: Tensor, edges: int | Tensor, panels: Tensor | None = None) -> Tensor:
    """Pieces a panel that has any edge, by the paper's granularity."""
    panels = (length > 0).sum().clamp(min=1) if panels is None else panels
    granularity = (edges / panels / 32).ceil() * 32
    return (length / granularity).ceil().sum() / panels


class _Sample:
    """At most 64 Ki edges at even distances, on the graph's device."""

    def __init__(self, csr: Csr) -> None:
        edges = csr.col.shape[0]
        self.csr = csr
        self.at = torch.arange(0, edges, max(edges >> 16, 1), device=csr.col.device)
        self.row = torch.searchsorted(csr.rowptr, self.at.to(csr.rowptr.dtype), right=True) - 1
        self.col = csr.col[self.at]

    def locality(self, distance: int) -> Tensor:
        """Share of the edges whose column lies that near to the row's own number."""
        if self.csr.num_rows != self.csr.num_cols:
            return torch.zeros((), dtype=torch.float64, device=self.col.device)
        return ((self.col - self.row).abs() <= distance).double().mean()

    def distinct(self) -> Tensor:
        """Different columns, over the most that there could be."""
        ordered = self.col.sort().values
        return ((ordered[1:] != ordered[:-1]).sum() + 1).double() / min(len(ordered), self.csr.num_cols)

    def shared(self) -> Tensor:
        """Share of the edges whose column the other row of the panel has too; of every fourth edge of the sample.

        It is looked for among 32 edges of that row, around the place that the edge has in its own: all of them where
        rows are short, the likely ones where columns ascend.
        """
        csr, at, row, col = self.csr, self.at[::4], self.row[::4], self.col[::4]
        other = row ^ 1
        there = other < csr.num_rows
        other = other.clamp(max=csr.num_rows - 1)
        begin, end = csr.rowptr[other].long(), csr.rowptr[other + 1].long()
        own, own_end = csr.rowptr[row].long(), csr.rowptr[row + 1].long()
        middle = begin + ((at - own).double() / (own_end - own) * (end - begin)).long()
        first = torch.minimum(torch.maximum(middle - 16, begin), torch.maximum(end - 32, begin))
        look = first.unsqueeze(1) + torch.arange(32, device=at.device)
        found = csr.col[look.clamp(max=csr.col.shape[0] - 1)] == col.unsqueeze(1)
        return ((found & (look < end.unsqueeze(1))).any(1) & there).double().mean()


def _locality(csr: Csr) -> Tensor:
    """`GraphFeatures.locality`."""
    return _Sample(csr).locality(csr.num_cols // 64)
