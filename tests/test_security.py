"""No network, nothing unpickled, no other program: read in the sources, and watched while a model is trained."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gnn_spmm_plugin

PACKAGE = Path(gnn_spmm_plugin.__path__[0])
NETWORK = {"socket", "ssl", "http", "urllib", "ftplib", "smtplib", "xmlrpc", "asyncio", "requests", "httpx", "aiohttp"}
UNPICKLING = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
#: Which may start a program: git, to name the commit that was measured, the ranks of a bench, a report's script.
STARTS = {"bench/results.py", "bench/ranks.py", "page/script.py"}
CALLS = {"eval", "exec", "torch.load", "torch.hub.load", "os.system", "os.popen"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_sources(path: Path) -> None:
    refused = NETWORK | UNPICKLING | (set() if path.relative_to(PACKAGE).as_posix() in STARTS else {"subprocess"})
    for node in ast.walk(ast.parse(path.read_text())):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [node.module or ""]
        for module in modules:
            assert module.split(".")[0] not in refused, f"line {node.lineno} imports {module}"
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in CALLS, f"line {node.lineno} calls {ast.unparse(node.func)}"
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle":
                    assert ast.unparse(keyword.value) == "False", f"line {node.lineno} allows pickles"
            if ast.unparse(node.func) == "np.load":
                assert any(k.arg == "allow_pickle" for k in node.keywords), f"line {node.lineno} does not say so"


WATCHED = """
import sys
import torch, torch_geometric, torch_geometric.nn  # whatever these do is theirs

seen = []
def hook(event, args):
    if event.split(".")[0] in ("socket", "urllib", "http", "ftplib", "smtplib") or event in (
        "pickle.find_class", "marshal.load", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork"
    ):
        seen.append((event, str(args)[:200]))
sys.addaudithook(hook)

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.cli import main

x, index = torch.randn(40, 8), torch.randint(40, (2, 300))
model = gsp.accelerate(torch_geometric.nn.GCN(8, 8, 2, 3))
model(x, index).sum().backward()
graph = gsp.Graph.from_edge_index(index, 40)
gsp.plan(graph, width=8, mode="tune")
gsp.plan(graph, width=8, policy="paramspmm")
assert main(["info"]) == 0
assert main(["demo", "--epochs", "4", "--device", "cpu"]) == 0
assert main(["explain", "cora"]) == 0
seen = [e for e in seen if "uname" not in e[1]]  # how Python's platform.platform() asks for the processor
print("seen", seen)
if len(sys.argv) > 1:
    import pickle, socket
    pickle.loads(pickle.dumps(ValueError))
    try:
        socket.create_connection(("127.0.0.1", 9), timeout=1)
    except OSError:
        pass
    assert {event for event, _ in seen} >= {"pickle.find_class", "socket.connect"}, seen
    print("the hook sees")
"""


@pytest.mark.pyg
def test_nothing_of_it_happens(tmp_path: Path) -> None:
    env = {**os.environ, "GSP_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, "check"], capture_output=True, text=True, env=env, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "\nseen []\n" in done.stdout and done.stdout.endswith("the hook sees\n"), done.stdout[-2000:]
