"""`Plan`: everything prepared once for one direction of a graph, so that a product is one call.

A plan has a life. It starts *cold*: no pass over the graph, no allocation. Further use of the same graph
*warms* it: degrees are looked at (one read back), and the rows are listed in the order in which they are processed,
long ones in pieces (see `gnn_spmm_plugin.schedule`). The upgrade comes at the same use in every run.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from . import dense, pcsr, tiles, vendor
from ._config import counters, env, log
from .candidate import RULES, Candidate
from .csr import Core, Csr, _refuse_capture, capturing
from .decider import Decision
from .features import GraphFeatures
from .graph import Graph
from .kernels import BUILT, DTYPES, KERNELS, REDUCES, Kernel, check_reduce, for_device
from .policy import BY_RULES, POLICIES, by_policy, decided
from .reuse import cached_rows, can_pay
from .router import SMALL_EDGES
from .schedule import (
    Layout,
    Stage,
    layout_by_rule,
    layout_of,
    list_items,
    move_edges,
    order_of,
    schedule_that_pays,
    stage_of,
)

MODES = ("auto", "cold", "warm", "tune")

#: Uses of a graph after which its plan is upgraded. A mini-batch is used two or three times in each direction and then
#: gone; looking at its degrees would cost more than it brings.
WARM_AFTER = 8

#: Uses after which a large graph is looked at for communities. To find them takes about 20 products and saves at most
#: four tenths of each: after as many again it is paid.
COMMUNITY_AFTER = 64

#: Rows of fewer edges are read faster where those of a schedule lie together; long ones fill cache lines anyway.
MOVE_DEGREE = 64


#: What the numbers of `Plan.config` are.
CONFIG = ("long_row", "chunk", "items", "split_rows", "scratch_slots", "lanes", "fold", "parallel", "bundle")


class Format(Protocol):
    """A graph as a kernel reads it that does not read the CSR arrays: see `pcsr`, `tiles`, `dense`, `vendor`."""

    def takes(self, csr: Csr, weight: Tensor | None, x: Tensor) -> bool:
        """Whether the kernel is for these operands; what it is not for runs on the CSR arrays."""

    def product(
        self,
        csr: Csr,
        weight: Tensor | None,
        x: Tensor,
        src_scale: Tensor | None,
        dst_scale: Tensor | None,
        mean: bool,
        *end: Any,
    ) -> Tensor:
        """As ``_native.spmm``, but `weight` in the caller's order."""

    def nbytes(self) -> int:
        """Bytes held."""


def _without_items(long_row: int, chunk: int) -> list[int]:
    """`Plan.config` where there is no list of items."""
    return [long_row, chunk, 0, 0, 0, 0, 0, 0, 1]


def _lengths(num_rows: int, num_edges: int) -> tuple[int, int]:
    """(long row, chunk) of a cold plan: a row of more edges for a lane group gets a block, a chunk at a time.

    A lane group sweeps a row of n edges as a chain of n / 4 dependent gathers of about 0.5 us; a block has 8 to 64
    groups. Where there are rows enough to fill a GPU, only those far above the average need more hands; a small graph
    leaves most of it idle, so its rows are shared out earlier.
    """
    long_row = 32 if num_edges < SMALL_EDGES else 128
    while num_rows > 100_000 and long_row < 4 * num_edges // num_rows:
        long_row *= 2
    return long_row, max(2048, 4 * long_row)


@dataclass(frozen=True)
class Plan:
    """What a kernel needs besides the graph and the features; made by `plan`, shown by `explain`.

    Attributes:
        kernel: the kernel that runs.
        mode: ``"cold"`` or ``"warm"``.
        items: what the CUDA kernel walks through, see `gnn_spmm_plugin.schedule.list_items`, or None.
        config: integers passed to the kernel: [long row (0: none), chunk, items, split rows, scratch slots, lanes,
            fold, parallel, bundle]. Without items and long rows, chunk is the longest row. Lanes, fold and parallel say
            how the threads of a warp share rows and columns; lanes = 0 lets the kernel choose by width. A bundle is the
            rows that a lane group takes at a time, where a sum has a kernel for that.
        stage: what the CUDA kernel for small dense graphs needs besides, by the names of the operator's arguments, see
            `gnn_spmm_plugin.schedule.stage_of`; empty where there is nothing for it.
        schedule: name of the order of rows.
        features: degree statistics, where the plan looked at them.
        reasons: why this and not another, line by line.
        build_seconds: host time it took to build.
        request: width, dtype and reduction that it was asked for, where it was asked for explicitly.
        format: what kernels read that do not read the CSR arrays, or None.
        moved: the graph as the kernel reads it, where the schedule is not its own order: see
            `gnn_spmm_plugin.schedule.move_edges`.
        settled: as the plan of calls that ask for nothing special it stays; else further use may replace it.
        lengths: for a kernel without items, long row and chunk of `config` in one, or chunk and bundle where no row is
            split.
    """

    kernel: Kernel
    mode: str
    owner: Callable[[], Csr | None] = field(repr=False)  # weak: a Csr holds its plans, and counting must free both
    items: Tensor | None = field(repr=False)
    config: list[int]
    features: GraphFeatures | None
    reasons: tuple[str, ...]
    build_seconds: float
    schedule: str = "natural"
    request: tuple[int, torch.dtype, str] | None = None
    format: Format | None = field(default=None, repr=False)
    stage: Stage = field(default_factory=Stage, repr=False)
    moved: Csr | None = field(default=None, repr=False)
    settled: bool = True
    lengths: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        long_row, chunk, bundle = self.config[0], self.config[1], self.config[-1]
        unsplit = min(chunk, 0xFFFF) << 16 | bundle
        object.__setattr__(self, "lengths", long_row << 32 | chunk if long_row else unsplit)

    def nbytes(self) -> int:
        """Bytes held besides the graph itself."""
        moved: tuple[Tensor | None, ...] = () if self.moved is None else (self.moved.col, self.moved.perm)
        held = [t for t in (self.items, self.stage.get("stage"), *moved) if t is not None]
        return sum(t.numel() * t.element_size() for t in held) + (0 if self.format is None else self.format.nbytes())

    def explain(self) -> str:
        """What runs and why, as a short text."""
        asked = ""
        if self.request is not None:
            width, dtype, reduce = self.request
            asked = f"  width={width} {str(dtype).removeprefix('torch.')} {reduce}"
        lines = [f"Plan  {self.kernel.name}{asked}  mode={self.mode}"]
        csr = self.owner()
        if csr is not None:
            lines.append(
                f"  graph     {csr.num_rows:,} rows, {csr.num_cols:,} columns, {csr.col.shape[0]:,} edges, "
                f"index {str(csr.col.dtype).removeprefix('torch.')}"
            )
        if self.features is not None:
            f = self.features
            lines.append(
                f"  features  mean degree {f.mean_degree:.1f}  degree_cv {f.degree_cv:.2f}  "
                f"longest row {f.max_degree:,}  empty rows {f.empty_rows:,}  locality {f.locality:.2f}"
            )
        lines.append(f"  schedule  {self.schedule}")
        lines += [f"  {reason}" for reason in self.reasons]
        lines.append(f"  built     in {self.build_seconds * 1e3:.2f} ms, {self.nbytes():,} bytes")
        names = ", ".join(k.name for k in KERNELS if k.device == self.kernel.device)
        lines.append(f"  override  GSP_KERNEL=NAME or gsp.plan(..., kernel=NAME); {self.kernel.device} has: {names}")
        return "\n".join(lines)

    __str__ = explain


def _cold(csr: Csr, kernel: Kernel, why: str) -> Plan:
    counters["plans_built"] += 1
    plan = object.__new__(Plan)
    shared = _cold_plan(kernel, *_lengths(csr.num_rows, csr.col.shape[0]), why)
    plan.__dict__.update(shared.__dict__, owner=weakref.ref(csr))
    return plan


@functools.lru_cache(maxsize=64)
def _cold_plan(kernel: Kernel, long_row: int, chunk: int, why: str) -> Plan:
    """What cold plans differ in by their owner alone: filling a frozen dataclass takes longer than a small product."""
    config = _without_items(long_row, chunk)
    return Plan(kernel, "cold", _no_owner, None, config, None, (f"cold      {why}",), 0.0, settled=False)


def _no_owner() -> None:
    return None


def shared_bytes(device: torch.device) -> int:
    """The most shared memory that a block of threads may have."""
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def _move(csr: Csr, order: Tensor) -> Csr | None:
    """`move_edges`, or None where there is no memory for that: a schedule does without."""
    try:
        return move_edges(csr, order)
    except torch.OutOfMemoryError:
        log.warning("out of memory while copying %d edges in the order of a schedule", csr.col.shape[0])
        return None


def _warm(csr: Csr, kernel: Kernel, schedule: str | Tensor | None = None, rows: Layout | None = None) -> Plan:
    """`rows`: how they are taken, instead of what the rules say."""
    counters["plans_built"] += 1
    start = time.perf_counter()
    config = _without_items(*_lengths(csr.num_rows, csr.col.shape[0]))
    items, moved, stage, reasons = None, None, Stage(), []
    with torch.no_grad():
        features = GraphFeatures.of(csr)
        listed = kernel.device == "cuda" and csr.col.dtype == torch.int32
        name, order = order_of(csr, schedule, read=listed)
        if not listed:
            if name != "natural":
                reasons.append(
                    f"schedule  {name} is not followed: on a CPU, or with int64 indices, rows stay as they are"
                )
            name = "natural"
        else:
            order = order if csr.num_rows else None
            layout, how = layout_by_rule(features) if rows is None else (rows, "")
            if order is not None:
                layout = layout if layout.chunk else layout_of(features)  # only a list can follow a schedule
                layout = replace(layout, bundle=1)  # bundles are of rows as they are
                moved = _move(csr, order) if features.mean_degree < MOVE_DEGREE else None
                if moved is not None:
                    reasons.append("edges     a copy of them in the order of the schedule")
            elif how:
                reasons.append(f"rows      {how}")
            if layout.chunk == 0:
                config[8] = layout.bundle
                if not layout.long:
                    config[:2] = 0, max(features.max_degree, 1)
            else:
                items, num_split, num_slots = list_items(csr, layout, order, moved is not None)
                config[1:5] = [layout.chunk, len(items) - num_split, num_split, num_slots]
                config[8] = layout.bundle
                reasons.append(
                    f"items     {config[2]:,} of {layout.chunk} edges at most, longest first among "
                    f"{layout.window or config[2]:,} neighbours, those of over {layout.long} ahead of all"
                )
                if num_split:
                    reasons.append(f"split     {num_split:,} rows into {num_slots:,} pieces, merged in order")
                if order is None and rows is None:
                    stage, how = stage_of(csr, features, shared_bytes(csr.col.device))
                    reasons += [f"staged    {how}"] if how else []
        if config[8] > 1:
            reasons.append(f"bundles   sums of wide features take {config[8]} rows at once")
    seconds = time.perf_counter() - start
    log.info("plan: %s, %d rows, %d edges, %s", kernel.name, csr.num_rows, csr.col.shape[0], "; ".join(reasons))
    owner = weakref.ref(csr)
    return Plan(kernel, "warm", owner, items, config, features, tuple(reasons), seconds, name, stage=stage, moved=moved)


def _formatted(
    csr: Csr,
    kernel: Kernel,
    width: int,
    dtype: torch.dtype,
    schedule: str | Tensor | None = None,
    candidate: Candidate = RULES,
) -> Plan:
    """A plan of a kernel that reads a format of its own."""
    _refuse_capture(f"gnn_spmm_plugin would have to build the format of kernel {kernel.name}")
    counters["plans_built"] += 1
    start = time.perf_counter()
    made: Format
    with torch.no_grad():
        if kernel.name == "pcsr":
            made, name, reasons = pcsr.prepare(csr, width, dtype, schedule, candidate.config)
        elif kernel.name == "tile":
            made, name, reasons = tiles.prepare(csr, width, dtype, schedule, candidate.tiles)
        else:
            name = "natural"
            made, reasons = dense.prepare(csr, dtype) if kernel.name == "dense" else vendor.prepare(csr)
            if schedule is not None and schedule != "natural":
                reasons += ("schedule  not followed: its rows are taken as they are",)
        beside = _without_items(*_lengths(csr.num_rows, csr.col.shape[0]))  # for what runs on the CSR
        features = GraphFeatures.of(csr)
    seconds = time.perf_counter() - start
    log.info("plan: %s, %d rows, %d edges, %s", kernel.name, csr.num_rows, csr.col.shape[0], "; ".join(reasons))
    return Plan(kernel, "warm", weakref.ref(csr), None, beside, features, reasons, seconds, name, format=made)


def default_plan(core: Core, csr: Csr) -> Plan:
    """The plan of a call that asks for nothing special: cold at first, warm from use `WARM_AFTER` on.

    At use `COMMUNITY_AFTER` a large graph gets a schedule, where that pays. A plan that is `settled` stays.

    A graph that a plan was prepared for in one direction is worth one in both: then it is warm from the next use on.
    Under ``torch.use_deterministic_algorithms(True)`` it is warm from the first use on, or stays what it was then.
    """
    current: Plan | None = csr.plan
    uses = csr.uses
    if current is not None and current.mode == "cold" and uses < WARM_AFTER - 1 and not core.warm:
        csr.uses = uses + 1
        return current
    # An upgrade may change last digits. Whoever asks torch for determinism keeps the plan of the first use.
    pinned = torch._C._get_deterministic_algorithms()
    ripe = core.warm or uses >= WARM_AFTER - 1
    if current is not None and (current.mode == "warm" or pinned or not ripe):
        if current.mode == "warm" and not (current.settled or pinned):
            current = _schedule_at_last(csr, current)
        csr.uses += 1
        return current
    mode = env("GSP_MODE") or "auto"
    _check_choice("GSP_MODE", mode, MODES[:3])  # what is tuned has a width, which a plan for any call has not
    kernel = for_device(core.device, env("GSP_KERNEL"))
    _check_mode(kernel, mode)
    early = mode == "cold" or (mode == "auto" and not (ripe or pinned))
    if kernel.name not in BUILT and (early or capturing(core.device)):
        if current is None:
            current = _cold(csr, kernel, f"use {csr.uses + 1}; warm from use {WARM_AFTER} on")
            csr.plan = current
    else:
        made = decided(csr, 64, torch.float32, (kernel.name,), implicit=True)
        current = _build(csr, kernel, schedule=made.candidate.schedule, candidate=made.candidate)
        current = replace(current, reasons=current.reasons + made.reasons) if made.reasons else current
        if _may_be_dense(csr, kernel) and not env("GSP_KERNEL") and current.mode == "warm":
            why = f"dense     products that are faster so go by a matrix, one GEMM: {_density(csr)}"
            current = replace(current, format=dense.WhereItPays(), reasons=(*current.reasons, why))
        elif (
            mode == "auto" and not pinned and _may_choose_order(csr, kernel) and can_pay(csr, cached_rows(core.device))
        ):
            current = _schedule_at_last(csr, replace(current, settled=False))
        csr.plan = current
        core.warm = True
    csr.uses += 1
    return current


def _may_be_dense(csr: Csr, kernel: Kernel, reduce: str = "sum") -> bool:
    """Whether a default kernel gives some products to `dense`, where nobody says which kernel."""
    there = any(k.name == "dense" and k.device == kernel.device and reduce in k.reduces for k in KERNELS)
    return there and kernel.name not in BUILT and dense.might_pay(csr)


def _density(csr: Csr) -> str:
    return f"{csr.col.shape[0] / (csr.num_rows * csr.num_cols):.1%} of the pairs of nodes are edges"


def _why_dense(csr: Csr, width: int, dtype: torch.dtype) -> str:
    """What a plan for such features says about a graph that `might_pay`."""
    what = _density(csr)
    features = f"{str(dtype).removeprefix('torch.')} of {width} columns"
    least = dense.least_density(width, dtype)
    if dense.pays(csr, width, dtype):
        return f"dense     as a matrix, one GEMM: {what}, it is faster from {least:.1%} on for {features}"
    if dtype == torch.float32 and tiles.passes(dtype) > 1:
        return f"dense     left out: {what}, but for float32 it takes torch.set_float32_matmul_precision('high')"
    where = "is slower" if least is None else f"is faster from {least:.1%} on, and enough edges"
    return f"dense     left out: {what}; for {features} a GEMM {where}"


def _may_choose_order(csr: Csr, kernel: Kernel) -> bool:
    return kernel.name not in BUILT and csr.col.dtype == torch.int32


def _schedule_at_last(csr: Csr, current: Plan) -> Plan:
    """The default plan of a graph that may get a schedule; from use `COMMUNITY_AFTER` on, with the answer."""
    if csr.uses < COMMUNITY_AFTER - 1 or capturing(csr.col.device):
        return current
    name, reasons = schedule_that_pays(csr, cached_rows(csr.col.device))
    plan = replace(current, settled=True, reasons=current.reasons + reasons)
    if name is not None:
        try:
            made = _warm(csr, current.kernel, name)
            plan = replace(made, reasons=made.reasons + reasons)
            csr.pin(current.items, current.stage.get("stage"))  # a CUDA graph or another stream may be reading them
            if plan.moved is not None:
                csr.release()
        except torch.OutOfMemoryError:
            log.warning("out of memory while scheduling a graph of %d edges: rows as they are", csr.col.shape[0])
    csr.plan = plan
    return plan


def _build(
    csr: Csr,
    kernel: Kernel,
    width: int = 64,  # for the choices of a plan that serves any
    dtype: torch.dtype = torch.float32,
    schedule: str | Tensor | None = None,
    candidate: Candidate = RULES,
) -> Plan:
    """A warm plan; of a `candidate` what its kernel and schedule, which are given, leave open."""
    try:
        return build_candidate(csr, kernel, candidate, width, dtype, schedule)
    except torch.OutOfMemoryError:
        log.warning(
            "out of memory while planning a graph of %d edges: staying with the cold kernel",
            csr.col.shape[0],
        )
        plan = _cold(csr, for_device(csr.col.device), "out of memory while building the warm plan")
        return replace(plan, mode="warm", settled=True)  # do not try again


def build_candidate(
    csr: Csr,
    kernel: Kernel,
    candidate: Candidate,
    width: int,
    dtype: torch.dtype,
    schedule: str | Tensor | None = None,  # instead of the candidate's
) -> Plan:
    """A warm plan of a candidate, not kept with the graph; whoever runs out of memory hears it."""
    order = candidate.schedule if schedule is None else schedule
    if kernel.name in BUILT:
        return _formatted(csr, kernel, width, dtype, order, candidate)
    return _warm(csr, kernel, order, candidate.layout)


def _check_mode(kernel: Kernel, mode: str) -> None:
    if mode == "cold" and kernel.name in BUILT:
        raise ValueError(
            f"kernel {kernel.name!r} reads a format that has to be built: use mode='auto' or 'warm', not 'cold'"
        )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def plan(
    graph: Graph,
    width: int,
    dtype: torch.dtype = torch.float32,
    reduce: str = "sum",
    mode: str = "auto",
    policy: str = "auto",
    kernel: str | None = None,
    schedule: Any = None,
) -> Plan:
    """Prepares `graph` for products of one kind, and says how it decided (`Plan.explain`).

    Args:
        graph: the graph.
        width: number of feature columns, heads counted in.
        dtype: dtype of the features.
        reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
        mode: ``"cold"`` (no preparation), ``"warm"``, or ``"auto"``, which here means warm: whoever asks for a plan
            will use it more than once. ``"tune"``: warm, as measured to be fastest on this GPU for this very product,
            within 10 seconds or as remembered from before (`gnn_spmm_plugin.tune`); the choice is left to it, and may
            differ from one measurement to the next. Communities that pay come first, as under ``"auto"``.
        policy: ``"auto"``; ``"ra"`` for the rules of RA-SpMM (`gnn_spmm_plugin.route`): of its kernels the nearest that
            there is, and `Plan.explain` says which; ``"paramspmm"`` for PCSR under the configuration that the decider
            chooses, or its rules where there is none (the default kernel where PCSR has none: maxima and minima, the
            CPU); ``"dualgcn"`` for rows by the dual metric (`gnn_spmm_plugin.partition`) where the graph is square; or
            ``"csr"`` for the plain row kernels.
        kernel: name of a kernel (see `kernels`), instead of a choice. `GSP_KERNEL` does the same.
        schedule: order in which rows are processed: ``"natural"``, ``"degree"`` (longest first), ``"dual_metric"`` (see
            `gnn_spmm_plugin.partition`), ``"rcm"`` (reverse Cuthill-McKee, needs scipy), ``"community"`` (see
            `gnn_spmm_plugin.community`), or a permutation of the rows, ``[num_rows]`` int32 or int64 on the graph's
            device; it has to be prepared, so not with a cold plan. None: on a GPU, under policy ``"auto"``, communities
            where an estimate says that they pay, else natural. Results depend on it no more than on the kernel. A plan
            with a permutation is not kept with the graph: a CUDA graph that uses it needs it alive.

    Returns:
        A plan to pass to ``spmm(graph, x, plan=...)``. It belongs to this graph.

    Raises:
        ValueError: an argument is none of its choices, or the kernel does not do what is asked; the message says what
            there is.
    """
    if not isinstance(graph, Graph):
        raise TypeError(f"graph must be a gnn_spmm_plugin.Graph, got {type(graph).__name__}")
    if not isinstance(width, int) or width < 0:
        raise ValueError(f"width must be a number of columns, 0 or more; got {width!r}")
    _check_choice("reduce", reduce, REDUCES)
    _check_choice("mode", mode, MODES)
    _check_choice("policy", policy, POLICIES)
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}; got {dtype}")
    _refuse_capture("gnn_spmm_plugin would have to build a plan")
    csr = graph._csr
    decision = BY_RULES
    if mode == "tune":
        if policy != "auto" or kernel or env("GSP_KERNEL") or schedule is not None:
            raise ValueError("mode='tune' chooses by measurement: leave policy, kernel, GSP_KERNEL and schedule open")
        from .tune import decision as measured
        from .tune import tuned

        decision, mode = measured(tuned(graph, width, dtype, reduce)), "warm"
    choice = by_policy(policy, csr, width, dtype, reduce, mode)
    asked = kernel or env("GSP_KERNEL") or choice.kernel
    chosen = for_device(graph.device, asked)
    check_reduce(chosen, reduce)
    _check_mode(chosen, mode)
    if mode == "auto":
        mode = "warm" if schedule is not None or chosen.name in BUILT else choice.mode
    reasons = choice.reasons
    as_it_is = schedule is None or (isinstance(schedule, str) and schedule == "natural")
    may_be_dense = (
        policy == "auto"
        and not asked
        and as_it_is
        and mode == "warm"
        and decision is BY_RULES
        and _may_be_dense(csr, chosen, reduce)
    )
    if may_be_dense:
        reasons += (_why_dense(csr, width, dtype),)
    by_matrix = may_be_dense and dense.pays(csr, width, dtype)
    if choice.candidate != RULES and chosen.name == choice.kernel and mode == "warm":
        decision = Decision(choice.candidate, ())
        schedule = choice.schedule if schedule is None else schedule
    elif by_matrix:
        pass
    elif schedule is None and mode == "warm":
        schedule = choice.schedule
        if policy == "auto" and _may_choose_order(csr, chosen):
            schedule, why = schedule_that_pays(csr, cached_rows(graph.device))
            reasons += why
        if schedule is not None:
            decision = BY_RULES  # no decider, and no measurement, has seen this order
        elif decision is BY_RULES and policy in ("auto", "paramspmm"):
            names = [k.name for k in KERNELS if reduce in k.reduces and asked in ("", k.name)]
            decision = decided(csr, width, dtype, names)
        if decision.candidate != RULES:
            chosen = for_device(graph.device, decision.candidate.kernel)
            schedule = decision.candidate.schedule
    named = "natural" if schedule is None else schedule if isinstance(schedule, str) else ""
    if mode == "cold" and named != "natural":
        raise ValueError("a schedule has to be prepared: use mode='auto' or 'warm', not 'cold'")
    kept: dict[Any, Any] = csr.plans if named else {}  # a permutation is the caller's, who keeps the plan
    request = (width, dtype, reduce)
    # What is prepared depends on the structure alone: every width, dtype and reduction shares it. Of a format, the
    # arrays do, and every reduction shares the rest.
    prepared = (mode, chosen.name, named, str(decision.candidate), request[:2] if chosen.name in BUILT else ())
    reasons += decision.reasons
    key = (request, prepared, reasons)
    made: Plan | None = kept.get(key)
    if made is None:
        shared = kept.get(prepared)
        if shared is None:
            if mode == "cold":
                shared = _cold(csr, chosen, "as asked")
            else:
                shared = _build(csr, chosen, width, dtype, schedule, decision.candidate)
                graph._core.warm = True
            kept[prepared] = shared
        made = replace(shared, request=request, reasons=shared.reasons + reasons)
        made = kept[key] = replace(made, format=dense.WhereItPays()) if by_matrix and made.mode == "warm" else made
    return made
