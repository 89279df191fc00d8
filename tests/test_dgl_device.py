"""``patch_dgl(cuda_features=True)``: the structure on the CPU, the features elsewhere.

Without a GPU, elsewhere is either the CPU itself, so that values can be compared, or the meta device, which has no
values but notices whenever something of one device meets something of the other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from dgl_cases import assert_same, graph
from test_dgl_graphs import NAMES, layers, step
from torch import Tensor

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.integrations.dgl import device as devices

pytestmark = pytest.mark.dgl


@pytest.fixture(params=["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """DGL patched so that graphs take features there."""
    kind = request.param
    dgl = gsp.import_dgl()
    if kind != "cuda":
        monkeypatch.setattr(devices, "_KINDS", (kind,))
    if kind == "meta":
        from gnn_spmm_plugin.integrations.dgl import aggregate, sddmm

        plans = sys.modules["gnn_spmm_plugin.plan"]
        monkeypatch.setenv("GSP_MODE", "cold")  # what warms a plan reads values
        monkeypatch.setattr(dgl.backend, "copy_to", lambda t, device, **kwargs: t.to(device, **kwargs))
        for module in (aggregate, sddmm):
            monkeypatch.setattr(module, "no_kernels", lambda device: None)
        kernel = plans.for_device
        monkeypatch.setattr(plans, "for_device", lambda device, name=None: kernel(torch.device("cpu"), name))
    with gsp.patch_dgl(cuda_features=True):
        yield devices._device(kind)


def assert_there(g: Any, device: torch.device) -> None:
    assert g.device == device and devices.marked(g) == device and g._graph.ctx.device_type == 1
    for frame in (g.srcdata, g.dstdata, g.edata):
        assert all(frame[name].device == device for name in frame)


@pytest.mark.parametrize("name", NAMES)
def test_layers(name: str, elsewhere: torch.device) -> None:
    torch.manual_seed(0)
    layer, g, x = layers()[name]().double(), graph(), torch.randn(10, 6, dtype=torch.float64)
    expected = step(layer, g, x)
    found = step(layer.to(elsewhere), g.to(elsewhere), x.to(elsewhere))
    assert [t.device for t in found] == [elsewhere] * len(found)
    assert [t.shape for t in found] == [t.shape for t in expected]
    if elsewhere.type != "meta":
        assert_same([t.cpu() for t in found], expected)


def test_graphs_made_of_it(elsewhere: torch.device) -> None:
    import dgl

    bare = devices._moved(graph(), None)
    bare.ndata["x"] = torch.randn(10, 3)
    g = bare.to(elsewhere)
    assert_there(g, elsewhere)
    assert devices.marked(bare) is None and bare.device.type == "cpu"
    assert g.to(elsewhere) is g
    ids = torch.tensor([1, 2, 3])
    made = [
        *(g.subgraph(ids), dgl.node_subgraph(g, ids), g.in_subgraph(ids), g.edge_subgraph(ids), dgl.batch([g, g])),
        *(dgl.add_self_loop(g), dgl.reverse(g, copy_ndata=False), g.clone(), g.local_var(), g.int(), g.formats("csc")),
        *(dgl.to_block(g), g["_E"]),
    ]
    for h in made:
        assert_there(h, elsewhere)
    assert dgl.batch([g, g]).ndata["x"].shape == (20, 3)
    answers = (g.nodes(), *g.edges(), g.in_degrees(), g.out_degrees(), g.batch_num_nodes(), *g.in_edges(ids))
    for answer in answers:
        assert answer.device == elsewhere
    assert g.in_degrees(3) == bare.in_degrees(3) and g.num_edges() == 30
    if elsewhere.type != "meta":
        assert g.cpu().device.type == g.cpu().ndata["x"].device.type == "cpu"
        assert g.in_degrees().tolist() == bare.in_degrees().tolist()
        assert g.out_degrees().tolist() == bare.out_degrees().tolist()
        assert [a.tolist() for a in g.edges()] == [a.tolist() for a in bare.edges()]
        g.add_edges(torch.tensor([1], device=elsewhere), torch.tensor([9], device=elsewhere))
        assert_there(g, elsewhere)
        assert g.num_edges() == 31 and bare.num_edges() == 30
        parts = dgl.unbatch(dgl.batch([g, g]))
        assert_there(parts[1], elsewhere)
        assert parts[1].ndata["x"].equal(g.ndata["x"])
        u = torch.tensor([0, 1], device=elsewhere)
        if elsewhere.type == "cuda":
            assert_there(dgl.graph((u, u)), elsewhere)


def test_message_passing(elsewhere: torch.device) -> None:
    import dgl
    import dgl.function as fn

    torch.manual_seed(0)
    bare = graph()
    bare.ndata["x"], bare.edata["w"] = torch.randn(10, 3).double(), torch.rand(30, 1).double()

    def everything(g: Any) -> list[Tensor]:
        with g.local_scope():
            g.update_all(fn.u_mul_e("x", "w", "m"), fn.max("m", "a"))
            g.update_all(lambda edges: {"m": edges.src["x"] - edges.dst["x"]}, fn.mean("m", "b"))
            g.update_all(fn.u_sub_e("x", "w", "m"), fn.min("m", "c"))
            g.apply_edges(fn.v_div_u("x", "x", "d"))
            g.edata["e"] = dgl.ops.edge_softmax(g, g.edata["w"])
            readout = dgl.mean_nodes(g, "x"), dgl.max_nodes(g, "x")
            return [*(g.ndata[k] for k in "abc"), *(g.edata[k] for k in "de"), *readout]

    def by_ids(g: Any) -> list[Tensor]:
        with g.local_scope():
            g.pull(torch.tensor([1, 2, 9], device=g.device), fn.copy_u("x", "m"), fn.sum("m", "a"))
            g.update_all(fn.copy_u("x", "m"), lambda nodes: {"b": nodes.mailbox["m"].amax(1)})
            return [g.ndata["a"], g.ndata["b"]]

    functions = [everything] if elsewhere.type == "meta" else [everything, by_ids]  # ids are values
    for f in functions:
        expected, found = f(bare), f(bare.to(elsewhere))
        assert [t.device for t in found] == [elsewhere] * len(found)
        assert [t.shape for t in found] == [t.shape for t in expected]
        if elsewhere.type != "meta":
            assert_same([t.cpu() for t in found], expected)


def test_blocks_of_a_sampler(elsewhere: torch.device) -> None:
    import dgl

    g = graph()
    g.ndata["x"] = torch.randn(10, 6)
    layer = layers()["SAGE mean"]().to(elsewhere)
    sampler = dgl.dataloading.NeighborSampler([3, 3])
    target = "cpu" if elsewhere.type == "meta" else elsewhere
    for _, seeds, blocks in dgl.dataloading.DataLoader(g, torch.arange(10), sampler, batch_size=4, device=target):
        block = blocks[0].to(elsewhere)
        assert_there(block, elsewhere)
        out = layer(block, block.srcdata["x"])
        assert out.shape == (block.num_dst_nodes(), 5) and len(seeds) in (2, 4)
        if elsewhere.type != "meta":
            expected = layer.cpu()(block.cpu(), block.srcdata["x"].cpu())
            layer.to(elsewhere)
            torch.testing.assert_close(out.cpu(), expected)


def test_heterographs(elsewhere: torch.device) -> None:
    import dgl
    import dgl.function as fn

    ends = torch.tensor([0, 1]), torch.tensor([1, 2])
    g = dgl.heterograph({("a", "r", "b"): ends, ("b", "s", "a"): ends}).to(elsewhere)
    for ntype in g.ntypes:
        g.nodes[ntype].data["h"] = torch.ones(3, 4, device=elsewhere)
    one = (fn.copy_u("h", "m"), fn.sum("m", "o"))
    g.multi_update_all({"r": one, "s": one}, "sum")
    assert g.nodes["a"].data["o"].device == elsewhere
    if elsewhere.type != "cpu":
        with pytest.raises(RuntimeError, match=r"features on a GPU.*several relations at once; use multi_update_all"):
            g.update_all(*one)


def test_what_cannot_work(elsewhere: torch.device) -> None:
    import dgl

    g = graph().to(elsewhere)
    if elsewhere.type != "cpu":
        with pytest.raises(RuntimeError, match=r"copy_u_sum is not possible with features on a GPU.*torch.int64"):
            dgl.ops.copy_u_sum(g, torch.ones(10, 2, dtype=torch.long, device=elsewhere))
    one, other = graph(), graph()
    one.__dict__[devices._MARK], other.__dict__[devices._MARK] = torch.device("cuda", 0), torch.device("cuda", 1)
    with pytest.raises(ValueError, match=r"features on cuda:., cuda:."):
        dgl.batch([one, other])


def test_nothing_stays(elsewhere: torch.device) -> None:
    import dgl

    cls = sys.modules["dgl.heterograph"].DGLGraph
    assert cls.to.__module__ != "dgl.heterograph" or hasattr(cls.to, "__wrapped__")
    gsp.unpatch_dgl()
    assert not hasattr(cls.to, "__wrapped__") and not hasattr(dgl.batch, "__wrapped__")
    assert not hasattr(dgl.dataloading.neighbor_sampler.to_block, "__wrapped__")
