"""The graphs that come with the package, and a user's own edge lists."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Dataset:
    """A graph with what a node classifier needs.

    Attributes:
        name: where it comes from.
        edge_index: ``[2, E]`` int64, row 0 sources, row 1 destinations.
        num_nodes: number of nodes.
        x: ``[num_nodes, F]`` float32 features, as in the source.
        y: ``[num_nodes]`` int64 labels.
        split: ``[num_nodes]`` uint8: 0 none, 1 training, 2 validation, 3 test.
        real: whether features and labels are real; else they are noise, and accuracy means nothing.
    """

    name: str
    edge_index: Tensor
    num_nodes: int
    x: Tensor
    y: Tensor
    split: Tensor
    real: bool = True

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return int(self.y.max()) + 1


def names() -> tuple[str, ...]:
    """The graphs that come with the package; the first is the default."""
    found = (p.stem for p in _HERE.glob("*.npz"))
    return tuple(sorted((n for n in found if not n.startswith("decider_")), key=lambda name: (name != "cora", name)))


def load(name: str) -> Dataset:
    """One of `names`.

    Raises:
        ValueError: there is no graph of that name; the message lists them.
    """
    if name not in names():
        raise ValueError(f"unknown graph {name!r}; there are {', '.join(names())}")
    with np.load(_HERE / f"{name}.npz", allow_pickle=False) as z:
        d = {key: z[key] for key in z.files}
    n = int(d["num_nodes"])
    row = np.repeat(np.arange(n, dtype=np.int64), d["upper_degree"])
    col = d["upper_col"].astype(np.int64)
    off = row != col
    edges = np.stack([np.concatenate([row, col[off]]), np.concatenate([col, row[off]])])
    edges = edges[:, np.lexsort((edges[0], edges[1]))]  # by destination, as PyG's loaders have it
    if "x" in d:
        x = d["x"].astype(np.float32)
    else:
        x = np.zeros((n, int(d["x_width"])), np.float32)
        x[np.repeat(np.arange(n), d["x_degree"]), d["x_col"]] = 1
    split = d["split"] if "split" in d else random_split(n)
    return Dataset(
        name,
        torch.from_numpy(edges),
        n,
        torch.from_numpy(x),
        torch.from_numpy(d["y"].astype(np.int64)),
        torch.from_numpy(split),
    )


def random_split(num_nodes: int, seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """``[num_nodes]`` uint8: 60 % training, 20 % validation, 20 % test."""
    split = np.full(num_nodes, 1, np.uint8)
    order = np.random.default_rng(seed).permutation(num_nodes)
    split[order[int(0.6 * num_nodes) :]] = 2
    split[order[int(0.8 * num_nodes) :]] = 3
    return split


def with_noise(name: str, edge_index: Tensor, num_nodes: int, width: int = 64, classes: int = 8) -> Dataset:
    """A graph that has neither features nor labels, with random ones."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num_nodes, width, generator=generator)
    y = torch.randint(classes, (num_nodes,), generator=generator)
    y[0] = classes - 1
    return Dataset(name, edge_index, num_nodes, x, y, torch.from_numpy(random_split(num_nodes)), real=False)


__all__ = ["Dataset", "load", "names", "random_split", "with_noise"]
