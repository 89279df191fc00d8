"""A convolution with its linear layers as one step of autograd: the same as its parts, to any order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.derivatives import SCATTER_TIE
from gnn_spmm_plugin.functional_convolution import convolve

CASES = {
    "sum": {"reduce": "sum"},
    "sum, first": {"reduce": "sum", "first": True},
    "mean, first, own": {"reduce": "mean", "first": True, "own": True},
    "mean, own": {"reduce": "mean", "own": True},
    "mean, x itself": {"reduce": "mean", "own": "x"},
    "mean, first, x itself": {"reduce": "mean", "first": True, "own": "x"},
    "sum, normalised": {"reduce": "sum", "scales": True},
    "sum, first, normalised": {"reduce": "sum", "first": True, "scales": True},
    "max, x itself": {"reduce": "max", "own": "x"},
    "max, as scatter": {"reduce": "max", "own": "x", "tie": SCATTER_TIE},
    "min, split": {"reduce": "min", "own": True, "tie": "split"},
    "max, no bias": {"reduce": "max", "bias": False},
}


def problem(case: dict[str, Any], device: str, dtype: torch.dtype = torch.float64) -> tuple[Any, list[Tensor]]:
    """``f(x, weight, bias, own, root)`` in one step and in parts, and arguments; those not asked for are empty."""
    generator = torch.Generator().manual_seed(3)
    n = 7
    edges = torch.randint(n, (2, 19), generator=generator)
    graph = gsp.Graph.from_edge_index(edges.to(device), n)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()

    x, weight, bias, own, root = values(n, 3), values(4, 3), values(4), values(n, 3), values(4, 3)
    scale, loop = values(n).detach().abs(), values(n).detach()
    if dtype != torch.float64:
        scale, loop = scale.float(), loop.float()
    reduce, tie, first = case["reduce"], case.get("tie", "first"), case.get("first", False)
    scales, with_bias, mine = case.get("scales", False), case.get("bias", True), case.get("own")

    def whole(x: Tensor, weight: Tensor, bias: Tensor, own: Tensor, root: Tensor) -> Tensor:
        out = convolve(
            *(graph, x, weight, bias if with_bias else None, reduce),
            own=x if mine == "x" else own if mine else None,
            root=root if mine else None,
            scale=scale if scales else None,
            loop=loop if scales else None,
            tie=tie,
            first=first,
        )
        assert out is not None
        return out

    def parts(x: Tensor, weight: Tensor, bias: Tensor, own: Tensor, root: Tensor) -> Tensor:
        factor = scale.to(dtype).unsqueeze(1) if scales else torch.ones(n, 1, dtype=dtype, device=device)
        out = gsp.spmm(graph, x * factor, None, reduce, tie=tie) * factor
        assert isinstance(out, Tensor)
        out = (out + loop.to(dtype).unsqueeze(1) * x if scales else out) @ weight.t()
        out = out + (x if mine == "x" else own) @ root.t() if mine else out
        return out + bias if with_bias else out

    return (whole, parts), [x, weight, bias, own, root]


def gradients(f: Any, given: list[Tensor], seed: Tensor, order: int) -> list[Tensor | None]:
    """Gradients of ``f(*given)``; of order 2, of the squares of these."""
    out = f(*given)
    found = torch.autograd.grad(out, given, seed, create_graph=order > 1, allow_unused=True)
    if order == 1:
        return list(found)
    total = sum((t.square().sum() for t in found if t is not None), out.sum())
    return list(torch.autograd.grad(total, given, allow_unused=True))


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_as_its_parts(name: str, order: int, device: str) -> None:
    (whole, parts), given = problem(CASES[name], device)
    expected = parts(*given)
    torch.testing.assert_close(whole(*given), expected)
    with torch.no_grad():
        torch.testing.assert_close(whole(*given), expected)
    seed = torch.randn_like(expected)
    found, right = (gradients(f, given, seed, order) for f in (whole, parts))
    for a, b in zip(found, right, strict=True):
        # What no second derivative reaches is a zero of one, and nothing of the other.
        none = torch.zeros(())
        a, b = (none if t is None or not t.any() else t for t in (a, b))
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["mean, x itself", "mean, first, x itself", "sum, normalised", "max, as scatter"])
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (4,), (0, 4), (1, 2)])
def test_only_what_is_wanted(name: str, wanted: tuple[int, ...], device: str) -> None:
    (whole, parts), given = problem(CASES[name], device)
    if 4 in wanted and CASES[name].get("own") is None:
        pytest.skip("has no such weight")
    given = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(given)]
    inputs = [given[i] for i in wanted]
    found, right = (torch.autograd.grad(f(*given).square().sum(), inputs) for f in (whole, parts))
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("name", ["mean, first, x itself", "mean, x itself", "max, as scatter"])
def test_many_gradients_at_once(name: str, device: str) -> None:
    (whole, parts), given = problem(CASES[name], device)
    seeds = torch.randn(3, 7, 4, dtype=torch.float64, device=device)
    found, right = (
        torch.autograd.grad(f(*given), [given[0], given[1]], seeds, is_grads_batched=True) for f in (whole, parts)
    )
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype, device: str) -> None:
    for name in ("mean, first, x itself", "sum, normalised", "max, x itself"):
        (whole, parts), given = problem(CASES[name], device, dtype)
        out = whole(*given)
        assert out.dtype == dtype
        wide = [t.detach().float().requires_grad_() for t in given]
        (_, parts), _ = problem(CASES[name], device, torch.float32)
        expected = parts(*wide)
        tolerance = {"atol": 0.1, "rtol": 0.05} if dtype != torch.float32 else {"atol": 1e-5, "rtol": 1e-5}
        torch.testing.assert_close(out.float(), expected, **tolerance)
        found = torch.autograd.grad(out.float().sum(), given[:3])
        right = torch.autograd.grad(expected.sum(), wide[:3])
        assert all(t.dtype == dtype for t in found)
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a.float(), b, **tolerance)


def test_not_under_transforms(device: str) -> None:
    (whole, _), given = problem(CASES["sum"], device)
    with pytest.raises(AssertionError):
        torch.func.vmap(whole, in_dims=(None, None, 0, None, None))(*given[:2], torch.randn(2, 4), *given[3:])
