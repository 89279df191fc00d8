"""Mini-batch training on ogbn-products with several processes: PyG's loader and models, DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/ogbn_products_ddp.py              # downloads 1.4 GB to ./dataset
    torchrun --nproc-per-node 2 examples/ogbn_products_ddp.py --stand-in   # a generated graph of that size
    python examples/ogbn_products_ddp.py --stand-in --compare              # one process, before and after

Every process has the whole graph and a share of the training nodes, and trains on neighbourhoods of its share. A step
is a batch on each, and as DistributedDataParallel averages gradients, one of the mean over all of them. Each evaluates
on the whole graph, so that none waits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import common
import loaders
import ogb_data
import processes
import torch
import torch.nn.functional as F
from torch import Tensor

import gnn_spmm_plugin as gsp


def main(argv: Sequence[str] | None = None) -> int:
    """Trains; returns the exit code."""
    parser = common.parser(__doc__, epochs=20, lr=0.003, hidden=256)
    ogb_data.add_options(parser, layers=3, dropout=0.5)
    loaders.add_sampling_options(parser)
    parser.set_defaults(model="sage")
    options = common.parse(parser, argv, {"scale": 0.001, "hidden": 32, "epochs": 20, "batch_size": 64})

    with processes.started(options) as ranks:
        data, split, accuracy = ogb_data.nodes("ogbn-products", options)
        classes = int(data.y.max()) + 1
        own = ranks.share(split["train"], options.seed)
        batches = loaders.Neighbourhoods(data, own, options.neighbors, options.batch_size)

        def make(accelerate: bool) -> torch.nn.Module:
            model = ogb_data.MODELS[options.model](
                data.num_features,
                options.hidden,
                options.layers,
                classes,
                dropout=options.dropout,
                **ogb_data.extras(options, accelerate, whole_graph=False),
            ).to(options.device)
            ranks.part_ways()  # the parameters are the same, what is sampled and dropped is not
            if accelerate:
                model = gsp.accelerate(model)
            return ranks.parallel(torch.compile(model) if options.compile else model)

        def epoch(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
            for batch in batches:
                optimizer.zero_grad()
                with ogb_data.autocast(options):
                    out = model(batch.x, batch.edge_index)[batch.seeds]
                    loss = F.cross_entropy(out, batch.y.squeeze(1))
                loss.backward()
                optimizer.step()
                yield ranks.mean(loss)

        def evaluate(model: torch.nn.Module) -> dict[str, float]:
            with ogb_data.autocast(options):
                plain = model.module if ranks.size > 1 else model
                predicted = plain(data.x, data.edge_index).argmax(1, keepdim=True)
            return {part: accuracy(data.y[nodes], predicted[nodes]) for part, nodes in split.items()}

        return common.run(options, make, epoch, evaluate)


if __name__ == "__main__":
    sys.exit(main())
