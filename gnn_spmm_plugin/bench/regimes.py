"""The graphs that the decider is trained on: every regime from a thousand rows to 20 million edges, drawn and seeded.

None is a graph of `gnn_spmm_plugin.bench.graphs.SPECS`, which are for the comparison.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from . import graphs
from .graphs import Csr

#: ``rowptr``, ``col`` and the number of columns.
Drawn: TypeAlias = "tuple[Tensor, Tensor, int]"
Make: TypeAlias = Callable[[torch.Generator], Drawn]


@dataclass(frozen=True)
class Regime:
    """One graph.

    Attributes:
        name: unique.
        family: what it is one of.
        make: draws it, on the device of the generator.
    """

    name: str
    family: str
    make: Make

    def draw(self, device: str, seed: int = 1) -> Drawn:
        """The graph, the same each time on one kind of device."""
        return self.make(torch.Generator(device).manual_seed(seed))


def _square(make: Callable[[torch.Generator], Csr], g: torch.Generator) -> Drawn:
    c = make(g)
    return c.rowptr, c.col, c.num_nodes


def _matrix(row: Tensor, col: Tensor, rows: int, cols: int) -> Drawn:
    """Sorted, parallel edges merged, what lies outside left out."""
    inside = (row >= 0) & (row < rows) & (col >= 0) & (col < cols)
    return *graphs.compress(row[inside], col[inside], rows, cols), cols


def _uniform(count: int, end: int, g: torch.Generator) -> Tensor:
    return torch.randint(end, (count,), generator=g, device=g.device)


def _unit(count: int, g: torch.Generator) -> Tensor:
    return torch.rand(count, generator=g, device=g.device).double()


def lattice(shape: Sequence[int], reach: int, corners: bool, g: torch.Generator) -> Drawn:
    """The nodes of a grid with their neighbours up to `reach` steps, diagonal ones where `corners`."""
    n = 1
    for side in shape:
        n *= side
    node = torch.arange(n, device=g.device)
    at: list[Tensor] = []
    rest = node
    for side in reversed(shape):
        at.insert(0, rest % side)
        rest = rest // side
    rows, cols = [], []
    for step in itertools.product(range(-reach, reach + 1), repeat=len(shape)):
        if not any(step) or (not corners and sum(map(abs, step)) > reach):
            continue
        there = torch.ones(n, dtype=torch.bool, device=g.device)
        other = torch.zeros_like(node)
        for where, side, s in zip(at, shape, step, strict=True):
            there &= (where + s >= 0) & (where + s < side)
            other = other * side + where + s
        rows.append(node[there])
        cols.append(other[there])
    return _matrix(torch.cat(rows), torch.cat(cols), n, n)


def banded(n: int, half: int, fill: float, g: torch.Generator) -> Drawn:
    """Entries within `half` of the diagonal, a part `fill` of them."""
    count = int(n * (2 * half + 1) * fill)
    row = _uniform(count, n, g)
    return _matrix(row, row + _uniform(count, 2 * half + 1, g) - half, n, n)


def near(n: int, degree: int, spread: float, g: torch.Generator) -> Drawn:
    """Columns normally distributed around the row's own number: what orders of geometric graphs look like."""
    row = torch.arange(n, device=g.device).repeat_interleave(degree)
    away = torch.randn(len(row), generator=g, device=g.device).double() * spread
    return _matrix(row, row + away.round().long(), n, n)


def nearest(n: int, dimensions: int, k: int, g: torch.Generator) -> Drawn:
    """The k nearest of random points, with the reverse edges."""
    points = torch.rand(n, dimensions, generator=g, device=g.device)
    points = points[points[:, 0].mul(30).floor().add(points[:, 1]).argsort()]
    found = [torch.cdist(part, points).topk(k + 1, largest=False).indices[:, 1:] for part in points.split(4096)]
    col = torch.cat(found).flatten()
    row = torch.arange(n, device=g.device).repeat_interleave(k)
    return _matrix(torch.cat([row, col]), torch.cat([col, row]), n, n)


def bipartite(rows: int, cols: int, edges: int, row_power: float, col_power: float, g: torch.Generator) -> Drawn:
    """Rows and columns drawn as ``u ** power``: 1 is uniform, more is skewed towards the first ones."""
    row = (_unit(edges, g) ** row_power * rows).long().clamp(max=rows - 1)
    col = (_unit(edges, g) ** col_power * cols).long().clamp(max=cols - 1)
    return _matrix(row, col, rows, cols)


def hot_columns(n: int, degree: int, power: float, g: torch.Generator) -> Drawn:
    """`degree` columns a row, some columns much more often than others, in random places."""
    row = torch.arange(n, device=g.device).repeat_interleave(degree)
    col = (_unit(len(row), g) ** power * n).long().clamp(max=n - 1)
    return _matrix(row, torch.randperm(n, generator=g, device=g.device)[col], n, n)


def stars(n: int, mean: float, hubs: int, hub_degree: int, both: bool, g: torch.Generator) -> Drawn:
    """A sparse uniform graph with a few rows, and where `both` columns, of very many edges."""
    count = int(n * mean)
    hub = _uniform(hubs, n, g).repeat_interleave(hub_degree)
    leaf = _uniform(len(hub), n, g)
    row, col = [_uniform(count, n, g), hub], [_uniform(count, n, g), leaf]
    if both:
        row, col = [*row, leaf], [*col, hub]
    return _matrix(torch.cat(row), torch.cat(col), n, n)


def dense(n: int, share: float, g: torch.Generator) -> Drawn:
    """A part of all entries."""
    key = (torch.rand(n * n, generator=g, device=g.device) < share).nonzero().flatten()
    return _matrix(key // n, key % n, n, n)


def batch(count: int, nodes: int, degree: float, g: torch.Generator) -> Drawn:
    """Many graphs of about so many nodes, one after the other, as loaders put them together."""
    size = (torch.rand(count, generator=g, device=g.device) * nodes + nodes / 2).long().clamp(min=2)
    end = size.cumsum(0)
    n = int(end[-1])
    own = torch.arange(count, device=g.device).repeat_interleave(size, output_size=n)
    row = _uniform(int(n * degree / 2), n, g)
    col = (end - size)[own[row]] + (_unit(len(row), g) * size[own[row]]).long()
    return _matrix(torch.cat([row, col]), torch.cat([col, row]), n, n)


def copies(n: int, degree: int, group: int, keep: float, reach: int, g: torch.Generator) -> Drawn:
    """Rows that follow one another share columns, as pages of a site share links.

    Args:
        n: rows.
        degree: columns that a group of rows chooses from; a row takes each with probability `keep`.
        group: rows of a group.
        keep: see there.
        reach: columns lie within so many of the group; 0: anywhere.
        g: the generator.
    """
    groups = -(-n // group)
    pool = _uniform(groups * degree, 2 * reach + 1 if reach else n, g).view(groups, degree)
    if reach:
        pool = (pool - reach + (torch.arange(groups, device=g.device) * group).unsqueeze(1)).clamp(0, n - 1)
    row = torch.arange(n, device=g.device).repeat_interleave(degree)
    col = pool[torch.arange(n, device=g.device) // group].flatten()
    taken = torch.rand(len(col), generator=g, device=g.device) < keep
    return _matrix(row[taken], col[taken], n, n)


def _short(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if isinstance(value, int) and value >= size and value % (size // 10) == 0:
            return f"{value / size:g}{unit}"
    return str(value) if isinstance(value, int) else f"{value:g}"


def _named(family: str, make: Callable[..., Drawn], *calls: Sequence[float]) -> Iterator[Regime]:
    for arguments in calls:
        yield Regime("_".join([family, *map(_short, arguments)]), family, partial(make, *arguments))


def _of_graphs(family: str, make: Callable[..., Csr], *calls: Sequence[float]) -> Iterator[Regime]:
    for arguments in calls:
        name = "_".join([family, *map(_short, arguments)])
        yield Regime(name, family, partial(_square, partial(make, *arguments)))


_K, _M = 1000, 1000_000
_SBM = (
    (4 * _K, 170 * _K, 100, 0.9, 600.0),
    (10 * _K, 200 * _K, 100, 0.8, 100.0),
    (12 * _K, 120 * _K, 60, 0.8, 300.0),
    (30 * _K, 3 * _M, 1000, 0.6, 200.0),
    (50 * _K, 500 * _K, 200, 0.7, 1000.0),
    (60 * _K, 12 * _M, 3000, 0.7, 60.0),
    (40 * _K, 300 * _K, 150, 0.7, 800.0),
    (80 * _K, 900 * _K, 300, 0.7, 1500.0),
    (100 * _K, 4 * _M, 500, 0.8, 300.0),
    (150 * _K, 2 * _M, 250, 0.6, 1500.0),
    (300 * _K, 1500 * _K, 64, 0.9, 50.0),
    (300 * _K, 9 * _M, 1000, 0.7, 500.0),
    (_M, 6 * _M, 256, 0.8, 2000.0),
    (900 * _K, 18 * _M, 600, 0.85, 1000.0),
)


def _sbm() -> Iterator[Regime]:
    for n, edges, size, inside, largest in _SBM:
        for shuffle in (False, True):

            def make(g: torch.Generator, a: tuple[int, int, int, float, float, bool]) -> Csr:
                return graphs.communities(a[0], a[1], g, a[2], a[3], a[4], shuffle=a[5])

            arguments = (n, edges, size, inside, largest, shuffle)
            name = f"sbm_{_short(n)}_{_short(edges)}_{size}_{'shuf' if shuffle else 'sorted'}"
            yield Regime(name, "sbm", partial(_square, partial(make, a=arguments)))


def _road() -> Iterator[Regime]:
    for side, shuffle in itertools.product((90, 300, 700, 1400), (False, True)):

        def make(g: torch.Generator, side: int, shuffle: bool) -> Csr:
            return graphs.road(side, g, shuffle)

        name = f"road_{side}_{'shuf' if shuffle else 'sorted'}"
        yield Regime(name, "road", partial(_square, partial(make, side=side, shuffle=shuffle)))


def _mesh() -> Iterator[Regime]:
    shapes = (((100, 100), 1, True), ((1000, 900), 1, False), ((700, 700), 1, True), ((500, 400), 2, True))
    for shape, reach, corners in (
        *shapes,
        ((30, 30, 30), 1, False),
        ((90, 90, 90), 1, False),
        ((60, 60, 60), 1, True),
        ((40, 40, 40), 1, False),
        ((70, 70, 70), 1, False),
    ):
        name = f"mesh_{'x'.join(map(str, shape))}_{reach}{'c' if corners else ''}"
        yield Regime(name, "mesh", partial(lattice, shape, reach, corners))


def _rows() -> Iterator[Regime]:
    mixes = {
        "a": ((0.9, 4.0, 0.5), (0.1, 60.0, 0.3)),
        "b": ((0.5, 2.0, 0.2), (0.49, 20.0, 0.5), (0.01, 800.0, 0.3)),
        "c": ((0.97, 6.0, 0.3), (0.03, 300.0, 0.5)),
    }
    for (name, parts), n in itertools.product(mixes.items(), (20 * _K, 150 * _K, 500 * _K)):

        def make(g: torch.Generator, n: int, parts: Sequence[tuple[float, float, float]]) -> Csr:
            return graphs.mixed(n, parts, g)

        yield Regime(f"mixed_{name}_{_short(n)}", "mixed", partial(_square, partial(make, n=n, parts=parts)))


def _all() -> Iterator[Regime]:
    yield from _of_graphs(
        "er",
        graphs.uniform,
        *((_K, 4), (_K, 16), (_K, 64), (10 * _K, 3), (10 * _K, 8), (10 * _K, 30), (10 * _K, 120)),
        *((100 * _K, 2), (100 * _K, 5), (100 * _K, 12), (100 * _K, 40), (100 * _K, 100)),
        *((_M, 2), (_M, 4), (_M, 7), (_M, 15), (3 * _M, 3), (300 * _K, 20)),
        *((2500, 4), (4 * _K, 3), (3 * _K, 9), (1500, 6), (2 * _K, 30), (6 * _K, 5), (8 * _K, 16)),
    )
    yield from _of_graphs(
        "rmat",
        graphs.rmat,
        *((10, 8 << 10), (12, 4 << 12), (12, 16 << 12), (12, 64 << 12), (14, 8 << 14), (14, 32 << 14)),
        *((16, 4 << 16), (16, 16 << 16), (16, 64 << 16), (17, 8 << 17), (18, 4 << 18), (18, 16 << 18)),
        *((18, 40 << 18), (20, 4 << 20), (20, 8 << 20), (19, 30 << 19), (21, 6 << 21), (22, 3 << 22)),
        *((11, 3 << 11), (11, 10 << 11), (11, 40 << 11), (12, 8 << 12), (13, 3 << 13), (13, 12 << 13), (13, 40 << 13)),
    )
    yield from _sbm()
    yield from _road()
    yield from _mesh()
    yield from _named(
        "banded",
        banded,
        *((20 * _K, 10, 1.0), (100 * _K, 5, 0.5), (100 * _K, 50, 0.3), (500 * _K, 3, 1.2), (_M, 8, 0.6)),
        *((200 * _K, 100, 0.2), (50 * _K, 200, 0.4), (2 * _M, 2, 1.0)),
    )
    yield from _named(
        "near",
        near,
        *((50 * _K, 10, 30.0), (200 * _K, 16, 500.0), (_M, 6, 100.0), (_M, 14, 3000.0), (400 * _K, 40, 1000.0)),
        *((300 * _K, 30, 800.0), (150 * _K, 50, 2000.0), (3 * _K, 6, 20.0), (5 * _K, 20, 100.0), (9 * _K, 12, 50.0)),
        *((80 * _K, 60, 500.0), (120 * _K, 30, 300.0)),
    )
    yield from _named("knn", nearest, (2 * _K, 2, 10), (10 * _K, 3, 16), (30 * _K, 2, 6), (30 * _K, 8, 20))
    yield from _named(
        "bipartite",
        bipartite,
        *((5 * _K, 50 * _K, 300 * _K, 1, 2), (50 * _K, 5 * _K, 300 * _K, 2, 1), (_M, 20 * _K, 5 * _M, 1.5, 2)),
        *((20 * _K, _M, 5 * _M, 2, 1.5), (200 * _K, 200 * _K, 4 * _M, 3, 3), (500 * _K, 100 * _K, 15 * _M, 2, 2)),
        *((100 * _K, 500 * _K, 10 * _M, 2, 1), (2 * _K, 200 * _K, 2 * _M, 1, 1), (300 * _K, 10 * _K, _M, 1, 3)),
        *((100 * _K, 5 * _K, 400 * _K, 1, 2), (400 * _K, 20 * _K, 1500 * _K, 1, 2), (250 * _K, 8 * _K, _M, 1, 4)),
        *((800 * _K, 30 * _K, 3 * _M, 1, 3), (150 * _K, 15 * _K, 600 * _K, 1.2, 3), (2 * _K, 6 * _K, 15 * _K, 1, 2)),
        *((7 * _K, _K, 20 * _K, 1, 3), (120 * _K, 6 * _K, 500 * _K, 1, 3), (180 * _K, 12 * _K, 800 * _K, 1, 3.5)),
    )
    yield from _of_graphs(
        "regular",
        graphs.regular,
        *((_K, 8), (10 * _K, 3), (10 * _K, 70), (50 * _K, 16), (100 * _K, 64), (250 * _K, 8), (300 * _K, 24)),
        *((_M, 6), (_M, 12), (2 * _M, 3), (2 * _M, 8), (30 * _K, 300)),
    )
    yield from _of_graphs(
        "powerlaw",
        graphs.powerlaw_rows,
        *((20 * _K, 3.0, 1, 400), (200 * _K, 2.0, 2, 120), (200 * _K, 6.0, 2, 400), (500 * _K, 4.0, 1, 150)),
        *((_M, 8.0, 2, 80), (60 * _K, 10.0, 4, 2000), (2500, 3.5, 1, 160), (5 * _K, 4.0, 1, 100)),
        *((1500, 3.0, 1, 100), (2 * _K, 5.0, 1, 200), (3 * _K, 3.0, 1, 250), (3500, 6.0, 2, 120), (2200, 3.5, 1, 120)),
        *(
            (2800, 4.0, 1, 180),
            (4 * _K, 3.5, 1, 300),
            (6 * _K, 3.0, 1, 150),
            (8 * _K, 5.0, 1, 400),
            (1200, 8.0, 2, 300),
        ),
    )
    yield from _rows()
    yield from _named(
        "stars",
        stars,
        *((10 * _K, 3, 3, 9 * _K, True), (100 * _K, 3, 5, 60 * _K, True), (300 * _K, 8, 30, 20 * _K, False)),
        *((_M, 4, 4, 900 * _K, True), (_M, 10, 200, 10 * _K, True), (50 * _K, 20, 50, 5 * _K, False)),
        *((500 * _K, 4, 3, 400 * _K, True), (2 * _M, 3, 6, 500 * _K, True), (700 * _K, 5, 10, 200 * _K, True)),
        *((200 * _K, 4, 2, 150 * _K, True), (2500, 3, 2, 800, True), (4 * _K, 5, 4, 600, False)),
    )
    yield from _named(
        "dense",
        dense,
        *((500, 0.5), (_K, 0.2), (1500, 0.8), (2 * _K, 0.1), (3 * _K, 0.4), (4 * _K, 0.25), (6 * _K, 0.3)),
        *((8 * _K, 0.05), (10 * _K, 0.1)),
    )
    yield from _named(
        "batch",
        batch,
        *((100, 20, 3), (_K, 20, 4), (5 * _K, 30, 2.2), (20 * _K, 25, 4), (60 * _K, 18, 2.2), (2 * _K, 100, 10)),
        *((500, 500, 40), (500, 100, 10), (_K, 120, 8), (4 * _K, 80, 12), (3 * _K, 60, 6), (10 * _K, 50, 8)),
        *((300, 300, 20), (1500, 150, 15), (40, 60, 6), (60, 30, 5), (100, 40, 10)),
    )
    yield from _named(
        "copies",
        copies,
        *((20 * _K, 20, 4, 0.8, 0), (100 * _K, 12, 8, 0.9, 2000), (300 * _K, 10, 2, 0.95, 0)),
        *((300 * _K, 30, 16, 0.5, 5000), (200 * _K, 60, 6, 0.8, 20 * _K), (_M, 8, 10, 0.9, 300)),
        *((50 * _K, 150, 20, 0.7, 0), (15 * _K, 15, 4, 0.8, 0), (40 * _K, 24, 4, 0.7, 0)),
    )
    yield from _named(
        "hot",
        hot_columns,
        *((20 * _K, 10, 4), (200 * _K, 6, 3), (200 * _K, 30, 6), (_M, 5, 8), (_M, 12, 3)),
        *((150 * _K, 8, 3), (300 * _K, 5, 2), (400 * _K, 10, 4)),
    )


def regimes() -> list[Regime]:
    """All of them, the families taking turns, so that a run that is cut short has some of each."""
    by_family: dict[str, list[Regime]] = {}
    for regime in _all():
        by_family.setdefault(regime.family, []).append(regime)
    turns = itertools.zip_longest(*(sorted(found, key=lambda r: digest(r.name)) for found in by_family.values()))
    return [regime for turn in turns for regime in turn if regime is not None]


def digest(name: str) -> str:
    """A fixed random order of names."""
    return hashlib.sha256(name.encode()).hexdigest()


def held_out(names: Sequence[tuple[str, str]], count: int) -> set[str]:
    """`count` of these (name, family), spread over the families, always the same."""
    rank: dict[str, int] = {}
    ranked = []
    for name, family in sorted(names, key=lambda item: digest(item[0])):
        ranked.append((rank.setdefault(family, 0), digest(name), name))
        rank[family] += 1
    return {name for _, _, name in sorted(ranked)[:count]}
