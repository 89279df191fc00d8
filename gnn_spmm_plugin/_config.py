"""Environment variables, the logger and the counters: what every other module may read."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

log = logging.getLogger("gnn_spmm_plugin")

#: The environment variables that are read, and what they do. Arguments win over them.
ENVIRONMENT = {
    "GSP_KERNEL": "name of the kernel that every plan must use (see gsp.kernels())",
    "GSP_MODE": "plan life-cycle: auto | cold | warm",
    "GSP_LOG": "info | debug: log to stderr; verify: compare cached graphs with their edge_index on every use",
    "GSP_DISABLE": "1: the PyG and DGL integrations do nothing",
    "GSP_REQUIRE": "tests only: comma list of gpu, pyg, dgl, browser whose absence is then a failure instead of a skip",
}

#: Counters of what happened in Python; kernel calls are counted by the native libraries themselves.
counters: dict[str, int] = {
    "graphs_built": 0,  # CSR structures made from an edge list or matrix
    "transposes_built": 0,
    "sorts": 0,  # graphs whose edges had to be sorted
    "plans_built": 0,
    "communities_found": 0,  # clusterings of a graph, for a schedule
    "plan_hits": 0,  # an implicit graph (plain edge_index) found again by identity
    "plan_misses": 0,
    "l2_hits": 0,  # found again by content
    "l2_syncs": 0,  # content comparisons that had to wait for the device
    "memo_hits": 0,  # normalised or looped edge lists of PyG's layers that were not computed again
    "norms_built": 0,  # normalisations of graph convolutions computed
    "weight_permutes": 0,  # edge weights brought into row order
    "scale_gathers": 0,  # constant scales of source nodes laid out as edge weights
    "exchanged_bytes": 0,  # features and gradients that came to this process from other ranks
    "fallbacks": 0,  # an integration left an operation to its host
}


# What os.environ keeps its values in, where it can be had: a look there takes 0.1 us instead of 1.
_environment: Mapping[bytes, bytes] = getattr(os.environ, "_data", os.environb)
_KEYS = {name: os.fsencode(name) for name in ENVIRONMENT}


def env(name: str) -> str:
    """The value of one of `ENVIRONMENT`, stripped and lower-cased; empty when unset."""
    value = _environment.get(_KEYS[name])
    return "" if value is None else os.fsdecode(value).strip().lower()


def disabled() -> bool:
    """Whether the integrations do nothing (``GSP_DISABLE=1``)."""
    return env("GSP_DISABLE") in ("1", "true", "yes", "on")


def verify_always() -> bool:
    """Whether cached graphs are compared with their edge_index on every use (``GSP_LOG=verify``)."""
    value = env("GSP_LOG")
    return bool(value) and "verify" in value.split(",")


def _configure_logging() -> None:
    for level in (logging.DEBUG, logging.INFO):
        if logging.getLevelName(level).lower() in env("GSP_LOG").split(","):
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            log.addHandler(handler)
            log.setLevel(level)
            return


_configure_logging()
