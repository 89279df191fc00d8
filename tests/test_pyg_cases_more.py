"""More of what was reported of other implementations, where it concerns PyG: dtypes, widths, copies, processes."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from pyg_layers import Plain, assert_same, kernel_calls, outputs_and_gradients, tg
from test_pyg_cases import run, same
from torch import Tensor, nn

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import cache

pytestmark = pytest.mark.pyg

AGGRS = ("sum", "mean", "max", "min")


def test_h05_own_layers_and_existing_self_loops(device: str) -> None:
    edges, w = torch.tensor([[0, 0, 1], [0, 1, 0]], device=device), torch.tensor([3.0, 1, 1], device=device)
    x = torch.tensor([[2.0], [4.0]], device=device)
    conv = gsp.nn.GCNConv(1, 1, bias=False).to(device)
    nn.init.ones_(conv.lin.weight)
    for adjacency in (edges, gsp.Graph.from_edge_index(edges, 2)):
        for _ in range(2):
            same(conv(x, adjacency, w), [[2.914213562], [2.707106781]])
            same(conv(x, adjacency), [[3], [3]])


@pytest.mark.parametrize("improved", [False, True])
def test_h05_parallel_self_loops(improved: bool, device: str) -> None:
    """One of them is kept. PyG gives the gradient of that one to all of them; ours is the derivative."""
    edges = torch.tensor([[0, 0, 0, 1, 2, 2], [0, 0, 1, 0, 2, 2]], device=device)
    w = torch.tensor([3.0, 5, 1, 1, 2, 4], dtype=torch.float64, device=device, requires_grad=True)
    x = torch.tensor([[1.0], [2], [3]], dtype=torch.float64, device=device, requires_grad=True)
    theirs = tg.GCNConv(1, 1, improved=improved).double().to(device)
    ours = gsp.nn.GCNConv(1, 1, improved=improved).double().to(device)
    ours.load_state_dict(theirs.state_dict())
    assert torch.autograd.gradcheck(lambda x, w: ours(x, edges, w), (x, w))
    if device == "cuda":
        return  # where chance decides which one PyG keeps
    torch.testing.assert_close(ours(x, edges, w), theirs(x, edges, w))
    expected = torch.autograd.grad(theirs(x, edges, w).square().sum(), w)[0]
    with gsp.patch_pyg():  # a patched layer does what PyG does
        torch.testing.assert_close(torch.autograd.grad(theirs(x, edges, w).square().sum(), w)[0], expected)


def test_h09_odd_widths(device: str) -> None:
    e = torch.arange(211)
    edges = torch.stack([(7 * e + 3) % 37, (5 * e * e + e) % 37])
    plain = {1: 27, 3: 5, 7: 21, 33: 21, 129: -22, 257: 27}
    for width, total in plain.items():
        x = (31 * torch.arange(37).unsqueeze(1) + 17 * torch.arange(width)) % 13 - 6
        for dtype in (torch.float32, torch.float64):
            assert run(edges, x, "sum", e % 5 - 2, device=device, dtype=dtype)[0].sum() == total
            for aggr, weight in itertools.product(AGGRS, (None, e % 5 - 2)):
                out, grad, by_weight = run(edges, x, aggr, weight, device=device, dtype=dtype)
                leaf = x.to(device, dtype).requires_grad_()
                w = None if weight is None else weight.to(device, dtype).requires_grad_()
                expected = Plain(aggr)(leaf, edges.to(device), w)
                expected.sum().backward()
                same(out, expected.detach())
                same(grad, leaf.grad)
                if w is not None:
                    same(by_weight, w.grad)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.float64, torch.float16])
def test_h14_two_dtypes(x_dtype: torch.dtype, w_dtype: torch.dtype, device: str) -> None:
    """The dtype that PyG gives, to the digit; each gradient in that of its leaf."""
    edges = torch.tensor([[0, 1, 1], [1, 0, 1]], device=device)
    for aggr in AGGRS:
        layer = Plain(aggr)
        x = torch.tensor([[1.0], [3.0]], dtype=x_dtype, device=device)
        w = torch.tensor([0.1, 2, 0.3], dtype=w_dtype, device=device)

        def call(x: Tensor, w: Tensor, layer: nn.Module = layer) -> Tensor:
            return layer(x, edges, w)  # type: ignore[no-any-return]

        expected = outputs_and_gradients(layer, call, x, w)
        with gsp.patch_pyg():
            got = outputs_and_gradients(layer, call, x, w)
        assert (
            [t.dtype for t in got]
            == [t.dtype for t in expected]
            == [torch.promote_types(x_dtype, w_dtype), x_dtype, w_dtype]
        )
        assert_same(got, expected)


@pytest.mark.parametrize(("dtype", "total"), [(torch.float16, 5000), (torch.bfloat16, 4992)])
def test_h15_sums_that_stall(dtype: torch.dtype, total: int, device: str) -> None:
    """A deliberate difference: accumulated in float32, whatever torch's own scatter does."""
    edges = torch.stack([torch.arange(5000), torch.full((5000,), 5000)])
    x = torch.ones(5001, 3)
    for weight in (None, torch.ones(5000)):
        out, grad, by_weight = run(edges, x, "sum", weight, device=device, dtype=dtype)
        assert out[5000].tolist() == [total] * 3 and out[:5000].count_nonzero() == 0
        assert bool((grad[:5000] == 1).all())  # type: ignore[index]
        assert by_weight is None or bool((by_weight == 3).all())
        assert run(edges, x, "mean", weight, device=device, dtype=dtype)[0][5000].tolist() == [1] * 3


def test_h24_copies_of_data_that_own_a_graph(device: str, fresh_cache: None) -> None:
    """Data and EdgeIndex that were used: a copy lives on when the original is gone, and is changed alone."""
    from torch_geometric import EdgeIndex
    from torch_geometric.data import Data

    plain = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]], device=device)
    x = torch.randn(3, 2, device=device)
    layer = tg.GraphConv(2, 2).to(device)
    expected = layer(x, plain)
    with gsp.patch_pyg():
        for make in (lambda: plain.clone(), lambda: EdgeIndex(plain.clone(), sparse_size=(3, 3))):
            data = Data(x=x, edge_index=make())
            torch.testing.assert_close(layer(data.x, data.edge_index), expected)
            for again in (copy.deepcopy(data), pickle.loads(pickle.dumps(data)), data.clone()):
                torch.testing.assert_close(layer(again.x, again.edge_index), expected)
            kept = copy.deepcopy(data)
            del data
            torch.testing.assert_close(layer(kept.x, kept.edge_index), expected)
            if type(kept.edge_index) is Tensor:
                kept.edge_index[:, 0] = kept.edge_index[:, 1]
                other = kept.edge_index.clone()
                now = layer(kept.x, kept.edge_index)
                gsp.clear_cache()
                torch.testing.assert_close(now, layer(kept.x, other))
                assert not torch.allclose(now, expected)


@pytest.mark.gpu
def test_h33_no_message_is_ever_written() -> None:
    """Under the patch, with a weight that learns: 7.2 GB of messages that do not exist."""
    n, edges, width = 14_000, 9_000_000, 200
    index = torch.randint(n, (2, edges), device="cuda")
    x = torch.randn(n, width, device="cuda", requires_grad=True)
    w = torch.randn(edges, device="cuda", requires_grad=True)
    for aggr, weight in itertools.product(("sum", "mean", "max"), (None, w)):
        with gsp.patch_pyg():
            Plain(aggr)(x, index, weight).sum().backward()  # makes the graph
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            Plain(aggr)(x, index, weight).sum().backward()
            torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before < 1 << 30
    gsp.clear_cache()
    assert cache.cached_graphs() == 0


# ---------------------------------------------------------------------- H22 c


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleList([tg.GCNConv(3, 4), tg.SAGEConv(4, 4, aggr="max"), tg.GATConv(4, 2)]).double()


def _batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(9, 3, generator=g, dtype=torch.float64), torch.randint(9, (2, 20), generator=g)


class _Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = _net()

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        for layer in self.net:
            x = layer(x, index).relu()
        return x.square().mean()


def _train(rank: int, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    with gsp.patch_pyg():
        calls = kernel_calls()
        model = nn.parallel.DistributedDataParallel(_Whole())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(5):
            optimizer.zero_grad()
            loss = model(*_batch(rank, step))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert kernel_calls() > calls
    results.put((rank, losses, [p.detach().tolist() for p in model.parameters()]))
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_h22_two_ranks_train_as_one_process(tmp_path: Path) -> None:
    model = _Whole()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected: list[list[float]] = []
    for step in range(5):
        optimizer.zero_grad()
        both = [model(*_batch(rank, step)) for rank in (0, 1)]
        (sum(both) / 2).backward()
        optimizer.step()
        expected.append([loss.item() for loss in both])
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    ranks = [context.Process(target=_train, args=(rank, str(tmp_path), results)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
    for _ in ranks:
        rank, losses, parameters = results.get()
        assert losses == pytest.approx([e[rank] for e in expected], rel=1e-6)
        for got, p in zip(parameters, model.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), p.detach())
