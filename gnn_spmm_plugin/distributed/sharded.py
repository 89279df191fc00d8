"""`ShardedGraph`: a rank's share of a graph."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..functional import LINEAR, sddmm, spmm
from ..functional_aggregate import aggregate
from ..graph import Graph, _as_index, check_weight, shape_advice
from .blocks import ORDERS, Blocks, check_square
from .halo import Halo, _all_gather

EXCHANGES = ("auto", "halo", "all")


class _Half(NamedTuple):
    """The edges from own nodes, or those from the halo.

    Attributes:
        graph: their sources are numbered among themselves.
        edges: ``[e]`` int64, which of the rank's edges they are.
        share: ``[rows]``, how many of the edges into each row, in both dtypes of accumulation.
    """

    graph: Graph
    edges: Tensor
    share: dict[torch.dtype, Tensor]

    def weighted(self, weight: Tensor | None) -> Graph:
        """The graph with its part of the rank's weights."""
        return self.graph.with_weight(None if weight is None else weight.index_select(0, self.edges))


class ShardedGraph:
    """The rows of a graph that one rank owns, and where it gets the features that they need.

    Make one with `from_edge_index`. Features and results are of the own nodes, in the order of `nodes`; weights and
    whatever else there is for each edge are of the edges into them, in the order of `edge_id`. `shard`, `shard_edges`
    and `gather` cut tensors that are of the whole graph, and put them together. Edges are lined up by destination,
    those into one node as they were passed.

    What takes a pair of features, as most of PyG's layers do, runs unchanged on ``(sharded.exchange(x), x)`` and
    `edge_index` (layers of `gnn_spmm_plugin.nn`: on `graph`, too). What takes one tensor gets ``sharded.exchange(x)``,
    and of its result the first `num_local` rows count; degrees are wrong in the others, so GCN's normalisation comes
    from `gcn_norm`.

    Attributes:
        graph: a bipartite `Graph` of the edges into the own nodes. Its sources are the own nodes, then the halo.
        blocks: who owns which nodes.
        halo: what is exchanged.
        edge_id: ``[e]`` int64, the place of each of the rank's edges in the ``edge_index`` that it passed; None where
            edges were added.
    """

    def __init__(self, graph: Graph, blocks: Blocks, halo: Halo, edge_id: Tensor | None) -> None:
        self.graph, self.blocks, self.halo, self.edge_id = graph, blocks, halo, edge_id
        self._edge_index: Tensor | None = None
        self._halves: list[_Half] = []
        self._weighted: tuple[int, Graph, Graph] | None = None  # the halves with the graph's own weights, and a version

    @classmethod
    def from_edge_index(
        cls,
        edge_index: Tensor,
        num_nodes: int | None = None,
        group: Any = None,
        order: str | Tensor | Blocks = "natural",
        exchange: str = "auto",
    ) -> ShardedGraph:
        """This rank's share of a graph; all ranks of the group call it.

        Args:
            edge_index: ``[2, E]`` int32 or int64, sources and destinations: the whole graph, or all edges into the own
                nodes and no others. On a device that the group communicates on.
            num_nodes: number of nodes; without it, the largest id plus one.
            group: a process group; None: the default one, or this process alone where there is none.
            order: how nodes are lined up before they are cut into blocks of as many each: ``"natural"``, ``"hash"``,
                ``"community"`` (the first rank must have the whole graph, and finds it for all), a permutation; or
                `Blocks`, which may differ in size. The same on all ranks.
            exchange: ``"halo"``: each rank gets the rows that it needs; ``"all"``: all, by ``all_gather``; ``"auto"``:
                all where most would have to be sent anyway.

        Raises:
            IndexError, TypeError, ValueError: as `Graph.from_edge_index`; the other ranks raise a RuntimeError which
                names the rank. ValueError on all of them: they disagree about `num_nodes`, or edges were passed to no
                rank that owns them.
        """
        rank, size = _place(group)
        if num_nodes is None and isinstance(order, (Blocks, Tensor)):
            num_nodes = order.num_nodes if isinstance(order, Blocks) else order.numel()
        error: Exception | None = None
        count = passed = how = 0
        try:
            edge_index, count = _checked(edge_index, num_nodes, group, order, exchange, size)
            passed = edge_index.shape[1]
            how = 8 * EXCHANGES.index(exchange) + (ORDERS.index(order) if isinstance(order, str) else 7)
        except (IndexError, TypeError, ValueError) as e:
            error = e
        found = _together(error, [count, passed, num_nodes is not None, how], group, size)
        counts, given = [row[0] for row in found], {row[0] for row in found if row[2]}
        num_nodes = max(counts)
        if len(given) > 1 or (given and max(given) < num_nodes):
            raise ValueError(f"the ranks must agree on num_nodes, got {counts}")
        if len({row[3] for row in found}) > 1:
            raise ValueError(f"the ranks must agree on order and exchange, this one got {order!r} and {exchange!r}")
        blocks = _blocks(edge_index, num_nodes, group, order, rank, size)

        begin, end = blocks.cuts[rank], blocks.cuts[rank + 1]
        destination = blocks.place(edge_index[1])
        edge_id = ((destination >= begin) & (destination < end)).nonzero()[:, 0]
        kept = [k for (k,) in _together(None, [len(edge_id)], group, size)]
        lost = [r for r, row in enumerate(found) if row[1] not in (kept[r], sum(kept))]
        if lost or (isinstance(order, str) and order == "community" and found[0][1] != sum(kept)):
            raise ValueError(
                "each rank must pass the whole edge_index, or all edges into the nodes that it owns and no others (for "
                f"order='community' the first rank the whole); the ranks passed {[row[1] for row in found]} edges, and "
                f"own {kept} of them"
            )
        # By destination, which keeps the order within a row: then no weight has to be permuted.
        destination, by = _sorted(destination.index_select(0, edge_id).long() - begin)
        edge_id = edge_id if by is None else edge_id[by]
        places = blocks.place(edge_index[0].index_select(0, edge_id))
        halo, columns = Halo.find(places, blocks, rank, group, exchange)
        graph = Graph.from_edge_index(torch.stack([columns, destination]), (halo.rows + halo.count, halo.rows))
        return cls(graph, blocks, halo, edge_id)

    # ------------------------------------------------------------------ what it is

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole graph."""
        return self.blocks.num_nodes

    @property
    def num_local(self) -> int:
        """Own nodes."""
        return self.halo.rows

    @property
    def num_halo(self) -> int:
        """Nodes of other ranks whose features come here."""
        return self.halo.count

    @property
    def device(self) -> torch.device:
        """Where the graph lives."""
        return self.graph.device

    @property
    def weight(self) -> Tensor | None:
        """``[e]`` or ``[e, H]`` weights of the rank's edges, or None."""
        return self.graph.weight

    @property
    def nodes(self) -> Tensor:
        """``[num_local]`` int64, the own nodes: rows of local tensors are in this order."""
        return self.blocks.nodes(self.halo.rank).to(self.device)

    @property
    def edge_index(self) -> Tensor:
        """``[2, e]`` int64: sources in `exchange`'s result, and destinations among the own nodes. Always one object."""
        if self._edge_index is None:
            with torch.inference_mode(False):  # kept for training too
                self._edge_index = self.graph.edge_index()
        return self._edge_index

    def bytes_received(self, width: int, dtype: torch.dtype = torch.float32) -> int:
        """What one exchange of `width` columns brings to this rank, forward; backward, that goes out."""
        if self.halo.send is None and len(self.halo.sizes) > 1:
            return (len(self.halo.sizes) - 1) * max(self.halo.sizes) * width * dtype.itemsize
        return self.num_halo * width * dtype.itemsize

    def bytes_sent(self, width: int, dtype: torch.dtype = torch.float32) -> int:
        """What one exchange of `width` columns takes from this rank, forward; backward, that comes in."""
        return sum(self.halo.sent) * width * dtype.itemsize

    def __repr__(self) -> str:
        how = "a halo" if self.halo.send is not None or not self.num_halo else "all others: a halo"
        return (
            f"ShardedGraph(rank {self.halo.rank} of {self.blocks.parts}: {self.num_local:,} of {self.num_nodes:,} "
            f"nodes, {self.graph.num_edges:,} edges, {how} of {self.num_halo:,}, device='{self.device}')"
        )

    # ------------------------------------------------------------------ tensors of the whole graph

    def shard(self, x: Tensor) -> Tensor:
        """The own rows of ``[num_nodes, *F]``, on the graph's device."""
        if x.dim() == 0 or x.shape[0] != self.num_nodes:
            raise ValueError(f"x must have one row for each of {self.num_nodes} nodes, got {list(x.shape)}")
        return x.index_select(0, self.blocks.nodes(self.halo.rank).to(x.device)).to(self.device)

    def shard_edges(self, t: Tensor) -> Tensor:
        """What the rank's edges have of ``[E, *F]``, in the order of the ``edge_index`` that this rank passed."""
        if self.edge_id is None:
            raise ValueError("this graph has edges that were added, by gcn_norm; cut the tensor with the graph before")
        return t.index_select(0, self.edge_id.to(t.device)).to(self.device)

    def gather(self, x: Tensor) -> Tensor:
        """``[num_nodes, *F]`` of every rank's ``[num_local, *F]``, on all ranks, in order of node ids; no gradient."""
        self._check(x)
        x = x.detach()
        sizes = self.halo.sizes
        if len(sizes) == 1:
            whole = x
        else:
            most = max(sizes)
            padded = torch.cat([x, x.new_zeros(most - self.num_local, *x.shape[1:])])
            got = x.new_empty(len(sizes) * most, *x.shape[1:])
            if got.numel():
                _all_gather(got, padded, group=self.halo.group)
            whole = torch.cat([got[r * most : r * most + n] for r, n in enumerate(sizes)])
        if self.blocks.order is None:
            return whole
        return torch.empty_like(whole).index_copy_(0, self.blocks.order.to(x.device), whole)

    # ------------------------------------------------------------------ operators

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def exchange(self, x: Tensor) -> Tensor:
        """Features of the own nodes and of the halo.

        Args:
            x: ``[num_local, *F]``, any dtype.

        Returns:
            ``[num_local + num_halo, *F]``. A gradient goes back to the ranks that the rows came from, which add up what
            they get in the order of the ranks: the same bits from run to run.
        """
        self._check(x)
        if len(self.halo.sizes) == 1:
            return x
        return torch.cat([x, self.halo.finish(*self.halo.start(x))])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def spmm(
        self, x: Tensor, weight: Tensor | None = None, reduce: str = "sum", *, overlap: bool = True, **kwargs: Any
    ) -> Any:
        """`gnn_spmm_plugin.spmm` over the edges into the own nodes.

        Args:
            x: ``[num_local, *F]``.
            weight: ``[e]`` or ``[e, H]`` in the order of `edge_id`; None: the graph's own weights, where it has any.
            reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
            overlap: sums and means of float32 and float64 over own nodes while the halo is on its way, and those over
                the halo when it has come. Then a row's terms are added in two parts. Without, they are added as on one
                process: on the CPU to the same bits.
            kwargs: as `gnn_spmm_plugin.spmm`; what ``return_arg`` gives are places in `edge_id`.

        Returns:
            ``[num_local, *F]``.
        """
        if len(self.halo.sizes) == 1:
            return spmm(self.graph, x, weight, reduce, **kwargs)
        if weight is not None:
            check_weight(self.graph, weight)  # before others wait for this rank; parts of a wrong one would fit
        given = self.weight if weight is None else weight
        plain = given is None or given.dim() == 1  # what comes with a weight for each head has seen the halo already
        early = overlap and reduce in LINEAR and plain and kwargs.keys() <= {"policy"}
        if not early or x.dtype not in (torch.float32, torch.float64):  # others would be rounded twice
            return spmm(self.graph, self.exchange(x), weight, reduce, **kwargs)
        self._check(x)
        near, far = self._split(weight)
        width = math.prod(x.shape[1:])
        dtype = torch.promote_types(x.dtype, torch.float32 if given is None else given.dtype)
        a, b = (half.share[dtype] if reduce == "mean" else None for half in self._halves)
        under_way = self.halo.start(x)
        first = aggregate(near, x.reshape(self.num_local, width), near.weight, reduce, dst_scale=a, **kwargs)
        halo = self.halo.finish(*under_way).reshape(self.num_halo, width)
        # The second sum begins with the first, in one kernel.
        out = aggregate(far, halo, far.weight, reduce, dst_scale=b, self_x=first, **kwargs)
        return out.view(self.num_local, *x.shape[1:])

    def gcn_norm(
        self,
        weight: Tensor | None = None,
        add_self_loops: bool = True,
        improved: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> ShardedGraph:
        """The graph with self loops and the weights of GCN, ``D^-1/2 (A + I) D^-1/2``, of degrees in the whole graph.

        A GCN layer is ``normalized.spmm(lin(x)) + bias``, or PyG's ``GCNConv(normalize=False)`` with `weight` as its
        ``edge_weight``. As in PyG: a node that has a self loop keeps the weight of its last one, and gets no second.

        Args:
            weight: as in `spmm`; it may need a gradient.
            add_self_loops: whether nodes without one get a self loop.
            improved: it weighs 2 instead of 1. As in PyG, only where the edges have weights.
            dtype: of the weights, where `weight` is None and the graph has none.
        """
        weight = self.weight if weight is None else weight
        source, destination = self.graph.edge_index()
        edge_id, n = self.edge_id, self.num_local
        w = torch.ones(len(source), dtype=dtype, device=self.device) if weight is None else weight
        if w.shape != source.shape:
            raise ValueError(f"weight must have shape [num_edges] = [{len(source)}], got {list(w.shape)}")
        if add_self_loops:
            loop = source == destination  # the halo's numbers come after the own ones
            edge, rest = loop.nonzero()[:, 0], (~loop).nonzero()[:, 0]
            last = torch.full((n,), -1, device=self.device).scatter_reduce(0, source[edge], edge, "amax")
            loops = w.new_full((n,), 2.0 if improved and weight is not None else 1.0)
            if len(edge):
                loops = torch.where(last >= 0, w.index_select(0, last.clamp(min=0)), loops)
            own = torch.arange(n, device=self.device)
            destination, by = _sorted(torch.cat([destination[rest], own]))
            source, w, edge_id = torch.cat([source[rest], own]), torch.cat([w.index_select(0, rest), loops]), None
            if by is not None:
                source, w = source[by], w.index_select(0, by)
        graph = Graph.from_edge_index(torch.stack([source, destination]), (self.graph.num_src, n))
        degree: Any = spmm(graph, w.new_ones(graph.num_src, 1), w)
        none = degree == 0
        root = degree.masked_fill(none, 1).pow(-0.5).masked_fill(none, 0)
        w = sddmm(graph, root, self.exchange(root)) * w
        return ShardedGraph(graph.with_weight(w), self.blocks, self.halo, edge_id)

    # ------------------------------------------------------------------ making others from it

    def with_weight(self, weight: Tensor | None) -> ShardedGraph:
        """The same graph with other weights, ``[e]`` or ``[e, H]`` in the order of `edge_id`, or none."""
        other = ShardedGraph(self.graph.with_weight(weight), self.blocks, self.halo, self.edge_id)
        other._edge_index, other._halves = self._edge_index, self._halves
        return other

    def to(self, device: torch.device | str) -> ShardedGraph:
        """The graph on another device, on which the group must communicate too."""
        edge_id = None if self.edge_id is None else self.edge_id.to(device)
        return ShardedGraph(self.graph.to(device), self.blocks.to(device), self.halo.to(device), edge_id)

    # ------------------------------------------------------------------ inside

    def _check(self, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() == 0 or x.shape[0] != self.num_local:
            hint = "; cut features of the whole graph with .shard(x)" if x.shape[:1] == (self.num_nodes,) else ""
            raise ValueError(
                f"x must have one row for each of the {self.num_local} nodes that rank {self.halo.rank} owns, got "
                f"{list(x.shape)}{hint}"
            )
        if x.device != self.device:
            raise ValueError(f"x is on {x.device} but the graph on {self.device}; use sharded.to(x.device)")

    def _split(self, weight: Tensor | None) -> tuple[Graph, Graph]:
        """The edges from own nodes, and those from the halo, with their weights; graphs are made at the first call."""
        n = self.num_local
        if not self._halves:
            source, destination = self.graph.edge_index()
            degree = self.graph.in_degree().clamp(min=1).double()
            for here in (source < n, source >= n):
                edges = here.nonzero()[:, 0]
                first, sources = (n, self.num_halo) if self._halves else (0, n)
                pair = torch.stack([source[edges] - first, destination[edges]])
                graph = Graph.from_edge_index(pair, (sources, n))
                with torch.inference_mode(False):  # kept for training too
                    share = graph.in_degree().clone() / degree.clone()
                    shares = {torch.float32: share.float(), torch.float64: share}
                self._halves.append(_Half(graph, edges, shares))
        near, far = self._halves
        if weight is not None:
            return near.weighted(weight), far.weighted(weight)
        weight = self.graph.weight
        if weight is None:
            return near.graph, far.graph
        # On the CPU, writes through NumPy pass by the version counter.
        if weight.requires_grad or weight.is_inference() or weight.is_cpu or torch.is_inference_mode_enabled():
            return near.weighted(weight), far.weighted(weight)
        if self._weighted is None or self._weighted[0] != weight._version:
            self._weighted = weight._version, near.weighted(weight), far.weighted(weight)
        return self._weighted[1], self._weighted[2]


# ---------------------------------------------------------------------- making one


def _place(group: Any) -> tuple[int, int]:
    """The rank of this process in a group, and the size of the group."""
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ValueError("a group was given, but torch.distributed is not initialised: call init_process_group")
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not in the group; only ranks of the group make a ShardedGraph of it")
    return rank, dist.get_world_size(group)


def _sorted(destination: Tensor) -> tuple[Tensor, Tensor | None]:
    """`destination` in rising order, and which comes where; None: they were."""
    if bool((destination[1:] >= destination[:-1]).all()):
        return destination, None
    return destination.sort(stable=True)


def _talks_on(group: Any) -> list[str]:
    """Types of the devices that a group communicates on."""
    pg: Any = dist.group.WORLD if group is None else group
    return sorted({d.type for d in pg._device_types})


def _checked(edge_index: Any, num_nodes: Any, group: Any, order: Any, exchange: str, size: int) -> tuple[Tensor, int]:
    """The edges and the number of nodes, if there is nothing wrong with them on this rank."""
    if hasattr(edge_index, "as_tensor"):
        edge_index = edge_index.as_tensor()
    edge_index = _as_index(edge_index, "edge_index")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise ValueError(f"edge_index must have shape [2, num_edges], got {shape_advice(edge_index)}")
    if isinstance(num_nodes, (tuple, list)):
        raise ValueError(
            f"a bipartite graph (num_nodes = {tuple(num_nodes)}) cannot be sharded: number all nodes in a row, sources "
            "first, and pass their total as num_nodes"
        )
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange must be one of {', '.join(EXCHANGES)}; got {exchange!r}")
    if isinstance(order, str) and order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, a permutation or Blocks; got {order!r}")
    if size > 1 and edge_index.device.type not in _talks_on(group):
        kinds = " and ".join(_talks_on(group))
        raise ValueError(
            f"edge_index is on {edge_index.device}, but the group communicates on {kinds}; move it "
            "there, or call init_process_group without a backend, which then has one for each device"
        )
    largest = int(edge_index.max()) if edge_index.numel() else -1
    count = largest + 1 if num_nodes is None else num_nodes
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"num_nodes must be a whole number, 0 or more, got {num_nodes!r}")
    if edge_index.numel() and (largest >= count or int(edge_index.min()) < 0):
        Graph.from_edge_index(edge_index, count)  # names the edge
    if isinstance(order, Blocks) and (order.parts, order.num_nodes) != (size, count):
        raise ValueError(
            f"order has {order.parts} blocks of {order.num_nodes} nodes; there are {size} ranks and {count} nodes"
        )
    if isinstance(order, Blocks):
        order.validate()
    return edge_index, count


def _together(error: Exception | None, numbers: list[int], group: Any, size: int) -> list[list[int]]:
    """What each rank says; raises on all of them if one has an error, there this one."""
    if size == 1:
        if error is not None:
            raise error
        return [[int(n) for n in numbers]]
    kinds = _talks_on(group)
    device = torch.device("cpu") if "cpu" in kinds else torch.device(kinds[0], torch.accelerator.current_device_index())
    said = torch.tensor([error is not None, *numbers], dtype=torch.int64, device=device)
    heard = [torch.empty_like(said) for _ in range(size)]
    dist.all_gather(heard, said, group=group)
    if error is not None:
        raise error
    rows: list[list[int]] = [t.tolist() for t in heard]
    failed = [rank for rank, row in enumerate(rows) if row[0]]
    if failed:
        raise RuntimeError(f"rank {failed[0]} could not make its share of the graph; its own error says why")
    return [row[1:] for row in rows]


def _blocks(edge_index: Tensor, num_nodes: int, group: Any, order: Any, rank: int, size: int) -> Blocks:
    """Who owns what: the same on all ranks, whoever found it."""
    if isinstance(order, Blocks):
        return order.to(edge_index.device)
    if isinstance(order, str) and order == "natural":
        return Blocks.even(num_nodes, size)
    error: Exception | None = None
    found = torch.empty(num_nodes, dtype=torch.int64, device=edge_index.device)
    try:
        if rank == 0 or isinstance(order, Tensor):
            edges = edge_index if isinstance(order, str) and order == "community" else edge_index[:, :0]
            graph = Graph.from_edge_index(edges, num_nodes)
            check_square(graph)
            given = Blocks.of(graph, size, order).order
            found = found if given is None else given  # None: there are no nodes
    except (TypeError, ValueError, RuntimeError) as e:
        error = e
    _together(error, [0], group, size)
    if size > 1 and num_nodes:
        dist.broadcast(found, group=group, group_src=0)
    return Blocks.even(num_nodes, size, found if num_nodes else None)
