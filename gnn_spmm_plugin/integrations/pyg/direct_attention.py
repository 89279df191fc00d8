"""PyG's GATConv, GATv2Conv, SuperGATConv and TransformerConv as a whole, without a tensor of the size of the messages.

The lazy gather can spare the weighted sum of an attention layer its messages, but not the scores, where features of
both ends of an edge meet. Here the whole layer is known, as for those of `direct`. What does not fit is left to PyG,
and `gnn_spmm_plugin.report` says why.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.nn.conv import GATConv, GATv2Conv, SuperGATConv, TransformerConv, supergat_conv

from ..._native import autocasts
from ...cache import graph_of
from ...functional import sddmm
from ...functional_attention import attend
from ...functional_attention_edge_index import attend_edge_index, with_loops
from ...graph import Graph
from . import aggregate, direct, softmax
from .records import record_of


class _Ends(NamedTuple):
    """Features of the sources, those of the destinations or None, and where messages go."""

    source: Tensor
    own: Tensor | None
    place: direct._Place


def _look(layer: Any, x: Any, edge_index: Any, size: Any = None, **unusual: Any) -> _Ends | str | None:
    """What attention runs on; or why it is left to PyG; or None, where PyG has an error to raise.

    Args:
        layer: the layer.
        x: its features, or a pair of them.
        edge_index: the edges.
        size: numbers of nodes.
        **unusual: arguments that are not for us, unless None.
    """
    given = [name for name, value in unusual.items() if value is not None]
    if given:
        return f"{given[0]} is given"
    pair = (x, x) if isinstance(x, Tensor) else x
    if type(pair) not in (tuple, list) or len(pair) != 2:
        return None
    source, own = pair
    if not direct._features(source) or not (own is None or direct._features(own)):
        return "the features are no plain matrices of float32, float64, float16 or bfloat16"
    if not direct._edges(edge_index, None, source):
        return "edge_index is no plain [2, E] tensor of int32 or int64"
    if not torch.compiler.is_compiling() and not softmax.is_own(sys.modules[type(layer).__module__]):
        return "its module has another softmax than PyG's"
    if not direct._unchanged(layer) or _watched(layer):
        return "the layer was changed, is explained, decomposed or has message passing hooks"
    if direct._reduction(layer) != "sum":
        return "its aggregation is no plain sum, or has hooks"
    sizes: list[Any] = [None, None] if size is None else list(size)
    if len(sizes) != 2 or (size is not None and None in sizes):
        return None
    for side, t in enumerate(pair):
        if t is not None and sizes[side] not in (None, t.shape[0]):
            return None
        sizes[side] = sizes[side] if t is None else t.shape[0]
    i = int(layer.flow == "source_to_target")
    num_dst = sizes[1 - i] if sizes[i] is None else sizes[i]
    if own is not None and (own.shape[0] != num_dst or own.device != source.device):
        return None
    place = direct._place(layer, edge_index, source.shape[0], num_dst)
    return None if place is None else _Ends(source, own, place)


def _watched(layer: Any) -> bool:
    if "edge_updater" in layer.__dict__:
        return True
    if torch.compiler.is_compiling():
        return False
    return bool(layer._edge_update_forward_pre_hooks or layer._edge_update_forward_hooks)


def _decline(layer: Any, reason: _Ends | str | None) -> Any:
    if isinstance(reason, str) and not torch.compiler.is_compiling():
        record_of(layer).miss(f"attention scores are PyG's: {reason}")
    return NotImplemented


def _attend(
    layer: Any, place: direct._Place, x: Tensor, score: str, *given: Tensor, of_none: Callable[[], Any], **how: Any
) -> Tensor:
    """`attend` for a layer; `of_none` computes PyG's scores of no edges, whose dtype under autocast is its own."""
    dtype = None
    if autocasts(x.device.type):
        dtype = of_none().exp().dtype  # softmax's, which some devices compute in float32
    p = layer.dropout if layer.training else 0.0
    loops = getattr(layer, "add_self_loops", False)
    direct._count(layer, f"attention ({score})")
    if place.graph is not None:
        graph = with_loops(place.graph) if loops else place.graph
        return attend(graph, x, score, given, dropout=p, dtype=dtype, policy=aggregate.policy(), **how)
    keep = None
    if p > 0:
        count = place.edge_index.shape[1] + (min(place.num_src, place.num_dst) if loops else 0)
        coefficients = of_none().dtype if dtype is None else dtype
        keep = F.dropout(x.new_ones(count, x.shape[1], dtype=coefficients), p)
    return attend_edge_index(
        *(x, given, place.edge_index, place.num_src, place.num_dst),
        score=score,
        reverse=place.reverse,
        loops=loops,
        keep=keep,
        dtype=dtype,
        policy=aggregate.policy(),
        **how,
    )


def _joined(layer: Any, out: Tensor) -> Tensor:
    return out.flatten(1) if layer.concat else out.mean(dim=1)


def _heads(layer: Any, x: Tensor) -> Tensor:
    return x.view(-1, layer.heads, layer.out_channels)


def _plus(out: Tensor, *others: Tensor | None) -> Tensor:
    for other in others:
        out = out if other is None else out + other
    return out


# ---------------------------------------------------------------------- the four layers


def _gat(
    layer: Any, x: Any, edge_index: Any, edge_attr: Any = None, size: Any = None, return_attention_weights: Any = None
) -> Any:
    unusual = {"edge_attr": edge_attr, "return_attention_weights": return_attention_weights}
    found = _look(layer, x, edge_index, size, **unusual)
    if not isinstance(found, _Ends):
        return _decline(layer, found)
    source, own, place = found
    residual = getattr(layer, "res", None)  # not in every release
    res = None if residual is None or own is None else residual(own)
    if layer.lin is not None:
        src = _heads(layer, layer.lin(source))
        dst = src if isinstance(x, Tensor) else None if own is None else _heads(layer, layer.lin(own))
    else:
        src = _heads(layer, layer.lin_src(source))
        dst = None if own is None else _heads(layer, layer.lin_dst(own))
    given = [(src * layer.att_src).sum(dim=-1)]
    if dst is not None:
        given.append((dst * layer.att_dst).sum(dim=-1))

    def of_none() -> Tensor:
        return _plus(*(t[:0] for t in given))

    out = _attend(layer, place, src, "sum", *given, of_none=of_none, slope=layer.negative_slope)
    return _plus(_joined(layer, out), res, layer.bias)


def _gatv2(layer: Any, x: Any, edge_index: Any, edge_attr: Any = None, return_attention_weights: Any = None) -> Any:
    found = _look(layer, x, edge_index, edge_attr=edge_attr, return_attention_weights=return_attention_weights)
    if not isinstance(found, _Ends) or found.own is None:
        return _decline(layer, found)
    source, own, place = found
    residual = getattr(layer, "res", None)
    res = None if residual is None else residual(own)
    src = _heads(layer, layer.lin_l(source))
    dst = src if isinstance(x, Tensor) and layer.share_weights else _heads(layer, layer.lin_r(own))
    att = layer.att.view(layer.heads, layer.out_channels)

    def of_none() -> Any:
        return (F.leaky_relu(dst[:0] + src[:0], layer.negative_slope) * layer.att).sum(dim=-1)

    out = _attend(layer, place, src, "pair", src, dst, att, of_none=of_none, slope=layer.negative_slope)
    return _plus(_joined(layer, out), res, layer.bias)


def _transformer(
    layer: Any, x: Any, edge_index: Any, edge_attr: Any = None, return_attention_weights: Any = None
) -> Any:
    found = _look(layer, x, edge_index, edge_attr=edge_attr, return_attention_weights=return_attention_weights)
    if not isinstance(found, _Ends) or found.own is None or layer.lin_edge is not None:
        return _decline(layer, found)
    source, own, place = found
    query, key, value = (
        _heads(layer, lin(t)) for lin, t in ((layer.lin_query, own), (layer.lin_key, source), (layer.lin_value, source))
    )
    scale = 1 / math.sqrt(layer.out_channels)

    def of_none() -> Tensor:
        return (query[:0] * key[:0]).sum(dim=-1)

    out = _joined(layer, _attend(layer, place, value, "dot", key, query, of_none=of_none, scale=scale))
    layer._alpha = None
    if not layer.root_weight:
        return out
    root = layer.lin_skip(own)
    if layer.lin_beta is None:
        return out + root
    beta = layer.lin_beta(torch.cat([out, root, out - root], dim=-1)).sigmoid()
    return beta * root + (1 - beta) * out


def _supergat(layer: Any, x: Any, edge_index: Any, neg_edge_index: Any = None, batch: Any = None) -> Any:
    if torch.compiler.is_compiling() and layer.training:
        return NotImplemented  # draws negative edges, as many as the graph says
    found = _look(layer, x, edge_index) if isinstance(x, Tensor) else None
    if not isinstance(found, _Ends):
        return _decline(layer, found)
    place, number = found.place, x.shape[0]
    x = _heads(layer, layer.lin(x))
    scale = 1 / math.sqrt(layer.out_channels) if layer.attention_type == "SD" else 1.0
    given: tuple[Tensor, ...] = x, x
    if layer.attention_type == "MX":
        given = (x * layer.att_l).sum(-1), (x * layer.att_r).sum(-1), x, x

    def of_none() -> Any:
        logits = (x[:0] * x[:0]).sum(dim=-1)
        return logits if len(given) == 2 else (given[0][:0] + given[1][:0]) * logits.sigmoid()

    score = "dot" if len(given) == 2 else "gated"
    out = _attend(layer, place, x, score, *given, of_none=of_none, slope=layer.negative_slope, scale=scale)
    if layer.training:
        if layer.add_self_loops:
            edge_index, _ = supergat_conv.remove_self_loops(edge_index)
            edge_index, _ = supergat_conv.add_self_loops(edge_index, num_nodes=number)
        positive = layer.positive_sampling(edge_index)
        kinds = [_logits(layer, x, positive, scale, graph_of)]
        if neg_edge_index is None:
            neg_edge_index = layer.negative_sampling(edge_index, number, batch)
        # negative edges are others in each step, so their graph is not kept
        kinds.append(_logits(layer, x, neg_edge_index, scale, Graph._from_pair))
        layer.att_x = torch.cat(kinds, dim=0)
        layer.att_y = layer.att_x.new_zeros(layer.att_x.size(0))
        layer.att_y[: positive.size(1)] = 1.0
    return _plus(_joined(layer, out), layer.bias)


def _logits(layer: Any, x: Tensor, edge_index: Any, scale: float, make: Callable[..., Graph]) -> Tensor:
    """Scores of edges, for SuperGAT's own loss."""
    if direct._edges(edge_index, None, x):
        try:
            graph = make(edge_index[1], edge_index[0], x.shape[0], x.shape[0])
        except IndexError:
            pass  # from the end, perhaps
        else:
            wide = x.to((x[:0] * x[:0]).sum(dim=-1).dtype)
            return sddmm(graph, wide, wide) * scale
    ends = x[edge_index[1]], x[edge_index[0]]
    return layer.get_attention(edge_index[1], *ends, num_nodes=x.shape[0], return_logits=True)  # type: ignore[no-any-return]


for _cls, _adapter in (
    (GATConv, _gat),
    (GATv2Conv, _gatv2),
    (TransformerConv, _transformer),
    (SuperGATConv, _supergat),
):
    direct.register(_cls, _adapter)
