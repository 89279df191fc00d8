"""Many small graphs in batches: GIN tells rings, trees, hubs and strips apart, by structure alone.

    python examples/graph_classification.py --compare

Each batch is a graph that was never seen before and is used once: preparing it must be cheap, and there is less to gain
than on one large graph.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import common
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, MLP, global_add_pool
from torch_geometric.utils import to_undirected

import gnn_spmm_plugin as gsp

KINDS = ("ring", "tree", "hubs", "strip")


def draw(kind: int) -> Data:
    """A graph of 20 to 59 nodes of one of the kinds, with a few random edges; features are noise and a constant."""
    n = int(torch.randint(20, 60, ()))
    node = torch.arange(1, n)
    edges = {
        "ring": torch.stack([torch.arange(n), torch.arange(1, n + 1) % n]),
        "tree": torch.stack([node, (torch.rand(n - 1) * node).long()]),  # each hangs on one before it
        "hubs": torch.stack([node, torch.randint(3, (n - 1,))]),
        "strip": torch.cat([torch.stack([node - 1, node]), torch.stack([node[:-1] - 1, node[1:]])], 1),
    }[KINDS[kind]]
    edges = torch.cat([edges, torch.randint(n, (2, n // 10))], 1)
    x = torch.cat([torch.ones(n, 1), torch.randn(n, 15)], 1)
    return Data(x=x, edge_index=to_undirected(edges, num_nodes=n), y=torch.tensor([kind]))


class Net(torch.nn.Module):
    """GIN on the nodes, their sum, and a perceptron."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gnn = GIN(16, hidden, num_layers=3, norm="batch_norm")
        self.head = MLP([hidden, hidden, len(KINDS)], dropout=0.5)

    def forward(self, batch: Data) -> Tensor:
        """Logits, a row per graph."""
        return self.head(global_add_pool(self.gnn(batch.x, batch.edge_index), batch.batch, batch.num_graphs))


def main(argv: Sequence[str] | None = None) -> int:
    """Trains; returns the exit code."""
    parser = common.parser(__doc__, epochs=10, lr=0.005, hidden=64)
    parser.add_argument("--graphs", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=128)
    options = common.parse(parser, argv, {"graphs": 400, "hidden": 16, "epochs": 5, "batch_size": 32})

    graphs = [draw(i % len(KINDS)) for i in range(options.graphs)]
    cut = [len(graphs) * part // 10 for part in (8, 9)]
    train = DataLoader(graphs[: cut[0]], options.batch_size, shuffle=True)
    held = {"valid": DataLoader(graphs[cut[0] : cut[1]], 1024), "test": DataLoader(graphs[cut[1] :], 1024)}
    print(f"{len(graphs):,} graphs, {sum(g.num_edges for g in graphs):,} edges, on {options.device}")

    def make(accelerate: bool) -> torch.nn.Module:
        model = Net(options.hidden).to(options.device)
        return gsp.accelerate(model) if accelerate else model

    def epoch(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        for batch in train:
            batch = batch.to(options.device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch), batch.y)
            loss.backward()
            optimizer.step()
            yield loss

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        def right(loader: DataLoader) -> Tensor:
            batches = (batch.to(options.device) for batch in loader)
            return torch.cat([model(batch).argmax(1) == batch.y for batch in batches])

        return {part: float(right(loader).float().mean()) for part, loader in held.items()}

    return common.run(options, make, epoch, evaluate)


if __name__ == "__main__":
    sys.exit(main())
