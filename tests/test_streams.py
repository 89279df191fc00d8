"""CUDA streams, graphs and several GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from strategies import NAMED, REDUCES, Edges, values

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import cache, reference
from gnn_spmm_plugin.cache import graph_of
from gnn_spmm_plugin.functional_aggregate import aggregate
from gnn_spmm_plugin.plan import WARM_AFTER

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_cache")]


@pytest.fixture(autouse=True)
def release_pinned() -> Iterator[None]:
    """Captured graphs of one test must not count in another."""
    yield
    torch.cuda.synchronize()
    cache._pinned.clear()


def random_edges(n: int, count: int, seed: int) -> Edges:
    generator = torch.Generator().manual_seed(seed)
    return Edges(torch.randint(n, (2, count), generator=generator), n, n)


# ---------------------------------------------------------------------- streams


@pytest.mark.parametrize("implicit", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_h20_side_stream(reduce: str, implicit: bool) -> None:
    """Building, forward and backward on a stream that is busy, without a wait of the host."""
    n = 3000
    stream = torch.cuda.Stream()
    busy = torch.rand(1500, 1500, device="cuda")
    pinned = torch.rand(n, 32).pin_memory()
    edges = [random_edges(n, 20_000, seed).edge_index.pin_memory() for seed in range(20)]
    found = []
    for index in edges:
        with torch.cuda.stream(stream):
            for _ in range(10):
                busy = busy @ busy
                busy = busy / busy.norm()
            x = torch.full((n, 32), torch.nan, device="cuda")
            x.copy_(pinned, non_blocking=True)
            x.requires_grad_()
            there = torch.zeros(2, index.shape[1], dtype=torch.int64, device="cuda")
            there.copy_(index, non_blocking=True)
            g = graph_of(there[1], there[0], n, n) if implicit else gsp.Graph.from_edge_index(there, n)
            out = gsp.spmm(g, x, reduce=reduce)
            out.sum().backward()
            found.append((out.detach(), x.grad))
    torch.cuda.current_stream().wait_stream(stream)
    for index, (out, grad) in zip(edges, found, strict=True):
        x = pinned.cuda().requires_grad_()
        expected = gsp.spmm(gsp.Graph.from_edge_index(index.cuda(), n), x, reduce=reduce)
        assert torch.equal(out, expected)
        assert torch.equal(grad, torch.autograd.grad(expected.sum(), x)[0])


def test_a_plan_made_on_one_stream_is_used_on_another() -> None:
    e = NAMED["hub"]
    stream = torch.cuda.Stream()
    x = values((60, 16), torch.float32, 1, device="cuda").requires_grad_()
    weight = values((e.num_edges,), torch.float32, 2, device="cuda")
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        g = e.graph("cuda")
        for _ in range(WARM_AFTER + 1):
            gsp.spmm(g, x, weight, "mean").sum().backward()
    x.grad = None
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(3):
        garbage = [torch.full((5000,), 1 << 30, device="cuda", dtype=torch.int32) for _ in range(20)]
        out = gsp.spmm(g, x, weight, "mean")
        del garbage
        assert torch.allclose(out, reference.spmm(g, x, weight, "mean")[0], atol=1e-4)


# ---------------------------------------------------------------------- CUDA graphs


def capture(step: Callable[[], list[torch.Tensor]], warmup: int = 3) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """`step` recorded, after some runs on a side stream, as torch's documentation asks."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        results = step()
    return recorded, results


def training_step(
    g: gsp.Graph, x: torch.Tensor, weight: torch.Tensor | None, reduce: str, tie: str = "first"
) -> Callable[[], list[torch.Tensor]]:
    leaves = [t for t in (x, weight) if t is not None and t.requires_grad]

    def step() -> list[torch.Tensor]:
        out = gsp.spmm(g, x, weight, reduce, tie=tie)
        assert isinstance(out, torch.Tensor)
        return [out.detach(), *torch.autograd.grad((out * out).sum(), leaves)]

    return step


@pytest.mark.parametrize("warmup", [1, WARM_AFTER + 1])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("name", ["shuffled", "sorted", "hub", "reverse_hub"])
@pytest.mark.parametrize(("reduce", "tie"), [("sum", "first"), ("mean", "first"), ("max", "first"), ("min", "split")])
def test_capture_forward_and_backward(reduce: str, tie: str, name: str, learned: bool, warmup: int) -> None:
    """With a Graph; replays see new features and weights, as long as the graph lives, whatever happens around it."""
    e = NAMED[name]
    g = e.graph("cuda")
    x = values((e.num_src, 20), torch.float32, 1, device="cuda").requires_grad_()
    weight = values((e.num_edges,), torch.float32, 2, device="cuda").requires_grad_(learned)
    step = training_step(g, x, weight, reduce, tie)
    recorded, results = capture(step, warmup)

    def check() -> None:
        recorded.replay()
        torch.cuda.synchronize()
        kept = [r.clone() for r in results]
        other = e.graph("cuda")
        if warmup > 1:
            gsp.plan(other, 20)  # warm, as the plan was that was captured
        fresh = training_step(other, x, weight, reduce, tie)()
        assert all(torch.equal(a, b) for a, b in zip(kept, fresh, strict=True))

    check()
    with torch.no_grad():
        x.copy_(values((e.num_src, 20), torch.float32, 5, device="cuda"))
        if learned:
            weight.copy_(values((e.num_edges,), torch.float32, 6, device="cuda"))
    check()
    for _ in range(WARM_AFTER + 1):  # upgrades the plan, if it was not
        step()
    gsp.plan(g, 20, reduce=reduce)
    gsp.clear_cache()
    other = torch.full((e.num_edges,), 7.0, device="cuda")
    gsp.spmm(g, x, other, reduce)  # takes the place of the weight's permuted copy
    del other
    garbage = [torch.full((4096,), torch.nan, device="cuda") for _ in range(200)]
    del garbage
    check()


@pytest.mark.parametrize("uses", [0, 1, 2])
def test_capture_of_scales(uses: int) -> None:
    """A capture lays out no scales, and those that it reads laid out stay for as long as the graph."""
    e = random_edges(3000, 120_000, 0)
    g = e.graph("cuda")
    x = values((3000, 20), torch.float32, 1, device="cuda")
    scale, other = (torch.rand(3000, device="cuda") for _ in range(2))
    gsp.plan(g, 20)
    aggregate(g, x)  # warm
    want = aggregate(g, x, src_scale=scale.clone())
    recorded, (out,) = capture(lambda: [aggregate(g, x, src_scale=scale)], uses)
    before = gsp.stats()["scale_gathers"]
    for _ in range(3):
        aggregate(g, x, src_scale=other)  # takes the place of the copy
    assert gsp.stats()["scale_gathers"] == before + 1
    garbage = [torch.full((120_000,), torch.nan, device="cuda") for _ in range(20)]
    del garbage
    out.zero_()
    recorded.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def test_capture_of_edge_operators() -> None:
    e = NAMED["hub"]
    g = e.graph("cuda")
    a = values((60, 2, 8), torch.float32, 1, device="cuda").requires_grad_()
    b = values((60, 2, 8), torch.float32, 2, device="cuda").requires_grad_()

    def step(g: gsp.Graph = g) -> list[torch.Tensor]:
        out = gsp.spmm(g, b, gsp.edge_softmax(g, gsp.sddmm(g, a, b)))
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (a, b))]

    recorded, results = capture(step)
    with torch.no_grad():
        a.mul_(-1)
    recorded.replay()
    torch.cuda.synchronize()
    kept = [r.clone() for r in results]
    assert all(torch.equal(x, y) for x, y in zip(kept, step(e.graph("cuda")), strict=True))


def test_capture_with_an_implicit_graph() -> None:
    """An L1 hit works; later, a new edge_index, clearing and eviction leave a replay alone."""
    n = 500
    edge_index = random_edges(n, 6000, 0).edge_index.cuda()
    x = values((n, 20), torch.float32, 1, device="cuda").requires_grad_()

    def step() -> list[torch.Tensor]:
        return training_step(graph_of(edge_index[1], edge_index[0], n, n), x, None, "mean")()

    expected = [t.clone() for t in step()]
    recorded, results = capture(step)
    recorded.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    edge_index = random_edges(n, 6000, 1).edge_index.cuda()  # the old one dies
    for seed in range(2, 20):
        graph_of(*random_edges(n, 6000, seed).edge_index.cuda().flip(0), n, n)
    gsp.clear_cache()
    garbage = [torch.full((6000,), 1 << 30, dtype=torch.int32, device="cuda") for _ in range(100)]
    del garbage
    recorded.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_clearing_says_what_stays(caplog: pytest.LogCaptureFixture) -> None:
    edge_index = random_edges(50, 200, 0).edge_index.cuda()
    x = torch.rand(50, 4, device="cuda")
    _, _ = capture(lambda: [gsp.spmm(graph_of(edge_index[1], edge_index[0], 50, 50), x)])
    with caplog.at_level("WARNING", logger="gnn_spmm_plugin"):
        gsp.clear_cache()
    assert "1 graphs are read by captured CUDA graphs" in caplog.text


@pytest.mark.parametrize("what", ["graph", "implicit", "transpose", "plan"])
def test_nothing_is_built_during_capture(what: str) -> None:
    """An error that says what to do; and the process goes on."""
    e = NAMED["shuffled"]
    edge_index = e.edge_index.cuda()
    g = e.graph("cuda")
    x = torch.rand(37, 4, device="cuda")
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=r"during CUDA graph capture: run the model once before capture, or build"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            if what == "graph":
                gsp.Graph.from_edge_index(edge_index, 37)
            elif what == "implicit":
                graph_of(edge_index[1], edge_index[0], 37, 37)
            elif what == "plan":
                gsp.plan(g, 4)
            else:
                gsp.spmm(g.T, x)
    torch.cuda.synchronize()
    assert torch.allclose(gsp.spmm(g.T, x), reference.spmm(g.T, x)[0], atol=1e-5)


@pytest.mark.parametrize("reduce", REDUCES)
def test_capture_of_a_first_use(reduce: str) -> None:
    """No run before: a graph that was made outside is captured with its cold kernel, and the transpose it needs."""
    e = NAMED["hub"]
    g = e.graph("cuda")
    _ = g.T.col
    x = values((60, 20), torch.float32, 1, device="cuda").requires_grad_()
    weight = values((e.num_edges,), torch.float32, 2, device="cuda")
    step = training_step(g, x, weight, reduce)
    expected = [t.clone() for t in training_step(e.graph("cuda"), x, weight, reduce)()]
    torch.cuda.synchronize()
    recorded, results = capture(step, warmup=0)
    for _ in range(WARM_AFTER + 1):  # eager uses after it must not read what only a replay computes
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(step(), expected, strict=True))
    for _ in range(2):
        for r in results:
            r.zero_()
        recorded.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_no_waiting_in_a_steady_step() -> None:
    g = NAMED["hub"].graph("cuda")
    edge_index = NAMED["shuffled"].edge_index.cuda()
    x = values((60, 20), torch.float32, 1, device="cuda").requires_grad_()
    y = values((37, 20), torch.float32, 1, device="cuda").requires_grad_()
    weight = torch.rand(4800, device="cuda")

    def step() -> None:
        for reduce in REDUCES:
            gsp.spmm(g, x, weight, reduce).sum().backward()
            gsp.spmm(graph_of(edge_index[1], edge_index[0], 37, 37), y, reduce=reduce).sum().backward()
        p = gsp.edge_softmax(g, weight.clone().requires_grad_())
        (p * gsp.sddmm(g, x, x)).sum().backward()

    for _ in range(WARM_AFTER + 1):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("count", [5000, 300_000])
@pytest.mark.parametrize("ordered", [False, True])
def test_building_waits_once(ordered: bool, count: int) -> None:
    """For what the check of the edges found; the transposed graph is built without."""
    edge_index = random_edges(3000, count, 0).edge_index
    if ordered:
        edge_index = edge_index[:, edge_index[1].argsort(stable=True)]
    edge_index = edge_index.cuda()
    x = torch.rand(3000, 8, device="cuda", requires_grad=True)
    graph_of(*random_edges(3000, count + 1, 0).edge_index.cuda().flip(0), 3000, 3000)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        g = graph_of(edge_index[1], edge_index[0], 3000, 3000)
    waits = {
        e.key: e.count for e in profile.key_averages() if e.key in ("cudaStreamSynchronize", "cudaEventSynchronize")
    }
    assert sum(waits.values()) == 1, waits
    torch.cuda.set_sync_debug_mode("error")
    try:
        gsp.spmm(g, x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (g.perm is None) == ordered


# ---------------------------------------------------------------------- several GPUs


@pytest.fixture
def second() -> Iterator[str]:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    torch.cuda.set_device(0)
    yield "cuda:1"
    torch.cuda.set_device(0)


def test_h21_the_second_gpu(second: str) -> None:
    """With the first one current: the same numbers, nothing allocated on the first, which stays current."""
    expected = {}
    for device in ("cuda:0", second):
        e = NAMED["hub"]
        x = values((60, 20), torch.float32, 1).to(device).requires_grad_()
        weight = values((e.num_edges,), torch.float32, 2).to(device).requires_grad_()
        edge_index = e.edge_index.to(device)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(0)
        for reduce in REDUCES:
            for g in (gsp.Graph.from_edge_index(edge_index, 60), graph_of(edge_index[1], edge_index[0], 60, 60)):
                for _ in range(3):
                    out = gsp.spmm(g, x, weight, reduce)
                    grads = torch.autograd.grad(out.sum(), (x, weight))
                results = [t.cpu() for t in (out, *grads)]
                assert all(
                    torch.equal(a, b) for a, b in zip(results, expected.setdefault(reduce, results), strict=True)
                )
        gsp.plan(g, 20)
        assert torch.cuda.current_device() == 0
        with pytest.raises(IndexError):
            gsp.Graph.from_edge_index(edge_index, 3)
        with pytest.raises(ValueError):
            gsp.spmm(g, x[:3])
        assert torch.cuda.current_device() == 0
        if device == second:
            assert torch.cuda.memory_allocated(0) == before
    here = NAMED["hub"].graph("cuda:0")
    with pytest.raises(ValueError, match=r"x is on cuda:1 but the graph on cuda:0"):
        gsp.spmm(here, x)
    moved = here.to(second)
    assert moved.device == torch.device(second) and torch.equal(moved.edge_index().cpu(), NAMED["hub"].edge_index)
