"""The adapters of GCNConv, SAGEConv, GINConv and GraphConv: against stock PyG, and proof of which way was taken."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pyg_layers import assert_same, changes, kernel_calls, outputs_and_gradients, random_graph, tg
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.integrations.pyg.records import known, record_of
from gnn_spmm_plugin.plan import WARM_AFTER

pytestmark = pytest.mark.pyg

N, E, F = 30, 200, 6
FLOWS = ("source_to_target", "target_to_source")


def direct(layer: Any) -> bool:
    """Whether `layer` ran fused and never asked for messages."""
    record = known(layer)
    return record is not None and sum(record.fused.values()) > 0 and not record.gathers


@contextlib.contextmanager
def patched(*layers: Any) -> Iterator[None]:
    """PyG patched, the layers' history forgotten."""
    with gsp.patch_pyg():
        for layer in layers:
            record = record_of(layer)
            record.fused.clear()
            record.gathers.clear()
        yield


# name: (layer of one width in and another out, whether it takes edge weights)
LAYERS: dict[str, Any] = {
    "gcn": (tg and (lambda a, b, **k: tg.GCNConv(a, b, **k)), True),
    "gcn_improved": (lambda a, b, **k: tg.GCNConv(a, b, improved=True, **k), True),
    "gcn_no_loops": (lambda a, b, **k: tg.GCNConv(a, b, add_self_loops=False, bias=False, **k), True),
    "gcn_plain": (lambda a, b, **k: tg.GCNConv(a, b, normalize=False, **k), True),
    "gcn_cached": (lambda a, b, **k: tg.GCNConv(a, b, cached=True, **k), True),
    "sage_mean": (lambda a, b, **k: tg.SAGEConv(a, b, **k), False),
    "sage_add": (lambda a, b, **k: tg.SAGEConv(a, b, aggr="add", root_weight=False, **k), False),
    "sage_max": (lambda a, b, **k: tg.SAGEConv(a, b, aggr="max", **k), False),
    "sage_min": (lambda a, b, **k: tg.SAGEConv(a, b, aggr="min", **k), False),
    "sage_all": (lambda a, b, **k: tg.SAGEConv(a, b, project=True, normalize=True, bias=False, **k), False),
    "gin": (lambda a, b, **k: tg.GINConv(nn.Linear(a, b), eps=0.5, **k), False),
    "gin_learned": (lambda a, b, **k: tg.GINConv(nn.Linear(a, b), train_eps=True, **k), False),
    "gin_mean": (lambda a, b, **k: tg.GINConv(nn.Linear(a, b), aggr="mean", **k), False),
    "graph": (lambda a, b, **k: tg.GraphConv(a, b, **k), True),
    "graph_mean": (lambda a, b, **k: tg.GraphConv(a, b, aggr="mean", **k), True),
    "graph_max": (lambda a, b, **k: tg.GraphConv(a, b, aggr="max", bias=False, **k), True),
}


def without_loops(edge_index: Tensor) -> Tensor:
    return edge_index[:, edge_index[0] != edge_index[1]]


def in_order(edge_index: Tensor) -> Tensor:
    """By destination, whichever row holds those: by the first row, and the second is its mirror image."""
    edge_index = edge_index[:, edge_index[0].argsort(stable=True)]
    return torch.stack([edge_index[0], (edge_index[0] + 1) % N])


#: Self loops (one a node at most: which of several PyG keeps on a GPU is chance), parallel edges, isolated nodes.
GRAPHS: dict[str, Callable[[str], Tensor]] = {
    "loops": lambda device: torch.cat(
        [without_loops(random_graph(N, N, E, device=device)), torch.arange(3, 9, device=device).expand(2, -1)], 1
    ),
    "no_loops": lambda device: without_loops(random_graph(N, N, E, seed=1, device=device)),
    "sorted": lambda device: in_order(without_loops(random_graph(N, N, E, seed=2, device=device))),
    "one_loop": lambda device: torch.tensor([[2], [2]], device=device),
    "empty": lambda device: torch.empty(2, 0, dtype=torch.long, device=device),
}


def reset(layer: Any) -> None:
    if hasattr(layer, "_cached_edge_index"):
        layer._cached_edge_index = None


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", LAYERS)
def test_equals_stock(name: str, graph: str, flow: str, device: str) -> None:
    make, takes_weight = LAYERS[name]
    edge_index = GRAPHS[graph](device)
    weight = torch.rand(edge_index.shape[1], dtype=torch.float64, device=device) + 0.1
    for widths, wants_grad, weights, index in itertools.product(
        ((F, 4), (4, F), (F, F)), (True, False), ("none", "given", "learned"), (torch.int64, torch.int32)
    ):
        if weights != "none" and not takes_weight:
            continue
        torch.manual_seed(0)
        layer = make(*widths, flow=flow).to(device, torch.float64)
        if getattr(layer, "bias", None) is not None:
            nn.init.normal_(layer.bias)
        x = torch.randint(-3, 4, (N, widths[0])).relu().to(device, torch.float64)  # ties, many at 0
        learned = weights == "learned"

        def call(x: Tensor, w: Tensor | None, index: Tensor, layer: Any, wants_grad: bool, learned: bool) -> Any:
            reset(layer)
            x = x if wants_grad else x.detach()
            return layer(x, index) if w is None else layer(x, index, w if learned else w.detach())

        w = None if weights == "none" else weight
        # torch 2.13 itself computes wrong gradients of scatter_add_ with int32 indices; ours are those of int64.
        how = {"layer": layer, "wants_grad": wants_grad, "learned": learned}
        expected = outputs_and_gradients(layer, functools.partial(call, index=edge_index, **how), x, w)
        with patched(layer):
            got = outputs_and_gradients(layer, functools.partial(call, index=edge_index.to(index), **how), x, w)
            if not (learned and layer.__class__.__name__ == "GCNConv" and layer.normalize):
                assert direct(layer), (widths, weights)
        assert_same(got, expected)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", ["sage_mean", "sage_add", "sage_max", "sage_all", "gin", "gin_learned", "graph"])
def test_bipartite(name: str, flow: str, device: str) -> None:
    num_src, num_dst = (30, 17) if flow == "source_to_target" else (30, 30)
    edge_index = random_graph(num_src, num_dst, E, device=device)
    edge_index = edge_index if flow == "source_to_target" else edge_index.flip(0)
    for widths in ((F, 3), (3, F)):
        torch.manual_seed(0)
        layer = LAYERS[name][0](*widths, flow=flow).to(device, torch.float64)
        x = torch.randn(num_src, widths[0], dtype=torch.float64, device=device)
        own = torch.randn(num_dst, widths[0], dtype=torch.float64, device=device)
        calls: list[Callable[..., Any]] = [
            lambda x, o, layer=layer: layer((x, o), edge_index),
            lambda x, o, layer=layer: layer((x, o), edge_index, size=(num_src, num_dst)),
            lambda x, o, layer=layer: layer((x, None), edge_index, size=(num_src, num_dst)),
        ]
        for call in calls:
            expected = outputs_and_gradients(layer, call, x, own)
            with patched(layer):
                got = outputs_and_gradients(layer, call, x, own)
                assert direct(layer)
            assert_same(got, expected)


@pytest.mark.parametrize("name", ["gcn", "gcn_plain", "gcn_cached", "sage_mean", "sage_all", "gin_learned", "graph"])
def test_second_derivatives(name: str, device: str) -> None:
    make, takes_weight = LAYERS[name]
    edge_index = random_graph(5, 5, 12, device=device)
    for widths in ((2, 3), (3, 2)):
        layer = make(*widths).to(device, torch.float64)
        x = torch.randn(5, widths[0], dtype=torch.float64, device=device, requires_grad=True)
        weight = torch.rand(12, dtype=torch.float64, device=device)
        weight.requires_grad_(name in ("gcn_plain", "graph"))
        leaves = [x, *layer.parameters()] + ([weight] if weight.requires_grad else [])

        def call(*_: Tensor, layer: Any = layer, x: Tensor = x, w: Tensor = weight) -> Tensor:
            out: Tensor = layer(x, edge_index, w) if takes_weight else layer(x, edge_index)
            return out.square()

        with patched(layer):
            assert torch.autograd.gradcheck(call, leaves)
            assert torch.autograd.gradgradcheck(call, leaves)
            assert direct(layer)


# ---------------------------------------------------------------------- what runs, and what is written


class Made(TorchDispatchMode):
    """(operator, shape) of every tensor that is made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor) and not func.is_view:
                self.made.append((str(func).split(".")[1], tuple(t.shape)))
        return out

    def products(self) -> list[tuple[int, ...]]:
        return [shape for name, shape in self.made if name in ("_spmm", "_row_sum")]

    def largest(self) -> int:
        return max(torch.Size(shape).numel() for _, shape in self.made)


class Two(nn.Module):
    """Two layers of one kind, with a ReLU between."""

    def __init__(self, make: Callable[..., nn.Module], *widths: int, **kwargs: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make(a, b, **kwargs) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first, second = self.layers
        out: Tensor = second(first(x, edge_index).relu(), edge_index)
        return out


# name: (widths of the products of a training step, in any order)
STEPS: dict[str, Any] = {
    # the first layer's features have no gradient: they are aggregated as they are, and never backward
    "gcn": [16, 4, 4],
    "gcn_cached": [16, 4, 4],
    "sage_mean": [16, 4, 4],
    "gin_learned": [16, 16, 16],
    "graph": [16, 4, 4],
}


@pytest.mark.parametrize("name", STEPS)
def test_a_training_step(name: str, device: str, fresh_cache: None) -> None:
    nodes, edges = 40, 4000
    edge_index = random_graph(nodes, nodes, edges, device=device)
    net = Two(LAYERS[name][0], 16, 16, 4).to(device)
    x = torch.randn(nodes, 16, device=device)

    def step() -> None:
        net(x, edge_index).square().sum().backward()

    def gradients() -> list[Tensor]:
        net.zero_grad()
        step()
        return [torch.zeros(()) if p.grad is None else p.grad.clone() for p in net.parameters()]

    stock = gradients()
    for layer in net.layers:
        reset(layer)
    with patched(*net.layers):
        for _ in range(WARM_AFTER + 1):
            assert_same(gradients(), stock, 1e-4)
        steady = changes(step)
        assert steady == {"kernel_calls": 3, "plan_hits": 2}, steady
        with Made() as seen:
            step()
    assert sorted(shape[1] for shape in seen.products()) == sorted(STEPS[name])
    if name != "gcn_cached":  # whose weights are PyG's, one for each edge
        assert seen.largest() < edges, seen.made
    assert all(direct(layer) for layer in net.layers)


def test_peak_of_saved_tensors(device: str) -> None:
    """A layer keeps for backward what stock keeps without its messages: features once, nothing by edge."""
    nodes, edges = 40, 4000
    edge_index = random_graph(nodes, nodes, edges, device=device)
    for name in ("gcn", "sage_mean", "gin", "graph"):
        layer = LAYERS[name][0](16, 16).to(device)
        x = torch.randn(nodes, 16, device=device, requires_grad=True)
        kept: dict[int, int] = {}

        def pack(t: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with patched(layer):
            layer(x, edge_index)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                layer(x, edge_index)
        features = [n for n in kept.values() if n == nodes * 16 * 4]
        assert max(kept.values()) <= nodes * 16 * 4 and len(features) <= 2, (name, kept)


def test_report_names_what_was_fused() -> None:
    edge_index, x = random_graph(N, N, E), torch.randn(N, F, requires_grad=True)
    net = nn.ModuleDict({name: LAYERS[name][0](F, 3) for name in ("gcn", "gcn_plain", "sage_mean", "gin", "graph_max")})
    with gsp.patch_pyg():
        for layer in net.values():
            layer(x, edge_index)
    rows = {row["layer"].split()[0]: row for row in gsp.report(net).rows}
    assert {name: row["ops"] for name, row in rows.items()} == {
        "gcn": {"normalised sum + bias": 1},
        "gcn_plain": {"sum + bias": 1},
        "sage_mean": {"mean + root + bias": 1},
        "gin": {"sum + self": 1},
        "graph_max": {"max": 1},
    }
    assert {row["status"] for row in rows.values()} == {"fused"}


# ---------------------------------------------------------------------- torch.compile


@pytest.mark.parametrize("name", LAYERS)
def test_compiled_to_one_operator(name: str, device: str) -> None:
    make, takes_weight = LAYERS[name]
    edge_index = GRAPHS["loops"](device)
    weight = torch.rand(edge_index.shape[1], device=device)
    for (widths, flow), w in itertools.product((((F, 3), FLOWS[0]), ((3, F), FLOWS[1])), (None, weight)):
        if w is not None and not takes_weight:
            continue
        torch.manual_seed(0)
        layer = make(*widths, flow=flow).to(device)
        x = torch.randint(-3, 4, (N, widths[0]), device=device).relu().float()
        extra = () if w is None else (w,)
        expected = outputs_and_gradients(layer, lambda x, e=extra, layer=layer: layer(x, edge_index, *e), x)
        reset(layer)
        operators: list[str] = []

        def backend(graph: Any, inputs: Any, operators: list[str] = operators) -> Any:
            operators.extend(str(node.target) for node in graph.graph.nodes)
            return graph.forward

        torch._dynamo.reset()
        with patched(layer):
            torch.compile(layer, fullgraph=True, backend=backend)(x, edge_index, *extra)
            reset(layer)
            torch._dynamo.reset()
            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
            got = outputs_and_gradients(layer, lambda x, e=extra, c=compiled: c(x, edge_index, *e), x)
        assert_same(got, expected, 1e-4)
        ours = [o for o in operators if "spmm_edge_index" in o]
        assert len(ours) == (0 if name == "gcn_cached" else 1), operators  # what a layer keeps is PyG's affair
        assert ours == [] or not any("scatter" in o or "index_select" in o for o in operators)
    torch._dynamo.reset()


def test_compiled_code_notices_what_changes(device: str) -> None:
    """Another graph, another number of nodes, the end of the patch."""
    torch._dynamo.reset()
    layer = tg.SAGEConv(F, 4).to(device)
    compiled = torch.compile(layer, backend="aot_eager")
    for nodes, edges, on in ((N, E, True), (N, 90, True), (17, 50, True), (17, 50, False), (N, E, True)):
        edge_index, x = random_graph(nodes, nodes, edges, device=device), torch.randn(nodes, F, device=device)
        expected = layer(x, edge_index).detach()
        with gsp.patch_pyg() if on else contextlib.nullcontext():
            before = kernel_calls()
            assert_same([compiled(x, edge_index).detach()], [expected], 1e-5)
            assert (kernel_calls() > before) is on
    torch._dynamo.reset()


def test_exported_models_are_stock(device: str) -> None:
    edge_index, x = random_graph(N, N, E, device=device), torch.randn(N, F, device=device)
    layer = tg.GCNConv(F, 4).to(device)
    with gsp.patch_pyg():
        program = torch.export.export(layer, (x, edge_index))
    assert not any("gnn_spmm_plugin" in str(node.target) for node in program.graph.nodes)


# ---------------------------------------------------------------------- cached GCN


@pytest.mark.parametrize("weighted", [False, True])
def test_cached_gcn_keeps_what_stock_keeps(weighted: bool, device: str) -> None:
    torch.manual_seed(0)
    first, other = GRAPHS["loops"](device), random_graph(N, N, 50, seed=5, device=device)
    x = torch.randn(N, F, device=device)
    extra = (torch.rand(first.shape[1], device=device),) if weighted else ()
    stock, ours = (tg.GCNConv(F, 3, cached=True).to(device) for _ in range(2))
    ours.load_state_dict(stock.state_dict())
    expected = [stock(x, first, *extra), stock(x, other)]
    assert_same([expected[0].detach()], [expected[1].detach()])  # the graph of the first call
    with patched(ours):
        got = [ours(x, first, *extra), ours(x, other)]
        assert direct(ours)
    assert_same([t.detach() for t in got], [t.detach() for t in expected])
    for a, b in zip(ours._cached_edge_index, stock._cached_edge_index, strict=True):
        # On a GPU, stock adds in no fixed order.
        assert torch.equal(a, b) if not a.is_floating_point() else torch.allclose(a, b)
    assert_same([ours(x, other).detach()], [expected[0].detach()])  # restored, it still has it
    with patched(stock):  # kept by stock, used here
        assert_same([stock(x, other).detach()], [expected[0].detach()])
        assert direct(stock)
        stock.reset_parameters()
        assert stock._cached_edge_index is None
        fresh = stock(x, other).detach()
    assert_same([stock(x, first).detach()], [fresh])


def test_compiled_cached_gcn(device: str) -> None:
    """What it keeps already is used when it is compiled, whatever graph comes; what it does not is PyG's affair."""
    torch.manual_seed(0)
    first, other = GRAPHS["loops"](device), random_graph(N, N, 50, seed=5, device=device)
    layer, x = tg.GCNConv(F, 3, cached=True).to(device), torch.randn(N, F, device=device)
    with patched(layer):
        expected = outputs_and_gradients(layer, lambda x: layer(x, first), x)
        for edge_index in (first, other):
            operators: list[str] = []

            def backend(graph: Any, inputs: Any, operators: list[str] = operators) -> Any:
                operators.extend(str(node.target) for node in graph.graph.nodes)
                return graph.forward

            torch._dynamo.reset()
            torch.compile(layer, fullgraph=True, backend=backend)(x, edge_index)
            assert sum("spmm_edge_index" in o for o in operators) == 1 and not any("scatter" in o for o in operators)
            torch._dynamo.reset()
            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
            got = outputs_and_gradients(layer, lambda x, e=edge_index, c=compiled: c(x, e), x)
            assert_same(got, expected, 1e-4)
    torch._dynamo.reset()


# ---------------------------------------------------------------------- what is left to the lazy gather, or to PyG


def hook(layer: Any, name: str) -> Any:
    return getattr(layer, f"register_{name}")(lambda *args: None)


UNFIT: dict[str, Callable[[Any], Any]] = {
    **{
        f"{where}_{when}": (lambda layer, name=f"{where}_forward_{when}": hook(layer, name))
        for where in ("propagate", "message", "aggregate")
        for when in ("pre_hook", "hook")
    },
    "aggregation_hook": lambda layer: hook(layer.aggr_module, "forward_hook"),
    "message": lambda layer: setattr(layer, "message", type(layer).message.__get__(layer)),
    "propagate": lambda layer: setattr(layer, "propagate", type(layer).propagate.__get__(layer)),
    "decomposed": lambda layer: setattr(layer, "decomposed_layers", 2),
    "multi": lambda layer: setattr(layer, "aggr_module", tg.aggr.MultiAggregation(["sum"])),
    "product": lambda layer: setattr(layer, "aggr_module", tg.aggr.MulAggregation()),
}


@pytest.mark.parametrize("unfit", UNFIT)
@pytest.mark.parametrize("name", ["gcn", "sage_mean", "gin", "graph"])
def test_layers_that_somebody_looks_into(name: str, unfit: str, device: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name][0](F, 4).to(device, torch.float64)
    edge_index, x = random_graph(N, N, E, device=device), torch.randn(N, F, dtype=torch.float64, device=device)
    if unfit == "decomposed" and name != "gcn":
        pytest.skip("PyG itself decomposes no layer that takes pairs of features")
    UNFIT[unfit](layer)
    expected = outputs_and_gradients(layer, lambda x: layer(x, edge_index), x)
    with patched(layer):
        got = outputs_and_gradients(layer, lambda x: layer(x, edge_index), x)
        assert record_of(layer).gathers  # it asked for messages
    assert_same(got, expected)


def test_explained_layers(device: str) -> None:
    torch.manual_seed(0)
    edge_index, x = GRAPHS["loops"](device), torch.randn(N, F, dtype=torch.float64, device=device)
    for name in ("gcn", "sage_mean", "gin", "graph"):
        layer = LAYERS[name][0](F, 4).to(device, torch.float64)
        layer.explain = True
        layer._edge_mask = nn.Parameter(torch.randn(edge_index.shape[1], dtype=torch.float64, device=device))
        layer._loop_mask = edge_index[0] != edge_index[1]
        expected = outputs_and_gradients(layer, lambda x, layer=layer: layer(x, edge_index), x)
        with patched(layer):
            got = outputs_and_gradients(layer, lambda x, layer=layer: layer(x, edge_index), x)
            assert not direct(layer)
        assert_same(got, expected)
        layer.explain = None
        with patched(layer):
            layer(x, edge_index)
            assert not record_of(layer).gathers or "propagate" in layer.__dict__


def test_hooks_on_inner_layers_see_what_they_saw(device: str) -> None:
    """A linear layer that somebody watches is not moved."""
    edge_index, x = random_graph(N, N, E, device=device), torch.randn(N, 3, device=device)
    for name, inner in (("gcn", "lin"), ("sage_mean", "lin_l"), ("graph", "lin_rel")):
        layer = LAYERS[name][0](3, 8).to(device)
        seen: list[Tensor] = []
        getattr(layer, inner).register_forward_hook(lambda m, i, o, seen=seen: seen.append(i[0].detach()))
        expected = layer(x, edge_index).detach()
        with patched(layer):
            got = layer(x, edge_index).detach()
            assert direct(layer)
        assert_same([got, seen[1]], [expected, seen[0]])


def test_a_global_hook_is_served(device: str) -> None:
    edge_index, x = random_graph(N, N, E, device=device), torch.randn(N, F, device=device)
    layer, seen = tg.SAGEConv(F, 4).to(device), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: seen.append(type(m).__name__))
    try:
        layer(x, edge_index)
        stock, seen[:] = list(seen), []
        with gsp.patch_pyg():
            layer(x, edge_index)
    finally:
        handle.remove()
    assert seen == stock and "MeanAggregation" in seen


def test_errors_are_those_of_stock(device: str) -> None:
    edge_index, x = random_graph(N, N, E, device=device), torch.randn(N, F, device=device)
    wrong = edge_index.clone()
    wrong[0, 5] = N + 7
    negative = edge_index.clone()
    negative[0, 3] = -2
    gcn, sage, graph = (LAYERS[n][0](F, 4).to(device) for n in ("gcn_plain", "sage_mean", "graph"))
    calls: list[Callable[[], Any]] = [
        lambda: sage(x, edge_index, size=(N + 1, N)),
        lambda: sage((x, x[:5]), edge_index, size=(N, N)),
        lambda: graph(x, edge_index.float()),
        lambda: graph(x, edge_index.t()),
        lambda: gcn((x, x), edge_index),
        lambda: gcn(x),
        lambda: gcn(x, edge_index, edge_weights=None),
        lambda: graph(x, edge_index, torch.ones(E - 1, device=device)),
    ]
    if device == "cpu":
        calls += [lambda: sage(x, wrong), lambda: graph(x, negative), lambda: gcn(x, wrong)]
    for call in calls:
        with pytest.raises(Exception) as stock:
            call()
        with gsp.patch_pyg(), pytest.raises(type(stock.value)) as ours:
            call()
        assert str(ours.value) == str(stock.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["gcn", "gcn_plain", "sage_mean", "gin", "gin_learned", "graph"])
def test_autocast(name: str, dtype: torch.dtype, device: str) -> None:
    """Dtypes of values and gradients as stock; features as they were and in the lower precision."""
    make, takes_weight = LAYERS[name]
    torch.manual_seed(0)
    layer = make(F, 4).to(device, dtype if dtype == torch.float64 else torch.float32)
    edge_index = GRAPHS["loops"](device)
    x = torch.randn(N, F, device=device, dtype=dtype)
    weight = torch.rand(edge_index.shape[1], device=device, dtype=dtype if dtype == torch.float64 else torch.float32)
    for w in (None, weight) if takes_weight else (None,):

        def call(x: Tensor, w: Tensor | None = w) -> Tensor:
            with torch.autocast(device, torch.bfloat16):
                out: Tensor = layer(x, edge_index) if w is None else layer(x, edge_index, w)
                return out

        expected = outputs_and_gradients(layer, call, x)
        with patched(layer):
            got = outputs_and_gradients(layer, call, x)
            assert direct(layer)
        assert_same(got, expected, 1e-10 if dtype == torch.float64 else 0.05)


def test_lazy_layers(device: str) -> None:
    edge_index, x = random_graph(N, N, E, device=device), torch.randn(N, F, device=device)
    for make in (lambda: tg.GCNConv(-1, 4), lambda: tg.SAGEConv(-1, 4), lambda: tg.GraphConv(-1, 4)):
        layer = make().to(device)
        with patched(layer):
            got = layer(x, edge_index).detach()
            assert direct(layer)
        assert_same([got], [layer(x, edge_index).detach()], 1e-5)


def test_strided_and_misaligned_features(device: str) -> None:
    edge_index = random_graph(N, N, E, device=device)
    for name in ("gcn", "sage_mean", "gin", "graph"):
        layer = LAYERS[name][0](F, 4).to(device)
        wide = torch.randn(N + 1, 2 * F + 1, device=device)
        for x in (
            wide[1:, 1 : F + 1],
            wide[:N, : 2 * F : 2],
            wide.t().contiguous().t()[:N, :F],
            wide[:1, :F].expand(N, F),
        ):
            expected = layer(x, edge_index).detach()
            with patched(layer):
                got = layer(x, edge_index).detach()
                assert direct(layer)
            assert_same([got], [expected], 1e-5)


def test_kernel_calls_of_inference(device: str) -> None:
    edge_index, x = random_graph(N, N, E, device=device), torch.randn(N, F, device=device)
    for name in LAYERS:
        layer = LAYERS[name][0](F, 4).to(device)
        with gsp.patch_pyg():
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    layer(x, edge_index)
                    before = kernel_calls()
                    layer(x, edge_index)
                    assert kernel_calls() - before == 1, (name, mode)
