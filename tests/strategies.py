"""Graphs and features that break aggregation code: fixed ones by name, and hypothesis strategies for others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

import gnn_spmm_plugin as gsp


@dataclass(frozen=True)
class Edges:
    """An edge list (row 0 sources) with its numbers of nodes."""

    edge_index: Tensor
    num_src: int
    num_dst: int

    @property
    def num_edges(self) -> int:
        return self.edge_index.shape[1]

    def graph(self, device: str = "cpu", dtype: torch.dtype = torch.int64) -> gsp.Graph:
        return gsp.Graph.from_edge_index(self.edge_index.to(device, dtype), (self.num_src, self.num_dst))


def _random(num_src: int, num_dst: int, num_edges: int, seed: int) -> Edges:
    g = torch.Generator().manual_seed(seed)
    src = torch.randint(num_src, (num_edges,), generator=g)
    dst = torch.randint(num_dst, (num_edges,), generator=g)
    return Edges(torch.stack([src, dst]), num_src, num_dst)


def _hub(num_nodes: int, in_hub: int, rest: int, seed: int) -> Edges:
    """Node 1 has `in_hub` incoming edges, more than one chunk of a kernel; half of the rows are empty."""
    e = _random(num_nodes, num_nodes, in_hub + rest, seed)
    dst = e.edge_index[1]
    dst[:in_hub] = 1
    dst[in_hub:] //= 2
    order = torch.randperm(in_hub + rest, generator=torch.Generator().manual_seed(seed))
    return Edges(e.edge_index[:, order].contiguous(), num_nodes, num_nodes)


def _make_named() -> dict[str, Edges]:
    shuffled = _random(37, 37, 211, 0)
    order = torch.argsort(shuffled.edge_index[1], stable=True)
    hub = _hub(60, 4500, 300, 1)
    loops = torch.arange(9).repeat(2, 2)
    return {
        "shuffled": shuffled,
        "sorted": Edges(shuffled.edge_index[:, order].contiguous(), 37, 37),
        "bipartite": _random(11, 29, 120, 2),
        "wide": _random(300, 7, 900, 3),
        "hub": hub,
        "reverse_hub": Edges(hub.edge_index.flip(0), 60, 60),
        "parallel": Edges(torch.tensor([[2] * 11 + [0, 0], [0] * 11 + [2, 2]]), 3, 3),
        "self_loops": Edges(torch.cat([loops, torch.tensor([[0], [3]])], 1), 9, 12),
        "one_edge": Edges(torch.tensor([[4], [2]]), 5, 3),
        "no_edges": Edges(torch.empty(2, 0, dtype=torch.int64), 4, 3),
        "no_nodes": Edges(torch.empty(2, 0, dtype=torch.int64), 0, 0),
    }


#: Small graphs, one for each way to be special.
NAMED = _make_named()


@st.composite
def edges(draw: st.DrawFn, max_nodes: int = 40, max_edges: int = 160) -> Edges:
    """Edge lists: empty rows, duplicates, skew, self loops, no edges, bipartite, sorted or not."""
    num_src = draw(st.integers(0, max_nodes), label="num_src")
    num_dst = draw(st.just(num_src) | st.integers(0, max_nodes), label="num_dst")
    if num_src == 0 or num_dst == 0:
        return Edges(torch.empty(2, 0, dtype=torch.int64), num_src, num_dst)
    count = draw(st.integers(0, max_edges), label="num_edges")
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31), label="seed"))
    src_skew = draw(st.sampled_from([1, 1, 4]), label="src_skew")
    dst_skew = draw(st.sampled_from([1, 1, 6]), label="dst_skew")
    src = (torch.rand(count, generator=g) ** src_skew * num_src).long()
    dst = (torch.rand(count, generator=g) ** dst_skew * num_dst).long()
    special = draw(st.sampled_from(["none", "duplicates", "self_loops", "hub"]), label="special")
    if special == "duplicates" and count:
        pick = torch.randint(max(count // 4, 1), (count,), generator=g)
        src, dst = src[pick], dst[pick]
    elif special == "self_loops":
        loop = torch.rand(count, generator=g) < 0.5
        same = src.clamp(max=num_dst - 1)
        src, dst = torch.where(loop, same, src), torch.where(loop, same, dst)
    elif special == "hub":
        dst[torch.rand(count, generator=g) < 0.7] = num_dst - 1
    if draw(st.booleans(), label="sorted"):
        order = torch.argsort(dst, stable=True)
        src, dst = src[order], dst[order]
    return Edges(torch.stack([src, dst]), num_src, num_dst)


#: Ways to store the same numbers.
LAYOUTS = (
    "contiguous",
    "transposed",
    "every_second_column",
    "misaligned",
    "every_second_row",
    "padded",
    "reversed_dims",
)


def lay_out(x: Tensor, layout: str) -> Tensor:
    """The values of `x` [N, ...] in memory of another shape: equal to `x`, with other strides or another alignment."""
    if layout == "contiguous":
        return x.contiguous()
    if layout == "transposed":
        return x.t().contiguous().t() if x.dim() == 2 else x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "reversed_dims":
        dims = tuple(reversed(range(x.dim())))
        return x.permute(dims).contiguous().permute(dims)
    if layout == "every_second_column":
        wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "misaligned":
        flat = x.new_full((x.numel() + 1,), torch.nan)
        flat[1:] = x.flatten()
        return flat[1:].view(x.shape)
    if layout == "every_second_row":
        tall = x.new_full((2 * x.shape[0], *x.shape[1:]), torch.nan)
        tall[::2] = x
        return tall[::2]
    assert layout == "padded"
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 3), torch.nan)
    wide[..., 1:-2] = x
    return wide[..., 1:-2]


WIDTHS = (0, 1, 3, 16, 33, 64, 100, 257, 1030)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
REDUCES = ("sum", "mean", "max", "min")


def heads_of(width: int) -> int:
    """A number of heads that divides `width`."""
    return {0: 2, 1: 1, 16: 4, 64: 4, 100: 4, 1030: 10}.get(width, width)


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int, few: bool = False, device: str = "cpu") -> Tensor:
    """Normal numbers; with `few`, small integers, so that ties are common and every sum is exact."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, shape, generator=g) if few else torch.randn(shape, generator=g, dtype=torch.float64)
    return x.to(device, dtype)
