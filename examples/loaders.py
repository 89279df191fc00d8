"""What a node classifier trains on in an epoch: the whole graph, or neighbourhoods of some nodes after another."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

from gnn_spmm_plugin.bench.graphs import Csr
from gnn_spmm_plugin.bench.minibatch import sample


def add_options(made: argparse.ArgumentParser) -> None:
    """Options of the examples that can train on neighbourhoods."""
    made.add_argument("--loader", choices=["full", "neighbor"], default="full")
    add_sampling_options(made)


def add_sampling_options(made: argparse.ArgumentParser) -> None:
    """Options of how neighbourhoods are drawn."""
    made.add_argument("--batch-size", type=int, default=1024, help="nodes whose neighbourhoods are a batch")
    made.add_argument("--neighbors", type=int, nargs="+", default=[15, 10, 5], help="how many, at each distance")


class Whole:
    """One batch: the graph, and the nodes to learn from as ``seeds``."""

    def __init__(self, data: Data, nodes: Tensor) -> None:
        self.batch = Data(x=data.x, edge_index=data.edge_index, y=data.y[nodes], seeds=nodes)

    def __iter__(self) -> Iterator[Data]:
        yield self.batch


class Neighbourhoods:
    """Batches of PyG's `NeighborLoader`, whose ``seeds`` are the first nodes.

    `NeighborLoader` needs pyg-lib or torch-sparse. Where neither is installed, a sampler in plain torch takes its
    place, which draws with replacement and runs on the device that the graph is on.
    """

    def __init__(self, data: Data, nodes: Tensor, neighbors: Sequence[int], batch_size: int) -> None:
        self.data, self.nodes, self.neighbors, self.batch_size = data, nodes, neighbors, batch_size
        self.loader: NeighborLoader | None = None
        if WITH_PYG_LIB or WITH_TORCH_SPARSE:
            whole = Data(x=data.x.cpu(), edge_index=data.edge_index.cpu(), y=data.y.cpu())
            self.loader = NeighborLoader(whole, list(neighbors), nodes.cpu(), batch_size=batch_size, shuffle=True)
            return
        print(
            "neither pyg-lib nor torch-sparse is installed, which PyG's NeighborLoader needs: sampling in plain torch"
        )
        col, order = data.edge_index[1].sort(stable=True)
        rowptr = torch.searchsorted(col, torch.arange(data.num_nodes + 1, device=col.device))
        self.structure = Csr(rowptr.int(), data.edge_index[0, order].int())

    def __iter__(self) -> Iterator[Data]:
        if self.loader is not None:
            for batch in self.loader:
                seeds = slice(0, batch.batch_size)
                yield Data(x=batch.x, edge_index=batch.edge_index, y=batch.y[seeds], seeds=seeds).to(self.nodes.device)
            return
        device = self.nodes.device
        generator = torch.Generator(device).manual_seed(int(torch.randint(2**62, ())))
        order = torch.randperm(len(self.nodes), generator=generator, device=device)
        for seeds in self.nodes[order].split(self.batch_size):
            found, edge_index = sample(self.structure, seeds, self.neighbors, generator)
            yield Data(x=self.data.x[found], edge_index=edge_index, y=self.data.y[seeds], seeds=slice(0, len(seeds)))


def batches(data: Data, nodes: Tensor, options: argparse.Namespace) -> Whole | Neighbourhoods:
    """What ``--loader`` asks for; each batch has ``x``, ``edge_index``, ``seeds`` and ``y`` of these."""
    if options.loader == "full":
        return Whole(data, nodes)
    return Neighbourhoods(data, nodes, options.neighbors, options.batch_size)
