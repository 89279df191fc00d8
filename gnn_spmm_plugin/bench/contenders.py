"""Who is measured: this package in several settings, its opponents, and what no product can beat.

A `Kind` names its contenders for a configuration before anything is prepared (so that a resumed run knows what is
missing), says why it cannot run here, and prepares calls.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from .. import _native
from ..derivatives import _sum_raw
from ..functional import spmm
from ..graph import Graph
from ..plan import Plan
from ..plan import plan as make_plan
from . import cusparse
from .graphs import Csr
from .problem import Configuration, Problem, exact
from .timer import estimate

#: What PyG may allocate for its messages before it is left out.
MESSAGE_BYTES = 24 << 30


@dataclass(frozen=True)
class Contender:
    """One way to compute a product.

    Attributes:
        name: the column ``contender``.
        setting: the column ``setting``: how it differs from the plain use, empty where it does not.
        call: computes it; returns the result.
        checked: whether the result is to be compared; a limit has none.
        wanted: what to compare with, where that is not the product of the problem.
        bound: largest relative error, where that is not its dtype's of `gnn_spmm_plugin.bench.problem.BOUNDS`.
    """

    name: str
    setting: str
    call: Callable[[], Any]
    checked: bool = True
    wanted: Callable[[], Tensor] | None = None
    bound: float | None = None


Names = list[tuple[str, str]]


@dataclass(frozen=True)
class Kind:
    """Contenders of one origin.

    Attributes:
        name: what ``--contender`` selects it by.
        names: (contender, setting) of all that it has for a configuration on a device ("cpu", "cuda").
        prepare: makes one of them.
        unavailable: why it cannot run on a device here, or None.
    """

    name: str
    names: Callable[[Configuration, str], Names]
    prepare: Callable[[Problem, str, str], Contender]
    unavailable: Callable[[str], str | None] = lambda device: None


# ---------------------------------------------------------------------- ours


def plan_for(problem: Problem, graph: Graph, kernel: str | None = None) -> Plan:
    """The plan of the problem, for its graph or the transposed or shuffled one."""
    c = problem.configuration
    schedule = problem.subject.csr.order if c.order == "schedule" else None if c.order == "auto" else c.order
    return make_plan(graph, c.width, c.dtype, c.reduce, mode="warm", kernel=kernel, schedule=schedule)


def _normalised(graph: Graph, plan: Plan, x: Tensor, scale: Tensor) -> Tensor:
    """GCN's ``D^-1/2 A D^-1/2 @ x`` without edge weights, as `aggregate` computes it, but by a plan of choice."""
    return _sum_raw(plan.moved or graph._csr, plan, x, None, scale, scale, False)


#: Settings of `ours:auto`, and where they make sense.
SETTINGS: dict[str, Callable[[Configuration], bool]] = {
    "": lambda c: True,
    "shuffled": lambda c: c.weighted,  # constant weights in the order of a shuffled edge list
    "shuffled,learned": lambda c: c.weighted,  # weights that may change from call to call
    "scales": lambda c: not c.weighted and c.reduce == "sum",
    "arg": lambda c: c.reduce in ("max", "min"),  # as training needs it
    "backward": lambda c: c.reduce in ("sum", "mean"),
    "transpose": lambda c: c.reduce == "sum",  # what a backward of a sum computes, as a forward
    "grad": lambda c: True,  # forward with gradients wanted: for the host's time
}
#: Of `ours` where it may use tensor cores: float32 rounded to tf32, as torch is told that this will do.
TF32 = "tf32"
_TF32_KERNELS = ("auto", "tile", "dense")
#: Those that are measured where nothing else is asked for.
PLAIN = ("",)


def _prepare_ours(problem: Problem, name: str, setting: str) -> Contender:
    c, s, x, w = problem.configuration, problem.subject, problem.x, problem.weight
    graph, kernel = s.graph, name.partition(":")[2]
    asked = None if kernel == "auto" else kernel
    plan = plan_for(problem, graph, asked)
    if setting == "":
        return Contender(name, setting, lambda: spmm(graph, x, w, c.reduce, plan=plan))
    if setting == TF32:
        chosen = _in_tf32(lambda: plan_for(problem, graph, asked))()
        return Contender(name, setting, _in_tf32(lambda: spmm(graph, x, w, c.reduce, plan=chosen)), bound=1e-3)
    if setting.startswith("shuffled"):
        assert w is not None
        shuffled, mixed = s.shuffled_graph, w[s.shuffle]
        mixed.requires_grad_(setting.endswith("learned"))
        other = plan_for(problem, shuffled, asked)
        return Contender(name, setting, lambda: spmm(shuffled, x, mixed, c.reduce, plan=other))
    if setting == "scales":
        scale = s.scale.to(_native.accumulation_dtype(c.dtype))

        def wanted() -> Tensor:
            return exact(s.csr, x * s.scale.unsqueeze(1), None, "sum") * s.scale.unsqueeze(1)

        return Contender(name, setting, lambda: _normalised(graph, plan, x, scale), wanted=wanted)
    if setting in ("arg", "grad"):
        leaf = x.detach().requires_grad_()

        def forward() -> Tensor:
            with torch.enable_grad():
                return cast(Tensor, spmm(graph, leaf, w, c.reduce, plan=plan))

        return Contender(name, setting, forward)
    # What reaches x backward: the same sum over the transposed graph.
    flipped = graph.T

    def transposed() -> Tensor:
        t = flipped._csr
        scaled = x.double() / s.degree.clamp(min=1).unsqueeze(1) if c.reduce == "mean" else x
        return exact(Csr(t.rowptr, t.col), scaled, None if w is None else t.in_row_order(w), "sum")

    if setting == "transpose":
        other = plan_for(problem, flipped, asked)
        return Contender(name, setting, lambda: spmm(flipped, x, w, plan=other), wanted=transposed)
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        y = spmm(graph, leaf, w, c.reduce, plan=plan)
    return Contender(name, setting, lambda: torch.autograd.grad(y, leaf, x, retain_graph=True)[0], wanted=transposed)


def _in_tf32(call: Callable[[], Any]) -> Callable[[], Any]:
    def told() -> Any:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            return call()
        finally:
            torch.set_float32_matmul_precision(before)

    return told


def ours(settings: tuple[str, ...] = PLAIN, kernels: tuple[str, ...] = ("auto",)) -> Kind:
    """This package: what it chooses by itself in `settings`, and `kernels` by name."""

    def names(c: Configuration, device: str) -> Names:
        chosen = [(f"ours:{kernels[0]}", s) for s in settings if s != TF32 and SETTINGS[s](c)]
        rounded = [k for k in kernels if TF32 in settings and k in _TF32_KERNELS and c.dtype == torch.float32]
        return chosen + [(f"ours:{k}", "") for k in kernels[1:]] + [(f"ours:{k}", TF32) for k in rounded]

    return Kind("ours", names, _prepare_ours)


# ---------------------------------------------------------------------- opponents


def _natural(c: Configuration) -> bool:
    return c.order == "natural"  # nobody else takes a schedule


def _cusparse_names(c: Configuration, device: str) -> Names:
    if device != "cuda" or c.reduce != "sum" or not _natural(c):
        return []
    return [(f"cusparse:{algorithm}", "") for algorithm in cusparse.ALGORITHMS]


def _prepare_cusparse(problem: Problem, name: str, setting: str) -> Contender:
    csr, algorithm = problem.subject.csr, name.partition(":")[2]
    product = cusparse.Product(csr.rowptr, csr.col, problem.values, problem.x, problem.out, algorithm)
    return Contender(name, setting, product)


def _torch_names(c: Configuration, device: str) -> Names:
    return [("torch.sparse.mm", "")] if _natural(c) and (c.reduce == "sum" or device == "cpu") else []


def _prepare_torch(problem: Problem, name: str, setting: str) -> Contender:
    csr, x, c = problem.subject.csr, problem.x, problem.configuration
    n = problem.subject.num_nodes
    index = (csr.rowptr, csr.col) if x.is_cuda else (csr.rowptr.long(), csr.col.long())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that sparse CSR is in beta
        matrix = torch.sparse_csr_tensor(*index, problem.values, (n, n), check_invariants=False)
    reduce = {"mean": "mean", "max": "amax", "min": "amin"}.get(c.reduce)
    if reduce is None:
        return Contender(name, setting, lambda: torch.sparse.mm(matrix, x))
    return Contender(name, setting, lambda: torch.sparse.mm(matrix, x, reduce=reduce))


def _prepare_pyg(problem: Problem, name: str, setting: str) -> Contender:
    from torch_geometric.utils import scatter

    bytes_needed = problem.gathered_bytes
    if bytes_needed > MESSAGE_BYTES:
        raise RuntimeError(f"its messages would take {bytes_needed / 1e9:.0f} GB")
    src, dst = problem.subject.edge_index
    weight = None if problem.weight is None else problem.weight.unsqueeze(1)
    n, reduce, x = problem.subject.num_nodes, problem.configuration.reduce, problem.x

    def call() -> Tensor:
        message = x.index_select(0, src)
        return cast(Tensor, scatter(message if weight is None else message * weight, dst, 0, n, reduce))

    return Contender(name, setting, call)


def _prepare_torch_sparse(problem: Problem, name: str, setting: str) -> Contender:
    import torch_sparse

    csr, n, x = problem.subject.csr, problem.subject.num_nodes, problem.x
    adjacency = torch_sparse.SparseTensor(
        rowptr=csr.rowptr.long(), col=csr.col.long(), value=problem.weight, sparse_sizes=(n, n), is_sorted=True
    )
    reduce = problem.configuration.reduce
    return Contender(name, setting, lambda: torch_sparse.matmul(adjacency, x, reduce=reduce))


def _prepare_dgl(problem: Problem, name: str, setting: str) -> Contender:
    from ..integrations.dgl import import_dgl

    dgl = import_dgl()
    csr, x, weight = problem.subject.csr, problem.x, problem.weight
    # The columns of a CSC are destinations: exactly our rows.
    graph = dgl.graph(("csc", (csr.rowptr, csr.col, [])), num_nodes=problem.subject.num_nodes).formats("csc")
    reduce = problem.configuration.reduce
    operator = getattr(dgl.ops, f"copy_u_{reduce}" if weight is None else f"u_mul_e_{reduce}")
    operands = (graph, x) if weight is None else (graph, x, weight.unsqueeze(1))
    if reduce not in ("max", "min"):
        return Contender(name, setting, lambda: operator(*operands))

    def call() -> Tensor:  # as its message passing does with what its operator says of nodes without edges
        out: Tensor = operator(*operands)
        return out.masked_fill_(out.isinf(), 0)

    return Contender(name, setting, call)


def _needs(module: str) -> Callable[[str], str | None]:
    return lambda device: None if importlib.util.find_spec(module) is not None else f"{module} is not installed"


def _plain(name: str) -> Callable[[Configuration, str], Names]:
    return lambda c, device: [(name, "")] if _natural(c) else []


# ---------------------------------------------------------------------- limits

#: Lengths of the runs that a thread group of the speed-of-light kernel gathers; the fastest is taken.
RUNS = (16, 64, 256)


def _speed_of_light_missing(device: str) -> str | None:
    if device != "cuda":
        return "there is a kernel for CUDA only"
    if _native.cuda_error is not None:
        return _native.cuda_error
    has = torch._C._dispatch_has_kernel_for_dispatch_key(f"{_native.NAMESPACE}::_speed_of_light", "CUDA")
    return None if has else "the CUDA library is older than this file: build it again"


def _prepare_speed_of_light(problem: Problem, name: str, setting: str) -> Contender:
    op = torch.ops.gnn_spmm_plugin._speed_of_light.default
    s, x, weight, col = problem.subject, problem.x, problem.weight, problem.subject.csr.col
    if problem.configuration.order == "schedule":
        position, col = s.scheduled
        weight = None if weight is None else weight[position]

    def with_run(run: int) -> Callable[[], Any]:
        return lambda: op(col, weight, x, s.num_nodes, run)

    return Contender(name, setting, min(map(with_run, RUNS), key=estimate), checked=False)


def _prepare_write_arg(problem: Problem, name: str, setting: str) -> Contender:
    arg = torch.empty(problem.out.shape, dtype=torch.int32, device=problem.x.device)
    return Contender(name, setting, lambda: arg.fill_(0), checked=False)


def _prepare_dense(problem: Problem, name: str, setting: str) -> Contender:
    square = problem.x.new_ones(problem.x.shape[1], problem.x.shape[1])
    return Contender(name, setting, lambda: torch.mm(problem.x, square), checked=False)


#: What writing the winners of a maximum costs by itself.
WRITE_ARG = Kind("write_arg", lambda c, device: [("write_arg", "")], _prepare_write_arg)
#: The operator that the host's time is compared with.
DENSE = Kind("torch.mm", lambda c, device: [("torch.mm", "")], _prepare_dense)

#: Every kind there is, ours first.
OPPONENTS = (
    Kind(
        "cusparse",
        _cusparse_names,
        _prepare_cusparse,
        lambda device: cusparse.unavailable() if device == "cuda" else "it runs on CUDA only",
    ),
    Kind("torch.sparse.mm", _torch_names, _prepare_torch),
    Kind("pyg.scatter", _plain("pyg.scatter"), _prepare_pyg, _needs("torch_geometric")),
    Kind("torch_sparse", _plain("torch_sparse"), _prepare_torch_sparse, _needs("torch_sparse")),
    Kind("dgl", _plain("dgl"), _prepare_dgl, _needs("dgl")),
    Kind(
        "speed_of_light",
        lambda c, device: [("speed_of_light", "")] if device == "cuda" else [],
        _prepare_speed_of_light,
        _speed_of_light_missing,
    ),
)
