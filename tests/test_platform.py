"""Machines and builds of torch that kernels cannot run on: each is told what is there, what is needed, what to do."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import _native, _platform

ROOT = Path(__file__).parents[1]


def torch_is(monkeypatch: pytest.MonkeyPatch, version: str, cuda: str | None, hip: str | None = None) -> None:
    """torch as it describes itself in such a build; on this machine it sees no GPU."""
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def driver_serves(monkeypatch: pytest.MonkeyPatch, version: int | None, failure: int = 0) -> None:
    """The library of a driver, or none."""

    class Driver:
        def cuDriverGetVersion(self, to: Any) -> int:
            to._obj.value = version
            return failure

    def load(name: str, *args: Any, **kwargs: Any) -> Driver:
        assert name == "libcuda.so.1"
        if version is None:
            raise OSError("libcuda.so.1: cannot open shared object file: No such file or directory")
        return Driver()

    monkeypatch.setattr(ctypes, "CDLL", load)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Which libraries there are; they load."""
    there = {"_gnn_spmm_cpu.so", "_gnn_spmm_cuda.so"}
    monkeypatch.setattr(_native, "cpu_error", None)
    monkeypatch.setattr(_native, "_find", lambda name: name if name in there else None)
    monkeypatch.setattr(_native, "_load", lambda path: None)
    monkeypatch.setattr(_native, "_lacks", lambda path, *names: None)
    monkeypatch.setattr(_native, "build_info", lambda: {"cuda": True, "cuda_version": "13.0.88"})
    return there


def test_rocm(monkeypatch: pytest.MonkeyPatch, libraries: set[str]) -> None:
    torch_is(monkeypatch, "2.10.0+rocm7.1", None, "7.1.25424")
    said = str(_native._load_cuda())
    assert "torch 2.10.0+rocm7.1 is a ROCm build, the kernels are CUDA; use the CPU, or an NVIDIA GPU" in said


def test_torch_without_cuda(monkeypatch: pytest.MonkeyPatch, libraries: set[str]) -> None:
    torch_is(monkeypatch, "2.13.0+cpu", None)
    said = str(_native._load_cuda())
    assert "torch 2.13.0+cpu is a build without CUDA" in said and "need not be built again" in said
    libraries.remove("_gnn_spmm_cuda.so")
    assert "then build this package again with `pip install --force-reinstall" in str(_native._load_cuda())


def test_package_without_cuda(monkeypatch: pytest.MonkeyPatch, libraries: set[str]) -> None:
    torch_is(monkeypatch, "2.13.0+cu130", "13.0")
    libraries.remove("_gnn_spmm_cuda.so")
    monkeypatch.setattr(_native, "build_info", lambda: {"cuda": False, "cuda_reason": "no nvcc was found on PATH"})
    said = str(_native._load_cuda())
    assert "built without CUDA (no nvcc was found on PATH); install the CUDA toolkit" in said
    assert "`GSP_CUDA=ON pip install --force-reinstall --no-deps .`" in said
    off = {"cuda": False, "cuda_reason": "switched off at build time by GSP_CUDA=OFF"}
    monkeypatch.setattr(_native, "build_info", lambda: off)
    assert "by GSP_CUDA=OFF); reinstall with `GSP_CUDA=ON pip install" in str(_native._load_cuda())


@pytest.mark.parametrize(("serves", "fits"), [(12040, False), (13000, True), (13020, True), (14000, True)])
def test_driver_for_the_package(monkeypatch: pytest.MonkeyPatch, libraries: set[str], serves: int, fits: bool) -> None:
    """torch for CUDA 12 runs on a driver that the runtime in our library, of CUDA 13, does not."""
    torch_is(monkeypatch, "2.10.0+cu128", "12.8")
    driver_serves(monkeypatch, serves)
    error = _native._load_cuda()
    if fits:
        assert error is None
        return
    assert error is not None and "the NVIDIA driver serves CUDA 12.4" in error
    assert "the package was built with CUDA 13.0.88; update the driver to one that serves CUDA 13, or" in error
    assert "with a toolkit for CUDA 12: set CUDA_HOME to it, then `pip install" in error
    monkeypatch.setattr(_native, "cuda_error", error)
    with pytest.raises(RuntimeError, match=r"no kernels for cuda:0: the NVIDIA driver serves CUDA 12\.4"):
        _native.require(torch.device("cuda:0"))


def reasons() -> list[str]:
    return next(k["reasons"] for k in gsp.kernels() if k["name"] == "csr_dual")  # type: ignore[return-value]


def test_no_driver(monkeypatch: pytest.MonkeyPatch, libraries: set[str]) -> None:
    torch_is(monkeypatch, "2.13.0+cu130", "13.0")
    driver_serves(monkeypatch, None)
    assert _native._load_cuda() is None  # the library loads, and the driver may come
    monkeypatch.setattr(_native, "cuda_error", None)
    assert reasons() == [
        "torch sees no GPU: there is no NVIDIA driver here (libcuda.so.1 does not load); install one until nvidia-smi "
        "runs, or use the CPU"
    ]
    driver_serves(monkeypatch, 0, failure=34)  # the stub of a toolkit: CUDA_ERROR_STUB_LIBRARY
    assert "there is no NVIDIA driver here" in reasons()[0]


def test_driver_for_torch(monkeypatch: pytest.MonkeyPatch, libraries: set[str]) -> None:
    torch_is(monkeypatch, "2.13.0+cu130", "13.0")
    driver_serves(monkeypatch, 12080)
    monkeypatch.setattr(_native, "cuda_error", None)
    assert reasons() == [
        "torch sees no GPU: the NVIDIA driver serves CUDA 12.8, torch 2.13.0+cu130 needs 13.0; update the driver, or "
        "install a torch for CUDA 12"
    ]
    driver_serves(monkeypatch, 13000)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert reasons() == ["torch sees no GPU: CUDA_VISIBLE_DEVICES is ''; unset it, or name a GPU that nvidia-smi lists"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert reasons() == ["torch sees no GPU, although there is a driver; see what nvidia-smi says"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert reasons() == []


@pytest.mark.parametrize(("system", "name"), [("darwin", "macOS"), ("win32", "Windows"), ("freebsd14", "freebsd14")])
def test_other_systems(monkeypatch: pytest.MonkeyPatch, system: str, name: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    error = _native._load_cpu()
    assert error is not None and error.startswith(f"this is {name} ({platform.machine()}), the package is built for")
    assert "WSL 2" in error
    monkeypatch.setattr(_native, "cpu_error", error)
    assert _native._load_cuda() == error
    with pytest.raises(RuntimeError, match=rf"no kernels for cpu: this is {name}"):
        gsp.Graph.from_edge_index(torch.tensor([[0], [1]]), 2)


@pytest.mark.parametrize("hook", ["wheel", "editable"])
def test_other_systems_at_build(monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    pytest.importorskip("scikit_build_core")
    monkeypatch.syspath_prepend(str(ROOT / "build_backend"))
    monkeypatch.chdir(ROOT)
    import backend

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    with pytest.raises(SystemExit, match=r"is for Linux, this is Darwin \(arm64\): .*WSL 2"):
        getattr(backend, f"get_requires_for_build_{hook}")()


def test_a_cuda_library_that_does_not_load(tmp_path: Path) -> None:
    """In a process of its own, whose torch claims CUDA and has none: what its loader says is passed on."""
    compiler = shutil.which("g++")
    if compiler is None or torch.version.cuda is not None:
        pytest.skip("needs g++ and a torch without CUDA")
    copy = tmp_path / "gnn_spmm_plugin"
    shutil.copytree(Path(gsp.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__", "bench", "*_cuda.so"))
    for name in ("_gnn_spmm_cpu.so", "_build_info.json"):
        found = _native._find(name)
        assert found is not None
        if not (copy / name).exists():
            shutil.copy(found, copy / name)
    make = [compiler, "-shared", "-fPIC", "-nostdlib", "-x", "c++", "-"]
    subprocess.run([*make, "-o", tmp_path / "libtorch_cuda.so"], input="", text=True, check=True)
    link = ["-Wl,--no-as-needed", f"-L{tmp_path}", "-ltorch_cuda"]
    subprocess.run([*make, "-o", copy / "_gnn_spmm_cuda.so", *link], input="", text=True, check=True)
    program = """
import torch
torch.version.cuda = "12.8"
import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import _native
print(_native.cuda_error)
x, index = torch.ones(2, 3), torch.tensor([[0, 1], [1, 0]])
print(gsp.spmm(gsp.Graph.from_edge_index(index, 2), x).sum())  # the CPU is as it was
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"under torch {torch.__version__} for CUDA 12.8 (libtorch_cuda.so: cannot open shared object" in done.stdout
    assert "_gnn_spmm_cuda.so, built with CUDA" in done.stdout and "tensor(6.)" in done.stdout


def test_the_driver_here_is_asked() -> None:
    """As torch finds it, where it finds one."""
    found = _platform.driver()
    if torch.cuda.is_available():
        assert found is not None and found[0] >= 11 and _platform.no_gpu() is None
    else:
        assert str(_platform.no_gpu()).startswith("torch sees no GPU")
