"""Accelerating PyG models without changing them.

`accelerate` works on one model, `patch_pyg` on every layer in the process; both can be undone. While one of them is
on, message passing layers get a stand-in for the gathered features (`lazy`), and the aggregation that follows becomes
one sparse product (`aggregate`). What does not fit that form runs as PyG runs it.

Importing this patches nothing and does not need PyG.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from ..._config import disabled, log
from ...plan import _check_choice
from ...policy import POLICIES


def _require() -> Any:
    try:
        import torch_geometric  # noqa: F401
    except ImportError as e:
        raise ImportError(
            "this needs PyTorch Geometric, which is not installed; install it with "
            "`pip install 'gnn-spmm-plugin[pyg]'` or `pip install torch_geometric`"
        ) from e
    from . import switch

    return switch


def _layers(model: Any) -> list[Any]:
    import torch
    from torch_geometric.nn.conv import MessagePassing

    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    return [(name, m) for name, m in model.named_modules() if isinstance(m, MessagePassing)]


def accelerate(model: Any, strict: bool | str = False, policy: str = "auto") -> Any:
    """Lets the message passing layers of one PyG model aggregate without writing a message per edge.

    Sets one boolean attribute on each `MessagePassing` layer in `model`; parameters, buffers and ``state_dict`` stay as
    they are. The attribute survives ``copy.deepcopy`` and pickling. In a process where this package is absent it does
    nothing; where a model is loaded in a fresh process, call `accelerate` (or `patch_pyg`) there again.

    Layers outside `model` behave as before. `gcn_norm` and the self-loop functions, called by a layer of `model`,
    return the same tensors again for the same unchanged arguments.

    Args:
        model: any module; itself a layer, or holding some.
        strict: True: raise RuntimeError, naming the layer and the reason, where one of its operations has to be left to
            PyG; ``"warn"``: say so on the logger ``gnn_spmm_plugin``, once for each layer and reason.
        policy: how plans are chosen, see `gnn_spmm_plugin.plan`; holds for all accelerated models of the process.

    Returns:
        `model` itself.

    Raises:
        ImportError: PyG is not installed.
        TypeError: `model` is not a module.
        ValueError: `strict` or `policy` is none of its choices.
    """
    switch = _require()
    from .aggregate import set_policy
    from .records import record_of

    _check_choice("policy", policy, POLICIES)
    if strict not in (True, False, "warn"):
        raise ValueError(f"strict must be True, False or 'warn', got {strict!r}")
    found = _layers(model)
    if not switch.usable():
        return model
    if not found:
        log.warning("accelerate: %s holds no MessagePassing layer, so there is nothing to do", type(model).__name__)
    global _accelerated
    _accelerated = policy
    set_policy(policy)
    for name, layer in found:
        setattr(layer, switch.FLAG, True)
        if strict:
            layer._gsp_strict = strict
        else:
            layer.__dict__.pop("_gsp_strict", None)
        record = record_of(layer)
        record.name = f"{name} ({type(layer).__name__})" if name else type(layer).__name__
        record.strict = strict
    switch.add_layers([layer for _, layer in found])
    return model


def restore(model: Any) -> Any:
    """Undoes `accelerate` for `model`, or for one layer of it.

    Returns:
        `model` itself.

    Raises:
        ImportError: PyG is not installed.
        TypeError: `model` is not a module.
    """
    switch = _require()
    from .records import record_of

    found = [layer for _, layer in _layers(model)]
    for layer in found:
        layer.__dict__.pop(switch.FLAG, None)
        layer.__dict__.pop("_gsp_strict", None)
        record_of(layer).strict = False
    switch.remove_layers(found)
    return model


class Patch:
    """One `patch_pyg` in force; ``with`` ends it, or `undo`."""

    def __init__(self, policy: str) -> None:
        self.policy = policy

    def undo(self) -> None:
        """Ends this patch; once is enough, more do nothing."""
        with _lock:
            if self in _patches:
                _patches.remove(self)
                _apply(-1)

    def __enter__(self) -> Patch:
        _start(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


_lock = threading.RLock()
_patches: list[Patch] = []
_accelerated = "auto"  # the policy of the latest `accelerate`


def _apply(change: int) -> None:
    from .aggregate import set_policy

    set_policy(_patches[-1].policy if _patches else _accelerated)
    _require().add_patch(change)


def _start(patch: Patch) -> None:
    with _lock:
        if patch not in _patches and _require().usable():
            _patches.append(patch)
            _apply(1)


def patch_pyg(policy: str = "auto") -> Patch:
    """Lets every PyG message passing layer in the process aggregate without writing a message per edge.

    Calls are counted: the patch ends when each has been undone, by `unpatch_pyg`, by the end of a ``with`` block or by
    the returned object's ``undo``. Then the replaced functions are PyG's own objects again.

    Args:
        policy: how plans are chosen, see `gnn_spmm_plugin.plan`.

    Returns:
        A context manager; the patch is in force already.

    Raises:
        ImportError: PyG is not installed.
    """
    _require()
    _check_choice("policy", policy, POLICIES)
    patch = Patch(policy)
    if not disabled():
        _start(patch)
    return patch


def unpatch_pyg() -> None:
    """Undoes the latest `patch_pyg` that is still in force; does nothing where there is none."""
    with _lock:
        if _patches:
            _patches[-1].undo()


__all__ = ["Patch", "accelerate", "patch_pyg", "restore", "unpatch_pyg"]
