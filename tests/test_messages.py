"""Sums over messages with features of their own, and reductions of what edges have, against plain torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import _native
from gnn_spmm_plugin.functional_messages import edges_of, sum_messages
from gnn_spmm_plugin.plan import WARM_AFTER

N, M, E, F = 12, 9, 60, 3


def edges(device: str, ordered: bool) -> tuple[Tensor, Tensor]:
    """Duplicates, one long row, and at the end rows and columns without edges."""
    g = torch.Generator().manual_seed(0)
    src, dst = torch.randint(N - 2, (E,), generator=g), torch.randint(M - 2, (E,), generator=g)
    dst[:20] = 3
    if ordered:
        dst = dst.sort().values
    return src.to(device), dst.to(device)


def plain(src: Tensor, dst: Tensor, x: Tensor, e: Tensor, w: Tensor | None, reduce: str, **form: Any) -> Tensor:
    messages = x[src] + e
    messages = (messages.relu() if form.get("relu", True) else messages) + form.get("shift", 0.0)
    messages = messages if w is None else messages * w.unsqueeze(1)
    out = messages.new_zeros(M, F).index_add(0, dst, messages)
    degree = torch.bincount(dst, minlength=M).clamp(min=1).to(out.dtype)
    return out / degree.unsqueeze(1) if reduce == "mean" else out


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("needs", ["xew", "xe", "xw", "x", "e", "w", ""])
@pytest.mark.parametrize("form", [{}, {"shift": 0.5}, {"relu": False}])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_equals_plain_torch(reduce: str, form: dict[str, Any], needs: str, ordered: bool, device: str) -> None:
    src, dst = edges(device, ordered)
    graph = gsp.Graph.from_edge_index(torch.stack([src, dst]), (N, M))
    # Integers: some sums are 0, where the ReLU has its corner.
    made = {"x": torch.randint(-2, 3, (N, F)), "e": torch.randint(-2, 3, (E, F)), "w": torch.rand(E)}
    for weighted in (True, False):
        found = []
        for run in (lambda *t: sum_messages(graph, *t, reduce, **form), lambda *t: plain(src, dst, *t, reduce, **form)):
            x, e, w = (t.double().to(device).requires_grad_(k in needs) for k, t in made.items())
            out = run(x, e, w if weighted else None)
            if out.requires_grad:
                out.backward(torch.arange(M * F, device=device).view(M, F).double())
            found.append([out.detach(), *(t.grad for t in (x, e, w))])
        for got, expected in zip(*found, strict=True):
            assert (got is None) == (expected is None)
            if expected is not None:
                torch.testing.assert_close(got, expected)


def test_any_order_of_derivatives(device: str) -> None:
    src, dst = edges(device, False)
    graph = gsp.Graph.from_edge_index(torch.stack([src, dst]), (N, M))
    x, e, w = (torch.randn(s, dtype=torch.float64, device=device).requires_grad_() for s in ((N, F), (E, F), (E,)))
    for reduce in ("sum", "mean"):
        call = lambda x, e, w, r=reduce: sum_messages(graph, x, e, w, r, shift=0.1)  # noqa: E731
        assert torch.autograd.gradcheck(call, (x, e, w))
        # Second derivatives are plain torch's, whose sums by index have no order on CUDA.
        assert torch.autograd.gradgradcheck(call, (x, e, w), nondet_tol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_are_accumulated_in_float32(dtype: torch.dtype, device: str) -> None:
    src = torch.zeros(4096, dtype=torch.long, device=device)
    graph = gsp.Graph.from_edge_index(torch.stack([src, src]), (1, 1))
    one = torch.ones(1, 1, dtype=dtype, device=device)
    out = sum_messages(graph, one, torch.zeros(4096, 1, dtype=dtype, device=device))
    assert out.dtype == dtype and float(out) == 4096  # one by one, a float16 stops at 2048 and a bfloat16 at 256


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 16, 33, 200])
def test_kernels_of_every_dtype_and_width(dtype: torch.dtype, width: int, device: str) -> None:
    """Against plain torch in float64, from the same rounded numbers: strided rows, hubs, a plan that has warmed up."""
    g = torch.Generator().manual_seed(0)
    src, dst = torch.randint(40, (3000,), generator=g), torch.randint(30, (3000,), generator=g)
    dst[:1500], src[1000:2500] = 3, 5  # long rows in both directions
    graph = gsp.Graph.from_edge_index(torch.stack([src, dst]).to(device), (40, 30))
    made = [torch.randn(n, width + 3, generator=g).to(dtype) for n in (40, 3000, 30)]
    w = torch.rand(3000, generator=g).to(dtype)
    wide = [t[:, :width].to(torch.float64, copy=True).requires_grad_() for t in made[:2]]
    wide.append(w.to(torch.float64, copy=True).requires_grad_())
    degree = torch.bincount(dst, minlength=30).clamp(min=1).unsqueeze(1)
    messages = (wide[0][src] + wide[1]).relu() * wide[2].unsqueeze(1)
    expected = torch.zeros(30, width, dtype=torch.float64).index_add(0, dst, messages) / degree
    expected.backward(made[2].double()[:, :width])
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    for _ in range(WARM_AFTER + 1):
        given = [t.to(device)[:, :width].requires_grad_() for t in made[:2]] + [
            w.to(device, copy=True).requires_grad_()
        ]
        before = _native.kernel_calls()
        out = sum_messages(graph, *given, "mean")
        out.backward(made[2].to(device)[:, :width])
        assert _native.kernel_calls() - before == 3
        assert out.dtype == dtype
        for got, right in zip([out, *(t.grad for t in given)], [expected, *(t.grad for t in wide)], strict=True):
            assert got is not None and right is not None
            error = float((got.detach().cpu().double() - right.detach()).norm() / right.detach().norm())
            assert error <= tolerance


def test_nan_and_infinities_are_those_of_a_relu(device: str) -> None:
    e = torch.tensor([[math.nan, math.inf, -math.inf, 1.0]], device=device).requires_grad_()
    x = torch.zeros(1, 4, device=device).requires_grad_()
    graph = gsp.Graph.from_edge_index(torch.zeros(2, 1, dtype=torch.long, device=device), 1)
    out = sum_messages(graph, x, e)
    out.backward(torch.ones_like(out))
    torch.testing.assert_close(out.detach(), e.detach().relu(), equal_nan=True)
    right = torch.tensor([[1.0, 1.0, 0.0, 1.0]], device=device)  # as torch has it: only what is at most 0 is cut off
    torch.testing.assert_close(e.grad, right)
    torch.testing.assert_close(x.grad, right)


def test_a_mean_does_not_overflow_where_it_fits() -> None:
    graph = gsp.Graph.from_edge_index(torch.zeros(2, 4, dtype=torch.long), 1)
    e = torch.full((4, 2), 2e38)
    assert sum_messages(graph, torch.zeros(1, 2), e, reduce="mean").tolist() == e[:1].tolist()


def test_compiled(device: str) -> None:
    src, dst = edges(device, False)
    graph = gsp.Graph.from_edge_index(torch.stack([src, dst]), (N, M))
    x, e, w = (torch.randn(s, device=device).requires_grad_() for s in ((N, F), (E, F), (E,)))
    call = lambda x, e, w: sum_messages(graph, x, e, w, "mean", shift=0.5)  # noqa: E731
    expected = torch.autograd.grad(call(x, e, w).square().sum(), (x, e, w))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(x, e, w).square().sum(), (x, e, w))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("ordered", [False, True])
def test_reductions_of_what_edges_have(reduce: str, ordered: bool, device: str) -> None:
    src, dst = edges(device, ordered)
    graph = gsp.Graph.from_edge_index(torch.stack([src, dst]), (N, M))
    ours, theirs = (torch.randn(E, F, dtype=torch.float64, device=device).requires_grad_() for _ in range(2))
    theirs.data.copy_(ours.data)
    out = gsp.spmm(edges_of(graph), ours, reduce=reduce)
    name = {"max": "amax", "min": "amin"}.get(reduce, reduce)
    expected = theirs.new_zeros(M, F).scatter_reduce(0, dst.unsqueeze(1).expand(E, F), theirs, name, include_self=False)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert edges_of(graph)._core is edges_of(graph)._core  # made once


def test_nothing_else_of_the_size_of_edges(device: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                # what is a view, or e's own gradient, has been written before or must be
                if isinstance(t, Tensor) and t.is_floating_point() and func is not torch.ops.aten.empty_like.default:
                    self.elements = max(self.elements, t.numel() if t._base is None else 0)
            return out

    src, dst = torch.randint(50, (2, 4000), device=device)
    graph = gsp.Graph.from_edge_index(torch.stack([src, dst]), 50)
    x, e = torch.randn(50, F, device=device).requires_grad_(), torch.randn(4000, F, device=device)
    with Largest() as seen:
        sum_messages(graph, x, e).sum().backward()
    assert seen.elements < 4000 * F / 4


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"x": torch.zeros(N + 1, F)}, ValueError, "one row for each of the graph's 12 source nodes"),
        ({"e": torch.zeros(E, F + 1)}, ValueError, r"one dtype, got \[12, 3\]"),
        ({"e": torch.zeros(E, F, dtype=torch.float64)}, ValueError, "one dtype"),
        ({"x": torch.zeros(N, F, dtype=torch.long)}, TypeError, "float"),
        ({"weight": torch.zeros(E, 2)}, ValueError, r"shape \[num_edges\]"),
        ({"reduce": "max"}, ValueError, "sum or mean"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], error: type[Exception], says: str) -> None:
    src, dst = edges("cpu", False)
    graph = gsp.Graph.from_edge_index(torch.stack([src, dst]), (N, M))
    arguments = {"x": torch.zeros(N, F), "e": torch.zeros(E, F), "weight": None, "reduce": "sum"} | change
    with pytest.raises(error, match=says):
        sum_messages(graph, **arguments)


def test_graphs_without_edges_or_columns(device: str) -> None:
    none = torch.empty(2, 0, dtype=torch.long, device=device)
    graph = gsp.Graph.from_edge_index(none, (N, M))
    x, e = torch.ones(N, F, device=device).requires_grad_(), torch.ones(0, F, device=device).requires_grad_()
    out = sum_messages(graph, x, e)
    out.sum().backward()
    assert out.shape == (M, F) and not out.any() and not x.grad.any() and e.grad.shape == (0, F)
    src, dst = edges(device, False)
    graph = gsp.Graph.from_edge_index(torch.stack([src, dst]), (N, M))
    assert sum_messages(graph, x[:, :0], torch.ones(E, 0, device=device)).shape == (M, 0)
