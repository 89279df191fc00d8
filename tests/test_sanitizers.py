"""The command that runs compute-sanitizer: what it makes of the tool's reports, by a tool that prints some."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sanitizers

HEAD = "========= COMPUTE-SANITIZER\n1234 kernel calls, all right\n"
CLEAN = HEAD + "========= ERROR SUMMARY: 0 errors\n"
OUT_OF_BOUNDS = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at void gsp::cuda::item_sweep<gsp::cuda::SumOp<float, int, 4, 1, 0>, -1, -1>(T1::Args)+0x2d0
=========     by thread (31,0,0) in block (12,0,0)
=========     Address 0x7f3c7ec000fc is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f3c7ec00000 of size 252 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: [0x32e990] in libcuda.so.1
=========
========= Program hit cudaErrorLaunchFailure (error 719) due to "unspecified launch failure" on CUDA API call to
cudaStreamSynchronize.
=========     Saved host backtrace up to driver entry point at error
=========
========= ERROR SUMMARY: 2 errors
"""
UNINITIALISED = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at 0x88 in void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int, T2)
=========     by thread (98,0,0) in block (194,0,0)
=========     Address 0x7fbbca800000
=========
========= Uninitialized __global__ memory read of size 4 bytes
=========     at 0x1c0 in void gsp::cuda::merge_pairs<float, int>(gsp::cuda::PairArgs<T1, T2>)
=========     by thread (0,0,0) in block (1,0,0)
=========     Address 0x7fbbca800040
=========
1234 kernel calls, all right
========= ERROR SUMMARY: 2 errors
"""
RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at void gsp::cuda::order_rows(const int *, int *)+0x50
=========     and Read access at void gsp::cuda::order_rows(const int *, int *)+0x90 [8 hazards]
=========
1234 kernel calls, all right
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
NO_RACE = HEAD + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
BARRIER = """\
========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in block
=========     at 0x2c8 in void gsp::cuda::scan_counts(const int *, int, int *)
=========     by thread (17,0,0) in block (0,0,0)
=========
1234 kernel calls, all right
========= ERROR SUMMARY: 1 error
"""


@pytest.mark.parametrize(
    ("tool", "output", "status", "errors", "others", "failed"),
    [
        ("memcheck", CLEAN, 0, 0, 0, 0),
        ("racecheck", NO_RACE, 0, 0, 0, 0),
        ("memcheck", OUT_OF_BOUNDS, 86, 2, 0, 1),  # and the program did not come to its end
        ("initcheck", UNINITIALISED, 86, 1, 1, 0),
        ("racecheck", RACE, 86, 1, 0, 0),
        ("synccheck", BARRIER, 86, 1, 0, 0),
        ("memcheck", CLEAN, 139, 0, 0, 1),
        ("memcheck", "Error: No supported GPUs were detected\n", 1, 0, 0, 1),
        (
            "memcheck",
            "========= COMPUTE-SANITIZER\nwrong result: spmm\n========= ERROR SUMMARY: 0 errors\n",
            1,
            0,
            0,
            1,
        ),
        ("memcheck", HEAD + "========= ERROR SUMMARY: 7 errors\n", 86, 7, 0, 0),  # counted, not printed
    ],
)
def test_reports_are_read(tool: str, output: str, status: int, errors: int, others: int, failed: int) -> None:
    found = sanitizers.read(tool, output, status)
    assert (found.errors, found.others, len(found.failed)) == (errors, others, failed), found
    assert found.calls == (1234 if "all right" in output else 0)


def test_what_was_found_names_the_kernel() -> None:
    found = sanitizers.read("memcheck", OUT_OF_BOUNDS, 86)
    assert found.what["Invalid __global__ read of size 16 bytes in item_sweep"] == 1
    assert "merge_pairs" in next(iter(sanitizers.read("initcheck", UNINITIALISED, 86).what))


def fake(folder: Path, reports: dict[str, tuple[str, int]]) -> dict[str, str]:
    """An environment whose compute-sanitizer prints these, by tool, and notes how it was called."""
    for tool, (text, _) in reports.items():
        (folder / tool).write_text(text)
    cases = "".join(f'  {tool}) cat "{folder / tool}"; exit {status};;\n' for tool, (_, status) in reports.items())
    program = folder / "compute-sanitizer"
    program.write_text(
        f'#!/bin/sh\necho "$@" "caching=$PYTORCH_NO_CUDA_MEMORY_CACHING" >>"{folder}/calls"\ncase $2 in\n{cases}esac\n'
    )
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def command(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    where = [sys.executable, sanitizers.__file__, "--no-coverage", "--widths", "2", "33"]
    return subprocess.run([*where, *arguments], env=env, capture_output=True, text=True, check=False)


def test_a_clean_run(tmp_path: Path) -> None:
    clean = {tool: (NO_RACE if tool == "racecheck" else CLEAN, 0) for tool in sanitizers.TOOLS}
    done = command(fake(tmp_path, clean))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split()[0]: line.split()[1:5] for line in done.stdout.splitlines()[1:]}
    assert rows == {tool: ["8", str(8 * 1234), "0", "0"] for tool in sanitizers.TOOLS}
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 32
    for call in calls:
        tool = call.split()[1]
        assert ("caching=1" in call) == (tool in ("memcheck", "initcheck"))
        assert ("--kernel-name kns=gsp" in call) == (tool != "initcheck")  # else what torch writes would not count


def test_what_is_found_makes_it_fail(tmp_path: Path) -> None:
    env = fake(tmp_path, {"memcheck": (CLEAN, 0), "racecheck": (RACE, 86)})
    done = command(env, "--tools", "memcheck", "racecheck", "--dtypes", "float16")
    assert done.returncode == 1
    assert "2 x Error: Race reported between Write access" in done.stdout and "order_rows" in done.stdout
    assert command(env, "--tools", "memcheck").returncode == 0
    env = fake(tmp_path, {"memcheck": ("", 127)})
    done = command(env, "--tools", "memcheck")
    assert done.returncode == 1 and "failed: float32 2: exit status 127, no summary" in done.stdout


def test_without_the_tool(tmp_path: Path) -> None:
    done = command({**os.environ, "PATH": str(tmp_path)})
    assert done.returncode == 2 and "compute-sanitizer is not on PATH" in done.stderr


def test_kernels_are_those_that_a_library_registers(tmp_path: Path) -> None:
    """Names as constants, which nvcc's registration has; symbols of host functions are none."""
    if shutil.which("g++") is None or shutil.which("readelf") is None:
        pytest.skip("needs g++ and readelf")
    kernel, other = "_ZN3gsp4cuda11scan_countsEPKiiPi", "_ZN3cub4scanEv"
    source = f"""
namespace gsp {{ namespace cuda {{ void launcher(int) {{}} }} }}
extern "C" const char* f(int i) {{ return i ? "{kernel}" : "{other}"; }}
"""
    path = tmp_path / "library.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", path], input=source, text=True, check=True)
    assert sanitizers.kernels_of(path) == {"gsp::cuda::scan_counts(int const*, int, int*)"}


@pytest.mark.gpu
@pytest.mark.slow
def test_every_kernel_runs_here() -> None:
    """Without a tool: each kernel of the library is launched by the program that the tools watch."""
    from gnn_spmm_plugin import _native

    library = _native._find("_gnn_spmm_cuda.so")
    assert library is not None
    there = sanitizers.kernels_of(Path(library))
    never = there - sanitizers.launched(list(sanitizers.DTYPES), list(sanitizers.WIDTHS))
    assert len(there) > 500 and not never, sorted(never)
