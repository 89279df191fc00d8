"""Memory, files and threads stay as they are, however many graphs come and go; and what happens where memory ends.

python tests/test_resources.py 10000 cpu memory.csv    # the curve, and memory.png where there is matplotlib
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks import books_agree, close, expect_spmm, resident
from pyg_layers import tg
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import cache
from gnn_spmm_plugin.functional_edge_index import spmm_edge_index
from gnn_spmm_plugin.plan import WARM_AFTER

NODES, EDGES, WIDTH = 60, 400, 16


def new_graph(device: str, n: int = NODES) -> Tensor:
    return torch.randint(n, (2, EDGES), device=device)


def model(device: str) -> nn.Module:
    """A patched layer of each sort, where there is PyG; own ones anyway."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.ModuleList([gsp.nn.GCNConv(WIDTH, WIDTH), gsp.nn.SAGEConv(WIDTH, WIDTH, aggr="max")])
            self.hosts = nn.ModuleList([] if tg is None else [tg.GATConv(WIDTH, WIDTH), tg.GraphConv(WIDTH, WIDTH)])

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            for layer in (*self.own, *self.hosts):
                x = layer(x, edge_index).relu()
            return x

    net = Net().to(device)
    return net if tg is None else gsp.accelerate(net)


def one_step(net: nn.Module, device: str) -> None:
    """A graph that nobody has seen, as an edge_index and as a Graph with plans, forward and back."""
    index = new_graph(device)
    net.zero_grad()
    net(torch.randn(NODES, WIDTH, device=device), index).sum().backward()
    g = gsp.Graph.from_edge_index(index, NODES)
    x = torch.randn(NODES, WIDTH, device=device, requires_grad=True)
    w = torch.rand(EDGES, device=device, requires_grad=True)
    gsp.spmm(g, x, w, "max").sum().backward()
    gsp.spmm(g.T, x, w.detach()).sum().backward()
    gsp.spmm(g, x, plan=gsp.plan(g, WIDTH))
    gsp.edge_softmax(g, gsp.sddmm(g, x, x)).sum().backward()


def opened() -> tuple[int, int, int]:
    """File descriptors, threads of the system, threads of Python."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), threading.active_count()


@pytest.mark.parametrize("steps", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_new_graphs_in_every_step(steps: int, device: str, fresh_cache: None, no_gc: None) -> None:
    """Memory is flat, by reference counting alone; no file and no thread stays open."""
    net = model(device)

    def memory() -> int:
        return torch.cuda.memory_allocated() if device == "cuda" else resident()

    for _ in range(steps // 4):
        one_step(net, device)
    before, open_before, highest = memory(), opened(), 0
    graphs = cache.cached_graphs()
    for _ in range(steps):
        one_step(net, device)
        highest = max(highest, memory())
    assert opened() == open_before
    assert cache.cached_graphs() <= max(graphs, cache.MAX_GRAPHS)
    # a step makes some 300 KB of graphs, plans and features; one in fifty that stayed would show
    allowed = max(4 << 20, steps * 6000) if device == "cpu" else 1 << 20
    assert highest - before < allowed, (highest - before, allowed)
    books_agree()
    gc.collect()
    gsp.restore(net)


@pytest.mark.gpu
def test_memory_that_torch_reserves(fresh_cache: None, no_gc: None) -> None:
    net = model("cuda")
    for _ in range(200):
        one_step(net, "cuda")
    reserved = torch.cuda.memory_reserved()
    for _ in range(1500):
        one_step(net, "cuda")
    assert torch.cuda.memory_reserved() <= reserved + (2 << 20)
    gsp.restore(net)


@pytest.mark.parametrize("limit", [0, 40_000, 200_000])
def test_a_small_limit(limit: int, device: str, fresh_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """More living graphs than fit, in turn: never more bytes than allowed and one graph, never a wrong result."""
    monkeypatch.setattr(cache, "budget", lambda device: float(limit))
    indices = [new_graph(device) for _ in range(12)]
    largest = 0
    for turn in range(3):
        for index in indices:
            x = torch.randn(NODES, 3, dtype=torch.float64, device=device).requires_grad_()
            out = spmm_edge_index(x, index, None, NODES, NODES, reduce=("sum", "max", "mean")[turn])
            grad = torch.randn_like(out)
            wanted = expect_spmm(
                gsp.Graph.from_edge_index(index, NODES), x.detach(), None, grad, ("sum", "max", "mean")[turn]
            )
            close(out.detach(), wanted.out)
            close(torch.autograd.grad(out, x, grad)[0], wanted.grad_x)
            largest = max(largest, *(e.nbytes for e in cache._entries.values()))
            assert sum(cache._bytes.values()) <= max(limit, largest)
            books_agree()
    if limit < 12 * largest:
        assert cache.cached_graphs() < 12


# ---------------------------------------------------------------------- where memory ends


class FailsAt(TorchDispatchMode):
    """The operator of this number does not get its memory."""

    def __init__(self, number: int, error: Callable[[], Exception]) -> None:
        super().__init__()
        self.left, self.error, self.failed = number, error, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            self.failed = str(func)
            raise self.error()
        return func(*args, **(kwargs or {}))


def out_of_gpu() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 PiB")


def out_of_cpu() -> Exception:
    return RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")


def _spmm(g: gsp.Graph, x: Tensor, w: Tensor, index: Tensor) -> Tensor:
    return gsp.spmm(g, x, w)  # type: ignore[return-value]


def _plan(g: gsp.Graph, x: Tensor, w: Tensor, index: Tensor) -> Tensor:
    return gsp.spmm(g, x, w, "mean", plan=gsp.plan(g, x.shape[1], x.dtype, "mean", schedule="degree"))  # type: ignore[return-value]


def _warm(g: gsp.Graph, x: Tensor, w: Tensor, index: Tensor) -> Tensor:
    for _ in range(WARM_AFTER):
        out = gsp.spmm(g, x, w.detach())
    return gsp.spmm(g, x, w, "max") + out  # type: ignore[operator]


def _implicit(g: gsp.Graph, x: Tensor, w: Tensor, index: Tensor) -> Tensor:
    return spmm_edge_index(x, index, w, NODES, NODES)


def _attention(g: gsp.Graph, x: Tensor, w: Tensor, index: Tensor) -> Tensor:
    p = gsp.edge_softmax(g, gsp.sddmm(g, x, x) * w)
    return gsp.spmm(g, x, p)  # type: ignore[return-value]


def _gcn(g: gsp.Graph, x: Tensor, w: Tensor, index: Tensor) -> Tensor:
    conv = CONV.to(x.device)
    return conv(x, index, w) + conv(x, g, w.detach())  # type: ignore[no-any-return]


CONV = gsp.nn.GCNConv(4, 3).double()


WAYS = {"spmm": _spmm, "plan": _plan, "warm": _warm, "implicit": _implicit, "attention": _attention, "gcn": _gcn}


@pytest.fixture
def quiet_after() -> Iterator[None]:
    yield
    gsp.clear_cache()


@pytest.mark.parametrize(
    ("way", "error"), [*((w, out_of_gpu) for w in WAYS), ("implicit", out_of_cpu), ("warm", out_of_cpu)]
)
def test_any_allocation_may_fail(way: str, error: Callable[[], Exception], device: str, quiet_after: None) -> None:
    """Each operator of a step in its turn: a right result or that error, and afterwards a right result, anyway."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(NODES, (2, EDGES), generator=generator).to(device)
    values = torch.randn(NODES, 4, generator=generator, dtype=torch.float64).to(device)
    weights = torch.rand(EDGES, generator=generator, dtype=torch.float64).to(device)

    def step(g: gsp.Graph | None, index: Tensor) -> list[Tensor]:
        x, w = values.clone().requires_grad_(), weights.clone().requires_grad_()
        g = gsp.Graph.from_edge_index(index, NODES) if g is None else g
        out = WAYS[way](g, x, w, index)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (x, w))]

    wanted = step(None, edges.clone())

    def check(got: list[Tensor]) -> None:
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)

    number, raised = 0, 0
    while True:
        number += 1
        gsp.clear_cache()
        index = edges.clone()
        g = gsp.Graph.from_edge_index(index, NODES) if number % 2 else None  # there before, or part of it
        mode = FailsAt(number, error)
        got = None
        try:
            with mode:
                got = step(g, index)
        except (torch.OutOfMemoryError, RuntimeError) as e:
            assert str(e) == str(error()), f"operator {number}, {mode.failed}: {e}"
            raised += 1
        if got is not None:
            check(got)
        if g is not None:
            g.validate()
        books_agree()
        check(step(g, index))
        check(step(g, index))
        if not mode.failed:
            break
    assert number > 5 and raised > 3


def test_a_plan_without_memory_is_a_cold_one(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, and not tried again."""
    module = importlib.import_module("gnn_spmm_plugin.plan")
    g = gsp.Graph.from_edge_index(new_graph(device), NODES)
    tried = []

    def fails(*args: Any, **kwargs: Any) -> Any:
        tried.append(args)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module.GraphFeatures, "of", fails)
    x = torch.randn(NODES, 3, dtype=torch.float64, device=device)
    for _ in range(3 * WARM_AFTER):
        out = gsp.spmm(g, x)
    close(out, expect_spmm(g, x, None, torch.ones_like(out), "sum").out)
    assert len(tried) == 1 and sum("out of memory" in r.message for r in caplog.records) == 1
    assert "out of memory" in g._csr.plan.explain()


def draw_curve(steps: int, device: str, path: str) -> None:
    """Memory after every hundredth of so many steps, as CSV and as a picture."""
    net = model(device)
    rows = []
    for step in range(steps):
        one_step(net, device)
        if (step + 1) % max(1, steps // 100) == 0:
            held = torch.cuda.memory_allocated() / 2**20 if device == "cuda" else 0.0
            rows.append((step + 1, resident() / 2**20, held, cache.cached_graphs(), *opened()[:2]))
    with open(path, "w", encoding="utf-8") as f:
        f.write(f"# python tests/test_resources.py {steps} {device} FILE; torch {torch.__version__}\n")
        f.write("step,resident_mib,cuda_allocated_mib,cached_graphs,files,threads\n")
        f.writelines(f"{s},{r:.1f},{c:.2f},{g},{o},{t}\n" for s, r, c, g, o, t in rows)
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    _, axes = pyplot.subplots(figsize=(6, 2.5))
    axes.plot([r[0] for r in rows], [r[2 if device == "cuda" else 1] for r in rows])
    axes.set(xlabel="steps, each with a new graph", ylabel="MiB allocated" if device == "cuda" else "MiB resident")
    axes.set_ylim(0, 1.3 * max(axes.get_ylim()))
    pyplot.tight_layout()
    pyplot.savefig(path.rsplit(".", 1)[0] + ".png", dpi=110)


if __name__ == "__main__":
    draw_curve(int(sys.argv[1]), sys.argv[2], sys.argv[3])
