"""``patch_dgl(cuda_features=True)``: graphs of a DGL without CUDA that take features on a GPU.

``g.to("cuda")`` marks a copy of the graph: its structure stays where it is, its features move, and ``g.device`` says
where they are, which is what DGL compares features with. The operators find the features on the GPU and take a copy
of the structure there, made once. Whatever else is asked of such a graph (ids of edges, a subgraph, a block) is asked
of an unmarked copy; what comes back moves. DGL moves features when they are looked at, so those of a subgraph never
leave the GPU.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._config import log
from ...csr import Core, Csr, _index_dtype
from ...dgl_index import relation_of
from ...functional import spmm
from ...graph import Graph

_MARK = "_gsp_device"  # in a graph's __dict__: where its features are
_KINDS = ("cuda",)
#: First digits of the SHA-256 of the files whose methods are replaced, as in `switch.SOURCES`: those of DGL 2.1.0.
SOURCES = {"heterograph.py": "34f1826f9959f7b4", "frame.py": "20f71311e308f215"}

#: Methods that are asked of the unmarked graph; their arguments come to it, their answers go back to the features.
_QUERIES = (
    "batch_num_nodes batch_num_edges all_edges edge_ids find_edges has_edges_between has_nodes in_edges out_edges "
    "predecessors successors adj adj_external adj_tensors adjacency_matrix inc incidence_matrix to_networkx "
    "shared_memory edge_subgraph subgraph edge_type_subgraph node_type_subgraph in_subgraph out_subgraph "
    "khop_in_subgraph khop_out_subgraph line_graph reverse to_simple reorder_graph add_self_loop remove_self_loop "
    "global_uniform_negative_sampling select_topk sample_neighbors sample_neighbors_biased sample_neighbors_fused "
    "sample_etype_neighbors sample_labors "
).split()
_IN_PLACE = (
    *("add_edges", "add_nodes", "remove_edges", "remove_nodes"),
    *("set_batch_num_nodes", "set_batch_num_edges"),
)
#: Functions of these modules (those in ``__all__``) are asked in the same way, wherever DGL holds them.
_MODULES = ("subgraph", "batch", "transforms.functional", "transforms.to_block", "convert", "merge", "traversal")
_SAMPLING = ("sampling.neighbor", "sampling.randomwalks", "sampling.labor", "sampling.negative", "sampling.pinsage")
_CONSTRUCTORS = ("graph", "heterograph", "create_block", "rand_graph", "rand_bipartite")


def marked(graph: Any) -> torch.device | None:
    """Where the features of a graph are whose structure is on the CPU; None for a graph as DGL knows it."""
    return graph.__dict__.get(_MARK)  # type: ignore[no-any-return]


def _moved(graph: Any, device: torch.device | None) -> Any:
    """A copy whose features are on `device`, and marked so; unmarked and on the CPU for None. Sizes of batches stay."""
    out = copy.copy(graph)
    target = torch.device("cpu") if device is None else device
    out._node_frames = [frame.to(target) for frame in graph._node_frames]
    out._edge_frames = [frame.to(target) for frame in graph._edge_frames]
    out.__dict__.pop(_MARK, None)
    if device is not None:
        out.__dict__[_MARK] = device
    return out


def _device(device: Any) -> torch.device:
    target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if target.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("features cannot go to cuda: torch sees no GPU, or was built without CUDA")
    if target.type == "cuda" and target.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return target


def _map(value: Any, of_graph: Callable[[Any], Any], of_tensor: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return of_tensor(value)
    if isinstance(value, dict):
        return {key: _map(item, of_graph, of_tensor) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map(item, of_graph, of_tensor) for item in value)
    return of_graph(value) if _is_graph(value) else value


def _is_graph(value: Any) -> bool:
    return isinstance(value, sys.modules["dgl.heterograph"].DGLGraph)


def _marks(value: Any) -> set[torch.device]:
    """The marks of all graphs in `value`."""
    if isinstance(value, dict):
        value = value.values()
    elif type(value) not in (list, tuple):
        mark = marked(value) if _is_graph(value) else None
        return set() if mark is None else {mark}
    found: set[torch.device] = set()
    for item in value:
        found |= _marks(item)
    return found


def _down(value: Any) -> Any:
    return _map(value, lambda g: g if marked(g) is None else _moved(g, None), Tensor.cpu)


def _up(value: Any, device: torch.device) -> Any:
    return _map(value, lambda g: _moved(g, device), lambda t: t.to(device))


def _the_mark(value: Any) -> torch.device | None:
    found = _marks(value)
    if len(found) > 1:
        raise ValueError(f"the graphs have their features on {', '.join(map(str, found))}; move them to one device")
    return found.pop() if found else None


def _query(original: Any) -> Any:
    @functools.wraps(original)
    def query(*args: Any, **kwargs: Any) -> Any:
        device = _the_mark((args, kwargs))
        if device is None:
            return original(*args, **kwargs)
        out = original(*_down(args), **_down(kwargs))
        return _up(list(out) if isinstance(out, types.GeneratorType) else out, device)

    return query


def _batch(original: Any, concatenated: Any) -> Any:
    @functools.wraps(original)
    def batch(graphs: Any, ndata: Any = "__ALL__", edata: Any = "__ALL__") -> Any:
        graphs = list(graphs)
        device = _the_mark(graphs)
        if device is None:
            return original(graphs, ndata, edata)
        out = _up(original(_down(graphs), None, None), device)
        # the features never leave the device
        for i, ntype in enumerate(out.ntypes if ndata is not None else ()):
            frames = [g._node_frames[i] for g in graphs if g._graph.num_nodes(i) > 0]
            out.nodes[ntype].data.update(concatenated(frames, ndata, f"nodes[{ntype!r}].data"))
        for i, etype in enumerate(out.canonical_etypes if edata is not None else ()):
            frames = [g._edge_frames[i] for g in graphs if g._graph.num_edges(i) > 0]
            out.edges[etype].data.update(concatenated(frames, edata, f"edges[{etype!r}].data"))
        return out

    return batch


def _in_place(original: Any) -> Any:
    @functools.wraps(original)
    def change(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = marked(self)
        if device is None:
            return original(self, *args, **kwargs)
        bare = _moved(self, None)
        out = original(bare, *_down(args), **_down(kwargs))
        self.__dict__.update(_moved(bare, device).__dict__)
        return out

    return change


def _constructor(original: Any) -> Any:
    @functools.wraps(original)
    def construct(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        tensors: list[Tensor] = []
        _map((args, kwargs), lambda g: g, tensors.append)
        target = _device(device) if device is not None else next((t.device for t in tensors), torch.device("cpu"))
        if target.type not in _KINDS:
            return original(*args, **kwargs) if device is None else original(*args, device=device, **kwargs)
        return original(*_down(args), device="cpu", **_down(kwargs)).to(target)

    return construct


# ---------------------------------------------------------------------- methods with an answer of their own


def _to(original: Any) -> Any:
    @functools.wraps(original)
    def to(self: Any, device: Any, **kwargs: Any) -> Any:
        here = marked(self)
        target = here if device is None else _device(device)
        if target is None or (here is not None and target == here):
            return self
        if target.type in _KINDS:
            return _moved(self, target)
        return original(self, device, **kwargs) if here is None else original(_moved(self, None), device, **kwargs)

    return to


def _device_property(original: Any) -> Any:
    def device(self: Any) -> torch.device:
        return marked(self) or original.fget(self)

    return property(device, doc=original.__doc__)


def _getitem(original: Any) -> Any:
    @functools.wraps(original)
    def getitem(self: Any, key: Any) -> Any:
        device = marked(self)
        if device is None:
            return original(self, key)
        if len(self._find_etypes(key if isinstance(key, tuple) else (slice(None), key, slice(None)))) > 1:
            return _moved(original(_moved(self, None), key), device)
        out = original(self, key)  # shares the features with this graph
        out.__dict__[_MARK] = device
        return out

    return getitem


def _degrees(original: Any, of_destinations: bool) -> Any:
    query = _query(original)

    @functools.wraps(original)
    def degrees(self: Any, nodes: Any = "__ALL__", etype: Any = None) -> Any:
        device = marked(self)
        if device is None or not (isinstance(nodes, str) and nodes == "__ALL__"):
            return query(self, nodes, etype)
        relation = relation_of(self._graph.get_relation_graph(self.get_etype_id(etype)), device)
        assert relation is not None
        graph = relation.graph
        return (graph._csr if of_destinations else graph._csr_t).degree().to(self.idtype)

    return degrees


def _record_stream(original: Any) -> Any:
    @functools.wraps(original)
    def record_stream(self: Any, stream: Any) -> Any:
        if marked(self) is None:
            return original(self, stream)
        for frame in (*self._node_frames, *self._edge_frames):
            for column in frame._columns.values():
                column.record_stream(stream)
        return self

    return record_stream


# ---------------------------------------------------------------------- operators beside gspmm and gsddmm


def _segment_reduce(original: Any) -> Any:
    @functools.wraps(original)
    def segment_reduce(op: str, x: Tensor, offsets: Tensor) -> Any:
        if x.device.type not in _KINDS:
            return original(op, x, offsets)
        count = x.shape[0]
        dtype = _index_dtype(count, offsets.shape[0])
        col = torch.arange(count, dtype=dtype, device=x.device)
        graph = Graph._make(Core(Csr(offsets.to(x.device, dtype), col, None, count)))
        return spmm(graph, x, None, op)

    return segment_reduce


def _segment_mm(original: Any) -> Any:
    @functools.wraps(original)
    def segment_mm(A: Tensor, B: Tensor, seglen_A: Tensor) -> Any:
        if A.device.type not in _KINDS:
            return original(A, B, seglen_A)
        return torch.cat([a @ b for a, b in zip(A.split(seglen_A.tolist()), B, strict=True)])

    return segment_mm


def _gather_mm(original: Any) -> Any:
    @functools.wraps(original)
    def gather_mm(A: Tensor, B: Tensor, idx_A: Tensor | None = None, idx_B: Tensor | None = None) -> Any:
        if A.device.type not in _KINDS:
            return original(A, B, idx_A, idx_B)
        a, b = A if idx_A is None else A[idx_A], B if idx_B is None else B[idx_B]
        return torch.bmm(a.unsqueeze(1), b).squeeze(1)

    return gather_mm


# ---------------------------------------------------------------------- the table


def table() -> list[tuple[Any, str, Any]]:
    """(owner, name, replacement) of what is replaced, besides what `switch` always replaces.

    Raises:
        RuntimeError: this DGL is not 2.1.0.
    """
    import dgl

    root = Path(dgl.__file__).parent
    for name, known in SOURCES.items():
        if hashlib.sha256((root / name).read_bytes()).hexdigest()[:16] != known:
            raise RuntimeError(
                f"cuda_features replaces methods of dgl 2.1.0, and this is {dgl.__version__}, whose {name} differs; "
                "use patch_dgl() without it, or install dgl==2.1.0"
            )
    if dgl.ndarray.gpu(0).exist:
        log.info("this DGL has CUDA of its own: cuda_features does nothing")
        return []
    cls = sys.modules["dgl.heterograph"].DGLGraph
    own = cls.__dict__
    found: list[tuple[Any, str, Any]] = [
        (cls, "to", _to(own["to"])),
        (cls, "device", _device_property(own["device"])),
        (cls, "__getitem__", _getitem(own["__getitem__"])),
        (cls, "in_degrees", _degrees(own["in_degrees"], True)),
        (cls, "out_degrees", _degrees(own["out_degrees"], False)),
        (cls, "record_stream", _record_stream(own["record_stream"])),
        *((cls, name, _query(own[name])) for name in _QUERIES if name in own),
        *((cls, name, _in_place(own[name])) for name in _IN_PLACE),
    ]
    sparse = sys.modules["dgl.backend.pytorch.sparse"]
    for name, make in (("segment_reduce", _segment_reduce), ("segment_mm", _segment_mm), ("gather_mm", _gather_mm)):
        new = make(getattr(sparse, name))
        found += [(m, name, new) for m in (sparse, dgl.backend, sys.modules["dgl.backend.pytorch"])]
    replacements = dict(_functions())
    for module in [m for name, m in list(sys.modules.items()) if name == "dgl" or name.startswith("dgl.")]:
        for name, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType) and value in replacements:
                found.append((module, name, replacements[value]))
    return found


def _functions() -> Iterable[tuple[Any, Any]]:
    """Functions that take or make graphs, and what replaces them."""
    import dgl

    yield dgl.rand_graph, _constructor(dgl.rand_graph)
    yield dgl.rand_bipartite, _constructor(dgl.rand_bipartite)
    batching = sys.modules["dgl.batch"]
    yield batching.batch, _batch(batching.batch, batching._batch_feat_dicts)
    heterograph = sys.modules["dgl.heterograph"]
    yield heterograph._create_compute_graph, _query(heterograph._create_compute_graph)
    for name in (*_MODULES, *_SAMPLING):
        module = sys.modules.get(f"dgl.{name}")
        for public in getattr(module, "__all__", ()):
            value = getattr(module, public)
            if isinstance(value, types.FunctionType) and value is not batching.batch:
                yield value, _constructor(value) if public in _CONSTRUCTORS else _query(value)


__all__ = ["marked", "table"]
