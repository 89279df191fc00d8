"""Graphs and comparisons for the tests under DGL. Imports DGL at the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import gnn_spmm_plugin as gsp


def graph(num_nodes: int = 10, num_edges: int = 30, idtype: torch.dtype = torch.int64, seed: int = 0) -> Any:
    """Parallel edges, self loops, and no edge into the last two nodes."""
    rng = torch.Generator().manual_seed(seed)
    src = torch.randint(num_nodes, (num_edges,), generator=rng)
    dst = torch.randint(num_nodes - 2, (num_edges,), generator=rng)
    return gsp.import_dgl().graph((src, dst), num_nodes=num_nodes, idtype=idtype)


def outcome(f: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """``f(*inputs)`` and the gradients of the inputs; infinities, DGL's result of empty rows, take no part."""
    given = [t.detach().clone().requires_grad_() for t in inputs]
    out = f(*given)
    finite = torch.where(out.isinf(), 0, out)
    weights = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).cos()
    grads = torch.autograd.grad((finite * weights).sum(), given)
    return [out.detach(), *grads]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class Counted:
    """``with Counted() as c``: DGL is patched, and afterwards `c` says how much of it ran here."""

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs

    def __enter__(self) -> Counted:
        self.before = gsp.stats()
        self.patch = gsp.patch_dgl(**self.kwargs)
        return self

    def __exit__(self, *error: object) -> None:
        self.patch.undo()
        now = gsp.stats()
        self.calls = now["kernel_calls"] - self.before["kernel_calls"]
        self.fallbacks = now["fallbacks"] - self.before["fallbacks"]
        self.transposes = now["transposes_built"] - self.before["transposes_built"]
