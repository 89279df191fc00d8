"""LEConv, FiLMConv without activation, GeneralConv without attention, PNAConv and RGCNConv: what can be taken apart.

What a message takes from its destination is the same for all edges into a node, and a linear layer may as well follow
a sum as precede it. So ``sum w * (a_j - b_i)`` is one product and ``b`` times the sum of the weights,
``mean (gamma_i * x_j + beta_i)`` one product between two vectors, and the edge features of GeneralConv are added up
before their linear layer sees them. The linear layer that PNAConv applies to both ends of an edge is one for each end,
applied to the nodes; what the destination adds moves the aggregations that follow (`shifted`). The relations of
RGCNConv are one graph whose destinations are the pairs of node and relation: one product for all of them, and one
matrix product after it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.typing
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.nn.aggr import DegreeScalerAggregation
from torch_geometric.nn.conv import FiLMConv, GeneralConv, LEConv, PNAConv, RGCNConv

from ..._native import autocasts
from ...cache import graph_of
from ...functional import spmm
from ...functional_messages import edges_of
from ...graph import Graph
from ...nn.conv import swaps, transforms_first
from . import aggregate, direct, memo
from .lazy import PLAIN
from .shifted import Shifted


def _usual(layer: Any, x: Tensor) -> bool:
    """Whether this may run now: outside of torch.compile, and where nothing changes dtypes in between."""
    if torch.compiler.is_compiling() or autocasts(x.device.type):
        return False
    return direct._unchanged(layer)


def _ready(layer: Any, x: Tensor) -> bool:
    """The same for layers that add up."""
    return _usual(layer, x) and direct._reduction(layer) in ("sum", "mean")


def _both(x: Any) -> tuple[Tensor, Tensor] | None:
    """Features of both sides, as layers take them; None where one is missing."""
    pair = (x, x) if isinstance(x, Tensor) else x
    if type(pair) not in (tuple, list) or len(pair) != 2 or not all(map(direct._features, pair)):
        return None
    return None if pair[0].device != pair[1].device or pair[0].dtype != pair[1].dtype else (pair[0], pair[1])


def _graph(layer: Any, edge_index: Tensor, num_src: int, num_dst: int) -> Graph | None:
    place = direct._place(layer, edge_index, num_src, num_dst)
    return None if place is None else place.graph


def _product(graph: Graph, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
    out = spmm(graph, x, weight, reduce, policy=aggregate.policy())
    assert isinstance(out, Tensor)
    return out


def _of_ones(graph: Graph, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
    """The sum (or mean) of the weights of each node's edges, ``[num_dst, 1]``."""
    if weight is None:
        degree = graph._csr.degree()
        return (degree.clamp(max=1) if reduce == "mean" else degree).to(x.dtype).unsqueeze(1)
    return _product(graph, weight.new_ones(graph.num_src, 1), weight, reduce)


# ---------------------------------------------------------------------- the layers


def _le(layer: Any, x: Any, edge_index: Any, edge_weight: Any = None) -> Any:
    pair, edge_index = _both(x), direct.as_plain(edge_index)
    if pair is None or not _ready(layer, pair[0]) or not direct._edges(edge_index, edge_weight, pair[0]):
        return NotImplemented
    if edge_weight is not None and edge_weight.dtype != pair[0].dtype:
        return NotImplemented
    graph = _graph(layer, edge_index, pair[0].shape[0], pair[1].shape[0])
    if graph is None:
        return NotImplemented
    reduce = direct._reduction(layer) or "sum"
    a, b = layer.lin1(pair[0]), layer.lin2(pair[1])
    out = _product(graph, a, edge_weight, reduce) - _of_ones(graph, b, edge_weight, reduce) * b
    direct._count(layer, f"{'weighted ' if edge_weight is not None else ''}{reduce} - self")
    return out + layer.lin3(pair[1])


def _film(layer: Any, x: Any, edge_index: Any, edge_type: Any = None) -> Any:
    if layer.act is not None:
        return NotImplemented
    pair = _both(x)
    if pair is None or not _ready(layer, pair[0]):
        return NotImplemented
    if not direct._edges(edge_index, None, pair[0]):
        return NotImplemented
    parts = (edge_index,)
    if layer.num_relations > 1:
        if not _types(edge_type, edge_index):
            return NotImplemented
        parts = memo.remembered(edges_of_relations, edge_index, edge_type, layer.num_relations)
    graphs = [_graph(layer, part, pair[0].shape[0], pair[1].shape[0]) for part in parts]
    if any(graph is None for graph in graphs):
        return NotImplemented
    reduce, width = direct._reduction(layer) or "mean", layer.out_channels
    beta, gamma = layer.film_skip(pair[1]).split(width, dim=-1)
    out = gamma * layer.lin_skip(pair[1]) + beta
    for graph, lin, film in zip(graphs, layer.lins, layer.films, strict=True):
        beta, gamma = film(pair[1]).split(width, dim=-1)
        assert graph is not None
        product = _product(graph, lin(pair[0]), None, reduce)
        out = out + gamma * product + _of_ones(graph, beta, None, reduce) * beta
    direct._count(layer, f"{reduce} between gamma and beta")
    return out


def _general(layer: Any, x: Any, edge_index: Any, edge_attr: Any = None, size: Any = None) -> Any:
    pair, edge_index = _both(x), direct.as_plain(edge_index)
    if pair is None or layer.attention or "message_basic" in layer.__dict__ or not _ready(layer, pair[0]):
        return NotImplemented
    source, own = pair
    if size is not None or not direct._edges(edge_index, None, source):
        return NotImplemented
    linear = [(layer.lin_msg, source)] if layer.directed_msg else [(layer.lin_msg, source), (layer.lin_msg_i, own)]
    if edge_attr is not None:
        if not direct._features(edge_attr) or edge_attr.shape[0] != edge_index.shape[1]:
            return NotImplemented
        linear.append((layer.lin_edge, edge_attr))
    if not all(swaps(lin, t) for lin, t in linear):
        return NotImplemented
    graph = _graph(layer, edge_index, source.shape[0], own.shape[0])
    if graph is None:
        return NotImplemented
    reduce = direct._reduction(layer) or "sum"
    lin = layer.lin_msg
    if transforms_first(lin.weight, source):
        out = _product(graph, F.linear(source, lin.weight), None, reduce)
    else:
        out = F.linear(_product(graph, source, None, reduce), lin.weight)
    constant = lin.bias  # what every edge into a node adds
    if not layer.directed_msg:
        here = layer.lin_msg_i(own)
        constant = here if constant is None else constant + here
    if edge_attr is not None:
        out = out + F.linear(_product(edges_of(graph), edge_attr, None, reduce), layer.lin_edge.weight)
        if layer.lin_edge.bias is not None:
            constant = layer.lin_edge.bias if constant is None else constant + layer.lin_edge.bias
    if constant is not None:
        out = out + _of_ones(graph, out, None, reduce) * constant
    out = out.view(-1, layer.heads, layer.out_channels).mean(dim=1) + layer.lin_self(own)
    direct._count(layer, f"{reduce}{' + edges' if edge_attr is not None else ''}")
    return F.normalize(out, p=2, dim=-1) if layer.normalize_l2 else out


def _pna(layer: Any, x: Any, edge_index: Any, edge_attr: Any = None) -> Any:
    edge_index, module = direct.as_plain(edge_index), layer.aggr_module
    if edge_attr is not None or layer.edge_dim is not None or not direct._features(x) or not _usual(layer, x):
        return NotImplemented
    if type(module) is not DegreeScalerAggregation or any(map(aggregate.hooked, module.modules())):
        return NotImplemented
    if any(getattr(part, "semi_grad", False) for part in module.modules()):
        return NotImplemented  # half of a gradient of the variance is moved too
    towers, width, n = layer.towers, layer.F_in, x.shape[0]
    first = [nn[0] for nn in layer.pre_nns]
    if any(len(nn) != 1 or aggregate.hooked(nn) for nn in layer.pre_nns) or not all(swaps(lin, x) for lin in first):
        return NotImplemented
    if x.shape[1] != layer.in_channels or not direct._edges(edge_index, None, x) or edge_index.shape[1] == 0:
        return NotImplemented
    if _graph(layer, edge_index, n, n) is None:
        return NotImplemented
    parts = x.chunk(towers, 1) if layer.divide_input else [x] * towers
    own, other = [], []
    for lin, part in zip(first, parts, strict=True):
        own.append(F.linear(part, lin.weight[:, :width], lin.bias))
        other.append(F.linear(part, lin.weight[:, width:]))
    forward = int(layer.flow == "source_to_target")
    source, to = edge_index[1 - forward], edge_index[forward]
    messages = Shifted.messages(layer, torch.cat(other, 1), torch.cat(own, 1), source, to)
    found = module(messages, to, dim_size=n, dim=0)
    found = found.view(n, -1, towers, width).transpose(1, 2).reshape(n, towers, -1)
    outs = [
        nn(torch.cat([part, found[:, i]], 1)) for i, (nn, part) in enumerate(zip(layer.post_nns, parts, strict=True))
    ]
    return layer.lin(torch.cat(outs, 1))


def _rgcn(layer: Any, x: Any, edge_index: Any, edge_type: Any = None) -> Any:
    pair = _both(x)
    if pair is None or not _ready(layer, pair[0]) or torch_geometric.typing.WITH_SEGMM:
        return NotImplemented  # pyg-lib's segment_matmul is another mean
    source, own = pair
    if not direct._edges(edge_index, None, source) or not _types(edge_type, edge_index):
        return NotImplemented
    relations, edges, rows = layer.num_relations, edge_index.shape[1], own.shape[0]
    # All relations' sums at once are what training keeps anyway; without a gradient, not for many empty ones.
    if relations * rows >= 2**31 or (not torch.is_grad_enabled() and relations * rows > 4 * edges + rows):
        return NotImplemented
    forward = layer.flow == "source_to_target"
    (pairs,) = memo.remembered(edges_to_relations, edge_index, edge_type, relations, int(forward))
    if pairs.shape[1] < edges:
        return NotImplemented  # types out of range, which PyG may complain of
    try:
        graph = graph_of(pairs[0], pairs[1], rows * relations, source.shape[0])
    except IndexError:
        return NotImplemented
    reduce = direct._reduction(layer) or "mean"
    h = _product(graph, source, None, reduce)
    weight = layer.weight
    if layer.num_bases is not None:
        weight = (layer.comp @ weight.view(layer.num_bases, -1)).view(relations, source.shape[1], layer.out_channels)
    if layer.num_blocks is None:
        out = h.view(rows, relations * source.shape[1]) @ weight.reshape(-1, layer.out_channels)
    else:
        parts = h.view(rows, relations, weight.shape[1], weight.shape[2])
        out = torch.einsum("nrbi,rbio->nbo", parts, weight).reshape(rows, layer.out_channels)
    out = out.to(torch.promote_types(torch.get_default_dtype(), out.dtype))  # PyG starts from zeros of that dtype
    if layer.root is not None:
        out = out + own @ layer.root
    direct._count(layer, f"{reduce} of all relations")
    return out if layer.bias is None else out + layer.bias


# ---------------------------------------------------------------------- relations


def _types(edge_type: Any, edge_index: Tensor) -> bool:
    """Whether `edge_type` is one number for each edge."""
    if type(edge_type) not in PLAIN or edge_type.shape != edge_index.shape[1:]:
        return False
    return edge_type.dtype in (torch.int32, torch.int64) and edge_type.device == edge_index.device


def edges_of_relations(edge_index: Tensor, edge_type: Tensor, relations: int) -> tuple[Tensor, ...]:
    """The ``edge_index`` of each relation."""
    return tuple(edge_index[:, edge_type == r] for r in range(relations))


def edges_to_relations(edge_index: Tensor, edge_type: Tensor, relations: int, dst: int) -> tuple[Tensor]:
    """``[2, E]``: the pair (destination, relation) of each edge as one number, and its source.

    Args:
        edge_index: ``[2, E]``.
        edge_type: ``[E]``; edges of types outside of ``[0, relations)`` are in no relation and left out.
        relations: their number.
        dst: which row of `edge_index` holds destinations.
    """
    known = (edge_type >= 0) & (edge_type < relations)
    if not bool(known.all()):
        edge_index, edge_type = edge_index[:, known], edge_type[known]
    to = edge_index[dst].long() * relations + edge_type
    return (torch.stack([to, edge_index[1 - dst].long()]),)


for _cls, _adapter in (
    *((LEConv, _le), (FiLMConv, _film), (GeneralConv, _general)),
    *((PNAConv, _pna), (RGCNConv, _rgcn)),
):
    direct.register(_cls, _adapter)
