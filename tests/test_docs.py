"""What the documentation shows runs, and what it refers to is there.

A page's Python blocks run one after the other, as a reader would type them. Two HTML comments steer that, each on its
own line before a block: ``<!-- needs: gpu, dgl -->`` says that the block runs only where these are (minutes: with
``-m slow``), and ``<!-- setup`` ... ``-->`` holds code that runs first and is not shown.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gnn_spmm_plugin as gsp
from gnn_spmm_plugin.cli import parse

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(p for p in DOCS.rglob("*.md") if "_build" not in p.parts)
ALL = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
#: What a block may need, a word that such a block has, and how its test is marked.
NEEDS = {"gpu": ("cuda", pytest.mark.gpu), "dgl": ("dgl", pytest.mark.dgl), "minutes": ("compile", pytest.mark.slow)}
BLOCK = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->$|^(?:<!-- needs: (?P<needs>[^\n]*?) -->\n)?^```python\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _blocks(page: Path) -> list[tuple[str, str]]:
    """(what it needs, code) of each block of a page; hidden code needs nothing."""
    found = []
    for m in BLOCK.finditer(_text(page)):
        line = _text(page)[: m.start()].count("\n") + 1
        # so that an error names the line of the page
        first = line + (1 if m["setup"] is not None or not m["needs"] else 2)
        found.append((m["needs"] or "", "\n" * (first - 1) + (m["setup"] or m["code"] or "")))
    return found


def _needed(needs: str) -> set[str]:
    return {n.strip() for n in needs.split(",") if n.strip()}


def _cases() -> Iterator[Any]:
    for page in PAGES:
        for needs in dict.fromkeys(needs for needs, _ in _blocks(page)):
            marks = [NEEDS[n][1] for n in sorted(_needed(needs)) if n in NEEDS]
            yield pytest.param(page, needs, marks=marks, id=f"{_name(page)} {needs}".strip())


@pytest.fixture
def clean() -> Iterator[None]:
    """What a page turns on is off afterwards."""
    yield
    for module in ("pyg", "dgl"):
        integration = sys.modules.get(f"gnn_spmm_plugin.integrations.{module}")
        while integration is not None and integration._patches:
            integration._patches[-1].undo()
    torch.use_deterministic_algorithms(False)
    logging.getLogger("gnn_spmm_plugin").setLevel(logging.NOTSET)
    gsp.clear_cache()


@pytest.mark.pyg
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("page", "there"), list(_cases()))
def test_its_blocks_run(
    page: Path,
    there: str,
    clean: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    scope: dict[str, Any] = {"__name__": "__main__"}
    for needs, code in _blocks(page):
        if _needed(needs) <= _needed(there):
            exec(compile(code, _name(page), "exec"), scope)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_what_its_blocks_need_is_true(page: Path) -> None:
    text = _text(page)
    assert len(re.findall(r"^\s*```python", text, re.MULTILINE)) == len(
        [1 for m in BLOCK.finditer(text) if m["code"] is not None]
    ), "a block is indented, or has no end"
    prose = FENCED.sub("", text)
    assert not re.search(r"^    (import |from \w+ import |class \w+\(|def )", prose, re.MULTILINE), "use a fence"
    for needs, code in _blocks(page):
        for need in _needed(needs):
            assert need in NEEDS, f"{need!r} is none of {', '.join(NEEDS)}"
            assert NEEDS[need][0] in code, f"a block needs {need}, but does not mention {NEEDS[need][0]!r}"


def _slugs(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", _text(page)), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", ALL, ids=_name)
def test_its_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"`[^`\n]*`", "", FENCED.sub("", _text(page)))
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = page if not path else (page.parent / path).resolve()
        assert there.exists(), f"{target}: there is no {path}"
        assert DOCS not in page.parents or DOCS in there.parents or there == page, f"{target} leaves the documentation"
        assert not anchor or anchor in _slugs(there), f"{target}: there is no such heading"


@pytest.mark.parametrize("page", ALL, ids=_name)
def test_files_that_it_names_exist(page: Path) -> None:
    text = _text(page)
    for name in re.findall(
        r"(?<![\w/.-])(?:docs/benchmarks/|benchmarks/)?(\w+_(?:h200|cpu)\.csv|imbalance\.csv)", text
    ):
        assert (DOCS / "benchmarks" / name).exists(), name
    for name in re.findall(r"(?<![\w/.-])((?:tests|examples|docs|cuda_src|gnn_spmm_plugin)/[\w/]+\.\w+)", text):
        example = page.name == "adding_a_kernel.md" and "warp" in name  # the kernel that it adds
        assert example or (ROOT / name).exists(), name
    for name in re.findall(r"python -m (gnn_spmm_plugin\.bench\.\w+)", text):
        assert importlib.util.find_spec(name) is not None, name


@pytest.mark.parametrize("page", ALL, ids=_name)
def test_commands_that_it_shows_are_ones(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def complain(parser: argparse.ArgumentParser, message: str) -> None:
        raise AssertionError(f"{line}: {message}")

    monkeypatch.setattr(argparse.ArgumentParser, "error", complain)
    for line in re.findall(r"^(?: {4}|\$ )?(gnn-spmm (?!COMMAND).*)$", _text(page), re.MULTILINE):
        parse(shlex.split(line.split("  #")[0].replace("FILE...", "FILE"))[1:])


def test_everything_that_was_measured_says_how() -> None:
    text = _text(DOCS / "reproducing.md")
    for path in (*sorted((DOCS / "benchmarks").iterdir()), *sorted((DOCS / "figures").iterdir())):
        assert f"`{path.name}`" in text, f"{path.name} is not in reproducing.md"


def test_every_public_name_is_in_the_reference() -> None:
    from gnn_spmm_plugin.integrations import dgl, pyg

    text = _text(DOCS / "api.md")
    documented = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)", text, re.MULTILINE))
    modules = {"gnn_spmm_plugin": gsp, **{f"gnn_spmm_plugin.{m}": getattr(gsp, m) for m in ("nn", "distributed")}}
    names = {f"{prefix}.{name}" for prefix, module in modules.items() for name in module.__all__} - set(modules)
    for module in (pyg, dgl):
        names |= {f"{module.__name__}.{n}" for n in module.__all__ if not hasattr(gsp, n)}
    assert names <= documented, names - documented
    for name in documented:  # and nothing that is gone
        where, _, what = name.rpartition(".")
        assert hasattr(importlib.import_module(where), what), name


def test_every_page_is_in_the_index() -> None:
    index = _text(DOCS / "index.md")
    for page in PAGES:
        name = page.relative_to(DOCS).with_suffix("").as_posix()
        assert name == "index" or re.search(rf"^{name}$", index, re.MULTILINE), f"{name} is in no toctree"


def test_diagrams_are_what_their_script_draws(tmp_path: Path) -> None:
    subprocess.run([sys.executable, DOCS / "diagrams.py", tmp_path], check=True)
    drawn = sorted(tmp_path.iterdir())
    assert drawn
    for path in drawn:
        assert path.read_text() == (DOCS / "figures" / path.name).read_text(), f"run docs/diagrams.py: {path.name}"
    assert {p.name for p in drawn} == {p.name for p in (DOCS / "figures").glob("*.svg")}
