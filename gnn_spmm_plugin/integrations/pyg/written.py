"""Messages that had to be written, reduced by rows of the graph instead of scattered: layers that cannot be fused.

The gradient of a maximum is what a scatter is worst at: it compares, counts and divides in tensors of the size of the
messages. With the edges in the order of their destinations it is two sweeps, so layers that take a maximum or minimum
have theirs sorted, and then their other aggregations use it too. For a sum alone sorting does not pay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...cache import graph_of, on_clear
from ...csr import capturing
from ...functional import spmm
from ...functional_messages import edges_of
from ...kernels import DTYPES
from . import aggregate
from .lazy import PLAIN
from .records import Record

#: Elements of the messages from which it pays.
LEAST = 1 << 15
#: What the indices whose edges were sorted are views of.
_sorted: Any = WeakIdKeyDictionary()
on_clear.append(_sorted.clear)


def reduced(
    record: Record, x: Any, index: Any, dim_size: int, dim: int, names: list[str], semi: bool
) -> list[Tensor] | None:
    """The aggregations called `names` of the messages `x`, or None where that is left to PyG.

    Args:
        record: of the layer that runs.
        x: ``[E, ...]`` messages.
        index: ``[E]`` destination of each.
        dim_size: number of destinations.
        dim: dimension of the messages.
        names: classes of PyG's aggregations.
        semi: whether squares are constants, see PyG's ``VarAggregation``.
    """
    if type(x) not in PLAIN or x.dim() < 2 or dim % x.dim() != 0 or x.numel() < LEAST or x.dtype not in DTYPES:
        return None
    index = aggregate.plain_index(index)
    if index is None or index.dim() != 1 or index.shape[0] != x.shape[0] or index.device != x.device:
        return None
    if index.dtype not in (torch.int32, torch.int64) or index.is_inference() or x.layout != torch.strided:
        return None
    root = index if index._base is None else index._base
    picks = x.requires_grad and any(name in ("MaxAggregation", "MinAggregation") for name in names)
    if not aggregate.known(names) or not (root in _sorted or (picks and not capturing(x.device))):
        return None
    try:
        graph = edges_of(graph_of(index, index, dim_size, dim_size))
    except IndexError:
        return None  # PyG says what is wrong
    _sorted[root] = True

    def product(messages: Tensor, reduce: str) -> Tensor:
        tie = aggregate.tie_rule(messages, messages.requires_grad)
        out = spmm(graph, messages, None, reduce, tie=tie, policy=aggregate.policy())
        record.fused[f"{reduce} of written messages"] += 1
        assert isinstance(out, Tensor)
        return out

    def of_squares(reduce: str) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not semi):
            return product(x * x, reduce)

    return aggregate.several(
        names, lambda reduce: product(x, reduce), of_squares, lambda dtype: graph._csr.inverse_degree(dtype)
    )
