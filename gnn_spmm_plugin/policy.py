"""What a policy makes of a graph: each published system's way to choose, in terms of what there is here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .candidate import RULES
from .csr import Csr
from .decider import FOLDER, Decision, DeviceFacts, choose, shipped
from .features import GraphFeatures, MatrixFeatures
from .kernels import KERNELS
from .router import ra_route

POLICIES = ("auto", "ra", "paramspmm", "dualgcn", "csr")

#: What runs of the families of RA-SpMM: a mode, a schedule, and what to say. They have other kernels, and tiles.
_RA_HERE = {
    "CSR_DIRECT": ("cold", None, "rows straight from the CSR arrays"),
    "ZERO_OVERHEAD_CSR": ("warm", "degree", "rows by falling length, long ones in pieces"),
    "SEGMENT_HYBRID": ("warm", None, "no tile kernel; long rows in pieces, merged in order"),
    "TC_DIRECT": ("warm", None, "no tile kernel; rows as a warm plan lists them"),
    "COMMUNITY_TC": ("warm", "community", "no tile kernel; rows by communities where sources are destinations"),
    "CUSPARSE": ("cold", None, "rows straight from the CSR arrays, which have the same bits in every run"),
}


@dataclass(frozen=True)
class Choice:
    """What a policy insists on: a kernel ("" for the default one), a mode and a schedule, and what there is to say."""

    kernel: str = ""
    mode: str = "warm"
    schedule: str | None = None
    reasons: tuple[str, ...] = ()


def by_policy(policy: str, csr: Csr, width: int, reduce: str, mode: str) -> Choice:
    """What `policy` insists on for a product of `width` columns."""
    device = csr.col.device.type
    if policy == "ra":
        f = GraphFeatures.of(csr)
        found = ra_route(f.num_rows, f.mean_degree, f.degree_cv, width)
        here_mode, schedule, what = _RA_HERE[found.family]
        if schedule == "community" and csr.num_rows != csr.num_cols:
            schedule = None
        numbers = f"{f.num_rows:,} rows, mean degree {f.mean_degree:.2f}, degree_cv {f.degree_cv:.2f}, width {width}"
        reasons = (
            f"ra        {numbers}",
            f"ra        {found.reason} -> {found.family} in {found.precision}",
            f"ra        here: {what}, in the dtype of the features",
        )
        return Choice("", here_mode, schedule, reasons)
    if policy == "dualgcn":
        if csr.num_rows != csr.num_cols:
            return Choice(reasons=("dualgcn   walks need sources that are destinations: rows as they are",))
        return Choice(
            schedule="dual_metric", reasons=("dualgcn   rows by falling density and degree, see dual_metric",)
        )
    if policy != "paramspmm":
        return Choice()
    if mode != "cold" and any(k.name == "pcsr" and k.device == device and reduce in k.reduces for k in KERNELS):
        return Choice("pcsr")
    why = f"paramspmm has no kernel for {reduce} on {device}, mode {mode}: the default one instead"
    return Choice(reasons=(why,))


#: The choice of who has nothing to say.
BY_RULES = Decision(RULES, ())


def decided(csr: Csr, width: int, dtype: torch.dtype, kernels: Sequence[str], *, implicit: bool = False) -> Decision:
    """What the decider of this GPU chooses among these kernels; the rules, where there is none.

    `implicit`: for a plan that serves any width.
    """
    if csr.col.device.type != "cuda" or csr.col.dtype != torch.int32 or csr.col.shape[0] == 0:
        return BY_RULES
    device = DeviceFacts.of(csr.col.device)
    decider, said = shipped(FOLDER, device.name)
    if decider is None:
        return BY_RULES if implicit else Decision(RULES, (f"decider   {said}: by the rules",))
    if implicit and not decider.implicit:
        return BY_RULES
    with torch.no_grad():
        return choose(decider, MatrixFeatures.of(csr), width, dtype, device, kernels)
