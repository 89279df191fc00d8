"""What results are compared with: the operators in float64, with a bound on the error that the arithmetic allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import cache, reference

#: Edges that a kernel adds up in one chain, at most.
CHUNK = 4096


@dataclass
class Expected:
    """A float64 result and, for each element, the sum of the absolute values of its terms."""

    value: Tensor
    size: Tensor


def close(got: Tensor, expected: Expected, roundings: int = 1, terms: int = 0) -> None:
    """Asserts `got` within `roundings` roundings of its dtype and the error of an accumulation in float32 (float64).

    Errors of an accumulation mostly cancel; where they need not, as of equal terms, `terms` says how many there are.
    """
    dtype = got.dtype
    assert got.shape == expected.value.shape, (got.shape, expected.value.shape)
    acc = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    eps = torch.finfo(dtype).eps
    # Where the dtype is that of the reference, both err.
    accumulation = ((128 if dtype == torch.float64 else 32) + min(terms, CHUNK) / 4) * acc
    bound = eps * expected.value.abs() + (accumulation + (roundings - 1) * eps) * expected.size
    bound = bound + torch.finfo(dtype).smallest_normal * eps * (
        8 + terms if roundings > 1 else 1
    )  # subnormal: their spacing
    error = (got.double() - expected.value).abs()
    worst = (error - bound).flatten().argmax() if error.numel() else None
    if worst is not None and not bool((error <= bound).all()):
        i = int(worst)
        raise AssertionError(
            f"element {i} of {list(got.shape)} {dtype}: got {got.flatten()[i]}, "
            f"expected {expected.value.flatten()[i]}, off by {error.flatten()[i]:.3g}, allowed {bound.flatten()[i]:.3g}"
        )


def _leaves(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def _grads(out: Tensor, grad: Tensor, leaves: list[Tensor | None]) -> list[Tensor | None]:
    present = [t for t in leaves if t is not None]
    found = iter(torch.autograd.grad(out, present, grad, allow_unused=True)) if out.requires_grad else iter(())
    result: list[Tensor | None] = []
    for t in leaves:
        g = next(found, None) if t is not None else None
        result.append(torch.zeros_like(t) if g is None and t is not None else g)
    return result


def _selected(graph: gsp.Graph, x: Tensor, weight: Tensor | None, share: Tensor) -> Tensor:
    """Sum of the messages, each times its share (``[E, *F]``), into each destination."""
    m = reference.messages(graph, x, weight) * share
    return m.new_zeros((graph.num_dst, *m.shape[1:])).index_add(0, graph.edge_index()[1], m)


def shares(graph: gsp.Graph, x: Tensor, weight: Tensor | None, reduce: str, tie: str) -> tuple[Tensor, Tensor, Tensor]:
    """(out, arg, share of each message) of an extremum, decided on messages rounded to the dtype of `x`."""
    with torch.no_grad():
        out, arg = reference.spmm(graph, x, weight, reduce)
        m = reference.messages(graph, x, weight)
        dst = graph.edge_index()[1]
        if tie == "first":
            ids = torch.arange(graph.num_edges, device=x.device).view(-1, *[1] * (m.dim() - 1))
            share = (arg[dst] == ids).double()
        else:
            wins = ((m == out[dst]) | (m.isnan() & out[dst].isnan())).double()
            count = wins.new_zeros(out.shape).index_add(0, dst, wins).clamp(min=1)
            share = wins / count[dst]
        return out, arg, share


@dataclass
class Everything:
    """Forward and gradients of one spmm."""

    out: Expected
    grad_x: Expected
    grad_weight: Expected | None
    arg: Tensor | None


def expect_spmm(
    graph: gsp.Graph, x: Tensor, weight: Tensor | None, grad: Tensor, reduce: str, tie: str = "first"
) -> Everything:
    """All of what `spmm(graph, x, weight, reduce)` should give, with `grad` coming back."""
    arg = share = exact = None
    if reduce in ("max", "min"):
        exact, arg, share = shares(graph, x, weight, reduce, tie)

    def run(leaves: list[Tensor | None], upstream: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        xs, ws = leaves
        assert xs is not None
        if share is None:
            out, _ = reference.spmm(graph, xs, ws, reduce)
        else:
            out = _selected(graph, xs, ws, share)
        return out, _grads(out, upstream, leaves)

    out, grads = run(_leaves(x, weight), grad.double())
    size, sizes = run(_leaves(x.abs(), None if weight is None else weight.abs()), grad.abs().double())
    if exact is not None:
        out = exact.double()  # an element is picked, not computed
    assert grads[0] is not None and sizes[0] is not None
    return Everything(
        Expected(out.detach(), size.detach()),
        Expected(grads[0], sizes[0]),
        None if grads[1] is None or sizes[1] is None else Expected(grads[1], sizes[1]),
        arg,
    )


def check_spmm(
    graph: gsp.Graph,
    x: Tensor,
    weight: Tensor | None,
    reduce: str,
    tie: str = "first",
    seed: int = 0,
    terms: int = 0,
    **how: Any,
) -> None:
    """Forward, argument and gradients of one spmm against the reference; `x` and `weight` need no gradients yet.

    `terms`: as of `close`; `how`: a plan or policy.
    """
    x_leaf = x.detach().requires_grad_()  # same memory, same strides
    w_leaf = None if weight is None else weight.detach().requires_grad_()
    arg = None
    if reduce in ("max", "min"):
        out, arg = gsp.spmm(graph, x_leaf, w_leaf, reduce, tie=tie, return_arg=True, **how)
    else:
        out = gsp.spmm(graph, x_leaf, w_leaf, reduce, **how)
    assert out.dtype == x.dtype and out.is_contiguous()
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(x.device, x.dtype)
    expected = expect_spmm(graph, x, weight, grad, reduce, tie)
    if arg is not None:
        assert arg.dtype == torch.int64
        assert torch.equal(arg, expected.arg)
        assert torch.equal(out.double(), expected.out.value)
    else:
        close(out, expected.out, terms=terms)
    out.backward(grad)
    assert x_leaf.grad is not None and x_leaf.grad.dtype == x.dtype
    # a shared gradient, and one divided by the number of edges, is rounded before it is used
    roundings = 1 + (tie == "split")
    close(x_leaf.grad, expected.grad_x, roundings, terms)
    if w_leaf is not None:
        assert w_leaf.grad is not None and w_leaf.grad.dtype == x.dtype
        assert expected.grad_weight is not None
        close(w_leaf.grad, expected.grad_weight, roundings + (reduce == "mean"), terms)
    plan = graph._csr.plan
    with torch.no_grad():  # the path without gradients gives the same bits, unless the plan is upgraded meanwhile
        again = gsp.spmm(graph, x, weight, reduce, tie=tie, **how)
    if graph._csr.plan is plan:
        assert torch.equal(again.isnan(), out.isnan()) and torch.equal(again.nan_to_num(), out.nan_to_num())
    else:
        close(again, expected.out, terms=terms)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit, NaNs included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8)) if a.numel() else True


def books_agree() -> None:
    """What is kept twice, to be found fast, says the same as the list of all that is kept."""
    entries = dict(cache._entries)
    linked = [ref() for root in cache._roots.values() for ref in root.entries.values()]
    for number, entry in entries.items():
        assert entry.roots == sum(e is entry for e in linked)
        assert cache._by_size[entry.size][number] is entry
        assert (number in cache._orphans) == (entry.roots <= 0)
    assert sum(map(len, cache._by_size.values())) == len(entries) and cache._orphans.keys() <= entries.keys()
    assert all(cache._by_size.values())
    for device, kept in cache._bytes.items():
        assert kept == sum(e.nbytes for e in entries.values() if e.graph.device == device)


def resident() -> int:
    """Bytes of memory that this process has."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096
