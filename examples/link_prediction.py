"""Link prediction on a graph that comes with the package: a GCN encoder, dot products of what it says of both ends.

    python examples/link_prediction.py --compare --dataset tolokers

A tenth of the edges is hidden for the test; the figure is the area under the ROC curve.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import common
import torch
import torch.nn.functional as F
from stand_in import rocauc
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCN
from torch_geometric.transforms import RandomLinkSplit
from torch_geometric.utils import negative_sampling

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.data import load, names


def scores(known: Tensor, pairs: Tensor) -> Tensor:
    """Logits of the pairs ``[2, M]``."""
    return (known.index_select(0, pairs[0]) * known.index_select(0, pairs[1])).sum(1)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains; returns the exit code."""
    parser = common.parser(__doc__, epochs=100, lr=0.01, hidden=64)
    parser.add_argument("--dataset", choices=names(), default="cora")
    options = common.parse(parser, argv, {"epochs": 20, "hidden": 16})

    given = load(options.dataset)
    x = given.x / given.x.sum(1, keepdim=True).clamp(min=1)
    hide = RandomLinkSplit(num_val=0.05, num_test=0.1, is_undirected=True, add_negative_train_samples=False)
    train, valid, test = (part.to(options.device) for part in hide(Data(x=x, edge_index=given.edge_index)))
    print(f"{options.dataset}: {given.num_nodes:,} nodes, {train.num_edges:,} edges to learn from, on {options.device}")

    def make(accelerate: bool) -> torch.nn.Module:
        model = GCN(train.num_features, options.hidden, num_layers=2).to(options.device)
        return gsp.accelerate(model) if accelerate else model

    def epoch(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        optimizer.zero_grad()
        known = model(train.x, train.edge_index)
        there = train.edge_label_index
        pairs = torch.cat([there, negative_sampling(train.edge_index, train.num_nodes, there.shape[1])], 1)
        linked = (torch.arange(pairs.shape[1], device=pairs.device) < there.shape[1]).float()
        loss = F.binary_cross_entropy_with_logits(scores(known, pairs), linked)
        loss.backward()
        optimizer.step()
        yield loss

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        def area(part: Data) -> float:
            found = scores(model(part.x, part.edge_index), part.edge_label_index)
            return rocauc(part.edge_label.unsqueeze(1), found.unsqueeze(1))

        return {"valid": area(valid), "test": area(test)}

    return common.run(options, make, epoch, evaluate)


if __name__ == "__main__":
    sys.exit(main())
