"""The ways to run a product that are measured, and chosen from by the decider: a kernel and how it takes the rows."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .features import MatrixFeatures
from .pcsr import Config
from .schedule import BLOCKS, SCHEDULES, SQUARE, UNSPLIT, Layout
from .tiles import TileConfig

#: Numbers that the kernels can do with; names come from files.
_NUMBER = r"(\d{1,6})"
_LAYOUT = re.compile(rf"c{_NUMBER}\.w{_NUMBER}\.l{_NUMBER}(?:\.b(\d{{1,3}}))?", re.ASCII)
_PLAIN = re.compile(r"(csr|blocks)(?:\.b(\d{1,3}))?", re.ASCII)
_CONFIG = re.compile(r"W([1248])\.F([1-8])\.V([12])\.S([01])")
_TILES = re.compile(rf"T(8|16)\.S{_NUMBER}", re.ASCII)


@dataclass(frozen=True)
class Candidate:
    """A way to take rows; as text ``rules``, ``csr.b4``, ``c64.w1024.l32``, ``degree/c256.w0.l256``, ``W4.F1.V2.S1``.

    Attributes:
        rows: a `Layout` for the kernel csr_dual (``csr`` and ``blocks``: without a list), a `Config` for pcsr, a
            `TileConfig` (``T8.S0``) for tile, ``"dense"`` for dense; None: of csr_dual, by the rules.
        schedule: a name of `gnn_spmm_plugin.schedule.SCHEDULES`.
    """

    rows: Layout | Config | TileConfig | Literal["dense"] | None = None
    schedule: str = "natural"

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        if self.rows == "dense":
            return "dense"
        return {Config: "pcsr", TileConfig: "tile"}.get(type(self.rows), "csr_dual")

    @property
    def layout(self) -> Layout | None:
        """`rows`, of csr_dual."""
        return self.rows if isinstance(self.rows, Layout) else None

    @property
    def config(self) -> Config | None:
        """`rows`, of pcsr."""
        return self.rows if isinstance(self.rows, Config) else None

    @property
    def tiles(self) -> TileConfig | None:
        """`rows`, of tile."""
        return self.rows if isinstance(self.rows, TileConfig) else None

    def __str__(self) -> str:
        r = self.rows
        if isinstance(r, (TileConfig, str)):
            text = str(r)
        elif r is None:
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
        rows: Layout | Config | TileConfig | Literal["dense"] | None
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
        elif name == "dense":
            rows = "dense"
        elif found := _TILES.fullmatch(name):
            rows = TileConfig(int(found[1]), int(found[2]))
        else:
            raise ValueError(
                f"{text!r} is no candidate; they look like rules, csr.b4, c64.w1024.l32, W4.F1.V2.S1, T8.S0"
            )
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


def allowed(candidate: Candidate, f: MatrixFeatures, kernels: Sequence[str]) -> bool:
    """Whether a candidate can run on a graph, and is of one of these kernels."""
    if candidate.kernel not in kernels or f.num_edges == 0:
        return False
    if candidate.schedule in SQUARE and f.num_rows != f.num_cols:
        return False
    config = candidate.config
    return config is None or max(f.num_cols << config.V, 2 * f.num_rows) <= 2**31


def usable(candidates: Sequence[Candidate], f: MatrixFeatures, kernels: Sequence[str]) -> list[int]:
    """Positions of those that are `allowed` on such a graph, and would have been measured there."""
    return [i for i, c in enumerate(candidates) if allowed(c, f, kernels) and as_measured(c, f) is not None]
