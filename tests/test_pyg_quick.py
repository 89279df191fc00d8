"""Layers that run in one step are what they were: whoever looks on, or has changed one, still finds PyG's way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pyg_layers import tg
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.integrations.pyg import quick

pytestmark = pytest.mark.pyg

LAYERS: dict[str, Callable[[], Any]] = {
    "gcn": lambda: tg.GCNConv(6, 4),
    "gcn wider": lambda: tg.GCNConv(6, 16),
    "gcn, no loops, no bias": lambda: tg.GCNConv(6, 4, add_self_loops=False, bias=False),
    "gcn, improved": lambda: tg.GCNConv(6, 4, improved=True),
    "sage mean": lambda: tg.SAGEConv(6, 4),
    "sage mean, wider, reversed": lambda: tg.SAGEConv(6, 16, flow="target_to_source"),
    "sage sum, no root": lambda: tg.SAGEConv(6, 4, aggr="sum", root_weight=False),
    "sage max": lambda: tg.SAGEConv(6, 4, aggr="max"),
    "sage min, no bias": lambda: tg.SAGEConv(6, 4, aggr="min", bias=False),
    "gin": lambda: tg.GINConv(nn.Linear(6, 4), eps=0.5),
    "gin, several": lambda: tg.GINConv(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))),
    "gin mean": lambda: tg.GINConv(nn.Linear(6, 4, bias=False), aggr="mean"),
}
LEFT: dict[str, Callable[[], Any]] = {
    "gcn, not normalised": lambda: tg.GCNConv(6, 4, normalize=False),
    "sage, projected": lambda: tg.SAGEConv(6, 4, project=True),
    "sage, unit length": lambda: tg.SAGEConv(6, 4, normalize=True),
    "sage median": lambda: tg.SAGEConv(6, 4, aggr="median"),
    "gin, learned eps": lambda: tg.GINConv(nn.Linear(6, 4), train_eps=True),
    "gin max": lambda: tg.GINConv(nn.Linear(6, 4), aggr="max"),
    "gin, MLP": lambda: tg.GINConv(nn.Sequential(nn.ReLU(), nn.Linear(6, 4))),
}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """One entry for each layer that ran in one step, at a glance."""
    seen: list[str] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[4])
        return real(*args, **kwargs)

    real = quick.convolve_unchecked
    monkeypatch.setattr(quick, "convolve_unchecked", counted)
    gsp.clear_cache()
    yield seen


def given(device: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    edge_index = torch.randint(9, (2, 30), generator=generator)
    x = torch.randn(9, 6, generator=generator, dtype=torch.float64).to(device, dtype)
    return x.requires_grad_(), edge_index.to(device)


def results(layer: Any, x: Tensor, edge_index: Tensor) -> list[Tensor]:
    """Output and all gradients."""
    out = layer(x, edge_index)
    wanted = [x, *layer.parameters()]
    seed = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    return [out, *torch.autograd.grad(out, wanted, seed)]


@pytest.mark.parametrize("name", [*LAYERS, *LEFT])
def test_as_pyg(name: str, device: str, steps: list[str]) -> None:
    torch.manual_seed(0)
    layer = {**LAYERS, **LEFT}[name]().to(device, torch.float64)
    x, edge_index = given(device)
    wrong = edge_index.clone()
    wrong[0, 3] = 9
    expected, error = results(layer, x, edge_index), _error(layer, x, wrong)
    gsp.accelerate(layer)
    for _ in range(2):
        torch.testing.assert_close(results(layer, x, edge_index), expected)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, edge_index), expected[0])
    assert len(steps) == (3 if name in LAYERS else 0)
    assert _error(layer, x, wrong) is error


def _error(layer: Any, x: Tensor, edge_index: Tensor) -> type[Exception] | None:
    if x.is_cuda:  # where PyG's own ends the process
        return None
    with pytest.raises((IndexError, ValueError, RuntimeError)) as caught:
        layer(x, edge_index)
    return caught.type


def _hook(module: Any, inputs: Any, output: Any) -> Any:
    return output * 2


def _prune(layer: Any) -> None:
    prune.l1_unstructured(layer.lin_l, "weight", amount=0.5)


def _parametrize(layer: Any) -> None:
    parametrizations.weight_norm(layer.lin_l)


def _forward(module: Any) -> None:
    own = module.forward
    module.forward = lambda *args, **kwargs: own(*args, **kwargs) + 1


def _explained(layer: Any) -> None:
    layer.explain = True
    layer._edge_mask = torch.linspace(-1, 1, 30, dtype=torch.float64)
    layer._loop_mask = torch.ones(30, dtype=torch.bool)
    layer._apply_sigmoid = True


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook of the layer": lambda layer: layer.register_forward_hook(_hook),
    "hook of a linear layer": lambda layer: layer.lin_l.register_forward_hook(_hook),
    "hook of the root": lambda layer: layer.lin_r.register_forward_pre_hook(lambda m, inputs: (inputs[0] * 3,)),
    "hook of the aggregation": lambda layer: layer.aggr_module.register_forward_hook(_hook),
    "hook of messages": lambda layer: layer.register_message_forward_hook(_hook),
    "hook of propagate": lambda layer: layer.register_propagate_forward_hook(_hook),
    "pruned": _prune,
    "weight norm": _parametrize,
    "forward of a linear layer": lambda layer: _forward(layer.lin_l),
    "forward of the aggregation": lambda layer: _forward(layer.aggr_module),
    "forward of the layer": _forward,
    "message of the layer": lambda layer: setattr(layer, "message", lambda x_j: x_j.abs()),
    "explained": _explained,
}


@pytest.mark.parametrize("name", CHANGES)
def test_whoever_looks_on(name: str, steps: list[str]) -> None:
    torch.manual_seed(0)
    layer = tg.SAGEConv(6, 4).double()
    x, edge_index = given("cpu")
    gsp.accelerate(layer)
    before = layer(x, edge_index)
    assert len(steps) == 1
    CHANGES[name](layer)
    found = layer(x, edge_index)
    assert len(steps) == 1, "not in one step any more"
    gsp.restore(layer)
    torch.testing.assert_close(found, layer(x, edge_index))
    if name not in ("weight norm",):
        assert not torch.equal(found, before)


def test_a_hook_on_all_modules(steps: list[str]) -> None:
    layer, (x, edge_index), seen = gsp.accelerate(tg.SAGEConv(6, 4).double()), given("cpu"), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: seen.append(type(module)))
    try:
        layer(x, edge_index)
    finally:
        handle.remove()
    assert tg.SAGEConv in seen and not steps
    layer(x, edge_index)
    assert len(steps) == 1


@pytest.mark.parametrize("positional", [True, False])
def test_whoever_replaces_what_calls_modules(
    positional: bool, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As profilers that count operations do: a layer and its linear layers are called for them to see."""
    layer, (x, edge_index), seen = gsp.accelerate(tg.SAGEConv(6, 4).double()), given("cpu"), []
    real = nn.Module.__call__
    expected = layer(x, edge_index)
    assert len(steps) == 1

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self)
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__call__", called)
        found = layer(x, edge_index) if positional else layer(x, edge_index=edge_index)
    assert {layer, layer.lin_l, layer.lin_r} <= set(seen) and len(steps) == 1
    torch.testing.assert_close(found, expected)
    layer(x, edge_index)
    assert len(steps) == 2


@pytest.mark.parametrize("positional", [True, False])
def test_linear_layers_whose_class_somebody_changed(positional: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, (x, edge_index) = gsp.accelerate(tg.SAGEConv(6, 4).double()), given("cpu")
    before, own = layer(x, edge_index), type(layer.lin_l).forward
    monkeypatch.setattr(type(layer.lin_l), "forward", lambda self, x: 2 * own(self, x))
    found = layer(x, edge_index) if positional else layer(x, edge_index=edge_index)
    torch.testing.assert_close(found, 2 * before)


@pytest.mark.parametrize("method", ["forward", "message", "propagate"])
def test_a_class_that_somebody_changed(method: str, steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    layer, (x, edge_index) = gsp.accelerate(tg.SAGEConv(6, 4).double()), given("cpu")
    own = getattr(tg.SAGEConv, method)
    before = layer(x, edge_index)
    monkeypatch.setattr(tg.SAGEConv, method, lambda *args, **kwargs: own(*args, **kwargs) + 1)
    found = layer(x, edge_index)
    assert len(steps) == 1 and not torch.equal(found, before)


def test_a_subclass_is_not_its_class(steps: list[str]) -> None:
    class Doubled(tg.SAGEConv):  # type: ignore[misc, name-defined]
        def message(self, x_j: Tensor) -> Tensor:
            return 2 * x_j

    layer, (x, edge_index) = Doubled(6, 4).double(), given("cpu")
    expected = layer(x, edge_index)
    torch.testing.assert_close(gsp.accelerate(layer)(x, edge_index), expected)
    assert not steps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype, device: str, steps: list[str]) -> None:
    for name in LAYERS:
        torch.manual_seed(0)
        layer = LAYERS[name]().to(device, dtype)
        x, edge_index = given(device, dtype)
        expected = results(layer, x, edge_index)
        found = results(gsp.accelerate(layer), x, edge_index)
        assert [t.dtype for t in found] == [t.dtype for t in expected]
        tolerance = 1e-5 if dtype == torch.float32 else 0.15
        torch.testing.assert_close(found[0], expected[0], atol=tolerance, rtol=tolerance)
    assert len(steps) == len(LAYERS)


def test_autocast_and_mixed_dtypes(steps: list[str]) -> None:
    layer, (x, edge_index) = gsp.accelerate(tg.SAGEConv(6, 4)), given("cpu", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x, edge_index).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="dtype"):
        layer(x.double(), edge_index)
    assert not steps


def test_counters_and_report(steps: list[str]) -> None:
    layer, (x, edge_index) = gsp.accelerate(tg.SAGEConv(6, 4), strict=True), given("cpu", torch.float32)
    for _ in range(3):
        layer(x, edge_index)
    text = str(gsp.report(layer))
    assert len(steps) == 3 and "mean" in text and "3" in text
    twin = copy.deepcopy(layer)
    twin(x, edge_index)
    assert len(steps) == 4, "a copy is accelerated as well"


def test_shapes_that_do_not_fit(steps: list[str]) -> None:
    layer, (x, edge_index) = tg.SAGEConv(6, 4).double(), given("cpu")
    for bad in (x[:, :5], x[0]):
        errors = []
        for one in (layer, gsp.accelerate(copy.deepcopy(layer))):
            with pytest.raises((RuntimeError, ValueError, IndexError)) as caught:
                one(bad, edge_index)
            errors.append(caught.type)
        assert errors[0] is errors[1]
