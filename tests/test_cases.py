"""Bugs that others reported, as tests: with the numbers of each report, and with its whole kind where that is cheap.

The names are those of the collection that they come from; what belongs to the PyG and DGL integrations is tested there.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
import torch
from checks import check_spmm
from strategies import REDUCES, Edges, lay_out, values

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import reference
from gnn_spmm_plugin.cache import graph_of
from gnn_spmm_plugin.plan import WARM_AFTER

FLOATS = (torch.float32, torch.float64)


def graph(edge_index: list[list[int]], n: int | tuple[int, int], device: str) -> gsp.Graph:
    return gsp.Graph.from_edge_index(torch.tensor(edge_index, dtype=torch.int64, device=device).view(2, -1), n)


def tensor(data: object, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(data, dtype=dtype, device=device, requires_grad=dtype.is_floating_point)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_h01_all_negative_neighbours_and_isolated_nodes(device: str, dtype: torch.dtype) -> None:
    g = graph([[0, 1, 3], [2, 2, 4]], 5, device)
    data = [[-4, 1], [-2, 5], [7, 7], [-1, -6], [9, 9]]
    x = tensor(data, device, dtype)
    out = gsp.spmm(g, x, reduce="max")
    assert out.tolist() == [[0, 0], [0, 0], [-2, 5], [0, 0], [-1, -6]]
    out.sum().backward()
    assert x.grad.tolist() == [[0, 0], [1, 1], [0, 0], [1, 1], [0, 0]]
    assert gsp.spmm(g, x, reduce="min").tolist() == [[0, 0], [0, 0], [-4, 1], [0, 0], [-1, -6]]
    for shift, reduce in itertools.product((-100.0, 100.0), REDUCES):
        check_spmm(g, x.detach() + shift, None, reduce)


def test_h02_no_edges(device: str) -> None:
    g = graph([[], []], 3, device)
    for reduce in REDUCES:
        x = torch.rand(3, 2, device=device).requires_grad_()
        weight = torch.rand(0, device=device).requires_grad_()
        out = gsp.spmm(g, x, weight, reduce)
        assert out.tolist() == [[0, 0]] * 3
        out.sum().backward()
        assert x.grad is not None and x.grad.tolist() == [[0, 0]] * 3
        assert weight.grad is not None and weight.grad.shape == (0,)
    x_b = tensor([[1], [2], [3]], device)
    empty, loop = graph([[], []], (4, 3), device), graph([[0], [1]], 3, device)
    assert (gsp.spmm(empty, torch.rand(4, 1, device=device)) + gsp.spmm(loop, x_b)).tolist() == [[0], [1], [0]]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_h03_more_parallel_edges_than_matrix_cells(device: str, dtype: torch.dtype) -> None:
    g = graph([[2] * 11, [0] * 11], 3, device)
    x = tensor([[10, 20, 30], [7, 7, 7], [1, 2, 3]], device, dtype)
    weight = tensor(list(range(1, 12)), device, dtype)
    for reduce, plain, weighted in (
        ("sum", [11, 22, 33], [66, 132, 198]),
        ("mean", [1, 2, 3], [6, 12, 18]),
        ("max", [1, 2, 3], [11, 22, 33]),
        ("min", [1, 2, 3], [1, 2, 3]),
    ):
        assert gsp.spmm(g, x, reduce=reduce).tolist() == [plain, [0] * 3, [0] * 3]
        assert gsp.spmm(g, x, weight, reduce).tolist() == [weighted, [0] * 3, [0] * 3]
    gsp.spmm(g, x, weight).sum().backward()
    assert weight.grad.tolist() == [6] * 11


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_h04_weights_follow_the_callers_order(device: str, dtype: torch.dtype, fresh_cache: None) -> None:
    edge_index = torch.tensor([[3, 0, 2, 1, 0], [1, 2, 0, 2, 1]], device=device)
    x = tensor([[1], [2], [3], [4]], device, dtype)
    weight = tensor([1, 10, 100, 1000, 10000], device, dtype)
    for _ in range(3):
        out = gsp.spmm(graph_of(edge_index[1], edge_index[0], 4, 4), x, weight)
        assert out.flatten().tolist() == [300, 10004, 2010, 0]
        grads = torch.autograd.grad(out.sum(), (weight, x))
        assert grads[0].tolist() == [4, 1, 3, 2, 1] and grads[1].flatten().tolist() == [10010, 1000, 100, 1]
        other = weight.detach().flip(0)
        again = gsp.spmm(graph_of(edge_index[1], edge_index[0], 4, 4), x, other)
        assert again.flatten().tolist() == [300, 4 * 10000 + 1, 1000 + 20, 0]


def test_h06_trailing_isolated_node(device: str) -> None:
    g = graph([[0, 1, 3], [1, 0, 4]], 5, device)
    assert gsp.spmm(g, tensor([[1], [2], [4], [8], [16]], device)).tolist() == [[2], [1], [0], [0], [8]]


@pytest.mark.parametrize("bad", [[[0, 4], [1, 2]], [[0, -1], [1, 2]], [[0, 1], [1, 4]]], ids=str)
def test_h07_out_of_range(device: str, bad: list[list[int]], fresh_cache: None) -> None:
    offender = next(v for v in itertools.chain(*bad) if not 0 <= v < 4)
    with pytest.raises(IndexError, match=rf"{offender}, .*\[0, 3\]"):
        graph(bad, 4, device)
    index = torch.tensor(bad, device=device)
    with pytest.raises(IndexError, match=rf"{offender}, .*\[0, 3\]"):
        graph_of(index[1], index[0], 4, 4)
    x = torch.arange(8.0, device=device).view(4, 2)
    assert gsp.spmm(graph([[0, 1], [2, 2]], 4, device), x).tolist() == [[0, 0], [0, 0], [2, 4], [0, 0]]


@pytest.mark.large
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_h08_more_than_2_to_the_31_elements(device: str, reduce: str) -> None:
    """4.3 GB of features and as much of gradients."""
    n, width = 8_389_632, 256
    first = n - 1024
    x = torch.zeros(n, width, dtype=torch.float16, device=device)
    x[first:] = (torch.arange(first, n, device=device) % 97).half().unsqueeze(1)
    x.requires_grad_()
    rows = torch.arange(1024, device=device)
    g = gsp.Graph.from_edge_index(torch.stack([first + rows, rows]), (n, 1024))
    out = gsp.spmm(g, x, reduce=reduce)
    assert torch.equal(out, ((first + rows) % 97).half().unsqueeze(1).expand(1024, width))
    assert out[5, 0] == 53 and out[1023, 0] == 4
    out.sum(dtype=torch.float32).backward()
    assert x.grad is not None and bool((x.grad[first:] == 1).all())
    assert int(x.grad[:first].count_nonzero()) == 0
    # and where the large side is the result
    del out
    x.grad = None
    back = gsp.spmm(g.T, x.detach()[first:], reduce=reduce)
    assert torch.equal(back[first:], x.detach()[first:]) and int(back[:first].count_nonzero()) == 0


H09_ISOLATED = [3, 8, 12, 13, 14, 15, 17, 20, 21, 23, 25, 27, 28, 31, 33, 34, 35, 36]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float16, torch.bfloat16], ids=str)
def test_h09_odd_widths(device: str, dtype: torch.dtype) -> None:
    """Small integers: exact in every format."""
    e = torch.arange(211)
    g = gsp.Graph.from_edge_index(torch.stack([(7 * e + 3) % 37, (5 * e * e + e) % 37]).to(device), 37)
    weight = (e % 5 - 2).to(device, dtype)
    plain = {1: 27, 3: 5, 7: 21, 33: 21, 129: -22, 257: 27}
    weighted = {1: 110, 3: 0, 7: 127, 33: 391, 129: 47, 257: 554}
    largest = {1: 152, 3: 478, 7: 1136, 33: 5340, 129: 20858, 257: 41560}
    for width in (1, 2, 3, 5, 7, 17, 31, 33, 63, 65, 127, 129, 257):
        i, f = torch.arange(37).unsqueeze(1), torch.arange(width)
        x = ((31 * i + 17 * f) % 13 - 6).to(device, dtype)
        check = ((3 * i + 5 * f) % 7 + 1).to(device)
        out, high = gsp.spmm(g, x, weight), gsp.spmm(g, x, weight, "max")
        assert out[H09_ISOLATED].count_nonzero() == 0 and high[H09_ISOLATED].count_nonzero() == 0
        if width in plain:
            assert out.double().sum() == plain[width]
            assert (out.double() * check).sum() == weighted[width]
            assert high.double().sum() == largest[width]
        for reduce, w in itertools.product(REDUCES, (None, weight)):
            wide = None if w is None else w.double()
            assert torch.equal(gsp.spmm(g, x, w, reduce), reference.spmm(g, x.double(), wide, reduce)[0].to(dtype))


def test_h10_strides_and_offsets(device: str) -> None:
    g = graph([[5, 1, 2], [0, 0, 3]], 6, device)
    x = torch.arange(12.0, device=device).view(2, 6).t()
    assert gsp.spmm(g, x).tolist() == [[6, 18], [0, 0], [0, 0], [2, 8], [0, 0], [0, 0]]
    leaf = tensor([[1, 2]], device)
    out = gsp.spmm(g, leaf.expand(6, 2))
    assert out.tolist() == [[2, 4], [0, 0], [0, 0], [1, 2], [0, 0], [0, 0]]
    out.sum().backward()
    assert leaf.grad.tolist() == [[3, 3]]
    x = torch.arange(21.0, device=device)[1:].view(5, 4)
    assert gsp.spmm(graph([[4, 1], [0, 0]], 5, device), x).tolist() == [[22, 24, 26, 28]] + [[0] * 4] * 4
    wide = torch.arange(48.0, device=device).view(6, 8)
    assert torch.equal(gsp.spmm(g, wide[:, ::2]), gsp.spmm(g, wide[:, ::2].contiguous()))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float16, torch.bfloat16], ids=str)
def test_h11_ties(device: str, dtype: torch.dtype) -> None:
    g = graph([[0, 1, 2], [3, 3, 3]], 4, device)
    twice = graph([[0, 0], [1, 1]], 2, device)
    third = torch.tensor(1 / 3, dtype=dtype).item()
    for tie, expected in (("first", [1, 0, 0, 0]), ("split", [third, third, third, 0])):
        x = tensor([[5], [5], [5], [1]], device, dtype)
        out = gsp.spmm(g, x, reduce="max", tie=tie)
        assert out[3, 0] == 5
        out.sum().backward()
        assert x.grad.flatten().tolist() == expected
        x = tensor([[4], [0]], device, dtype)
        gsp.spmm(twice, x, reduce="max", tie=tie).sum().backward()
        assert x.grad.flatten().tolist() == [1, 0]
    # the first in the caller's order, whatever its source
    x = tensor([[5], [5], [5], [1]], device, dtype)
    gsp.spmm(graph([[2, 0, 1], [3, 3, 3]], 4, device), x, reduce="max").sum().backward()
    assert x.grad.flatten().tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_h12_nan_in_every_order(device: str, order: tuple[int, ...]) -> None:
    x = tensor([[1, 2], [torch.nan, 4], [3, -1], [0, 0]], device)
    g = graph([list(order), [3, 3, 3]], 4, device)
    for reduce, second in (("max", 4), ("min", -1), ("sum", 5), ("mean", 5 / 3)):
        out = gsp.spmm(g, x, reduce=reduce)[3]
        assert out[0].isnan() and out[1].item() == pytest.approx(second)
    infinite = tensor([[-torch.inf], [-torch.inf], [0]], device)
    assert gsp.spmm(graph([[0, 1], [2, 2]], 3, device), infinite, reduce="max")[2, 0] == -torch.inf


def test_h13_integers(device: str) -> None:
    x = torch.tensor([[1, 2], [3, 4], [5, 6]], device=device)
    for reduce in REDUCES:
        with pytest.raises(TypeError, match=r"torch.int64.*\.float\(\)"):
            gsp.spmm(graph([[0, 1], [2, 2]], 3, device), x, reduce=reduce)
    index = torch.tensor([[0, 1], [2, 2]], device=device)
    expected = gsp.spmm(gsp.Graph.from_edge_index(index, 3), x.float())
    assert torch.equal(gsp.spmm(gsp.Graph.from_edge_index(index.int(), 3), x.float()), expected)
    for dtype in (torch.int16, torch.uint8, torch.float32, torch.bool):
        with pytest.raises(TypeError, match="int64"):
            gsp.Graph.from_edge_index(index.to(dtype), 3)


def test_h14_two_formats(device: str) -> None:
    g = graph([[0], [1]], 2, device)
    x, weight = tensor([[1], [0]], device), tensor([0.1], device, torch.float64)
    for reduce in REDUCES:
        out = gsp.spmm(g, x, weight, reduce)
        assert out.dtype == torch.float64 and out[1, 0].item() == 0.1
        grads = torch.autograd.grad(out.sum(), (x, weight))
        assert [t.dtype for t in grads] == [torch.float32, torch.float64]
        assert gsp.spmm(g, x.double(), weight.float(), reduce).dtype == torch.float64


@pytest.mark.parametrize(("dtype", "total"), [(torch.float16, 5000), (torch.bfloat16, 4992)], ids=str)
def test_h15_sums_that_stall(device: str, dtype: torch.dtype, total: int) -> None:
    leaves = list(range(5000))
    g = graph([leaves, [5000] * 5000], 5001, device)
    for width in (1, 16, 33):
        x = torch.ones(5001, width, dtype=dtype, device=device).requires_grad_()
        weight = torch.ones(5000, dtype=dtype, device=device).requires_grad_()
        assert gsp.spmm(g, x)[5000].tolist() == [total] * width
        assert gsp.spmm(g, x, weight)[5000].tolist() == [total] * width
        assert gsp.spmm(g, x, reduce="mean")[5000].tolist() == [1] * width
        back = gsp.spmm(g.T, torch.ones(5001, width, dtype=dtype, device=device))
        assert bool((back[:5000] == 1).all())
    # the gradients: of one source of many edges, and of a weight over many columns
    x = torch.ones(5001, 1, dtype=dtype, device=device).requires_grad_()
    gsp.spmm(g.T, x).sum(dtype=torch.float32).backward()
    assert x.grad[5000].item() == total
    one = graph([[0], [0]], 1, device)
    weight = torch.ones(1, dtype=dtype, device=device).requires_grad_()
    gsp.spmm(one, torch.ones(1, 5000, dtype=dtype, device=device), weight).sum(dtype=torch.float32).backward()
    assert weight.grad.item() == total


def test_h16_autocast(device: str) -> None:
    g = graph([[0, 1], [1, 0]], 2, device)
    dtypes = [torch.bfloat16, torch.float16] if device == "cuda" else [torch.bfloat16]
    for dtype, through_linear in itertools.product(dtypes, (False, True)):
        x, weight = tensor([[1, 1], [1, 1]], device), tensor([2, 3], device)
        with torch.autocast(device, dtype):
            inner = torch.nn.functional.linear(x, torch.eye(2, device=device)) if through_linear else x
            out = gsp.spmm(g, inner, weight)
        assert out.tolist() == [[3, 3], [2, 2]]
        out.float().sum().backward()
        assert weight.grad.tolist() == [2, 2] and x.grad.tolist() == [[2, 2], [3, 3]]
        assert x.grad.dtype == weight.grad.dtype == torch.float32


@pytest.mark.gpu
def test_h16_grad_scaler() -> None:
    g = graph([[0, 1], [1, 0]], 2, "cuda")
    layer = torch.nn.Linear(2, 2, device="cuda")
    weight = torch.tensor([2.0, 3.0], device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([*layer.parameters(), weight], lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)  # the default overflows float16 here, as it should
    for _ in range(3):
        with torch.autocast("cuda", torch.float16):
            loss = gsp.spmm(g, layer(torch.ones(2, 2, device="cuda")), weight, "mean").float().pow(2).sum()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert bool(weight.isfinite().all()) and weight.tolist() != [2, 3]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_h17_gradient_of_weights(device: str, dtype: torch.dtype) -> None:
    g = graph([[0, 0, 2], [1, 2, 1]], 3, device)
    upstream = torch.tensor([[1, 1], [1, 0], [0, 2]], dtype=dtype, device=device)
    for reduce, out_, grad_w, grad_x in (
        ("sum", [[0, 0], [-4.5, -5], [2, 4]], [1, 4, 5], [[0.5, 4], [0, 0], [-1, 0]]),
        ("mean", [[0, 0], [-2.25, -2.5], [2, 4]], [0.5, 4, 2.5], [[0.25, 4], [0, 0], [-0.5, 0]]),
    ):
        x, weight = tensor([[1, 2], [3, 4], [5, 6]], device, dtype), tensor([0.5, 2, -1], device, dtype)
        out = gsp.spmm(g, x, weight, reduce)
        out.backward(upstream)
        assert out.tolist() == out_ and weight.grad.tolist() == grad_w and x.grad.tolist() == grad_x


def test_h18_second_derivatives(device: str) -> None:
    g = graph([[0], [1]], 2, device)
    for reduce in REDUCES:
        x, weight = tensor([[3], [0]], device, torch.float64), tensor([2], device, torch.float64)
        (first,) = torch.autograd.grad((gsp.spmm(g, x, weight, reduce) ** 2).sum(), weight, create_graph=True)
        assert first.item() == 36
        by_weight, by_x = torch.autograd.grad(first.sum(), (weight, x), retain_graph=True)
        assert by_weight.item() == 18 and by_x[0, 0].item() == 24
        (first,) = torch.autograd.grad((gsp.spmm(g, x, weight, reduce) ** 2).sum(), x, create_graph=True)
        assert torch.autograd.grad(first.sum(), x)[0][0, 0].item() == 8
        x, weight = tensor([[2], [0]], device), tensor([3], device)
        out = gsp.spmm(g, x, weight, reduce).sum()
        out.backward(retain_graph=True)
        out.backward()
        assert x.grad[0, 0] == 6 and weight.grad.tolist() == [4]


def test_h23_numbers(device: str) -> None:
    """The eager half; tests of compiled code compare with it."""
    g = graph([[0, 0, 2], [1, 2, 1]], 3, device)
    x, weight = tensor([[1, 2], [3, 4], [5, 6]], device), tensor([0.5, 2, -1], device)
    assert gsp.spmm(g, x, weight, "mean").relu().sum().item() == 6


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_h27_directions(device: str, dtype: torch.dtype) -> None:
    index = torch.tensor([[0, 0, 3], [1, 2, 2]], device=device)
    x = tensor([[1], [10], [100], [1000]], device, dtype)
    forward = gsp.Graph.from_edge_index(index, 4)
    backward = gsp.Graph.from_edge_index(index, 4, flow="target_to_source")
    assert gsp.spmm(forward, x).flatten().tolist() == [0, 1, 1001, 0]
    assert gsp.spmm(backward, x).flatten().tolist() == [110, 0, 0, 100]
    assert torch.equal(gsp.spmm(forward.T, x), gsp.spmm(backward, x))
    g = graph([[0, 2, 2], [1, 4, 0]], (3, 5), device)
    x = tensor([[1], [2], [4]], device, dtype)
    out = gsp.spmm(g, x)
    assert out.flatten().tolist() == [4, 1, 0, 0, 4]
    out.sum().backward()
    assert x.grad.flatten().tolist() == [1, 0, 2]


def test_h28_mini_batches_build_only_what_they_use(device: str, fresh_cache: None) -> None:
    generator = torch.Generator().manual_seed(0)
    for ordered in (True, False):
        edge_index = torch.randint(1000, (2, 8000), generator=generator)
        if ordered:
            edge_index = edge_index[:, edge_index[1].argsort(stable=True)]
        edge_index = edge_index.to(device)
        x = torch.rand(1000, 16, device=device)
        before = gsp.stats()
        for _ in range(2):
            gsp.spmm(graph_of(edge_index[1], edge_index[0], 1000, 1000), x)
        after = gsp.stats()
        assert after["transposes_built"] == before["transposes_built"]
        assert after["sorts"] - before["sorts"] == int(not ordered)
        assert after["graphs_built"] - before["graphs_built"] == 1
        assert after["plan_hits"] - before["plan_hits"] == 1


@pytest.mark.slow
def test_h28_time_of_a_mini_batch_loop(device: str) -> None:
    """100 graphs, each used for two layers forward and backward once, against index_add on gathered messages."""

    def batches(ordered: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        made = []
        for i in range(100 if device == "cuda" else 20):
            n = 10_000 + 100 * i
            index = torch.randint(n, (2, 100_000), generator=generator)
            if ordered:
                index = index[:, index[1].argsort(stable=True)]
            made.append((index.to(device), torch.rand(n, 64, generator=generator).to(device)))
        return made

    def ours(index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return gsp.spmm(graph_of(index[1], index[0], x.shape[0], x.shape[0]), x)

    def plain(index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).index_add(0, index[1], x[index[0]])

    def spent(layer: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ordered: bool) -> float:
        todo = batches(ordered)
        gsp.clear_cache()
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for index, x in todo:
            leaf = x.requires_grad_()
            layer(index, layer(index, leaf).relu()).sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for ordered in (False, True):
        spent(ours, ordered), spent(plain, ordered)
        mine, theirs = (min(spent(layer, ordered) for _ in range(3)) for layer in (ours, plain))
        assert mine <= 1.1 * theirs, (ordered, mine, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("weighted", [False, True])
def test_h33_no_message_is_ever_written(reduce: str, weighted: bool) -> None:
    """9 million edges: 7.2 GB of messages that do not exist."""
    n, edges, width = 14_000, 9_000_000, 200
    generator = torch.Generator("cuda").manual_seed(0)
    index = torch.randint(n, (2, edges), generator=generator, device="cuda")
    x = torch.randn(n, width, generator=generator, device="cuda").requires_grad_()
    weight = torch.randn(edges, generator=generator, device="cuda").requires_grad_() if weighted else None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    g = gsp.Graph.from_edge_index(index, n)
    out = gsp.spmm(g, x, weight, reduce)
    built = torch.cuda.max_memory_allocated() - before
    # the output, 16 bytes an edge, what sorting needs, permuted weights
    assert built <= 4 * n * width + (reduce == "max") * 4 * n * width + 16 * edges + (
        64 << 20
    ) + 4 * edges * weighted + (40 * edges), built
    out.sum().backward()
    del out
    x.grad = None
    if weight is not None:
        weight.grad = None
    for _ in range(2):  # steady: nothing but results and, for a weight, its copy in row order
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = gsp.spmm(g, x, weight, reduce)
        forward = torch.cuda.max_memory_allocated() - before
        results = (2 if reduce == "max" else 1) * 4 * n * width
        assert forward <= results + 4 * edges * weighted + (64 << 20), forward
        torch.cuda.reset_peak_memory_stats()
        grad = torch.ones_like(out)
        before = torch.cuda.memory_allocated()
        out.backward(grad)
        backward = torch.cuda.max_memory_allocated() - before
        assert backward <= 2 * 4 * n * width + 3 * 4 * edges * weighted + (64 << 20), backward
        x.grad = None
        if weight is not None:
            weight.grad = None


def hub(n: int, edges: int, seed: int = 0) -> Edges:
    """Half of all edges go into node 0."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(n, (2, edges), generator=generator)
    index[1, : edges // 2] = 0
    return Edges(index[:, torch.randperm(edges, generator=generator)], n, n)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("reverse", [False, True])
def test_h34_one_hub_is_right(device: str, reduce: str, reverse: bool) -> None:
    e = hub(5000, 200_000)
    g = e.graph(device).T if reverse else e.graph(device)
    for width in (1, 16):
        x = values((5000, width), torch.float32, 1, device=device)
        check_spmm(g, x, None, reduce)
        check_spmm(g, x, values((200_000,), torch.float32, 2, device=device), reduce)
        out = gsp.spmm(g, x + 1, reduce=reduce)
        expected = reference.spmm(g, x.double() + 1, None, reduce)[0]
        assert torch.allclose(out[0].double(), expected[0], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize("width", [16, 128])
def test_h34_one_hub_takes_no_longer(device: str, width: int, reduce: str, reverse: bool) -> None:
    """Forward and backward against a uniform graph of the same size: 2.5 times at most on CUDA, 4 on the CPU."""
    n, edges = 50_000, 2_000_000
    generator = torch.Generator().manual_seed(1)
    uniform = Edges(torch.randint(n, (2, edges), generator=generator), n, n)

    def spent(e: Edges) -> float:
        g = e.graph(device).T if reverse else e.graph(device)
        x = values((n, width), torch.float32, 1, device=device).requires_grad_()
        grad = torch.ones(n, width, device=device)
        best = float("inf")
        for _ in range(WARM_AFTER + 20):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            gsp.spmm(g, x, reduce=reduce).backward(grad)
            if device == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        return best

    one, other = spent(hub(n, edges)), spent(uniform)
    assert one <= (2.5 if device == "cuda" else 4) * other, (one, other)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_h35_sparse_matrices_with_repeated_entries(device: str, dtype: torch.dtype) -> None:
    stored = tensor([2, 1, 5, 4], device, dtype)
    A = torch.sparse_coo_tensor(torch.tensor([[1, 0, 1, 1], [2, 0, 2, 0]], device=device), stored, (2, 3))
    assert not A.is_coalesced()
    x = torch.tensor([[1], [10], [100]], dtype=dtype, device=device)
    out = gsp.Graph.from_torch_sparse(A) @ x
    assert out.tolist() == [[1], [704]]
    out.sum().backward()
    assert stored.grad.tolist() == [100, 1, 100, 1]
    B = torch.sparse_csr_tensor(
        torch.tensor([0, 2], device=device),
        torch.tensor([1, 1], device=device),
        torch.tensor([2, 5], dtype=dtype, device=device),
        (1, 3),
        check_invariants=False,
    )
    assert (gsp.Graph.from_torch_sparse(B) @ x).tolist() == [[70]]
    # a mean counts entries: three in row 1
    assert gsp.Graph.from_torch_sparse(A.detach()).reduce(x, "mean")[1, 0].item() == pytest.approx(704 / 3)


def test_every_layout_of_every_case(device: str) -> None:
    """H09 and H10 together: odd widths in memory that no vector load likes."""
    e = torch.arange(211)
    g = gsp.Graph.from_edge_index(torch.stack([(7 * e + 3) % 37, (5 * e * e + e) % 37]).to(device), 37)
    for width, dtype, layout in itertools.product(
        (1, 3, 7, 33, 65), (torch.float32, torch.float16), ("misaligned", "padded")
    ):
        x = values((37, width), dtype, 1, few=True, device=device)
        expected = reference.spmm(g, x.double())[0].to(dtype)
        assert torch.equal(gsp.spmm(g, lay_out(x, layout)), expected)
