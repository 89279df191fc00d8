"""The decider: how a plan takes the rows of a graph, from its features, a width and a dtype, by a random forest.

A `Candidate` is a way; a `Decider` is a forest that was trained on measurements of them (``gnn-spmm tune --train``) and
foresees their times; `choose` takes the one that promises most, where that is clearly more than the rules
(`gnn_spmm_plugin.schedule.layout_by_rule`, `gnn_spmm_plugin.pcsr.choose_config`) do. All of it is a pure function of
what the graph looks like, width, dtype, GPU and the file of the forest.

Method: the decider of ParamSpMM (Zhang et al., 2026, section 5). Different here: one forest for all widths, which
foresees times instead of a class, over the rows of the CSR as well as over PCSR.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from ._config import log
from .features import MatrixFeatures
from .kernels import KERNELS_VERSION
from .pcsr import Config
from .schedule import BLOCKS, SCHEDULES, SQUARE, UNSPLIT, Layout

Array: TypeAlias = "np.ndarray[Any, Any]"

#: Of the file.
FORMAT = 1
FOLDER = Path(__file__).parent / "data"

#: Numbers that the kernels can do with; names come from files.
_NUMBER = r"(\d{1,6})"
_LAYOUT = re.compile(rf"c{_NUMBER}\.w{_NUMBER}\.l{_NUMBER}(?:\.b(\d{{1,3}}))?", re.ASCII)
_PLAIN = re.compile(r"(csr|blocks)(?:\.b(\d{1,3}))?", re.ASCII)
_CONFIG = re.compile(r"W([1248])\.F([1-8])\.V([12])\.S([01])")


@dataclass(frozen=True)
class Candidate:
    """A way to take rows; as text ``rules``, ``csr.b4``, ``c64.w1024.l32``, ``degree/c256.w0.l256``, ``W4.F1.V2.S1``.

    Attributes:
        rows: a `Layout` for the kernel csr_dual (``csr`` and ``blocks``: without a list), a `Config` for pcsr; None: of
            csr_dual, by the rules.
        schedule: a name of `gnn_spmm_plugin.schedule.SCHEDULES`.
    """

    rows: Layout | Config | None = None
    schedule: str = "natural"

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return "pcsr" if isinstance(self.rows, Config) else "csr_dual"

    @property
    def layout(self) -> Layout | None:
        """`rows`, of csr_dual."""
        return self.rows if isinstance(self.rows, Layout) else None

    @property
    def config(self) -> Config | None:
        """`rows`, of pcsr."""
        return self.rows if isinstance(self.rows, Config) else None

    def __str__(self) -> str:
        r = self.rows
        if r is None:
            text = "rules"
        elif isinstance(r, Config):
            text = f"W{r.W}.F{r.F}.V{r.V}.S{int(r.S)}"
        else:
            text = f"c{r.chunk}.w{r.window}.l{r.long}" if r.chunk else "blocks" if r.long else "csr"
            text += f".b{r.bundle}" if r.bundle > 1 else ""
        return text if self.schedule == "natural" else f"{self.schedule}/{text}"

    @classmethod
    def parse(cls, text: str) -> Candidate:
        """The inverse of ``str``.

        Raises:
            ValueError: there is no such candidate.
        """
        schedule, _, name = text.rpartition("/")
        if schedule and schedule not in SCHEDULES:
            raise ValueError(f"candidate {text!r} has a schedule that is none of {', '.join(SCHEDULES)}")
        rows: Layout | Config | None
        if name == "rules":
            rows = None
        elif found := _LAYOUT.fullmatch(name):
            chunk, window, long, bundle = (1 if v is None else int(v) for v in found.groups())
            if chunk < 2 or bundle < 1:
                raise ValueError(f"{text!r} is no candidate: a piece has 2 edges or more, a bundle a row or more")
            rows = Layout(chunk, window, long, bundle)
        elif found := _PLAIN.fullmatch(name):
            plain = UNSPLIT if found[1] == "csr" else BLOCKS
            rows = Layout(plain.chunk, plain.window, plain.long, max(1, int(found[2] or 1)))
        elif found := _CONFIG.fullmatch(name):
            rows = Config(int(found[1]), int(found[2]), int(found[3]), found[4] == "1")
        else:
            raise ValueError(f"{text!r} is no candidate; they look like rules, csr.b4, c64.w1024.l32, W4.F1.V2.S1")
        return cls(rows, schedule or "natural")


RULES = Candidate()

#: What is measured, and chosen from. The first are those of csr_dual.
CANDIDATES: tuple[Candidate, ...] = (
    RULES,
    *(
        Candidate.parse(name)
        for name in (
            "blocks csr csr.b2 csr.b4 c64.w1024.l32 c64.w1024.l64 c64.w0.l64 c128.w1024.l64 c256.w1024.l64 "
            "c256.w1024.l256 c256.w0.l256 c64.w1024.l64.b2 c64.w1024.l64.b4 degree/c64.w1024.l64 degree/c256.w1024.l64"
        ).split()
    ),
    Candidate(schedule="degree"),  # whether communities pay is judged in `gnn_spmm_plugin.reuse`
    *(Candidate(Config(w, f, v, s)) for w, f, v, s in itertools.product((4, 8), (1, 2), (1, 2), (False, True))),
)


def as_measured(candidate: Candidate, f: MatrixFeatures) -> Candidate | None:
    """The first candidate that does the same to a graph of these features; None: not worth a measurement there."""
    layout, config = candidate.layout, candidate.config
    if config is not None:
        splits = (f.split_single if config.V == 1 else f.split_double) > 1
        return candidate if splits else Candidate(config._replace(S=False))
    if layout is None:
        return candidate
    if layout.bundle > 1 and f.mean_degree > 12:
        return None
    if layout.chunk == 0:
        return candidate if not layout.long or f.max_degree > 32 else Candidate.parse("csr")
    chunk = 64 if f.max_degree <= 64 else layout.chunk  # none is split
    long = 32 if f.max_degree <= 32 else 64 if f.max_degree <= 64 else layout.long
    window = layout.window if f.num_rows > 1024 else 1024
    return Candidate(Layout(chunk, window, min(long, layout.long), layout.bundle), candidate.schedule)


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
)
#: What a GPU gathers, in bytes a microsecond for each multiprocessor, and edges that a lane group sweeps in one: to
#: put numbers of edges in proportion, no more.
_GATHERS, _EDGES = 40_000, 8
#: Names of what it sees, in order.
INPUTS = (*_SEEN, *_DERIVED)


def inputs(f: MatrixFeatures, width: int, dtype: torch.dtype, device: DeviceFacts) -> Array:
    """The values of `INPUTS`, float32."""
    row = width * dtype.itemsize
    cols, edges = max(f.num_cols, 1), max(f.num_edges, 1)
    gather, longest = edges * row / (_GATHERS * device.multiprocessors), f.max_degree / _EDGES
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
    )
    return np.array([*(getattr(f, name) for name in _SEEN), *derived], np.float32)


# ---------------------------------------------------------------------- the forest


@dataclass(frozen=True, eq=False)
class Decider:
    """A forest over `INPUTS` that foresees the logarithm of each candidate's time, against the best of them.

    Attributes:
        gpu: name of the GPU that it was trained on.
        version: `KERNELS_VERSION` of then.
        names: of what it sees.
        candidates: what it knows.
        margin: part of the time of the rules that a candidate has to promise to save, to be taken.
        implicit: whether plans that serve any width are chosen by it too.
        roots: ``[trees]`` the first node of each.
        feature: ``[nodes]`` position in `names`.
        threshold: ``[nodes]`` float32; a value of at most that goes to the first child. Leaves: infinity.
        child: ``[nodes, 2]``; leaves are their own.
        leaf: ``[nodes]`` row of `value`; 0 where it is none.
        value: ``[leaves, candidates]`` float32.
        depth: steps from a root to a leaf, at most.
    """

    gpu: str
    version: int
    names: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    margin: float
    implicit: bool
    roots: Array
    feature: Array
    threshold: Array
    child: Array
    leaf: Array
    value: Array
    depth: int

    def leaves(self, x: Array) -> Array:
        """The leaf that a vector of `INPUTS` ends in, in each tree: ``[trees]`` rows of `value`."""
        node, children = self.roots, self.child.reshape(-1)
        for _ in range(self.depth):
            node = children[2 * node + (x[self.feature[node]] > self.threshold[node])]
        return self.leaf[node]

    def foresee(self, x: Array) -> Array:
        """Logarithm of the time of each candidate, up to a constant: ``[candidates]``."""
        return self.value[self.leaves(x)].mean(0, dtype=np.float64)  # type: ignore[no-any-return]

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
            with np.load(path, allow_pickle=False) as z:
                d = {key: z[key] for key in z.files}
            if int(d["format"]) != FORMAT:
                raise ValueError(f"its format is {d['format']}, not {FORMAT}")
            names = tuple(map(str, d["names"]))
            if names != INPUTS:
                raise ValueError("it sees other features than this version has")
            index = {k: d[k].astype(np.int64) for k in ("roots", "feature", "child", "leaf")}
            made = cls(
                gpu=str(d["gpu"]),
                version=int(d["version"]),
                names=names,
                candidates=tuple(Candidate.parse(str(c)) for c in d["candidates"]),
                margin=float(d["margin"]),
                implicit=bool(d["implicit"]),
                threshold=d["threshold"].astype(np.float32),
                value=d["value"].astype(np.float32),
                depth=int(d["depth"]),
                **index,
            )
            made._check()
        except (OSError, KeyError, TypeError, ValueError, IndexError, EOFError) as e:
            raise ValueError(f"{Path(path).name} is no decider: {e}") from e
        except Exception as e:  # NumPy's and zipfile's own
            raise ValueError(f"{Path(path).name} is no decider: {type(e).__name__}: {e}") from e
        return made

    def _check(self) -> None:
        nodes = len(self.feature)
        fits = self.child.shape == (nodes, 2) and self.threshold.shape == self.leaf.shape == (nodes,)
        fits = fits and nodes > 0 and self.value.ndim == 2 and self.value.shape[1] == len(self.candidates)
        fits = fits and self.feature.ndim == self.roots.ndim == 1 and 0 <= self.depth <= nodes and 0 <= self.margin < 1
        for index, end in (
            (self.roots, nodes),
            (self.child, nodes),
            (self.feature, len(self.names)),
            (self.leaf, len(self.value)),
        ):
            fits = fits and index.size > 0 and 0 <= int(index.min()) and int(index.max()) < end
        if not fits or RULES not in self.candidates or not np.isfinite(self.value).all():
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


def allowed(candidate: Candidate, f: MatrixFeatures, kernels: Sequence[str]) -> bool:
    """Whether a candidate can run on a graph, and is of one of these kernels."""
    if candidate.kernel not in kernels or f.num_edges == 0:
        return False
    if candidate.schedule in SQUARE and f.num_rows != f.num_cols:
        return False
    config = candidate.config
    return config is None or max(f.num_cols << config.V, 2 * f.num_rows) <= 2**31


def select(ratio: Array, usable: Sequence[int], rules: int, margin: float) -> int:
    """The usable candidate of the least time; the rules, where they are usable, unless it saves `margin` of theirs.

    Args:
        ratio: time of each candidate over that of the rules.
        usable: positions of the candidates to choose from.
        rules: position of the rules.
        margin: see `Decider.margin`.
    """
    best = min(usable, key=lambda i: (ratio[i], i))
    return rules if rules in usable and ratio[best] > 1 - margin else best


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
    foreseen = decider.foresee(x)
    usable = [i for i, c in enumerate(decider.candidates) if allowed(c, f, kernels)]
    if not usable:
        return Decision(RULES, ("decider   knows nothing that can run here: by the rules",))
    rules = decider.candidates.index(RULES)
    ratio = np.exp(foreseen - foreseen[rules])
    best = select(ratio, usable, rules, decider.margin)
    ranked = sorted(usable, key=lambda i: (ratio[i], i))
    chosen = decider.candidates[best]
    told = ", ".join(f"{decider.candidates[i]} {ratio[i]:.2f}" for i in ranked[:4])
    reasons = (
        f"decider   {chosen}, expected at {ratio[best]:.2f} of the time of the rules, "
        f"asked for {decider.margin:.0%} less",
        f"decider   expects {told}",
        "decider   saw " + ", ".join(f"{n} {v:.4g}" for n, v in zip(INPUTS, x.tolist(), strict=True)),
    )
    return Decision(chosen, reasons)
