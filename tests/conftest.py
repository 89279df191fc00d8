"""Devices, markers and what may be skipped.

``GSP_REQUIRE=gpu,pyg,dgl,browser`` turns the skips for what is named there into failures, so that a machine that has a
GPU cannot pass without using it.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from browser import BROWSERS
from hypothesis import HealthCheck, settings

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin import _native

settings.register_profile(
    "gsp",
    deadline=None,  # the first call of an operator loads and warms things
    print_blob=True,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
settings.load_profile("gsp")

_NO_DECIDERS = Path(__file__).parent / "data" / "none"
_MODULES = {"pyg": "torch_geometric", "dgl": "dgl"}


def _missing(marker: str) -> str | None:
    """Why tests with this marker cannot run here, or None."""
    if marker == "gpu":
        if not torch.cuda.is_available():
            return "torch sees no GPU"
        return _native.cuda_error
    if marker == "browser":
        return None if any(map(shutil.which, BROWSERS)) else f"none of {', '.join(BROWSERS)} is on the PATH"
    try:
        if marker == "dgl":
            getattr(gsp, "import_dgl", lambda: importlib.import_module("dgl"))()
        else:
            importlib.import_module(_MODULES[marker])
    except Exception as e:  # DGL raises all sorts of things under a torch it does not know
        return f"{_MODULES[marker]} does not import: {e}"
    return None


_reasons: dict[str, str | None] = {}


def pytest_runtest_setup(item: pytest.Item) -> None:
    required = {name.strip() for name in os.environ.get("GSP_REQUIRE", "").lower().split(",")}
    for marker in ("gpu", "pyg", "dgl", "browser"):
        if item.get_closest_marker(marker) is None:
            continue
        if marker not in _reasons:
            _reasons[marker] = _missing(marker)
        if _reasons[marker] is not None:
            if marker in required:
                pytest.fail(f"GSP_REQUIRE names {marker}, but {_reasons[marker]}", pytrace=False)
            pytest.skip(f"{marker}: {_reasons[marker]}")


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each test that takes it runs on the CPU, and, marked gpu, on the GPU."""
    return str(request.param)


@pytest.fixture(autouse=True)
def by_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made by the rules, whatever decider ships for the GPU at hand; test_decider.py has its own."""
    monkeypatch.setattr(importlib.import_module("gnn_spmm_plugin.policy"), "FOLDER", _NO_DECIDERS)


@pytest.fixture
def fresh_cache() -> Iterator[None]:
    """No implicit graphs before and after."""
    gsp.clear_cache()
    yield
    gsp.clear_cache()


@pytest.fixture
def no_gc() -> Iterator[None]:
    """What goes in this test goes by reference counting alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
