"""Attention layers of PyG: against stock PyG, and proof of which way was taken and that no messages were made."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from pyg_layers import MessagePassing, assert_same, changes, kernel_calls, outputs_and_gradients, random_graph, tg
from test_pyg_direct import FLOWS, Made, direct, patched
from torch import Tensor, nn

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.integrations.pyg.records import record_of

try:
    from torch_geometric.utils import softmax
except ImportError:  # the tests are skipped then
    softmax = None

pytestmark = pytest.mark.pyg

N, E, F = 24, 150, 6


# name: layer of a width in, and options
LAYERS: dict[str, Callable[..., Any]] = {
    "gat": lambda w, **k: tg.GATConv(w, 5, **k),
    "gat_residual": lambda w, **k: tg.GATConv(w, 5, residual=True, negative_slope=0.1, **k),
    "gatv2": lambda w, **k: tg.GATv2Conv(w, 5, **k),
    "gatv2_shared": lambda w, **k: tg.GATv2Conv(w, 5, share_weights=True, residual=True, bias=False, **k),
    "supergat_mx": lambda w, **k: tg.SuperGATConv(w, 5, attention_type="MX", is_undirected=True, **k),
    "supergat_sd": lambda w, **k: tg.SuperGATConv(w, 5, attention_type="SD", is_undirected=True, **k),
    "transformer": lambda w, add_self_loops=None, **k: tg.TransformerConv(w, 5, **k),
    "transformer_beta": lambda w, add_self_loops=None, **k: tg.TransformerConv(w, 5, beta=True, **k),
    "transformer_no_root": lambda w, add_self_loops=None, **k: tg.TransformerConv(w, 5, root_weight=False, **k),
}


def edges(name: str, device: str) -> Tensor:
    """Unsorted, with loops, parallel edges and isolated nodes, unless the name says otherwise."""
    if name == "empty":
        return torch.empty(2, 0, dtype=torch.long, device=device)
    if name == "one":
        return torch.tensor([[3], [5]], device=device)
    edge_index = random_graph(N, N, E, device=device)
    return edge_index[:, edge_index[1].argsort(stable=True)] if name == "sorted" else edge_index


def options(heads: int, concat: bool, loops: bool, flow: str, dropout: float) -> dict[str, Any]:
    return {"heads": heads, "concat": concat, "add_self_loops": loops, "flow": flow, "dropout": dropout}


def run(layer: Any, seed: int, *args: Any) -> Any:
    """The layer's output and, of SuperGAT, its loss, with the generators as `seed` says."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    out = layer(*args)
    return (out, layer.get_attention_loss()) if hasattr(layer, "get_attention_loss") and layer.training else out


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize(
    ("graph", "index"),
    [("any", torch.int64), ("any", torch.int32), ("sorted", torch.int64), ("one", torch.int32), ("empty", torch.int64)],
    ids=["any", "int32", "sorted", "one", "empty"],
)
@pytest.mark.parametrize("name", LAYERS)
def test_equals_stock(name: str, graph: str, index: torch.dtype, flow: str, device: str) -> None:
    edge_index = edges(graph, device)
    # each pair of values of two options comes up
    for heads, concat, loops, dropout in (
        *((1, True, True, 0.4), (1, False, False, 0.0), (4, True, False, 0.4), (4, False, True, 0.0)),
        *((4, False, False, 0.4), (1, True, True, 0.0)),
    ):
        torch.manual_seed(0)
        layer = LAYERS[name](F, **options(heads, concat, loops, flow, dropout)).to(device, torch.float64)
        if "supergat" in name:
            layer.eval()  # in training it draws negative edges: test_supergat_draws_as_stock
        x = torch.randn(N, F, dtype=torch.float64, device=device)
        call = functools.partial(lambda x, e, layer: run(layer, 7, x, e), layer=layer)
        expected = outputs_and_gradients(layer, functools.partial(call, e=edge_index), x)
        # torch 2.13 itself computes wrong gradients of scatter_add_ with int32 indices; ours are those of int64.
        with patched(layer):
            got = outputs_and_gradients(layer, functools.partial(call, e=edge_index.to(index)), x)
            assert direct(layer), (heads, concat, loops)
        assert_same(got, expected)


@pytest.mark.parametrize("kind", ["MX", "SD"])
def test_supergat_draws_as_stock(kind: str, device: str) -> None:
    """Attention, positive and negative samples come from the same generators in the same order."""
    edge_index = edges("any", device)
    edge_index = torch.cat([edge_index, edge_index.flip(0)], 1)
    for ratio, loops, undirected in itertools.product((1.0, 0.5), (True, False), (True, False)):
        torch.manual_seed(0)
        layer = tg.SuperGATConv(
            F, 4, 2, dropout=0.3, attention_type=kind, edge_sample_ratio=ratio, add_self_loops=loops
        ).to(device, torch.float64)
        layer.is_undirected = undirected
        x = torch.randn(N, F, dtype=torch.float64, device=device)

        def call(x: Tensor, layer: Any = layer) -> Any:
            out = run(layer, 3, x, edge_index)
            return *out, layer.att_x, layer.att_y

        expected = outputs_and_gradients(layer, call, x)
        with patched(layer):
            got = outputs_and_gradients(layer, call, x)
            assert direct(layer)
        assert_same(got, expected)
        given = random_graph(N, N, 40, seed=4, device=device) - 1  # from the end, too
        call = functools.partial(lambda x, layer, given: run(layer, 3, x, edge_index, given), layer=layer, given=given)
        expected = outputs_and_gradients(layer, call, x)
        with patched(layer):
            got = outputs_and_gradients(layer, call, x)
        assert_same(got, expected)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("name", ["gat", "gat_residual", "gatv2", "transformer", "transformer_beta"])
def test_bipartite(name: str, loops: bool, flow: str, device: str) -> None:
    num_src, num_dst = (24, 17) if flow == "source_to_target" else (24, 24)
    for widths, flip in itertools.product(((F, 4), F), (False, True)):
        if flip and flow == "source_to_target":
            num_src, num_dst = 17, 24
        edge_index = random_graph(num_src, num_dst, E, device=device)
        edge_index = edge_index if flow == "source_to_target" else edge_index.flip(0)
        torch.manual_seed(0)
        layer = LAYERS[name](widths, **options(2, True, loops, flow, 0.0)).to(device, torch.float64)
        w = widths if isinstance(widths, tuple) else (widths, widths)
        x = torch.randn(num_src, w[0], dtype=torch.float64, device=device)
        own = torch.randn(num_dst, w[1], dtype=torch.float64, device=device)
        calls: list[Callable[..., Any]] = [lambda x, o, layer=layer, e=edge_index: layer((x, o), e)]
        if name.startswith("gat") and "v2" not in name:
            size = (num_src, num_dst)
            calls += [
                lambda x, o, layer=layer, e=edge_index, size=size: layer((x, o), e, size=size),
                lambda x, o, layer=layer, e=edge_index, size=size: layer((x, None), e, size=size),
            ]
        for call in calls:
            expected = outputs_and_gradients(layer, call, x, own)
            with patched(layer):
                got = outputs_and_gradients(layer, call, x, own)
                assert direct(layer)
            assert_same(got, expected)


@pytest.mark.parametrize("name", ["gat", "gatv2", "supergat_mx", "transformer"])
def test_second_derivatives(name: str, device: str) -> None:
    edge_index = random_graph(5, 5, 12, device=device)
    layer = LAYERS[name](2, heads=2).to(device, torch.float64).eval()
    x = torch.randn(5, 2, dtype=torch.float64, device=device, requires_grad=True)
    leaves = [x, *layer.parameters()]
    with patched(layer):
        assert torch.autograd.gradcheck(lambda x, *_: layer(x, edge_index), leaves)
        assert torch.autograd.gradgradcheck(lambda x, *_: layer(x, edge_index), leaves)
        assert direct(layer)


# ---------------------------------------------------------------------- layers that the lazy gather serves


class Own(MessagePassing):
    """A user's own attention, which imported softmax itself."""

    def __init__(self, heads: int = 2, cut: str = "", **kwargs: Any) -> None:
        super().__init__(aggr="add", node_dim=0, **kwargs)
        self.heads, self.cut = heads, cut
        self.query, self.key = nn.Linear(F, heads * 4), nn.Linear(F, heads * 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        query, key = self.query(x).view(-1, self.heads, 4), self.key(x).view(-1, self.heads, 4)
        out: Tensor = self.propagate(edge_index, q=query, k=key, v=key.relu())
        return out.flatten(1)

    def message(self, q_i: Tensor, k_j: Tensor, v_j: Tensor, index: Tensor, size_i: int | None) -> Tensor:
        both = q_i * k_j
        if self.cut == "kept":
            both = both.clone()
        if self.cut == "halves":
            scores = both[..., :2].sum(-1) + both[..., 2:].sum(dim=-1)
        elif self.cut == "heads":
            scores = both.sum(dim=1)[:, : self.heads]
        elif self.cut == "function":
            scores = Doubled.apply(both).sum(-1)
        elif self.cut == "no_grad":
            with torch.no_grad():
                scores = (q_i * k_j).sum(-1)
        elif self.cut == "changed":
            with torch.no_grad():
                both = q_i * k_j
                q_i += 1
                scores = both.sum(-1) + q_i.sum(-1)
        elif self.cut == "twice":
            scores = both.sum(-1) + both.abs().sum(-1)
        else:
            scores = torch.sum(both, -1, keepdim=True).squeeze(-1)
        return v_j * softmax(scores, index, num_nodes=size_i).unsqueeze(-1)


class Doubled(torch.autograd.Function):
    """A function of the user's own, to which torch passes the stand-in itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


META = (["a", "b"], [("a", "x", "b"), ("b", "y", "a"), ("a", "z", "a")])


def hetero(layer: Any, x: Tensor, edge_index: Tensor) -> Any:
    """A call of a heterogeneous layer with two kinds of nodes."""
    edges = {("a", "x", "b"): edge_index[:, :60], ("b", "y", "a"): edge_index[:, 60:100]}
    edges = {k: e.remainder(N // 2) for k, e in edges.items()} | {("a", "z", "a"): edge_index[:, 100:] % (N // 2)}
    return layer({"a": x[: N // 2], "b": x[N // 2 :]}, edges)


# name: (layer, call, whether no message at all is written)
LAZY: dict[str, tuple[Callable[..., Any], Callable[..., Any], bool]] = {
    "agnn": (lambda **k: tg.AGNNConv(**k), lambda layer, x, e: layer(x, e), True),
    "fa": (lambda **k: tg.FAConv(F, dropout=0.3, **k), lambda layer, x, e: layer(x, x * 2, e), True),
    "hgt": (lambda **k: tg.HGTConv(F, 8, META, 2, **k), hetero, True),
    "han": (lambda **k: tg.HANConv(F, 8, META, 2, dropout=0.3, **k), hetero, True),
    "own": (lambda **k: Own(**k), lambda layer, x, e: layer(x, e), True),
    "own_one_head": (lambda **k: Own(1, **k), lambda layer, x, e: layer(x, e), True),
    **{
        f"own_{cut}": (lambda cut=cut, **k: Own(cut=cut, **k), lambda layer, x, e: layer(x, e), cut == "no_grad")
        for cut in ("kept", "halves", "heads", "function", "no_grad", "twice", "changed")
    },
}


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", LAZY)
def test_lazy(name: str, flow: str, device: str) -> None:
    make, call, whole = LAZY[name]
    if name == "hgt" and flow == "target_to_source":
        pytest.skip("HGTConv itself knows one flow only")
    edge_index = edges("any", device)
    torch.manual_seed(0)
    layer = make(flow=flow).to(device, torch.float64)
    x = torch.randn(N, F, dtype=torch.float64, device=device)

    def run_it(x: Tensor) -> Any:
        torch.manual_seed(5)
        return call(layer, x, edge_index)

    expected = outputs_and_gradients(layer, run_it, x)
    before = softmax
    with patched(layer):
        record_of(layer).missed.clear()
        calls = kernel_calls()
        got = outputs_and_gradients(layer, run_it, x)
        record = record_of(layer)
        assert record.fused["sum"] and kernel_calls() - calls >= 3
        assert not record.missed or not whole, record.missed
        assert softmax is not before or not name.startswith("own")
    assert softmax is before
    assert_same(got, expected)


def test_softmax_of_a_user_is_fused_and_given_back(device: str) -> None:
    """On the graph that the aggregation uses: nothing is built for it."""
    edge_index, x = edges("any", device), torch.randn(N, F, device=device)
    layer = Own().to(device)
    gsp.clear_cache()
    with gsp.patch_pyg():
        made = changes(lambda: layer(x, edge_index))
    assert made["graphs_built"] == 1 and made["kernel_calls"] == 3  # scores, softmax, sum


@pytest.mark.parametrize("shape", [(E,), (E, 1), (E, 3), (E, 2, 3)], ids=str)
def test_softmax_alone(shape: tuple[int, ...], device: str) -> None:
    edge_index = edges("any", device)
    src = torch.randn(shape, dtype=torch.float64, device=device)
    index, ordered = edge_index[1], torch.arange(E, device=device) // 10
    cases: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda t, i: softmax(t, i),
        lambda t, i: softmax(t, i, num_nodes=N + 2),
        lambda t, i: softmax(t, i, None, N),
        lambda t, i: softmax(t, ordered, ptr=torch.arange(0, E + 1, 10, device=device)),
        lambda t, i: softmax(t.float(), i, num_nodes=N),
        lambda t, i: softmax(t.t().contiguous(), i, num_nodes=N, dim=-1) if t.dim() == 2 else t,
    ]
    for case, dtype in itertools.product(cases, (torch.int64, torch.int32)):
        # torch 2.13 itself computes wrong gradients of scatter_add_ with int32 indices; ours are those of int64.
        stock = Alone(functools.partial(case, i=index))
        layer = Alone(functools.partial(case, i=index if case is cases[-1] else index.to(dtype)))
        expected = outputs_and_gradients(stock, stock, src)
        with patched(layer):
            assert_same(outputs_and_gradients(layer, layer, src), expected, 1e-6)  # one case is in float32


class Alone(MessagePassing):
    """A layer that only computes a softmax, of whatever it is given."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


# ---------------------------------------------------------------------- nothing of the size of messages


@pytest.mark.parametrize("name", [*(n for n in LAYERS if n != "supergat_sd"), "agnn", "fa", "han", "hgt", "own"])
def test_no_messages(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward make no tensor as large as E x H x C, nor half of it."""
    nodes, count, heads, channels = 40, 6000, 2, 32
    edge_index = random_graph(nodes, nodes, count, device=device)
    x = torch.randn(nodes, F, device=device, requires_grad=True)
    call: Callable[..., Any] = lambda layer, x, e: layer(x, e)  # noqa: E731
    largest = count + nodes  # edges and loops
    if name in LAYERS:
        made: Any = LAYERS[name](F, heads=heads)
        made = type(made)(F, channels, heads, dropout=0.3) if "supergat" not in name else made
        layer = made.to(device)
    else:
        make, call, _ = LAZY[name]
        layer = make().to(device)
    if name in ("agnn", "fa"):
        x, channels = torch.randn(nodes, 64, device=device, requires_grad=True), 32
        layer = (tg.AGNNConv() if name == "agnn" else tg.FAConv(64)).to(device)
        call = {"agnn": call, "fa": lambda layer, x, e: layer(x, x, e)}[name]
    if name in ("han", "hgt"):
        layer = (tg.HANConv if name == "han" else tg.HGTConv)(F, heads * channels, META, heads).to(device)
        call = lambda layer, x, e: hetero_any(layer, x, e)  # noqa: E731
    if "supergat" in name:
        layer = tg.SuperGATConv(F, channels, heads, is_undirected=True).to(device)
    if name == "own":
        layer = Own(heads).to(device)
        layer.query, layer.key = (nn.Linear(F, heads * channels).to(device) for _ in range(2))
        layer.width = channels
        monkeypatch.setattr(Own, "forward", wide_forward)
    with patched(layer), Made() as run_made:
        out = call(layer, x, edge_index)
        outs = list(out.values()) if isinstance(out, dict) else [out]
        torch.stack([o.square().sum() for o in outs]).sum().backward()
    bound = 4 * largest * heads
    assert run_made.largest() <= bound < largest * heads * channels // 2


def hetero_any(layer: Any, x: Tensor, edge_index: Tensor) -> Any:
    half = x.shape[0] // 2
    edges = {kind: edge_index[:, i::3] % half for i, kind in enumerate(META[1])}
    return layer({"a": x[:half], "b": x[half:]}, edges)


def wide_forward(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    query, key = (lin(x).view(-1, self.heads, self.width) for lin in (self.query, self.key))
    out: Tensor = self.propagate(edge_index, q=query, k=key, v=key)
    return out.flatten(1)


# ---------------------------------------------------------------------- what is left to PyG, and why


def test_reasons(device: str) -> None:
    edge_index, x = edges("any", device), torch.randn(N, F, device=device)
    attr = torch.randn(E, 3, device=device)
    cases: list[tuple[Any, Callable[[Any], Any], str]] = [
        (tg.GATConv(F, 4, edge_dim=3), lambda c: c(x, edge_index, attr), "edge_attr is given"),
        (tg.GATv2Conv(F, 4, edge_dim=3), lambda c: c(x, edge_index, attr), "edge_attr is given"),
        (tg.TransformerConv(F, 4, edge_dim=3), lambda c: c(x, edge_index, attr), "edge_attr is given"),
        (
            tg.GATConv(F, 4),
            lambda c: c(x, edge_index, return_attention_weights=True),
            "return_attention_weights is given",
        ),
        (tg.GATConv(F, 4, aggr="max"), lambda c: c(x, edge_index), "no plain sum"),
        (tg.SuperGATConv(F, 4).eval(), lambda c: c(x, tg_edge_index(edge_index)), "no plain [2, E] tensor"),
    ]
    for conv, call, reason in cases:
        conv = conv.to(device)
        for hooked in (False, True):
            if hooked:
                conv.register_propagate_forward_pre_hook(lambda *_: None)
            expected = call(conv)
            with patched(conv):
                got = call(conv)
                text = str(gsp.report(conv))
            assert_same(flatten(got), flatten(expected), 1e-5)
            assert reason in text, text
    for hook in ("edge_update_forward_pre_hook", "edge_update_forward_hook", "message_forward_hook"):
        conv, seen = tg.GATConv(F, 4).to(device), []
        getattr(conv, f"register_{hook}")(lambda *_, seen=seen: seen.append(1))
        with patched(conv):
            conv(x, edge_index)
            assert "has message passing hooks" in str(gsp.report(conv)) and seen == [1]
    strict = gsp.accelerate(tg.GATConv(F, 4, edge_dim=3).to(device), strict=True)
    with pytest.raises(RuntimeError, match="edge_attr is given"):
        strict(x, edge_index, attr)
    gsp.restore(strict)


def tg_edge_index(edge_index: Tensor) -> Any:
    from torch_geometric import EdgeIndex

    return EdgeIndex(edge_index, sparse_size=(N, N))


def flatten(values: Any) -> list[Tensor]:
    if isinstance(values, (tuple, list)):
        return [t for v in values for t in flatten(v)]
    return [values.detach()]


@pytest.mark.parametrize("name", ["gat", "gatv2", "supergat_sd", "transformer"])
def test_subclasses_and_exchanged_methods(name: str, device: str) -> None:
    """A class or method that is not PyG's is let alone: its own message counts."""
    edge_index, x = edges("any", device), torch.randn(N, F, device=device)
    base = type(LAYERS[name](F))

    class Sub(base):  # type: ignore[misc, valid-type]
        def message(self, *args: Any, **kwargs: Any) -> Tensor:
            out: Tensor = super().message(*args, **kwargs)
            return out * 2

    Sub.message.__signature__ = __import__("inspect").signature(base.message)  # type: ignore[attr-defined]
    torch.manual_seed(0)
    plain = LAYERS[name](F, heads=2).to(device).eval()
    torch.manual_seed(0)
    exchanged = LAYERS[name](F, heads=2).to(device).eval()
    exchanged.aggregate = lambda inputs, index, ptr=None, dim_size=None: (
        base.aggregate(exchanged, inputs, index, ptr, dim_size) * 2
    )
    expected = exchanged(x, edge_index).detach()
    with patched(exchanged):
        assert_same([exchanged(x, edge_index).detach()], [expected], 1e-5)
        assert not direct(exchanged)
        assert not torch.allclose(plain(x, edge_index), expected)


def test_errors_are_those_of_stock(device: str) -> None:
    edge_index, x = edges("any", device), torch.randn(N, F, device=device)
    wrong = edge_index.clone()
    wrong[0, 5] = N + 7
    gat, v2, transformer = (LAYERS[n](F).to(device) for n in ("gat", "gatv2", "transformer"))
    plain = LAYERS["gat"](F, add_self_loops=False).to(device)
    calls: list[Callable[[], Any]] = [
        lambda: gat(x),
        lambda: gat(x.unsqueeze(0), edge_index),
        lambda: plain(x, edge_index, size=(N + 1, N)),
        lambda: v2((x, None), edge_index),
        lambda: transformer((x, None), edge_index),
        lambda: plain(x, edge_index.float()),
        lambda: gat(x, edge_index, edge_attrs=None),
    ]
    if device == "cpu":
        calls += [lambda: plain(x, wrong), lambda: transformer(x, wrong)]
    for call in calls:
        with pytest.raises(Exception) as stock:
            call()
        with gsp.patch_pyg(), pytest.raises(type(stock.value)) as ours:
            call()
        assert str(ours.value) == str(stock.value)


# ---------------------------------------------------------------------- autocast, compiling, scripting


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [n for n in LAYERS if "beta" not in n])
def test_autocast(name: str, dtype: torch.dtype, device: str) -> None:
    """Dtypes of values and gradients as stock."""
    torch.manual_seed(0)
    layer = LAYERS[name](F, heads=2).to(device)
    if "supergat" in name:
        layer.eval()
    edge_index, x = edges("any", device), torch.randn(N, F, device=device)

    def call(x: Tensor) -> Tensor:
        with torch.autocast(device, dtype):
            out: Tensor = layer(x, edge_index)
            return out

    expected = outputs_and_gradients(layer, call, x)
    with patched(layer):
        got = outputs_and_gradients(layer, call, x)
        assert direct(layer)
    assert_same(got, expected, 0.05)


@pytest.mark.parametrize("name", ["gat", "gatv2", "supergat_mx", "transformer"])
@pytest.mark.parametrize("training", [True, False])
def test_compiles(name: str, training: bool, device: str) -> None:
    """No more graph breaks than stock, the kernels run, and values and gradients are those of stock."""
    edge_index, x = edges("any", device), torch.randn(N, F, device=device)
    layer = LAYERS[name](F, heads=2).to(device).train(training)
    if "supergat" in name and training:
        pytest.skip("in training it draws negative edges, and is left to PyG")
    torch._dynamo.reset()
    stock_breaks = torch._dynamo.explain(layer)(x, edge_index).graph_break_count
    expected = outputs_and_gradients(layer, lambda x: layer(x, edge_index), x)
    with gsp.patch_pyg():
        torch._dynamo.reset()
        assert torch._dynamo.explain(layer)(x, edge_index).graph_break_count <= stock_breaks
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        before = kernel_calls()
        assert_same(outputs_and_gradients(layer, lambda x: compiled(x, edge_index), x), expected, 1e-4)
        assert kernel_calls() - before >= 6
        other = random_graph(N, N, E - 30, seed=8, device=device)
        assert_same([compiled(x, other).detach()], [layer(x, other).detach()], 1e-4)
    torch._dynamo.reset()


def test_scripted_models_are_pygs(device: str) -> None:
    edge_index, x = edges("any", device), torch.randn(N, F, device=device)
    layer = LAYERS["transformer"](F).to(device)  # GATConv and GATv2Conv cannot be scripted as they are
    expected = layer(x, edge_index).detach()
    with gsp.patch_pyg():
        scripted = torch.jit.script(Outer(layer))
        assert_same([scripted(x, edge_index).detach()], [expected], 1e-5)


class Outer(nn.Module):
    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


# ---------------------------------------------------------------------- one tensor in two places


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return t.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Passes(tg.MessagePassing):
    """Hands what `what` makes of its messages to a function of autograd."""

    def __init__(self, what: Any) -> None:
        super().__init__(aggr="add")
        self.what, self.w = what, torch.nn.Parameter(torch.rand(E, 1, dtype=torch.float64))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return _Same.apply(self.what(x_i, x_j, self.w))


@pytest.mark.parametrize(
    "layer",
    [
        lambda: tg.GATv2Conv(6, 3, heads=2, share_weights=True),
        lambda: _Passes(lambda i, j, w: i * j),
        lambda: _Passes(lambda i, j, w: j * w * w),
    ],
    ids=["gatv2", "product", "factors"],
)
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_tensor_that_is_two_operands(layer: Any, create_graph: bool, device: str) -> None:
    """Its gradient is the sum of both, once."""
    torch.manual_seed(0)
    net = layer().to(device, torch.float64)
    x = torch.randn(N, 6, dtype=torch.float64, device=device).requires_grad_()
    edge_index = random_graph(N, N, E, device=device)

    def grads() -> tuple[Tensor, ...]:
        given = [x, *net.parameters()]
        out = net(x, edge_index).square().sum()
        return torch.autograd.grad(out, given, create_graph=create_graph, materialize_grads=True)

    expected = grads()
    with gsp.patch_pyg():
        assert_same(grads(), expected, 1e-12)


def test_a_softmax_of_somebody_else(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_geometric.nn.conv import gat_conv

    net = tg.GATConv(6, 3).to(device, torch.float64)
    x, edge_index = torch.randn(N, 6, dtype=torch.float64, device=device), random_graph(N, N, E, device=device)
    monkeypatch.setattr(gat_conv, "softmax", lambda src, *args, **kwargs: src.sigmoid())
    expected = net(x, edge_index)
    with gsp.patch_pyg():
        assert_same([net(x, edge_index)], [expected], 1e-12)
        assert any("another softmax" in reason for row in gsp.report(net).rows for reason in row["reasons"])
