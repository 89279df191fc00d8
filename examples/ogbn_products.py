"""Node classification on ogbn-products: OGB's data, split and evaluator, PyG's models, accelerated.

    python examples/ogbn_products.py                      # downloads 1.4 GB to ./dataset; the leaderboard: --runs 10
    python examples/ogbn_products.py --stand-in --compare  # a generated graph of that size, before and after
    python examples/ogbn_products.py --model sage --loader neighbor --lr 0.003 --epochs 20  # neighbourhoods

The defaults are those of OGB's baselines (examples/nodeproppred/products/gnn.py of snap-stanford/ogb), which reach
75.64 % (GCN) and 78.50 % (SAGE) on its leaderboard: the whole graph, three layers of 256 channels, dropout 0.5, 300
epochs of Adam at 0.01. The third command is its NeighborSampling.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import common
import loaders
import ogb_data
import torch
import torch.nn.functional as F
from torch import Tensor

import gnn_spmm_plugin as gsp


def main(argv: Sequence[str] | None = None) -> int:
    """Trains; returns the exit code."""
    parser = common.parser(__doc__, epochs=300, lr=0.01, hidden=256)
    ogb_data.add_options(parser, layers=3, dropout=0.5)
    loaders.add_options(parser)
    options = common.parse(parser, argv, {"scale": 0.001, "hidden": 32, "epochs": 20, "batch_size": 128})

    data, split, accuracy = ogb_data.nodes("ogbn-products", options)
    classes = int(data.y.max()) + 1
    batches = loaders.batches(data, split["train"], options)

    def make(accelerate: bool) -> torch.nn.Module:
        model = ogb_data.MODELS[options.model](
            data.num_features,
            options.hidden,
            options.layers,
            classes,
            dropout=options.dropout,
            **ogb_data.extras(options, accelerate, whole_graph=options.loader == "full"),
        ).to(options.device)
        if accelerate:
            model = gsp.accelerate(model)
        return torch.compile(model) if options.compile else model

    def epoch(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        for batch in batches:
            optimizer.zero_grad()
            with ogb_data.autocast(options):
                out = model(batch.x, batch.edge_index)[batch.seeds]
                loss = F.cross_entropy(out, batch.y.squeeze(1))
            loss.backward()
            optimizer.step()
            yield loss

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        with ogb_data.autocast(options):
            predicted = model(data.x, data.edge_index).argmax(1, keepdim=True)
        return {part: accuracy(data.y[nodes], predicted[nodes]) for part, nodes in split.items()}

    return common.run(options, make, epoch, evaluate)


if __name__ == "__main__":
    sys.exit(main())
