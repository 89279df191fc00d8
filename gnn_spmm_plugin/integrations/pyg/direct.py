"""PyG's GCNConv, SAGEConv, GINConv and GraphConv as a whole: aggregation and what is around it in one kernel.

A lazy gather (`lazy`) sees one layer's messages, so it can spare their writing and no more. Where the layer is one of
these four, unchanged, and nobody looks at its messages, more is known: that GCN's edge weights are a product of two
factors of nodes, that its self loops, GIN's ``(1 + eps) * x``, the root term and the bias are added to the result, and
that a linear layer may as well come after a sum as before it. What does not fit, down to the kind of ``edge_index``, is
left to PyG's own ``forward``, and so to the lazy gather.

While torch.compile traces, the product is one opaque operator, which finds its graph when the code runs.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric import EdgeIndex
from torch_geometric.nn.conv import GCNConv, GINConv, GraphConv, SAGEConv, gcn_conv
from torch_geometric.nn.dense.linear import Linear

from ... import _native
from ...cache import graph_of_edge_index
from ...functional import spmm
from ...functional_aggregate import aggregate_unchecked
from ...functional_edge_index import spmm_edge_index
from ...graph import Graph
from ...kernels import DTYPES
from ...nn.conv import swaps, transforms_first
from ...normalize import gcn_norm
from . import aggregate
from .convolved import convolved, watched
from .lazy import PLAIN
from .records import record_of

#: Where a layer keeps hooks on parts of its work.
LAYER_HOOKS = tuple(
    f"_{where}_forward_{when}" for where in ("propagate", "message", "aggregate") for when in ("pre_hooks", "hooks")
)
_HOOKS = operator.itemgetter(*LAYER_HOOKS)
#: Methods that decide about messages. The four classes have PyG's; a layer with one of its own is let alone.
_DECIDING = (
    *("message", "aggregate", "update", "message_and_aggregate", "edge_update", "explain_message"),
    *("_check_input", "_set_size", "_lift", "_index_select"),
)
_METHODS = operator.attrgetter(*_DECIDING)
#: What a layer has none of by itself, only its class.
OWN = frozenset((*_DECIDING, "propagate", "_index_select_safe", "forward"))


def _stock(cls: type) -> tuple[Any, ...]:
    """The methods of a class, or nothing that any have where somebody has exchanged one before us."""
    methods: tuple[Any, ...] = _METHODS(cls)
    return methods if all(m.__module__.startswith("torch_geometric.") for m in methods) else ()


_STOCK: dict[type, tuple[Any, ...]] = {cls: _stock(cls) for cls in (GCNConv, SAGEConv, GINConv, GraphConv)}


def _unchanged(layer: Any) -> bool:
    """Whether `layer` is what PyG made it, and nobody looks at its messages."""
    cls, own = type(layer), layer.__dict__
    if torch.compiler.is_compiling():  # PyG itself runs no hooks there; in terms that dynamo knows
        known = not any(name in own for name in OWN) and _STOCK[cls] == tuple([getattr(cls, n) for n in _DECIDING])
    else:
        known = not any(_HOOKS(own)) and OWN.isdisjoint(own) and _METHODS(cls) == _STOCK[cls]
    return (
        known
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
    """Whether there are kernels for `x`."""
    if type(x) not in PLAIN or x.dim() != 2 or x.dtype not in DTYPES or x.layout != torch.strided:
        return False
    return (_native.cpu_error if x.device.type == "cpu" else _native.cuda_error) is None and (x.is_cuda or x.is_cpu)


def _edges(edge_index: Any, weight: Any, x: Tensor) -> bool:
    """Whether these are a plain edge list, and weights of its edges or None, beside `x`."""
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


def as_plain(edge_index: Any) -> Any:
    """The tensor in an `EdgeIndex`, as one that is known by its content alone: writes to it are not all counted."""
    if torch.compiler.is_compiling() or not isinstance(edge_index, EdgeIndex):
        return edge_index
    return edge_index.as_tensor().detach()


class _Place(NamedTuple):
    """Where messages go from and to."""

    graph: Graph | None  # None while torch.compile traces
    edge_index: Tensor
    num_src: int
    num_dst: int
    reverse: bool


def _place(layer: Any, edge_index: Tensor, num_src: int, num_dst: int) -> _Place | None:
    """None where PyG has an error to raise."""
    reverse = layer.flow == "target_to_source"
    graph = None
    if not torch.compiler.is_compiling():
        try:
            graph = graph_of_edge_index(edge_index, num_dst, num_src, reverse)
        except IndexError:
            return None
    return _Place(graph, edge_index, num_src, num_dst, reverse)


def _opaque(place: _Place, x: Tensor, weight: Tensor | None, **options: Any) -> Tensor:
    return spmm_edge_index(
        *(x, place.edge_index, weight, place.num_src, place.num_dst),
        reverse=place.reverse,
        policy=aggregate.policy(),
        **options,
    )


def _sum(
    place: _Place,
    x: Tensor,
    weight: Tensor | None,
    reduce: str,
    self_x: Tensor | None = None,
    self_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """A sum or mean, plus ``self_scale * self_x + bias``."""
    if place.graph is None:
        out = _opaque(place, x, weight, reduce=reduce)
        if self_x is not None:
            out = out + (self_x if self_scale is None else self_scale * self_x)
        return out if bias is None else out + bias
    dtype = _promoted(x, weight, self_x, self_scale, bias)
    policy = aggregate.policy()
    return aggregate_unchecked(place.graph, x, weight, reduce, self_x, self_scale, bias, None, None, dtype, policy)


def _promoted(x: Tensor, *others: Tensor | None) -> torch.dtype:
    dtype = x.dtype
    for t in others:
        if t is not None and t.dtype != dtype:
            dtype = torch.promote_types(dtype, t.dtype)
    return dtype


def _count(layer: Any, name: str) -> None:
    if not torch.compiler.is_compiling():
        record_of(layer).fused[name] += 1


# ---------------------------------------------------------------------- the four layers


def _gcn(layer: Any, x: Any, edge_index: Any, edge_weight: Any = None) -> Any:
    lin, bias = layer.lin, layer.bias
    fits = _features(x) and _edges(edge_index, edge_weight, x) and _unchanged(layer) and _reduction(layer) == "sum"
    if not fits or type(lin) is not Linear or not (bias is None or bias.shape == (layer.out_channels,)):
        return NotImplemented
    index, weight, normalize = edge_index, edge_weight, layer.normalize
    if normalize and edge_weight is not None and edge_weight.requires_grad and torch.is_grad_enabled():
        return NotImplemented  # its gradient goes through the normalisation
    if normalize and layer.cached:
        to_be_kept = layer._cached_edge_index is None and torch.compiler.is_compiling()  # by PyG's own code then
        found = None if to_be_kept else _cached(layer, x, edge_index, edge_weight)
        if found is None:
            return NotImplemented
        (index, weight), normalize = found, False
    place = _place(layer, index, x.shape[0], x.shape[0])
    if place is None:
        return NotImplemented
    dtype = x.dtype if weight is None else weight.dtype  # of the weights, where there are any
    norm = None
    if normalize and place.graph is not None:
        norm = gcn_norm(place.graph, weight, dtype, layer.add_self_loops, layer.improved)
    name = "normalised sum" if normalize else "sum" if weight is None else "weighted sum"
    if weight is None:
        scales = (None, None) if norm is None else (norm.scale, norm.loop)
        out, first = convolved(place.graph, place.num_dst, x, lin, bias, "sum", scales=scales)
        if out is not None:
            _count(layer, name if bias is None or not first else f"{name} + bias")
            return out
    free = swaps(lin, x) and dtype == x.dtype and (bias is None or bias.dtype == x.dtype)
    before = free and not transforms_first(lin.weight, x)
    features, added = (x, None) if before else (lin(x), bias)
    if not normalize:
        out = _sum(place, features, weight, "sum", bias=added)
    elif norm is None:
        options = {"loops": layer.add_self_loops, "improved": layer.improved, "dtype": dtype}
        out = _opaque(place, features, weight, norm=True, **options)
        out = out if added is None else out + added
    else:
        out = norm.product(features, added, dtype, aggregate.policy())
    if before:
        out = F.linear(out, lin.weight, bias)
    _count(layer, name if added is None else f"{name} + bias")
    return out


def _cached(layer: Any, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """What a layer with ``cached=True`` keeps, made by PyG's own function where there is nothing yet."""
    if layer._cached_edge_index is None:
        arguments = (x.shape[0], layer.improved, layer.add_self_loops, layer.flow, x.dtype)
        layer._cached_edge_index = gcn_conv.gcn_norm(edge_index, edge_weight, *arguments)
    index, weight = layer._cached_edge_index
    return (index, weight) if weight is not None and _edges(index, weight, x) else None


def _pair(layer: Any, x: Any, edge_index: Any, weight: Any, size: Any) -> tuple[Any, Any, _Place] | None:
    """(source features, a node's own or None, place) of a layer for bipartite graphs; None: leave it to PyG."""
    if isinstance(x, Tensor):
        source = own = x
    elif type(x) in (tuple, list) and len(x) == 2:
        source, own = x
    else:
        return None
    if not _features(source) or not _edges(edge_index, weight, source) or not _unchanged(layer):
        return None
    num_src = num_dst = source.shape[0]
    if own is not source or size is not None:
        if own is not None and (type(own) not in PLAIN or own.dim() != 2 or own.device != source.device):
            return None
        if own is not None and own.layout != torch.strided:
            return None
        sizes = [None, None] if size is None else list(size)
        if len(sizes) != 2:
            return None
        for side, t in enumerate((source, own)):
            if t is not None and sizes[side] not in (None, t.shape[0]):
                return None
            sizes[side] = sizes[side] if t is None else t.shape[0]
        i = int(layer.flow == "source_to_target")
        num_dst = sizes[1 - i] if sizes[i] is None else sizes[i]  # type: ignore[assignment]
    place = _place(layer, edge_index, num_src, num_dst)
    return None if place is None else (source, own, place)


def _gin(layer: Any, x: Any, edge_index: Any, size: Any = None) -> Any:
    reduce = _reduction(layer)
    found = _pair(layer, x, edge_index, None, size) if reduce in ("sum", "mean") else None
    if found is None or reduce is None:
        return NotImplemented
    source, own, place = found
    scale = None
    if own is not None:
        if own.shape != (place.num_dst, source.shape[1]) or layer.eps.shape != (1,) or own.dtype not in DTYPES:
            return NotImplemented
        scale = 1 + layer.eps
    _count(layer, reduce if own is None else f"{reduce} + self")
    if scale is not None and own is source and not scale.requires_grad and scale.dtype == source.dtype:
        # The linear layer that `nn` is, or begins with, belongs to the same step.
        nn = layer.nn
        lin, *then = tuple(nn) if type(nn) is torch.nn.Sequential and len(nn) and not watched(nn) else (nn,)
        out, _ = convolved(
            place.graph, place.num_dst, source, lin, getattr(lin, "bias", None), reduce, scales=(None, scale)
        )
        if out is not None:
            for module in then:
                out = module(out)
            return out
    return layer.nn(_sum(place, source, None, reduce, own, scale))


def _sage(layer: Any, x: Any, edge_index: Any, size: Any = None) -> Any:
    before = layer.lin if layer.project and hasattr(layer, "lin") else None
    after = layer.lin_r if layer.root_weight else None
    out = _two_linear(layer, x, edge_index, None, size, before, layer.lin_l, after)
    if out is not NotImplemented and layer.normalize:
        out = F.normalize(out, p=2.0, dim=-1)
    return out


def _graph_conv(layer: Any, x: Any, edge_index: Any, edge_weight: Any = None, size: Any = None) -> Any:
    edge_index = as_plain(edge_index)  # with which PyG would multiply, past all that could be replaced
    return _two_linear(layer, x, edge_index, edge_weight, size, None, layer.lin_rel, layer.lin_root)


def _two_linear(layer: Any, x: Any, edge_index: Any, weight: Any, size: Any, before: Any, lin: Any, root: Any) -> Any:
    """``lin(reduce(before(x_j).relu())) + root(x_i)``."""
    reduce = _reduction(layer)
    found = _pair(layer, x, edge_index, weight, size) if type(lin) is Linear else None
    if found is None or reduce is None:
        return NotImplemented
    source, own, place = found
    if before is not None:
        source = before(source).relu()
    if weight is None:
        whole, first = convolved(place.graph, place.num_dst, source, lin, lin.bias, reduce, root, own)
        if whole is not None:
            _count(layer, named(reduce, root is not None and own is not None, lin.bias) if first else reduce)
            return whole
    name = reduce
    free = reduce in ("sum", "mean") and swaps(lin, source) and _promoted(source, weight) == source.dtype
    if free and transforms_first(lin.weight, source):
        h, bias = F.linear(source, lin.weight), lin.bias
        added = None if root is None or own is None else root(own)
        inside = added if added is not None and added.shape == (place.num_dst, h.shape[1]) else None
        out: Any = _sum(place, h, weight, reduce, inside, bias=bias)
        name = named(reduce, inside is not None, bias)
        added = added if inside is None else None
    else:
        tie = aggregate.tie_rule(source, source.requires_grad or (weight is not None and weight.requires_grad))
        if place.graph is None:
            out = _opaque(place, source, weight, reduce=reduce, tie=tie)
        else:
            out = spmm(place.graph, source, weight, reduce, tie=tie, policy=aggregate.policy())
        out = lin(out)
        added = None if root is None or own is None else root(own)
    _count(layer, name)
    return out if added is None else out + added


def named(reduce: str, root: bool, bias: Tensor | None) -> str:
    """What `report` calls an aggregation that adds these."""
    return reduce + (" + root" if root else "") + ("" if bias is None else " + bias")


# ---------------------------------------------------------------------- putting it under PyG's layers


_ADAPTERS: dict[type, Callable[..., Any]] = {GCNConv: _gcn, SAGEConv: _sage, GINConv: _gin, GraphConv: _graph_conv}


def register(cls: type, adapter: Callable[..., Any]) -> None:
    """Adds a class whose layers `adapter` runs as a whole, unless it returns NotImplemented; before `install`."""
    _ADAPTERS[cls] = adapter
    _STOCK[cls] = _stock(cls)


def _wrapper(cls: type, forward: Callable[..., Any], active: Callable[[Any], bool]) -> Any:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self) is cls and active(self):
            out = adapter(self, *args, **kwargs)
            if out is not NotImplemented:
                return out
        return forward(self, *args, **kwargs)

    adapter = _ADAPTERS[cls]
    adapter.__qualname__ = forward.__qualname__  # in complaints about arguments
    # TorchScript compiles the source of what this wraps, with the globals of this: so they must be its own.
    made = types.FunctionType(wrapper.__code__, forward.__globals__, "forward", None, wrapper.__closure__)
    return functools.update_wrapper(made, forward)


_installed: list[tuple[Any, Any, Any]] = []  # (class, its own forward, ours)
_ours: dict[Any, Any] = {}  # class -> ours


def installed(cls: Any) -> bool:
    """Whether objects of a class run by its adapter: nobody has exchanged a method of the class."""
    ours = cls.forward is _ours.get(cls) and _METHODS(cls) == _STOCK[cls]
    return ours and cls.propagate is getattr(cls, "_jinja_propagate", None)


def install(active: Callable[[Any], bool]) -> None:
    """Puts the adapters in place of the ``forward`` of their classes.

    Args:
        active: whether to use it for a layer, asked at each call.
    """
    cls: Any
    for cls in _ADAPTERS:
        forward = cls.__dict__["forward"]
        if not getattr(forward, "__module__", "").startswith("torch_geometric."):
            continue  # somebody else's
        made = _wrapper(cls, forward, active)
        cls.forward = _ours[cls] = made
        _installed.append((cls, forward, made))


def uninstall() -> None:
    """Puts the layers' own ``forward`` back, where ours still stands."""
    _ours.clear()
    while _installed:
        cls, forward, made = _installed.pop()
        if cls.__dict__["forward"] is made:
            cls.forward = forward
