"""What is replaced in DGL while the plugin is on, and under which DGL: four operators, and layers as a whole."""

from __future__ import annotations

import functools
import hashlib
import importlib
import sys
import threading
from pathlib import Path
from typing import Any

from torch import Tensor

from ... import _native
from ..._config import disabled, log
from ...dgl_index import share
from . import aggregate, layers, records, sddmm

#: The first 16 digits of the SHA-256 of the files whose names are replaced: those of DGL 2.1.0 to 2.5.
SOURCES = {
    "ops/spmm.py": "a2a46766c12e5a3c",
    "ops/sddmm.py": "2edf64497b3195bc",
    "ops/edge_softmax.py": "8550f601af56e6d0",
    "backend/pytorch/sparse.py": "2d1ef7b7e0c4c28d",
    "_sparse_ops.py": "41c531185a6d98a0",
}

_lock = threading.RLock()
_saved: list[tuple[Any, str, Any, Any]] = []
_refusal: str | bool | None = False  # why this DGL is left alone; False: not looked at yet
_devices = False  # whether `device` is in force
_relation = "gnn_spmm_plugin relation graph"
_reverse = "gnn_spmm_plugin reverse"


def _module(name: str) -> Any:
    # dgl.ops and dgl.backend have functions of the same names as some of their modules
    importlib.import_module(name)
    return sys.modules[name]


# ---------------------------------------------------------------------- the replacements

_SEVERAL = "several relations at once"
_UNARY = {"copy_lhs": "copy_u", "copy_rhs": "copy_e"}
#: What users call the operations.
_NAMES = {(op, r): f"{_UNARY.get(op, f'u_{op}_e')}_{r}" for op in aggregate.OPS for r in aggregate.REDUCES}


@functools.lru_cache(maxsize=256)
def _edge_name(op: str, lhs: str, rhs: str) -> str:
    return {"copy_lhs": f"copy_{lhs}", "copy_rhs": f"copy_{rhs}"}.get(op, f"{lhs}_{op}_{rhs}")


# Each does what DGL does once it is no longer in force: somebody may have kept it, or patched on top of it.


def _gspmm(original: Any) -> Any:
    @functools.wraps(original)
    def gspmm(g: Any, op: str, reduce_op: str, lhs_data: Any, rhs_data: Any) -> Any:
        if _saved:  # only here is a mean still one
            out = aggregate.aggregate(g._graph, op, reduce_op, lhs_data, rhs_data)
            if isinstance(out, Tensor):
                records.hit(_NAMES[op, reduce_op])
                return out
        return original(g, op, reduce_op, lhs_data, rhs_data)  # counted where it gets to, below

    return gspmm


def _gspmm_internal(original: Any) -> Any:
    @functools.wraps(original)
    def gspmm(gidx: Any, op: str, reduce_op: str, lhs_data: Any, rhs_data: Any) -> Any:
        if _saved:
            out = aggregate.aggregate(gidx, op, reduce_op, lhs_data, rhs_data)
            name = _NAMES.get((op, reduce_op), f"u_{op}_e_{reduce_op}")
            if isinstance(out, Tensor):
                records.hit(name)
                return out
            _refuse_device(name, out, lhs_data, rhs_data)
            records.miss(name, out)
        return original(gidx, op, reduce_op, lhs_data, rhs_data)

    return gspmm


def _gsddmm(original: Any) -> Any:
    @functools.wraps(original)
    def gsddmm(gidx: Any, op: str, lhs_data: Any, rhs_data: Any, lhs_target: str = "u", rhs_target: str = "v") -> Any:
        if _saved:
            out = sddmm.per_edge(gidx, op, lhs_data, rhs_data, lhs_target, rhs_target)
            name = _edge_name(op, lhs_target, rhs_target)
            if isinstance(out, Tensor):
                records.hit(name)
                return out
            _refuse_device(name, out, lhs_data, rhs_data)
            records.miss(name, out)
        return original(gidx, op, lhs_data, rhs_data, lhs_target, rhs_target)

    return gsddmm


def _edge_softmax(original: Any, every: Any) -> Any:
    @functools.wraps(original)
    def edge_softmax(gidx: Any, logits: Any, eids: Any = every, norm_by: str = "dst") -> Any:
        if _saved:
            out = sddmm.softmax(gidx, logits, eids, norm_by)
            if isinstance(out, Tensor):
                records.hit("edge_softmax")
                return out
            _refuse_device("edge_softmax", out, logits)
            records.miss("edge_softmax", out)
        return original(gidx, logits, eids, norm_by)

    return edge_softmax


def _refuse_device(name: str, reason: str, *features: Any) -> None:
    """Says what DGL cannot do either, where its structure is on the CPU and features are not."""
    if _devices and any(isinstance(t, Tensor) and t.device.type != "cpu" for t in features):
        advice = "; use multi_update_all, or one relation at a time" if reason == _SEVERAL else ""
        raise RuntimeError(f"{name} is not possible with features on a GPU and a DGL without CUDA: {reason}{advice}")


def _hetero(original: Any, name: str) -> Any:
    @functools.wraps(original)
    def operator(*args: Any, **kwargs: Any) -> Any:
        if _saved:
            _refuse_device(name, _SEVERAL, *args)
            records.miss(name, _SEVERAL)
        return original(*args, **kwargs)

    return operator


def _replace_inf_with_zero(original: Any) -> Any:
    @functools.wraps(original)
    def replace_inf_with_zero(x: Any) -> Any:
        out = aggregate.without_infinities(x) if _saved else None
        return original(x) if out is None else out

    return replace_inf_with_zero


# DGL makes a new index for a relation, or a reverse, whenever it is asked for one: also in each update_all of a graph
# that has one relation. What is to be found again has to hang on the same index.


def _get_relation_graph(original: Any) -> Any:
    @functools.wraps(original)
    def get_relation_graph(self: Any, etype: int) -> Any:
        key = _relation, int(etype)
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = original(self, etype)
            if self.number_of_etypes() == 1:
                share(self, found, reverse=False)
        return found

    return get_relation_graph


def _reversed(original: Any) -> Any:
    @functools.wraps(original)
    def reverse(self: Any) -> Any:
        found = self._cache.get(_reverse)
        if found is None:
            found = self._cache[_reverse] = original(self)
            if self.number_of_etypes() == 1:
                share(self, found, reverse=True)
        return found

    return reverse


# ---------------------------------------------------------------------- on and off


def _table() -> list[tuple[Any, str, Any]]:
    """(owner, name, replacement), for each name through which DGL or a user reaches one of the operators."""
    import dgl

    backend, pytorch, sparse = dgl.backend, _module("dgl.backend.pytorch"), _module("dgl.backend.pytorch.sparse")
    ops, spmm = _module("dgl.ops"), _module("dgl.ops.spmm")
    per_edge, softmax = _module("dgl.ops.sddmm"), _module("dgl.ops.edge_softmax")
    index = _module("dgl.heterograph_index").HeteroGraphIndex
    places: list[tuple[Any, list[tuple[Any, str]]]] = [
        (_gspmm(spmm.gspmm), [(spmm, "gspmm"), (ops, "gspmm")]),
        (
            _gspmm_internal(sparse.gspmm),
            [(spmm, "gspmm_internal"), *((m, "gspmm") for m in (sparse, backend, pytorch))],
        ),
        (
            _gsddmm(sparse.gsddmm),
            [(per_edge, "gsddmm_internal"), *((m, "gsddmm") for m in (sparse, backend, pytorch))],
        ),
        (
            _edge_softmax(sparse.edge_softmax, sparse.ALL),
            [(softmax, "edge_softmax_internal"), *((m, "edge_softmax") for m in (sparse, backend, pytorch))],
        ),
        *(
            (_hetero(getattr(m, name), public), [(m, name)])
            for m, name, public in (
                (spmm, "gspmm_internal_hetero", "update_all"),
                (per_edge, "gsddmm_internal_hetero", "apply_edges"),
                (softmax, "edge_softmax_hetero_internal", "edge_softmax"),
            )
        ),
        (
            _replace_inf_with_zero(backend.replace_inf_with_zero),
            [(m, "replace_inf_with_zero") for m in (backend, pytorch)],
        ),
        (_get_relation_graph(index.get_relation_graph), [(index, "get_relation_graph")]),
        (_reversed(index.reverse), [(index, "reverse")]),
    ]
    operators = [(owner, name, new) for new, where in places for owner, name in where]
    return operators + layers.table(lambda: bool(_saved))


def put(owner: Any, name: str, new: Any) -> None:
    """Replaces one name, until `uninstall`."""
    _saved.append((owner, name, owner.__dict__[name], new))
    setattr(owner, name, new)


def install(policy: str, cuda_features: bool) -> None:
    """Replaces the operators, or changes what is in force.

    Raises:
        RuntimeError: `cuda_features` is not possible here.
    """
    global _devices
    with _lock:
        if _saved and _devices != cuda_features:
            uninstall()
        aggregate.policy = policy
        if _saved:
            return
        try:
            table = _table()
            if cuda_features:
                from . import device

                table += device.table()
            _devices = cuda_features
            for owner, name, new in table:
                put(owner, name, new)
        except BaseException:
            uninstall()
            raise


def uninstall() -> None:
    """Puts DGL's own objects back."""
    with _lock:
        while _saved:
            owner, name, old, new = _saved.pop()
            if owner.__dict__.get(name) is new:  # else somebody patched on top of us
                setattr(owner, name, old)


def usable() -> bool:
    """Whether the plugin can be put under this DGL; else a warning says once why not."""
    global _refusal
    if disabled():
        return False
    with _lock:
        if _refusal is False:
            _refusal = _refuse()
            if _refusal is not None:
                log.warning("DGL stays as it is: %s", _refusal)
        return _refusal is None


def _refuse() -> str | None:
    import dgl

    if _native.cpu_error is not None:
        return _native.cpu_error
    if dgl.backend.backend_name != "pytorch":
        return f"its backend is {dgl.backend.backend_name}, not pytorch"
    root = Path(dgl.__file__).parent
    for name, known in SOURCES.items():
        path = root / name
        found = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else "missing"
        if found != known:
            return (
                f"{name} of dgl {dgl.__version__} is none that was tested (those of 2.1.0 to 2.5 were); update "
                "gnn_spmm_plugin or DGL"
            )
    return None
