"""Rows ordered by communities of communities, found on the graph's device.

Label propagation (Raghavan, Albert and Kumara 2007, "Near linear time algorithm to detect community structures in
large-scale networks"): every node starts with a label of its own and keeps taking the one that most of its neighbours
have. Then, as in Louvain's method (Blondel, Guillaume, Lambiotte and Lefebvre 2008, "Fast unfolding of communities in
large networks"), each community becomes one node, and so on, until one is left. The order of the rows is that of
the leaves of this tree, so neighbours are close at every scale: what fits a cache is one subtree, whatever its size.

What is our own: labels have a greatest size, of which more is asked at each level; of the edges of a node only some are
looked at, in a rectangular array, so that a round takes no sort of the edges; and nothing is left to chance or to the
order in which threads arrive.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .csr import Csr
from .partition import check_square

#: Neighbours of a node that are looked at.
NEIGHBOURS = 16

#: Nodes of a community of the first level at most, and how many times more at each further level.
FIRST_SIZE, GROWTH = 4096, 4

#: Numbers compared at a time.
_AT_ONCE = 1 << 24

#: Parts of the nodes that take labels one after the other.
PARTS = 4

#: Rounds of a level at most; it ends when fewer than 1 of `SETTLED` nodes take another label.
ROUNDS, SETTLED = 8, 50


def _hash(ids: Tensor, seed: int) -> Tensor:
    """Well-mixed int32 numbers from 0 to 2**31 - 1, the same for the same int32 `ids`."""
    h = (ids ^ (seed * 40503 & 0x7FFFFFFF)) * 0x2C1B3C6D
    h = (h ^ (h >> 15 & 0x1FFFF)) * 0x297A2D39
    return (h ^ (h >> 16 & 0xFFFF)) & 0x7FFFFFFF


def _some_neighbours(csr: Csr) -> tuple[Tensor, Tensor]:
    """Neighbours and weights, both ``[K, n]`` int32; a weight of 0 where there is no other.

    All edges of a node of at most K, else one of each K-th part of them.
    """
    n, device = csr.num_rows, csr.col.device
    degree = csr.degree()
    width = max(1, min(NEIGHBOURS, int(degree.max()), 2 * -(-csr.col.shape[0] // n) + 2))
    ids = torch.arange(n, dtype=torch.int32, device=device)
    begin = csr.rowptr[:-1]
    near = torch.empty(width, n, dtype=torch.int32, device=device)
    weight = torch.empty_like(near)
    last = csr.col.shape[0] - 1
    for k in range(width):
        # The k-th part of a long row is [k * degree / width, (k + 1) * degree / width).
        low = degree.long() * k // width
        part = degree.long() * (k + 1) // width - low
        place = torch.where(degree > width, low + _hash(ids, k + 1) % part.clamp(min=1), k)
        column = csr.col[(begin + place).clamp(max=last)].int()
        there = (degree > k) & (column != ids)
        near[k] = torch.where(there, column, ids)
        weight[k] = there
    return near, weight


def _settle(near: Tensor, weight: Tensor | None, size: Tensor, bound: int) -> Tensor:
    """Label propagation: a label for each node, ``[n]`` int32, none of them on nodes of together more than `bound`."""
    n = near.shape[1]
    ids = torch.arange(n, dtype=torch.int32, device=near.device)
    label, total = ids.clone(), size.clone()
    # A part of the nodes at a time, those of a hash: of neighbours that act at once, each may take the other's label.
    parts = (_hash(ids, 0) % PARTS).sort(stable=True).indices.chunk(PARTS)
    for step in range(ROUNDS):
        moved = 0
        for part in parts:
            moved += _move(part, near, weight, size, bound, label, total, step)
        if moved * SETTLED < n:
            break
    return label


def _move(
    part: Tensor, near: Tensor, weight: Tensor | None, size: Tensor, bound: int, label: Tensor, total: Tensor, step: int
) -> int:
    """Nodes of a part take the label that most of their neighbours have, where there is room; how many did."""
    around, own = label[near[:, part]], label[part]
    there = None if weight is None else weight[:, part]
    if there is None:
        around = torch.where(near[:, part] == part, -1, around)
    score = _votes(around, around, there)
    stay = _votes(around, own.unsqueeze(0), there)[0]
    other = (around != own) & (around >= 0) & (total[around] + size[part] <= bound)
    # Most votes; of as many, the label of the greatest hash, which is another in each round.
    best = torch.where(other, (score.long() << 31) | _hash(around, step + 1), -1).max(0)
    wants = ((best.values >> 31) > stay).nonzero()[:, 0]
    if len(wants) == 0:
        return 0
    # Into each label as many as there is room for, in an order of chance that is always the same.
    movers, target = part[wants], around[best.indices[wants], wants].long()
    by = ((target << 31) | _hash(movers.int(), step + 1)).argsort()
    movers, target = movers[by], target[by]
    weighs = size[movers]
    so_far = weighs.cumsum(0)
    first = torch.searchsorted(target, target)
    fit = so_far - (so_far - weighs)[first] + total[target] <= bound
    movers, target, weighs = movers[fit], target[fit], weighs[fit]
    total.index_add_(0, label[movers].long(), -weighs)
    total.index_add_(0, target, weighs)
    label[movers] = target.int()
    return len(movers)


def _votes(around: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
    """How many of the neighbours' labels, or of what weight, are each of `labels`: ``[len(labels), m]`` int32."""
    at_once = max(1, _AT_ONCE // max(around.numel(), 1))
    found = []
    for some in labels.split(at_once):
        same = around == some.unsqueeze(1)
        found.append((same if weight is None else same * weight).sum(1, dtype=torch.int32))
    return torch.cat(found)


def _renumber(label: Tensor) -> tuple[Tensor, int]:
    """Labels from 0, in their order, and how many there are."""
    used = torch.zeros(len(label), dtype=torch.bool, device=label.device)
    used[label] = True
    number = used.cumsum(0)
    return (number[label] - 1).int(), int(number[-1])


def _contract(near: Tensor, weight: Tensor | None, label: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Communities as nodes: for each its strongest neighbours and the edges to them, as `_some_neighbours`."""
    here, there = label.expand_as(near), label[near]
    cross = here != there
    weight = torch.ones_like(near) if weight is None else weight
    a, b, w = here[cross].long(), there[cross].long(), weight[cross]
    key, by = (torch.minimum(a, b) * count + torch.maximum(a, b)).sort()
    if len(key) == 0:
        return near.new_empty(0, count), near.new_empty(0, count)
    end = torch.cat([key[1:] != key[:-1], key.new_ones(1, dtype=torch.bool)]).nonzero()[:, 0]
    sums = w[by].cumsum(0)[end]
    key, w = key[end], torch.cat([sums[:1], sums[1:] - sums[:-1]])
    a, b = key // count, key % count
    a, b, w = torch.cat([a, b]), torch.cat([b, a]), torch.cat([w, w])
    by = ((a << 31) | (0x7FFFFFFF - w)).argsort(stable=True)
    a, b, w = a[by], b[by], w[by]
    rank = torch.arange(len(a), device=a.device) - torch.searchsorted(a, a)
    width = min(NEIGHBOURS, int(rank.max()) + 1)
    keep = rank < width
    a, b, w, rank = a[keep], b[keep], w[keep], rank[keep]
    ids = torch.arange(count, dtype=torch.int32, device=near.device)
    near, weight = ids.repeat(width, 1), torch.zeros(width, count, dtype=torch.int32, device=near.device)
    near[rank, a], weight[rank, a] = b.int(), w.int()
    return near, weight


def levels(csr: Csr) -> list[Tensor]:
    near, weight = _some_neighbours(csr)[0], None
    size = torch.ones(csr.num_rows, dtype=torch.int64, device=near.device)
    bound, found = FIRST_SIZE, []
    while len(near):
        label, count = _renumber(_settle(near, weight, size, bound))
        n = len(label)
        if count == n and bound >= csr.num_rows:
            break
        found.append(label)
        near, weight = _contract(near, weight, label, count)
        size = size.new_zeros(count).index_add_(0, label.long(), size)
        bound *= GROWTH
        if len(found) > 12 or count * 10 > n * 9:
            break
    return found


def community_order(csr: Csr) -> Tensor:
    check_square(csr, "the schedule community")
    if csr.col.shape[0] == 0:
        return torch.arange(csr.num_rows, device=csr.col.device)
    rank = None
    for label in reversed(levels(csr)):
        by = label.long() if rank is None else rank[label.long()]
        order = by.argsort(stable=True)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device)
    return order
