"""Finds the torch headers of the environment that the package is being installed into.

Used by ``cuda_src/CMakeLists.txt`` (as a script) and by ``backend.py``. It must work inside pip's
isolated build environment, where ``import torch`` fails although torch is installed: ``sys.prefix``
is still the environment that is being installed into, so its site-packages folders are looked
through on disk instead.
"""

from __future__ import annotations

import json
import os
import re
import site
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

MINIMUM = (2, 10)
"""Oldest torch whose stable ABI the sources are written against."""


class TorchHeaders(NamedTuple):
    """Where usable headers were found, and of which torch."""

    include: Path
    version: str


def _site_folders() -> list[Path]:
    """Folders in which torch may be installed, first match first, without duplicates."""
    paths = sysconfig.get_paths()
    folders = [*sys.path, paths["purelib"], paths["platlib"], *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return [Path(folder) for folder in dict.fromkeys(folders) if folder]


def _version_of(torch_folder: Path) -> str | None:
    """Reads torch's version without importing it; None where there is none to read."""
    try:
        text = (torch_folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match.group(1) if match else None


def _is_new_enough(version: str) -> bool:
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and (int(match.group(1)), int(match.group(2))) >= MINIMUM


def find() -> TorchHeaders | None:
    """Looks for a torch that is new enough and has the stable headers.

    The environment variable ``GSP_TORCH_INCLUDE`` names an include folder directly and is trusted.

    Returns:
        The headers, or None if no folder has usable ones.
    """
    override = os.environ.get("GSP_TORCH_INCLUDE")
    if override:
        include = Path(override)
        return TorchHeaders(include, _version_of(include.parent) or "unknown")
    for folder in _site_folders():
        include = folder / "torch" / "include"
        version = _version_of(folder / "torch")
        if version is None or not _is_new_enough(version):
            continue
        if (include / "torch" / "csrc" / "stable" / "library.h").is_file():
            return TorchHeaders(include, version)
    return None


def main() -> int:
    """Prints the find as one JSON object, or says on stderr where it looked."""
    found = find()
    if found is None:
        looked = "\n  ".join(str(folder) for folder in _site_folders())
        wanted = ".".join(map(str, MINIMUM))
        print(f"no torch >= {wanted} with headers in any of\n  {looked}", file=sys.stderr)
        return 1
    print(json.dumps({"include": str(found.include), "version": found.version}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
