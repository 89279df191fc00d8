"""The decider: how a plan takes the rows of a graph, from its features, a width and a dtype.

A `gnn_spmm_plugin.candidate.Candidate` is a way; a `Decider` holds measurements of them (``gnn-spmm tune --train``)
and foresees their times by reading between them; `choose` takes the one that promises most, where that is clearly more
than the rules (`gnn_spmm_plugin.schedule.layout_by_rule`, `gnn_spmm_plugin.pcsr.choose_config`) do. All of it is a pure
function of what the graph looks like, width, dtype, GPU and the file of the decider.

Method: the features, and the task, of the decider of ParamSpMM (Zhang et al., 2026, section 5), which is a forest for
each width that foresees a class. Here it is kernel ridge regression, one for all widths, that foresees times, over the
rows of the CSR as well as over PCSR: what is near differs little, and it errs less than forests on unseen graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from ._config import log
from ._files import open_npz
from .candidate import RULES, Candidate, usable
from .features import MatrixFeatures
from .kernels import KERNELS_VERSION
from .router import STAGED_COLS, STAGED_DEGREE
from .schedule import layout_by_rule, layout_of

Array: TypeAlias = "np.ndarray[Any, Any]"

#: Of the file.
FORMAT = 2
FOLDER = Path(__file__).parent / "data"


def may_stage(f: MatrixFeatures) -> bool:
    """Whether the rules might gather from shared memory (`gnn_spmm_plugin.schedule.stage_of`), which none else does."""
    return f.mean_degree >= STAGED_DEGREE and f.num_cols <= STAGED_COLS


# ---------------------------------------------------------------------- what it sees


@dataclass(frozen=True)
class DeviceFacts:
    """A GPU as the decider sees it."""

    name: str
    l2_bytes: int
    multiprocessors: int

    @staticmethod
    @functools.lru_cache
    def of(device: torch.device) -> DeviceFacts:
        """Of a CUDA device."""
        p = torch.cuda.get_device_properties(device)
        return DeviceFacts(p.name, int(getattr(p, "L2_cache_size", 0)) or 1, p.multi_processor_count)


_SEEN = tuple(f.name for f in fields(MatrixFeatures))
_DERIVED = (
    "density",
    "non_empty_share",
    "longest_share",
    "width",
    "item_bytes",
    "row_bytes",
    "source_over_l2",
    "hot_over_l2",
    "rows_per_sm",
    "edges_per_sm",
    "gather_us",
    "longest_us",
    "longest_over_all",
    "bytes_a_row",
    "rule_direct",
    "rule_staged",
    "rule_chunk",
    "rule_window",
    "rule_long",
    "rule_bundle",
)
#: What a GPU gathers, in bytes a microsecond for each multiprocessor, and edges that a lane group sweeps in one: to
#: put numbers of edges in proportion, no more.
_GATHERS, _EDGES = 40_000, 8
#: Names of what it sees, in order.
INPUTS = (*_SEEN, *_DERIVED)


def inputs(f: MatrixFeatures, width: int, dtype: torch.dtype, device: DeviceFacts) -> Array:
    """The values of `INPUTS`, float32, 0 or more; those that begin with rule say what the rules would do."""
    row = width * dtype.itemsize
    cols, edges = max(f.num_cols, 1), max(f.num_edges, 1)
    gather, longest = edges * row / (_GATHERS * device.multiprocessors), f.max_degree / _EDGES
    direct, listed = layout_by_rule(f)[0], layout_of(f)
    derived = (
        f.num_edges / (max(f.num_rows, 1) * cols),
        1 - f.empty_rows / max(f.num_rows, 1),
        f.max_degree / edges,
        width,
        dtype.itemsize,
        row,
        cols * row / device.l2_bytes,
        cols * row * f.distinct / device.l2_bytes,
        f.num_rows / device.multiprocessors,
        f.num_edges / device.multiprocessors,
        gather,
        longest,
        longest / (gather + 2),
        f.mean_degree * row,
        direct.chunk == 0,
        may_stage(f),
        listed.chunk,
        listed.window,
        listed.long,
        direct.bundle,
    )
    return np.array([*(getattr(f, name) for name in _SEEN), *derived], np.float32)


# ---------------------------------------------------------------------- what it foresees

#: Inputs count by their ratios: their logarithms are what is near or far, of those under this hardly.
SMALL = 0.01


def levels(x: Array) -> Array:
    """Logarithms of `INPUTS`, float64."""
    found: Array = np.log(x.astype(np.float64) + SMALL)
    return found


def nearness(squared_distance: Array) -> Array:
    """What a measurement so far away is worth, 1 at 0: the Matern kernel of smoothness 3/2."""
    r = np.sqrt(np.maximum(squared_distance, 0))
    found: Array = (1 + r) * np.exp(-r)
    return found


@dataclass(frozen=True, eq=False)
class Decider:
    """Foresees the logarithm of each candidate's time, against the best of them, from products that were measured.

    Attributes:
        gpu: name of the GPU of the measurements.
        version: `KERNELS_VERSION` of then.
        names: of what it sees.
        candidates: what it knows.
        margin: part of the time of the rules that a candidate has to promise to save, to be taken.
        implicit: whether plans that serve any width are chosen by it too.
        products: what was measured, in words.
        scale: ``[inputs]`` how far a step of 1 in each of the `levels` leads.
        points: ``[products, inputs]`` float32, `levels` of each times `scale`.
        mean: ``[candidates]`` far away from all of them.
        value: ``[products, candidates]`` float32, what each adds, times its `nearness`.
    """

    gpu: str
    version: int
    names: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    margin: float
    implicit: bool
    products: tuple[str, ...]
    scale: Array
    points: Array
    mean: Array
    value: Array

    def distance(self, x: Array) -> Array:
        """Square of how far each product is from `INPUTS`; what lies beyond all that was measured counts as its rim."""
        low, high = self._rim
        away = self.points - np.clip((levels(x) * self.scale).astype(np.float32), low, high)
        found: Array = np.einsum("ij,ij->i", away, away)
        return found

    @functools.cached_property
    def _rim(self) -> tuple[Array, Array]:
        return self.points.min(0), self.points.max(0)

    def foresee(self, x: Array) -> Array:
        """Logarithm of the time of each candidate, up to a constant: ``[candidates]``."""
        return self.read(self.distance(x))

    def read(self, distance: Array) -> Array:
        """As `foresee`, from `distance`."""
        # By einsum, whose sums, unlike a BLAS library's, do not depend on the number of threads.
        found: Array = self.mean + np.einsum("i,ij->j", nearness(distance), self.value)
        return found

    def save(self, path: str | Path) -> None:
        """Writes it."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "candidates"}
        names = np.array([str(c) for c in self.candidates])
        np.savez_compressed(path, format=FORMAT, candidates=names, **plain)

    @classmethod
    def load(cls, path: str | Path) -> Decider:
        """Reads what `save` has written; nothing is unpickled.

        Raises:
            ValueError: it is no such file, or one whose candidates or inputs are unknown here.
        """
        try:
            with open_npz(Path(path)) as z:
                d = {key: z[key] for key in z.files}
            if int(d["format"]) != FORMAT:
                raise ValueError(f"its format is {d['format']}, not {FORMAT}")
            names = tuple(map(str, d["names"]))
            if names != INPUTS:
                raise ValueError("it sees other features than this version has")
            if any(d[name].dtype.kind not in "iuf" for name in ("scale", "points", "mean", "value")):
                raise ValueError("its arrays are no real numbers")
            made = cls(
                gpu=str(d["gpu"]),
                version=int(d["version"]),
                names=names,
                candidates=tuple(Candidate.parse(str(c)) for c in d["candidates"]),
                margin=float(d["margin"]),
                implicit=bool(d["implicit"]),
                products=tuple(map(str, d["products"])),
                scale=d["scale"].astype(np.float64),
                points=d["points"].astype(np.float32),
                mean=d["mean"].astype(np.float64),
                value=d["value"].astype(np.float32),
            )
            made._check()
        except (OSError, KeyError, TypeError, ValueError, IndexError, EOFError) as e:
            raise ValueError(f"{Path(path).name} is no decider: {e}") from e
        except Exception as e:  # NumPy's and zipfile's own
            raise ValueError(f"{Path(path).name} is no decider: {type(e).__name__}: {e}") from e
        return made

    def _check(self) -> None:
        known, inputs_, ways = len(self.products), len(self.names), len(self.candidates)
        fits = self.scale.shape == (inputs_,) and self.points.shape == (known, inputs_)
        fits = fits and self.mean.shape == (ways,) and self.value.shape == (known, ways) and known > 0
        fits = fits and 0 <= self.margin < 1 and RULES in self.candidates
        arrays = (self.scale, self.points, self.mean, self.value)
        if not fits or not all(np.isfinite(a).all() for a in arrays) or not (self.scale >= 0).all():
            raise ValueError("its arrays do not fit each other")


@functools.lru_cache
def shipped(folder: Path, gpu: str) -> tuple[Decider | None, str]:
    """The decider of `folder` for that GPU and these kernels, or None; and what there is to say about it."""
    others: list[str] = []
    for path in sorted(p for p in folder.glob("decider_*.npz") if p.is_file()):
        try:
            found = Decider.load(path)
        except ValueError as e:
            log.warning("%s", e)
            others.append(str(e))
            continue
        if found.gpu != gpu:
            others.append(f"{path.name} is for {found.gpu}")
        elif found.version != KERNELS_VERSION:
            others.append(f"{path.name} knows version {found.version} of the kernels, these are {KERNELS_VERSION}")
        else:
            return found, path.name
    return None, f"none for {gpu}" + (f" ({'; '.join(others)})" if others else "")


# ---------------------------------------------------------------------- the choice


@dataclass(frozen=True)
class Decision:
    """What was chosen (`RULES`: what they say), and why, line by line."""

    candidate: Candidate
    reasons: tuple[str, ...]


def select(ratio: Array, among: Sequence[int], rules: int, margin: float) -> int:
    """The candidate of the least time; the rules, where they are among them, unless it saves `margin` of theirs.

    Args:
        ratio: time of each candidate over that of the rules.
        among: positions of the candidates to choose from.
        rules: position of the rules.
        margin: see `Decider.margin`.
    """
    best = min(among, key=lambda i: (ratio[i], i))
    return rules if rules in among and ratio[best] > 1 - margin else best


def choose(
    decider: Decider,
    f: MatrixFeatures,
    width: int,
    dtype: torch.dtype,
    device: DeviceFacts,
    kernels: Sequence[str] = ("csr_dual", "pcsr"),
) -> Decision:
    """The candidate that promises most, where csr_dual is among `kernels` by its margin over the rules.

    Args:
        decider: which foresees.
        f: features of the graph.
        width: feature columns.
        dtype: of the features.
        device: the GPU.
        kernels: names of those to choose from.
    """
    x = inputs(f, width, dtype, device)
    distance = decider.distance(x)
    foreseen = decider.read(distance)
    among = usable(decider.candidates, f, kernels)
    if not among:
        return Decision(RULES, ("decider   knows nothing that can run here: by the rules",))
    rules = decider.candidates.index(RULES)
    ratio = np.exp(foreseen - foreseen[rules])
    best = select(ratio, among, rules, decider.margin)
    ranked = sorted(among, key=lambda i: (ratio[i], i))
    chosen = decider.candidates[best]
    told = ", ".join(f"{decider.candidates[i]} {ratio[i]:.2f}" for i in ranked[:4])
    near = int(np.argmin(distance))
    reasons = (
        f"decider   {chosen}, expected at {ratio[best]:.2f} of the time of the rules, "
        f"asked for {decider.margin:.0%} less",
        f"decider   expects {told}; nearest measured {decider.products[near]}, {distance[near] ** 0.5:.2f} away",
        "decider   saw " + ", ".join(f"{n} {v:.4g}" for n, v in zip(INPUTS, x.tolist(), strict=True)),
    )
    return Decision(chosen, reasons)
