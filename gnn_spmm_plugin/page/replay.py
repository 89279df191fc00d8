"""Each layer called again, alone, with what the model called it with: its time, its memory, and what is in it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..bench.memory import peak_memory, quiet
from ..bench.timer import Timing, own_stream, time_side_by_side
from ..cache import clear_cache
from .watch import Seen, edges_of, tensors

#: Products of dense matrices: what a layer spends there no sparse product saves.
DENSE = {"mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "linear", "mkldnn_linear", "_scaled_mm", "_grouped_mm"}
WARM_UP = 8  # calls after which a graph's plan is made


def replay(
    seen: list[Seen], first_edges: dict[nn.Module, Any], budget_ms: float, accelerated: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Facts about each layer, as JSON takes them, and the graphs they ran on, as ``numpy.savez`` takes them.

    Times are 20th percentiles: what else the machine does makes calls longer, never shorter.

    Args:
        seen: the layers and their calls in a step.
        first_edges: what they were called with as graphs in another step: where that was another graph, mini-batches
            are trained on, and each call here gets an edge_index that is new.
        budget_ms: milliseconds to spend on timing each.
        accelerated: whether the library is patched; then `gnn_spmm_plugin.report` is asked what was fused.
    """
    roots = list(dict.fromkeys(s.root for s in seen))
    graphs = _Graphs()
    rows = []
    for s in seen:
        edges = edges_of(s)
        row: dict[str, Any] = {
            "name": _name(s, roots),
            "kind": type(s.layer).__name__,
            "module": type(s.layer).__module__,
            "training_calls": s.training,
            "evaluating_calls": s.evaluating,
            "graph": graphs.add(edges, s),
            "batches": not _same(edges, first_edges.get(s.layer, edges)),
        } | dict.fromkeys(
            ("forward_ms", "backward_ms", "peak_bytes", "dense_share", "message_bytes", "width", "error", "report")
        )
        if accelerated:
            row["report"] = _report(s.layer)
        try:
            row |= _measure(s, budget_ms, row["batches"], accelerated)
        except Exception as e:  # the layer is the user's: what it does when called again is anyone's guess
            row["error"] = f"{type(e).__name__}: {e}"
        rows.append(row)
    return rows, graphs.arrays


def _report(layer: nn.Module) -> dict[str, Any] | None:
    from ..report import report

    rows = report(layer).rows
    return next((r for r in rows if r["layer"] == type(layer).__name__), rows[0] if rows else None)


def _name(s: Seen, roots: list[nn.Module]) -> str:
    """Where the layer is in its model, without what wrappers of models put before it."""
    path = next((name for name, m in s.root.named_modules() if m is s.layer), "")
    parts = [p for p in path.split(".") if p not in ("_orig_mod", "module", "")]
    if not parts:
        parts = [type(s.layer).__name__]
    if len(roots) > 1 and s.root is not s.layer:
        parts.insert(0, kind_of(s.root))
    return ".".join(parts)


def kind_of(model: nn.Module) -> str:
    """The class of a model, whatever it is wrapped in."""
    inner = next((m for name in ("_orig_mod", "module") if (m := model._modules.get(name)) is not None), None)
    return type(model).__name__ if inner is None else kind_of(inner)


# ---------------------------------------------------------------------- measuring


def _measure(s: Seen, budget_ms: float, batches: bool, accelerated: bool) -> dict[str, Any]:
    forward, step = calls_of(s, fresh=batches)
    device = next((t.device.type for t in tensors([*s.args, *s.kwargs.values(), *s.layer.parameters()])), "cpu")
    calls: list[Callable[[], Any]] = [forward] if step is None else [forward, step]
    with own_stream(device):
        for _ in range(2 if batches else WARM_UP):
            for call in calls:
                call()
        times = time_side_by_side(calls, device, "eager", budget_ms)
    found: dict[str, Any] = {}
    if isinstance(times[0], Timing):
        found["forward_ms"] = times[0].p20_ms
    if step is not None and isinstance(times[-1], Timing) and isinstance(times[0], Timing):
        found["backward_ms"] = max(times[-1].p20_ms - times[0].p20_ms, 0.0)
    whole = calls[-1]
    found["dense_share"] = _dense_share(whole, device)
    found["peak_bytes"] = peak_memory(whole, device)
    if not accelerated:
        found |= _messages(s.layer, forward)
    return found


def calls_of(s: Seen, fresh: bool = False) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    """The layer's forward, and forward and backward, as functions; the latter None where nothing has a gradient.

    Args:
        s: the layer, and what it was called with.
        fresh: each call gets its edge_index as a new tensor, as with mini-batches.
    """
    leaves: list[Tensor] = []
    edges = edges_of(s) if fresh else None

    def prepared(value: Any) -> Any:
        if isinstance(value, Tensor):
            if not value.requires_grad:
                return value  # the very same: implicit graphs are known by their tensors
            leaf = value.detach().requires_grad_()
            leaves.append(leaf)
            return leaf
        if type(value) in (tuple, list):
            return type(value)(prepared(v) for v in value)
        return {k: prepared(v) for k, v in value.items()} if type(value) is dict else value

    args, kwargs = prepared(s.args), prepared(s.kwargs)

    def renewed(value: Any) -> Any:
        return value.clone() if value is edges and isinstance(value, Tensor) else value

    def run() -> Any:
        if fresh:
            clear_cache()  # which would know it by its content
        with _autocast(s):
            return s.layer(*map(renewed, args), **{k: renewed(v) for k, v in kwargs.items()})

    def forward() -> Any:
        with torch.set_grad_enabled(s.training > 0):
            return run()

    wanted = leaves + [p for p in s.layer.parameters() if p.requires_grad]
    with torch.enable_grad():
        outputs = [t for t in tensors(run()) if t.requires_grad]
    if not s.training or not wanted or not outputs:
        return forward, None
    grads = [torch.ones_like(t) for t in outputs]

    def step() -> Any:
        with torch.enable_grad():
            found = [t for t in tensors(run()) if t.requires_grad]
            return torch.autograd.grad(found, wanted, grads, allow_unused=True)

    return forward, step


@contextlib.contextmanager
def _autocast(s: Seen) -> Iterator[None]:
    if s.autocast is None:
        yield
        return
    device = next(t.device.type for t in tensors([*s.args, *s.kwargs.values(), *s.layer.parameters()]))
    with torch.autocast(device, s.autocast):
        yield


def _dense_share(call: Callable[[], Any], device: str) -> float | None:
    """Share of the time of some calls that products of dense matrices take, by the profiler; None: it cannot tell."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(5):
                call()
            if device == "cuda":
                torch.cuda.synchronize()
    total = dense = 0.0
    for e in profile.key_averages():
        if e.device_type != torch._C._autograd.DeviceType.CPU:
            continue  # a kernel, which its operator has been charged with
        spent = float(e.self_device_time_total if device == "cuda" else e.self_cpu_time_total)
        total += spent
        dense += spent if e.key.startswith("aten::") and e.key[6:] in DENSE else 0.0
    return dense / total if total > 0 else None


def _messages(layer: nn.Module, forward: Callable[[], Any]) -> dict[str, Any]:
    """Bytes and width of the messages that a layer of PyG writes; nothing where they are not to be seen."""
    register = getattr(layer, "register_message_forward_hook", None)
    if register is None:
        return {}
    shapes: list[Tensor] = []
    handle = register(lambda module, inputs, output: shapes.append(output) if isinstance(output, Tensor) else None)
    try:
        forward()
    finally:
        handle.remove()
    if not shapes or shapes[0].dim() < 2 or not shapes[0].shape[0]:
        return {}
    t = shapes[0]
    return {"message_bytes": t.numel() * t.element_size(), "width": t.numel() // t.shape[0]}


# ---------------------------------------------------------------------- graphs


class _Graphs:
    """Different graphs, numbered."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}
        self._kept: list[tuple[Any, int]] = []
        self._pairs: list[Tensor] = []

    def add(self, edges: Any, s: Seen) -> int | None:
        """The number of a graph; None where it is none that is known."""
        for known, number in self._kept:
            if known is edges:
                return number
        pair = _pair(edges)
        if pair is None:
            return None
        edge_index, sizes = pair
        number = next((i for i, p in enumerate(self._pairs) if torch.equal(p, edge_index)), len(self._pairs))
        self._kept.append((edges, number))
        if number == len(self._pairs):
            if sizes is None:
                sizes = _sizes(s, edge_index)
            self._pairs.append(edge_index)
            self.arrays[f"edges{number}"] = edge_index.cpu().numpy()
            self.arrays[f"sizes{number}"] = np.array(sizes)
        return number


def _pair(edges: Any) -> tuple[Tensor, tuple[int, int] | None] | None:
    """``[2, E]`` int64, row 0 sources, and the numbers of sources and destinations where the graph says them."""
    if edges is None:
        return None
    if hasattr(edges, "num_src_nodes"):  # a DGLGraph
        if len(edges.canonical_etypes) != 1:
            return None
        return torch.stack(edges.edges(order="eid")).long(), (edges.num_src_nodes(), edges.num_dst_nodes())
    if isinstance(edges, Tensor):
        if edges.layout == torch.strided:
            return edges.as_subclass(Tensor).detach().long(), None
        row, col = edges.detach().to_sparse_coo().coalesce().indices()
        return torch.stack([col, row]), (edges.shape[1], edges.shape[0])
    row, col, _ = edges.coo()  # a SparseTensor: rows are destinations
    return torch.stack([col, row]).long(), (edges.size(1), edges.size(0))


def _sizes(s: Seen, edge_index: Tensor) -> tuple[int, int]:
    """Numbers of sources and destinations, by the features that the layer was called with."""
    least = [int(m) + 1 for m in edge_index.amax(1)] if edge_index.shape[1] else [0, 0]
    for value in [*s.args, *s.kwargs.values()]:
        pair = value if type(value) is tuple and len(value) == 2 else (value, value)
        rows = [len(v) if isinstance(v, Tensor) and v.is_floating_point() and v.dim() > 1 else None for v in pair]
        if rows[0] is not None and rows[0] >= least[0]:
            return rows[0], max(rows[0] if rows[1] is None else rows[1], least[1])
    return least[0], least[1]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.layout == b.layout == torch.strided:
        return a is b or (a.shape == b.shape and torch.equal(a, b))
    if hasattr(a, "num_src_nodes") and hasattr(b, "num_src_nodes"):
        return a is b or (a.num_edges(), a.num_src_nodes()) == (b.num_edges(), b.num_src_nodes())
    return True


__all__ = ["calls_of", "kind_of", "replay"]
