"""torch.compile, torch.export and the operators' own metadata."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
import torch
from strategies import NAMED, REDUCES, values
from test_errors import ONLY_ON, raw_arguments

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import _native, reference


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---------------------------------------------------------------------- opcheck


def _variants(device: str) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Legal calls of every raw operator: with and without what is optional, other dtypes, strides and sizes."""
    base = raw_arguments(device)
    yield from base.items()
    optional = {
        "spmm": (2, 4, 5, 9, 10, 11, 13, 14),
        "row_sum": (),
        "pcsr_spmm": (5, 7, 8, 11, 12, 13, 15),
        "tile_spmm": (2, 6, 11, 14, 15, 16, 18),
        "tile_end": (2, 5, 7, 8, 9, 11),
        "spmm_arg": (2, 3),
        "spmm_arg_backward": (2, 3),
        "spmm_tie_count": (2, 7),
        "spmm_tie_backward": (2,),
        "sddmm": (2,),
        "sddmm_arg": (2,),
        "sddmm_tie": (2, 3),
        "pair_score": (2,),
        "pair_gradient": (2,),
        "edge_sum": (2, 3),
        "edge_sum_backward": (2, 3),
        "edge_sum_dot": (2,),
        "edge_softmax": (1,),
        "edge_softmax_backward": (1,),
    }
    for name, places in optional.items():
        args = list(base[name])
        for i in places:
            args[i] = None
        if name.startswith("sddmm"):
            args[-1] = 0
        if name == "edge_sum_backward":
            args[-1] = False
        yield name, tuple(args)
        half = [a.to(torch.float16) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        if not name.startswith("tile"):  # these have widths and sums of their own
            yield name, tuple(half)
        strided = [
            a.repeat(1, 2)[:, : a.shape[1]] if isinstance(a, torch.Tensor) and a.dim() == 2 and a.shape[1] == 4 else a
            for a in args
        ]
        if name in ("spmm", "row_sum", "spmm_arg", "sddmm") or name.startswith("edge_sum"):
            yield name, tuple(strided)
    rowptr, col, *_ = base["gcn_scales"]
    yield "inverse_degree", (rowptr.long(), torch.float64)
    yield "gcn_scales", (rowptr, col, False, torch.float32)
    dst, src, *sizes = base["from_coo"]
    order = dst.argsort(stable=True)  # of which less is returned
    yield "from_coo", (dst[order], src[order], *sizes)


@pytest.mark.parametrize("name", _native._OPS)
def test_opcheck(device: str, name: str) -> None:
    """Schema, fake tensors and strides of results. They are raw: differentiation belongs to the layer above them."""
    if ONLY_ON.get(name, device) != device:
        pytest.skip(f"a kernel for {ONLY_ON[name]}; test_pcsr.py and test_tiles.py check it with a twin")
    checked = 0
    # Some look at values, which fake tensors have not.
    utils = "test_schema" if name in ("from_coo", "same_coo") else torch.library._OPCHECK_DEFAULT_UTILS
    for other, args in _variants(device):
        if other == name:
            torch.library.opcheck(getattr(torch.ops.gnn_spmm_plugin, f"_{name}").default, args, test_utils=utils)
            checked += 1
    assert checked >= (1 if name in ("transpose", "same_coo") else 2)


def test_no_graph_of_fake_tensors() -> None:
    """Not one that says nothing: its edges cannot be looked at."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), pytest.raises(RuntimeError, match=r"_from_coo"):
        gsp.Graph.from_edge_index(torch.zeros(2, 3, dtype=torch.int64), 4)


def test_every_operator_is_checked() -> None:
    schemas = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("gnn_spmm_plugin::_")}
    ours = {f"gnn_spmm_plugin::_{name}" for name in _native._OPS}
    others = {f"gnn_spmm_plugin::_{name}" for name in ("kernel_calls", "kernel_calls_cuda", "speed_of_light")}
    assert ours <= schemas <= ours | others


def test_results_are_contiguous_whatever_the_strides(device: str) -> None:
    """A fake kernel that copies a stride of zero makes compiled gradients zero."""
    g = NAMED["shuffled"].graph(device)
    x, config = torch.rand(1, 4, device=device).expand(37, 4), [128, 2048, 0, 0, 0, 0, 0, 0, 1]
    out = _native.spmm(g.rowptr, g.col, None, x, None, None, None, config, False)
    assert out.is_contiguous()
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (g.rowptr, g.col, x)]
        fake = _native.spmm(fakes[0], fakes[1], None, fakes[2], None, None, None, config, False)
        assert fake.stride() == out.stride() and fake.shape == out.shape


# ---------------------------------------------------------------------- compile


def compare(fn, compiled, leaves: list[torch.Tensor], backward: bool = True) -> None:  # type: ignore[no-untyped-def]
    """Values and gradients of compiled and eager code."""
    found = compiled(*leaves)  # first: eager code would prepare the graph
    wanted = fn(*leaves)
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert torch.allclose(found, wanted, atol=1e-5), (found - wanted).abs().max()
    if backward:
        grad = values(tuple(wanted.shape), wanted.dtype, 9, device=str(wanted.device))
        inputs = [t for t in leaves if t.requires_grad]
        for a, b in zip(
            torch.autograd.grad(found, inputs, grad), torch.autograd.grad(wanted, inputs, grad), strict=True
        ):
            assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("kind", ["none", "edge", "head"])
@pytest.mark.parametrize("reduce", REDUCES)
def test_static(device: str, reduce: str, kind: str) -> None:
    """One graph, without a break, forward and backward; the transposed graph is made while tracing."""
    e = NAMED["shuffled"]
    for tie in ("first", "split") if reduce in ("max", "min") else ("first",):
        torch._dynamo.reset()
        g = e.graph(device)
        shape = (37, 2, 3) if kind == "head" else (37, 6)
        x = values(shape, torch.float32, 1, device=device).requires_grad_()
        leaves = [x]
        if kind != "none":
            weight = values((211, 2) if kind == "head" else (211,), torch.float32, 2, device=device)
            leaves.append(weight.requires_grad_())

        def fn(*args: torch.Tensor, g: gsp.Graph = g, tie: str = tie) -> torch.Tensor:
            return gsp.spmm(g, args[0], args[1] if len(args) > 1 else None, reduce, tie=tie).relu() * 2

        compare(fn, torch.compile(fn, fullgraph=True, backend="aot_eager"), leaves)


def test_inductor(device: str) -> None:
    if device == "cuda":
        pytest.importorskip("triton")
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "c++", "clang++")):
        pytest.skip("inductor needs a C++ compiler")
    g = NAMED["shuffled"].graph(device)
    x = values((37, 6), torch.float32, 1, device=device).requires_grad_()
    weight = values((211,), torch.float32, 2, device=device).requires_grad_()

    def fn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        p = gsp.edge_softmax(g, weight)
        out = gsp.spmm(g, x, p, "mean").relu() + gsp.spmm(g, x, weight, "max")
        return out + gsp.spmm(g.T, x, weight).sum()

    compare(fn, torch.compile(fn, fullgraph=True, backend="inductor"), [x, weight])


@pytest.mark.parametrize("name", ["shuffled", "sorted", "bipartite", "no_edges", "hub"])
def test_every_operator_compiles(device: str, name: str) -> None:
    e = NAMED[name]
    g = e.graph(device)
    a = values((e.num_dst, 2, 3), torch.float32, 1, device=device).requires_grad_()
    b = values((e.num_src, 2, 3), torch.float32, 2, device=device).requires_grad_()

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        attention = gsp.edge_softmax(g, gsp.sddmm(g, a, b))
        out = gsp.spmm(g, b, attention)
        back = gsp.spmm(g.T, a.flatten(1), reduce="mean")
        return out.sum(0) + g.reduce(back).sum() + g.with_weight(attention[:, 0]).reduce(b, "max").sum()

    compare(fn, torch.compile(fn, fullgraph=True, backend="aot_eager"), [a, b])


def test_dynamic_widths_and_graphs(device: str) -> None:
    """One compilation serves many sizes, and graphs of other sizes are not confused with each other."""

    def fn(g: gsp.Graph, x: torch.Tensor) -> torch.Tensor:
        return gsp.spmm(g, x, reduce="mean").relu()

    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager", dynamic=True)
    for name in ("shuffled", "bipartite", "wide", "shuffled"):
        e = NAMED[name]
        g = e.graph(device)
        for width in (3, 8, 5):
            x = values((e.num_src, width), torch.float32, 1, device=device).requires_grad_()
            found = compiled(g, x)
            assert torch.allclose(found, reference.spmm(g, x, None, "mean")[0].relu(), atol=1e-5)
            (grad,) = torch.autograd.grad(found.sum(), x)
            (wanted,) = torch.autograd.grad(fn(g, x).sum(), x)
            assert torch.allclose(grad, wanted, atol=1e-5)


def test_many_graphs_through_one_compiled_function(device: str) -> None:
    """A mini-batch loop: right for every batch, whether it compiles again or not."""

    def fn(g: gsp.Graph, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return gsp.spmm(g, x, w)

    compiled = torch.compile(fn, backend="aot_eager")
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        edge_index = torch.randint(20, (2, 50 + 3 * seed), generator=generator).to(device)
        g = gsp.Graph.from_edge_index(edge_index, 20)
        x = values((20, 4), torch.float32, seed, device=device).requires_grad_()
        w = values((50 + 3 * seed,), torch.float32, seed, device=device).requires_grad_()
        compare(lambda x, w, g=g: fn(g, x, w), lambda x, w, g=g: compiled(g, x, w), [x, w])


def test_in_a_module(device: str) -> None:
    """A graph held by a module, weights of its own, more than one step: nothing is built after the first."""
    e = NAMED["shuffled"]

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.graph = e.graph(device).with_weight(torch.rand(211, device=device))
            self.linear = torch.nn.Linear(6, 4, device=device)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.graph.reduce(self.linear(x))

    torch._dynamo.utils.counters.clear()
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = values((37, 6), torch.float32, 1, device=device)
    for step in range(4):
        before = gsp.stats()
        found = compiled(x)
        found.sum().backward()
        after = gsp.stats()
        assert torch.allclose(found, layer(x), atol=1e-5)
        if step > 1:
            for name in ("graphs_built", "transposes_built", "sorts", "plans_built"):
                assert after[name] == before[name], (step, name)
            assert after["kernel_calls"] - before["kernel_calls"] == 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 1
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 0


def test_matmul(device: str) -> None:
    """torch.compile does not trace `@` of other classes: it breaks the graph there, and goes on."""
    g = NAMED["shuffled"].graph(device)
    x = values((37, 6), torch.float32, 1, device=device).requires_grad_()
    compare(lambda x: (g @ (x + 1)) * 2, torch.compile(lambda x: (g @ (x + 1)) * 2, backend="aot_eager"), [x])


def test_the_transposed_graph_first(device: str) -> None:
    """Nothing else has prepared it."""
    for fn in (
        lambda g, x: gsp.spmm(g.T, x, reduce="mean"),
        lambda g, x: gsp.sddmm(g.T, x, x),
        lambda g, x: gsp.edge_softmax(g.T, x.flatten()[:211]),
        lambda g, x: gsp.spmm(g.T, x, reduce="max"),
    ):
        torch._dynamo.reset()
        g = NAMED["shuffled"].graph(device)
        x = values((37, 6), torch.float32, 1, device=device).requires_grad_()
        compare(
            lambda x, g=g, fn=fn: fn(g, x),
            torch.compile(lambda x, g=g, fn=fn: fn(g, x), fullgraph=True, backend="aot_eager"),
            [x],
        )


def test_expanded_features_get_gradients(device: str) -> None:
    g = gsp.Graph.from_edge_index(torch.tensor([[0, 0, 2], [1, 2, 1]], device=device), 3)
    row = torch.tensor([[1.0, 2.0]], device=device, requires_grad=True)
    weight = torch.tensor([0.5, 2.0, -1.0], device=device, requires_grad=True)

    def fn(row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return gsp.spmm(g, row.expand(3, 2), weight, "mean").relu().sum()

    compare(fn, torch.compile(fn, fullgraph=True, backend="aot_eager"), [row, weight])


def test_weights_changed_between_calls(device: str) -> None:
    """Compiled code keeps no permuted copy."""
    g = NAMED["shuffled"].graph(device)
    x = values((37, 6), torch.float32, 1, device=device)
    weight = torch.rand(211, device=device)
    compiled = torch.compile(lambda x, w: gsp.spmm(g, x, w), fullgraph=True, backend="aot_eager")
    for _ in range(3):
        assert torch.allclose(compiled(x, weight), gsp.spmm(g, x, weight))
        weight.mul_(2)


@pytest.mark.parametrize("reduce", REDUCES)
def test_autocast_and_half_precision(device: str, reduce: str) -> None:
    g = NAMED["shuffled"].graph(device)
    x = values((37, 6), torch.bfloat16, 1, device=device).requires_grad_()
    weight = values((211,), torch.bfloat16, 2, device=device).requires_grad_()

    def fn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return gsp.spmm(g, x, weight, reduce)

    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    found, wanted = compiled(x, weight), fn(x, weight)
    assert torch.equal(found, wanted)
    for a, b in zip(
        torch.autograd.grad(found.sum(), (x, weight)), torch.autograd.grad(wanted.sum(), (x, weight)), strict=True
    ):
        assert a.dtype == torch.bfloat16 and torch.equal(a, b)


def test_inference(device: str) -> None:
    g = NAMED["shuffled"].graph(device)
    x = values((37, 6), torch.float32, 1, device=device)
    compiled = torch.compile(lambda x: gsp.spmm(g, x, reduce="max"), fullgraph=True, backend="aot_eager")
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(compiled(x), gsp.spmm(g, x, reduce="max"))


def test_compiled_transforms_are_right_or_refused(device: str) -> None:
    g = NAMED["shuffled"].graph(device)
    x = values((37, 6), torch.float32, 1, device=device)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(lambda t: gsp.spmm(g, t), (x,), (torch.ones_like(x),))[1]

    try:
        found = torch.compile(fn, backend="aot_eager")(x)
    except Exception:
        return
    assert torch.allclose(found, gsp.spmm(g, torch.ones_like(x)))


# ---------------------------------------------------------------------- export


@pytest.mark.parametrize("reduce", REDUCES)
def test_export(device: str, reduce: str) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.graph = NAMED["shuffled"].graph(device)

        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return gsp.spmm(self.graph, x, weight, reduce)

    x = values((37, 6), torch.float32, 1, device=device)
    weight = values((211,), torch.float32, 2, device=device)
    width = torch.export.Dim("width", min=2, max=64)
    program = torch.export.export(Layer(), (x, weight), dynamic_shapes={"x": {1: width}, "weight": None})
    assert any("gnn_spmm_plugin" in str(node.target) for node in program.graph.nodes)
    for columns in (6, 11):
        x = values((37, columns), torch.float32, 3, device=device)
        eager = gsp.spmm(NAMED["shuffled"].graph(device), x, weight, reduce)
        assert torch.allclose(program.module()(x, weight), eager, atol=1e-5)
