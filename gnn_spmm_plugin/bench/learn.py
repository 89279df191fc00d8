"""Trains the decider from a file of measurements, and says how well it chooses for graphs that it has not seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .._table import progress
from ..candidate import CANDIDATES, RULES, Candidate, as_measured, usable
from ..decider import INPUTS, Decider, inputs, levels, may_stage, nearness, select
from ..features import MatrixFeatures
from ..kernels import DTYPE_OF, KERNELS_VERSION
from ..schedule import layout_by_rule
from .collect import Collection
from .regimes import digest

Array: TypeAlias = "np.ndarray[Any, Any]"

#: Times are foreseen up to so many times the best; beyond that it does not matter how bad a candidate is.
CLIP = math.log(2)
#: And a loss while learning up to so many.
MOST = math.log(3)
#: Margins that are tried, smallest first.
MARGINS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2)
#: Of a learning of the scale: steps, how far each leads, the part of the graphs that is hidden at a step, how often
#: families are instead, a fifth of them, and how much more two candidates have to differ for the choice to be clear.
STEPS, STEP, HIDDEN, FAMILIES, UNCLEAR = 150, 0.05, 0.4, 0.3, 0.03
#: See `Scale.noise`; where learning begins, and the least, so that equal products do no harm.
NOISE, LEAST_NOISE = 0.02, 0.001


@dataclass(frozen=True)
class Product:
    """What was measured, and on what."""

    graph: str
    family: str
    holdout: bool
    width: int
    dtype: str
    features: MatrixFeatures


@dataclass(frozen=True)
class Data:
    """Measurements as arrays.

    Attributes:
        products: what was measured.
        x: ``[products, inputs]`` float32.
        ms: ``[products, candidates]``, infinity where there is no time; columns as `CANDIDATES`.
    """

    products: list[Product]
    x: Array
    ms: Array

    @classmethod
    def of(cls, collection: Collection) -> Data:
        """The products of a file that have a time of the rules.

        Raises:
            ValueError: there is none.
        """
        features, device = collection.features(), collection.device()
        names = [str(c) for c in CANDIDATES]
        products, x, ms = [], [], []
        for (graph, width, dtype), rows in collection.rows.items():
            if width == 0 or graph not in features or not rows.get(str(RULES), {}).get("ms"):
                continue
            first = rows[str(RULES)]
            products.append(Product(graph, first["family"], first["holdout"] == "1", width, dtype, features[graph]))
            x.append(inputs(features[graph], width, DTYPE_OF[dtype], device))
            times = {n: float(row["ms"]) for n, row in rows.items() if row["ms"]}
            times[str(RULES)] = _by_rules_now(times, features[graph])
            ms.append([times.get(n, math.inf) for n in names])
        if not products:
            raise ValueError("the file has no product with a time of the rules")
        return cls(products, np.stack(x), np.array(ms))

    def only(self, keep: Callable[[Product], bool]) -> Data:
        """Some of the products."""
        return self.without(np.array([not keep(p) for p in self.products]))

    def without(self, out: Array) -> Data:
        """All products but some."""
        return Data([p for p, o in zip(self.products, out, strict=True) if not o], self.x[~out], self.ms[~out])

    def target(self) -> Array:
        """Logarithm of each candidate's time over the best, up to `CLIP`."""
        found: Array = np.minimum(np.log(self.ms / self.ms.min(1, keepdims=True)), CLIP)
        return found

    def usable(self, kernels: Sequence[str]) -> Array:
        """``[products, candidates]``: what may be chosen."""
        found = np.zeros(self.ms.shape, bool)
        for row, p in zip(found, self.products, strict=True):
            row[usable(CANDIDATES, p.features, kernels)] = True
        return found


def _by_rules_now(times: dict[str, float], f: MatrixFeatures) -> float:
    """Time of the rules: as measured, or, where another candidate says what they have become since then, of that."""
    candidate = as_measured(Candidate(layout_by_rule(f)[0]), f)
    # Where it may be staged, no candidate is what the rules are.
    return times[str(RULES)] if may_stage(f) else times.get(str(candidate), times[str(RULES)])


# ---------------------------------------------------------------------- learning


@dataclass(frozen=True)
class Scale:
    """What is learnt of how near two products are.

    Attributes:
        scale: see `Decider.scale`.
        noise: that of the measurements, against a variance of 1: added to the diagonal of the kernel's matrix.
    """

    scale: Array
    noise: float

    @classmethod
    def start(cls, data: Data) -> Scale:
        """All inputs count the same, one standard deviation of each as much as that of any other."""
        spread = levels(data.x).std(0)
        return cls(np.where(spread > 1e-9, len(INPUTS) ** -0.5 / np.maximum(spread, 1e-9), 0.0), NOISE)


def learn_scale(data: Data, seed: int = 17) -> Scale:
    """The scale under which the choice for hidden graphs loses least, by gradient descent.

    At each step other graphs, or families of them, are hidden, their times foreseen from the rest, and the candidates
    weighted by the softmax of what is foreseen; what that loses on average, in logarithms of time, goes down. The mean
    over the second half of the steps is taken. So the scale is not fitted to one way of dividing the graphs.
    """
    start = Scale.start(data)
    graphs, families = (np.array([getattr(p, name) for p in data.products]) for name in ("graph", "family"))
    draw = np.random.default_rng(seed)
    x = torch.from_numpy(levels(data.x) * start.scale).float()
    y = torch.from_numpy(data.target()).float()
    may = torch.from_numpy(data.usable(SPACES["auto"]) & np.isfinite(data.ms))
    lost = torch.from_numpy(np.where(may, np.minimum(np.log(data.ms / data.ms.min(1, keepdims=True)), MOST), 0)).float()
    free = torch.tensor([0.0] * len(INPUTS) + [math.log(NOISE)], requires_grad=True)
    steps = torch.optim.Adam([free], lr=STEP)
    seen: list[Tensor] = []
    for step in range(STEPS):
        labels, part = (families, 0.2) if draw.random() < FAMILIES else (graphs, HIDDEN)
        names = np.unique(labels)
        hidden = np.isin(labels, draw.choice(names, max(1, int(len(names) * part)), replace=False))
        if hidden.all():
            continue
        out, rest = torch.from_numpy(hidden), torch.from_numpy(~hidden)
        a = x * free[:-1].exp()
        noise = free[-1].exp().clamp(min=LEAST_NOISE)
        k = _nearness(a[rest], a[rest]) + noise * torch.eye(int(rest.sum()))
        mean = y[rest].mean(0)
        foreseen = mean + _nearness(a[out], a[rest]) @ torch.cholesky_solve(y[rest] - mean, torch.linalg.cholesky(k))
        share = torch.softmax(torch.where(may[out], -foreseen / UNCLEAR, -math.inf), 1)
        loss = (share * lost[out]).sum(1).mean()
        steps.zero_grad()
        loss.backward()
        steps.step()
        if 2 * step >= STEPS:
            seen.append(free.detach().clone())
    if not seen:
        return start
    found = torch.stack(seen).mean(0).double().exp().numpy()
    return Scale(start.scale * found[:-1], max(float(found[-1]), LEAST_NOISE))


def _nearness(a: Tensor, b: Tensor) -> Tensor:
    """`gnn_spmm_plugin.decider.nearness` of the rows of one to those of the other, with a gradient."""
    squared = a.square().sum(1, keepdim=True) + b.square().sum(1) - 2 * a @ b.T
    r = (squared.clamp(min=0) + 1e-8).sqrt()
    return (1 + r) * (-r).exp()


def train(data: Data, learnt: Scale, gpu: str, margin: float = 0.0, implicit: bool = False) -> Decider:
    """The decider of measurements."""
    points = (levels(data.x) * learnt.scale).astype(np.float32)
    y = data.target()
    mean = y.mean(0)
    exact = points.astype(np.float64)
    squares = (exact * exact).sum(1)
    k = nearness(squares[:, None] + squares - 2 * exact @ exact.T)
    value = np.linalg.solve(k + learnt.noise * np.eye(len(k)), y - mean)
    return Decider(
        gpu=gpu,
        version=KERNELS_VERSION,
        names=INPUTS,
        candidates=CANDIDATES,
        margin=margin,
        implicit=implicit,
        products=tuple(f"{p.graph} {p.width} {p.dtype}" for p in data.products),
        scale=learnt.scale,
        points=points,
        mean=mean,
        value=value.astype(np.float32),
    )


def foresee_unseen(data: Data, group: Callable[[Product], str], parts: int = 8) -> Array:
    """What deciders foresee that know nothing of the product's group: ``[products, candidates]``.

    A scale is learnt for each of so many parts of the groups, without that part; with it, each group of the part is
    foreseen from all other groups.
    """
    groups = np.array([group(p) for p in data.products])
    names = sorted(set(groups), key=digest)
    found = np.empty_like(data.ms)
    for part in progress([names[i::parts] for i in range(min(parts, len(names)))], min(parts, len(names)), "unseen"):
        learnt = learn_scale(data.without(np.isin(groups, part)))
        for name in part:
            out = groups == name
            made = train(data.without(out), learnt, "")
            found[out] = [made.foresee(x) for x in data.x[out]]
    return found


_RULES = CANDIDATES.index(RULES)


def chosen(foreseen: Array, may: Array, margin: float) -> Array:
    """Which candidate the decider takes, ``[products]``."""
    ratio = np.exp(foreseen - foreseen[:, [_RULES]])
    return np.array([select(r, list(np.flatnonzero(u)), _RULES, margin) for r, u in zip(ratio, may, strict=True)])


def share_of_best(data: Data, choice: Array, may: Array) -> Array:
    """Time of the best usable candidate over that of the chosen one, ``[products]``; a third where that has none."""
    best = np.where(may, data.ms, np.inf).min(1)
    share: Array = best / data.ms[np.arange(len(choice)), choice]
    return np.where(share > 0, share, 1 / 3)


#: Kernels among which ``policy="auto"`` chooses, and what ``"paramspmm"`` does.
SPACES = {"auto": ("csr_dual", "pcsr"), "csr_dual": ("csr_dual",), "paramspmm": ("pcsr",)}


def report_rows(data: Data, foreseen: Array, margin: float, protocol: str) -> list[dict[str, Any]]:
    """How well the decider and the rules choose, by space; of all products, by width and dtype, and by family."""
    found = []
    for space, kernels in SPACES.items():
        may = data.usable(kernels)
        best = np.where(may, data.ms, np.inf).argmin(1)
        choices = {"decider": chosen(foreseen, may, margin)}
        if _RULES in np.flatnonzero(may.any(0)):
            choices["rules"] = np.full(len(data.products), _RULES)
        for who, choice in choices.items():
            share = share_of_best(data, choice, may)
            parts = {
                "all": ["all"] * len(share),
                "width": [f"{p.width} {p.dtype}" for p in data.products],
                "family": [p.family for p in data.products],
            }
            for part, labels in parts.items():
                for label in dict.fromkeys(labels):
                    here = np.array([text == label for text in labels])
                    found.append(
                        {
                            "protocol": protocol,
                            "space": space,
                            "choice": who,
                            "part": part,
                            "of": label,
                            "products": int(here.sum()),
                            "accuracy": round(float((choice == best)[here].mean()), 4),
                            "geomean": round(_geomean(share[here]), 4),
                            "worst": round(float(share[here].min()), 4),
                            "under_85": int((share[here] < 0.85).sum()),
                        }
                    )
    return found


def _geomean(values: Array) -> float:
    return math.exp(float(np.log(values).mean()))


def best_margin(data: Data, foreseen: Array) -> float:
    """The largest margin under which unseen products come as close to their best as under any, but for 0.05%."""
    may = data.usable(SPACES["auto"])
    score = {m: _geomean(share_of_best(data, chosen(foreseen, may, m), may)) for m in MARGINS}
    return max(m for m in MARGINS if score[m] >= max(score.values()) - 0.0005)


def implicit_gain(data: Data, foreseen: Array, margin: float) -> tuple[float, float]:
    """What the choice for float32 of width 64 brings to all products of a graph: rules over chosen, mean and worst."""
    choice = chosen(foreseen, data.usable(("csr_dual",)), margin)
    nominal = {p.graph: c for p, c in zip(data.products, choice, strict=True) if (p.width, p.dtype) == (64, "float32")}
    pairs = zip(data.products, data.ms, strict=True)
    gains = np.array([row[_RULES] / row[nominal[p.graph]] for p, row in pairs if p.graph in nominal])
    gains = np.where(gains > 0, gains, 1 / 3)
    return (_geomean(gains), float(gains.min())) if len(gains) else (1.0, 1.0)


def fit(path: str) -> tuple[Decider, list[dict[str, Any]]]:
    """The decider of a file of measurements, and the rows of its report.

    Args:
        path: written by ``gnn-spmm tune --collect``.

    Raises:
        ValueError: the file is none, or was measured with other kernels.
    """
    collection = Collection.read(path)
    version = collection.head.get("kernels_version")
    if version != str(KERNELS_VERSION):
        raise ValueError(
            f"{path} was measured with version {version} of the kernels, these are {KERNELS_VERSION}: collect it anew"
        )
    every = Data.of(collection)
    seen = every.only(lambda p: not p.holdout)
    graphs = {p.graph for p in seen.products}
    if len(graphs) < 2:
        raise ValueError(f"{path} has {len(graphs)} graphs to train on; it takes 2 and should be 150")
    foreseen = foresee_unseen(seen, lambda p: p.graph)
    margin = best_margin(seen, foreseen)
    rows = report_rows(seen, foreseen, margin, "leave one graph out")
    if len({p.family for p in seen.products}) > 1:
        rows += report_rows(seen, foresee_unseen(seen, lambda p: p.family), margin, "leave one family out")
    gain, worst = implicit_gain(seen, foreseen, margin)
    made = train(seen, learn_scale(seen), collection.head["gpu"], margin, gain > 1.01 and worst > 0.9)
    for protocol, part in (
        ("held out", every.only(lambda p: p.holdout and p.family != "bench")),
        ("suite", every.only(lambda p: p.family == "bench")),
    ):
        if part.products:
            rows += report_rows(part, np.stack([made.foresee(x) for x in part.x]), margin, protocol)
    return made, rows


def print_rows(rows: Iterable[dict[str, Any]], show: Callable[..., None]) -> None:
    """The rows of a report that are not about families, as a table."""
    some = [r for r in rows if r["part"] != "family"]
    head = ("protocol", "space", "choice", "of", "products", "accuracy", "geomean", "worst", "under_85")
    show(list(head), [[str(r[k]) for k in head] for r in some])
