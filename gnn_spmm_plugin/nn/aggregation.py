"""`SpMMAggregation`: a PyG aggregation that runs as one kernel, and says how ties are broken."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cache import graph_of
from ..csr import Core, Csr
from ..functional import TIES, spmm
from ..graph import Graph
from ..kernels import REDUCES
from ..policy import POLICIES
from .host import FUSED, Aggregation


class SpMMAggregation(Aggregation):
    """Sum, mean, maximum or minimum over sets of elements; bitwise reproducible, usable as ``aggr=`` of PyG layers.

    In the layers of `gnn_spmm_plugin.nn`, messages are never written. In a stock PyG layer that is not accelerated it
    receives the messages, and replaces the scatter.

    Args:
        reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
        tie: for max and min, who gets the gradient where several elements attain the extremum: ``"first"`` or
            ``"split"``.
        policy: how a kernel is chosen, see `gnn_spmm_plugin.plan`.

    Raises:
        ValueError: an argument is none of its choices.
    """

    def __init__(self, reduce: str = "sum", tie: str = "first", policy: str = "auto") -> None:
        super().__init__()
        reduce = FUSED.get(reduce, reduce)
        for name, value, choices in (("reduce", reduce, REDUCES), ("tie", tie, TIES), ("policy", policy, POLICIES)):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
        self.reduction, self.tie, self.policy = reduce, tie, policy  # PyG has a method called reduce

    def forward(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
        max_num_elements: int | None = None,
    ) -> Tensor:
        """Aggregates the elements of `x` along `dim`.

        Args:
            x: elements, of any number of dimensions; float32, float64, float16 or bfloat16.
            index: ``[x.shape[dim]]`` int32 or int64, the set of each element, in any order.
            ptr: instead, ``[num_sets + 1]`` borders of sets that follow each other. `index` wins where both are given.
            dim_size: number of sets; without it, as many as `ptr` or `index` says.
            dim: the dimension to aggregate.
            max_num_elements: ignored.

        Returns:
            `x` with ``dim_size`` entries along `dim`; sets without elements get 0.

        Raises:
            ValueError: neither `index` nor `ptr`, or a length that does not fit.
            IndexError: an index outside ``[0, dim_size)``.
        """
        if index is None and ptr is None:
            raise ValueError("SpMMAggregation needs index or ptr")
        if index is None:
            assert ptr is not None
            _check_borders(ptr, x.shape[dim])
            sizes = ptr[1:] - ptr[:-1]
            sets = torch.arange(sizes.shape[0], dtype=ptr.dtype, device=ptr.device)
            index = sets.repeat_interleave(sizes, output_size=x.shape[dim])
            dim_size = sizes.shape[0]
        if hasattr(index, "as_tensor"):  # PyG's Index
            index = index.as_tensor()
        if index.dim() != 1 or index.shape[0] != x.shape[dim]:
            raise ValueError(f"index must have shape [{x.shape[dim]}], one set per element, got {list(index.shape)}")
        if dim_size is None:
            dim_size = int(index.max()) + 1 if index.numel() else 0
        graph = _membership(index, dim_size)
        out = spmm(graph, x.movedim(dim, 0), None, self.reduction, tie=self.tie, policy=self.policy)
        assert isinstance(out, Tensor)
        return out.movedim(0, dim).contiguous()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.reduction}, tie={self.tie})"


def _check_borders(ptr: Tensor, count: int) -> None:
    if ptr.dim() != 1 or ptr.shape[0] == 0 or ptr.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ptr must have shape [num_sets + 1], int32 or int64, got {list(ptr.shape)} {ptr.dtype}")
    if torch.compiler.is_compiling():
        return
    # repeat_interleave would take it at its word, and on CUDA write past the end.
    if not bool((ptr[0] == 0) & (ptr[-1] == count) & (ptr[1:] >= ptr[:-1]).all()):
        raise ValueError(
            f"ptr must start at 0, never decrease and end at the number of elements, {count}; got {ptr.tolist()[:8]}"
            + ("" if ptr.shape[0] <= 8 else f" ... {int(ptr[-1])}")
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _membership(index: Tensor, num_sets: int) -> Graph:
    """The bipartite graph with an edge ``e -> index[e]`` for each element e, found again by the identity of `index`."""
    core = graph_of(index, index, num_sets, num_sets)._core
    made: Core | None = core.derived.get("membership")
    if made is None:
        csr, num_elements = core.csr, index.shape[0]
        elements = csr.perm
        if elements is None:
            elements = torch.arange(num_elements, dtype=csr.rowptr.dtype, device=index.device)
        made = Core(Csr(csr.rowptr, elements, csr.perm, num_elements))
        setattr(core.derived, "membership", made)  # noqa: B010
    return Graph._make(made)


def fused_reduction(aggr: Any, tie: str) -> tuple[str, str] | None:
    """(reduction, tie rule) of an aggregation that runs as one kernel, or None for any other."""
    if isinstance(aggr, SpMMAggregation):
        return aggr.reduction, aggr.tie
    return (FUSED[aggr], tie) if isinstance(aggr, str) and aggr in FUSED else None
