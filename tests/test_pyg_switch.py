"""Turning the PyG plugin on and off: what it replaces, for whom, what survives copying, what is remembered."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pyg_layers import (
    Custom,
    MessagePassing,
    Plain,
    assert_same,
    changes,
    kernel_calls,
    outputs_and_gradients,
    random_graph,
    tg,
)
from torch import Tensor, nn

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.integrations.pyg import switch

pytestmark = pytest.mark.pyg

N, E, F = 30, 120, 4
NAMES = (
    "gcn_norm",
    "add_self_loops",
    "add_self_loops_fn",
    "add_remaining_self_loops",
    "remove_self_loops",
    "get_laplacian",
)


@pytest.fixture(autouse=True)
def all_off() -> Iterator[None]:
    gc.collect()
    switch.add_patch(0)  # looks again: layers that other files accelerated have died since
    before = replaced()
    yield
    if replaced() != before:
        gc.collect()  # of accelerated layers in cycles
        assert replaced() == before, "a test left something patched"


def replaced() -> dict[str, Any]:
    """What stands in the places where the plugin puts its own."""
    from torch_geometric.nn import MessagePassing
    from torch_geometric.nn.aggr import Aggregation

    found = {n: MessagePassing.__dict__.get(n) for n in ("_index_select_safe", "__call__", "__setstate__")}
    found["aggregate"] = Aggregation.__dict__.get("__call__")
    found |= {cls.__name__: cls.forward for cls in (tg.GCNConv, tg.SAGEConv, tg.GINConv, tg.GraphConv)}
    for name, module in list(sys.modules.items()):
        if name.startswith("torch_geometric.nn."):
            made_by_pyg = module.__spec__ is None or "/tmp" in str(getattr(module, "__file__", ""))
            for attribute, value in vars(module).items():
                ours = isinstance(value, types.FunctionType) and "__original_fn" in vars(value)
                if ours or (attribute in NAMES and not made_by_pyg):
                    found[f"{name}.{attribute}"] = value
    return found


def model(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = tg.GCNConv(F, F), tg.SAGEConv(F, F, aggr="max")

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.second(self.first(x, edge_index).relu(), edge_index)

    return Net().to(device)


def data(device: str = "cpu") -> tuple[Tensor, Tensor]:
    return torch.randn(N, F, device=device), random_graph(N, N, E, device=device)


def runs_kernels(m: nn.Module, x: Tensor, edge_index: Tensor) -> bool:
    before = kernel_calls()
    m(x, edge_index)
    return kernel_calls() > before


# ---------------------------------------------------------------------- patch_pyg


def test_importing_patches_nothing() -> None:
    code = """
        import torch_geometric.nn as tg
        before = tg.MessagePassing._index_select_safe, tg.aggr.Aggregation.__call__
        import gnn_spmm_plugin as gsp
        gsp.patch_pyg, gsp.accelerate, gsp.report
        assert (tg.MessagePassing._index_select_safe, tg.aggr.Aggregation.__call__) == before
        assert "__call__" not in tg.MessagePassing.__dict__
    """
    run_python(code)


def run_python(code: str, *args: str, **environment: str) -> str:
    root = str(Path(gsp.__file__).parent.parent)
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", textwrap.dedent(code), *args]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path} | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "second", ["EdgeConv(Linear(16, 8))", "SAGEConv(8, 8, aggr='median')", "TransformerConv(8, 8)", "GCNConv(8, 8)"]
)
def test_nothing_is_said_at_exit(second: str) -> None:
    """What still lives when the interpreter ends dies while modules are taken apart."""
    code = f"""
        import torch, gnn_spmm_plugin as gsp
        from torch.nn import Linear
        from torch_geometric.nn import EdgeConv, GATConv, GCNConv, SAGEConv, Sequential, TransformerConv
        x, edge_index = torch.randn(50, 8), torch.randint(0, 50, (2, 200))
        model = gsp.accelerate(Sequential("x, e", [(GATConv(8, 8), "x, e -> x"), ({second}, "x, e -> x")]))
        out = model(x, edge_index)
        again = gsp.spmm(gsp.Graph.from_edge_index(edge_index, 50), x)
    """
    assert "Exception ignored" not in run_python(code)


@pytest.mark.parametrize("value", ["1", "true", "YES", "on"])
def test_the_switch_in_the_environment(value: str) -> None:
    code = """
        import torch, gnn_spmm_plugin as gsp, torch_geometric.nn as tg
        model = gsp.accelerate(tg.GCNConv(4, 4))
        with gsp.patch_pyg():
            model(torch.randn(3, 4), torch.tensor([[0, 1], [1, 2]]))
        print(gsp.stats()["kernel_calls"], gsp.report(model).rows[0]["status"])
    """
    assert run_python(code, GSP_DISABLE=value).split("\n")[-2].startswith("0 ")
    assert not run_python(code, GSP_DISABLE="0").split("\n")[-2].startswith("0 ")


def test_an_environment_that_names_no_kernel_is_to_blame_itself() -> None:
    code = """
        import gnn_spmm_plugin as gsp, torch_geometric.nn as tg
        gsp.accelerate(tg.GCNConv(4, 4))
    """
    said = run_python(code, GSP_KERNEL="foo")
    assert "PyG stays as it is: a self test failed: ValueError: unknown kernel 'foo' for cpu" in said


def test_patches_are_counted_and_undone_exactly() -> None:
    before = replaced()
    m, (x, edge_index) = model(), data()
    first = gsp.patch_pyg()
    assert replaced() != before
    second = gsp.patch_pyg()
    gsp.unpatch_pyg()
    assert runs_kernels(m, x, edge_index)
    first.undo()
    assert replaced() == before and not runs_kernels(m, x, edge_index)
    for undo in (first.undo, second.undo, gsp.unpatch_pyg):  # nothing left to undo
        undo()
    assert replaced() == before
    with gsp.patch_pyg() as outer:
        with gsp.patch_pyg():
            assert runs_kernels(m, x, edge_index)
        assert runs_kernels(m, x, edge_index)
        outer.undo()
        assert not runs_kernels(m, x, edge_index)
    with outer:  # usable again
        assert runs_kernels(m, x, edge_index)
    assert replaced() == before


def test_exceptions_end_the_patch() -> None:
    before = replaced()
    with pytest.raises(ZeroDivisionError), gsp.patch_pyg(), gsp.patch_pyg():
        raise ZeroDivisionError
    assert replaced() == before
    x, edge_index = data()

    def fails(x: Tensor, w: Tensor) -> Tensor:
        raise KeyError("inside")

    with gsp.patch_pyg():
        with pytest.raises(KeyError):
            Custom(fails)(x, edge_index)
        assert runs_kernels(model(), x, edge_index)


def test_somebody_else_on_top_is_left_alone() -> None:
    from torch_geometric.nn import MessagePassing

    m, (x, edge_index) = model(), data()
    expected = m(x, edge_index)
    original = MessagePassing._index_select_safe
    patch = gsp.patch_pyg()
    ours = MessagePassing._index_select_safe
    try:
        MessagePassing._index_select_safe = lambda self, src, index: ours(self, src, index)
        theirs = MessagePassing._index_select_safe
        patch.undo()
        assert MessagePassing._index_select_safe is theirs
        before = kernel_calls()
        assert torch.equal(m(x, edge_index), expected) and kernel_calls() == before
        with gsp.patch_pyg():
            assert_same([m(x, edge_index).detach()], [expected.detach()])
        assert MessagePassing._index_select_safe is theirs
    finally:
        MessagePassing._index_select_safe = original


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"policy must be one of auto, ra, paramspmm, dualgcn, csr.*'fast'"):
        gsp.patch_pyg(policy="fast")
    with pytest.raises(TypeError, match=r"torch.nn.Module, got Tensor"):
        gsp.accelerate(torch.ones(1))
    with pytest.raises(ValueError, match="policy"):
        gsp.accelerate(model(), policy="fast")


def test_policy_is_passed_on() -> None:
    m, (x, edge_index) = model(), data()
    expected = m(x, edge_index)
    with gsp.patch_pyg(policy="csr"):
        assert_same([m(x, edge_index).detach()], [expected.detach()])
        assert runs_kernels(m, x, edge_index)


# ---------------------------------------------------------------------- accelerate


def test_only_this_model() -> None:
    before = replaced()
    mine, other, (x, edge_index) = model(), model(), data()
    expected = outputs_and_gradients(mine, lambda x: mine(x, edge_index), x)
    keys = list(mine.state_dict())
    assert gsp.accelerate(mine) is mine
    assert list(mine.state_dict()) == keys
    assert runs_kernels(mine, x, edge_index) and not runs_kernels(other, x, edge_index)
    assert_same(outputs_and_gradients(mine, lambda x: mine(x, edge_index), x), expected)
    with gsp.patch_pyg():
        assert runs_kernels(other, x, edge_index)
    assert runs_kernels(mine, x, edge_index) and not runs_kernels(other, x, edge_index)
    gsp.restore(mine.first)
    assert runs_kernels(mine, x, edge_index)
    assert gsp.restore(mine) is mine
    assert not runs_kernels(mine, x, edge_index)
    assert vars(mine.second) == vars(mine.second) and not any(k.startswith("_gsp") for k in vars(mine.second))
    assert replaced() == before


def test_a_dead_model_leaves_nothing_patched() -> None:
    before = replaced()
    m, (x, edge_index) = gsp.accelerate(model()), data()
    m(x, edge_index)
    alive = weakref.ref(m.first)
    del m
    gc.collect()
    assert alive() is None
    with gsp.patch_pyg():
        pass
    assert replaced() == before


def copies(m: nn.Module) -> dict[str, nn.Module]:
    buffer = io.BytesIO()
    torch.save(m.first, buffer)
    buffer.seek(0)
    averaged = torch.optim.swa_utils.AveragedModel(m.first)
    return {
        "deepcopy": copy.deepcopy(m.first),
        "pickle": pickle.loads(pickle.dumps(m.first)),
        "save": torch.load(buffer, weights_only=False),
        "averaged": averaged,
        "copy": copy.copy(m.first),
    }


@pytest.mark.parametrize("on", ["accelerate", "patch"])
def test_copies_of_a_layer_that_ran(on: str) -> None:  # H24
    m, (x, edge_index) = model(), data()
    theta = torch.randn(E, requires_grad=True)
    expected = m.first(x, edge_index, theta.sigmoid()).detach()
    patch = gsp.patch_pyg() if on == "patch" else gsp.accelerate(m)
    m.first(x, edge_index, theta.sigmoid()).sum().backward()
    made = copies(m)
    if on == "accelerate":
        gsp.restore(m)
    del m
    for name, conv in made.items():
        before = kernel_calls()
        got = conv(x, edge_index, theta.sigmoid()).detach()
        assert kernel_calls() > before, name
        assert_same([got], [expected])
        gsp.restore(conv) if on == "accelerate" else None
        copy.deepcopy(edge_index)
    if on == "patch":
        patch.undo()


def test_state_dict_goes_both_ways() -> None:
    m, (x, edge_index) = gsp.accelerate(model()), data()
    plain = model()
    plain.load_state_dict(m.state_dict())
    m.load_state_dict(plain.state_dict())
    assert_same([plain(x, edge_index).detach()], [m(x, edge_index).detach()])
    gsp.restore(m)


def test_loading_in_processes_with_and_without_the_package(tmp_path: Path) -> None:
    conv, (x, edge_index) = gsp.accelerate(tg.GCNConv(F, F)), data()
    expected = conv(x, edge_index).detach()
    torch.save((conv, x, edge_index, expected), tmp_path / "layer.pt")
    gsp.restore(conv)
    code = """
        import sys, torch
        if sys.argv[2] == "absent":
            sys.modules["gnn_spmm_plugin"] = None
        conv, x, edge_index, expected = torch.load(sys.argv[1], weights_only=False)
        torch.testing.assert_close(conv(x, edge_index), expected)
        if sys.argv[2] == "present":
            import gnn_spmm_plugin as gsp
            assert gsp.stats()["kernel_calls"] == 0
            torch.testing.assert_close(gsp.accelerate(conv)(x, edge_index), expected)
            assert gsp.stats()["kernel_calls"] > 0
    """
    for case in ("absent", "present"):
        run_python(code, str(tmp_path / "layer.pt"), case)


class Half(MessagePassing):
    """Its weighted sum is fused, its scores are not."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x, s=x.sum(1, keepdim=True))
        return out

    def message(self, s_i: Tensor, s_j: Tensor, x_j: Tensor) -> Tensor:
        return x_j * torch.cat([s_i, s_j], 1).amax(1, keepdim=True)


def test_strict_names_the_layer_and_the_reason() -> None:
    m, (x, edge_index) = nn.ModuleDict({"fine": tg.GINConv(nn.Linear(F, F)), "bad": Half()}), data()
    gsp.accelerate(m, strict=True)
    assert runs_kernels(m["fine"], x, edge_index)
    with pytest.raises(RuntimeError, match=r"bad \(Half\) was accelerated with strict=True.*cat needs"):
        m["bad"](x, edge_index)
    with pytest.raises(RuntimeError, match=r"fine \(GINConv\).*torch.int64"):
        m["fine"](torch.ones(N, F, dtype=torch.long), edge_index)
    other = copy.deepcopy(m["bad"])
    with pytest.raises(RuntimeError, match="Half was accelerated with strict=True"):
        other(x, edge_index)
    gsp.restore(other)
    gsp.accelerate(m)
    m["bad"](x, edge_index)
    gsp.restore(m)


# ---------------------------------------------------------------------- environments


def test_disabled_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSP_DISABLE", "1")
    before = replaced()
    m, (x, edge_index) = model(), data()
    with gsp.patch_pyg():
        assert replaced() == before and not runs_kernels(m, x, edge_index)
    assert not runs_kernels(gsp.accelerate(m), x, edge_index)
    gsp.unpatch_pyg()


def test_untested_pyg_is_left_alone_with_one_warning() -> None:
    code = """
        import torch, torch_geometric
        torch_geometric.__version__ = "3.1.0"
        import gnn_spmm_plugin as gsp
        from torch_geometric.nn import GINConv
        conv = gsp.accelerate(GINConv(torch.nn.Linear(2, 2)))
        with gsp.patch_pyg():
            conv(torch.ones(2, 2), torch.tensor([[0], [1]]))
        gsp.patch_pyg()
        gsp.unpatch_pyg()
        assert gsp.stats()["kernel_calls"] == 0
    """
    said = run_python(code)
    assert said.count("torch_geometric 3.1.0 is not one that was tested") == 1


def test_changed_pyg_is_left_alone() -> None:
    for change, said in {
        "del MessagePassing._index_select_safe": "has no MessagePassing._index_select_safe",
        "Aggregation.reduce = lambda self, x, *a, **k: x": "self test",
    }.items():
        code = f"""
            import torch
            from torch_geometric.nn import MessagePassing
            from torch_geometric.nn.aggr import Aggregation
            {change}
            import gnn_spmm_plugin as gsp
            gsp.patch_pyg()
            assert "__call__" not in MessagePassing.__dict__
        """
        assert said in run_python(code)


def test_without_pyg_the_error_names_the_extra() -> None:
    code = """
        import sys
        sys.modules["torch_geometric"] = None
        import torch, gnn_spmm_plugin as gsp
        model = torch.nn.Linear(1, 1)
        for call in (gsp.patch_pyg, lambda: gsp.accelerate(model), lambda: gsp.report(model)):
            try:
                call()
            except ImportError as e:
                assert "gnn-spmm-plugin[pyg]" in str(e)
            else:
                raise AssertionError
    """
    run_python(code)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_of_patched_layers() -> None:
    x, edge_index = data()
    layers = [tg.GCNConv(F, F), tg.SAGEConv(F, F, aggr="max"), tg.ChebConv(F, F, 2), tg.SGConv(F, F), tg.APPNP(2, 0.1)]
    scripts: list[Any] = []
    with gsp.patch_pyg():
        for layer in layers:
            expected = layer(x, edge_index).detach()
            scripts.append(scripted := torch.jit.script(layer))
            assert_same([scripted(x, edge_index).detach()], [expected], 1e-5)
        torch.testing.assert_close(layers[2](x, edge_index), scripts[2](x, edge_index))
        traced = torch.jit.trace(layers[0], (x, edge_index))
        assert_same([traced(x, edge_index).detach()], [layers[0](x, edge_index).detach()], 1e-5)


@pytest.mark.parametrize("on", ["accelerate", "patch"])
def test_compile_of_patched_models_breaks_no_more_graphs(on: str) -> None:
    m, (x, edge_index) = model(), data()
    expected = m(x, edge_index).detach()

    def graphs() -> int:
        torch._dynamo.reset()
        seen: list[Any] = []

        def backend(graph: Any, inputs: Any) -> Any:
            seen.append(graph)
            return graph.forward

        out = torch.compile(m, backend=backend)(x, edge_index)
        assert_same([out.detach()], [expected], 1e-5)
        return len(seen)

    stock = graphs()
    patch = gsp.patch_pyg() if on == "patch" else gsp.accelerate(m)
    try:
        m(x, edge_index)
        assert graphs() <= stock
    finally:
        patch.undo() if on == "patch" else gsp.restore(m)


def test_checkpointed_layers(device: str) -> None:
    m, (x, edge_index) = model(device), data(device)

    def call(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(m, x, edge_index, use_reentrant=False)

    expected = outputs_and_gradients(m, call, x)
    with gsp.patch_pyg():
        for _ in range(2):
            assert_same(outputs_and_gradients(m, call, x), expected)


@pytest.mark.parametrize("name", ["FeaStConv", "ResGatedGraphConv", "FiLMConv", "CGConv", "GATv2Conv"])
def test_checkpointed_layers_that_stop_trying(device: str, name: str) -> None:
    """Nothing may change between a forward pass and its repetition: a checkpoint matches saved tensors by position."""
    from gnn_spmm_plugin.integrations.pyg.records import PATIENCE

    x, edge_index = data(device)
    torch.manual_seed(0)
    layers = [tg.CGConv(F), tg.CGConv(F)] if name == "CGConv" else [getattr(tg, name)(F, F), tg.SAGEConv(F, F)]
    m = nn.ModuleList(layers).double().to(device)

    def call(x: Tensor) -> Tensor:
        def both(x: Tensor) -> Tensor:
            return m[1](m[0](x, edge_index).tanh() + x, edge_index)  # type: ignore[no-any-return]

        return torch.utils.checkpoint.checkpoint(both, x, use_reentrant=False)

    expected = outputs_and_gradients(m, call, x.double())
    with gsp.patch_pyg():
        for _ in range(PATIENCE + 2):
            assert_same(outputs_and_gradients(m, call, x.double()), expected)


class Doubled(torch.autograd.Function):
    """Does not look at its input, so a lazy one stays lazy."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return t * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("where", ["layer", "class", "aggregation"])
def test_methods_that_are_exchanged_later(device: str, where: str, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(tg.SAGEConv):  # type: ignore[misc]
        pass

    x, edge_index = data(device)
    conv = (Mine if own else tg.SAGEConv)(F, F).to(device)

    def exchange() -> None:
        if where == "layer":
            conv.message = lambda x_j: Doubled.apply(x_j)
        elif where == "class":
            monkeypatch.setattr(tg.SAGEConv, "message", lambda self, x_j: Doubled.apply(x_j))
        else:
            old = conv.aggr_module.forward
            conv.aggr_module.forward = lambda *args, **kwargs: old(*args, **kwargs) * 2

    with gsp.patch_pyg():
        before = conv(x, edge_index)
        exchange()
        got = outputs_and_gradients(conv, lambda x: conv(x, edge_index), x)
    expected = outputs_and_gradients(conv, lambda x: conv(x, edge_index), x)
    assert_same(got, expected)
    assert not torch.allclose(got[0], before.detach())


@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
def test_gradients_of_nodes_without_edges(device: str, factor: float) -> None:
    x, edge_index = data(device)
    layer = Custom(lambda x, w: x * factor)
    edge_index = edge_index % (N - 2)
    expected = outputs_and_gradients(layer, lambda x: layer(x, edge_index), x)
    with gsp.patch_pyg():
        got = outputs_and_gradients(layer, lambda x: layer(x, edge_index), x)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
    assert any((t[-2:] == 0).all() for t in got if t.shape == x.shape)


def test_module_hooks_and_propagate_hooks(device: str) -> None:
    x, edge_index = data(device)
    seen: list[str] = []
    conv = tg.GraphConv(F, F).to(device)
    conv.register_forward_hook(lambda m, i, o: seen.append("forward") or o * 2)
    conv.register_propagate_forward_pre_hook(lambda m, i: seen.append("propagate"))
    conv.register_message_forward_hook(lambda m, i, o: seen.append("message") or o * 3)
    conv.register_aggregate_forward_pre_hook(lambda m, i: seen.append("aggregate pre"))
    conv.register_aggregate_forward_hook(lambda m, i, o: seen.append("aggregate"))
    conv.aggr_module.register_forward_hook(lambda m, i, o: seen.append("sum"))
    expected = outputs_and_gradients(conv, lambda x: conv(x, edge_index), x)
    stock, seen[:] = list(seen), []
    with gsp.patch_pyg():
        got = outputs_and_gradients(conv, lambda x: conv(x, edge_index), x)
    assert seen == stock and len(stock) == 6
    assert_same(got, expected)


def test_decomposed_layers(device: str) -> None:
    x, edge_index = data(device)
    conv = tg.GCNConv(F, F, decomposed_layers=2).to(device)
    expected = outputs_and_gradients(conv, lambda x: conv(x, edge_index), x)
    with gsp.patch_pyg():
        before = kernel_calls()
        assert_same(outputs_and_gradients(conv, lambda x: conv(x, edge_index), x), expected)
        assert kernel_calls() - before == 4


# ---------------------------------------------------------------------- gcn_norm and self loops, remembered


class OwnGCN(tg.GCNConv if tg is not None else nn.Module):  # type: ignore[misc]
    """Not PyG's own class, so that no adapter is meant for it."""


def test_norm_is_computed_once_and_found_by_identity(device: str, fresh_cache: None) -> None:
    conv, (x, edge_index) = OwnGCN(F, F).to(device), data(device)
    with gsp.patch_pyg():
        conv(x, edge_index)
        changed = changes(lambda: conv(x, edge_index))
        assert changed["memo_hits"] == 1 and changed["plan_hits"] == 1 and "graphs_built" not in changed
        changed = changes(lambda: conv(x, edge_index.clone()))  # equal content, another tensor
        assert changed["l2_hits"] == 1 and "memo_hits" not in changed
    assert "memo_hits" not in changes(lambda: conv(x, edge_index))


def stale(edge_index: Tensor, weight: Tensor, how: str) -> None:
    if how == "in place":
        edge_index[1, :5] = 3
    elif how == "view in place":
        edge_index[0].copy_(edge_index[0].flip(0))
    elif how == "numpy":
        edge_index.numpy()[1, :5] = 3
    elif how == "data":
        edge_index.data[1, :5] = 3
    elif how == "weight in place":
        weight.mul_(2)[3] = 0
    elif how == "weight numpy":
        weight.numpy()[:7] = 5
    elif how == "set":
        edge_index.set_(random_graph(N, N, E, seed=9).to(edge_index.device))
    elif how == "transpose":
        edge_index.copy_(edge_index.flip(0))


WAYS = ("in place", "view in place", "numpy", "data", "weight in place", "weight numpy", "set", "transpose")


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["gcn", "my_gcn", "graph", "cluster", "cheb", "user"])
def test_stale_caches_are_noticed(name: str, weighted: bool, how: str, device: str) -> None:
    if device != "cpu" and how in ("numpy", "data", "weight numpy"):
        pytest.skip("writes that a GPU does not count: a documented limit")
    if name == "cluster" and weighted:
        pytest.skip("takes no weights")
    torch.manual_seed(0)
    layer = {
        "gcn": lambda: tg.GCNConv(F, F),
        "my_gcn": lambda: OwnGCN(F, F),
        "graph": lambda: tg.GraphConv(F, F),
        "cluster": lambda: tg.ClusterGCNConv(F, F),
        "cheb": lambda: tg.ChebConv(F, F, 3),
        "user": lambda: Plain(),
    }[name]().to(device)
    x, edge_index = data(device)
    weight = torch.rand(E, device=device) + 0.5
    extra = (weight,) if weighted else ()

    def call(x: Tensor) -> Tensor:
        return layer(x, edge_index, *extra)

    with gsp.patch_pyg():
        for _ in range(3):
            outputs_and_gradients(layer, call, x)
        stale(edge_index, weight, how)
        if device != "cpu" and weighted:  # of several loops at a node, which one's weight counts is chance on a GPU
            src, dst = edge_index
            dst.copy_(torch.where(src == dst, (dst + 1) % N, dst))
        got = outputs_and_gradients(layer, call, x)
    assert_same(got, outputs_and_gradients(layer, call, x), 1e-5)


def test_freed_and_reused_memory(fresh_cache: None) -> None:
    conv, x = OwnGCN(F, F), torch.randn(N, F)
    addresses, graphs = set(), []
    for seed in range(30):
        edge_index = random_graph(N, N, E, seed=seed)
        addresses.update([id(edge_index), edge_index.data_ptr()])
        expected = conv(x, edge_index).detach()
        with gsp.patch_pyg():
            gsp.accelerate(conv)  # what is remembered outlives the patch
            assert_same([conv(x, edge_index).detach()], [expected])
        graphs.append(changes(functools.partial(conv, x, edge_index)).get("memo_hits"))
        conv.__dict__.pop("_gsp_accelerated")
        del edge_index
    gsp.restore(conv)
    assert graphs == [1] * 30
    assert len(addresses) < 60  # or the test tests nothing


def test_views_and_slices_are_told_apart(device: str) -> None:
    conv, (x, edge_index) = Plain(), data(device)
    with gsp.patch_pyg():
        views = [edge_index[:, :60], edge_index[:, 60:], edge_index[:, ::2], edge_index.flip(0), edge_index[[1, 0]]]
        for _ in range(2):
            got = [conv(x, v) for v in views]
    assert_same(got, [conv(x, v) for v in views])


def test_remembered_results_are_not_handed_out_after_a_write(device: str) -> None:
    class Meddling(tg.GCNConv):
        def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
            edge_weight.mul_(2)
            return edge_weight.view(-1, 1) * x_j

    torch.manual_seed(0)
    conv, (x, edge_index) = Meddling(F, F).to(device), data(device)
    expected = conv(x, edge_index).detach()
    with gsp.patch_pyg():
        for _ in range(3):
            assert_same([conv(x, edge_index).detach()], [expected], 1e-5)


@pytest.mark.parametrize("own", [False, True])
def test_learned_weights_are_not_remembered(device: str, own: bool) -> None:
    conv, (x, edge_index) = (OwnGCN if own else tg.GCNConv)(F, F).to(device), data(device)
    w = torch.rand(E, device=device)
    expected = outputs_and_gradients(conv, lambda x, w: conv(x, edge_index, w), x, w)
    with gsp.patch_pyg():
        assert "memo_hits" not in changes(lambda: [conv(x, edge_index, w.requires_grad_()) for _ in range(2)])
        got = outputs_and_gradients(conv, lambda x, w: conv(x, edge_index, w), x, w)
    assert_same(got, expected)


@pytest.mark.parametrize("own", [False, True])
def test_dtypes_and_options_are_told_apart(device: str, own: bool) -> None:
    _, edge_index = data(device)
    cases = [
        (
            (OwnGCN if own else tg.GCNConv)(F, F, improved=improved, add_self_loops=loops, flow=flow).to(device, dtype),
            dtype,
        )
        for dtype in (torch.float32, torch.float64)
        for improved in (False, True)
        for loops in (False, True)
        for flow in ("source_to_target", "target_to_source")
    ]
    inputs = [torch.randn(N, F, dtype=dtype, device=device) for _, dtype in cases]
    expected = [conv(x, edge_index).detach() for (conv, _), x in zip(cases, inputs, strict=True)]
    with gsp.patch_pyg():
        for _ in range(2):
            for (conv, _), x, want in zip(cases, inputs, expected, strict=True):
                assert_same([conv(x, edge_index).detach()], [want])


def test_nothing_is_kept_alive(no_gc: None, fresh_cache: None) -> None:  # H25
    from gnn_spmm_plugin import cache

    convs = tg.GCNConv(F, F), OwnGCN(F, F)
    with gsp.patch_pyg():
        for seed in range(60):
            conv = convs[seed // 2 % 2]
            x, edge_index, w = torch.randn(N, F, requires_grad=True), random_graph(N, N, E, seed=seed), torch.rand(E)
            if seed % 2:
                edge_index[0, 7] = N + seed
                with pytest.raises(IndexError):
                    conv(x, edge_index)
            else:
                conv(x, edge_index, w).sum().backward()
            alive = [weakref.ref(t) for t in (x, edge_index, w)]
            del x, edge_index, w
            assert [r() for r in alive] == [None] * 3
        assert cache.cached_graphs() <= cache.MAX_GRAPHS + 1
        gsp.clear_cache()
        assert cache.cached_graphs() == 0


def test_clear_cache_forgets_norms(fresh_cache: None) -> None:
    conv, (x, edge_index) = OwnGCN(F, F), data()
    with gsp.patch_pyg():
        conv(x, edge_index)
        gsp.clear_cache()
        assert "memo_hits" not in changes(lambda: conv(x, edge_index))


def test_threads(device: str) -> None:  # H22 a
    convs = [tg.GCNConv(F, F).to(device), tg.SAGEConv(F, F, aggr="max").to(device)]
    graphs = [random_graph(N, N, E, seed=s, device=device) for s in range(6)]
    x = torch.randn(N, F, device=device)
    expected = [[conv(x, g).detach() for g in graphs] for conv in convs]
    wrong: list[Any] = []

    def work(number: int) -> None:
        try:
            for step in range(40):
                i, j = step % 2, (step + number) % 6
                assert_same([convs[i](x, graphs[j]).detach()], [expected[i][j]], 1e-5)
        except BaseException as e:
            wrong.append(e)

    with gsp.patch_pyg():
        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
    assert not wrong and not any(t.is_alive() for t in threads)


# ---------------------------------------------------------------------- report


def test_report() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gcn, self.part, self.edge = tg.GCNConv(F, F), Half(), tg.EdgeConv(nn.Linear(2 * F, F))
            self.unused = tg.SAGEConv(F, F)

    m, (x, edge_index) = Net(), data()
    with gsp.patch_pyg():
        for _ in range(2):
            for layer in (m.gcn, m.part, m.edge):
                layer(x, edge_index)
    found = gsp.report(m)
    by_kind = {row["kind"]: row for row in found.rows}
    assert [row["status"] for row in found.rows] == ["fused", "partly", "not", "not called"]
    assert by_kind["GCNConv"]["ops"] == {"normalised sum": 2} and by_kind["GCNConv"]["calls"] == 2
    assert by_kind["GCNConv"]["reasons"] == {}
    assert any("cat needs" in reason for reason in by_kind["Half"]["reasons"])
    assert any("sub needs" in reason or "cat needs" in reason for reason in by_kind["EdgeConv"]["reasons"])
    assert [row["status"] for row in gsp.report(Net()).rows] == ["not accelerated"] * 4
    assert [row["status"] for row in gsp.report(gsp.accelerate(Net())).rows] == ["not called"] * 4
    lines = str(found).splitlines()
    assert lines[0].split() == ["layer", "status", "op", "calls", "why", "not"]
    assert lines[1].split()[:7] == ["gcn", "GCNConv", "fused", "normalised", "sum", "x2", "2"]
    with torch.inference_mode(), gsp.patch_pyg():
        user = Custom(lambda x, w: x)
        user(x + 0, edge_index)
    assert "use torch.no_grad()" in str(gsp.report(user))


def test_layers_that_never_fuse_stop_trying(device: str) -> None:
    from gnn_spmm_plugin.integrations.pyg.records import PATIENCE, known

    x, edge_index = data(device)
    conv, half = tg.EdgeConv(nn.Linear(2 * F, F)).to(device), Half().to(device)
    expected = [conv(x, edge_index).detach(), half(x, edge_index).detach()]
    with gsp.patch_pyg():
        for _ in range(PATIENCE + 2):
            got = [conv(x, edge_index).detach(), half(x, edge_index).detach()]
        before = kernel_calls()
        half(x, edge_index)
        assert kernel_calls() > before  # its features are another matter than its scores
    assert_same(got, expected, 1e-5)
    record, other = known(conv), known(half)
    assert record is not None and other is not None
    assert [g.hopeless() for g in record.gathers.values()] == [True]
    assert [g.hopeless() for g in other.gathers.values()] == [True, False]
    assert record.calls == PATIENCE + 2
    assert sum(record.missed.values()) == 2 * record.calls  # still counted, with the reason


BACKWARD_HOOKED: dict[str, Callable[[], Any]] = {
    "aggregation": lambda: Plain("mean"),
    "attention": lambda: tg.GATConv(F, 3, heads=2),
    "several": lambda: Plain(["sum", "max"]),
    "softmax": lambda: Plain(tg.aggr.SoftmaxAggregation()),
    "sees": lambda: WithModule(nn.Linear(F, 3)),
    "returns": lambda: WithModule(nn.Identity()),
}


class WithModule(tg.MessagePassing if tg is not None else nn.Module):  # type: ignore[misc]
    """Its messages go through a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(aggr="sum")
        self.inner = inner

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return self.inner(x_j)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("name", BACKWARD_HOOKED)
def test_backward_hooks_of_modules_that_see_messages(name: str, everywhere: bool, device: str) -> None:
    """They get the gradients that they get from PyG."""
    torch.manual_seed(0)
    layer = BACKWARD_HOOKED[name]().to(device, torch.float64)
    edge_index, x = random_graph(N, N, E, device=device), torch.randn(N, F, device=device, dtype=torch.float64)
    seen: list[Tensor] = []

    def hook(module: Any, *grads: Any) -> None:
        if module is getattr(layer, "inner", layer.aggr_module):
            seen.extend(g for group in grads for g in group if g is not None)

    target = getattr(layer, "inner", layer.aggr_module)
    every = nn.modules.module
    handles = (
        [every.register_module_full_backward_hook(hook), every.register_module_full_backward_pre_hook(hook)]
        if everywhere
        else [target.register_full_backward_hook(hook), target.register_full_backward_pre_hook(hook)]
    )
    try:
        found = []
        for on in (False, True):
            seen.clear()
            with gsp.patch_pyg() if on else contextlib.nullcontext():
                found.append([*outputs_and_gradients(layer, lambda x: layer(x, edge_index), x), *seen])
    finally:
        for handle in handles:
            handle.remove()
    assert len(seen) >= 3
    assert_same(found[1], found[0])
