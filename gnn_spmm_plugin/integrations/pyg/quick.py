"""The commonest calls of the commonest layers, ``layer(x, edge_index)``, in as few steps as Python allows.

A mini-batch's edge list is new in every step, its layers take microseconds on the device, and then it counts what a
layer is asked before its one kernel. Here it is asked what can be seen at a glance; whoever is in doubt returns None,
and the layer is called as ever: by way of `torch.nn.Module.__call__` to `direct`, which asks everything.
"""

from __future__ import annotations

import operator
import weakref
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import GCNConv, GINConv, SAGEConv

from ..._config import verify_always
from ..._native import accumulation_dtype, autocasts
from ...cache import graph_of_edge_index, latest
from ...csr import capturing, state
from ...derivatives import _is_batched
from ...functional import LINEAR
from ...functional_convolution import convolve_unchecked
from ...graph import Graph
from ...nn.conv import calls_replaced, transforms_first
from ...normalize import gcn_norm
from . import aggregate, direct
from .convolved import CALLS, fits, watched, weight_of
from .lazy import PLAIN
from .records import Record

_every = torch.nn.modules.module
#: Hooks on all modules; torch adds to these and takes from them, and never exchanges them.
_ALL = (
    *(_every._global_forward_hooks, _every._global_forward_pre_hooks),
    *(_every._global_backward_hooks, _every._global_backward_pre_hooks),
)
#: What has to be empty in a layer.
_WATCHERS = operator.itemgetter(*(CALLS + direct.LAYER_HOOKS + ("_explain",)))
_OWN = direct.OWN | {"_compiled_call_impl", "__call__"}
_SETTINGS = operator.itemgetter("_modules", "node_dim", "_decomposed_layers", "flow")


def quick(layer: Any, x: Any, edge_index: Any, record: Record) -> Tensor | None:
    """What ``layer(x, edge_index)`` returns; None where it has to be called.

    For callers that know that no transform is on, nor anything that traces.

    Args:
        layer: an accelerated layer.
        x: features.
        edge_index: the edges.
        record: of the layer.
    """
    cls = type(layer)
    form = _FORMS.get(cls)
    if form is None or type(x) not in PLAIN or type(edge_index) is not Tensor:
        return None
    attributes = layer.__dict__
    try:
        modules, node_dim, decomposed, flow = _SETTINGS(attributes)
        aggr = modules["aggr_module"]
        reduce = aggregate.REDUCTIONS[type(aggr)]
        if any(_WATCHERS(attributes)) or any(_ALL) or decomposed != 1 or not (node_dim == -2 or node_dim == 0):
            return None
        if calls_replaced():
            return None
        if watched(aggr) or not _OWN.isdisjoint(attributes) or not direct.installed(cls):
            return None
        if autocasts(x.device.type) or aggregate.policy() != "auto" or x.dim() != 2 or _is_batched(x):
            return None
        return form(attributes, modules, reduce, x, edge_index, flow != "source_to_target", record)
    except KeyError:
        return None


def _graph(x: Tensor, edge_index: Tensor, reverse: bool) -> Graph | None:
    """The graph of `edge_index`, square; None where that or `x` are not what there are kernels for."""
    nodes = x.shape[0]
    graph = latest(edge_index, nodes, nodes, reverse)
    if graph is not None and graph._core.device == x.device and x.layout is torch.strided:
        return graph
    if not direct._features(x) or not direct._edges(edge_index, None, x):
        return None
    try:
        return graph_of_edge_index(edge_index, nodes, nodes, reverse)
    except IndexError:  # it is PyG's to raise
        return None


def _sage(
    attributes: Any, modules: Any, reduce: str, x: Tensor, edge_index: Tensor, reverse: bool, record: Record
) -> Tensor | None:
    if attributes["normalize"] or attributes["project"]:
        return None
    lin, root = modules["lin_l"], None
    weight, bias = weight_of(lin, x), lin.__dict__["_parameters"]["bias"]
    if attributes["root_weight"]:
        right = modules["lin_r"]
        root = weight_of(right, x)
        if root is None or right.__dict__["_parameters"]["bias"] is not None:
            return None
    if weight is None or not fits(bias, weight) or (root is not None and root.shape[0] != weight.shape[0]):
        return None
    graph = _graph(x, edge_index, reverse)
    if graph is None:
        return None
    if reduce in LINEAR:
        first, tie = transforms_first(weight, x), "first"
    else:
        first, tie = False, aggregate.tie_rule(x, x.requires_grad)
    out = convolve_unchecked(graph, x, weight, bias, reduce, root=root, tie=tie, first=first)
    record.fused[direct.named(reduce, root is not None, bias) if first else reduce] += 1
    return out


def _gcn(
    attributes: Any, modules: Any, reduce: str, x: Tensor, edge_index: Tensor, reverse: bool, record: Record
) -> Tensor | None:
    if attributes["cached"] or not attributes["normalize"] or reduce != "sum":
        return None
    lin, bias = modules["lin"], attributes["_parameters"]["bias"]
    weight = weight_of(lin, x)
    if weight is None or lin.__dict__["_parameters"]["bias"] is not None or not fits(bias, weight):
        return None
    graph = _graph(x, edge_index, reverse)
    if graph is None:
        return None
    norm, first = gcn_norm(graph, None, x.dtype, attributes["add_self_loops"]), transforms_first(weight, x)
    out = convolve_unchecked(graph, x, weight, bias, "sum", scale=norm.scale, loop=norm.loop, first=first)
    record.fused["normalised sum + bias" if first and bias is not None else "normalised sum"] += 1
    return out


def _gin(
    attributes: Any, modules: Any, reduce: str, x: Tensor, edge_index: Tensor, reverse: bool, record: Record
) -> Tensor | None:
    eps, lin = attributes["_buffers"]["eps"], modules["nn"]
    if reduce not in LINEAR or eps.requires_grad or eps.dtype != x.dtype or eps.shape != (1,):
        return None
    then: Any = None
    if type(lin) is torch.nn.Sequential and not watched(lin) and len(lin):
        lin, *then = lin  # its first layer belongs to the same step
    weight, bias = weight_of(lin, x), lin.__dict__["_parameters"]["bias"]
    if weight is None or x.shape[1] != weight.shape[1] or not fits(bias, weight):
        return None
    graph = _graph(x, edge_index, reverse)
    if graph is None:
        return None
    first = transforms_first(weight, x)
    out = convolve_unchecked(graph, x, weight, bias, reduce, loop=_one_plus(eps, record), first=first)
    record.fused[f"{reduce} + self"] += 1
    for module in then or ():
        out = module(out)
    return out


def _one_plus(eps: Tensor, record: Record) -> Tensor:
    """``1 + eps`` as kernels read it; on a GPU, where that is a launch, the same again while `eps` is what it was."""
    if not eps.is_cuda or verify_always() or capturing(eps.device):
        return (1 + eps).to(accumulation_dtype(eps.dtype))
    kept = record.one_plus
    if kept is not None and kept[0]() is eps and kept[1] == state(eps):
        same: Tensor = kept[2]
        return same
    made = (1 + eps).to(accumulation_dtype(eps.dtype))
    if not (made.is_inference() or eps.is_inference()):
        record.one_plus = weakref.ref(eps), state(eps), made
    return made


_FORMS = {SAGEConv: _sage, GCNConv: _gcn, GINConv: _gin}
