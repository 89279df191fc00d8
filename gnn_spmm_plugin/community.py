"""Rows ordered by communities of communities, found on the graph's device.

Label propagation (Raghavan, Albert and Kumara 2007, "Near linear time algorithm to detect community structures in
large-scale networks"): every node starts with a label of its own, and takes the one that most of its neighbours have,
until few change. Then, as in Louvain's method (Blondel, Guillaume, Lambiotte and Lefebvre 2008, "Fast unfolding of
communities in large networks"), each community becomes a node, and so on. Rows are ordered as the leaves of this tree,
so that neighbours are close at every scale: what fits a cache is some subtree, whatever its size.

Of our own: communities have a greatest size, which grows from level to level; of the edges of a node only some are
looked at, in a rectangular array, so that no round sorts edges; and nothing is left to chance or to the order in which
threads arrive.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .csr import Csr
from .partition import check_square

#: Neighbours of a node that are looked at, at most. Of 8, planted communities are found less well.
NEIGHBOURS = 16

#: Nodes of a community of the first level at most, and how many times more on each further level.
FIRST_SIZE, GROWTH = 4096, 4

#: Parts of the nodes that take labels one after the other (all at once, neighbours would swap theirs for ever), and
#: rounds at most: on the first level, and on those of communities, where it is launches that take the time.
FIRST, FURTHER = (4, 8), (2, 4)

#: A level ends if in a round fewer than one in so many nodes took another label; the tree, at `FEW` communities.
SETTLED, FEW = 50, 8

#: Numbers compared at a time, so that small graphs take few launches and large ones little memory.
_AT_ONCE = 1 << 24

_BITS = 31
_MASK = (1 << _BITS) - 1


def _hash(ids: Tensor, seed: int) -> Tensor:
    """Well-mixed int32 numbers for int32 `ids`, none of which is negative; under one seed as many as there are ids."""
    h = ((ids ^ (seed * 0x9E3779B1 & _MASK)) * 0x2C1B3C6D) & _MASK
    h = ((h ^ (h >> 15)) * 0x297A2D39) & _MASK
    return h ^ (h >> 16)


def _some_neighbours(csr: Csr) -> Tensor:
    """``[K, n]`` int32 neighbours of each node, itself where there are fewer.

    All of a node that has at most K, else one of each K-th part of its row.
    """
    n, edges = csr.num_rows, csr.col.shape[0]
    degree, begin = csr.degree().long(), csr.rowptr[:-1].long()
    width = min(NEIGHBOURS, int(degree.max()), 2 * -(-edges // n) + 2)  # of few edges, no mostly empty array for hubs
    ids = torch.arange(n, dtype=torch.int32, device=csr.col.device)
    near = torch.empty(width, n, dtype=torch.int32, device=csr.col.device)
    for k in range(width):
        low = degree * k // width
        size = degree * (k + 1) // width - low
        place = torch.where(degree > width, low + _hash(ids, k) % size.clamp(min=1), k)
        column = csr.col[(begin + place).clamp(max=edges - 1)].int()
        near[k] = torch.where(degree > k, column, ids)
    return near


def _settle(near: Tensor, weight: Tensor | None, size: Tensor, bound: int, parts: int, rounds: int) -> Tensor:
    """Label propagation.

    Args:
        near: ``[K, n]`` int32 neighbours; the node itself counts as none.
        weight: ``[K, n]`` int32, of each of them; None: 1.
        size: ``[n]`` int64, what each node counts.
        bound: what the nodes of a label count together, at most.
        parts: of the nodes, which take labels one after the other.
        rounds: at most.

    Returns:
        ``[n]`` int32 labels, which are numbers of nodes.
    """
    n, device = near.shape[1], near.device
    # The label n, of which there is never room for more, is that of no neighbour.
    label = torch.arange(n + 1, dtype=torch.int32, device=device)
    total = torch.cat([size, size.new_full((1,), 1 << 62)])
    ids = label.clone()
    split = []
    for part in (_hash(ids[:n], 0) % parts).sort(stable=True).indices.chunk(parts):
        around = near[:, part]
        around = torch.where(around == ids[part], n, around)
        split.append((part, around, None if weight is None else weight[:, part], size[part]))
    for step in range(rounds):
        # Of as many votes, those for the label of the greatest number win, which is another one in each round.
        tie = _hash(ids, step)
        moved = sum(_move(*each, bound, label, total, tie) for each in split)
        if moved * SETTLED < n:
            break
    return label[:n]


def _pick(values: Tensor, index: Tensor) -> Tensor:
    """``values[index]`` for int32 indices, which that would copy as int64."""
    return values.index_select(0, index.flatten()).view(index.shape)


def _move(
    part: Tensor,
    near: Tensor,
    weight: Tensor | None,
    size: Tensor,
    bound: int,
    label: Tensor,
    total: Tensor,
    tie: Tensor,
) -> int:
    """Nodes of a part take the label that most of their neighbours have, where there is room; returns how many did.

    Changes `label`, and `total`, what the nodes of each label count. Others are for the nodes of the part.
    """
    around, own = _pick(label, near), label[part]
    score = _votes(around, around, weight)
    stay = _votes(around, own.unsqueeze(0), weight)[0]
    free = (around != own) & (_pick(total, around) <= bound - size)
    best = torch.where(free, (score.long() << _BITS) | _pick(tie, around), -1).max(0)
    wants = ((best.values >> _BITS) > stay).nonzero()[:, 0]
    movers, target = part[wants], around[best.indices[wants], wants].long()
    # Into each label as many as there is room for, in an order that is any but always the same.
    by = ((target << _BITS) | tie[movers]).argsort()
    movers, target, weighs = movers[by], target[by], size[wants[by]]
    before = weighs.cumsum(0) - weighs
    before -= before[torch.searchsorted(target, target)]
    fit = (total[target] + before + weighs <= bound).nonzero()[:, 0]
    movers, target, weighs = movers[fit], target[fit], weighs[fit]
    total.index_add_(0, label[movers], weighs, alpha=-1)
    total.index_add_(0, target, weighs)
    label[movers] = target.int()
    return len(fit)


def _votes(around: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
    """What each of `labels` ``[J, m]`` has among the neighbours' ``[K, m]``: ``[J, m]`` int32."""
    found = []
    for some in labels.split(max(1, _AT_ONCE // max(around.numel(), 1))):
        same = around == some.unsqueeze(1)
        found.append((same if weight is None else same * weight).sum(1, dtype=torch.int32))
    return torch.cat(found)


def _renumber(label: Tensor) -> tuple[Tensor, int]:
    """Labels from 0 on, in their order, int64, and how many there are."""
    used = torch.zeros(len(label), dtype=torch.bool, device=label.device)
    used[label.long()] = True
    number = used.cumsum(0)
    return number[label.long()] - 1, int(number[-1])


def _contract(near: Tensor, weight: Tensor | None, label: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`near` and `weight` of the graph whose nodes are labels: the strongest links of each, both ways."""
    other = label[near]
    cross = other != label
    a, b = label.expand_as(other)[cross], other[cross]
    key, by = (torch.minimum(a, b) * count + torch.maximum(a, b)).sort(stable=True)
    last = torch.ones_like(key, dtype=torch.bool)
    last[:-1] = key[1:] != key[:-1]
    end = last.nonzero()[:, 0]
    so_far = end + 1 if weight is None else weight[cross][by].cumsum(0)[end]
    link = so_far.diff(prepend=so_far.new_zeros(1)).clamp(max=_MASK // NEIGHBOURS)  # sums of K of them fit int32
    low, high = key[end] // count, key[end] % count
    a, b, link = torch.cat([low, high]), torch.cat([high, low]), torch.cat([link, link])
    by = ((a << _BITS) | (_MASK - link)).argsort(stable=True)
    a, b, link = a[by], b[by], link[by]
    rank = torch.arange(len(a), device=a.device) - torch.searchsorted(a, a)
    a, b, link, rank = (t[rank < NEIGHBOURS] for t in (a, b, link, rank))
    width = int(rank.max()) + 1 if len(rank) else 0
    near = torch.arange(count, dtype=torch.int32, device=a.device).repeat(width, 1)
    weight = torch.zeros_like(near)
    near[rank, a], weight[rank, a] = b.int(), link.int()
    return near, weight


def community_levels(csr: Csr) -> list[Tensor]:
    """The tree of communities, from the leaves on.

    Args:
        csr: a square matrix with edges. Its columns are neighbours of its rows; only communities are so both ways.

    Returns:
        int64 tensors. The first, ``[num_rows]``, holds the community of each row, of at most `FIRST_SIZE`; each further
        one the greater community that each of these belongs to.
    """
    near, weight = _some_neighbours(csr), None
    size = torch.ones(csr.num_rows, dtype=torch.int64, device=near.device)
    bound = FIRST_SIZE
    found: list[Tensor] = []
    while True:
        label, count = _renumber(_settle(near, weight, size, bound, *(FURTHER if found else FIRST)))
        found.append(label)
        if count <= FEW:
            return found
        if bound >= csr.num_rows and len(label) - count <= len(label) // 10:  # what is left has no links to speak of
            return found
        near, weight = _contract(near, weight, label, count)
        if near.shape[0] == 0:
            return found
        size = size.new_zeros(count).index_add_(0, label, size)
        bound *= GROWTH


def community_order(csr: Csr) -> Tensor:
    """Rows by communities of communities, see `gnn_spmm_plugin.community`; those of the smallest in their order.

    It is the same in every run on a kind of device, and takes memory of a few numbers for each of `NEIGHBOURS` edges a
    row, however many there are.

    Args:
        csr: a square matrix, its columns nodes like its rows, of fewer than 2**31.

    Returns:
        ``[num_rows]`` int64 permutation on the graph's device.

    Raises:
        ValueError: the matrix is not square, or too large.
    """
    check_square(csr, "the schedule community")
    if csr.num_rows > _MASK:
        raise ValueError(f"the schedule community is for graphs of up to {_MASK:,} nodes, got {csr.num_rows:,}")
    order = torch.arange(csr.num_rows, device=csr.col.device)
    if csr.col.shape[0] == 0:
        return order
    with torch.no_grad():
        place = torch.zeros(1, dtype=torch.int64, device=csr.col.device)
        for depth, label in enumerate(reversed(community_levels(csr))):
            order = (label if depth == 0 else place[label]).argsort(stable=True)
            place = torch.empty_like(order)
            place[order] = torch.arange(len(order), device=order.device)
    return order
