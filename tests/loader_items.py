"""What workers of a DataLoader make. A spawned worker imports it by name, which it cannot do with a test's own file."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

import gnn_spmm_plugin as gsp


class Graphs(Dataset):  # type: ignore[type-arg]
    """Graphs, products that the worker computes, and index tensors."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[gsp.Graph, Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(i)
        index = torch.randint(9, (2, 20), generator=generator)
        x = torch.randn(9, 3, generator=generator, dtype=torch.float64).requires_grad_()
        g = gsp.Graph.from_edge_index(index, 9).with_weight(torch.rand(20, generator=generator, dtype=torch.float64))
        out = gsp.spmm(g, x)
        assert isinstance(out, Tensor)
        torch.autograd.set_multithreading_enabled(False)  # its threads are not there after a fork
        out.square().sum().backward()
        assert x.grad is not None
        return g, index, out.detach(), x.grad


def alone(items: list[Any]) -> Any:
    """A batch of one."""
    return items[0]
