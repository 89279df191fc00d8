"""Attention layers of PyG: against stock PyG, and proof of which way was taken and that no messages were made."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pyg_layers import MessagePassing, assert_same, kernel_calls, outputs_and_gradients, random_graph, tg
from test_pyg_direct import FLOWS, Made, direct, patched
from torch import Tensor, nn

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import functional_attention
from gnn_spmm_plugin.integrations.pyg.records import known

pytestmark = pytest.mark.pyg

N, E, F = 24, 150, 6


def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """GATv2's scores in parts of a few edges."""
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(functional_attention.PART_BYTES, device, 700)


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
    import random

    random.seed(seed)
    out = layer(*args)
    return (out, layer.get_attention_loss()) if hasattr(layer, "get_attention_loss") and layer.training else out


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("graph", ["any", "sorted", "one", "empty"])
@pytest.mark.parametrize("name", LAYERS)
def test_equals_stock(name: str, graph: str, flow: str, device: str) -> None:
    edge_index = edges(graph, device)
    for heads, concat, loops, dropout in itertools.product((1, 4), (True, False), (True, False), (0.0, 0.4)):
        if "supergat" in name and (graph in ("empty", "one") or dropout):
            continue  # its negative samples are drawn with NumPy; test_supergat_draws_as_stock
        torch.manual_seed(0)
        layer = LAYERS[name](F, **options(heads, concat, loops, flow, dropout)).to(device, torch.float64)
        if "supergat" in name:
            layer.eval()
        x = torch.randn(N, F, dtype=torch.float64, device=device)
        for index in (torch.int64, torch.int32):
            # torch 2.13 itself computes wrong gradients of scatter_add_ with int32 indices; ours are those of int64.
            call = functools.partial(lambda x, e, layer: run(layer, 7, x, e), layer=layer)
            expected = outputs_and_gradients(layer, functools.partial(call, e=edge_index), x)
            with patched(layer):
                got = outputs_and_gradients(layer, functools.partial(call, e=edge_index.to(index)), x)
                assert direct(layer), (heads, concat, loops)
            assert_same(got, expected)


@pytest.mark.parametrize("kind", ["MX", "SD"])
def test_supergat_draws_as_stock(kind: str, device: str) -> None:
    """Attention, positive and negative samples come from the same generators in the same order."""
    import numpy as np

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
            np.random.seed(3)
            out = run(layer, 3, x, edge_index)
            return *out, layer.att_x, layer.att_y

        expected = outputs_and_gradients(layer, call, x)
        with patched(layer):
            got = outputs_and_gradients(layer, call, x)
            assert direct(layer)
        assert_same(got, expected)
        given = random_graph(N, N, 40, seed=4, device=device) - 1  # from the end, too
        call = functools.partial(lambda x, layer: run(layer, 3, x, edge_index, given), layer=layer)
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
