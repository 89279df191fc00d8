"""Faults that were reported of other implementations, run through patched DGL, with the numbers of the reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dgl_cases import Counted
from torch import Tensor

import gnn_spmm_plugin as gsp

pytestmark = pytest.mark.dgl


def run(
    edges: Any, n: int, x: Any, reduce: str, w: Any = None, idtype: torch.dtype = torch.int64
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output of ``update_all``, gradients of its sum; a kernel of ours ran if there are edges."""
    dgl = gsp.import_dgl()
    fn = dgl.function
    index = torch.as_tensor(edges, dtype=idtype).view(2, -1)
    g = dgl.graph((index[0], index[1]), num_nodes=n, idtype=idtype)
    x = torch.as_tensor(x, dtype=torch.float64).requires_grad_()
    weight = None if w is None else torch.as_tensor(w, dtype=torch.float64).requires_grad_()
    with Counted() as counted, g.local_scope():
        g.ndata["x"] = x
        message = fn.copy_u("x", "m")
        if weight is not None:
            g.edata["w"] = weight.unsqueeze(1)
            message = fn.u_mul_e("x", "w", "m")
        g.update_all(message, getattr(fn, reduce)("m", "y"))
        out = g.ndata["y"]
        out.sum().backward()
    assert counted.calls > 0 or not index.numel()
    return out.detach(), x.grad, None if weight is None else weight.grad


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_h01_all_negative_neighbours_and_isolated_nodes(idtype: torch.dtype) -> None:
    edges, x = [[0, 1, 3], [2, 2, 4]], [[-4, 1], [-2, 5], [7, 7], [-1, -6], [9, 9]]
    out, grad, _ = run(edges, 5, x, "max", idtype=idtype)
    assert out.tolist() == [[0, 0], [0, 0], [-2, 5], [0, 0], [-1, -6]]
    assert grad.tolist() == [[0, 0], [1, 1], [0, 0], [1, 1], [0, 0]]
    assert run(edges, 5, x, "min", idtype=idtype)[0].tolist() == [[0, 0], [0, 0], [-4, 1], [0, 0], [-1, -6]]


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_h02_no_edges(reduce: str) -> None:
    out, grad, by_weight = run([[], []], 3, torch.rand(3, 2), reduce, [])
    assert out.tolist() == [[0, 0]] * 3 and grad is not None and grad.tolist() == [[0, 0]] * 3
    assert by_weight is None or by_weight.shape == (0,)


def test_h03_more_parallel_edges_than_matrix_cells() -> None:
    edges, x = [[2] * 11, [0] * 11], [[10, 20, 30], [7, 7, 7], [1, 2, 3]]
    for reduce, plain, weighted in (
        ("sum", [11, 22, 33], [66, 132, 198]),
        ("mean", [1, 2, 3], [6, 12, 18]),
        ("max", [1, 2, 3], [11, 22, 33]),
        ("min", [1, 2, 3], [1, 2, 3]),
    ):
        assert run(edges, 3, x, reduce)[0].tolist() == [plain, [0] * 3, [0] * 3]
        assert run(edges, 3, x, reduce, range(1, 12))[0].tolist() == [weighted, [0] * 3, [0] * 3]
    assert run(edges, 3, x, "sum", range(1, 12))[2].tolist() == [6] * 11  # type: ignore[union-attr]


def test_h04_weights_follow_the_callers_order() -> None:
    edges, x = [[3, 0, 2, 1, 0], [1, 2, 0, 2, 1]], [[1], [2], [3], [4]]
    out, grad, by_weight = run(edges, 4, x, "sum", [1, 10, 100, 1000, 10000])
    assert out.flatten().tolist() == [300, 10004, 2010, 0]
    assert by_weight is not None and by_weight.tolist() == [4, 1, 3, 2, 1]
    assert grad.flatten().tolist() == [10010, 1000, 100, 1]
    other = run(edges, 4, x, "sum", [10000, 1000, 100, 10, 1])[0]
    assert other.flatten().tolist() == [300, 4 * 10000 + 1, 1000 + 20, 0]


def test_h07_wrong_indices() -> None:
    """DGL says so itself, before anything of ours sees them."""
    for bad in ([[0, 4], [1, 2]], [[0, -1], [1, 2]], [[0, 1], [1, 4]]):
        with pytest.raises(Exception, match=r"4|-1|negative|non-negative|num_nodes"):
            run(bad, 4, torch.arange(8.0).view(4, 2), "sum")
        good = run([[0, 1], [2, 2]], 4, torch.arange(8.0).view(4, 2), "sum")[0]
        assert good.tolist() == [[0, 0], [0, 0], [2, 4], [0, 0]]
