"""`Plan`: everything prepared once for one direction of a graph, so that a product is one call.

A plan has a life. It starts *cold*: no pass over the graph, no allocation. Further use of the same graph
*warms* it: degrees are looked at (one read back), and rows too long for one block are split into chunks that
several blocks sweep, merged in a fixed order. Cold and warm give the same bits: the cold kernel walks the same
chunks one after another.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ._config import counters, env, log
from .features import GraphFeatures
from .graph import Core, Csr, Graph, _refuse_capture, capturing
from .kernels import DTYPES, KERNELS, REDUCES, Kernel, check_reduce, for_device
from .pcsr import Pcsr, prepare

MODES = ("auto", "cold", "warm")
POLICIES = ("auto", "paramspmm", "csr")

#: Uses of a graph after which its plan is upgraded. A mini-batch is used two or three times in each direction and then
#: gone; looking at its degrees would cost more than it brings.
WARM_AFTER = 8


def _lengths(num_rows: int, num_edges: int) -> tuple[int, int]:
    """(long row, chunk): a longer row than the first gets a block to itself, than the second several.

    A lane group sweeps a row of n edges as a chain of n / 4 dependent gathers of about 0.5 us; a block has 8 to 64
    groups. Where there are rows enough to fill a GPU, only those far above the average need more hands; a small graph
    leaves most of it idle, so its rows are shared out earlier.
    """
    long_row = 32 if num_edges < 100_000 else 128
    while num_rows > 100_000 and long_row < 4 * num_edges // num_rows:
        long_row *= 2
    return long_row, max(2048, 4 * long_row)


@dataclass(frozen=True)
class Plan:
    """What a kernel needs besides the graph and the features; made by `plan`, shown by `explain`.

    Attributes:
        kernel: the kernel that runs.
        mode: ``"cold"`` or ``"warm"``.
        items: ``[n, 4]`` int32 work items of the CUDA kernel (chunks of hub rows, then rows to merge), or None.
        config: integers passed to the kernel: [long row, chunk, chunk items, merged rows, scratch slots, whether the
            items hold every long row].
        features: degree statistics, where the plan looked at them.
        reasons: why this and not another, line by line.
        build_seconds: host time it took to build.
        request: width, dtype and reduction that it was asked for, where it was asked for explicitly.
        pcsr: the format that the kernel of this name reads, or None.
    """

    kernel: Kernel
    mode: str
    owner: weakref.ref[Csr] = field(repr=False)  # weak: a Csr holds its plans, and counting must free both
    items: Tensor | None = field(repr=False)
    config: list[int]
    features: GraphFeatures | None
    reasons: tuple[str, ...]
    build_seconds: float
    request: tuple[int, torch.dtype, str] | None = None
    pcsr: Pcsr | None = field(default=None, repr=False)

    def nbytes(self) -> int:
        """Bytes held besides the graph itself."""
        items = 0 if self.items is None else self.items.numel() * self.items.element_size()
        return items + (0 if self.pcsr is None else self.pcsr.nbytes())

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
                f"longest row {f.max_degree:,}  empty rows {f.empty_rows:,}"
            )
        lines += [f"  {reason}" for reason in self.reasons]
        lines.append(f"  built     in {self.build_seconds * 1e3:.2f} ms, {self.nbytes():,} bytes")
        names = ", ".join(k.name for k in KERNELS if k.device == self.kernel.device)
        lines.append(f"  override  GSP_KERNEL=NAME or gsp.plan(..., kernel=NAME); {self.kernel.device} has: {names}")
        return "\n".join(lines)

    __str__ = explain


def _cold(csr: Csr, kernel: Kernel, why: str) -> Plan:
    counters["plans_built"] += 1
    config = [*_lengths(csr.num_rows, csr.col.shape[0]), 0, 0, 0, 0]
    return Plan(kernel, "cold", weakref.ref(csr), None, config, None, (f"cold      {why}",), 0.0)


def _warm(csr: Csr, kernel: Kernel) -> Plan:
    counters["plans_built"] += 1
    start = time.perf_counter()
    long_row, chunk = _lengths(csr.num_rows, csr.col.shape[0])
    items, config, reasons = None, [long_row, chunk, 0, 0, 0, 0], []
    with torch.no_grad():
        features = GraphFeatures.of(csr)
        if kernel.device == "cuda" and features.max_degree <= long_row:
            config[5] = 1
            reasons.append(f"long      no row over {long_row} edges: every row is swept by a lane group")
        elif kernel.device == "cuda" and csr.col.dtype == torch.int32:
            items, num_long, num_split = _list_long_rows(csr, long_row, chunk)
            config[2:] = [len(items) - num_split, num_split, int(items[-1, 2]) if num_split else 0, 1]
            reasons.append(f"long      {num_long} rows over {long_row} edges: a block each, ahead of the others")
            if num_split:
                reasons.append(f"split     {num_split} of them over {chunk} edges: {config[4]} chunks, merged in order")
    seconds = time.perf_counter() - start
    log.info("plan: %s, %d rows, %d edges, %s", kernel.name, csr.num_rows, csr.col.shape[0], "; ".join(reasons))
    return Plan(kernel, "warm", weakref.ref(csr), items, config, features, tuple(reasons), seconds)


def _pcsr(csr: Csr, kernel: Kernel, width: int, dtype: torch.dtype, schedule: Tensor | None) -> Plan:
    _refuse_capture("gnn_spmm_plugin would have to build the format of kernel pcsr")
    counters["plans_built"] += 1
    start = time.perf_counter()
    with torch.no_grad():
        made, reasons = prepare(csr, width, dtype, schedule)
        config = [*_lengths(csr.num_rows, csr.col.shape[0]), 0, 0, 0, 0]  # for what runs beside it, on the CSR
        features = GraphFeatures.of(csr)
    seconds = time.perf_counter() - start
    log.info("plan: %s, %d rows, %d edges, %s", kernel.name, csr.num_rows, csr.col.shape[0], "; ".join(reasons))
    return Plan(kernel, "warm", weakref.ref(csr), None, config, features, reasons, seconds, pcsr=made)


def _list_long_rows(csr: Csr, long_row: int, chunk: int) -> tuple[Tensor, int, int]:
    """Work items of the CUDA kernel, and how many rows are long and how many of those are split.

    Returns ``[n, 4]`` int32: {row, begin, end, slot} for each chunk of each long row, slot -1 where that is the whole
    row; then {row, first slot, end slot, 0} for each split row.
    """
    device = csr.col.device
    degree = csr.degree()
    rows = (degree > long_row).nonzero().flatten()
    chunks = (degree[rows] + chunk - 1) // chunk
    ends = chunks.cumsum(0)
    total = int(ends[-1])
    owner = torch.arange(len(rows), device=device).repeat_interleave(chunks, output_size=total)
    number = torch.arange(total, device=device) - (ends - chunks)[owner]
    begin = csr.rowptr[rows][owner] + number * chunk
    end = torch.minimum(begin + chunk, csr.rowptr[rows + 1][owner])
    is_split = chunks > 1
    slot = is_split[owner].cumsum(0) - 1
    items = torch.stack([rows[owner], begin, end, torch.where(is_split[owner], slot, -1)], 1)
    slots_end = chunks[is_split].cumsum(0)
    split = torch.stack([rows[is_split], slots_end - chunks[is_split], slots_end, torch.zeros_like(slots_end)], 1)
    return torch.cat([items, split]).to(torch.int32).contiguous(), len(rows), len(split)


def default_plan(core: Core, csr: Csr) -> Plan:
    """The plan of a call that asks for nothing special: cold at first, warm from use `WARM_AFTER` on."""
    current: Plan | None = csr.plan
    if current is not None and (current.mode == "warm" or csr.uses < WARM_AFTER - 1):
        csr.uses += 1
        return current
    mode = env("GSP_MODE") or "auto"
    _check_choice("GSP_MODE", mode, MODES)
    kernel = for_device(core.device, env("GSP_KERNEL"))
    _check_mode(kernel, mode)
    early = mode == "cold" or (mode == "auto" and csr.uses < WARM_AFTER - 1) or capturing(core.device)
    if early and kernel.name != "pcsr":
        if current is None:
            current = _cold(csr, kernel, f"use {csr.uses + 1}; warm from use {WARM_AFTER} on")
            csr.plan = current
    else:
        current = _build(csr, kernel)
        csr.plan = current
    csr.uses += 1
    return current


def _build(
    csr: Csr,
    kernel: Kernel,
    width: int = 64,  # for the choices of a plan that serves any
    dtype: torch.dtype = torch.float32,
    schedule: Tensor | None = None,
) -> Plan:
    try:
        if kernel.name == "pcsr":
            return _pcsr(csr, kernel, width, dtype, schedule)
        return _warm(csr, kernel)
    except torch.OutOfMemoryError:
        log.warning(
            "out of memory while planning a graph of %d edges: staying with the cold kernel",
            csr.col.shape[0],
        )
        plan = _cold(csr, for_device(csr.col.device), "out of memory while building the warm plan")
        return replace(plan, mode="warm")  # do not try again


def _check_mode(kernel: Kernel, mode: str) -> None:
    if mode == "cold" and kernel.name == "pcsr":
        raise ValueError("kernel 'pcsr' reads a format that has to be built: use mode='auto' or 'warm', not 'cold'")


def _by_policy(policy: str, device: torch.device, reduce: str, mode: str) -> tuple[str, tuple[str, ...]]:
    """The kernel that a policy insists on, "" for the default one, and what there is to say about it."""
    if policy != "paramspmm":
        return "", ()
    if mode != "cold" and any(k.name == "pcsr" and k.device == device.type and reduce in k.reduces for k in KERNELS):
        return "pcsr", ()
    return "", (f"paramspmm has no kernel for {reduce} on {device.type}, mode {mode}: the default one instead",)


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
            will use it more than once.
        policy: ``"auto"``, ``"paramspmm"`` for PCSR under the configuration that its rules choose (the default kernel
            where PCSR has none: maxima and minima, the CPU), or ``"csr"`` for the plain row kernels.
        kernel: name of a kernel (see `kernels`), instead of a choice. `GSP_KERNEL` does the same.
        schedule: order in which rows are processed, an int32 permutation on the graph's device, for kernel pcsr; None:
            the natural one. Such a plan is not kept with the graph: a CUDA graph that used it needs it alive.

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
    by_policy, why = _by_policy(policy, graph.device, reduce, mode)
    chosen = for_device(graph.device, kernel or env("GSP_KERNEL") or by_policy)
    check_reduce(chosen, reduce)
    _check_mode(chosen, mode)
    csr = graph._csr
    mode = "cold" if mode == "cold" else "warm"
    if schedule is not None:
        if chosen.name != "pcsr":
            raise ValueError(f"schedule must be None (natural order) for kernel {chosen.name}; got {schedule!r}")
        return replace(_build(csr, chosen, width, dtype, schedule), request=(width, dtype, reduce))
    key = (width, dtype, reduce, mode, chosen.name, policy)
    made: Plan | None = csr.plans.get(key)
    if made is None:
        # What is prepared depends on the structure alone: every width, dtype and reduction shares it. Of PCSR, the
        # arrays do.
        prepared = csr.plans.get((mode, chosen.name))
        if chosen.name == "pcsr":
            prepared = _build(csr, chosen, width, dtype)
        elif prepared is None:
            prepared = _cold(csr, chosen, "as asked") if mode == "cold" else _build(csr, chosen)
            csr.plans[mode, chosen.name] = prepared
        made = csr.plans[key] = replace(prepared, request=(width, dtype, reduce), reasons=prepared.reasons + why)
    return made
