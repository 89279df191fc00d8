"""Synthetic graphs with the sizes and degree spreads of well-known ones, made on the spot and seeded.

`named` makes them by name. Communities lie one after another in the ``sorted`` graphs and in random order in the
``shuf`` ones. A graph is the same on every NVIDIA GPU under one torch release; the CPU draws other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


def compress(row: Tensor, col: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """int32 ``rowptr`` and ``col`` of int64 edges: sorted, parallel ones merged."""
    key = torch.unique(row * cols + col)
    rowptr = torch.zeros(rows + 1, dtype=torch.int32, device=key.device)
    rowptr[1:] = torch.bincount(key // cols, minlength=rows).cumsum(0)
    return rowptr, (key % cols).int()


def _csr(row: Tensor, col: Tensor, n: int, order: Tensor | None = None) -> Csr:
    return Csr(*compress(row, col, n, n), order)


def _named_anew(row: Tensor, col: Tensor, n: int, generator: torch.Generator, shuffle: bool) -> Csr:
    """With random node ids where `shuffle` says so; `Csr.order` then leads back to the old ones."""
    if not shuffle:
        return _csr(row, col, n)
    order = torch.randperm(n, generator=generator, device=generator.device)
    return _csr(order[row], order[col], n, order.int())


def _uniform_columns(degree: Tensor, generator: torch.Generator) -> Csr:
    n = len(degree)
    row = torch.arange(n, device=degree.device).repeat_interleave(degree)
    return _csr(row, torch.randint(n, (len(row),), generator=generator, device=degree.device), n)


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


def road(side: int, generator: torch.Generator, shuffle: bool = False) -> Csr:
    """A grid of side x side nodes of whose edges seven in ten exist; `shuffle` as in `communities`."""
    n, device = side * side, generator.device
    node = torch.arange(n, device=device)
    keep = torch.rand(n, 2, generator=generator, device=device) < 0.7
    right, down = (node % side < side - 1) & keep[:, 0], (node < n - side) & keep[:, 1]
    a, b = torch.cat([node[right], node[down]]), torch.cat([node[right] + 1, node[down] + side])
    return _named_anew(torch.cat([a, b]), torch.cat([b, a]), n, generator, shuffle)


def regular(n: int, degree: int, generator: torch.Generator) -> Csr:
    """`degree` uniform columns in every row, fewer where some coincide: RA-SpMM's ``dense_small`` and such."""
    return _uniform_columns(torch.full((n,), degree, device=generator.device), generator)


def mixed(n: int, parts: Sequence[tuple[float, float, float]], generator: torch.Generator) -> Csr:
    """Short, medium and giant rows side by side: RA-SpMM's ``mixed_skew``.

    Args:
        n: rows.
        parts: (share of the rows, their degree, by which part of it a degree varies), for each kind.
        generator: also says on which device the graph is made.
    """
    kind = torch.rand(n, generator=generator, device=generator.device)
    degree = torch.zeros(n, device=generator.device)
    below = 0.0
    for share, mean, spread in parts:
        here = (kind >= below) & (kind < below + share)
        jitter = torch.rand(int(here.sum()), generator=generator, device=generator.device) * 2 - 1
        degree[here] = mean * (1 + spread * jitter)
        below += share
    return _uniform_columns(degree.round().long().clamp(min=1), generator)


def powerlaw_rows(n: int, exponent: float, shortest: int, longest: int, generator: torch.Generator) -> Csr:
    """Degrees ``shortest + (longest - shortest) * u ** exponent``, columns uniform: RA-SpMM's ``skewed_powerlaw``."""
    u = torch.rand(n, generator=generator, device=generator.device)
    return _uniform_columns((shortest + (longest - shortest) * u**exponent).round().long(), generator)


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
    stays, where = torch.rand(half, generator=generator, device=device) < inside, draw(half)
    dst = node_at(torch.where(stays, low + where * (high - low), where * below[-1]))
    src, dst = torch.cat([src, dst]), torch.cat([dst, src])
    return _named_anew(src, dst, n, generator, shuffle)


def _size(count: int, scale: float) -> int:
    return max(2, round(count * scale))


def _both(
    in_order: str, shuffled: str, n: int, edges: int, size: int, inside: float, largest: float = 2000.0
) -> dict[str, Callable[[torch.Generator, float], Csr]]:
    """The same communities in order and under random node ids."""

    def make(shuffle: bool) -> Callable[[torch.Generator, float], Csr]:
        return lambda g, s: communities(_size(n, s), _size(edges, s), g, size, inside, largest, shuffle=shuffle)

    return {in_order: make(False), shuffled: make(True)}


_MIXED = ((0.4, 4.0, 0.25), (0.55, 25.0, 0.35), (0.05, 250.0, 0.2))

#: How each is made; the second argument, 1 for the real size, shrinks it.
SPECS: dict[str, Callable[[torch.Generator, float], Csr]] = {
    "er1M_d10": lambda g, s: uniform(_size(1 << 20, s), 10, g),
    "rmat20_16M": lambda g, s: rmat(20 + round(math.log2(s)), _size(16 << 20, s), g),
    "road1M": lambda g, s: road(_size(1024, s**0.5), g),
    "road1M_shuf": lambda g, s: road(_size(1024, s**0.5), g, shuffle=True),
    **_both("arxivlike", "arxivlike_shuf", 169_343, 2_332_486, 300, 0.6),
    "cora_like": lambda g, s: communities(_size(2708, s), _size(10_556, s), g, 300, 0.8, 100),
    **_both("sbm1M_sorted", "sbm1M_shuf", 1 << 20, 20 << 20, 512, 0.8),
    "ddi_like": lambda g, s: communities(_size(4267, s), _size(4_271_644, s), g, 4267, 0.1, 10),
    "proteins_like": lambda g, s: communities(_size(132_534, s), _size(79_122_504, s), g, 3000, 0.7, 60),
    **_both("redditlike_sorted", "redditlike_shuf", 232_965, 114_615_892, 4000, 0.6, 300),
    **_both("productslike_sorted", "productslike_shuf", 2_449_029, 123_718_280, 2000, 0.7, 800),
    "ra_mixed_v3": lambda g, s: mixed(_size(200_000, s), _MIXED, g),
    "ra_skewed_cv2p5": lambda g, s: powerlaw_rows(_size(200_000, s), 2.2, 2, 160, g),
    "ra_community_nc100": lambda g, s: communities(
        _size(200_000, s), _size(1_100_000, s), g, 2000, 0.9, largest=1.01, exponent=50
    ),
    "ra_sparse_uniform_d8": lambda g, s: regular(_size(300_000, s), 8, g),
    "ra_dense_small_d90": lambda g, s: regular(_size(10_000, s), 90, g),
}


def named(name: str, device: torch.device | str = "cuda", seed: int = 1, scale: float = 1.0) -> Csr:
    """The graph called `name` (see `SPECS`), with about `scale` times its nodes and edges.

    Raises:
        ValueError: there is none of that name; the message lists them.
    """
    if name not in SPECS:
        raise ValueError(f"no synthetic graph is called {name!r}; there are {', '.join(SPECS)}")
    return SPECS[name](torch.Generator(device).manual_seed(seed), scale)
