"""`gsp.nn.GATConv`: against PyG's, and with a Graph, compiled, transformed, explained, and without PyG."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pyg_layers import assert_same, changes, outputs_and_gradients, random_graph, tg
from torch import Tensor

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.plan import WARM_AFTER

N, E, WIDTH = 24, 150, 6
FLOWS = ("source_to_target", "target_to_source")
needs_pyg = pytest.mark.pyg
each_adjacency = pytest.mark.parametrize("plain", [False, True], ids=["Graph", "edge_index"])


def pair(device: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """PyG's layer and ours, of the same seed, in float64."""
    made = []
    for cls in (tg.GATConv, gsp.nn.GATConv):
        torch.manual_seed(0)
        made.append(cls(*args, **kwargs).to(device, torch.float64))
    return made[0], made[1]


@pytest.fixture
def edge_index(device: str) -> Tensor:
    return random_graph(N, N, E, device=device)


@pytest.fixture
def x(device: str) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(N, WIDTH, dtype=torch.float64, device=device)


@needs_pyg
@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize(
    "kwargs",
    [
        {"heads": 3},
        {"heads": 3, "concat": False, "residual": True},
        {"add_self_loops": False, "bias": False},
        {"heads": 2, "dropout": 0.5, "negative_slope": 0.05},
        {"heads": 2, "aggr": "mean"},
        {"heads": 2, "aggr": "max", "dropout": 0.3},
    ],
    ids=str,
)
def test_equals_pyg(x: Tensor, edge_index: Tensor, device: str, kwargs: dict[str, Any], flow: str) -> None:
    stock, ours = pair(device, WIDTH, 5, flow=flow, **kwargs)
    assert list(stock.state_dict()) == list(ours.state_dict())
    for a, b in zip(stock.state_dict().values(), ours.state_dict().values(), strict=True):
        assert torch.equal(a, b)  # the same start values from the same seed
    graph = gsp.Graph.from_edge_index(edge_index, N, flow=flow).with_weight(torch.rand(E, device=device))
    every: list[Any] = [edge_index, edge_index.int(), graph]
    if flow == "source_to_target":
        adjacency = torch.sparse_coo_tensor(edge_index.flip(0), torch.ones(E, device=device), (N, N))
        every += [adjacency] if "dropout" not in kwargs else []  # whose edges have another order
    for adjacency, training in itertools.product(every, (True, False)):
        stock.train(training)
        ours.train(training)

        def call(x: Tensor, layer: Any, edges: Any) -> Any:
            torch.manual_seed(3)
            return layer(x, edges)

        expected = outputs_and_gradients(stock, lambda x: call(x, stock, edge_index), x)
        assert_same(outputs_and_gradients(ours, lambda x, a=adjacency: call(x, ours, a), x), expected)


@needs_pyg
def test_bipartite(device: str) -> None:
    edge_index = random_graph(N, 13, E, device=device)
    x = torch.randn(N, WIDTH, dtype=torch.float64, device=device)
    own = torch.randn(13, 4, dtype=torch.float64, device=device)
    for loops in (True, False):
        stock, ours = pair(device, (WIDTH, 4), 5, 2, add_self_loops=loops, residual=True)
        graph = gsp.Graph.from_edge_index(edge_index, (N, 13))
        for given, size in ((own, None), (own, (N, 13)), (None, (N, 13))):

            def call(x: Tensor, o: Tensor | None, layer: Any, edges: Any, size: Any) -> Any:
                return layer((x, o), edges, size=size)

            how = {"edges": edge_index, "size": size}
            expected = outputs_and_gradients(stock, functools.partial(call, layer=stock, **how), x, given)
            assert_same(outputs_and_gradients(ours, functools.partial(call, layer=ours, **how), x, given), expected)
            how = {"edges": graph, "size": None}
            assert_same(outputs_and_gradients(ours, functools.partial(call, layer=ours, **how), x, given), expected)


@needs_pyg
@pytest.mark.parametrize("flow", FLOWS)
def test_attention_weights(x: Tensor, edge_index: Tensor, device: str, flow: str) -> None:
    stock, ours = pair(device, WIDTH, 5, 2, flow=flow)
    expected, (edges, alpha) = stock(x, edge_index, return_attention_weights=True)
    for adjacency in (edge_index, gsp.Graph.from_edge_index(edge_index, N, flow=flow)):
        got, (our_edges, our_alpha) = ours(x, adjacency, return_attention_weights=True)
        assert torch.equal(our_edges, edges)
        assert_same([got.detach(), our_alpha.detach()], [expected.detach(), alpha.detach()])


@needs_pyg
def test_explainers_and_hooks_see_messages(x: Tensor, edge_index: Tensor, device: str) -> None:
    stock, ours = pair(device, WIDTH, 5, 2)
    mask = torch.rand(E, dtype=torch.float64, device=device)
    for conv in (stock, ours):
        conv.explain, conv._edge_mask, conv._apply_sigmoid = True, mask, True
        conv._loop_mask = edge_index[0] != edge_index[1]
    assert_same([ours(x, edge_index).detach()], [stock(x, edge_index).detach()])
    for conv in (stock, ours):
        conv.explain = False
    seen: list[Tensor] = []
    for conv in (stock, ours):
        conv.register_message_forward_hook(lambda c, i, o: seen.append(o.detach()))
        conv(x, edge_index)
    assert_same(seen[1:], seen[:1])


@needs_pyg
def test_hetero(device: str) -> None:
    net = tg.to_hetero(_Net(), (["a", "b"], [("a", "x", "b"), ("b", "y", "a")])).to(device)
    x = {"a": torch.randn(9, WIDTH, device=device), "b": torch.randn(7, WIDTH, device=device)}
    edges = {("a", "x", "b"): random_graph(9, 7, 30, device=device), ("b", "y", "a"): random_graph(7, 9, 30)}
    out = net(x, {k: e.to(device) for k, e in edges.items()})
    assert out["a"].shape == (9, 8) and out["b"].shape == (7, 8)


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = gsp.nn.GATConv((WIDTH, WIDTH), 4, 2, add_self_loops=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index)
        return out


# ---------------------------------------------------------------------- what needs no PyG


def train(conv: Any, x: Tensor, adjacency: Any) -> list[Tensor]:
    conv.zero_grad()
    leaf = x.detach().clone().requires_grad_()
    out = conv(leaf, adjacency)
    out.square().sum().backward()
    return [out.detach(), leaf.grad, *(p.grad for p in conv.parameters())]  # type: ignore[list-item]


@each_adjacency
def test_a_steady_step_builds_nothing(
    x: Tensor, edge_index: Tensor, device: str, plain: bool, fresh_cache: None
) -> None:
    conv = gsp.nn.GATConv(WIDTH, 5, 2).to(device, torch.float64)
    adjacency = edge_index if plain else gsp.Graph.from_edge_index(edge_index, N)
    for _ in range(WARM_AFTER + 1):
        train(conv, x, adjacency)
    happened = changes(lambda: train(conv, x, adjacency))
    # scores, softmax and sum; back through the sum (features, coefficients), the softmax, the scores (both ends). The
    # way back to the features reads coefficients in another order of the edges.
    assert happened == {"kernel_calls": 8, "weight_permutes": 1, **({"plan_hits": 1} if plain else {})}


@each_adjacency
def test_compiles_without_a_graph_break(x: Tensor, edge_index: Tensor, device: str, plain: bool) -> None:
    conv = gsp.nn.GATConv(WIDTH, 5, 2, residual=True).to(device, torch.float64)
    adjacency = edge_index if plain else gsp.Graph.from_edge_index(edge_index, N)
    expected = train(conv, x, adjacency)
    torch._dynamo.reset()
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    assert_same(train(compiled, x, adjacency), expected)
    train(compiled, x, adjacency)
    happened = changes(lambda: train(compiled, x, adjacency))
    assert happened["kernel_calls"] >= 8 and "graphs_built" not in happened and "plans_built" not in happened
    other = random_graph(N, N, E - 20, seed=5, device=device)
    adjacency = other if plain else gsp.Graph.from_edge_index(other, N)
    assert_same(train(compiled, x, adjacency), train(conv, x, adjacency))


@each_adjacency
def test_compiled_dropout(x: Tensor, edge_index: Tensor, device: str, plain: bool) -> None:
    """Drops coefficients with the right probability, the same ones forward and backward."""
    conv = gsp.nn.GATConv(WIDTH, 8, 4, dropout=0.5, bias=False).to(device, torch.float64)
    torch.nn.init.zeros_(conv.att_src)  # so that coefficients are 1 / degree, and outputs linear in x
    torch.nn.init.zeros_(conv.att_dst)
    adjacency = edge_index if plain else gsp.Graph.from_edge_index(edge_index, N)
    torch._dynamo.reset()
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    leaf = x.clone().requires_grad_()
    outs = [compiled(leaf, adjacency) for _ in range(200)]
    expected = conv.eval()(x, adjacency).detach()
    mean = torch.stack(outs).mean(0).detach()
    assert 0 < float((mean - expected).abs().mean()) < 0.15 * float(expected.abs().mean())
    assert not torch.equal(outs[0], outs[1])
    out = outs[0]
    (grad,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
    torch.testing.assert_close((grad * x).sum(), out.sum())  # linear in x: <gradient, x> is the output


def test_dropout_of_everything_and_nothing(x: Tensor, edge_index: Tensor, device: str) -> None:
    conv = gsp.nn.GATConv(WIDTH, 5, 2, dropout=1.0, bias=False).to(device, torch.float64)
    assert float(conv(x, edge_index).abs().max()) == 0
    conv.eval()
    plain = gsp.nn.GATConv(WIDTH, 5, 2, bias=False).to(device, torch.float64)
    plain.load_state_dict(conv.state_dict())
    assert torch.equal(conv(x, edge_index), plain(x, edge_index))


def test_second_derivatives(device: str) -> None:
    conv = gsp.nn.GATConv(3, 2, 2).to(device, torch.float64)
    x = torch.randn(6, 3, device=device, dtype=torch.float64, requires_grad=True)
    edge_index = random_graph(6, 6, 14, device=device)
    assert torch.autograd.gradcheck(lambda x, *_: conv(x, edge_index), (x, *conv.parameters()))
    assert torch.autograd.gradgradcheck(lambda x, *_: conv(x, edge_index), (x, *conv.parameters()))


def test_functional_transforms(x: Tensor, edge_index: Tensor, device: str) -> None:
    conv = gsp.nn.GATConv(WIDTH, 5, 2).to(device, torch.float64)
    parameters = dict(conv.named_parameters())

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(conv, p, (x, edge_index)).square().sum()  # type: ignore[no-any-return]

    grads = torch.func.grad(loss)(parameters, x)
    expected = torch.autograd.grad(loss(parameters, x), list(parameters.values()))
    assert_same(list(grads.values()), list(expected))
    many = torch.stack([x, 2 * x])
    got = torch.func.vmap(lambda x: loss(parameters, x))(many)
    assert_same([got.detach()], [torch.stack([loss(parameters, t) for t in many]).detach()])


@each_adjacency
def test_training_after_inference_mode(
    x: Tensor, edge_index: Tensor, device: str, plain: bool, fresh_cache: None
) -> None:
    conv = gsp.nn.GATConv(WIDTH, 5, 2).to(device, torch.float64)
    adjacency = edge_index if plain else gsp.Graph.from_edge_index(edge_index, N)
    with torch.inference_mode():  # what is built and kept here must do for training
        expected = conv(x, adjacency)
    assert_same(train(conv, x, adjacency)[:1], [expected.clone()])


def test_copies_and_empty_graphs(x: Tensor, edge_index: Tensor, device: str) -> None:
    conv = gsp.nn.GATConv(WIDTH, 5, 2).to(device, torch.float64)
    expected = conv(x, edge_index)
    for other in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        assert torch.equal(other(x, edge_index), expected)
    none = torch.zeros(2, 0, dtype=torch.long, device=device)
    for loops in (True, False):
        conv = gsp.nn.GATConv(WIDTH, 5, 2, add_self_loops=loops).to(device, torch.float64)
        assert conv(x[:4], none).shape == (4, 10)
        assert conv(x[:0], none).shape == (0, 10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(x: Tensor, edge_index: Tensor, device: str, dtype: torch.dtype) -> None:
    conv = gsp.nn.GATConv(WIDTH, 5, 2).to(device)
    expected = conv(x.float(), edge_index)
    with torch.autocast(device, dtype):
        out = conv(x.float(), edge_index)
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.1)


def test_errors_say_what_to_do(x: Tensor, edge_index: Tensor, device: str) -> None:
    conv = gsp.nn.GATConv(WIDTH, 5).to(device, torch.float64)
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: gsp.nn.GATConv(4, 4, edge_dim=3), ValueError, "torch_geometric.nn.GATConv"),
        (lambda: conv(x, edge_index, torch.ones(E, 3)), ValueError, "edge_attr=None"),
        (lambda: conv(x.unsqueeze(0), edge_index), ValueError, r"\[num_nodes, channels\]"),
        (lambda: conv(x, edge_index + N), IndexError, "must lie in"),
        (lambda: conv(x, edge_index.t()), ValueError, "transpose"),
        (lambda: conv((x, x[:5]), gsp.Graph.from_edge_index(edge_index, N)), ValueError, "destination"),
    ]
    for call, kind, message in cases:
        with pytest.raises(kind, match=message):
            call()


WITHOUT_PYG = """
import sys
sys.modules["torch_geometric"] = None
import torch
import gnn_spmm_plugin as gsp
saved = torch.load(sys.argv[1])
torch.manual_seed(3)
layer = gsp.nn.GATConv(6, 5, 2, residual=True)
for key, value in saved["state"].items():
    assert torch.equal(layer.state_dict()[key], value), key
for adjacency in (saved["edge_index"], gsp.Graph.from_edge_index(saved["edge_index"], 24)):
    torch.testing.assert_close(layer(saved["x"], adjacency), saved["out"], rtol=1e-4, atol=1e-5)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(saved["x"], adjacency), saved["out"], rtol=1e-4, atol=1e-5)
    layer(saved["x"], adjacency, return_attention_weights=True)
print(layer)
"""


@needs_pyg
def test_without_pyg(x: Tensor, edge_index: Tensor, tmp_path: Path) -> None:
    """Start values and results of PyG's layer, in a process that has no PyG."""
    x, edge_index = x.cpu().float(), edge_index.cpu()
    torch.manual_seed(3)
    stock = tg.GATConv(WIDTH, 5, 2, residual=True)
    saved = {"x": x, "edge_index": edge_index, "out": stock(x, edge_index).detach(), "state": stock.state_dict()}
    torch.save(saved, tmp_path / "saved.pt")
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_PYG, str(tmp_path / "saved.pt")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(gsp.__file__).parents[1])},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "GATConv(6, 5, heads=2)"
