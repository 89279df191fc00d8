"""`GraphFeatures`: what the choice of a kernel may depend on, in one O(rows) pass and one read back."""

from __future__ import annotations

from dataclasses import dataclass

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
        degree = csr.degree()
        stats = torch.stack(
            [
                degree.max().double(),
                degree.double().var(correction=0),
                (degree == 0).sum().double(),
                _locality(csr),
            ]
        ).tolist()
        mean = edges / rows
        return cls(rows, csr.num_cols, edges, mean, int(stats[0]), stats[1] ** 0.5 / mean, int(stats[2]), stats[3])


def _locality(csr: Csr) -> Tensor:
    """`GraphFeatures.locality`, from at most 64 Ki edges at even distances, on the graph's device."""
    edges = csr.col.shape[0]
    if csr.num_rows != csr.num_cols:
        return torch.zeros((), dtype=torch.float64, device=csr.col.device)
    some = torch.arange(0, edges, max(edges >> 16, 1), dtype=csr.rowptr.dtype, device=csr.col.device)
    row = torch.searchsorted(csr.rowptr, some, right=True) - 1
    near = (csr.col[some.long()] - row).abs() <= csr.num_cols // 64
    return near.double().mean()
