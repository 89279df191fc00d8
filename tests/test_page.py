"""The page of `gnn-spmm report`: its pieces, what it says, and names that would like to be markup."""

from __future__ import annotations

import json
import re
import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import page_result
import pytest
import torch
from page_result import layer, run, seen, trials

from gnn_spmm_plugin import Graph, data
from gnn_spmm_plugin.cli import main
from gnn_spmm_plugin.distributed import partition_cost
from gnn_spmm_plugin.distributed.blocks import ORDERS
from gnn_spmm_plugin.page import charts, graphs, markup, sections
from gnn_spmm_plugin.page.verdict import judge


class Reader(HTMLParser):
    """Tags, attributes and text of a page; complains where tags are not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in ("meta", "link", "img", "br") and tag not in ("rect", "circle", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "circle", "path"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_hostile_names_stay_text() -> None:
    page = sections.render(page_result.result())
    read = Reader(page)
    assert "script" not in read.tags and read.text.count("document.title='owned'") >= 8
    assert not any(name.startswith("on") for _, name, _ in read.attributes)
    assert [v for t, n, v in read.attributes if n == "src"] == [
        v for t, n, v in read.attributes if t == "img" and str(v).startswith("data:image/png;base64,")
    ]
    assert "\x07" not in page and "\\x07" in read.text


def test_nothing_is_fetched() -> None:
    page = sections.render(page_result.result("a/model.py"))
    read = Reader(page)
    links = [value for _, name, value in read.attributes if name in ("href", "src", "action", "data", "srcset")]
    assert links and all(str(value).startswith("data:") for value in links)
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style and "@import" not in style and "://" not in page
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in read.attributes


def test_all_sections_are_there() -> None:
    result = page_result.result("model.py")
    titles = re.findall("<h2>(.*?)</h2>", sections.render(result))
    assert titles == [
        "Result",
        "Where a step&#x27;s time goes, as it is",
        "Layers",
        "Graph 1: structure",
        "Graph 1: plan, and why",
        "Graph 1: products",
        "Graph 1: shared between ranks",
        "More graphs",
    ]
    assert sections.render(json.loads(json.dumps(result))) == sections.render(result)  # --json has all of it


def test_sections_without_their_numbers() -> None:
    """What could not be measured is left out, or said."""
    result = page_result.result("model.py")
    for row in result["verdict"]["layers"]:
        row |= dict.fromkeys(("before_ms", "after_ms", "share", "graph", "before_bytes", "after_bytes"))
    result["verdict"] |= {"shares": None, "bound": None, "gain": None, "peak_bytes": {"before": None, "after": None}}
    result["graphs"] = []
    read = Reader(sections.render(result))
    assert "Where a step's" not in read.text and "not measured" in read.text
    result["verdict"] = None
    result["graphs"] = [graphs.describe("one", torch.zeros(2, 0, dtype=torch.int64), (3, 3), graphs.Asked([4]))]
    assert "3 rows, 0 edges" in Reader(sections.render(result)).text


def test_table_alignment_and_markup() -> None:
    made = markup.table(["name", "n", "text"], [("a<b", "1 ms", "x"), ("c", "-", markup.badge("<i>", "good"))])
    assert '<td class="n">1 ms</td>' in made and '<td class="n">-</td>' in made and "a&lt;b" in made
    assert '<td><span class="badge good">&lt;i&gt;</span></td>' in made
    assert markup.section("t", "", "") == "<section><h2>t</h2></section>"


# ---------------------------------------------------------------------- pictures


def test_points_are_where_they_belong() -> None:
    svg = charts.points([("s", "after", [(1, 1), (10, 100), (100, 10000), (0, 5)])], "x", "y", "label")
    circles = [(float(x), float(y)) for x, y in re.findall('cx="([0-9.]+)" cy="([0-9.]+)"', svg)]
    assert len(circles) == 3  # 0 has no logarithm
    (x1, y1), (x2, y2), (x3, y3) = circles
    assert abs((x2 - x1) - (x3 - x2)) < 0.2 and abs((y1 - y2) - (y2 - y3)) < 0.2 and y1 > y2 > y3
    assert all(58 <= x <= 468 and 30 <= y <= 256 for x, y in circles)
    assert charts.points([("s", "after", [(0, 1)])], "x", "y", "label") == ""


@pytest.mark.parametrize("values", [[5.0], [2.2, 2.9], [1e-3, 1e9], [1, 1e30], [7e6, 7.1e6]])
def test_axes_have_ticks(values: list[float]) -> None:
    svg = charts.points([("s", "after", [(v, v) for v in values])], "x", "y", "label")
    ticks = svg.count('class="grid"')
    assert 4 <= ticks <= 24


def test_pairs_and_shares() -> None:
    svg = charts.pairs([("a" * 99, 4.0, 2.0), ("b", None, 1500.0)], "ms", "label")
    widths = [float(w) for w in re.findall('<rect x="0" y="[0-9.]+" width="([0-9.]+)"', svg)]
    assert len(widths) == 3 and widths[-1] == max(widths) == 370  # the others are a pixel, to be seen at all
    assert widths[:2] == [1.0, 1.0]
    assert "not measured" in svg and "1,500 ms" in svg and "a" * 99 not in svg
    assert charts.pairs([("a", None, None)], "ms", "label") == "" == charts.shares([("a", "after", 0.0)], "label")
    bar = charts.shares([("a", "after", 3.0), ("b", "before", 1.0)], "label")
    assert "75%" in bar and "25%" in bar


def test_the_matrix_is_a_png() -> None:
    counts = [[0, 5], [1, 0], [0, 100]]
    source = charts.matrix(counts, "label")
    import base64

    png = base64.b64decode(source.partition("base64,")[2].partition('"')[0])
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, body = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert struct.unpack(">I", png[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + body)
        chunks[kind] = body
        at += 12 + length
    assert struct.unpack(">II", chunks[b"IHDR"][:8]) == (2, 3)
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(3, 9)
    alpha = lines[:, 1:].reshape(3, 2, 4)[..., 3]
    assert ((alpha > 0) == (np.array(counts) > 0)).all() and alpha.max() == alpha[2, 1] == 255
    assert charts.matrix([], "l") == "" == charts.matrix([[0]], "l")


# ---------------------------------------------------------------------- graphs


def test_degrees() -> None:
    assert graphs.degree_points(torch.tensor([0, 1, 1, 2, 5])) == [(1, 4), (2, 2), (3, 1), (4, 1), (5, 1)]
    assert graphs.degree_points(torch.tensor([0, 0])) == [] == graphs.degree_points(torch.tensor([], dtype=torch.int64))
    many = graphs.degree_points(torch.arange(5000))
    assert len(many) < 62 and many[0] == (1, 4999) and many[-1] == (4999, 1)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_describe(reduce: str) -> None:
    """Numbers of a graph whose sources and destinations are not the same nodes."""
    edge_index = torch.stack([torch.randint(30, (200,)), torch.randint(20, (200,))])
    g = graphs.describe("g", edge_index, (30, 20), graphs.Asked([3, 8], reduce=reduce, budget_ms=1))
    assert (g["num_src"], g["num_dst"], g["num_edges"]) == (30, 20, 200)
    assert g["picture"]["after"] is None and "different nodes" in g["picture"]["note"]
    assert sum(map(sum, g["picture"]["before"])) == 200
    for p in g["products"]:
        assert p["note"] == "" and p["before_ms"] > 0 and p["after_ms"] > 0
        assert p["gathered_bytes"] == 200 * p["width"] * 4
        assert p["before_bytes"] >= p["gathered_bytes"] > p["after_bytes"]  # the messages; and no messages
    json.dumps(g)


def test_sharing_is_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `partition_cost` says, for each number of ranks and order; not where an edge joins nodes of two kinds."""
    index = torch.randint(40, (2, 300))
    g = graphs.describe("g", index, (40, 40), graphs.Asked([8, 16], torch.float64, budget_ms=1, parts=[2, 5]))
    assert [(p["parts"], p["order"]) for p in g["partition"]] == [(n, o) for n in (2, 5) for o in ORDERS]
    for p in g["partition"]:
        ranks = partition_cost(Graph.from_edge_index(index, 40), p["parts"], p["order"], [8, 16], torch.float64)
        assert p["step_bytes"] == sum(r["step_bytes"] for r in ranks) > 0
    assert graphs.describe("g", index, (40, 41), graphs.Asked([8], budget_ms=1, parts=[2]))["partition"] == []
    page = tmp_path / "page.html"
    assert (
        main(
            [
                "report",
                "--graph",
                "cora",
                "--device",
                "cpu",
                "--width",
                "8",
                "--html",
                str(page),
                "--partition",
                "2",
                "3",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "moved in a step" in text and text.count("community") >= 2
    read = Reader(page.read_text())
    assert "Graph: shared between ranks" in read.text and read.text.count("hash") >= 2
    for wrong in ("0", "-1", "two", "100000"):
        with pytest.raises(SystemExit) as e:
            main(["report", "--graph", "cora", "--partition", wrong])
        assert e.value.code == 2


@pytest.mark.parametrize("sizes", [(0, 0), (3, 3)])
def test_sharing_of_no_edges(sizes: tuple[int, int]) -> None:
    g = graphs.describe("g", torch.zeros(2, 0, dtype=torch.int64), sizes, graphs.Asked([8], budget_ms=1, parts=[2]))
    assert all(p["step_bytes"] == 0 and p["cut"] == 0 for p in g["partition"]) and len(g["partition"]) == len(ORDERS)


def test_the_picture_in_another_order() -> None:
    d = data.load("cora")
    picture = graphs.describe("cora", d.edge_index, (2708, 2708), graphs.Asked([4], budget_ms=1))["picture"]
    before, after = np.array(picture["before"]), np.array(picture["after"])
    assert before.sum() == after.sum() == 10556 and picture["schedule"] == "community"
    near = np.abs(np.subtract.outer(np.arange(80), np.arange(80))) <= 4
    assert after[near].sum() > 2 * before[near].sum()  # communities come together


def test_wrong_results_get_no_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    right = graphs.spmm
    monkeypatch.setattr(graphs, "spmm", lambda *a, **k: right(*a, **k) + 1)
    argv = ["report", "--graph", "cora", "--device", "cpu", "--width", "4", "--html", str(tmp_path / "p.html")]
    assert main([*argv, "--json", str(tmp_path / "p.json")]) == 1
    result = json.loads((tmp_path / "p.json").read_text())
    assert result["graphs"][0]["products"][0]["before_ms"] is None and "wrong" in result["wrong"][0]
    assert "results differ" in capsys.readouterr().err and "wrong: results differ" in (tmp_path / "p.html").read_text()


def test_messages_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_free_bytes", lambda device: 1000)
    g = graphs.describe("g", torch.randint(30, (2, 200)), (30, 30), graphs.Asked([8], budget_ms=1))
    (p,) = g["products"]
    assert p["before_ms"] is None and p["after_ms"] > 0 and "would not fit" in p["note"]


# ---------------------------------------------------------------------- verdicts


def verdict(before_ms: float, after_ms: float | None, rows: list[dict[str, Any]], new: list[dict[str, Any]]) -> Any:
    return judge(trials(run(rows, before_ms), run(new, after_ms)))


def test_amdahl() -> None:
    """Ten of 100 ms in the layer, a quarter of that in dense products."""
    v = verdict(100.0, 97.0, [layer("c", 4.0, 6.0)], [layer("c", 1.0, 2.0, report=seen("fused"))])
    assert v["shares"] == pytest.approx({"aggregation": 0.075, "dense": 0.025, "outside": 0.9})
    assert v["bound"] == pytest.approx(1 / 0.925) and v["gain"] == pytest.approx(100 / 97)
    assert v["headline"].startswith("Little can be gained. Message passing takes 8% of a step")
    assert any("outside of message passing layers" in line for line in v["advice"])
    v = verdict(1000.0, 999.0, [layer("c", 4.0, 6.0)], [layer("c", 1.0, 2.0, report=seen("fused"))])
    assert v["headline"].startswith("Nothing here will help.") and "1.01 times as fast, at most" in v["headline"]


def test_it_helps() -> None:
    v = verdict(12.0, 6.0, [layer("c", 4.0, 6.0)], [layer("c", 1.0, 2.0, report=seen("fused"))])
    assert v["headline"].startswith("It helps: a step is 2.00 times as fast")
    assert v["advice"][0].startswith("Call gsp.accelerate(model)")


def test_nothing_fused() -> None:
    why = seen("not", ("cat needs the message of each edge",), ("split the linear layer",))
    v = verdict(12.0, 12.1, [layer("c", 4.0, 6.0)], [layer("c", 4.0, 6.0, report=why)])
    assert v["headline"].startswith("None of the layers is fused")
    assert any("cat needs the message" in line and "Split the linear layer." in line for line in v["advice"])


def test_evaluations_and_equal_names_count() -> None:
    rows = [layer("c", 1.0, 2.0, training_calls=2, evaluating_calls=3), layer("c", 1.0, None, training_calls=1)]
    v = verdict(20.0, 20.0, rows, rows)
    assert [(r["layer"], r["before_ms"]) for r in v["layers"]] == [("c", 9.0), ("c #2", 1.0)]


def test_what_cannot_be_timed() -> None:
    broken = layer("c", 1.0, 1.0) | {"forward_ms": None, "error": "ValueError: no"}
    v = verdict(20.0, 10.0, [broken], [broken])
    assert v["shares"] is None and v["bound"] is None and "no bound" in v["headline"]
    v = verdict(5.0, 5.0, [layer("c", 6.0, 6.0)], [layer("c", 6.0, 6.0)])  # longer alone than the whole step
    assert v["shares"]["aggregation"] == pytest.approx(0.75) and v["shares"]["outside"] == 0
    assert judge(trials(run([layer("c", 1.0, 1.0)], None), run([layer("c", 1.0, 1.0)], None)))["gain"] is None


def test_doubtful_numbers_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0, 1.0, 1.0))
    v = verdict(12.0, 1.0, [layer("c", 1.0, 2.0)], [layer("c", 0.1, 0.1, report=seen("fused"))])
    assert any("than the bound allows" in n for n in v["notes"]) and any("busy (load 1000" in n for n in v["notes"])


def test_report_of_a_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file whose name would like to be markup."""
    file = tmp_path / "<script>alert(1)<script>.csv"
    file.write_text("0,1\n1,2\n2,0\n")
    page = tmp_path / "page.html"
    assert main(["report", "--graph", str(file), "--device", "cpu", "--html", str(page), "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)  # nothing else is printed
    assert [p["width"] for p in result["graphs"][0]["plans"]] == [16, 64, 256] and result["copy_bytes_per_s"] > 1e8
    read = Reader(page.read_text())
    assert "script" not in read.tags and "<script>alert(1)" in read.text
