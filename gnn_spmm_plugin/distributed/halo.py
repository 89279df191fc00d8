"""`Halo`: the rows of other ranks that a rank needs, how they come, and how their gradients go back."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._config import counters
from ..functional import spmm
from ..graph import Graph
from .blocks import Blocks

#: From this share of all rows of the others on, everything is sent to everyone: that moves a ninth more at most, and
#: nothing has to be packed.
EVERYONE = 0.9

#: Its name in torch 2.13 and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Flight:
    """What one exchange has under way between its start and its finish; `back`: that of its gradient."""

    __slots__ = ("arriving", "back", "leaving", "shape", "work")
    work: Any
    arriving: Tensor
    leaving: Tensor
    shape: torch.Size
    back: _Flight


class Halo:
    """Rows that ranks send each other.

    Attributes:
        rank: of this process in the group.
        sizes: rows that each rank owns.
        send: ``[S]`` int64, the own rows that others need, those for rank 0 first; None: everyone gets all of them.
        sent: how many of them go to each rank.
        received: how many rows come from each rank: the halo, in this order.
        group: of the processes; None: the default one.
    """

    def __init__(
        self, rank: int, sizes: list[int], send: Tensor | None, sent: list[int], received: list[int], group: Any
    ) -> None:
        self.rank, self.sizes, self.send, self.sent, self.received, self.group = (
            rank,
            sizes,
            send,
            sent,
            received,
            group,
        )
        self.rows, self.count = sizes[rank], sum(received)
        self._sum: Graph | None = None

    @classmethod
    def find(cls, places: Tensor, blocks: Blocks, rank: int, group: Any, exchange: str) -> tuple[Halo, Tensor]:
        """The halo of a rank, and columns of its own graph for the sources of its edges; a collective operation.

        Args:
            places: ``[E]`` place of the source of each edge into the own block.
            blocks: who owns what.
            rank: of this process.
            group: of the processes.
            exchange: ``"halo"``, ``"all"`` or ``"auto"``, as in `ShardedGraph.from_edge_index`.

        Returns:
            The halo, and ``[E]`` int64: own nodes are the columns from 0 on, the rows of the halo follow.
        """
        begin, end = blocks.cuts[rank], blocks.cuts[rank + 1]
        sizes = [blocks.rows(r) for r in range(blocks.parts)]
        own, device = sizes[rank], places.device
        if blocks.parts == 1:
            return cls(rank, sizes, None, [0], [0], group), places.long()
        needed = torch.zeros(blocks.num_nodes, dtype=torch.bool, device=device)
        needed[places.long()] = True
        needed[begin:end] = False
        everyone = exchange == "all"
        if exchange == "auto":
            halos = torch.zeros(blocks.parts, dtype=torch.int64, device=device)
            halos[rank] = needed.sum()
            dist.all_reduce(halos, group=group)
            everyone = int(halos.sum()) >= EVERYONE * (blocks.parts - 1) * max(blocks.num_nodes, 1)
        if everyone:
            needed.fill_(True)
            needed[begin:end] = False
        column = needed.cumsum(0).add_(own - 1)
        column[begin:end] = torch.arange(own, device=device)
        columns = column.index_select(0, places)
        del column
        if everyone:
            others = [0 if r == rank else n for r, n in enumerate(sizes)]
            return cls(rank, sizes, None, [0 if r == rank else own for r in range(len(sizes))], others, group), columns
        wanted = needed.nonzero()[:, 0]
        cuts = torch.tensor(blocks.cuts, device=device)
        received = torch.searchsorted(wanted, cuts).diff()
        sent = torch.empty_like(received)
        dist.all_to_all_single(sent, received, group=group)
        sent_to, received_from = sent.tolist(), received.tolist()
        send = torch.empty(sum(sent_to), dtype=torch.int64, device=device)
        dist.all_to_all_single(send, wanted, sent_to, received_from, group=group)
        return cls(rank, sizes, send - begin, sent_to, received_from, group), columns

    def to(self, device: torch.device | str) -> Halo:
        """The same with its lists on another device."""
        send = None if self.send is None else self.send.to(device)
        return Halo(self.rank, self.sizes, send, self.sent, self.received, self.group)

    # ------------------------------------------------------------------ moving rows

    def start(self, x: Tensor) -> tuple[Tensor, _Flight]:
        """Sends the own rows ``[rows, *F]`` on their way; `finish` takes what this returns."""
        flight = _Flight()
        return _Start.apply(x, self, flight, False), flight

    def finish(self, token: Tensor, flight: _Flight) -> Tensor:
        """The halo, ``[count, *F]``. Its gradient is sent while whatever lies between the two is differentiated."""
        return _Finish.apply(token, self, flight, False)  # type: ignore[no-any-return]

    def _depart(self, x: Tensor, flight: _Flight, back: bool) -> None:
        flight.shape = x.shape[1:]
        width = math.prod(flight.shape)
        x = x.reshape(x.shape[0], width)
        if self.send is not None and not back:
            x = x.index_select(0, self.send)
        flight.work, flight.leaving = None, x.contiguous()
        row = width * x.element_size()
        if self.send is None and not back:
            most = max(self.sizes)
            if self.rows < most:
                flight.leaving = torch.cat([x, x.new_zeros(most - self.rows, width)])
            flight.arriving = x.new_empty(len(self.sizes) * most, width)
            counters["exchanged_bytes"] += (len(self.sizes) - 1) * most * row
            if flight.arriving.numel():
                flight.work = _all_gather(
                    _bytes(flight.arriving), _bytes(flight.leaving), group=self.group, async_op=True
                )
            return
        arriving, leaving = (self.sent, self.received) if back else (self.received, self.sent)
        flight.arriving = x.new_empty(sum(arriving), width)
        counters["exchanged_bytes"] += sum(arriving) * row
        if width:
            flight.work = dist.all_to_all_single(
                _bytes(flight.arriving), _bytes(flight.leaving), arriving, leaving, group=self.group, async_op=True
            )

    def _arrive(self, flight: _Flight, back: bool) -> Tensor:
        if flight.work is not None:
            flight.work.wait()
        got = flight.arriving
        del flight.work, flight.arriving, flight.leaving
        if back:
            got = self._added_up(got)
        elif self.send is None:
            most = max(self.sizes)
            others = [got[r * most : r * most + n] for r, n in enumerate(self.received) if n]
            got = others[0] if len(others) == 1 else torch.cat([got[:0], *others])  # of two ranks: no copy
        return got.view(got.shape[0], *flight.shape)

    def _added_up(self, grads: Tensor) -> Tensor:
        """What came back for each own row: added up in the order of the ranks, and rounded once."""
        if self.send is None:
            return grads.view(len(self.sizes) - 1, self.rows, grads.shape[1]).sum(0)
        if self._sum is None:
            arrived = torch.arange(len(self.send), device=self.send.device)
            self._sum = Graph.from_edge_index(torch.stack([arrived, self.send]), (len(arrived), self.rows))
        return spmm(self._sum, grads)  # type: ignore[return-value]


def _bytes(t: Tensor) -> Tensor:
    """Rows as bytes: then it matters to no backend what they are of."""
    return t.view(torch.uint8)


class _Start(torch.autograd.Function):
    """The first half of an exchange. It returns a number without meaning, which orders it before the second half."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: Halo, flight: _Flight, back: bool) -> Tensor:
        ctx.halo, ctx.flight, ctx.is_back = halo, flight, back
        halo._depart(x, flight, back)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        return _Finish.apply(token, ctx.halo, ctx.flight.back, not ctx.is_back), None, None, None


class _Finish(torch.autograd.Function):
    """The second half. The gradient of an exchange is an exchange the other way: this starts it, the first ends it."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, halo: Halo, flight: _Flight, back: bool) -> Tensor:
        ctx.halo, ctx.flight, ctx.is_back = halo, flight, back
        return halo._arrive(flight, back)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.flight.back = _Flight()
        return _Start.apply(grad, ctx.halo, ctx.flight.back, not ctx.is_back), None, None, None
