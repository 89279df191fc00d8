"""What follows from the two runs of a script: where a step's time goes, what was gained, what could be, what to do."""

from __future__ import annotations

import os
from typing import Any

from .script import Trials

#: Below these shares of a step, nothing that this package does can matter, or matter much.
NOTHING, LITTLE = 0.05, 0.2
#: A ratio of times nearer to 1 than this says nothing: the machine does other things too.
NOISE = 0.07
#: Layers with less of the step than this are not worth an effort.
SMALL_LAYER = 0.02


def judge(trials: Trials) -> dict[str, Any]:
    """The numbers and sentences for both commands, as JSON takes them.

    Returns:
        ``shares`` of a step (``aggregation``, ``dense``, ``outside``; None where a layer could not be timed),
        ``bound`` (times as fast a step would be if aggregation cost nothing: Amdahl's law), ``gain`` (times as fast it
        is), ``layers`` (a row each), ``headline``, ``advice`` and ``notes``.
    """
    before, after = trials.before, trials.after
    step, step_after = before["ms_per_step"], after["ms_per_step"]
    layers = _layers(trials)
    shares = _shares(layers, step)
    bound = None if shares is None else 1 / max(1 - shares["aggregation"], 1e-3)
    gain = step / step_after if step and step_after else None
    return {
        "step_ms": {"before": step, "after": step_after},
        "peak_bytes": {"before": before["peak_bytes"], "after": after["peak_bytes"]},
        "gain": gain,
        "bound": bound,
        "shares": shares,
        "layers": layers,
        "headline": _headline(shares, bound, gain, layers),
        "advice": _advice(trials, layers, shares, gain),
        "notes": [*trials.notes, *_doubts(gain, bound), *([trials.wrong] if trials.wrong else [])],
        "wrong": trials.wrong,
    }


def _doubts(gain: float | None, bound: float | None) -> list[str]:
    """Why the times may be off."""
    found = []
    if gain is not None and bound is not None and gain > bound * (1 + NOISE):
        found.append(
            f"More was gained ({gain:.2f} times) than the bound allows ({bound:.2f}): the machine did other things, "
            "the layers take longer in the model than called alone, or their dense products are fewer now."
        )
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > 1.5 * cores:
        found.append(f"The machine is busy (load {load:.1f} on {cores} cores), so times on the CPU are unreliable.")
    return found


def _layers(trials: Trials) -> list[dict[str, Any]]:
    """One row for each layer, the slowest first."""
    step, patched = trials.before["ms_per_step"], _by_name(trials.after["layers"])
    whole = max(step or 0.0, sum(_per_step(row) or 0.0 for row in trials.before["layers"]))
    rows = []
    for name, old in _by_name(trials.before["layers"]).items():
        new = patched.get(name, {})
        report = new.get("report") or {}
        ms = _per_step(old)
        rows.append(
            {
                "layer": name,
                "kind": old["kind"],
                "graph": old["graph"],
                "calls": old["training_calls"] + old["evaluating_calls"],
                "before_ms": ms,
                "after_ms": _per_step(new) if new else None,
                "share": None if ms is None or not step else ms / whole,
                "dense_share": old["dense_share"],
                "before_bytes": old["peak_bytes"],
                "after_bytes": new.get("peak_bytes"),
                "message_bytes": old["message_bytes"],
                "width": old["width"],
                "status": report.get("status", "not seen"),
                "reasons": list(report.get("reasons", {})),
                "hints": list(report.get("hints", [])),
                "error": old["error"] or new.get("error"),
            }
        )
    return sorted(rows, key=lambda r: -(r["before_ms"] or 0.0))


def _by_name(layers: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Layers by their names, equal ones numbered."""
    found: dict[str, dict[str, Any]] = {}
    for row in layers:
        name, number = row["name"], 1
        while name in found:
            number += 1
            name = f"{row['name']} #{number}"
        found[name] = row
    return found


def _per_step(row: dict[str, Any]) -> float | None:
    """Milliseconds that a layer takes of a step: all its calls, forward and backward."""
    if row["forward_ms"] is None:
        return None
    training = row["training_calls"] * (row["forward_ms"] + (row["backward_ms"] or 0.0))
    return float(training + row["evaluating_calls"] * row["forward_ms"])


def _shares(layers: list[dict[str, Any]], step: float | None) -> dict[str, float] | None:
    """Parts of a step; layers that were measured to take more than all of it share it by their times."""
    if not step or any(r["before_ms"] is None for r in layers):
        return None
    total = sum(r["before_ms"] for r in layers)
    dense = sum(r["before_ms"] * (r["dense_share"] or 0.0) for r in layers)
    scale = 1 / max(step, total)
    return {
        "aggregation": (total - dense) * scale,
        "dense": dense * scale,
        "outside": max(step - total, 0.0) * scale,
    }


def _headline(
    shares: dict[str, float] | None, bound: float | None, gain: float | None, layers: list[dict[str, Any]]
) -> str:
    if shares is None or bound is None:
        return "Not every layer could be timed by itself, so there is no bound on what can be gained; see the table."
    part = shares["aggregation"]
    limit = f"Message passing takes {part:.0%} of a step: if it cost nothing, a step would be {bound:.2f} times as fast"
    measured = "" if gain is None else f" Measured with the library patched: {gain:.2f} times."
    if part < NOTHING:
        return f"Nothing here will help. {limit}, at most.{measured}"
    if part < LITTLE:
        return f"Little can be gained. {limit}, at most.{measured}"
    fused = sum(r["status"] in ("fused", "partly", "gsp.nn") for r in layers)
    if gain is not None and gain > 1 + NOISE:
        start = f"It helps: a step is {gain:.2f} times as fast with the library patched."
        return f"{start} {limit}, at most."
    if fused == 0:
        return f"None of the layers is fused, so nothing is gained yet. {limit}, at most.{measured}"
    slower = "It is slower" if gain is not None and gain < 1 - NOISE else "No faster step was measured"
    return f"{slower}, though {fused} of {len(layers)} layers are fused. {limit}, at most.{measured}"


def _advice(
    trials: Trials, layers: list[dict[str, Any]], shares: dict[str, float] | None, gain: float | None
) -> list[str]:
    """What to do, the most useful first."""
    found: list[str] = []
    libraries = trials.before["libraries"]
    if any(r["status"] in ("fused", "partly") for r in layers) and gain is not None and gain > 1 + NOISE:
        calls = {"torch_geometric": "gsp.accelerate(model) or gsp.patch_pyg()", "dgl": "gsp.patch_dgl()"}
        ways = " and ".join(calls[name] for name in libraries)
        found.append(f"Call {ways} once, before training; nothing else in the script has to change.")
    for row in layers:
        if (row["share"] or 0.0) < SMALL_LAYER and row["share"] is not None:
            continue
        if row["status"] in ("not", "partly", "not accelerated", "not seen", "not called"):
            why = "; ".join(row["reasons"]) or "it aggregates in a way that is not known here"
            part = "" if row["share"] is None else f", {row['share']:.0%} of a step,"
            what = "is fused in part" if row["status"] == "partly" else "is left to the library"
            hints = "".join(f" {hint[0].upper()}{hint[1:]}." for hint in row["hints"])
            found.append(f"{row['layer']} ({row['kind']}){part} {what}: {why}.{hints}")
    if shares is not None and shares["outside"] > 0.5:
        found.append(
            f"{shares['outside']:.0%} of a step is spent outside of message passing layers: loading and sampling, "
            "other modules, the optimizer, evaluation between steps. Look there first; torch.profiler says where."
        )
    if shares is not None and shares["dense"] > 0.4:
        found.append(
            f"{shares['dense']:.0%} of a step is products of dense matrices inside the layers. They take less time in "
            "bf16 or tf32 on a GPU, or with fewer channels."
        )
    small = [g for g, _ in trials.graphs if g.shape[1] < 20_000]
    if small and len(small) == len(trials.graphs) and (gain is None or gain < 1 + NOISE):
        found.append(
            "The graphs are small: calling operators takes longer than running them. Larger batches, or "
            "torch.compile, save more than faster aggregation."
        )
    if any(r["batches"] for r in trials.before["layers"]) and (gain is None or gain < 1 + NOISE):
        found.append("Each mini-batch is used once, so what is prepared for it pays back little.")
    return found


__all__ = ["judge"]
