"""HTML by hand: escaped text, tables, figures, and a page that needs nothing from elsewhere, not even a script."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

_STYLE = Path(__file__).with_name("page.css")


def escape(value: object) -> str:
    """Any text as it is shown: no character of it is markup, in attributes neither. What does not print is named."""
    return html.escape("".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in str(value)))


def paragraph(text: str, kind: str = "") -> str:
    """Text of our own or others', escaped."""
    return f"<p{_class(kind)}>{escape(text)}</p>"


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table that scrolls by itself where it is too wide; columns of numbers, but the first, are aligned right."""
    numbers = {i for i in range(1, len(headers)) if all(str(row[i])[:1] in "-0123456789" for row in rows)}

    def line(cells: Sequence[object], tag: str) -> str:
        made = (f"<{tag}{_class('n' if i in numbers else '')}>{_cell(c)}</{tag}>" for i, c in enumerate(cells))
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    head = f"<thead>{line(headers, 'th')}</thead>"
    return f'<div class="scroll" tabindex="0"><table>{head}<tbody>{body}</tbody></table></div>'


class Raw(str):
    """Markup that a cell of a table takes as it is."""


def _cell(value: object) -> str:
    return str(value) if isinstance(value, Raw) else escape(value)


def badge(text: str, kind: str) -> Raw:
    """A word in a coloured box; `kind`: ``"good"``, ``"partly"``, ``"bad"`` or ``""``."""
    return Raw(f'<span class="badge {escape(kind)}">{escape(text)}</span>')


def figure(picture: str, caption: str) -> str:
    """A picture (markup) with its caption (text)."""
    return f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>"


def tiles(items: Iterable[tuple[str, str, str]]) -> str:
    """Numbers at a glance: (what it is, the number, a remark)."""
    made = (
        f'<div class="tile"><dt>{escape(name)}</dt><dd><b>{escape(value)}</b><small>{escape(remark)}</small></dd></div>'
        for name, value, remark in items
    )
    return f'<dl class="tiles">{"".join(made)}</dl>'


def columns(*parts: str, narrow: bool = False) -> str:
    """Side by side where there is room; narrow ones take less of it."""
    kind = "columns narrow" if narrow else "columns"
    return f'<div class="{kind}">{"".join(p for p in parts if p)}</div>'


def section(title: str, *parts: str) -> str:
    """A part of the page under its heading; empty parts are left out."""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def block(text: str) -> str:
    """Text as a terminal shows it."""
    return f'<pre tabindex="0">{escape(text)}</pre>'


def details(summary: str, *parts: str) -> str:
    """What is shown when asked for; printed pages show it."""
    return f"<details><summary>{escape(summary)}</summary>{''.join(parts)}</details>"


def page(title: str, lead: str, body: Iterable[str], foot: str) -> str:
    """The whole document. `title`, `lead` and `foot` are text, `body` is markup."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        # Nothing is fetched and nothing is run, whatever a hostile name might have smuggled in.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title>'
        f"<style>{_STYLE.read_text(encoding='utf-8')}</style></head>\n<body><main>"
        f"<header><h1>{escape(title)}</h1><p>{escape(lead)}</p></header>\n"
        + "\n".join(part for part in body if part)
        + f"\n<footer>{escape(foot)}</footer></main></body></html>\n"
    )


def _class(kind: str) -> str:
    return f' class="{escape(kind)}"' if kind else ""


__all__ = [
    "Raw",
    "badge",
    "block",
    "columns",
    "details",
    "escape",
    "figure",
    "page",
    "paragraph",
    "section",
    "table",
    "tiles",
]
