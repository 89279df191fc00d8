"""What a policy makes of a graph: each published system's way to choose, in terms of what there is here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .candidate import RULES, Candidate
from .csr import Csr
from .decider import FOLDER, Decision, DeviceFacts, choose, shipped
from .features import GraphFeatures, MatrixFeatures
from .kernels import KERNELS
from .router import ra_route
from .tiles import DTYPES as TILE_DTYPES
from .tiles import TileConfig

POLICIES = ("auto", "ra", "paramspmm", "dualgcn", "csr")

#: Groups of vectors after which RA-SpMM cuts a window in SEGMENT_HYBRID: 64 of its own, of 8 vectors.
_SEGMENT = 32


class _Here(NamedTuple):
    """What runs of a family: a mode, a schedule, how windows are cut where it has tiles, and what to say."""

    mode: str
    schedule: str | None
    tiles: TileConfig | None
    what: str


#: Of the families of RA-SpMM. Those without tiles have other kernels there.
_RA_HERE = {
    "CSR_DIRECT": _Here("cold", None, None, "rows straight from the CSR arrays"),
    "ZERO_OVERHEAD_CSR": _Here("warm", "degree", None, "rows by falling length, long ones in pieces"),
    "SEGMENT_HYBRID": _Here("warm", None, TileConfig(8, _SEGMENT), "tiles, long windows in pieces, merged in order"),
    "TC_DIRECT": _Here("warm", None, TileConfig(8), "tiles of rows as they are"),
    "COMMUNITY_TC": _Here("warm", "community", TileConfig(8), "tiles of rows by communities"),
    "CUSPARSE": _Here("cold", None, None, "rows straight from the CSR arrays, which have the same bits in every run"),
}


@dataclass(frozen=True)
class Choice:
    """What a policy insists on.

    Attributes:
        kernel: "" for the default one.
        mode, schedule: as of a plan.
        candidate: how the kernel takes the rows, where the policy says that, too.
        reasons: what there is to say.
    """

    kernel: str = ""
    mode: str = "warm"
    schedule: str | None = None
    candidate: Candidate = RULES
    reasons: tuple[str, ...] = ()


def by_policy(policy: str, csr: Csr, width: int, dtype: torch.dtype, reduce: str, mode: str) -> Choice:
    """What `policy` insists on for a product of `width` columns."""
    device = csr.col.device.type
    if policy == "ra":
        return _ra(csr, width, dtype, reduce, mode)
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


def _ra(csr: Csr, width: int, dtype: torch.dtype, reduce: str, mode: str) -> Choice:
    f = GraphFeatures.of(csr)
    found = ra_route(f.num_rows, f.mean_degree, f.degree_cv, width)
    here = _RA_HERE[found.family]
    square = csr.num_rows == csr.num_cols
    schedule = here.schedule if here.schedule != "community" or square else None
    missing = _no_tiles(csr, dtype, reduce, mode) if here.tiles is not None else ""
    what = here.what if square or here.schedule != "community" else "tiles of rows as they are: no square matrix"
    if missing:
        by_communities = "by communities" if schedule else "as a warm plan lists them"
        what = f"no tiles for {missing}; rows {by_communities}"
    reasons = (
        f"ra        {f.num_rows:,} rows, mean degree {f.mean_degree:.2f}, degree_cv {f.degree_cv:.2f}, width {width}",
        f"ra        {found.reason} -> {found.family} in {found.precision}",
        f"ra        here: {what}, in the dtype of the features",
    )
    if here.tiles is None or missing:
        return Choice("", here.mode, schedule, reasons=reasons)
    return Choice("tile", here.mode, schedule, Candidate(here.tiles), reasons)


def _no_tiles(csr: Csr, dtype: torch.dtype, reduce: str, mode: str) -> str:
    """What there are no tiles for among these, or ""."""
    device = csr.col.device.type
    if not any(k.name == "tile" and k.device == device and reduce in k.reduces for k in KERNELS):
        return f"{reduce} on {device}"
    if dtype not in TILE_DTYPES:
        return str(dtype).removeprefix("torch.")
    if csr.col.dtype != torch.int32:
        return "int64 indices"
    return "mode cold" if mode == "cold" else ""


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
