"""The lazy gather under messages that do strange things: right whatever they do."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pyg_layers import Custom, MessagePassing, assert_same, kernel_calls, outputs_and_gradients, random_graph, tg
from torch import Tensor, nn

import gnn_spmm_plugin as gsp

pytestmark = pytest.mark.pyg

N, E, WIDTH = 20, 90, 4


class Double(torch.autograd.Function):
    """Twice its input, for an autograd function that is given x_j as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def view_then_write(x: Tensor, w: Tensor) -> Tensor:
    x.view(-1, 2, WIDTH // 2)[:, 0] = 0
    return x


def detach_then_write(x: Tensor, w: Tensor) -> Tensor:
    x.detach().mul_(2)
    return x


def clone_then_write(x: Tensor, w: Tensor) -> Tensor:
    x.clone().mul_(2)
    return x


def write_after_weighing(x: Tensor, w: Tensor) -> Tensor:
    y = x * w.detach().view(-1, 1)
    x.mul_(3)
    return x + y


def weigh_before_write(x: Tensor, w: Tensor) -> Tensor:
    y = x * w.detach().view(-1, 1)
    x.mul_(3)
    return y


def partly_without_grad(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        scaled = x * w.view(-1, 1)
    return scaled + x


def without_grad(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        return x * w.view(-1, 1)


def view_without_grad(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        y = x.view(-1, 2, WIDTH // 2)
    return y.reshape(-1, WIDTH) + x


def under_autocast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return (x * w.view(-1, 1)).float()


def hook(x: Tensor, w: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda g: g * 3)
    return x


def by_numpy(x: Tensor, w: Tensor) -> Tensor:
    return x + torch.from_numpy(np.asarray(x.detach().cpu())).to(x.device)


def by_array(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.as_tensor(np.asarray(x.detach().cpu().tolist()), dtype=x.dtype, device=x.device)


def conditional(x: Tensor, w: Tensor) -> Tensor:
    return x if (x > 0).any() else x * 2


# Each is (message, whether the aggregation must still be fused).
MESSAGES: dict[str, tuple[Callable[..., Any], bool]] = {
    "itself": (lambda x, w: x, True),
    "weighted": (lambda x, w: w.view(-1, 1) * x, True),
    "weighted_twice": (lambda x, w: w[:, None] * x * w.unsqueeze(-1), True),
    "torch_mul": (lambda x, w: torch.mul(x, w.reshape(-1, 1)), True),
    "relu": (lambda x, w: x.relu(), True),
    "functional_relu": (lambda x, w: F.relu(x), True),
    "leaky_relu": (lambda x, w: F.leaky_relu(x, 0.1), True),
    "scaled": (lambda x, w: (2 * x - 1) / 3 + 1, True),
    "per_feature": (lambda x, w: x * torch.arange(1.0, WIDTH + 1, dtype=x.dtype, device=x.device), True),
    "shifted_per_feature": (lambda x, w: x + torch.arange(1.0, WIDTH + 1, dtype=x.dtype, device=x.device), True),
    "squared": (lambda x, w: x * x, True),
    "square": (lambda x, w: x**2, True),
    "square_of_weighted": (lambda x, w: (x * w.view(-1, 1)).square(), False),
    "clamped": (lambda x, w: x.clamp(-1, 1), True),
    "contiguous": (lambda x, w: x.contiguous(), True),
    "clone": (lambda x, w: x.clone(), True),
    "heads": (lambda x, w: (x.view(-1, 2, WIDTH // 2) * w.view(-1, 1, 1)).flatten(1), False),
    "detached": (lambda x, w: x.detach(), True),
    "zero_dim": (lambda x, w: x * torch.tensor(2.0, device=x.device), True),
    "vector_weight": (lambda x, w: x * w.view(-1, 1).expand(-1, WIDTH), False),
    "plus_weight": (lambda x, w: x + w.view(-1, 1), False),
    "relu_of_weighted": (lambda x, w: (x * w.view(-1, 1)).relu(), False),
    "in_place": (lambda x, w: x.mul_(2), False),
    "in_place_operator": (lambda x, w: x.__imul__(w.view(-1, 1)), False),
    "relu_in_place": (lambda x, w: F.relu(x, inplace=True), False),
    "view_then_write": (view_then_write, False),
    "detach_then_write": (detach_then_write, False),
    "clone_then_write": (clone_then_write, True),
    "write_after_weighing": (write_after_weighing, False),
    "weigh_before_write": (weigh_before_write, True),
    "partly_without_grad": (partly_without_grad, False),
    "without_grad": (without_grad, True),
    "view_without_grad": (view_without_grad, False),
    "autocast": (under_autocast, False),
    "hook": (hook, False),
    "numpy": (by_numpy, False),
    "array": (by_array, False),
    "conditional": (conditional, False),
    "indexing": (lambda x, w: x[:, [1, 0, 3, 2]], False),
    "index_assignment": (lambda x, w: torch.where(x > 0, x, x.new_zeros(())), False),
    "cat": (lambda x, w: torch.cat([x, x * 2], -1), False),
    "stack_in_dict": (lambda x, w: torch.stack([x, x]).sum(0), False),
    "einsum": (lambda x, w: torch.einsum("ef,e->ef", x, w), False),
    "own_function": (lambda x, w: Double.apply(x), False),
    "own_function_of_weighted": (lambda x, w: Double.apply(x * w.view(-1, 1)), False),
    "checkpoint": (
        lambda x, w: torch.utils.checkpoint.checkpoint(lambda t: t.sin() * w.view(-1, 1), x, use_reentrant=False),
        False,
    ),
    "checkpoint_reentrant": (
        lambda x, w: torch.utils.checkpoint.checkpoint(lambda t: t.sin(), x, use_reentrant=True),
        False,
    ),
    "own_function_then_weight": (lambda x, w: Double.apply(x) * w.view(-1, 1), False),
    "vmap": (lambda x, w: torch.vmap(lambda row, s: row * s)(x, w), False),
    "deepcopy": (lambda x, w: copy.deepcopy(x.detach()) + x, False),
    "pickle": (lambda x, w: pickle.loads(pickle.dumps(x.detach())) + x, False),
    "data": (lambda x, w: x.data + x, False),
    "dlpack": (lambda x, w: torch.from_dlpack(x.detach()) + x, False),
    "out": (lambda x, w: torch.add(x, 1, out=torch.empty_like(x.detach())) if not x.requires_grad else x + 1, True),
    "as_strided": (lambda x, w: x.as_strided(x.shape, x.stride()), False),
    "view_as_strides": (lambda x, w: x.flatten().view(-1, WIDTH), False),
    "numel": (lambda x, w: x * (x.numel() / (x.size(0) * x.shape[1]) * x.dim() / len(x.shape)), True),
    "cast": (lambda x, w: x.to(torch.float32), True),
    "no_weight_of_heads": (lambda x, w: x.view(-1, 2, WIDTH // 2).transpose(1, 2).reshape(-1, WIDTH), False),
}


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize("name", MESSAGES)
def test_any_message(name: str, aggr: str, device: str) -> None:
    message, fused = MESSAGES[name]
    if name in ("numpy", "dlpack", "array") and device != "cpu":
        pytest.skip("host memory only")
    layer = Custom(message, aggr)
    edge_index = random_graph(N, N, E, device=device)
    x = torch.randint(-3, 4, (N, WIDTH), device=device).double()
    w = (torch.randint(1, 5, (E,), device=device) / 4).double()

    def call(x: Tensor, w: Tensor) -> Tensor:
        return layer(x, edge_index, w)

    expected = outputs_and_gradients(layer, call, x, w)
    with torch.no_grad():
        plain = call(x, w)
    with gsp.patch_pyg():
        before = kernel_calls()
        got = outputs_and_gradients(layer, call, x, w)
        assert (kernel_calls() > before) == fused
        with torch.no_grad():
            assert_same([call(x, w)], [plain], 1e-6 if name == "cast" else None)
    assert_same(got, expected, 1e-6 if name == "cast" else 1e-12)


def lazy_message(device: str = "cpu", **kwargs: Any) -> tuple[Tensor, Tensor]:
    """A lazy x_j as a message sees it, and the gathered tensor; call with the patch on."""
    kept: list[Tensor] = []
    layer = Custom(lambda x, w: kept.append(x) or x)
    x = torch.randn(N, WIDTH, device=device, **kwargs)
    edge_index = random_graph(N, N, E, device=device)
    layer(x, edge_index)
    return kept[0], x[edge_index[0]]


QUESTIONS: dict[str, Callable[[Tensor], Any]] = {
    "repr": repr,
    "tolist": lambda t: t.tolist(),
    "item": lambda t: t[0, 0].item(),
    "sum": lambda t: float(t.sum()),
    "bool": lambda t: bool(t[0, 0] > 0),
    "len": len,
    "iter": lambda t: [float(row.sum()) for row in t],
    "shape": lambda t: (t.shape, t.size(), t.size(0), t.size(-1), t.dim(), t.ndim, t.numel(), t.nelement()),
    "type": lambda t: (t.dtype, t.device, t.layout, t.is_cuda, t.is_sparse, t.is_floating_point(), t.type()),
    "strides": lambda t: (t.stride(), t.is_contiguous(), t.storage_offset(), t.element_size()),
    "grad": lambda t: (t.requires_grad, t.is_leaf, t.grad_fn is not None),
    "storage": lambda t: t.untyped_storage().nbytes(),
    "isinstance": lambda t: (isinstance(t, Tensor), torch.is_tensor(t)),
    "comparison": lambda t: (t == t).all().item(),
    "contains": lambda t: 1e30 in t,
    "hash": lambda t: isinstance(hash(t), int),
    "dir": lambda t: "sin" in dir(t),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", QUESTIONS)
def test_answers_are_those_of_the_gathered_tensor(name: str, requires_grad: bool, device: str) -> None:
    ask = QUESTIONS[name]
    with gsp.patch_pyg():
        lazy, gathered = lazy_message(device, requires_grad=requires_grad)
        answer = ask(lazy)
        if name == "repr":  # the name of the gradient function is that of another operator
            answer, expected = answer.split("grad_fn")[0], ask(gathered).split("grad_fn")[0]
        else:
            expected = ask(gathered)
    assert answer == expected


def test_messages_made_without_grad_need_none(device: str) -> None:
    with gsp.patch_pyg():
        with torch.no_grad():
            lazy, _ = lazy_message(device, requires_grad=True)
        assert not lazy.requires_grad and not (lazy * 2).requires_grad
        assert (
            not lazy.new_zeros(N, WIDTH)
            .index_add_(0, torch.zeros(E, dtype=torch.long, device=device), lazy)
            .requires_grad
        )
        assert not lazy.sin().requires_grad


def test_retain_grad_and_hooks_see_the_gradient_of_the_messages(device: str) -> None:
    kept: list[Tensor] = []

    def message(x: Tensor, w: Tensor) -> Tensor:
        x.retain_grad()
        kept.append(x)
        return x * w.view(-1, 1)

    layer = Custom(message)
    edge_index = random_graph(N, N, E, device=device)
    w = torch.rand(E, device=device)
    with gsp.patch_pyg():
        x = torch.randn(N, WIDTH, device=device, requires_grad=True)
        layer(x, edge_index, w).sum().backward()
    torch.testing.assert_close(kept[0].grad, w.view(-1, 1).expand(E, WIDTH))


def test_saving_writes_the_messages() -> None:
    with gsp.patch_pyg():
        lazy, gathered = lazy_message()
        buffer = io.BytesIO()
        torch.save(lazy, buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()))  # without our class
    assert type(loaded) is Tensor and torch.equal(loaded, gathered)


def test_addresses_are_those_of_written_messages() -> None:
    import ctypes

    with gsp.patch_pyg():
        lazy, gathered = lazy_message()
        first = ctypes.cast(lazy.data_ptr(), ctypes.POINTER(ctypes.c_float))[0]
    assert first == float(gathered[0, 0])


def test_code_below_python_gets_an_error_and_no_garbage() -> None:
    with gsp.patch_pyg():
        lazy, _ = lazy_message()
        with pytest.raises(RuntimeError, match=r"never written.*gnn_spmm_plugin.restore"):
            torch.utils.dlpack.to_dlpack(lazy)


@pytest.mark.parametrize("what", ["features", "weight", "edge_index"])
@pytest.mark.parametrize("how", ["aggregate", "write"])
def test_changes_in_between_are_refused(what: str, how: str, device: str) -> None:
    edge_index = random_graph(N, N, E, device=device)
    x, w = torch.randn(N, WIDTH, device=device), torch.rand(E, device=device)

    def message(x_j: Tensor, weight: Tensor) -> Tensor:
        m = x_j * weight.view(-1, 1)
        {"features": x, "weight": w, "edge_index": edge_index}[what].zero_()
        return m if how == "aggregate" else m.sin()

    with gsp.patch_pyg(), pytest.raises(RuntimeError, match=r"Custom: .* changed in place between"):
        Custom(message)(x, edge_index, w)


def test_messages_that_leave_the_layer_are_written(device: str) -> None:
    class Keep(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

        def message(self, x_j: Tensor) -> Tensor:
            return x_j

        def aggregate(self, inputs: Tensor) -> Any:
            return inputs

    edge_index = random_graph(N, N, E, device=device)
    x = torch.randn(N, WIDTH, device=device)
    gathered = x[edge_index[0]]
    with gsp.patch_pyg():
        out = Keep(aggr=None)(x, edge_index)
        x.zero_()
        assert type(out) is Tensor and torch.equal(out, gathered)


def test_tuples_and_own_aggregations(device: str) -> None:
    from torch_geometric.nn.aggr import Aggregation, SumAggregation

    class Twice(Aggregation):
        def forward(self, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None, dim: int = -2) -> Tensor:
            return self.reduce(x, index, ptr, dim_size, dim, "sum") * 2

    class Pair(MessagePassing):
        def __init__(self) -> None:
            super().__init__(aggr="sum")
            self.other = SumAggregation()

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            return self.propagate(edge_index, x=x)

        def message(self, x_j: Tensor) -> Any:
            return x_j, x_j.relu()

        def aggregate(self, inputs: Any, index: Tensor, dim_size: int) -> Any:
            return self.aggr_module(inputs[0], index, dim_size=dim_size), self.other(
                inputs[1], index, dim_size=dim_size
            )

    edge_index = random_graph(N, N, E, device=device)
    x = torch.randn(N, WIDTH, dtype=torch.float64, device=device)
    for layer in (Custom(lambda x, w: x, Twice()), Pair()):
        expected = outputs_and_gradients(layer, lambda x, f=layer: f(x, edge_index), x)
        with gsp.patch_pyg():
            before = kernel_calls()
            got = outputs_and_gradients(layer, lambda x, f=layer: f(x, edge_index), x)
            assert kernel_calls() > before
        assert_same(got, expected)


@pytest.mark.parametrize("reduce", ["sum", "amax", "amin"])
def test_scatter_into_what_is_not_zero(reduce: str, device: str) -> None:
    def aggregate(messages: Tensor, index: Tensor, start: Tensor, into_new: bool) -> Tensor:
        target = messages.new_zeros(start.shape) if into_new else start.clone()
        if into_new:
            target += start
        at = index.view(-1, 1).expand_as(messages)
        if reduce == "sum":
            return target.scatter_add_(0, at, messages)
        return target.scatter_reduce_(0, at, messages, reduce=reduce, include_self=False)

    class Into(Custom):
        into_new = False

        def aggregate(self, inputs: Tensor, index: Tensor) -> Tensor:
            return aggregate(inputs, index, start, self.into_new)

    edge_index = random_graph(N, N, E, device=device)
    x = torch.randn(N, WIDTH, dtype=torch.float64, device=device)
    start = torch.randn(N, WIDTH, dtype=torch.float64, device=device)
    for into_new in (False, True):
        layer = Into(lambda x, w: x)
        layer.into_new = into_new
        expected = outputs_and_gradients(layer, lambda x, f=layer: f(x, edge_index), x)
        with gsp.patch_pyg():
            got = outputs_and_gradients(layer, lambda x, f=layer: f(x, edge_index), x)
        assert_same(got, expected)


def test_index_add_and_functional_forms(device: str) -> None:
    forms: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda m, i: m.new_zeros(N, WIDTH).index_add_(0, i, m),
        lambda m, i: m.new_zeros(N, WIDTH).index_add(0, i, m),
        lambda m, i: torch.zeros(N, WIDTH, dtype=m.dtype, device=m.device).index_add_(0, i, m),
        lambda m, i: torch.scatter_add(m.new_ones(N, WIDTH), 0, i.view(-1, 1).expand_as(m), m),
        lambda m, i: m.new_zeros(N, WIDTH).scatter_add(0, i.view(-1, 1).expand_as(m), m),
        lambda m, i: m.new_zeros(N, WIDTH).index_add_(0, i, m, alpha=2),
        lambda m, i: m.new_zeros(N, WIDTH).scatter_reduce(0, i.view(-1, 1).expand_as(m), m, "sum"),
        lambda m, i: m.new_zeros(N, WIDTH).scatter_reduce_(0, i.view(-1, 1).expand_as(m), m, "amax"),
    ]

    class Form(Custom):
        form: Any

        def aggregate(self, inputs: Tensor, index: Tensor) -> Tensor:
            return self.form(inputs, index)

    edge_index = random_graph(N, N, E, device=device)
    x = torch.randn(N, WIDTH, dtype=torch.float64, device=device)
    for number, form in enumerate(forms):
        layer = Form(lambda x, w: x)
        layer.form = form
        expected = outputs_and_gradients(layer, lambda x, f=layer: f(x, edge_index), x)
        with gsp.patch_pyg():
            before = kernel_calls()
            got = outputs_and_gradients(layer, lambda x, f=layer: f(x, edge_index), x)
            assert (kernel_calls() > before) == (number < 5)
        assert_same(got, expected)


def test_unreferenced_nodes_keep_zero_gradients(device: str) -> None:
    """Infinities and NaN in rows that no edge leaves from must not reach a gradient."""
    edge_index = torch.tensor([[0, 1, 0, 1, 0], [1, 0, 0, 1, 2]], device=device)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [float("nan"), float("inf")]], device=device)
    for message in (
        lambda x, w: x.relu(),
        lambda x, w: x * 2 + 1,
        lambda x, w: x * torch.tensor([1.0, 2.0], device=device),
        lambda x, w: F.leaky_relu(x),
        lambda x, w: x.clamp(min=0),
        lambda x, w: x,
    ):
        layer = Custom(message)
        with gsp.patch_pyg():
            leaf = x.clone().requires_grad_()
            layer(leaf, edge_index).sum().backward()
        assert leaf.grad[2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "forward_ad"])
def test_functional_transforms_get_stock_behaviour(transform: str, device: str) -> None:
    conv = tg.GraphConv(WIDTH, 3).to(device, torch.float64)
    edge_index = random_graph(N, N, E, device=device)
    x = torch.randn(5, N, WIDTH, dtype=torch.float64, device=device)

    def run() -> Tensor:
        if transform == "vmap":
            return torch.vmap(lambda t: conv(t, edge_index))(x)
        if transform == "grad":
            return torch.func.grad(lambda t: conv(t, edge_index).sin().sum())(x[0])
        if transform == "jvp":
            return torch.func.jvp(lambda t: conv(t, edge_index), (x[0],), (x[1],))[1]
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x[0], x[1])
            return torch.autograd.forward_ad.unpack_dual(conv(dual, edge_index)).tangent.clone()

    expected = run()
    with gsp.patch_pyg():
        got = run()
    torch.testing.assert_close(got, expected)


def test_inference_mode(device: str) -> None:
    edge_index = random_graph(N, N, E, device=device)
    conv, x = tg.GCNConv(WIDTH, WIDTH).to(device), torch.randn(N, WIDTH, device=device)
    user = Custom(lambda x, w: x)
    with torch.inference_mode():
        expected = conv(conv(x, edge_index), edge_index), user(conv(x, edge_index), edge_index)
        with gsp.patch_pyg():
            before = kernel_calls()
            got = conv(conv(x, edge_index), edge_index), user(conv(x, edge_index), edge_index)
            assert (
                kernel_calls() - before == 3
            )  # a user's own message may write into features whose writes are not counted
            inner = random_graph(N, N, E, seed=5, device=device)
            assert inner.is_inference()
            for _ in range(2):
                inner.copy_(random_graph(N, N, E, seed=6, device=device))
                first = conv(x, inner)
                inner.copy_(random_graph(N, N, E, seed=7, device=device))
                second = conv(x, inner)
        want = [conv(x, random_graph(N, N, E, seed=s, device=device)) for s in (6, 7)]
    assert_same([*got, first, second], [*expected, *want], 1e-5)
    conv(x, edge_index).sum().backward()  # nothing made in inference mode is left behind
    with gsp.patch_pyg(), torch.inference_mode():
        conv(x, edge_index)
    with gsp.patch_pyg():
        conv(x, edge_index).sum().backward()


def test_compiled_helpers_in_messages(device: str) -> None:
    helper = torch.compile(lambda x, w: x * w.view(-1, 1) + 1, backend="eager")
    layer: nn.Module = Custom(lambda x, w: helper(x, w))
    edge_index = random_graph(N, N, E, device=device)
    x, w = torch.randn(N, WIDTH, device=device), torch.rand(E, device=device)
    expected = outputs_and_gradients(layer, lambda x, w: layer(x, edge_index, w), x, w)
    with gsp.patch_pyg():
        got = outputs_and_gradients(layer, lambda x, w: layer(x, edge_index, w), x, w)
    assert_same(got, expected)
