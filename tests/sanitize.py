"""Runs every CUDA kernel instantiation once on tiny graphs, for NVIDIA's compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py

Names of dtypes and widths as arguments pick some; tests/sanitizers.py runs all under every tool. Without the caching
allocator every tensor is an allocation of its own, so that an access one element past its end is seen. Results are
compared with the plain-torch reference as well. Prints the number of kernel calls; `--names FILE` writes which kernels
ran.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path

import torch
from torch import Tensor

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import _native, pcsr, reference, tiles
from gnn_spmm_plugin.features import GraphFeatures
from gnn_spmm_plugin.schedule import Layout, list_items, stage_of

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WIDTHS = (1, 2, 8, 24, 33, 66, 100, 256, 300)
#: Chosen, which is a warp a row; two vectors a thread; the one with a kernel of its own; many groups.
GEOMETRIES = ((0, 0, 0), (4, 2, 1), (8, 2, 4), (2, 1, 8))
LONG_ROW, CHUNK = 8, 32  # small, so that every path is taken on a tiny graph
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def tiny_graph() -> gsp.Graph:
    """Rows of 0, a few, more than LONG_ROW and more than CHUNK edges; shuffled; 20 sources, 13 destinations."""
    g = torch.Generator().manual_seed(0)
    dst = torch.cat([torch.full((n,), row) for row, n in enumerate((3, 0, 90, 1, 20, 0, 2, 8, 9, 33, 5, 4, 0))])
    src = torch.randint(20, dst.shape, generator=g)
    order = torch.randperm(len(dst), generator=g)
    return gsp.Graph.from_edge_index(torch.stack([src, dst])[:, order].cuda(), (20, 13))


def check(what: object, ours: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Exits unless both agree as far as `dtype` can say."""
    error = (ours.cpu().double() - expected).norm() / expected.norm().clamp(min=1e-9)
    if not error <= TOLERANCE[dtype]:
        sys.exit(f"wrong result: {what}: relative error {float(error):.2e}")


def main() -> None:
    """Runs what the arguments pick."""
    if "--names" not in sys.argv:
        return run_all(sys.argv[1:])
    at = sys.argv.index("--names")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run_all(sys.argv[1:at] + sys.argv[at + 2 :])
    events = profile.profiler.kineto_results.events()
    Path(sys.argv[at + 1]).write_text("\n".join(sorted({e.name() for e in events if "gsp::cuda::" in e.name()})))


def run_all(picked: list[str]) -> None:
    """All cases, of these dtypes and widths if any is named."""
    run_builders()
    graph = tiny_graph()
    twin = graph.cpu()  # the reference runs there: a sanitizer slows every kernel of torch down too
    formats = [
        pcsr.build(graph._csr, pcsr.vectors(graph._csr, height, schedule), pcsr.Config(V=height, S=split), CHUNK)
        for height, split, schedule in itertools.product((1, 2), (False, True), (None, torch.randperm(13).cuda()))
    ]
    calls = _native.kernel_calls()
    widths = [int(a) for a in picked if a.isdecimal()] or WIDTHS
    names = [a for a in picked if not a.isdecimal()]
    dtypes = [t for t in DTYPES if not names or str(t).removeprefix("torch.") in names]
    for dtype, width, wide in itertools.product(dtypes, widths, (False, True)):
        if wide and width not in (1, 33):
            continue  # int64 indices have one instantiation
        halves = []
        for csr in (graph._csr, graph._csr_t):
            items, split, slots = list_items(csr, Layout(CHUNK, 4, LONG_ROW, 4))
            listed = [LONG_ROW, CHUNK, len(items) - split, split, slots]
            arrays = [t.long() if wide else t for t in (csr.rowptr, csr.col, csr.perm) if t is not None]
            # Rows that blocks share, and rows of any length.
            plans = [(None, [LONG_ROW, CHUNK, 0, 0, 0, 4, 1, 1, 1]), (None, [0, CHUNK, *[0] * 6, 1])]
            shapes = () if wide else GEOMETRIES if width in (24, 256) else GEOMETRIES[:2]
            plans += [(items, [*listed, *shape, 1]) for shape in shapes]
            if not wide:
                plans += [(items, [*listed, 0, 0, 0, 4]), (None, [0, CHUNK, *[0] * 6, 3])]
            halves.append((arrays, csr.perm, plans))
        (csr, perm, plans), (csr_t, perm_t, plans_t) = halves
        for heads in (0, 1, 2):
            if heads == 2 and width % 2:
                continue
            run(twin, dtype, width, heads, csr, perm, plans, csr_t, perm_t, plans_t)
            if heads > 0:
                run_pair(twin, dtype, width, heads, csr, csr_t)
            run_pcsr(formats, twin, graph.rowptr.long() if wide else graph.rowptr, dtype, width, heads)
        run_edge_sums(twin, dtype, width, csr, perm, plans, csr_t, perm_t, plans_t)
        if dtype != torch.float64 and not wide:
            run_staged(twin, dtype, width)
            run_tiles(graph, twin, dtype, width)
    torch.cuda.synchronize()
    print(f"{_native.kernel_calls() - calls} kernel calls, all right")


def run_builders() -> None:
    """What makes a graph, in every index type, by counting and by sorting; and the gathers of the speed of light."""
    g = torch.Generator().manual_seed(1)
    many = (1 << 18) + 7  # too many to count
    for nodes, edges, ordered in ((50, 3000, False), (50, 3000, True), (many, 900, False), (many, 900, True)):
        dst, src = torch.randint(nodes, (2, edges), generator=g)
        dst = dst.sort().values if ordered else dst
        for key, wide in itertools.product((torch.int32, torch.int64), (False, True)):
            given = (dst.to(key), src.to(key))
            made = _native.from_coo(*(t.cuda() for t in given), nodes, nodes, wide)
            want = _native.from_coo(*given, nodes, nodes, wide)
            same("from_coo", made[1:], want[1:])
            own = made[1:3]
            same("transpose", _native.transpose(*own, nodes), _native.transpose(*want[1:3], nodes))
            if not _native.same_coo(*(t.cuda() for t in given), *own) or _native.same_coo(*own, own[1], own[0]):
                sys.exit("wrong result: same_coo")
            rowptr, col = made[3], own[1] if made[4] is None else made[4]
            for scale in (torch.float32, torch.float64):
                check("inverse degree", _native.inverse_degree(rowptr, scale), want_degree(dst, nodes), torch.float32)
                for loops in (False, True):
                    _native.gcn_scales(rowptr, col, loops, scale)
    col = torch.randint(20, (96,), dtype=torch.int32, generator=g).cuda()
    for dtype, width, weighted in itertools.product(DTYPES, (1, 2, 4, 8), (False, True)):
        x, weight = torch.ones(20, width, dtype=dtype).cuda(), torch.ones(96, dtype=dtype).cuda()
        out = torch.ops.gnn_spmm_plugin._speed_of_light(col, weight if weighted else None, x, 4, 16)
        if not bool((out <= 16).all()):
            sys.exit(f"wrong result: speed_of_light {dtype} {width}")


def want_degree(dst: Tensor, nodes: int) -> Tensor:
    """1 / max(degree, 1), in double."""
    return 1 / torch.bincount(dst, minlength=nodes).clamp(min=1).double()


def same(what: str, got: tuple[Tensor | None, ...], want: tuple[Tensor | None, ...]) -> None:
    """Exits unless both are the same numbers."""
    for a, b in zip(got, want, strict=True):
        if (a is None) != (b is None) or (a is not None and b is not None and not torch.equal(a.cpu(), b)):
            sys.exit(f"wrong result: {what}")


def run(graph, dtype, width, heads, csr, perm, plans, csr_t, perm_t, plans_t):  # type: ignore[no-untyped-def]
    """All operators for one dtype, width and kind of weight (0: none, 1: one an edge, 2: two heads)."""
    edges, index = graph.num_edges, csr[0].dtype
    cpu_x, cpu_grad = torch.randn(20, width + 8).to(dtype)[:, :width], torch.randn(13, width).to(dtype)
    cpu_w = None if heads == 0 else torch.randn(edges, *([2] if heads == 2 else [])).to(dtype)
    by_head = cpu_x.reshape(20, 2, -1) if heads == 2 else cpu_x
    wide_x, wide_w = by_head.double(), None if cpu_w is None else cpu_w.double()
    acc = _native.accumulation_dtype(dtype)
    cpu_scale, cpu_scale_t = torch.rand(20, dtype=acc), torch.rand(13, dtype=acc)
    x = torch.zeros(20, width + 8, dtype=dtype, device="cuda")[:, :width]  # rows further apart than they are long
    x.copy_(cpu_x)
    w = None if cpu_w is None else cpu_w.cuda()
    row, row_t = (None if w is None else w.index_select(0, p) for p in (perm, perm_t))
    scale, scale_t, grad = cpu_scale.cuda(), cpu_scale_t.cuda(), cpu_grad.cuda()
    where = (dtype, width, heads, index)
    for items, config in plans:
        for mean, scaled in itertools.product((False, True), (False, True)):
            by = (scale, scale_t) if scaled else (None, None)
            out = _native.spmm(csr[0], csr[1], row, x, *by, items, config, mean)
            factor = cpu_scale.double().view(-1, *[1] * (by_head.dim() - 1)) if scaled else 1
            expected, _ = reference.spmm(graph, wide_x * factor, wide_w, "mean" if mean else "sum")
            expected = expected.reshape(13, width) * (cpu_scale_t.double().unsqueeze(1) if scaled else 1)
            check((where, "sum", mean, scaled), out, expected, dtype)
        if heads == 0:  # the end of a sum: the scales above are of the right sizes for it too
            own = (grad, scale_t, torch.rand(width + 1, dtype=acc, device="cuda")[1:])
            results = (torch.float64,) if acc == torch.float64 else (torch.float32, torch.float16, torch.bfloat16)
            expected, _ = reference.spmm(graph, wide_x, None, "sum")
            expected = expected + cpu_grad.double() * cpu_scale_t.double().unsqueeze(1) + own[2].cpu().double()
            for result in results:
                out = _native.spmm(
                    csr[0], csr[1], None, x, None, None, items, config, False, *own, relu=True, out_dtype=result
                )
                check((where, "epilogue", result), out, expected.relu(), max(dtype, result, key=TOLERANCE.__getitem__))
        for minimum in (False, True):
            best, arg = _native.spmm_arg(csr[0], csr[1], csr[2], row, x, items, config, minimum)
            count = _native.spmm_tie_count(csr[0], csr[1], row, x, best, items, config)
            assert bool((count >= (arg >= 0)).all())
            expected, _ = reference.spmm(graph, wide_x, wide_w, "min" if minimum else "max")
            check((where, "arg", minimum), best, expected.reshape(13, width), dtype)
    one = 2 if heads == 2 else 0  # products an edge, 0: a single one without a dimension of its own
    for items, config in plans_t:
        back = _native.spmm_arg_backward(csr_t[0], csr_t[1], csr_t[2], row_t, grad, arg, items, config)
        tied = _native.spmm_tie_backward(csr_t[0], csr_t[1], row_t, grad, x, best, items, config)
        if heads == 0:  # every gradient goes somewhere
            total = cpu_grad.double().masked_fill(arg.cpu() < 0, 0).sum(0)
            check((where, "arg backward"), back.cpu().double().sum(0), total, dtype)
        assert tied.shape == back.shape
    dots = _native.sddmm(csr[0], csr[1], csr[2], grad, x, one)
    shape = (2, -1) if one else (-1,)
    a, b = (t.double().reshape(len(t), *shape) for t in (cpu_grad, cpu_x))
    check((where, "dot"), dots, reference.sddmm(graph, a, b), dtype)
    _native.sddmm_arg(csr[0], csr[1], csr[2], grad, x, arg, one)
    _native.sddmm_tie(csr[0], csr[1], csr[2], row, grad, x, best, one)
    if w is not None:
        p = _native.edge_softmax(csr[0], csr[2], w)
        check((where, "softmax"), p, reference.edge_softmax(graph, wide_w), dtype)
        _native.edge_softmax_backward(csr[0], csr[2], p, w)


def run_pair(graph, dtype, width, heads, csr, csr_t):  # type: ignore[no-untyped-def]
    """GATv2's scores, and their gradient by both ends and by what they are multiplied with."""
    shapes = ((20, heads, width // heads), (13, heads, width // heads), (heads, width // heads))
    cpu = [torch.randn(shape).to(dtype) for shape in shapes]
    src, dst, att = (t.cuda() for t in cpu)
    src, dst = (torch.cat([t, t], 1).flatten(1)[:, :width] for t in (src, dst))  # rows apart
    wide = [t.double().requires_grad_() for t in cpu]
    s, d = graph.edge_index()
    expected = (torch.nn.functional.leaky_relu(wide[0][s] + wide[1][d], 0.2) * wide[2]).sum(2)
    where = (dtype, width, heads, csr[0].dtype, "pair")
    check(where, _native.pair_score(*csr, dst, src, att, 0.2), expected.detach(), dtype)
    grad = torch.randn(expected.shape).to(dtype)
    grads = torch.autograd.grad(expected, wide, grad.double())
    of_dst, one = _native.pair_gradient(*csr, grad.cuda(), dst, src, att, 0.2)
    of_src, other = _native.pair_gradient(*csr_t, grad.cuda(), src, dst, att, 0.2)
    for name, got, want in zip(("src", "dst", "att"), (of_src, of_dst, one + other), grads, strict=True):
        check((*where, name), got, want.flatten() if name == "att" else want.flatten(1), dtype)


def run_edge_sums(graph, dtype, width, csr, perm, plans, csr_t, perm_t, plans_t):  # type: ignore[no-untyped-def]
    """Sums of messages with features of their own, and all their gradients, with weights and without."""
    src, dst = graph.edge_index()
    cpu = [torch.randn(n, width + 8).to(dtype) for n in (20, graph.num_edges, 13)]
    x, e, grad = (t.cuda()[:, :width] for t in cpu)
    wide_x, wide_e, wide_grad = (t.double()[:, :width] for t in cpu)
    message, degree = (wide_x[src] + wide_e).relu(), torch.bincount(dst, minlength=13).clamp(min=1).double()
    back = wide_grad[dst] * (message > 0)
    where = (dtype, width, csr[0].dtype)
    for cpu_w in (None, torch.randn(graph.num_edges).to(dtype)):
        w, factor = (None, 1) if cpu_w is None else (cpu_w.cuda(), cpu_w.double().unsqueeze(1))
        row, row_t = (None if w is None else w.index_select(0, p) for p in (perm, perm_t))
        total = torch.zeros(13, width).double().index_add(0, dst, message * factor)
        for (items, config), mean in itertools.product(plans, (False, True)):
            out = _native.edge_sum(csr[0], csr[1], csr[2], row, x, e, items, config, mean)
            check((where, "edge sum", mean), out, total / degree.unsqueeze(1) if mean else total, dtype)
        total = torch.zeros(20, width).double().index_add(0, src, back * factor)
        for (items, config), both in itertools.product(plans_t, (False, True)):
            given = (csr_t[0], csr_t[1], csr_t[2], row_t, x, e, grad, items, config)
            of_x, of_e = _native.edge_sum_backward(*given, both)
            check((where, "edge sum backward", both), of_x, total, dtype)
            if both:
                check((where, "of edges"), of_e, back * factor, dtype)
    dots = _native.edge_sum_dot(csr[0], csr[1], csr[2], grad, x, e)
    check((where, "message dot"), dots, (wide_grad[dst] * message).sum(1), dtype)


def run_staged(graph, dtype, width):  # type: ignore[no-untyped-def]
    """Sums from shared memory: all sources at once, in blocks, and with what is added at the end."""
    index = graph.edge_index()
    order = (index[1] * 20 + index[0]).argsort(stable=True)  # columns must ascend
    graph = gsp.Graph.from_edge_index(index[:, order], (20, 13))
    csr = gsp.Graph.from_edge_index(index[:, order].cuda(), (20, 13))._csr
    cpu_x, cpu_own, cpu_w = (torch.randn(n).to(dtype) for n in ((20, width), (13, width), (graph.num_edges,)))
    cpu_scale, cpu_bias = torch.rand(13), torch.rand(width)
    scale, end = cpu_scale.cuda(), (cpu_own.cuda(), cpu_scale.cuda(), cpu_bias.cuda())
    ended = cpu_own.double() * cpu_scale.double().unsqueeze(1) + cpu_bias.double()
    x = cpu_x.cuda()
    apart = torch.zeros(20, width + 1, dtype=dtype, device="cuda")[:, 1:].copy_(x)
    features = dataclasses.replace(GraphFeatures.of(csr), num_edges=10**9, max_degree=1)  # whatever the rule says
    plan = (None, [LONG_ROW, CHUNK, *[0] * 6, 1])
    for blocks, weight, features_x in itertools.product((1, 3), (None, cpu_w), (x, apart)):
        stage, _ = stage_of(csr, features, 20 * 160 // blocks + 1)
        assert stage["stage"].shape[0] == blocks + 2
        w, wide_w = (None, None) if weight is None else (weight.cuda(), weight.double())
        out = _native.spmm(csr.rowptr, csr.col, w, features_x, None, None, *plan, False, **stage)
        expected, _ = reference.spmm(graph, cpu_x.double(), wide_w, "sum")
        check(("staged", width, blocks), out, expected, dtype)
        end_of = (*end, True, torch.float16)
        out = _native.spmm(csr.rowptr, csr.col, w, features_x, None, scale, *plan, True, *end_of, **stage)
        expected, _ = reference.spmm(graph, cpu_x.double(), wide_w, "mean")
        expected = expected * cpu_scale.double().unsqueeze(1) + ended
        check(
            ("staged", width, blocks, "epilogue"),
            out,
            expected.relu(),
            max(dtype, torch.float16, key=TOLERANCE.__getitem__),
        )


def run_pcsr(formats, graph, rowptr, dtype, width, heads):  # type: ignore[no-untyped-def]
    """The kernel pcsr for one dtype, width and kind of weight, under every V, S and F."""
    cpu_x = torch.randn(20, width).to(dtype)
    cpu_w = None if heads == 0 else torch.randn(graph.num_edges, *([2] if heads == 2 else [])).to(dtype)
    weight = None if cpu_w is None else cpu_w.double()
    by_head = (cpu_x.reshape(20, 2, -1) if heads == 2 else cpu_x).double()
    acc = _native.accumulation_dtype(dtype)
    cpu_scale, cpu_scale_t = torch.rand(20, dtype=acc), torch.rand(13, dtype=acc)
    scales = (cpu_scale.cuda(), cpu_scale_t.cuda())
    x = cpu_x.cuda()
    apart = torch.zeros(20, width + 1, dtype=dtype, device="cuda")[:, :width].copy_(x)
    cpu_own, cpu_bias = torch.randn(13, width).to(dtype), torch.rand(width, dtype=acc)
    own, bias = cpu_own.cuda(), cpu_bias.cuda()
    ended = cpu_own.double() * cpu_scale_t.double().unsqueeze(1) + cpu_bias.double()  # what comes to a sum
    results = (torch.float64,) if acc == torch.float64 else (torch.float32, torch.float16, torch.bfloat16)
    for scaled in (False, True):
        factor = cpu_scale.double().view(-1, *[1] * (by_head.dim() - 1)) if scaled else 1
        expected, _ = reference.spmm(graph, by_head * factor, weight, "mean" if scaled else "sum")
        expected = expected.reshape(13, width) * (cpu_scale_t.double().unsqueeze(1) if scaled else 1)
        for made, fold in itertools.product(formats, (1, 2)):
            values = None if cpu_w is None else made.values(cpu_w.cuda())
            arrays = (rowptr, made.ptr, made.col, made.target, made.merges, values, apart if made.config.S else x)
            config = [made.config.W, fold, made.config.V, made.slots]
            out = _native.pcsr_spmm(*arrays, *(scales if scaled else (None, None)), config, scaled)
            where = (dtype, width, heads, rowptr.dtype, str(made.config), fold, scaled)
            check(where, out, expected, dtype)
            for result in results if scaled else ():
                end = (own, scales[1], bias, True, result)
                out = _native.pcsr_spmm(*arrays, *scales, config, True, *end)
                loosest = max(dtype, result, key=TOLERANCE.__getitem__)
                check((*where, "epilogue", result), out, (expected + ended).relu(), loosest)


def run_tiles(graph, twin, dtype, width):  # type: ignore[no-untyped-def]
    """The kernel tile for one dtype and width, in every height, cut and precision, and the end of a GEMM's sums."""
    cpu_x, cpu_w = torch.randn(20, width).to(dtype), torch.randn(twin.num_edges).to(dtype)
    x, weight = tiles.in_16_bytes(cpu_x.cuda()), graph._csr.in_row_order(cpu_w.cuda())
    cpu_own, cpu_bias, cpu_scale = torch.randn(13, width).to(dtype), torch.rand(width), torch.rand(13)
    end = (cpu_own.cuda(), cpu_scale.cuda(), cpu_bias.cuda(), True)
    rowptr, col = graph._csr.rowptr, graph._csr.col
    for height, most, shuffled, weighted in itertools.product((8, 16), (0, 1), (False, True), (False, True)):
        packed = tiles.pack(graph._csr, height, torch.randperm(13).cuda() if shuffled else None)
        made = tiles.build(packed, tiles.TileConfig(height, most))
        w, values = (weight, made.values(weight)) if weighted else (None, None)
        arrays = (made.ptr, made.vectors, made.bits, values, made.rows, made.target, made.merges)
        exact, _ = reference.spmm(twin, cpu_x.double(), cpu_w.double() if weighted else None, "mean")
        for passes in (1, 3) if dtype == torch.float32 else (1,):
            config = [height, made.slots, passes, width]
            out = _native.tile_spmm(rowptr, col, w, *arrays, x, None, config, True)
            # tf32 has as many bits as float16
            about = torch.float16 if passes == 1 and dtype == torch.float32 else dtype
            check((dtype, width, str(made.config), weighted, passes), out, exact, about)
            out = _native.tile_spmm(rowptr, col, w, *arrays, x, None, config, True, *end, torch.float32)
            ended = cpu_own.double() * cpu_scale.double().unsqueeze(1) + cpu_bias.double()
            check((dtype, width, str(made.config), weighted, passes, "end"), out, (exact + ended).relu(), about)
    sums = torch.full((13, width), torch.nan, device="cuda")  # all of it is made anew
    exact, _ = reference.spmm(twin, cpu_x.double(), cpu_w.double(), "sum")
    check(
        (dtype, width, "tile_end"), _native.tile_end(rowptr, col, weight, cpu_x.cuda(), sums, None, False), exact, dtype
    )


if __name__ == "__main__":
    main()
