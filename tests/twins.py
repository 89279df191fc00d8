"""Operators of the GPU alone, in plain torch on the CPU: what their formats are tried with where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import Tensor

from gnn_spmm_plugin import _native

#: By name: the package has functions called like them.
KERNELS, PLAN, POLICY = (import_module(f"gnn_spmm_plugin.{name}") for name in ("kernels", "plan", "policy"))


def ended(
    out: Tensor,
    rowptr: Tensor,
    dst_scale: Tensor | None,
    mean: bool,
    self_x: Tensor | None,
    self_scale: Tensor | None,
    bias: Tensor | None,
    relu: bool,
    dtype: torch.dtype,
) -> Tensor:
    """What becomes of sums, in the dtype of the accumulation; they are changed."""
    if mean:
        out /= rowptr.diff().clamp(min=1).unsqueeze(1)
    if dst_scale is not None:
        out *= dst_scale.unsqueeze(1)
    if self_x is not None:
        out += self_x.to(out.dtype) if self_scale is None else self_x.to(out.dtype) * self_scale.unsqueeze(1)
    if bias is not None:
        out += bias
    return (out.relu() if relu else out).to(dtype)


@contextmanager
def kernels_on_cpu(operators: Mapping[str, Mapping[str, Callable[..., Tensor]]]) -> Iterator[None]:
    """While it lasts, these kernels are there for the CPU: by name, the operators that each needs, and their twins."""
    names = {k.name for k in KERNELS.KERNELS if k.device == "cuda"} & set(operators)
    here = tuple(replace(k, device="cpu") for k in KERNELS.KERNELS if k.name in names)
    library = torch.library.Library(_native.NAMESPACE, "IMPL")
    for name, twin in {n: t for kernel in operators.values() for n, t in kernel.items()}.items():
        library.impl(name, twin, "CPU")
    try:
        with pytest.MonkeyPatch.context() as patch:
            KERNELS.for_device.cache_clear()
            for module in (KERNELS, PLAN, POLICY):
                patch.setattr(module, "KERNELS", (*module.KERNELS, *here))
            yield
    finally:
        KERNELS.for_device.cache_clear()
        library._destroy()
