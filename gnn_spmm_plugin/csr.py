"""`Csr`: one direction of a graph and what is prepared for it; `Core`: both directions; how they are built."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _native
from ._config import counters, verify_always

_INT32_MAX = 2**31 - 1


class KeptWeight:
    """A weight for each edge, in the order in which a kernel reads it; one at a time.

    It is made from one constant tensor, or two, once, and kept until these change or die; one that needs a gradient
    changes with every step, so nothing of it is kept. As for implicit graphs, what is kept is compared on the CPU,
    where writes through NumPy pass by the version counter, and on CUDA only under ``GSP_LOG=verify``.
    """

    __slots__ = ("_entry", "_given_up", "pinned")

    def __init__(self) -> None:
        # of what was given last: (weak reference, its state, a copy to compare it with) of each; what was made of it
        self._entry: tuple[tuple[tuple[weakref.ref[Tensor], Any, Tensor | None], ...], Tensor | None] | None = None
        self._given_up = False  # there is no room for a copy, or the values are not for it: it can be done without
        self.pinned: list[Tensor] = []  # read by a captured CUDA graph: never freed before the graph

    def permuted(self, weight: Tensor, index: Tensor) -> Tensor:
        """``weight[index]``; `index` is always the same."""
        if torch.compiler.is_compiling():
            return weight.index_select(0, index)
        return self.made(lambda: per_edge_rows(weight, index), weight)

    def made(self, make: Callable[[], Tensor], *given: Tensor) -> Tensor:
        """``make()`` of what is `given`, alone or together with what never changes."""
        if torch.compiler.is_compiling():
            return make()
        _, kept = self._find(given)
        if kept is None:
            counters["weight_permutes"] += 1
            kept = make()
            self._keep(given, kept)
        return kept

    def recurring(self, make: Callable[[], Tensor | None], *given: Tensor) -> Tensor | None:
        """``make()``, from the second time in a row that it is `given`; None before: it may change with every call."""
        if torch.compiler.is_compiling() or self._given_up:
            return None
        known, kept = self._find(given)
        if kept is None and not capturing(given[0].device):
            if known:
                try:
                    kept = make()
                except torch.OutOfMemoryError:
                    pass
                self._given_up = kept is None
                counters["scale_gathers"] += kept is not None
            self._keep(given, kept)
        return kept

    def release(self) -> None:
        """Lets go of what is kept, but for what a CUDA graph reads."""
        self._entry = None

    def _find(self, given: tuple[Tensor, ...]) -> tuple[bool, Tensor | None]:
        """Whether it is what was given last, as it was then, and what was made of it, if anything."""
        if self._entry is None or len(self._entry[0]) != len(given):
            return False, None
        then, kept = self._entry
        in_capture = capturing(given[0].device)
        for t, (ref, before, original) in zip(given, then, strict=True):
            if ref() is not t or not is_cacheable(t) or before != state(t):
                return False, None
            compare = not t.is_cuda or (verify_always() and not in_capture)
            if compare and (original is None or not unchanged(original, t)):
                return False, None
        if in_capture and kept is not None:
            self.pinned.append(kept)
        return True, kept

    def _keep(self, given: tuple[Tensor, ...], kept: Tensor | None) -> None:
        # what a capture allocates belongs to its CUDA graph
        if all(map(is_cacheable, given)) and not capturing(given[0].device):
            compare = not given[0].is_cuda or verify_always()
            self._entry = tuple((weakref.ref(t), state(t), t.clone() if compare else None) for t in given), kept


def per_edge_rows(t: Tensor, index: Tensor) -> Tensor:
    """``t[index]`` of the few numbers that an edge has, ``[E]`` or ``[E, H]``.

    On CUDA torch gives each row a block of threads, however short it is: of 2 million edges with four float32, 1.3 ms.
    """
    if t.dim() == 2 and t.is_cuda and not torch.compiler.is_compiling():
        return _rows_by_words(t, index)
    return t.index_select(0, index)


def _rows_by_words(t: Tensor, index: Tensor) -> Tensor:
    """``t[index]`` of a matrix, 16 or 8 bytes at a time, which are one (complex) number each."""
    bytes_a_row = t.shape[1] * t.element_size()
    word, size = (torch.complex64, 8) if bytes_a_row == 8 else (torch.complex128, 16)
    fits = t.is_contiguous() and t.storage_offset() * t.element_size() % size == 0
    if not fits or not bytes_a_row or bytes_a_row % size or bytes_a_row > 64:
        return t.index_select(0, index)
    words = [w.index_select(0, index) for w in t.view(word).unbind(1)]
    return (words[0].unsqueeze(1) if len(words) == 1 else torch.stack(words, 1)).view(t.dtype)


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
        # (dst, src) in the caller's order, copies of our own: what the transpose is made from, and then let go. Where
        # they were sorted, a GPU makes them again when they are asked for: they are as long as the edges.
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
            with torch.inference_mode(False):  # whoever comes next may want gradients
                cached = _native.inverse_degree(self.rowptr, dtype)
            if not capturing(self.col.device):  # what a capture computes is there only after a replay
                self._inverse_degree[dtype] = cached
        return cached

    def rows(self) -> Tensor:
        """The row of each entry, ``[E]`` of the index dtype, in row order."""
        return torch.repeat_interleave(self.degree(), output_size=self.col.shape[0])

    def in_row_order(self, weight: Tensor) -> Tensor:
        """`weight` ([E] or [E, H], caller's order) in row order; of a constant weight it is kept."""
        if self.perm is None:
            return weight.contiguous()
        return self._weights.permuted(weight, self.perm)

    def scale_in_row_order(self, src_scale: Tensor, dst_scale: Tensor | None = None) -> Tensor | None:
        """`src_scale` ([num_cols]) of each entry's column times `dst_scale` ([num_rows]) of its row, in row order.

        None unless they seem to be constant.
        """
        if dst_scale is None:
            return self._scales.recurring(lambda: src_scale.index_select(0, self.col), src_scale)

        def make() -> Tensor | None:
            if not _products_fit(src_scale, dst_scale):
                return None
            of_rows = torch.repeat_interleave(dst_scale, self.degree(), output_size=self.col.shape[0])
            return of_rows.mul_(src_scale.index_select(0, self.col))

        return self._scales.recurring(make, src_scale, dst_scale)

    def pin(self, *tensors: Tensor | None) -> None:
        """Keeps what a captured CUDA graph reads for as long as this lives."""
        self._weights.pinned.extend(t for t in tensors if t is not None)

    def release(self) -> None:
        """Frees weights and scales in row order: from now on they are wanted in another."""
        self._weights.release()
        self._scales.release()

    def in_caller_order(self, per_edge: Tensor) -> Tensor:
        """The inverse of `in_row_order`, for any per-edge tensor."""
        if self.perm is None:
            return per_edge
        return torch.empty_like(per_edge).index_copy(0, self.perm.long(), per_edge)

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


def _products_fit(a: Tensor, b: Tensor) -> bool:
    """Whether no product of the two vectors overflows or is rounded to 0; waits for the device."""
    if a.numel() == 0 or b.numel() == 0:
        return True
    info = torch.finfo(a.dtype)
    a, b = a.abs().double(), b.abs().double()
    least = torch.where(a > 0, a, 1).amin() * torch.where(b > 0, b, 1).amin()
    return bool((least >= info.tiny) & (a.amax() * b.amax() <= info.max))


def is_cacheable(t: Tensor) -> bool:
    """Whether another value of `t` would show, and no vmap or other transform stands between it and its memory."""
    functorch = torch._C._functorch
    wrapped = functorch.is_functorch_wrapped_tensor(t) or functorch.is_legacy_batchedtensor(t)
    return not (t.requires_grad or t.is_inference() or wrapped)


def state(t: Tensor) -> Any:
    """What another value of the same tensor object shows in: its version and, where ``.data`` was exchanged, the rest.

    ``module.double()`` exchanges the ``.data`` of a parameter, which its version does not tell.
    """
    return t._version, t.dtype, t.shape, t.stride(), t.data_ptr()


def unchanged(kept: Tensor, now: Tensor) -> bool:
    """Exact comparison of two tensors of one shape; on CUDA one read back."""
    if now.device.type != "cpu":
        return bool((kept == now).all())
    # NumPy, in one thread: torch compares int64 with int32 by copies, and spends more on waking threads than on this.
    a, b = kept.detach().resolve_neg(), now.detach().resolve_neg()
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


def _from_coo(dst: Tensor, src: Tensor, num_dst: int, num_src: int, both: bool = False) -> Core:
    """The graph of an edge list; waits for the device once, and sorts only what is not sorted.

    If `both`, with its transpose where that is so small that the host decides how long it takes.
    """
    _refuse_capture("gnn_spmm_plugin would have to build a graph")
    _native.require(dst.device)
    if dst.is_meta:
        raise ValueError("no graph can be made of edges on the meta device, where they have no values; move them first")
    if dst.dtype != src.dtype:
        dst, src = dst.long(), src.long()
    wide = _index_dtype(num_dst, num_src, dst.shape[0]) == torch.int64
    made = _native.from_coo(dst, src, num_dst, num_src, wide, both)
    bad, own_dst, own_src, rowptr, col, perm, *transposed = made
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
    if perm is not None or not own_dst.is_cuda:
        csr.coo = own_dst, own_src
    core = Core(csr)
    if transposed[0] is not None:
        counters["transposes_built"] += 1
        rowptr, col, perm = transposed
        core.transpose = Csr(rowptr, col, perm, num_dst)
    return core
