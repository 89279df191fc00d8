"""Bad input: an error that says what it was, what it should be and what to do; never a crash, never garbage."""

from __future__ import annotations

import itertools

import pytest
import torch
from strategies import NAMED, values

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import _native, pcsr, tiles
from gnn_spmm_plugin.cache import graph_of
from gnn_spmm_plugin.functional_aggregate import aggregate


@pytest.fixture
def g(device: str) -> gsp.Graph:
    return NAMED["bipartite"].graph(device)


def still_works(device: str) -> None:
    graph = gsp.Graph.from_edge_index(torch.tensor([[0, 1], [2, 2]], device=device), 4)
    x = torch.arange(8.0, device=device).view(4, 2)
    assert gsp.spmm(graph, x).tolist() == [[0, 0], [0, 0], [2, 4], [0, 0]]


# ---------------------------------------------------------------------- edges


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("edge_index", "message"),
    [
        ([[0, 4], [1, 2]], r"edge 1 \(4 -> 2\) has source 4, .* \[0, 3\]"),
        ([[0, -1], [1, 2]], r"edge 1 \(-1 -> 2\) has source -1, .* \[0, 3\]"),
        ([[0, 1], [1, 4]], r"edge 1 \(1 -> 4\) has destination 4, .* \[0, 3\]"),
        ([[0, 1, 9], [-7, 4, 0]], r"edge 0 \(0 -> -7\) has destination -7, .* \[0, 3\]"),
        ([[0, 1, 2, 2**31 - 1], [0, 1, 2, 3]], r"edge 3 \(2147483647 -> 3\)"),
    ],
)
def test_out_of_range(device: str, edge_index: list[list[int]], message: str, index: torch.dtype) -> None:
    bad = torch.tensor(edge_index, dtype=index, device=device)
    with pytest.raises(IndexError, match=message):
        gsp.Graph.from_edge_index(bad, 4)
    with pytest.raises(IndexError, match=message):
        graph_of(bad[1], bad[0], 4, 4)
    flipped = message.replace("source", "?").replace("destination", "source").replace("?", "destination")
    flipped = flipped.split(r" \(")[0]
    with pytest.raises(IndexError, match=flipped):
        gsp.Graph.from_edge_index(bad, 4, flow="target_to_source")
    still_works(device)


@pytest.mark.parametrize("value", [2**32, 2**32 + 1, -(2**32), 2**62, -(2**63), 2**63 - 1])
def test_ids_that_wrap_around(device: str, value: int) -> None:
    """Whoever narrows before checking sees a legal id."""
    for edge_index in ([[0, value], [1, 2]], [[0, 1], [1, value]]):
        with pytest.raises(IndexError, match=str(value)):
            gsp.Graph.from_edge_index(torch.tensor(edge_index, device=device), 4)
    with pytest.raises(IndexError, match=str(value)):
        gsp.Graph.from_csr(torch.tensor([0, 2], device=device), torch.tensor([0, value], device=device), num_src=4)
    if value < 0:
        with pytest.raises(IndexError, match=str(value)):
            gsp.Graph.from_edge_index(torch.tensor([[0, value], [1, 2]], device=device))
        with pytest.raises(IndexError, match=str(value)):
            gsp.Graph.from_csr(torch.tensor([0, 1], device=device), torch.tensor([value], device=device))
    still_works(device)


@pytest.mark.parametrize("value", [2**62, 2**63 - 1])
def test_guessed_sizes_that_do_not_fit(device: str, value: int) -> None:
    """The largest id plus one is no size for a graph: said before anything is allocated."""
    with pytest.raises((IndexError, ValueError), match=r"num_nodes"):
        gsp.Graph.from_edge_index(torch.tensor([[0, 1], [1, value]], device=device))
    still_works(device)


def test_a_bad_edge_comes_before_an_absurd_size(device: str) -> None:
    """The size is guessed from the edges: what no memory is enough for is not asked for while one of them is bad."""
    with pytest.raises(IndexError, match=r"edge 1 \(-1 -> "):
        gsp.Graph.from_edge_index(torch.tensor([[0, -1], [1, 2**40]], device=device))
    still_works(device)


def test_first_bad_edge_of_many(device: str) -> None:
    """Threads and blocks share the check; the first bad edge is named all the same."""
    edge_index = torch.zeros(2, 1_000_000, dtype=torch.int64)
    edge_index[0, [777_777, 999_999]] = 5
    edge_index[1, [500_001, 800_000]] = -3
    with pytest.raises(IndexError, match=r"edge 500001 \(0 -> -3\)"):
        gsp.Graph.from_edge_index(edge_index.to(device), 4)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.float32, torch.bool, torch.complex64], ids=str)
def test_index_dtypes(device: str, dtype: torch.dtype) -> None:
    bad = torch.zeros(2, 3, device=device).to(dtype)
    with pytest.raises(TypeError, match=rf"int32 or torch.int64, got {dtype}.*\.long\(\)"):
        gsp.Graph.from_edge_index(bad, 4)
    with pytest.raises(TypeError, match=r"int64"):
        gsp.Graph.from_csr(bad[0, :1], bad[0, :0])
    good = bad.real.long() if bad.is_complex() else bad.long()
    for _ in range(2):  # also where a graph of that content is known
        graph_of(good[1], good[0], 4, 4)
        with pytest.raises(TypeError, match=r"int64"):
            graph_of(bad[1], bad[0], 4, 4)


@pytest.mark.parametrize("shape", [(3, 2), (2,), (1, 4), (2, 3, 1), (0,), (), (0, 2)], ids=str)
def test_index_shapes(device: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\[2, num_edges\], got"):
        gsp.Graph.from_edge_index(torch.zeros(shape, dtype=torch.int64, device=device), 4)


@pytest.mark.parametrize("bad", [None, [[0], [1]], "edges", 3, object()], ids=str)
def test_index_types(bad: object) -> None:
    with pytest.raises(TypeError, match=r"must be a torch.Tensor"):
        gsp.Graph.from_edge_index(bad, 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch.sparse"):
        gsp.Graph.from_torch_sparse(bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"scipy"):
        gsp.Graph.from_scipy(bad)
    with pytest.raises(TypeError, match=r"Graph.from_edge_index"):
        gsp.spmm(bad, torch.zeros(3, 1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Graph"):
        gsp.plan(bad, 3)  # type: ignore[arg-type]


def test_edge_index_where_a_graph_belongs() -> None:
    with pytest.raises(TypeError, match=r"spmm.*Graph.from_edge_index"):
        gsp.spmm(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "num_nodes", [-1, (3, -1), 2.5, "4", (1, 2, 3), (4,), True, (4.0, 4), [None, 4], torch.tensor([4.5])], ids=str
)
def test_sizes(num_nodes: object) -> None:
    with pytest.raises((ValueError, TypeError), match=r"num_nodes"):
        gsp.Graph.from_edge_index(torch.zeros(2, 1, dtype=torch.int64), num_nodes)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_nodes", [2**62, 2**63, 2**70])
def test_absurd_sizes(device: str, num_nodes: int) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        gsp.Graph.from_edge_index(torch.zeros(2, 1, dtype=torch.int64, device=device), num_nodes)
    still_works(device)


def test_flow() -> None:
    with pytest.raises(ValueError, match=r"source_to_target.*'up'"):
        gsp.Graph.from_edge_index(torch.zeros(2, 1, dtype=torch.int64), 4, flow="up")


@pytest.mark.parametrize(
    ("rowptr", "message"),
    [
        ([0, 2, 1, 3], "decreases at row 1"),
        ([1, 2, 3, 3], "first 1"),
        ([0, 1, 2, 4], "last 4"),
        ([0, 1, 2, 2], "last 2"),
        ([0, -1, 3, 3], "decreases at row 0"),
        ([0, 2**63 - 1, -2, 3], "decreases at row 1"),  # the differences wrap around to legal ones
        ([0, 2**40, 3, 3], "decreases at row 1"),
        ([], r"\[num_dst \+ 1\]"),
    ],
)
def test_row_pointers(device: str, rowptr: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gsp.Graph.from_csr(
            torch.tensor(rowptr, dtype=torch.int64, device=device), torch.tensor([0, 1, 2], device=device)
        )
    still_works(device)


def test_narrow_row_pointers(device: str) -> None:
    rowptr = torch.tensor([0, 2**31 - 1, -2, 3], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"decreases at row 1"):
        gsp.Graph.from_csr(rowptr, torch.tensor([0, 1, 2], device=device))


def test_csr_shapes(device: str) -> None:
    index = torch.zeros(3, 1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"got"):
        gsp.Graph.from_csr(index, index[0])
    with pytest.raises(ValueError, match=r"got"):
        gsp.Graph.from_csr(index[0], index)
    with pytest.raises(IndexError, match=r"edge 1 \(3 -> 1\) has source 3"):
        gsp.Graph.from_csr(torch.tensor([0, 1, 2], device=device), torch.tensor([0, 3], device=device), num_src=3)


@pytest.mark.gpu
def test_csr_devices() -> None:
    with pytest.raises(ValueError, match=r"cpu.*cuda|cuda.*cpu"):
        gsp.Graph.from_csr(torch.tensor([0, 1]), torch.tensor([0], device="cuda"))
    with pytest.raises((ValueError, RuntimeError), match=r"cpu.*cuda|cuda.*cpu"):
        graph_of(torch.tensor([0]), torch.tensor([0], device="cuda"), 2, 2)


def test_lengths(device: str) -> None:
    index = torch.zeros(3, dtype=torch.int64, device=device)
    for _ in range(2):
        with pytest.raises((ValueError, RuntimeError), match=r"3.*2|2.*3"):
            graph_of(index, index[:2], 4, 4)
        graph_of(index, index, 4, 4)


def test_sparse_layouts(device: str) -> None:
    A = torch.eye(3, device=device)
    with pytest.raises(TypeError, match=r"COO, CSR or CSC.*torch.strided"):
        gsp.Graph.from_torch_sparse(A)
    with pytest.raises(TypeError, match=r"COO, CSR or CSC"):
        gsp.Graph.from_torch_sparse(A[:2, :2].to_sparse_bsr((1, 1)))
    with pytest.raises(ValueError, match=r"dense dims"):
        gsp.Graph.from_torch_sparse(torch.ones(3, 3, 2, device=device).to_sparse(2))
    with pytest.raises(ValueError, match=r"shape"):
        gsp.Graph.from_torch_sparse(torch.ones(3, device=device).to_sparse())
    with pytest.raises(ValueError, match=r"shape"):
        gsp.Graph.from_torch_sparse(torch.ones(2, 3, 3, device=device).to_sparse_csr())
    with pytest.raises(TypeError, match=r"floating point"):
        gsp.Graph.from_torch_sparse(A.long().to_sparse())
    for dense in (A.long().to_sparse(), A.long().to_sparse_csr()):
        with pytest.raises(TypeError, match=r"from_torch_sparse"):
            gsp.Graph.from_edge_index(dense, 4)


@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_inconsistent_sparse_matrices(device: str, layout: str) -> None:
    """torch lets one be made without checks."""
    make = {"csr": torch.sparse_csr_tensor, "csc": torch.sparse_csc_tensor}[layout]
    for ptr, index in (([0, 2, 1, 2], [0, 1]), ([0, 1, 2, 2], [0, 7]), ([0, 1, 2, 2], [0, -1]), ([0, 1, 1, 9], [0, 1])):
        A = make(
            torch.tensor(ptr, device=device),
            torch.tensor(index, device=device),
            torch.ones(2, device=device),
            (3, 3),
            check_invariants=False,
        )
        with pytest.raises((IndexError, ValueError, RuntimeError)):
            gsp.Graph.from_torch_sparse(A)
    still_works(device)


# ---------------------------------------------------------------------- features


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int8],
    ids=str,
)
def test_feature_dtypes(g: gsp.Graph, device: str, dtype: torch.dtype) -> None:
    x = torch.zeros(g.num_src, 2, device=device).to(dtype)
    advice = "real and imaginary" if dtype.is_complex else r"\.float\(\)"
    for reduce in ("sum", "max"):
        with pytest.raises(TypeError, match=rf"x must be float32.*got {dtype}.*{advice}"):
            gsp.spmm(g, x, reduce=reduce)
    with pytest.raises(TypeError, match=rf"a_dst.*{dtype}"):
        gsp.sddmm(g, torch.zeros(g.num_dst, 2, device=device).to(dtype), x)
    with pytest.raises(TypeError, match=rf"logits.*{dtype}"):
        gsp.edge_softmax(g, torch.zeros(g.num_edges, device=device).to(dtype))
    with pytest.raises(TypeError, match=rf"weight must be .*got {dtype}"):
        gsp.spmm(
            g, x.real.float() if dtype.is_complex else x.float(), torch.zeros(g.num_edges, device=device).to(dtype)
        )


@pytest.mark.parametrize("rows", [0, 1, 10, 12, 29])
def test_feature_rows(g: gsp.Graph, device: str, rows: int) -> None:
    with pytest.raises(
        ValueError, match=rf"x must have one row for each of the graph's 11 source nodes, got \[{rows}, 2\]"
    ) as e:
        gsp.spmm(g, torch.zeros(rows, 2, device=device))
    assert ("graph.T" in str(e.value)) == (rows == 29)
    with pytest.raises(ValueError, match=r"a_dst.*29 destination"):
        gsp.sddmm(g, torch.zeros(rows + (rows == 29), 2, device=device), torch.zeros(11, 2, device=device))
    with pytest.raises(ValueError, match=r"b_src.*11 source"):
        gsp.sddmm(g, torch.zeros(29, 2, device=device), torch.zeros(rows, 2, device=device))
    with pytest.raises(ValueError, match=r"logits.*120 edges"):
        gsp.edge_softmax(g, torch.zeros(rows, device=device))


def test_advice_for_wrong_adjacencies(device: str) -> None:
    edges, x = torch.tensor([[0, 1], [1, 2], [2, 0]], device=device), torch.zeros(3, 2, device=device)
    conv = gsp.nn.GCNConv(2, 2).to(device)
    for call in (lambda: gsp.Graph.from_edge_index(edges), lambda: conv(x, edges)):
        with pytest.raises(ValueError, match=r"got \[3, 2\]; transpose it"):
            call()
    with pytest.raises(TypeError, match=r"torch.as_tensor"):
        gsp.Graph.from_edge_index([[0], [1]])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"dense adjacency"):
        conv(x, torch.ones(3, 3, device=device))
    scipy_sparse = pytest.importorskip("scipy.sparse")
    with pytest.raises(TypeError, match=r"csr_matrix; see Graph.from_scipy"):
        conv(x, scipy_sparse.eye(3).tocsr())


@pytest.mark.parametrize("bad", [None, [[1.0]], 3.0, "x"], ids=str)
def test_feature_types(g: gsp.Graph, device: str, bad: object) -> None:
    x = torch.zeros(11, 2, device=device)
    with pytest.raises(TypeError, match=r"x must be a torch.Tensor, got"):
        gsp.spmm(g, bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"x must be a torch.Tensor, got"):
        _ = g @ bad  # type: ignore[operator]
    if bad is not None:
        with pytest.raises(TypeError, match=r"weight must be a torch.Tensor, got"):
            gsp.spmm(g, x, bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be a torch.Tensor, got"):
        gsp.sddmm(g, bad, x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be a torch.Tensor, got"):
        gsp.edge_softmax(g, bad)  # type: ignore[arg-type]


def test_feature_layouts(g: gsp.Graph, device: str) -> None:
    x = torch.zeros(11, 2, device=device)
    with pytest.raises(ValueError, match=r"got \[\]"):
        gsp.spmm(g, x[0, 0])
    for sparse in (x.to_sparse(), x.to_sparse_csr()):
        with pytest.raises(TypeError, match=r"dense.*to_dense"):
            gsp.spmm(g, sparse)
    with pytest.raises(TypeError, match=r"dense"):
        gsp.spmm(g, x, torch.ones(g.num_edges, device=device).to_sparse())
    with pytest.raises(TypeError, match=r"dense"):
        gsp.edge_softmax(g, torch.ones(g.num_edges, device=device).to_sparse())
    nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(3, 3)])
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        gsp.spmm(g, nested)
    still_works(device)


@pytest.mark.gpu
def test_devices() -> None:
    here, there = NAMED["bipartite"].graph(), NAMED["bipartite"].graph("cuda")
    x = torch.zeros(11, 2)
    for graph, wrong in ((here, "cuda"), (there, "cpu")):
        with pytest.raises(ValueError, match=rf"x is on {wrong}.*graph\.to"):
            gsp.spmm(graph, x.to(wrong))
        with pytest.raises(ValueError, match=rf"weight is on {wrong}"):
            gsp.spmm(graph, x.to(graph.device), torch.zeros(120, device=wrong))
        with pytest.raises(ValueError, match=rf"weight is on {wrong}"):
            graph.with_weight(torch.zeros(120, device=wrong))
    still_works("cuda")


def test_meta_tensors() -> None:
    g = NAMED["bipartite"].graph()
    with pytest.raises(ValueError, match=r"meta"):
        gsp.spmm(g, torch.zeros(11, 2, device="meta"))
    with pytest.raises(ValueError, match=r"no graph can be made of edges on the meta device"):
        gsp.Graph.from_edge_index(torch.zeros(2, 3, dtype=torch.int64, device="meta"), 4)


@pytest.mark.parametrize("shape", [(119,), (121,), (0,), (), (119, 2), (1, 120), (120, 2, 1)], ids=str)
def test_weight_shapes(g: gsp.Graph, device: str, shape: tuple[int, ...]) -> None:
    weight = torch.zeros(shape, device=device)
    with pytest.raises(ValueError, match=r"\[num_edges, heads\] with num_edges = 120, got \["):
        gsp.spmm(g, torch.zeros(11, 2, 3, device=device), weight)
    with pytest.raises(ValueError, match=r"num_edges = 120"):
        g.with_weight(weight)


def test_heads(g: gsp.Graph, device: str) -> None:
    weight = torch.zeros(120, 3, device=device)
    for shape in ((11, 2), (11,), (11, 2, 3)):
        with pytest.raises(ValueError, match=r"\[120, 3\].*\[num_src, heads, ...\], got \[11"):
            gsp.spmm(g, torch.zeros(shape, device=device), weight)
    assert gsp.spmm(g, torch.zeros(11, 3, device=device), weight).shape == (29, 3)
    assert gsp.spmm(g, torch.zeros(11, 3, 2, 2, device=device), weight).shape == (29, 3, 2, 2)
    assert gsp.spmm(g, torch.zeros(11, 0, 2, device=device), weight[:, :0]).shape == (29, 0, 2)


def test_sddmm_shapes(g: gsp.Graph, device: str) -> None:
    for a, b in (((29, 2), (11, 3)), ((29, 2, 3), (11, 6)), ((29,), (11,)), ((29, 1, 2, 3), (11, 1, 2, 3))):
        with pytest.raises(ValueError, match=r"a_dst and b_src must have shapes"):
            gsp.sddmm(g, torch.zeros(a, device=device), torch.zeros(b, device=device))
    with pytest.raises(ValueError, match=r"logits must have shape"):
        gsp.edge_softmax(g, torch.zeros(120, 2, 2, device=device))


@pytest.mark.parametrize("bad", ["median", "SUM", None, 3, ["sum"]], ids=str)
def test_choices(g: gsp.Graph, device: str, bad: object) -> None:
    x = torch.zeros(11, 2, device=device)
    with pytest.raises(ValueError, match=r"reduce must be one of sum, mean, max, min; got"):
        gsp.spmm(g, x, reduce=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tie must be one of first, split; got"):
        gsp.spmm(g, x, reduce="max", tie=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"policy must be one of auto.*; got"):
        gsp.spmm(g, x, policy=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"reduce must be one of"):
        gsp.plan(g, 3, reduce=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"mode must be one of"):
        gsp.plan(g, 3, mode=bad)  # type: ignore[arg-type]


def test_arguments_that_do_not_fit_the_reduction(g: gsp.Graph, device: str) -> None:
    with pytest.raises(ValueError, match=r"return_arg needs reduce='max' or 'min', got 'mean'"):
        gsp.spmm(g, torch.zeros(11, 2, device=device), reduce="mean", return_arg=True)


def test_no_kernels_for_this_device() -> None:
    with pytest.raises(RuntimeError, match=r"no kernels for xpu.*cpu and cuda only"):
        _native.require(torch.device("xpu"))


def test_missing_cuda_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "cuda_error", "the package was built without CUDA (no nvcc)")
    with pytest.raises(RuntimeError, match=r"no kernels for cuda:0: the package was built without CUDA"):
        _native.require(torch.device("cuda:0"))
    listed = {k["name"]: k for k in gsp.kernels()}
    assert not listed["csr_dual"]["available"]
    assert listed["csr_dual"]["reasons"] == ["the package was built without CUDA (no nvcc)"]


# ---------------------------------------------------------------------- the raw operators are reachable too


BUILDERS = ("from_coo", "transpose", "same_coo")
#: Operators that one device alone has kernels for.
ONLY_ON = {"pcsr_spmm": "cuda", "tile_spmm": "cuda", "tile_end": "cuda"}


def raw_arguments(device: str) -> dict[str, tuple[object, ...]]:
    """One legal call of each raw operator."""
    g = NAMED["shuffled"].graph(device)
    csr, other = g._csr, g._csr_t
    x = values((g.num_src, 4), torch.float32, 1, device=device)
    y = values((g.num_dst, 4), torch.float32, 2, device=device)
    w = values((g.num_edges, 2), torch.float32, 3, device=device)
    one, e = w[:, 0].contiguous(), values((g.num_edges, 4), torch.float32, 4, device=device)
    out, arg = _native.spmm_arg(csr.rowptr, csr.col, csr.perm, w, x, None, [128, 2048, 0, 0, 0, 0, 0, 0, 1], False)
    plan = (None, [128, 2048, 0, 0, 0, 0, 0, 0, 1])
    scale, bias = torch.ones(37, device=device), torch.ones(4, device=device)
    att = y[:2, :2].contiguous()
    split = pcsr.build(csr, pcsr.vectors(csr, 2), pcsr.Config(V=2, S=True), 4)
    arrays = (csr.rowptr, split.ptr, split.col, split.target, split.merges, split.values(w))
    end = (y, scale, bias, True, torch.float16)
    stage = torch.zeros(3, 37, dtype=torch.int32, device=device)  # not used with weights of two heads
    order = torch.arange(37, device=device).flip(0)
    cut = tiles.build(tiles.pack(csr, 8, order), tiles.TileConfig(8, 1))
    packed = (cut.ptr, cut.vectors, cut.bits, cut.values(one), cut.rows, cut.target, cut.merges)
    sums = torch.zeros(37, 4, device=device)
    return {
        "spmm": (csr.rowptr, csr.col, w, x, scale, scale, *plan, True, *end, stage, 37),
        "row_sum": (csr.rowptr, csr.col, x, 128 << 32 | 2048, True),
        "pcsr_spmm": (*arrays, x, scale, scale, [4, 1, 2, split.slots], True, *end),
        "tile_spmm": (csr.rowptr, csr.col, one, *packed, x, scale, [8, cut.slots, 3, 4], True, *end),
        "tile_end": (csr.rowptr, csr.col, one, x, sums, scale, True, *end),
        "spmm_arg": (csr.rowptr, csr.col, csr.perm, w, x, *plan, False),
        "spmm_arg_backward": (other.rowptr, other.col, other.perm, w, y, arg, *plan),
        "spmm_tie_count": (csr.rowptr, csr.col, w, x, out, *plan, y, True),
        "spmm_tie_backward": (other.rowptr, other.col, w, y, x, out, *plan),
        "sddmm": (csr.rowptr, csr.col, csr.perm, y, x, 2),
        "sddmm_arg": (csr.rowptr, csr.col, csr.perm, y, x, arg, 2),
        "sddmm_tie": (csr.rowptr, csr.col, csr.perm, w, y, x, out, 2),
        "pair_score": (csr.rowptr, csr.col, csr.perm, y, x, att, 0.2),
        "pair_gradient": (csr.rowptr, csr.col, csr.perm, w, y, x, att, 0.2),
        "edge_sum": (csr.rowptr, csr.col, csr.perm, one, x, e, *plan, True),
        "edge_sum_backward": (other.rowptr, other.col, other.perm, one, x, e, y, *plan, True),
        "edge_sum_dot": (csr.rowptr, csr.col, csr.perm, y, x, e),
        "edge_softmax": (csr.rowptr, csr.perm, w),
        "edge_softmax_backward": (csr.rowptr, csr.perm, w, w),
        "from_coo": (g.edge_index()[1], g.edge_index()[0], 37, 37, False, True),
        "inverse_degree": (csr.rowptr, torch.float32),
        "gcn_scales": (csr.rowptr, csr.col, True, torch.float64),
        "transpose": (*g.edge_index().int().flip(0).unbind(), 37),
        "same_coo": (*g.edge_index().unbind(), *g.edge_index().int().unbind()),
    }


def _damaged(t: torch.Tensor) -> list[torch.Tensor]:
    """Tensors that no raw operator may take in the place of `t`."""
    more = torch.cat([t, t])
    bad = [t.unsqueeze(0), t.bool(), t.to("meta"), more[: t.shape[0] - 1]]
    if t.dtype.is_floating_point:
        bad += [t.long(), more[:, :1] if t.dim() == 2 else more]
        if t.dim() == 2:
            bad.append(t[:, :3] if t.shape[1] == 4 else torch.cat([t, t[:, :1]], 1))
        bad.append(t.double())
    else:
        bad += [t.float(), t.to(torch.int16)]
        if t.dim() == 1:
            bad.append(t.long() if t.dtype == torch.int32 else t.int())
    return bad


@pytest.mark.parametrize("name", [n for n in _native._OPS if n not in BUILDERS])
def test_raw_operators_check_their_arguments(device: str, name: str) -> None:
    """They trust index values, which a Graph has checked, and nothing else: a wrong tensor anywhere is an error."""
    if ONLY_ON.get(name, device) != device:
        pytest.skip(f"a kernel for {ONLY_ON[name]}")
    op, args = getattr(_native, name), raw_arguments(device)[name]
    op(*args)
    for i, arg in enumerate(args):
        if not isinstance(arg, torch.Tensor):
            continue
        for j, bad in enumerate(_damaged(arg)):
            try:
                result = op(*args[:i], bad, *args[i + 1 :])
            except (RuntimeError, NotImplementedError, ValueError, TypeError):
                continue
            if result is not None and bad.device.type != "meta":
                # legal after all where the operator leaves this freedom: then the shapes say so
                _assert_free(name, i, j, arg, bad)
    still_works(device)


def _assert_free(name: str, i: int, j: int, arg: torch.Tensor, bad: torch.Tensor) -> None:
    same_kind = bad.dtype == arg.dtype and bad.dim() == arg.dim()
    heads = arg.dim() == 2 and same_kind and bad.shape[0] == arg.shape[0]  # another number of heads or columns
    any_features = name in ("edge_softmax", "edge_softmax_backward") or (name, i) == ("row_sum", 2)
    all_of_it = any_features and bad.is_floating_point()
    more_rows = same_kind and bad.shape[0] != arg.shape[0] and arg.shape[1:] == bad.shape[1:]
    any_heads = (name, i) == ("pair_score", 5) and bad.numel() == 4
    # the format has a type of its own; and degrees are in rowptr alone
    any_index = (name, i, bad.dtype) in {("pcsr_spmm", 0, torch.int64), ("inverse_degree", 0, torch.int64)}
    assert heads or all_of_it or any_heads or any_index or (more_rows and _rows_are_free(name, i)), (
        name,
        i,
        j,
        list(bad.shape),
        bad.dtype,
    )


def _rows_are_free(name: str, i: int) -> bool:
    # x has num_src rows, and rowptr says how many there are of the result and of edges, where nothing repeats it
    return (name, i) in {
        ("pcsr_spmm", 4),
        ("tile_spmm", 9),
        ("tile_spmm", 10),
        ("tile_end", 3),
        ("row_sum", 0),
        ("row_sum", 1),
        ("spmm_arg", 0),
        ("spmm_arg", 4),
        ("spmm_arg_backward", 0),
        ("spmm_tie_count", 3),
        ("sddmm", 4),
        ("sddmm_arg", 4),
        ("sddmm_tie", 5),
        ("pair_score", 4),
        ("pair_gradient", 5),
        ("edge_sum", 0),
        ("edge_sum", 4),
        ("edge_sum_backward", 6),
        ("edge_sum_dot", 4),
        ("edge_softmax", 0),
        ("edge_softmax_backward", 0),
        ("inverse_degree", 0),
        ("gcn_scales", 0),
        ("gcn_scales", 1),
    }


@pytest.mark.parametrize("name", BUILDERS)
def test_raw_builders_check_their_arguments(device: str, name: str) -> None:
    op, args = getattr(_native, name), raw_arguments(device)[name]
    for i, bad in itertools.product(
        range(len(args)), [torch.zeros(2, 2), torch.zeros(3), torch.zeros(3, dtype=torch.bool)]
    ):
        if isinstance(args[i], torch.Tensor):
            with pytest.raises((RuntimeError, NotImplementedError)):
                op(*args[:i], bad.to(device), *args[i + 1 :])
    for i, size in itertools.product(range(len(args)), (-1, -(2**63))):
        if type(args[i]) is int:
            with pytest.raises(RuntimeError):
                op(*args[:i], size, *args[i + 1 :])


def test_what_does_not_fit_into_int32_is_refused(device: str) -> None:
    edge = torch.zeros(1, dtype=torch.int64, device=device)
    for sizes in ((1, 2**31), (2**31, 1)):
        with pytest.raises(RuntimeError, match=r"expected wide = true"):
            _native.from_coo(edge, edge, *sizes, False)
    with pytest.raises(RuntimeError, match=r"dst is Int, expected int64 for 2147483648 sources"):
        _native.transpose(edge.int(), edge.int(), 2**31)


def test_out_of_memory_inside_an_operator(device: str) -> None:
    """It is torch's own error, which callers catch; and nothing is left behind."""
    g = gsp.Graph.from_edge_index(torch.zeros(2, 0, dtype=torch.int64, device=device), (1, 1 << 22))
    for needs_grad in (False, True):
        x = torch.ones(1, 1 << 24, device=device).requires_grad_(needs_grad)
        for reduce in ("sum", "max"):
            with pytest.raises(torch.OutOfMemoryError, match=r"out of memory: cannot allocate \[4194304, 16777216\]"):
                gsp.spmm(g, x, reduce=reduce)
    still_works(device)


# ---------------------------------------------------------------------- functorch


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_what_a_transform_leaves_behind(device: str, reduce: str) -> None:
    """A tensor that escaped from torch.func.grad stands for the one that went in, gradients included."""
    g = NAMED["shuffled"].graph(device)
    x = values((37, 4), torch.float32, 1, device=device).requires_grad_()
    w = values((211,), torch.float32, 2, device=device).requires_grad_()
    kept: list[torch.Tensor] = []
    torch.func.grad(lambda a, b: (kept.extend((a, b)), (a.sum() * b.sum()))[1], (0, 1))(x, w)
    for weighted in (False, True):
        leaves = [x, w][: 1 + weighted]
        grads = [
            torch.autograd.grad(gsp.spmm(g, *of, reduce=reduce).square().sum(), leaves)
            for of in (kept[: len(leaves)], leaves)
        ]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_vmap(device: str, reduce: str) -> None:
    """In plain torch, one message per edge: slow, and right."""
    g = NAMED["shuffled"].graph(device)
    x = values((3, g.num_src, 4), torch.float32, 1, device=device)
    w = values((3, g.num_edges), torch.float32, 2, device=device)
    for args, dims in (((x, None), (0, None)), ((x[0], w), (None, 0)), ((x, w), (0, 0))):
        for needs_grad in (False, True):
            args = tuple(None if a is None else a.detach().requires_grad_(needs_grad) for a in args)
            out = torch.vmap(lambda a, b: gsp.spmm(g, a, b, reduce), in_dims=dims)(*args)
            for i in range(3):
                one = [a if d is None or a is None else a[i] for a, d in zip(args, dims, strict=True)]
                assert torch.allclose(out[i], gsp.spmm(g, *one, reduce=reduce), atol=1e-5)
    if reduce == "sum":
        assert torch.allclose(
            torch.vmap(lambda t: gsp.edge_softmax(g, t))(w), torch.stack([gsp.edge_softmax(g, t) for t in w])
        )
        assert torch.allclose(
            torch.vmap(lambda t: gsp.sddmm(g, t, t))(x), torch.stack([gsp.sddmm(g, t, t) for t in x]), atol=1e-5
        )


def _as_one(graph: gsp.Graph, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    options = {"self_x": x, "self_scale": w[:1], "bias": x[0], "relu": True, "dst_scale": w[: graph.num_dst].detach()}
    return aggregate(graph, x, w, "mean", **options)


DERIVED_TWICE = {
    **{r: lambda g, x, w, r=r: gsp.spmm(g, x, reduce=r) for r in ("sum", "mean", "max")},
    **{f"weighted {r}": lambda g, x, w, r=r: gsp.spmm(g, x, w, r) for r in ("sum", "mean", "min")},
    "split": lambda g, x, w: gsp.spmm(g, x, w, "max", tie="split"),
    "heads": lambda g, x, w: gsp.spmm(g, x.view(-1, 2, 2), torch.stack([w, w * w], 1)).flatten(1),
    "heads of a maximum": lambda g, x, w: gsp.spmm(g, x.view(-1, 2, 2), torch.stack([w, w * w], 1), "max").flatten(1),
    "attention": lambda g, x, w: gsp.spmm(g, x, gsp.edge_softmax(g, gsp.sddmm(g, x, x))),
    "aggregate": _as_one,
}


@pytest.mark.parametrize("edges", ["shuffled", "no edges"])
@pytest.mark.parametrize("name", DERIVED_TWICE)
def test_many_gradients_at_once(device: str, name: str, edges: str) -> None:
    """Wrapped gradients, which hide that they need one: as those one by one, and so are their own gradients."""
    g = NAMED["shuffled"].graph(device)
    if edges == "no edges":
        g = gsp.Graph.from_edge_index(torch.zeros(2, 0, dtype=torch.int64, device=device), g.num_src)
    op = DERIVED_TWICE[name]
    if name == "aggregate" and edges == "no edges":
        pytest.skip("takes its scales from the weights")
    x = values((g.num_src, 4), torch.float64, 1, device=device).requires_grad_()
    w = values((g.num_edges,), torch.float64, 2, device=device).requires_grad_()
    y = op(g, op(g, x, w).tanh() + x, w)
    grads = values((3, *y.shape), torch.float64, 3, device=device)

    def derived(of: torch.Tensor, grad: torch.Tensor, **options: bool) -> tuple[torch.Tensor, ...]:
        options |= {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        return torch.autograd.grad(of, (x, w), grad, **options)

    for again in (False, True):
        one_by_one = [derived(y, grad, create_graph=again) for grad in grads]
        want = [torch.stack(t) for t in zip(*one_by_one, strict=True)]
        batched = derived(y, grads, create_graph=again, is_grads_batched=True)
        mapped = torch.vmap(lambda grad, again=again: derived(y, grad, create_graph=again))(grads)
        for got in (batched, mapped):
            assert all(torch.allclose(a, b) for a, b in zip(got, want, strict=True))
            if again:
                losses = [sum(t.square().sum() for t in first) + 0 * x.sum() for first in (got, want)]
                second = [derived(loss, torch.ones_like(loss)) for loss in losses]
                assert all(torch.allclose(a, b) for a, b in zip(*second, strict=True))


@pytest.mark.parametrize("tie", ["first", "split"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_functional_derivatives(device: str, reduce: str, tie: str) -> None:
    """torch.func.grad and jvp, forward mode: none of them sees into a kernel, and a tangent must not vanish."""
    g = NAMED["shuffled"].graph(device)
    x = values((g.num_src, 4), torch.float64, 1, few=True, device=device)
    w = values((g.num_edges,), torch.float64, 2, few=True, device=device)
    leaf = x.clone().requires_grad_()

    def loss(t: torch.Tensor) -> torch.Tensor:
        out = gsp.spmm(g, t, w, reduce, tie=tie)
        assert isinstance(out, torch.Tensor)
        return (out**2).sum()

    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    assert torch.allclose(torch.func.grad(loss)(x), expected)
    direction = torch.ones_like(x)
    _, tangent = torch.func.jvp(loss, (x,), (direction,))
    assert torch.allclose(tangent, expected.sum())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, direction)
        assert torch.allclose(torch.autograd.forward_ad.unpack_dual(loss(dual)).tangent, expected.sum())
