"""One DGL model, before and after `patch_dgl`: the same losses, in less time.

    pip install ".[dgl]" && python examples/dgl_patch.py

``--tiny`` takes a second. With a GPU and PyPI's DGL, which is built without CUDA, ``--device cuda`` leaves the graph on
the CPU and trains on the GPU; there is no "before" then.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import trange

import gnn_spmm_plugin as gsp

try:
    dgl = gsp.import_dgl()  # PyPI's wheel does not import under this torch by itself
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
from dgl.nn import GATConv, SAGEConv


class Net(torch.nn.Module):
    """A layer of attention, and one of GraphSAGE."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.attention = GATConv(width, 16, num_heads=4)
        self.sage = SAGEConv(64, classes, "pool")

    def forward(self, g: Any, x: Tensor) -> Tensor:
        """Scores, ``[N, classes]``."""
        return self.sage(g, self.attention(g, x).flatten(1).relu())


def train(g: Any, steps: int, seed: int, label: str) -> tuple[list[float], float]:
    """The losses, and milliseconds of a step after the first two."""
    torch.manual_seed(seed)
    x, labels = g.ndata["x"], g.ndata["label"]
    net = Net(x.shape[1], 10).to(x.device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses, start = [], 0.0
    for step in trange(steps, desc=label, leave=False, disable=None):
        start = time.perf_counter() if step == 2 else start
        loss = cross_entropy(net(g, x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, (time.perf_counter() - start) / (steps - 2) * 1e3


def main() -> int:
    """Trains, patches, trains again; returns the exit code, 1 where the losses differ."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--edges", type=int, default=500_000)
    parser.add_argument("--steps", type=int, default=8, help="3 or more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tiny", action="store_true", help="a small graph, for a quick look")
    args = parser.parse_args()
    nodes, edges, steps = (500, 4000, 4) if args.tiny else (args.nodes, args.edges, max(args.steps, 3))

    torch.manual_seed(args.seed)
    g = dgl.add_self_loop(dgl.rand_graph(nodes, edges))
    g.ndata["x"], g.ndata["label"] = torch.randn(nodes, 64), torch.randint(10, (nodes,))
    if args.device == "cuda":
        with gsp.patch_dgl(cuda_features=True):
            losses, ours = train(g.to("cuda"), steps, args.seed, "patched")
        print(f"losses {losses[0]:.4f} to {losses[-1]:.4f}, {ours:.1f} ms a step")
        return 0

    before, theirs = train(g, steps, args.seed, "DGL")
    with gsp.patch_dgl():
        after, ours = train(g, steps, args.seed, "patched")
    apart = max(abs(a - b) for a, b in zip(before, after, strict=True))
    print(f"losses {before[0]:.4f} to {before[-1]:.4f}, the same within {apart:.0e}")
    print(f"DGL {theirs:.1f} ms a step, patched {ours:.1f} ms: {theirs / ours:.1f} times as fast")
    print(f"kernel calls {gsp.stats()['kernel_calls']}, operations left to DGL {gsp.stats()['fallbacks']}")
    return int(apart > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
