"""Fast, memory-lean aggregation for graph neural networks, under existing PyG and DGL models.

Importing this patches nothing and never fails for want of a GPU, of PyG or of DGL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _config, _native
from .cache import clear_cache
from .functional import edge_softmax, sddmm, spmm
from .graph import Graph
from .kernels import kernels
from .plan import Plan, plan
from .router import route

if TYPE_CHECKING:
    from . import distributed as distributed
    from . import nn as nn
    from .integrations.dgl import import_dgl as import_dgl
    from .integrations.dgl import patch_dgl as patch_dgl
    from .integrations.dgl import unpatch_dgl as unpatch_dgl
    from .integrations.pyg import accelerate as accelerate
    from .integrations.pyg import patch_pyg as patch_pyg
    from .integrations.pyg import restore as restore
    from .integrations.pyg import unpatch_pyg as unpatch_pyg
    from .report import report as report

__version__ = "0.1.0"

# Needs PyG or DGL, or a while to import, so: at first use.
_LAZY = {
    "accelerate": ".integrations.pyg",
    "restore": ".integrations.pyg",
    "patch_pyg": ".integrations.pyg",
    "unpatch_pyg": ".integrations.pyg",
    "import_dgl": ".integrations.dgl",
    "patch_dgl": ".integrations.dgl",
    "unpatch_dgl": ".integrations.dgl",
    "report": ".report",
    "nn": ".nn",
    "distributed": ".distributed",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_LAZY[name], __name__)
    value = module if name in ("nn", "distributed") else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])


def stats() -> dict[str, int]:
    """What happened in this process so far, as counts; take the difference of two calls to look at a part of it.

    ``kernel_calls`` is counted where kernels run. ``graphs_built``, ``transposes_built``, ``sorts`` and ``plans_built``
    stop growing while one graph is used again and again; so do ``weight_permutes`` where weights are not learned, and
    ``scale_gathers``: constant scales of source nodes laid out as edge weights, on a GPU.
    ``plan_hits`` and ``l2_hits`` count finds of a plain ``edge_index``, by identity and by content, ``plan_misses``
    where identity did not do, ``l2_syncs`` comparisons that waited for the GPU, ``memo_hits`` normalisations of PyG
    that were not computed again, ``exchanged_bytes`` what came from other ranks, ``fallbacks`` operations that were
    left to PyG or DGL.
    """
    return {"kernel_calls": _native.kernel_calls(), **_config.counters}


__all__ = [
    "Graph",
    "Plan",
    "accelerate",
    "clear_cache",
    "distributed",
    "edge_softmax",
    "import_dgl",
    "kernels",
    "nn",
    "patch_dgl",
    "patch_pyg",
    "plan",
    "report",
    "restore",
    "route",
    "sddmm",
    "spmm",
    "stats",
    "unpatch_dgl",
    "unpatch_pyg",
]
