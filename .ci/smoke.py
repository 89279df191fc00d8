"""Uses the installed package as a user would first do, with torch and nothing else; exits with 1 if anything is off.

Run it outside the repository, whose folder would otherwise be imported instead.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import torch

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import _native

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Forward and backward of every reduction, a layer, plans, the command line."""
    place = Path(gsp.__file__).resolve().parent
    assert ROOT not in place.parents, f"{place} is the source folder; run this elsewhere"
    assert importlib.metadata.version("gnn-spmm-plugin") == gsp.__version__
    devices = ["cpu"] + ["cuda"] * (torch.cuda.is_available() and _native.cuda_error is None)
    generator = torch.Generator().manual_seed(0)
    edge_index, features = torch.randint(50, (2, 400), generator=generator), torch.randn(50, 16, generator=generator)
    before = gsp.stats()["kernel_calls"]
    for device in devices:
        src, dst = edge_index.to(device)
        x, expected_x = (features.to(device).requires_grad_() for _ in range(2))
        graph = gsp.Graph.from_edge_index(edge_index.to(device), 50)
        for reduce, name in (("sum", "sum"), ("mean", "mean"), ("max", "amax"), ("min", "amin")):
            out = gsp.spmm(graph, x, reduce=reduce)
            index = dst.unsqueeze(1).expand(-1, 16)
            expected = torch.zeros_like(out).scatter_reduce(0, index, expected_x[src], name, include_self=False)
            torch.testing.assert_close(out, expected)
            (got,), (want,) = torch.autograd.grad(out.sum(), x), torch.autograd.grad(expected.sum(), expected_x)
            torch.testing.assert_close(got, want)
        scores = gsp.edge_softmax(graph, gsp.sddmm(graph, x, x))
        totals = torch.zeros(50, device=device).index_add(0, dst, scores)
        torch.testing.assert_close(totals, (graph.in_degree() > 0).float())
        gsp.nn.GCNConv(16, 8).to(device)(x, edge_index.to(device)).sum().backward()
        gsp.plan(graph, width=16).explain()
    assert gsp.stats()["kernel_calls"] > before, "no kernel of the package ran"
    said = subprocess.run([sys.executable, "-m", "gnn_spmm_plugin", "info"], capture_output=True, text=True, check=True)
    print(said.stdout.strip())
    print(f"smoke test passed on {', '.join(devices)}: Python {sys.version.split()[0]}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
