"""Layers, graphs and comparisons for the PyG tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import _native

try:
    from torch_geometric import nn as tg
    from torch_geometric.nn import MessagePassing
except ImportError:  # the tests are skipped then
    tg, MessagePassing = None, nn.Module


def random_graph(num_src: int, num_dst: int, num_edges: int, seed: int = 0, device: str = "cpu") -> Tensor:
    """Unsorted, with duplicates, self loops and, at the end, destinations and sources without edges."""
    g = torch.Generator().manual_seed(seed)
    src = torch.randint(max(num_src - 2, 1), (num_edges,), generator=g)
    dst = torch.randint(max(num_dst - 2, 1), (num_edges,), generator=g)
    return torch.stack([src, dst]).to(device)


def leaves(*tensors: Tensor | None) -> list[Tensor | None]:
    """Copies that ask for gradients, where they are floating point."""
    return [t if t is None or not t.is_floating_point() else t.detach().clone().requires_grad_() for t in tensors]


def outputs_and_gradients(layer: nn.Module, call: Callable[..., Any], *inputs: Tensor | None) -> list[Tensor]:
    """What `call` of copies of `inputs` returns, and its gradients by them and by the parameters of `layer`."""
    layer.zero_grad()
    copies = leaves(*inputs)
    out = call(*copies)
    outs = list(out.values()) if isinstance(out, dict) else list(out) if isinstance(out, (tuple, list)) else [out]
    g = torch.Generator().manual_seed(1)
    loss = sum((o * torch.randn(o.shape, generator=g, dtype=torch.float64).to(o)).sum() for o in outs)
    if loss.requires_grad:
        loss.backward()
    grads = [t.grad for t in copies if t is not None and t.requires_grad] + [p.grad for p in layer.parameters()]
    return [o.detach() for o in outs] + [torch.zeros(()) if t is None else t for t in grads]


def assert_same(got: list[Tensor], expected: list[Tensor], tolerance: float | None = None) -> None:
    """Equal up to rounding, relative to the largest element of all tensors of the list."""
    assert len(got) == len(expected)
    scale = max([float(e.abs().max()) for e in expected if e.numel()], default=1.0)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype and a.device == b.device, (
            i,
            a.dtype,
            b.dtype,
            a.shape,
            b.shape,
        )
        bound = (tolerance or 64 * torch.finfo(b.dtype).eps) * max(scale, 1.0)
        error = float((a - b).abs().max()) if a.numel() else 0.0
        assert error <= bound, f"tensor {i} of {len(got)} differs by {error:.3g}, allowed {bound:.3g}"


def kernel_calls() -> int:
    return _native.kernel_calls()


def changes(run: Callable[[], Any]) -> dict[str, int]:
    """Which counters of `gsp.stats` `run` changed, and by how much."""
    before = gsp.stats()
    run()
    return {k: v - before[k] for k, v in gsp.stats().items() if v != before[k]}


class Plain(MessagePassing):
    """A user's own layer: messages are the features, perhaps times a weight."""

    def __init__(self, aggr: Any = "sum", **kwargs: Any) -> None:
        super().__init__(aggr=aggr, **kwargs)

    def forward(self, x: Any, edge_index: Tensor, weight: Tensor | None = None, size: Any = None) -> Tensor:
        return self.propagate(edge_index, x=x, weight=weight, size=size)

    def message(self, x_j: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x_j
        return x_j * weight.view(-1, *[1] * (x_j.dim() - 1)) if self.node_dim == 0 else x_j * weight.view(-1, 1)


if tg is not None:
    # PyG rewrites a class at its first instance. Where threads make the first ones, two may both do so, and then it has
    # lost what it was: its layers ignore explanations ever after. And if the first one cannot multiply with a matrix,
    # as one of several aggregations, none that follows can.
    Plain()
    for _layer in (tg.GCNConv, tg.SAGEConv, tg.GraphConv):
        _layer(1, 1)
    tg.GINConv(nn.Identity())


class Custom(MessagePassing):
    """A layer whose message is any function of x_j, edge_weight and x_i."""

    def __init__(self, function: Callable[..., Any], aggr: Any = "sum", **kwargs: Any) -> None:
        super().__init__(aggr=aggr, **kwargs)
        self.function = function

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        return self.propagate(edge_index, x=x, edge_weight=edge_weight)

    def message(self, x_j: Tensor, edge_weight: Tensor | None) -> Tensor:
        return self.function(x_j, edge_weight)
