"""Synthetic graphs with the sizes and degree spreads of well-known ones, made on the spot and seeded.

`named` makes them by name. Communities lie one after another in the ``sorted`` graphs and in random order in the
``shuf`` ones. A graph is the same on every NVIDIA GPU under one torch release; the CPU draws other numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Csr:
    """``rowptr`` [N + 1] and ``col`` [E], int32; `order` is a row order that follows the planted structure, or None."""

    rowptr: Tensor
    col: Tensor
    order: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        """Number of rows."""
        return self.rowptr.shape[0] - 1

    def edge_index(self) -> Tensor:
        """``[2, E]`` int64, row 0 the columns (sources), row 1 the rows (destinations), sorted by row."""
        degree = (self.rowptr[1:] - self.rowptr[:-1]).long()
        row = torch.arange(self.num_nodes, device=self.col.device).repeat_interleave(degree)
        return torch.stack([self.col.long(), row])


def _csr(row: Tensor, col: Tensor, n: int, order: Tensor | None = None) -> Csr:
    """Sorted, parallel edges merged."""
    key = torch.unique(row * n + col)
    rowptr = torch.zeros(n + 1, dtype=torch.int32, device=key.device)
    rowptr[1:] = torch.bincount(key // n, minlength=n).cumsum(0)
    return Csr(rowptr, (key % n).int(), order)


def uniform(n: int, degree: int, generator: torch.Generator) -> Csr:
    """About `degree` uniform columns a row (an Erdos-Renyi graph)."""
    shape, device = (n * degree,), generator.device
    row, col = (torch.randint(n, shape, generator=generator, device=device) for _ in range(2))
    return _csr(row, col, n)


def rmat(scale: int, edges: int, generator: torch.Generator) -> Csr:
    """The recursive matrix of Graph500 (0.57, 0.19, 0.19, 0.05): hubs, no communities."""
    row = torch.zeros(edges, dtype=torch.int64, device=generator.device)
    col = row.clone()
    for _ in range(scale):
        u = torch.rand(edges, generator=generator, device=generator.device)
        row = row * 2 + (u >= 0.76).long()
        col = col * 2 + (((u >= 0.57) & (u < 0.76)) | (u >= 0.95)).long()
    return _csr(row, col, 1 << scale)


def road(side: int, generator: torch.Generator) -> Csr:
    """A grid of side x side nodes of whose edges seven in ten exist."""
    n, device = side * side, generator.device
    node = torch.arange(n, device=device)
    keep = torch.rand(n, 2, generator=generator, device=device) < 0.7
    right, down = (node % side < side - 1) & keep[:, 0], (node < n - side) & keep[:, 1]
    a, b = torch.cat([node[right], node[down]]), torch.cat([node[right] + 1, node[down] + side])
    return _csr(torch.cat([a, b]), torch.cat([b, a]), n)


def communities(
    n: int,
    edges: int,
    generator: torch.Generator,
    size: int,
    inside: float,
    largest: float = 2000.0,
    exponent: float = 2.3,
    shuffle: bool = False,
) -> Csr:
    """A symmetric degree-corrected block model.

    Args:
        n: nodes.
        edges: entries of the matrix before parallel ones are merged.
        generator: also says on which device the graph is made.
        size: nodes of a community on average (log-normal).
        inside: share of the edges that stay inside a community.
        largest: largest expected degree over the smallest.
        exponent: of the power law of expected degrees.
        shuffle: random node ids; `Csr.order` then leads back to the communities.
    """
    device = generator.device

    def draw(count: int) -> Tensor:
        return torch.rand(count, generator=generator, device=device).double()

    weight = (1 - draw(n) * (1 - largest ** (1 - exponent))) ** (1 / (1 - exponent))
    below = torch.cat([weight.new_zeros(1), weight.cumsum(0)])  # weight of the nodes before each
    blocks = max(1, n // size)
    share = torch.exp(torch.randn(blocks, generator=generator, device=device) * 0.7)
    stop = (share.cumsum(0) / share.sum() * n).long()
    stop[-1] = n
    start = torch.cat([stop.new_zeros(1), stop[:-1]])
    block = torch.searchsorted(stop, torch.arange(n, device=device), right=True).clamp(max=blocks - 1)

    def node_at(position: Tensor) -> Tensor:
        return torch.searchsorted(below, position, right=True).sub(1).clamp(0, n - 1)

    half = edges // 2
    src = node_at(draw(half) * below[-1])
    low, high = below[start[block[src]]], below[stop[block[src]]]
    stays, where = draw(half) < inside, draw(half)
    dst = node_at(torch.where(stays, low + where * (high - low), where * below[-1]))
    src, dst = torch.cat([src, dst]), torch.cat([dst, src])
    if not shuffle:
        return _csr(src, dst, n)
    order = torch.randperm(n, generator=generator, device=device)
    return _csr(order[src], order[dst], n, order.int())


SPECS: dict[str, Callable[[torch.Generator], Csr]] = {
    "er1M_d10": lambda g: uniform(1 << 20, 10, g),
    "rmat20_16M": lambda g: rmat(20, 16 << 20, g),
    "road1M": lambda g: road(1024, g),
    "arxivlike": lambda g: communities(169_343, 2_332_486, g, 300, 0.6),
    "sbm1M_sorted": lambda g: communities(1 << 20, 20 << 20, g, 512, 0.8),
    "sbm1M_shuf": lambda g: communities(1 << 20, 20 << 20, g, 512, 0.8, shuffle=True),
    "ddi_like": lambda g: communities(4267, 4_271_644, g, 4267, 0.1, 10),
    "redditlike_sorted": lambda g: communities(232_965, 114_615_892, g, 4000, 0.6, 300),
    "productslike_sorted": lambda g: communities(2_449_029, 123_718_280, g, 2000, 0.7, 800),
    "productslike_shuf": lambda g: communities(2_449_029, 123_718_280, g, 2000, 0.7, 800, shuffle=True),
}


def named(name: str, device: torch.device | str = "cuda", seed: int = 1) -> Csr:
    """The graph called `name` (see `SPECS`).

    Raises:
        ValueError: there is none of that name; the message lists them.
    """
    if name not in SPECS:
        raise ValueError(f"no synthetic graph is called {name!r}; there are {', '.join(SPECS)}")
    return SPECS[name](torch.Generator(device).manual_seed(seed))
