"""What is replaced in PyG while the plugin is on, and when: methods of two base classes, and `memo`'s functions."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import torch
import torch_geometric
import torch_geometric.typing
from torch import Tensor
from torch.utils.hooks import BackwardHook
from torch_geometric.nn.aggr import Aggregation, MaxAggregation, StdAggregation, SumAggregation, VarAggregation
from torch_geometric.nn.aggr.fused import FusedAggregation
from torch_geometric.nn.conv import MessagePassing

from ... import _native
from ..._config import disabled, log
from ...kernels import DTYPES
from . import (
    aggregate,
    algebra,  # noqa: F401 (registers its layers)
    deferred,
    direct,
    direct_attention,  # noqa: F401 (registers its layers)
    exchange,
    memo,
    quick,
    softmax,
    sparse,
    written,
)
from .lazy import PLAIN, LazyMessage, Pending, constant, saved_tensor_hooks, wrap
from .operations import is_lazy
from .records import Record, record_of

FLAG = "_gsp_accelerated"  # the one attribute that `accelerate` sets on layers
TESTED = ((2, 6), (2, 9))  # first PyG release that was tested, first that was not

_lock = threading.RLock()
_count = 0  # patches in force for the whole process
_layers: weakref.WeakSet[Any] = weakref.WeakSet()  # accelerated one by one
_saved: list[tuple[Any, str, Any, Any]] = []
_local = threading.local()
_refusal: str | bool | None = False  # why this PyG is left alone; False: not looked at yet
_MISSING = object()


def active(layer: Any) -> bool:
    """Whether `layer` is accelerated, or all are."""
    return _count > 0 or FLAG in layer.__dict__


def _memo_active() -> bool:
    if _count == 0 and getattr(_local, "record", None) is None:
        return False
    return not _host_only()


def _running() -> Record | None:
    """The record of the accelerated layer that this thread is in."""
    if torch.compiler.is_compiling():
        return None
    record: Record | None = getattr(_local, "record", None)
    return None if record is None or _host_only() else record


def _adapts(layer: Any) -> bool:
    """Whether `layer` may run as a whole: unlike the lazy gather, also while torch.compile traces it."""
    if not active(layer):
        return False
    return not _exporting() if torch.compiler.is_compiling() else not _transformed()


def _exporting() -> bool:
    # Not is_exporting(), which is True in everything that dynamo of torch 2.11 traces.
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def _host_only() -> bool:
    """Whether something records or transforms the operations, so that they must be PyG's own."""
    return torch.compiler.is_compiling() or _transformed()  # the former also while exporting


def _transformed() -> bool:
    return (
        torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


# ---------------------------------------------------------------------- the replacements


def _gather(self: Any, src: Tensor, index: Tensor) -> Tensor:
    original = _original(MessagePassing, "_index_select_safe")
    if not active(self) or _host_only() or type(src) not in PLAIN or src.dim() < 2 or src.layout != torch.strided:
        return original(self, src, index)  # type: ignore[no-any-return]
    plain = aggregate.plain_index(index)
    if plain is None or plain.dim() != 1 or plain.shape[0] == 0 or plain.device != src.device:
        return original(self, src, index)  # type: ignore[no-any-return]
    record = record_of(self)
    dim = self.node_dim % src.dim()
    tally = record.gathers_of(src.shape, dim)
    # A checkpoint runs the layer twice and matches what the two runs save by position: no change of mind between them.
    if tally.hopeless() and saved_tensor_hooks() is None:
        record.miss(tally.reason)
        return original(self, src, index)  # type: ignore[no-any-return]
    trusted = _trusted(self, record)
    reason = _unsuitable(src, plain, trusted)
    if reason is not None:
        record.miss(reason)
        return original(self, src, index)  # type: ignore[no-any-return]
    if not torch.is_grad_enabled():
        src = constant(src)
    softmax.note(plain, src.shape[dim])
    return wrap(Pending(src, index, dim, _rows, record, tally, not trusted))


class _Dimension:
    """All that PyG's own gather asks of a layer."""

    def __init__(self, node_dim: int) -> None:
        self.node_dim = node_dim


def _rows(src: Tensor, index: Tensor, dim: int) -> Tensor:
    return _original(MessagePassing, "_index_select_safe")(_Dimension(dim), src, index)  # type: ignore[no-any-return]


def _unsuitable(src: Tensor, index: Tensor, trusted: bool) -> str | None:
    if src.dtype not in DTYPES:
        return f"the features are {src.dtype}; kernels exist for float32, float64, float16 and bfloat16"
    if index.dtype not in (torch.int32, torch.int64):
        return f"edge_index is {index.dtype}; use int64 or int32"
    error = _no_kernels(src.device.type)
    if error is not None:
        return error
    if not trusted and src.is_inference():
        return (
            "the features were made in inference mode, where torch does not count writes, and code that is not PyG's "
            "sees the messages; use torch.no_grad()"
        )
    return None


_warned: set[str] = set()


def _no_kernels(device: str) -> str | None:
    if device == "cpu":
        return _native.cpu_error
    error = _native.cuda_error if device == "cuda" else f"there are no kernels for {device}"
    if error is not None and device not in _warned:
        _warned.add(device)
        log.warning("PyG layers on %s run as without this package: %s", device, error)
    return error


_HOOKS = ("_message_forward_pre_hooks", "_message_forward_hooks", "_aggregate_forward_pre_hooks")
_METHODS = ("message", "aggregate", "update", "edge_update", "explain_message")


def _trusted(layer: Any, record: Record) -> bool:
    """Whether only PyG's own code sees the messages of `layer`, which neither hides nor keeps them."""
    attributes = layer.__dict__
    if any(attributes.get(name) for name in _HOOKS) or any(name in attributes for name in _METHODS):
        return False
    seen = tuple(getattr(type(layer), name) for name in _METHODS), _kinds(layer.aggr_module)
    if record.trusted is None or record.trusted[0] != seen:
        own = all(m.__module__.startswith("torch_geometric.") for m in seen[0])
        own = own and all(kind.__module__.startswith(("torch_geometric.", "torch.")) for kind in seen[1])
        record.trusted = (seen, own)
    return record.trusted[1]


def _kinds(module: torch.nn.Module | None) -> tuple[type, ...]:
    """The classes of a module and of all in it."""
    if module is None or not module._modules:
        return () if module is None else (type(module),)
    return tuple(type(m) for m in module.modules())


def _aggregate(
    self: Any,
    x: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    dim_size: int | None = None,
    dim: int = -2,
    **kwargs: Any,
) -> Any:
    original = _original(Aggregation, "__call__")
    heads = deferred.heads_of(x, dim)
    if heads is not None:
        return _aggregate(self, heads, index, ptr, dim_size, 0, **kwargs).flatten(1)
    if not isinstance(x, LazyMessage):
        found = None
        if type(self) in _REDUCED and ptr is None and dim_size is not None and not kwargs:
            found = _of_written(self, x, index, dim_size, dim)
        return original(self, x, index=index, ptr=ptr, dim_size=dim_size, dim=dim, **kwargs) if found is None else found
    if not is_lazy(x) or not (type(self) in aggregate.REDUCTIONS or type(self) is FusedAggregation):
        return original(self, x, index=index, ptr=ptr, dim_size=dim_size, dim=dim, **kwargs)
    p: Pending = x.pending
    vector = None if index is None else aggregate.index_vector(p, dim, index, expanded=False)
    result: Any = None
    if (
        not kwargs
        and not aggregate.hooked(self)
        and vector is not None
        and not (ptr is not None and self._deterministic)
    ):
        if ptr is None and dim_size is None:
            dim_size = int(vector.max()) + 1 if vector.numel() > 0 else 0
        if dim_size is not None and (ptr is None or dim_size == ptr.numel() - 1):
            if type(self) is FusedAggregation:
                result = aggregate.run_many(p, self.aggr_names, self.semi_grad, vector, dim_size, dim)
            else:
                result = aggregate.run(p, vector, dim_size, dim, aggregate.REDUCTIONS[type(self)])
    if result is None:
        return original(self, x, index=index, ptr=ptr, dim_size=dim_size, dim=dim, **kwargs)
    return result


_REDUCED = (*aggregate.REDUCTIONS, VarAggregation, StdAggregation, FusedAggregation)


def _of_written(self: Any, x: Any, index: Any, dim_size: int, dim: int) -> Any:
    record = _running()
    if record is None or aggregate.hooked(self):
        return None
    inner = self.var_aggr if type(self) is StdAggregation else self
    if inner is not self and aggregate.hooked(inner):
        return None
    fused = type(self) is FusedAggregation
    names = self.aggr_names if fused else [type(self).__name__]
    found = written.reduced(record, x, index, dim_size, dim, names, getattr(inner, "semi_grad", False))
    return found if fused or found is None else found[0]


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return torch.nn.Module.__call__(self, *args, **kwargs)
    outer = getattr(_local, "record", None)
    record = _local.record = record_of(self) if active(self) else None
    if record is not None:
        record.calls += 1
        softmax.adopt(type(self))
    elif outer is None:
        return torch.nn.Module.__call__(self, *args, **kwargs)
    try:
        if record is not None and len(args) == 2 and not kwargs and not _transformed():
            out = quick.quick(self, *args, record)
            if out is not None:
                return out
        out = torch.nn.Module.__call__(self, *args, **kwargs)
    finally:
        _local.record = outer
    return _settled(out)


def _settled(out: Any) -> Any:
    """What leaves a layer is written, so that later changes of its inputs cannot reach it."""
    if isinstance(out, LazyMessage):
        if is_lazy(out):
            out.pending.miss("the layer returns its messages")
        return out.written()
    if type(out) in (tuple, list) and any(isinstance(o, LazyMessage) for o in out):
        return type(out)(_settled(o) for o in out)
    return out


def _before_hook(self: Any, args: Any) -> Any:
    return _original(BackwardHook, "setup_input_hook")(self, _written(args))


def _behind_hook(self: Any, args: Any) -> Any:
    return _original(BackwardHook, "setup_output_hook")(self, _written(args))


def _written(args: Any) -> Any:
    """What a module with backward hooks takes and returns, which these tie into the graph themselves."""
    if type(args) is tuple:
        return tuple(map(_written, args))
    if is_lazy(args):
        args.pending.miss("a module that sees the messages has backward hooks")
    return args.written() if isinstance(args, LazyMessage) else args


def _setstate(self: Any, data: dict[str, Any]) -> None:
    _original(MessagePassing, "__setstate__")(self, data)
    if FLAG in self.__dict__:
        _layers.add(self)  # a copy of an accelerated layer


# ---------------------------------------------------------------------- on and off


_ORIGINALS: dict[tuple[Any, str], Any] = {}


def _original(owner: Any, name: str) -> Any:
    return _ORIGINALS[owner, name]


def _install() -> None:
    replacements = (
        (MessagePassing, "_index_select_safe", _gather),
        (MessagePassing, "__call__", _call),
        (MessagePassing, "__setstate__", _setstate),
        (Aggregation, "__call__", _aggregate),
        (BackwardHook, "setup_input_hook", _before_hook),
        (BackwardHook, "setup_output_hook", _behind_hook),
    )
    for owner, name, new in replacements:
        old = owner.__dict__.get(name, _MISSING)
        _ORIGINALS[owner, name] = getattr(owner, name)
        _saved.append((owner, name, old, new))
        setattr(owner, name, new)
    exchange.install(
        [*memo.replacements(_memo_active), *softmax.replacements(_memo_active), *sparse.replacements(_running)]
    )
    direct.install(_adapts)


def _uninstall() -> None:
    direct.uninstall()
    softmax.restore()
    exchange.uninstall()
    memo.clear()
    while _saved:
        owner, name, old, new = _saved.pop()
        if owner.__dict__.get(name) is not new:
            continue  # somebody patched on top of us; ours passes everything on
        if old is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, old)


def _settle() -> None:
    """Brings what is installed in line with what is asked for."""
    wanted = _count > 0 or len(_layers) > 0
    if wanted and not _saved:
        _install()
    elif not wanted and _saved:
        _uninstall()


def usable() -> bool:
    """Whether the plugin can be put under this PyG; else a warning says once why not."""
    global _refusal
    if disabled():
        return False
    with _lock:
        if _refusal is False:
            _refusal = _refuse()
            if _refusal is not None:
                log.warning("PyG stays as it is: %s", _refusal)
        return _refusal is None


def _refuse() -> str | None:
    if _native.cpu_error is not None:
        return _native.cpu_error
    version = torch_geometric.__version__
    numbers = tuple(int(n) if n.isdigit() else 0 for n in version.split(".")[:2])
    if not TESTED[0] <= numbers < TESTED[1]:
        return f"torch_geometric {version} is not one that was tested (2.6 to 2.8); update gnn_spmm_plugin or PyG"
    missing = [n for n in ("_index_select_safe", "_index_select", "__setstate__") if not hasattr(MessagePassing, n)]
    if missing:
        return f"torch_geometric {version} has no MessagePassing.{missing[0]}"
    return _self_test()


def _self_test() -> str | None:
    """A sum and a maximum through the patched methods, compared with PyG's own; about a millisecond."""
    start = time.perf_counter()
    layer = MessagePassing.__new__(MessagePassing)
    torch.nn.Module.__init__(layer)
    layer.node_dim, layer.aggr_module = -2, None
    layer.__dict__.update({name: {} for name in _HOOKS}, **{FLAG: True})
    x = torch.tensor([[1.0, -2.0], [3.0, 4.0], [5.0, -6.0]])
    source, target = torch.tensor([2, 0, 1]), torch.tensor([1, 1, 0])
    already = bool(_saved)
    try:
        expected = [a(x[source], target, dim_size=3) for a in (SumAggregation(), MaxAggregation())]
        if not already:
            _install()
        messages = layer._index_select_safe(x, source)
        lazy = is_lazy(messages)
        found = [a(messages, target, dim_size=3) for a in (SumAggregation(), MaxAggregation())]
    except Exception as e:
        return f"a self test failed: {type(e).__name__}: {e} (torch_geometric {torch_geometric.__version__})"
    finally:
        if not already:
            _uninstall()
    log.debug("PyG self test: %.2f ms", (time.perf_counter() - start) * 1e3)
    if not lazy or not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
        return f"a self test gave other results than torch_geometric {torch_geometric.__version__}"
    return None


def add_patch(change: int) -> None:
    """One more, or one less, patch in force for the whole process."""
    global _count
    with _lock:
        _count = max(_count + change, 0)
        _settle()


def add_layers(layers: list[Any]) -> None:
    """These layers are accelerated one by one."""
    with _lock:
        _layers.update(layers)
        _settle()


def remove_layers(layers: list[Any]) -> None:
    """These no longer are."""
    with _lock:
        for layer in layers:
            _layers.discard(layer)
        _settle()
