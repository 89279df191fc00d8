"""CI's check of wheels: a good one passes, and each way of spoiling it is named."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import gnn_spmm_plugin as gsp

ROOT = Path(__file__).parents[1]
INFO = f"gnn_spmm_plugin-{gsp.__version__}.dist-info"
CPU = "gnn_spmm_plugin/_gnn_spmm_cpu.so"
METADATA = f"""\
Metadata-Version: 2.4
Name: gnn-spmm-plugin
Version: {gsp.__version__}
License-Expression: Apache-2.0
License-File: LICENSE
Classifier: Operating System :: POSIX :: Linux
Classifier: Typing :: Typed
Requires-Python: >=3.10
Requires-Dist: torch>=2.10
Requires-Dist: numpy
Requires-Dist: scipy; extra == 'test'
"""
Files = dict[str, bytes]


@pytest.fixture(scope="module")
def check_wheel() -> ModuleType:
    if shutil.which("readelf") is None:
        pytest.skip("no readelf (binutils)")
    spec = importlib.util.spec_from_file_location("check_wheel", ROOT / ".ci" / "check_wheel.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library(name: str) -> Path:
    found = [Path(place) / name for place in gsp.__path__ if (Path(place) / name).exists()]
    if not found:
        pytest.skip(f"{name} is not beside the package")
    return found[0]


def compiled(path: Path, source: str, *options: str) -> bytes:
    """A library that needs torch's as ours do."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    stub = path.parent / "libtorch_cpu.so"
    make = ["g++", "-shared", "-fPIC", "-fvisibility=hidden", "-x", "c++", "-"]
    subprocess.run([*make, "-nostdlib", "-o", stub], input="", text=True, check=True)
    flags = ["-Wl,--no-as-needed", f"-L{path.parent}", "-ltorch_cpu", *options]
    subprocess.run([*make, "-o", path, *flags], input=source, text=True, check=True)
    return path.read_bytes()


@pytest.fixture
def files() -> Files:
    """What a wheel of this repository holds, with the CPU library alone."""
    package = ROOT / "gnn_spmm_plugin"
    held = (p for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    skip = ("_build_info.json", "_gnn_spmm_cpu.so", "_gnn_spmm_cuda.so")
    found = {p.relative_to(ROOT).as_posix(): p.read_bytes() for p in held if p.name not in skip}
    found[CPU] = library("_gnn_spmm_cpu.so").read_bytes()
    found["gnn_spmm_plugin/_build_info.json"] = json.dumps({"cuda": False}).encode()
    found[f"{INFO}/METADATA"] = METADATA.encode()
    found[f"{INFO}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-linux_x86_64\n"
    found[f"{INFO}/entry_points.txt"] = b"[console_scripts]\ngnn-spmm = gnn_spmm_plugin.cli:main\n"
    found[f"{INFO}/licenses/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    return found


def written(files: Files, folder: Path, name: str = "") -> Path:
    path = folder / (name or f"gnn_spmm_plugin-{gsp.__version__}-py3-none-linux_x86_64.whl")
    record = f"{INFO}/RECORD"
    lines = []
    for file, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{file},sha256={digest},{len(content)}\n")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for file, content in {**files, record: "".join([*lines, f"{record},,\n"]).encode()}.items():
            archive.writestr(file, content)
    return path


def test_a_good_wheel_passes(check_wheel: ModuleType, files: Files, tmp_path: Path) -> None:
    path = written(files, tmp_path)
    assert check_wheel.check(path) == []
    script = ROOT / ".ci" / "check_wheel.py"
    done = subprocess.run([sys.executable, script, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "GLIBC 2." in done.stdout, done.stdout + done.stderr


def replace(name: str, old: str, new: str) -> Callable[[Files], None]:
    def spoil(files: Files) -> None:
        assert old.encode() in files[name]
        files[name] = files[name].replace(old.encode(), new.encode())

    return spoil


def add(name: str) -> Callable[[Files], None]:
    return lambda files: files.__setitem__(name, b"")


def drop(name: str) -> Callable[[Files], None]:
    return lambda files: files.__delitem__(name)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (drop("gnn_spmm_plugin/py.typed"), "the wheel lacks gnn_spmm_plugin/py.typed"),
        (drop("gnn_spmm_plugin/data/cora.npz"), "the wheel lacks gnn_spmm_plugin/data/cora.npz"),
        (drop(f"{INFO}/licenses/LICENSE"), f"the wheel lacks {INFO}/licenses/LICENSE"),
        (drop(CPU), f"the wheel lacks {CPU}"),
        (add("tests/test_graph.py"), "the wheel has tests/test_graph.py, which is not of the package"),
        (add("gnn_spmm_plugin/graph.cpp.o"), "the wheel has gnn_spmm_plugin/graph.cpp.o, which"),
        (
            replace("gnn_spmm_plugin/_build_info.json", "false", "true"),
            "the wheel lacks gnn_spmm_plugin/_gnn_spmm_cuda.so",
        ),
        (replace(f"{INFO}/METADATA", "License-Expression: Apache-2.0\n", ""), "METADATA has License-Expression: []"),
        (replace(f"{INFO}/METADATA", "Requires-Dist: torch>=2.10\n", ""), "METADATA requires ['numpy']"),
        (replace(f"{INFO}/METADATA", "; extra == 'test'", ""), "METADATA requires ['numpy', 'scipy', 'torch>=2.10']"),
        (replace(f"{INFO}/METADATA", f"Version: {gsp.__version__}", "Version: 9"), "METADATA has Version: ['9']"),
        (replace(f"{INFO}/METADATA", " :: Linux", " :: BSD"), "METADATA lacks the classifier Operating System"),
        (replace(f"{INFO}/WHEEL", "py3-none", "cp311-cp311"), "WHEEL has the tags ['cp311-cp311-linux_x86_64']"),
    ],
)
def test_a_spoilt_wheel_is_refused(
    check_wheel: ModuleType, files: Files, tmp_path: Path, spoil: Callable[[Files], None], says: str
) -> None:
    spoil(files)
    faults = check_wheel.check(written(files, tmp_path))
    assert len(faults) == 1 and faults[0].startswith(says), faults


def test_a_wheel_of_another_name_or_size_or_content(
    check_wheel: ModuleType, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"gnn_spmm_plugin-{gsp.__version__}-cp311-cp311-linux_x86_64.whl"
    faults = check_wheel.check(written(files, tmp_path, name))
    assert len(faults) == 1 and f"is called {name}" in faults[0]
    path = written(files, tmp_path)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("gnn_spmm_plugin/py.typed", b"changed")
    assert check_wheel.check(path) == ["RECORD has another hash of gnn_spmm_plugin/py.typed"]
    path = written(files, tmp_path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("more", b"")
    assert "RECORD does not name more" in check_wheel.check(path)
    monkeypatch.setitem(check_wheel.BUDGET, "wheel", 1)
    assert "MiB, at most 1 are allowed" in check_wheel.check(written(files, tmp_path))[0]


BAD_LIBRARIES = {
    "has a search path: /opt/torch/lib": ("", ["-Wl,-rpath,/opt/torch/lib", "-Wl,--disable-new-dtags"]),
    "has a search path: $ORIGIN": ("", ["-Wl,-rpath,$ORIGIN"]),
    "needs libresolv.so.2": ("", ["-lresolv"]),
    "needs Py_Initialize, a symbol of Python": ('extern "C" void Py_Initialize(); void f() { Py_Initialize(); }', []),
    "needs _ZN2at5emptyEv, of torch's C++ ABI": ("namespace at { void empty(); } void f() { at::empty(); }", []),
    "exports gsp_spmm": ('extern "C" __attribute__((visibility("default"))) void gsp_spmm() {}', []),
    "names /home/someone/src/spmm.cpp, a path of the machine that built it": (
        'extern "C" const char* f() { return "/home/someone/src/spmm.cpp"; }',
        [],
    ),
    f"names {ROOT}, a path of the machine that built it": (f'extern "C" const char* f() {{ return "{ROOT}"; }}', []),
    "has debug information: it is not stripped": ("void f() {}", ["-g"]),
}


@pytest.mark.parametrize("says", BAD_LIBRARIES)
def test_a_bad_library_is_refused(check_wheel: ModuleType, tmp_path: Path, says: str) -> None:
    source, options = BAD_LIBRARIES[says]
    path = tmp_path / "_gnn_spmm_cpu.so"
    source = source.replace("void f()", 'extern "C" void f()')
    compiled(path, source.replace('extern "C" ', 'extern "C" __attribute__((used)) '), *options)
    faults = check_wheel.faults_of_library(path)
    if "debug" in says:  # which names the folder of the build as well
        faults = [fault for fault in faults if "a path of" not in fault]
    assert f"_gnn_spmm_cpu.so {says}" in faults and len(faults) <= 2, faults


def test_a_library_without_torch_or_of_a_newer_system(
    check_wheel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "_gnn_spmm_cpu.so"
    compiled(path, "")
    assert check_wheel.faults_of_library(path) == []
    as_cuda = path.rename(tmp_path / "_gnn_spmm_cuda.so")
    assert check_wheel.faults_of_library(as_cuda) == [
        "_gnn_spmm_cuda.so does not name libtorch_cuda.so, without which it is not loaded"
    ]
    real = library("_gnn_spmm_cpu.so")
    monkeypatch.setitem(check_wheel.NEWEST, "GLIBC", (2, 17))
    monkeypatch.setitem(check_wheel.NEWEST, "GLIBCXX", (3, 4, 9))
    monkeypatch.setitem(check_wheel.BUDGET, "_gnn_spmm_cpu.so", 1)
    faults = check_wheel.faults_of_library(real)
    assert any("needs GLIBC_2." in f and "at most 2.17 is allowed" in f for f in faults)
    assert any("needs GLIBCXX_3.4." in f and "at most 3.4.9 is allowed" in f for f in faults)
    assert any("at most 1 are allowed" in f for f in faults)


@pytest.mark.parametrize("name", ["_gnn_spmm_cpu.so", "_gnn_spmm_cuda.so"])
def test_the_installed_libraries_pass(check_wheel: ModuleType, name: str) -> None:
    assert check_wheel.faults_of_library(library(name)) == []
