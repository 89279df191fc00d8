"""The file that measurements are kept in: one row for each configuration, contender, setting and mode."""

from __future__ import annotations

import csv
import importlib.metadata
import io
import math
import os
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from . import cusparse

CONFIGURATION = ("graph", "order", "width", "dtype", "reduce", "weighted")
KEY = (*CONFIGURATION, "contender", "setting", "mode")
COLUMNS = (*KEY, "ms_median", "ms_p20", "ms_p80", "gbps", "roofline_share", "rel_err", "note")
_NUMBERS = (
    "ms_median",
    "ms_min",
    "products_ms",
    "ms_p20",
    "ms_p80",
    "gbps",
    "roofline_share",
    "rel_err",
    "peak_bytes",
    "graph_bytes",
)

#: One measurement as text, by column.
Row: TypeAlias = "dict[str, str]"


def key_of(row: Row) -> tuple[str, ...]:
    """What a row measures; a later row with the same key replaces an earlier one."""
    return tuple(row[name] for name in KEY)


def table_of(path: str | Path) -> tuple[list[str], list[Row]]:
    """Columns and rows of a CSV file with ``#`` lines ahead; whatever is numeric there must make sense.

    Raises:
        ValueError: it cannot be read, is torn, or has a number that is none.
    """
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8-sig").splitlines() if not line.startswith("#")]
        reader = csv.DictReader(lines)
        columns, rows = list(reader.fieldnames or []), list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise ValueError(f"{path} cannot be read: {e}") from e
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise ValueError(f"{path}: row {number} does not have {len(columns)} columns")
        for name, text in row.items():
            if text and name in _NUMBERS and not _is_number(text, name.startswith("ms_")):
                raise ValueError(f"{path}: row {number} has {text!r} as {name}, expected a number")
        if not row.get("width", "0").isdecimal():
            raise ValueError(f"{path}: row {number} has {row['width']!r} as width, expected a whole number")
    return columns, rows


def read(path: str | Path) -> list[Row]:
    """The measurements of a file, the last of each key, in the order of their first appearance.

    Raises:
        ValueError: it is no such file; the message says why.
    """
    return measurements(path, *table_of(path))


def measurements(path: str | Path, columns: Sequence[str], rows: Sequence[Row]) -> list[Row]:
    """As `read`, of what `table_of` has found in the file."""
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        raise ValueError(f"{path} is no file of measurements: it has no columns {', '.join(missing)}")
    return list({key_of(row): row for row in rows}.values())


def _is_number(text: str, positive: bool) -> bool:
    try:
        value = float(text)
    except ValueError:
        return False
    return 0 < value < math.inf if positive else not math.isnan(value)


def _cut_torn_row(path: str) -> None:
    """Takes away the beginning of a row that an interrupted run, or a full disk, has left at the end of a file."""
    text = Path(path).read_bytes()
    whole = text.rfind(b"\n") + 1
    rest = text[whole:]
    if not rest or ",".join(COLUMNS).encode() not in text[:whole].split(b"\n"):
        return  # nothing torn; or none of our files
    if rest.count(b",") < len(COLUMNS) - 1 or rest.count(b'"') % 2:
        os.truncate(path, whole)
    else:
        with open(path, "ab") as f:
            f.write(b"\n")


class Store:
    """Measurements of this run and, where the file existed, of those before it.

    Args:
        path: written after each configuration, so that an interrupted run can be resumed; None: nowhere.
        command: for the head of the file.
        facts: more for the head.
    """

    def __init__(self, path: str | None, command: str, facts: dict[str, str] | None = None) -> None:
        self.path = path
        exists = path is not None and os.path.exists(path) and os.path.getsize(path) > 0
        if exists and path is not None:
            _cut_torn_row(path)
        self.rows: list[Row] = read(path) if exists and path is not None else []
        self._head = {**environment(), **(facts or {}), "command": command}
        self._started, self._exists = False, exists
        self._known = {key_of(row)[:-1] for row in self.rows}

    def has(self, configuration: Row, names: Iterable[tuple[str, str]]) -> bool:
        """Whether all these (contender, setting) of a configuration have been measured, or found impossible."""
        base = tuple(configuration[name] for name in CONFIGURATION)
        return all((*base, *name) in self._known for name in names)

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Keeps the measurements of one configuration, replacing earlier ones."""
        new = [{name: _text(row.get(name)) for name in COLUMNS} for row in rows]
        keys = {key_of(row) for row in new}
        self.rows = [row for row in self.rows if key_of(row) not in keys] + new
        self._known |= {key[:-1] for key in keys}
        if self.path is None:
            return
        text = io.StringIO()
        if not self._started:
            text.writelines(f"# {name}: {value}\n" for name, value in self._head.items())
            if not self._exists:
                text.write(",".join(COLUMNS) + "\n")
            self._started = True
        csv.DictWriter(text, COLUMNS, lineterminator="\n").writerows(new)
        with open(self.path, "a", encoding="utf-8") as f:
            f.write(text.getvalue())


def write_table(path: str, columns: Sequence[str], rows: Iterable[dict[str, Any]], command: str) -> None:
    """Writes a whole CSV file under the environment and the command that made it."""
    with open(path, "w", newline="") as f:
        f.writelines(f"# {key}: {value}\n" for key, value in {**environment(), "command": command}.items())
        writer = csv.DictWriter(f, columns)
        writer.writeheader()
        writer.writerows(rows)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def environment() -> dict[str, str]:
    """What a measurement depends on besides its command: for the head of a CSV file."""
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "threads": str(torch.get_num_threads()),
        "package": _version("gnn-spmm-plugin") or "source tree",
        "commit": _commit(),
    }
    if torch.cuda.is_available():
        found["driver"] = _driver()
        if cusparse.unavailable() is None:
            found["cusparse"] = cusparse.version()
    for name in ("torch_geometric", "torch_sparse", "pyg_lib", "dgl"):
        version = _version(name.replace("_", "-"))
        if version is not None:
            found[name] = version
    return found


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str:
    return _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).split("\n")[0]


def _commit() -> str:
    return _output(["git", "describe", "--always", "--dirty"])


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
