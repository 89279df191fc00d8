"""Which message passing layers a model calls, and with what.

`torch.nn.Module.__call__` is replaced for the time, for all modules of the process. Torch's own global hooks would do
too, but where somebody hooks modules, integrations hand every module what its library would: little would be fused.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Seen:
    """A layer, and its calls in one step.

    Attributes:
        layer, root: the layer, and the outermost module that was being called.
        args, kwargs: of its last call while training, or else of its last call.
        autocast: dtype under autocast, or None.
        training, evaluating: number of calls with gradients, and without.
    """

    layer: nn.Module
    root: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    training: int = 0
    evaluating: int = 0


class _Frame:
    """A module that is being called."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.inner = False  # a module in it was called with a graph of DGL


class Watch:
    """An eye on all calls of modules, open or shut.

    Attributes:
        called: calls of message passing layers so far.
        modules: classes of other modules that were called, for a message where there are no layers.
        first_edges: what each layer was called with as its graph in the first step that was watched.
    """

    def __init__(self) -> None:
        self.on, self.called = False, 0
        self.modules: list[str] = []
        self.first_edges: dict[nn.Module, Any] = {}
        self._stack = threading.local()
        self._original: Any = None  # nn.Module.__call__, while it is replaced
        self._ours: Any = None
        self._now: dict[nn.Module, Seen] = {}
        self._best: dict[nn.Module, Seen] = {}

    def start(self) -> None:
        """From here on calls are seen."""
        self.on, self._now = True, {}
        if self._original is not None:
            return
        original = self._original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            frames, frame = self._frames(), _Frame(module)
            frames.append(frame)
            try:
                result = original(module, *args, **kwargs)
            finally:
                frames.pop()
            if self.on:
                self._called(frame, frames, args, kwargs)
            return result

        self._ours = nn.Module.__call__ = call  # type: ignore[method-assign]

    def stop(self, keep: bool = True) -> None:
        """Until here. Of the steps to keep, that with the fewest calls is: others may have an evaluation in them."""
        self.on = False
        if self._original is not None and nn.Module.__call__ is self._ours:
            nn.Module.__call__ = self._original  # type: ignore[method-assign]
            self._original = None
        if keep and not self.first_edges:
            self.first_edges = {m: edges_of(s) for m, s in self._now.items()}

        def calls(found: dict[nn.Module, Seen]) -> int:
            return sum(s.training + s.evaluating for s in found.values())

        if keep and self._now and (not self._best or calls(self._now) <= calls(self._best)):
            self._best = self._now
        self._now = {}

    def best(self) -> list[Seen]:
        """The layers of that step."""
        return list(self._best.values())

    def _frames(self) -> list[_Frame]:
        if not hasattr(self._stack, "frames"):
            self._stack.frames = []
        found: list[_Frame] = self._stack.frames
        return found

    def _called(self, frame: _Frame, frames: list[_Frame], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module was called, inside the calls of `frames`."""
        module = frame.module
        if _is_message_passing(module):
            if any(_is_message_passing(f.module) for f in frames):
                return  # a part of another layer
        elif _dgl_graph((args, kwargs)) is not None:
            for f in frames:
                f.inner = True
            if frame.inner:
                return  # a model, or a layer made of layers
        else:
            kind = type(module).__name__
            if kind not in self.modules and len(self.modules) < 20:
                self.modules.append(kind)
            return
        if _capturing():
            return
        self.called += 1
        seen = self._now.setdefault(module, Seen(module, frames[0].module if frames else module))
        training = torch.is_grad_enabled() and module.training
        if training or not seen.training:
            seen.args, seen.kwargs, seen.autocast = args, kwargs, _autocast((args, kwargs))
        seen.training += training
        seen.evaluating += not training


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments, tuples, lists and dicts searched."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors(part)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))


def edges_of(seen: Seen) -> Any:
    """What a layer was called with as its graph: an edge_index, a sparse adjacency, a DGLGraph; None: not found."""
    graph = _dgl_graph((seen.args, seen.kwargs))
    if graph is not None:
        return graph
    flat = [*seen.args, *seen.kwargs.values()]
    for value in flat:
        if type(value).__name__ == "SparseTensor" or (isinstance(value, Tensor) and value.layout != torch.strided):
            return value
    for t in tensors(flat):
        whole = t.dtype in (torch.int64, torch.int32)
        if whole and t.dim() == 2 and t.shape[0] == 2:
            return t
    return None


def _is_message_passing(module: nn.Module) -> bool:
    library = sys.modules.get("torch_geometric.nn.conv")
    base = getattr(library, "MessagePassing", None)
    return base is not None and isinstance(module, base)


def _dgl_graph(value: Any) -> Any:
    kind = getattr(sys.modules.get("dgl"), "DGLGraph", None)
    if kind is None:
        return None
    if isinstance(value, kind):
        return value
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((found for part in parts if (found := _dgl_graph(part)) is not None), None)


def _autocast(value: Any) -> torch.dtype | None:
    device = next((t.device.type for t in tensors(list(value[0]) + list(value[1].values()))), "cpu")
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


__all__ = ["Seen", "Watch", "edges_of", "tensors"]
