"""Link prediction on ogbl-ddi: OGB's data, split and evaluator, PyG's models, accelerated.

    python examples/ogbl_ddi.py                       # downloads to ./dataset; --runs 10 for the leaderboard
    python examples/ogbl_ddi.py --stand-in --compare  # a generated graph of that size, before and after

The defaults are those of OGB's baselines (examples/linkproppred/ddi/gnn.py of snap-stanford/ogb), which reach a Hits@20
of 37.07 % (GCN) and 53.90 % (SAGE) on its leaderboard: learned embeddings, two layers of 256 channels, dropout 0.5, 200
epochs of Adam at 0.005 in batches of 65,536 edges and as many non-edges, gradients clipped to a norm of 1, evaluated
after each fifth epoch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import common
import ogb_data
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch_geometric.nn import MLP

import gnn_spmm_plugin as gsp


class LinkPredictor(torch.nn.Module):
    """A learned embedding per node, a GNN over them, and a perceptron that scores pairs of nodes."""

    def __init__(self, num_nodes: int, options: argparse.Namespace, **extras: Any) -> None:
        super().__init__()
        hidden, layers, dropout = options.hidden, options.layers, options.dropout
        self.embedding = torch.nn.Embedding(num_nodes, hidden)
        torch.nn.init.xavier_uniform_(self.embedding.weight)
        self.gnn = ogb_data.MODELS[options.model](hidden, hidden, layers, hidden, dropout=dropout, **extras)
        self.scores = MLP([hidden] * layers + [1], dropout=dropout, norm=None)

    def forward(self, edge_index: Tensor) -> Tensor:
        """What is known of each node, ``[N, hidden]``."""
        return self.gnn(self.embedding.weight, edge_index)

    def score(self, known: Tensor, pairs: Tensor) -> Tensor:
        """Logits, one for each of the pairs ``[2, M]``."""
        return self.scores(known[pairs[0]] * known[pairs[1]]).squeeze(1)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains; returns the exit code."""
    parser = common.parser(__doc__, epochs=200, lr=0.005, hidden=256)
    ogb_data.add_options(parser, layers=2, dropout=0.5, eval_steps=5)
    parser.add_argument("--batch-size", type=int, default=64 * 1024, help="edges of a batch")
    options = common.parse(parser, argv, {"scale": 0.1, "hidden": 32, "epochs": 20, "batch_size": 4096})

    data, split, hits = ogb_data.links("ogbl-ddi", options)
    edges = split["train"]["edge"].t()
    apart = torch.ones(data.num_nodes, data.num_nodes, dtype=torch.bool, device=edges.device).fill_diagonal_(False)
    apart[data.edge_index[0], data.edge_index[1]] = False

    def make(accelerate: bool) -> torch.nn.Module:
        model = LinkPredictor(data.num_nodes, options, **ogb_data.extras(options, accelerate)).to(options.device)
        if accelerate:
            model = gsp.accelerate(model)
        if options.compile:
            model.compile()
        return model

    def epoch(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        for batch in torch.randperm(edges.shape[1], device=edges.device).split(options.batch_size):
            optimizer.zero_grad()
            # PyG's negative_sampling draws by Python's random.sample, which takes longer than the rest of a step.
            negative = torch.randint(data.num_nodes, (2, 2 * len(batch)), device=edges.device)
            negative = negative[:, apart[negative[0], negative[1]]][:, : len(batch)]
            with ogb_data.autocast(options):
                known = model(data.edge_index)
                loss = -F.logsigmoid(model.score(known, edges[:, batch])).mean()
                loss = loss - F.logsigmoid(-model.score(known, negative)).mean()
            loss.backward()
            for part in model.children():
                clip_grad_norm_(part.parameters(), 1.0)
            optimizer.step()
            yield loss

    sample = edges[:, torch.randperm(edges.shape[1], device=edges.device)[: len(split["valid"]["edge"])]]

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        with ogb_data.autocast(options):
            known = model(data.edge_index)

        def scores(pairs: Tensor) -> Tensor:
            with ogb_data.autocast(options):
                parts = [model.score(known, part) for part in pairs.split(options.batch_size, 1)]
            return torch.cat(parts).float()

        against = {part: scores(split[part]["edge_neg"].t()) for part in ("valid", "test")}
        return {
            "train": hits(scores(sample), against["valid"]),
            **{part: hits(scores(split[part]["edge"].t()), against[part]) for part in ("valid", "test")},
        }

    return common.run(options, make, epoch, evaluate)


if __name__ == "__main__":
    sys.exit(main())
