"""`Plan`: everything prepared once for one direction of a graph, so that a product is one call.

A plan has a life. It starts *cold*: no pass over the graph, no allocation. The second use of the same graph
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
from .kernels import DTYPES, REDUCES, Kernel, for_device

MODES = ("auto", "cold", "warm")
POLICIES = ("auto", "csr")

#: Uses of a graph after which its plan is upgraded. Splitting costs about one product of a small graph.
WARM_AFTER = 2

# Rows longer than LONG are swept by a whole block instead of a lane group: a row of n edges is a chain of about
# n / 4 dependent gathers of 0.5 us, and a block has 8 to 64 groups. Rows longer than CHUNK are split over blocks.
LONG = 128
CHUNK = 2048


@dataclass(frozen=True)
class Plan:
    """What a kernel needs besides the graph and the features; made by `plan`, shown by `explain`.

    Attributes:
        kernel: the kernel that runs.
        mode: ``"cold"`` or ``"warm"``.
        items: ``[n, 4]`` int32 work items of the CUDA kernel (chunks of hub rows, then rows to merge), or None.
        config: integers passed to the kernel: [long row, chunk, number of chunk items, number of merged rows].
        features: degree statistics, where the plan looked at them.
        reasons: why this and not another, line by line.
        build_seconds: host time it took to build.
        request: width, dtype and reduction that it was asked for, where it was asked for explicitly.
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

    def nbytes(self) -> int:
        """Bytes held besides the graph itself."""
        return 0 if self.items is None else self.items.numel() * self.items.element_size()

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
        lines.append(f"  override  GSP_KERNEL={self.kernel.name} or gsp.plan(..., kernel={self.kernel.name!r})")
        return "\n".join(lines)


def _cold(core: Core, csr: Csr, kernel: Kernel, why: str) -> Plan:
    counters["plans_built"] += 1
    return Plan(
        kernel,
        "cold",
        weakref.ref(csr),
        None,
        [LONG, CHUNK, 0, 0],
        None,
        (f"cold      {why}",),
        0.0,
    )


def _warm(core: Core, csr: Csr, kernel: Kernel) -> Plan:
    counters["plans_built"] += 1
    start = time.perf_counter()
    with torch.no_grad():
        features = GraphFeatures.of(csr)
        items, num_chunks, num_hubs = None, 0, 0
        if kernel.device == "cuda" and features.max_degree > CHUNK and csr.col.dtype == torch.int32:
            items, num_chunks, num_hubs = _split_hubs(csr)
    reasons = [f"long      rows over {LONG} edges are swept by a whole block"]
    if num_hubs:
        reasons.append(f"split     {num_hubs} rows over {CHUNK} edges, in {num_chunks} chunks, merged in fixed order")
    else:
        reasons.append(f"split     nothing: the longest row has {features.max_degree:,} edges")
    config = [LONG, CHUNK, num_chunks, num_hubs]
    seconds = time.perf_counter() - start
    result = Plan(kernel, "warm", weakref.ref(csr), items, config, features, tuple(reasons), seconds)
    log.info(
        "plan: %s, %d rows, %d edges, %s",
        kernel.name,
        csr.num_rows,
        csr.col.shape[0],
        "; ".join(reasons),
    )
    return result


def _split_hubs(csr: Csr) -> tuple[Tensor, int, int]:
    """Work items of the rows over CHUNK edges: {row, begin, end, slot} per chunk, {row, slot, end slot, 0} per row."""
    degree = csr.degree()
    hubs = (degree > CHUNK).nonzero().flatten()
    chunks = (degree[hubs] + CHUNK - 1) // CHUNK
    slot_end = chunks.cumsum(0)
    total = int(slot_end[-1])
    slot = torch.arange(total, device=csr.col.device)
    owner = torch.arange(len(hubs), device=csr.col.device).repeat_interleave(chunks, output_size=total)
    row = hubs[owner]
    begin = csr.rowptr[row] + (slot - (slot_end - chunks)[owner]) * CHUNK
    end = torch.minimum(begin + CHUNK, csr.rowptr[row + 1])
    items = torch.stack([row, begin, end, slot], 1)
    merges = torch.stack([hubs, slot_end - chunks, slot_end, torch.zeros_like(hubs)], 1)
    return torch.cat([items, merges]).to(torch.int32).contiguous(), total, len(hubs)


def default_plan(core: Core, csr: Csr) -> Plan:
    """The plan of a call that asks for nothing special: cold at first, warm from the second use on."""
    current: Plan | None = csr.plan
    if current is not None and (current.mode == "warm" or csr.uses < WARM_AFTER - 1):
        csr.uses += 1
        return current
    mode = env("GSP_MODE") or "auto"
    _check_choice("GSP_MODE", mode, MODES)
    kernel = for_device(core.device, env("GSP_KERNEL"))
    if mode == "cold" or (mode == "auto" and csr.uses < WARM_AFTER - 1) or capturing(core.device):
        if current is None:
            current = _cold(core, csr, kernel, f"use {csr.uses + 1}; warm from use {WARM_AFTER} on")
            csr.plan = current
    else:
        current = _build(core, csr, kernel)
        csr.plan = current
    csr.uses += 1
    return current


def _build(core: Core, csr: Csr, kernel: Kernel) -> Plan:
    try:
        return _warm(core, csr, kernel)
    except torch.OutOfMemoryError:
        log.warning(
            "out of memory while planning a graph of %d edges: staying with the cold kernel",
            csr.col.shape[0],
        )
        plan = _cold(core, csr, kernel, "out of memory while building the warm plan")
        return replace(plan, mode="warm")  # do not try again


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
        policy: ``"auto"``, or ``"csr"`` for the plain row kernels.
        kernel: name of a kernel (see `kernels`), instead of a choice. `GSP_KERNEL` does the same.
        schedule: order in which rows are processed; only the natural one (None) exists.

    Returns:
        A plan to pass to ``spmm(graph, x, plan=...)``. It belongs to this graph.

    Raises:
        ValueError: an argument is none of its choices; the message lists them.
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
    if schedule is not None:
        raise ValueError(f"schedule must be None (natural order); got {schedule!r}")
    _refuse_capture("gnn_spmm_plugin would have to build a plan")
    chosen = for_device(graph.device, kernel or env("GSP_KERNEL"))
    csr = graph._csr
    key = (width, dtype, reduce, mode, chosen.name)
    made: Plan | None = csr.plans.get(key)
    if made is None:
        if mode == "cold":
            made = _cold(graph._core, csr, chosen, "as asked")
        else:
            made = _build(graph._core, csr, chosen)
        made = replace(made, request=(width, dtype, reduce))
        csr.plans[key] = made
    return made
