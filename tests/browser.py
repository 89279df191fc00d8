"""A page in a real browser without a screen: what is laid out where, what overflows, what is fetched."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")

#: Runs in a page that shows the page to be looked at in a frame: that one runs no scripts.
_PROBE = """
const frame = document.querySelector('iframe');
frame.onload = () => {
  const page = frame.contentDocument, found = {sections: [], overflowing: [], outside: []};
  page.querySelectorAll('details').forEach(d => d.open = true);
  const root = page.documentElement, view = frame.contentWindow;
  found.width = root.clientWidth;
  found.content = root.scrollWidth;
  for (const s of page.querySelectorAll('section, figure, svg, .tile, img')) {
    const r = s.getBoundingClientRect();
    found.sections.push([s.tagName, Math.round(r.width), Math.round(r.height)]);
  }
  for (const e of page.querySelectorAll('body *')) {
    const style = view.getComputedStyle(e);
    if (e.closest('svg') || e.closest('.scroll') || style.overflowX !== 'visible') continue;
    if (style.display === 'inline') continue;
    if (e.scrollWidth > e.clientWidth + 1) found.overflowing.push(e.tagName + ': ' + e.textContent.slice(0, 60));
  }
  for (const t of page.querySelectorAll('svg text')) {
    const inner = t.getBoundingClientRect(), outer = t.closest('svg').getBoundingClientRect();
    if (inner.left < outer.left - 1 || inner.right > outer.right + 1 || inner.top < outer.top - 1
        || inner.bottom > outer.bottom + 1) found.outside.push(t.textContent);
  }
  found.fetched = view.performance.getEntriesByType('resource').map(r => r.name).filter(n => !n.startsWith('data:'));
  found.scripts = page.scripts.length;
  found.title = page.title;
  found.ink = view.getComputedStyle(page.body).color;
  found.card = view.getComputedStyle(page.querySelector('section') || page.body).backgroundColor;
  found.images = [...page.images].map(i => i.naturalWidth);
  document.querySelector('pre').textContent = JSON.stringify(found);
};
"""


class Browser:
    """A browser with a profile of its own under `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = next(path for name in BROWSERS if (path := shutil.which(name)))

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Opens something; what it wrote."""
        fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]
        quiet = ["--no-first-run", "--disable-background-networking", f"--user-data-dir={self.folder / 'profile'}"]
        command = [self.path, *fixed, *quiet, "--virtual-time-budget=5000", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)

    def look(self, page: Path, width: int, *arguments: str) -> dict[str, Any]:
        """What `_PROBE` finds in a page in a frame of that width.

        Without its security policy: what that keeps from being fetched is to be seen too.
        """
        text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8"))
        style = f"width:{width}px;height:900px;border:0"
        frame = f'<iframe sandbox="allow-same-origin" style="{style}" srcdoc="{escape(text)}">'
        around = self.folder / "around.html"
        around.write_text(f"<!doctype html><meta charset=utf-8><pre></pre>{frame}</iframe><script>{_PROBE}</script>")
        dumped = self.run(*arguments, f"--window-size={width + 100},1000", "--dump-dom", around.as_uri()).stdout
        found = re.search("<pre>(.*?)</pre>", dumped, re.DOTALL)
        assert found is not None and found[1], dumped[-2000:]
        seen: dict[str, Any] = json.loads(unescape(found[1]))
        return seen

    def console(self, page: Path) -> list[str]:
        """What a page, as it is, writes to the console."""
        said = self.run("--enable-logging=stderr", "--v=0", "--dump-dom", page.as_uri()).stderr
        return [line for line in said.splitlines() if "CONSOLE" in line]
