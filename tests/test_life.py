"""The life of graphs and of what is kept for them: whatever happens, in whatever order, a result is that of now."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import pickle
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from checks import books_agree
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pyg_layers import Plain, tg
from strategies import REDUCES
from torch import Tensor

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import reference
from gnn_spmm_plugin.functional_edge_index import spmm_edge_index
from gnn_spmm_plugin.plan import WARM_AFTER

NODES, EDGES, SLOTS = 9, 14, 3
SLOT = st.integers(0, SLOTS - 1)
REDUCE = st.sampled_from(REDUCES)


def expected(edges: Tensor, x: Tensor, w: Tensor | None, reduce: str) -> list[Tensor]:
    """Output and gradients of its squares, edge by edge, in plain torch: no code of ours but the reference."""
    g = gsp.Graph.from_edge_index(edges.cpu().clone(), NODES)
    leaves = [t.detach().cpu().clone().requires_grad_() for t in (x, w) if t is not None]
    out, _ = reference.spmm(g, leaves[0], *leaves[1:], reduce=reduce, tie="split")
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def same(got: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-9, atol=1e-9)


def run(call: Callable[..., Any], x: Tensor, w: Tensor | None) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (x, w) if t is not None]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


class Life(RuleBasedStateMachine):
    """Some index tensors, graphs made of them, and weights; all in float64."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.generator = torch.Generator().manual_seed(0)
        self.patches = ExitStack()
        self.patched = self.forks = 0

    def draw(self) -> Tensor:
        return torch.randint(NODES, (2, EDGES), generator=self.generator)

    def numbers(self, *shape: int) -> Tensor:
        # distinct: where several attain a maximum, plain and patched layers differ in the gradient, as they should
        t = torch.randperm(torch.Size(shape).numel(), generator=self.generator).double().view(shape) / 7 + 0.1
        return t.to(self.device)

    @initialize()
    def begin(self) -> None:
        gsp.clear_cache()
        self.tensors = [self.draw().to(self.device) for _ in range(SLOTS)]
        self.graphs: list[tuple[gsp.Graph, Tensor]] = [
            (gsp.Graph.from_edge_index(t, NODES), t.cpu().clone()) for t in self.tensors
        ]
        self.weights = [self.numbers(EDGES) for _ in range(SLOTS)]

    def teardown(self) -> None:
        self.patches.close()
        gsp.clear_cache()

    # ------------------------------------------------------------------ uses

    def use_tensor(self, slot: int, reduce: str, weighted: bool, layer: bool) -> None:
        t, w = self.tensors[slot], self.weights[slot] if weighted else None
        x = self.numbers(NODES, 2)
        if layer and tg is not None:
            got = run(lambda x, w=None: Plain(reduce)(x, t, w), x, w)
        else:
            got = run(lambda x, w=None: spmm_edge_index(x, t, w, NODES, NODES, reduce=reduce, tie="split"), x, w)
        same(got, expected(t, x, w, reduce))

    def use_graph(self, slot: int, reduce: str, weighted: bool, flipped: bool) -> None:
        (g, edges), w = self.graphs[slot], self.weights[slot] if weighted else None
        x = self.numbers(NODES, 2)
        g, edges = (g.T, edges.flip(0)) if flipped else (g, edges)
        wanted = expected(edges, x, w, reduce)
        same(run(lambda x, w=None: gsp.spmm(g, x, w, reduce, tie="split"), x, w), wanted)
        if w is not None:  # a constant one, of which a copy in another order may be kept
            same([gsp.spmm(g, x, w, reduce)], wanted[:1])

    @rule(slot=SLOT, reduce=REDUCE, weighted=st.booleans(), layer=st.booleans())
    def tensor(self, slot: int, reduce: str, weighted: bool, layer: bool) -> None:
        self.use_tensor(slot, reduce, weighted, layer)

    @rule(slot=SLOT, reduce=REDUCE, weighted=st.booleans(), flipped=st.booleans())
    def graph(self, slot: int, reduce: str, weighted: bool, flipped: bool) -> None:
        self.use_graph(slot, reduce, weighted, flipped)

    @rule(slot=SLOT, times=st.sampled_from((2, WARM_AFTER)))
    def often(self, slot: int, times: int) -> None:
        for _ in range(times):
            self.use_graph(slot, "sum", True, False)
            self.use_tensor(slot, "sum", False, True)

    @rule(slot=SLOT, reduce=REDUCE, mode=st.sampled_from(("cold", "warm")))
    def plan(self, slot: int, reduce: str, mode: str) -> None:
        g, edges = self.graphs[slot]
        x = self.numbers(NODES, 2)
        plan = gsp.plan(g, 2, torch.float64, reduce, mode)
        same([gsp.spmm(g, x, reduce=reduce, plan=plan)], expected(edges, x, None, reduce)[:1])

    # ------------------------------------------------------------------ what happens to them

    @rule(slot=SLOT)
    def build(self, slot: int) -> None:
        self.graphs[slot] = gsp.Graph.from_edge_index(self.tensors[slot], NODES), self.tensors[slot].cpu().clone()

    @rule(
        slot=SLOT, at=st.integers(0, 2 * EDGES - 1), how=st.sampled_from(("index", "numpy", "whole", "under no_grad"))
    )
    def write(self, slot: int, at: int, how: str) -> None:
        t, value = self.tensors[slot], int(self.draw()[0, 0])
        if how == "numpy" and self.device == "cpu":
            t.numpy()[at % 2, at // 2] = value
        elif how == "whole":
            t.copy_(self.draw())
        else:
            with torch.set_grad_enabled(how != "under no_grad"):
                t[at % 2, at // 2] = value

    @rule(slot=SLOT, at=st.integers(0, EDGES - 1), numpy=st.booleans())
    def write_weight(self, slot: int, at: int, numpy: bool) -> None:
        if numpy and self.device == "cpu":
            self.weights[slot].numpy()[at] += 1 / 3
        else:
            self.weights[slot][at] += 1 / 3

    @rule(slot=SLOT)
    def recreate(self, slot: int) -> None:
        """In memory that was just freed."""
        made = self.draw().to(self.device)
        self.tensors[slot] = None  # type: ignore[call-overload]
        self.tensors[slot] = torch.empty(2, EDGES, dtype=torch.int64, device=self.device).copy_(made)
        self.weights[slot] = None  # type: ignore[call-overload]
        self.weights[slot] = self.numbers(EDGES)

    @rule(slot=SLOT, other=SLOT, how=st.sampled_from(("alias", "clone", "view", "swap")))
    def share(self, slot: int, other: int, how: str) -> None:
        t = self.tensors
        if how == "swap":
            t[slot], t[other] = t[other], t[slot]
        else:
            t[slot] = {"alias": t[other], "clone": t[other].clone(), "view": t[other].view(2, EDGES)}[how]

    @rule(slot=SLOT)
    def transpose(self, slot: int) -> None:
        g, edges = self.graphs[slot]
        self.graphs[slot] = g.T, edges.flip(0)

    @rule(slot=SLOT, how=st.sampled_from(("pickle", "deepcopy", "torch.save", "move", "with_weight")))
    def copy(self, slot: int, how: str) -> None:
        g, edges = self.graphs[slot]
        if how == "pickle":
            g = pickle.loads(pickle.dumps(g))
        elif how == "torch.save":
            file = io.BytesIO()
            torch.save({"graph": g, "tensor": self.tensors[slot]}, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
            g, self.tensors[slot] = loaded["graph"], loaded["tensor"]
        elif how == "move":
            g = g.to("cpu").to(self.device)
        elif how == "with_weight":
            g = g.with_weight(self.weights[slot]).with_weight(None)
        else:
            g = copy.deepcopy(g)
        self.graphs[slot] = g.validate(), edges

    @rule()
    def patch(self) -> None:
        if tg is not None and self.patched < 2:
            self.patches.enter_context(gsp.patch_pyg())
            self.patched += 1

    @rule()
    def unpatch(self) -> None:
        self.patches.close()
        self.patched = 0

    @rule(collect=st.booleans())
    def clear(self, collect: bool) -> None:
        gsp.clear_cache()
        if collect:
            gc.collect()

    # ------------------------------------------------------------------ elsewhere

    def both(self, slot: int) -> None:
        for reduce in ("mean", "max"):
            self.use_graph(slot, reduce, True, reduce == "max")
            self.use_tensor(slot, reduce, False, True)

    @rule(slots=st.lists(SLOT, min_size=1, max_size=4))
    def threads(self, slots: list[int]) -> None:
        wrong: list[BaseException] = []

        def work(slot: int) -> None:
            try:
                self.both(slot)
            except BaseException as e:
                wrong.append(e)

        running = [threading.Thread(target=work, args=(s,)) for s in slots]
        for t in running:
            t.start()
        for t in running:
            t.join(60)
        assert not wrong and not any(t.is_alive() for t in running), wrong

    @precondition(lambda self: self.device == "cpu" and self.forks < 2)
    @rule(slot=SLOT)
    def fork(self, slot: int) -> None:
        self.forks += 1
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # what a fork needs under OpenMP, with or without this package
        child = multiprocessing.get_context("fork").Process(target=_quiet, args=(self.both, slot))
        child.start()
        child.join(60)
        torch.set_num_threads(threads)
        assert child.exitcode == 0

    @invariant()
    def kept(self) -> None:
        books_agree()


def _quiet(call: Callable[..., None], *args: Any) -> None:
    torch.autograd.set_multithreading_enabled(False)  # its threads are not there after a fork
    call(*args)


def test_life(device: str) -> None:
    run_state_machine_as_test(
        lambda: Life(device), settings=settings(max_examples=20, stateful_step_count=30, deadline=None)
    )


@pytest.mark.slow
def test_a_longer_life(device: str) -> None:
    run_state_machine_as_test(
        lambda: Life(device), settings=settings(max_examples=150, stateful_step_count=50, deadline=None)
    )
