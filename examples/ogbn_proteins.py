"""112 functions of proteins on ogbn-proteins: OGB's data, split and evaluator, PyG's models, accelerated.

    python examples/ogbn_proteins.py                       # downloads to ./dataset; --runs 10 for the leaderboard
    python examples/ogbn_proteins.py --stand-in --compare  # a generated graph of that size, before and after

The defaults are those of OGB's baselines (examples/nodeproppred/proteins/gnn.py of snap-stanford/ogb), which reach a
ROC-AUC of 72.51 % (GCN) and 77.68 % (SAGE) on its leaderboard: a node has the mean features of the edges into it, three
layers of 256 channels, no dropout, 1000 epochs of Adam at 0.01, evaluated after each fifth.
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
from torch_geometric.utils import scatter

import gnn_spmm_plugin as gsp


def main(argv: Sequence[str] | None = None) -> int:
    """Trains; returns the exit code."""
    parser = common.parser(__doc__, epochs=1000, lr=0.01, hidden=256)
    ogb_data.add_options(parser, layers=3, dropout=0.0, eval_steps=5)
    loaders.add_options(parser)
    options = common.parse(parser, argv, {"scale": 0.01, "hidden": 32, "epochs": 20, "batch_size": 128})

    data, split, rocauc = ogb_data.nodes("ogbn-proteins", options)
    if not options.stand_in:
        data.x = scatter(data.edge_attr, data.edge_index[1], dim_size=data.num_nodes, reduce="mean")
    batches = loaders.batches(data, split["train"], options)

    def make(accelerate: bool) -> torch.nn.Module:
        model = ogb_data.MODELS[options.model](
            data.num_features,
            options.hidden,
            options.layers,
            data.y.shape[1],
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
                loss = F.binary_cross_entropy_with_logits(out, batch.y.to(out.dtype))
            loss.backward()
            optimizer.step()
            yield loss

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        with ogb_data.autocast(options):
            predicted = model(data.x, data.edge_index).float()
        return {part: rocauc(data.y[nodes], predicted[nodes]) for part, nodes in split.items()}

    return common.run(options, make, epoch, evaluate)


if __name__ == "__main__":
    sys.exit(main())
