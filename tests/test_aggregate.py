"""`aggregate`: an aggregation and what a layer does around it, against the same in plain torch and float64."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checks import same_bits
from strategies import NAMED, Edges, values
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import _native, reference
from gnn_spmm_plugin.derivatives import _scales_rows_first
from gnn_spmm_plugin.functional_aggregate import aggregate
from gnn_spmm_plugin.router import SMALL_EDGES

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NAMES = ("shuffled", "bipartite", "wide", "hub", "self_loops", "one_edge", "no_edges", "no_nodes")
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DIFFERENTIABLE = ("x", "weight", "self_x", "self_scale", "bias")


def parts(
    e: Edges, width: int, dtype: torch.dtype, device: str, weight: bool, scaled: bool, own: str, by_row: bool
) -> dict[str, Any]:
    """Operands of `aggregate`; own: "none", "x" (where the graph allows it) or "other"."""
    acc = _native.accumulation_dtype(dtype)
    p: dict[str, Any] = {"x": values((e.num_src, width), dtype, 1, device=device)}
    if weight:
        p["weight"] = values((e.num_edges,), dtype, 2, device=device)
    if scaled:
        p["src_scale"] = values((e.num_src,), acc, 3, device=device).abs()
        p["dst_scale"] = values((e.num_dst,), acc, 4, device=device).abs()
    if own == "x" and e.num_src == e.num_dst:
        p["self_x"] = p["x"]
    elif own != "none":
        p["self_x"] = values((e.num_dst, width), dtype, 5, device=device)
    if own != "none":
        p["self_scale"] = values((e.num_dst if by_row else 1,), acc, 6, device=device)
    p["bias"] = values((width,), acc, 7, device=device)
    return p


def leaves(p: dict[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The same operands as leaves, in `dtype` where it is given; what was one tensor stays one."""
    made: dict[int, Any] = {}
    out = {}
    for name, t in p.items():
        if id(t) not in made:
            copy = t.detach().to(dtype or t.dtype)
            made[id(t)] = copy.requires_grad_() if name in DIFFERENTIABLE else copy
        out[name] = made[id(t)]
    return out


def plain(g: gsp.Graph, p: dict[str, Any], reduce: str, relu: bool) -> Tensor:
    x = p["x"] if "src_scale" not in p else p["x"] * p["src_scale"][:, None]
    out, _ = reference.spmm(g.with_weight(None), x, p.get("weight"), reduce)
    out = out if "dst_scale" not in p else out * p["dst_scale"][:, None]
    if "self_x" in p:
        out = out + p["self_x"] * p["self_scale"][:, None]
    out = out + p["bias"]
    return out.relu() if relu else out


def close(got: Tensor, want: Tensor, dtype: torch.dtype, what: object) -> None:
    got, want = got.detach().double(), want.detach()
    size = float(want.abs().max()) if want.numel() else 0.0
    error = float((got - want).abs().max()) if want.numel() else 0.0
    assert got.shape == want.shape and error <= TOLERANCE[dtype] * (1 + size), (what, error, size)


def check(g: gsp.Graph, p: dict[str, Any], reduce: str, relu: bool, result: torch.dtype | None) -> None:
    """Value and gradients, as leaves of `p`."""
    dtype = p["x"].dtype
    mine, theirs = leaves(p), leaves(p, torch.float64)
    out = aggregate(g, mine.pop("x"), mine.pop("weight", None), reduce, relu=relu, dtype=result, **mine)
    want = plain(g, theirs, reduce, relu)
    worst = max(dtype, out.dtype, key=TOLERANCE.__getitem__)
    assert out.dtype == (result or dtype) and out.is_contiguous()
    close(out, want, worst, "value")
    mine = leaves(p)
    out = aggregate(g, mine["x"], mine.get("weight"), reduce, relu=relu, dtype=result, **without(mine))
    if relu:  # where rounding decides the sign, either gradient is right
        theirs = leaves(p, torch.float64)
        want = plain(g, theirs, reduce, False) * (out.detach() > 0)
    grad = values(tuple(out.shape), out.dtype, 8, device=str(out.device))
    names = [n for n in DIFFERENTIABLE if n in p and not (n == "self_x" and p["self_x"] is p["x"])]
    found = torch.autograd.grad(out, [mine[n] for n in names], grad)
    wanted = torch.autograd.grad(want, [theirs[n] for n in names], grad.double())
    for name, a, b in zip(names, found, wanted, strict=True):
        assert a.dtype == mine[name].dtype
        close(a, b, worst, name)


def without(p: dict[str, Any]) -> dict[str, Any]:
    return {name: t for name, t in p.items() if name not in ("x", "weight")}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients(device: str, name: str, dtype: torch.dtype) -> None:
    e = NAMED[name]
    g = e.graph(device)
    options = itertools.product((False, True), (False, True), ("none", "x", "other"), (False, True))
    turns = itertools.cycle(itertools.product((5, 16), ("sum", "mean"), (False, True)))
    for (weight, scaled, own, by_row), (width, reduce, relu) in zip(options, turns, strict=False):
        p = parts(e, width, dtype, device, weight, scaled, own, by_row)
        check(g, p, reduce, relu, None)
        if dtype in (torch.float16, torch.bfloat16):
            check(g, p, reduce, relu, torch.float32)
        elif dtype == torch.float32:
            check(g, p, reduce, relu, torch.bfloat16)
        check(g.T.T, p, reduce, not relu, None)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("own", ["none", "x", "other"])
def test_second_derivatives(device: str, own: str, reduce: str) -> None:
    e = NAMED["self_loops"] if own == "other" else Edges(NAMED["shuffled"].edge_index[:, :40] % 9, 9, 9)
    g = e.graph(device)
    for weight, by_row, relu in ((False, False, False), (True, True, False), (True, False, True)):
        p = leaves(parts(e, 3, torch.float64, device, weight, True, own, by_row))
        names = [n for n in DIFFERENTIABLE if n in p and not (n == "self_x" and p["self_x"] is p["x"])]

        def fn(*given: Tensor, p: dict[str, Any] = p, names: list[str] = names, relu: bool = relu) -> Tensor:
            q = {**p, **dict(zip(names, given, strict=True))}
            if own == "x":
                q["self_x"] = q["x"]
            return aggregate(g, q["x"], q.get("weight"), reduce, relu=relu, **without(q))

        given = [p[n] for n in names]
        assert torch.autograd.gradcheck(fn, given)
        assert torch.autograd.gradgradcheck(fn, given)


class Sizes(TorchDispatchMode):
    """Numbers of elements of all tensors made meanwhile, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view:
            self.made.append((str(func), out.numel()))
        return out


def test_one_kernel_each_way_and_nothing_else(device: str) -> None:
    """GCN's form: forward is one kernel, the gradient of the features another; no second matrix of features."""
    e = NAMED["shuffled"]
    g = e.graph(device)
    p = leaves(parts(e, 8, torch.float32, device, False, True, "x", True))
    p["self_scale"].requires_grad_(False)
    grad = torch.ones(37, 8, device=device)

    def step() -> None:
        aggregate(g, p["x"], **without(p)).backward(grad)

    step()
    p["x"].grad = p["bias"].grad = None
    calls = _native.kernel_calls()
    with Sizes() as sizes:
        step()
    assert _native.kernel_calls() == calls + 2
    large = [name for name, n in sizes.made if n >= 37 * 8]
    # autograd keeps the features' gradient by `detach`, a view
    assert large == ["gnn_spmm_plugin._spmm.default"] * 2, sizes.made


def test_learned_eps_writes_no_products() -> None:
    """GIN's form: the gradient of eps is a dot product."""
    e = NAMED["shuffled"]
    g = e.graph()
    x, eps = torch.rand(37, 8, requires_grad=True), torch.zeros(1, requires_grad=True)
    grad = torch.ones(37, 8)

    def step() -> None:
        aggregate(g, x, self_x=x, self_scale=1 + eps).backward(grad)

    step()
    x.grad = eps.grad = None
    with Sizes() as sizes:
        step()
    assert [name for name, n in sizes.made if n >= 37 * 8] == ["gnn_spmm_plugin._spmm.default"] * 2, sizes.made
    assert eps.grad is not None and torch.allclose(eps.grad, x.detach().sum())


@pytest.mark.parametrize("own", ["none", "x", "other"])
def test_compiled(device: str, own: str) -> None:
    e = NAMED["shuffled"]
    for weight in (False, True):
        torch._dynamo.reset()
        g = e.graph(device)
        p = leaves(parts(e, 6, torch.float32, device, weight, True, own, own == "x"))
        p["dst_scale"] = p["src_scale"]  # as GCN has it

        def fn(x: Tensor, bias: Tensor, g: gsp.Graph = g, p: dict[str, Any] = p, mean: bool = weight) -> Tensor:
            q = {**without(p), "bias": bias}
            if own == "x":
                q["self_x"] = x
            return aggregate(g, x, p.get("weight"), "mean" if mean else "sum", relu=True, **q) * 2

        args = (p["x"], p["bias"])
        want = fn(*args)
        out = torch.compile(fn, fullgraph=True, backend="aot_eager")(*args)
        assert torch.allclose(out, want, atol=1e-5)
        grad = values(tuple(out.shape), out.dtype, 9, device=device)
        inputs = [t for n, t in p.items() if n in DIFFERENTIABLE and not (n == "self_x" and own == "x")]
        for a, b in zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(want, inputs, grad), strict=True):
            assert torch.allclose(a, b, atol=1e-5)
    torch._dynamo.reset()


def test_functional_transforms(device: str) -> None:
    e = Edges(NAMED["shuffled"].edge_index, 37, 37)
    g = e.graph(device)
    p = parts(e, 4, torch.float64, device, True, True, "x", True)

    def fn(x: Tensor) -> Tensor:
        return aggregate(g, x, p["weight"], **{**without(p), "self_x": x}).sum()

    grad = torch.func.grad(fn)(p["x"])
    x = p["x"].clone().requires_grad_()
    fn(x).backward()
    assert torch.allclose(grad, x.grad)
    stacked = torch.stack([p["x"], p["x"] * 2])
    assert torch.allclose(torch.vmap(fn)(stacked), torch.stack([fn(t) for t in stacked]))


# ---------------------------------------------------------------------- scales laid out as edge weights


def large(device: str) -> gsp.Graph:
    """A graph whose plans list items; the CPU has none and reads none: there, a list that is empty."""
    edge_index = torch.randint(500, (2, SMALL_EDGES), generator=torch.Generator().manual_seed(0))
    g = gsp.Graph.from_edge_index(edge_index.to(device), 500)
    for half, csr in ((g, g._csr), (g.T, g._csr_t)):
        plan = gsp.plan(half, 8)
        assert (plan.items is None) == (device == "cpu")
        csr.plan = plan if plan.items is not None else replace(plan, items=torch.empty(0, dtype=torch.int32))
    return g


def scale_of(device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return values((500,), dtype, 3, device=device).abs()


def gathers(run: Callable[[], object]) -> int:
    before = gsp.stats()["scale_gathers"]
    run()
    return gsp.stats()["scale_gathers"] - before


def expected(g: gsp.Graph, x: Tensor, scale: Tensor, weight: Tensor | None = None) -> Tensor:
    return reference.spmm(g, x.double() * scale.double()[:, None], None if weight is None else weight.double())[0]


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_constant_scales_are_laid_out_at_their_second_use(device: str, dtype: torch.dtype, flag: bool) -> None:
    """Once for each direction; under torch's flag with the same bits, else together with those of the rows."""
    g, scale = large(device), scale_of(device, dtype)
    x = values((500, 8), dtype, 1, device=device).requires_grad_()
    grad = values((500, 8), dtype, 2, device=device)

    def step() -> list[Tensor]:
        out = aggregate(g, x, src_scale=scale, dst_scale=scale, self_x=x, self_scale=scale)
        return [out.detach(), *torch.autograd.grad(out, x, grad)]

    torch.use_deterministic_algorithms(flag)
    try:
        results: list[list[Tensor]] = []
        assert [gathers(lambda: results.append(step())) for _ in range(4)] == [0, 2, 0, 0]
        for other in results[1:]:
            assert all(same_bits(a, b) for a, b in zip(results[0 if flag else 1], other, strict=True))
            assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-4) for a, b in zip(results[0], other, strict=True))
        calls, permutes = _native.kernel_calls(), gsp.stats()["weight_permutes"]
        with Sizes() as sizes:
            step()
    finally:
        torch.use_deterministic_algorithms(False)
    assert _native.kernel_calls() == calls + 2 and gsp.stats()["weight_permutes"] == permutes
    assert max(n for _, n in sizes.made) < g.num_edges, sizes.made
    want = expected(g, x, scale) * scale[:, None] + x * scale[:, None]
    assert torch.allclose(results[0][0].double(), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("edges", "cols", "width", "first"),
    [
        (4_000_000, 100_000, 19, True),
        (4_000_000, 100_000, 20, False),  # exactly two edges for each element of x
        (3_999_999, 100_000, 1, False),
        (100_000_000, 200_000, 249, True),
        (100_000_000, 200_000, 250, False),
    ],
)
def test_when_rows_are_scaled_first(edges: int, cols: int, width: int, first: bool) -> None:
    csr = SimpleNamespace(col=torch.empty(edges, device="meta"), num_cols=cols)
    assert _scales_rows_first(csr, torch.empty(cols, width, device="meta")) == first  # type: ignore[arg-type]


@pytest.mark.gpu
def test_long_rows_have_their_sources_scaled_first() -> None:
    """Nothing is laid out by edge then, and every use has the same bits from the warm plan on."""
    torch.manual_seed(0)
    n, edges = 2000, 4_200_000
    g = gsp.Graph.from_edge_index(torch.randint(n, (2, edges), device="cuda"), n)
    x, scale = torch.randn(n, 16, device="cuda"), torch.rand(n, device="cuda")
    gsp.plan(g, 16)
    results: list[Tensor] = []
    assert gathers(lambda: results.extend(aggregate(g, x, src_scale=scale, dst_scale=scale) for _ in range(4))) == 0
    assert all(same_bits(results[0], other) for other in results[1:])
    want = expected(g, x, scale) * scale[:, None]
    assert torch.allclose(results[0].double(), want, rtol=1e-4, atol=1e-3)


def test_the_backward_of_a_mean_has_its_counts_laid_out(device: str) -> None:
    g = large(device)
    x = values((500, 8), torch.float32, 1, device=device).requires_grad_()
    grad = values((500, 8), torch.float32, 2, device=device)
    results: list[Tensor] = []

    def step() -> None:
        results.extend(torch.autograd.grad(gsp.spmm(g, x, reduce="mean"), x, grad))

    assert [gathers(step) for _ in range(4)] == [0, 1, 0, 0]
    assert all(same_bits(results[0], other) for other in results[1:])
    assert torch.allclose(results[0], reference.spmm(g.T, grad / g.in_degree()[:, None])[0], atol=1e-4)


def test_scales_that_change_are_not_laid_out(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a new one at each call, nor two in turn; one that was is not used as it was, however it changes."""
    g = large(device)
    x = values((500, 8), torch.float32, 1, device=device)

    def check(scale: Tensor) -> None:
        out = aggregate(g, x, src_scale=scale)
        assert torch.allclose(out.double(), expected(g, x, scale), rtol=1e-4, atol=1e-3)

    assert gathers(lambda: [check(torch.rand(500, device=device)) for _ in range(20)]) == 0
    one, other = torch.rand(500, device=device), torch.rand(500, device=device)
    assert gathers(lambda: [check(s) for s in (one, other, one, other, one)]) == 0
    assert gathers(lambda: [check(s) for s in (other, one, one, one)]) == 1
    monkeypatch.setenv("GSP_LOG", "verify")  # or what passes by the version counter goes unseen on CUDA
    check(other)
    for edit in (
        lambda: other.mul_(2),
        lambda: other[3:7].zero_(),
        lambda: other.set_(torch.rand(500, device=device)),
        lambda: setattr(other, "data", torch.rand(500, device=device)),
        lambda: other.data.mul_(3),
        *([lambda: other.numpy().__setitem__(7, 50.0)] if device == "cpu" else []),
    ):
        assert gathers(lambda: [check(other) for _ in range(3)]) == 1
        edit()
        assert gathers(lambda: check(other)) == 0


def test_scales_that_stay_by_column(device: str) -> None:
    """Beside weights; of features that weights would be rounded to; what does not say when it changes; where it is
    not worth it, or is compiled."""
    g, scale = large(device), scale_of(device)
    x = values((500, 8), torch.float32, 1, device=device)
    weight = values((g.num_edges,), torch.float32, 2, device=device)
    small = NAMED["shuffled"].graph(device)
    with torch.inference_mode():
        inference = scale_of(device)
    compiled = torch.compile(lambda x: aggregate(g, x, src_scale=scale), fullgraph=True, backend="aot_eager")
    for run in (
        lambda: aggregate(g, x, weight, src_scale=scale),
        lambda: aggregate(g, x.half(), src_scale=scale),
        lambda: aggregate(g, x.bfloat16(), src_scale=scale, dtype=torch.float32),
        lambda: aggregate(g, x, src_scale=inference),
        lambda: aggregate(g, x, src_scale=scale.double()),  # converted anew at each call
        lambda: aggregate(small, x[:37], src_scale=scale[:37]),
        lambda: compiled(x),
        lambda: torch.func.vmap(lambda x: aggregate(g, x, src_scale=scale))(x.expand(2, 500, 8)),
    ):
        assert gathers(lambda run=run: [run() for _ in range(4)]) == 0  # type: ignore[misc]
    torch._dynamo.reset()


def test_scales_laid_out_in_inference_mode_serve_training(device: str) -> None:
    g, scale = large(device), scale_of(device)
    x = values((500, 8), torch.float32, 1, device=device)
    with torch.inference_mode():
        assert gathers(lambda: [aggregate(g, x, src_scale=scale, dst_scale=scale) for _ in range(3)]) == 1
    x.requires_grad_()
    out = aggregate(g, x, src_scale=scale, dst_scale=scale)
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.isfinite(second).all()


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_scales_whose_products_do_not_fit(device: str, size: float) -> None:
    """Each by itself they do; together they would be 0, or infinite."""
    g = large(device)
    x = values((500, 8), torch.float32, 1, device=device) * (1e30 if size < 1 else 1e-30)
    scale = torch.full((500,), size, device=device)
    results: list[Tensor] = []
    run = lambda: results.extend(aggregate(g, x, src_scale=scale, dst_scale=scale) for _ in range(4))  # noqa: E731
    assert gathers(run) == 0
    assert all(same_bits(results[0], r) for r in results)
    assert results[0].isfinite().all() and (results[0] != 0).any()


def test_no_room_for_scales(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay where they are, and are not tried again."""
    g, scale = large(device), scale_of(device)
    x = values((500, 8), torch.float32, 1, device=device)
    tries = []

    def fail(*_: object) -> None:
        tries.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "index_select", fail)
        results = [aggregate(g, x, src_scale=scale) for _ in range(4)]
    assert len(tries) == 1 and all(same_bits(results[0], r) for r in results)
    assert gathers(lambda: [aggregate(g, x, src_scale=scale) for _ in range(3)]) == 0


def test_scales_and_copies_die_with_the_graph(device: str, no_gc: None) -> None:
    g, scale = large(device), scale_of(device)
    for _ in range(3):
        aggregate(g, values((500, 8), torch.float32, 1, device=device), src_scale=scale)
    copy = g._csr.scale_in_row_order(scale)
    assert copy is not None and copy.shape == (g.num_edges,)
    dead = weakref.ref(scale), weakref.ref(copy), weakref.ref(g._core)
    del scale
    assert dead[0]() is None  # a copy keeps no scale
    del copy, g
    assert [d() for d in dead] == [None] * 3


def test_refuses_what_it_cannot_do() -> None:
    g = NAMED["bipartite"].graph()
    x, own = torch.rand(11, 4), torch.rand(29, 4)
    for arguments, message in (
        ({"reduce": "max"}, "reduce must be 'sum' or 'mean'"),
        ({"self_scale": torch.ones(1)}, "self_scale multiplies self_x"),
        ({"src_scale": torch.ones(11, requires_grad=True)}, "src_scale requires a gradient"),
        ({"weight": torch.ones(120, 2)}, r"weight must have shape \[num_edges\]"),
        ({"weight": torch.ones(7)}, "num_edges = 120"),
        ({"src_scale": torch.ones(11, 1)}, r"src_scale must have shape \[11\], got \[11, 1\]"),
        ({"dst_scale": torch.ones(1)}, r"dst_scale must have shape \[29\], got \[1\]"),
        ({"src_scale": torch.ones(11, device="meta")}, "src_scale is on meta but the graph on cpu"),
        ({"bias": torch.ones(1)}, r"bias must have shape \[4\], got \[1\]"),
        ({"bias": torch.ones(4, device="meta")}, "bias is on meta but the graph on cpu"),
        ({"self_x": x}, "self_x must have one row for each of the graph's 29 destination nodes"),
        ({"self_x": own[:, :3]}, "self_x must have as many columns as x, 4, got"),
        ({"self_x": own.to("meta")}, "self_x is on meta but the graph on cpu"),
        ({"self_x": own, "self_scale": torch.tensor(2.0)}, r"self_scale must have shape \[29\] or \[1\], got \[\]"),
        ({"dtype": torch.int32}, "dtype must be one of torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            aggregate(g, x, **arguments)
    with pytest.raises(ValueError, match=r"\[num_src, features\]"):
        aggregate(g, x[:, 0])
    for arguments, message in (
        ({"bias": [1, 2, 3, 4]}, "bias must be a torch.Tensor, got list"),
        ({"bias": torch.ones(4) + 0j}, "bias must be a dense tensor of real numbers, got torch.complex64"),
        ({"self_x": own + 0j}, "self_x must be float32, .* got torch.complex64"),
        ({"self_x": own.to_sparse()}, "self_x must be a dense tensor"),
        ({"self_x": own, "self_scale": 2.0}, "self_scale must be a torch.Tensor, got float"),
    ):
        with pytest.raises(TypeError, match=message):
            aggregate(g, x, **arguments)
    with pytest.raises(TypeError, match="aggregate: the first argument must be a"):
        aggregate(torch.zeros(2, 3), x)
