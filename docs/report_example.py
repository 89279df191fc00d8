"""The training script whose page is shown in command_line.md: a graph with communities, and one layer that cannot fuse.

gnn-spmm report docs/report_example.py --steps 16 -- --hidden 64
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.nn import GATConv, GCNConv, MessagePassing


class EdgeMLP(MessagePassing):
    """A perceptron of both ends of each edge."""

    def __init__(self, i, o):
        super().__init__(aggr="add")
        self.mlp = torch.nn.Sequential(torch.nn.Linear(2 * i, o), torch.nn.ReLU())

    def forward(self, x, edge_index):
        """``[N, o]``."""
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        """Of an edge."""
        return self.mlp(torch.cat([x_i, x_j], dim=-1))


class Net(torch.nn.Module):
    """Four layers."""

    def __init__(self, i, h, o):
        super().__init__()
        self.conv1 = GCNConv(i, h)
        self.conv2 = GATConv(h, h // 4, heads=4)
        self.edge = EdgeMLP(h, 16)
        self.out = GCNConv(16, o)

    def forward(self, x, edge_index):
        """Logits."""
        x = F.relu(self.conv1(x, edge_index))
        x = F.dropout(F.elu(self.conv2(x, edge_index)), 0.5, self.training)
        return self.out(self.edge(x, edge_index), edge_index)


def draw(n, k):
    """An undirected graph of `n` nodes in `k` communities, a fifth of the edges anywhere; and who belongs where."""
    g = torch.Generator().manual_seed(0)
    member = torch.multinomial(torch.rand(k, generator=g) + 0.2, n, True, generator=g)
    degree = (6 / torch.rand(n, generator=g) ** 0.45).clamp(max=600).long()
    src = torch.arange(n).repeat_interleave(degree)
    order, count = member.argsort(), torch.bincount(member, minlength=k)
    start = count.cumsum(0) - count
    same = order[start[member[src]] + (torch.rand(len(src), generator=g) * count[member[src]]).long()]
    anywhere = torch.randint(n, (len(src),), generator=g)
    dst = torch.where(torch.rand(len(src), generator=g) < 0.8, same, anywhere)
    return torch.cat([torch.stack([src, dst]), torch.stack([dst, src])], 1), member


def main():
    """Trains."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=64)
    args = parser.parse_args()
    edge_index, y = draw(8000, 24)
    x = torch.randn(len(y), 64)
    model = Net(64, args.hidden, 24)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(200):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, edge_index), y)
        loss.backward()
        optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
