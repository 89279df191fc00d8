"""Reads a wheel and fails on anything that would surprise the machine that it is installed on.

Usage: check_wheel.py WHEEL. Needs readelf (binutils). Prints what the libraries ask of a system, then every fault.

Of each library: the newest glibc and libstdc++ that it needs, which other libraries, no search path of its own, no
Python symbols and none of torch's C++ ABI (either would tie it to one version), no path of the machine that built it,
no debug information, a size. Of the wheel: its tag, metadata and licence, hashes, and that it holds the package as it
stands in this repository with the libraries, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "gnn_spmm_plugin"
#: Ubuntu 22.04, Debian 12, RHEL 9.
NEWEST = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 26), "CXXABI": (1, 3, 9), "GCC": (4, 2)}
#: MiB. A wheel that the default index would refuse has 100.
BUDGET = {"_gnn_spmm_cpu.so": 8, "_gnn_spmm_cuda.so": 25, "wheel": 32}
#: Part of every system that has glibc. No libcudart: it is linked statically, for one library to serve CUDA 12 and 13.
SYSTEM = re.compile(r"(libstdc\+\+|libm|libgcc_s|libc|libpthread|libdl|librt|ld-linux-x86-64)\.so\.\d+")
TORCH = {"_gnn_spmm_cpu.so": {"libtorch_cpu.so"}, "_gnn_spmm_cuda.so": {"libtorch_cpu.so", "libtorch_cuda.so"}}
#: Where things are built; what CUDA's own runtime looks into at run time (/dev, /proc, /sys, /tmp/nvidia-mps) is not.
FOLDERS = re.compile(rb"/(?:home|root|work|build|builds|mnt|Users|opt|usr/local|tmp/(?:pip|tmp|build))[-\w]*/[\w./+-]+")
TAG = "py3-none-linux_x86_64"
METADATA = {
    "License-Expression": ["Apache-2.0"],
    "License-File": ["LICENSE"],
    "Requires-Python": [">=3.10"],
}
REQUIRED = {"torch>=2.10", "numpy"}
CLASSIFIERS = {"Operating System :: POSIX :: Linux", "Typing :: Typed"}


def _readelf(path: Path, *options: str) -> str:
    return subprocess.run(["readelf", "-W", *options, str(path)], capture_output=True, text=True, check=True).stdout


def floors(path: Path) -> dict[str, tuple[int, ...]]:
    """The newest version of each set of system symbols that a library needs: ``{"GLIBC": (2, 32), ...}``."""
    found: dict[str, tuple[int, ...]] = {}
    for name, version in re.findall(r"Name: ([A-Z]+)_([\d.]+) ", _readelf(path, "-V")):
        found[name] = max(found.get(name, ()), tuple(map(int, version.split("."))))
    return found


def faults_of_library(path: Path) -> list[str]:
    """Everything that is wrong with a compiled library, by its name; one line each."""
    name, content = path.name, path.read_bytes()
    faults = []
    for symbols, version in floors(path).items():
        newest = NEWEST.get(symbols)
        if newest is None or version > newest:
            allowed = "none" if newest is None else ".".join(map(str, newest))
            faults.append(f"needs {symbols}_{'.'.join(map(str, version))}, at most {allowed} is allowed")
    dynamic = _readelf(path, "-d")
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
    of_torch = TORCH.get(name, set())
    faults += [f"needs {other}" for other in sorted(needed - of_torch) if not SYSTEM.fullmatch(other)]
    faults += [f"does not name {other}, without which it is not loaded" for other in sorted(of_torch - needed)]
    faults += [f"has a search path: {line}" for line in re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic)]
    symbols_of = [line.split() for line in _readelf(path, "--dyn-syms").splitlines()]
    undefined = [words[7].split("@")[0] for words in symbols_of if len(words) > 7 and words[6] == "UND"]
    faults += [f"needs {s}, a symbol of Python" for s in undefined if re.match(r"_?Py[A-Z_]", s)]
    faults += [f"needs {s}, of torch's C++ ABI" for s in undefined if re.match(r"_ZN?K?(2at|3c10|5torch)", s)]
    exported = [words[7] for words in symbols_of if len(words) > 7 and words[6].isdecimal() and words[4] != "LOCAL"]
    faults += [f"exports {s}" for s in exported if "gsp" in s or "spmm" in s]
    if ".debug_info" in _readelf(path, "-S"):
        faults.append("has debug information: it is not stripped")
    paths = {found.decode() for found in FOLDERS.findall(content)}
    if bytes(ROOT) in content:
        paths.add(str(ROOT))
    faults += [f"names {found}, a path of the machine that built it" for found in sorted(paths)]
    most = BUDGET.get(name)
    if most is not None and len(content) > most << 20:
        faults.append(f"has {len(content) / 2**20:.1f} MiB, at most {most} are allowed")
    return [f"{name} {fault}" for fault in faults]


def _files_of_package() -> set[str]:
    """What the repository has of the package; what a build or a run leaves there is not of it."""
    files = (p for p in (ROOT / PACKAGE).rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    built = {"_build_info.json", *TORCH}
    return {p.relative_to(ROOT).as_posix() for p in files if p.name not in built}


def _faults_of_files(names: set[str], info: str, with_cuda: bool) -> list[str]:
    expected = _files_of_package() | {f"{PACKAGE}/_gnn_spmm_cpu.so", f"{PACKAGE}/_build_info.json"}
    expected |= {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    if with_cuda:
        expected.add(f"{PACKAGE}/_gnn_spmm_cuda.so")
    lacking = [f"the wheel lacks {name}" for name in sorted(expected - names)]
    return lacking + [f"the wheel has {name}, which is not of the package" for name in sorted(names - expected)]


def _faults_of_metadata(metadata: str, wheel: str, version: str) -> list[str]:
    fields, faults = HeaderParser().parsestr(metadata), []
    for name, expected in {**METADATA, "Version": [version], "Name": ["gnn-spmm-plugin"]}.items():
        if (got := fields.get_all(name, [])) != expected:
            faults.append(f"METADATA has {name}: {got}, expected {expected}")
    required = {r for r in fields.get_all("Requires-Dist", []) if "extra ==" not in r}
    if required != REQUIRED:
        faults.append(f"METADATA requires {sorted(required)}, expected {sorted(REQUIRED)}")
    lacking = CLASSIFIERS - set(fields.get_all("Classifier", []))
    faults += [f"METADATA lacks the classifier {name}" for name in sorted(lacking)]
    tags = HeaderParser().parsestr(wheel).get_all("Tag", [])
    return faults if tags == [TAG] else [*faults, f"WHEEL has the tags {tags}, expected {TAG}"]


def _faults_of_record(archive: zipfile.ZipFile, record: str) -> list[str]:
    faults, named = [], set()
    for line in archive.read(record).decode().splitlines():
        name, digest, _ = line.rsplit(",", 2)
        named.add(name)
        if name == record or name not in archive.namelist():
            continue
        got = base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest()).rstrip(b"=").decode()
        if digest != f"sha256={got}":
            faults.append(f"RECORD has another hash of {name}")
    return faults + [f"RECORD does not name {name}" for name in archive.namelist() if name not in named]


def check(path: Path) -> list[str]:
    """Everything that is wrong with a wheel; one line each."""
    faults, version = [], path.name.split("-")[1]
    if path.name != f"{PACKAGE}-{version}-{TAG}.whl":
        faults.append(f"the wheel is called {path.name}, expected {PACKAGE}-{version}-{TAG}.whl")
    if path.stat().st_size > BUDGET["wheel"] << 20:
        faults.append(f"the wheel has {path.stat().st_size / 2**20:.1f} MiB, at most {BUDGET['wheel']} are allowed")
    info = f"{PACKAGE}-{version}.dist-info"
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        names = set(archive.namelist())
        built = json.loads(archive.read(f"{PACKAGE}/_build_info.json"))
        faults += _faults_of_files(names, info, built["cuda"])
        faults += _faults_of_metadata(
            archive.read(f"{info}/METADATA").decode(), archive.read(f"{info}/WHEEL").decode(), version
        )
        faults += _faults_of_record(archive, f"{info}/RECORD")
        for name in sorted(names):
            if name.endswith(".so"):
                library = Path(archive.extract(name, folder))
                needs = (f"{symbols} {'.'.join(map(str, v))}" for symbols, v in sorted(floors(library).items()))
                print(f"{library.name}: {library.stat().st_size / 2**20:.1f} MiB, needs {', '.join(needs)}")
                faults += faults_of_library(library)
    return faults


def main() -> int:
    """Prints the faults; returns 1 if there is any."""
    path = Path(sys.argv[1])
    faults = check(path)
    print(f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB, {len(faults)} faults")
    for fault in faults:
        print(f"  {fault}")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
