"""`import_dgl`: PyPI's DGL under a torch that it was not built for.

What stands in the way is one submodule. ``dgl.graphbolt`` loads a library named after the exact version of torch, and
a module that torchdata no longer has; the rest of DGL imports it, but uses it only inside functions that are about
it. So where the real one cannot load, a stub is served under its name, by a finder that is there while DGL is imported.
Nothing in site-packages is touched, and a DGL that imports by itself is left alone.

Processes started anew have no finder. Two things reach them before anything of DGL does: what a `Process` hands down
(`_hand_down`), and the first bytes of a pickled graph (`_reduce`).
"""

from __future__ import annotations

import copyreg
import importlib
import importlib.abc
import importlib.util
import multiprocessing.process
import os
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

GRAPHBOLT = "dgl.graphbolt"
#: What ``import dgl`` imports and DGL 2.1.0 does not declare; then what it does, for ``pip install --no-deps``.
UNDECLARED = ("packaging", "pandas")
NEEDED = (*UNDECLARED, "numpy", "scipy", "networkx", "requests", "tqdm", "psutil")


class Stub(types.ModuleType):
    """Stands in for ``dgl.graphbolt``; says so as soon as something of it is wanted.

    Attributes:
        reason: why the real one does not load.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.reason = reason

    def __getattr__(self, item: str) -> Any:
        if item.startswith("__"):
            raise AttributeError(item)
        raise ImportError(
            f"{self.__name__}.{item} is not available: {self.reason}. dgl, dgl.nn, dgl.ops and dgl.dataloading work; "
            "for GraphBolt install a DGL that was built for this torch"
        )


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stub of ``dgl.graphbolt``, where the real one cannot load; steps aside when it was asked once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """The stub's spec, or None: then the real one is found."""
        if fullname != GRAPHBOLT:
            return None
        self.remove()
        self.reason = _reason(Path(next(iter(path or ["."]))))
        return None if self.reason is None else ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """The stub."""
        assert self.reason is not None
        return Stub(spec.name, self.reason)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: the stub is all there is."""

    def install(self) -> None:
        """Asks to be asked first."""
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """No longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def _reason(root: Path) -> str | None:
    """Why ``dgl.graphbolt`` of the DGL in `root` cannot load under this torch, or None."""
    import torch

    folder = root / "graphbolt"
    if not folder.is_dir():
        return None
    version = torch.__version__.split("+", 1)[0]
    names = {"darwin": f"libgraphbolt_pytorch_{version}.dylib", "win32": f"graphbolt_pytorch_{version}.dll"}
    name = names.get(sys.platform, f"libgraphbolt_pytorch_{version}.so")
    if not (folder / name).exists():
        return f"this DGL has no {name}"
    base = folder / "base.py"
    if (
        base.exists()
        and "torchdata.datapipes" in base.read_text(encoding="utf-8")
        and not _found("torchdata.datapipes")
    ):
        return "it needs torchdata.datapipes, which torchdata 0.10 and newer have not; pip install 'torchdata<0.10'"
    return None


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of its parent
        return False


def import_dgl() -> Any:
    """Imports DGL, also where PyPI's wheel does not import under the installed torch, and returns the module.

    Afterwards ``import dgl`` gives the same module, here and in processes that are started from here. Where the library
    of ``dgl.graphbolt`` is not there for this torch, that one submodule becomes a stub, which raises ImportError when
    something of it is used. A graph that is pickled then imports DGL through this package where it is loaded.

    Returns:
        the module ``dgl``.

    Raises:
        ImportError: DGL, or a package that it needs, is not installed; the message names all that are missing.
    """
    dgl = sys.modules.get("dgl")
    if dgl is None or not hasattr(dgl, "DGLGraph"):
        dgl = _import()
    if isinstance(sys.modules.get(GRAPHBOLT), Stub):
        _reach_other_processes()
    return dgl


def _import() -> Any:
    if not _found("dgl"):
        raise ImportError(
            "DGL is not installed; install it with `pip install 'gnn-spmm-plugin[dgl]'` or "
            "`pip install dgl==2.1.0 packaging pandas`"
        )
    missing = [name for name in NEEDED if not _found(name)]
    if missing:
        raise ImportError(
            f"DGL needs packages that are not installed: {', '.join(missing)} ({' and '.join(UNDECLARED)} are imported "
            f"but not declared by DGL 2.1.0); install them with `pip install {' '.join(missing)}`"
        )
    os.environ.setdefault("DGLBACKEND", "pytorch")  # or the first import writes a file into the user's home
    finder = next((f for f in sys.meta_path if isinstance(f, Finder)), None) or Finder()
    if finder not in sys.meta_path:
        finder.install()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torchdata.*")
            return importlib.import_module("dgl")
    finally:
        finder.remove()


# ---------------------------------------------------------------------- processes started anew


def expect_dgl() -> None:
    """Makes a later ``import dgl`` of this process work as `import_dgl` would; imports nothing yet."""
    if "dgl" not in sys.modules and not any(isinstance(finder, Finder) for finder in sys.meta_path):
        Finder().install()


class _Expects:
    """Unpickled, it has called `expect_dgl`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _expects, ()


def _expects() -> _Expects:
    expect_dgl()
    return _Expects()


def _reach_other_processes() -> None:
    _hand_down()
    import dgl.multiprocessing
    from dgl.heterograph import DGLBlock, DGLGraph
    from dgl.heterograph_index import HeteroGraphIndex

    for cls in (DGLGraph, DGLBlock, HeteroGraphIndex, dgl.multiprocessing.Process):
        # Someone else's reducer is left alone.
        copyreg.dispatch_table.setdefault(cls, _reduce)
    forking = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    host = forking.get(HeteroGraphIndex)
    if host is not None and host is not _reduce_forking:
        _HOST["forking"] = host
        ForkingPickler.register(HeteroGraphIndex, _reduce_forking)


def _hand_down() -> None:
    """Puts `_Expects` where every process that is spawned from here (and from there) unpickles it first.

    A `Process` is pickled with its parent's ``_config``, before its target and its arguments.
    """
    config: dict[str, Any] = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    config.setdefault("gnn_spmm_plugin", _Expects())


_HOST: dict[str, Callable[[Any], Any]] = {}


def _reduce(obj: Any) -> tuple[Any, ...]:
    """An object of DGL, so that loading it calls `_call` before anything of DGL is looked up."""
    function, args, *rest = obj.__reduce_ex__(4)
    return (_call, (_name(function), *map(_name, args)), *rest)


def _reduce_forking(obj: Any) -> tuple[Any, ...]:
    function, args = _HOST["forking"](obj)
    return _call, (_name(function), *args)


class _Name(tuple[str, str]):
    """A class or function of DGL: its module and its name there."""


def _name(value: Any) -> Any:
    of_dgl = str(getattr(value, "__module__", "")).partition(".")[0] == "dgl"
    named = of_dgl and isinstance(value, (type, types.FunctionType))
    return _Name((value.__module__, value.__qualname__)) if named else value


def _call(*parts: Any) -> Any:
    import_dgl()
    values = [getattr(importlib.import_module(p[0]), p[1]) if isinstance(p, _Name) else p for p in parts]
    return values[0](*values[1:])


__all__ = ["import_dgl"]
