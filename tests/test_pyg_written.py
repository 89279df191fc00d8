"""Maxima of messages that had to be written: stock's values and gradients, by other means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pyg_layers import MessagePassing, assert_same, kernel_calls, outputs_and_gradients, random_graph, tg
from torch import Tensor, nn

import gnn_spmm_plugin as gsp

pytestmark = pytest.mark.pyg

N, M, E, F = 24, 15, 130, 4


@pytest.fixture(autouse=True)
def however_few(monkeypatch: pytest.MonkeyPatch) -> None:
    from gnn_spmm_plugin.integrations.pyg import written

    monkeypatch.setattr(written, "LEAST", 0)


class Difference(MessagePassing):
    """Its messages cannot but be written; integers, so that extrema tie, also at 0."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_j - x_i) * x_i


def layers() -> dict[str, Any]:
    degrees = torch.tensor([1, 2, 3])
    some = ["mean", "min", "max", "std"]
    return {
        "max": lambda **k: Difference("max", **k),
        "min": lambda **k: Difference("min", **k),
        "many": lambda **k: Difference(["sum", "mean", "max", "min", "std", "var"], **k),
        "edge": lambda **k: tg.EdgeConv(nn.Linear(2 * F, 3), **k),
        "pna": lambda **k: tg.PNAConv(F, 4, some, ["identity", "amplification"], degrees, pre_layers=2, **k),
        "point": lambda **k: Positions(tg.PointNetConv(nn.Linear(F + 3, 3), add_self_loops=False, **k)),
    }


class Positions(nn.Module):
    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, x[:, :3].cos(), edge_index)


@pytest.mark.parametrize("kind", ["drawn", "int32", "sorted", "isolated"])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("name", layers())
def test_equals_stock(name: str, flow: str, kind: str, device: str) -> None:
    torch.manual_seed(0)
    if name == "pna" and kind == "int32":
        pytest.skip("its mean is PyG's until a maximum has the edges sorted, with torch's gradient by int32")
    layer = layers()[name](flow=flow).to(device, torch.float64)
    edge_index = random_graph(N, N, E, device=device)
    edge_index = edge_index[:, edge_index[1].argsort(stable=True)] if kind == "sorted" else edge_index
    edge_index = edge_index % 4 if kind == "isolated" else edge_index
    x = torch.randint(-3, 4, (N, F), device=device).double()
    expected = outputs_and_gradients(layer, lambda x: layer(x, edge_index), x)
    index = edge_index.int() if kind == "int32" else edge_index  # of which torch 2.13 has wrong gradients itself
    with gsp.patch_pyg():
        for _ in range(2):
            before = kernel_calls()
            got = outputs_and_gradients(layer, lambda x: layer(x, index), x)
            assert kernel_calls() - before >= 3
            assert_same(got, expected, 1e-12)
    rows = gsp.report(layer).rows
    assert [row["status"] for row in rows] == ["partly"]
    assert any("of written messages" in op for op in rows[0]["ops"])


def test_only_where_it_pays(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from gnn_spmm_plugin.integrations.pyg import written

    edge_index = random_graph(N, N, E, device=device)
    x = torch.randn(N, F, device=device)

    def runs(layer: nn.Module, x: Tensor, index: Tensor) -> bool:
        before = kernel_calls()
        layer(x, index)
        return kernel_calls() > before

    with gsp.patch_pyg():
        assert not runs(Difference("sum"), x.clone().requires_grad_(), edge_index)  # no reason to sort
        assert not runs(Difference("max"), x, edge_index)  # nor without gradients
        assert runs(Difference("max"), x.clone().requires_grad_(), edge_index)
        assert runs(Difference("sum"), x.clone().requires_grad_(), edge_index)  # sorted now
        assert not runs(Difference("sum"), x.clone().requires_grad_(), edge_index.clone())
        monkeypatch.setattr(written, "LEAST", E * F + 1)
        assert not runs(Difference("max"), x.clone().requires_grad_(), edge_index)
    assert not runs(Difference("max"), x.clone().requires_grad_(), edge_index)
    aggr, ids = tg.aggr.MaxAggregation(), torch.arange(N, device=device) % 3  # a readout, in no layer
    with gsp.patch_pyg():
        before = kernel_calls()
        aggr(x.clone().requires_grad_(), ids, dim_size=3)
        assert kernel_calls() == before


def test_a_layer_that_was_restored_inside_of_one_that_was_not(device: str) -> None:
    class Outer(MessagePassing):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Difference("max")

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.inner(x, edge_index)

    outer = gsp.accelerate(Outer())
    edge_index = random_graph(N, N, E, device=device)
    x = torch.randn(N, F, device=device).requires_grad_()
    try:
        before = kernel_calls()
        outer(x, edge_index)
        assert kernel_calls() > before
        gsp.restore(outer.inner)
        before = kernel_calls()
        outer(x, edge_index)
        assert kernel_calls() == before
    finally:
        gsp.restore(outer)


def test_hooks_wrong_indices_and_writes(device: str) -> None:
    edge_index = random_graph(N, N, E, device=device)
    x = torch.randn(N, F, dtype=torch.float64, device=device)
    layer = Difference("max")
    seen: list[Any] = []
    layer.aggr_module.register_forward_hook(lambda *args: seen.append(1))
    with gsp.patch_pyg():
        before = kernel_calls()
        outputs_and_gradients(layer, lambda x: layer(x, edge_index), x)
        assert kernel_calls() == before and seen
        plain = Difference("max")
        outputs_and_gradients(plain, lambda x: plain(x, edge_index), x)
        edge_index.copy_(edge_index.flip(1).roll(3, 0))
        got = outputs_and_gradients(plain, lambda x: plain(x, edge_index), x)
        if device == "cpu":
            with pytest.raises((IndexError, ValueError)):
                plain(x.clone().requires_grad_(), edge_index + N)
    assert_same(got, outputs_and_gradients(plain, lambda x: plain(x, edge_index), x))


def test_second_derivatives(device: str) -> None:
    edge_index = random_graph(8, 8, 20, device=device)
    x = torch.randn(8, 2, dtype=torch.float64, device=device).requires_grad_()
    with gsp.patch_pyg():
        assert torch.autograd.gradgradcheck(lambda x: Difference(["max", "sum"])(x, edge_index), (x,), nondet_tol=1e-10)
