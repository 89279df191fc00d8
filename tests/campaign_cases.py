"""What each kind of case of the campaign checks, against plain torch in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from campaign_draw import (
    Draw,
    doubles,
    draw_edges,
    draw_graph,
    draw_how,
    draw_values,
    draw_weight,
    draw_width,
    gradients,
    largest,
    leaves,
    longest,
    pinned,
    sentinels,
    unwritten,
    within,
)
from checks import check_spmm, close, expect_spmm, same_bits
from strategies import values
from torch import Tensor

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import reference
from gnn_spmm_plugin.functional_aggregate import aggregate
from gnn_spmm_plugin.functional_attention import SCORES, attend
from gnn_spmm_plugin.functional_edge_index import spmm_edge_index
from gnn_spmm_plugin.functional_messages import sum_messages
from gnn_spmm_plugin.kernels import DTYPES, REDUCES
from gnn_spmm_plugin.policy import POLICIES


def case_spmm(d: Draw) -> None:
    """Forward, arg, all gradients."""
    e = draw_edges(d)
    g = draw_graph(d, e)
    dtype, reduce = d.pick("dtype", DTYPES), d.pick("reduce", REDUCES)
    tie = d.pick("tie", ("first", "split")) if reduce in ("max", "min") else "first"
    width, heads = draw_width(d, e), 0
    shape: tuple[int, ...] = (width,)
    form = d.choice(("matrix", "matrix", "vector", "heads", "heads", "deep"))
    if form == "vector":
        shape = ()
    elif form != "matrix":
        heads = d.choice((1, 2, 3, 4, 8, width or 1))
        shape = (
            (heads, max(width // heads, d.choice((0, 1, 1)))) if form == "heads" else (heads, 2, width // heads // 2)
        )
    d.drawn.append(f"x[{', '.join(map(str, shape))}]")
    x = draw_values(d, (e.num_src, *shape), dtype)
    weight = draw_weight(d, e, heads, dtype)
    columns = functools.reduce(lambda a, b: a * b, shape, 1)
    how = draw_how(d, g, columns, dtype, reduce)
    with unwritten(x, weight):
        check_spmm(g, x, weight, reduce, tie, d.number(), longest(g) + columns, **how)
    if weight is not None and d.one_in(3):  # as the graph's own
        with pinned():
            own = gsp.spmm(g.with_weight(weight), x, reduce=reduce, **how)
            assert same_bits(own, gsp.spmm(g, x, weight, reduce, **how))
    if not _fills_up(**how):
        sentinels(lambda: gsp.spmm(g, x, weight, reduce, **how))


def _fills_up(plan: Any = None, policy: str = "auto") -> bool:
    """Whether a kernel may copy features to more columns or rows, in memory that the output gets afterwards."""
    return policy == "ra" or (plan is not None and plan.kernel.name in ("tile", "dense"))


def case_some_gradients(d: Draw) -> None:
    """By the features alone, or the weights alone, gives the bits that asking for both gives."""
    e = draw_edges(d)
    g = draw_graph(d, e)
    dtype, reduce = d.pick("dtype", DTYPES), d.pick("reduce", REDUCES)
    width = draw_width(d, e)
    x, w = draw_values(d, (e.num_src, width), dtype), draw_values(d, (e.num_edges,), dtype)
    how = draw_how(d, g, width, dtype, reduce)
    how = how if "plan" in how or "policy" in how else {"plan": gsp.plan(g, width, dtype, reduce)}
    gsp.plan(g.T, width, dtype, reduce)
    up = draw_values(d, (e.num_dst, width), dtype)

    def run(by_x: bool, by_w: bool) -> list[Tensor]:
        xs, ws = x.detach().requires_grad_(by_x), w.detach().requires_grad_(by_w)
        out = gsp.spmm(g, xs, ws, reduce, **how)
        return [out.detach(), *torch.autograd.grad(out, [t for t in (xs, ws) if t.requires_grad], up)]

    with pinned():
        run(True, True)
        both, by_x, by_w = run(True, True), run(True, False), run(False, True)
    for got, expected in zip((*by_x, *by_w), (both[0], both[1], both[0], both[2]), strict=True):
        assert same_bits(got, expected)


def case_mixed(d: Draw) -> None:
    """Features and weights of two dtypes: as if both had been promoted before."""
    e = draw_edges(d)
    g = draw_graph(d, e)
    a, b, reduce = d.pick("x", DTYPES), d.pick("w", DTYPES), d.pick("reduce", REDUCES)
    both = torch.promote_types(a, b)
    x, w = draw_values(d, (e.num_src, draw_width(d, e)), a), draw_values(d, (e.num_edges,), b)
    out = gsp.spmm(g, x, w, reduce)
    assert out.dtype == both == torch.result_type(x, w)
    expected = expect_spmm(g, x.to(both), w.to(both), torch.ones_like(out), reduce)
    close(out, expected.out, terms=longest(g))
    xs, ws = leaves(x, w)
    gx, gw = torch.autograd.grad(gsp.spmm(g, xs, ws, reduce), (xs, ws), torch.ones_like(out))
    assert gx.dtype == a and gw.dtype == b
    assert expected.grad_weight is not None
    if torch.float16 in (a, b) and largest(expected.grad_x.size, expected.grad_weight.size) > 3e4:
        return  # the gradient in float16 overflows, as it may
    close(gx, expected.grad_x, 2, longest(g))
    close(gw, expected.grad_weight, 3, x.shape[1])


def case_special(d: Draw) -> None:
    """NaN and infinity in their own columns; -inf is a value, and no edges are 0."""
    e = draw_edges(d)
    g = draw_graph(d, e)
    dtype, reduce = d.pick("dtype", DTYPES), d.pick("reduce", REDUCES)
    x = draw_values(d, (e.num_src, draw_width(d, e)), dtype, layout=False)
    for value in (torch.nan, torch.inf, -torch.inf, -0.0):
        x = torch.where(torch.rand(x.shape, generator=d.generator()).to(x.device) < d.choice((0, 0.02, 0.3)), value, x)
    w = draw_values(d, (e.num_edges,), dtype) if d.one_in(2) else None
    how = draw_how(d, g, x.shape[1], dtype, reduce)
    if reduce in ("max", "min"):
        out, arg = gsp.spmm(g, x, w, reduce, return_arg=True, **how)
        expected, expected_arg = reference.spmm(g, x, w, reduce)
        assert torch.equal(arg, expected_arg)
        assert torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.nan_to_num(), expected.nan_to_num())
        return
    out = gsp.spmm(g, x, w, reduce, **how)
    wide = None if w is None else w.double()
    expected, _ = reference.spmm(g, x.double(), wide, reduce)
    assert torch.equal(out.isnan(), expected.isnan())
    large = expected.isinf()
    assert torch.equal(out.double()[large], expected[large])
    finite = expected.isfinite()
    size, _ = reference.spmm(g, x.double().abs(), None if wide is None else wide.abs(), reduce)
    fits = finite & (expected.abs() < torch.finfo(dtype).max / 2)
    within(out[fits], expected[fits], size[fits], 1, dtype, longest(g))


def case_second(d: Draw) -> None:
    """Second derivatives, in float64."""
    e = draw_edges(d)
    g = draw_graph(d, e)
    reduce = d.pick("reduce", REDUCES)
    tie = d.pick("tie", ("first", "split")) if reduce in ("max", "min") else "first"
    width = draw_width(d, e, 40)
    heads = d.choice((0, 0, 2))
    x = draw_values(d, (e.num_src, heads, width) if heads else (e.num_src, width), torch.float64)
    w = draw_values(d, (e.num_edges, heads) if heads else (e.num_edges,), torch.float64)
    up = values((e.num_dst, *x.shape[1:]), torch.float64, d.number(), device=d.device)
    down = [values(tuple(t.shape), torch.float64, d.number(), device=d.device) for t in (x, w)]

    def run(f: Callable[..., Any]) -> list[Tensor]:
        xs, ws, us = leaves(x, w, up)
        out = f(g, xs, ws)
        first = torch.autograd.grad(out, (xs, ws), us, create_graph=True)
        total = sum((a * b).sum() for a, b in zip(first, down, strict=True))
        second = torch.autograd.grad(total, (xs, ws, us), allow_unused=True, materialize_grads=True)
        return [*first, *second]

    got = run(lambda g, x, w: gsp.spmm(g, x, w, reduce, tie=tie))
    expected = run(lambda g, x, w: reference.spmm(g, x, w, reduce, tie)[0])
    for a, b in zip(got, expected, strict=True):
        within(a, b, torch.full_like(b, max(largest(b), 1.0)), 1e4, torch.float64)


def case_aggregate(d: Draw) -> None:
    """Scales, the node itself, bias, ReLU, other dtypes of the result; all gradients."""
    e = draw_edges(d)
    g = draw_graph(d, e)
    dtype, reduce, relu = d.pick("dtype", DTYPES), d.pick("reduce", ("sum", "mean")), d.one_in(2)
    result = d.pick("result", (None, None, *DTYPES))
    width = draw_width(d, e)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    x = draw_values(d, (e.num_src, width), dtype)
    w = draw_values(d, (e.num_edges,), dtype) if d.one_in(2) else None

    def maybe(shape: tuple[int, ...], kind: torch.dtype = acc) -> Tensor | None:
        return draw_values(d, shape, kind) if d.one_in(2) else None

    src_scale, dst_scale, bias = maybe((e.num_src,)), maybe((e.num_dst,)), maybe((width,))
    own = e.num_src == e.num_dst and d.one_in(3)
    self_x = None if own else maybe((e.num_dst, width), dtype)
    has_self = own or self_x is not None
    self_scale = maybe((d.choice((1, e.num_dst)),)) if has_self else None
    d.drawn.append(
        f"relu={relu} own={own} "
        + " ".join(
            n
            for n, t in (
                ("src", src_scale),
                ("dst", dst_scale),
                ("bias", bias),
                ("self", self_x),
                ("scale", self_scale),
            )
            if t is not None
        )
    )
    given = dict(src_scale=src_scale, dst_scale=dst_scale, relu=relu, dtype=result)
    given["policy"] = d.pick("policy", ("auto", *POLICIES))
    if d.one_in(4):
        gsp.plan(g, width, dtype, reduce)
    xs, ws, ss, cs, bs = leaves(x, w, self_x, self_scale, bias)
    with unwritten(x, w, self_x, self_scale, bias, src_scale, dst_scale):
        for _ in range(d.choice((1, 1, 3))):  # scales that keep coming are laid out by edge
            out = aggregate(g, xs, ws, reduce, self_x=xs if own else ss, self_scale=cs, bias=bs, **given)
    assert out.dtype == (result or dtype)

    def plain(x: Tensor, w: Any, s: Any, c: Any, b: Any, src: Any, dst: Any) -> Tensor:
        y, _ = reference.spmm(g, x if src is None else x * src[:, None], w, reduce)
        y = y if dst is None else y * dst[:, None]
        me = x if own else s
        if me is not None:
            y = y + (me if c is None else me * c[:, None])
        return y if b is None else y + b

    scales = [None if t is None else t.double() for t in (src_scale, dst_scale)]
    wide = doubles(x, w, self_x, self_scale, bias)
    value = plain(*wide, *scales)
    sizes = [None if t is None else t.detach().abs().requires_grad_() for t in wide]
    size = plain(*sizes, *(None if t is None else t.abs() for t in scales))
    up = values(tuple(out.shape), out.dtype, d.number(), device=d.device)
    up = torch.where(value.detach().abs() > 1e-12 * size.detach(), up, 0)  # a ReLU of what cancels is 0 or next to it
    with unwritten(x, w, self_x, self_scale, bias, src_scale, dst_scale):
        got = gradients(out, up, [xs, ws, ss, cs, bs])
    coarsest = max(dtype, out.dtype, key=lambda t: torch.finfo(t).eps)
    fits = value.abs() < torch.finfo(out.dtype).max / 4
    shown = value.relu() if relu else value
    terms = longest(g) + max(e.num_dst, width)
    within(torch.where(fits, out, 0), torch.where(fits, shown, 0), size.detach(), 3, coarsest, terms)
    large = torch.float16 in (dtype, out.dtype) and largest(size) > 1e3
    if large or not bool(fits.all()):
        return  # gradients overflow as they may
    passed = up.double()
    if relu:  # which is applied before a float64 is rounded to less
        passed = passed * ((value if dtype == torch.float64 else out) > 0)
    expected = gradients(value, passed, wide)
    bounds = gradients(size, passed.abs(), sizes)
    for a, b, c in zip(got, expected, bounds, strict=True):
        if a is not None:
            within(a, b, c, 5, coarsest, terms)


def case_sddmm(d: Draw) -> None:
    """Products of any heads and dtypes, gradients."""
    e = draw_edges(d)
    g = draw_graph(d, e)
    a_dtype = d.pick("a", DTYPES)
    b_dtype = d.pick("b", DTYPES) if d.one_in(4) else a_dtype
    width, heads = draw_width(d, e), d.choice((None, None, 1, 2, 3, 8))
    shape = (width,) if heads is None else (heads, max(1, width // heads))
    d.drawn.append(f"shape={shape}")
    a, b = draw_values(d, (e.num_dst, *shape), a_dtype), draw_values(d, (e.num_src, *shape), b_dtype)
    both = torch.promote_types(a_dtype, b_dtype)
    xs = leaves(a, b)
    with unwritten(a, b):
        out = gsp.sddmm(g, *xs)
        up = values(tuple(out.shape), out.dtype, d.number(), device=d.device)
        got = gradients(out, up, xs)
    assert out.dtype == both
    wide = doubles(a, b)
    value = reference.sddmm(g, *wide)
    sizes = [t.detach().abs().requires_grad_() for t in wide]
    size = reference.sddmm(g, *sizes)
    coarsest = max(a_dtype, b_dtype, key=lambda t: torch.finfo(t).eps)
    within(out, value, size, 1, both, width)
    if both == torch.float16 and largest(size) > 1e3:
        return
    for x, y, z in zip(
        got, gradients(value, up.double(), wide), gradients(size, up.abs().double(), sizes), strict=True
    ):
        within(x, y, z, 3, coarsest, longest(g))
    sentinels(lambda: gsp.sddmm(g, a, b))


def case_edge_softmax(d: Draw) -> None:
    """Any heads, some logits -inf, large ones; gradients."""
    e = draw_edges(d)
    g = draw_graph(d, e)
    dtype, heads = d.pick("dtype", DTYPES), d.choice((None, None, 1, 2, 3, 4, 7, 16))
    logits = draw_values(d, (e.num_edges,) if heads is None else (e.num_edges, heads), dtype) * d.choice((1, 1, 20))
    d.drawn.append(f"heads={heads}")
    if d.one_in(4):
        logits = torch.where(
            values(tuple(logits.shape), torch.float32, d.number(), device=d.device) > 1, -torch.inf, logits
        )
        top, _ = reference.spmm(reference_edges(g), logits.double(), None, "max")
        logits = torch.where(top[g.edge_index()[1]].isinf(), 1.0, logits).to(dtype)  # not all of a row
    (xs,) = leaves(logits)
    out = gsp.edge_softmax(g, xs)
    up = values(tuple(out.shape), dtype, d.number(), device=d.device)
    (got,) = gradients(out, up, [xs])
    assert out.dtype == dtype
    (wide,) = doubles(logits)
    value = reference.edge_softmax(g, wide)
    finite = logits.masked_fill(logits.isinf(), 0).abs().double()
    large = 1 + (float(finite.max()) if finite.numel() else 0)
    within(out, value, value.detach() * large, 2, dtype, longest(g))
    (expected,) = gradients(value, up.double(), [wide])
    dst = g.edge_index()[1]
    p = value.detach()
    total = p.new_zeros((g.num_dst, *p.shape[1:])).index_add(0, dst, p * up.abs().double())
    within(got, expected, p * (up.abs().double() + total[dst]) * large, 4, dtype, longest(g))
    sentinels(lambda: gsp.edge_softmax(g, logits))


def reference_edges(g: gsp.Graph) -> gsp.Graph:
    """The graph from edges to destinations."""
    dst = g.edge_index()[1]
    return gsp.Graph.from_edge_index(
        torch.stack([torch.arange(g.num_edges, device=dst.device), dst]), (g.num_edges, g.num_dst)
    )


def case_attention(d: Draw) -> None:
    """The four ways of scoring, dropout's factors, gradients by everything."""
    e = draw_edges(d)
    g = draw_graph(d, e)
    dtype, score = d.pick("dtype", DTYPES), d.pick("score", SCORES)
    heads, slope, scale = d.choice((1, 1, 2, 3, 4, 8)), d.choice((0.2, 0.2, 0.0, 1.0)), d.choice((1.0, 0.25))
    width = max(1, draw_width(d, e, 120) // heads)
    d.drawn.append(f"[{heads}, {width}] slope={slope} scale={scale}")

    def draw(*shape: int) -> Tensor:
        return values(shape, torch.float64, d.number(), device=d.device).to(dtype)

    src, dst, a, b = draw(e.num_src, heads, width), draw(e.num_dst, heads, width), draw(e.num_src, heads), None
    one = score == "sum" and d.one_in(4)
    b = None if one else draw(e.num_dst, heads)
    given = {"sum": (a, b), "pair": (src, dst, draw(heads, width)), "dot": (src, dst), "gated": (a, b, src, dst)}[score]
    given = tuple(t for t in given if t is not None)
    x = draw_values(d, (e.num_src, heads, width), dtype) if d.one_in(2) else src
    keep = (
        torch.rand(e.num_edges, heads, generator=d.generator()).to(d.device, dtype).round() * 2 if d.one_in(2) else None
    )
    how = {"slope": None if score == "dot" else slope, "scale": scale, "policy": d.pick("policy", ("auto", *POLICIES))}
    xs, *gs = leaves(x, *given)
    with unwritten(x, *given):
        out = attend(g, xs, score, tuple(gs), keep=keep, **how)
        up = values(tuple(out.shape), dtype, d.number(), device=d.device)
        got = gradients(out, up, [xs, *gs])
    assert out.dtype == dtype
    wide_x, *wide = doubles(x, *given)
    value = plain_attention(g, wide_x, score, wide, how["slope"], scale, keep)
    expected = gradients(value, up.double(), [wide_x, *wide])
    # scores are rounded to the dtype, and what exp makes of that grows with them
    logits = max(
        [
            1.0,
            *(
                float(t.detach().abs().max())
                for t in plain_scores(g, score, wide, how["slope"], scale, True)
                if t.numel()
            ),
        ]
    )
    roundings = 256 * logits * max(1.0, float(width) ** 0.5 if dtype in (torch.float16, torch.bfloat16) else 1.0)
    if roundings * torch.finfo(dtype).eps > 0.5:
        return  # bfloat16 says nothing about these
    for t, wanted in zip([out, *got], [value, *expected], strict=True):
        most = largest(wanted)
        if dtype == torch.float16 and most > 1e3:
            continue
        within(t, wanted, torch.full_like(wanted, max(most, float(longest(g)) ** 0.5)), roundings, dtype, longest(g))


def plain_scores(g: gsp.Graph, score: str, given: Any, slope: float | None, scale: float, parts: bool = False) -> Any:
    """Scores of each edge in plain torch; with `parts`, sums of absolute values of what they are made of."""
    s, t = g.edge_index()
    size = (lambda v: v.detach().abs()) if parts else (lambda v: v)
    act = (lambda v: v) if parts or slope is None else (lambda v: F.leaky_relu(v, slope))
    if score == "pair":
        out = (act(size(given[0][s]) + size(given[1][t])) * size(given[2])).sum(-1)
        return [out] if parts else out
    if score == "dot":
        out = (size(given[0][s]) * size(given[1][t])).sum(-1) * scale
    elif score == "sum":
        out = size(given[0][s]) + (size(given[1][t]) if len(given) > 1 else 0)
    else:
        out = size(given[0][s]) + size(given[1][t])
        products = (size(given[2][s]) * size(given[3][t])).sum(-1)
        out = out * (1 + products) if parts else out * products.sigmoid()
    return [out] if parts else act(out)


def plain_attention(
    g: gsp.Graph, x: Tensor, score: str, given: Any, slope: float | None, scale: float, keep: Tensor | None
) -> Tensor:
    """One message an edge."""
    p = reference.edge_softmax(g, plain_scores(g, score, given, slope, scale))
    p = p if keep is None else p * keep.double()
    s, t = g.edge_index()
    return x.new_zeros(g.num_dst, *x.shape[1:]).index_add(0, t, p.unsqueeze(2) * x[s])


def case_messages(d: Draw) -> None:
    """Sums of relu(x_j + e) + shift; gradients."""
    e = draw_edges(d)
    g = draw_graph(d, e)
    dtype, reduce, relu = d.pick("dtype", DTYPES), d.pick("reduce", ("sum", "mean")), d.one_in(3) is False
    width, shift = draw_width(d, e, 100), d.choice((0.0, 0.0, 0.5))
    x, m = draw_values(d, (e.num_src, width), dtype), draw_values(d, (e.num_edges, width), dtype)
    w = draw_values(d, (e.num_edges,), dtype) if d.one_in(2) else None
    xs, ms, ws = leaves(x, m, w)
    with unwritten(x, m, w):
        out = sum_messages(g, xs, ms, ws, reduce, relu=relu, shift=shift, policy=d.pick("policy", POLICIES))
        up = values(tuple(out.shape), dtype, d.number(), device=d.device)
        got = gradients(out, up, [xs, ms, ws])
    s, t = g.edge_index()
    count = g.in_degree().clamp(min=1).double().unsqueeze(1) if reduce == "mean" else 1.0

    def plain(x: Tensor, m: Tensor, w: Tensor | None, passed: Tensor | None) -> Tensor:
        y = x[s] + m
        y = y if passed is None else y * passed
        y = (y + shift) if w is None else (y + shift) * w.unsqueeze(1)
        return y.new_zeros(g.num_dst, width).index_add(0, t, y) / count

    wide = doubles(x, m, w)
    passed = ((wide[0][s] + wide[1]) > 0).double() if relu else None
    value = plain(*wide, passed)
    sizes = [None if v is None else v.detach().abs().requires_grad_() for v in wide]
    size = plain(*sizes, None)  # a sum of opposite signs was rounded where it was small
    within(out, value, size.detach(), 4, dtype, longest(g))
    if dtype == torch.float16 and largest(size) > 1e3:
        return
    bounds = gradients(size, up.abs().double(), sizes)
    for a, b, c in zip(got, gradients(value, up.double(), wide), bounds, strict=True):
        if a is not None:
            within(a, b, c, 5, dtype, longest(g))


def case_edge_index(d: Draw) -> None:
    """A plain edge_index that is used, written in place, copied, viewed: never what was there before."""
    e = draw_edges(d)
    reduce, reverse = d.pick("reduce", REDUCES), d.one_in(2)
    index = e.edge_index.to(d.device, d.choice((torch.int64, torch.int32)))
    if reverse:
        index = index.flip(0)
    width = draw_width(d, e, 40)
    if d.one_in(3):
        index = torch.cat([index, index], 1)[:, : e.num_edges]
    for step in range(d.randint(2, 6)):
        x = draw_values(d, (e.num_src, width), torch.float64)
        w = draw_values(d, (index.shape[1],), torch.float64) if d.one_in(2) else None
        xs, ws = leaves(x, w)
        out = spmm_edge_index(xs, index, ws, e.num_src, e.num_dst, reverse=reverse, reduce=reduce)
        up = values(tuple(out.shape), torch.float64, d.number(), device=d.device)
        got = gradients(out, up, [xs, ws])
        src, dst = index[int(reverse)], index[int(not reverse)]
        now = gsp.Graph.from_edge_index(torch.stack([src, dst]).clone(), (e.num_src, e.num_dst))
        wanted = expect_spmm(now, x, w, up, reduce)
        close(out.detach(), wanted.out, terms=longest(now))
        close(got[0], wanted.grad_x, 2, longest(now.T))
        if wanted.grad_weight is not None:
            close(got[1], wanted.grad_weight, 3)
        if not index.numel():
            return
        change = d.pick(f"step {step}", ("same", "write", "write", "swap", "copy", "view", "drop"))
        if change == "write":
            index[int(reverse), d.randrange(index.shape[1])] = d.randrange(e.num_src)
        elif change == "swap":
            a, b = d.randrange(index.shape[1]), d.randrange(index.shape[1])
            index[:, [a, b]] = index[:, [b, a]]
        elif change == "copy":
            index = index.clone()
        elif change == "view":
            index = index[:, d.randrange(index.shape[1]) :]
        elif change == "drop":
            index = index[:, torch.randperm(index.shape[1], generator=d.generator()).to(d.device)]


def case_layers(d: Draw) -> None:
    """A PyG layer as it is, patched, and (where there is one) ours with the same parameters, in float64."""
    from campaign_layers import run

    run(d)


KINDS: dict[str, tuple[int, Callable[[Draw], None]]] = {
    "spmm": (10, case_spmm),
    "some gradients": (1, case_some_gradients),
    "mixed dtypes": (1, case_mixed),
    "special values": (2, case_special),
    "second derivatives": (1, case_second),
    "aggregate": (4, case_aggregate),
    "sddmm": (2, case_sddmm),
    "edge_softmax": (2, case_edge_softmax),
    "attention": (3, case_attention),
    "messages": (1, case_messages),
    "edge_index": (2, case_edge_index),
    "layers": (3, case_layers),
}
