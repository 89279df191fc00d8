"""Pictures as inline SVG: points on logarithmic axes, bars, shares, and a matrix seen from afar."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence

import numpy as np

from .markup import escape

#: (x, y), or (x, y, what is written beside it). What is not positive has no place on a logarithmic axis.
Point = tuple[float, float] | tuple[float, float, str]
#: (name, CSS class, points): a series of a picture.
Series = tuple[str, str, Sequence[Point]]
#: (name, slope, offset): the line ``y = offset * x ** slope``.
Line = tuple[str, float, float]

_W, _H = 480, 300  # of a picture, before it is scaled to its place
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 30, 44


def number(value: float) -> str:
    """Three digits, and a suffix for large ones."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    for suffix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def _svg(width: float, height: float, label: str, body: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(label)}"><title>{escape(label)}'
        f"</title>{body}</svg>"
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "middle", turn: bool = False) -> str:
    turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}"{turned}>{escape(text)}</text>'


def _legend(names: Sequence[tuple[str, str]], x: float = _LEFT, y: float = 14) -> str:
    made = []
    for name, kind in names:
        made.append(f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="10" height="10" rx="2" class="{kind}"/>')
        made.append(_text(x + 15, y, name, anchor="start"))
        x += 34 + 6.3 * len(name)
    return "".join(made)


class _Axis:
    """A logarithmic axis from pixel `start` to pixel `end`, over all `values`."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        low, high = math.log10(min(values)), math.log10(max(values))
        room = max((high - low) * 0.05, 0.08)
        self.low, self.high, self.start, self.end = low - room, high + room, start, end

    def at(self, value: float) -> float:
        """The pixel of a value."""
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Powers of ten, with 2 and 5 times them where there are few; or three values with two digits."""
        decades = range(math.floor(self.low), math.ceil(self.high) + 1)
        steps = (1,) if self.high - self.low > 2.2 else (1, 2, 5)
        step = max(1, round((self.high - self.low) / 6))
        found = [m * 10.0**d for d in decades if d % step == 0 for m in steps]
        found = [v for v in found if self.low <= math.log10(v) <= self.high]
        if len(found) > 1:
            return found
        even = [10 ** (self.low + (self.high - self.low) * share) for share in (0.1, 0.5, 0.9)]
        return sorted({float(f"{v:.2g}") for v in even})


def points(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    label: str,
    lines: Sequence[Line] = (),
    show: Sequence[float] = (),
) -> str:
    """Points, and lines, on two logarithmic axes, the upright one reaching `show`; empty where there are no points."""
    drawn = [(n, kind, [p for p in found if p[0] > 0 and p[1] > 0]) for n, kind, found in series]
    drawn = [s for s in drawn if s[2]]
    if not drawn:
        return ""
    xs = [p[0] for _, _, found in drawn for p in found]
    ys = [p[1] for _, _, found in drawn for p in found] + list(show)
    on_lines = [offset * x**slope for _, slope, offset in lines for x in (min(xs), max(xs))]
    across, up = _Axis(xs, _LEFT, _W - _RIGHT), _Axis([*ys, *on_lines], _H - _BOTTOM, _TOP)
    made = []
    for v in across.ticks():
        x = across.at(v)
        made.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{_H - _BOTTOM}"/>{_text(x, _H - _BOTTOM + 16, number(v))}')
    for v in up.ticks():
        y = up.at(v)
        made.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_W - _RIGHT}"/>')
        made.append(_text(_LEFT - 6, y + 4, number(v), anchor="end"))
    for _, slope, offset in lines:
        ends = [10**across.low, 10**across.high]
        (x1, y1), (x2, y2) = ((across.at(x), up.at(offset * x**slope)) for x in ends)
        made.append(f'<path class="line" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>')
    for _, kind, found in drawn:
        for x, y, *said in found:
            made.append(f'<circle cx="{across.at(x):.1f}" cy="{up.at(y):.1f}" r="3.6" class="{kind}"/>')
            made += [_text(across.at(x), up.at(y) - 8, text) for text in said]
    made.append(_text((_LEFT + _W - _RIGHT) / 2, _H - 8, x_label, "label"))
    made.append(_text(14, (_TOP + _H - _BOTTOM) / 2, y_label, "label", turn=True))
    names = [(n, kind) for n, kind, _ in drawn] + [(n, "line-box") for n, _, _ in lines]
    return _svg(_W, _H, label, "".join(made) + _legend(names))


def pairs(rows: Sequence[tuple[str, float | None, float | None]], unit: str, label: str) -> str:
    """Two bars for each row, before and after; None: it is not known."""
    known = [v for row in rows for v in row[1:] if v is not None]
    if not known or max(known) <= 0:
        return ""
    scale = (_W - 110) / max(known)
    made, y = [_legend([("before", "before"), ("after", "after")], 0)], 34.0
    for name, before, after in rows:
        made.append(_text(0, y + 4, _short(name, 50), "label", "start"))
        for value, kind, top in ((before, "before", y + 10), (after, "after", y + 25)):
            length = 0.0 if value is None else max(value * scale, 1)
            if value is not None:
                made.append(f'<rect x="0" y="{top:.1f}" width="{length:.1f}" height="12" rx="2" class="{kind}"/>')
            made.append(
                _text(
                    length + 6, top + 10, "not measured" if value is None else f"{_amount(value)} {unit}", "", "start"
                )
            )
        y += 58
    return _svg(_W, y - 12, label, "".join(made))


def shares(parts: Sequence[tuple[str, str, float]], label: str) -> str:
    """One bar of parts (name, CSS class, size); sizes are taken as shares of their sum."""
    total = sum(size for _, _, size in parts)
    if total <= 0:
        return ""
    made, x, y = [], 0.0, 64.0
    for name, kind, size in parts:
        width = size / total * _W
        made.append(f'<rect x="{x:.1f}" y="0" width="{max(width - 1, 0):.1f}" height="34" rx="2" class="{kind}"/>')
        made.append(f'<rect x="0" y="{y - 10:.1f}" width="10" height="10" rx="2" class="{kind}"/>')
        made.append(_text(16, y, f"{size / total:.0%}", "label", "start") + _text(58, y, name, "", "start"))
        x += width
        y += 22
    return _svg(_W, y - 12, label, "".join(made))


def matrix(counts: Sequence[Sequence[float]], label: str) -> str:
    """A matrix of counts, dark where there are many, as a picture inside the page."""
    cells = np.asarray(counts, dtype=np.float64)
    if cells.size == 0 or np.max(cells) <= 0:
        return ""
    # The logarithm: one dense corner would leave the rest blank.
    alpha = np.log1p(cells / cells[cells > 0].mean() * 4)
    alpha = np.round(alpha / alpha.max() * 255).astype(np.uint8)
    image = np.zeros((*cells.shape, 4), np.uint8)
    image[..., :3] = (37, 99, 235)
    image[..., 3] = np.where(cells > 0, np.maximum(alpha, 26), 0)
    data = base64.b64encode(_png(image)).decode()
    return f'<img class="matrix" alt="{escape(label)}" src="data:image/png;base64,{data}">'


def _png(image: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    """``[height, width, 4]`` as a PNG."""
    height, width, _ = image.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    lines = b"".join(b"\0" + row.tobytes() for row in image)  # each after the number of its filter: none
    head = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


__all__ = ["Line", "Series", "matrix", "number", "pairs", "points", "shares"]
