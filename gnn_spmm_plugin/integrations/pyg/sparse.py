"""PyG's product with a sparse matrix, ``torch_geometric.utils.spmm``, as its layers call it for sparse adjacencies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._native import autocasts
from ...csr import capturing
from ...functional import spmm
from ...graph import Graph
from ...kernels import DTYPES
from ...nn.conv import _of_sparse
from . import aggregate
from .lazy import PLAIN
from .records import Record

_LAYOUTS = (torch.sparse_csr, torch.sparse_csc, torch.sparse_coo)


def replacements(current: Callable[[], Record | None]) -> list[tuple[Any, Callable[..., Any]]]:
    """For `exchange`.

    Args:
        current: the record of the accelerated layer that runs now, if any; asked at each call.
    """
    from torch_geometric.utils import spmm as product

    def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        record = current()
        if record is not None:
            out = _product(record, *args, **kwargs)
            if out is not NotImplemented:
                return out
        return function(*args, **kwargs)

    return [(product, call)]


def _product(record: Record, src: Any, other: Any, reduce: str = "sum") -> Any:
    """``src @ other``, or another reduction of ``src[i, j] * other[j]`` over the entries of each row.

    A coalesced matrix without gradient only: of parallel entries PyG makes one, and what it gives as the gradient of a
    matrix is one. Ties of a maximum are those of ``torch.sparse.mm``: the first entry of a row gets the gradient.
    """
    reduce = "sum" if reduce == "add" else reduce
    if type(src) is not Tensor or src.layout not in _LAYOUTS or src.dim() != 2 or src.requires_grad:
        return NotImplemented
    if type(other) not in PLAIN or other.dim() != 2 or other.layout != torch.strided or other.dtype not in DTYPES:
        return NotImplemented
    if src.dtype != other.dtype or src.device != other.device or src.shape[1] != other.shape[0]:
        return NotImplemented
    if reduce not in ("sum", "mean", "max", "min") or (src.layout == torch.sparse_coo and not src.is_coalesced()):
        return NotImplemented
    if capturing(other.device):
        return NotImplemented  # what a matrix holds cannot be read there
    if src.is_inference() or autocasts(other.device.type) or src._nnz() == 0:
        return NotImplemented
    graph: Graph = _of_sparse(src)
    out = spmm(graph, other, None, reduce, tie="first", policy=aggregate.policy())
    record.fused[f"{reduce} by a sparse matrix"] += 1
    return out
