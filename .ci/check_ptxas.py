"""Reads what `nvcc -Xptxas=-v` printed and fails on any kernel of ours that spills registers or uses local memory.

Kernels of CUB, which comes with the toolkit, are named only: its scan keeps 16 bytes in local memory on sm_90.

Usage: check_ptxas.py BUILD_LOG. Prints, for each architecture, the kernels with the most registers.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SHOWN = 3

ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)' for '(?P<arch>\w+)'")
MEMORY = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)
REGISTERS = re.compile(r"Used (?P<count>\d+) registers")
LIBRARY = "_ZN3cub"  # the namespace that a mangled name begins with


@dataclass
class Kernel:
    """What ptxas said about one kernel on one architecture."""

    name: str
    arch: str
    local_bytes: int = 0
    registers: int = 0


def parse(log: str) -> list[Kernel]:
    """Collects the kernels of a build log.

    The properties of a function that was not inlined count for the kernel that is being compiled.
    """
    kernels: list[Kernel] = []
    for line in log.splitlines():
        if entry := ENTRY.search(line):
            kernels.append(Kernel(entry["name"], entry["arch"]))
        elif kernels and (memory := MEMORY.search(line)):
            kernels[-1].local_bytes += sum(map(int, memory.groups()))
        elif kernels and (registers := REGISTERS.search(line)):
            kernels[-1].registers = int(registers["count"])
    return kernels


def demangle(names: list[str]) -> list[str]:
    """Makes C++ names readable where c++filt is there to do it."""
    if shutil.which("c++filt") is None:
        return names
    text = "\n".join(names)
    done = subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def _print_largest(kernels: list[Kernel]) -> None:
    largest = sorted(kernels, key=lambda kernel: -kernel.registers)[:SHOWN]
    for kernel, name in zip(largest, demangle([k.name for k in largest]), strict=True):
        print(f"  {kernel.registers:4d} registers  {name}")


def _print_spilling(kernels: list[Kernel]) -> None:
    places: dict[str, list[str]] = {}
    for kernel in kernels:
        places.setdefault(kernel.name, []).append(f"{kernel.arch} {kernel.local_bytes} B")
    print(f"{len(places)} kernels spill registers or keep arrays in local memory:")
    for where, name in zip(places.values(), demangle(list(places)), strict=True):
        print(f"  {name}: {', '.join(where)}")


def main() -> int:
    """Prints the summary; returns 1 if a kernel of ours uses local memory or the log names no kernel."""
    kernels = parse(Path(sys.argv[1]).read_text(encoding="utf-8", errors="replace"))
    if not kernels:
        print(f"{sys.argv[1]} has no report of ptxas: was it built with -Xptxas=-v?")
        return 1
    for arch in sorted({kernel.arch for kernel in kernels}):
        of_arch = [kernel for kernel in kernels if kernel.arch == arch]
        print(f"{arch}: {len(of_arch)} kernels, the most registers:")
        _print_largest(of_arch)
    spilling = [kernel for kernel in kernels if kernel.local_bytes]
    if spilling:
        _print_spilling(spilling)
    return int(any(not kernel.name.startswith(LIBRARY) for kernel in spilling))


if __name__ == "__main__":
    sys.exit(main())
