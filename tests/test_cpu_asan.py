"""Runs the CPU kernels on exactly sized buffers under AddressSanitizer: see cpu/test_cpu_kernels.cpp."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLAGS = [
    *("-std=c++17", "-O1", "-g1", "-Wall", "-Wno-maybe-uninitialized", "-Wno-uninitialized"),
    *("-fsanitize=address", "-fno-sanitize-recover=all"),
]
# Best first, each with the flags of cuda_src/CMakeLists.txt and a flag of /proc/cpuinfo.
INSTRUCTION_SETS = {
    "avx512dq": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mf16c", "-mfma"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "": [],
}


@pytest.mark.slow
def test_kernels_stay_inside_their_buffers(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the kernels with")
    info = Path("/proc/cpuinfo")
    here = info.read_text().split() if info.exists() else []
    name = next(name for name in INSTRUCTION_SETS if name in here or not name)
    program = tmp_path / "program"
    sources = [
        Path(__file__).parent / "cpu" / "test_cpu_kernels.cpp",
        ROOT / "cuda_src" / "cpu" / "schedule.cpp",
        ROOT / "cuda_src" / "cpu" / "build.cpp",
    ]
    flags = [*FLAGS, *INSTRUCTION_SETS[name], f"-I{ROOT / 'cuda_src'}"]
    _run([compiler, *flags, *map(str, sources), "-o", str(program)])
    _run([str(program)])


def _run(command: list[str]) -> None:
    # Leaks are not what this is after, and their detector fails where ptrace is forbidden.
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
