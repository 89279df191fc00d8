"""Faults that were reported of other implementations, run through patched PyG layers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from pyg_layers import Plain, assert_same, kernel_calls, tg
from torch import Tensor, nn

import gnn_spmm_plugin as gsp

pytestmark = pytest.mark.pyg

DTYPES = [torch.float32, torch.float64]


def run(
    edge_index: Any,
    x: Any,
    aggr: str = "sum",
    weight: Any = None,
    device: str = "cpu",
    dtype: Any = None,
    **kw: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(output, gradient of its sum by x, by weight) of a plain layer under the patch, which must run kernels."""
    edge_index = torch.as_tensor(edge_index, dtype=torch.long, device=device).view(2, -1)
    dtype = dtype or torch.float32
    x = torch.as_tensor(x, dtype=dtype, device=device).detach().requires_grad_()
    weight = None if weight is None else torch.as_tensor(weight, dtype=dtype, device=device).requires_grad_()
    with gsp.patch_pyg():
        before = kernel_calls()
        out = Plain(aggr, **kw)(x, edge_index, weight)
        assert kernel_calls() > before or not edge_index.numel()
    out.sum().backward()
    return out.detach(), x.grad, None if weight is None else weight.grad


def same(got: Tensor | None, expected: Any) -> None:
    assert got is not None
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype, device=got.device), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_h01_all_negative_and_isolated(dtype: torch.dtype, device: str) -> None:
    edges, x = [[0, 1, 3], [2, 2, 4]], [[-4, 1], [-2, 5], [7, 7], [-1, -6], [9, 9]]
    out, grad, _ = run(edges, x, "max", device=device, dtype=dtype)
    same(out, [[0, 0], [0, 0], [-2, 5], [0, 0], [-1, -6]])
    same(grad, [[0, 0], [1, 1], [0, 0], [1, 1], [0, 0]])
    same(run(edges, x, "min", device=device, dtype=dtype)[0], [[0, 0], [0, 0], [-4, 1], [0, 0], [-1, -6]])


def test_h02_no_edges(device: str) -> None:
    for aggr in ("sum", "mean", "max", "min"):
        out, grad, by_weight = run([[], []], [[1, 2], [3, 4], [5, 6]], aggr, [], device=device)
        same(out, torch.zeros(3, 2))
        same(grad, torch.zeros(3, 2))
        assert by_weight is not None and by_weight.shape == (0,)
    conv = tg.HeteroConv(
        {("a", "r1", "b"): Plain("sum"), ("b", "r2", "b"): Plain("sum")},  # identity weights
        aggr="sum",
    )
    x = {"a": torch.ones(2, 1, device=device), "b": torch.tensor([[1.0], [2.0], [3.0]], device=device)}
    edges = {
        ("a", "r1", "b"): torch.empty(2, 0, dtype=torch.long, device=device),
        ("b", "r2", "b"): torch.tensor([[0], [1]], device=device),
    }
    with gsp.patch_pyg():
        same(conv(x, edges)["b"], [[0], [1], [0]])


def test_h03_parallel_edges(device: str) -> None:
    edges, x = [[2] * 11, [0] * 11], [[10, 20, 30], [7, 7, 7], [1, 2, 3]]
    same(run(edges, x, "sum", device=device)[0][0], [11, 22, 33])
    same(run(edges, x, "mean", device=device)[0][0], [1, 2, 3])
    w = list(range(1, 12))
    for aggr, row in {"sum": [66, 132, 198], "mean": [6, 12, 18], "max": [11, 22, 33], "min": [1, 2, 3]}.items():
        out, _, by_weight = run(edges, x, aggr, w, device=device)
        same(out, [row, [0] * 3, [0] * 3])
        if aggr == "sum":
            same(by_weight, [6] * 11)


def test_h04_weights_follow_the_callers_order(device: str) -> None:
    edges = torch.tensor([[3, 0, 2, 1, 0], [1, 2, 0, 2, 1]], device=device)
    x = torch.tensor([[1.0], [2], [3], [4]], device=device)
    layer = Plain()
    with gsp.patch_pyg():
        for order in (1, -1, 1):  # a plan is there; the weights change
            w = torch.tensor([1.0, 10, 100, 1000, 10000][::order], device=device)
            expected = torch.zeros(4, 1, device=device).index_add(0, edges[1], w[:, None] * x[edges[0]])
            same(layer(x, edges, w), expected)
    out, grad, by_weight = run(edges, x, "sum", [1, 10, 100, 1000, 10000], device=device)
    same(out, [[300], [10004], [2010], [0]])
    same(by_weight, [4, 1, 3, 2, 1])
    same(grad, [[10010], [1000], [100], [1]])


def test_h05_existing_self_loops(device: str) -> None:
    conv = tg.GCNConv(1, 1, bias=False).to(device)
    nn.init.ones_(conv.lin.weight)
    edges = torch.tensor([[0, 0, 1], [0, 1, 0]], device=device)
    x = torch.tensor([[2.0], [4.0]], device=device)
    with gsp.patch_pyg():
        for _ in range(2):
            same(conv(x, edges, torch.tensor([3.0, 1, 1], device=device)), [[2.914213562], [2.707106781]])
            same(conv(x, edges), [[3], [3]])


def test_h06_trailing_isolated_nodes(device: str) -> None:
    same(run([[0, 1, 3], [1, 0, 4]], [[1], [2], [4], [8], [16]], device=device)[0], [[2], [1], [0], [0], [8]])


@pytest.mark.parametrize(
    ("edges", "error", "says"),
    [
        ([[0, 4], [1, 2]], IndexError, r"Found indices in 'edge_index' that are larger than 3 \(got 4\).*\[0, 4\)"),
        ([[0, -1], [1, 2]], IndexError, r"Found negative indices in 'edge_index' \(got -1\)"),
        ([[0, 1], [1, 4]], ValueError, r"Encountered invalid 'dim_size' \(got '4' but expected >= '5'\)"),
        ([[0, 1], [1, -2]], (IndexError, ValueError, RuntimeError), "-2"),
    ],
)
def test_h07_wrong_indices(edges: Any, error: Any, says: str, device: str) -> None:
    x = torch.arange(8.0, device=device).view(4, 2)
    edge_index = torch.tensor(edges, device=device)
    for layer in (Plain(), Plain("max"), Plain(["sum", "max"]), tg.GraphConv(2, 2).to(device)):
        if device == "cpu":
            with pytest.raises(error, match=says):
                layer(x, edge_index)  # what PyG says
        with gsp.patch_pyg():
            with pytest.raises(error, match=says):
                layer(x, edge_index)
            good = Plain()(x, torch.tensor([[0, 1], [2, 2]], device=device))
            same(good, [[0, 0], [0, 0], [2, 4], [0, 0]])


def test_h10_strides_and_offsets(device: str) -> None:
    edges = torch.tensor([[5, 1, 2], [0, 0, 3]], device=device)
    layer = Plain()
    leaf = torch.tensor([[1.0, 2.0]], device=device, requires_grad=True)
    with gsp.patch_pyg():
        a = torch.arange(12.0, device=device).view(2, 6).t()
        same(layer(a, edges), [[6, 18], [0, 0], [0, 0], [2, 8], [0, 0], [0, 0]])
        out = layer(leaf.expand(6, 2), edges)
        same(out, [[2, 4], [0, 0], [0, 0], [1, 2], [0, 0], [0, 0]])
        out.sum().backward()
        same(leaf.grad, [[3, 3]])
        c = torch.arange(21.0, device=device)[1:].view(5, 4)
        same(layer(c, torch.tensor([[4, 1], [0, 0]], device=device))[0], [22, 24, 26, 28])
        wide = torch.arange(24.0, device=device).view(6, 4)
        same(layer(wide[:, ::2], edges), layer(wide[:, ::2].contiguous(), edges))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_h11_ties_split_as_in_pyg(dtype: torch.dtype, device: str) -> None:
    third = 1 / 3
    out, grad, _ = run([[0, 1, 2], [3, 3, 3]], [[5], [5], [5], [1]], "max", device=device, dtype=dtype)
    same(out[3], [5])
    same(grad, [[third], [third], [third], [0]])
    same(run([[0, 0], [1, 1]], [[4], [0]], "max", device=device, dtype=dtype)[1], [[1], [0]])


def test_ties_at_zero_are_those_of_torch(device: str) -> None:
    """scatter_reduce_ counts the zero that it starts from as one more winner: part of the gradient goes nowhere."""
    edges = torch.tensor([[0, 1, 2, 0], [3, 3, 3, 1]], device=device)
    x = torch.tensor([[0.0], [0], [-1], [2]], device=device)
    expected = []
    for aggr in ("max", "min"):
        leaf = x.clone().requires_grad_()
        Plain(aggr)(leaf, edges).sum().backward()
        expected.append(leaf.grad)
    assert float(expected[0][1]) == pytest.approx(1 / 3)
    for aggr, want in zip(("max", "min"), expected, strict=True):
        same(run(edges, x, aggr, device=device)[1], want)


def test_h12_nan_and_infinity(device: str) -> None:
    nan, inf = math.nan, math.inf
    x = [[1, 2], [nan, 4], [3, -1], [0, 0]]
    for order in itertools.permutations(range(3)):
        expected = {"max": [nan, 4], "min": [nan, -1], "sum": [nan, 5], "mean": [nan, 5 / 3]}
        for aggr, row in expected.items():
            same(run([list(order), [3, 3, 3]], x, aggr, device=device)[0][3], row)
    same(run([[0, 1], [2, 2]], [[-inf], [-inf], [0]], "max", device=device)[0][2], [-inf])


@pytest.mark.parametrize("by_linear", [False, True])
def test_h16_autocast(by_linear: bool, device: str) -> None:
    edges = torch.tensor([[0, 1], [1, 0]], device=device)
    x = torch.ones(2, 2, device=device, requires_grad=True)
    w = torch.tensor([2.0, 3.0], device=device, requires_grad=True)
    linear = nn.Linear(2, 2, bias=False).to(device)
    nn.init.eye_(linear.weight)
    with gsp.patch_pyg():
        before = kernel_calls()
        with torch.autocast(device, torch.bfloat16):
            out = Plain()(linear(x) if by_linear else x, edges, w)
        out.float().sum().backward()
        assert kernel_calls() > before
    same(out.float(), [[3, 3], [2, 2]])
    same(w.grad, [2, 2])
    same(x.grad, [[2, 2], [3, 3]])
    assert x.grad.dtype == w.grad.dtype == torch.float32


def test_h17_gradient_of_weights(device: str) -> None:
    edges = torch.tensor([[0, 0, 2], [1, 2, 1]], device=device)
    upstream = torch.tensor([[1.0, 1], [1, 0], [0, 2]], device=device)
    expected = {
        "sum": ([[0, 0], [-4.5, -5], [2, 4]], [1, 4, 5], [[0.5, 4], [0, 0], [-1, 0]]),
        "mean": ([[0, 0], [-2.25, -2.5], [2, 4]], [0.5, 4, 2.5], [[0.25, 4], [0, 0], [-0.5, 0]]),
    }
    for aggr, (value, by_weight, by_x) in expected.items():
        x = torch.tensor([[1.0, 2], [3, 4], [5, 6]], device=device, requires_grad=True)
        w = torch.tensor([0.5, 2, -1], device=device, requires_grad=True)
        with gsp.patch_pyg():
            out = Plain(aggr)(x, edges, w)
            out.backward(upstream)
        same(out, value)
        same(w.grad, by_weight)
        same(x.grad, by_x)


def test_h18_second_derivatives_and_repeated_backward(device: str) -> None:
    edges = torch.tensor([[0], [1]], device=device)
    x = torch.tensor([[3.0], [0.0]], device=device, requires_grad=True)
    w = torch.tensor([2.0], device=device, requires_grad=True)
    with gsp.patch_pyg():
        loss = Plain()(x, edges, w).square().sum()
        by_w, by_x = torch.autograd.grad(loss, (w, x), create_graph=True)
        twice = torch.autograd.grad(by_w.sum(), (w, x), retain_graph=True)
        same(by_w, [36])
        same(twice[0], [18])
        same(twice[1], [[24], [0]])
        same(torch.autograd.grad(by_x[0, 0], x)[0], [[8], [0]])
        out = Plain()(x, edges, w)
        out.sum().backward(retain_graph=True)
        out.sum().backward()
    same(x.grad, [[4], [0]])
    same(w.grad, [6])


def test_h23_compile(device: str) -> None:
    conv = tg.GraphConv(2, 2).to(device)
    edges = torch.tensor([[0, 0, 2], [1, 2, 1]], device=device)
    x = torch.tensor([[1.0, 2], [3, 4], [5, 6]], device=device)
    expected = conv(x, edges)
    with gsp.patch_pyg():
        torch._dynamo.reset()
        compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, edges), expected)


def test_h26_cached_layers_and_other_graphs(device: str) -> None:
    first, second = torch.tensor([[0, 1], [1, 0]], device=device), torch.tensor([[0, 1], [2, 2]], device=device)
    conv = tg.GCNConv(2, 2, cached=True).to(device)
    with gsp.patch_pyg():
        conv(torch.ones(6, 2, device=device), torch.tensor([[0, 1, 4], [1, 0, 5]], device=device))
        with pytest.raises((IndexError, ValueError)):
            conv(torch.ones(3, 2, device=device), first)
        conv = tg.GCNConv(2, 2, cached=True).to(device)
        x = torch.randn(3, 2, device=device)
        assert torch.equal(conv(x, first), conv(x, second))  # as in PyG: what the flag says
        ones = torch.ones(3, 1, device=device)
        same(Plain()(ones, first), [[1], [1], [0]])
        same(Plain()(ones, second), [[0], [0], [2]])


def test_h27_directions(device: str) -> None:
    edges, x = [[0, 0, 3], [1, 2, 2]], [[1], [10], [100], [1000]]
    same(run(edges, x, device=device)[0], [[0], [1], [1001], [0]])
    same(run(edges, x, device=device, flow="target_to_source")[0], [[110], [0], [0], [100]])
    x_src = torch.tensor([[1.0], [2], [4]], device=device, requires_grad=True)
    bipartite = torch.tensor([[0, 2, 2], [1, 4, 0]], device=device)
    with gsp.patch_pyg():
        out = Plain()((x_src, None), bipartite, size=(3, 5))
        out.sum().backward()
    same(out, [[4], [1], [0], [0], [4]])
    same(x_src.grad, [[1], [0], [2]])


def test_h29_batched_features(device: str) -> None:
    x = torch.arange(12.0).view(2, 3, 2)
    out, grad, _ = run([[0, 1], [2, 2]], x, device=device, node_dim=-2)
    same(out, [[[0, 0], [0, 0], [2, 4]], [[0, 0], [0, 0], [14, 16]]])
    same(grad, torch.tensor([1.0, 1, 0]).view(1, 3, 1).expand(2, 3, 2))
    square = torch.randn(3, 3, 2, device=device)  # as many batches as nodes
    edges = torch.tensor([[0, 1], [2, 2]], device=device)
    expected = Plain(node_dim=-2)(square, edges)
    with gsp.patch_pyg():
        same(Plain(node_dim=-2)(square, edges), expected)


def test_h30_complex_and_integer_features_are_left_to_pyg(device: str) -> None:
    edges = torch.tensor([[0, 1], [2, 2]], device=device)
    x = torch.tensor([[1 + 1j], [2 - 3j], [0]], device=device)
    w = torch.tensor([1 + 2j], device=device, requires_grad=True)
    y = torch.tensor([[3 - 1j], [0]], device=device, requires_grad=True)
    with gsp.patch_pyg():
        before = gsp.stats()
        assert complex(Plain()(x, edges)[2]) == 3 - 2j
        Plain()(y, torch.tensor([[0], [1]], device=device), w)[1].real.sum().backward()
        whole = torch.tensor([[9007199254740993], [1], [0]], device=device)
        assert Plain()(whole, edges)[2].item() == 9007199254740994
        assert gsp.stats()["fallbacks"] == before["fallbacks"] + 3
        assert gsp.stats()["kernel_calls"] == before["kernel_calls"]
    assert complex(w.grad) == 3 + 1j and complex(y.grad[0]) == 1 - 2j


def test_h36_explanations(device: str) -> None:
    from torch_geometric.explain import Explainer, GNNExplainer
    from torch_geometric.nn import MessagePassing

    edges = torch.tensor([[0, 1], [2, 2]], device=device)
    x = torch.tensor([[2.0], [4], [0]], device=device)
    layer = Plain()
    with gsp.patch_pyg():
        same(layer(x, edges)[2], [6.0])
        mask = torch.zeros(2, device=device, requires_grad=True)
        layer.explain, layer._edge_mask, layer._apply_sigmoid = True, mask, True
        out = layer(x, edges)
        out.sum().backward()
        layer.explain = False
        same(layer(x, edges)[2], [6.0])
    same(out[2], [3.0])
    same(mask.grad, [0.5, 1.0])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([tg.GCNConv(4, 4), tg.SAGEConv(4, 4), tg.GINConv(nn.Linear(4, 3))])

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            for conv in self.convs:
                x = conv(x, edge_index).relu()
            return x

    torch.manual_seed(0)
    model = Net().to(device).eval()
    assert all(isinstance(c, MessagePassing) for c in model.convs)
    x = torch.randn(10, 4, device=device)
    edges = torch.randint(10, (2, 40), device=device)

    def explain() -> list[Tensor]:
        torch.manual_seed(1)
        explainer = Explainer(
            model,
            GNNExplainer(epochs=5),
            explanation_type="model",
            node_mask_type="attributes",
            edge_mask_type="object",
            model_config={"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"},
        )
        found = explainer(x, edges, index=3)
        return [found.node_mask, found.edge_mask]

    expected = explain()
    with gsp.patch_pyg():
        before = kernel_calls()
        got = explain()
        assert kernel_calls() > before
    assert_same(got, expected, 1e-4)
