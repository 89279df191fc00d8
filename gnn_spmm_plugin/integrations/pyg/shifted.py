"""Messages that add what belongs to the destination: ``a_i + x_j``, as a linear layer of both ends makes them.

What all messages into a node share moves their sum, mean, maximum and minimum by as much, and their variance not at
all. So these are reduced as ``x_j`` alone, and moved afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...derivatives import SCATTER_TIE
from ...graph import Graph
from .lazy import LazyMessage, Pending, constant, wrap
from .records import record_of


class Alike(Pending):
    """The messages without what is added to all of a node: a maximum of theirs that is 0 is a value as any other."""

    __slots__ = ()

    def aggregated(self, graph: Graph, reduce: str, tie: str, policy: str) -> Tensor | None:
        """As `Pending.aggregated`."""
        return super().aggregated(graph, reduce, "split" if tie == SCATTER_TIE else tie, policy)


class Shifted(Pending):
    """``src`` gathered, plus a row of features of the destination.

    Attributes:
        own: ``[num_dst, F]``.
        to: ``[E]`` the destination of each message.
    """

    __slots__ = ("alike", "own", "to")

    def __init__(self, alike: Alike, own: Tensor, to: Tensor) -> None:
        self.alike, self.own, self.to = alike, own, to
        super().__init__(alike.src, alike.index, 0, alike.gather, alike.record, alike.tally, False)

    @staticmethod
    def messages(layer: Any, x: Tensor, own: Tensor, source: Tensor, to: Tensor) -> LazyMessage:
        """``own[to] + x[source]``, of a layer that is all PyG's own.

        Args:
            layer: whose record they go to.
            x: ``[num_src, F]``.
            own: ``[num_dst, F]`` of the same dtype.
            source: ``[E]``, as `to`.
            to: ``[E]``, within range.
        """
        record = record_of(layer)
        alike = Alike(x, source, 0, _select, record, record.gathers_of(x.shape, 0), False)
        made = Shifted(alike, own, to)
        return wrap(made if torch.is_grad_enabled() else made.constant())

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Features of both ends."""
        return (self.src, self.own)

    def named(self) -> tuple[str, ...]:
        """As of `parts`."""
        return ("the features", "the features")

    def recipe(self) -> Callable[..., Tensor]:
        """As of `parts`."""
        return functools.partial(_rows, self.index, self.to)

    def constant(self) -> Pending:
        """The same messages without gradient."""
        if not self.requires_grad:
            return self
        alike = Alike(constant(self.src), self.index, 0, self.gather, self.record, self.tally, False)
        return Shifted(alike, constant(self.own), self.to)

    def derive(self, src: Tensor | None = None, *more: Tensor) -> Any:
        """Nothing else is made of these before they are written."""
        return NotImplemented

    def per_node(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
        """As `derive`."""
        return NotImplemented

    def squared(self) -> Any:
        """As `derive`."""
        return NotImplemented

    def plus(self, term: Any) -> Any:
        """As `derive`."""
        return NotImplemented

    def moved(self, out: Tensor, reduce: str, graph: Graph) -> Tensor:
        """`out`, which `alike` was reduced to, as these are."""
        degree = graph._csr.degree()
        count = degree if reduce == "sum" else degree.clamp(max=1)
        return torch.addcmul(out, count.to(out.dtype).unsqueeze(1), self.own)

    def aggregated(self, graph: Graph, reduce: str, tie: str, policy: str) -> Tensor | None:
        """As `Pending.aggregated`."""
        out = self.alike.aggregated(graph, reduce, tie, policy)
        return None if out is None else self.moved(out, reduce, graph)


def _select(src: Tensor, index: Tensor, dim: int) -> Tensor:
    return src.index_select(dim, index)


def _rows(index: Tensor, to: Tensor, src: Tensor, own: Tensor) -> Tensor:
    return src.index_select(0, index) + own.index_select(0, to)
