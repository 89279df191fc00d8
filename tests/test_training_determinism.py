"""Whole trainings, bit by bit: from run to run, for every number of threads, with torch's flag and without."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks import same_bits
from pyg_layers import Plain, kernel_calls, tg
from strategies import values
from torch import Tensor, nn

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.plan import WARM_AFTER

NODES, CHANNELS = 300, 12
STEPS = WARM_AFTER + 3  # past the upgrade of plans
RUNS = 5

OURS: dict[str, Callable[[], nn.Module]] = {
    "GCNConv": lambda: gsp.nn.GCNConv(CHANNELS, CHANNELS),
    "SAGEConv mean": lambda: gsp.nn.SAGEConv(CHANNELS, CHANNELS),
    "SAGEConv max": lambda: gsp.nn.SAGEConv(CHANNELS, CHANNELS, aggr="max"),
    "SAGEConv pool": lambda: gsp.nn.SAGEConv(CHANNELS, CHANNELS, aggr="pool"),
    "GINConv": lambda: gsp.nn.GINConv(nn.Linear(CHANNELS, CHANNELS), train_eps=True),
    "GATConv": lambda: gsp.nn.GATConv(CHANNELS, CHANNELS // 3, heads=3, dropout=0.2),
}
PYG: dict[str, Callable[[], nn.Module]] = {
    "GCNConv": lambda: tg.GCNConv(CHANNELS, CHANNELS),
    "SAGEConv": lambda: tg.SAGEConv(CHANNELS, CHANNELS, aggr="max"),
    "GINConv": lambda: tg.GINConv(nn.Linear(CHANNELS, CHANNELS)),
    "GraphConv": lambda: tg.GraphConv(CHANNELS, CHANNELS, aggr="mean"),
    "GATConv": lambda: tg.GATConv(CHANNELS, CHANNELS // 3, heads=3, dropout=0.2),
    "GATv2Conv": lambda: tg.GATv2Conv(CHANNELS, CHANNELS // 3, heads=3),
    "TransformerConv": lambda: tg.TransformerConv(CHANNELS, CHANNELS // 3, heads=3),
    "TAGConv": lambda: tg.TAGConv(CHANNELS, CHANNELS, K=2),
    "Plain": lambda: Plain("min"),
}
DGL: dict[str, Callable[[Any], nn.Module]] = {
    "GraphConv": lambda d: d.GraphConv(CHANNELS, CHANNELS, allow_zero_in_degree=True),
    "SAGEConv": lambda d: d.SAGEConv(CHANNELS, CHANNELS, "pool"),
    "GATConv": lambda d: d.GATConv(CHANNELS, CHANNELS // 3, 3, allow_zero_in_degree=True),
    "GATv2Conv": lambda d: d.GATv2Conv(CHANNELS, CHANNELS // 3, 3, allow_zero_in_degree=True),
    "GINConv": lambda d: d.GINConv(nn.Linear(CHANNELS, CHANNELS), "max"),
}


def edges(device: str) -> Tensor:
    """A hub of 4500 edges, which kernels share out, duplicates, self loops, rows without edges; unsorted."""
    g = torch.Generator().manual_seed(3)
    index = torch.randint(NODES - 20, (2, 6000), generator=g)
    index[1, ::4] = 7
    index[1, 1::2] = 7
    index[0, 3::4] = 5
    return index.to(device)


@pytest.fixture(autouse=True)
def restore(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch's flag asks for of its own products
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def train(make: Callable[[], nn.Module], adjacency: Any, device: str, first: bool = False) -> list[Tensor]:
    """Losses, and every parameter in the end. `first`: the adjacency goes first, as DGL has it."""
    torch.manual_seed(0)
    before, layer = nn.Linear(8, CHANNELS).to(device), make().to(device)
    after = nn.Linear(CHANNELS, 4).to(device)
    parameters = [*before.parameters(), *layer.parameters(), *after.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    x = values((NODES, 8), torch.float32, 1, device=device)
    y = torch.arange(NODES, device=device) % 4
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        h = before(x).relu()
        h = layer(adjacency, h) if first else layer(h, adjacency)
        loss = nn.functional.cross_entropy(after(h.reshape(NODES, -1)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().view(1))
    assert losses[-1] < losses[0]
    return [*losses, *(p.detach() for p in parameters)]


def check(run: Callable[[], list[Tensor]], device: str) -> None:
    """The same bits: `RUNS` times without the flag and with it, and for other numbers of threads."""
    for flag in (False, True):
        torch.use_deterministic_algorithms(flag)
        runs = [run() for _ in range(RUNS if not flag else 2)]
        for threads in (1, 2, 3) if device == "cpu" and not flag else ():
            torch.set_num_threads(threads)
            runs.append(run())
        for a, b in itertools.pairwise(runs):
            for i, (s, t) in enumerate(zip(a, b, strict=True)):
                assert same_bits(s, t), f"tensor {i}: {float((s - t).abs().max())}"


@pytest.mark.parametrize("given", ["graph", "edge_index"])
@pytest.mark.parametrize("name", OURS)
def test_own_layers(name: str, given: str, device: str) -> None:
    index = edges(device)

    def run() -> list[Tensor]:
        gsp.clear_cache()
        calls = kernel_calls()
        found = train(OURS[name], index if given == "edge_index" else gsp.Graph.from_edge_index(index, NODES), device)
        assert kernel_calls() > calls
        return found

    check(run, device)


@pytest.mark.pyg
@pytest.mark.parametrize("name", PYG)
def test_patched_pyg(name: str, device: str) -> None:
    index = edges(device)

    def run() -> list[Tensor]:
        gsp.clear_cache()
        calls = kernel_calls()
        with gsp.patch_pyg():
            found = train(PYG[name], index, device)
        assert kernel_calls() > calls
        return found

    check(run, device)


@pytest.mark.dgl
@pytest.mark.parametrize("name", DGL)
def test_patched_dgl(name: str) -> None:
    dgl = gsp.import_dgl()
    from dgl.nn import pytorch as layers

    index = edges("cpu")

    def run() -> list[Tensor]:
        calls = kernel_calls()
        with gsp.patch_dgl():
            found = train(
                lambda: DGL[name](layers), dgl.graph((index[0], index[1]), num_nodes=NODES), "cpu", first=True
            )
        assert kernel_calls() > calls
        return found

    check(run, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", OURS)
def test_other_streams(name: str) -> None:
    """The same on a stream of one's own."""
    index = edges("cuda")
    expected = train(OURS[name], gsp.Graph.from_edge_index(index, NODES), "cuda")
    for _ in range(2):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            got = train(OURS[name], gsp.Graph.from_edge_index(index, NODES), "cuda")
        torch.cuda.current_stream().wait_stream(stream)
        assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))
