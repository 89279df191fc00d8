"""A layer that nobody listed: `accelerate` runs its aggregation in one kernel, and `report` says so.

    python examples/custom_layer.py --compare

The layer weights each edge by how far apart its ends are, with a reach that is learned, so the weights have gradients.
The graph joins each of 1,797 handwritten digits to those that look alike.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import common
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import MessagePassing

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.data import load


class ReachConv(MessagePassing):
    """``W x + mean over the edges of exp(-distance / reach) V x_j``: PyG alone, it knows nothing of the plugin."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(aggr="mean")
        self.own = torch.nn.Linear(in_channels, out_channels)
        self.other = torch.nn.Linear(in_channels, out_channels)
        self.log_reach = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, edge_index: Tensor, distance: Tensor) -> Tensor:
        """``[N, out_channels]``; `distance` has a number for each edge."""
        near = torch.exp(-distance / self.log_reach.exp())
        return self.own(x) + self.propagate(edge_index, x=self.other(x), near=near)

    def message(self, x_j: Tensor, near: Tensor) -> Tensor:
        """One weight per edge times the features of its source, which is never written out when accelerated."""
        return near.view(-1, 1) * x_j


class Net(torch.nn.Module):
    """Two such layers."""

    def __init__(self, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = ReachConv(width, hidden), ReachConv(hidden, classes)

    def forward(self, x: Tensor, edge_index: Tensor, distance: Tensor) -> Tensor:
        """Logits."""
        return self.conv2(self.conv1(x, edge_index, distance).relu(), edge_index, distance)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains; returns the exit code."""
    parser = common.parser(__doc__, epochs=100, lr=0.01, hidden=64)
    options = common.parse(parser, argv, {"epochs": 20, "hidden": 16})

    digits = load("digits_knn10")
    x = (digits.x / digits.x.max()).to(options.device)
    edge_index, y = digits.edge_index.to(options.device), digits.y.to(options.device)
    train, valid, test = ((digits.split == part).to(options.device) for part in (1, 2, 3))
    distance = (x[edge_index[0]] - x[edge_index[1]]).norm(dim=1)
    models = []

    def make(accelerate: bool) -> torch.nn.Module:
        models.append(Net(x.shape[1], options.hidden, digits.num_classes).to(options.device))
        return gsp.accelerate(models[-1]) if accelerate else models[-1]

    def epoch(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, edge_index, distance)[train], y[train])
        loss.backward()
        optimizer.step()
        yield loss

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        right = model(x, edge_index, distance).argmax(1) == y
        return {"valid": float(right[valid].float().mean()), "test": float(right[test].float().mean())}

    code = common.run(options, make, epoch, evaluate)
    print(gsp.report(models[-1]))
    return code


if __name__ == "__main__":
    sys.exit(main())
