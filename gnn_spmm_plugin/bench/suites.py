"""What is measured with whom: two fixed suites, and whatever the caller asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from .contenders import DENSE, OPPONENTS, PLAIN, TF32, WRITE_ARG, Kind, ours
from .graphs import SPECS
from .problem import Configuration
from .run import Job

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
WIDTHS = (16, 32, 64, 100, 128, 256, 512)
#: Measured in every setting: one of each shape.
VARIED = ("er1M_d10", "rmat20_16M", "road1M", "arxivlike", "sbm1M_sorted", "ra_mixed_v3", "ra_sparse_uniform_d8")
CPU_GRAPHS = ("cora", "tolokers", "random:100000:1000000")

_LIMIT = ("speed_of_light",)
_ALL = tuple(kind.name for kind in OPPONENTS)
_NO_PYG = tuple(name for name in _ALL if name != "pyg.scatter")
_BY_NAME = {kind.name: kind for kind in (*OPPONENTS, WRITE_ARG, DENSE)}


@dataclass
class _Plan:
    """Configurations as they are asked for; what is asked for twice is measured once, by all who were asked for."""

    jobs: dict[Configuration, tuple[dict[str, None], dict[str, None], dict[str, None]]] = field(default_factory=dict)

    def add(
        self,
        graphs: Iterable[str],
        widths: Iterable[int],
        *,
        dtype: torch.dtype = F32,
        reduce: str = "sum",
        weighted: bool = True,
        order: str = "natural",
        settings: Sequence[str] = PLAIN,
        others: Sequence[str] = _LIMIT,
        modes: Sequence[str] = ("eager", "graph"),
    ) -> None:
        for width in widths:
            for graph in graphs:
                c = Configuration(graph, order, width, dtype, reduce, weighted)
                for kept, new in zip(self.jobs.setdefault(c, ({}, {}, {})), (settings, others, modes), strict=True):
                    kept.update(dict.fromkeys(new))

    def made(self, kernels: tuple[str, ...]) -> list[Job]:
        by_graph: dict[str, list[Job]] = {}
        for c, (settings, others, modes) in self.jobs.items():
            kinds = (ours(tuple(settings), kernels), *(_BY_NAME[name] for name in others))
            by_graph.setdefault(c.graph, []).append(Job(c, kinds, tuple(modes)))
        return [job for jobs in by_graph.values() for job in jobs]


def full(device: str, files: Sequence[str] = (), kernels: tuple[str, ...] = ("auto",)) -> list[Job]:
    """Everything that docs/benchmarks.md reports. `files`: real graphs."""
    plan = _Plan()
    if device == "cpu":
        plan.add([*CPU_GRAPHS, *files], (16, 64, 256), others=_ALL)
        for reduce in ("sum", "mean", "max"):
            plan.add(CPU_GRAPHS, (16, 64, 256), reduce=reduce, weighted=False, others=_ALL)
        return plan.made(kernels)
    graphs = [name for name in SPECS if name != "cora_like"]
    plan.add(graphs, WIDTHS, others=_NO_PYG)
    plan.add(graphs, (64, 128), others=("pyg.scatter",))
    plan.add(graphs, (64, 256), others=_NO_PYG, modes=("cold",))
    plan.add(files, WIDTHS[:-1], others=_NO_PYG)
    # Weights: as they come, and none.
    plan.add((*VARIED, "redditlike_sorted"), (32, 128), settings=("shuffled", "shuffled,learned"))
    plan.add(VARIED, (2, 4, 8, 16, 64, 128))
    plan.add(VARIED, (2, 4, 8, 16, 64, 128), weighted=False, settings=("", "scales"))
    # Schedules, reductions, gradients.
    plan.add([name for name in SPECS if name.endswith("_shuf")], (128, 256), order="schedule")
    plan.add(VARIED, (16, 64, 128), weighted=False, reduce="mean")
    plan.add(VARIED, (64, 128), weighted=False, reduce="max", settings=("", "arg"), others=("write_arg",))
    plan.add(VARIED, (64, 128), settings=("backward", "transpose"))
    # Half widths.
    for dtype in (F16, BF16):
        plan.add(graphs, (128, 256, 512), dtype=dtype, others=("cusparse", *_LIMIT))
    # Tiny graphs: launches, and the host's time.
    plan.add(("cora_like",), (16, 64), others=_ALL)
    plan.add(("cora_like",), (16,), settings=("", "grad"), others=("torch.mm",), modes=("host",))
    return plan.made(kernels)


def quick(device: str, files: Sequence[str] = (), kernels: tuple[str, ...] = ("auto",)) -> list[Job]:
    """A first look, in well under a minute."""
    plan = _Plan()
    if device == "cpu":
        for reduce in ("sum", "mean", "max"):
            plan.add([*CPU_GRAPHS, *files], (16, 64), reduce=reduce, weighted=False, others=_ALL)
    else:
        plan.add(("cora_like", "arxivlike", "road1M", "rmat20_16M", *files), (32, 128), others=_ALL)
    return plan.made(kernels)


def tiles(device: str, files: Sequence[str] = (), kernels: tuple[str, ...] = ("auto",)) -> list[Job]:
    """The kernels for tensor cores and all others, at equal precision: on dense graphs, and where nothing is to win."""
    if device == "cpu":
        raise ValueError("suite tiles is of kernels for CUDA: there are none for cpu")
    plan = _Plan()
    dense = ("proteins_like", "redditlike_sorted", "ra_dense_small_d90", *files)
    mixed = ("redditlike_shuf", "proteins_like")
    where = (
        (("ddi_like",), (64, 512), "natural"),
        (("ddi_like", "redditlike_shuf", *dense), (128, 256), "natural"),
        (mixed, (128, 256), "community"),  # as found here
        (("redditlike_shuf",), (128, 256), "schedule"),  # as planted
    )
    for dtype in (BF16, F16, F32):
        for weighted in (True, False):
            for graphs, widths, order in where:
                plan.add(graphs, widths, dtype=dtype, weighted=weighted, order=order, settings=("", TF32))
    return plan.made((*kernels, "pcsr", "tile", "dense"))


SUITES: dict[str, Callable[..., list[Job]]] = {"quick": quick, "full": full, "tiles": tiles}


def grid(
    graphs: Sequence[str],
    widths: Sequence[int],
    dtypes: Sequence[torch.dtype],
    reduces: Sequence[str],
    weighted: Sequence[bool],
    orders: Sequence[str],
    settings: Sequence[str],
    modes: Sequence[str],
    kernels: tuple[str, ...] = ("auto",),
) -> list[Job]:
    """Every combination, with all opponents."""
    plan = _Plan()
    for dtype in dtypes:
        for reduce in reduces:
            for w in weighted:
                for order in orders:
                    asked = {"settings": settings, "others": _ALL, "modes": modes}
                    plan.add(graphs, widths, dtype=dtype, reduce=reduce, weighted=w, order=order, **asked)
    return plan.made(kernels)


def only(jobs: Sequence[Job], keep: Callable[[Configuration], bool], kinds: Sequence[str] | None) -> list[Job]:
    """Those jobs whose configuration is kept, with those kinds of contenders (None: all)."""

    def chosen(kind: Kind) -> bool:
        return kinds is None or kind.name in kinds

    return [
        Job(job.configuration, tuple(filter(chosen, job.kinds)), job.modes) for job in jobs if keep(job.configuration)
    ]
