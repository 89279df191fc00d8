"""Generated graphs of the size and degree spread of OGB's, with planted classes: for a try where there is no data.

Communities of a degree-corrected block model (`gnn_spmm_plugin.bench.graphs.communities`); the classes are groups of
communities, and features are noise around a point per class, so that neighbours tell more than a node's own features.
Ids are random where OGB's are in no order. How well a model does here says nothing about how it does on OGB's graphs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data

from gnn_spmm_plugin.bench.graphs import Csr, communities


class Size(NamedTuple):
    """What is published of a graph, and what makes a generated one alike.

    Nodes, features, classes and split are OGB's (https://ogb.stanford.edu/docs/nodeprop and /linkprop). `communities`
    merges parallel edges, so `drawn` is larger than the number of edges, both directions counted, that is left:
    2,315,598 for ogbn-arxiv made symmetric, 123,718,152, 79,122,504 and 2,669,778. `hub`, the largest expected degree
    over the smallest, gives the spread: standard deviation over mean 3.5, 2.0 and 1.0; published in RA-SpMM's
    measurements 1.9 for ogbn-products and 1.0 for ogbn-proteins, for ogbn-arxiv of one direction only.
    """

    nodes: int
    drawn: int
    community: int
    inside: float
    hub: float
    features: int
    classes: int
    split: tuple[int, int, int]
    shuffle: bool


SIZES = {
    "ogbn-arxiv": Size(169_343, 2_800_000, 300, 0.6, 4000, 128, 40, (90_941, 29_799, 48_603), True),
    "ogbn-products": Size(2_449_029, 137_000_000, 2000, 0.7, 250, 100, 47, (196_615, 39_323, 2_213_091), True),
    "ogbn-proteins": Size(132_534, 104_000_000, 3000, 0.7, 60, 8, 40, (86_619, 21_236, 24_679), False),
    "ogbl-ddi": Size(4267, 5_300_000, 400, 0.7, 10, 0, 0, (1_067_911, 133_489, 133_489), True),
}


def _draw(name: str, scale: float, device: str, seed: int) -> tuple[Csr, torch.Generator]:
    size, generator = SIZES[name], torch.Generator(device).manual_seed(seed)
    nodes = max(64, round(size.nodes * scale))
    # Of a small share, communities must fit into classes, and edges into communities.
    community = min(size.community, max(20, nodes // max(size.classes, 10)))
    degree = size.drawn / size.nodes
    drawn = round(nodes * min(degree, max(10.0, degree * community / size.community)))
    graph = communities(nodes, drawn, generator, community, size.inside, size.hub, shuffle=size.shuffle)
    return graph, generator


def nodes(name: str, scale: float = 1.0, device: str = "cpu", seed: int = 1) -> tuple[Data, dict[str, Tensor]]:
    """A node classification task; `scale` is the share of nodes, and of edges if not very small.

    Returns:
        `Data` with ``x``, ``edge_index`` (both directions) and ``y``, ``[N, 1]`` as OGB has it (ogbn-proteins:
        ``[N, 112]`` zeros and ones), and the nodes of ``"train"``, ``"valid"`` and ``"test"``, drawn at random.
    """
    size = SIZES[name]
    graph, generator = _draw(name, scale, device, seed)
    n = graph.num_nodes
    group = torch.arange(n, device=device) * size.classes // n
    if graph.order is not None:  # order[i] is the id of the i-th node of the communities in a row
        group = torch.empty_like(group).scatter_(0, graph.order.long(), group)
    centre = torch.randn(size.classes, size.features, generator=generator, device=device)
    x = torch.randn(n, size.features, generator=generator, device=device).add_(centre[group], alpha=0.5)
    y = group.unsqueeze(1)
    if name == "ogbn-proteins":  # each group has some of 112 functions, and a tenth of the labels is wrong
        functions = torch.rand(size.classes, 112, generator=generator, device=device) < 0.3
        y = (functions[group] ^ (torch.rand(n, 112, generator=generator, device=device) < 0.1)).long()
    order = torch.randperm(n, generator=generator, device=device)
    counts = [n * part // sum(size.split) for part in size.split[:2]]
    parts = order.split([*counts, n - sum(counts)])
    return Data(x=x, edge_index=graph.edge_index(), y=y), dict(zip(("train", "valid", "test"), parts, strict=True))


def links(
    name: str, scale: float = 1.0, device: str = "cpu", seed: int = 1
) -> tuple[Data, dict[str, dict[str, Tensor]]]:
    """A link prediction task, as OGB has it.

    Returns:
        `Data` with ``num_nodes`` and the training edges, both directions, as ``edge_index``; and ``{"train": {"edge"},
        "valid": {"edge", "edge_neg"}, "test": ...}`` of ``[M, 2]`` pairs. Negative pairs have no edge, and are drawn
        at random.
    """
    size = SIZES[name]
    graph, generator = _draw(name, scale, device, seed)
    n, edges = graph.num_nodes, graph.edge_index()
    pairs = edges[:, edges[0] < edges[1]].t()
    pairs = pairs[torch.randperm(len(pairs), generator=generator, device=device)]
    held = [len(pairs) * part // sum(size.split) for part in size.split[1:]]
    train, valid, test = pairs.split([len(pairs) - sum(held), *held])
    linked = torch.zeros(n, n, dtype=torch.bool, device=device)
    linked[edges[0], edges[1]] = True
    drawn = torch.randint(n, (4 * sum(held), 2), generator=generator, device=device)
    drawn = drawn[~linked[drawn[:, 0], drawn[:, 1]] & (drawn[:, 0] != drawn[:, 1])]
    negatives = drawn[: 2 * min(held)].chunk(2)
    data = Data(edge_index=torch.cat([train.t(), train.t().flip(0)], 1), num_nodes=n)
    split = {"train": {"edge": train}}
    for part, edge, negative in zip(("valid", "test"), (valid, test), negatives, strict=True):
        split[part] = {"edge": edge, "edge_neg": negative}
    return data, split


def accuracy(y_true: Tensor, y_pred: Tensor) -> float:
    """Share of equal entries."""
    return float((y_true == y_pred).double().mean())


def rocauc(y_true: Tensor, y_pred: Tensor) -> float:
    """Area under the ROC curve, the mean over the columns that have both classes; ties count half."""
    areas = []
    for truth, score in zip(y_true.t() == 1, y_pred.double().t(), strict=True):
        positive = int(truth.sum())
        if 0 < positive < len(truth):
            _, place, count = score.unique(return_inverse=True, return_counts=True)
            rank = (count.cumsum(0) - (count - 1) / 2)[place]  # of equal scores: the mean
            above = rank[truth].double().sum() - positive * (positive + 1) / 2
            areas.append(float(above) / (positive * (len(truth) - positive)))
    if not areas:
        raise ValueError("no column has both classes")
    return sum(areas) / len(areas)


def hits(positive: Tensor, negative: Tensor, k: int = 20) -> float:
    """Share of positive scores above the k-th largest negative one."""
    if len(negative) < k:
        return 1.0
    return float((positive > negative.topk(k).values[-1]).double().mean())
