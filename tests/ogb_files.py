"""Tiny data sets in the files that OGB's archives unpack to, as its own loaders read them."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data


def _csv(path: Path, rows: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        np.savetxt(file, rows.numpy(), fmt="%.6g" if rows.is_floating_point() else "%d", delimiter=",")


def _graph(folder: Path, edge_index: Tensor, num_nodes: int) -> None:
    _csv(folder / "raw/edge.csv.gz", edge_index.t())
    _csv(folder / "raw/num-node-list.csv.gz", torch.tensor([num_nodes]))
    _csv(folder / "raw/num-edge-list.csv.gz", torch.tensor([edge_index.shape[1]]))
    (folder / "RELEASE_v1.txt").write_text("version 1\n")


def write_nodes(root: Path, name: str, data: Data, split: dict[str, Tensor]) -> None:
    """ogbn-arxiv, -products or -proteins, with one direction of each edge: the loader or the example adds the other."""
    folder = root / name.replace("-", "_")
    edge_index = data.edge_index[:, data.edge_index[0] < data.edge_index[1]]
    _graph(folder, edge_index, data.num_nodes)
    _csv(folder / "raw/node-label.csv.gz", data.y)
    if name == "ogbn-proteins":  # features of edges instead, and under a name that OGB's loader changes
        _csv(folder / "raw/edge-feat.csv.gz", (data.x[edge_index[0]] + data.x[edge_index[1]]) / 2)
        _csv(folder / "raw/species.csv.gz", torch.full((data.num_nodes, 1), 3702))
    else:
        _csv(folder / "raw/node-feat.csv.gz", data.x)
    if name == "ogbn-arxiv":
        _csv(folder / "raw/node_year.csv.gz", torch.full((data.num_nodes, 1), 2017))
    kind = {"ogbn-arxiv": "time", "ogbn-products": "sales_ranking", "ogbn-proteins": "species"}[name]
    for part, nodes in split.items():
        _csv(folder / "split" / kind / f"{part}.csv.gz", nodes)


def write_ddi(root: Path, data: Data, split: dict[str, dict[str, Tensor]]) -> None:
    """ogbl-ddi; its split was pickled by a torch and a numpy of 2020."""
    folder = root / "ogbl_ddi"
    _graph(folder, data.edge_index[:, data.edge_index[0] < data.edge_index[1]], data.num_nodes)
    (folder / "split/target").mkdir(parents=True)
    for part, edges in split.items():
        path = folder / "split/target" / f"{part}.pt"
        torch.save({k: v.numpy() for k, v in edges.items()}, path, _use_new_zipfile_serialization=False)
        path.write_bytes(path.read_bytes().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))
