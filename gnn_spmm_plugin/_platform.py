"""What this machine is, as far as kernels depend on it: its system, torch's kind of build, the NVIDIA driver.

Every function returns what stands in the way, said with what is there, what is needed and what to do; or None.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from typing import Any

import torch

REBUILD = "`pip install --force-reinstall --no-deps .`"


def other_system() -> str | None:
    """A system that nothing is built for."""
    if sys.platform == "linux":
        return None
    name = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
    return (
        f"this is {name} ({platform.machine()}), the package is built for Linux; use it there, in a container or, on "
        "Windows, in WSL 2"
    )


def torch_without_cuda(built_with_cuda: bool) -> str | None:
    """A build of torch that has no CUDA."""
    if torch.version.hip is not None:
        return (
            f"torch {torch.__version__} is a ROCm build, the kernels are CUDA; use the CPU, or an NVIDIA GPU and a "
            "torch for CUDA"
        )
    if torch.version.cuda is not None:
        return None
    then = (
        "this package need not be built again" if built_with_cuda else f"then build this package again with {REBUILD}"
    )
    return f"torch {torch.__version__} is a build without CUDA; for a GPU install one with CUDA, {then}"


def driver() -> tuple[int, int] | None:
    """The newest CUDA that the NVIDIA driver serves, (13, 0) for instance; None without a driver. Starts nothing."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)


def old_driver(build: dict[str, Any]) -> str | None:
    """A driver that serves no CUDA of the major version that the library was built with.

    The runtime is part of the library, and one of 13.0 runs on each driver of 13, but not on those of 12.
    """
    found, version = driver(), str(build.get("cuda_version", ""))
    if found is None or not version or found[0] >= int(version.split(".")[0]):
        return None
    return (
        f"the NVIDIA driver serves CUDA {found[0]}.{found[1]}, but the package was built with CUDA {version}; update "
        f"the driver to one that serves CUDA {version.split('.')[0]}, or build the package again with a toolkit for "
        f"CUDA {found[0]}: set CUDA_HOME to it, then {REBUILD}"
    )


def no_gpu() -> str | None:
    """Why a torch with CUDA sees no GPU."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return "torch sees no GPU"
    found = driver()
    if found is None:
        return (
            "torch sees no GPU: there is no NVIDIA driver here (libcuda.so.1 does not load); install one until "
            "nvidia-smi runs, or use the CPU"
        )
    if found[0] < int(torch.version.cuda.split(".")[0]):
        return (
            f"torch sees no GPU: the NVIDIA driver serves CUDA {found[0]}.{found[1]}, torch {torch.__version__} needs "
            f"{torch.version.cuda}; update the driver, or install a torch for CUDA {found[0]}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"torch sees no GPU: CUDA_VISIBLE_DEVICES is {visible!r}; unset it, or name a GPU that nvidia-smi lists"
    return "torch sees no GPU, although there is a driver; see what nvidia-smi says"
