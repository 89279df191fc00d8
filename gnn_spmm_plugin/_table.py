"""Tables on a terminal, progress bars, and results as JSON: what the commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any


def show(headers: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Prints a table: through rich where it is installed and the output a terminal, else as aligned text."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table(title=title or None, title_justify="left")
            for i, header in enumerate(headers):
                table.add_column(header, justify="left" if i == 0 else "right", overflow="fold")
            for row in rows:
                table.add_row(*row)
            Console().print(table)
            return
    print(text(headers, rows, title))


def text(headers: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> str:
    """The table as text, the first column aligned left, the others right."""
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (c.rjust(w) for c, w in zip(cells, widths, strict=True))
        return "  ".join([cells[0].ljust(widths[0]), *rest]).rstrip() if first else ""

    rule = "  ".join("-" * w for w in widths)
    return "\n".join([*([title] if title else []), line(headers), rule, *(line(row) for row in rows)])


def progress(items: Iterable[Any], total: int, label: str) -> Iterator[Any]:
    """The items, with a progress bar on stderr: tqdm's where it is installed, else a plain one on a terminal."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        yield from _plain_progress(items, total, label)
        return
    yield from tqdm(items, total=total, desc=label, file=sys.stderr, leave=False, disable=None)


def _plain_progress(items: Iterable[Any], total: int, label: str) -> Iterator[Any]:
    visible = sys.stderr.isatty()
    for i, item in enumerate(items):
        yield item
        if visible:
            done = 30 * (i + 1) // max(total, 1)
            print(f"\r{label} [{'#' * done}{' ' * (30 - done)}] {i + 1}/{total}", end="", file=sys.stderr, flush=True)
    if visible:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def write_json(path: str | None, result: dict[str, Any]) -> None:
    """Writes `result` to `path`, or to stdout for ``-``; nowhere for None."""
    if path is None:
        return
    content = json.dumps(result, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(content)
    else:
        Path(path).write_text(content, encoding="utf-8")


def bytes_text(count: int | None) -> str:
    """``12.3 MB``; ``?`` where it is not known."""
    if count is None:
        return "?"
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError
