"""Nodes and edges of several kinds: RGCN on papers, authors and venues, or GraphSAGE made heterogeneous.

    python examples/hetero_rgcn.py --compare
    python examples/hetero_rgcn.py --compare --model sage

All relations of RGCNConv run as one product. The graph is generated: papers have a subject, which authors, citations
and venues mostly keep to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import common
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.nn import GraphSAGE, RGCNConv, to_hetero
from torch_geometric.transforms import ToUndirected

import gnn_spmm_plugin as gsp

SUBJECTS = 10


def draw(papers: int, width: int = 32) -> HeteroData:
    """Papers, half as many authors, one venue for 100 papers; the subject of papers is what is to be predicted."""
    counts = {"paper": papers, "author": papers // 2, "venue": max(papers // 100, SUBJECTS)}
    subject = {kind: torch.randint(SUBJECTS, (n,)) for kind, n in counts.items()}
    centre = torch.randn(SUBJECTS, width)
    data = HeteroData()
    for kind, n in counts.items():
        data[kind].x = torch.randn(n, width) + 0.3 * centre[subject[kind]]
    data["paper"].y = subject["paper"]

    def edges(source: str, target: str, each: int) -> Tensor:
        """`each` edges of every source; two thirds go to targets of its subject."""
        order = subject[target].argsort()
        first = torch.searchsorted(subject[target][order], torch.arange(SUBJECTS + 1))
        start = torch.arange(counts[source]).repeat_interleave(each)
        begin, end = first[subject[source][start]], first[subject[source][start] + 1]
        same = order[(begin + (torch.rand(len(start)) * (end - begin)).long()).clamp(max=counts[target] - 1)]
        other = torch.randint(counts[target], (len(start),))
        return torch.stack([start, torch.where(torch.rand(len(start)) < 2 / 3, same, other)])

    data["author", "writes", "paper"].edge_index = edges("author", "paper", 6)
    data["paper", "cites", "paper"].edge_index = edges("paper", "paper", 10)
    data["paper", "appears_in", "venue"].edge_index = edges("paper", "venue", 1)
    return ToUndirected(merge=False)(data)


class RGCN(torch.nn.Module):
    """Two layers over the edges of all kinds at once, with a matrix for each kind."""

    def __init__(self, width: int, hidden: int, relations: int) -> None:
        super().__init__()
        self.conv1 = RGCNConv(width, hidden, relations)
        self.conv2 = RGCNConv(hidden, SUBJECTS, relations)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        """Logits of all nodes, whatever their kind."""
        return self.conv2(self.conv1(x, edge_index, edge_type).relu(), edge_index, edge_type)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains; returns the exit code."""
    parser = common.parser(__doc__, epochs=30, lr=0.01, hidden=64)
    parser.add_argument("--model", choices=["rgcn", "sage"], default="rgcn")
    parser.add_argument("--papers", type=int, default=20_000)
    options = common.parse(parser, argv, {"papers": 500, "hidden": 16, "epochs": 20})

    data = draw(options.papers).to(options.device)
    y = data["paper"].y
    order = torch.randperm(len(y), device=y.device)
    split = dict(zip(("train", "valid", "test"), order.chunk(3), strict=True))
    one = data.to_homogeneous()
    papers = (one.node_type == data.node_types.index("paper")).nonzero().flatten()
    print(f"{one.num_nodes:,} nodes, {one.num_edges:,} edges of {len(data.edge_types)} kinds, on {options.device}")

    def make(accelerate: bool) -> torch.nn.Module:
        if options.model == "rgcn":
            model = RGCN(one.num_features, options.hidden, len(data.edge_types))
        else:
            sage = GraphSAGE((-1, -1), options.hidden, num_layers=2, out_channels=SUBJECTS)
            model = to_hetero(sage, data.metadata())
        model = model.to(options.device)
        with torch.no_grad():
            logits(model)  # the lazy layers of `to_hetero` learn their widths
        return gsp.accelerate(model) if accelerate else model

    def logits(model: torch.nn.Module) -> Tensor:
        if options.model == "rgcn":
            return model(one.x, one.edge_index, one.edge_type)[papers]
        return model(data.x_dict, data.edge_index_dict)["paper"]

    def epoch(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        optimizer.zero_grad()
        loss = F.cross_entropy(logits(model)[split["train"]], y[split["train"]])
        loss.backward()
        optimizer.step()
        yield loss

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        right = logits(model).argmax(1) == y
        return {part: float(right[split[part]].float().mean()) for part in ("valid", "test")}

    return common.run(options, make, epoch, evaluate)


if __name__ == "__main__":
    sys.exit(main())
