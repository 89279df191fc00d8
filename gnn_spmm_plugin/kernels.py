"""The registry of kernels: what exists, what each can do, and why one is not available."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from . import _native, _platform

DTYPES = _native.DTYPES


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"``, as commands and files call it."""
    return str(dtype).removeprefix("torch.")


DTYPE_OF = {dtype_name(d): d for d in DTYPES}
REDUCES = ("sum", "mean", "max", "min")

#: Of the CUDA kernels and what they make of a plan. Whoever changes how fast one is adds 1; what was measured before
#: (`gnn_spmm_plugin.decider`, `gnn_spmm_plugin.tune`) is not used any more then.
KERNELS_VERSION = 2


@dataclass(frozen=True, eq=False)  # there is one of each, and hashing all fields would take longer than finding it
class Kernel:
    """One kernel family.

    Attributes:
        name: what `GSP_KERNEL`, ``plan(kernel=)`` and `explain` call it.
        device: ``"cpu"`` or ``"cuda"``.
        summary: how it works, in a line.
        source: where the method comes from.
        reduces: the reductions that it has.
    """

    name: str
    device: str
    summary: str
    source: str
    reduces: tuple[str, ...] = REDUCES

    def unavailable(self) -> list[str]:
        """Reasons why this kernel cannot run on this machine; empty when it can."""
        if self.device == "cpu":
            return [] if _native.cpu_error is None else [_native.cpu_error]
        if _native.cuda_error is not None:
            return [_native.cuda_error]
        missing = _platform.no_gpu()
        return [] if missing is None else [missing]


KERNELS = (
    Kernel(
        "csr_cpu",
        "cpu",
        "vectorised row sweep in chunks of equal work, long rows split and merged in fixed order",
        "CSR by rows, as graph-spmm; chunking our own",
    ),
    Kernel(
        "csr_dual",
        "cuda",
        "lane groups sweep rows and pieces of long ones as a warm plan lists them, merged in fixed order; without a "
        "plan, blocks own the long rows; sums of small dense graphs gather from shared memory",
        "coalesced CSR of GE-SpMM, dual path of DualGCN",
    ),
    Kernel(
        "pcsr",
        "cuda",
        "panels of one or two rows whose edges share loads, long panels in pieces merged in fixed order; built once",
        "PCSR of ParamSpMM",
        ("sum", "mean"),
    ),
    Kernel(
        "tile",
        "cuda",
        "windows of 8 or 16 rows whose distinct columns share loads, by the tensor cores; long windows in pieces "
        "merged in fixed order; built once",
        "row windows of TC-GNN and FlashSparse, families of RA-SpMM",
        ("sum", "mean"),
    ),
    Kernel(
        "dense",
        "cuda",
        "a small dense graph as a matrix, one GEMM by torch",
        "cuBLAS",
        ("sum", "mean"),
    ),
    Kernel(
        "cusparse",
        "cuda",
        "the vendor's product, as torch.sparse calls it: not the same bits in every run",
        "cuSPARSE",
        ("sum", "mean"),
    ),
)


#: Kernels that read a format of their own, which has to be made: there is no cold plan of them.
BUILT = ("pcsr", "tile", "dense", "cusparse")


def kernels() -> list[dict[str, object]]:
    """Every kernel that a plan can name.

    Returns:
        For each a dict of ``name``, ``device`` (``"cpu"`` or ``"cuda"``), ``summary``, ``reduces`` (its reductions),
        ``available`` (here), and ``reasons`` why not.
    """
    return [
        {
            "name": k.name,
            "device": k.device,
            "summary": k.summary,
            "reduces": list(k.reduces),
            "available": not k.unavailable(),
            "reasons": k.unavailable(),
        }
        for k in KERNELS
    ]


def check_reduce(kernel: Kernel, reduce: str) -> None:
    """Raises ValueError unless `kernel` has the reduction."""
    if reduce not in kernel.reduces:
        others = ", ".join(k.name for k in KERNELS if k.device == kernel.device and reduce in k.reduces)
        raise ValueError(
            f"kernel {kernel.name!r} computes {' and '.join(kernel.reduces)}, not {reduce}; use {others}, or leave the "
            "choice open"
        )


@functools.cache
def for_device(device: torch.device, name: str | None = None) -> Kernel:
    """The kernel called `name`, or the default one, for `device`.

    Raises:
        ValueError: no kernel of that name runs on that device.
    """
    here = [k for k in KERNELS if k.device == device.type]
    if not here:
        _native.require(device)
    if not name:
        return here[0]
    for k in here:
        if k.name == name:
            return k
    elsewhere = "".join(f" (it is one for {k.device})" for k in KERNELS if k.name == name)
    there_are = ", ".join(k.name for k in here)
    raise ValueError(f"unknown kernel {name!r} for {device.type}{elsewhere}; there is {there_are}")
