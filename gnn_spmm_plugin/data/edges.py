"""Edge lists from files that a user brings: checked, never unpickled, and every complaint says where and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .._files import open_npz

SUFFIXES = (".npz", ".npy", ".csv", ".tsv", ".txt")
_HOW = "an edge list has two columns (or rows) of integers: the source and the destination of each edge"

Array: TypeAlias = Any  # np.ndarray of any dtype


class EdgeFileError(ValueError):
    """The file is no edge list; the message says why."""


def read_edges(path: str | Path) -> tuple[Tensor, int]:
    """An edge list from a file.

    Args:
        path: ``.npy`` with an array ``[2, E]`` or ``[E, 2]``; ``.npz`` with such an array as ``edge_index`` (or as the
            only one), or with two vectors ``row`` and ``col`` or ``src`` and ``dst``, or as ``scipy.sparse.save_npz``
            writes it, or with ``rowptr`` and ``col`` (rows of both are destinations), and optionally ``num_nodes``;
            ``.csv``, ``.tsv`` or ``.txt`` with two columns, with or without a header; lines that start with ``#`` or
            ``%`` are skipped.

    Returns:
        ``[2, E]`` int64, row 0 sources, and the number of nodes.

    Raises:
        EdgeFileError: anything else.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise EdgeFileError(f"{path}: the name must end in one of {', '.join(SUFFIXES)}")
    try:
        if suffix == ".npz":
            edges, num_nodes = _read_npz(path)
        elif suffix == ".npy":
            edges, num_nodes = _pair(np.load(path, allow_pickle=False), path), None
        else:
            edges, num_nodes = _read_text(path), None
    except EdgeFileError:
        raise
    except OSError as e:
        raise EdgeFileError(f"{path}: cannot be read: {e.strerror or e}") from e
    except UnicodeDecodeError as e:
        raise EdgeFileError(f"{path}: is not text: {e.reason} at byte {e.start}") from e
    except Exception as e:  # NumPy's parsers raise what their parts do: tokenize, zlib, zipfile, ...
        pickled = "allow_pickle" in str(e) or "pickle" in str(e)
        why = "it holds pickled objects, which are not loaded from files" if pickled else str(e) or type(e).__name__
        raise EdgeFileError(f"{path}: is no readable NumPy file: {why}") from e
    return _checked(edges, num_nodes, path)


def _checked(edges: Array, num_nodes: int | None, path: Path) -> tuple[Tensor, int]:
    if edges.shape[1] == 0:
        raise EdgeFileError(f"{path}: there are no edges in it")
    if edges.dtype.kind not in "iu":
        raise EdgeFileError(f"{path}: node ids must be integers, got {edges.dtype}; {_HOW}")
    smallest, largest = int(edges.min()), int(edges.max())
    if smallest < 0:
        edge = int(np.flatnonzero((edges < 0).any(0))[0])
        raise EdgeFileError(
            f"{path}: node ids start at 0, but edge {edge} is {int(edges[0, edge])} -> {int(edges[1, edge])}"
        )
    if num_nodes is not None and largest >= num_nodes:
        raise EdgeFileError(f"{path}: num_nodes is {num_nodes}, but there is a node {largest}")
    count = largest + 1 if num_nodes is None else num_nodes
    if count > max(1_000_000, 100 * edges.shape[1]):
        raise EdgeFileError(
            f"{path}: the largest node id is {largest}, but there are only {edges.shape[1]} edges; number the nodes "
            "0, 1, 2, ... without gaps"
        )
    return torch.from_numpy(np.ascontiguousarray(edges.astype(np.int64))), count


def _pair(array: Array, path: Path) -> Array:
    if array.ndim == 2 and array.shape[0] == 2:
        return array
    if array.ndim == 2 and array.shape[1] == 2:
        return array.T
    raise EdgeFileError(f"{path}: expected an array of shape [2, E] or [E, 2], got {list(array.shape)}; {_HOW}")


def _read_npz(path: Path) -> tuple[Array, int | None]:
    with open_npz(path) as z:
        num_nodes = _scalar(z["num_nodes"], path) if "num_nodes" in z.files else None
        for offsets, entries in (("indptr", "indices"), ("rowptr", "col")):
            if offsets in z.files and entries in z.files:
                return _compressed(z, offsets, entries, path), num_nodes
        for first, second in (("row", "col"), ("src", "dst")):
            if first in z.files and second in z.files:
                a, b = z[first], z[second]
                if a.ndim != 1 or a.shape != b.shape:
                    raise EdgeFileError(f"{path}: {first} and {second} must be vectors of one length; {_HOW}")
                if "format" in z.files or "symmetric" in z.files:  # a matrix: its rows are destinations
                    a, b = b, a
                if "symmetric" in z.files and _scalar(z["symmetric"], path):
                    off = a != b
                    a, b = np.concatenate([a, b[off]]), np.concatenate([b, a[off]])
                return np.stack([a, b]), num_nodes
        if "edge_index" in z.files:
            return _pair(z["edge_index"], path), num_nodes
        others = [name for name in z.files if name != "num_nodes"]
        if len(others) == 1:
            return _pair(z[others[0]], path), num_nodes
        raise EdgeFileError(
            f"{path}: expected an array 'edge_index', or 'row' and 'col', or 'src' and 'dst'; it has {sorted(z.files)}"
        )


def _scalar(array: Array, path: Path) -> int:
    if array.size != 1 or array.dtype.kind not in "iub" or int(array.reshape(())) < 0:
        raise EdgeFileError(f"{path}: num_nodes and symmetric must each be one integer, 0 or more")
    return int(array.reshape(()))


def _compressed(z: Any, offsets: str, entries: str, path: Path) -> Array:
    """CSR, or CSC as scipy writes it."""
    indptr, indices = z[offsets], z[entries]
    fits = indptr.ndim == 1 and indptr.size and indptr.dtype.kind in "iu"
    sizes = np.diff(indptr.astype(np.int64)) if fits else np.array([-1])  # unsigned differences would wrap around
    if indices.ndim != 1 or (sizes < 0).any() or int(indptr[0]) != 0 or int(indptr[-1]) != len(indices):
        raise EdgeFileError(f"{path}: {offsets} and {entries} are no compressed matrix")
    major = np.repeat(np.arange(len(sizes)), sizes)
    by_column = "format" in z.files and z["format"].item() in (b"csc", "csc")
    return np.stack([major, indices] if by_column else [indices, major])


def _read_text(path: Path) -> Array:
    with open(path, encoding="utf-8-sig") as f:
        lines = f.read().splitlines()
    pairs: list[tuple[int, int]] = []
    header_allowed = True
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line[0] in "#%":
            continue
        cells = [
            c.strip().strip("\"'")
            for c in (line.replace(";", ",").split(",") if "," in line or ";" in line else line.split())
        ]
        numeric = [_is_number(c) for c in cells]
        if header_allowed and not any(numeric):
            header_allowed = False
            continue
        header_allowed = False
        if len(cells) != 2:
            raise EdgeFileError(f"{path}, line {number}: expected 2 columns, got {len(cells)}: {line[:60]!r}; {_HOW}")
        try:
            source, destination = int(cells[0]), int(cells[1])
        except ValueError:
            raise EdgeFileError(f"{path}, line {number}: node ids must be integers, got {line[:60]!r}") from None
        if not (0 <= source < 2**63 and 0 <= destination < 2**63):
            raise EdgeFileError(f"{path}, line {number}: node ids start at 0 and fit in 64 bits, got {line[:60]!r}")
        pairs.append((source, destination))
    return np.array(pairs, np.int64).reshape(-1, 2).T


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


__all__ = ["SUFFIXES", "EdgeFileError", "read_edges"]
