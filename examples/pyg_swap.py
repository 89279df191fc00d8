"""One PyG model, before and after `accelerate`: the same losses, in less time and memory.

    python examples/pyg_swap.py --scale 1

A plain PyG model in a plain training loop, but for one line in `make`. The graph is generated: a stand-in for
ogbn-arxiv, or a share of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import common
import stand_in
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GCN

import gnn_spmm_plugin as gsp


def main(argv: Sequence[str] | None = None) -> int:
    """Trains twice; returns the exit code."""
    parser = common.parser(__doc__, epochs=30, lr=0.01, hidden=128, compare=True)
    parser.add_argument("--scale", type=float, default=0.2, help="share of the stand-in's nodes and edges")
    options = common.parse(parser, argv, {"scale": 0.02, "hidden": 32, "epochs": 20})

    data, split = stand_in.nodes("ogbn-arxiv", options.scale, options.device)
    y = data.y.squeeze(1)
    print(f"{data.num_nodes:,} nodes, {data.num_edges:,} edges, on {options.device}")

    def make(accelerate: bool) -> torch.nn.Module:
        model = GCN(data.num_features, options.hidden, num_layers=3, out_channels=40).to(options.device)
        return gsp.accelerate(model) if accelerate else model  # this is all

    def epoch(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[split["train"]], y[split["train"]])
        loss.backward()
        optimizer.step()
        yield loss

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        right = model(data.x, data.edge_index).argmax(1) == y
        return {part: float(right[split[part]].float().mean()) for part in ("valid", "test")}

    return common.run(options, make, epoch, evaluate)


if __name__ == "__main__":
    sys.exit(main())
