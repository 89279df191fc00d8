"""Arrays of more than 2^31 elements: features, results, arguments, and what edges have, by heads and by columns.

Each test is run on a small graph too, so that it is known to be right before it is run on a large one. All numbers are
such that sums are exact. More of the kind: H08 in test_cases.py; offsets of the CUDA kernels under emulation in
emu/test_large.cpp and, beside each kernel, in the files of its own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import _native
from gnn_spmm_plugin.functional_attention import attend
from gnn_spmm_plugin.functional_messages import sum_messages

GIB = 1 << 30
DEGREE, COLUMNS = 256, 64
LARGE_NODES = 131_104
assert LARGE_NODES * DEGREE * COLUMNS > 2**31
sizes = pytest.mark.parametrize("nodes", [37, pytest.param(LARGE_NODES, marks=pytest.mark.large)])


@pytest.fixture(autouse=True)
def returned() -> Iterator[None]:
    """Memory of a test is not kept for the next."""
    yield
    gsp.clear_cache()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def needs(device: str, gib: float, nodes: int) -> None:
    """Skips where there is not as much memory as a large test takes at its height."""
    if nodes < LARGE_NODES:
        return
    free = (
        torch.cuda.mem_get_info()[0] if device == "cuda" else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    )
    if device == "cpu":  # what files occupy is given back
        with open("/proc/meminfo") as f:
            free = next(int(line.split()[1]) << 10 for line in f if line.startswith("MemAvailable"))
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB, {free / GIB:.0f} are free")


def graph_of(nodes: int, device: str) -> tuple[gsp.Graph, Tensor, Tensor]:
    """Each node with as many edges, the last node's first, so that row order is not the caller's; and both ends."""
    e = torch.arange(nodes * DEGREE, device=device)
    dst = (nodes - 1) - e // DEGREE
    src = (e * 7 + e // DEGREE) % nodes
    graph = gsp.Graph.from_edge_index(torch.stack([src, dst]), nodes)
    assert graph.perm is not None
    return graph, src.int(), dst.int()


def per_node(nodes: int, device: str, step: int, modulus: int, *shape: int) -> Tensor:
    """``[nodes, *shape]`` float16 of small integers."""
    inner = torch.arange(math.prod(shape), device=device).view(shape)
    outer = torch.arange(nodes, device=device).view(-1, *[1] * len(shape))
    return ((step * outer + inner) % modulus).half()


def chunks(edges: int) -> Iterator[slice]:
    """Of the edges, some at a time; the first fifth and the last of a large graph."""
    step = 1 << 20
    for begin in range(0, edges, step):
        if edges <= 5 * step or not edges // 5 < begin < edges - edges // 5:
            yield slice(begin, min(begin + step, edges))


@sizes
def test_products_of_edges_and_heads(device: str, nodes: int) -> None:
    needs(device, 8, nodes)
    graph, src, dst = graph_of(nodes, device)
    a, b = per_node(nodes, device, 1, 5, COLUMNS, 1), per_node(nodes, device, 3, 7, COLUMNS, 1)
    got = gsp.sddmm(graph, a, b)
    assert got.shape == (nodes * DEGREE, COLUMNS)
    for part in chunks(len(got)):
        assert torch.equal(got[part], (a[dst[part]] * b[src[part]]).squeeze(2))


@sizes
def test_softmax_of_edges_and_heads(device: str, nodes: int) -> None:
    """Of every row as many edges of as many logits of 0 take part, by head; the gradient is +-1 of their share."""
    needs(device, 18, nodes)
    graph, _, _ = graph_of(nodes, device)
    edges = nodes * DEGREE
    e, h = torch.arange(edges, device=device).view(-1, 1), torch.arange(COLUMNS, device=device)
    logits = torch.zeros(edges, COLUMNS, dtype=torch.float16, device=device)
    for part in (slice(i, i + (1 << 20)) for i in range(0, edges, 1 << 20)):
        logits[part].masked_fill_((e[part] // 2) % 4 < h % 4, -torch.inf)  # 4, 3, 2 or 1 of 4 pairs are left
    csr = graph._csr
    p = _native.edge_softmax(csr.rowptr, csr.perm, logits)
    share = (1 / (DEGREE * (4 - h % 4) / 4)).half()
    for part in chunks(edges):
        assert torch.equal(p[part], torch.where(logits[part] == 0, share, 0))
    grad = logits  # in its place: 8 * (+1, -1, +1, ...)
    grad[0::2], grad[1::2] = 8, -8
    back = _native.edge_softmax_backward(csr.rowptr, csr.perm, p, grad)
    for part in chunks(edges):
        assert torch.equal(back[part], p[part] * grad[part])


@sizes
@pytest.mark.parametrize("kernel", ["", "pcsr"])
def test_weights_of_edges_and_heads(device: str, nodes: int, kernel: str) -> None:
    if kernel and device == "cpu":
        pytest.skip("a kernel of GPUs")
    needs(device, 40 if kernel else 18, nodes)
    graph, src, dst = graph_of(nodes, device)
    edges = nodes * DEGREE
    plan = gsp.plan(graph, COLUMNS, torch.float16, kernel=kernel) if kernel else None
    x = per_node(nodes, device, 1, 3, COLUMNS, 1)
    weight = torch.zeros(edges, COLUMNS, dtype=torch.float16, device=device)
    weight[0::DEGREE] = per_node(nodes, device, 5, 4, COLUMNS)  # of the first edge of each row
    weight[DEGREE - 1 :: DEGREE] = 2  # and the last
    want = x[src[0::DEGREE]].squeeze(2) * weight[0::DEGREE] + 2 * x[src[DEGREE - 1 :: DEGREE]].squeeze(2)
    assert torch.equal(gsp.spmm(graph, x, weight, plan=plan).squeeze(2).flip(0), want)
    if device == "cpu" and nodes == LARGE_NODES:
        return
    for t in (x, weight):
        t.requires_grad_()
    out = gsp.spmm(graph, x, weight, plan=plan)
    up = per_node(nodes, device, 1, 2, COLUMNS, 1)
    of_x, of_weight = torch.autograd.grad(out, (x, weight), up)
    want_x = torch.zeros(nodes, COLUMNS, device=device)
    for place in (0, DEGREE - 1):
        rows = dst[place::DEGREE].long()
        want_x.index_add_(0, src[place::DEGREE], up[rows, :, 0].float() * weight.detach()[place::DEGREE])
    assert torch.equal(of_x.squeeze(2), want_x.half())
    for part in chunks(edges):
        assert torch.equal(of_weight[part], (up[dst[part]] * x.detach()[src[part]]).squeeze(2))


@sizes
@pytest.mark.parametrize("score", ["sum", "pair", "dot"])
def test_attention_of_edges_and_heads(device: str, nodes: int, score: str) -> None:
    """Equal scores: a mean over the neighbours."""
    needs(device, 20, nodes)
    graph, src, _ = graph_of(nodes, device)
    x = per_node(nodes, device, 1, 3, COLUMNS, 1)
    ones = torch.ones(nodes, COLUMNS, 1, dtype=torch.float16, device=device)
    given = {"sum": (ones[..., 0], ones[..., 0]), "dot": (ones, ones), "pair": (ones, ones, ones[0])}[score]
    got = attend(graph, x, score, given, slope=0.2).squeeze(2)
    want = gsp.spmm(graph, x.float().flatten(1), reduce="mean")
    torch.testing.assert_close(got.float(), want, rtol=2e-3, atol=2e-3)
    assert int(src.max()) == nodes - 1


@sizes
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_messages_of_edges(device: str, nodes: int, reduce: str) -> None:
    """Features of edges that matter for the first and the last edge of each row alone: -2 makes the others nothing."""
    needs(device, 12, nodes)
    graph, src, _ = graph_of(nodes, device)
    edges = nodes * DEGREE
    x = per_node(nodes, device, 1, 3, COLUMNS).requires_grad_()
    e = torch.full((edges, COLUMNS), -2, dtype=torch.float16, device=device)
    for place in (0, DEGREE - 1):
        e[place::DEGREE] = per_node(nodes, device, 1, 6, COLUMNS) + 1
    e.requires_grad_()
    out = sum_messages(graph, x, e, reduce=reduce)
    want = sum(x[src[place::DEGREE]].detach() + e.detach()[place::DEGREE] for place in (0, DEGREE - 1))
    assert torch.equal(out.detach().flip(0), want / (1 if reduce == "sum" else DEGREE))  # type: ignore[operator]
    of_e = torch.autograd.grad(out, e, torch.ones_like(out))[0]
    one = 1 / (1 if reduce == "sum" else DEGREE)
    for part in chunks(edges):
        assert torch.equal(of_e[part], (x.detach()[src[part]] + e.detach()[part] > 0).half() * one)


@pytest.mark.parametrize("sources", [1500, pytest.param(8_389_632, marks=pytest.mark.large)])
@pytest.mark.parametrize(
    ("reduce", "tie", "kernel"),
    [("max", "first", ""), ("min", "split", ""), ("sum", "first", "pcsr"), ("mean", "first", "pcsr")],
)
def test_large_features_and_results(device: str, sources: int, reduce: str, tie: str, kernel: str) -> None:
    """The graph of H08 both ways: x, the result, its arguments and gradients have more than 2^31 elements."""
    if kernel and device == "cpu":
        pytest.skip("a kernel of GPUs")
    nodes = LARGE_NODES if sources > 2000 else 0
    needs(device, 50 if device == "cuda" else 20, nodes)
    width, first = 256, sources - 1024
    rows = torch.arange(1024, device=device)
    graph = gsp.Graph.from_edge_index(torch.stack([first + rows, rows]), (sources, 1024))
    plan, back_plan = (
        gsp.plan(g, width, torch.float16, reduce, kernel=kernel) if kernel else None for g in (graph, graph.T)
    )
    x = torch.zeros(sources, width, dtype=torch.float16, device=device)
    x[first:] = (torch.arange(first, sources, device=device) % 97).half().unsqueeze(1)
    out = gsp.spmm(graph, x.requires_grad_(), reduce=reduce, tie=tie, plan=plan)
    assert torch.equal(out, x.detach()[first:])
    out.sum(dtype=torch.float32).backward()
    assert x.grad is not None and bool((x.grad[first:] == 1).all()) and int(x.grad[:first].count_nonzero()) == 0
    small, x = x.detach()[first:].clone().requires_grad_(), torch.empty(0)
    del out
    if device == "cpu" and nodes:
        return
    big = gsp.spmm(graph.T, small, reduce=reduce, tie=tie, plan=back_plan)
    assert torch.equal(big[first:], small) and int(big[:first].count_nonzero()) == 0
    big.backward(torch.ones_like(big))
    assert small.grad is not None and bool((small.grad == 1).all())
    if kernel:
        return
    del big
    _, arg = gsp.spmm(graph.T, small.detach(), reduce=reduce, return_arg=True)
    assert torch.equal(arg[first:], rows.unsqueeze(1).expand(-1, width)) and bool((arg[:first] == -1).all())


@pytest.mark.parametrize("edges", [5000, pytest.param(2**31 + 1024, marks=[pytest.mark.large, pytest.mark.gpu])])
def test_more_edges_than_32_bits_count(edges: int) -> None:
    """64-bit indices: 16 rows of 2^27 edges each, from three sources."""
    device = "cuda" if edges > 5000 else "cpu"
    needs(device, 110, LARGE_NODES if edges > 5000 else 0)
    per_row, kind = edges // 16, torch.int64
    rowptr = torch.arange(17, device=device, dtype=kind) * per_row
    rowptr[-1] = edges
    col = torch.arange(edges, device=device).remainder_(3)
    x = torch.tensor([[1.0, 4.0], [1.0, 1.0], [1.0, 1.0]], device=device)
    last = edges - 15 * per_row
    if edges > 5000:
        graph = gsp.Graph.from_csr(rowptr, col, 3)
        assert graph._csr.col.dtype == kind
        mean, top = gsp.spmm(graph, x, reduce="mean"), gsp.spmm(graph, x, reduce="max")
    else:  # the same kernels on the CPU
        lengths, config = 128 << 32 | 2048, [128, 2048, 0, 0, 0, 0, 0, 0, 1]
        mean = _native.row_sum(rowptr, col, x, lengths, True)
        top = _native.spmm_arg(rowptr, col, None, None, x, None, config, False)[0]
    torch.testing.assert_close(mean, torch.tensor([1.0, 2.0], device=device).expand(16, 2), rtol=5e-3, atol=0)
    assert torch.equal(top, torch.tensor([1.0, 4.0], device=device).expand(16, 2)) and last >= per_row


@pytest.mark.gpu
@pytest.mark.large
def test_mean_of_a_row_of_more_edges_than_32_bits_count() -> None:
    """4.3 billion edges of one row, by the raw operator: a Graph of it would not fit beside it."""
    needs("cuda", 40, LARGE_NODES)
    edges = 2**32 + 2**28
    rowptr = torch.tensor([0, edges], device="cuda")
    col = torch.zeros(edges, dtype=torch.int64, device="cuda")
    x = torch.full((1, 2), 2.0**-10, dtype=torch.float64, device="cuda")
    out = _native.row_sum(rowptr, col, x, 128 << 32 | 2048, True)
    assert torch.equal(out, x)


@pytest.mark.gpu
@pytest.mark.parametrize("operator", ["spmm", "sddmm", "softmax", "pair", "gathers"])
def test_columns_and_heads_beyond_32_bits_are_refused(operator: str) -> None:
    """Without a row, for which 2^31 columns would take memory."""
    wide, index = torch.empty(0, 2**31, device="cuda"), {"dtype": torch.int32, "device": "cuda"}
    rowptr, col = torch.zeros(1, **index), torch.empty(0, **index)  # type: ignore[call-overload]
    call = {
        "spmm": lambda: _native.row_sum(rowptr, col, wide, 128 << 32 | 2048, False),
        "sddmm": lambda: _native.sddmm(rowptr, col, None, wide, wide, 0),
        "softmax": lambda: _native.edge_softmax(rowptr, None, wide),
        "pair": lambda: _native.pair_score(rowptr, col, None, wide, wide, torch.empty(2**31, 1, device="cuda"), 0.2),
        "gathers": lambda: torch.ops.gnn_spmm_plugin._speed_of_light(col, None, wide, 0, 16),
    }[operator]
    with pytest.raises(RuntimeError, match=r"got 2147483648 (columns|heads), expected fewer than 2\^31 - 1024"):
        call()


@pytest.mark.gpu
def test_more_columns_than_a_launch_can_have() -> None:
    """Rows of one vector a thread, of which a grid has no more than 65,535 times 32."""
    graph = gsp.Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]], device="cuda"), 2)
    x = torch.ones(2, 65_536 * 32 + 1, device="cuda", dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"more columns than one launch can have; pass the features in parts"):
        gsp.spmm(graph, x, reduce="min")
    assert torch.equal(gsp.spmm(graph, x[:, : 65_535 * 32], reduce="min"), x[:, : 65_535 * 32])


def test_rows_beyond_32_bits_are_refused() -> None:
    """An int32 row pointer of more rows than it could count, in memory that is never touched."""
    rowptr = torch.empty(2**31 + 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"rowptr is .*, expected int64 for 2147483648 rows"):
        _native.inverse_degree(rowptr, torch.float32)
