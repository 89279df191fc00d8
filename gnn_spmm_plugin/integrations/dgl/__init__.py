"""DGL: importing it under a torch that it was not built for, and aggregating with this package's kernels underneath.

`import_dgl` imports it, `patch_dgl` replaces its operators in the whole process, undoably. What is not faster here, or
not known here, runs as DGL runs it.

Importing this patches nothing and does not import DGL.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from ..._config import disabled
from ...plan import _check_choice
from ...policy import POLICIES
from .importing import import_dgl

_lock = threading.RLock()
_patches: list[Patch] = []


class Patch:
    """One `patch_dgl` in force; ``with`` ends it, or `undo`."""

    def __init__(self, policy: str, cuda_features: bool) -> None:
        self.policy, self.cuda_features = policy, cuda_features

    def undo(self) -> None:
        """Ends this patch; once is enough, more do nothing."""
        with _lock:
            if self in _patches:
                _patches.remove(self)
                _settle()

    def __enter__(self) -> Patch:
        _start(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def _start(patch: Patch) -> None:
    from . import switch

    with _lock:
        if patch not in _patches and switch.usable():
            _patches.append(patch)
            try:
                _settle()
            except BaseException:
                _patches.remove(patch)
                raise


def _settle() -> None:
    """Brings what is installed in line with the patches in force."""
    from . import switch

    if not _patches:
        switch.uninstall()
    else:
        switch.install(_patches[-1].policy, any(p.cuda_features for p in _patches))


def patch_dgl(policy: str = "auto", cuda_features: bool = False) -> Patch:
    """Lets every DGL message passing in the process aggregate with this package's kernels.

    That is `update_all`, `multi_update_all`, `pull` and so on, ``dgl.ops`` and all of ``dgl.nn`` that is built on
    these, on graphs, heterographs, blocks and batches; names that were imported before count too. Calls are counted:
    the patch ends when each has been undone, by `unpatch_dgl`, by the end of a ``with`` block or by the returned
    object's ``undo``. Then the replaced functions are DGL's own objects again.

    Args:
        policy: how plans are chosen, see `gnn_spmm_plugin.plan`.
        cuda_features: with a DGL that was built without CUDA, let graphs take features on a GPU: ``g.to("cuda")``
            leaves the structure on the CPU and moves features; plans are made on the GPU. Only for DGL 2.1.0.

    Returns:
        A context manager; the patch is in force already. Where DGL is none that was tested it is not, and a warning
        says so.

    Raises:
        ImportError: DGL, or a package that it needs, is not installed.
        RuntimeError: `cuda_features` is not possible with this DGL; the message says why.
    """
    import_dgl()
    _check_choice("policy", policy, POLICIES)
    patch = Patch(policy, cuda_features)
    if not disabled():
        _start(patch)
    return patch


def unpatch_dgl() -> None:
    """Undoes the latest `patch_dgl` that is still in force; does nothing where there is none."""
    with _lock:
        if _patches:
            _patches[-1].undo()


def _layers(model: Any) -> list[Any]:
    """The modules of `model` that are layers of DGL, or called its operators while they were patched."""
    from .records import known

    return [
        (name, m)
        for name, m in model.named_modules()
        if known(m) is not None or type(m).__module__.startswith("dgl.nn.")
    ]


__all__ = ["Patch", "import_dgl", "patch_dgl", "unpatch_dgl"]
