"""DGL's own operators and layers against the same calls under `patch_dgl`.

    python -m gnn_spmm_plugin.bench.dgl --csv docs/benchmarks/dgl_cpu.csv

DGL's threads and torch's are two pools, each of which spins where it waits: on a machine that does other things, set
``OMP_WAIT_POLICY=passive``.

Both take turns, so that whatever else the machine does meets both; medians. ``ratio`` is DGL's time over ours, ``bar``
what was asked for, ``difference`` the largest between the two results, in parts of the largest value. On a GPU,
``--device cuda``, DGL has nothing to compare with where its wheel is built without CUDA: there, training steps of its
layers with features on the GPU are held against the same layers of PyG, accelerated.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .._table import progress, show
from ..integrations.dgl import import_dgl, patch_dgl
from ..integrations.pyg import accelerate
from .results import write_table

COLUMNS = "what bar ratio dgl_ms ours_ms difference".split()
Step = Callable[[], list[Tensor]]


class Case:
    """What to measure, `calls` at a time; the step returns what it computed. `bar` is the ratio asked for."""

    def __init__(self, what: str, bar: float, step: Step, calls: int = 1) -> None:
        self.what, self.bar, self.step, self.calls = what, bar, step, calls


def _backward(f: Callable[..., Tensor], inputs: list[Tensor], parameters: list[Tensor] | None = None) -> Step:
    every = [*inputs, *(parameters or [])]
    with torch.no_grad():
        grad = torch.randn_like(f(*inputs))

    def step() -> list[Tensor]:
        out = f(*inputs)
        return [out.detach(), *torch.autograd.grad(out, every, grad)]

    return step


def _layer(layer: torch.nn.Module, g: Any, x: Tensor) -> Step:
    parameters: list[Tensor] = list(layer.parameters())
    return _backward(lambda x: layer(g, x), [x], parameters)


def cases(nodes: int, edges: int, width: int) -> Iterator[Case]:
    """On a random graph, and on one of ten nodes."""
    import dgl
    import dgl.function as fn

    torch.manual_seed(0)
    g = dgl.graph((torch.randint(nodes, (edges,)), torch.randint(nodes, (edges,))), num_nodes=nodes)
    x, w = torch.randn(nodes, width), torch.rand(edges, 1)
    leaf, learned = x.clone().requires_grad_(), w.clone().requires_grad_()
    ops, nn = dgl.ops, dgl.nn
    yield Case("copy_u sum", 0.9, lambda: [ops.copy_u_sum(g, x)])
    yield Case("copy_u mean", 0.9, lambda: [ops.copy_u_mean(g, x)])
    yield Case("copy_u max", 0.9, lambda: [ops.copy_u_max(g, x)])
    yield Case("copy_u sum, backward too", 0.9, _backward(lambda x: ops.copy_u_sum(g, x), [leaf]))
    yield Case("copy_u mean, backward too", 0.9, _backward(lambda x: ops.copy_u_mean(g, x), [leaf]))
    yield Case("copy_e sum", 0.9, lambda: [ops.copy_e_sum(g, w)])
    yield Case("u_mul_e sum", 4.0, lambda: [ops.u_mul_e_sum(g, x, w)])
    both = _backward(lambda x, w: ops.u_mul_e_sum(g, x, w), [leaf, learned])
    yield Case("u_mul_e sum, backward by both", 4.0, both)
    yield Case("u_add_e sum", 1.0, lambda: [ops.u_add_e_sum(g, x, w)])
    yield Case("u_dot_v, 4 heads", 1.0, lambda: [ops.u_dot_v(g, x.view(nodes, 4, -1), x.view(nodes, 4, -1))])
    yield Case("edge_softmax, 4 heads", 1.0, lambda: [ops.edge_softmax(g, w.expand(-1, 4).contiguous())])
    yield Case("GraphConv step", 1.0, _layer(nn.GraphConv(width, width, allow_zero_in_degree=True), g, leaf))
    yield Case("SAGEConv mean step", 1.0, _layer(nn.SAGEConv(width, width, "mean"), g, leaf))
    yield Case("SAGEConv pool step", 1.5, _layer(nn.SAGEConv(width, width, "pool"), g, leaf))
    yield Case("GATConv 4 x 16 step", 3.0, _layer(nn.GATConv(width, 16, 4, allow_zero_in_degree=True), g, leaf))

    small = dgl.graph((torch.randint(10, (30,)), torch.randint(10, (30,))), num_nodes=10)
    small.ndata["h"], y, v = torch.randn(10, 8), torch.randn(10, 8), torch.rand(30, 1)

    def update() -> list[Tensor]:
        small.update_all(fn.copy_u("h", "m"), fn.sum("m", "out"))
        return [small.ndata["out"]]

    score = torch.randn(30, 2, 1)
    for what, step in (
        ("edge_softmax", lambda: [ops.edge_softmax(small, score)]),
        ("u_dot_v", lambda: [ops.u_dot_v(small, y, y)]),
        ("u_add_v", lambda: [ops.u_add_v(small, y, y)]),
        ("copy_u sum", lambda: [ops.copy_u_sum(small, y)]),
        ("copy_u max", lambda: [ops.copy_u_max(small, y)]),
        ("u_mul_e sum", lambda: [ops.u_mul_e_sum(small, y, v)]),
        ("update_all", update),
    ):
        yield Case(f"10 nodes, {what}", 1.0, step, 50)


def _gpu_cases(width: int) -> Iterator[tuple[str, Step, Step]]:
    """Training steps on arxivlike: (what, under DGL, under PyG)."""
    import dgl.nn as dn
    import torch_geometric.nn as pn
    from dgl import add_self_loop, graph

    from .graphs import named

    torch.manual_seed(0)
    csr = named("arxivlike", "cpu")
    nodes = csr.num_nodes
    g = add_self_loop(graph(tuple(csr.edge_index()), num_nodes=nodes)).to("cuda")
    edge_index = torch.stack(g.edges())
    x = torch.randn(nodes, width, device="cuda", requires_grad=True)
    linear = torch.nn.Linear(width, width)
    for what, ours, theirs in (
        ("GraphConv", dn.GraphConv(width, width), pn.GCNConv(width, width, add_self_loops=False)),
        ("SAGEConv mean", dn.SAGEConv(width, width, "mean"), pn.SAGEConv(width, width)),
        ("SAGEConv pool", dn.SAGEConv(width, width, "pool"), pn.SAGEConv(width, width, "max", project=True)),
        ("GINConv", dn.GINConv(linear, "sum"), pn.GINConv(linear)),
        ("GATConv 4 heads", dn.GATConv(width, width // 4, 4), pn.GATConv(width, width // 4, 4, add_self_loops=False)),
    ):
        accelerate(theirs)
        ours, theirs = ours.cuda(), theirs.cuda()
        host = _backward(lambda x, m=theirs: m(x, edge_index), [x], list(theirs.parameters()))
        yield what, _layer(ours, g, x), host


def _milliseconds(step: Step, calls: int, device: str) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1e3


def _difference(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest, in parts of the largest finite value of each pair."""
    worst = 0.0
    for p, q in zip(a, b, strict=True):
        same = (p == q) | (p.isnan() & q.isnan())  # infinities too
        finite = q[q.isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 1.0
        apart = (p - q).abs().masked_fill(same, 0)
        worst = max(worst, float(apart.max()) / max(scale, 1e-30) if apart.numel() else 0.0)
    return worst


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """A row of `COLUMNS`."""
    theirs: list[Tensor] = case.step()
    ours: list[Tensor] = []
    times: dict[bool, list[float]] = {False: [], True: []}
    for i in range(rounds + 2):
        for on, kept in times.items():
            with patch_dgl() if on else _nothing():
                if on and not ours:
                    ours = case.step()
                _milliseconds(case.step, 1, "cpu")
                seconds = _milliseconds(case.step, case.calls, "cpu")
            if i >= 2:
                kept.append(seconds)
    host, own = statistics.median(times[False]), statistics.median(times[True])
    return {
        **{"what": case.what, "bar": case.bar, "ratio": round(host / own, 2)},
        **{"dgl_ms": f"{host:.4g}", "ours_ms": f"{own:.4g}", "difference": f"{_difference(ours, theirs):.1e}"},
    }


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m gnn_spmm_plugin.bench.dgl", description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--edges", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=64, help="feature columns, a multiple of 4")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each, in turns; default 9")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose names have this in them")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--csv", metavar="FILE")
    options = parser.parse_args(arguments)
    if min(options.nodes, options.edges, options.rounds, options.threads) < 1 or options.width % 4 or options.width < 4:
        parser.error("all sizes must be 1 or more, and the width a multiple of 4")
    import_dgl()
    torch.set_num_threads(options.threads)
    sys.modules["dgl.utils"].set_num_threads(options.threads)
    if options.device == "cuda":
        columns, rows = ["what", "dgl_ms", "pyg_ms", "ratio"], list(_on_gpu(options.width, options.rounds))
    else:
        every = [c for c in cases(options.nodes, options.edges, options.width) if options.only in c.what]
        columns, rows = COLUMNS, [measure(case, options.rounds) for case in progress(every, len(every), "cases")]
    show(columns, [[str(row[c]) for c in columns] for row in rows])
    if options.csv:
        waiting = os.environ.get("OMP_WAIT_POLICY")
        command = f"python -m gnn_spmm_plugin.bench.dgl {' '.join(arguments or sys.argv[1:])}"
        command = command if waiting is None else f"OMP_WAIT_POLICY={waiting} {command}"
        write_table(options.csv, columns, rows, command)
    return 0


def _on_gpu(width: int, rounds: int) -> Iterator[dict[str, Any]]:
    with patch_dgl(cuda_features=True):
        for what, ours, theirs in _gpu_cases(width):
            times: tuple[list[float], list[float]] = ([], [])
            for i in range(rounds + 3):
                for step, kept in zip((ours, theirs), times, strict=True):
                    milliseconds = _milliseconds(step, 40, "cuda")  # past the first upgrade of plans
                    if i >= 3:
                        kept.append(milliseconds)
            a, b = (statistics.median(t) for t in times)
            yield {"what": what, "dgl_ms": f"{a:.4g}", "pyg_ms": f"{b:.4g}", "ratio": round(a / b, 3)}


if __name__ == "__main__":
    sys.exit(main())
