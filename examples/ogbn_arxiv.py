"""Node classification on ogbn-arxiv: OGB's data, split and evaluator, PyG's models, accelerated.

    python examples/ogbn_arxiv.py                       # downloads 80 MB to ./dataset; --runs 10 for the leaderboard
    python examples/ogbn_arxiv.py --stand-in --compare  # a generated graph of that size, before and after

The defaults are those of OGB's baselines (examples/nodeproppred/arxiv/gnn.py of snap-stanford/ogb), which reach 71.74 %
(GCN) and 71.49 % (SAGE) on its leaderboard: three layers of 256 channels with batch norm, dropout 0.5, 500 epochs of
Adam at 0.01, edges made symmetric.
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
from torch_geometric.utils import to_undirected

import gnn_spmm_plugin as gsp


def main(argv: Sequence[str] | None = None) -> int:
    """Trains; returns the exit code."""
    parser = common.parser(__doc__, epochs=500, lr=0.01, hidden=256)
    ogb_data.add_options(parser, layers=3, dropout=0.5)
    loaders.add_options(parser)
    options = common.parse(parser, argv, {"scale": 0.02, "hidden": 32, "epochs": 20, "batch_size": 128})

    data, split, accuracy = ogb_data.nodes("ogbn-arxiv", options)
    data.edge_index = to_undirected(data.edge_index)
    classes = int(data.y.max()) + 1
    batches = loaders.batches(data, split["train"], options)

    def make(accelerate: bool) -> torch.nn.Module:
        model = ogb_data.MODELS[options.model](
            data.num_features,
            options.hidden,
            options.layers,
            classes,
            dropout=options.dropout,
            norm="batch_norm",
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
