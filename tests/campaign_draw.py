"""What a case of the campaign draws, and how it compares: graphs, numbers, plans, all from one number."""

from __future__ import annotations

import dataclasses
import importlib.util
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from checks import CHUNK, same_bits
from strategies import LAYOUTS, Edges, lay_out, values
from torch import Tensor

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.candidate import CANDIDATES, allowed
from gnn_spmm_plugin.features import MatrixFeatures
from gnn_spmm_plugin.kernels import BUILT, KERNELS, for_device
from gnn_spmm_plugin.plan import WARM_AFTER, build_candidate
from gnn_spmm_plugin.policy import POLICIES
from gnn_spmm_plugin.schedule import SCHEDULES, SQUARE

_SCIPY = importlib.util.find_spec("scipy") is not None
#: Elements of all messages of a case, about: a case takes some 20 ms on one core.
MESSAGES = 200_000


class Draw(random.Random):
    """Everything that is random in a case, and what was drawn, to be shown where it is wrong."""

    def __init__(self, case: int, device: str) -> None:
        super().__init__(case)
        self.case, self.device, self.drawn = case, device, [f"case {case}"]

    def pick(self, name: str, choices: Any) -> Any:
        """One of `choices`."""
        found = self.choice(list(choices))
        self.drawn.append(f"{name}={found}")
        return found

    def one_in(self, n: int) -> bool:
        """True once in `n` times."""
        return self.randrange(n) == 0

    def generator(self) -> torch.Generator:
        """A generator of its own for tensors, on the CPU."""
        return torch.Generator().manual_seed(self.getrandbits(48))

    def number(self) -> int:
        """A number."""
        return self.getrandbits(31)


# ---------------------------------------------------------------------- graphs


def _sizes(d: Draw) -> tuple[int, int]:
    regime = d.pick("nodes", ("none", "one", "few", "few", "some", "some", "many", "one side", "no side"))
    if regime == "none":
        return 0, 0
    if regime == "one":
        return 1, 1
    top = {"few": 12, "some": 300, "many": 20_000, "one side": 300, "no side": 40}[regime]
    a, b = d.randint(1, top), d.randint(1, top)
    if regime == "one side":
        b = 1
    if regime == "no side":
        b = 0
    if d.one_in(2) and regime in ("few", "some", "many"):
        b = a
    return (a, b) if d.one_in(2) else (b, a)


def draw_edges(d: Draw, square: bool = False) -> Edges:
    """Empty rows, duplicates, self loops, hubs on either side, one or no node, sorted either way or not."""
    num_src, num_dst = _sizes(d)
    if square:
        num_src = num_dst = max(num_src, num_dst)
    if min(num_src, num_dst) == 0:
        return Edges(torch.empty(2, 0, dtype=torch.int64), num_src, num_dst)
    count = int(d.choice((0, 1, 2, 3, 8)) if d.one_in(8) else 2 ** d.uniform(0, 13 if d.one_in(12) else 11))
    g = d.generator()
    src = (torch.rand(count, generator=g) ** d.choice((1, 1, 4)) * num_src).long().clamp(max=num_src - 1)
    dst = (torch.rand(count, generator=g) ** d.choice((1, 1, 6)) * num_dst).long().clamp(max=num_dst - 1)
    special = d.pick("edges", ("plain", "plain", "duplicates", "loops", "hub", "reverse hub", "one pair", "spread"))
    some = torch.rand(count, generator=g) < d.uniform(0.3, 1)
    if special == "duplicates" and count:
        pick = torch.randint(max(count // 4, 1), (count,), generator=g)
        src, dst = src[pick], dst[pick]
    elif special == "loops":
        both = src.clamp(max=num_dst - 1)
        src, dst = torch.where(some, both, src), torch.where(some, both, dst)
    elif special == "hub":
        dst[some] = d.randrange(num_dst)
    elif special == "reverse hub":
        src[some] = d.randrange(num_src)
    elif special == "one pair":
        src, dst = torch.full_like(src, d.randrange(num_src)), torch.full_like(dst, d.randrange(num_dst))
    elif special == "spread":  # every second row is empty
        dst = dst // 2 * 2
    order = d.pick("order", ("as drawn", "as drawn", "by destination", "by source", "by both", "falling"))
    if order != "as drawn":
        keys = {"by destination": dst, "by source": src, "by both": dst * num_src + src, "falling": -dst}
        at = torch.argsort(keys[order], stable=True)
        src, dst = src[at], dst[at]
    d.drawn.append(f"{num_src} -> {num_dst} nodes, {count} edges")
    return Edges(torch.stack([src, dst]), num_src, num_dst)


def draw_graph(d: Draw, e: Edges) -> gsp.Graph:
    """`e` as a graph, made in one of the ways there are; edges keep their order."""
    sizes = (e.num_src, e.num_dst)
    index = e.edge_index.to(d.device, d.choice((torch.int64, torch.int32)))
    ordered = bool((index[1, 1:] >= index[1, :-1]).all())
    ways = ["edge_index", "strided", "reversed", "transposed", "moved", *(["csr"] if ordered else [])]
    way = d.pick("made", ways)
    if way == "strided":
        index = torch.stack([index[0], index[1]], 1).t()
    elif way == "reversed":
        return gsp.Graph.from_edge_index(index.flip(0), sizes, flow="target_to_source").T.T
    elif way == "transposed":
        return gsp.Graph.from_edge_index(index.flip(0), sizes[::-1]).T
    elif way == "csr":
        count = torch.bincount(index[1].long(), minlength=e.num_dst).cumsum(0)
        rowptr = torch.cat([count.new_zeros(1), count]).to(d.choice((torch.int64, torch.int32)))
        return gsp.Graph.from_csr(rowptr, index[0].contiguous(), e.num_src)
    elif way == "moved":
        return gsp.Graph.from_edge_index(index.cpu(), sizes).to(d.device)
    return gsp.Graph.from_edge_index(index, sizes)


# ---------------------------------------------------------------------- numbers


def draw_width(d: Draw, e: Edges, most: int = 300) -> int:
    """Odd ones, those around powers of two, 0 and 1; less where there are many edges."""
    room = max(1, min(most, MESSAGES // max(e.num_edges + e.num_src + e.num_dst, 1)))
    width = d.choice((d.randint(1, room), d.choice((0, 1, 2, 3, 4, 8, 16, 17, 31, 32, 33, 64, 65, 128, 129, 257))))
    width = min(width, room)
    d.drawn.append(f"width={width}")
    return width


def draw_values(d: Draw, shape: tuple[int, ...], dtype: torch.dtype, layout: bool = True) -> Tensor:
    """Normal numbers, small integers (ties, exact sums), or numbers of very different sizes, in any layout."""
    sort = d.choice(("normal", "normal", "few", "sizes"))
    t = values(shape, torch.float64, d.number(), few=sort == "few")
    if sort == "sizes" and len(shape) and dtype != torch.float16:
        scale = 10 ** values(shape[:1], torch.float64, d.number())
        t = t * scale.view(-1, *[1] * (len(shape) - 1))
    t = t.to(d.device, dtype)
    if not layout or not shape or d.one_in(2):
        return t
    name = d.pick("layout", (*LAYOUTS, "expanded"))
    return (
        t[:1].expand(shape) if name == "expanded" and shape[0] else lay_out(t, "contiguous" if not shape[0] else name)
    )


def draw_weight(d: Draw, e: Edges, heads: int, dtype: torch.dtype) -> Tensor | None:
    """None, one number an edge, or one for each head (where there are heads)."""
    sort = d.pick("weight", ("none", "edge", "edge", *(["heads"] * 2 if heads else [])))
    if sort == "none":
        return None
    return draw_values(d, (e.num_edges, heads) if sort == "heads" else (e.num_edges,), dtype)


def draw_how(d: Draw, g: gsp.Graph, width: int, dtype: torch.dtype, reduce: str) -> dict[str, Any]:
    """Arguments of spmm that say how: a plan of any mode, kernel, policy, schedule or candidate; a policy; nothing."""
    way = d.pick(
        "how", ("default", "used", "policy", "plan", "plan", *(["candidate"] * 2 if g.device.type == "cuda" else []))
    )
    square = g.num_src == g.num_dst
    if way == "used":  # often enough for an upgrade
        x = torch.zeros(g.num_src, 1, device=g.device)
        for _ in range(d.randint(1, WARM_AFTER + 1)):
            gsp.spmm(g, x)
    if way == "policy":
        return {"policy": d.pick("policy", POLICIES)}
    if way == "candidate":
        f = MatrixFeatures.of(g._csr)
        able = [k.name for k in KERNELS if k.device == "cuda" and reduce in k.reduces]
        usable = [c for c in CANDIDATES if allowed(c, f, able)]
        if not usable:
            return {}
        c = d.pick("candidate", usable)
        made = build_candidate(g._csr, for_device(g.device, c.kernel), c, width, dtype)
        return {"plan": dataclasses.replace(made, request=(width, dtype, reduce))}
    if way != "plan":
        return {}
    able = [k.name for k in KERNELS if k.device == g.device.type and reduce in k.reduces]
    # A matrix is small, not of float64, and counts parallel edges in its dtype.
    most = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11, torch.float32: 1 << 24, torch.float64: -1}[dtype]
    if g.num_edges > most or g.num_src * g.num_dst > 1 << 26:
        able = [name for name in able if name != "dense"]
    kernel = d.pick("kernel", (None, *(name for name in able if name != "cusparse")))  # that is not ours to test
    mode = d.pick("mode", ("auto", "warm", *(["cold"] if kernel not in BUILT else [])))
    policy = d.pick("policy", POLICIES if kernel is None and mode != "cold" else ("auto",))
    schedule: Any = None
    if mode != "cold":
        names = [s for s in SCHEDULES if (square or s not in SQUARE) and (s != "rcm" or _SCIPY)]
        schedule = d.pick("schedule", (None, None, "permutation", *names))
        if schedule == "permutation":
            schedule = torch.randperm(g.num_dst, generator=d.generator()).to(g.device)
    return {"plan": gsp.plan(g, width, dtype, reduce, mode, policy, kernel, schedule)}


def largest(*tensors: Tensor) -> float:
    """The largest absolute value of all; 0 where there is none."""
    return max([0.0, *(float(t.detach().abs().max()) for t in tensors if t.numel())])


def longest(g: gsp.Graph) -> int:
    """Edges of the longest row of either direction."""
    return max(1, *(int(h.in_degree().max()) if h.num_dst else 0 for h in (g, g.T)))


def within(
    got: Tensor, value: Tensor, size: Tensor, roundings: float, coarsest: torch.dtype | None = None, terms: int = 0
) -> None:
    """`got` is `value`, up to `roundings` of the coarsest dtype and an accumulation over terms of `size` in all.

    `terms`: as of `checks.close`.
    """
    assert got.shape == value.shape, (got.shape, value.shape)
    acc = torch.finfo(torch.float64 if got.dtype == coarsest == torch.float64 else torch.float32).eps
    info = torch.finfo(coarsest or got.dtype)
    subnormal = max(i.smallest_normal * i.eps for i in (info, torch.finfo(got.dtype)))  # their spacing
    bound = (roundings * info.eps + (128 + min(terms, CHUNK) / 4) * acc) * size.abs().double() + (
        4 * roundings + terms
    ) * subnormal
    error = (got.double() - value.double()).abs()
    wrong = ~(error <= bound)
    if bool(wrong.any()):
        i = int(wrong.flatten().nonzero()[0])
        raise AssertionError(
            f"element {i} of {list(got.shape)} {got.dtype}: got {got.flatten()[i]}, expected {value.flatten()[i]}, "
            f"allowed {bound.flatten()[i]:.3g}; {int(wrong.sum())} are wrong"
        )


def doubles(*tensors: Tensor | None) -> list[Any]:
    """Leaves in float64."""
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def leaves(*tensors: Tensor | None) -> list[Any]:
    """The same memory, asking for gradients."""
    return [None if t is None else t.detach().requires_grad_() for t in tensors]


def gradients(out: Tensor, upstream: Tensor, tensors: list[Any]) -> list[Any]:
    """By each tensor that is there; zeros where it has no part in `out`."""
    present = [t for t in tensors if t is not None]
    found = iter(torch.autograd.grad(out, present, upstream, allow_unused=True, materialize_grads=True))
    return [None if t is None else next(found) for t in tensors]


@contextmanager
def unwritten(*tensors: Tensor | None) -> Iterator[None]:
    """What is around inputs, and they themselves, stay as they are."""
    bases = [t if t._base is None else t._base for t in tensors if t is not None]
    before = [b.detach().clone(memory_format=torch.preserve_format) for b in bases]
    yield
    for a, b in zip(before, bases, strict=True):
        assert same_bits(a, b.detach()), "an input, or the memory around it, was written"


class _Bytes:
    """Some bytes of a GPU's memory, as torch takes them."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 2}


@contextmanager
def pinned() -> Iterator[None]:
    """Plans stay as they are: the same call gives the same bits. What is not written is not filled by torch either."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def sentinels(call: Callable[[], Tensor]) -> None:
    """On CUDA: a second call, into memory that was filled before, writes all of its output and nothing behind it.

    The allocator hands out the block that was freed last, in units of 512 bytes: what is behind the output in the last
    of these belongs to nobody. On the CPU the campaign runs under glibc's checks of the same (see ``--guard``).
    """
    with pinned():
        _sentinels(call)


def _sentinels(call: Callable[[], Tensor]) -> None:
    first = call()
    if not first.is_cuda or not first.numel():
        return
    bytes_ = first.numel() * first.element_size()
    gap = -bytes_ % 512
    kept, at = first.clone(), first.data_ptr()
    if gap == 0 or not first.is_contiguous():
        return
    whole = torch.as_tensor(_Bytes(at, bytes_ + gap), device="cuda")
    torch.cuda.synchronize()
    whole.fill_(0xFF)  # NaN, in every dtype
    del first
    again = call()
    if again.data_ptr() == at:
        assert bool((whole[bytes_:] == 0xFF).all()), "memory behind the output was written"
    assert same_bits(again, kept), "another call gave other bits (not every element was written?)"
