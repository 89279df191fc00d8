"""Messages that add what the edge has, when they do strange things: right whatever they do; fused where they can be."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pyg_layers import MessagePassing, assert_same, kernel_calls, outputs_and_gradients, random_graph, tg
from test_pyg_lazy import Double
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gnn_spmm_plugin as gsp

pytestmark = pytest.mark.pyg

N, E, WIDTH = 20, 90, 4


class Edges(MessagePassing):
    """A layer whose message is any function of x_j, x_i, edge features and edge weight."""

    def __init__(self, function: Callable[..., Any], aggr: Any = "sum") -> None:
        super().__init__(aggr=aggr)
        self.function = function

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor, w: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, e=e, w=w)

    def message(self, x_j: Tensor, x_i: Tensor, e: Tensor, w: Tensor) -> Any:
        return self.function(x_j, x_i, e, w.view(-1, 1))


def hooked(x: Tensor, i: Tensor, e: Tensor, w: Tensor) -> Tensor:
    message = (x + e).relu()
    if message.requires_grad:
        message.register_hook(lambda g: g * 3)
    return message


def written_to(x: Tensor, i: Tensor, e: Tensor, w: Tensor) -> Tensor:
    message = x + e
    message[:, 0] = 0
    return message.relu()


def written_after(x: Tensor, i: Tensor, e: Tensor, w: Tensor) -> Tensor:
    message = x + e
    other = message * w.detach()
    message.mul_(2)
    return other + message


def without_grad(x: Tensor, i: Tensor, e: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        return (x + e).relu()


def half_without_grad(x: Tensor, i: Tensor, e: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        total = x + e
    return total.relu() * w


def under_autocast(x: Tensor, i: Tensor, e: Tensor, w: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return (x + e).relu() * w


def by_numpy(x: Tensor, i: Tensor, e: Tensor, w: Tensor) -> Tensor:
    return x + e + torch.from_numpy(np.asarray((x + e).detach().cpu())).to(x.device)


# Each is (message, whether its sum must still run as kernels).
MESSAGES: dict[str, tuple[Callable[..., Any], bool]] = {
    "sum": (lambda x, i, e, w: x + e, True),
    "reversed": (lambda x, i, e, w: e + x, True),
    "relu": (lambda x, i, e, w: (x + e).relu(), True),
    "functional": (lambda x, i, e, w: F.relu(torch.add(e, x)), True),
    "shifted": (lambda x, i, e, w: (x + e).relu() + 1e-7, True),
    "shifted_twice": (lambda x, i, e, w: 1 + ((x + e).relu() + 0.5), True),
    "weighted": (lambda x, i, e, w: w * (x + e).relu(), True),
    "weighted_twice": (lambda x, i, e, w: w * (x + e).relu() * w.detach(), True),
    "weighted_and_shifted": (lambda x, i, e, w: w * ((x + e).relu() + 0.1), True),
    "function_of_e": (lambda x, i, e, w: (x + e.sin()).relu(), True),
    "of_scaled": (lambda x, i, e, w: (2 * x + e).relu(), True),
    "without_grad": (without_grad, True),
    "half_without_grad": (half_without_grad, True),
    "detached": (lambda x, i, e, w: (x + e).detach().relu(), True),
    "clone": (lambda x, i, e, w: (x + e).clone().relu(), True),
    "asked": (lambda x, i, e, w: (x + e).relu() if (x + e).shape[1] == WIDTH else x, True),
    "relu_twice": (lambda x, i, e, w: (x + e).relu().relu(), False),
    "shift_first": (lambda x, i, e, w: (x + e + 1).relu(), False),
    "weight_first": (lambda x, i, e, w: (w * (x + e)).relu(), False),
    "weighted_x": (lambda x, i, e, w: x * w + e, False),
    "leaky": (lambda x, i, e, w: F.leaky_relu(x + e), False),
    "sigmoid": (lambda x, i, e, w: torch.sigmoid(x + e), False),
    "two_edges": (lambda x, i, e, w: x + e + e, False),
    "minus": (lambda x, i, e, w: x - e, False),
    "alpha": (lambda x, i, e, w: torch.add(x, e, alpha=2), False),
    "per_feature_weight": (lambda x, i, e, w: (x + e) * e, False),
    "one_column": (lambda x, i, e, w: x + e[:, :1], False),
    "squared": (lambda x, i, e, w: (x + e) ** 2, False),
    "indexed": (lambda x, i, e, w: (x + e)[:, [1, 0, 3, 2]], False),
    "viewed": (lambda x, i, e, w: (x + e).view(-1, 2, 2).sum(1).repeat(1, 2), False),
    "cat": (lambda x, i, e, w: torch.cat([x + e, x], -1), False),
    "both_sides": (lambda x, i, e, w: x + i, True),  # narrow, as attention scores are
    "difference": (lambda x, i, e, w: (x - i).relu(), False),
    "product": (lambda x, i, e, w: x * i, False),
    "both_and_edge": (lambda x, i, e, w: (x + i + e).relu(), True),
    "conditional": (lambda x, i, e, w: x + e if (x + e > 0).any() else x, True),
    "numpy": (by_numpy, False),
    "hook": (hooked, False),
    "in_place": (lambda x, i, e, w: (x + e).relu_(), False),
    "added_in_place": (lambda x, i, e, w: x.add_(e), False),
    "written_to": (written_to, False),
    "written_after": (written_after, False),
    "own_function": (lambda x, i, e, w: Double.apply((x + e).relu()), False),
    "checkpoint": (lambda x, i, e, w: checkpoint(lambda t: t.relu().sin(), x + e, use_reentrant=False), False),
    "deepcopy": (lambda x, i, e, w: copy.deepcopy((x + e).detach()) + x, False),
    "autocast": (under_autocast, True),
}


@pytest.mark.parametrize("aggr", ["sum", "mean", "max", ["sum", "std"]])
@pytest.mark.parametrize("name", MESSAGES)
def test_any_message(name: str, aggr: Any, device: str) -> None:
    message, fused = MESSAGES[name]
    if name == "deepcopy" or name == "numpy":
        fused = name == "deepcopy" and aggr in (
            "sum",
            "mean",
        )  # what was copied is a plain tensor: x plus that of edges
    layer = Edges(message, aggr)
    edge_index = random_graph(N, N, E, device=device)
    x, e = (torch.randint(-3, 4, (n, WIDTH), device=device).double() for n in (N, E))
    w = (torch.randint(1, 5, (E,), device=device) / 4).double()

    def call(x: Tensor, e: Tensor, w: Tensor) -> Tensor:
        return layer(x, edge_index, e, w)

    expected = outputs_and_gradients(layer, call, x, e, w)
    with torch.no_grad():
        plain = call(x, e, w)
    with gsp.patch_pyg():
        before = kernel_calls()
        got = outputs_and_gradients(layer, call, x, e, w)
        if aggr in ("sum", "mean"):
            assert (kernel_calls() > before) == fused
        with torch.no_grad():
            assert_same([call(x, e, w)], [plain], 1e-12)
    assert_same(got, expected, 1e-12)


@pytest.mark.parametrize("what", ["x", "e", "w", "edge_index"])
@pytest.mark.parametrize("how", ["aggregate", "write"])
def test_changes_in_between_are_refused(what: str, how: str, device: str) -> None:
    made = {"x": torch.randn(N, WIDTH, device=device), "e": torch.randn(E, WIDTH, device=device)}
    made |= {"w": torch.rand(E, device=device), "edge_index": random_graph(N, N, E, device=device)}

    def message(x: Tensor, i: Tensor, e: Tensor, w: Tensor) -> Tensor:
        out = w * (x + e).relu()
        made[what].zero_()
        return out if how == "aggregate" else out.sin()

    name = {"x": "the features", "e": "edge features", "w": "edge weights"}.get(what, what)
    with gsp.patch_pyg(), pytest.raises(RuntimeError, match=rf"Edges: {name} were changed in place between"):
        Edges(message)(made["x"], made["edge_index"], made["e"], made["w"])


def test_checkpointed_layers(device: str) -> None:
    torch.manual_seed(0)
    layer = tg.GINEConv(nn.Linear(WIDTH, WIDTH)).to(device, torch.float64)
    edge_index = random_graph(N, N, E, device=device)
    x, e = (torch.randn(n, WIDTH, dtype=torch.float64, device=device) for n in (N, E))

    def call(x: Tensor, e: Tensor) -> Tensor:
        return checkpoint(layer, x, edge_index, e, use_reentrant=False)

    expected = outputs_and_gradients(layer, call, x, e)
    with gsp.patch_pyg():
        before = kernel_calls()
        assert_same(outputs_and_gradients(layer, call, x, e), expected)
        assert kernel_calls() > before


def test_mixed_dtypes(device: str) -> None:
    edge_index = random_graph(N, N, E, device=device)
    layer = Edges(lambda x, i, e, w: (x + e).relu() * w)
    for x_type, e_type, w_type in (
        (torch.float32, torch.float64, torch.float32),
        (torch.float64, torch.float32, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.float32, torch.int64),
    ):
        x, e = (torch.randint(-3, 4, (n, WIDTH), device=device) for n in (N, E))
        given = x.to(x_type), e.to(e_type), torch.randint(0, 3, (E,), device=device).to(w_type)
        call = lambda x, e, w: layer(x, edge_index, e, w)  # noqa: E731
        expected = outputs_and_gradients(layer, call, *given)
        with gsp.patch_pyg():
            before = kernel_calls()
            got = outputs_and_gradients(layer, call, *given)
            assert kernel_calls() > before
        assert_same(got, expected, 1e-2 if x_type is torch.bfloat16 else 1e-6)


def test_warnings_once_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    layer = gsp.accelerate(tg.EdgeConv(nn.Linear(2 * WIDTH, 3)), strict="warn")
    x, edge_index = torch.randn(N, WIDTH), random_graph(N, N, E)
    with caplog.at_level(logging.WARNING, logger="gnn_spmm_plugin"):
        for _ in range(3):
            layer(x, edge_index)
            copy.deepcopy(layer)
    said = [r.getMessage() for r in caplog.records]
    reasons = gsp.report(layer).rows[0]["reasons"]
    assert len(said) == len(set(said)) == len(reasons) > 0
    assert all(text.startswith("EdgeConv: left to PyG: ") for text in said)
    assert "aggregate x_j alone and subtract the node's own part afterwards" in str(gsp.report(layer))
    gsp.restore(layer)
    with pytest.raises(ValueError, match="strict must be True, False or 'warn', got 'loud'"):
        gsp.accelerate(layer, strict="loud")


def test_report_of_what_was_fused(device: str) -> None:
    layers = nn.ModuleList(
        [
            tg.GINEConv(nn.Linear(WIDTH, 3)),
            tg.LEConv(WIDTH, 3),
            tg.FiLMConv(WIDTH, 3, act=None),
            tg.GeneralConv(WIDTH, 3, WIDTH),
            tg.RGCNConv(WIDTH, 3, 2),
            tg.GENConv(WIDTH, 3, aggr="mean", edge_dim=WIDTH),
        ]
    ).to(device)
    edge_index = random_graph(N, N, E, device=device)
    x, e = torch.randn(N, WIDTH, device=device), torch.randn(E, WIDTH, device=device)
    more: list[tuple[Any, ...]] = [(e,), (), (), (e,), (torch.arange(E, device=device) % 2,), (e,)]
    with gsp.patch_pyg():
        for layer, extra in zip(layers, more, strict=True):
            layer(x, edge_index, *extra)
    rows = gsp.report(layers).rows
    assert [row["status"] for row in rows] == ["fused"] * len(rows)
    assert [list(row["ops"]) for row in rows] == [
        ["sum of relu(x + e)"],
        ["sum - self"],
        ["mean between gamma and beta"],
        ["sum + edges"],
        ["mean of all relations"],
        ["mean of relu(x + e)"],
    ]
