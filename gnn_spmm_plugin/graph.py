"""`Graph`: an immutable adjacency, kept as CSR by destination and, on demand, by source.

The class follows one convention: rows are destinations, so ``g @ x`` is ``A @ x``. Every entry point that
knows another convention (PyG's ``flow``, DGL's edge direction) converts at the door.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _native
from ._config import counters, verify_always

_INT32_MAX = 2**31 - 1
_MAX_NODES = 2**48  # what an address can reach; beyond it, sizes in bytes overflow
_INDEX_DTYPES = (torch.int32, torch.int64)


class KeptWeight:
    """A weight for each edge, in the order in which a kernel reads it; one at a time.

    It is gathered from a constant tensor once, and kept until that changes or dies; one that needs a gradient changes
    with every step, so nothing of it is kept. As for implicit graphs, what is kept is compared on the CPU, where writes
    through NumPy pass by the version counter, and on CUDA only under ``GSP_LOG=verify``.
    """

    __slots__ = ("_entry", "_no_room", "pinned")

    def __init__(self) -> None:
        # (weak reference to what was given last, its state, what was gathered from it, a copy to compare it with)
        self._entry: tuple[weakref.ref[Tensor], Any, Tensor | None, Tensor | None] | None = None
        self._no_room = False  # for a copy that can be done without
        self.pinned: list[Tensor] = []  # read by a captured CUDA graph: never freed before the graph

    def permuted(self, weight: Tensor, index: Tensor) -> Tensor:
        """``weight[index]``; `index` is always the same."""
        if torch.compiler.is_compiling():
            return weight.index_select(0, index)
        _, kept = self._find(weight)
        if kept is None:
            counters["weight_permutes"] += 1
            kept = weight.index_select(0, index)
            self._keep(weight, kept)
        return kept

    def recurring(self, scale: Tensor, index: Tensor) -> Tensor | None:
        """``scale[index]``, from the second time in a row on; None before: it may change with every call."""
        if torch.compiler.is_compiling() or self._no_room:
            return None
        known, kept = self._find(scale)
        if kept is None and not capturing(scale.device):
            if known:
                try:
                    kept = scale.index_select(0, index)
                    counters["scale_gathers"] += 1
                except torch.OutOfMemoryError:
                    self._no_room = True
            self._keep(scale, kept)
        return kept

    def _find(self, t: Tensor) -> tuple[bool, Tensor | None]:
        """Whether `t` is what was given last, as it was then, and what was gathered from it, if anything."""
        if self._entry is None:
            return False, None
        ref, then, kept, original = self._entry
        if ref() is not t or not _is_cacheable(t) or then != state(t):
            return False, None
        in_capture = capturing(t.device)
        compare = not t.is_cuda or (verify_always() and not in_capture)
        if compare and (original is None or not unchanged(original, t)):
            return False, None
        if in_capture and kept is not None:
            self.pinned.append(kept)
        return True, kept

    def _keep(self, t: Tensor, kept: Tensor | None) -> None:
        if _is_cacheable(t) and not capturing(t.device):  # what a capture allocates belongs to its CUDA graph
            compare = not t.is_cuda or verify_always()
            self._entry = weakref.ref(t), state(t), kept, t.clone() if compare else None


class Csr:
    """One direction of a graph, and everything that was prepared for it.

    Attributes:
        rowptr: ``[num_rows + 1]`` offsets into `col`.
        col: ``[E]`` column of each entry, row by row.
        perm: ``[E]`` position in `col` -> the caller's edge id; None where that is the identity.
        plan, plans, uses: plans made for this direction, filled by `gnn_spmm_plugin.plan`.

    All three share one index dtype: int32 where rows, columns and edges fit, else int64.
    """

    __slots__ = (
        "__weakref__",
        "_inverse_degree",
        "_scales",
        "_weights",
        "col",
        "coo",
        "num_cols",
        "num_rows",
        "perm",
        "plan",
        "plans",
        "rowptr",
        "uses",
    )

    def __init__(self, rowptr: Tensor, col: Tensor, perm: Tensor | None, num_cols: int) -> None:
        self.rowptr, self.col, self.perm = rowptr, col, perm
        self.num_rows, self.num_cols = rowptr.shape[0] - 1, num_cols
        # (dst, src) in the caller's order, copies of our own: what the transpose is made from, and then let go
        self.coo: tuple[Tensor, Tensor] | None = None
        self.plan: Any = None  # the plan of calls that ask for nothing special
        self.plans: dict[Any, Any] = {}  # the others, by what was asked for
        self.uses = 0  # calls so far, until the default plan is upgraded
        self._inverse_degree: dict[torch.dtype, Tensor] = {}
        self._scales = KeptWeight()
        self._weights = KeptWeight()

    def degree(self) -> Tensor:
        """Number of entries of each row, ``[num_rows]`` of the index dtype."""
        return self.rowptr[1:] - self.rowptr[:-1]

    def inverse_degree(self, dtype: torch.dtype) -> Tensor:
        """``1 / max(degree, 1)`` in `dtype`, ``[num_rows]``, computed once."""
        cached = self._inverse_degree.get(dtype)
        if cached is None:
            cached = self.degree().clamp(min=1).to(dtype).reciprocal()
            if not capturing(self.col.device):  # what a capture computes is there only after a replay
                self._inverse_degree[dtype] = cached
        return cached

    def rows(self) -> Tensor:
        """The row of each entry, ``[E]`` of the index dtype, in row order."""
        ids = torch.arange(self.num_rows, dtype=self.rowptr.dtype, device=self.rowptr.device)
        return ids.repeat_interleave(self.degree(), output_size=self.col.shape[0])

    def in_row_order(self, weight: Tensor) -> Tensor:
        """`weight` ([E] or [E, H], caller's order) in row order; of a constant weight it is kept."""
        if self.perm is None:
            return weight.contiguous()
        return self._weights.permuted(weight, self.perm)

    def scale_in_row_order(self, scale: Tensor) -> Tensor | None:
        """`scale` ([num_cols]) of each entry's column, in row order; None unless it seems to be constant."""
        return self._scales.recurring(scale, self.col)

    def pin(self, *tensors: Tensor | None) -> None:
        """Keeps what a captured CUDA graph reads for as long as this lives."""
        self._weights.pinned.extend(t for t in tensors if t is not None)

    def in_caller_order(self, per_edge: Tensor) -> Tensor:
        """The inverse of `in_row_order`, for any per-edge tensor."""
        if self.perm is None:
            return per_edge
        return torch.empty_like(per_edge).index_copy_(0, self.perm.long(), per_edge)

    def arrays(self) -> list[Tensor]:
        """The tensors that describe this direction."""
        return [t for t in (self.rowptr, self.col, self.perm) if t is not None]


class Derived:
    """What was computed from a graph's structure and is kept for as long as it lives, as attributes.

    Not a dict: torch.compile remembers the keys of a dict from its first look.
    """

    def get(self, name: str) -> Any:
        """The attribute called `name`, or None."""
        return getattr(self, name, None)


class Core:
    """What a `Graph` and its transpose share. It holds no `Graph`, so reference counting frees it."""

    __slots__ = ("__weakref__", "csr", "derived", "device", "lock", "num_edges", "transpose", "warm")

    def __init__(self, csr: Csr) -> None:
        self.csr = csr
        self.transpose: Csr | None = None
        self.derived = Derived()
        self.warm = False  # whether a plan was prepared for one direction: the other's uses need not add up
        self.num_edges = csr.col.shape[0]
        self.device = csr.col.device
        self.lock = threading.Lock()

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def while_tracing(self, build: Callable[..., Any], *args: Any) -> Any:
        """``build(self, *args)``; where torch.compile traces this, run then and there, its result a constant.

        What compiled code reads is built by it. A method, since torch before 2.13 takes no object as an argument of
        such a function.
        """
        return build(self, *args)

    def half(self, flipped: bool) -> Csr:
        """The CSR of the graph as built, or of its transpose, which is made at the first call."""
        if not flipped:
            return self.csr
        if self.transpose is None:
            with self.lock:
                if self.transpose is None:
                    self.transpose = _transpose(self.csr)
                    self.csr.coo = None
        return self.transpose


def _is_cacheable(t: Tensor) -> bool:
    """Whether another value of `t` would show, and no vmap or other transform stands between it and its memory."""
    functorch = torch._C._functorch
    wrapped = functorch.is_functorch_wrapped_tensor(t) or functorch.is_legacy_batchedtensor(t)
    return not (t.requires_grad or t.is_inference() or wrapped)


def state(t: Tensor) -> Any:
    """What another value of the same tensor object shows in: its version and, where ``.data`` was exchanged, the rest.

    ``module.double()`` exchanges the ``.data`` of a parameter, which its version does not tell.
    """
    return t._version, t.dtype, t.shape, t.data_ptr()


def unchanged(kept: Tensor, now: Tensor) -> bool:
    """Exact comparison of two tensors of one shape; on CUDA one read back."""
    if now.device.type != "cpu":
        return bool((kept == now).all())
    # NumPy, in one thread: torch compares int64 with int32 by copies, and spends more on waking threads than on this.
    a, b = kept.detach(), now.detach()
    if a.dtype == b.dtype == torch.bfloat16:
        a, b = a.view(torch.int16), b.view(torch.int16)
    return bool((a.numpy() == b.numpy()).all())


def _index_dtype(*sizes: int) -> torch.dtype:
    return torch.int32 if max(sizes) <= _INT32_MAX else torch.int64


def capturing(device: torch.device) -> bool:
    """Whether the current stream records a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _refuse_capture(what: str) -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{what} during CUDA graph capture: run the model once before capture, or build a "
            "gnn_spmm_plugin.Graph outside and pass it"
        )


def _rowptr(ordered: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    return torch._convert_indices_from_coo_to_csr(ordered, num_rows, out_int32=dtype == torch.int32)


def _transpose(csr: Csr) -> Csr:
    _refuse_capture("gnn_spmm_plugin would have to build the transposed graph")
    counters["transposes_built"] += 1
    # By the edges in the caller's order, so that "the first edge" means the same in both directions.
    dst, src = csr.coo or (csr.in_caller_order(csr.rows()), csr.in_caller_order(csr.col))
    rowptr, col, perm = _native.transpose(dst, src, csr.num_cols)
    return Csr(rowptr, col, perm, csr.num_rows)


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


def _from_coo(dst: Tensor, src: Tensor, num_dst: int, num_src: int) -> Csr:
    """The CSR of an edge list; waits for the device once, and sorts only what is not sorted."""
    _refuse_capture("gnn_spmm_plugin would have to build a graph")
    _native.require(dst.device)
    if dst.is_meta:
        raise ValueError("no graph can be made of edges on the meta device, where they have no values; move them first")
    if dst.dtype != src.dtype:
        dst, src = dst.long(), src.long()
    wide = _index_dtype(num_dst, num_src, dst.shape[0]) == torch.int64
    bad, own_dst, own_src, rowptr, col, perm = _native.from_coo(dst, src, num_dst, num_src, wide)
    if bad >= 0:
        s, d = int(src[bad]), int(dst[bad])
        what, value, size = ("source", s, num_src) if not 0 <= s < num_src else ("destination", d, num_dst)
        raise IndexError(
            f"edge {bad} ({s} -> {d}) has {what} {value}, but there are {num_src} source and {num_dst} destination "
            f"nodes, so a {what} must lie in [0, {size - 1}]; pass num_nodes=, or correct the edge list"
        )
    counters["graphs_built"] += 1
    counters["sorts"] += perm is not None
    csr = Csr(rowptr, own_src if col is None else col, perm, num_src)
    csr.coo = own_dst, own_src
    return csr


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
        """A graph from a `torch_sparse.SparseTensor`; rows are destinations, as in ``adj_t @ x``."""
        if not all(hasattr(adj_t, name) for name in ("csr", "sparse_sizes")):
            raise TypeError(f"adj_t must be a torch_sparse.SparseTensor, got {type(adj_t).__name__}")
        rowptr, col, value = adj_t.csr()
        graph = cls.from_csr(rowptr, col, adj_t.sparse_size(1))
        return graph if value is None else graph.with_weight(value)

    @classmethod
    def from_scipy(cls, A: Any) -> Graph:
        """A graph from a scipy sparse matrix or array; rows are destinations, values become the weight.

        Integer and boolean values become float32.
        """
        if not all(hasattr(A, name) for name in ("tocoo", "shape", "nnz")):
            raise TypeError(f"A must be a scipy sparse matrix, got {type(A).__name__}")
        coo = A.tocoo()
        if len(coo.shape) != 2:
            raise ValueError(f"A must be 2-D, got shape {coo.shape}")
        dst, src = torch.from_numpy(coo.row.copy()), torch.from_numpy(coo.col.copy())
        graph = cls._from_pair(dst, src, *coo.shape)
        value = torch.from_numpy(coo.data.copy())
        return graph.with_weight(value if value.is_floating_point() else value.float())

    @classmethod
    def from_dgl(cls, g: Any, etype: Any = None) -> Graph:
        """A graph from a `DGLGraph` (one relation of it, where there are several); messages go src -> dst."""
        if not all(hasattr(g, name) for name in ("edges", "canonical_etypes", "to_canonical_etype")):
            raise TypeError(f"g must be a DGLGraph, got {type(g).__name__}")
        if etype is None and len(g.canonical_etypes) != 1:
            raise ValueError(f"the graph has the relations {g.canonical_etypes}; say which with etype=")
        canonical = g.to_canonical_etype(etype) if etype is not None else g.canonical_etypes[0]
        src, dst = g.edges(form="uv", order="eid", etype=canonical)
        return cls._from_pair(dst, src, g.num_nodes(canonical[2]), g.num_nodes(canonical[0]))

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
        """
        if weight is not None:
            check_weight(self, weight)
        return Graph._make(self._core, self._flipped, weight)

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
        """`gnn_spmm_plugin.spmm` on this graph, with its own weights."""
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
