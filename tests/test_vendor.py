"""The kernel cusparse: torch.sparse under a plan. On the CPU, what torch.sparse does there stands in for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from checks import close, expect_spmm
from strategies import LAYOUTS, NAMED, lay_out, values
from test_aggregate import DIFFERENTIABLE, leaves, parts, without
from test_aggregate import close as close_parts
from test_pcsr import Kernels
from twins import kernels_on_cpu

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.functional_aggregate import aggregate
from gnn_spmm_plugin.vendor import VendorSparse


@pytest.fixture
def place(device: str) -> Iterator[str]:
    if device == "cpu":
        with kernels_on_cpu({"cusparse": {}}):
            yield device
    else:
        yield device


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_against_float64(place: str, name: str, dtype: torch.dtype) -> None:
    if place == "cpu" and dtype.itemsize == 2:
        pytest.skip("torch.sparse has no product of halves on the CPU")
    e = NAMED[name]
    g = e.graph(place)
    for width, layout, reduce, weighted in itertools.product((1, 12), LAYOUTS, ("sum", "mean"), (False, True)):
        x = lay_out(values((e.num_src, width), dtype, 1, device=place), layout).requires_grad_()
        weight = values((e.num_edges,), dtype, 2, device=place).requires_grad_() if weighted else None
        plan = gsp.plan(g, width, dtype, reduce, kernel="cusparse")
        grad = values((e.num_dst, width), dtype, 3, device=place)
        with Kernels() as ran:
            out = gsp.spmm(g, x, weight, reduce, plan=plan)
        left = not 0 < e.num_edges <= e.num_src * e.num_dst  # no matrix to cuSPARSE
        assert set(ran.names) <= {"transpose", "spmm" if left else ""}  # that for the backward
        expected = expect_spmm(g, x, weight, grad, reduce)
        close(out, expected.out, 2, terms=4500)
        out.backward(grad)  # by the default plan of the transpose
        close(x.grad, expected.grad_x, 2, terms=4500)
        assert weight is None or weight.grad.shape == weight.shape


def test_weights_by_head(place: str) -> None:
    """Run on the CSR arrays."""
    g = NAMED["bipartite"].graph(place)
    x, weight = values((11, 2, 3), torch.float32, 1, device=place), values((120, 2), torch.float32, 2, device=place)
    plan = replace(gsp.plan(g, 6, kernel="cusparse"), request=None)
    with Kernels() as ran:
        out = gsp.spmm(g, x, weight, plan=plan)
    assert ran.names[-1] == "spmm"
    close(out, expect_spmm(g, x, weight, torch.zeros_like(out), "sum").out)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_aggregate(place: str, reduce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales, self term, bias, ReLU: as with the default kernel, both ways."""
    e = NAMED["shuffled"]
    for weight, scaled, own, by_row in itertools.product((False, True), (False, True), ("none", "x", "other"), (0, 1)):
        p = parts(e, 12, torch.float64, place, weight, scaled, own, bool(by_row))
        found = []
        for name in ("", "cusparse"):
            monkeypatch.setenv("GSP_KERNEL", name)
            g, q = e.graph(place), leaves(p)
            with Kernels() as ran:
                out = aggregate(g, q["x"], q.get("weight"), reduce, **without(q), relu=bool(by_row))
            assert ("spmm" in ran.names) == (name == "")
            names = [n for n in DIFFERENTIABLE if n in q and not (n == "self_x" and own == "x")]
            found.append((out, *torch.autograd.grad(out.sum(), [q[n] for n in names])))
        for got, want in zip(*reversed(found), strict=True):
            close_parts(got, want.detach(), torch.float64, (weight, scaled, own, by_row))


def test_plan(place: str) -> None:
    g = NAMED["shuffled"].graph(place)
    plan = gsp.plan(g, 8, kernel="cusparse")
    assert isinstance(plan.format, VendorSparse) and "as torch.sparse calls it" in plan.explain()
    assert plan.nbytes() == 0
    gsp.spmm(g, torch.ones(37, 8, device=place), plan=plan)
    assert plan.nbytes() == 4 * g.num_edges
    with pytest.raises(ValueError, match="'cusparse' computes sum and mean, not max"):
        gsp.plan(g, 8, reduce="max", kernel="cusparse")
    with pytest.raises(ValueError, match="'cusparse' reads a format"):
        gsp.plan(g, 8, kernel="cusparse", mode="cold")
    assert all(gsp.plan(NAMED[n].graph(place), 64).kernel.name != "cusparse" for n in NAMED)


def test_refused_where_results_have_to_repeat(place: str) -> None:
    g = NAMED["shuffled"].graph(place)
    plan = gsp.plan(g, 8, kernel="cusparse")
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="'cusparse' promises no deterministic results"):
            gsp.spmm(g, torch.ones(37, 8, device=place), plan=plan)
    finally:
        torch.use_deterministic_algorithms(False)
