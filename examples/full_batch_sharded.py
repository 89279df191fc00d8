"""Full-batch training on ogbn-products with several processes, each of which has a share of the graph.

    torchrun --nproc-per-node 2 examples/full_batch_sharded.py              # downloads 1.4 GB to ./dataset
    torchrun --nproc-per-node 2 examples/full_batch_sharded.py --stand-in   # a generated graph of that size
    python examples/full_batch_sharded.py --stand-in --compare              # one process, before and after

A process owns a block of nodes: their features, labels and the edges into them. What else its edges need comes from the
other processes in each layer, and gradients go back. The loss is the mean over all training nodes; its parts, and so
the gradients of the parameters, are added up. ``--no-accelerate`` runs PyG's layers on what was fetched; accelerated,
GCN and SAGE add up what is there while the rest is on its way.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise

import common
import ogb_data
import processes
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.distributed import ShardedGraph, all_reduce_gradients


class Net(torch.nn.Module):
    """PyG's layers on a share of a graph."""

    def __init__(self, widths: Sequence[int], sharded: ShardedGraph, options: argparse.Namespace, fused: bool) -> None:
        super().__init__()
        make = {
            "gcn": lambda a, b: GCNConv(a, b, normalize=False),
            "sage": SAGEConv,
            "gin": lambda a, b: GINConv(
                torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.ReLU(), torch.nn.Linear(b, b))
            ),
            "gat": lambda a, b: GATConv(a, b, heads=4, concat=False),
        }[options.model]
        self.layers = torch.nn.ModuleList(make(a, b) for a, b in pairwise(widths))
        self.sharded, self.dropout = sharded, options.dropout
        self.model, self.fused, self.overlap = options.model, fused, options.overlap

    def forward(self, x: Tensor) -> Tensor:
        """Classes of the own nodes, from their features."""
        for i, layer in enumerate(self.layers):
            if i:
                x = F.dropout(x.relu(), self.dropout, self.training)
            x = self._overlapped(layer, x) if self.fused and self.model in ("gcn", "sage") else self._plain(layer, x)
        return x

    def _plain(self, layer: torch.nn.Module, x: Tensor) -> Tensor:
        """The layer as it is, on own and fetched features: most take a pair, a GCNConv does not."""
        fetched, edges = self.sharded.exchange(x), self.sharded.edge_index
        if self.model == "gcn":
            return layer(fetched, edges, self.sharded.weight.to(fetched.dtype))[: self.sharded.num_local]
        return layer((fetched, x), edges)

    def _overlapped(self, layer: torch.nn.Module, x: Tensor) -> Tensor:
        """The same as a product: what is fetched is what is narrower, the layer's input or its output."""
        own, reduce = (layer.lin, "sum") if self.model == "gcn" else (layer.lin_l, "mean")
        bias = layer.bias if self.model == "gcn" else own.bias
        if own.out_channels < own.in_channels:
            out = self.sharded.spmm(F.linear(x, own.weight), reduce=reduce, overlap=self.overlap) + bias
        else:
            out = F.linear(self.sharded.spmm(x, reduce=reduce, overlap=self.overlap), own.weight, bias)
        return out if self.model == "gcn" else out + layer.lin_r(x)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains; returns the exit code."""
    parser = common.parser(__doc__, epochs=300, lr=0.01, hidden=256)
    ogb_data.add_options(parser, layers=3, dropout=0.5)
    parser.add_argument("--order", choices=["natural", "community", "hash"], default="community", help="of the nodes")
    parser.add_argument("--exchange", choices=["auto", "halo", "all"], default="auto", help="how features are fetched")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True, help="add up meanwhile")
    parser.add_argument("--cut-on-cpu", action="store_true", help="no GPU ever holds the whole graph or its features")
    options = common.parse(parser, argv, {"scale": 0.001, "hidden": 32, "epochs": 20})
    if options.compile:
        parser.error("--compile: a layer that fetches features is not one graph; train without it")

    with processes.started(options) as ranks:
        data, split, accuracy = ogb_data.nodes("ogbn-products", options, "cpu" if options.cut_on_cpu else None)
        whole = ShardedGraph.from_edge_index(
            data.edge_index, data.num_nodes, order=options.order, exchange=options.exchange
        )
        sharded = whole.to(options.device)
        if options.model == "gcn":
            sharded = sharded.gcn_norm()
        print(sharded)
        widths = [data.num_features, *[options.hidden] * (options.layers - 1), int(data.y.max()) + 1]
        labels = data.y.to(options.device)
        split = {part: nodes.to(options.device) for part, nodes in split.items()}
        training = torch.zeros(data.num_nodes, dtype=torch.bool, device=options.device)
        training[split["train"]] = True
        x, y = sharded.shard(data.x), sharded.shard(labels).squeeze(1)
        chosen = sharded.shard(training).nonzero()[:, 0]
        y = y.index_select(0, chosen)
        del data, whole

        def make(accelerate: bool) -> torch.nn.Module:
            model = Net(widths, sharded, options, accelerate).to(options.device)
            ranks.part_ways()  # the parameters are the same, what is dropped is not
            return gsp.accelerate(model) if accelerate else model

        def epoch(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
            optimizer.zero_grad()
            with ogb_data.autocast(options):
                out = model(x).index_select(0, chosen)
                loss = F.cross_entropy(out, y, reduction="sum") / len(split["train"])
            loss.backward()
            all_reduce_gradients(model)
            optimizer.step()
            yield ranks.sum(loss)

        def evaluate(model: torch.nn.Module) -> dict[str, float]:
            with ogb_data.autocast(options):
                predicted = sharded.gather(model(x).argmax(1, keepdim=True))
            return {part: accuracy(labels[nodes], predicted[nodes]) for part, nodes in split.items()}

        return common.run(options, make, epoch, evaluate)


if __name__ == "__main__":
    sys.exit(main())
