"""Draws the diagrams of the documentation: `python docs/diagrams.py [FOLDER]`, default docs/figures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

INK, GREY, PALE = "#1b2a3a", "#8794a3", "#eef1f5"
BLUE, ORANGE, GREEN, RED, VIOLET = "#cfe0f7", "#fbdcb9", "#cfead0", "#f6cccc", "#e0d3f0"
COLOURS = (BLUE, ORANGE, GREEN, VIOLET, RED)


class Svg:
    """A picture that is put together line by line."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="6" fill="white"/>',
        ]

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, bold: bool = False) -> None:
        """Writes a line; (x, y) is on its baseline."""
        weight = ' font-weight="bold"' if bold else ""
        self.lines.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"{weight}>{escape(text)}</text>'
        )

    def box(self, x: float, y: float, w: float, h: float, fill: str = PALE, text: str = "", *, size: int = 11) -> None:
        """Draws a rectangle with lines of text in its middle, separated by newlines."""
        self.lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="{fill}" stroke="{GREY}"/>'
        )
        parts = text.split("\n") if text else []
        for i, part in enumerate(parts):
            middle = y + h / 2 + (i - (len(parts) - 1) / 2) * (size + 3) + size * 0.36
            self.text(x + w / 2, middle, part, anchor="middle", size=size)

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draws an arrow."""
        self.lines.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}" marker-end="url(#head)"/>'
        )

    def cells(self, x: float, y: float, side: float, fills: list[str], texts: list[str] | None = None) -> None:
        """Draws a row of squares."""
        for i, fill in enumerate(fills):
            self.box(x + i * side, y, side, side, fill, texts[i] if texts else "", size=10)

    def dot(self, x: float, y: float, fill: str, text: str) -> None:
        """Draws a labelled point."""
        self.lines.append(f'<circle cx="{x:g}" cy="{y:g}" r="7" fill="{fill}" stroke="{INK}"/>')
        self.text(x + 11, y + 4, text, size=11)

    def __str__(self) -> str:
        return "\n".join([*self.lines, "</svg>", ""])


def rows_cold() -> Svg:
    """The kernel without a plan: `row_sweep`."""
    s = Svg(720, 300, "Rows straight from the CSR arrays")
    s.text(16, 22, "a block of 256 threads: 8 warps", bold=True)
    lengths = (3, 5, 2, 7)
    for i, length in enumerate(lengths):
        y = 40 + i * 34
        s.text(16, y + 16, f"row {i}")
        s.cells(66, y, 22, [COLOURS[i]] * length, [f"e{j}" for j in range(length)])
        s.arrow(66 + 22 * length + 6, y + 11, 318, y + 11)
        s.box(326, y, 168, 22, COLOURS[i], f"group {i}: 8 lanes of 16 bytes")
        s.arrow(500, y + 11, 540, y + 11)
        s.box(546, y, 158, 22, PALE, f"out[{i}], columns 0 to 31")
    s.text(
        16, 196, "a long row: once the short ones are done, all 32 groups of the block share it, each every 32nd edge"
    )
    s.text(16, 216, "row 4")
    s.cells(66, 206, 12, [BLUE, ORANGE, GREEN, VIOLET] * 10)
    for k in range(4):
        s.arrow(120 + k * 108, 222, 306, 252)
    s.box(186, 254, 250, 24, PALE, "folded within a warp, then warp by warp")
    s.arrow(440, 266, 540, 266)
    s.box(546, 254, 158, 24, PALE, "out[4]")
    return s


def rows_items() -> Svg:
    """A warm plan: items, pieces and their merge."""
    s = Svg(760, 320, "A warm plan lists the rows; long ones in pieces")
    s.text(16, 22, "rows", bold=True)
    s.text(246, 22, "items {row, begin, end, slot}", bold=True)
    s.text(500, 22, "groups of lanes, in this order", bold=True)
    rows = [("row 0", 4), ("row 1", 20), ("row 2", 2), ("row 3", 6)]
    for i, (name, length) in enumerate(rows):
        y = 40 + i * 40
        s.text(16, y + 14, name)
        s.cells(62, y, 8, [COLOURS[i]] * length)
    s.text(62, 78 + 22, "over 8 edges: in pieces of 8", size=10)
    items = [
        ("1, 4, 12, slot 0", ORANGE),
        ("1, 12, 20, slot 1", ORANGE),
        ("3, 26, 32, -1", VIOLET),
        ("0, 0, 4, -1", BLUE),
        ("1, 20, 24, slot 2", ORANGE),
        ("2, 24, 26, -1", GREEN),
    ]
    for i, (text, fill) in enumerate(items):
        y = 34 + i * 28
        s.box(250, y, 150, 22, fill, text)
        s.arrow(404, y + 11, 494, y + 11)
        to = "scratch" if "slot" in text else "out"
        s.box(500, y, 110, 22, fill, f"warp {i // 2}, half {i % 2}")
        s.arrow(614, y + 11, 654, y + 11)
        s.box(660, y, 84, 22, PALE, to)
    s.text(16, 226, "long items ahead of all, then windows of 1024 items, each by falling length: the groups of a")
    s.text(16, 242, "warp end together, and rows that lie together are still swept together")
    s.cells(250, 262, 30, [ORANGE] * 3, ["s0", "s1", "s2"])
    s.text(16, 282, "merge {row 1, slots 0 to 3}", size=12)
    s.arrow(344, 277, 394, 277)
    s.box(400, 264, 210, 26, PALE, "folded in a fixed order, then written")
    s.arrow(614, 277, 654, 277)
    s.box(660, 264, 84, 26, PALE, "out[1]")
    return s


def stream() -> Svg:
    """Short rows streamed four at a time."""
    s = Svg(720, 170, "Bundles of short rows")
    s.text(16, 22, "four consecutive rows, whose edges lie one after the other in memory", bold=True)
    lengths = (3, 2, 3, 2)
    x = 60.0
    for i, n in enumerate(lengths):
        s.cells(x, 40, 28, [COLOURS[i]] * n, [f"{j}" for j in range(n)])
        s.text(x + 14 * n, 36, f"row {i}", anchor="middle", size=10)
        x += 28 * n
        s.arrow(x, 72, x, 104)
        s.text(x, 120, f"write {i}", anchor="middle", size=10)
    s.arrow(360, 54, 420, 54)
    s.text(428, 50, "one group of lanes streams them as one run;")
    s.text(428, 66, "columns of the next edges are on their way")
    s.text(428, 82, "while rows of x arrive, and a row is written")
    s.text(428, 98, "wherever one ends")
    s.text(16, 150, "row by row, the group would wait for bounds, columns and features four times instead of once")
    return s


def staged() -> Svg:
    """Gathers from shared memory."""
    s = Svg(760, 330, "Small dense graphs gather from shared memory")
    s.text(16, 22, "x", bold=True)
    for b in range(2):
        for k in range(3):
            s.box(40 + k * 60, 34 + b * 70, 60, 70, COLOURS[k] if b == 0 else PALE, f"slab {k}\nsources {b}")
    s.text(40, 192, "a slab: 128 bytes of each source", size=11)
    s.text(40, 207, "a block of sources: as many as fit", size=11)
    s.arrow(226, 68, 286, 68)
    s.text(256, 60, "cp.async", anchor="middle", size=10)
    s.box(292, 34, 190, 70, BLUE, "shared memory of a block:\nslab 0 of sources 0\n(and sums of its rows)")
    s.arrow(486, 68, 536, 68)
    s.box(
        542,
        34,
        202,
        70,
        PALE,
        "warps take two rows at a time\nin order of falling length,\n16 lanes a row, an edge a lane",
    )
    s.text(292, 130, "columns up to 4 slabs: each block keeps one block of sources,", size=11)
    s.text(292, 146, "partial sums are added by a second kernel, in order", size=11)
    s.text(292, 162, "more: a block takes one block of sources after the other", size=11)
    s.text(16, 234, "lane q reads chunk q xor t of its own edge's source in step t:", bold=True)
    for q in range(8):
        s.text(46 + q * 44 + 16, 252, f"q={q}", anchor="middle", size=10)
    for t in range(2):
        s.text(16, 276 + t * 28, f"t={t}", size=10)
        s.cells(46, 260 + t * 28, 32, [], None)
        for q in range(8):
            s.box(46 + q * 44, 260 + t * 28, 32, 22, COLOURS[(q ^ t) % 5], f"{q ^ t}", size=10)
    s.text(420, 276, "eight lanes, eight different chunks of 16 bytes:", size=11)
    s.text(420, 292, "no two in the same banks, whatever their sources", size=11)
    return s


def pcsr() -> Svg:
    """Panels, vectors and pieces."""
    s = Svg(760, 310, "PCSR: panels of two rows")
    s.text(16, 22, "rows 0 and 1: a panel, V = 2", bold=True)
    first, second = {0, 2, 5, 7}, {2, 3, 7, 9}
    for c in range(10):
        s.text(60 + c * 24 + 12, 44, str(c), anchor="middle", size=10)
    for r, edges in enumerate((first, second)):
        s.text(16, 66 + r * 24, f"row {r}", size=11)
        s.cells(60, 50 + r * 24, 24, [(BLUE, ORANGE)[r] if c in edges else "white" for c in range(10)])
    s.arrow(306, 74, 346, 74)
    s.text(352, 22, "vectors: a column, and a bit for each row", bold=True)
    for i, c in enumerate(sorted(first | second)):
        x = 352 + i * 44 + (i // 4) * 20
        s.box(x, 34, 40, 20, PALE, f"col {c}", size=10)
        s.box(x, 56, 40, 20, BLUE if c in first else "white", "w" if c in first else "-", size=10)
        s.box(x, 78, 40, 20, ORANGE if c in second else "white", "w" if c in second else "-", size=10)
    s.text(352, 116, "read by fours; x[2] and x[7] are loaded once for both rows", size=11)
    s.text(352, 131, "what is absent (-) is neither loaded nor multiplied: 0 x inf would be NaN", size=11)
    s.text(
        16,
        164,
        "S: a panel of more than SG vectors is cut; F: vectors of columns a thread; W: warps a block",
        bold=True,
    )
    for i in range(3):
        s.box(60 + i * 130, 178, 124, 26, GREEN, f"piece {i}: SG vectors")
        s.arrow(122 + i * 130, 208, 122 + i * 130, 236)
        s.box(60 + i * 130, 240, 124, 26, VIOLET, f"slot {i} of scratch")
    s.arrow(450, 253, 506, 253)
    s.box(512, 240, 232, 26, PALE, "pcsr_merge: in a fixed order")
    s.text(60, 292, "ParamSpMM adds pieces atomically; here the order is fixed, so bits do not change", size=11)
    return s


def tiles() -> Svg:
    """Windows, vectors and what a warp multiplies."""
    s = Svg(760, 400, "Tiles for tensor cores")
    s.text(16, 22, "a window of 8 rows, its distinct columns", bold=True)
    rows = [{3, 9}, {4, 9, 21}, {3, 4}, set(), {9, 21}, {3, 21, 40}, {9}, {4, 40}]
    columns = sorted(set().union(*rows))
    for i, column in enumerate(columns):
        s.text(66 + i * 24 + 12, 44, str(column), anchor="middle", size=10)
    for r, edges in enumerate(rows):
        s.text(16, 66 + r * 24, f"row {r}", size=11)
        s.cells(66, 50 + r * 24, 24, [BLUE if c in edges else "white" for c in columns])
    s.text(66, 262, "16 vectors are a group: a tile of weights", size=11)
    s.text(66, 277, "15 edges, 5 vectors: 3 edges a vector", size=11)
    s.text(330, 22, "a warp: a slab of 128 bytes of the rows that a group names", bold=True)
    for i, column in enumerate(columns):
        s.box(330, 50 + i * 26, 176, 22, COLOURS[i], f"x[{column}], columns of the slab")
    s.text(330, 196, "lane 4 g + t loads 16 bytes,", size=11)
    s.text(330, 211, "at g, of vectors 4 t to 4 t + 3", size=11)
    s.arrow(512, 106, 546, 106)
    s.box(552, 62, 192, 88, PALE, "mma: slab, transposed,\ntimes the tile\nnext group is on its way")
    s.arrow(648, 154, 648, 182)
    s.box(552, 186, 192, 44, GREEN, "sums of 8 rows,\na lane's own columns of two")
    s.text(350, 262, "0 x inf is NaN: what comes out as NaN is summed anew", size=11)
    s.text(350, 277, "from the row's own edges", size=11)
    s.text(16, 314, "S: windows of more than so many groups, or too few windows, are cut", bold=True)
    for i in range(3):
        s.box(60 + i * 130, 328, 124, 24, GREEN, f"piece {i}")
        s.arrow(122 + i * 130, 354, 122 + i * 130, 366)
        s.box(60 + i * 130, 368, 124, 24, VIOLET, f"slot {i} of scratch")
    s.arrow(450, 380, 506, 380)
    s.box(512, 368, 232, 24, PALE, "tile_merge: in a fixed order")
    return s


def arg() -> Svg:
    """Maxima: the winner forward, its gradient back."""
    s = Svg(760, 250, "Maxima and their backward")
    s.text(16, 22, "forward: row d sweeps its edges", bold=True)
    s.cells(30, 36, 44, [BLUE, ORANGE, GREEN], ["e1: 0.3", "e4: 0.9", "e6: 0.9"])
    s.arrow(168, 58, 216, 58)
    s.box(222, 36, 150, 44, PALE, "out[d] = 0.9\narg[d] = e4 (the first)")
    s.text(392, 52, "per column: value and position of the first winner;", size=11)
    s.text(392, 68, "positions only where someone asks for them", size=11)
    s.text(16, 122, "backward: on the transposed graph, row s sweeps the edges out of s", bold=True)
    s.box(30, 140, 110, 40, ORANGE, "edge e4 = (s, d)")
    s.arrow(144, 160, 186, 160)
    s.box(192, 140, 150, 40, PALE, "arg[d] == e4 ?")
    s.arrow(346, 152, 396, 152)
    s.text(352, 146, "yes", size=10)
    s.box(402, 140, 160, 24, GREEN, "add w x grad[d]")
    s.arrow(346, 170, 396, 184)
    s.text(352, 190, "no", size=10)
    s.box(402, 172, 160, 24, PALE, "add nothing")
    s.text(30, 222, "a gather by row like any other sum: no scatter, no atomics, the same bits in every run", size=11)
    return s


def form() -> Svg:
    """What happens around a sum in the same kernel."""
    s = Svg(760, 200, "What a sum does on the way in and on the way out")
    s.text(16, 22, "per edge, on the way in", bold=True)
    for i, text in enumerate(("gather\nx[s]", "x weight[e]\n(or [e, head])", "x src_scale[s]")):
        s.box(16 + i * 120, 36, 104, 40, BLUE, text)
        s.arrow(122 + i * 120, 56, 134 + i * 120, 56)
    s.box(376, 36, 180, 40, GREEN, "added in float32\n(float64 of float64)")
    s.text(16, 112, "once per row, before it is written", bold=True)
    steps = (
        "/ edges\n(mean)",
        "x dst_scale[d]",
        "+ self_scale\nx self[d]",
        "+ bias",
        "ReLU",
        "rounded once\nto the result's type",
    )
    x = 16
    for i, text in enumerate(steps):
        wide = 132 if i == 5 else 104
        s.box(x, 126, wide, 40, ORANGE if i < 5 else PALE, text)
        if i < 5:
            s.arrow(x + wide + 2, 146, x + wide + 12, 146)
        x += wide + 14
    s.arrow(560, 56, 660, 56)
    s.text(600, 50, "row d", anchor="middle", size=10)
    s.lines.append(f'<path d="M660,56 L700,56 L700,96 L8,96 L8,146 L14,146" fill="none" stroke="{INK}"/>')
    s.text(
        16, 188, "each part only where it is asked for; the backward is the same form on the transposed graph", size=11
    )
    return s


def pair() -> Svg:
    """GATv2's gradient: runs of edges, pieces of rows."""
    s = Svg(760, 240, "Even runs of edges")
    s.text(16, 22, "edges in row order; each group of lanes has a run of equally many", bold=True)
    lengths = (5, 14, 3, 10)
    x = 30.0
    for i, n in enumerate(lengths):
        s.cells(x, 36, 20, [COLOURS[i]] * n)
        s.text(x + 10 * n, 52, f"row {i}", anchor="middle", size=10)
        x += 20 * n
    for g in range(4):
        at = 30 + g * 160
        s.box(at + 2, 66, 156, 22, PALE, f"group {g}, 8 edges")
        s.arrow(at + 80, 90, at + 80, 112)
    s.box(30, 116, 318, 26, VIOLET, "block 0: first and last rows meet in shared memory")
    s.box(352, 116, 318, 26, VIOLET, "block 1")
    s.arrow(190, 146, 190, 172)
    s.box(30, 176, 318, 26, GREEN, "rows that end inside a block are written")
    s.arrow(348, 140, 440, 172)
    s.box(380, 176, 290, 26, ORANGE, "rows of several blocks: merge_pairs, in order")
    s.text(30, 226, "a hub is no chain: its edges are shared by as many groups as it takes", size=11)
    return s


def cpu() -> Svg:
    """Tasks of the CPU kernels."""
    s = Svg(760, 230, "Tasks of the CPU kernels")
    s.text(16, 22, "rows are cut into tasks of about equal cost (edges + rows), by rowptr alone", bold=True)
    widths = (120, 60, 200, 150, 130)
    x = 30.0
    for i, w in enumerate(widths):
        label = ("rows 0-90", "91-99", "row 100, piece 0", "row 100, piece 1", "101-180")[i]
        s.box(x, 36, w, 28, (BLUE, BLUE, ORANGE, ORANGE, BLUE)[i], label)
        s.arrow(x + w / 2, 68, x + w / 2, 92)
        s.box(x, 96, w, 24, PALE, "a thread")
        x += w
    s.text(
        30,
        146,
        "within a task: 8 to 1 vectors of the widest registers (AVX-512, AVX2 or baseline) a row of x,",
        size=11,
    )
    s.text(30, 162, "rows of x a few edges ahead are prefetched, sums stay in registers until the row ends", size=11)
    s.box(30, 178, 300, 28, VIOLET, "pieces of a long row: merged in order")
    s.text(346, 196, "so results do not depend on the number of threads", size=11)
    return s


def space() -> Svg:
    """The space of ways to run a product, and where five systems stand in it."""
    s = Svg(800, 480, "The parameter space: how rows are taken, in which order, and where five systems stand")
    columns = ("straight from CSR", "long rows by blocks", "a list, in pieces", "PCSR, V=1", "PCSR, V=2")
    below = ("csr_dual", "csr_dual, cold", "csr_dual, warm", "pcsr, S=0 or 1", "pcsr, S=0 or 1")
    orders = ("natural", "degree", "dual_metric", "community", "rcm, or yours")
    auto = {(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (2, 1), (2, 3)}
    points = {
        (0, 0): (("GE-SpMM", ORANGE), ("graph-spmm", BLUE)),
        (1, 0): (("RA-SpMM", RED),),
        (2, 0): (("RA-SpMM", RED),),
        (3, 0): (("ParamSpMM", VIOLET),),
        (4, 0): (("ParamSpMM", VIOLET),),
        (2, 1): (("RA-SpMM", RED),),
        (2, 2): (("DualGCN", "#f3e27c"),),
        (2, 3): (("RA-SpMM", RED),),
    }
    left, top, w, h = 120, 60, 132, 56
    for i, (name, code) in enumerate(zip(columns, below, strict=True)):
        s.text(left + i * w + w / 2, 32, name, anchor="middle", bold=True, size=11)
        s.text(left + i * w + w / 2, 49, code, anchor="middle", size=10)
    for j, name in enumerate(orders):
        s.text(16, top + j * h + h / 2 + 4, name, bold=True, size=11)
        for i in range(5):
            fill = GREEN if (i, j) in auto else "white"
            s.box(left + i * w, top + j * h, w, h, fill, "" if j == 0 or i > 1 else "-")
            for k, (system, colour) in enumerate(points.get((i, j), ())):
                s.dot(left + i * w + 14, top + j * h + 18 + k * 20, colour, system)
    y = top + 5 * h + 26
    s.box(16, y - 11, 24, 14, GREEN)
    s.text(
        48,
        y,
        "what policy auto chooses from; any other cell is there for who asks: gsp.plan(kernel=, schedule=, policy=)",
    )
    s.text(16, y + 26, "- : a schedule needs a list, or PCSR; without one rows run as they are")
    s.text(16, y + 52, "inside a cell:", bold=True)
    s.text(
        120,
        y + 52,
        "lanes that cover a row, groups that share one, vectors of columns a thread (F), warps a block (W),",
    )
    s.text(120, y + 70, "edges of a piece (chunk, SG), items sorted together (window), rows at once (bundle)")
    s.text(120, y + 88, "by rules, by the decider of the GPU, or measured with mode='tune'")
    return s


DIAGRAMS: dict[str, Callable[[], Svg]] = {
    "kernel_rows.svg": rows_cold,
    "kernel_items.svg": rows_items,
    "kernel_stream.svg": stream,
    "kernel_staged.svg": staged,
    "kernel_pcsr.svg": pcsr,
    "kernel_tiles.svg": tiles,
    "kernel_arg.svg": arg,
    "kernel_form.svg": form,
    "kernel_pair.svg": pair,
    "kernel_cpu.svg": cpu,
    "space.svg": space,
}


def main(folder: Path) -> None:
    """Writes them all."""
    for name, draw in DIAGRAMS.items():
        (folder / name).write_text(str(draw()), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "figures")
