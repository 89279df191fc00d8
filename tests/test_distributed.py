"""Graphs over several processes give what one process gives: results, gradients, trainings; and mistakes are said.

What is the same to the last bit, on the CPU: results without overlap and maxima always, since each row's terms are
added in the same order; everything where sums do not round; and everything from run to run.
"""

from __future__ import annotations

import importlib
import itertools
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.distributed import Blocks, ShardedGraph, all_reduce_gradients, partition_cost

ranks_module = importlib.import_module("ranks")
work = importlib.import_module("rank_work")

REDUCES = ("sum", "mean", "max", "min")
WAYS = [  # order, exchange, overlap
    ("natural", "halo", True),
    ("natural", "halo", False),
    ("natural", "all", True),
    ("natural", "all", False),
    ("community", "auto", True),
    ("hash", "halo", False),
    ("backwards", "all", True),
    ("last", "halo", True),
    ("last", "all", False),
]


@pytest.fixture(scope="module")
def groups() -> Iterator[Any]:
    """Groups by size, made when they are needed."""
    made: dict[int, Any] = {}

    def of(size: int) -> Any:
        if size not in made:
            made[size] = ranks_module.Ranks(size)
        return made[size]

    yield of
    for group in made.values():
        group.close()


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest, groups: Any) -> Any:
    return groups(request.param)


@pytest.fixture
def three(groups: Any) -> Any:
    return groups(3)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("weighted", [False, True])
def test_products(ranks: Any, reduce: str, weighted: bool) -> None:
    given, whole = work.problem(1, 60, 500), work.problem(2, 60, 500, "whole")
    alone, alone_whole = (work.products_alone(p, reduce, weighted, "cpu") for p in (given, whole))
    # A mean rounds where it divides, and over two parts more often.
    exact = reduce != "mean"
    for order, exchange, overlap in WAYS:
        how = reduce, weighted, order, exchange, overlap, "cpu"
        for result in (found := ranks(work.products, given, *how)):
            assert all(map(torch.equal, result, found[0])), "each rank has the whole result"
        for got, expected in zip(found[0], alone, strict=True):
            close(got, expected)
        if not overlap or reduce in ("max", "min"):
            assert torch.equal(found[0][0], alone[0]) and torch.equal(found[0][2], alone[2])
        if order == "natural":
            again = ranks(work.products, given, *how)
            assert all(map(torch.equal, found[0], again[0])), "the same bits again"
        result = ranks(work.products, whole, *how)[0]
        if exact:
            assert all(map(torch.equal, result, alone_whole)), (order, exchange, overlap)


@pytest.mark.parametrize("seed", [1, 2])
def test_drawn_graphs_blocks_and_ways(ranks: Any, seed: int) -> None:
    assert ranks(work.drawn, seed, 60) == [60] * ranks.size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_dtypes(ranks: Any, dtype: torch.dtype) -> None:
    given = work.problem(3, 40, 300, "random", dtype)
    for reduce in ("sum", "mean", "max"):
        alone = work.products_alone(given, reduce, False, "cpu")
        result = ranks(work.products, given, reduce, False, "natural", "halo", False, "cpu")[0]
        assert torch.equal(result[0], alone[0])
        torch.testing.assert_close(result[1], alone[1], rtol=2e-2, atol=2e-2)
        result = ranks(work.products, given, reduce, False, "natural", "halo", True, "cpu")[0]
        if dtype != torch.float32:  # two parts would be rounded twice
            assert torch.equal(result[0], alone[0])
        torch.testing.assert_close(result[0], alone[0])


@pytest.mark.parametrize("order", ["natural", "hash", "last"])
def test_winners_and_ties(ranks: Any, order: str) -> None:
    given = work.problem(4, 40, 300, "whole")  # has ties
    graph = gsp.Graph.from_edge_index(given[0], 40)
    x = given[1].clone().requires_grad_()
    _, arg = gsp.spmm(graph, x, reduce="max", return_arg=True)
    gsp.spmm(graph, x, reduce="max", tie="split").backward(given[3])
    for place, grad in ranks(work.winners, given, order):
        assert torch.equal(place, arg)
        close(grad, x.grad)


@pytest.mark.parametrize("exchange", ["halo", "all"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.bool, torch.complex64]
)
def test_any_dtype_is_exchanged(ranks: Any, dtype: torch.dtype, exchange: str) -> None:
    for ok in ranks(work.exchanged, work.problem(5, 50, 200), dtype, exchange):
        assert all(ok), ok


@pytest.mark.parametrize("exchange", ["halo", "all"])
def test_second_derivatives(ranks: Any, exchange: str) -> None:
    given = work.problem(6, 40, 200)
    for got, expected in zip(ranks(work.twice, given, exchange)[0], work.twice_alone(given), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("exchange", ["halo", "all"])
def test_bytes_are_those_computed(ranks: Any, exchange: str) -> None:
    given = work.problem(7, 60, 90)
    found = ranks(work.traffic, given, exchange)
    for counted, _ in found:
        for forward, received, back, sent in counted:
            assert forward == received > 0 and back == sent > 0
    if exchange == "halo":
        cost = partition_cost(gsp.Graph.from_edge_index(given[0], 60), ranks.size, "natural", [2, 2], torch.float64)
        for (counted, sizes), row in zip(found, cost, strict=True):
            assert sizes == tuple(row[k] for k in ("rows", "edges", "halo_rows", "sent_rows", "index_bytes"))
            assert row["step_bytes"] == 2 * counted[0][1] + counted[0][3]


def test_own_rows_are_added_meanwhile(ranks: Any) -> None:
    for log in ranks(work.in_between, work.problem(8, 60, 500)):
        assert [(what, back) for what, back, _ in log] == [
            ("departs", False),
            ("arrives", False),
            ("departs", True),
            ("arrives", True),
        ]
        assert log[1][2] > log[0][2] and log[3][2] > log[2][2], log


# Layers and trainings.

TRAININGS = [
    (kind, own, accelerate)
    for kind in ("sage", "sage_max", "gin", "gat", "gcn", "gcn_weighted", "transformer")
    for own, accelerate in ((False, False), (False, True), (True, False))
    if kind != "transformer" or not own
]


@pytest.mark.pyg
@pytest.mark.parametrize(("kind", "own", "accelerate"), TRAININGS)
def test_training(ranks: Any, kind: str, own: bool, accelerate: bool) -> None:
    """Losses, the first step's gradients and the last step's parameters; alike to the bit on all ranks."""
    given = work.problem(9, 60, 400)
    given[0][:, :6] = given[0][:, 6:12]  # twice
    how = kind, own, accelerate, 8, kind == "gcn_weighted"
    whole: Any = gsp.Graph.from_edge_index(given[0], 60) if own else given[0]
    losses, parameters, gradients = work.train(whole, given, *how)
    found = ranks(work.train_sharded, given, "community", *how)
    assert losses[-1] < losses[0]
    for other_losses, other_parameters, other_gradients in found:
        assert losses == pytest.approx(other_losses, rel=1e-9)
        for got, expected in zip(other_gradients, gradients, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)
        for got, expected in zip(other_parameters, parameters, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
        assert all(map(torch.equal, other_parameters, found[0][1])), "each rank has the same parameters"
    if kind == "sage":
        again = ranks(work.train_sharded, given, "community", *how)[0]
        assert again[0] == found[0][0] and all(map(torch.equal, again[1], found[0][1])), "the same bits again"


def test_gradients_of_some(three: Any) -> None:
    for a, b, c, d in three(work.some_gradients):
        assert torch.equal(a, torch.ones(2, 2)) and b is None and c is None
        assert torch.equal(d, torch.full((3,), 3.0, dtype=torch.float64))


# Sizes, and who passes what.


@pytest.mark.parametrize(("nodes", "edges"), [(0, 0), (1, 0), (1, 4), (2, 7), (40, 0)])
@pytest.mark.parametrize("order", ["natural", "community", "last"])
def test_few_nodes_and_none(ranks: Any, nodes: int, edges: int, order: str) -> None:
    edge_index = torch.randint(max(nodes, 1), (2, edges), generator=torch.Generator().manual_seed(1))
    expected = gsp.spmm(gsp.Graph.from_edge_index(edge_index, nodes), torch.arange(nodes).double().unsqueeze(1))
    for dtype, exchange in ((torch.int64, "halo"), (torch.int32, "all"), (torch.int32, "auto")):
        found = ranks(work.make, edge_index.to(dtype), nodes, order, exchange)
        assert sum(n for n, _, _ in found) == nodes
        assert all(torch.equal(whole, expected) for _, whole, _ in found)


def test_each_passes_its_own_rows(ranks: Any) -> None:
    edge_index, _, _, _ = work.problem(10, 50, 300)
    blocks = Blocks.even(50, ranks.size)
    own = [edge_index[:, blocks.owner(edge_index[1]) == r] for r in range(ranks.size)]
    expected = gsp.spmm(gsp.Graph.from_edge_index(edge_index, 50), torch.arange(50).double().unsqueeze(1))
    for given in (own, [edge_index, *own[1:]]):
        assert all(torch.equal(whole, expected) for _, whole, _ in ranks(work.make, given, 50))
    pieces = list(edge_index.tensor_split(ranks.size, 1))
    for well, said in ranks.answers(work.make, pieces, 50):
        assert not well and "ValueError: each rank must pass the whole edge_index" in said
    for well, said in ranks.answers(work.make, own, 50, "community"):
        assert not well and "for order='community' the first rank the whole" in said


def test_a_group_of_some(three: Any) -> None:
    given = work.problem(11, 30, 200)
    first, none, last = three(work.in_a_group, given)
    assert "not in the group" in none
    expected = gsp.spmm(gsp.Graph.from_edge_index(given[0], 30), given[1])
    for whole, grad in (first, last):
        close(whole, expected)
        assert torch.equal(grad, torch.tensor([4.0, 4.0]))


# Mistakes.


def test_a_mistake_on_one_rank_is_said_on_all(ranks: Any) -> None:
    good = torch.tensor([[0, 1], [1, 0]])
    for wrong, said in (
        (torch.tensor([[0, 9], [1, 0]]), "IndexError: edge 1 (9 -> 0)"),
        (good.float(), "TypeError: edge_index must have dtype"),
        (good.flatten(), "ValueError: edge_index must have shape [2, num_edges]"),
        (None, "TypeError: edge_index must be a torch.Tensor"),
    ):
        answers = ranks.answers(work.make, [good, wrong, good], 5)
        assert not any(well for well, _ in answers)
        assert said in answers[1][1], answers[1][1]
        assert "RuntimeError: rank 1 could not make its share" in answers[0][1]
    for well, text in ranks.answers(work.make, good, [5, 6, 5]):
        assert not well and "must agree on num_nodes" in text
    for well, text in ranks.answers(work.make, good, 5, ["natural", "hash", "hash"]):
        assert not well and "must agree on order and exchange" in text
    for well, text in ranks.answers(work.make, good, 5, "natural", ["halo", "all", "all"]):
        assert not well and "must agree on order and exchange" in text
    for well, text in ranks.answers(work.make, good, 5, torch.tensor([0, 0, 1, 2, 3])):
        assert not well and ("each row from 0 to 4 once" in text or "could not make" in text)
    assert all(n > 0 for n, _, _ in ranks(work.make, good, 5)), "the group lives on"


def test_mistakes_are_said(ranks: Any) -> None:
    for said in ranks(work.wrong_rows, work.problem(12, 20, 60)):
        assert len(said) == 6
        assert "cut features of the whole graph with .shard(x)" in said[0] and "nodes that rank" in said[1]
        assert "must be a torch.Tensor" in said[2] and "each of 20 nodes" in said[3]
        assert "were added" in said[4] and "[num_edges]" in said[5]


def test_wrong_weights_are_said(ranks: Any) -> None:
    """Parts of weights of the whole graph would fit the parts of a rank's."""
    for whole, few, number in ranks(work.wrong_weights, work.problem(14, 20, 61)):
        assert "num_edges = " in whole and "got [61]" in whole and "num_edges = " in few
        assert "must be a torch.Tensor, got float" in number


def test_inference_comes_first(ranks: Any) -> None:
    for first, other in ranks(work.inference_first, work.problem(15, 20, 60)):
        close(first, other)


def test_weights_that_are_written_past_torch(ranks: Any) -> None:
    for overlapped, exchanged in ranks(work.written_weights, work.problem(16, 20, 60)):
        close(overlapped, exchanged)


@pytest.mark.parametrize("when", ["making", "product"])
def test_nobody_waits_for_a_rank_that_is_gone(when: str) -> None:
    """The others have an error at once, or, whatever happened, after the group's timeout."""
    made = ranks_module.Ranks(2, seconds=5)
    try:
        made(torch.get_num_threads)  # they are up
        start = time.monotonic()
        answers = made.answers(work.ends, work.problem(13, 30, 200), when)
        assert time.monotonic() - start < 30
        assert not answers[1][0] and answers[1][1] == "it ended"
        assert not answers[0][0] and "Error" in answers[0][1]
    finally:
        made.close()


# One process.


def test_alone_is_unsharded() -> None:
    edge_index, x, w, _ = work.problem(14, 40, 300)
    graph, sharded = gsp.Graph.from_edge_index(edge_index, 40), ShardedGraph.from_edge_index(edge_index, 40)
    by = edge_index[1].argsort(stable=True)
    assert torch.equal(sharded.edge_index, edge_index[:, by]) and torch.equal(sharded.edge_id, by)
    assert sharded.edge_index is sharded.edge_index and sharded.num_halo == 0
    mine = sharded.shard_edges(w)
    assert torch.equal(sharded.shard(x), x) and torch.equal(sharded.gather(x), x) and sharded.exchange(x) is x
    for reduce in REDUCES:
        assert torch.equal(sharded.spmm(x, mine, reduce), gsp.spmm(graph, x, w, reduce))
        assert torch.equal(sharded.with_weight(mine).spmm(x, reduce=reduce), gsp.spmm(graph, x, w, reduce))
    assert sharded.bytes_received(8) == sharded.bytes_sent(8) == 0
    ordered = ShardedGraph.from_edge_index(edge_index, order="community", num_nodes=40)
    assert torch.equal(ordered.gather(ordered.spmm(ordered.shard(x))), gsp.spmm(graph, x))
    p = torch.nn.Parameter(torch.zeros(2))
    all_reduce_gradients([p])
    assert p.grad is None
    assert ShardedGraph.from_edge_index(edge_index, order=torch.arange(40)).num_nodes == 40
    assert gsp.distributed.ShardedGraph is ShardedGraph


@pytest.mark.pyg
@pytest.mark.parametrize("improved", [False, True])
@pytest.mark.parametrize("loops", [False, True])
def test_normalisation_is_that_of_pyg(improved: bool, loops: bool) -> None:
    from torch_geometric.nn.conv.gcn_conv import gcn_norm

    edge_index, x, w, _ = work.problem(15, 30, 200)
    edge_index[1, 20:26] = edge_index[0, 20:26]  # self loops, some of them twice
    loop = edge_index[0] == edge_index[1]
    last = torch.zeros(30, dtype=torch.long).scatter_reduce(0, edge_index[0, loop], loop.nonzero()[:, 0], "amax")
    counts = ~loop  # PyG has gradients for loops that others have replaced
    counts[last] = True
    for weight in (None, w.abs()):
        mine, theirs = ((None if weight is None else weight.clone().requires_grad_()) for _ in range(2))
        index, value = gcn_norm(edge_index, theirs, 30, improved, loops, dtype=torch.float64)
        sharded = ShardedGraph.from_edge_index(edge_index, 30)
        local = None if mine is None else sharded.shard_edges(mine)
        norm = sharded.gcn_norm(local, loops, improved, torch.float64)
        expected = gsp.spmm(gsp.Graph.from_edge_index(index, 30), x, value)
        close(norm.spmm(x), expected)
        if weight is not None:
            norm.spmm(x).pow(2).sum().backward()
            expected.pow(2).sum().backward()
            close(mine.grad[counts], theirs.grad[counts])
    lonely = ShardedGraph.from_edge_index(torch.tensor([[0], [1]]), 3).with_weight(torch.ones(1, requires_grad=True))
    norm = lonely.gcn_norm(add_self_loops=False)
    norm.spmm(torch.ones(3, 1)).sum().backward()
    assert lonely.weight.grad.isfinite().all()


def test_mistakes_alone() -> None:
    edges = torch.tensor([[0, 1], [1, 0]])
    for arguments, said in (
        ({"num_nodes": (2, 3)}, "bipartite"),
        ({"num_nodes": -1}, "0 or more"),
        ({"num_nodes": True}, "whole number"),
        ({"order": "best"}, "order must be one of natural, community, hash"),
        ({"exchange": "some"}, "exchange must be one of"),
        ({"order": Blocks((0, 1, 2))}, "2 blocks of 2 nodes; there are 1 ranks"),
        ({"group": object()}, "init_process_group"),
        ({"order": torch.tensor([0, 0])}, "once"),
        ({"order": Blocks((0, 2), torch.tensor([1, 1]))}, "order must hold each node from 0 to 1 once"),
    ):
        with pytest.raises(ValueError, match=said):
            ShardedGraph.from_edge_index(edges, **arguments)


# Blocks and what they cost.


def test_blocks() -> None:
    graph = gsp.Graph.from_edge_index(torch.stack([torch.arange(12) % 5, torch.tensor([4] * 8 + [0, 1, 2, 3])]), 5)
    assert Blocks.of(graph, 2, "natural").cuts == (0, 2, 5) and Blocks.of(graph, 7, "natural").parts == 7
    by_edges = Blocks.of(graph, 2, "natural", balance="edges")
    assert by_edges.cuts == (0, 5, 5)  # half of the edges are reached at the last node
    order = torch.tensor([4, 3, 2, 1, 0])
    blocks = Blocks.of(graph, 2, order, balance="edges")
    assert blocks.cuts == (0, 1, 5) and blocks.nodes(0).tolist() == [4] and blocks.rows(1) == 4
    assert blocks.place(torch.tensor([4, 0])).tolist() == [0, 4]
    assert blocks.owner(torch.arange(5)).tolist() == [0, 1, 1, 1, 1]
    assert Blocks((0, 0, 2, 2)).owner(torch.arange(2)).tolist() == [1, 1]
    assert torch.equal(Blocks.of(graph, 2, "hash").order.sort().values, torch.arange(5))
    for wrong in (lambda: Blocks((0,)), lambda: Blocks((1, 2)), lambda: Blocks((0, 3, 2)), lambda: Blocks.even(3, 0)):
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises(ValueError, match="order must hold each of 2 nodes"):
        Blocks((0, 2), torch.arange(3))
    with pytest.raises(ValueError, match="balance must be"):
        Blocks.of(graph, 2, balance="both")
    with pytest.raises(ValueError, match="number all nodes of a bipartite graph"):
        Blocks.of(gsp.Graph.from_edge_index(torch.tensor([[0], [1]]), (1, 2)), 2)


def test_cost_by_counting() -> None:
    edge_index, *_ = work.problem(16, 40, 150)
    graph = gsp.Graph.from_edge_index(edge_index, 40)
    for order in ("natural", "community", "hash"):
        blocks = Blocks.of(graph, 3, order)
        owner = blocks.owner(blocks.place(torch.arange(40))).tolist()
        pairs = list(zip(*edge_index.tolist(), strict=True))
        rows = partition_cost(graph, 3, order, (8, 4))
        assert rows == partition_cost(graph, 3, blocks, (8, 4))
        for r, row in enumerate(rows):
            into = [(s, d) for s, d in pairs if owner[d] == r]
            halo = {s for s, _ in into if owner[s] != r}
            sent = {(s, owner[d]) for s, d in pairs if owner[s] == r != owner[d]}
            assert row["rank"] == r and row["rows"] == owner.count(r) and row["edges"] == len(into)
            assert row["cut_edges"] == sum(owner[s] != r for s, _ in into)
            assert (row["halo_rows"], row["sent_rows"]) == (len(halo), len(sent))
            assert row["step_bytes"] == 4 * (12 * len(halo) + 4 * len(sent))
            assert row["input_bytes"] == 4 * 12 * row["rows"]
            assert row["buffer_bytes"] == 4 * 8 * (len(halo) + len(sent))
    (one,) = partition_cost(graph, 1, "natural")
    assert one["halo_rows"] == one["step_bytes"] == 0 and one["edges"] == 150
    for empty in (gsp.Graph.from_edge_index(edge_index[:, :0], 40), gsp.Graph.from_edge_index(edge_index[:, :0], 0)):
        assert sum(row["rows"] for row in partition_cost(empty, 4)) == empty.num_dst
    with pytest.raises(ValueError, match="widths"):
        partition_cost(graph, 2, widths=())
    with pytest.raises(ValueError, match="expected 2 of 40"):
        partition_cost(graph, 2, Blocks.even(40, 3))


def test_the_table_for_papers100m_is_what_its_code_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "scaling.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(def rank.*?)```", page, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out in page


# GPUs.


def _on_gpus(made: Any) -> None:
    try:
        for reduce, order, exchange, overlap in itertools.product(
            REDUCES, ("natural", "community"), ("halo", "all"), (True, False)
        ):
            for kind in ("random", "whole"):
                given = work.problem(17, 300, 4000, kind, torch.float32)
                alone = work.products_alone(given, reduce, True, "cuda")
                how = given, reduce, True, order, exchange, overlap, "cuda"
                found = made(work.products, *how)[0]
                assert all(map(torch.equal, found, made(work.products, *how)[0])), "the same bits again"
                for got, expected in zip(found, alone, strict=True):
                    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
                if kind == "whole" and reduce != "mean":
                    assert all(map(torch.equal, found, alone))
    finally:
        made.close()


@pytest.mark.gpu
def test_two_ranks_on_one_gpu() -> None:
    """Through gloo, which takes CUDA tensors; NCCL wants a GPU for each rank."""
    _on_gpus(ranks_module.Ranks(2))


@pytest.mark.gpu
def test_a_gpu_for_each_rank() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    _on_gpus(ranks_module.Ranks(2, "cpu:gloo,cuda:nccl"))
