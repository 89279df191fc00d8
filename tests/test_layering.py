"""Imports point one way: each module may import those that stand before it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import gnn_spmm_plugin

PACKAGE = Path(gnn_spmm_plugin.__path__[0])

#: A module may import from lower layers, never from its own or a higher one, unless named in `SAME`.
LAYERS = (
    ("_config", "_files", "_platform", "_table"),
    ("_native",),
    ("csr",),
    ("graph",),
    ("features", "kernels", "reference", "router"),
    ("dgl_index", "partition", "reuse"),
    ("community",),
    ("schedule", "pcsr", "tiles"),
    ("candidate", "dense", "vendor"),
    ("decider",),
    ("policy",),
    ("plan",),
    ("derivatives",),
    ("functional",),
    ("functional_aggregate", "functional_attention", "functional_messages"),
    ("functional_convolution",),
    ("cache", "normalize"),
    ("functional_edge_index", "functional_attention_edge_index"),
    ("nn", "integrations", "distributed"),
    ("report", "data"),
    ("bench",),
    ("tune",),
    ("tune_command",),
    ("demo",),
    ("page",),
    ("cli",),
)
SAME = {
    ("pcsr", "schedule"),
    ("tiles", "schedule"),
    ("normalize", "cache"),
    ("functional_attention_edge_index", "functional_edge_index"),
    ("integrations", "nn"),
}
#: Imported at the call, not at the import of the module: sugar, `Graph.reduce` and `Graph.reorder`.
FORWARD = {("graph", "functional"), ("graph", "partition"), ("graph", "schedule"), ("plan", "tune")}
#: The package itself: the version, the folder, and what the command line shows.
ROOT = {"_native", "cli", "demo", "__main__", "report", "page"}


def _modules() -> dict[str, list[Path]]:
    """Top-level module or folder -> its files."""
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if name not in ("__init__", "__main__"):
            found.setdefault(name, []).append(path)
    return found


def _imports(path: Path) -> set[tuple[str, bool]]:
    """(top-level module of ours, whether the import runs when the module is imported) for each import in a file."""
    tree = ast.parse(path.read_text())
    at_top: set[ast.AST] = set()

    def mark(node: ast.AST) -> None:
        at_top.add(node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                mark(child)

    mark(tree)
    depth = len(path.relative_to(PACKAGE).parts) - 1
    found: set[tuple[str, bool]] = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            if node.level:
                inside = list(path.relative_to(PACKAGE).parts[: depth + 1 - node.level])
                module = ".".join([*inside, *([node.module] if node.module else [])])
                names = [module] if module else [a.name for a in node.names]
            elif node.module and node.module.split(".")[0] == "gnn_spmm_plugin":
                module = node.module.partition(".")[2]
                names = [module] if module else [a.name for a in node.names]
        elif isinstance(node, ast.Import):
            names = [
                a.name.partition(".")[2] or "gnn_spmm_plugin"
                for a in node.names
                if a.name.split(".")[0] == "gnn_spmm_plugin"
            ]
        found |= {(name.split(".")[0], node in at_top) for name in names}
    return found


def _level(name: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if name in layer)


def test_every_module_has_its_layer() -> None:
    known = {name for layer in LAYERS for name in layer}
    assert set(_modules()) <= known, set(_modules()) - known


@pytest.mark.parametrize("name", sorted(_modules()))
def test_imports_point_back(name: str) -> None:
    for path in _modules()[name]:
        for other, at_top in _imports(path):
            if other == name:
                continue
            if other not in _modules():
                assert name in ROOT or other == "__version__", f"{path.name} imports {other} of the package itself"
                continue
            if _level(other) < _level(name) or (name, other) in SAME:
                continue
            assert (name, other) in FORWARD and not at_top, f"{path.name} imports {other}, which stands after it"


def test_core_needs_torch_and_numpy_alone() -> None:
    """Whatever else is imported in the core modules is imported at its first use."""
    allowed = {"torch", "numpy", "gnn_spmm_plugin", "__future__"}
    import sys

    core = (
        "_config",
        "_native",
        "graph",
        "features",
        "kernels",
        "schedule",
        "pcsr",
        "tiles",
        "dense",
        "vendor",
        "candidate",
        "decider",
        "reference",
        "plan",
        "functional",
        "cache",
    )
    for name in core:
        for path in _modules()[name]:
            for node in ast.parse(path.read_text()).body:
                modules = []
                if isinstance(node, ast.Import):
                    modules = [a.name.split(".")[0] for a in node.names]
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    modules = [(node.module or "").split(".")[0]]
                for module in modules:
                    assert module in allowed or module in sys.stdlib_module_names, f"{path.name} imports {module}"


def test_importing_touches_nothing() -> None:
    """No CUDA context, no PyG, no DGL, no patch; and no message."""
    import subprocess
    import sys

    code = (
        "import sys, gnn_spmm_plugin, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not {'torch_geometric', 'dgl', 'scipy', 'sklearn'} & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_five_environment_variables() -> None:
    from gnn_spmm_plugin import _config

    assert set(_config.ENVIRONMENT) == {"GSP_KERNEL", "GSP_MODE", "GSP_LOG", "GSP_DISABLE", "GSP_REQUIRE"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("GSP_"):
                assert node.value in _config.ENVIRONMENT or " " in node.value, (path.name, node.value)
