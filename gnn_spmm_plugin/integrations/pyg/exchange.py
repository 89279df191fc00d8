"""Functions of PyG that its layers import by name, exchanged in every module that holds one of them, and put back."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch


def _wrapper(function: Callable[..., Any], instead: Callable[..., Any]) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(function, args, kwargs)

    call = instead
    # TorchScript reads the source of what a layer calls, in that function's own globals; through these two attributes
    # it, and torch.compile, see the function itself.
    made = types.FunctionType(wrapper.__code__, function.__globals__, function.__name__, None, wrapper.__closure__)
    functools.update_wrapper(made, function)
    setattr(made, "__script_if_tracing_wrapper", True)
    setattr(made, "__original_fn", function)
    return made


_wrappers: list[tuple[Any, Any]] = []  # (original, wrapper) while installed
_torch_overloads: Any = None


def _get_overloads(function: Any) -> Any:
    """In place of TorchScript's own: a wrapper has the overloads of the function it wraps, compiled once for both."""
    return _torch_overloads(next((original for original, wrapper in _wrappers if wrapper is function), function))


def install(replacements: list[tuple[Any, Callable[..., Any]]]) -> None:
    """Puts wrappers in place of functions in every module of torch_geometric.nn that holds one of them.

    Args:
        replacements: each function, and what is called in its place, with the function and its arguments: a tuple of
            those by position, a dict of those by name.
    """
    global _torch_overloads
    _torch_overloads = getattr(torch.jit._script, "_get_overloads", None)
    if _torch_overloads is not None:
        torch.jit._script._get_overloads = _get_overloads
    _wrappers.extend((f, _wrapper(f, instead)) for f, instead in replacements)
    _exchange({id(original): wrapper for original, wrapper in _wrappers})


def uninstall() -> None:
    """Puts the functions back wherever a wrapper of ours stands, also in modules that PyG made in the meantime."""
    _exchange({id(wrapper): original for original, wrapper in _wrappers})
    if getattr(torch.jit._script, "_get_overloads", None) is _get_overloads:
        torch.jit._script._get_overloads = _torch_overloads
    _wrappers.clear()


def replacement(function: Any) -> Any:
    """What stands in place of a function now, or None."""
    return next((wrapper for original, wrapper in _wrappers if original is function), None)


def _exchange(new: dict[int, Any]) -> None:
    for name, module in list(sys.modules.items()):
        if module is not None and (name == "torch_geometric.nn" or name.startswith("torch_geometric.nn.")):
            for attribute, value in list(vars(module).items()):
                if id(value) in new:
                    setattr(module, attribute, new[id(value)])
