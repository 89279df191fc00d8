"""Runs the CUDA device code on the CPU, under AddressSanitizer and UBSan: see emu/cuda_emu.h."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

EMU = Path(__file__).parent / "emu"
ROOT = EMU.parents[1]
INCLUDES = [EMU, EMU / "include", ROOT / "cuda_src"]
FLAGS = [
    *("-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
]


@pytest.mark.parametrize("source", sorted(EMU.glob("test_*.cpp")), ids=lambda path: path.stem)
def test_emulated(source: Path, tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the emulation with")
    program = tmp_path / source.stem
    includes = [f"-I{folder}" for folder in INCLUDES]
    _run([compiler, *FLAGS, *includes, str(source), "-o", str(program)])
    _run([str(program)])


def _run(command: list[str]) -> None:
    # Leaks are not what these programs are after, and their detector fails where ptrace is forbidden.
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
