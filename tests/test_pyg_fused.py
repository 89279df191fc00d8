"""Every layer without attention that can be fused, on every kind of graph: values and all gradients are stock PyG's.

In float64, and with proof that kernels ran and that nothing was left to PyG: equal numbers alone show neither.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pyg_layers import Custom, assert_same, kernel_calls, outputs_and_gradients, random_graph, tg
from torch import Tensor, nn

import gnn_spmm_plugin as gsp

pytestmark = pytest.mark.pyg

N, M, E, F, R = 24, 15, 130, 4, 3
MANY = ["sum", "mean", "max", "min", "std", "var"]


def scalers(**kw: Any) -> nn.Module:
    names = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]
    aggr = tg.aggr.DegreeScalerAggregation(["mean", "max", "std"], names, torch.tensor([1, 2, 3]))
    return tg.SAGEConv((15 * F, F), 3, aggr=aggr, **kw)


def pna(aggregators: list[str], **kw: Any) -> nn.Module:
    return tg.PNAConv(F, 6, aggregators, ["identity", "amplification", "linear"], torch.tensor([1, 2, 3]), **kw)


# name: (layer, its arguments after the features; "w": edge weight, "e": edge features, "t": edge type)
BOTH_SIDES: dict[str, tuple[Callable[..., nn.Module], str]] = {
    "sage_mean": (lambda **k: tg.SAGEConv(F, 3, **k), ""),
    "sage_max": (lambda **k: tg.SAGEConv(F, 3, aggr="max", **k), ""),
    "sage_many": (lambda **k: tg.SAGEConv(F, 3, aggr=MANY, **k), ""),
    "sage_scalers": (scalers, ""),
    "gin": (lambda **k: tg.GINConv(nn.Linear(F, 3), train_eps=True, **k), ""),
    "gine": (lambda **k: tg.GINEConv(nn.Linear(F, 3), train_eps=True, **k), "e"),
    "gine_edge_dim": (lambda **k: tg.GINEConv(nn.Linear(F, 3), edge_dim=F, **k), "e"),
    "gine_mean": (lambda **k: tg.GINEConv(nn.Linear(F, 3), aggr="mean", **k), "e"),
    "graph": (lambda **k: tg.GraphConv(F, 3, **k), "w"),
    "graph_max": (lambda **k: tg.GraphConv(F, 3, aggr="max", **k), "w"),
    "mf": (lambda **k: tg.MFConv(F, 3, 4, **k), ""),
    "simple": (lambda **k: tg.SimpleConv("mean", **k), "w"),
    "wl": (lambda **k: tg.WLConvContinuous(**k), "w"),
    "gen": (lambda **k: tg.GENConv(F, F, aggr="add", **k), ""),
    "gen_max": (lambda **k: tg.GENConv(F, F, aggr="max", **k), ""),
    "gen_edges": (lambda **k: tg.GENConv(F, F, aggr="mean", edge_dim=F, **k), "e"),
    "general": (lambda **k: tg.GeneralConv(F, 3, heads=2, **k), ""),
    "general_both": (lambda **k: tg.GeneralConv(F, 3, directed_msg=False, aggr="mean", **k), ""),
    "general_edges": (lambda **k: tg.GeneralConv(F, 3, F, l2_normalize=True, **k), "e"),
    "le": (lambda **k: tg.LEConv(F, 3, **k), "w"),
    "le_mean": (lambda **k: tg.LEConv(F, 3, aggr="mean", **k), "w"),
    "film": (lambda **k: tg.FiLMConv(F, 3, act=None, **k), ""),
    "film_sum": (lambda **k: tg.FiLMConv(F, 3, act=None, aggr="sum", **k), ""),
    "film_typed": (lambda **k: tg.FiLMConv(F, 3, R, act=None, **k), "t"),
    "rgcn": (lambda **k: tg.RGCNConv(F, 3, R, **k), "t"),
    "rgcn_sum": (lambda **k: tg.RGCNConv(F, 3, R, aggr="sum", root_weight=False, **k), "t"),
    "rgcn_bases": (lambda **k: tg.RGCNConv(F, 3, R, num_bases=2, **k), "t"),
    "rgcn_blocks": (lambda **k: tg.RGCNConv(F, 6, R, num_blocks=2, bias=False, **k), "t"),
    "rgcn_max": (lambda **k: tg.RGCNConv(F, 3, R, aggr="max", **k), "t"),
}
ONE_SIDE: dict[str, tuple[Callable[..., nn.Module], str]] = {
    "gcn": (lambda **k: tg.GCNConv(F, 3, **k), "w"),
    "gcn2": (lambda **k: Second(tg.GCN2Conv(F, 0.1, **k)), "w"),
    "appnp": (lambda **k: tg.APPNP(2, 0.1, **k), "w"),
    "sg": (lambda **k: tg.SGConv(F, 3, 2, **k), "w"),
    "ssg": (lambda **k: tg.SSGConv(F, 3, 0.1, 2, **k), "w"),
    "tag": (lambda **k: tg.TAGConv(F, 3, 2, **k), "w"),
    "lg": (lambda **k: tg.LGConv(**k), "w"),
    "mixhop": (lambda **k: tg.MixHopConv(F, 3, [0, 1, 2], **k), "w"),
    "gated": (lambda **k: tg.GatedGraphConv(F, 2, **k), "w"),
    "arma": (lambda **k: tg.ARMAConv(F, 3, 2, 2, **k), "w"),
    "cheb": (lambda **k: tg.ChebConv(F, 3, 3, **k), "w"),
    "cluster": (lambda **k: tg.ClusterGCNConv(F, 3, **k), ""),
    "pdn": (lambda **k: tg.PDNConv(F, 3, F, 4, **k), "e"),
    "eg": (lambda **k: tg.EGConv(F, 4, ["sum", "mean", "max", "symnorm", "std"], 2, 2, **k), ""),
    "pna": (lambda **k: pna(MANY, **k), ""),
    "pna_towers": (lambda **k: pna(["std", "min"], towers=2, **k), ""),
    "pna_divided": (lambda **k: pna(["mean", "max"], towers=2, divide_input=True, post_layers=2, **k), ""),
    "hypergraph": (lambda **k: tg.HypergraphConv(F, 3, **k), ""),
    "anti": (lambda **k: tg.AntiSymmetricConv(F, **k), ""),
    "dir": (lambda **k: tg.DirGNNConv(tg.SAGEConv(F, 3, **k)), ""),
    "user_gine": (
        lambda **k: Custom(lambda x, e: e.view(-1, 1).square() * (x + e.view(-1, 1).expand_as(x)).relu()),
        "w",
    ),
}


class Second(nn.Module):
    """A layer with features of its own to start from."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        return self.conv(x, x.detach().cos(), edge_index, weight)


def extras(kinds: str, edges: int, device: str) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    made = {
        "w": torch.randint(1, 5, (edges,), generator=g).double() / 4,
        # Small integers: some sums with the features are 0, where the ReLU has its corner.
        "e": torch.randint(-2, 3, (edges, F), generator=g).double(),
        "t": torch.randint(R, (edges,), generator=g),
    }
    return [made[k].to(device) for k in kinds]


GRAPHS = ("drawn", "int32", "sorted", "isolated", "empty", "one_edge")


def drawn(kind: str, num_src: int, num_dst: int, flow: str, device: str) -> Tensor:
    edge_index = random_graph(num_src, num_dst, E, device=device)  # with parallel edges, loops, isolated nodes
    if kind == "isolated":
        edge_index = edge_index % 4
    elif kind == "empty":
        edge_index = edge_index[:, :0]
    elif kind == "one_edge":
        edge_index = edge_index[:, :1]
    elif kind == "sorted":
        edge_index = edge_index[:, edge_index[1].argsort(stable=True)]
    edge_index = edge_index.flip(0) if flow == "target_to_source" else edge_index
    return edge_index.int() if kind == "int32" else edge_index


def compare(layer: nn.Module, kind: str, call: Callable[..., Any], *inputs: Tensor) -> None:
    """Stock, then patched twice: cold, and with what the first step left behind.

    `call` takes the kind of graph and the inputs; int32 indices are compared with int64 ones, whose gradients in stock
    PyG are right (torch 2.13 computes others for ``scatter_add_`` by int32).
    """
    expected = outputs_and_gradients(layer, lambda *t: call("drawn" if kind == "int32" else kind, *t), *inputs)
    with gsp.patch_pyg():
        for _ in range(2):
            before = kernel_calls()
            got = outputs_and_gradients(layer, lambda *t: call(kind, *t), *inputs)
            ran = kernel_calls() - before
            assert_same(got, expected, 1e-12)
    rows = [row for row in gsp.report(layer).rows if row["calls"]]
    if kind not in ("empty", "one_edge"):  # one edge for many nodes: what runs on the nodes elsewhere does not pay
        assert ran >= 2  # forward and backward
        assert rows and all(row["status"] == "fused" for row in rows), str(gsp.report(layer))


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("name", [*BOTH_SIDES, *ONE_SIDE])
def test_equals_stock(name: str, flow: str, kind: str, device: str) -> None:
    make, kinds = (BOTH_SIDES | ONE_SIDE)[name]
    if name in ("anti", "hypergraph") and flow != "source_to_target":
        pytest.skip("takes no flow")
    torch.manual_seed(0)
    layer = make(**({} if flow == "source_to_target" else {"flow": flow})).to(device, torch.float64)
    graphs = {k: drawn(k, N, N, flow, device) for k in (kind, "drawn")}
    edges = graphs[kind].shape[1]
    if name == "hypergraph":
        graphs = {k: v % torch.tensor([[N], [M]], device=device) for k, v in graphs.items()}
    x = torch.randint(-3, 4, (N, F), device=device).double()
    given = extras(kinds, edges, device)
    loops = graphs[kind][0] == graphs[kind][1]
    for t in given:
        if device == "cuda" and t.is_floating_point():
            t[loops] = 1  # which of several of a node PyG takes for its one is up to chance there
    # Weights of normalising layers that ask for a gradient take another way: as constants here, see test_pyg_direct.
    constant = kinds == "w" and name not in ("graph", "graph_max", "le", "le_mean", "simple", "user_gine")
    if constant:
        compare(layer, kind, lambda k, x: layer(x, graphs[k], *given), x)
    else:
        compare(layer, kind, lambda k, x, *more: layer(x, graphs[k], *more), x, *given)


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("name", BOTH_SIDES)
def test_bipartite(name: str, flow: str, kind: str, device: str) -> None:
    make, kinds = BOTH_SIDES[name]
    if name == "simple":
        pytest.skip("combines nothing of the other side")
    torch.manual_seed(0)
    # Where PyG takes the pair of features for (source, destination) whatever the flow, sizes fit only without it.
    sizes = (N, M) if flow == "source_to_target" else (N, N)
    layer = make(**({} if flow == "source_to_target" else {"flow": flow})).to(device, torch.float64)
    graphs = {k: drawn(k, *sizes, flow, device) for k in (kind, "drawn")}
    x, y = (torch.randint(-3, 4, (n, F), device=device).double() for n in sizes)
    given = extras(kinds, graphs[kind].shape[1], device)
    compare(layer, kind, lambda k, x, y, *more: layer((x, y), graphs[k], *more), x, y, *given)


@pytest.mark.parametrize("name", ["sage_mean", "sage_max", "gin", "gine", "graph", "mf", "wl", "gen", "gen_edges"])
def test_sizes_and_no_features_on_the_other_side(name: str, device: str) -> None:
    make, kinds = BOTH_SIDES[name]
    torch.manual_seed(0)
    layer = make().to(device, torch.float64)
    edge_index = drawn("drawn", N, M, "source_to_target", device)
    x = torch.randint(-3, 4, (N, F), device=device).double()
    given = extras(kinds, E, device)
    compare(layer, "drawn", lambda k, x, *more: layer((x, None), edge_index, *more, size=(N, M)), x, *given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gine", "gen_edges", "general", "general_edges", "le", "film", "rgcn", "sage_many"])
def test_other_dtypes(name: str, dtype: torch.dtype, device: str) -> None:
    make, kinds = BOTH_SIDES[name]
    torch.manual_seed(0)
    layer = make().to(device, dtype)
    edge_index = drawn("drawn", N, N, "source_to_target", device)
    x = torch.randint(-2, 3, (N, F), device=device).to(dtype)
    given = [t.to(dtype) if t.is_floating_point() else t for t in extras(kinds, E, device)]
    expected = outputs_and_gradients(layer, lambda x, *m: layer(x, edge_index, *m), x, *given)
    with gsp.patch_pyg():
        before = kernel_calls()
        got = outputs_and_gradients(layer, lambda x, *m: layer(x, edge_index, *m), x, *given)
        assert kernel_calls() - before >= 2
    assert_same(got, expected, 1e-5 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize(
    "name", ["gine", "gen_edges", "general_edges", "le", "film_typed", "rgcn", "rgcn_blocks", "eg"]
)
def test_autocast(name: str, device: str) -> None:
    make, kinds = (BOTH_SIDES | ONE_SIDE)[name]
    torch.manual_seed(0)
    layer = make().to(device)
    edge_index = drawn("drawn", N, N, "source_to_target", device)
    x = torch.randint(-2, 3, (N, F), device=device).float()
    given = [t.float() if t.is_floating_point() else t for t in extras(kinds, E, device)]

    def call(x: Tensor, *more: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return layer(x, edge_index, *more)

    expected = outputs_and_gradients(layer, call, x, *given)
    with gsp.patch_pyg():
        before = kernel_calls()
        got = outputs_and_gradients(layer, call, x, *given)
        # these mix dtypes, or have a linear layer in the message: PyG's own way
        assert kernel_calls() > before or name in ("le", "film_typed", "general_edges")
    assert_same(got, expected, 0.1)


@pytest.mark.parametrize("name", ["gine", "gen_edges", "general_edges", "le", "film", "rgcn", "pna"])
def test_second_derivatives(name: str, device: str) -> None:
    make, kinds = (BOTH_SIDES | ONE_SIDE)[name]
    torch.manual_seed(0)
    layer = make().to(device, torch.float64)
    edge_index = drawn("drawn", N, N, "source_to_target", device)
    x = torch.randn(N, F, dtype=torch.float64, device=device).requires_grad_()
    given = [t.requires_grad_() if t.is_floating_point() else t for t in extras(kinds, E, device)]

    def penalty() -> list[Tensor]:
        out = layer(x, edge_index, *given)
        first = torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]
        wanted = [x, *(p for p in (*layer.parameters(), *given) if p.requires_grad)]
        found = torch.autograd.grad(first.square().sum(), wanted, allow_unused=True)
        return [torch.zeros(()) if t is None else t for t in found]

    expected = penalty()
    with gsp.patch_pyg():
        before = kernel_calls()
        got = penalty()
        assert kernel_calls() > before
    assert_same(got, expected, 1e-11)


@pytest.mark.parametrize(
    "name", ["gine", "gen_edges", "general", "general_edges", "le", "film", "rgcn", "sage_many", "eg", "pna"]
)
def test_no_tensor_has_a_row_for_each_edge(name: str, device: str) -> None:
    from test_pyg import Largest

    make, kinds = (BOTH_SIDES | ONE_SIDE)[name]
    nodes, edges = 40, 6000
    layer = make().to(device, torch.float64)
    edge_index = random_graph(nodes, nodes, edges, device=device)
    x, given = torch.randn(nodes, F, dtype=torch.float64, device=device), extras(kinds, edges, device)

    def largest() -> int:
        with Largest() as seen:
            outputs_and_gradients(layer, lambda x: layer(x, edge_index, *given), x)
        return seen.elements

    assert largest() > 1.1 * edges  # stock: the measure works
    with gsp.patch_pyg():
        found = largest()
    # lin_edge makes E x F by itself
    assert found <= (edges * F if name == "gen_edges" else edges), found


def test_relations_are_remembered_until_they_change(device: str, fresh_cache: None) -> None:
    torch.manual_seed(0)
    layer = tg.RGCNConv(F, 3, R).to(device, torch.float64)
    edge_index = drawn("drawn", N, N, "source_to_target", device)
    edge_type = extras("t", E, device)[0]
    x = torch.randn(N, F, dtype=torch.float64, device=device)

    def step() -> list[Tensor]:
        return outputs_and_gradients(layer, lambda x: layer(x, edge_index, edge_type), x)

    with gsp.patch_pyg():
        step()
        before = gsp.stats()
        step()
        after = gsp.stats()
        assert after["graphs_built"] == before["graphs_built"] and after["memo_hits"] > before["memo_hits"]
        edge_type.add_(1).remainder_(R)
        changed = step()
        edge_index.copy_(edge_index.flip(0))
        turned = step()
    expected = step()
    assert_same(turned, expected)
    edge_index.copy_(edge_index.flip(0))
    assert_same(changed, step())


def test_types_out_of_range(device: str) -> None:
    edge_index = drawn("drawn", N, N, "source_to_target", device)
    edge_type = extras("t", E, device)[0].clone()
    edge_type[:20], edge_type[20:30] = R, -1
    x = torch.randn(N, F, dtype=torch.float64, device=device)
    for layer in (tg.FiLMConv(F, 3, R, act=None), tg.RGCNConv(F, 6, R, num_blocks=2)):  # they are in no relation
        layer = layer.to(device, torch.float64)
        compare(layer, "drawn", lambda k, x, f=layer: f(x, edge_index, edge_type), x)
    layer = tg.RGCNConv(F, 3, R).to(device, torch.float64)
    if device == "cpu":  # on a GPU, PyG's own count of the types fails later
        with gsp.patch_pyg(), pytest.raises(RuntimeError, match="out of bounds"):
            layer(x, edge_index, edge_type)


@pytest.mark.parametrize("name", ["general", "le", "film", "rgcn", "pna"])
@pytest.mark.parametrize("unfit", ["subclass", "method", "hook", "activation", "aggr"])
def test_layers_that_somebody_looks_into(name: str, unfit: str, device: str) -> None:
    make, kinds = (BOTH_SIDES | ONE_SIDE)[name]
    torch.manual_seed(0)
    layer = make().to(device, torch.float64)
    seen: list[Any] = []
    if unfit == "subclass":
        layer.__class__ = type("Own", (type(layer),), {})
    elif unfit == "method":
        original = layer.message
        layer.message = lambda *args, **kwargs: seen.append(1) or original(*args, **kwargs)
    elif unfit == "hook":
        layer.register_message_forward_hook(lambda module, inputs, out: seen.append(1) or out * 2)
    elif unfit == "aggr":
        median = tg.aggr.MedianAggregation().to(device)
        if name == "pna":
            layer.aggr_module.aggr.aggrs[1], layer.aggr_module.aggr.fused_aggr = median, None
        else:
            layer.aggr_module = median
    elif name == "film":
        layer.act = nn.ReLU()
    edge_index = drawn("drawn", N, N, "source_to_target", device)
    x, given = torch.randn(N, F, dtype=torch.float64, device=device), extras(kinds, E, device)
    expected = outputs_and_gradients(layer, lambda x: layer(x, edge_index, *given), x)
    count = len(seen)
    with gsp.patch_pyg():
        got = outputs_and_gradients(layer, lambda x: layer(x, edge_index, *given), x)
    assert_same(got, expected, 1e-12)
    assert len(seen) == 2 * count and (count > 0) == (unfit in ("method", "hook"))


@pytest.mark.parametrize("name", ["general", "le", "film", "rgcn", "gine", "pna"])
def test_errors_are_those_of_stock(name: str) -> None:
    make, kinds = (BOTH_SIDES | ONE_SIDE)[name]
    layer = make()
    x, given = torch.randn(N, F), [t.float() if t.is_floating_point() else t for t in extras(kinds, 1, "cpu")]
    for bad in ([[0], [N]], [[N], [0]], [[-1], [0]]):
        errors = []
        for patched in (False, True):
            with pytest.raises(Exception) as caught:
                if patched:
                    with gsp.patch_pyg():
                        layer(x, torch.tensor(bad), *given)
                else:
                    layer(x, torch.tensor(bad), *given)
            errors.append(caught)
        # GeneralConv gathers an x_i that it may not use, and complains of that first.
        assert name == "general" or str(errors[0].value)[:40] == str(errors[1].value)[:40]
        assert all(issubclass(e.type, (IndexError, ValueError)) for e in errors)
    with gsp.patch_pyg(), pytest.raises(TypeError, match=r"forward\(\)"):
        layer(x)


def test_copies_keep_what_they_were_given(device: str) -> None:
    """A layer that is pickled, copied or restored computes the same with and without."""
    torch.manual_seed(0)
    edge_index = drawn("drawn", N, N, "source_to_target", device)
    x = torch.randn(N, F, dtype=torch.float64, device=device)
    for name in ("general", "le", "rgcn", "gine"):
        make, kinds = BOTH_SIDES[name]
        layer, given = make().to(device, torch.float64), extras(kinds, E, device)
        expected = layer(x, edge_index, *given).detach()
        fast = gsp.accelerate(copy.deepcopy(layer))
        other = copy.deepcopy(fast)
        for model in (fast, other):
            before = kernel_calls()
            assert_same([model(x, edge_index, *given).detach()], [expected])
            assert kernel_calls() > before
            gsp.restore(model)
            before = kernel_calls()
            assert_same([model(x, edge_index, *given).detach()], [expected])
            assert kernel_calls() == before


def test_factors_of_lower_precision(device: str) -> None:
    """Each multiplies the messages, not the other."""
    w = torch.full((3, 1), 300.0, dtype=torch.float16, device=device)
    layer = Custom(lambda x, e: x * w * w)
    edge_index = torch.zeros(2, 3, dtype=torch.long, device=device)
    x = torch.ones(2, 4, device=device)
    expected = layer(x, edge_index, torch.zeros(3, device=device))
    with gsp.patch_pyg():
        assert_same([layer(x, edge_index, torch.zeros(3, device=device))], [expected], 1e-6)
    assert float(expected[0, 0]) == 270_000


@pytest.mark.parametrize(
    "layer",
    [
        lambda: pna(MANY, edge_dim=F),
        lambda: pna(["mean", "std"], pre_layers=2),
        lambda: pna([tg.aggr.StdAggregation(semi_grad=True), "max"]),
        lambda: pna(["median", "max"]),
        lambda: pna(["mean"]),
    ],
    ids=["edges", "two_layers", "semi_grad", "median", "one"],
)
def test_pna_of_other_kinds(layer: Callable[[], nn.Module], device: str) -> None:
    torch.manual_seed(0)
    made = layer().to(device, torch.float64)
    edge_index = drawn("drawn", N, N, "source_to_target", device)
    x = torch.randn(N, F, dtype=torch.float64, device=device)
    given = extras("e" if made.edge_dim else "", E, device)
    expected = outputs_and_gradients(made, lambda x, *m: made(x, edge_index, *m), x, *given)
    with gsp.patch_pyg():
        got = outputs_and_gradients(made, lambda x, *m: made(x, edge_index, *m), x, *given)
    assert_same(got, expected, 1e-12)


def test_pna_where_a_maximum_of_the_neighbours_is_zero(device: str) -> None:
    """Stock splits the gradient of its messages, which are not zero, evenly; of zeros it would lose a share."""
    torch.manual_seed(0)
    layer = pna(["max", "min"]).to(device, torch.float64)
    edge_index = torch.tensor([[0, 1, 0, 2], [2, 2, 2, 0]], device=device)
    x = torch.zeros(3, F, dtype=torch.float64, device=device)
    expected = outputs_and_gradients(layer, lambda x: layer(x, edge_index), x)
    with gsp.patch_pyg():
        before = kernel_calls()
        got = outputs_and_gradients(layer, lambda x: layer(x, edge_index), x)
        assert kernel_calls() > before
    assert_same(got, expected, 1e-12)


def test_rgcn_without_nodes(device: str) -> None:
    layer = tg.RGCNConv(4, 2, 3).to(device)
    none = torch.zeros(2, 0, dtype=torch.long, device=device)
    with gsp.patch_pyg():
        assert layer(torch.zeros(0, 4, device=device), none, none[0]).shape == (0, 2)


def test_an_aggregation_that_is_exchanged_inside_of_another(device: str) -> None:
    class Own(tg.aggr.Aggregation):
        def forward(self, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None, dim: int = -2) -> Tensor:
            return self.reduce(Doubled.apply(x), index, ptr, dim_size, dim, reduce="sum")

    several = tg.aggr.MultiAggregation([tg.aggr.MaxAggregation(), tg.aggr.SumAggregation()])
    layer = tg.SAGEConv(F, 3, aggr=several).to(device, torch.float64)
    x, edge_index = (
        torch.randn(N, F, dtype=torch.float64, device=device),
        drawn("drawn", N, N, "source_to_target", device),
    )
    with gsp.patch_pyg():
        layer(x, edge_index)
    layer.aggr_module.aggrs[0] = Own()
    expected = outputs_and_gradients(layer, lambda x: layer(x, edge_index), x)
    with gsp.patch_pyg():
        assert_same(outputs_and_gradients(layer, lambda x: layer(x, edge_index), x), expected, 1e-12)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return 2 * t

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def test_the_policy_of_accelerate_outlives_a_patch() -> None:
    from gnn_spmm_plugin.integrations.pyg import aggregate

    layer = gsp.accelerate(tg.GCNConv(4, 2), policy="csr")
    try:
        with gsp.patch_pyg(policy="ra"):
            assert aggregate.policy() == "ra"
        assert aggregate.policy() == "csr"
    finally:
        gsp.accelerate(gsp.restore(layer), policy="auto")
        gsp.restore(layer)
