"""What a `LazyMessage` does by itself, by the torch function it is passed to; all others gather."""

from __future__ import annotations

import math
import numbers
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import aggregate, deferred
from .lazy import PLAIN, LazyMessage, Pending, constant, version, wrap

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def is_lazy(value: Any) -> bool:
    """Whether `value` stands for messages that nobody has looked at."""
    return type(value) is LazyMessage and value.pending.pristine and not value.adopted()


# ---------------------------------------------------------------------- everything else: gather


def _name(func: Any) -> str:
    if getattr(func, "__name__", "") in ("__get__", "__set__"):  # a property
        return str(getattr(getattr(func, "__self__", None), "__name__", "an attribute"))
    return str(getattr(func, "__name__", func))


def _replace(value: Any, found: list[LazyMessage]) -> Any:
    """`value` with messages in place of lazy ones, also inside of containers, and the lazy ones that were found."""
    if isinstance(value, LazyMessage):
        found.append(value)
        return value.written()
    if type(value) in (tuple, list):
        before = len(found)
        made = [_replace(v, found) for v in value]
        return type(value)(made) if len(found) > before else value
    if type(value) is dict:
        before = len(found)
        entries = {k: _replace(v, found) for k, v in value.items()}
        return entries if len(found) > before else value
    return value


def _count_misses(func: Any, value: Any) -> None:
    if is_lazy(value):
        value.pending.miss(f"{_name(func)} needs the message of each edge")
    elif type(value) in (tuple, list):
        for v in value:
            _count_misses(func, v)
    elif type(value) is dict:
        _count_misses(func, list(value.values()))


def materialized(func: Any, values: Any) -> Any:
    """`values` (arguments of `func`) with messages in place of lazy ones; each of those counts as a miss."""
    _count_misses(func, values)
    return _replace(values, [])


def below(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `func` (an operator of ATen, below autograd) on the messages themselves.

    Raises:
        RuntimeError: autograd does not know of the lazy tensor, so a gradient would be lost; or `func` asks for memory.
    """
    found: list[LazyMessage] = []
    overload = getattr(func, "_schema", None)
    plain = _replace(args, found), _replace(kwargs, found)
    lost = any(m.pending.requires_grad and not m.requires_grad_below() for m in found)
    if lost or overload is None or overload.is_mutable or str(func).startswith(("aten.stride", "aten.is_contiguous")):
        raise RuntimeError(
            f"gnn_spmm_plugin: {func} reached the memory of messages that were never written; this layer passes x_j to "
            "code that torch cannot see into. Pass x_j[:] (which writes them), or leave the layer out with "
            "gnn_spmm_plugin.restore(layer)"
        )
    args, kwargs = torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, plain)
    return func(*args, **kwargs)


# ---------------------------------------------------------------------- questions


def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not is_lazy(args[0]):
        return NotImplemented
    return func(*args, **kwargs)  # the wrapper has the right shape, dtype and device


def _requires_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].pending.requires_grad if is_lazy(args[0]) else NotImplemented


def _is_leaf(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return not args[0].pending.requires_grad if is_lazy(args[0]) else NotImplemented


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not is_lazy(args[0]):
        return NotImplemented
    pending: Pending = args[0].pending
    kwargs.setdefault("dtype", pending.dtype)
    made = func(constant(pending.src), *args[1:], **kwargs)
    if func is Tensor.new_zeros:
        pending.zeros = weakref.ref(made), version(made)
    return made


def _expand_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or isinstance(args[0], LazyMessage) or not is_lazy(args[1]):
        return NotImplemented
    return args[0].expand(args[1].pending.shape)


def _unchanged(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operations that return the tensor itself when it is contiguous, as a gathered one is."""
    return args[0] if len(args) == 1 and not kwargs and is_lazy(args[0]) else NotImplemented


def _contiguous(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return True if len(args) == 1 and not kwargs and is_lazy(args[0]) else NotImplemented


# ---------------------------------------------------------------------- views


def _detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not is_lazy(args[0]):
        return NotImplemented
    p: Pending = args[0].pending
    p.check()
    return p.view_of(p.like(constant(p.src), p.factors).constant(), Tensor.detach)


def _clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 1 or kwargs or not is_lazy(args[0]):
        return NotImplemented
    args[0].pending.check()
    return args[0].pending.derive()


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A change of the dimensions after the messages' own, as a split into heads."""
    sizes = args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list, torch.Size)):
        sizes = tuple(sizes[0])
    if kwargs or not is_lazy(args[0]) or not sizes or not all(type(s) is int for s in sizes):
        return NotImplemented
    p: Pending = args[0].pending
    if p.factors:
        return deferred.joined(args[0], tuple(sizes))
    count, nodes = p.shape[0], p.src.shape[0]
    total = p.shape.numel()
    known = 1
    for s in sizes:
        known *= s if s != -1 else 1
    if p.dim != 0 or len(p.parts) > 1 or count < 2 or total == 0 or nodes == 0 or sizes.count(-1) > 1 or known <= 0:
        return NotImplemented
    sizes = tuple(total // known if s == -1 else s for s in sizes)
    if sizes[0] != count or torch.Size(sizes).numel() != total or len(sizes) < 2:
        return NotImplemented
    p.check()
    src = p.src.reshape(nodes, *sizes[1:])
    src = src if torch.is_grad_enabled() else constant(src)
    child = Pending(src, p.index, 0, p.gather, p.record, p.tally, p.linked)
    return p.view_of(child, lambda rows: rows.view(sizes))


# ---------------------------------------------------------------------- element-wise


def _multiply(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or kwargs:
        return NotImplemented
    a, b = args
    if a is b:
        if not is_lazy(a):
            return NotImplemented
        a.pending.check()
        return a.pending.squared()
    if is_lazy(a) and is_lazy(b):
        return deferred.product(a.pending, b.pending)
    if not is_lazy(a):
        a, b = b, a
    if not is_lazy(a) or isinstance(b, LazyMessage):
        return NotImplemented
    a.pending.check()
    if isinstance(b, numbers.Real):
        # A node without edges has the gradient 0, but 0 * inf is NaN.
        return a.pending.per_node(operator.mul, b) if math.isfinite(b) else NotImplemented
    return a.pending.scaled(b) if isinstance(b, Tensor) else NotImplemented


def _square(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    exponent = args[1] if len(args) > 1 else 2
    if kwargs or not is_lazy(args[0]) or type(exponent) not in (int, float) or exponent != 2:
        return NotImplemented
    return args[0].pending.squared()


def _affine(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Plus, minus, divided by a number or by what is the same for all edges."""
    if len(args) != 2 or kwargs:
        return NotImplemented
    a, b = args
    if is_lazy(a) and is_lazy(b):
        return NotImplemented if a is b or func not in _SUMS else deferred.added(a.pending, b.pending)
    p: Pending | None = a.pending if is_lazy(a) else b.pending if is_lazy(b) else None
    other = b if is_lazy(a) else a
    if p is None or isinstance(other, LazyMessage):
        return NotImplemented
    if func in _SUMS:
        p.check()
        summed = p.plus(other)
        if summed is not NotImplemented:
            return summed
    divides = func in _DIVISIONS
    if divides and (other is a or (isinstance(other, numbers.Real) and not other)):
        return NotImplemented
    if not isinstance(other, numbers.Real):
        if divides or type(other) not in PLAIN or other.requires_grad or other.device != p.src.device:
            return NotImplemented
        if p.varying(other) is None or p.varying(other)[0]:  # type: ignore[index]
            return NotImplemented
    return p.per_node(lambda t: func(t, other) if other is b else func(other, t))


def _per_node(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Functions of one argument whose gradient at a node without edges is 0, whatever is in it."""
    values = (*args[1:], *kwargs.values())
    if kwargs.get("inplace") or not is_lazy(args[0]) or any(isinstance(v, Tensor) for v in values):
        return NotImplemented
    if func in (F.relu, F.leaky_relu) and any(v is True for v in values):  # inplace
        return NotImplemented
    return args[0].pending.per_node(func, *args[1:], **kwargs)


def _cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or not is_lazy(args[0]) or len(args) > 2 or not all(isinstance(a, torch.dtype) for a in args[1:]):
        return NotImplemented
    p: Pending = args[0].pending
    dtype = _CASTS.get(func) or (args[1] if len(args) == 2 else None)
    if dtype is None or not dtype.is_floating_point:
        return NotImplemented
    return args[0] if dtype == p.dtype else p.per_node(Tensor.to, dtype)


# ---------------------------------------------------------------------- aggregation


def _scatter(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``scatter_add`` and ``index_add`` of messages, in place or not."""
    names = ("self", "dim", "index", "src" if "scatter" in func.__name__ else "source")
    call = dict(zip(names, args, strict=False)) | kwargs
    if len(args) > 4 or len(call) != 4 or set(call) != set(names):
        return NotImplemented
    target, dim, index, messages = (call[n] for n in names)
    if not is_lazy(messages) or type(target) not in PLAIN or target.dtype != messages.pending.dtype:
        return NotImplemented
    p: Pending = messages.pending
    vector = aggregate.index_vector(p, dim, index, expanded="scatter" in func.__name__)
    if vector is None or not aggregate.fits(p, target, dim):
        return NotImplemented
    result = aggregate.run(p, vector, target.shape[dim], dim, "sum")
    if result is None:
        return NotImplemented
    if not func.__name__.endswith("_"):
        return target + result
    return target.copy_(result) if _still_zero(p, target) else target.add_(result)


def _still_zero(p: Pending, target: Tensor) -> bool:
    if p.zeros is None or target.is_inference() or target.requires_grad:
        return False
    made, then = p.zeros
    return made() is target and bool(target._version == then)


def _scatter_reduce(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("self", "dim", "index", "src", "reduce")
    call = dict(zip(names, args, strict=False)) | kwargs
    include_self = call.pop("include_self", True)
    reduce = {"amax": "max", "amin": "min"}.get(call.get("reduce", ""))
    if len(args) > 5 or set(call) != set(names) or include_self or reduce is None:
        return NotImplemented
    target, dim, index, messages = (call[n] for n in names[:4])
    if not is_lazy(messages) or type(target) not in PLAIN or target.dtype != messages.pending.dtype:
        return NotImplemented
    p: Pending = messages.pending
    vector = aggregate.index_vector(p, dim, index, expanded=True)
    # Into anything but zeros, torch's gradient depends on what was there before.
    if vector is None or not aggregate.fits(p, target, dim) or not _still_zero(p, target):
        return NotImplemented
    result = aggregate.run(p, vector, target.shape[dim], dim, reduce, scatter_reduce=True)
    if result is None:
        return NotImplemented
    return target.copy_(result) if func.__name__.endswith("_") else result


def _get(name: str) -> Any:
    return getattr(Tensor, name).__get__


_SUMS = {Tensor.add, torch.add, Tensor.__add__, Tensor.__radd__}
_DIVISIONS = {Tensor.div, torch.div, Tensor.true_divide, torch.true_divide, Tensor.__truediv__}
_CASTS: dict[Any, torch.dtype] = {
    Tensor.float: torch.float32,
    Tensor.double: torch.float64,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
}

_GROUPS: list[tuple[Handler, tuple[Any, ...]]] = [
    (
        _answer,
        (
            *(_get(n) for n in ("shape", "dtype", "device", "ndim", "is_cuda", "layout", "is_sparse", "is_quantized")),
            *(_get(n) for n in ("is_meta", "is_mkldnn", "is_nested", "is_sparse_csr", "is_cpu", "itemsize")),
            *(Tensor.dim, Tensor.size, Tensor.ndimension, Tensor.numel, Tensor.nelement, torch.numel, Tensor.__len__),
            *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex),
            *(Tensor.element_size, Tensor.get_device),
        ),
    ),
    (_requires_grad, (_get("requires_grad"),)),
    (_is_leaf, (_get("is_leaf"),)),
    (_new, (Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full)),
    (_expand_as, (Tensor.expand_as,)),
    (_unchanged, (Tensor.contiguous,)),
    (_contiguous, (Tensor.is_contiguous,)),
    (_detach, (Tensor.detach, torch.detach)),
    (_clone, (Tensor.clone, torch.clone)),
    (_view, (Tensor.view, Tensor.reshape, torch.reshape)),
    (_multiply, (Tensor.mul, torch.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply)),
    (_square, (Tensor.square, torch.square, Tensor.pow, torch.pow, Tensor.__pow__)),
    (
        _affine,
        (
            *_SUMS,
            *(Tensor.sub, torch.sub, Tensor.__sub__),
            *_DIVISIONS,
        ),
    ),
    (_per_node, (Tensor.relu, torch.relu, F.relu, F.leaky_relu, Tensor.neg, torch.neg, Tensor.clamp, torch.clamp)),
    (_cast, (*_CASTS, Tensor.to, Tensor.type)),
    (deferred.sum_product, (Tensor.sum, torch.sum)),
    (_scatter, (Tensor.scatter_add_, Tensor.scatter_add, torch.scatter_add)),
    (_scatter, (Tensor.index_add_, Tensor.index_add, torch.index_add)),
    (_scatter_reduce, (Tensor.scatter_reduce_, Tensor.scatter_reduce, torch.scatter_reduce)),
]

HANDLERS: dict[Any, Handler] = {func: handler for handler, functions in _GROUPS for func in functions}

__all__ = ["HANDLERS", "below", "is_lazy", "materialized", "wrap"]
