"""Importing DGL, in this process and in others; putting the operators in place, and taking them away again."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dgl_cases import Counted, graph

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.integrations.dgl import importing

pytestmark = pytest.mark.dgl

FOLDER = str(Path(gsp.__file__).parents[1])


def run(code: str, **env: str) -> str:
    """What a fresh process prints."""
    path = os.pathsep.join([FOLDER, os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


# ---------------------------------------------------------------------- the import


def test_the_import_leaves_nothing_behind() -> None:
    dgl = gsp.import_dgl()
    assert gsp.import_dgl() is dgl is sys.modules["dgl"]
    assert not any(isinstance(finder, importing.Finder) for finder in sys.meta_path)
    if isinstance(dgl.graphbolt, importing.Stub):
        with pytest.raises(ImportError, match=r"dgl.graphbolt.ItemSet is not available: this DGL has no lib"):
            _ = dgl.graphbolt.ItemSet
        with pytest.raises(ModuleNotFoundError):
            __import__("dgl.graphbolt.impl")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importing._found
    monkeypatch.delitem(sys.modules, "dgl")
    monkeypatch.setattr(importing, "_found", lambda name: name not in ("packaging", "pandas") and found(name))
    with pytest.raises(ImportError, match=r"packaging, pandas .*declared.*pip install packaging pandas"):
        gsp.import_dgl()
    monkeypatch.setattr(importing, "_found", lambda name: False)
    with pytest.raises(ImportError, match="DGL is not installed; install it with"):
        gsp.patch_dgl()


def test_a_graphbolt_that_loads_is_left_alone(tmp_path: Path) -> None:
    version = torch.__version__.split("+")[0]
    for name, content in (("base.py", "import torch"), (f"libgraphbolt_pytorch_{version}.so", "")):
        (tmp_path / "graphbolt").mkdir(exist_ok=True)
        (tmp_path / "graphbolt" / name).write_text(content)
    finder = importing.Finder()
    finder.install()
    assert finder.find_spec("dgl", None) is None and finder in sys.meta_path
    assert finder.find_spec("dgl.graphbolt", [str(tmp_path)]) is None and finder not in sys.meta_path
    (tmp_path / "graphbolt" / "base.py").write_text("import torchdata.datapipes")
    if not importing._found("torchdata.datapipes"):
        spec = finder.find_spec("dgl.graphbolt", [str(tmp_path)])
        assert spec is not None and spec.loader is finder


_CHILD = """
import torch
import torch.multiprocessing as mp
import gnn_spmm_plugin as gsp

def work(queue, g):
    import dgl
    queue.put((int(g.in_degrees().sum()), [type(b).__name__ for b in [dgl.to_block(g)]]))

if __name__ == "__main__":
    dgl = gsp.import_dgl()
    torch.set_num_threads(1)
    g = dgl.rand_graph(10, 30)
    for method in ("fork", "spawn"):
        ctx = mp.get_context(method)
        queue = ctx.SimpleQueue()
        child = ctx.Process(target=work, args=(queue, g))
        child.start()
        assert queue.get() == (30, ["DGLBlock"]), method
        child.join()
        loader = dgl.dataloading.DataLoader(
            *(g, torch.arange(10), dgl.dataloading.NeighborSampler([3])),
            batch_size=5,
            num_workers=1,
            multiprocessing_context=method,
        )
        for _, seeds, (block,) in loader:
            assert block.num_dst_nodes() == len(seeds) == 5
    started = dgl.multiprocessing.Process(target=print, args=("started",))
    started.start()
    started.join()
    print("fine")
"""


def test_children(tmp_path: Path) -> None:
    """Their main module imports DGL only where it is the main module."""
    script = tmp_path / "script.py"
    script.write_text(_CHILD)
    out = run(f"import runpy, sys; sys.argv = [{str(script)!r}]; runpy.run_path({str(script)!r}, run_name='__main__')")
    assert out.splitlines() == ["started", "fine"]


def test_graphs_in_files(tmp_path: Path) -> None:
    """Loaded in a process that knows nothing of this package."""
    import pickle

    import dgl

    g = graph()
    g.ndata["x"] = torch.arange(10)
    things = {"graph": g, "index": g._graph, "block": dgl.to_block(g), "list": [g, g]}
    for name, thing in things.items():
        (tmp_path / name).write_bytes(pickle.dumps(thing))
    torch.save({"g": g}, tmp_path / "torch")
    out = run(
        f"""
import pickle, torch
graph, index, block, (a, b) = (pickle.load(open({str(tmp_path)!r} + "/" + n, "rb")) for n in {list(things)})
assert a is b and graph.ndata["x"].tolist() == list(range(10)), "features"
assert index.num_edges(0) == block.num_edges() == graph.num_edges() == 30
assert torch.load({str(tmp_path)!r} + "/torch", weights_only=False)["g"].num_nodes() == 10
print(type(graph).__module__)
"""
    )
    assert out == "dgl.heterograph"


# ---------------------------------------------------------------------- the switch


def operators() -> list[Any]:
    import dgl

    index = sys.modules["dgl.heterograph_index"].HeteroGraphIndex
    names = [(dgl.ops, "gspmm"), (index, "reverse"), (index, "get_relation_graph")]
    for module in ("dgl.backend", "dgl.backend.pytorch", "dgl.backend.pytorch.sparse"):
        names += [(sys.modules[module], name) for name in ("gspmm", "gsddmm", "edge_softmax")]
    for module in ("spmm", "sddmm", "edge_softmax"):
        names += [(sys.modules[f"dgl.ops.{module}"], n) for n in vars(sys.modules[f"dgl.ops.{module}"]) if n[0] != "_"]
    return [vars(owner)[name] for owner, name in names]


def test_nested_patches_and_exceptions() -> None:
    before = operators()
    with pytest.raises(KeyError), gsp.patch_dgl():
        assert operators() != before
        with gsp.patch_dgl(policy="ra") as inner:
            inner.undo()
            inner.undo()
            assert operators() != before
        raise KeyError
    assert operators() == before
    outer = gsp.patch_dgl()
    gsp.patch_dgl()
    gsp.unpatch_dgl()
    assert operators() != before
    outer.undo()
    gsp.unpatch_dgl()
    assert operators() == before
    with outer:
        assert operators() != before
    assert operators() == before


def test_names_imported_before_the_patch() -> None:
    gsp.import_dgl()
    from dgl.ops import copy_u_sum, gspmm, u_dot_v

    g, x = graph(), torch.randn(10, 3)
    with Counted() as c:
        copy_u_sum(g, x)
        gspmm(g, "copy_lhs", "mean", x, None)  # its sum is ours, the division DGL's
        u_dot_v(g, x, x)
    assert c.calls == 3 and c.fallbacks == 0


def test_somebody_patched_on_top() -> None:
    import dgl

    spmm, g, x = sys.modules["dgl.ops.spmm"], graph(), torch.randn(10, 3)
    own = spmm.gspmm
    patch = gsp.patch_dgl()
    below = spmm.gspmm
    spmm.gspmm = lambda *args: below(*args) * 2
    try:
        patch.undo()
        before = gsp.stats()["kernel_calls"]
        dgl.ops.copy_u_sum(g, x)  # passes through ours, which is no longer in force
        assert gsp.stats()["kernel_calls"] == before
    finally:
        spmm.gspmm = own


def test_unknown_sources(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    import dgl

    from gnn_spmm_plugin.integrations.dgl import switch

    before, g, x = operators(), graph(), torch.randn(10, 3)
    monkeypatch.setattr(switch, "_refusal", False)
    monkeypatch.setitem(switch.SOURCES, "ops/spmm.py", "0" * 16)
    with caplog.at_level(logging.WARNING, "gnn_spmm_plugin"), Counted() as c:
        with gsp.patch_dgl():
            assert operators() == before
            dgl.ops.copy_u_sum(g, x)
    assert c.calls == c.fallbacks == 0
    assert len(caplog.records) == 1 and "ops/spmm.py of dgl" in caplog.text
    monkeypatch.setattr(switch, "_refusal", False)


def test_a_patch_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from gnn_spmm_plugin.integrations.dgl import device, switch

    before = operators()
    monkeypatch.setitem(device.SOURCES, "frame.py", "0" * 16)
    with pytest.raises(RuntimeError, match=r"cuda_features replaces methods of dgl 2.1.0"):
        gsp.patch_dgl(cuda_features=True)
    assert operators() == before

    def broken(original: Any) -> Any:
        raise OSError("broken")

    monkeypatch.setattr(switch, "_reversed", broken)
    with pytest.raises(OSError, match="broken"):
        gsp.patch_dgl()
    assert operators() == before


def test_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    gsp.import_dgl()
    before = operators()
    monkeypatch.setenv("GSP_DISABLE", "1")
    with gsp.patch_dgl():
        assert operators() == before


def test_policies() -> None:
    import dgl

    g, x, w = graph(), torch.randn(10, 3), torch.rand(30, 1)
    expected = dgl.ops.u_mul_e_sum(g, x, w)
    for policy in ("auto", "ra", "paramspmm", "dualgcn", "csr"):
        with Counted(policy=policy) as c:
            torch.testing.assert_close(dgl.ops.u_mul_e_sum(g, x, w), expected)
        assert c.calls == 1
    with pytest.raises(ValueError, match="policy must be one of"):
        gsp.patch_dgl(policy="best")


def test_the_overhead_of_a_call_is_not_dgls() -> None:
    """On ten nodes, where nothing but Python runs; the medians of interleaved rounds."""
    import statistics
    import time

    import dgl

    g, x = graph(), torch.randn(10, 3)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(5):
        for on, kept in seconds.items():
            patch = gsp.patch_dgl() if on else None
            for i in range(40):
                start = time.perf_counter()
                dgl.ops.copy_u_sum(g, x)
                if i >= 10:
                    kept.append(time.perf_counter() - start)
            if patch is not None:
                patch.undo()
    assert statistics.median(seconds[True]) <= statistics.median(seconds[False])


@pytest.mark.slow
def test_compiled_layers_break_the_graph_and_are_right() -> None:
    import dgl

    layer, g, x = dgl.nn.SAGEConv(3, 4, "mean"), graph(), torch.randn(10, 3)
    expected = layer(g, x)
    with gsp.patch_dgl():
        found = torch.compile(layer, backend="eager")(g, x)
    torch.testing.assert_close(found, expected)


# ---------------------------------------------------------------------- what comes with it


def test_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gnn_spmm_plugin.bench import dgl as bench
    from gnn_spmm_plugin.bench.results import table_of

    threads = torch.get_num_threads()
    path = tmp_path / "out.csv"
    try:
        assert bench.main(f"--nodes 40 --edges 200 --width 8 --rounds 1 --threads 1 --csv {path}".split()) == 0
    finally:
        torch.set_num_threads(threads)
    columns, rows = table_of(path)
    assert columns == bench.COLUMNS and len(rows) == 22
    assert "bench.dgl --nodes 40" in path.read_text()
    for row in rows:
        assert float(row["difference"]) < 1e-5, row
    assert "GATConv 4 x 16 step" in capsys.readouterr().out


def test_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import runpy

    path = Path(__file__).parents[1] / "examples" / "dgl_patch.py"
    monkeypatch.setattr(sys, "argv", ["dgl_patch.py", "--tiny"])
    before = operators()
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code == 0
    assert operators() == before
    out = capsys.readouterr().out
    assert "the same within" in out and "times as fast" in out
