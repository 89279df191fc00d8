"""What ranks do in tests/test_distributed.py, and the same on one process."""

from __future__ import annotations

import os
import random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.distributed import Blocks, ShardedGraph, all_reduce_gradients
from gnn_spmm_plugin.distributed.halo import Halo


def problem(seed: int, nodes: int, edges: int, kind: str = "random", dtype: torch.dtype = torch.float64) -> Any:
    """Edges, features, weights, and what the result's gradient is; ``"whole"`` numbers add up without rounding."""
    g = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(max(nodes // 2, 1), (2, edges), generator=g)  # the other half is isolated
    if nodes > 4:
        edge_index[0, ::3] = torch.randint(nodes - 2, edge_index[0, ::3].shape, generator=g)
        edge_index[1, ::5] = torch.randint(nodes - 2, edge_index[1, ::5].shape, generator=g)

    def draw(*shape: int) -> Tensor:
        if kind == "whole":
            return torch.randint(-8, 9, shape, generator=g).to(dtype)
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    return edge_index, draw(nodes, 3, 2), draw(edges), draw(nodes, 3, 2)


def blocks_of(order: Any, nodes: int, size: int) -> Any:
    """Names stand for orders; ``"last"``: the last rank owns everything."""
    if order == "last":
        return Blocks((*[0] * size, nodes))
    if order == "backwards":
        return torch.arange(nodes - 1, -1, -1)
    return order


def products(given: Any, reduce: str, weighted: bool, order: Any, exchange: str, overlap: bool, device: str) -> Any:
    """The whole result and the whole gradients of x and of the rank's weights, put together."""
    edge_index, x, w, grad = (t.to(device) for t in given)
    nodes = len(x)
    order = blocks_of(order, nodes, dist.get_world_size())
    sharded = ShardedGraph.from_edge_index(edge_index, nodes, order=order, exchange=exchange)
    x = sharded.shard(x).requires_grad_()
    w = sharded.shard_edges(w).requires_grad_() if weighted else None
    y = sharded.spmm(x, w, reduce, overlap=overlap)
    y.backward(sharded.shard(grad))
    whole_w = torch.zeros(edge_index.shape[1], dtype=x.dtype, device=device)
    if w is not None:
        whole_w[sharded.edge_id] = w.grad
        dist.all_reduce(whole_w)
    return tuple(t.cpu() for t in (sharded.gather(y), sharded.gather(x.grad), whole_w))


def products_alone(given: Any, reduce: str, weighted: bool, device: str) -> Any:
    """The same on one process."""
    edge_index, x, w, grad = (t.clone().to(device) for t in given)
    x, w = x.requires_grad_(), w.requires_grad_()
    y = gsp.spmm(gsp.Graph.from_edge_index(edge_index, len(x)), x, w if weighted else None, reduce)
    y.backward(grad)
    return tuple(t.detach().cpu() for t in (y, x.grad, w.grad if weighted else torch.zeros_like(w)))


def drawn(seed: int, cases: int) -> int:
    """Random graphs, blocks, orders, shapes and ways, in numbers that do not round, against one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pick = random.Random(seed)  # the same on all ranks
    for case in range(cases):
        nodes = pick.choice([1, 2, 3, 7, 30, 80])
        given = problem(pick.randrange(10**6), nodes, pick.choice([0, 1, nodes, 6 * nodes]), "whole")
        reduce, weighted = pick.choice(["sum", "sum", "max", "min"]), pick.random() < 0.5
        cuts = sorted(pick.randint(0, nodes) for _ in range(size - 1))
        order = None if pick.random() < 0.5 else torch.tensor(pick.sample(range(nodes), nodes))
        blocks, exchange = Blocks((0, *cuts, nodes), order), pick.choice(["auto", "halo", "all"])
        edge_index, mine = given[0].int() if pick.random() < 0.3 else given[0], pick.random() < 0.3
        if mine:  # a rank has its own edges alone
            own = (blocks.owner(blocks.place(given[0][1])) == rank).nonzero()[:, 0]
            edge_index, w = edge_index[:, own], given[2][own]
        else:
            own, w = torch.arange(given[0].shape[1]), given[2]
        if pick.random() < 0.3:
            given = (given[0], given[1][:, 0, 0], given[2], given[3][:, 0, 0])
        sharded = ShardedGraph.from_edge_index(edge_index, nodes, order=blocks, exchange=exchange)
        x = sharded.shard(given[1]).requires_grad_()
        w = sharded.shard_edges(w).requires_grad_() if weighted else None
        y = sharded.spmm(x, w, reduce, overlap=pick.random() < 0.7)
        y.backward(sharded.shard(given[3]))
        alone, grad, grad_w = products_alone(given, reduce, weighted, "cpu")
        what = f"case {case} of seed {seed}: {sharded}, {reduce}, {exchange}"
        assert torch.equal(sharded.gather(y), alone), what
        assert torch.equal(sharded.gather(x.grad), grad), what
        if w is not None:
            assert torch.equal(w.grad, grad_w[own][sharded.edge_id]), what
    return cases


def winners(given: Any, order: Any) -> Any:
    """The winning edges of a maximum, as places in the whole edge list, and the gradient where ties are split."""
    edge_index, x, _, grad = given
    sharded = ShardedGraph.from_edge_index(edge_index, len(x), order=blocks_of(order, len(x), dist.get_world_size()))
    mine = sharded.shard(x).requires_grad_()
    _, arg = sharded.spmm(mine, reduce="max", return_arg=True)
    place = torch.where(arg < 0, -1, sharded.edge_id[arg.clamp(min=0)]) if len(sharded.edge_id) else arg
    sharded.spmm(mine, reduce="max", tie="split").backward(sharded.shard(grad))
    return sharded.gather(place), sharded.gather(mine.grad)


def exchanged(given: Any, dtype: torch.dtype, exchange: str) -> Any:
    """Whether what comes is what each source has, for three shapes."""
    edge_index, x, _, _ = given
    sharded = ShardedGraph.from_edge_index(edge_index, len(x), exchange=exchange)
    nodes = sharded.edge_id
    ok = []
    for whole in (x, x[:, :, 0], x[:, 0, 0], x[:, :0]):
        whole = whole.mul(4).to(dtype)
        got = sharded.exchange(sharded.shard(whole))
        ok.append(got.dtype == dtype and torch.equal(got[sharded.edge_index[0]], whole[edge_index[0, nodes]]))
    ok.append(torch.equal(sharded.nodes[sharded.edge_index[1]], edge_index[1, nodes]))
    ok.append(torch.equal(sharded.gather(sharded.shard(x)), x))
    return ok


def twice(given: Any, exchange: str) -> Any:
    """Second derivatives through `exchange` and `spmm`, added up over the ranks."""
    edge_index, x, _, grad = given
    sharded = ShardedGraph.from_edge_index(edge_index, len(x), exchange=exchange)
    x, v = sharded.shard(x).requires_grad_(), sharded.shard(grad)
    y = sharded.spmm(x.pow(3)) + sharded.spmm(x, reduce="mean", overlap=False).pow(2)
    (first,) = torch.autograd.grad(y, x, v, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), x)
    return sharded.gather(first), sharded.gather(second)


def twice_alone(given: Any) -> Any:
    """The same on one process."""
    edge_index, x, _, v = given
    g, x = gsp.Graph.from_edge_index(edge_index, len(x)), x.clone().requires_grad_()
    y = gsp.spmm(g, x.pow(3)) + gsp.spmm(g, x, reduce="mean").pow(2)
    (first,) = torch.autograd.grad(y, x, v, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), x)
    return first.detach(), second


def traffic(given: Any, exchange: str) -> Any:
    """Bytes that were counted and bytes that were computed, forward and back, of 2 layers."""
    edge_index, x, _, _ = given
    sharded = ShardedGraph.from_edge_index(edge_index, len(x), exchange=exchange)
    x = sharded.shard(x[:, 0]).requires_grad_()
    found = []
    for overlap in (True, False):
        before = gsp.stats()["exchanged_bytes"]
        y = sharded.spmm(x, overlap=overlap)
        forward = gsp.stats()["exchanged_bytes"] - before
        y.sum().backward()
        back = gsp.stats()["exchanged_bytes"] - before - forward
        found.append((forward, sharded.bytes_received(2, x.dtype), back, sharded.bytes_sent(2, x.dtype)))
    graphs = [half.graph for half in sharded._halves]
    held = [sharded.edge_id, *sharded.graph._csr.arrays(), *(t for g in graphs for t in g._csr.arrays())]
    held += [t for g in graphs for t in g.T._csr.arrays()] + ([] if sharded.halo.send is None else [sharded.halo.send])
    index_bytes = sum(t.numel() * t.element_size() for t in held)
    return found, (sharded.num_local, sharded.graph.num_edges, sharded.num_halo, sum(sharded.halo.sent), index_bytes)


def in_between(given: Any) -> Any:
    """Kernel calls at which exchanges begin and end: something must run in between, forward and back."""
    edge_index, x, _, grad = given
    sharded = ShardedGraph.from_edge_index(edge_index, len(x))
    x = sharded.shard(x).requires_grad_()
    log: list[tuple[str, bool, int]] = []
    depart, arrive = Halo._depart, Halo._arrive

    def departs(self: Halo, t: Tensor, flight: Any, back: bool) -> None:
        log.append(("departs", back, gsp.stats()["kernel_calls"]))
        depart(self, t, flight, back)

    def arrives(self: Halo, flight: Any, back: bool) -> Tensor:
        log.append(("arrives", back, gsp.stats()["kernel_calls"]))
        return arrive(self, flight, back)

    Halo._depart, Halo._arrive = departs, arrives  # type: ignore[method-assign]
    try:
        sharded.spmm(x).backward(sharded.shard(grad))
    finally:
        Halo._depart, Halo._arrive = depart, arrive  # type: ignore[method-assign]
    return log


class Net(torch.nn.Module):
    """Three layers: of PyG's or ours, on the whole graph or on a rank's share of it."""

    def __init__(self, kind: str, own: bool) -> None:
        super().__init__()
        if own:
            from gnn_spmm_plugin import nn
        else:
            import torch_geometric.nn as nn  # type: ignore[no-redef]
        make: Any = {
            "sage": lambda a, b: nn.SAGEConv(a, b),
            "sage_max": lambda a, b: nn.SAGEConv(a, b, aggr="max"),
            "gin": lambda a, b: nn.GINConv(torch.nn.Linear(a, b)),
            "gat": lambda a, b: nn.GATConv(a, b, heads=2, concat=False),
            "gcn": lambda a, b: nn.GCNConv(a, b),
            "gcn_weighted": lambda a, b: nn.GCNConv(a, b, add_self_loops=False),
            "transformer": lambda a, b: nn.TransformerConv(a, b, heads=2, concat=False),
        }[kind]
        self.kind, self.own = kind, own
        self.layers = torch.nn.ModuleList([make(6, 5), make(5, 5), make(5, 4)])

    def forward(self, x: Tensor, graph: Any, weight: Tensor | None) -> Tensor:
        gcn = self.kind.startswith("gcn")
        sharded = isinstance(graph, ShardedGraph)
        if gcn and sharded:
            graph = graph.gcn_norm(weight, add_self_loops=self.kind == "gcn", dtype=x.dtype)
        for i, layer in enumerate(self.layers):
            x = F.elu(x) if i else x
            if not sharded:
                x = layer(x, graph, weight) if gcn else layer(x, graph)
            elif not gcn:
                x = layer((graph.exchange(x), x), graph.graph if self.own else graph.edge_index)
            elif i == 1:  # a layer that takes one tensor
                layer.normalize = layer.add_self_loops = False
                x = layer(graph.exchange(x), graph.edge_index, graph.weight)[: graph.num_local]
            else:
                x = graph.spmm(layer.lin(x)) + layer.bias
        return x


def train(graph: Any, given: Any, kind: str, own: bool, accelerate: bool, steps: int, weighted: bool) -> Any:
    """Losses, parameters at the end, and the gradients of the first step."""
    torch.manual_seed(3)
    net = Net(kind, own).double()
    if accelerate:
        net = gsp.accelerate(net)
    _, x, w, _ = given
    x, y, w = x.flatten(1), x[:, 0, 0].gt(0).long(), w.abs()
    if isinstance(graph, ShardedGraph):
        x, y, w = graph.shard(x), graph.shard(y), graph.shard_edges(w)
    chosen = (torch.arange(len(y)) if not isinstance(graph, ShardedGraph) else graph.nodes) % 3 == 0
    total = len(range(0, len(given[1]), 3))
    optimizer, losses, first = torch.optim.Adam(net.parameters(), 0.02), [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x, graph, w if weighted else None)[chosen], y[chosen], reduction="sum") / total
        loss.backward()
        all_reduce_gradients(net)
        if step == 0:
            first = [p.grad.clone() for p in net.parameters()]
        optimizer.step()
        loss = loss.detach()
        if isinstance(graph, ShardedGraph) and dist.is_initialized():
            dist.all_reduce(loss)
        losses.append(loss.item())
    return losses, [p.detach() for p in net.parameters()], first


def train_sharded(given: Any, order: Any, *how: Any) -> Any:
    """`train` on a rank's share."""
    order = blocks_of(order, len(given[1]), dist.get_world_size())
    return train(ShardedGraph.from_edge_index(given[0], len(given[1]), order=order), given, *how)


def make(edge_index: Any, num_nodes: Any, order: Any = "natural", exchange: str = "auto") -> Any:
    """Sizes of a graph of which each rank is given its own entry of lists, or all the same."""
    rank = dist.get_rank()
    given = edge_index, num_nodes, order, exchange
    edge_index, num_nodes, order, exchange = (v[rank] if isinstance(v, list) else v for v in given)
    order = blocks_of(order, num_nodes, dist.get_world_size())
    sharded = ShardedGraph.from_edge_index(edge_index, num_nodes, order=order, exchange=exchange)
    x = sharded.nodes.double().unsqueeze(1)
    return sharded.num_local, sharded.gather(sharded.spmm(x)), str(sharded)


def in_a_group(given: Any) -> Any:
    """Ranks 0 and 2 of three share a graph; 1 is told that it has none."""
    edge_index, x, _, _ = given
    group = dist.new_group([0, 2])
    try:
        sharded = ShardedGraph.from_edge_index(edge_index, len(x), group=group, order="community")
    except ValueError as error:
        return str(error)
    assert sharded.blocks.parts == 2 and sharded.halo.rank == (0 if dist.get_rank() == 0 else 1)
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), 1.0 + dist.get_rank())
    all_reduce_gradients([parameter], group)
    return sharded.gather(sharded.spmm(sharded.shard(x))), parameter.grad


def some_gradients() -> Any:
    """Of one parameter on rank 1 alone, of one on none, of one frozen, of one in another dtype."""
    rank = dist.get_rank()
    a, b, c = (torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(3))
    d = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    c.requires_grad_(False)
    if rank == 1:
        a.grad = torch.ones(2, 2)
    d.grad = torch.full((3,), float(rank), dtype=torch.float64)
    all_reduce_gradients([a, b, c, d])
    return a.grad, b.grad, c.grad, d.grad


def wrong_rows(given: Any) -> Any:
    """Mistakes that each rank makes for itself: nothing was sent yet."""
    edge_index, x, w, _ = given
    sharded = ShardedGraph.from_edge_index(edge_index, len(x))
    said = []
    for wrong in (
        lambda: sharded.spmm(x),
        lambda: sharded.exchange(x[:1].expand(len(x) + 1, 3, 2)),
        lambda: sharded.exchange(None),
        lambda: sharded.shard(x[1:]),
        lambda: sharded.gcn_norm().shard_edges(w),
        lambda: sharded.gcn_norm(sharded.shard_edges(w).unsqueeze(1)),
    ):
        try:
            wrong()
        except (TypeError, ValueError) as error:
            said.append(str(error))
    return said


def ends(given: Any, when: str) -> Any:
    """Rank 1 goes away; the others must hear of it."""
    edge_index, x, _, _ = given
    if dist.get_rank() == 1 and when == "making":
        os._exit(1)
    sharded = ShardedGraph.from_edge_index(edge_index, len(x))
    if dist.get_rank() == 1:
        os._exit(1)
    return sharded.spmm(sharded.shard(x))


def wrong_weights(given: Any) -> Any:
    """What is said of weights of the whole graph, of one too few, and of a number."""
    edge_index, x, w, _ = given
    sharded = ShardedGraph.from_edge_index(edge_index, len(x))
    own, few = sharded.shard(x), sharded.shard_edges(w)[:-1]
    said = []
    for weight in (w, few, 3.0):
        try:
            sharded.spmm(own, weight)
            said.append("nothing")
        except (TypeError, ValueError) as e:
            said.append(str(e))
    return said


def inference_first(given: Any) -> Any:
    """A graph that was looked at in inference mode trains as another: its gradients, and those of the other."""
    edge_index, x, w, grad = given
    found = []
    for first in (True, False):
        sharded = ShardedGraph.from_edge_index(edge_index, len(x))
        sharded = sharded.with_weight(sharded.shard_edges(w))
        own = sharded.shard(x)
        if first:
            with torch.inference_mode():
                sharded.spmm(own, reduce="mean"), sharded.spmm(own), sharded.edge_index
        own = own.clone().requires_grad_()
        (sharded.spmm(own, reduce="mean") * sharded.spmm(own) * sharded.shard(grad)).sum().backward()
        gsp.spmm(sharded.graph, sharded.exchange(own.detach()).requires_grad_()).sum().backward()
        found.append(sharded.gather(own.grad))
    return found


def written_weights(given: Any) -> Any:
    """Sums before and after weights of the graph were written through NumPy, and what comes without overlap."""
    edge_index, x, w, _ = given
    sharded = ShardedGraph.from_edge_index(edge_index, len(x))
    own, weight = sharded.shard(x), sharded.shard_edges(w)
    sharded = sharded.with_weight(weight)
    sharded.spmm(own)
    weight.numpy()[:] *= 3
    return sharded.spmm(own), sharded.spmm(own, overlap=False)
