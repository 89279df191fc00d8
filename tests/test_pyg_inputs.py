"""Patched PyG layers take every kind of graph and batch that PyG has, and live in every kind of parallel training."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pyg_layers import assert_same, kernel_calls, outputs_and_gradients, random_graph, tg
from torch import Tensor, nn

import gnn_spmm_plugin as gsp

pytestmark = pytest.mark.pyg

N, E, F = 30, 140, 4


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: tg.GCNConv(F, 3),
    "sage_mean": lambda: tg.SAGEConv(F, 3),
    "sage_max": lambda: tg.SAGEConv(F, 3, aggr="max"),
    "sage_many": lambda: tg.SAGEConv(F, 3, aggr=["sum", "max", "std"]),
    "gin": lambda: tg.GINConv(nn.Linear(F, 3)),
    "graph": lambda: tg.GraphConv(F, 3),
    "tag": lambda: tg.TAGConv(F, 3, 2),
    "le": lambda: tg.LEConv(F, 3),
    "general": lambda: tg.GeneralConv(F, 3),
    "gen": lambda: tg.GENConv(F, 3, aggr="add"),
}


def same_and_fast(layer: nn.Module, call: Callable[..., Any], *inputs: Tensor) -> None:
    """Output and gradients as of stock, twice, with kernels."""
    expected = outputs_and_gradients(layer, call, *inputs)
    with gsp.patch_pyg():
        for _ in range(2):
            before = kernel_calls()
            assert_same(outputs_and_gradients(layer, call, *inputs), expected, 1e-12)
            assert kernel_calls() - before >= 2


def make(name: str, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    edge_index = torch.unique(random_graph(N, N, E), dim=1).to(device).contiguous()  # a matrix has no parallel entries
    return LAYERS[name]().to(device, torch.float64), torch.randn(N, F, dtype=torch.float64, device=device), edge_index


# ---------------------------------------------------------------------- adjacencies


@pytest.mark.parametrize("kind", ["int64", "int32", "unsorted", "sorted", "undirected"])
@pytest.mark.parametrize("name", LAYERS)
def test_edge_lists(name: str, kind: str, device: str) -> None:
    from torch_geometric import EdgeIndex
    from torch_geometric.utils import to_undirected

    layer, x, edge_index = make(name, device)
    if kind == "undirected":
        edge_index = to_undirected(edge_index)
    by_dst = edge_index[:, edge_index[1].argsort(stable=True)].contiguous()
    index = {
        "int64": lambda: edge_index,
        "int32": lambda: edge_index.int(),
        "unsorted": lambda: EdgeIndex(edge_index, sparse_size=(N, N)),
        "sorted": lambda: EdgeIndex(by_dst, sparse_size=(N, N), sort_order="col"),
        "undirected": lambda: EdgeIndex(by_dst, sparse_size=(N, N), sort_order="col", is_undirected=True),
    }[kind]()
    if kind == "int32":  # torch 2.13 itself has wrong gradients of scatter_add_ by int32
        expected = outputs_and_gradients(layer, lambda x: layer(x, edge_index), x)
        with gsp.patch_pyg():
            before = kernel_calls()
            assert_same(outputs_and_gradients(layer, lambda x: layer(x, index), x), expected, 1e-12)
            assert kernel_calls() - before >= 2
    elif name == "graph":  # PyG's own product with an EdgeIndex is of float32
        layer, x = layer.float(), x.float()
        expected = outputs_and_gradients(layer, lambda x: layer(x, index), x)
        with gsp.patch_pyg():
            before = kernel_calls()
            assert_same(outputs_and_gradients(layer, lambda x: layer(x, index), x), expected)
            assert kernel_calls() - before >= 2
    else:
        same_and_fast(layer, lambda x: layer(x, index), x)


@pytest.mark.parametrize("values", ["ones", "weights"])
@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
@pytest.mark.parametrize("name", ["gcn_plain", "sage_mean", "sage_max", "sage_many", "gin", "graph", "graph_min"])
@pytest.mark.filterwarnings("ignore:Converting sparse tensor", "ignore:Sparse CS")
def test_sparse_matrices(name: str, layout: str, values: str, device: str) -> None:
    torch.manual_seed(0)
    layers = LAYERS | {
        "gcn_plain": lambda: tg.GCNConv(F, 3, normalize=False),
        "graph_min": lambda: tg.GraphConv(F, 3, aggr="min"),
    }
    layer = layers[name]().to(device, torch.float64)
    edge_index = torch.unique(random_graph(N, N, E), dim=1)
    entries = torch.ones(edge_index.shape[1]) if values == "ones" else torch.rand(edge_index.shape[1]) + 0.5
    adjacency = torch.sparse_coo_tensor(edge_index.flip(0), entries.double(), (N, N)).coalesce().to(device)
    adjacency = {"coo": adjacency, "csr": adjacency.to_sparse_csr(), "csc": adjacency.to_sparse_csc()}[layout]
    x = torch.randint(-2, 3, (N, F), device=device).double()  # ties
    call: Callable[..., Any] = lambda x: layer(x, adjacency)  # noqa: E731
    try:
        expected = outputs_and_gradients(layer, call, x)
    except (ValueError, NotImplementedError):
        if name == "sage_many" and layout == "csc":
            pytest.skip("PyG takes no CSC matrix where it does not multiply with it")
        assert device == "cuda"  # stock has no maximum there; ours is that of the CPU
        host = copy.deepcopy(layer).cpu()
        expected = [t.to(device) for t in outputs_and_gradients(host, lambda x: host(x, adjacency.cpu()), x.cpu())]
    with gsp.patch_pyg():
        for _ in range(2):
            before = kernel_calls()
            assert_same(outputs_and_gradients(layer, call, x), expected, 1e-12)
            assert kernel_calls() - before >= 2
    assert gsp.report(layer).rows[0]["status"] == "fused"


@pytest.mark.filterwarnings("ignore:Converting sparse tensor", "ignore:Sparse CS")
def test_values_that_change_and_matrices_that_are_left_to_pyg(device: str) -> None:
    layer, x, edge_index = make("graph", device)
    entries = torch.rand(edge_index.shape[1], dtype=torch.float64, device=device)
    adjacency = torch.sparse_coo_tensor(edge_index.flip(0), entries, (N, N)).coalesce().to_sparse_csr()
    with gsp.patch_pyg():
        layer(x, adjacency)
        adjacency.values().mul_(2)
        got = outputs_and_gradients(layer, lambda x: layer(x, adjacency), x)
    assert_same(got, outputs_and_gradients(layer, lambda x: layer(x, adjacency), x))
    twice = torch.sparse_coo_tensor(torch.cat([edge_index.flip(0)] * 2, 1), torch.cat([entries] * 2), (N, N))
    learned = adjacency.detach().clone().requires_grad_()
    for matrix in (twice, learned):
        expected = layer(x, matrix).detach()
        with gsp.patch_pyg():
            before = kernel_calls()
            assert_same([layer(x, matrix).detach()], [expected])
            assert kernel_calls() == before
    plain = tg.GraphConv(F, 3).to(device, torch.float64)
    before = kernel_calls()
    with torch.no_grad():
        gsp.accelerate(layer)
        plain(x, adjacency)  # another model
        assert kernel_calls() == before
        layer(x, adjacency)
        assert kernel_calls() > before
    gsp.restore(layer)


def test_sparse_tensors(device: str) -> None:
    torch_sparse = pytest.importorskip("torch_sparse")
    layer, x, edge_index = make("sage_many", device)
    adjacency = torch_sparse.SparseTensor(row=edge_index[1], col=edge_index[0], sparse_sizes=(N, N))
    same_and_fast(layer, lambda x: layer(x, adjacency), x)


# ---------------------------------------------------------------------- data and batches


class Two(nn.Module):
    """Two layers, as for sampled batches."""

    def __init__(self, aggr: Any = "mean") -> None:
        super().__init__()
        self.first, self.second = tg.SAGEConv(F, F, aggr=aggr), tg.SAGEConv(F, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def data(device: str, nodes: int = N, seed: int = 0) -> Any:
    from torch_geometric.data import Data

    g = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, F, dtype=torch.float64, generator=g)
    return Data(x=x, edge_index=random_graph(nodes, nodes, E, seed), edge_attr=torch.randn(E, F).double()).to(device)


@pytest.mark.parametrize("aggr", ["mean", "max", ["sum", "std"]])
def test_batches_of_graphs(aggr: Any, device: str) -> None:
    from torch_geometric.data import Batch
    from torch_geometric.loader import DataLoader

    torch.manual_seed(0)
    graphs = [data(device, nodes, nodes) for nodes in (5, 9, 12, 7)]
    first = tg.SAGEConv(F, F, aggr=aggr).to(device, torch.float64)
    gine = tg.GINEConv(nn.Linear(F, 3)).to(device, torch.float64)
    both = nn.ModuleList([first, gine])
    for batch in (Batch.from_data_list(graphs), *DataLoader(graphs, batch_size=2)):
        pooled: Callable[..., Any] = lambda x, b=batch: tg.global_mean_pool(  # noqa: E731
            gine(first(x, b.edge_index).relu(), b.edge_index, b.edge_attr), b.batch
        )
        same_and_fast(both, pooled, batch.x)


def test_hetero_data(device: str) -> None:
    from torch_geometric.data import HeteroData

    torch.manual_seed(0)
    whole = HeteroData()
    whole["a"].x, whole["b"].x = torch.randn(12, F).double(), torch.randn(9, F).double()
    whole["a", "to", "b"].edge_index = random_graph(12, 9, 50)
    whole["b", "back", "a"].edge_index = random_graph(9, 12, 50, 1)
    whole["b", "none", "b"].edge_index = torch.empty(2, 0, dtype=torch.long)
    whole = whole.to(device)
    kinds = {
        "SAGE": lambda: tg.SAGEConv((F, F), 3),
        "GraphConv": lambda: tg.GraphConv((F, F), 3, aggr="max"),
        "GeneralConv": lambda: tg.GeneralConv((F, F), 3),
    }
    for kind in kinds.values():
        conv = tg.HeteroConv({e: kind() for e in whole.edge_types}).to(device, torch.float64)
        same_and_fast(
            conv,
            lambda a, b, conv=conv: conv({"a": a, "b": b}, whole.edge_index_dict),
            whole["a"].x,
            whole["b"].x,
        )
    lifted = tg.to_hetero(Two("max"), whole.metadata()).to(device, torch.float64)
    same_and_fast(lifted, lambda a, b: lifted({"a": a, "b": b}, whole.edge_index_dict), whole["a"].x, whole["b"].x)
    typed = whole.to_homogeneous()
    rgcn = tg.RGCNConv(F, 3, len(whole.edge_types)).to(device, torch.float64)
    same_and_fast(rgcn, lambda x: rgcn(x, typed.edge_index, typed.edge_type), typed.x)


def loaders(whole: Any) -> dict[str, Callable[[], Any]]:
    from torch_geometric import loader as tl

    return {
        "neighbor": lambda: tl.NeighborLoader(whole, [4, 3], batch_size=8),
        "neighbor_disjoint": lambda: tl.NeighborLoader(whole, [4, 3], batch_size=8, disjoint=True),
        "link_neighbor": lambda: tl.LinkNeighborLoader(whole, [4, 3], batch_size=16, neg_sampling_ratio=1.0),
        "cluster": lambda: tl.ClusterLoader(tl.ClusterData(whole, 3), batch_size=1),
        "saint_node": lambda: tl.GraphSAINTNodeSampler(whole, batch_size=10, num_steps=2),
        "saint_edge": lambda: tl.GraphSAINTEdgeSampler(whole, batch_size=10, num_steps=2),
        "saint_walk": lambda: tl.GraphSAINTRandomWalkSampler(whole, batch_size=6, walk_length=2, num_steps=2),
        "shadow": lambda: tl.ShaDowKHopSampler(whole, depth=2, num_neighbors=4, batch_size=8),
        "random_node": lambda: tl.RandomNodeLoader(whole, num_parts=3),
    }


@pytest.mark.parametrize(
    "name",
    "neighbor neighbor_disjoint link_neighbor cluster saint_node saint_edge saint_walk shadow random_node".split(),
)
def test_sampled_batches(name: str, device: str) -> None:
    torch.manual_seed(0)
    whole = data("cpu", 60)
    try:
        batches = list(loaders(whole)[name]())
    except (ImportError, RuntimeError) as e:
        pytest.skip(f"its sampler is not installed: {e}")
    model = Two("max").to(device, torch.float64)
    ran = 0
    for batch in batches[:4]:
        batch = batch.to(device)
        if batch.edge_index.shape[1]:
            ran += 1
            same_and_fast(model, lambda x, b=batch: model(x, b.edge_index), batch.x)
    assert ran


def test_trimmed_layers_with_edge_features(device: str) -> None:
    from torch_geometric.utils import trim_to_layer

    torch.manual_seed(0)
    whole = data(device)
    order = whole.edge_index[1].argsort(stable=True)
    edge_index, edge_attr = whole.edge_index[:, order], whole.edge_attr[order]
    layers = nn.ModuleList([tg.GINEConv(nn.Linear(F, F)) for _ in range(2)]).to(device, torch.float64)

    def call(x: Tensor, attr: Tensor) -> Tensor:
        index = edge_index
        for i, layer in enumerate(layers):
            x, index, attr = trim_to_layer(i, [N, 0, 0], [E - 60, 40, 20], x, index, attr)
            x = layer(x, index, attr)
        return x

    same_and_fast(layers, call, whole.x, edge_attr)


# ---------------------------------------------------------------------- parallel training


def test_replicas_in_threads(device: str) -> None:
    """As DataParallel does it: copies of the model, each in a thread of its own."""
    torch.manual_seed(0)
    model = gsp.accelerate(Two("max").to(device, torch.float64))
    parts = [data(device, 20 + i, i) for i in range(4)]
    gsp.restore(model)
    expected = [outputs_and_gradients(model, lambda x, d=d: model(x, d.edge_index), d.x) for d in parts]
    gsp.accelerate(model)
    replicas = [copy.deepcopy(model) for _ in parts]
    got: list[Any] = [None] * len(parts)

    def work(i: int) -> None:
        for _ in range(5):
            got[i] = outputs_and_gradients(replicas[i], lambda x: replicas[i](x, parts[i].edge_index), parts[i].x)

    before = kernel_calls()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(parts))]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert kernel_calls() - before >= 5 * 5 * len(parts)
    for a, b in zip(got, expected, strict=True):
        assert_same(a, b)
    for m in (model, *replicas):
        gsp.restore(m)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch is built without gloo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("on", ["accelerate", "patch"])
def test_distributed_data_parallel(on: str, one_process: None) -> None:
    torch.manual_seed(0)
    model, whole = Two("max").double(), data("cpu")
    expected = outputs_and_gradients(model, lambda x: model(x, whole.edge_index), whole.x)
    wrapped = nn.parallel.DistributedDataParallel(model)
    if on == "accelerate":
        gsp.accelerate(wrapped)
    patch = gsp.patch_pyg() if on == "patch" else None
    try:
        for _ in range(2):
            before = kernel_calls()
            got = outputs_and_gradients(wrapped, lambda x: wrapped(x, whole.edge_index), whole.x)
            assert kernel_calls() - before >= 5
            assert_same(got, expected)
    finally:
        patch.undo() if patch else gsp.restore(wrapped)


def test_lightning(device: str) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Two()

        def training_step(self, batch: Any, i: int) -> Tensor:
            return self.net(batch.x.float(), batch.edge_index).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    from torch_geometric.loader import DataLoader

    trainer = lightning.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with gsp.patch_pyg():
        before = kernel_calls()
        trainer.fit(Module(), DataLoader([data("cpu", 9, i) for i in range(4)], batch_size=2))
        assert kernel_calls() - before >= 2 * 3  # features are constant: two products forward, one backward


# ---------------------------------------------------------------------- scripts and exports


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ["gine", "gen", "le", "film", "general", "rgcn", "graph"])
def test_torchscript(name: str) -> None:
    torch.manual_seed(0)
    whole = data("cpu")
    edge_type = torch.arange(E) % 2
    makers: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
        "gine": (lambda: tg.GINEConv(nn.Linear(F, 3)), (whole.edge_attr,)),
        "gen": (lambda: tg.GENConv(F, 3, aggr="add"), ()),
        "le": (lambda: tg.LEConv(F, 3), ()),
        "film": (lambda: tg.FiLMConv(F, 3), ()),
        "general": (lambda: tg.GeneralConv(F, 3), ()),
        "rgcn": (lambda: tg.RGCNConv(F, 3, 2), (edge_type,)),
        "graph": (lambda: tg.GraphConv(F, 3), ()),
    }
    make, more = makers[name]
    layer = make().double()
    arguments = (whole.x, whole.edge_index, *more)

    def script() -> Any:
        try:
            return torch.jit.script(layer)(*arguments).detach()
        except Exception as e:  # some layers have no script in stock PyG either
            return type(e)

    stock = script()
    with gsp.patch_pyg():
        layer(*arguments)
        patched = script()
        traced = torch.jit.trace(layer, arguments, check_trace=False)(*arguments).detach()
    assert isinstance(stock, Tensor) == isinstance(patched, Tensor)
    if isinstance(stock, Tensor):
        assert_same([patched], [stock], 1e-12)
    assert_same([traced], [layer(*arguments).detach()], 1e-12)


@pytest.mark.filterwarnings("ignore")
def test_onnx_export(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    model, whole = Two().eval(), data("cpu")
    graphs = []
    for patched in (False, True):
        path = str(tmp_path / f"{patched}.onnx")
        patch = gsp.patch_pyg() if patched else None
        try:
            torch.onnx.export(model, (whole.x.float(), whole.edge_index), path, opset_version=16, dynamo=False)
        finally:
            if patch is not None:
                patch.undo()
        graphs.append([node.op_type for node in onnx.load(path).graph.node])
    assert graphs[0] == graphs[1]
