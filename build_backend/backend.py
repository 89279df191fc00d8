"""PEP 517 backend: scikit-build-core, and torch as a build requirement only where there is none.

Naming torch in ``[build-system] requires`` would make every isolated build download gigabytes,
although the build needs nothing but headers that are already there when torch was installed first.
"""

from __future__ import annotations

import platform
import sys

import torch_headers
from scikit_build_core import build as _build
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_Settings = dict[str, list[str] | str] | None


def _refuse_other_systems() -> None:
    """Before anything is compiled, or a gigabyte fetched."""
    if sys.platform != "linux":
        raise SystemExit(
            f"gnn_spmm_plugin is for Linux, this is {platform.system()} ({platform.machine()}): install it there, in a "
            "container or, on Windows, in WSL 2"
        )


def _torch_if_missing() -> list[str]:
    if torch_headers.find() is not None:
        return []
    return ["torch>=" + ".".join(map(str, torch_headers.MINIMUM))]


def get_requires_for_build_wheel(config_settings: _Settings = None) -> list[str]:
    """Lists what an isolated wheel build needs besides scikit-build-core."""
    _refuse_other_systems()
    return [*_build.get_requires_for_build_wheel(config_settings), *_torch_if_missing()]


def get_requires_for_build_editable(config_settings: _Settings = None) -> list[str]:
    """Lists what an isolated editable build needs besides scikit-build-core."""
    _refuse_other_systems()
    return [*_build.get_requires_for_build_editable(config_settings), *_torch_if_missing()]
