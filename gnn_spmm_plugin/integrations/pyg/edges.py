"""Messages that add what belongs to the edge, as those of GINE and GEN: ``relu(x_j + edge_attr)``."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...functional_messages import sum_messages
from ...graph import Graph
from .lazy import PLAIN, LazyMessage, Pending, constant, wrap

_RELUS = (Tensor.relu, torch.relu, F.relu)


class EdgeSum(Pending):
    """``src`` gathered, plus a row of features for each edge, then perhaps a ReLU, a number, and factors.

    Attributes:
        edge: ``[E, F]``.
        relu: whether there is a ReLU.
        shift: the number that is added then.
    """

    __slots__ = ("edge", "relu", "shift")

    def __init__(
        self, base: Pending, src: Tensor, edge: Tensor, relu: bool, shift: float, factors: tuple[Tensor, ...]
    ) -> None:
        self.edge, self.relu, self.shift = edge, relu, shift
        super().__init__(src, base.index, base.dim, base.gather, base.record, base.tally, base.linked, factors)
        self.dtype = torch.promote_types(self.dtype, edge.dtype)

    @staticmethod
    def of(p: Pending, edge: Any) -> Any:
        """`p` plus `edge`; NotImplemented unless that has a row for each message."""
        if type(edge) not in PLAIN or edge.shape != p.shape or edge.dim() != 2 or p.dim != 0:
            return NotImplemented
        if edge.device != p.src.device or edge.layout != torch.strided or not edge.is_floating_point():
            return NotImplemented
        made = EdgeSum(p, p.src, edge, False, 0.0, ())
        return wrap(made if torch.is_grad_enabled() else made.constant())

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Features, edge features, factors."""
        return (self.src, self.edge, *self.factors)

    def named(self) -> tuple[str, ...]:
        """As of `parts`."""
        first, *rest = super().named()
        return (first, "edge features", *rest)

    def recipe(self) -> Callable[..., Tensor]:
        """As of `parts`."""
        return functools.partial(_rows, self.gather, self.index, self.dim, self.relu, self.shift)

    def like(self, src: Tensor, factors: tuple[Tensor, ...]) -> Pending:
        """The same sum with other features and factors."""
        return EdgeSum(self, src, self.edge, self.relu, self.shift, factors)

    def constant(self) -> Pending:
        """The same sum without gradient."""
        if not self.requires_grad:
            return self
        factors = tuple(map(constant, self.factors))
        return EdgeSum(self, constant(self.src), constant(self.edge), self.relu, self.shift, factors)

    def per_node(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
        """Only a ReLU: nothing else of a sum can be known from the nodes."""
        if function not in _RELUS or args or any(kwargs.values()) or self.relu or self.factors:
            return NotImplemented
        self.check()
        return self._changed(relu=True)

    def plus(self, term: Any) -> Any:
        """A number after the ReLU."""
        if not isinstance(term, numbers.Real) or not self.relu or self.factors or not math.isfinite(term):
            return NotImplemented
        return self._changed(shift=self.shift + float(term))

    def squared(self) -> Any:
        """A square of sums is no sum."""
        return NotImplemented

    def _changed(self, relu: bool = True, shift: float = 0.0) -> LazyMessage:
        made = EdgeSum(self, self.src, self.edge, relu, shift, self.factors)
        return wrap(made if torch.is_grad_enabled() else made.constant())

    def operation(self, reduce: str) -> str:
        """What `report` calls it."""
        return f"{reduce} of {'relu(x + e)' if self.relu else 'x + e'}"

    def aggregated(self, graph: Graph, reduce: str, tie: str, policy: str) -> Tensor | None:
        """As `Pending.aggregated`, for sums and means."""
        weight = self.weight()
        if reduce not in ("sum", "mean") or (weight is not None and weight.dim() != 1):
            return None
        if weight is not None and weight.dtype != self.dtype:
            weight = weight.to(self.dtype)
        x, e = self.src.to(self.dtype), self.edge.to(self.dtype)
        return sum_messages(graph, x, e, weight, reduce, relu=self.relu, shift=self.shift, policy=policy)


def _rows(
    gather: Callable[[Tensor, Tensor, int], Tensor],
    index: Tensor,
    dim: int,
    relu: bool,
    shift: float,
    src: Tensor,
    edge: Tensor,
    *factors: Tensor,
) -> Tensor:
    rows = gather(src, index, dim) + edge
    if relu:
        rows = rows.relu()
    if shift:
        rows = rows + shift
    for factor in factors:
        rows = rows * factor
    return rows
