"""The layers: equal to PyG's in values, gradients and parameters, and really one kernel each way."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.normalize import gcn_norm, with_self_loops, without_self_loops

N, E, WIDTH = 60, 400, 16


@pytest.fixture
def data(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Features, an edge_index with self loops, parallel edges and isolated nodes, and edge weights."""
    generator = torch.Generator().manual_seed(7)
    edge_index = torch.randint(0, N - 5, (2, E), generator=generator)
    edge_index[:, :3] = torch.tensor([[4, 4, 9], [4, 4, 9]])
    x = torch.randn(N, WIDTH, generator=generator)
    weight = torch.rand(E, generator=generator) + 0.1
    if device != "cpu":  # which of several self loops of a node PyG keeps there is a matter of chance
        weight = torch.where(edge_index[0] == edge_index[1], 0.5 + edge_index[0] / N, weight)
    return x.to(device), edge_index.to(device), weight.to(device)


def calls(fn: Any) -> tuple[Any, dict[str, int]]:
    """What `fn` returns, and what happened meanwhile."""
    before = gsp.stats()
    result = fn()
    return result, {k: v - before[k] for k, v in gsp.stats().items() if v != before[k]}


def run(layer: Any, x: Tensor, *args: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, gradient of the input, gradients of the parameters."""
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    out = layer(x, *args)
    out.backward(torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype))
    assert x.grad is not None
    return out.detach(), x.grad, [p.grad for p in layer.parameters() if p.grad is not None]


def assert_same(a: tuple[Tensor, Tensor, list[Tensor]], b: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    assert len(a[2]) == len(b[2])
    for p, q in zip([*a[:2], *a[2]], [*b[:2], *b[2]], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def pair(name: str, device: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The stock layer and ours, from the same seed."""
    import torch_geometric.nn as pyg

    layers = []
    for module in (pyg, gsp.nn):
        torch.manual_seed(3)
        actual = [a() if callable(a) else a for a in args]
        layers.append(getattr(module, name)(*actual, **kwargs).to(device))
    return layers[0], layers[1]


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))


GCN = [
    {},
    {"improved": True},
    {"add_self_loops": False},
    {"normalize": False},
    {"flow": "target_to_source"},
    {"cached": True},
    {"bias": False},
    {"aggr": "mean"},
    {"aggr": "max"},
]
SAGE = [
    {},
    {"aggr": "max"},
    {"aggr": "sum"},
    {"aggr": "min"},
    {"aggr": "max", "project": True},
    {"aggr": ["mean", "max"]},
    {"aggr": "std"},
    {"normalize": True},
    {"root_weight": False},
    {"bias": False},
    {"flow": "target_to_source"},
    {"flow": "target_to_source", "aggr": "max", "project": True},
]


@pytest.mark.pyg
@pytest.mark.parametrize("weighted", [False, True], ids=["ones", "weighted"])
@pytest.mark.parametrize("width", [5, 32], ids=["narrow", "wide"])
@pytest.mark.parametrize("kwargs", GCN, ids=str)
def test_gcn_equals_pyg(
    data: tuple[Tensor, Tensor, Tensor], device: str, kwargs: dict[str, Any], width: int, weighted: bool
) -> None:
    x, edge_index, weight = data
    stock, ours = pair("GCNConv", device, WIDTH, width, **kwargs)
    args = (edge_index, weight) if weighted else (edge_index,)
    expected = run(stock, x, *args)
    assert_same(run(ours, x, *args), expected)
    assert_same(run(ours, x, *args), expected)  # from the cache
    if kwargs.get("flow") is None and not kwargs.get("cached"):
        g = gsp.Graph.from_edge_index(edge_index, N)
        assert_same(run(ours, x, g, *args[1:]), expected)
        if weighted:
            assert_same(run(ours, x, g.with_weight(weight)), expected)


@pytest.mark.pyg
@pytest.mark.parametrize("width", [5, 32], ids=["narrow", "wide"])
@pytest.mark.parametrize("kwargs", SAGE, ids=str)
def test_sage_equals_pyg(data: tuple[Tensor, Tensor, Tensor], device: str, kwargs: dict[str, Any], width: int) -> None:
    x, edge_index, _ = data
    stock, ours = pair("SAGEConv", device, WIDTH, width, **kwargs)
    expected = run(stock, x, edge_index)
    assert_same(run(ours, x, edge_index), expected)
    if kwargs.get("flow") is None:
        assert_same(run(ours, x, gsp.Graph.from_edge_index(edge_index, N)), expected)


@pytest.mark.pyg
@pytest.mark.parametrize("kwargs", [{}, {"train_eps": True, "eps": 0.5}, {"aggr": "max"}], ids=str)
def test_gin_equals_pyg(data: tuple[Tensor, Tensor, Tensor], device: str, kwargs: dict[str, Any]) -> None:
    x, edge_index, _ = data
    stock, ours = pair("GINConv", device, mlp, **kwargs)
    expected = run(stock, x, edge_index)
    assert_same(run(ours, x, edge_index), expected)
    assert_same(run(ours, x, edge_index.int()), expected)
    assert_same(run(ours, x, gsp.Graph.from_edge_index(edge_index, N)), expected)


@pytest.mark.pyg
@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("GCNConv", (WIDTH, 8), {}),
        ("GCNConv", (WIDTH, 8), {"bias": False}),
        ("SAGEConv", (WIDTH, 8), {"aggr": "max", "project": True}),
        ("SAGEConv", ((WIDTH, 4), 8), {"root_weight": True}),
        ("SAGEConv", (WIDTH, 8), {"aggr": ["mean", "max"]}),
        ("GINConv", (mlp,), {"train_eps": True}),
    ],
    ids=str,
)
def test_parameters_are_pygs(name: str, args: Any, kwargs: dict[str, Any]) -> None:
    stock, ours = pair(name, "cpu", *args, **kwargs)
    assert list(stock.state_dict()) == list(ours.state_dict())
    for a, b in zip(stock.state_dict().values(), ours.state_dict().values(), strict=True):
        assert torch.equal(a, b)  # the same start values from the same seed
    for p in stock.parameters():
        p.data.normal_()
    ours.load_state_dict(stock.state_dict())
    stock.load_state_dict(ours.state_dict())
    stock.reset_parameters()
    ours.reset_parameters()


@pytest.mark.pyg
def test_lazy_width_takes_pyg_checkpoints(data: tuple[Tensor, Tensor, Tensor], device: str) -> None:
    x, edge_index, _ = data
    stock, ours = pair("GCNConv", device, -1, 8)
    fresh = gsp.nn.GCNConv(-1, 8).to(device)
    torch.manual_seed(1)
    expected = stock(x, edge_index)
    torch.manual_seed(1)
    torch.testing.assert_close(ours(x, edge_index), expected)
    fresh.load_state_dict(stock.state_dict())
    torch.testing.assert_close(fresh(x, edge_index), expected)


@pytest.mark.pyg
@pytest.mark.parametrize("kwargs", [{}, {"aggr": "max", "project": True}, {"aggr": ["mean", "max"]}], ids=str)
@pytest.mark.parametrize("target", [True, False], ids=["root", "no-root"])
def test_sage_bipartite(data: tuple[Tensor, Tensor, Tensor], device: str, kwargs: dict[str, Any], target: bool) -> None:
    x, edge_index, _ = data
    few = edge_index.clone()
    few[1] %= 11
    stock, ours = pair("SAGEConv", device, (WIDTH, 4), 6, **kwargs)
    x_dst = torch.randn(13, 4, device=device) if target else None
    expected = stock((x, x_dst), few, size=(N, 13))
    torch.testing.assert_close(ours((x, x_dst), few, size=(N, 13)), expected)
    g = gsp.Graph.from_edge_index(few, (N, 13))
    torch.testing.assert_close(ours((x, x_dst), g), expected)
    if target:
        torch.testing.assert_close(ours((x, x_dst), few), expected)


@pytest.mark.pyg
def test_gin_bipartite(data: tuple[Tensor, Tensor, Tensor], device: str) -> None:
    x, edge_index, _ = data
    few = edge_index.clone()
    few[1] %= 11
    stock, ours = pair("GINConv", device, mlp)
    for x_dst in (None, torch.randn(13, WIDTH, device=device)):
        expected = stock((x, x_dst), few, size=(N, 13))
        torch.testing.assert_close(ours((x, x_dst), few, size=(N, 13)), expected)


LAYERS = {
    "gcn": lambda: gsp.nn.GCNConv(WIDTH, 8),
    "gcn wide": lambda: gsp.nn.GCNConv(WIDTH, 32),
    "sage mean": lambda: gsp.nn.SAGEConv(WIDTH, 8),
    "sage max": lambda: gsp.nn.SAGEConv(WIDTH, 8, aggr="max"),
    "sage pool": lambda: gsp.nn.SAGEConv(WIDTH, 8, aggr="pool"),
    "gin": lambda: gsp.nn.GINConv(mlp()),
}
each_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
each_adjacency = pytest.mark.parametrize("plain", [False, True], ids=["Graph", "edge_index"])


@each_adjacency
@each_layer
def test_a_steady_step_is_one_kernel_each_way(
    data: tuple[Tensor, Tensor, Tensor], device: str, layer: Any, plain: bool, fresh_cache: None
) -> None:
    x, edge_index, _ = data
    conv = layer().to(device)
    adjacency = edge_index if plain else gsp.Graph.from_edge_index(edge_index, N)
    for _ in range(3):
        run(conv, x, adjacency)
    x = x.clone().requires_grad_()
    out, forward = calls(lambda: conv(x, adjacency))
    _, backward = calls(lambda: out.sum().backward())
    # no sort, no permutation, no build, no second look-up
    assert forward == {"kernel_calls": 1, **({"plan_hits": 1} if plain else {})}
    assert backward == {"kernel_calls": 1}


def test_constant_weights_are_normalised_once(data: tuple[Tensor, Tensor, Tensor], device: str) -> None:
    x, edge_index, weight = data
    conv = gsp.nn.GCNConv(WIDTH, 8).to(device)
    g = gsp.Graph.from_edge_index(edge_index, N)
    for _ in range(3):
        run(conv, x, g, weight)
    _, steady = calls(lambda: run(conv, x, g, weight))
    assert steady == {"kernel_calls": 2}
    before = conv(x, g, weight)
    for write in (lambda: weight.__setitem__(3, 10.0), lambda: weight.numpy().__setitem__(4, 20.0)):
        if device == "cuda" and "numpy" in write.__code__.co_names:
            continue  # past the version counter: seen on the CPU only
        write()
        fresh = conv(x, gsp.Graph.from_edge_index(edge_index, N), weight.clone())
        assert not torch.equal(conv(x, g, weight), before)
        torch.testing.assert_close(conv(x, g, weight), fresh)
        before = fresh


@pytest.mark.pyg
@pytest.mark.parametrize("kwargs", [{}, {"add_self_loops": False}, {"improved": True}], ids=str)
def test_gradients_of_learned_weights(data: tuple[Tensor, Tensor, Tensor], device: str, kwargs: dict[str, Any]) -> None:
    x, edge_index, weight = data
    edge_index = edge_index[:, 2:]  # PyG's gradient of repeated self loops depends on which write wins
    weight = weight[2:]
    stock, ours = pair("GCNConv", device, WIDTH, 8, **kwargs)
    grads = []
    for conv in (stock, ours):
        w = weight.clone().requires_grad_()
        for _ in range(2):  # nothing of a learned weight may be kept
            w.grad = None
            conv(x, edge_index, w).square().sum().backward()
        grads.append(w.grad)
        with torch.no_grad():
            w.mul_(0.5)
        grads.append(conv(x, edge_index, w).detach())
    torch.testing.assert_close(grads[0], grads[2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grads[1], grads[3], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plain", [False, True], ids=["Graph", "edge_index"])
@pytest.mark.parametrize("kwargs", [{}, {"add_self_loops": False}, {"improved": True}], ids=str)
def test_compiled_gradients_of_learned_weights(
    data: tuple[Tensor, Tensor, Tensor], device: str, kwargs: dict[str, Any], plain: bool
) -> None:
    x, edge_index, weight = data
    conv = gsp.nn.GCNConv(WIDTH, 8, **kwargs).to(device)
    adjacency = edge_index if plain else gsp.Graph.from_edge_index(edge_index, N)
    results = []
    torch._dynamo.reset()
    for layer in (conv, torch.compile(conv, fullgraph=True, backend="aot_eager")):
        w = weight.clone().requires_grad_()
        out = layer(x, adjacency, w)
        results.append((out.detach(), torch.autograd.grad(out.square().sum(), w)[0]))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@each_layer
def test_copies_work_and_stay_fast(data: tuple[Tensor, Tensor, Tensor], device: str, layer: Any) -> None:
    x, edge_index, _ = data
    g = gsp.Graph.from_edge_index(edge_index, N)
    conv = layer().to(device)
    expected = conv(x, g)
    buffer = io.BytesIO()
    torch.save(conv, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(conv), pickle.loads(pickle.dumps(conv)), torch.load(buffer, weights_only=False)]
    for other in [*copies, conv]:
        out, happened = calls(lambda other=other: other(x, g))
        assert torch.equal(out, expected)
        assert happened["kernel_calls"] == 1 and "fallbacks" not in happened


class OwnConv(gsp.nn.SpMMConv):
    def __init__(self, aggr: Any = "mean", **kwargs: Any) -> None:
        super().__init__(aggr=aggr, **kwargs)
        self.lin = torch.nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x), edge_weight=edge_weight)


def test_own_layer_from_the_base_class(data: tuple[Tensor, Tensor, Tensor], device: str) -> None:
    x, edge_index, weight = data
    conv = OwnConv().to(device)
    g = gsp.Graph.from_edge_index(edge_index, N)
    for layer in (conv, copy.deepcopy(conv), pickle.loads(pickle.dumps(conv)), conv):
        out, happened = calls(lambda layer=layer: layer(x, edge_index, weight))
        assert happened["kernel_calls"] == 1
        torch.testing.assert_close(out, gsp.spmm(g, conv.lin(x), weight, "mean"))


class OwnMessage(gsp.nn.SpMMConv if gsp.nn.conv.HAS_PYG else object):  # type: ignore[misc]
    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i - x_j).abs()


@pytest.mark.pyg
def test_own_message_takes_pygs_path(data: tuple[Tensor, Tensor, Tensor], device: str) -> None:
    x, edge_index, _ = data
    src, dst = edge_index
    expected = torch.zeros_like(x).index_add(0, dst, (x[dst] - x[src]).abs())
    for adjacency in (edge_index, gsp.Graph.from_edge_index(edge_index, N)):
        out, happened = calls(lambda a=adjacency: OwnMessage()(x, a))
        assert happened["fallbacks"] == 1
        torch.testing.assert_close(out, expected)


@pytest.mark.pyg
@pytest.mark.parametrize("aggr", ["sum", "mean", "max", "min"])
def test_aggregation_in_stock_layers(data: tuple[Tensor, Tensor, Tensor], device: str, aggr: str) -> None:
    import torch_geometric.nn as pyg

    x, edge_index, _ = data
    torch.manual_seed(0)
    stock = pyg.SAGEConv(WIDTH, 8, aggr=aggr).to(device)
    torch.manual_seed(0)
    ours = pyg.SAGEConv(WIDTH, 8, aggr=gsp.nn.SpMMAggregation(aggr)).to(device)
    assert_same(run(ours, x, edge_index), run(stock, x, edge_index))
    for _ in range(2):
        run(ours, x, edge_index)
    _, happened = calls(lambda: run(ours, x, edge_index))
    assert happened["kernel_calls"] == 2
    assert "sorts" not in happened and "graphs_built" not in happened
    fused = gsp.nn.SAGEConv(WIDTH, 8, aggr=gsp.nn.SpMMAggregation(aggr)).to(device)
    fused.load_state_dict(stock.state_dict())
    assert_same(run(fused, x, edge_index), run(stock, x, edge_index))


def test_aggregation_alone(device: str) -> None:
    x = torch.randn(3, 7, 5, device=device)
    index = torch.tensor([3, 0, 0, 3, 1, 3, 0], device=device)
    for reduce, ref in (("sum", "sum"), ("mean", "mean"), ("max", "amax"), ("min", "amin")):
        expected = torch.zeros(3, 5, 5, device=device).scatter_reduce(
            1, index.view(1, -1, 1).expand_as(x), x, ref, include_self=False
        )
        aggr = gsp.nn.SpMMAggregation(reduce)
        torch.testing.assert_close(aggr(x, index, dim_size=5), expected)
        torch.testing.assert_close(aggr(x.transpose(0, 1), index, dim_size=5, dim=0), expected.transpose(0, 1))
        order = index.sort(stable=True).indices
        ptr = torch.tensor([0, 3, 4, 4, 7, 7], device=device)
        torch.testing.assert_close(aggr(x[:, order], ptr=ptr), expected)
    with pytest.raises(ValueError, match="index must have shape"):
        aggr(x, index[:3])
    for wrong in ([0, 3, 2, 7], [2, 3, 7], [0, 3, 6], [0, 3, 9], [0.0, 3, 7], [[0, 7]], []):
        with pytest.raises(ValueError, match="ptr must"):
            aggr(x, ptr=torch.tensor(wrong, device=device), dim=1)
    with pytest.raises(ValueError, match="reduce must be one of"):
        gsp.nn.SpMMAggregation("median")


def test_tie_rules(device: str) -> None:
    edge_index = torch.tensor([[1, 2, 3], [0, 0, 0]], device=device)
    for tie, expected in (("first", [0.0, 1.0, 0.0, 0.0]), ("split", [0.0, 1 / 3, 1 / 3, 1 / 3])):
        conv = gsp.nn.SpMMConv(aggr="max", tie=tie)
        x = torch.ones(4, 1, device=device, requires_grad=True)
        conv.propagate(edge_index, x=x).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad.flatten(), torch.tensor(expected, device=device))


@each_adjacency
@each_layer
def test_compiles_without_a_graph_break(
    data: tuple[Tensor, Tensor, Tensor], device: str, layer: Any, plain: bool
) -> None:
    x, edge_index, _ = data
    conv = layer().to(device)
    adjacency = edge_index if plain else gsp.Graph.from_edge_index(edge_index, N)
    expected = run(conv, x, adjacency)
    torch._dynamo.reset()
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    assert_same(run(compiled, x, adjacency), expected)
    run(compiled, x, adjacency)
    _, happened = calls(lambda: run(compiled, x, adjacency))
    assert happened["kernel_calls"] == 2
    assert "graphs_built" not in happened


@pytest.mark.parametrize("norm", [False, True], ids=["", "gcn"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_the_opaque_operator(data: tuple[Tensor, Tensor, Tensor], device: str, reduce: str, norm: bool) -> None:
    x, edge_index, weight = data
    x, weight = x[:, :3].double().requires_grad_(), weight.double().requires_grad_()
    args = (N, N, False, reduce, "first", "auto", norm, norm, False, torch.float64)
    op = torch.ops.gnn_spmm_plugin.spmm_edge_index.default
    if norm:
        weight = weight.detach()
    torch.library.opcheck(op, (x, edge_index, weight, *args))
    torch.library.opcheck(op, (x.detach(), edge_index, None, *args))
    graph = gsp.Graph.from_edge_index(edge_index, N)
    outs = []
    for way in ("op", "eager"):
        if way == "op":
            out = op(x, edge_index, weight, *args)[0]
        elif norm:
            a = gcn_norm(graph, weight, torch.float64)
            written, numbers = a.as_edges(torch.float64)
            out = gsp.spmm(written, x, numbers, reduce)
        else:
            out = gsp.spmm(graph, x, weight, reduce)
        inputs = (x,) if norm else (x, weight)
        outs.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for a, b in zip(*outs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@each_layer
def test_autocast(data: tuple[Tensor, Tensor, Tensor], device: str, layer: Any, dtype: torch.dtype) -> None:
    x, edge_index, _ = data
    conv = layer().to(device)
    expected = conv(x, edge_index)
    with torch.autocast(device, dtype):
        out = conv(x, edge_index)
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.1)


@pytest.mark.pyg
def test_explainers_and_hooks_see_messages(data: tuple[Tensor, Tensor, Tensor], device: str) -> None:
    x, edge_index, _ = data
    stock, ours = pair("GCNConv", device, WIDTH, 8)
    mask = torch.rand(E, device=device)
    loop_mask = edge_index[0] != edge_index[1]
    outs = []
    for conv in (stock, ours):
        conv.explain = True
        conv._edge_mask, conv._loop_mask, conv._apply_sigmoid = mask, loop_mask, True
        outs.append(conv(x, edge_index))
        conv.explain = False
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(stock(x, edge_index), ours(x, edge_index))
    seen: list[list[int]] = []
    handle = ours.register_message_forward_hook(lambda module, inputs, out: seen.append(list(out.shape)))
    _, happened = calls(lambda: ours(x, edge_index))
    assert happened["fallbacks"] == 1 and len(seen) == 1 and seen[0][1] == 8
    handle.remove()
    _, happened = calls(lambda: ours(x, edge_index))
    assert "fallbacks" not in happened and len(seen) == 1


@pytest.mark.pyg
def test_explainer_end_to_end(data: tuple[Tensor, Tensor, Tensor], device: str) -> None:
    from torch_geometric.explain import Explainer, GNNExplainer

    x, edge_index, _ = data

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = gsp.nn.GCNConv(WIDTH, 8), gsp.nn.SAGEConv(8, 3)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv2(self.conv1(x, edge_index).relu(), edge_index).log_softmax(-1)

    explainer = Explainer(
        Net().to(device),
        algorithm=GNNExplainer(epochs=3),
        explanation_type="model",
        edge_mask_type="object",
        model_config={"mode": "multiclass_classification", "task_level": "node", "return_type": "log_probs"},
    )
    explanation = explainer(x, edge_index, index=4)
    assert explanation.edge_mask.shape == (E,) and bool((explanation.edge_mask > 0).any())


@pytest.mark.pyg
def test_hetero(device: str) -> None:
    from torch_geometric.nn import MessagePassing, to_hetero

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = gsp.nn.SAGEConv((-1, -1), 8), gsp.nn.SAGEConv((-1, -1), 3, aggr="max")

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

    assert all(isinstance(m, MessagePassing) for m in Net().children())
    metadata = (["a", "b"], [("a", "to", "b"), ("b", "back", "a"), ("b", "self", "b")])
    model = to_hetero(Net(), metadata).to(device)
    xs = {"a": torch.randn(7, 4, device=device), "b": torch.randn(5, 6, device=device)}
    edges = {
        ("a", "to", "b"): torch.tensor([[0, 6, 3, 3], [4, 0, 0, 1]], device=device),
        ("b", "back", "a"): torch.zeros(2, 0, dtype=torch.long, device=device),
        ("b", "self", "b"): torch.tensor([[0, 1], [1, 1]], device=device),
    }
    out, happened = calls(lambda: model(xs, edges))
    assert out["a"].shape == (7, 3) and out["b"].shape == (5, 3)
    assert happened["kernel_calls"] == 6 and "fallbacks" not in happened


def test_sparse_matrices(data: tuple[Tensor, Tensor, Tensor], device: str) -> None:
    x, edge_index, weight = data
    dense = torch.zeros(N, N, device=device).index_put((edge_index[1], edge_index[0]), weight, accumulate=True)
    sage = gsp.nn.SAGEConv(WIDTH, 8, aggr="sum").to(device)
    gcn = gsp.nn.GCNConv(WIDTH, 8).to(device)
    coo = dense.to_sparse_coo()
    expected = sage.lin_l(dense @ x) + sage.lin_r(x)
    by_edges = gcn(x, coo.indices().flip(0), coo.values())
    for matrix in (coo, dense.to_sparse_csr(), dense.to_sparse_csc()):
        torch.testing.assert_close(sage(x, matrix), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gcn(x, matrix), by_edges, rtol=1e-4, atol=1e-4)


def test_static_graph_features(data: tuple[Tensor, Tensor, Tensor], device: str) -> None:
    x, edge_index, _ = data
    many = torch.stack([x, 2 * x, -x])
    for conv in (gsp.nn.GCNConv(WIDTH, 8), gsp.nn.GCNConv(WIDTH, 32), gsp.nn.SAGEConv(WIDTH, 8, aggr="max")):
        conv = conv.to(device)
        expected = torch.stack([conv(m, edge_index) for m in many])
        torch.testing.assert_close(conv(many, edge_index), expected, rtol=1e-4, atol=1e-5)


def test_self_loops_are_those_of_the_formula(data: tuple[Tensor, Tensor, Tensor], device: str) -> None:
    _, edge_index, weight = data
    g = gsp.Graph.from_edge_index(edge_index, N)
    loops = without_self_loops(g)
    loops.graph.validate()
    keep = edge_index[0] != edge_index[1]
    nodes = torch.arange(N, device=device).expand(2, -1)
    assert torch.equal(loops.graph.edge_index(), edge_index[:, keep])
    assert torch.equal(with_self_loops(loops.graph).edge_index(), torch.cat([edge_index[:, keep], nodes], 1))
    with_self_loops(loops.graph).validate()
    kept, new = loops.weights(weight, 1.0)
    assert torch.equal(kept, weight[keep])
    last = {int(s): float(w) for s, d, w in zip(*edge_index.tolist(), weight.tolist(), strict=True) if s == d}
    assert new.tolist() == pytest.approx([last.get(v, 1.0) for v in range(N)])
    # of the transpose; and of a graph that has none, which is not built again
    t = without_self_loops(g.T)
    t.graph.validate()
    assert torch.equal(t.graph.edge_index(), edge_index[:, keep].flip(0))
    assert torch.equal(with_self_loops(t.graph).edge_index(), torch.cat([edge_index[:, keep], nodes], 1).flip(0))
    assert without_self_loops(loops.graph).graph._core is loops.graph._core
    # dense formula
    dense = torch.zeros(N, N, device=device, dtype=torch.float64)
    dense.index_put_(
        (edge_index[1][keep], edge_index[0][keep]), torch.ones_like(weight[keep]).double(), accumulate=True
    )
    dense += torch.eye(N, device=device)
    root = dense.sum(1).rsqrt()
    a = gcn_norm(g, dtype=torch.float64)
    x = torch.eye(N, device=device, dtype=torch.float64)
    torch.testing.assert_close(a.product(x), root[:, None] * dense * root)
    written, numbers = a.as_edges(x.dtype)
    torch.testing.assert_close(gsp.spmm(written, x, numbers), a.product(x))
    b = gcn_norm(g.T, dtype=torch.float64)  # normalised by the degrees of its own rows
    torch.testing.assert_close(b.transposed.product(x), b.product(x).T)


def test_what_is_derived_dies_with_its_graph(data: tuple[Tensor, Tensor, Tensor], device: str, no_gc: None) -> None:
    x, edge_index, weight = data
    conv = gsp.nn.GCNConv(WIDTH, 8).to(device)
    g = gsp.Graph.from_edge_index(edge_index, N)
    run(conv, x, g)
    run(conv, x, g, weight)
    run(conv, x, g.T)
    refs = [weakref.ref(with_self_loops(without_self_loops(g).graph)._core), weakref.ref(gcn_norm(g).scale)]
    refs.append(weakref.ref(without_self_loops(g).graph._core))
    gc.collect()
    del g
    assert all(r() is None for r in refs)


@each_adjacency
@each_layer
def test_training_after_inference_mode(
    data: tuple[Tensor, Tensor, Tensor], device: str, layer: Any, plain: bool, fresh_cache: None
) -> None:
    x, edge_index, weight = data
    conv = layer().to(device)
    adjacency = edge_index if plain else gsp.Graph.from_edge_index(edge_index, N)
    args = (adjacency, weight) if isinstance(conv, gsp.nn.GCNConv) else (adjacency,)
    with torch.inference_mode():  # what is built and kept here must do for training
        conv(x, adjacency)
        conv(x, *args)
    run(conv, x, adjacency)
    run(conv, x, *args)


def test_second_derivatives(device: str) -> None:
    conv = gsp.nn.GCNConv(3, 2).to(device, torch.float64)
    x = torch.randn(6, 3, device=device, dtype=torch.float64, requires_grad=True)
    edge_index = torch.randint(6, (2, 14), device=device)
    weight = (torch.rand(14, device=device, dtype=torch.float64) + 0.1).requires_grad_()
    for args in ((x,), (x, weight)):

        def fn(x: Tensor, weight: Tensor | None = None) -> Tensor:
            return conv(x, edge_index, weight)

        assert torch.autograd.gradcheck(fn, args)
        assert torch.autograd.gradgradcheck(fn, args)


@each_layer
def test_functional_transforms(data: tuple[Tensor, Tensor, Tensor], device: str, layer: Any) -> None:
    x, edge_index, _ = data
    conv = layer().to(device)
    parameters = dict(conv.named_parameters())
    loss = lambda p: torch.func.functional_call(conv, p, (x, edge_index)).square().sum()  # noqa: E731
    grads = torch.func.grad(loss)(parameters)
    expected = torch.autograd.grad(loss(parameters), list(parameters.values()))
    torch.testing.assert_close(list(grads.values()), list(expected), rtol=1e-4, atol=1e-4)


@each_layer
def test_empty_graphs(device: str, layer: Any) -> None:
    conv = layer().to(device)
    none = torch.zeros(2, 0, dtype=torch.long, device=device)
    assert conv(torch.randn(4, WIDTH, device=device), none).shape[0] == 4
    assert conv(torch.randn(0, WIDTH, device=device), none).shape[0] == 0


def test_errors_say_what_to_do(data: tuple[Tensor, Tensor, Tensor], device: str) -> None:
    x, edge_index, weight = data
    gcn, sage = gsp.nn.GCNConv(WIDTH, 8).to(device), gsp.nn.SAGEConv(WIDTH, 8).to(device)
    with pytest.raises(ValueError, match="does not support bipartite"):
        gcn((x, x), edge_index)
    with pytest.raises(TypeError, match="int32 or torch"):
        sage(x, edge_index.float())
    with pytest.raises(ValueError, match=r"shape \[2, num_edges\]"):
        sage(x, edge_index.T.contiguous())
    with pytest.raises(TypeError, match=r"must be a gnn_spmm_plugin\.Graph"):
        gcn(x, [[0], [1]])
    with pytest.raises(IndexError, match="edge 5"):
        bad = edge_index.clone()
        bad[1, 5] = N
        sage(x, bad)
    with pytest.raises(ValueError, match="weight must have shape"):
        gcn(x, edge_index, weight[:-1])
    with pytest.raises(ValueError, match="as many source as destination"):
        gcn(x, gsp.Graph.from_edge_index(edge_index, (N, N + 1)))
    with pytest.raises(ValueError, match="size says"):
        sage((x, x), edge_index, size=(N, N + 1))
    with pytest.raises(ValueError, match="policy must be one of"):
        gsp.nn.GCNConv(WIDTH, 8, policy="fastest")
    with pytest.raises(ValueError, match="normalize=True"):
        gsp.nn.GCNConv(WIDTH, 8, normalize=False, add_self_loops=True)
    with pytest.raises(ValueError, match="project=True"):
        gsp.nn.SAGEConv(-1, 8, project=True)


def test_policy_reaches_the_operator(data: tuple[Tensor, Tensor, Tensor], device: str) -> None:
    x, edge_index, _ = data
    for policy in gsp.plan.__globals__["POLICIES"]:
        for conv in (
            gsp.nn.GCNConv(WIDTH, 8, policy=policy),
            gsp.nn.SAGEConv(WIDTH, 8, policy=policy),
            gsp.nn.GINConv(mlp(), policy=policy),
        ):
            conv.to(device)(x, edge_index)


@each_adjacency
def test_policy_compiles(data: tuple[Tensor, Tensor, Tensor], device: str, plain: bool) -> None:
    x, edge_index, _ = data
    conv = gsp.nn.GCNConv(WIDTH, 8, policy="csr").to(device)
    torch._dynamo.reset()
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    for seed in range(3):  # one plan must not serve another graph
        graph = edge_index[:, torch.randperm(E, generator=torch.Generator().manual_seed(seed), device="cpu").to(device)]
        graph = graph[:, : E - 10 * seed]
        adjacency = graph if plain else gsp.Graph.from_edge_index(graph, N)
        torch.testing.assert_close(compiled(x, adjacency), conv(x, adjacency), rtol=1e-4, atol=1e-5)


WITHOUT_PYG = """
import sys
sys.modules["torch_geometric"] = None
import copy, pickle, torch
import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.nn.host import HAS_PYG
assert not HAS_PYG
saved = torch.load(sys.argv[1])
torch.manual_seed(3)
layers = {
    "gcn": gsp.nn.GCNConv(16, 8), "pool": gsp.nn.SAGEConv(16, 8, aggr="pool"),
    "many": gsp.nn.SAGEConv(16, 8, aggr=["mean", "max"]),
    "gin": gsp.nn.GINConv(torch.nn.Sequential(torch.nn.Linear(16, 4)), train_eps=True), "lazy": gsp.nn.GCNConv(-1, 8),
}
for name, layer in layers.items():
    if name != "lazy":
        for key, value in saved["state"][name].items():
            assert torch.equal(layer.state_dict()[key], value), (name, key)
    layer.load_state_dict(saved["state"][name])
    for conv in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        before = gsp.stats()["kernel_calls"]
        out = conv(saved["x"], saved["edge_index"])
        assert gsp.stats()["kernel_calls"] > before
        torch.testing.assert_close(out, saved["out"][name], rtol=1e-4, atol=1e-5)
    print(layer)

class Own(gsp.nn.SpMMConv):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)
assert Own()(saved["x"], saved["edge_index"]).shape == saved["x"].shape

class Message(Own):
    def message(self, x_i, x_j):
        return x_i * x_j
for bad in (Message, lambda: gsp.nn.SAGEConv(16, 8, aggr="lstm"), lambda: gsp.nn.SpMMConv(aggr="median")):
    try:
        bad()
    except ValueError as e:
        assert "torch_geometric" in str(e), e
    else:
        raise AssertionError(bad)
torch._dynamo.reset()
compiled = torch.compile(layers["gcn"], fullgraph=True, backend="aot_eager")
torch.testing.assert_close(compiled(saved["x"], saved["edge_index"]), saved["out"]["gcn"], rtol=1e-4, atol=1e-5)
print("ok")
"""


@pytest.mark.pyg
def test_without_pyg(data: tuple[Tensor, Tensor, Tensor], tmp_path: Path) -> None:
    """Start values, checkpoints and results of PyG's layers, in a process that has no PyG."""
    import torch_geometric.nn as pyg

    x, edge_index, _ = (t.cpu() for t in data)
    torch.manual_seed(3)
    layers = {
        "gcn": pyg.GCNConv(16, 8),
        "pool": pyg.SAGEConv(16, 8, aggr="max", project=True),
        "many": pyg.SAGEConv(16, 8, aggr=["mean", "max"]),
        "gin": pyg.GINConv(torch.nn.Sequential(torch.nn.Linear(16, 4)), train_eps=True),
        "lazy": pyg.GCNConv(-1, 8),
    }
    out = {name: layer(x, edge_index).detach() for name, layer in layers.items()}
    state = {name: layer.state_dict() for name, layer in layers.items()}
    torch.save({"x": x, "edge_index": edge_index, "out": out, "state": state}, tmp_path / "saved.pt")
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_PYG, str(tmp_path / "saved.pt")],
        capture_output=True,
        text=True,
        env={**__import__("os").environ, "PYTHONPATH": str(Path(gsp.__file__).parents[1])},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "ok"
