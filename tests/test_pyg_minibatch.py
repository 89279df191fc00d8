"""What a mini-batch costs the host: how many operators run, and how often the device is waited for, in one step.

Every batch brings an edge list that nobody has seen. These are counts, so they are the same wherever they are made; a
bound that is exceeded says that something is computed, or waited for, that was not before.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from pyg_layers import tg
from torch import Tensor, nn
from torch.nn import functional as F

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import cache

pytestmark = pytest.mark.pyg

WIDTH, NODES, EDGES = 16, 40, 160
#: What launches nothing on a GPU.
_FREE = "view t transpose detach alias select unbind slice unsqueeze expand as_strided empty empty_strided empty_like"
_MORE = (
    "_unsafe_view reshape _reshape_alias resolve_conj broadcast_tensors resize_ as_strided_ to flatten promote_types"
)
FREE = {f"aten::{name}" for name in (*_FREE.split(), *_MORE.split())}
#: What a GPU has to be waited for.
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::_unique2", "gnn_spmm_plugin::_from_coo"}

MAKE = {
    "gcn": lambda a, b: tg.GCNConv(a, b),
    "sage_mean": lambda a, b: tg.SAGEConv(a, b),
    "sage_max": lambda a, b: tg.SAGEConv(a, b, aggr="max"),
    "gin": lambda a, b: tg.GINConv(nn.Linear(a, b)),
    "gat": lambda a, b: tg.GATConv(a, b // 4, 4),
}
#: Operators that launch something in forward and backward of three layers, and waits: what it takes, and a little more.
BOUNDS = {"gcn": (38, 1), "sage_mean": (50, 1), "sage_max": (54, 1), "gin": (43, 1), "gat": (185, 3)}
#: Calls of Python functions in the forward of three layers: what it takes, and a little more.
CALLS = {"gcn": 240, "sage_mean": 200, "sage_max": 210, "gin": 190}


class Net(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MAKE[name](WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index).relu()
        return x


def batch(seed: int, device: str, loops: int) -> tuple[Tensor, Tensor]:
    """Features and an edge list as loaders make them, grouped by destination, with so many self loops."""
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(NODES + seed, (2, EDGES), generator=generator)
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    edge_index = torch.cat([edge_index, torch.arange(loops).expand(2, -1)], 1)
    edge_index = edge_index[:, edge_index[1].argsort(stable=True)]
    return torch.randn(NODES + seed, WIDTH, generator=generator).to(device), edge_index.to(device)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An edge list that was found by identity is not compared with a copy."""
    monkeypatch.setattr(cache, "_trusted", lambda device: True)
    gsp.clear_cache()
    yield
    gsp.clear_cache()


def step(net: nn.Module, x: Tensor, edge_index: Tensor) -> None:
    F.mse_loss(net(x, edge_index), x).backward()


def counted(net: nn.Module, x: Tensor, edge_index: Tensor) -> Counter[str]:
    """How often each operator that is made of no others runs in a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        step(net, x, edge_index)
    ops = [e for e in found.events() if e.name.startswith(("aten::", "gnn_spmm_plugin::"))]
    return Counter(e.name for e in ops if not any(child.name not in FREE for child in e.cpu_children))


@pytest.mark.parametrize("loops", [0, 5])
@pytest.mark.parametrize("name", MAKE)
def test_operators_of_a_fresh_batch(name: str, loops: int, as_on_a_gpu: None) -> None:
    net = gsp.accelerate(Net(name))
    for seed in range(2):
        step(net, *batch(seed, "cpu", loops))
    ops = counted(net, *batch(2, "cpu", loops))
    launches, waits = sum(n for op, n in ops.items() if op not in FREE), sum(ops[op] for op in WAITS)
    most, most_waits = BOUNDS[name]
    assert launches <= most, f"{launches} operators: {ops}"
    assert waits <= most_waits, f"{waits} waits: {ops}"
    # Of all but attention the backward's direction comes with the graph, since the last batch's was used.
    assert ops["gnn_spmm_plugin::_from_coo"] == 1, "one graph for all layers"
    assert ops["gnn_spmm_plugin::_transpose"] == (name == "gat")


@pytest.mark.parametrize("name", CALLS)
def test_python_of_a_fresh_batch(name: str, as_on_a_gpu: None) -> None:
    net, calls = gsp.accelerate(Net(name)), [0]
    for seed in range(2):
        step(net, *batch(seed, "cpu", 0))
    x, edge_index = batch(2, "cpu", 0)

    def count(frame: object, event: str, arg: object) -> None:
        calls[0] += event == "call"

    sys.setprofile(count)
    try:
        net(x, edge_index)
    finally:
        sys.setprofile(None)
    assert calls[0] <= CALLS[name], f"{calls[0]} calls"


@pytest.mark.gpu
@pytest.mark.parametrize("name", MAKE)
def test_waits_of_a_fresh_batch(name: str) -> None:
    gsp.clear_cache()  # a batch of another test is known by its content
    net = gsp.accelerate(Net(name).cuda())
    batches = [batch(seed, "cuda", 5) for seed in range(3)]
    for b in batches[:2]:
        step(net, *b)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(net, *batches[2])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in caught if "synchroniz" in str(w.message)]
    assert len(waits) <= BOUNDS[name][1], waits


@pytest.mark.parametrize("duplicates", [1, 2])
def test_self_loops_stay_where_they_are(duplicates: int, device: str) -> None:
    """GCN's replace those that there are, whose share of an infinite feature is infinite, as PyG says it."""
    x = torch.tensor([[float("inf")], [2.0], [-1.0]], dtype=torch.float64, device=device)
    if duplicates > 1:
        x[0] = 3.0
    edge_index = torch.tensor([[0, 2, 1, 1], [0, 0, 2, 0]], device=device)
    edge_index = torch.cat([edge_index, *[edge_index[:, :1]] * (duplicates - 1)], 1)
    layer = tg.GCNConv(1, 1).to(device, torch.float64)
    expected = layer(x, edge_index)
    torch.testing.assert_close(gsp.accelerate(layer)(x, edge_index), expected)


@pytest.mark.parametrize("change", ["in place", "data", "shape", "sizes"])
def test_the_latest_edge_list_is_looked_at(change: str, as_on_a_gpu: None) -> None:
    """What is remembered of it is no longer believed once it has changed."""
    x, edge_index = batch(0, "cpu", 0)
    layer = tg.SAGEConv(WIDTH, WIDTH)
    gsp.accelerate(layer)
    layer(x, edge_index)
    if change == "in place":
        edge_index[0, 3] = (edge_index[0, 3] + 1) % NODES
    elif change == "data":
        edge_index.data = edge_index.flip(1)
    elif change == "shape":
        edge_index = edge_index[:, 5:]
    else:
        x = torch.cat([x, x[:1]])
    found = layer(x, edge_index)
    gsp.restore(layer)
    torch.testing.assert_close(found, layer(x, edge_index))
