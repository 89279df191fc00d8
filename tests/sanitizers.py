"""Every tool of compute-sanitizer over every CUDA kernel instantiation, and a table of what they found.

    python tests/sanitizers.py [--jobs 8] [--tools memcheck racecheck initcheck synccheck] [--widths 33 256]

Runs tests/sanitize.py under each tool, a process for each dtype and width, `--jobs` of them at a time. First it runs it
once without a tool and asks torch's profiler which kernels ran, and compares that with what the library holds. Exits
with 1 if a tool found anything, a process failed, or there are kernels that never ran.

initcheck follows all kernels, for what torch's have written counts as written; only reads by ours are errors (torch
compares and copies whole buffers, padding included). The other tools follow ours alone. For memcheck and initcheck each
tensor is an allocation of its own: in memory that the caching allocator gives out again, everything has been written.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

PROGRAM = Path(__file__).with_name("sanitize.py")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
DTYPES = ("float32", "float64", "float16", "bfloat16")
WIDTHS = (1, 2, 8, 24, 33, 66, 100, 256, 300)
OURS = "gsp::cuda::"
FOUND = 86  # what compute-sanitizer exits with if it found something

_LINE = re.compile(r"^========= ?(.*)$")
#: Lines that stand at the margin, as reports do, and are none.
_NO_REPORT = re.compile(
    r"COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY|LEAK SUMMARY|SYNCCHECK SUMMARY|"
    r"Target application returned an error|No attachable process|$"
)
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_CALLS = re.compile(r"^(\d+) kernel calls, all right$", re.MULTILINE)
_KERNEL = re.compile(r"gsp::cuda::(\w+)")


@dataclass
class Finding:
    """What a tool said of a process, or of several."""

    calls: int = 0
    errors: int = 0
    others: int = 0  # of kernels that are not ours: not counted
    what: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    def __iadd__(self, other: Finding) -> Finding:
        self.calls += other.calls
        self.errors += other.errors
        self.others += other.others
        self.what += other.what
        self.failed += other.failed
        return self


def read(tool: str, output: str, status: int) -> Finding:
    """What a process printed under a tool, and exited with."""
    found, reports = Finding(), []
    for line in output.splitlines():
        if (match := _LINE.match(line)) is None:
            continue
        text = match[1]
        if not text.startswith(" ") and not _NO_REPORT.match(text):
            reports.append([text])
        elif reports and text.startswith(" "):
            reports[-1].append(text)
    for report in reports:
        named = _KERNEL.search("\n".join(report))
        if tool == "initcheck" and named is None and report[0].startswith("Uninitialized"):
            found.others += 1
            continue
        found.errors += 1
        found.what[f"{report[0].strip()} in {named[1] if named else 'no kernel of ours'}"] += 1
    summary, calls = _SUMMARY.search(output), _CALLS.search(output)
    if calls:
        found.calls = int(calls[1])
    if summary is None:
        found.failed.append(f"exit status {status}, no summary: {output.strip()[-300:]}")
    elif calls is None:
        found.failed.append(f"exit status {status}, the program did not end well: {output.strip()[-300:]}")
    elif status not in (0, FOUND):
        found.failed.append(f"exit status {status}")
    if summary is not None and int(summary[1] or summary[2]) > found.errors + found.others:
        found.errors = int(summary[1] or summary[2]) - found.others  # reports that it counted and did not print
    return found


def run(tool: str, dtype: str, width: int) -> Finding:
    """One process under one tool."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "0"]
    env = dict(os.environ)
    if tool in ("memcheck", "initcheck"):
        env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    if tool != "initcheck":
        command += ["--kernel-name", "kns=gsp"]
    command += [sys.executable, str(PROGRAM), dtype, str(width)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    found = read(tool, done.stdout + done.stderr, done.returncode)
    found.failed = [f"{dtype} {width}: {why}" for why in found.failed]
    return found


def kernels_of(library: Path) -> set[str]:
    """The demangled names of the kernels that a library registers, as it holds them for the CUDA runtime."""
    sections = subprocess.run(["readelf", "-SW", library], capture_output=True, text=True, check=True).stdout
    match = re.search(r" \.rodata +PROGBITS +[0-9a-f]+ ([0-9a-f]+) ([0-9a-f]+) ", sections)
    if match is None:
        return set()
    start, size = int(match[1], 16), int(match[2], 16)
    constants = library.read_bytes()[start : start + size]
    names = re.findall(rb"(?<![\w$.])_ZN3gsp4cuda\w+", constants)
    return {demangled(name.decode()) for name in names}


def demangled(name: str) -> str:
    """As the C++ runtime, which the profiler asks too."""
    runtime = ctypes.CDLL("libstdc++.so.6")
    runtime.__cxa_demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    found = runtime.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
    return name if status.value or not found else str(ctypes.string_at(found).decode())  # not freed: a few KB


def launched(dtypes: list[str], widths: list[int]) -> set[str]:
    """The names of our kernels that the program launches."""
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder) / "names"
        arguments = [*dtypes, *map(str, widths), "--names", str(names)]
        subprocess.run([sys.executable, str(PROGRAM), *arguments], check=True)
        return set(names.read_text().splitlines())


def main() -> int:
    """Prints the coverage and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS))
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time, which share the GPU; default 4")
    parser.add_argument("--no-coverage", action="store_true", help="do not ask the profiler which kernels run")
    args = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 2

    missing: set[str] = set()
    if not args.no_coverage:
        from gnn_spmm_plugin import _native

        library = _native._find("_gnn_spmm_cuda.so")
        if library is None:
            print("the package has no _gnn_spmm_cuda.so", file=sys.stderr)
            return 2
        there, ran = kernels_of(Path(library)), launched(args.dtypes, args.widths)
        missing = there - ran
        print(f"{len(there)} kernels in {library}, {len(there & ran)} of them run here", flush=True)
        for name in sorted(missing):
            print(f"  never: {name}")

    bad = bool(missing)
    print(
        f"{'tool':10}{'processes':>10}{'calls':>9}{'errors':>8}{'of others':>11}{'failed':>8}{'seconds':>9}", flush=True
    )
    for tool in args.tools:
        began, found = time.monotonic(), Finding()
        cases = [(tool, dtype, width) for width in args.widths for dtype in args.dtypes]
        with ThreadPoolExecutor(args.jobs) as pool:
            for one in pool.map(lambda case: run(*case), cases):
                found += one
        seconds = time.monotonic() - began
        print(
            f"{tool:10}{len(cases):10}{found.calls:9}{found.errors:8}{found.others:11}{len(found.failed):8}{seconds:9.0f}",
            flush=True,
        )
        for what, times in found.what.most_common(20):
            print(f"  {times} x {what}")
        for why in found.failed:
            print(f"  failed: {why}")
        bad |= found.errors > 0 or bool(found.failed)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
