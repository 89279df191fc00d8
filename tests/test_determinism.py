"""The same bits: from run to run, for every number of threads, cold and warm, with and without the flag."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from checks import same_bits
from strategies import NAMED, REDUCES, values

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.functional_attention import scores
from gnn_spmm_plugin.functional_messages import sum_messages
from gnn_spmm_plugin.plan import WARM_AFTER

THREADS = (1, 2, 3, 8)


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(False)


def skewed(device: str, seed: int = 7) -> tuple[gsp.Graph, torch.Tensor]:
    """H19: 2000 nodes, 100000 edges, node 0 has thousands of them."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(2000, (100_000,), generator=generator)
    dst = (torch.rand(100_000, generator=generator) ** 3 * 2000).floor().long()
    weight = torch.randn(100_000, generator=generator)
    return gsp.Graph.from_edge_index(torch.stack([src, dst]).to(device), 2000), weight.to(device)


def everything(
    g: gsp.Graph,
    weight: torch.Tensor,
    reduce: str,
    tie: str = "first",
    dtype: torch.dtype = torch.float32,
    width: int = 64,
) -> list[torch.Tensor]:
    x = values((g.num_src, width), dtype, 1, device=str(g.device)).requires_grad_()
    w = weight.to(dtype).requires_grad_()
    out = gsp.spmm(g, x, w, reduce, tie=tie)
    grad = values(tuple(out.shape), dtype, 2, device=str(g.device))
    return [out.detach(), *torch.autograd.grad(out, (x, w), grad)]


def test_sums_of_messages(device: str) -> None:
    """Whatever the number of threads, one row of thousands of edges included."""
    g, weight = skewed(device)
    x = values((g.num_src, 33), torch.float32, 1, device=device).requires_grad_()
    e = values((g.num_edges, 33), torch.float32, 2, device=device).requires_grad_()
    grad = values((g.num_dst, 33), torch.float32, 3, device=device)
    w = weight.requires_grad_()
    runs = []
    for threads in THREADS * (1 if device == "cpu" else WARM_AFTER):
        torch.set_num_threads(threads)
        out = sum_messages(g, x, e, w, "mean")
        runs.append([out.detach(), *torch.autograd.grad(out, (x, e, w), grad)])
    for before, after in itertools.pairwise(runs if device == "cpu" else runs[-len(THREADS) :]):
        assert all(same_bits(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize(("reduce", "tie"), [("sum", "first"), ("mean", "first"), ("max", "first"), ("max", "split")])
def test_runs(device: str, reduce: str, tie: str, flag: bool) -> None:
    """H19: 20 runs. With torch's flag all are the same; without, a GPU's plan may change last digits where it warms."""
    torch.use_deterministic_algorithms(flag)
    g, weight = skewed(device)
    runs = [everything(g, weight, reduce, tie) for _ in range(WARM_AFTER + 1 if device == "cpu" else 20)]
    one_plan = flag or device == "cpu"
    for before, after in itertools.pairwise(runs if one_plan else runs[WARM_AFTER:]):
        assert all(same_bits(a, b) for a, b in zip(before, after, strict=True))
    assert one_plan or all(same_bits(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    again, weight = skewed(device)
    for run in runs:  # and a program that is run again sees the same, upgrade and all
        assert all(same_bits(a, b) for a, b in zip(run, everything(again, weight, reduce, tie), strict=True))


def test_scores_of_pairs(device: str) -> None:
    g, weight = skewed(device)
    weight = weight.unsqueeze(1) * torch.ones(4, device=device)
    src, dst = (values((2000, 4, 8), torch.float32, seed, device=device).requires_grad_() for seed in (1, 2))
    att = values((4, 8), torch.float32, 3, device=device).requires_grad_()

    def run() -> list[torch.Tensor]:
        out = scores(g, "pair", (src, dst, att), 0.2)
        return [out.detach(), *torch.autograd.grad(out, (src, dst, att), weight)]

    first = run()
    for threads in THREADS:
        torch.set_num_threads(threads)
        assert all(same_bits(a, b) for a, b in zip(first, run(), strict=True))


def test_the_flag_pins_plans(device: str) -> None:
    torch.use_deterministic_algorithms(True)
    g, _ = skewed(device)
    gsp.spmm(g, values((2000, 4), torch.float32, 1, device=device))
    plan = g._csr.plan
    assert plan.mode == "warm"
    torch.use_deterministic_algorithms(False)
    g, _ = skewed(device)
    gsp.spmm(g, values((2000, 4), torch.float32, 1, device=device))
    torch.use_deterministic_algorithms(True)
    for _ in range(WARM_AFTER + 2):
        gsp.spmm(g, values((2000, 4), torch.float32, 1, device=device))
    assert g._csr.plan.mode == "cold"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("reduce", "tie"), [("sum", "first"), ("mean", "first"), ("min", "first"), ("max", "split")])
def test_threads(reduce: str, tie: str, dtype: torch.dtype) -> None:
    g, weight = skewed("cpu")
    for width in (1, 33):
        results = []
        for threads in THREADS:
            torch.set_num_threads(threads)
            results.append(everything(g, weight, reduce, tie, dtype, width))
        for other in results[1:]:
            assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("name", ["hub", "reverse_hub", "wide", "shuffled"])
def test_threads_on_edges(name: str) -> None:
    """sddmm, edge_softmax, and building: sorting and the transpose."""
    e = NAMED[name]
    results = []
    for threads in THREADS:
        torch.set_num_threads(threads)
        g = e.graph()
        logits = values((e.num_edges, 3), torch.float32, 1).requires_grad_()
        p = gsp.edge_softmax(g, logits)
        a, b = values((e.num_dst, 65), torch.float32, 2), values((e.num_src, 65), torch.float32, 3)
        (grad,) = torch.autograd.grad(p, logits, values((e.num_edges, 3), torch.float32, 4))
        results.append([g.perm, g.col, g.T.perm, g.T.col, p.detach(), grad, gsp.sddmm(g, a, b)])
    for other in results[1:]:
        assert all(same_bits(x, y) for x, y in zip(results[0], other, strict=True))


@pytest.mark.parametrize("name", ["hub", "reverse_hub", "shuffled"])
@pytest.mark.parametrize("reduce", REDUCES)
def test_cold_and_warm(device: str, reduce: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits depend on the plan alone: those of mode auto are first a cold plan's, then a warm one's, at the same use."""
    e = NAMED[name]
    weight = values((e.num_edges,), torch.float32, 3, device=device)
    results = {}
    for mode in ("cold", "warm", "auto"):
        monkeypatch.setenv("GSP_MODE", mode)
        g = e.graph(device)
        results[mode] = [everything(g, weight, reduce, width=5) for _ in range(WARM_AFTER + 1)]
    for mode in ("cold", "warm"):
        for other in results[mode]:
            assert all(same_bits(a, b) for a, b in zip(results[mode][0], other, strict=True))
    for at, mode in ((0, "cold"), (-1, "warm")):
        assert all(same_bits(a, b) for a, b in zip(results["auto"][at], results[mode][0], strict=True))
    for a, b in zip(results["cold"][0], results["warm"][0], strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-3)
    x = values((e.num_src, 5), torch.float32, 1, device=device)
    for mode in ("cold", "warm"):
        plan = gsp.plan(g, 5, reduce=reduce, mode=mode)
        out = gsp.spmm(g, x, weight, reduce, plan=plan)
        assert isinstance(out, torch.Tensor) and same_bits(out, results[mode][0][0])
