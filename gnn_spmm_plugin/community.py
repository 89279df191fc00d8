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
FIRST_SIZE, GROWTH = 4096, 8

#: Rounds of a level at most; it ends when fewer than 1 of `SETTLED` nodes take another label.
ROUNDS, SETTLED = 10, 50


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


def _settle(near: Tensor, weight: Tensor, size: Tensor, bound: int) -> Tensor:
    """Label propagation: a label for each node, ``[n]`` int32, none of them on nodes of together more than `bound`."""
    width, n = near.shape
    ids = torch.arange(n, dtype=torch.int32, device=near.device)
    label, total = ids.clone(), size.clone()
    for step in range(ROUNDS):
        around = label[near]
        score = torch.stack([((around == one) * weight).sum(0, dtype=torch.int32) for one in around])
        own = ((around == label) * weight).sum(0, dtype=torch.int32)
        fits = total[around] + size <= bound
        score = torch.where(fits & (around != label), score, 0)
        # The greatest score, and of equal ones the one whose label has the greatest hash, another in each round.
        best = ((score.long() << 31) | _hash(around, step)).max(0)
        choice = around.gather(0, best.indices.unsqueeze(0))[0]
        wants = ((best.values >> 31) > own) & (_hash(ids, step + 1000) < 1 << 30)
        movers = wants.nonzero()[:, 0]
        if len(movers) * SETTLED < n // 2 and step:
            break
        # Into each label as many as fit, in an order of chance that is always the same.
        key, by = ((choice[movers].long() << 31) | _hash(movers.int(), step + 2000)).sort()
        movers = movers[by]
        target = key >> 31
        weighs = size[movers]
        so_far = weighs.cumsum(0)
        first = torch.searchsorted(target, target)
        fit = so_far - (so_far - weighs)[first] + total[target] <= bound
        movers, target, weighs = movers[fit], target[fit], weighs[fit]
        total.index_add_(0, label[movers].long(), -weighs)
        total.index_add_(0, target, weighs)
        label[movers] = target.int()
    return label


def _renumber(label: Tensor) -> tuple[Tensor, int]:
    """Labels from 0, in their order, and how many there are."""
    used = torch.zeros(len(label), dtype=torch.bool, device=label.device)
    used[label] = True
    number = used.cumsum(0)
    return (number[label] - 1).int(), int(number[-1])


def _contract(near: Tensor, weight: Tensor, label: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Communities as nodes: for each its strongest neighbours and the edges to them, as `_some_neighbours`."""
    here, there = label.expand_as(near), label[near]
    cross = (here != there) & (weight > 0)
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
    near, weight = _some_neighbours(csr)
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
        if len(found) > 12:
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
