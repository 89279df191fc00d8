"""Trains the decider from a file of measurements, and says how well it chooses for graphs that it has not seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from .._table import progress
from ..decider import CANDIDATES, INPUTS, RULES, Candidate, Decider, allowed, as_measured, inputs, select
from ..features import MatrixFeatures
from ..kernels import DTYPE_OF, KERNELS_VERSION
from ..router import STAGED_COLS
from ..schedule import layout_by_rule
from .collect import Collection

Array: TypeAlias = "np.ndarray[Any, Any]"

#: Times are foreseen up to so many times the best; beyond that it does not matter how bad a candidate is.
CLIP = math.log(2)
#: Margins that are tried, smallest first.
MARGINS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2)
#: Values of leaves are rounded to this, so that the file packs well.
GRAIN = 1 / 1024
SETTINGS: dict[str, Any] = {
    "n_estimators": 60,
    "min_samples_leaf": 2,
    "max_depth": 16,
    "max_features": 1.0,
    "random_state": 17,
}


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
        at = [i for i, p in enumerate(self.products) if keep(p)]
        return Data([self.products[i] for i in at], self.x[at], self.ms[at])

    def target(self) -> Array:
        """Logarithm of each candidate's time over the best, up to `CLIP`."""
        found: Array = np.minimum(np.log(self.ms / self.ms.min(1, keepdims=True)), CLIP)
        return found

    def usable(self, kernels: Sequence[str]) -> Array:
        """``[products, candidates]``: what may be chosen."""
        return np.array([[allowed(c, p.features, kernels) for c in CANDIDATES] for p in self.products])


def _by_rules_now(times: dict[str, float], f: MatrixFeatures) -> float:
    """Time of the rules: as measured, or, where another candidate says what they have become since then, of that."""
    candidate = as_measured(Candidate(layout_by_rule(f)[0]), f)
    staged = f.mean_degree >= 64 and f.num_cols <= STAGED_COLS  # perhaps: then no candidate is what the rules are
    return times[str(RULES)] if staged else times.get(str(candidate), times[str(RULES)])


def train(data: Data, **settings: Any) -> Any:
    """A scikit-learn forest.

    Raises:
        ValueError: scikit-learn is not installed.
    """
    try:
        from sklearn.ensemble import ExtraTreesRegressor
    except ImportError as e:
        raise ValueError("training needs scikit-learn: pip install gnn-spmm-plugin[tune]") from e
    forest = ExtraTreesRegressor(**{**SETTINGS, **settings})
    return forest.fit(data.x, data.target())


def export(forest: Any, gpu: str, margin: float, implicit: bool, grain: float = GRAIN) -> Decider:
    """The forest as plain arrays; `grain` 0: leaves as they are, in float32."""
    roots, feature, threshold, child, leaf, value = [], [], [], [], [], []
    nodes = leaves = depth = 0
    for tree in (e.tree_ for e in forest.estimators_):
        count = tree.node_count
        is_leaf = tree.children_left < 0
        own = np.arange(count)
        exact = np.where(is_leaf, np.inf, tree.threshold)
        bound = exact.astype(np.float32)
        # sklearn compares float32 features with float64 thresholds: the largest float32 below says the same.
        bound = np.where(bound > exact, np.nextafter(bound, np.float32(-np.inf)), bound).astype(np.float32)
        sides = [np.where(is_leaf, own, side) for side in (tree.children_left, tree.children_right)]
        number = np.cumsum(is_leaf) - 1 + leaves
        roots.append(nodes)
        feature.append(np.where(is_leaf, 0, tree.feature))
        threshold.append(bound)
        child.append(np.stack(sides, 1) + nodes)
        leaf.append(np.where(is_leaf, number, 0))
        value.append(tree.value[is_leaf, :, 0])
        nodes, leaves, depth = nodes + count, leaves + int(is_leaf.sum()), max(depth, tree.max_depth)
    values = np.concatenate(value)
    return Decider(
        gpu=gpu,
        version=KERNELS_VERSION,
        names=INPUTS,
        candidates=CANDIDATES,
        margin=margin,
        implicit=implicit,
        roots=np.array(roots),
        feature=np.concatenate(feature).astype(np.int16),
        threshold=np.concatenate(threshold),
        child=np.concatenate(child).astype(np.int32),
        leaf=np.concatenate(leaf).astype(np.int32),
        value=(np.round(values / grain) * grain if grain else values).astype(np.float32),
        depth=depth,
    )


def foresee_unseen(data: Data, group: Callable[[Product], str], **settings: Any) -> Array:
    """What forests foresee that were trained without the product's group: ``[products, candidates]``."""
    groups = [group(p) for p in data.products]
    names = sorted(set(groups))
    found = np.empty_like(data.ms)
    for name in progress(names, len(names), "leave one out"):
        out = np.array([g == name for g in groups])
        forest = train(Data([], data.x[~out], data.ms[~out]), n_jobs=-1, **settings)
        found[out] = forest.predict(data.x[out])
    return found


_RULES = CANDIDATES.index(RULES)


def chosen(foreseen: Array, usable: Array, margin: float) -> Array:
    """Which candidate the decider takes, ``[products]``."""
    ratio = np.exp(foreseen - foreseen[:, [_RULES]])
    return np.array([select(r, list(np.flatnonzero(u)), _RULES, margin) for r, u in zip(ratio, usable, strict=True)])


def share_of_best(data: Data, choice: Array, usable: Array) -> Array:
    """Time of the best usable candidate over that of the chosen one, ``[products]``; a third where that has none."""
    best = np.where(usable, data.ms, np.inf).min(1)
    share: Array = best / data.ms[np.arange(len(choice)), choice]
    return np.where(share > 0, share, 1 / 3)


#: Kernels among which ``policy="auto"`` chooses, and what ``"paramspmm"`` does.
SPACES = {"auto": ("csr_dual", "pcsr"), "csr_dual": ("csr_dual",), "paramspmm": ("pcsr",)}


def report_rows(data: Data, foreseen: Array, margin: float, protocol: str) -> list[dict[str, Any]]:
    """How well the decider and the rules choose, by space; of all products, by width and dtype, and by family."""
    found = []
    for space, kernels in SPACES.items():
        usable = data.usable(kernels)
        best = np.where(usable, data.ms, np.inf).argmin(1)
        choices = {"decider": chosen(foreseen, usable, margin)}
        if _RULES in np.flatnonzero(usable.any(0)):
            choices["rules"] = np.full(len(data.products), _RULES)
        for who, choice in choices.items():
            share = share_of_best(data, choice, usable)
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
    """The largest margin under which unseen products come as close to their best as under any, but for 0.2%."""
    usable = data.usable(SPACES["auto"])
    score = {m: _geomean(share_of_best(data, chosen(foreseen, usable, m), usable)) for m in MARGINS}
    return max(m for m in MARGINS if score[m] >= max(score.values()) - 0.002)


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
        ValueError: the file is none, or was measured with other kernels; or scikit-learn is not installed.
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
    made = export(train(seen, n_jobs=-1), collection.head["gpu"], margin, implicit=gain > 1.01 and worst > 0.9)
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
