"""Patched DGL at work: layers, heterographs, blocks, batches; what is prepared once, what is freed, what is counted."""

from __future__ import annotations

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
from dgl_cases import Counted, assert_same, graph
from torch import Tensor

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import dgl_index

pytestmark = pytest.mark.dgl


def layers() -> dict[str, Any]:
    gsp.import_dgl()
    from dgl import nn

    return {
        "GraphConv": lambda: nn.GraphConv(6, 5, allow_zero_in_degree=True),
        "SAGE mean": lambda: nn.SAGEConv(6, 5, "mean"),
        "SAGE pool": lambda: nn.SAGEConv(6, 5, "pool"),
        "SAGE gcn": lambda: nn.SAGEConv(6, 5, "gcn"),
        "GIN": lambda: nn.GINConv(torch.nn.Linear(6, 5), "max"),
        "GAT": lambda: nn.GATConv(6, 5, 2, allow_zero_in_degree=True),
        "GATv2": lambda: nn.GATv2Conv(6, 5, 2, allow_zero_in_degree=True),
        "DotGat": lambda: nn.DotGatConv(6, 5, 2, allow_zero_in_degree=True),
        "TAG": lambda: nn.TAGConv(6, 5),
        "EdgeConv": lambda: nn.EdgeConv(6, 5, allow_zero_in_degree=True),
    }


NAMES = ("GraphConv", "SAGE mean", "SAGE pool", "SAGE gcn", "GIN", "GAT", "GATv2", "DotGat", "TAG", "EdgeConv")


def step(layer: Any, g: Any, x: Any) -> list[Tensor]:
    given = [t.detach().clone().requires_grad_() for t in (x if isinstance(x, tuple) else (x,))]
    out = layer(g, tuple(given) if isinstance(x, tuple) else given[0])
    parameters = [p for p in layer.parameters() if p.requires_grad]
    grads = torch.autograd.grad((out**2).sum(), [*given, *parameters], allow_unused=True)
    return [out.detach(), *(g for g in grads if g is not None)]


@pytest.mark.parametrize("name", NAMES)
def test_layers(name: str) -> None:
    torch.manual_seed(0)
    layer, g, x = layers()[name]().double(), graph(), torch.randn(10, 6, dtype=torch.float64)
    expected = step(layer, g, x)
    for _ in range(2):
        with Counted() as c:
            found = step(layer, g, x)
        assert_same(found, expected)
        assert c.calls > 0
    assert c.transposes == 0  # what the first step made is still there


def test_blocks_and_batches() -> None:
    import dgl

    torch.manual_seed(0)
    g = graph()
    x = torch.randn(10, 6, dtype=torch.float64)
    layer = layers()["SAGE mean"]().double()
    sampler = dgl.dataloading.NeighborSampler([3])
    block = sampler.sample(g, torch.tensor([1, 4, 9]))[2][0]
    batch = dgl.batch([g, dgl.add_self_loop(g), dgl.graph(([], []), num_nodes=2)])
    for h, width in ((block, block.num_src_nodes()), (batch, 22)):
        features = torch.randn(width, 6, dtype=torch.float64)
        expected = step(layer, h, features)
        with Counted() as c:
            found = step(layer, h, features)
        assert_same(found, expected)
        assert c.calls > 0 and c.fallbacks == 0
    assert x.shape == (10, 6)


def test_message_passing_of_all_sorts() -> None:
    import dgl.function as fn

    g = graph()
    g.ndata["x"], g.edata["w"] = torch.randn(10, 3).double(), torch.rand(30, 1).double()

    def everything() -> list[Tensor]:
        with g.local_scope():
            g.update_all(fn.u_mul_e("x", "w", "m"), fn.max("m", "a"))
            g.update_all(fn.copy_u("x", "m"), fn.mean("m", "b"), lambda nodes: {"b": nodes.data["b"] * 2})
            g.pull(torch.tensor([1, 2, 9]), fn.copy_u("x", "m"), fn.min("m", "c"))
            g.send_and_recv(torch.tensor([0, 5, 7]), fn.copy_e("w", "m"), fn.sum("m", "d"))
            g.push(torch.tensor([0, 3]), fn.copy_u("x", "m"), fn.sum("m", "e"))
            g.update_all(lambda edges: {"m": edges.src["x"] * 2}, fn.sum("m", "f"))
            g.update_all(fn.copy_u("x", "m"), lambda nodes: {"g": nodes.mailbox["m"].amax(1)})
            g.apply_edges(fn.u_dot_v("x", "x", "h"))
            return [*(g.ndata[k] for k in "abcdefg"), g.edata["h"]]

    expected = everything()
    with Counted() as c:
        found = everything()
    assert_same(found, expected)
    assert c.calls >= 6


def test_heterographs() -> None:
    import dgl
    import dgl.function as fn

    g = dgl.heterograph(
        {
            ("user", "follows", "user"): (torch.tensor([0, 1, 1]), torch.tensor([1, 2, 2])),
            ("user", "plays", "game"): (torch.tensor([0, 0, 2]), torch.tensor([0, 1, 1])),
            ("game", "bores", "user"): (torch.tensor([0, 1]), torch.tensor([0, 2])),
        },
        num_nodes_dict={"user": 4, "game": 2},
    )
    g.nodes["user"].data["h"], g.nodes["game"].data["h"] = torch.randn(4, 3).double(), torch.randn(2, 3).double()
    one = (fn.copy_u("h", "m"), fn.sum("m", "o"))

    def everything() -> list[Tensor]:
        with g.local_scope():
            g.update_all(*one, etype="plays")
            first = g.nodes["game"].data["o"]
            for cross in ("sum", "max", "stack"):
                g.multi_update_all({"follows": (one[0], fn.mean("m", "o")), "bores": one, "plays": one}, cross)
                yield_ = g.nodes["user"].data["o"]
                first = torch.cat([first.flatten(), yield_.flatten()])
            g.update_all(*one)  # several relations in one call of DGL's: not ours
            return [first, g.nodes["user"].data["o"], g.nodes["game"].data["o"]]

    expected = everything()
    with Counted() as c:
        found = everything()
    assert_same(found, expected)
    assert c.calls >= 10 and c.fallbacks == 1

    conv = dgl.nn.HeteroGraphConv({e: dgl.nn.SAGEConv(3, 2, "mean") for e in g.etypes}).double()
    features = {t: g.nodes[t].data["h"] for t in g.ntypes}
    theirs = conv(g, features)
    with Counted() as c:
        ours = conv(g, features)
    assert_same([ours[t] for t in sorted(ours)], [theirs[t] for t in sorted(theirs)])
    assert c.fallbacks == 0


# ---------------------------------------------------------------------- caches


def test_a_graph_is_built_once_and_once_transposed() -> None:
    import dgl
    import dgl.function as fn

    g, x = graph(), torch.randn(10, 3, requires_grad=True)
    with gsp.patch_dgl():
        before = gsp.stats()
        for _ in range(3):
            g.ndata["x"] = x
            g.update_all(fn.copy_u("x", "m"), fn.sum("m", "y"))
            (dgl.ops.copy_u_max(g, x).relu().sum() + g.ndata["y"].sum() + dgl.ops.copy_u_sum(g, x).sum()).backward()
            dgl.ops.copy_u_sum(dgl.reverse(g), x)  # a new graph each time, on the same index
        reverse = g._graph.reverse()
        assert reverse is g._graph.reverse()
        backwards, forwards = dgl_index.relation_of(reverse), dgl_index.relation_of(g._graph)
        assert backwards is not None and forwards is not None
        assert backwards.graph._core is forwards.graph._core
        now = gsp.stats()
    assert now["transposes_built"] - before["transposes_built"] == 1
    assert now["graphs_built"] - before["graphs_built"] == 1


def test_reverse_asked_first() -> None:
    import dgl

    g, x = graph(), torch.randn(10, 3)
    expected = dgl.ops.copy_u_sum(g, x), dgl.ops.copy_u_sum(dgl.reverse(g), x)
    with gsp.patch_dgl():
        index = g._graph.reverse()
        relation = dgl_index.relation_of(index)
        assert relation is not None
        torch.testing.assert_close(gsp.spmm(relation.graph, x), expected[1])
        torch.testing.assert_close(dgl.ops.copy_u_sum(g, x), expected[0])


def test_changed_graphs_are_new() -> None:
    import dgl

    g, x = graph(), torch.randn(10, 3)
    with gsp.patch_dgl():
        dgl.ops.copy_u_sum(g, x)
        g.add_edges([3], [9])
        g.add_nodes(1)
        x = torch.cat([x, x[:1]])
        ours = dgl.ops.copy_u_sum(g, x)
    torch.testing.assert_close(ours, dgl.ops.copy_u_sum(g, x))
    assert ours[9].equal(x[3])


def test_first_used_in_inference_mode() -> None:
    import dgl

    g, x, w = graph(), torch.randn(10, 3), torch.rand(30, 1)
    leaf = x.clone().requires_grad_()

    def everything(x: Tensor) -> Tensor:
        a = dgl.ops.u_add_e_max(g, x, w)[:8].sum() + dgl.ops.u_mul_e_mean(g, x, w).sum()
        return a + dgl.ops.u_sub_v(g, x, x).square().sum() + dgl.ops.copy_e_sum(g, dgl.ops.copy_u(g, x)).sum()

    with gsp.patch_dgl():
        with torch.inference_mode():
            expected = everything(x)
        out = everything(leaf)
        out.backward()
    torch.testing.assert_close(out.detach(), expected.clone())
    assert leaf.grad is not None and leaf.grad.isfinite().all()


@pytest.mark.usefixtures("no_gc")
def test_goes_with_the_graph() -> None:
    import dgl

    g, x = graph(), torch.randn(10, 3, requires_grad=True)
    with gsp.patch_dgl():
        out = dgl.ops.copy_u_max(dgl.add_self_loop(g), x)  # that graph is gone before the backward
        g._graph.reverse()
        dgl.ops.copy_u_sum(g, x).sum().backward()
        relation = dgl_index.relation_of(g._graph)
        assert relation is not None
        core = weakref.ref(relation.graph._core)
        del relation
        out.sum().backward()
        assert core() is not None
        del g
        assert core() is None
    assert x.grad is not None


def test_copies_do_not_carry_it() -> None:
    import dgl

    g, x = graph(), torch.randn(10, 3)
    with gsp.patch_dgl():
        out = dgl.ops.copy_u_sum(g, x)
        for other in (copy.deepcopy(g), pickle.loads(pickle.dumps(g)), g.int(), g.clone(), g.local_var()):
            torch.testing.assert_close(dgl.ops.copy_u_sum(other, x), out)


# ---------------------------------------------------------------------- what else takes a DGLGraph


def test_graph_from_dgl_and_own_layers() -> None:
    import dgl

    g, x = graph(), torch.randn(10, 6)
    own = gsp.Graph.from_dgl(g)
    torch.testing.assert_close(gsp.spmm(own, x), dgl.ops.copy_u_sum(g, x))
    for layer in (
        gsp.nn.GCNConv(6, 4),
        gsp.nn.SAGEConv(6, 4),
        gsp.nn.SAGEConv(6, 4, "max"),
        gsp.nn.GINConv(torch.nn.Linear(6, 4)),
    ):
        torch.testing.assert_close(layer(x, g), layer(x, own))
    before = gsp.stats()["graphs_built"]
    layer(x, g)
    assert gsp.stats()["graphs_built"] == before
    block = dgl.to_block(g)
    y = torch.randn(block.num_src_nodes(), 6)
    sage = gsp.nn.SAGEConv(6, 4)
    torch.testing.assert_close(
        sage((y, y[: block.num_dst_nodes()]), block), sage((y, y[: block.num_dst_nodes()]), gsp.Graph.from_dgl(block))
    )
    two = dgl.heterograph({("a", "r", "b"): ([0], [0]), ("b", "s", "a"): ([0], [0])})
    with pytest.raises(ValueError, match=r"g\[etype\]"):
        sage(x, two)


def test_report() -> None:
    torch.manual_seed(0)
    make = layers()

    class Own(torch.nn.Module):
        def forward(self, g: Any, x: Tensor) -> Tensor:
            import dgl

            return dgl.ops.copy_u_mean(g, x)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = make["SAGE mean"](), make["GAT"](), Own(), make["TAG"]()

        def forward(self, g: Any, x: Tensor) -> Tensor:
            return self.c(g, self.a(g, x)) + self.b(g, x, get_attention=True)[0].sum(1)

    model, g, x = Model(), graph(200, 40000), torch.randn(200, 6)
    assert [row["status"] for row in gsp.report(model).rows] == ["not accelerated"] * 3
    with gsp.patch_dgl():
        model(g, x).sum().backward()
        rows = {row["layer"]: row for row in gsp.report(model).rows}
    assert {name: row["status"] for name, row in rows.items()} == {
        "a SAGEConv": "fused",
        "b GATConv": "partly",
        "c Own": "fused",
        "d TAGConv": "not called",
    }
    assert rows["a SAGEConv"]["ops"] == {"mean + self": 1}
    assert rows["b GATConv"]["ops"] == {"edge_softmax": 1, "u_mul_e_sum": 1}
    assert list(rows["b GATConv"]["reasons"]) == ["u_add_v: DGL's kernel is faster on the CPU"]
    assert "copy_u_mean x1" in str(gsp.report(model))


def test_a_graph_of_dgl_is_none_of_ours(device: str) -> None:
    g = graph(5, 5)
    with pytest.raises(TypeError, match=r"got DGLGraph; make one with Graph.from_dgl\(graph\)"):
        gsp.spmm(g, torch.ones(2, 1))


@pytest.mark.parametrize("operator", ["u_sub_v", "u_add_v", "u_mul_v", "u_div_v", "u_dot_v"])
def test_a_backward_without_edges(operator: str) -> None:
    g = graph(5, 0)
    x = torch.randn(5, 3, dtype=torch.float64).requires_grad_()
    with gsp.patch_dgl():
        getattr(gsp.import_dgl().ops, operator)(g, x, x * 1).sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
