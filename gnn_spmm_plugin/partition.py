"""The dual metric of DualGCN: how many rows a walk from this one meets, and how long the row is, in one number.

The paper sorts rows by it and hands those above a threshold to blocks, the others to warps. Here it makes a schedule
(`gnn_spmm_plugin.schedule`); which rows are shared out by whom is decided by their length alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .csr import Csr

#: Walks that go on at a time: their places so far are held in memory.
_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class DualMetric:
    """What `dual_metric` finds.

    Attributes:
        density: ``[M]`` float32, the mean number of distinct nodes that a walk from the row meets, itself included.
        hybrid: ``[M]`` float32, ``alpha * density + (1 - alpha) * degree``, of both how many standard deviations they
            lie above their mean.
        alpha: the share of the density.
        threshold: mean and half a standard deviation of `hybrid`; the paper's dense path begins there.
    """

    density: Tensor
    hybrid: Tensor
    alpha: float
    threshold: float


def check_square(csr: Csr, what: str) -> None:
    """Raises ValueError unless sources and destinations are as many, and so may be the same nodes."""
    if csr.num_rows != csr.num_cols:
        raise ValueError(
            f"{what} needs a graph whose sources and destinations are the same nodes, got {csr.num_cols:,} sources and "
            f"{csr.num_rows:,} destinations"
        )


def neighbour_density(csr: Csr, walks: int = 50, length: int = 30, seed: int = 0) -> Tensor:
    """Mean number of distinct nodes on random walks from each row, ``[M]`` float32 in ``[1, length + 1]``.

    In the paper's words the sum of i * P_i, where P_i is the share of the anonymous walks from a row, in which nodes
    are told apart but not named, that have i distinct nodes. A step goes along an edge from the row to one of its
    columns, all as likely; where a row has none, the walk stays.

    Args:
        csr: a square matrix, its columns nodes like its rows.
        walks: walks from each row (k in the paper).
        length: steps of each (d).
        seed: of the random numbers. The same walks come on the same kind of device again, not on another.

    Raises:
        ValueError: the matrix is not square, or there are no walks.
    """
    check_square(csr, "a walk")
    if walks < 1 or length < 0:
        raise ValueError(f"expected at least 1 walk of 0 steps or more, got {walks} of {length}")
    device = csr.col.device
    total = torch.zeros(csr.num_rows, device=device)
    if csr.col.shape[0] == 0:
        return total + 1
    random = torch.Generator(device).manual_seed(seed)
    begin, degree = csr.rowptr[:-1].long(), csr.degree()
    for first in range(0, csr.num_rows, _AT_ONCE):
        rows = torch.arange(first, min(first + _AT_ONCE, csr.num_rows), device=device)
        met = csr.col.new_empty(length + 1, len(rows))
        for _ in range(walks):
            met[0] = at = rows
            distinct = torch.ones(len(rows), device=device)
            for step in range(1, length + 1):
                choices = degree[at]
                picked = (torch.rand(len(rows), generator=random, device=device) * choices).long()
                picked = torch.minimum(picked, (choices - 1).clamp(min=0))  # a product may round up
                edge = (begin[at] + picked).clamp(max=csr.col.shape[0] - 1)  # of an empty row at the end: not read
                met[step] = at = torch.where(choices > 0, csr.col[edge].long(), at)
                distinct += (met[:step] != met[step]).all(0)
            total[first : first + len(rows)] += distinct
    return total / walks


def _standardised(t: Tensor) -> Tensor:
    """How many standard deviations each lies above the mean; 0 where all are the same."""
    deviation = t.std(correction=0)
    return (t - t.mean()) / torch.where(deviation > 0, deviation, 1)


def dual_metric(csr: Csr, alpha: float | None = None, walks: int = 50, length: int = 30, seed: int = 0) -> DualMetric:
    """The hybrid of density and degree by which DualGCN sorts rows.

    Args:
        csr: a square matrix with at least one row.
        alpha: share of the density, in ``[0, 1]``; None: the variance of the degrees over that of both, 0.5 where
            neither varies.
        walks: see `neighbour_density`, as what follows.
        length: steps of each.
        seed: of the random numbers.

    Raises:
        ValueError: as there, or `alpha` is no share.
    """
    if alpha is not None and not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1], got {alpha}")
    density = neighbour_density(csr, walks, length, seed).double()
    degree = csr.degree().double()
    if alpha is None:
        of_degree, of_density = float(degree.var(correction=0)), float(density.var(correction=0))
        both = of_degree + of_density
        alpha = of_degree / both if both > 0 else 0.5
    hybrid = alpha * _standardised(density) + (1 - alpha) * _standardised(degree)
    threshold = float(hybrid.mean() + 0.5 * hybrid.std(correction=0))
    return DualMetric(density.float(), hybrid.float(), alpha, threshold)
