"""Implicit graphs: found again when they may be, never when they may not, and gone when their tensor is."""

from __future__ import annotations

import gc
import multiprocessing
import random
import threading
import weakref

import pytest
import torch
from checks import books_agree, resident
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import NAMED, values

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import cache, csr, reference

pytestmark = pytest.mark.usefixtures("fresh_cache")


def lookup(edge_index: torch.Tensor, n: int = 37, reverse: bool = False) -> gsp.Graph:
    src, dst = edge_index[int(reverse)], edge_index[int(not reverse)]
    return cache.graph_of(dst, src, n, n)


def changes(run) -> dict[str, int]:  # type: ignore[no-untyped-def]
    """The counters that `run` moved."""
    before = gsp.stats()
    run()
    return {k: v - before[k] for k, v in gsp.stats().items() if v != before[k] and k != "kernel_calls"}


def example(device: str, seed: int = 0, n: int = 37, count: int = 211) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(n, (2, count), generator=generator).to(device)


# ---------------------------------------------------------------------- level 1: identity


def test_found_by_identity(device: str) -> None:
    edge_index = example(device)
    first = lookup(edge_index)
    assert changes(lambda: lookup(edge_index)) == {"plan_hits": 1}
    assert lookup(edge_index) is first
    assert torch.equal(first.edge_index(), edge_index)


def test_views_of_one_tensor_are_told_apart(device: str) -> None:
    """By offset, stride, length, dtype and direction."""
    base = example(device, count=200)
    views = [
        base,
        base[:, 50:],
        base[:, :150],
        base[:, 50:][:, 25:],
        base[:, ::2],
        base[:, 1::2],
        base.flip(0),  # a copy
        base.t().reshape(2, -1),
    ]
    for _ in range(2):
        for view in views:
            assert torch.equal(lookup(view).edge_index(), view)
            assert torch.equal(lookup(view, reverse=True).edge_index(), view.flip(0))
    hits = changes(lambda: [lookup(v) for v in views])
    assert hits == {"plan_hits": len(views)}
    assert lookup(base, 37).num_src == 37 and lookup(base, 40).num_src == 40
    assert torch.equal(lookup(base.int()).edge_index(), base)


def test_the_same_place_in_another_type(device: str) -> None:
    """int64 memory read as int32 has twice as many edges of other numbers."""
    base = example(device, count=200)
    lookup(base)
    narrow = base.view(torch.int32)
    assert torch.equal(lookup(narrow).edge_index(), narrow.long())
    assert torch.equal(lookup(base).edge_index(), base)


@pytest.mark.parametrize("trusted", [False, True])
def test_in_place_edits(device: str, trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the version counter alone, as on CUDA, and where hits are compared."""
    monkeypatch.setattr(cache, "_trusted", lambda _: trusted)
    edge_index = example(device)
    other = example(device, 1)
    for edit in (
        lambda: edge_index.copy_(other),
        lambda: edge_index[0].copy_(edge_index[1]),
        lambda: edge_index.__setitem__((0, 5), 3),
        lambda: edge_index.add_(1).remainder_(37),
        lambda: edge_index.t()[7].fill_(2),
    ):
        for _ in range(2):
            lookup(edge_index)
        edit()
        assert torch.equal(lookup(edge_index).edge_index(), edge_index)


def test_numpy_edits() -> None:
    """They pass by the version counter, so that a hit on the CPU is compared."""
    edge_index = example("cpu")
    array = edge_index.numpy()
    for _ in range(2):
        lookup(edge_index)
    array[:] = example("cpu", 1).numpy()
    assert torch.equal(lookup(edge_index).edge_index(), edge_index)
    array[0, 3] = 11
    assert torch.equal(lookup(edge_index).edge_index(), edge_index)
    edge_index.data.copy_(example("cpu", 2))
    assert torch.equal(lookup(edge_index).edge_index(), edge_index)
    array[1, 4] = 99
    with pytest.raises(IndexError, match=r"99"):
        lookup(edge_index)


def test_verify_compares_always(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, writes that pass by the version counter are found only where asked for."""
    monkeypatch.setenv("GSP_LOG", "verify")
    edge_index = example(device)
    lookup(edge_index)
    edge_index.data.copy_(example(device, 1))
    assert torch.equal(lookup(edge_index).edge_index(), edge_index)


def test_other_storage_under_the_same_tensor(device: str) -> None:
    edge_index = example(device)
    for _ in range(2):
        lookup(edge_index)
    other = example(device, 1)
    edge_index.set_(other)
    assert torch.equal(lookup(edge_index).edge_index(), other)
    edge_index.data = example(device, 2)
    assert torch.equal(lookup(edge_index).edge_index(), example(device, 2))
    edge_index.resize_(2, 100)
    edge_index.fill_(3)
    assert lookup(edge_index).num_edges == 100


def test_freed_and_reused_memory(device: str) -> None:
    """A new tensor where an old one was, with its address and perhaps its id()."""
    n = 50
    for seed in range(200):
        edge_index = example(device, seed, n, 64)
        assert torch.equal(lookup(edge_index, n).edge_index(), edge_index)
        del edge_index


def test_inference_tensors(device: str) -> None:
    """They have no version counter: compared by content."""
    with torch.inference_mode():
        edge_index = example(device)
        first = lookup(edge_index)
        assert changes(lambda: lookup(edge_index)).get("plan_hits") is None
        assert lookup(edge_index) is first
        edge_index.fill_(4)
        assert torch.equal(lookup(edge_index).edge_index(), edge_index)
        x = values((37, 3), torch.float32, 1, device=device)
        weight = torch.rand(211, device=device)
        g = gsp.Graph.from_edge_index(example(device), 37)
        for _ in range(3):
            out = gsp.spmm(g, x, weight)
            weight.mul_(2)
            assert torch.allclose(gsp.spmm(g, x, weight), 2 * out, atol=1e-5)
    normal = example(device, 5)
    lookup(normal)
    with torch.inference_mode():
        assert changes(lambda: lookup(normal)).get("plan_misses") is None
        lookup(example(device, 6))
    with torch.no_grad():
        assert changes(lambda: lookup(normal)) == {"plan_hits": 1}


def test_graphs_made_under_inference_mode_train(device: str) -> None:
    """The graph of an edge_index first seen in an evaluation is used in the training that follows."""
    edge_index = example(device)
    weight = torch.rand(211, device=device)
    with torch.inference_mode():
        g = lookup(edge_index)
        for reduce in ("sum", "mean", "max"):
            gsp.spmm(g, values((37, 3), torch.float32, 1, device=device), weight, reduce)
            gsp.spmm(g.T, values((37, 3), torch.float32, 1, device=device), weight, reduce)
    x = values((37, 3), torch.float32, 1, device=device).requires_grad_()
    w = weight.clone().requires_grad_()
    for reduce in ("sum", "mean", "max"):
        assert lookup(edge_index) is g
        for _ in range(3):
            out = gsp.spmm(lookup(edge_index), x, w, reduce)
            (grad,) = torch.autograd.grad((out**2).sum(), x, create_graph=True)
            grad.sum().backward()
        gsp.spmm(g, x, weight, reduce).sum().backward()


def test_directions(device: str) -> None:
    edge_index = torch.tensor([[0, 0, 3], [1, 2, 2]], device=device)
    x = torch.tensor([[1.0], [10.0], [100.0], [1000.0]], device=device)
    for _ in range(2):
        assert gsp.spmm(lookup(edge_index, 4), x).flatten().tolist() == [0, 1, 1001, 0]
        assert gsp.spmm(lookup(edge_index, 4, reverse=True), x).flatten().tolist() == [110, 0, 0, 100]


# ---------------------------------------------------------------------- level 2: content


def test_found_by_content(device: str) -> None:
    edge_index = example(device)
    first = lookup(edge_index)
    again = changes(lambda e=edge_index: lookup(e.clone()))
    assert again == {"l2_hits": 1} | ({"l2_syncs": 1} if device == "cuda" else {})
    assert lookup(edge_index.clone()) is first
    assert lookup(edge_index.int()) is first
    del edge_index
    assert lookup(first.edge_index()) is first
    two = first.edge_index()
    assert cache.graph_of(two[1].clone(), two[0].clone(), 37, 37) is first  # two tensors instead of one


def test_one_edge_differs(device: str) -> None:
    edge_index = example(device)
    first = lookup(edge_index)
    for row, position in ((0, 0), (1, 0), (0, 210), (1, 210), (0, 100)):
        other = edge_index.clone()
        other[row, position] = (other[row, position] + 1) % 37
        assert lookup(other) is not first
        assert torch.equal(lookup(other).edge_index(), other)


def test_edges_in_another_order_are_another_graph(device: str) -> None:
    edge_index = example(device)
    lookup(edge_index)
    shuffled = edge_index[:, torch.randperm(211)]
    assert torch.equal(lookup(shuffled).edge_index(), shuffled)
    ordered = edge_index[:, edge_index[1].argsort()]
    assert torch.equal(lookup(ordered).edge_index(), ordered)


def test_numbers_of_nodes_count(device: str) -> None:
    edge_index = example(device)
    assert lookup(edge_index).num_dst == 37
    assert lookup(edge_index.clone(), 40).num_dst == 40
    assert cache.graph_of(edge_index[1], edge_index[0], 37, 50).num_src == 50


def test_no_candidates_no_waiting(device: str) -> None:
    """Nothing is compared, so nothing is waited for, where no graph of that size is known."""
    lookup(example(device))
    found = changes(lambda: lookup(example(device, 1, count=212)))
    assert "l2_syncs" not in found and "l2_hits" not in found


# ---------------------------------------------------------------------- life and bounds


def test_freed_tensors_free_graphs(device: str, no_gc: None) -> None:
    graphs = []
    for seed in range(cache.MAX_GRAPHS + 5):
        edge_index = example(device, seed)
        graphs.append(weakref.ref(lookup(edge_index)._core))
        del edge_index
    alive = [g() is not None for g in graphs]
    assert alive == [False] * 5 + [True] * cache.MAX_GRAPHS
    assert cache.cached_graphs() == cache.MAX_GRAPHS
    gsp.clear_cache()
    assert cache.cached_graphs() == 0 and not any(g() for g in graphs)


def test_living_tensors_keep_graphs(device: str) -> None:
    """A loader that keeps its batches finds all of them again; when they go, all but the last few go."""
    batches = [example(device, seed) for seed in range(50)]
    for b in batches:
        lookup(b)
    assert changes(lambda bs=batches: [lookup(b) for b in bs]) == {"plan_hits": 50}
    books_agree()
    assert cache.cached_graphs() == 50
    del b, batches
    assert cache.cached_graphs() == cache.MAX_GRAPHS


def test_edited_tensors_free_graphs(device: str) -> None:
    edge_index = example(device)
    for seed in range(40):
        edge_index.copy_(example(device, seed))
        assert torch.equal(lookup(edge_index).edge_index(), edge_index)
    assert cache.cached_graphs() <= cache.MAX_GRAPHS + 1


def test_many_views_of_one_tensor(device: str) -> None:
    base = example(device, count=5000)
    sizes = [lookup(base[:, i : i + 100]).num_edges for i in range(500)]
    assert sizes == [100] * 500
    found = changes(lambda: [lookup(base[:, i : i + 100]) for i in range(500)])
    assert found == {"plan_hits": 500}


def test_bytes_are_bounded(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of living tensors, the least recently used first."""
    size = 0

    def one(seed: int) -> torch.Tensor:
        edge_index = example(device, seed)
        lookup(edge_index)
        return edge_index

    keep = one(0)
    size = next(iter(cache._entries.values())).nbytes
    monkeypatch.setattr(cache, "MAX_BYTES", 5.5 * size)
    if device == "cuda":
        monkeypatch.setattr(cache, "MAX_SHARE", 5.5 * size / torch.cuda.get_device_properties(0).total_memory)
    batches = [one(seed) for seed in range(1, 20) if lookup(keep) is not None]
    assert cache.cached_graphs() == 5
    books_agree()
    assert changes(lambda: lookup(keep)) == {"plan_hits": 1}  # in use all the time
    assert changes(lambda: lookup(batches[0])).get("plan_misses") == 1
    monkeypatch.setattr(cache, "MAX_BYTES", 0)
    monkeypatch.setattr(cache, "MAX_SHARE", 0)
    for b in batches[:3]:
        assert torch.equal(lookup(b).edge_index(), b)
    assert cache.cached_graphs() == 1


def test_the_cache_keeps_nothing_of_the_caller(device: str, no_gc: None) -> None:
    edge_index = example(device)
    x = values((37, 3), torch.float32, 1, device=device).requires_grad_()
    w = torch.rand(211, device=device)
    out = gsp.spmm(lookup(edge_index), x, w)
    out.sum().backward()
    dead = [weakref.ref(t) for t in (edge_index, x, w, out)]
    del edge_index, x, w, out
    assert [r() for r in dead] == [None] * 4


def test_errors_are_not_cached(device: str) -> None:
    edge_index = example(device)
    edge_index[0, 7] = 37
    for _ in range(3):
        with pytest.raises(IndexError, match=r"edge 7 .* source 37"):
            lookup(edge_index)
    assert cache.cached_graphs() == 0
    assert lookup(edge_index, 38).num_src == 38


def short_lived(device: str, count: int) -> None:
    for i in range(count):
        edge_index = torch.randint(30, (2, 60), device=device)
        if i % 2:
            edge_index[1, 30] = 30
        x = torch.randn(30, 16, device=device, requires_grad=True)
        try:
            gsp.spmm(lookup(edge_index, 30), x, reduce=random.choice(["sum", "max"])).sum().backward()
            assert i % 2 == 0
        except IndexError:
            assert i % 2
        if i % 500 == 499:
            gc.collect()


@pytest.mark.parametrize("count", [1500, pytest.param(5000, marks=pytest.mark.slow)])
def test_many_short_lived_graphs(device: str, count: int) -> None:
    """H25: memory after 5000 graphs is that after 500, also where half of the batches raise."""
    short_lived(device, 500)
    assert cache.cached_graphs() <= cache.MAX_GRAPHS
    gc.collect()
    before = resident(), torch.cuda.memory_allocated() if device == "cuda" else 0
    short_lived(device, count - 500)
    gc.collect()
    assert cache.cached_graphs() <= cache.MAX_GRAPHS
    if device == "cuda":
        assert torch.cuda.memory_allocated() - before[1] < 1 << 20
    # malloc's own ups and downs, and the driver's; a graph, its transpose and plans are 10 KB
    assert resident() - before[0] < (8 << 20 if device == "cpu" else 64 << 20)
    assert not cache._dead and len(cache._roots) <= cache.MAX_GRAPHS
    books_agree()
    gsp.clear_cache()
    assert cache.cached_graphs() == 0


# ---------------------------------------------------------------------- threads and processes


def test_threads(device: str) -> None:
    """H22a: 8 threads, 200 calls each over 20 graphs of their own, with a cold cache."""
    wrong: list[str] = []
    barrier = threading.Barrier(8)

    def work(me: int) -> None:
        try:
            generator = torch.Generator().manual_seed(me)
            graphs, wanted = [], []
            for i in range(20):
                n = 20 + 9 * i
                edge_index = torch.randint(n, (2, 3 * n), generator=generator).to(device)
                x = torch.randn(n, 4, generator=generator).to(device)
                g = gsp.Graph.from_edge_index(edge_index, n)
                graphs.append((edge_index, x, n))
                wanted.append([reference.spmm(g, x, None, reduce)[0] for reduce in ("sum", "max")])
            barrier.wait()
            for call in range(200):
                i = int(torch.randint(20, (), generator=generator))
                edge_index, x, n = graphs[i]
                if call % 3 == 0:
                    edge_index = edge_index.clone()
                leaf = x.clone().requires_grad_()
                reduce = ("sum", "max")[call % 2]
                out = gsp.spmm(lookup(edge_index, n), leaf, reduce=reduce)
                out.sum().backward()
                if not torch.allclose(out, wanted[i][call % 2], atol=1e-5):
                    wrong.append(f"thread {me} call {call}")
                if call == 100 and me == 0:
                    gsp.clear_cache()
        except Exception as e:
            wrong.append(f"thread {me}: {e!r}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not any(t.is_alive() for t in threads)
    assert wrong == []


def test_threads_share_one_tensor(device: str) -> None:
    edge_index = example(device)
    x = values((37, 4), torch.float32, 1, device=device)
    expected = gsp.spmm(lookup(edge_index), x)
    gsp.clear_cache()
    results: list[torch.Tensor] = []
    gsp.plan(lookup(edge_index), 4)  # warm, so that no upgrade changes last digits on the way

    def work() -> None:
        for _ in range(50):
            results.append(gsp.spmm(lookup(edge_index), x))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len(results) == 400 and all(torch.equal(r, results[0]) for r in results)
    assert torch.allclose(results[0], expected, atol=1e-5)


def _child(queue: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    torch.set_num_threads(1)  # what a fork needs under OpenMP, with or without this package
    edge_index = example("cpu")
    x = values((37, 4), torch.float32, 1).requires_grad_()
    out = gsp.spmm(lookup(edge_index), x)
    out.sum().backward()
    queue.put((out.sum().item(), cache.cached_graphs()))


def test_fork() -> None:
    """Also while another thread of the parent holds the cache's lock."""
    edge_index = example("cpu")
    expected = gsp.spmm(lookup(edge_index), values((37, 4), torch.float32, 1)).sum().item()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with cache._lock:
        child = context.Process(target=_child, args=(queue,))
        child.start()
    total, kept = queue.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0 and total == expected and kept >= 1


# ---------------------------------------------------------------------- anything, in any order


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["new", "clone", "edit", "numpy", "drop", "clear", "view", "reverse", "swap"]),
            st.integers(0, 3),
        ),
        max_size=30,
    )
)
def test_never_stale(device, steps) -> None:  # type: ignore[no-untyped-def]
    """Whatever happens to a few tensors, a graph is always that of what they hold now."""
    slots = [example(device, seed, 9, 12) for seed in range(4)]
    generator = torch.Generator().manual_seed(0)
    for action, i in steps:
        t = slots[i]
        if action == "new":
            slots[i] = torch.randint(9, (2, 12), generator=generator).to(device)
        elif action == "clone":
            slots[i] = slots[(i + 1) % 4].clone()
        elif action == "edit":
            t[i % 2, 3 * i] = int(torch.randint(9, (), generator=generator))
        elif action == "numpy" and device == "cpu":
            t.numpy()[i % 2, i] = int(torch.randint(9, (), generator=generator))
        elif action == "drop":
            slots[i] = torch.zeros(2, 12, dtype=torch.int64, device=device)
        elif action == "clear":
            gsp.clear_cache()
        elif action == "view":
            assert torch.equal(lookup(t[:, i:], 9).edge_index(), t[:, i:])
        elif action == "swap":
            slots[i], slots[3 - i] = slots[3 - i], slots[i]
        found = lookup(slots[i], 9, reverse=action == "reverse").edge_index()
        assert torch.equal(found, slots[i].flip(0) if action == "reverse" else slots[i])
        books_agree()


# ---------------------------------------------------------------------- permuted weights


def test_constant_weights_are_permuted_once(device: str) -> None:
    e = NAMED["shuffled"]
    g = e.graph(device)
    x = values((37, 4), torch.float32, 1, device=device)
    weight = torch.rand(211, device=device)
    assert changes(lambda: gsp.spmm(g, x, weight))["weight_permutes"] == 1
    assert "weight_permutes" not in changes(lambda: gsp.spmm(g, x, weight))
    for edit in (
        lambda: weight.mul_(2),
        lambda: weight.__setitem__(5, 9.0),
        lambda: weight[3:7].zero_(),
        lambda: weight.copy_(torch.rand(211)),
        lambda: weight.set_(torch.rand(211, device=device)),
    ):
        edit()
        assert torch.allclose(gsp.spmm(g, x, weight), reference.spmm(g, x, weight)[0], atol=1e-5)


def test_writes_into_weights_that_pass_by_the_version_counter(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA they are found under GSP_LOG=verify only."""
    if device == "cuda":
        monkeypatch.setenv("GSP_LOG", "verify")
    g = NAMED["shuffled"].graph(device)
    x = values((37, 4), torch.float32, 1, device=device)
    weight = torch.rand(211, device=device)
    edits = [lambda: weight.data.mul_(3)]
    if device == "cpu":
        edits += [lambda: weight.numpy().__setitem__(7, 50.0)]
    for edit in edits:
        for _ in range(2):
            gsp.spmm(g, x, weight)
        edit()
        assert torch.allclose(gsp.spmm(g, x, weight), reference.spmm(g, x, weight)[0], atol=1e-4)


@pytest.mark.parametrize("kind", ["dtype", "heads", "no heads", "value"])
def test_weights_whose_data_is_exchanged(device: str, kind: str) -> None:
    """As module.double() does with a frozen parameter: the same object and version."""
    g = NAMED["shuffled"].graph(device)
    x = values((37, 4), torch.float32, 1, device=device)
    ones = torch.ones(211, device=device)
    old = ones.unsqueeze(1).expand(211, 4).contiguous() if kind == "no heads" else ones
    new = {
        "dtype": ones.double(),
        "heads": ones.unsqueeze(1).expand(211, 4).contiguous(),
        "no heads": ones,
        "value": torch.rand(211, device=device),
    }[kind]
    weight = torch.nn.Parameter(old, requires_grad=False)
    for _ in range(2):
        gsp.spmm(g, x, weight)
    weight.data = new
    out = gsp.spmm(g, x, weight)
    assert out.dtype == new.dtype and torch.allclose(out, reference.spmm(g, x, weight)[0], atol=1e-5)


def test_weights_in_reused_memory(device: str) -> None:
    g = NAMED["shuffled"].graph(device)
    x = values((37, 4), torch.float32, 1, device=device)
    for _ in range(100):
        weight = torch.rand(211, device=device)
        assert torch.allclose(gsp.spmm(g, x, weight), reference.spmm(g, x, weight)[0], atol=1e-5)
        del weight


def test_weights_that_start_to_learn(device: str) -> None:
    """requires_grad_ changes no version."""
    g = NAMED["shuffled"].graph(device)
    x = values((37, 4), torch.float32, 1, device=device)
    weight = torch.rand(211, device=device)
    gsp.spmm(g, x, weight)
    weight.requires_grad_()
    gsp.spmm(g, x, weight).sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        weight.sub_(weight.grad)
        out = gsp.spmm(g, x, weight)
    weight.requires_grad_(False)
    assert torch.equal(gsp.spmm(g, x, weight), out)


def test_two_weights_in_turn(device: str) -> None:
    g = NAMED["shuffled"].graph(device)
    x = values((37, 4), torch.float32, 1, device=device)
    for kind in ((211,), (211, 4)):
        a, b = torch.rand(kind, device=device), torch.rand(kind, device=device)
        for weight in (a, b, a, a, b):
            assert torch.allclose(gsp.spmm(g, x, weight), reference.spmm(g, x, weight)[0], atol=1e-5)


def test_a_transpose_is_made_ahead_where_the_last_was_used(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training loop over batches wants both directions of each, an evaluation one."""
    asked: list[bool] = []
    real = csr._native.from_coo
    monkeypatch.setattr(csr._native, "from_coo", lambda *args: asked.append(args[-1]) or real(*args))
    gsp.clear_cache()

    def step(seed: int, train: bool) -> gsp.Graph:
        edges = torch.randint(30 + seed, (2, 80), generator=torch.Generator().manual_seed(seed)).to(device)
        graph = cache.graph_of(edges[1], edges[0], 30 + seed, 30 + seed)
        x = torch.ones(30 + seed, 3, device=device, requires_grad=train)
        out = gsp.spmm(graph, x)
        if train:
            out.sum().backward()
            degree = torch.bincount(edges[0], minlength=len(x)).to(x.dtype)
            torch.testing.assert_close(x.grad, degree.unsqueeze(1).expand_as(x))
        return graph

    before = gsp.stats()["transposes_built"]
    kept = [step(seed, seed < 3) for seed in range(6)]
    # The first says nothing yet; the fourth was a guess, and wrong, so there is no other.
    assert asked == [False, True, True, True, False, False]
    assert gsp.stats()["transposes_built"] - before == 4
    kept.append(step(6, True))
    with torch.no_grad():
        kept.append(step(7, False))
    assert asked[6:] == [False, False]
    assert [g._core.transpose is not None for g in kept] == [True] * 4 + [False, False, True, False]
    assert all(g._core.csr.coo is None for g in kept if g._core.transpose is not None)
