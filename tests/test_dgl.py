"""Patched DGL against DGL itself, operator by operator: values and all gradients, in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from dgl_cases import Counted, assert_same, graph, outcome

import gnn_spmm_plugin as gsp

pytestmark = pytest.mark.dgl

REDUCES = ("sum", "mean", "max", "min")
#: (node features, edge features), as DGL broadcasts them
SHAPES = [
    *[((), ()), ((4,), (4,)), ((4,), (1,)), ((1,), (4,)), ((3, 4), (3, 1)), ((3, 4), (1, 4)), ((3, 1), (3, 4))],
    *[((3, 4), (4,)), ((3, 4), ()), ((4,), (3, 4)), ((2, 3, 4), (2, 1, 4)), ((2, 1, 4), (1, 3, 1)), ((), (3,))],
]


def features(rows: int, shape: tuple[int, ...], seed: int = 1) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.rand(rows, *shape, generator=rng, dtype=torch.float64) + 0.5


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("reduce", REDUCES)
def test_messages_of_one_side(reduce: str, idtype: torch.dtype) -> None:
    import dgl

    g = graph(idtype=idtype)
    for rows, name in ((10, "copy_u"), (30, "copy_e")):
        f = getattr(dgl.ops, f"{name}_{reduce}")
        for shape in ((), (4,), (1,), (3, 2)):
            x = features(rows, shape) - 1
            expected = outcome(lambda x: f(g, x), x)  # noqa: B023
            with Counted() as c:
                found = outcome(lambda x: f(g, x), x)  # noqa: B023
            assert_same(found, expected)
            assert c.calls >= 2 and c.fallbacks == 0


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div"])
def test_messages_of_both_sides(op: str, reduce: str) -> None:
    import dgl

    g = graph()
    f = getattr(dgl.ops, f"u_{op}_e_{reduce}")
    for x_shape, w_shape in SHAPES:
        x, w = features(10, x_shape) - 1, features(30, w_shape, 2)
        expected = outcome(lambda x, w: f(g, x, w), x, w)
        with Counted() as c:
            found = outcome(lambda x, w: f(g, x, w), x, w)
        assert_same(found, expected)
        assert c.calls > 0 and c.fallbacks == 0


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_extrema_of_sums_of_large_graphs_write_no_messages(reduce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import dgl

    from gnn_spmm_plugin.integrations.dgl import aggregate

    monkeypatch.setattr(aggregate, "_SMALL", 0)
    g = graph()
    f = getattr(dgl.ops, f"u_add_e_{reduce}")
    for x_shape, w_shape in SHAPES:
        x, w = features(10, x_shape) - 1, features(30, w_shape, 2)
        expected = outcome(lambda x, w: f(g, x, w), x, w)
        with Counted() as c:
            found = outcome(lambda x, w: f(g, x, w), x, w)
        assert_same(found, expected)
        assert c.fallbacks == 0
    x = features(10, (3,))
    x[:, 1] = torch.nan  # which DGL's kernel would pass over
    with gsp.patch_dgl():
        out = f(g, x, features(30, (1,)))
    assert out[:8, 1].isnan().all() and not out[:, (0, 2)].isnan().any()


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "dot"])
def test_values_of_edges(op: str, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import dgl

    from gnn_spmm_plugin.integrations.dgl import sddmm

    if not small:
        monkeypatch.setattr(sddmm, "_SMALL", 0)
    g = graph()
    rows = {"u": 10, "v": 10, "e": 30}
    for left, right in itertools.permutations("uve", 2):
        for x_shape, y_shape in SHAPES:
            if op == "dot" and (x_shape or (1,))[-1] != (y_shape or (1,))[-1]:
                continue
            x, y = features(rows[left], x_shape) - 1, features(rows[right], y_shape, 2)

            def f(x: Any, y: Any) -> Any:
                return dgl.ops.gsddmm(g, op, x, y, left, right)  # noqa: B023

            expected = outcome(f, x, y)
            with Counted() as c:
                found = outcome(f, x, y)
            assert_same(found, expected)
            ours = small or (op == "dot" and "e" not in (left, right) and (x_shape or y_shape))
            assert c.fallbacks == 0 if ours else c.fallbacks > 0


@pytest.mark.parametrize("norm_by", ["dst", "src"])
def test_softmax_over_edges(norm_by: str) -> None:
    import dgl

    g = graph()
    for shape in ((), (1,), (3,), (3, 1), (2, 3, 1)):
        for eids in (None, torch.tensor([1, 3, 5, 7, 8])):
            x = features(30 if eids is None else 5, shape)
            args = {"norm_by": norm_by} if eids is None else {"norm_by": norm_by, "eids": eids}
            expected = outcome(lambda x: dgl.ops.edge_softmax(g, x, **args), x)  # noqa: B023
            with Counted() as c:
                found = outcome(lambda x: dgl.ops.edge_softmax(g, x, **args), x)  # noqa: B023
            assert_same(found, expected)
            assert (c.fallbacks == 0) == (eids is None)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("op", ["mul", "add"])
def test_second_derivatives(op: str, reduce: str) -> None:
    import dgl

    g = graph(6, 12)
    f = getattr(dgl.ops, f"u_{op}_e_{reduce}")
    x, w = features(6, (2, 2)).requires_grad_(), features(12, (2, 1), 2).requires_grad_()

    def finite(x: Any, w: Any) -> Any:
        out = f(g, x, w)
        return torch.where(out.isinf(), 0, out) ** 2

    with gsp.patch_dgl():
        assert torch.autograd.gradgradcheck(finite, (x, w))
        logits = features(12, (2, 1)).requires_grad_()
        assert torch.autograd.gradgradcheck(lambda z: dgl.ops.edge_softmax(g, z), (logits,))
        assert torch.autograd.gradgradcheck(lambda a, b: dgl.ops.u_dot_v(g, a, b), (x, x.detach() * 2))
        assert torch.autograd.gradgradcheck(lambda a, b: dgl.ops.u_add_v(g, a, b), (x, x.detach() * 2))


def test_second_derivatives_of_extrema_by_dgls_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from gnn_spmm_plugin.integrations.dgl import aggregate

    monkeypatch.setattr(aggregate, "_SMALL", 0)
    test_second_derivatives("add", "max")


# ---------------------------------------------------------------------- where DGL is odd


def test_empty_destinations() -> None:
    """An infinity, as in DGL, but its gradient goes nowhere: in DGL it goes to node 0."""
    import dgl

    g = dgl.graph((torch.tensor([2]), torch.tensor([0])), num_nodes=4)
    w = torch.zeros(1, 1, dtype=torch.float64)
    for f in (dgl.ops.copy_u_max, lambda g, x: dgl.ops.u_add_e_max(g, x, w)):
        x = features(4, (1,)).requires_grad_()
        (theirs,) = torch.autograd.grad(f(g, x).sum(), x)
        assert theirs.flatten().tolist() == [3, 0, 1, 0]
        with gsp.patch_dgl():
            out = f(g, x)
            (ours,) = torch.autograd.grad(out.sum(), x)
        assert out.flatten().tolist()[1:] == [-torch.inf] * 3
        assert ours.flatten().tolist() == [0, 0, 1, 0]
    none = dgl.graph(([], []), num_nodes=3)
    with Counted() as c:
        assert dgl.ops.copy_u_max(none, features(3, (2,))).tolist() == [[0, 0]] * 3
        assert dgl.ops.copy_u_mean(none, features(3, (2,))).tolist() == [[0, 0]] * 3
    assert c.fallbacks == 0


def test_update_all_makes_every_infinity_0() -> None:
    """Of empty destinations and of features alike."""
    import dgl.function as fn

    g = graph()
    for special in (None, torch.inf, torch.nan):
        x = features(10, (3,)) - 1
        if special is not None:
            x[4, 1] = special

        def f(x: torch.Tensor) -> torch.Tensor:
            with g.local_scope():
                g.ndata["x"] = x
                g.update_all(fn.copy_u("x", "m"), fn.max("m", "y"))
                return g.ndata["y"]

        expected = outcome(f, x)
        with Counted() as c:
            found = outcome(f, x)
        assert c.calls == 2
        if special is torch.nan:
            assert found[0].isnan().sum() > 0 == expected[0].isnan().sum() and not found[0].isinf().any()
        else:
            assert_same(found, expected)


def test_nan_wins() -> None:
    import dgl

    g = dgl.graph((torch.tensor([0, 1]), torch.tensor([2, 2])))
    x = torch.tensor([[torch.nan, 1.0], [3.0, 2.0], [0.0, 0.0]])
    with gsp.patch_dgl():
        out = dgl.ops.copy_u_max(g, x)
    assert out[2, 0].isnan() and out[2, 1] == 2


def test_ties_go_to_the_first_edge_of_dgls_order() -> None:
    """Also where a user gave DGL arrays in which that is not the edge with the smallest id."""
    import dgl

    rowptr, col, ids = torch.tensor([0, 3, 3, 5]), torch.tensor([2, 0, 1, 1, 0]), torch.tensor([4, 2, 0, 3, 1])
    g = dgl.graph(("csc", (rowptr, col, ids)), num_nodes=3)
    x, w = torch.ones(3, 2, dtype=torch.float64), torch.ones(5, 1, dtype=torch.float64)
    for f in (dgl.ops.u_mul_e_max, dgl.ops.u_mul_e_min, dgl.ops.u_mul_e_sum, dgl.ops.u_add_e_max):
        expected = outcome(lambda x, w: f(g, x, w), x, w)  # noqa: B023
        with Counted() as c:
            found = outcome(lambda x, w: f(g, x, w), x, w)  # noqa: B023
        assert_same(found, expected)
        assert c.fallbacks == 0


@pytest.mark.parametrize("formats", ["coo", "csc", "csr", ["coo", "csc"]])
def test_graphs_restricted_to_some_formats(formats: Any) -> None:
    import dgl

    whole, x, w = graph(), features(10, (3,)), features(30, (1,))
    for f in (dgl.ops.u_mul_e_sum, dgl.ops.u_mul_e_max, dgl.ops.u_mul_e_mean):
        expected = outcome(lambda x, w: f(whole, x, w), x, w)  # noqa: B023
        with Counted() as c:
            found = outcome(lambda x, w: f(whole.formats(formats), x, w), x, w)  # noqa: B023
        assert_same(found, expected)
        assert c.fallbacks == 0


def test_dtypes_as_dgl_has_them() -> None:
    import dgl

    g, x = graph(), features(10, (3,))
    reference = dgl.ops.copy_u_sum(g, x)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):  # DGL has no float16 on the CPU
        with gsp.patch_dgl():
            out = dgl.ops.copy_u_sum(g, x.to(dtype))
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), reference, rtol=0.02, atol=0.02)
    with Counted() as c:
        with pytest.raises(dgl.DGLError):
            dgl.ops.copy_u_sum(g, x.long())
        with pytest.raises(dgl.DGLError, match="doesn't match"):
            dgl.ops.u_mul_e_sum(g, x, features(30, (1,)).float())
        with pytest.raises(dgl.DGLError, match="broadcasting"):
            dgl.ops.u_mul_e_sum(g, x, features(30, (2,)))
        with pytest.raises(dgl.DGLError):
            dgl.ops.copy_u_sum(g, features(9, (3,)))
    assert c.fallbacks == 4


def test_ids_that_dgl_did_not_check() -> None:
    import dgl

    x = features(3, (2,))
    twice = dgl.graph(("csc", (torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1]), torch.tensor([1, 1]))), num_nodes=3)
    with gsp.patch_dgl(), pytest.raises(ValueError, match="no permutation"):
        dgl.ops.copy_u_sum(twice, x)
