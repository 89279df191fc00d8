"""`Blocks`: which rank owns which nodes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..graph import Graph
from ..schedule import check_schedule, order_of

#: Orders of the nodes that have a name: as they are, communities side by side, and any: what hashing their ids gives.
ORDERS = ("natural", "community", "hash")


@dataclass(frozen=True, eq=False)
class Blocks:
    """Nodes in some order, cut into a block for each rank.

    Attributes:
        cuts: ``parts + 1`` numbers from 0 to the number of nodes: rank r owns the nodes at the places ``cuts[r]`` to
            ``cuts[r + 1] - 1`` of the order. A block may be empty.
        order: ``[N]`` int64 permutation, the node at each place; None: nodes are at the places of their ids.
    """

    cuts: tuple[int, ...]
    order: Tensor | None = None

    def __post_init__(self) -> None:
        cuts = self.cuts
        if len(cuts) < 2 or cuts[0] != 0 or any(a > b for a, b in pairwise(cuts)):
            raise ValueError(f"cuts must begin with 0, never fall, and have one more entry than ranks; got {cuts}")
        if self.order is not None and self.order.shape != (cuts[-1],):
            raise ValueError(f"order must hold each of {cuts[-1]} nodes once, got shape {list(self.order.shape)}")

    @classmethod
    def even(cls, num_nodes: int, parts: int, order: Tensor | None = None) -> Blocks:
        """Blocks of as many nodes each, or one more."""
        if parts < 1:
            raise ValueError(f"parts must be 1 or more, got {parts}")
        return cls(tuple(num_nodes * r // parts for r in range(parts + 1)), order)

    @classmethod
    def of(cls, graph: Graph, parts: int, order: str | Tensor = "community", balance: str = "rows") -> Blocks:
        """Blocks of a graph.

        Args:
            graph: its sources and destinations are the same nodes.
            parts: how many blocks.
            order: one of `ORDERS`, or an int32 or int64 permutation of the nodes.
            balance: ``"rows"``: as many nodes in each block; ``"edges"``: about as many edges into each.

        Raises:
            TypeError, ValueError: the graph is bipartite, or an argument is none of its choices.
        """
        check_square(graph)
        if balance not in ("rows", "edges"):
            raise ValueError(f"balance must be 'rows' or 'edges', got {balance!r}")
        if isinstance(order, str) and order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)} or a permutation of the nodes, got {order!r}")
        found: Tensor | None
        if isinstance(order, str) and order == "hash":
            found = torch.randperm(graph.num_dst, generator=torch.Generator().manual_seed(0)).to(graph.device)
        elif isinstance(order, str):
            found = order_of(graph._csr, order)[1]
        else:
            found = check_schedule(graph._csr, order)
        blocks = cls.even(graph.num_dst, parts, found)
        if balance == "rows" or graph.num_edges == 0:
            return blocks
        degree = graph.in_degree()
        ends = (degree if found is None else degree[found]).cumsum(0)
        wanted = torch.arange(1, parts, device=ends.device) * graph.num_edges // parts
        cuts = torch.searchsorted(ends, wanted).add(1).clamp(max=graph.num_dst).tolist()
        return cls((0, *cuts, graph.num_dst), found)

    def validate(self) -> Blocks:
        """The blocks themselves; raises ValueError unless the order has each node once."""
        if self.order is not None and not torch.equal(
            self.order.sort().values, torch.arange(self.num_nodes, device=self.order.device)
        ):
            raise ValueError(f"order must hold each node from 0 to {self.num_nodes - 1} once, as int64")
        return self

    @property
    def parts(self) -> int:
        """How many blocks."""
        return len(self.cuts) - 1

    @property
    def num_nodes(self) -> int:
        """How many nodes all blocks have."""
        return self.cuts[-1]

    def rows(self, part: int) -> int:
        """How many nodes a block has."""
        return self.cuts[part + 1] - self.cuts[part]

    def nodes(self, part: int) -> Tensor:
        """The nodes of a block, int64, in their order."""
        begin, end = self.cuts[part], self.cuts[part + 1]
        return torch.arange(begin, end) if self.order is None else self.order[begin:end]

    def place(self, nodes: Tensor) -> Tensor:
        """The place of each of `nodes` in the order."""
        if self.order is None:
            return nodes
        places = torch.empty_like(self.order)
        places[self.order] = torch.arange(len(places), device=places.device)
        return places.index_select(0, nodes)

    def owner(self, places: Tensor) -> Tensor:
        """The part that each place is in, int64."""
        ends = torch.tensor(self.cuts[1:], device=places.device)
        return torch.searchsorted(ends, places, right=True)

    def to(self, device: torch.device | str) -> Blocks:
        """The same with its order on another device."""
        return self if self.order is None else Blocks(self.cuts, self.order.to(device))


def check_square(graph: Graph) -> None:
    """Raises ValueError for a bipartite graph."""
    if graph.num_src != graph.num_dst:
        raise ValueError(
            "only a graph whose sources and destinations are the same nodes can be sharded, got "
            f"{graph.num_src:,} sources and {graph.num_dst:,} destinations; number all nodes of a bipartite graph in a "
            "row, sources first, and pass their total as num_nodes"
        )
