"""DGL's GraphConv, SAGEConv, GINConv, GATConv and GATv2Conv as a whole.

The operators that a layer calls are this package's already; knowing the whole layer saves what is between them.
Degrees, which DGL counts and takes the root of in each call, are factors in the kernel and kept with the graph; the
term of a node itself and the bias are added where sums are written; attention scores, ``E x H x C`` in GATv2, are not.
What does not fit is DGL's, operator by operator.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...dgl_index import Relation, is_dgl, relation_of
from ...functional import spmm
from ...functional_aggregate import aggregate as aggregate_and_add
from ...functional_attention import attend
from ...kernels import DTYPES
from . import aggregate, records

#: First digits of the SHA-256 of the files whose layers are known: those of DGL 2.1.0.
SOURCES = {
    "GraphConv": ("graphconv", "5d84c047f694fc73"),
    "GINConv": ("ginconv", "37f4617c0cd74a4f"),
    "SAGEConv": ("sageconv", "a8f5272e7bb66f57"),
    "GATConv": ("gatconv", "1de5cd791dfb4871"),
    "GATv2Conv": ("gatv2conv", "4808019c4130c2e5"),
}
_PLAIN = (Tensor, nn.Parameter)


class _Ends(NamedTuple):
    """Features of the sources, those of the destinations, the edges between them, ``[E]`` weights of these or None."""

    src: Tensor
    dst: Tensor
    relation: Relation
    weight: Tensor | None


def _ends(layer: Any, graph: Any, feat: Any, weight: Any = None) -> _Ends | None:
    """What a layer convolves, or None where DGL has to."""
    if not is_dgl(graph) or torch.is_autocast_enabled() or torch.compiler.is_compiling():
        return None
    pair = feat if isinstance(feat, tuple) else (feat, feat)
    if len(pair) != 2:
        return None
    for t in pair:
        if type(t) not in _PLAIN or t.dim() != 2 or t.dtype not in DTYPES or t.layout is not torch.strided:
            return None
    src, dst = pair
    device = src.device
    if dst.device != device or dst.dtype != src.dtype or graph.device != device:
        return None
    if aggregate.no_kernels(device) is not None:
        return None
    relation = relation_of(graph._graph, device)
    if relation is None or relation.graph.num_src != src.shape[0] or relation.graph.num_edges == 0:
        return None
    num_dst = relation.graph.num_dst
    if dst is src and graph.is_block:
        dst = _first(src, num_dst)
    if dst.shape[0] != num_dst or (not getattr(layer, "_allow_zero_in_degree", True) and relation.empty is not None):
        return None  # DGL has an error to raise
    if weight is not None:
        number = relation.graph.num_edges
        if type(weight) not in _PLAIN or weight.dtype != src.dtype or weight.device != device:
            return None
        if weight.shape not in ((number,), (number, 1)):
            return None
        weight = weight.reshape(-1)
    return _Ends(src, dst, relation, weight)


def _first(x: Tensor, rows: int) -> Tensor:
    """``x[:rows]``, whose backward fills and copies a tensor as large as x; where these are all rows, x."""
    return x if x.shape[0] == rows else x[:rows]


def _graph_conv(layer: Any, graph: Any, feat: Any, weight: Any = None, edge_weight: Any = None) -> Any:
    ends = _ends(layer, graph, feat, edge_weight)
    if ends is None or (weight is not None and layer.weight is not None):
        return NotImplemented
    weight = layer.weight if weight is None else weight
    x, bias, relation, norm = ends.src, layer.bias, ends.relation, layer._norm
    others = [t for t in (weight, bias) if t is not None]
    if any(type(t) not in _PLAIN or t.dtype != x.dtype or t.device != x.device for t in others):
        return NotImplemented
    if (weight is not None and weight.dim() != 2) or (bias is not None and bias.dim() != 1):
        return NotImplemented
    power = -0.5 if norm == "both" else -1.0
    before = weight is not None and layer._in_feats > layer._out_feats
    after = weight is not None and not before
    out: Any = aggregate_and_add(
        *(relation.graph, x @ weight if before else x, ends.weight),
        src_scale=relation.scale(False, power, x.dtype) if norm in ("left", "both") else None,
        dst_scale=relation.scale(True, power, x.dtype) if norm in ("right", "both") else None,
        bias=None if after else bias,
        policy=aggregate.policy,
    )
    if after:
        out = out @ weight if bias is None else torch.addmm(bias, out, weight)
    records.hit(f"{'sum' if norm == 'none' else 'normalised sum'}{'' if bias is None or after else ' + bias'}")
    return out if layer._activation is None else layer._activation(out)


def _gin(layer: Any, graph: Any, feat: Any, edge_weight: Any = None) -> Any:
    ends = _ends(layer, graph, feat, edge_weight)
    reduce, eps = layer._aggregator_type, layer.eps
    if ends is None or reduce not in ("sum", "mean") or ends.dst.shape[1] != ends.src.shape[1]:
        return NotImplemented
    if type(eps) not in _PLAIN or eps.shape != (1,) or eps.device != ends.src.device:
        return NotImplemented
    out: Any = aggregate_and_add(
        *(ends.relation.graph, ends.src, ends.weight, reduce),
        self_x=ends.dst,
        self_scale=1 + eps,
        dtype=torch.promote_types(ends.src.dtype, eps.dtype),
        policy=aggregate.policy,
    )
    records.hit(f"{reduce} + self")
    for then in (layer.apply_func, layer.activation):
        out = out if then is None else then(out)
    return out


def _sage(layer: Any, graph: Any, feat: Any, edge_weight: Any = None) -> Any:
    kind = layer._aggre_type
    ends = _ends(layer, graph, feat, edge_weight) if kind in ("mean", "pool") else None
    if ends is None:
        return NotImplemented
    src = layer.feat_drop(ends.src)
    dst = layer.feat_drop(ends.dst) if isinstance(feat, tuple) else _first(src, ends.dst.shape[0])
    structure, name = ends.relation.graph, "max" if kind == "pool" else "mean"
    if kind == "mean" and layer._in_src_feats > layer._out_feats:
        h, own = layer.fc_neigh(src), layer.fc_self(dst)
        out: Any = aggregate_and_add(structure, h, ends.weight, "mean", self_x=own, policy=aggregate.policy)
        name += " + self"
    else:
        h, late = src, kind == "pool" and ends.weight is None
        if kind == "pool":
            h = layer.fc_pool(src) if late else F.relu(layer.fc_pool(src))
        seen: Any = spmm(structure, h, ends.weight, name, policy=aggregate.policy)
        if late:  # what ReLU leaves of the maximum is the maximum of what it leaves: fewer rows, in place
            seen = F.relu_(seen)
        out = layer.fc_self(dst) + layer.fc_neigh(seen)
    records.hit(name)
    for then in (layer.activation, layer.norm):
        out = out if then is None else then(out)
    return out


def _attention(layer: Any, graph: Any, feat: Any, get_attention: Any, edge_weight: Any = None) -> _Ends | None:
    """What an attention layer runs on; its own modules are asked for nothing but their numbers."""
    own = (layer.attn_drop, nn.Dropout), (layer.leaky_relu, nn.LeakyReLU)
    if get_attention or edge_weight is not None:
        return None
    if any(type(m) is not kind or m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m, kind in own):
        return None
    return _ends(layer, graph, feat)


def _heads(layer: Any, x: Tensor) -> Tensor:
    return x.view(-1, layer._num_heads, layer._out_feats)


def _attended(layer: Any, ends: _Ends, h_dst: Tensor, x: Tensor, score: str, given: tuple[Tensor, ...]) -> Tensor:
    p = layer.attn_drop.p if layer.attn_drop.training else 0.0
    slope = layer.leaky_relu.negative_slope
    out = attend(ends.relation.graph, x, score, given, slope=slope, dropout=p, policy=aggregate.policy)
    records.hit(f"attention ({score})")
    return out if layer.res_fc is None else out + layer.res_fc(h_dst).view(h_dst.shape[0], -1, layer._out_feats)


def _gat(layer: Any, graph: Any, feat: Any, edge_weight: Any = None, get_attention: Any = False) -> Any:
    ends = _attention(layer, graph, feat, get_attention, edge_weight)
    if ends is None:
        return NotImplemented
    if isinstance(feat, tuple):
        h_src, h_dst = layer.feat_drop(ends.src), layer.feat_drop(ends.dst)
        shared = not hasattr(layer, "fc_src")
        src = _heads(layer, (layer.fc if shared else layer.fc_src)(h_src))
        dst = _heads(layer, (layer.fc if shared else layer.fc_dst)(h_dst))
    else:
        h_src = h_dst = layer.feat_drop(ends.src)
        src = dst = _heads(layer, layer.fc(h_src))
        if graph.is_block:
            h_dst, dst = _first(h_dst, ends.dst.shape[0]), _first(dst, ends.dst.shape[0])
    given = (src * layer.attn_l).sum(-1), (dst * layer.attn_r).sum(-1)
    out: Any = _attended(layer, ends, h_dst, src, "sum", given)
    if layer.has_explicit_bias:
        out = out + layer.bias.view(layer._num_heads, layer._out_feats)
    return layer.activation(out) if layer.activation else out


def _gatv2(layer: Any, graph: Any, feat: Any, get_attention: Any = False) -> Any:
    ends = _attention(layer, graph, feat, get_attention)
    if ends is None:
        return NotImplemented
    if isinstance(feat, tuple):
        h_src, h_dst = layer.feat_drop(ends.src), layer.feat_drop(ends.dst)
        src, dst = _heads(layer, layer.fc_src(h_src)), _heads(layer, layer.fc_dst(h_dst))
    else:
        h_src = h_dst = layer.feat_drop(ends.src)
        src = _heads(layer, layer.fc_src(h_src))
        dst = src if layer.share_weights else _heads(layer, layer.fc_dst(h_dst))
        if graph.is_block:
            h_dst, dst = _first(h_dst, ends.dst.shape[0]), _first(dst, ends.dst.shape[0])
    out: Any = _attended(layer, ends, h_dst, src, "pair", (src, dst, layer.attn[0]))
    return layer.activation(out) if layer.activation else out


_ADAPTERS: dict[str, Callable[..., Any]] = {
    "GraphConv": _graph_conv,
    "SAGEConv": _sage,
    "GINConv": _gin,
    "GATConv": _gat,
    "GATv2Conv": _gatv2,
}


def _forward(cls: type, original: Any, adapter: Callable[..., Any], on: Callable[[], bool]) -> Any:
    adapter.__qualname__ = original.__qualname__  # in complaints about arguments

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self) is cls and on():
            out = adapter(self, *args, **kwargs)
            if out is not NotImplemented:
                return out
        return original(self, *args, **kwargs)

    return forward


def table(on: Callable[[], bool]) -> list[tuple[Any, str, Any]]:
    """(class, ``"forward"``, replacement) of the layers that are as they were when this was written.

    Args:
        on: whether the replacements are in force, asked at each call.
    """
    found = []
    for name, (file, known) in SOURCES.items():
        module = importlib.import_module(f"dgl.nn.pytorch.conv.{file}")
        cls = getattr(module, name)
        original = cls.__dict__["forward"]
        source = Path(module.__file__ or "")
        if original.__module__ == module.__name__ and _digest(source) == known:
            found.append((cls, "forward", _forward(cls, original, _ADAPTERS[name], on)))
    return found


@functools.lru_cache(maxsize=16)
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""
