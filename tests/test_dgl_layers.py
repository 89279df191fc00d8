"""DGL's layers that run as a whole, against DGL's own, whatever their options; and what is left to DGL."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from dgl_cases import Counted, assert_same, graph
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import report

pytestmark = pytest.mark.dgl

NORMS = ("none", "both", "left", "right")


class Passes(TorchDispatchMode):
    """The operators that run on matrices of ten rows or more."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() > 1 and len(out) >= 10:
            self.operators.append(func._schema.name)
        return out


def step(layer: Any, g: Any, x: Any, **given: Any) -> list[Tensor]:
    """The output and all gradients."""
    inputs = [t.detach().clone().requires_grad_() for t in (x if isinstance(x, tuple) else (x,))]
    edges = [t for t in given.values() if isinstance(t, Tensor) and t.requires_grad]
    torch.manual_seed(1)  # of dropout
    out = layer(g, tuple(inputs) if isinstance(x, tuple) else inputs[0], **given)
    weights = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).cos()
    parameters = [p for p in layer.parameters() if p.requires_grad]
    grads = torch.autograd.grad((out * weights).sum(), [*inputs, *edges, *parameters], allow_unused=True)
    return [out.detach(), *(torch.zeros(()).double() if t is None else t for t in grads)]


def places() -> dict[str, tuple[Any, Any]]:
    """Graphs and what is convolved on them: one, one with self loops, a bipartite one, a block."""
    dgl = gsp.import_dgl()
    g = graph()
    pair = dgl.heterograph({("a", "to", "b"): (torch.arange(20) % 7, torch.arange(20) % 5)})
    block = dgl.to_block(dgl.add_self_loop(g), torch.arange(10))
    x = torch.randn(10, 6, dtype=torch.float64)
    return {
        "graph": (g, x),
        "loops": (dgl.add_self_loop(g), x),
        "pair": (pair, (torch.randn(7, 6).double(), torch.randn(5, 6).double())),
        "block": (block, torch.randn(block.num_src_nodes(), 6).double()),
        "reverse": (dgl.reverse(dgl.add_self_loop(g)), x),
    }


PLACES = ("graph", "loops", "pair", "block", "reverse")


def check(layer: Any, g: Any, x: Any, name: str, **given: Any) -> None:
    expected = step(layer, g, x, **given)
    for _ in range(2):
        with Counted() as c:
            found = step(layer, g, x, **given)
            seen = report(layer).rows[0]
        assert_same(found, expected)
        assert c.calls > 0 and c.fallbacks == 0
        assert name in seen["ops"], seen
    assert c.transposes == 0


@pytest.mark.parametrize(
    "norm, width, bias, weighted, place", [*itertools.product(NORMS, (4, 6, 9), (False, True), (None, 1, 2), PLACES)]
)
def test_graph_conv(norm: str, width: int, bias: bool, weighted: int | None, place: str) -> None:
    from dgl.nn import GraphConv

    torch.manual_seed(0)
    g, x = places()[place]
    layer = GraphConv(6, width, norm=norm, bias=bias, activation=torch.tanh, allow_zero_in_degree=True).double()
    if bias:
        nn.init.uniform_(layer.bias)
    shape = (g.num_edges(), 1)[: weighted or 0]
    given = {} if weighted is None else {"edge_weight": torch.rand(shape, dtype=torch.float64, requires_grad=True)}
    name = "sum" if norm == "none" else "normalised sum"
    check(layer, g, x, f"{name} + bias" if bias and width < 6 else name, **given)


def test_graph_conv_without_its_own_weight() -> None:
    from dgl.nn import GraphConv

    torch.manual_seed(0)
    g, x = places()["loops"]
    layer = GraphConv(6, 6, weight=False).double()
    check(layer, g, x, "normalised sum + bias")
    check(layer, g, x, "normalised sum", weight=torch.randn(6, 6).double().requires_grad_())
    with gsp.patch_dgl(), pytest.raises(gsp.import_dgl().DGLError, match="External weight"):
        GraphConv(6, 4).double()(g, x, weight=torch.randn(6, 4).double())


@pytest.mark.parametrize(
    "reduce, learned, weighted, place", [*itertools.product(("sum", "mean"), (False, True), (None, 1, 2), PLACES)]
)
def test_gin(reduce: str, learned: bool, weighted: int | None, place: str) -> None:
    from dgl.nn import GINConv

    torch.manual_seed(0)
    g, x = places()[place]
    layer = GINConv(nn.Linear(6, 5), reduce, 0.3, learned, torch.tanh).double()
    shape = (g.num_edges(), 1)[: weighted or 0]
    given = {} if weighted is None else {"edge_weight": torch.rand(shape, dtype=torch.float64, requires_grad=True)}
    check(layer, g, x, f"{reduce} + self", **given)


@pytest.mark.parametrize(
    "kind, width, weighted, place", [*itertools.product(("mean", "pool"), (4, 6, 9), (None, 1, 2), PLACES)]
)
def test_sage(kind: str, width: int, weighted: int | None, place: str) -> None:
    from dgl.nn import SAGEConv

    torch.manual_seed(0)
    g, x = places()[place]
    layer = SAGEConv(6, width, kind, 0.5, True, nn.LayerNorm(width), torch.tanh).double()
    shape = (g.num_edges(), 1)[: weighted or 0]
    given = {} if weighted is None else {"edge_weight": torch.randn(shape, dtype=torch.float64, requires_grad=True)}
    name = "max" if kind == "pool" else "mean + self" if width < 6 else "mean"
    check(layer, g, x, name, **given)


@pytest.mark.parametrize("kind", ["GraphConv", "mean", "pool", "GIN", "GAT", "GATv2"])
def test_a_step_writes_no_zeros_to_add_to(kind: str) -> None:
    """Each pass over the nodes' features is one that the layer's mathematics asks for."""
    from dgl import nn as layers

    layer = {
        "GraphConv": lambda: layers.GraphConv(6, 4),
        "GIN": lambda: layers.GINConv(nn.Linear(6, 4)),
        "GAT": lambda: layers.GATConv(6, 4, 2),
        "GATv2": lambda: layers.GATv2Conv(6, 4, 2),
    }.get(kind, lambda: layers.SAGEConv(6, 4, kind))()
    g, x = places()["loops"]
    layer, x, grad = layer.double(), x.requires_grad_(), None
    with Counted() as c:
        for _ in range(2):  # what the graph keeps is there in the second
            out = layer(g, x)
            grad = torch.randn_like(out) if grad is None else grad
            with Passes() as seen:
                torch.autograd.grad(layer(g, x), [x, *layer.parameters()], grad)
    assert c.calls > 0 and len(seen.operators) > 2
    assert not {"aten::new_zeros", "aten::zeros", "aten::copy_", "aten::slice_backward"} & set(seen.operators)


def test_pooling_of_values_below_zero() -> None:
    """What ReLU cuts off has no gradient, whichever edge the maximum came by."""
    from dgl.nn import SAGEConv

    g, x = places()["loops"]
    layer = SAGEConv(6, 4, "pool").double()
    with torch.no_grad():
        layer.fc_pool.bias[:3] = -100.0
    for given in ({}, {"edge_weight": -torch.rand(g.num_edges(), 1, dtype=torch.float64, requires_grad=True)}):
        check(layer, g, x, "max", **given)


@pytest.mark.parametrize("half", [torch.float32, torch.bfloat16])
def test_gin_of_other_dtypes_gives_what_its_eps_makes_of_them(half: torch.dtype) -> None:
    from dgl.nn import GINConv

    g, x = places()["loops"]
    layer, x = GINConv(None, "sum"), x.to(half)
    with Counted() as c:
        out = layer(g, x)
    assert out.dtype == torch.float32 and c.calls == 1
    torch.testing.assert_close(out, layer(g, x.float()), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("residual, dropout, place", [*itertools.product((None, 5, 3), (0.0, 0.5), PLACES)])
@pytest.mark.parametrize("kind", ["GATConv", "GATv2Conv"])
def test_attention(kind: str, residual: int | None, dropout: float, place: str) -> None:
    from dgl import nn as layers

    torch.manual_seed(0)
    g, x = places()[place]
    g = gsp.import_dgl().add_self_loop(g) if place == "graph" else g
    width = 3 if residual == 3 else 5  # of 2 heads: the features themselves, or a linear layer of them
    sizes = (6, 6) if place == "pair" else 6
    layer = getattr(layers, kind)(
        *(sizes, width, 2, dropout, dropout, 0.1, residual is not None, torch.tanh), allow_zero_in_degree=True
    ).double()
    score = "sum" if kind == "GATConv" else "pair"
    check(layer, g, x, f"attention ({score})")
    check(layer.eval(), g, x, f"attention ({score})")


def test_attention_of_pairs_that_share_a_linear_layer() -> None:
    from dgl.nn import GATConv

    g, x = places()["pair"]
    check(GATConv(6, 5, 2).double(), g, x, "attention (sum)")


def test_v2_with_shared_weights() -> None:
    from dgl.nn import GATv2Conv

    g, x = places()["loops"]
    check(GATv2Conv(6, 5, 2, share_weights=True).double(), g, x, "attention (pair)")


def test_what_is_not_known_is_dgls() -> None:
    """Each layer gives what DGL gives, and does not run as a whole."""
    from dgl import nn as layers

    class Own(layers.GraphConv):  # type: ignore[misc]
        pass

    torch.manual_seed(0)
    g, x = places()["loops"]
    wide = torch.randn(10, 2, 6).double()
    replaced = layers.GATConv(6, 5, 2).double()
    replaced.leaky_relu = nn.ELU()
    hooked = layers.GATConv(6, 5, 2).double()
    hooked.attn_drop.register_forward_hook(lambda module, given, out: out * 2)
    weights = torch.rand(g.num_edges(), 6).double()
    for layer, features, given in (
        (Own(6, 4).double(), x, {}),
        (layers.GraphConv(6, 4).double(), wide, {}),
        (layers.GINConv(None, "max").double(), x, {}),
        (layers.SAGEConv(6, 4, "gcn").double(), x, {}),
        (layers.SAGEConv(6, 4, "mean").double(), x, {"edge_weight": torch.rand(g.num_edges(), 6).double()[:, :4]}),
        (layers.GINConv(None, "sum").double(), x, {"edge_weight": weights}),
        (replaced, x, {}),
        (hooked, x, {}),
        (layers.GATConv(6, 5, 2).double(), x, {"edge_weight": torch.rand(g.num_edges()).double()}),
    ):
        expected = step(layer, g, features, **given)
        with Counted() as c:
            found = step(layer, g, features, **given)
            seen = report(layer).rows[0]["ops"]
        assert_same(found, expected)
        assert c.calls > 0
        assert not any(op.startswith(("normalised", "attention")) or "+" in op for op in seen), seen
    with gsp.patch_dgl():
        assert replaced(g, x, get_attention=True)[1].shape == (g.num_edges(), 2, 1)


@pytest.mark.parametrize("kind", ["GraphConv", "GATConv", "GATv2Conv"])
def test_nodes_without_edges_are_refused_as_dgl_refuses_them(kind: str) -> None:
    dgl = gsp.import_dgl()
    from dgl import nn as layers

    g, x = places()["graph"]
    layer = layers.GraphConv(6, 4) if kind == "GraphConv" else getattr(layers, kind)(6, 4, 2)
    empty = dgl.graph(([], []), num_nodes=10)
    with gsp.patch_dgl():
        for there in (g, empty):
            with pytest.raises(dgl.DGLError, match="0-in-degree"):
                layer.double()(there, x)
        layer.set_allow_zero_in_degree(True)
        assert layer(empty, x).shape[0] == 10


def test_forward_is_dgls_own_again() -> None:
    from dgl.nn import GATConv, GraphConv

    before = GraphConv.__dict__["forward"], GATConv.__dict__["forward"]
    with gsp.patch_dgl():
        kept = GraphConv.forward
        assert kept is not before[0]
    assert (GraphConv.__dict__["forward"], GATConv.__dict__["forward"]) == before
    g, x = places()["loops"]
    calls = gsp.stats()["kernel_calls"]
    layer = GraphConv(6, 4).double()
    torch.testing.assert_close(kept(layer, g, x), layer(g, x))  # somebody may have kept it
    assert gsp.stats()["kernel_calls"] == calls


def test_twice_differentiable() -> None:
    from dgl import nn as layers

    torch.manual_seed(0)
    g, x = places()["loops"]
    x = x.requires_grad_()
    for layer in (
        layers.GraphConv(6, 4),
        layers.GINConv(None, "mean"),
        layers.GATConv(6, 4, 2),
        layers.GATv2Conv(6, 4, 2),
    ):
        layer = layer.double()
        with Counted() as c:
            assert torch.autograd.gradgradcheck(lambda x, layer=layer: layer(g, x), x)
        assert c.calls > 0
