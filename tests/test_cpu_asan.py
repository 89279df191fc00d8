"""Runs the CPU kernels on exactly sized buffers under AddressSanitizer and UBSan: see cpu/test_cpu_kernels.cpp."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "cuda_src" / "cpu"
FLAGS = [
    *("-std=c++17", "-O1", "-g1", "-Wall", "-Wno-maybe-uninitialized", "-Wno-uninitialized"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
]
# One instruction set each: the flags of cuda_src/CMakeLists.txt.
INSTRUCTION_SETS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mf16c", "-mfma"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_kernels_stay_inside_their_buffers(name: str, tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the kernels with")
    base = [compiler, *FLAGS, f"-I{ROOT / 'cuda_src'}", f"-DGSP_TEST_{name.upper()}"]
    kernels = tmp_path / "kernels.o"
    program = tmp_path / "program"
    flags = INSTRUCTION_SETS[name]
    _run([*base, *flags, "-c", str(SOURCES / f"kernels_{name}.cpp"), "-o", str(kernels)])
    harness = Path(__file__).parent / "cpu" / "test_cpu_kernels.cpp"
    plain = [str(SOURCES / "schedule.cpp"), str(SOURCES / "build.cpp")]
    _run([*base, str(harness), *plain, str(kernels), "-o", str(program)])
    if "not on this machine" in _run([str(program)]):
        pytest.skip(f"this machine has no {name}")


def _run(command: list[str]) -> str:
    # Leaks are not what this is after, and their detector fails where ptrace is forbidden.
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout
