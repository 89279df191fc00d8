"""The native CPU operators against plain torch in float64, on random graphs.

Each operator is compared with a twin of a few lines that writes every message, the way nobody would run it.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from gnn_spmm_plugin import _native

ops = torch.ops.gnn_spmm_plugin

WIDTHS = (0, 1, 3, 16, 33, 64, 100, 257, 1030)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INDICES = (torch.int32, torch.int64)
# Of results of order 1, sums of some ten of them: rounding of the storage type, of float32 sums, of float64 sums.
TOLERANCE = {
    torch.float32: 1e-5,
    torch.float64: 1e-13,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    _native.require(torch.device("cpu"))


@dataclasses.dataclass
class Csr:
    """A random graph: rows are destinations, `perm` maps row order to the caller's order."""

    rowptr: torch.Tensor
    col: torch.Tensor
    perm: torch.Tensor
    num_src: int

    @property
    def row(self) -> torch.Tensor:
        """Row of every edge, in row order."""
        return torch.repeat_interleave(torch.arange(self.rowptr.numel() - 1), self.rowptr.long().diff())

    @property
    def rows(self) -> int:
        return self.rowptr.numel() - 1

    @property
    def edges(self) -> int:
        return self.col.numel()

    def transposed(self) -> Csr:
        """Rows are sources; perm still leads to the caller's order."""
        order = torch.argsort(self.col.long(), stable=True)
        rowptr = torch.zeros(self.num_src + 1, dtype=torch.long)
        rowptr[1:] = torch.bincount(self.col.long(), minlength=self.num_src).cumsum(0)
        index = self.col.dtype
        return Csr(rowptr.to(index), self.row[order].to(index), self.perm[order], self.rows)


def random_csr(index: torch.dtype, rows: int = 37, num_src: int = 23, edges: int = 300, hub: int = 0) -> Csr:
    """Edges with duplicates and empty rows; row 5 gets `hub` edges on top."""
    gen = torch.Generator().manual_seed(rows * 1000 + edges + hub)
    row = torch.randint(0, rows, (edges,), generator=gen)
    row[row % 4 == 3] = 0  # every fourth row is empty, row 0 is full
    row = torch.cat([row, torch.full((hub,), min(5, rows - 1))]).sort().values
    col = torch.randint(0, num_src, (edges + hub,), generator=gen)
    rowptr = torch.zeros(rows + 1, dtype=torch.long)
    rowptr[1:] = torch.bincount(row, minlength=rows).cumsum(0)
    # As a stable sort by row makes it: the edges of a row keep the caller's order.
    perm = torch.argsort(torch.rand(edges + hub, generator=gen))
    perm = torch.cat([p.sort().values for p in perm.split(rowptr.diff().tolist())])
    return Csr(rowptr.to(index), col.to(index), perm.to(index), num_src)


def features(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random values with many ties, in rows that lie apart and start at odd addresses."""
    gen = torch.Generator().manual_seed(seed)
    values = torch.randint(-8, 9, (rows, width + 3), generator=gen) / 4
    return values.to(dtype)[:, 1 : width + 1]


def weights(edges: int, heads: int, dtype: torch.dtype) -> torch.Tensor | None:
    """None for 0 heads, [E] for 1, [E, H] for more."""
    if heads == 0:
        return None
    gen = torch.Generator().manual_seed(edges)
    shape = (edges,) if heads == 1 else (edges, heads)
    return (torch.randint(-6, 7, shape, generator=gen) / 3).to(dtype)


def spread(weight: torch.Tensor | None, width: int) -> torch.Tensor:
    """The weight of every edge and column, or 1."""
    if weight is None:
        return torch.ones(())
    columns = weight if weight.dim() == 2 else weight[:, None]
    return columns.repeat_interleave(width // columns.shape[1], dim=1)


def messages(csr: Csr, weight: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Weight times x of every edge, rounded to the dtype of x, in float64."""
    product = spread(weight, x.shape[1]).double() * x[csr.col.long()].double()
    return product.to(x.dtype).double()


def sum_rows(csr: Csr, values: torch.Tensor) -> torch.Tensor:
    return torch.zeros(csr.rows, values.shape[1], dtype=torch.float64).index_add(0, csr.row, values.double())


def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def winners(csr: Csr, sent: torch.Tensor, minimum: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The extreme of every row, NaN first, and the caller's id of the first edge that has it."""
    out = torch.zeros(csr.rows, sent.shape[1], dtype=torch.float64)
    arg = torch.full(out.shape, -1)
    for row, (begin, end) in enumerate(itertools.pairwise(csr.rowptr.tolist())):
        if begin == end:
            continue
        part = sent[begin:end]
        out[row] = part.amin(0) if minimum else part.amax(0)  # both let NaN win
        first = same(part, out[row]).to(torch.int8).argmax(0)
        arg[row] = csr.perm.long()[begin + first]
    return out, arg


def to_caller(csr: Csr, values: torch.Tensor) -> torch.Tensor:
    """Row order to the caller's order."""
    return torch.empty_like(values).index_copy(0, csr.perm.long(), values)


def per_head(products: torch.Tensor, heads: int) -> torch.Tensor:
    if heads == 0:
        return products.sum(1)
    return products.unflatten(1, (heads, products.shape[1] // heads)).sum(2)


def close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, scale: float = 1) -> None:
    tolerance = TOLERANCE[dtype] * scale
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


def cases() -> list[tuple[torch.dtype, torch.dtype, int, int]]:
    """Every width with every dtype; heads (0: no weight) and index types take turns."""
    turns = itertools.cycle(itertools.product((0, 1, 3, 4), INDICES))
    chosen = []
    for dtype, width in itertools.product(DTYPES, WIDTHS):
        for heads, index in itertools.islice(turns, 3):
            chosen.append((dtype, index, width if heads < 2 else width // heads * heads, heads))
    return chosen


@pytest.mark.parametrize("hub", [0, 20000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_hub_is_cut_and_merged(dtype: torch.dtype, hub: int) -> None:
    csr = random_csr(torch.int32, hub=hub)
    for width, heads in ((20, 1), (33, 3), (1, 0)):
        check_spmm(csr, dtype, width, heads)
        check_extremes(csr, dtype, width, heads)


@pytest.mark.parametrize(("dtype", "index", "width", "heads"), cases())
def test_spmm(dtype: torch.dtype, index: torch.dtype, width: int, heads: int) -> None:
    check_spmm(random_csr(index), dtype, width, heads)


def check_spmm(csr: Csr, dtype: torch.dtype, width: int, heads: int) -> None:
    x = features(csr.num_src, width, dtype)
    weight = weights(csr.edges, heads, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    src_scale = torch.linspace(0.5, 1.5, csr.num_src, dtype=wide)
    dst_scale = torch.linspace(0.5, 2.0, csr.rows, dtype=wide)
    degree = csr.rowptr.long().diff()
    largest = max(1.0, degree.max().item() / 100)
    for scaled, mean in itertools.product((False, True), (False, True)):
        got = ops._spmm(
            csr.rowptr,
            csr.col,
            weight,
            x,
            src_scale if scaled else None,
            dst_scale if scaled else None,
            None,
            [],
            mean,
        )
        source = x.double() * src_scale.double()[:, None] if scaled else x.double()
        expected = sum_rows(csr, spread(weight, width).double() * source[csr.col.long()])
        if mean:
            expected /= degree.clamp(min=1)[:, None]
        if scaled:
            expected *= dst_scale.double()[:, None]
        assert got.dtype == dtype
        assert got.is_contiguous()
        close(got, expected.to(dtype), dtype, 1 if mean else largest)


@pytest.mark.parametrize(("dtype", "index", "width", "heads"), cases())
def test_max_and_min(dtype: torch.dtype, index: torch.dtype, width: int, heads: int) -> None:
    check_extremes(random_csr(index), dtype, width, heads)


def check_extremes(csr: Csr, dtype: torch.dtype, width: int, heads: int) -> None:
    """Forward, both tie rules backward, and the gradient of the weight."""
    x = features(csr.num_src, width, dtype)
    if width > 1:
        x[3, 0], x[4, 1], x[5, -1] = torch.nan, torch.inf, -torch.inf
    weight = weights(csr.edges, heads, dtype)
    sent = messages(csr, weight, x)
    transposed = csr.transposed()
    order = torch.argsort(csr.col.long(), stable=True)
    weight_t = None if weight is None else weight[order]
    grad = features(csr.rows, width, dtype, seed=1)
    index = csr.col.dtype
    for minimum, perm in ((False, csr.perm), (True, None)):
        csr = dataclasses.replace(csr, perm=torch.arange(csr.edges, dtype=index) if perm is None else perm)
        expected, expected_arg = winners(csr, sent, minimum)
        out, arg = ops._spmm_arg(csr.rowptr, csr.col, perm, weight, x, None, [], minimum)
        assert out.dtype == dtype
        assert arg.dtype == index
        assert torch.equal(arg.long(), expected_arg)
        assert bool(same(out.double(), expected).all())

        factor = spread(weight, width).double()
        sent_grad = grad.double()[csr.row]
        sloppy = max(1.0, csr.edges / 1000)

        won = arg.long()[csr.row] == csr.perm.long()[:, None]
        got = ops._spmm_arg_backward(
            transposed.rowptr,
            transposed.col,
            csr.perm[order],
            weight_t,
            grad,
            arg,
            None,
            [],
        )
        gathered = torch.where(won, factor * sent_grad, torch.zeros(()).double())[order]
        close(got, sum_rows(transposed, gathered).to(dtype), dtype, sloppy)
        got = ops._sddmm_arg(csr.rowptr, csr.col, perm, grad, x, arg, max(heads, 1))
        products = torch.where(won, sent_grad * x.double()[csr.col.long()], 0.0)
        finite = to_caller(csr, per_head(products, max(heads, 1)))
        torch.testing.assert_close(
            got.double(),
            finite.to(dtype).double(),
            rtol=8 * TOLERANCE[dtype],
            atol=8 * TOLERANCE[dtype],
            equal_nan=True,
        )

        tied = same(sent, out.double()[csr.row])
        got = ops._spmm_tie_count(csr.rowptr, csr.col, weight, x, out, None, [])
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.equal(got.double(), sum_rows(csr, tied))
        for zero_wins in (False, True):
            share = ops._spmm_tie_count(csr.rowptr, csr.col, weight, x, out, None, [], grad, zero_wins)
            assert share.dtype == dtype
            count = got + (out == 0) if zero_wins else got
            some = count > 0
            assert torch.equal(share[some], (grad / count).to(dtype)[some])
        got = ops._spmm_tie_backward(transposed.rowptr, transposed.col, weight_t, grad, x, out, None, [])
        gathered = torch.where(tied, factor * sent_grad, torch.zeros(()).double())[order]
        close(got, sum_rows(transposed, gathered).to(dtype), dtype, sloppy)
        got = ops._sddmm_tie(csr.rowptr, csr.col, perm, weight, grad, x, out, 0 if heads == 0 else heads)
        products = torch.where(tied, sent_grad * x.double()[csr.col.long()], 0.0)
        torch.testing.assert_close(
            got.double(),
            to_caller(csr, per_head(products, heads)).to(dtype).double(),
            rtol=8 * TOLERANCE[dtype],
            atol=8 * TOLERANCE[dtype],
            equal_nan=True,
        )


@pytest.mark.parametrize(("dtype", "index", "width", "heads"), cases())
def test_sddmm(dtype: torch.dtype, index: torch.dtype, width: int, heads: int) -> None:
    csr = random_csr(index, hub=9000 if width == 16 else 0)
    a, b = features(csr.rows, width, dtype), features(csr.num_src, width, dtype, seed=1)
    expected = per_head(a.double()[csr.row] * b.double()[csr.col.long()], heads)
    got = ops._sddmm(csr.rowptr, csr.col, csr.perm, a, b, heads)
    close(got, to_caller(csr, expected).to(dtype), dtype, 8)
    got = ops._sddmm(csr.rowptr, csr.col, None, a, b, heads)
    close(got, expected.to(dtype), dtype, 8)


@pytest.mark.parametrize("hub", [0, 20000])
@pytest.mark.parametrize("heads", [0, 1, 3, 4, 33])
@pytest.mark.parametrize("dtype", DTYPES)
def test_edge_softmax(dtype: torch.dtype, heads: int, hub: int) -> None:
    csr = random_csr(INDICES[heads % 2], hub=hub)
    gen = torch.Generator().manual_seed(heads)
    shape = (csr.edges,) if heads == 0 else (csr.edges, heads)
    logits = (torch.randn(shape, generator=gen) * 20).to(dtype)
    logits[csr.perm[1].item()] = -torch.inf
    logits[csr.perm[csr.rowptr[1].item() :][:2].long()] = -torch.inf
    grad = torch.randn(shape, generator=gen).to(dtype)
    p = ops._edge_softmax(csr.rowptr, csr.perm, logits)
    back = ops._edge_softmax_backward(csr.rowptr, csr.perm, p, grad)
    for begin, end in itertools.pairwise(csr.rowptr.tolist()):
        ids = csr.perm[begin:end].long()
        expected = logits[ids].double().softmax(0)
        torch.testing.assert_close(
            p[ids].double(),
            expected.to(dtype).double(),
            rtol=TOLERANCE[dtype] * 4,
            atol=1e-30 if dtype == torch.float32 else TOLERANCE[dtype],
            equal_nan=True,
        )
        exact, given = p[ids].double(), grad[ids].double()
        close(back[ids], exact * (given - (exact * given).sum(0)), dtype, 4)
    whole_row_masked = ops._edge_softmax(torch.tensor([0, 2]), None, torch.full((2,), -torch.inf, dtype=dtype))
    assert whole_row_masked.isnan().all()


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize(
    ("edges", "n"), [(0, 0), (0, 5), (1, 1), (1000, 7), (1000, 100000), (200000, 3), (200000, 40000)]
)
def test_transpose_is_a_stable_sort(edges: int, n: int, index: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(edges + n)
    key, other = torch.randint(0, max(n, 1), (2, edges), generator=gen).to(index)
    rowptr, col, perm = ops._transpose(other, key, n)
    assert rowptr.dtype == col.dtype == perm.dtype == index
    assert torch.equal(perm.long(), torch.argsort(key, stable=True))
    assert torch.equal(col, other[perm.long()])
    assert torch.equal(rowptr[1:].long(), torch.bincount(key, minlength=n).cumsum(0))
    assert rowptr[0] == 0


SELF_SCALES = ("none", "one", "rows")
RESULTS = {torch.float64: (None, torch.float64), torch.float32: (None, torch.float16, torch.bfloat16)}


@pytest.mark.parametrize("hub", [0, 20000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_epilogue(dtype: torch.dtype, hub: int) -> None:
    csr = random_csr(torch.int32, hub=hub)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    results = RESULTS.get(dtype, (None, torch.float32, torch.float16, torch.bfloat16))
    turns = itertools.cycle(itertools.product(SELF_SCALES, (False, True), (False, True), results))
    for width, scaled in itertools.product(WIDTHS[:-1], (False, True)):
        x, own = features(csr.num_src, width, dtype), features(csr.rows, width, dtype, seed=1)
        bias = features(1, width, wide, seed=2)[0]  # at an odd address
        by = [torch.linspace(-0.5, 2, n, dtype=wide) if scaled else None for n in (csr.num_src, csr.rows)]
        scales = {
            "none": None,
            "one": torch.tensor([1.5], dtype=wide),
            "rows": torch.linspace(-1, 2, csr.rows).to(wide),
        }
        total = sum_rows(csr, (x.double() * (1 if by[0] is None else by[0].double()[:, None]))[csr.col.long()])
        for kind, mean, relu, result in itertools.islice(turns, 13):
            scale = scales[kind]
            got = ops._spmm(
                csr.rowptr, csr.col, None, x, *by, None, [], mean, own, scale, bias, relu=relu, out_dtype=result
            )
            expected = total / csr.rowptr.long().diff().clamp(min=1)[:, None] if mean else total
            expected = expected if by[1] is None else expected * by[1].double()[:, None]
            expected = expected + own.double() * (1 if scale is None else scale.double()[:, None]) + bias.double()
            expected = expected.relu() if relu else expected
            assert got.dtype == result or (result is None and got.dtype == dtype)
            assert got.is_contiguous()
            close(got, expected, got.dtype, 1 if mean else max(1.0, hub / 100))


def test_parts_of_the_epilogue_alone() -> None:
    csr, width = random_csr(torch.int64), 21
    x, own, bias = (
        features(csr.num_src, width, torch.float32),
        torch.ones(1, width).expand(csr.rows, width),
        torch.ones(21),
    )
    total = ops._spmm(csr.rowptr, csr.col, None, x, None, None, None, [], False)

    def run(**parts: object) -> torch.Tensor:
        return ops._spmm(csr.rowptr, csr.col, None, x, None, None, None, [], False, **parts)

    assert torch.equal(run(), total)
    assert torch.equal(run(self_x=own), total + 1)
    assert torch.equal(run(bias=bias), total + 1)
    assert torch.equal(run(relu=True), total.relu())
    x[3, 4], x[3, 5] = torch.nan, -torch.inf
    total = ops._spmm(csr.rowptr, csr.col, None, x, None, None, None, [], False)
    assert total[:, 4].isnan().any()
    assert torch.equal(run(relu=True).nan_to_num(7), total.relu().nan_to_num(7))


def test_any_number_of_threads_gives_the_same_bits() -> None:
    csr = random_csr(torch.int32, rows=3000, num_src=500, edges=40000, hub=30000)
    x = torch.randn(csr.num_src, 70)
    weight = torch.randn(csr.edges)
    logits = torch.randn(csr.edges, 2)

    def results() -> list[torch.Tensor]:
        return [
            ops._spmm(csr.rowptr, csr.col, weight, x, None, None, None, [], True),
            *ops._spmm_arg(csr.rowptr, csr.col, csr.perm, weight, x, None, [], False),
            ops._edge_softmax(csr.rowptr, csr.perm, logits),
            *ops._transpose(csr.perm, csr.col, csr.num_src),
            *ops._from_coo(csr.col, csr.perm, csr.num_src, csr.edges, False, True)[1:],
        ]

    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            runs.append(results())
    finally:
        torch.set_num_threads(before)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


def test_expanded_rows() -> None:
    csr = random_csr(torch.int64)
    x = torch.arange(40.0).expand(csr.num_src, 40)
    got = ops._spmm(csr.rowptr, csr.col, None, x, None, None, None, [], True)
    assert torch.equal(got, x[:1] * (csr.rowptr.diff() > 0)[:, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mean_of_values_near_the_largest(dtype: torch.dtype) -> None:
    """The sum overflows, the mean does not."""
    largest = torch.finfo(dtype).max
    x = torch.full((3, 20), largest, dtype=dtype)
    x[2] = -largest / 2
    rowptr, col = torch.tensor([0, 3, 4]), torch.tensor([0, 1, 2, 1])
    got = ops._spmm(rowptr, col, None, x, None, None, None, [], True)
    torch.testing.assert_close(got[0], torch.full((20,), largest / 2, dtype=dtype))
    assert torch.equal(got[1], x[1])
    x[0, 0] = torch.inf
    got = ops._spmm(rowptr, col, torch.ones(4, dtype=dtype), x, None, None, None, [], True)
    assert got[0, 0] == torch.inf
    torch.testing.assert_close(got[0, 1:], torch.full((19,), largest / 2, dtype=dtype))


def test_calls_are_counted() -> None:
    csr = random_csr(torch.int32)
    before = ops._kernel_calls()
    ops._spmm(csr.rowptr, csr.col, None, torch.ones(csr.num_src, 2), None, None, None, [], False)
    ops._row_sum(csr.rowptr, csr.col, torch.ones(csr.num_src, 2), 0)
    ops._transpose(csr.perm, csr.col, csr.num_src)
    assert ops._kernel_calls() == before + 2


def test_bad_input_says_what_was_got_and_expected() -> None:
    csr = random_csr(torch.int32)
    x = torch.ones(csr.num_src, 6)

    def spmm(**change: object) -> None:
        given = {"rowptr": csr.rowptr, "col": csr.col, "weight": None, "x": x, "scale": None}
        rowptr, col, weight, features_, scale = (given | change).values()
        ops._spmm(rowptr, col, weight, features_, scale, None, None, [], False)

    for change, message in (
        ({"rowptr": csr.rowptr.float()}, "rowptr is Float, expected int32 or int64"),
        ({"rowptr": csr.rowptr[:0]}, r"rowptr has shape \[0\], expected \[rows \+ 1\]"),
        ({"col": csr.col.long()}, "col is Long, expected Int"),
        ({"col": csr.col[:, None]}, r"col has shape \[300, 1\], expected \[edges\]"),
        ({"col": csr.col[::2]}, "col is not contiguous"),
        ({"x": x.int()}, "x is Int, expected float32, float64, float16 or bfloat16"),
        ({"x": x[0]}, r"x has shape \[6\], expected 2 dimensions"),
        ({"x": x.t()}, r"x has strides \[1, 6\], expected 1 between columns"),
        ({"x": x[:0]}, r"x has shape \[0, 6\], expected a row for every node"),
        ({"weight": torch.ones(7)}, r"weight has shape \[7\], expected \[300\] or \[300, heads\]"),
        ({"weight": torch.ones(300, 4)}, "got 4 heads for 6 columns"),
        ({"weight": torch.ones(300, 0)}, "got 0 heads for 6 columns"),
        ({"weight": torch.ones(300).double()}, "weight is Double, expected Float"),
        ({"scale": torch.ones(5)}, r"src_scale has shape \[5\], expected \[23\]"),
        ({"scale": torch.ones(23).double()}, "src_scale is Double, expected Float"),
    ):
        with pytest.raises(RuntimeError, match=message):
            spmm(**change)
    for parts, message in (
        ({"self_x": torch.ones(36, 6)}, r"self_x has shape \[36, 6\], expected \[37, 6\]"),
        ({"self_x": torch.ones(37, 6).half()}, "self_x is Half, expected Float"),
        ({"self_scale": torch.ones(1)}, "got self_scale without self_x"),
        ({"self_x": torch.ones(37, 6), "self_scale": torch.ones(2)}, r"self_scale has shape \[2\], expected \[37\]"),
        ({"bias": torch.ones(5)}, r"bias has shape \[5\], expected \[6\]"),
        ({"bias": torch.ones(6).half()}, "bias is Half, expected Float"),
        ({"out_dtype": torch.int32}, "out_dtype is Int, expected float32, float64"),
        ({"out_dtype": torch.float64}, "out_dtype is Double for features of Float"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops._spmm(csr.rowptr, csr.col, None, x, None, None, None, [], False, **parts)
    with pytest.raises(RuntimeError, match=r"a has shape \[4, 6\], expected \[37, 6\]"):
        ops._sddmm(csr.rowptr, csr.col, None, x[:4], x, 0)
    with pytest.raises(RuntimeError, match="arg is Long, expected Int"):
        ops._sddmm_arg(csr.rowptr, csr.col, None, torch.ones(37, 6), x, torch.zeros(37, 6).long(), 0)
    with pytest.raises(RuntimeError, match=r"perm has shape \[1\], expected \[5\]"):
        ops._edge_softmax(csr.rowptr, csr.perm[:1], torch.ones(5))
    with pytest.raises(RuntimeError, match="dst has 3 entries, src has 2"):
        ops._from_coo(torch.zeros(3).long(), torch.zeros(2).long(), 1, 1, False)
    with pytest.raises(RuntimeError, match="got num_src = 0 for 3 edges"):
        ops._transpose(torch.zeros(3).long(), torch.zeros(3).long(), 0)
