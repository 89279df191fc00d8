"""What the build promises: libraries that fit every Python and torch, and honest facts beside them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def _package_file(name: str) -> Path | None:
    spec = importlib.util.find_spec("gnn_spmm_plugin")
    assert spec is not None and spec.submodule_search_locations, "the package is not installed"
    found = [Path(place) / name for place in spec.submodule_search_locations]
    return next((path for path in found if path.exists()), None)


@pytest.fixture
def build_info() -> dict[str, Any]:
    path = _package_file("_build_info.json")
    assert path is not None
    info = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(info, dict)
    return info


def test_build_info_says_what_was_built_or_why_not(build_info: dict[str, Any]) -> None:
    assert build_info["torch_target"] == "2.10"
    assert re.match(r"2\.\d+|unknown", build_info["torch_headers"])
    assert build_info["cxx"] and build_info["machine"] and build_info["build_type"]
    if build_info["cuda"]:
        assert re.match(r"\d+\.\d+", build_info["cuda_version"])
        assert re.fullmatch(r"(\d+[af]?(\+PTX)? ?)+", build_info["cuda_archs"])
    else:
        assert build_info["cuda_reason"]


def test_wheel_fits_every_python_3() -> None:
    try:
        wheel = importlib.metadata.distribution("gnn-spmm-plugin").read_text("WHEEL")
    except importlib.metadata.PackageNotFoundError:
        wheel = None
    if wheel is None:
        pytest.skip("built in place, not installed from a wheel")
    assert re.search(r"^Tag: py3-none-linux_\w+$", wheel, re.MULTILINE)


def test_version_is_the_same_wherever_it_is_written() -> None:
    written = {
        "pyproject.toml": r'^version = "(.+)"$',
        "CITATION.cff": r"^version: (.+)$",
        "gnn_spmm_plugin/__init__.py": r'^__version__ = "(.+)"$',
    }
    found = {}
    for name, pattern in written.items():
        match = re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        assert match is not None, name
        found[name] = match[1]
    assert len(set(found.values())) == 1, found


# ---- Configuring, without building ----


def _configure(tmp_path: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    for tool in ("cmake", "g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool}")
    ours = ("GSP_CUDA", "GSP_TORCH_INCLUDE", "TORCH_CUDA_ARCH_LIST", "CUDACXX")
    env = {name: value for name, value in os.environ.items() if name not in ours} | environment
    python = f"-DPython_EXECUTABLE={sys.executable}"
    command = ["cmake", "-S", str(ROOT / "cuda_src"), "-B", str(tmp_path), python, *options]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def _recorded(folder: Path) -> dict[str, Any]:
    info = json.loads((folder / "_build_info.json").read_text(encoding="utf-8"))
    assert isinstance(info, dict)
    return info


def _words(text: str) -> str:
    return " ".join(text.split())  # CMake wraps its messages


@pytest.fixture
def broken_nvcc(tmp_path: Path) -> str:
    program = tmp_path / "nvcc"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    return str(program)


def test_without_nvcc_only_the_cpu_library_is_built(tmp_path: Path) -> None:
    done = _configure(tmp_path, "-DGSP_NVCC=")  # empty: the search has been done and found none
    assert done.returncode == 0, done.stderr
    assert "building the CPU library ONLY: no nvcc was found" in _words(done.stderr)
    assert _recorded(tmp_path)["cuda"] is False
    assert "no nvcc was found" in _recorded(tmp_path)["cuda_reason"]


def test_with_a_broken_nvcc_only_the_cpu_library_is_built(tmp_path: Path, broken_nvcc: str) -> None:
    done = _configure(tmp_path / "build", CUDACXX=broken_nvcc)
    assert done.returncode == 0, done.stderr
    assert _recorded(tmp_path / "build")["cuda"] is False
    assert f"does not work: {broken_nvcc}" in _recorded(tmp_path / "build")["cuda_reason"]


def test_cuda_on_insists(tmp_path: Path, broken_nvcc: str) -> None:
    done = _configure(tmp_path / "none", "-DGSP_NVCC=", GSP_CUDA="ON")
    assert done.returncode != 0
    assert "GSP_CUDA=ON, but no nvcc was found" in _words(done.stderr)
    done = _configure(tmp_path / "broken", "-DGSP_CUDA=ON", CUDACXX=broken_nvcc)
    assert done.returncode != 0
    assert "GSP_CUDA=ON, but the nvcc found at build time does not work" in _words(done.stderr)


def test_cuda_off_does_not_look(tmp_path: Path) -> None:
    done = _configure(tmp_path, GSP_CUDA="OFF")
    assert done.returncode == 0 and "WARNING" not in done.stderr.upper(), done.stderr
    assert "switched off" in _recorded(tmp_path)["cuda_reason"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"GSP_CUDA": "maybe"}, "GSP_CUDA=maybe, want AUTO, ON or OFF"),
        ({"TORCH_CUDA_ARCH_LIST": "9.0 hopper"}, "TORCH_CUDA_ARCH_LIST: can't read 'hopper'"),
        ({"GSP_TORCH_INCLUDE": "/nowhere"}, "not the include folder of a torch >= 2.10"),
    ],
)
def test_unreadable_switches_are_named(tmp_path: Path, option: dict[str, str], message: str) -> None:
    done = _configure(tmp_path, **option)
    assert done.returncode != 0
    assert message in _words(done.stderr)


# ---- The backend's search for torch ----


@pytest.fixture
def torch_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module, looking only into ``tmp_path``."""
    monkeypatch.syspath_prepend(str(ROOT / "build_backend"))
    monkeypatch.delenv("GSP_TORCH_INCLUDE", raising=False)
    module = importlib.import_module("torch_headers")
    monkeypatch.setattr(module, "_site_folders", lambda: [tmp_path / "first", tmp_path / "second"])
    return module


def _lay_torch(site_folder: Path, version: str) -> Path:
    stable = site_folder / "torch" / "include" / "torch" / "csrc" / "stable"
    stable.mkdir(parents=True)
    (stable / "library.h").touch()
    (site_folder / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")
    return site_folder / "torch" / "include"


def test_headers_of_an_old_torch_are_passed_over(torch_headers: ModuleType, tmp_path: Path) -> None:
    assert torch_headers.find() is None
    _lay_torch(tmp_path / "first", "2.9.1+cpu")
    assert torch_headers.find() is None
    include = _lay_torch(tmp_path / "second", "2.10.0+cu128")
    assert torch_headers.find() == (include, "2.10.0+cu128")


def test_headers_of_an_override_win(torch_headers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _lay_torch(tmp_path / "first", "2.10.0")
    include = _lay_torch(tmp_path / "elsewhere", "2.13.0")
    monkeypatch.setenv("GSP_TORCH_INCLUDE", str(include))
    assert torch_headers.find() == (include, "2.13.0")


def test_backend_asks_for_torch_only_where_there_is_none(
    torch_headers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("scikit_build_core")
    monkeypatch.chdir(ROOT)
    backend = importlib.import_module("backend")
    for hook in (backend.get_requires_for_build_wheel, backend.get_requires_for_build_editable):
        assert "torch>=2.10" in hook()
    _lay_torch(tmp_path / "first", "2.13.0")
    for hook in (backend.get_requires_for_build_wheel, backend.get_requires_for_build_editable):
        assert not any("torch" in requirement for requirement in hook())


# ---- CI's reader of ptxas reports ----

PTXAS_REPORT = """\
ptxas info    : Compiling entry function '_Z3arrPfi' for 'sm_80'
ptxas info    : Function properties for _Z3arrPfi
    256 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 31 registers, used 0 barriers, 364 bytes cmem[0]
ptxas info    : Compiling entry function '_Z2okPf' for 'sm_90'
ptxas info    : Function properties for _Z2okPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 360 bytes cmem[0]
"""


@pytest.mark.parametrize(("skip", "status"), [(0, 1), (4, 0), (8, 1)], ids=["spill", "none", "empty"])
def test_ptxas_report_fails_on_local_memory(skip: int, status: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(PTXAS_REPORT.splitlines()[skip:]))
    script = ROOT / ".ci" / "check_ptxas.py"
    done = subprocess.run([sys.executable, script, log], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    if skip == 0:
        assert "sm_80 268 B" in done.stdout and "8 registers" in done.stdout
        # CUB's own kernels are named, and forgiven
        log.write_text(PTXAS_REPORT.replace("'_Z3arrPfi'", "'_ZN3cub3arrEPfi'"))
        done = subprocess.run([sys.executable, script, log], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "268 B" in done.stdout
