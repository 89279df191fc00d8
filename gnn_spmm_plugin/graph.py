"""`Graph`: an immutable adjacency, kept as CSR by destination and, on demand, by source.

The class follows one convention: rows are destinations, so ``g @ x`` is ``A @ x``. Every entry point that
knows another convention (PyG's ``flow``, DGL's edge direction) converts at the door.
"""

from __future__ import annotations

import operator
import weakref
from typing import Any

import torch
from torch import Tensor

from . import _native
from .csr import Core, Csr, _from_coo, _index_dtype

_MAX_NODES = 2**48  # what an address can reach; beyond it, sizes in bytes overflow
_INDEX_DTYPES = (torch.int32, torch.int64)


def shape_advice(edge_index: Tensor) -> str:
    """The shape of what is no ``[2, E]``, and what to do where it is ``[E, 2]``."""
    advice = "; transpose it: edge_index.t()" if edge_index.dim() == 2 and edge_index.shape[1] == 2 else ""
    return f"{list(edge_index.shape)}{advice}"


def _as_index(t: Any, name: str) -> Tensor:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}; convert it with torch.as_tensor()")
    if t.dtype not in _INDEX_DTYPES:
        raise TypeError(f"{name} must have dtype torch.int32 or torch.int64, got {t.dtype}; convert it with .long()")
    if t.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {t.layout}; see Graph.from_torch_sparse")
    return t


class _StoredValues(torch.autograd.Function):
    """The values of an uncoalesced COO matrix as they are stored, which torch itself hands out without a gradient."""

    @staticmethod
    def forward(ctx: Any, A: Tensor) -> Tensor:
        ctx.indices, ctx.shape = A._indices(), A.shape
        return A._values().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # A's own backward adds the entries of equal position up, then gives each of them that sum: so divide first.
        position = ctx.indices[0] * ctx.shape[1] + ctx.indices[1]
        _, group, count = position.unique(return_inverse=True, return_counts=True)
        first = torch.zeros_like(count, dtype=grad.dtype).scatter_(0, group, grad)
        if not torch.equal(first[group], grad):
            raise RuntimeError(
                "the gradients of repeated entries of the sparse matrix differ, and torch keeps one for all of them; "
                "use Graph.from_edge_index(A._indices().flip(0), ...).with_weight(values) with the values themselves"
            )
        return torch.sparse_coo_tensor(ctx.indices, grad / count[group], ctx.shape, check_invariants=False)


class Graph:
    """An immutable graph for aggregation: row ``d`` of `rowptr` holds the edges into destination ``d``.

    Make one with `from_edge_index`, `from_csr`, `from_torch_sparse`, `from_sparse_tensor`, `from_scipy` or
    `from_dgl`. Indices are checked once, there. Parallel edges and self loops are kept. Edge ids, wherever a
    method or operator takes or returns something per edge, are positions in what the graph was made from.

    Attributes:
        num_src: number of source nodes (rows of the features that are aggregated).
        num_dst: number of destination nodes (rows of the result).
        num_edges: number of edges.
        device: where the graph lives; the features must be there too.
        weight: ``[E]`` or ``[E, H]`` edge weights in the caller's order that `gnn_spmm_plugin.spmm` uses
            unless it is given others, or None.
    """

    __slots__ = ("__weakref__", "_core", "_flipped", "_transposed", "_weight")
    _core: Core
    _flipped: bool
    _transposed: weakref.ref[Graph] | None
    _weight: Tensor | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("make a Graph with Graph.from_edge_index, from_csr, from_torch_sparse, from_scipy, ...")

    @classmethod
    def _make(cls, core: Core, flipped: bool = False, weight: Tensor | None = None) -> Graph:
        self = object.__new__(cls)
        object.__setattr__(self, "_core", core)
        object.__setattr__(self, "_flipped", flipped)
        object.__setattr__(self, "_weight", weight)
        object.__setattr__(self, "_transposed", None)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Graph is immutable; cannot set {name!r}. To change its weights use g.with_weight(w)")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Graph is immutable; cannot delete {name!r}")

    # ------------------------------------------------------------------ constructors

    @classmethod
    def from_edge_index(
        cls,
        edge_index: Tensor,
        num_nodes: int | tuple[int, int] | None = None,
        flow: str = "source_to_target",
    ) -> Graph:
        """A graph from PyG's edge list.

        Args:
            edge_index: ``[2, E]``, int32 or int64 (a plain tensor or PyG's `EdgeIndex`), in any order.
            num_nodes: number of nodes, or ``(num_src, num_dst)`` of a bipartite graph. Without it, the
                largest id plus one, for both sides.
            flow: ``"source_to_target"``: row 0 holds sources, row 1 destinations; ``"target_to_source"``:
                the other way round.

        Raises:
            IndexError: an id is negative or too large; the message names the edge.
            TypeError: wrong type or dtype.
            ValueError: wrong shape, negative `num_nodes` or unknown `flow`.
        """
        if hasattr(edge_index, "as_tensor"):
            edge_index = edge_index.as_tensor()
        edge_index = _as_index(edge_index, "edge_index")
        if edge_index.dim() != 2 or edge_index.shape[0] != 2:
            raise ValueError(f"edge_index must have shape [2, num_edges], got {shape_advice(edge_index)}")
        if flow not in ("source_to_target", "target_to_source"):
            raise ValueError(f"flow must be 'source_to_target' or 'target_to_source', got {flow!r}")
        src, dst = edge_index[0], edge_index[1]
        if flow == "target_to_source":
            src, dst = dst, src
        if num_nodes is None:
            num_nodes = int(edge_index.max()) + 1 if edge_index.numel() else 0
            num_nodes = max(num_nodes, 0)
        num_src, num_dst = _sizes(num_nodes)
        return cls._make(Core(_from_coo(dst, src, num_dst, num_src)))

    @classmethod
    def _from_pair(cls, dst: Tensor, src: Tensor, num_dst: int, num_src: int) -> Graph:
        """A graph from two index vectors of any stride."""
        return cls._make(Core(_from_coo(_as_index(dst, "dst"), _as_index(src, "src"), num_dst, num_src)))

    @classmethod
    def from_csr(cls, rowptr: Tensor, col: Tensor, num_src: int | None = None) -> Graph:
        """A graph from CSR arrays whose rows are destinations.

        Args:
            rowptr: ``[num_dst + 1]`` int32 or int64, starting at 0, non-decreasing, ending at ``len(col)``.
            col: ``[E]`` source of each edge.
            num_src: number of source nodes; without it, the largest id plus one, at least ``num_dst``.

        Raises:
            IndexError: a column is out of range.
            TypeError: wrong type or dtype.
            ValueError: `rowptr` is not a valid row pointer for `col`, or the devices differ.
        """
        rowptr, col = _as_index(rowptr, "rowptr"), _as_index(col, "col")
        if rowptr.dim() != 1 or col.dim() != 1 or rowptr.shape[0] < 1:
            raise ValueError(
                f"rowptr must have shape [num_dst + 1] and col [num_edges], got {list(rowptr.shape)} and "
                f"{list(col.shape)}"
            )
        if rowptr.device != col.device:
            raise ValueError(f"rowptr is on {rowptr.device} but col on {col.device}; move both to one device")
        num_dst, num_edges = rowptr.shape[0] - 1, col.shape[0]
        with torch.no_grad():
            decreases = rowptr[1:] < rowptr[:-1]  # a difference could wrap around
            valid = (rowptr[0] == 0) & (rowptr[-1] == num_edges) & ~decreases.any()
            if not bool(valid):
                wrong = decreases.nonzero().flatten()
                where = f"it decreases at row {int(wrong[0])}" if wrong.numel() else "it does not span col"
                raise ValueError(
                    f"rowptr must start at 0, never decrease and end at len(col) = {num_edges}; got first "
                    f"{int(rowptr[0])}, last {int(rowptr[-1])}, and {where}"
                )
            if num_src is None:
                num_src = max(int(col.max()) + 1 if num_edges else 0, num_dst)
            num_src, num_dst = _sizes((num_src, num_dst))
            wide = _index_dtype(num_src, num_dst, num_edges)
            rows = Csr(rowptr.to(wide), col, None, num_src).rows()
            # The caller's `col`, not a copy: a narrowed id may look legal.
            csr = _from_coo(rows, col, num_dst, num_src)
        return cls._make(Core(csr))

    @classmethod
    def from_torch_sparse(cls, A: Tensor) -> Graph:
        """A graph from a 2-D sparse matrix (COO, coalesced or not, CSR or CSC); rows are destinations.

        Its values become the graph's weight, one for each stored entry, in stored order; repeated entries
        stay separate edges. Gradients flow to the values. (torch has one gradient for repeated entries of a COO
        matrix; where theirs differ, as under a maximum, the backward raises a RuntimeError.)

        Raises:
            TypeError: `A` is not a sparse COO, CSR or CSC tensor.
            ValueError: it is not 2-D, or has dense dimensions.
        """
        layouts = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
        if not isinstance(A, Tensor) or A.layout not in layouts:
            got = A.layout if isinstance(A, Tensor) else type(A).__name__
            raise TypeError(f"A must be a torch.sparse COO, CSR or CSC tensor, got {got}")
        if A.dim() != 2 or A.dense_dim():
            raise ValueError(
                f"A must be a matrix of scalars, got shape {list(A.shape)} with {A.dense_dim()} dense dims"
            )
        num_dst, num_src = A.shape
        if A.layout == torch.sparse_coo:
            dst, src = A._indices()
            graph = cls._from_pair(dst, src, num_dst, num_src)
            values = A.values() if A.is_coalesced() else _StoredValues.apply(A)
        elif A.layout == torch.sparse_csr:
            graph, values = cls.from_csr(A.crow_indices(), A.col_indices(), num_src), A.values()
        else:
            # By columns, it is the CSR of the transposed matrix.
            graph, values = cls.from_csr(A.ccol_indices(), A.row_indices(), num_dst).T, A.values()
        return graph.with_weight(values)

    @classmethod
    def from_sparse_tensor(cls, adj_t: Any) -> Graph:
        """A graph from a `torch_sparse.SparseTensor`; rows are destinations, as in ``adj_t @ x``.

        Its values, if it has any, become the graph's weight.

        Raises:
            TypeError: `adj_t` is no such tensor, or its values are not floating point.
        """
        if not all(hasattr(adj_t, name) for name in ("csr", "sparse_sizes")):
            raise TypeError(f"adj_t must be a torch_sparse.SparseTensor, got {type(adj_t).__name__}")
        rowptr, col, value = adj_t.csr()
        graph = cls.from_csr(rowptr, col, adj_t.sparse_size(1))
        return graph if value is None else graph.with_weight(value)

    @classmethod
    def from_scipy(cls, A: Any) -> Graph:
        """A graph from a scipy sparse matrix or array; rows are destinations, values become the weight.

        Integer and boolean values become float32.

        Raises:
            TypeError: `A` is not a sparse matrix, or its values are complex.
            ValueError: it is not 2-D.
        """
        if not all(hasattr(A, name) for name in ("tocoo", "shape", "nnz")):
            raise TypeError(f"A must be a scipy sparse matrix, got {type(A).__name__}")
        coo = A.tocoo()
        if len(coo.shape) != 2:
            raise ValueError(f"A must be 2-D, got shape {coo.shape}")
        dst, src = torch.from_numpy(coo.row.copy()), torch.from_numpy(coo.col.copy())
        graph = cls._from_pair(dst, src, *coo.shape)
        value = torch.from_numpy(coo.data.copy())
        keep = value.is_floating_point() or value.is_complex()  # the latter is refused, not cut in half
        return graph.with_weight(value if keep else value.float())

    @classmethod
    def from_dgl(cls, g: Any, etype: Any = None) -> Graph:
        """A graph from a `DGLGraph`, where that has its structure; messages go src -> dst, edges keep their ids.

        Args:
            g: a graph, heterograph, block or batch.
            etype: its relation, by name or as a triple; needed where there are several.

        Raises:
            TypeError: `g` is not a DGLGraph.
            ValueError: it has several relations, and `etype` is None.
        """
        if not all(hasattr(g, name) for name in ("edges", "canonical_etypes", "to_canonical_etype")):
            raise TypeError(f"g must be a DGLGraph, got {type(g).__name__}")
        if etype is None and len(g.canonical_etypes) != 1:
            raise ValueError(f"the graph has the relations {g.canonical_etypes}; say which with etype=")
        canonical = g.to_canonical_etype(etype) if etype is not None else g.canonical_etypes[0]
        src, dst = g.edges(form="uv", order="eid", etype=canonical)
        return cls._from_pair(dst, src, g.num_dst_nodes(canonical[2]), g.num_src_nodes(canonical[0]))

    # ------------------------------------------------------------------ what it is

    @property
    def _csr(self) -> Csr:
        return self._core.half(self._flipped)

    @property
    def _csr_t(self) -> Csr:
        return self._core.half(not self._flipped)

    @property
    def rowptr(self) -> Tensor:
        """``[num_dst + 1]`` offsets of each destination's edges."""
        return self._csr.rowptr

    @property
    def col(self) -> Tensor:
        """``[E]`` source of each edge, destination by destination."""
        return self._csr.col

    @property
    def perm(self) -> Tensor | None:
        """``[E]`` position in `col` -> edge id; None where they are the same."""
        return self._csr.perm

    @property
    def weight(self) -> Tensor | None:
        """Edge weights in the caller's order, or None."""
        return self._weight

    @property
    def num_dst(self) -> int:
        """Number of destination nodes."""
        return self._core.csr.num_cols if self._flipped else self._core.csr.num_rows

    @property
    def num_src(self) -> int:
        """Number of source nodes."""
        return self._core.csr.num_rows if self._flipped else self._core.csr.num_cols

    @property
    def num_edges(self) -> int:
        """Number of edges, parallel ones counted each."""
        return self._core.num_edges

    @property
    def device(self) -> torch.device:
        """Where the graph lives."""
        return self._core.device

    @property
    def T(self) -> Graph:
        """The graph with every edge reversed and the same edge ids; made once, shares storage with this one."""
        other = self._transposed() if self._transposed is not None else None
        if other is None:
            other = Graph._make(self._core, not self._flipped, self._weight)
            object.__setattr__(other, "_transposed", weakref.ref(self))
            object.__setattr__(self, "_transposed", weakref.ref(other))
        return other

    def edge_index(self) -> Tensor:
        """``[2, E]`` int64: row 0 sources, row 1 destinations, in the caller's order."""
        csr = self._csr
        return torch.stack([csr.in_caller_order(csr.col), csr.in_caller_order(csr.rows())]).long()

    def in_degree(self) -> Tensor:
        """``[num_dst]`` int64: number of edges into each destination."""
        return self._csr.degree().long()

    def nbytes(self) -> int:
        """Bytes held by the index arrays of both directions, as far as they exist."""
        halves = [self._core.csr, self._core.transpose]
        arrays = {id(t): t for h in halves if h is not None for t in (*h.arrays(), *(h.coo or ()))}
        return sum(t.numel() * t.element_size() for t in arrays.values())

    def validate(self) -> Graph:
        """Checks every index array again (they were checked when the graph was made); returns the graph.

        Raises:
            IndexError, TypeError or ValueError: something was written into the graph's own arrays, or it was unpickled
                from a file that somebody changed.
        """
        for csr in (self._core.csr, self._core.transpose):
            if csr is not None:
                Graph.from_csr(csr.rowptr, csr.col, csr.num_cols)
                _check_arrays(csr)
        a, b = self._core.csr, self._core.transpose
        if b is not None:
            same_dst = torch.equal(a.in_caller_order(a.rows()), b.in_caller_order(b.col))
            if not same_dst or not torch.equal(a.in_caller_order(a.col), b.in_caller_order(b.rows())):
                raise ValueError("the transposed graph has other edges than the graph")
        if self._weight is not None:
            check_weight(self, self._weight)
        return self

    # ------------------------------------------------------------------ making others from it

    def with_weight(self, weight: Tensor | None) -> Graph:
        """The same graph (sharing everything that was prepared for it) with other edge weights.

        Args:
            weight: ``[E]`` or ``[E, H]`` floating point, in the caller's order, on the graph's device; or None.

        Raises:
            TypeError, ValueError: it is none of these.
        """
        if weight is not None:
            check_weight(self, weight)
        return Graph._make(self._core, self._flipped, weight)

    def reorder(self, schedule: str | Tensor) -> tuple[Graph, Tensor, Tensor]:
        """The same graph with its nodes numbered in another order.

        ``plan(schedule=)`` follows an order and leaves features where they are; this is for whoever moves them once and
        for all: ``x[order]`` belongs to the new graph, and of its results ``y[inverse]`` is in the order of this one.
        Edges stay in their order, so weights are the same.

        Args:
            schedule: a name or a permutation, as of `gnn_spmm_plugin.plan`.

        Returns:
            (graph, order, inverse): node i of the new graph was node ``order[i]`` of this one, whose node j is now node
            ``inverse[j]``; both ``[N]`` int64 on the graph's device.

        Raises:
            TypeError, ValueError: sources and destinations are not the same nodes, or there is no such schedule.
        """
        from .partition import check_square
        from .schedule import order_of

        csr = self._csr
        check_square(csr, "reorder")
        order = order_of(csr, schedule)[1]
        if order is None:
            order = torch.arange(csr.num_rows, device=self.device)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(csr.num_rows, device=self.device)
        graph = Graph.from_edge_index(inverse[self.edge_index()], csr.num_rows)
        return graph.with_weight(self._weight), order, inverse

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Graph:
        """The graph on another device; itself where it already is there."""
        target = torch.empty(0, device=device).device
        if target == self.device:
            return self
        csr = self._csr
        rowptr, col, perm = (
            None if t is None else t.to(target, non_blocking=non_blocking) for t in (csr.rowptr, csr.col, csr.perm)
        )
        assert rowptr is not None and col is not None
        weight = None if self._weight is None else self._weight.to(target, non_blocking=non_blocking)
        return Graph._make(Core(Csr(rowptr, col, perm, csr.num_cols)), weight=weight)

    def cpu(self) -> Graph:
        """The graph on the CPU."""
        return self.to("cpu")

    def cuda(self, device: int | None = None) -> Graph:
        """The graph on a GPU, the current one by default."""
        return self.to(f"cuda:{torch.cuda.current_device() if device is None else device}")

    def __reduce__(self) -> tuple[Any, ...]:
        csr = self._csr
        return _unpickle, (csr.rowptr, csr.col, csr.perm, csr.num_cols, self._weight)

    def __copy__(self) -> Graph:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        return self  # immutable; and a copied model must not copy its graph

    def __repr__(self) -> str:
        weight = "" if self._weight is None else f", weight={list(self._weight.shape)} {self._weight.dtype}"
        index = str(self._core.csr.col.dtype).removeprefix("torch.")
        return (
            f"Graph(num_src={self.num_src}, num_dst={self.num_dst}, num_edges={self.num_edges}, "
            f"device='{self.device}', index={index}{weight})"
        )

    # ------------------------------------------------------------------ operators

    def __matmul__(self, x: Tensor) -> Tensor:
        """``A @ x``. torch.compile breaks its graph at an operator like this; `reduce` and `spmm` it sees through."""
        return self.reduce(x, "sum")

    def reduce(self, x: Tensor, reduce: str = "sum", **kwargs: Any) -> Tensor:
        """`gnn_spmm_plugin.spmm` on this graph, with its own weights; `kwargs` as there."""
        from .functional import spmm  # the one place that looks forward: sugar for the operator

        return spmm(self, x, reduce=reduce, **kwargs)  # type: ignore[return-value]


def _check_arrays(csr: Csr) -> None:
    """Raises ValueError unless the arrays fit each other and `perm` orders each row as the caller's edges."""
    for t in csr.arrays():
        if t.dtype != csr.col.dtype or t.device != csr.col.device or not t.is_contiguous():
            raise ValueError("the arrays of the graph must be contiguous, and of one dtype and device")
    if csr.perm is None:
        return
    ids = torch.arange(csr.col.shape[0], dtype=csr.perm.dtype, device=csr.perm.device)
    if not torch.equal(csr.perm.sort().values, ids):
        raise ValueError("the edge permutation of the graph is no permutation of its edges")
    rows = csr.rows()
    if bool(((csr.perm[1:] < csr.perm[:-1]) & (rows[1:] == rows[:-1])).any()):
        raise ValueError("the edge permutation of the graph does not keep the order of edges within a row")


def _unpickle(rowptr: Tensor, col: Tensor, perm: Tensor | None, num_src: int, weight: Tensor | None) -> Graph:
    return Graph._make(Core(Csr(rowptr, col, perm, num_src)), weight=weight)


def _sizes(num_nodes: int | tuple[int, int]) -> tuple[int, int]:
    pair = tuple(num_nodes) if isinstance(num_nodes, (tuple, list)) else (num_nodes, num_nodes)
    try:
        if len(pair) != 2 or any(isinstance(n, bool) for n in pair):
            raise TypeError
        src, dst = (operator.index(n) for n in pair)
    except TypeError:
        raise ValueError(f"num_nodes must be an int or a pair (num_src, num_dst) of ints, got {num_nodes!r}") from None
    if min(src, dst) < 0:
        raise ValueError(f"num_nodes must not be negative, got {num_nodes}")
    if max(src, dst) > _MAX_NODES:
        raise ValueError(
            f"num_nodes must be at most 2**48, got {num_nodes} (one more than the largest id, where it was not given)"
        )
    return src, dst


def check_weight(graph: Graph, weight: Tensor) -> None:
    """Raises TypeError or ValueError unless `weight` is ``[E]`` or ``[E, H]``, floating, on the graph's device."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight must be a torch.Tensor, got {type(weight).__name__}")
    if weight.dtype not in _native.DTYPES:
        advice = "use its real and imaginary parts" if weight.is_complex() else "convert it with .float()"
        raise TypeError(
            f"weight must be floating point (float32, float64, float16 or bfloat16), got {weight.dtype}; {advice}"
        )
    if weight.layout != torch.strided:
        raise TypeError(f"weight must be a dense tensor, got layout {weight.layout}; convert it with .to_dense()")
    if weight.dim() not in (1, 2) or weight.shape[0] != graph.num_edges:
        raise ValueError(
            f"weight must have shape [num_edges] or [num_edges, heads] with num_edges = {graph.num_edges}, got "
            f"{list(weight.shape)}"
        )
    if weight.device != graph.device:
        raise ValueError(f"weight is on {weight.device} but the graph on {graph.device}; move one of them")


__all__ = ["Graph"]
