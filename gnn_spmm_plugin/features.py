"""`GraphFeatures`: what the choice of a kernel may depend on, in one O(rows) pass and one read back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .graph import Csr


@dataclass(frozen=True)
class GraphFeatures:
    """Degree statistics of one direction of a graph.

    Attributes:
        num_rows, num_cols, num_edges: sizes.
        mean_degree: edges per row.
        max_degree: length of the longest row.
        degree_cv: population standard deviation of the row lengths over their mean; 0 without edges.
        empty_rows: rows without edges.
    """

    num_rows: int
    num_cols: int
    num_edges: int
    mean_degree: float
    max_degree: int
    degree_cv: float
    empty_rows: int

    @classmethod
    def of(cls, csr: Csr) -> GraphFeatures:
        """The features of `csr`; waits for the device once."""
        rows, edges = csr.num_rows, csr.col.shape[0]
        if rows == 0 or edges == 0:
            return cls(rows, csr.num_cols, edges, 0.0, 0, 0.0, rows)
        degree = csr.degree()
        stats = torch.stack(
            [
                degree.max().double(),
                degree.double().var(correction=0),
                (degree == 0).sum().double(),
            ]
        ).tolist()
        mean = edges / rows
        return cls(rows, csr.num_cols, edges, mean, int(stats[0]), stats[1] ** 0.5 / mean, int(stats[2]))
