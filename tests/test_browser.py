"""The page of `gnn-spmm report` as people see it."""

from __future__ import annotations

import struct
from pathlib import Path

import page_result
import pytest
from browser import Browser

from gnn_spmm_plugin.page import sections

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    return Browser(tmp_path_factory.mktemp("browser"))


@pytest.fixture(scope="module", params=["plain", "hostile"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = page_result.HOSTILE if request.param == "hostile" else "model.encoder.convs.0"
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(sections.render(page_result.result(name)), encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [1200, 390])
def test_layout(browser: Browser, page: Path, width: int) -> None:
    seen = browser.look(page, width)
    assert seen["width"] == width and seen["content"] <= width  # nothing to scroll sideways to
    assert seen["overflowing"] == [] and seen["outside"] == []
    sizes = seen["sections"]
    assert sum(tag == "SECTION" for tag, *_ in sizes) == 8 and sum(tag == "svg" for tag, *_ in sizes) == 6
    assert all(across > 40 and down > 30 for _, across, down in sizes), sizes
    assert seen["images"] == [80, 80]  # both matrices were decoded


def test_nothing_is_fetched_and_nothing_runs(browser: Browser, page: Path) -> None:
    seen = browser.look(page, 1200)
    assert seen["fetched"] == [] and seen["scripts"] == 0
    assert seen["title"].startswith("gnn-spmm report: ")
    assert browser.console(page) == []


def _luminance(colour: str) -> float:
    parts = [int(p) / 255 for p in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    r, g, b = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_light_and_dark(browser: Browser, page: Path) -> None:
    light = browser.look(page, 1200, "--blink-settings=preferredColorScheme=1")
    dark = browser.look(page, 1200, "--blink-settings=preferredColorScheme=0")
    assert _luminance(light["card"]) > 0.9 and _luminance(dark["card"]) < 0.05
    for seen in (light, dark):
        low, high = sorted([_luminance(seen["card"]), _luminance(seen["ink"])])
        assert (high + 0.05) / (low + 0.05) > 7  # WCAG's AAA


def test_a_picture_and_print(browser: Browser, page: Path, tmp_path: Path) -> None:
    browser.run(f"--screenshot={tmp_path / 'page.png'}", "--window-size=1200,1500", page.as_uri())
    png = (tmp_path / "page.png").read_bytes()
    assert struct.unpack(">II", png[16:24]) == (1200, 1500) and len(png) > 50_000
    browser.run(f"--print-to-pdf={tmp_path / 'page.pdf'}", page.as_uri())
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


def test_the_eye_sees(browser: Browser, tmp_path: Path) -> None:
    """What is looked for above is found where it is."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!doctype html><title>x</title><body style='margin:0'><img src='http://127.0.0.1:9/x.png'>"
        "<div style='width:100px;white-space:nowrap'>much too long for so little room, this line of words</div>"
        "<div style='width:1500px'>wide</div><svg width=50 height=20><text x=0 y=15>much too long</text></svg>"
        "<script>console.error('said')</script>"
    )
    seen = browser.look(bad, 1200)
    assert seen["fetched"] == ["http://127.0.0.1:9/x.png"] and seen["content"] == 1500 and seen["scripts"] == 1
    assert any("much too long for" in text for text in seen["overflowing"]) and seen["outside"] == ["much too long"]
    assert any("said" in line for line in browser.console(bad))
