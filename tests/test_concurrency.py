"""Many at once: threads on one graph, workers of a DataLoader, forked and spawned."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks import books_agree
from loader_items import Graphs, alone
from pyg_layers import tg
from strategies import NAMED, REDUCES, Edges
from torch import Tensor
from torch.utils.data import DataLoader

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import reference
from gnn_spmm_plugin.functional_attention import attend

THREADS = 6


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns a thousand times more often than Python lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(work: Callable[[int], None], count: int = THREADS) -> None:
    """``work(i)`` in `count` threads that start as one; what one raises, this raises."""
    wrong: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(i: int) -> None:
        try:
            barrier.wait(60)
            work(i)
        except BaseException as e:
            wrong.append(e)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not any(t.is_alive() for t in threads)
    if wrong:
        raise wrong[0]


def wanted(g: gsp.Graph, x: Tensor, w: Tensor, reduce: str) -> list[Tensor]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    out, _ = reference.spmm(g, x, w, reduce)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (x, w))]


def got(g: gsp.Graph, x: Tensor, w: Tensor, reduce: str, **how: Any) -> list[Tensor]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    out = gsp.spmm(g, x, w, reduce, **how)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (x, w))]  # type: ignore[union-attr]


def same(a: list[Tensor], b: list[Tensor]) -> None:
    for s, t in zip(a, b, strict=True):
        torch.testing.assert_close(s, t, rtol=1e-9, atol=1e-9)


def numbers(e: Edges, seed: int, device: str) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(e.num_src, 3, generator=g, dtype=torch.float64)
    return x.to(device), torch.rand(e.num_edges, generator=g, dtype=torch.float64).to(device)


@pytest.mark.parametrize("name", ["shuffled", "bipartite", "hub"])
def test_threads_share_a_graph(name: str, device: str, often: None) -> None:
    """From its very first use: transpose, plans, permuted weights, upgrades, all made while others look."""
    e = NAMED[name]
    for round_ in range(4):
        g = e.graph(device)
        twin = e.graph(device)
        given = [numbers(e, 10 * round_ + i, device) for i in range(THREADS)]
        expected = [wanted(twin, *given[i], REDUCES[i % 4]) for i in range(THREADS)]

        def work(i: int, g: gsp.Graph = g, given: Any = given, expected: Any = expected) -> None:
            x, w = given[i]
            for turn in range(6):
                how = {"plan": gsp.plan(g, 3, torch.float64, REDUCES[i % 4])} if turn == 3 else {}
                same(got(g, x, w, REDUCES[i % 4], **how), expected[i])
                torch.testing.assert_close(gsp.spmm(g, x, w, REDUCES[i % 4]), expected[i][0])  # constant weights
                assert g.T.T.num_edges == e.num_edges

        together(work)
        g.validate()


def test_threads_share_all_that_is_derived(device: str, often: None) -> None:
    """Self loops, normalisations, edges by rows: what layers keep with a graph."""
    e = NAMED["shuffled"]
    index = e.edge_index.to(device)
    torch.manual_seed(0)
    layers = [
        gsp.nn.GCNConv(3, 4),
        gsp.nn.GCNConv(3, 4, add_self_loops=False),
        gsp.nn.GATConv(3, 2, heads=2),
        gsp.nn.SAGEConv(3, 4, aggr="max"),
        gsp.nn.GINConv(torch.nn.Linear(3, 4)),
    ]
    layers = [layer.double().to(device) for layer in layers]
    x, w = numbers(e, 1, device)
    weighted = (True, True, False, False, False)

    def outputs(i: int, adjacency: Any) -> Tensor:
        layer = layers[i % 5]
        return layer(x, adjacency, w) if weighted[i % 5] else layer(x, adjacency)  # type: ignore[no-any-return]

    expected = [outputs(i, gsp.Graph.from_edge_index(index, 37)).detach() for i in range(5)]
    scores = torch.randn(37, 2, dtype=torch.float64, device=device)
    for _ in range(4):
        gsp.clear_cache()
        g = gsp.Graph.from_edge_index(index, 37)

        def work(i: int, g: gsp.Graph = g) -> None:
            for _ in range(4):
                for adjacency in (g, index):
                    out = outputs(i, adjacency)
                    torch.testing.assert_close(out.detach(), expected[i % 5])
                    out.sum().backward()
                attend(g, x.view(37, 1, 3).expand(37, 2, 3), "sum", (scores, scores))

        together(work)
        books_agree()


@pytest.mark.pyg
def test_threads_patch_and_unpatch(device: str, often: None) -> None:
    """Patches are counted: whoever is inside one is inside one."""
    e = NAMED["shuffled"]
    index = e.edge_index.to(device)
    x, w = numbers(e, 1, device)
    layer = tg.GraphConv(3, 4).double().to(device)
    before = tg.MessagePassing._index_select_safe
    expected = layer(x, index, w).detach()

    def work(i: int) -> None:
        for _ in range(15):
            with gsp.patch_pyg():
                torch.testing.assert_close(layer(x, index, w).detach(), expected)

    together(work)
    assert tg.MessagePassing._index_select_safe is before


# ---------------------------------------------------------------------- workers


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_data_loader(context: str) -> None:
    """The parent has used graphs before; what comes from a worker is used here."""
    gsp.spmm(NAMED["shuffled"].graph(), torch.randn(37, 3))
    data = Graphs()
    loader = DataLoader(
        data, num_workers=2 if context == "fork" else 1, multiprocessing_context=context, collate_fn=alone, timeout=120
    )
    for _ in range(2 if context == "fork" else 1):
        for i, (g, index, out, grad) in enumerate(loader):
            here = data[i]
            assert torch.equal(index, here[1]) and torch.equal(out, here[2]) and torch.equal(grad, here[3])
            g.validate()
            assert torch.equal(g.edge_index(), index) and g.weight is not None
            x = torch.randn(9, 3, dtype=torch.float64)
            torch.testing.assert_close(gsp.spmm(g, x), reference.spmm(g, x)[0])
            torch.testing.assert_close(gsp.spmm(g.T, x), reference.spmm(g.T, x)[0])


@pytest.mark.pyg
def test_batches_of_pygs_loader_train_as_without_a_patch() -> None:
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as PygLoader

    def graphs() -> list[Data]:
        generator = torch.Generator().manual_seed(0)
        return [
            Data(
                x=torch.randn(5 + i, 3, generator=generator, dtype=torch.float64),
                edge_index=torch.randint(5 + i, (2, 12), generator=generator),
            )
            for i in range(12)
        ]

    def train() -> list[Tensor]:
        torch.manual_seed(0)
        net = torch.nn.ModuleList([tg.GCNConv(3, 4), tg.SAGEConv(4, 2)]).double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for _ in range(2):
            for batch in PygLoader(graphs(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
                optimizer.zero_grad()
                net[1](net[0](batch.x, batch.edge_index).relu(), batch.edge_index).square().mean().backward()
                optimizer.step()
        return [p.detach() for p in net.parameters()]

    expected = train()
    with gsp.patch_pyg():
        calls = gsp.stats()["kernel_calls"]
        same(train(), expected)
        assert gsp.stats()["kernel_calls"] > calls
