"""What is measured: a graph with its weights, a product on it, and whether a result is right."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..graph import Graph
from ..kernels import dtype_name
from .graphs import Csr

#: Largest ``||out - exact|| / ||exact||`` that is still timed.
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-13, torch.float16: 1e-3, torch.bfloat16: 8e-3}
_BLOCK_BYTES = 2 << 30  # of float64 messages at a time


class Subject:
    """A graph on a device, and what every product with it shares. All of it is seeded.

    Attributes:
        name: what the CSV calls it.
        csr: the structure; rows are destinations, entries of a row adjacent.
        graph: the same as a `Graph`, edges in row order.
    """

    def __init__(self, name: str, csr: Csr) -> None:
        self.name, self.csr = name, csr
        self.device = csr.col.device
        self.num_nodes, self.num_edges = csr.num_nodes, csr.col.numel()
        self.graph = Graph.from_csr(csr.rowptr, csr.col, csr.num_nodes)

    def _random(self, *shape: int, seed: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.rand(shape, generator=generator, device=self.device)

    @cached_property
    def weight(self) -> Tensor:
        """Float32 weights in row order, away from 0."""
        return self._random(self.num_edges, seed=1) + 0.5

    @cached_property
    def edge_index(self) -> Tensor:
        """``[2, E]`` int64, sorted by destination."""
        return self.csr.edge_index()

    @cached_property
    def shuffle(self) -> Tensor:
        """A random order of the edges."""
        return torch.randperm(self.num_edges, generator=torch.Generator(self.device).manual_seed(2), device=self.device)

    @cached_property
    def shuffled_graph(self) -> Graph:
        """The same graph from an edge list in that order."""
        return Graph.from_edge_index(self.edge_index[:, self.shuffle], self.num_nodes)

    @cached_property
    def degree(self) -> Tensor:
        """Entries of each row, int64."""
        return (self.csr.rowptr[1:] - self.csr.rowptr[:-1]).long()

    @cached_property
    def scale(self) -> Tensor:
        """``1 / sqrt(degree)``, 0 where there is none: GCN's normalisation."""
        return self.degree.double().rsqrt().masked_fill_(self.degree == 0, 0)

    @cached_property
    def num_sources(self) -> int:
        """Nodes that some edge comes from."""
        used = torch.zeros(self.num_nodes, dtype=torch.bool, device=self.device)
        used[self.csr.col.long()] = True
        return int(used.sum())

    @cached_property
    def scheduled(self) -> tuple[Tensor, Tensor]:
        """Positions of the entries, and the columns (int32), in the order in which scheduled rows are swept."""
        assert self.csr.order is not None
        rows = self.csr.order.long()
        degree = self.degree[rows]
        starts = degree.cumsum(0) - degree
        shift = self.csr.rowptr[:-1].long()[rows] - starts
        position = torch.arange(self.num_edges, device=self.device)
        position += shift.repeat_interleave(degree, output_size=self.num_edges)
        return position, self.csr.col[position].contiguous()

    def random_features(self, width: int, dtype: torch.dtype) -> Tensor:
        """``[N, width]``, in (-1, 1)."""
        return (self._random(self.num_nodes, width, seed=3) * 2 - 1).to(dtype)


@dataclass(frozen=True)
class Configuration:
    """The product that contenders of one measurement compute; the first columns of the CSV."""

    graph: str
    order: str  # a schedule by name; schedule: that of the generator; auto: what a plan chooses
    width: int
    dtype: torch.dtype
    reduce: str
    weighted: bool

    def columns(self) -> dict[str, str]:
        """As the CSV writes it."""
        return {
            "graph": self.graph,
            "order": self.order,
            "width": str(self.width),
            "dtype": dtype_name(self.dtype),
            "reduce": self.reduce,
            "weighted": str(int(self.weighted)),
        }


class Problem:
    """One `Configuration` with its operands.

    Attributes:
        x: ``[N, width]``, what is aggregated.
        weight: ``[E]`` in row order and of `x`'s dtype, or None.
    """

    def __init__(self, subject: Subject, configuration: Configuration) -> None:
        self.subject, self.configuration = subject, configuration
        self.x = subject.random_features(configuration.width, configuration.dtype)
        self.weight = subject.weight.to(configuration.dtype) if configuration.weighted else None

    @cached_property
    def values(self) -> Tensor:
        """The weights, or ones, for those who know no unweighted matrix."""
        if self.weight is not None:
            return self.weight
        return torch.ones(self.subject.num_edges, dtype=self.configuration.dtype, device=self.subject.device)

    @cached_property
    def out(self) -> Tensor:
        """A place for the result of those who write into one."""
        return self.x.new_empty(self.subject.num_nodes, self.configuration.width)

    @cached_property
    def exact(self) -> Tensor:
        """The result in float64."""
        return exact(self.subject.csr, self.x, self.weight, self.configuration.reduce)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of features that the edges point at."""
        return self.subject.num_edges * self.x.shape[1] * self.x.element_size()

    @property
    def compulsory_bytes(self) -> int:
        """Bytes that must come from memory or go there: index, weights, each used row of features once, the result."""
        s, row = self.subject, self.x.shape[1] * self.x.element_size()
        per_edge = 4 + (self.x.element_size() if self.weight is not None else 0)
        return (s.num_nodes + 1) * 4 + s.num_edges * per_edge + (s.num_sources + s.num_nodes) * row


def exact(csr: Csr, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
    """The product in float64, ``[M, F]``: messages of some rows at a time, each row reduced by itself.

    Sums and means do not round their messages; max and min round them to `x`'s dtype, as `gnn_spmm_plugin.spmm` does.
    """
    wide = x.double()
    out = wide.new_zeros(csr.num_nodes, x.shape[1])
    rowptr = csr.rowptr.long()
    limit = max(_BLOCK_BYTES // (8 * max(x.shape[1], 1)), 1)
    edges = csr.col.numel()
    # Rows in which each multiple of `limit` edges falls: blocks end there, longer rows make longer blocks.
    marks = torch.arange(0, edges + 1, limit, device=rowptr.device)
    borders = torch.searchsorted(rowptr, marks, right=True).sub_(1).tolist()
    borders = sorted({0, *borders, csr.num_nodes})
    offsets = rowptr[torch.tensor(borders, device=rowptr.device)].tolist()
    for (first, last), (begin, end) in zip(itertools.pairwise(borders), itertools.pairwise(offsets), strict=True):
        if begin == end:
            continue
        message = wide[csr.col[begin:end].long()]
        if weight is not None:
            message *= weight[begin:end].double().unsqueeze(1)
            if reduce in ("max", "min"):
                message = message.to(x.dtype).double()
        local = rowptr[first : last + 1] - begin
        # "unsafe" leaves out checks that read back.
        out[first:last] = torch.segment_reduce(message, reduce, offsets=local, axis=0, unsafe=True)
    return out.masked_fill_((rowptr[1:] == rowptr[:-1]).unsqueeze(1), 0)


def relative_error(out: Tensor, wanted: Tensor) -> float:
    """``||out - wanted|| / ||wanted||``, a block of rows at a time; NaN where anything is NaN or the shapes differ."""
    if out.shape != wanted.shape:
        return float("nan")
    difference = norm = 0.0
    step = max(_BLOCK_BYTES // (8 * max(wanted.shape[1], 1)), 1)
    for a, b in zip(out.split(step), wanted.split(step), strict=True):
        difference += float((a.double() - b).square_().sum())
        norm += float(b.square().sum())
    if norm == 0:
        return 0.0 if difference == 0 else math.sqrt(difference)
    return math.sqrt(difference / norm)
