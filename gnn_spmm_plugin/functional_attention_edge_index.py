"""One opaque operator for ``torch.compile``: attention over a plain ``edge_index``, as in `functional_edge_index`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .functional_attention import attend
from .functional_edge_index import _TAGS, _graph
from .graph import Graph
from .normalize import with_self_loops, without_self_loops

_NAME = "gnn_spmm_plugin::attend_edge_index"
_COMMON = (
    "Tensor x, Tensor[] given, Tensor edge_index, Tensor? keep, SymInt num_src, SymInt num_dst, bool reverse, "
    "bool loops, str score, float? slope, float scale, ScalarType? dtype, str policy"
)


def attend_edge_index(
    x: Tensor,
    given: tuple[Tensor, ...],
    edge_index: Tensor,
    num_src: int,
    num_dst: int,
    *,
    score: str,
    reverse: bool = False,
    loops: bool = False,
    keep: Tensor | None = None,
    slope: float | None = None,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    policy: str = "auto",
) -> Tensor:
    """`functional_attention.attend` over ``edge_index``, as one operator that ``torch.compile`` can see.

    Args:
        x: ``[num_src, H, C]``.
        given: operands of the score.
        edge_index: ``[2, E]`` int32 or int64; row 0 holds the sources, row 1 if `reverse`.
        num_src: number of source nodes.
        num_dst: number of destination nodes.
        score: as there, like what follows.
        reverse: messages go from row 1 to row 0.
        loops: in place of the self loops, put one on each node.
        keep: ``[E', H]`` factors of the coefficients, one row for each edge, those of the loops last; surplus ones are
            not used. How many edges there are without self loops is not known while code is compiled.
        slope: negative slope of a leaky ReLU.
        scale: factor of dot products.
        dtype: of scores and softmax.
        policy: as in `gnn_spmm_plugin.spmm`.

    Returns:
        ``[num_dst, H, C]``. Differentiable once, by `x` and `given`; the backward computes the coefficients again.
    """
    rest = (num_src, num_dst, reverse, loops, score, slope, scale, dtype, policy)
    out: Tensor = _forward(x, list(given), edge_index, keep, *rest)
    return out


def with_loops(graph: Graph) -> Graph:
    """`graph` with one self loop on each node, after all other edges, in place of those it has."""
    return with_self_loops(without_self_loops(graph).graph)


def _run(x: Tensor, given: list[Tensor], edge_index: Tensor, keep: Tensor | None, rest: tuple[Any, ...]) -> Tensor:
    num_src, num_dst, reverse, loops, score, slope, scale, dtype, policy = rest
    graph = _graph(edge_index, num_src, num_dst, reverse)
    graph = with_loops(graph) if loops else graph
    return attend(graph, x, score, tuple(given), slope=slope, scale=scale, keep=keep, dtype=dtype, policy=policy)


@torch.library.custom_op(_NAME, mutates_args=(), schema=f"({_COMMON}) -> Tensor", tags=_TAGS)
def _forward(x: Tensor, given: list[Tensor], edge_index: Tensor, keep: Tensor | None, *rest: Any) -> Tensor:
    return _run(x, given, edge_index, keep, rest)


@_forward.register_fake
def _(x: Tensor, given: list[Tensor], edge_index: Tensor, keep: Tensor | None, num_src: int, *rest: Any) -> Tensor:
    num_dst, dtype = rest[0], rest[6]
    if dtype is None:
        dtype = functools.reduce(torch.promote_types, (t.dtype for t in given))
    dtype = torch.promote_types(x.dtype, dtype)
    dtype = dtype if keep is None else torch.promote_types(dtype, keep.dtype)
    return x.new_empty((num_dst, *x.shape[1:]), dtype=dtype)


@torch.library.custom_op(
    f"{_NAME}_backward",
    mutates_args=(),
    schema=f"(Tensor grad, bool[] needed, {_COMMON}) -> Tensor[]",
    tags=_TAGS,
)
def _backward(
    grad: Tensor,
    needed: list[bool],
    x: Tensor,
    given: list[Tensor],
    edge_index: Tensor,
    keep: Tensor | None,
    *rest: Any,
) -> list[Tensor]:
    with _recording():
        leaves = [t.detach().requires_grad_(need) for t, need in zip((x, *given), needed, strict=True)]
        out = _run(leaves[0], leaves[1:], edge_index, keep, rest)
        found = iter(torch.autograd.grad(out, [t for t in leaves if t.requires_grad], grad))
    return [next(found).contiguous() if need else x.new_empty(0) for need in needed]


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Inside of an operator, where torch has shut autograd out: with it."""
    keys, excluded = torch._C.DispatchKey, torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradCPU, keys.AutogradCUDA, keys.ADInplaceOrView):
        excluded = excluded - torch._C.DispatchKeySet(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


@_backward.register_fake
def _(grad: Tensor, needed: list[bool], x: Tensor, given: list[Tensor], *_: Any) -> list[Tensor]:
    every = zip((x, *given), needed, strict=True)
    return [t.new_empty(t.shape) if need else x.new_empty(0) for t, need in every]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, given, edge_index, keep, *rest = inputs
    ctx.save_for_backward(x, edge_index, keep, *given)
    ctx.rest = rest


def _autograd(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, edge_index, keep, *given = ctx.saved_tensors
    needed = [t.requires_grad for t in (x, *given)]
    grads = _backward(grad, needed, x, given, edge_index, keep, *ctx.rest)
    found = [g if need else None for g, need in zip(grads, needed, strict=True)]
    return found[0], found[1:], None, None, *[None] * len(ctx.rest)


_forward.register_autograd(_autograd, setup_context=_setup)

__all__ = ["attend_edge_index", "with_loops"]
