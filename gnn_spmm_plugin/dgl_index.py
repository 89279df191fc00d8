"""DGL's graph indices as graphs of ours, made once and kept with them. DGL itself is not needed to import this.

A `DGLGraph` holds an immutable *graph index*, and replaces it when nodes or edges are added or removed. Each index has
a dict, ``_cache``, that DGL makes and does not use; what is made here hangs there, and goes with the index.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ._native import accumulation_dtype
from .csr import Core, Csr
from .graph import Graph

_RELATION = "gnn_spmm_plugin relation"  # the Relation of an index; on another device than the CPU, (this, device)
_HOLDER = "gnn_spmm_plugin"  # (what it shares with its reverse, whether it is the reverse)


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    """What is made in here is kept, and whoever comes next may want gradients."""
    with torch.no_grad(), torch.inference_mode(False):
        yield


class Relation:
    """One relation of a DGLGraph as the operators take it.

    Attributes:
        graph: sources to destinations; edge ids are DGL's, edges into one node in the order of DGL's CSC, whose first
            is the one that DGL lets win a maximum.
    """

    __slots__ = ("_edges", "_empty", "_ends", "_leaving", "_scales", "graph")

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._edges: Graph | None = None
        self._leaving: Graph | None = None
        self._empty: Tensor | bool | None = False
        self._ends: list[Tensor | None] = [None, None]
        self._scales: dict[tuple[bool, float, torch.dtype], Tensor] = {}

    @property
    def edges(self) -> Graph:
        """Edges to their destinations: aggregating over it reduces what belongs to edges."""
        if self._edges is None:
            self._edges = _incidence(self.graph._csr)
        return self._edges

    @property
    def leaving(self) -> Graph:
        """Edges to their sources."""
        if self._leaving is None:
            self._leaving = _incidence(self.graph._csr_t)
        return self._leaving

    @property
    def empty(self) -> Tensor | None:
        """``[k]`` int64 destinations without edges; None where there is none, and in a graph without edges."""
        if isinstance(self._empty, bool):
            with _plain():
                found = (self.graph._csr.degree() == 0).nonzero().flatten() if self.graph.num_edges else None
            self._empty = None if found is None or found.numel() == 0 else found
        return self._empty

    def to(self, device: torch.device) -> Relation:
        """The same on another device."""
        with _plain():
            other = Relation(self.graph.to(device))
            empty = self.empty  # asked of this one: no wait over there
            other._empty = None if empty is None else empty.to(device)
        return other

    def scale(self, destinations: bool, power: float, dtype: torch.dtype) -> Tensor:
        """``[N]`` numbers of edges into the destinations, or out of the sources, at least 1, to the power of `power`.

        In the dtype that features of `dtype` are accumulated in.
        """
        dtype = accumulation_dtype(dtype)
        key = destinations, power, dtype
        found = self._scales.get(key)
        if found is None:
            with _plain():
                degree = (self.graph._csr if destinations else self.graph._csr_t).degree()
                found = self._scales[key] = degree.clamp(min=1).to(dtype).pow(power)
        return found

    def ends(self, destinations: bool) -> Tensor:
        """``[E]`` source or destination of each edge, by edge id."""
        found = self._ends[destinations]
        if found is None:
            csr = self.graph._csr
            with _plain():
                found = csr.in_caller_order(csr.rows() if destinations else csr.col)
            self._ends[destinations] = found
        return found


def _incidence(csr: Csr) -> Graph:
    """The graph with an edge from each edge of `csr`, under its id, to its row."""
    num_edges, ids = csr.col.shape[0], csr.perm
    if ids is None:
        with _plain():
            ids = torch.arange(num_edges, dtype=csr.col.dtype, device=csr.col.device)
    return Graph._make(Core(Csr(csr.rowptr, ids, csr.perm, num_edges)))


class _Holder:
    """What an index and its reverse share: their relations on each device, by (device, whether it is the reverse)."""

    __slots__ = ("relations",)

    def __init__(self) -> None:
        self.relations: dict[tuple[torch.device, bool], Relation] = {}


_CPU = torch.device("cpu")


def relation_of(gidx: Any, device: torch.device = _CPU) -> Relation | None:
    """The relation of an index with one edge type, on `device`; None where there are several.

    Raises:
        IndexError or ValueError: the arrays that DGL was given do not describe a graph.
    """
    cache, key = gidx._cache, _RELATION if device == _CPU else (_RELATION, device)
    known: Relation | None = cache.get(key)
    if known is not None:
        return known
    if device.index is None and device.type == "cuda":
        device = torch.empty(0, device=device).device
    if gidx.number_of_etypes() != 1:
        return None
    holder, reverse = _held(gidx)
    relation = holder.relations.get((device, reverse))
    if relation is None:
        relation = holder.relations[device, reverse] = _make(holder, gidx, device, reverse)
    cache[key] = relation
    return relation


def is_dgl(value: Any) -> bool:
    """Whether `value` is a DGLGraph."""
    return all(hasattr(value, name) for name in ("_graph", "canonical_etypes", "to_canonical_etype"))


def graph_of_dgl(g: Any) -> Graph:
    """The graph of a DGLGraph with one relation, on its device; the same object at each call.

    Raises:
        ValueError: there are several relations.
    """
    relation = relation_of(g._graph, g.device)
    if relation is None:
        raise ValueError(f"the graph has the relations {g.canonical_etypes}; pass one of them, g[etype]")
    return relation.graph


def _held(gidx: Any) -> tuple[_Holder, bool]:
    found: tuple[_Holder, bool] | None = gidx._cache.get(_HOLDER)
    if found is None:
        found = gidx._cache[_HOLDER] = _Holder(), False
    return found


def share(gidx: Any, other: Any, reverse: bool) -> None:
    """Lets `other`, the same relation as `gidx` or its reverse, have what is made for `gidx`."""
    holder, flipped = _held(gidx)
    other._cache[_HOLDER] = holder, flipped != reverse


def _make(holder: _Holder, gidx: Any, device: torch.device, reverse: bool) -> Relation:
    other = holder.relations.get((device, not reverse))
    if other is not None:
        return Relation(other.graph.T)
    for (_, flipped), known in list(holder.relations.items()):  # on another device
        moved = known.to(device)
        if flipped == reverse:
            return moved
        holder.relations[device, flipped] = moved
        return Relation(moved.graph.T)
    built = Relation(_build(gidx))
    if built.graph.device == device:
        return built
    holder.relations[built.graph.device, reverse] = built
    return built.to(device)


def _build(gidx: Any) -> Graph:
    with _plain():
        formats = gidx.formats()
        allowed = formats["created"] + formats["not created"]
        if "csc" in allowed:
            _, num_src, rowptr, col, ids = gidx.adjacency_matrix_tensors(0, True, "csr")
            return _of_csc(rowptr, col, ids, num_src)
        if "coo" not in allowed:
            _, num_dst, rowptr, col, ids = gidx.adjacency_matrix_tensors(0, False, "csr")
            return _of_csc(rowptr, col, ids, num_dst).T
        src, dst, _ = gidx.edges(0, "eid")
        source, destination = gidx.metagraph.find_edge(0)
        return Graph._from_pair(dst, src, gidx.num_nodes(destination), gidx.num_nodes(source))


def _of_csc(rowptr: Tensor, col: Tensor, ids: Tensor, num_src: int) -> Graph:
    """A graph from DGL's CSC arrays, which it does not check when a user makes a graph of them."""
    csr = Graph.from_csr(rowptr, col, num_src)._csr
    if ids.numel() == 0:  # the identity
        return Graph._make(Core(csr))
    valid = torch.zeros(col.shape[0], dtype=torch.bool, device=col.device)
    if ids.shape == col.shape and int(ids.min()) >= 0:
        with contextlib.suppress(IndexError, RuntimeError):
            valid.index_fill_(0, ids.long(), True)
    if not bool(valid.all()):
        raise ValueError(f"the edge ids of the DGLGraph are no permutation of its {col.shape[0]} edges")
    own = ids.to(csr.col.dtype)
    ordered = bool((own[1:] > own[:-1]).all())
    return Graph._make(Core(Csr(csr.rowptr, csr.col, None if ordered else own, num_src)))


__all__ = ["Relation", "graph_of_dgl", "is_dgl", "relation_of", "share"]
