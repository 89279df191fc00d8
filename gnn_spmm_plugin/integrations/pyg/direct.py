"""PyG's GCNConv, SAGEConv, GINConv and GraphConv as a whole: aggregation and what is around it in one kernel.

A lazy gather (`lazy`) sees one layer's messages, so it can spare their writing and no more. Where the layer is one of
these four, unchanged, and nobody looks at its messages, more is known: that GCN's edge weights are a product of two
factors of nodes, that its self loops, GIN's ``(1 + eps) * x``, the root term and the bias are added to the result, and
that a linear layer may as well come after a sum as before it. What does not fit, down to the kind of ``edge_index``, is
left to PyG's own ``forward``, and so to the lazy gather.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.nn.conv import GCNConv, GINConv, GraphConv, SAGEConv, gcn_conv
from torch_geometric.nn.dense.linear import Linear

from ... import _native
from ...cache import graph_of
from ...functional import spmm
from ...functional_aggregate import aggregate as aggregate_and_add
from ...graph import Graph
from ...kernels import DTYPES
from ...nn.conv import swaps, transforms_first
from ...normalize import Normalized, gcn_norm
from . import aggregate
from .lazy import PLAIN
from .records import record_of

_HOOKS = tuple(
    f"_{where}_forward_{when}" for where in ("propagate", "message", "aggregate") for when in ("pre_hooks", "hooks")
)
_METHODS = (
    *("message", "aggregate", "update", "message_and_aggregate", "propagate", "edge_update", "explain_message"),
    *("_check_input", "_set_size", "_lift", "_index_select", "_index_select_safe", "forward"),
)


def _stock(cls: type) -> dict[str, Any]:
    """The methods that decide about messages; `propagate` is PyG's to replace, `_index_select_safe` is ours."""
    names = (n for n in _METHODS if n not in ("propagate", "_index_select_safe", "forward"))
    return {name: getattr(cls, name) for name in names}


_STOCK = {cls: _stock(cls) for cls in (GCNConv, SAGEConv, GINConv, GraphConv)}
_PYG = {cls: all(m.__module__.startswith("torch_geometric.") for m in _STOCK[cls].values()) for cls in _STOCK}


def _unchanged(layer: Any) -> bool:
    """Whether `layer` is what PyG made it, and nobody looks at its messages."""
    cls, own = type(layer), layer.__dict__
    return (
        _PYG[cls]
        and not any(own.get(name) for name in _HOOKS)
        and not any(name in own for name in _METHODS)
        and all(getattr(cls, name) is method for name, method in _STOCK[cls].items())
        and cls.propagate is getattr(cls, "_jinja_propagate", None)
        and not layer.explain
        and layer.decomposed_layers == 1
        and layer.node_dim in (-2, 0)
    )


def _reduction(layer: Any) -> str | None:
    """The reduction of a layer's aggregation, or None where it is not one kernel or somebody looks on."""
    module = layer.aggr_module
    if type(module) not in aggregate.REDUCTIONS or aggregate.hooked(module):
        return None
    return aggregate.REDUCTIONS[type(module)]


def _features(x: Any) -> bool:
    if type(x) not in PLAIN or x.dim() != 2 or x.dtype not in DTYPES or x.layout != torch.strided:
        return False
    return (_native.cpu_error if x.device.type == "cpu" else _native.cuda_error) is None and (x.is_cuda or x.is_cpu)


def _edges(edge_index: Any, weight: Any, x: Tensor) -> bool:
    if type(edge_index) is not Tensor or edge_index.dim() != 2 or edge_index.shape[0] != 2:
        return False
    if edge_index.dtype not in (torch.int32, torch.int64) or edge_index.layout != torch.strided:
        return False
    if weight is not None and (
        type(weight) not in PLAIN
        or weight.shape != edge_index.shape[1:]
        or weight.dtype not in DTYPES
        or weight.layout != torch.strided
        or weight.device != x.device
    ):
        return False
    return edge_index.device == x.device


def _graph(layer: Any, edge_index: Tensor, num_dst: int, num_src: int) -> Graph | None:
    """The graph of an edge_index; None where PyG has an error to raise."""
    i = int(layer.flow == "source_to_target")
    try:
        return graph_of(edge_index[i], edge_index[1 - i], num_dst, num_src)
    except IndexError:
        return None


def _promoted(*tensors: Tensor | None) -> torch.dtype:
    dtypes = [t.dtype for t in tensors if t is not None]
    return functools.reduce(torch.promote_types, dtypes)


# ---------------------------------------------------------------------- the four layers


def _gcn(layer: Any, x: Any, edge_index: Any, edge_weight: Any = None) -> Any:
    lin, bias, policy = layer.lin, layer.bias, aggregate.policy()
    fits = _features(x) and _edges(edge_index, edge_weight, x) and _unchanged(layer) and _reduction(layer) == "sum"
    if not fits or type(lin) is not Linear or not (bias is None or bias.shape == (layer.out_channels,)):
        return NotImplemented
    index, weight, kept = edge_index, edge_weight, False
    if layer.normalize:
        if edge_weight is not None and edge_weight.requires_grad and torch.is_grad_enabled():
            return NotImplemented  # its gradient goes through the normalisation
        if layer.cached:
            found = _cached(layer, x, edge_index, edge_weight)
            if found is None:
                return NotImplemented
            (index, weight), kept = found, True
    graph = _graph(layer, index, x.shape[0], x.shape[0])
    if graph is None:
        return NotImplemented
    dtype: torch.dtype | None = None  # of the weights, where there are any
    if layer.normalize and not kept:
        dtype = x.dtype if weight is None else weight.dtype
        norm, name = gcn_norm(graph, weight, dtype, layer.add_self_loops, layer.improved), "normalised sum"
    else:
        dtype = None if weight is None else weight.dtype
        norm, name = Normalized(graph, weight, None, None), "sum" if weight is None else "weighted sum"
    free = swaps(lin, x) and dtype in (None, x.dtype) and (bias is None or bias.dtype == x.dtype)
    if free and not transforms_first(lin, x):
        out = F.linear(norm.product(x, None, dtype, policy), lin.weight, bias)
    else:
        out = norm.product(lin(x), bias, dtype, policy)
        name += "" if bias is None else " + bias"
    record_of(layer).fused[name] += 1
    return out


def _cached(layer: Any, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """What a layer with ``cached=True`` keeps, made by PyG's own function where there is nothing yet."""
    if layer._cached_edge_index is None:
        arguments = (x.shape[0], layer.improved, layer.add_self_loops, layer.flow, x.dtype)
        layer._cached_edge_index = gcn_conv.gcn_norm(edge_index, edge_weight, *arguments)
    index, weight = layer._cached_edge_index
    return (index, weight) if weight is not None and _edges(index, weight, x) else None


def _pair(layer: Any, x: Any, edge_index: Any, weight: Any, size: Any) -> tuple[Any, Any, Graph] | None:
    """(source features, a node's own or None, graph) of a layer for bipartite graphs; None: leave it to PyG."""
    pair = (x, x) if isinstance(x, Tensor) else x
    if type(pair) not in (tuple, list) or len(pair) != 2 or not _features(pair[0]):
        return None
    source, own = pair
    if own is not None and (type(own) not in PLAIN or own.dim() != 2 or own.device != source.device):
        return None
    if not _edges(edge_index, weight, source) or not _unchanged(layer):
        return None
    sizes = [None, None] if size is None else list(size)
    if len(sizes) != 2:
        return None
    for side, t in enumerate((source, own)):
        if t is not None and sizes[side] not in (None, t.shape[0]):
            return None
        sizes[side] = sizes[side] if t is None else t.shape[0]
    i = int(layer.flow == "source_to_target")
    num_dst = sizes[1 - i] if sizes[i] is None else sizes[i]
    graph = _graph(layer, edge_index, num_dst, source.shape[0])  # type: ignore[arg-type]
    return None if graph is None else (source, own, graph)


def _gin(layer: Any, x: Any, edge_index: Any, size: Any = None) -> Any:
    reduce = _reduction(layer)
    found = _pair(layer, x, edge_index, None, size) if reduce in ("sum", "mean") else None
    if found is None or reduce is None:
        return NotImplemented
    source, own, graph = found
    scale, name = None, reduce
    if own is not None:
        if own.shape != (graph.num_dst, source.shape[1]) or layer.eps.shape != (1,) or own.dtype not in DTYPES:
            return NotImplemented
        scale, name = 1 + layer.eps, f"{reduce} + self"
    out = aggregate_and_add(
        *(graph, source, None, reduce),
        self_x=own,
        self_scale=scale,
        dtype=_promoted(source, own, scale),
        policy=aggregate.policy(),
    )
    record_of(layer).fused[name] += 1
    return layer.nn(out)


def _sage(layer: Any, x: Any, edge_index: Any, size: Any = None) -> Any:
    before = layer.lin if layer.project and hasattr(layer, "lin") else None
    after = layer.lin_r if layer.root_weight else None
    out = _two_linear(layer, x, edge_index, None, size, before, layer.lin_l, after)
    if out is not NotImplemented and layer.normalize:
        out = F.normalize(out, p=2.0, dim=-1)
    return out


def _graph_conv(layer: Any, x: Any, edge_index: Any, edge_weight: Any = None, size: Any = None) -> Any:
    return _two_linear(layer, x, edge_index, edge_weight, size, None, layer.lin_rel, layer.lin_root)


def _two_linear(layer: Any, x: Any, edge_index: Any, weight: Any, size: Any, before: Any, lin: Any, root: Any) -> Any:
    """``lin(reduce(before(x_j).relu())) + root(x_i)``."""
    reduce = _reduction(layer)
    found = _pair(layer, x, edge_index, weight, size) if type(lin) is Linear else None
    if found is None or reduce is None:
        return NotImplemented
    source, own, graph = found
    if before is not None:
        source = before(source).relu()
    policy, name = aggregate.policy(), reduce
    free = reduce in ("sum", "mean") and swaps(lin, source) and _promoted(source, weight) == source.dtype
    if not free or not transforms_first(lin, source):
        tie = aggregate.tie_rule(source, source.requires_grad or (weight is not None and weight.requires_grad))
        out: Any = lin(spmm(graph, source, weight, reduce, tie=tie, policy=policy))
        if root is not None and own is not None:
            out = out + root(own)
    else:
        h = F.linear(source, lin.weight)
        added = None if root is None or own is None else root(own)
        inside = added if added is not None and added.shape == (graph.num_dst, h.shape[1]) else None
        out = aggregate_and_add(
            *(graph, h, weight, reduce),
            self_x=inside,
            bias=lin.bias,
            dtype=_promoted(h, weight, inside, lin.bias),
            policy=policy,
        )
        name += ("" if inside is None else " + root") + ("" if lin.bias is None else " + bias")
        if inside is None and added is not None:
            out = out + added
    record_of(layer).fused[name] += 1
    return out


# ---------------------------------------------------------------------- putting it under PyG's layers


_ADAPTERS = {GCNConv: _gcn, SAGEConv: _sage, GINConv: _gin, GraphConv: _graph_conv}


def _wrapper(cls: type, forward: Callable[..., Any], active: Callable[[Any], bool]) -> Any:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not compiling() and type(self) is cls and active(self):
            out = adapter(self, *args, **kwargs)
            if out is not NotImplemented:
                return out
        return forward(self, *args, **kwargs)

    adapter, compiling = _ADAPTERS[cls], torch.compiler.is_compiling
    adapter.__qualname__ = forward.__qualname__  # in complaints about arguments
    # TorchScript compiles the source of what this wraps, with the globals of this: so they must be its own.
    made = types.FunctionType(wrapper.__code__, forward.__globals__, "forward", None, wrapper.__closure__)
    return functools.update_wrapper(made, forward)


_installed: list[tuple[Any, Any, Any]] = []  # (class, its own forward, ours)


def install(active: Callable[[Any], bool]) -> None:
    """Puts the adapters in place of the ``forward`` of the four layers.

    Args:
        active: whether to use it for a layer, asked at each call.
    """
    for cls in _ADAPTERS:
        forward = cls.__dict__["forward"]
        if not getattr(forward, "__module__", "").startswith("torch_geometric."):
            continue  # somebody else's
        made = _wrapper(cls, forward, active)
        cls.forward = made
        _installed.append((cls, forward, made))


def uninstall() -> None:
    """Puts the layers' own ``forward`` back, where ours still stands."""
    while _installed:
        cls, forward, made = _installed.pop()
        if cls.__dict__["forward"] is made:
            cls.forward = forward
