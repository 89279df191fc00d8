"""Layers of the campaign: PyG's, plain and patched, and ours where there is one of that name."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from campaign_draw import Draw, draw_edges, draw_values
from pyg_layers import Plain, assert_same, outputs_and_gradients, tg
from torch import Tensor, nn

import gnn_spmm_plugin as gsp

C = 6  # channels in


def _mlp() -> nn.Module:
    return nn.Linear(C, 5)


_NORMS = (
    dict(add_self_loops=True),
    dict(add_self_loops=False),
    dict(add_self_loops=False, normalize=False),
)

#: Name -> (layer from a draw, whether it takes a weight for each edge).
LAYERS: dict[str, tuple[Callable[[Draw], Any], bool]] = {
    "GCNConv": (
        lambda d: dict(improved=d.one_in(2), bias=d.one_in(2), **d.choice(_NORMS)),
        True,
    ),
    "SAGEConv": (
        lambda d: dict(aggr=d.choice(("mean", "max", "sum", "min")), root_weight=d.one_in(2), project=d.one_in(3)),
        False,
    ),
    "GINConv": (lambda d: dict(nn=_mlp(), train_eps=d.one_in(2)), False),
    "GATConv": (
        lambda d: dict(heads=d.choice((1, 2, 3)), concat=d.one_in(2), add_self_loops=d.one_in(2), bias=d.one_in(2)),
        False,
    ),
    "GraphConv": (lambda d: dict(aggr=d.choice(("add", "mean", "max"))), True),
    "GATv2Conv": (lambda d: dict(heads=d.choice((1, 2)), share_weights=d.one_in(2)), False),
    "TransformerConv": (lambda d: dict(heads=d.choice((1, 2)), beta=d.one_in(2)), False),
    "SuperGATConv": (lambda d: dict(heads=2, attention_type=d.choice(("MX", "SD"))), False),
    "TAGConv": (lambda d: dict(K=2), True),
    "SGConv": (lambda d: dict(K=2), True),
    "ChebConv": (lambda d: dict(K=3), True),
    "ARMAConv": (lambda d: dict(num_stacks=2, num_layers=2), True),
    "LEConv": (lambda d: {}, True),
    "ClusterGCNConv": (lambda d: {}, False),
    "MFConv": (lambda d: {}, False),
    "FeaStConv": (lambda d: dict(heads=2), False),
    "GatedGraphConv": (lambda d: dict(num_layers=2), True),
    "EGConv": (lambda d: dict(aggregators=["sum", "mean", "max"], num_bases=2, num_heads=1), False),
    "ResGatedGraphConv": (lambda d: {}, False),
    "FiLMConv": (lambda d: {}, False),
    "EdgeConv": (lambda d: dict(nn=nn.Linear(2 * C, 5)), False),
    "Plain": (lambda d: dict(aggr=d.choice(("sum", "mean", "max", "min", "mul", "std", "median"))), True),
}
_OURS = ("GCNConv", "SAGEConv", "GINConv", "GATConv")


def _make(name: str, given: dict[str, Any]) -> nn.Module:
    if name == "Plain":
        return Plain(**given)
    cls = getattr(tg, name)
    if "nn" in given:
        return cls(given["nn"], **{k: v for k, v in given.items() if k != "nn"})
    return cls(C, **given) if name == "GatedGraphConv" else cls(C, 4 if name == "EGConv" else 5, **given)


def run(d: Draw) -> None:
    """One layer: outputs and gradients by features, weights of edges and parameters."""
    if tg is None:
        d.drawn.append("no PyG here")
        return
    name = d.pick("layer", LAYERS)
    make, weighted = LAYERS[name]
    given = make(d)
    d.drawn.append(str({k: v for k, v in given.items() if k != "nn"}))
    e = draw_edges(d, square=True)
    torch.manual_seed(d.number())
    layer = _make(name, given).double().to(d.device)
    if d.one_in(3):
        layer.eval()
    index = e.edge_index.to(d.device)
    x = draw_values(d, (e.num_src, C), torch.float64)
    w = draw_values(d, (e.num_edges,), torch.float64).abs() + 0.1 if weighted and d.one_in(2) else None
    second = None if w is None else w + 1
    seed = d.number()

    def call(net: nn.Module, *more: Any) -> list[Tensor]:
        found = []
        for weight in (w, second):  # another weight on the same graph
            torch.manual_seed(seed)

            def one(x: Tensor, *weights: Tensor) -> Tensor:
                out: Tensor = net(x, *more, *weights)
                return out

            found += outputs_and_gradients(net, one, *(t for t in (x, weight) if t is not None))
        return found

    try:
        expected = call(layer, index)
    except Exception as stock:  # what PyG refuses, it refuses patched too
        d.drawn.append(f"PyG raises {type(stock).__name__}")
        with gsp.patch_pyg():
            try:
                call(layer, index)
            except Exception:
                return
        return
    with gsp.patch_pyg():
        _compare(call(layer, index), expected)
        again = index.clone()
        _compare(call(layer, again), expected)
    _compare(call(layer, index), expected)  # and undone
    if name in _OURS:
        own = getattr(gsp.nn, name)
        if "nn" in given:
            made = own(_mlp(), **{k: v for k, v in given.items() if k != "nn"})
        else:
            made = own(C, 5, **given)
        made = made.double().to(d.device).train(layer.training)
        made.load_state_dict(layer.state_dict())
        if given.get("aggr") in ("max", "min"):
            expected = [call(layer, index)[0]]  # ours has another rule for ties
        wrong: set[int] = set()
        if name == "GCNConv" and w is not None and given["add_self_loops"]:
            # Of parallel self loops PyG uses one, but gives all of them its gradient.
            wrong = {2, len(expected) // 2 + 2}
        for adjacency in (index, gsp.Graph.from_edge_index(index, e.num_src)):
            _compare(call(made, adjacency)[: len(expected)], expected, wrong)


def _compare(got: list[Tensor], expected: list[Tensor], wrong: Collection[int] = ()) -> None:
    """Of what PyG computes, without what is `wrong` there, and without what is no number."""
    pairs = enumerate(zip(got, expected, strict=True))
    both = [(a, b) for i, (a, b) in pairs if i not in wrong and bool(b.isfinite().all())]
    assert_same([a for a, _ in both], [b for _, b in both], 1e-9)
