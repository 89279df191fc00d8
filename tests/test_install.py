"""H31: native libraries that do not fit; `import gnn_spmm_plugin` works, says why, and PyG goes on as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gnn_spmm_plugin as gsp

LIBRARY = "_gnn_spmm_cpu.so"
PROGRAM = """
import sys
import torch
import gnn_spmm_plugin as gsp

print("imported", all(k["reasons"] for k in gsp.kernels()))
x, index = torch.randn(2, 3), torch.tensor([[0, 1], [1, 0]])
for attempt in (
    lambda: gsp.Graph.from_edge_index(index, 2),
    lambda: gsp.nn.GCNConv(3, 2)(x, index),
):
    try:
        attempt()
    except RuntimeError as e:
        print("refused:", e)
if len(sys.argv) < 2:
    sys.exit()
from torch_geometric import nn as tg

for layer in (tg.GCNConv(3, 2), tg.SAGEConv(3, 2, aggr="max"), tg.GATConv(3, 2)):
    expected = layer(x, index)
    with gsp.patch_pyg():
        assert torch.equal(layer(x, index), expected)
    assert torch.equal(gsp.accelerate(layer)(x, index), expected)
assert gsp.stats()["kernel_calls"] == 0
print("PyG is as it was")
"""


def compiled(source: str, path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    made = ["-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
    subprocess.run([compiler, *made], input=source, text=True, check=True)


def of_another_torch(path: Path) -> None:
    """Needs a function that this torch does not have."""
    compiled('extern "C" void aoti_of_another(); __attribute__((constructor)) void go() { aoti_of_another(); }', path)


def of_another_version(path: Path) -> None:
    """Loads, and has not the operators of this version."""
    compiled("int nothing;", path)


def torn(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def garbage(path: Path) -> None:
    path.write_bytes(b"no library\n")


def unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.pyg
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (of_another_torch, "undefined symbol: aoti_of_another"),
        (of_another_version, "is of another version of the package: it has no spmm, row_sum"),
        (torn, "the file is torn: its end is missing"),
        (garbage, "does not load"),
        (unreadable, "does not load"),
    ],
)
def test_a_library_that_does_not_fit(spoil: object, says: str, tmp_path: Path) -> None:
    package = Path(gsp.__file__).parent
    copy = tmp_path / "gnn_spmm_plugin"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__", "bench", "*_cuda.so"))
    library = next((Path(f) / LIBRARY for f in gsp.__path__ if (Path(f) / LIBRARY).exists()), None)
    if library is None:
        pytest.skip("the library is not beside the package")
    if not (copy / LIBRARY).exists():
        shutil.copy(library, copy / LIBRARY)
    pyg = spoil is of_another_torch
    spoil(copy / LIBRARY)  # type: ignore[operator]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *(["pyg"] if pyg else [])],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "imported True" in done.stdout and ("PyG is as it was" in done.stdout) == pyg
    refused = [line for line in done.stdout.splitlines() if line.startswith("refused:")]
    assert len(refused) == 2
    for line in refused:
        assert says in line and str(copy / LIBRARY) in line
        assert "pip install --force-reinstall" in line
        assert "another version" in line or f"torch {torch.__version__}" in line
    assert done.stderr.count("PyG stays as it is") == pyg  # said once
