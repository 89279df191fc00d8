"""`Graph`: every constructor, what it keeps, what it shares, and when it dies."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import NAMED, Edges, edges, values

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import _native, reference
from gnn_spmm_plugin.csr import Core, _rows_by_words, per_edge_rows


def pairs(g: gsp.Graph) -> list[tuple[int, int]]:
    """The edges row by row, as (source, destination)."""
    rows = torch.arange(g.num_dst, device=g.device).repeat_interleave(g.in_degree())
    return list(zip(g.col.tolist(), rows.tolist(), strict=True))


def check_structure(g: gsp.Graph, e: Edges) -> None:
    """`g` holds exactly the edges of `e`, those of a row in the caller's order, and so does its transpose."""
    assert (g.num_src, g.num_dst, g.num_edges) == (e.num_src, e.num_dst, e.num_edges)
    assert torch.equal(g.edge_index().cpu(), e.edge_index)
    for half in (g, g.T):
        assert half.rowptr[0] == 0 and half.rowptr[-1] == e.num_edges and (half.rowptr.diff() >= 0).all()
        assert {t.dtype for t in (half.rowptr, half.col)} == {torch.int32}
        assert half.rowptr.shape == (half.num_dst + 1,)
        perm = torch.arange(e.num_edges) if half.perm is None else half.perm.cpu().long()
        src, dst = e.edge_index if half is g else e.edge_index.flip(0)
        assert pairs(half) == list(zip(src[perm].tolist(), dst[perm].tolist(), strict=True))
        assert sorted(perm.tolist()) == list(range(e.num_edges))
        for row in range(half.num_dst):
            ids = perm[int(half.rowptr[row]) : int(half.rowptr[row + 1])]
            assert (ids.diff() > 0).all()
        half.validate()


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_from_edge_index(device: str, name: str, index: torch.dtype) -> None:
    check_structure(NAMED[name].graph(device, index), NAMED[name])


@settings(max_examples=60)
@given(e=edges(max_nodes=12, max_edges=40))
def test_from_any_edge_index(device, e) -> None:  # type: ignore[no-untyped-def]
    check_structure(e.graph(device), e)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded", "offset"])
def test_from_strided_edge_index(device: str, layout: str) -> None:
    base = NAMED["shuffled"].edge_index.to(device)
    if layout == "transposed":
        index = base.t().contiguous().t()
    elif layout == "sliced":
        index = base.repeat_interleave(3, 1)[:, ::3]
    elif layout == "offset":
        index = torch.cat([base[:, :1], base], 1)[:, 1:]
    else:
        index = base[:, :1].expand(2, 9)
    e = Edges(index.cpu().contiguous(), 37, 37)
    check_structure(gsp.Graph.from_edge_index(index, 37), e)
    check_structure(gsp.Graph.from_edge_index(index.int(), 37), e)


def test_sizes(device: str) -> None:
    index = torch.tensor([[0, 4], [1, 2]], device=device)
    assert (gsp.Graph.from_edge_index(index).num_src, gsp.Graph.from_edge_index(index).num_dst) == (5, 5)
    assert gsp.Graph.from_edge_index(index, 9).num_dst == 9
    bipartite = gsp.Graph.from_edge_index(index, (5, 3))
    assert (bipartite.num_src, bipartite.num_dst) == (5, 3)
    reverse = gsp.Graph.from_edge_index(index, (3, 5), flow="target_to_source")
    assert (reverse.num_src, reverse.num_dst) == (3, 5)
    assert pairs(reverse) == [(1, 0), (2, 4)]
    assert gsp.Graph.from_edge_index(index[:, :0]).num_src == 0
    assert gsp.Graph.from_edge_index(index, np.int64(5)).num_src == 5  # type: ignore[arg-type]
    assert gsp.Graph.from_edge_index(index, torch.Size([5, 3])).num_dst == 3


def test_from_csr(device: str) -> None:
    g = gsp.Graph.from_csr(torch.tensor([0, 2, 2, 3], device=device), torch.tensor([3, 1, 0], device=device))
    assert (g.num_src, g.num_dst, g.perm) == (4, 3, None)
    check_structure(g, Edges(torch.tensor([[3, 1, 0], [0, 0, 2]]), 4, 3))
    few = gsp.Graph.from_csr(torch.tensor([0, 1, 1], dtype=torch.int32), torch.tensor([0]), num_src=1)
    assert (few.num_src, few.num_dst) == (1, 2)
    assert gsp.Graph.from_csr(torch.tensor([0]), torch.empty(0, dtype=torch.int64)).num_edges == 0


@pytest.mark.parametrize("layout", ["coo", "uncoalesced", "csr", "csc"])
def test_from_torch_sparse(device: str, layout: str) -> None:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(6, 9, generator=generator) * (torch.rand(6, 9, generator=generator) < 0.4)
    dense = dense.to(device)
    A = {
        "coo": dense.to_sparse,
        "csr": dense.to_sparse_csr,
        "csc": dense.to_sparse_csc,
        "uncoalesced": lambda: torch.sparse_coo_tensor(
            torch.cat([dense.to_sparse().indices().flip(1)] * 2, 1),
            torch.cat([dense.to_sparse().values().flip(0)] * 2) / 2,
            (6, 9),
        ),
    }[layout]()
    g = gsp.Graph.from_torch_sparse(A)
    assert (g.num_src, g.num_dst, g.num_edges) == (9, 6, A._nnz())
    x = values((9, 4), torch.float32, 1, device=device)
    assert torch.allclose(g @ x, dense @ x, atol=1e-5)
    assert torch.allclose(g.T @ (dense @ x), dense.t() @ (dense @ x), atol=1e-4)


@pytest.mark.parametrize("layout", ["coo", "uncoalesced", "csr", "csc"])
def test_sparse_values_get_gradients(device: str, layout: str) -> None:
    """... in stored order, whether or not entries repeat."""
    x = torch.tensor([[1.0], [10.0], [100.0]], device=device)
    stored = torch.tensor([2.0, 1.0, 5.0, 4.0], device=device, requires_grad=True)
    if layout in ("coo", "uncoalesced"):
        index = torch.tensor([[1, 0, 1, 1], [2, 0, 2, 0]], device=device)
        if layout == "coo":
            index = torch.tensor([[0, 0, 1, 1], [0, 2, 0, 1]], device=device)
        A = torch.sparse_coo_tensor(index, stored, (2, 3), is_coalesced=True if layout == "coo" else None)
        expected = x.flatten()[index[1]]
    elif layout == "csr":
        A = torch.sparse_csr_tensor(torch.tensor([0, 1, 4]), torch.tensor([1, 0, 1, 2]), stored, (2, 3), device=device)
        expected = x.flatten()[[1, 0, 1, 2]]
    else:
        A = torch.sparse_csc_tensor(
            torch.tensor([0, 1, 2, 4]), torch.tensor([1, 0, 0, 1]), stored, (2, 3), device=device
        )
        expected = x.flatten()[[0, 1, 2, 2]]
    (gsp.Graph.from_torch_sparse(A) @ x).sum().backward()
    assert stored.grad is not None and torch.equal(stored.grad, expected)


def test_repeated_sparse_entries_that_need_different_gradients_are_refused() -> None:
    """torch adds the gradients of equal entries up, so that a maximum over them cannot be told to their values."""
    stored = torch.tensor([1.0, 2.0], requires_grad=True)
    A = torch.sparse_coo_tensor(torch.tensor([[0, 0], [0, 0]]), stored, (1, 1))
    out = gsp.Graph.from_torch_sparse(A).reduce(torch.ones(1, 1), "max")
    with pytest.raises(RuntimeError, match=r"with_weight"):
        out.sum().backward()


def test_from_scipy() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    A = sparse.random(7, 5, 0.4, random_state=0, dtype=np.float32)
    x = values((5, 3), torch.float32, 1)
    for kind in ("coo", "csr", "csc", "lil", "dok", "bsr", "dia"):
        g = gsp.Graph.from_scipy(A.asformat(kind))
        assert (g.num_src, g.num_dst) == (5, 7)
        assert torch.allclose(g @ x, torch.from_numpy(A.toarray()) @ x, atol=1e-5)
    array = sparse.csr_array(np.array([[0, 2], [1, 0]]))
    g = gsp.Graph.from_scipy(array)
    assert g.weight is not None and g.weight.dtype == torch.float32
    assert (g @ torch.ones(2, 1)).flatten().tolist() == [2, 1]
    assert gsp.Graph.from_scipy(sparse.csr_array((3, 4))).num_edges == 0
    with pytest.raises(TypeError, match="complex"):
        gsp.Graph.from_scipy(sparse.eye(3, dtype=complex))


def test_from_sparse_tensor() -> None:
    """Also without torch_sparse: what is asked of it is little."""

    class Fake:
        def __init__(self, value: torch.Tensor | None) -> None:
            self.value = value

        def csr(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
            return torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1]), self.value

        def sparse_size(self, dim: int) -> int:
            return (2, 3)[dim]

        def sparse_sizes(self) -> tuple[int, int]:
            return 2, 3

    x = torch.tensor([[1.0], [10.0], [100.0]])
    assert (gsp.Graph.from_sparse_tensor(Fake(None)) @ x).tolist() == [[101], [10]]
    assert (gsp.Graph.from_sparse_tensor(Fake(torch.tensor([2.0, 3.0, 4.0]))) @ x).tolist() == [[302], [40]]
    with pytest.raises(TypeError, match=r"SparseTensor"):
        gsp.Graph.from_sparse_tensor(x)


def test_from_real_sparse_tensor() -> None:
    torch_sparse = pytest.importorskip("torch_sparse")
    e = NAMED["bipartite"]
    value = values((e.num_edges,), torch.float32, 1)
    adj_t = torch_sparse.SparseTensor(row=e.edge_index[1], col=e.edge_index[0], value=value, sparse_sizes=(29, 11))
    x = values((11, 3), torch.float32, 2)
    assert torch.allclose(gsp.Graph.from_sparse_tensor(adj_t) @ x, adj_t @ x, atol=1e-5)


@pytest.mark.pyg
def test_from_pyg_edge_index(device: str) -> None:
    from torch_geometric import EdgeIndex

    e = NAMED["shuffled"]
    index = EdgeIndex(e.edge_index.to(device), sparse_size=(37, 37))
    check_structure(gsp.Graph.from_edge_index(index, 37), e)


def test_from_dgl() -> None:
    """By what is asked of a DGLGraph."""

    class Fake:
        canonical_etypes = (("a", "to", "b"), ("b", "back", "a"))

        def to_canonical_etype(self, etype: object) -> tuple[str, str, str]:
            return next(c for c in self.canonical_etypes if etype in (c, c[1]))

        def edges(self, form: str, order: str, etype: object) -> tuple[torch.Tensor, torch.Tensor]:
            assert (form, order) == ("uv", "eid")
            ends = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32)
            return ends if etype == self.canonical_etypes[0] else (ends[1], ends[0])

        def num_src_nodes(self, ntype: str) -> int:
            return {"a": 3, "b": 2}[ntype]

        num_dst_nodes = num_src_nodes

    g = gsp.Graph.from_dgl(Fake(), "to")
    assert (g.num_src, g.num_dst) == (3, 2) and g.edge_index().tolist() == [[2, 0], [1, 0]]
    with pytest.raises(ValueError, match=r"etype="):
        gsp.Graph.from_dgl(Fake())
    with pytest.raises(TypeError, match=r"DGLGraph"):
        gsp.Graph.from_dgl(3)


# ---------------------------------------------------------------------- immutability, sharing, life


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", ["sorted", "shuffled"])
def test_a_graph_keeps_its_own_copy(device: str, name: str, index: torch.dtype) -> None:
    """Whatever is later written into what it was made from."""
    e = NAMED[name]
    source = e.edge_index.to(device, index, copy=True)
    g = gsp.Graph.from_edge_index(source, 37)
    source.zero_()
    check_structure(g, e)
    rowptr, col = g.rowptr.clone(), g.col.clone()
    h = gsp.Graph.from_csr(rowptr, col)
    rowptr.zero_()
    col.zero_()
    assert torch.equal(h.rowptr, g.rowptr) and torch.equal(h.col, g.col)


def test_immutable() -> None:
    g = NAMED["shuffled"].graph()
    for name in ("weight", "rowptr", "_core", "anything", "num_src"):
        with pytest.raises(AttributeError, match=r"immutable"):
            setattr(g, name, None)
    with pytest.raises(AttributeError, match=r"immutable"):
        del g._core
    with pytest.raises(TypeError, match=r"from_edge_index"):
        gsp.Graph(torch.zeros(2, 0))


def test_repr() -> None:
    g = NAMED["bipartite"].graph().with_weight(torch.zeros(120, 2))
    assert repr(g) == (
        "Graph(num_src=11, num_dst=29, num_edges=120, device='cpu', index=int32, weight=[120, 2] torch.float32)"
    )
    assert "num_src=29" in repr(g.T)


def test_transpose_is_shared(device: str) -> None:
    g = NAMED["bipartite"].graph(device)
    before = gsp.stats()["transposes_built"]
    t = g.T
    assert t is g.T and t.T is g and (t.num_src, t.num_dst) == (29, 11)
    assert gsp.stats()["transposes_built"] == before  # nothing read yet
    assert t.col.data_ptr() == g.T.col.data_ptr() and t.T.col.data_ptr() == g.col.data_ptr()
    assert t._core is g._core and gsp.stats()["transposes_built"] == before + 1
    nbytes = g.nbytes()
    assert nbytes == t.nbytes() > 0
    del g
    assert t.T.T is t and t.T.num_src == 11
    check_structure(t.T, NAMED["bipartite"])


def test_reference_counting_frees_everything(device: str, no_gc: None) -> None:
    """Without the cycle collector: a graph, its transpose, plans, permuted weights and an autograd graph over them."""
    e = NAMED["hub"]
    g = e.graph(device)
    weight = values((e.num_edges,), torch.float32, 1, device=device)
    x = values((e.num_src, 4), torch.float32, 2, device=device).requires_grad_()
    for reduce in ("sum", "mean", "max"):
        for _ in range(3):
            gsp.spmm(g, x, weight, reduce).sum().backward()
    gsp.plan(g, 4)
    t = g.T
    _ = t.T
    gsp.edge_softmax(g, weight.clone().requires_grad_()).sum().backward()
    with pytest.raises(ValueError):
        gsp.spmm(g, x[:1])
    core = g._core
    dead = [weakref.ref(o) for o in (g, t, core, core.csr, core.transpose, core.csr.col, core.csr.plan, weight, x)]
    del g, t, core, weight, x, _
    assert [r() for r in dead] == [None] * len(dead)


def test_autograd_graph_keeps_what_it_needs(device: str) -> None:
    e = NAMED["shuffled"]
    x = values((e.num_src, 4), torch.float32, 2, device=device).requires_grad_()
    expected = torch.autograd.grad(gsp.spmm(e.graph(device), x).sum(), x)[0]
    g = e.graph(device)
    out = gsp.spmm(g, x)
    del g
    gc.collect()
    out.sum().backward()
    assert torch.equal(x.grad, expected)


def test_with_weight_shares_everything(device: str) -> None:
    e = NAMED["shuffled"]
    g = e.graph(device)
    for weight in (torch.ones(e.num_edges, device=device), torch.ones(e.num_edges, 3, device=device)):
        other = g.with_weight(weight)
        assert other.weight is weight and g.weight is None
        assert other._core is g._core and other.T.weight is weight
    assert g.with_weight(None).weight is None


def test_degrees(device: str) -> None:
    for e in NAMED.values():
        g = e.graph(device)
        for half, ids in ((g, e.edge_index[1]), (g.T, e.edge_index[0])):
            assert half.in_degree().dtype == torch.int64
            assert half.in_degree().tolist() == torch.bincount(ids, minlength=half.num_dst).tolist()


def test_pickle(device: str) -> None:
    e = NAMED["bipartite"]
    weight = values((e.num_edges,), torch.float32, 1, device=device).requires_grad_()
    x = values((e.num_src, 4), torch.float32, 2, device=device)
    for g in (e.graph(device), e.graph(device).with_weight(weight)):
        _ = gsp.spmm(g, x)
        for half in (g, g.T):
            for again in (pickle.loads(pickle.dumps(half)), _saved(half)):
                assert (again.num_src, again.num_dst, again.num_edges) == (half.num_src, half.num_dst, half.num_edges)
                assert torch.equal(again.edge_index(), half.edge_index())
                assert torch.equal(again.T.edge_index(), half.T.edge_index())
                assert again._csr.plan is None  # a saved graph carries no plan
                if half.num_src == x.shape[0]:
                    assert torch.equal(again @ x, half @ x)
                again.validate()


def _saved(g: gsp.Graph) -> gsp.Graph:
    file = io.BytesIO()
    torch.save(g, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


def test_copies_are_the_graph_itself() -> None:
    g = NAMED["bipartite"].graph()
    assert copy.copy(g) is g and copy.deepcopy(g) is g
    assert copy.deepcopy({"g": [g]})["g"][0] is g


def test_to(device: str) -> None:
    e = NAMED["bipartite"]
    weight = values((e.num_edges,), torch.float32, 1).requires_grad_()
    g = e.graph().with_weight(weight)
    there = g.to(device)
    assert there.device.type == device and there.to(device) is there and g.to("cpu") is g
    check_structure(there, e)
    check_structure(g.T.to(device).T, e)
    x = values((e.num_src, 3), torch.float32, 2)
    assert torch.allclose((there @ x.to(device)).cpu(), g @ x, atol=1e-5)
    (there @ x.to(device)).sum().backward()
    assert weight.grad is not None
    back = there.cpu()
    assert back.device.type == "cpu" and torch.equal(back.edge_index(), e.edge_index)


@pytest.mark.gpu
def test_cuda_method() -> None:
    g = NAMED["bipartite"].graph().cuda()
    assert g.device == torch.device("cuda", torch.cuda.current_device()) and g.cuda() is g


def test_validate_finds_writes(device: str) -> None:
    for which, value, match in (
        ("col", 99, "99"),
        ("rowptr", 1, "rowptr"),
        ("perm", 0, "permutation"),
        ("perm", 1 << 30, "permutation"),
    ):
        g = NAMED["shuffled"].graph(device)
        assert g.validate() is g
        getattr(g, which).fill_(value)
        with pytest.raises((IndexError, ValueError), match=match):
            g.validate()


def test_validate_finds_changed_pickles() -> None:
    g = NAMED["shuffled"].graph()
    make, (rowptr, col, perm, num_cols, _) = g.__reduce__()
    assert perm is not None
    whole = {"rowptr": rowptr, "col": col, "perm": perm, "num_src": num_cols, "weight": None}
    assert make(**whole).validate() is not None
    for change, match in (
        ({"perm": torch.cat([perm, perm.new_tensor([len(perm)])])}, "permutation"),
        ({"perm": perm[perm < len(perm) - 1]}, "permutation"),
        ({"perm": perm.flip(0)}, "order of edges"),
        ({"perm": perm.long()}, "one dtype"),
        ({"perm": perm.float()}, "one dtype"),
        ({"col": col.long()}, "one dtype"),
        ({"col": col.repeat_interleave(2)[::2]}, "contiguous"),
        ({"col": col[:-1]}, "rowptr"),
        ({"rowptr": rowptr.flip(0)}, "rowptr"),
        ({"num_src": 3}, "source"),
        ({"num_src": -3}, "negative"),
        ({"weight": torch.rand(3)}, "weight"),
        ({"weight": torch.arange(g.num_edges)}, "floating point"),
    ):
        with pytest.raises((IndexError, TypeError, ValueError), match=match):
            make(**(whole | change)).validate()


def test_validate_compares_the_transpose(device: str) -> None:
    for name, e in NAMED.items():
        g = e.graph(device)
        _ = g.T.col
        assert g.validate() is g and g.T.validate() is g.T, name
    g = NAMED["shuffled"].graph(device)
    g.T.col.copy_(g.T.col.flip(0).clone())
    with pytest.raises(ValueError, match="transposed"):
        g.validate()


def test_transpose_is_built_once_by_many_threads(device: str) -> None:
    e = NAMED["hub"]
    for _ in range(5):
        g = e.graph(device)
        before = gsp.stats()["transposes_built"]
        barrier = threading.Barrier(8)
        seen: list[int] = []

        def work(g: gsp.Graph = g, barrier: threading.Barrier = barrier, seen: list[int] = seen) -> None:
            barrier.wait()
            seen.append(g.T.col.data_ptr())

        threads = [threading.Thread(target=work) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(seen) == 8 and len(set(seen)) == 1
        assert gsp.stats()["transposes_built"] == before + 1


def test_core_holds_no_graph() -> None:
    assert not any(isinstance(getattr(NAMED["hub"].graph()._core, name, None), gsp.Graph) for name in Core.__slots__)


@settings(max_examples=40)
@given(e=edges(max_nodes=20, max_edges=60), narrow=st.booleans(), wide=st.booleans(), strided=st.booleans())
def test_native_building_blocks(device, e, narrow, wide, strided) -> None:  # type: ignore[no-untyped-def]
    given_type, own_type = (torch.int32 if kind else torch.int64 for kind in (narrow, not wide))
    edge_index = e.edge_index.to(device, given_type)
    src, dst = edge_index.t().contiguous().unbind(1) if strided else edge_index
    bad, own_dst, own_src, rowptr, col, perm = _native.from_coo(dst, src, e.num_dst, e.num_src, wide)
    ordered = bool((e.edge_index[1].diff() >= 0).all())
    assert bad == -1 and (perm is None) == (col is None) == ordered
    col = own_src if col is None else col
    assert torch.equal(own_dst.long(), dst.long()) and torch.equal(own_src.long(), src.long())
    assert {t.dtype for t in (own_dst, own_src, rowptr, col)} == {own_type}
    assert torch.equal(rowptr.diff().long(), torch.bincount(dst, minlength=e.num_dst))
    order = torch.sort(dst, stable=True).indices
    assert perm is None or torch.equal(perm.long(), order)
    assert torch.equal(col.long(), src.long()[order])
    rowptr, col, perm = _native.transpose(own_dst, own_src, e.num_src)
    assert torch.equal(rowptr.diff().long(), torch.bincount(src, minlength=e.num_src))
    order = torch.sort(src, stable=True).indices
    assert torch.equal(perm.long(), order) and torch.equal(col.long(), dst.long()[order])
    assert {t.dtype for t in (rowptr, col, perm)} == {own_type}
    assert _native.same_coo(dst, src, own_dst, own_src)
    for edge in range(e.num_edges):
        for own in (own_dst, own_src):
            own[edge] += 1
            assert not _native.same_coo(dst, src, own_dst, own_src)
            own[edge] -= 1


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_the_first_bad_edge_is_found(device: str, kind: torch.dtype) -> None:
    count = 150_000
    generator = torch.Generator().manual_seed(0)
    dst, src = torch.randint(10, (2, count), generator=generator).to(device, kind)
    for place, value, which in ((140_000, 10, dst), (70_000, -1, src), (3, 11, dst), (0, -(2**31), src)):
        which[place] = value
        assert _native.from_coo(dst, src, 10, 10, False)[0] == place
        with pytest.raises(IndexError, match=f"edge {place} "):
            gsp.Graph.from_edge_index(torch.stack([src, dst]), 10)


@pytest.mark.parametrize("count", [1 << 18, (1 << 18) + 1, (5 << 18) + 3])
@pytest.mark.parametrize("skew", ["even", "one row", "two rows", "few rows", "half"])
def test_groups_of_every_length(device: str, skew: str, count: int) -> None:
    """The largest graph whose edges are grouped by counting on CUDA, the smallest that is sorted, and one in parts."""
    generator = torch.Generator().manual_seed(0)
    n = 1 << 18
    dst = torch.randint(n, (count,), generator=generator)
    if skew == "one row":
        dst.fill_(77)
    elif skew == "two rows":
        dst = torch.where(dst < n // 2, n - 1, 0)
    elif skew == "few rows":  # of lengths around 1024, which counting treats in another way
        dst = dst % 256
    elif skew == "half":
        dst[torch.rand(count, generator=generator) < 0.5] = 5
    src = torch.randint(n, (count,), generator=generator)
    g = gsp.Graph.from_edge_index(torch.stack([src, dst]).to(device), n)
    for graph, key, other in ((g, dst, src), (g.T, src, dst)):
        if graph.perm is None:
            assert skew == "one row"
            continue
        order = torch.sort(key, stable=True).indices
        assert torch.equal(graph.perm.cpu().long(), order)
        assert torch.equal(graph.col.cpu().long(), other[order])
        assert torch.equal(graph.rowptr.cpu().diff().long(), torch.bincount(key, minlength=n))


def test_large_sort_is_stable_and_right(device: str) -> None:
    """Big enough for every thread to have a share of the counting sort."""
    generator = torch.Generator().manual_seed(0)
    n, m = 300_000, 5_000
    for skew in (1, 8):
        dst = (torch.rand(n, generator=generator) ** skew * m).long()
        src = torch.randint(m, (n,), generator=generator)
        g = gsp.Graph.from_edge_index(torch.stack([src, dst]).to(device), m)
        assert g.perm is not None
        assert torch.equal(g.perm.cpu().long(), torch.sort(dst, stable=True).indices)
        assert torch.equal(g.T.perm.cpu().long(), torch.sort(src, stable=True).indices)  # type: ignore[union-attr]
        assert torch.equal(g.edge_index().cpu(), torch.stack([src, dst]))


def test_reference_agrees_with_a_loop() -> None:
    """The reference itself, against the definition written as a loop."""
    e = NAMED["bipartite"]
    g, x, w = e.graph(), values((11, 2), torch.float64, 1), values((120,), torch.float64, 2)
    for reduce in ("sum", "mean", "max", "min"):
        out, _ = reference.spmm(g, x, w, reduce)
        for d in range(29):
            messages = [w[i] * x[s] for i, (s, t) in enumerate(e.edge_index.t().tolist()) if t == d]
            expected = torch.zeros(2, dtype=torch.float64)
            if messages:
                m = torch.stack(messages)
                expected = {"sum": m.sum(0), "mean": m.mean(0), "max": m.amax(0), "min": m.amin(0)}[reduce]
            assert torch.allclose(out[d], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [0, 1, 2, 3, 4, 8, 16, 33])
def test_rows_of_edges_by_words(device: str, dtype: torch.dtype, heads: int) -> None:
    """The same bits, whatever the number of heads; also of views that words do not fit."""
    index = torch.tensor([4, 0, 0, 3], device=device)
    whole = torch.randn(5, heads + 1, device=device).to(dtype)
    flat = torch.randn(1 + 5 * heads, device=device).to(dtype)
    for t in (whole[:, :heads].contiguous(), whole[:, 1:], flat[1:].view(5, heads)):
        for found in (_rows_by_words(t, index), per_edge_rows(t, index)):
            assert found.dtype == dtype and torch.equal(found, t[index])
    assert torch.equal(per_edge_rows(whole[:, 0], index), whole[:, 0][index])
