"""Files that somebody else wrote: whatever is in them, the answer is a result or one clear error.

A corpus of good files of every kind is mutated, by bytes and by what the bytes mean, for a bounded time.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import os
import pickle
import random
import resource
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from measurements import GPU, write_csv

from gnn_spmm_plugin import tune
from gnn_spmm_plugin.bench.collect import Collection
from gnn_spmm_plugin.data.edges import EdgeFileError, read_edges
from gnn_spmm_plugin.decider import INPUTS, Decider
from gnn_spmm_plugin.kernels import KERNELS_VERSION
from gnn_spmm_plugin.tune import Tuned, recall, remember

FILES = importlib.import_module("gnn_spmm_plugin._files")

SECONDS = 1.5  # of each kind
#: Bytes that reading a file of a few KB may add.
MEMORY = 400 << 20


def saved(save: Callable[..., None], *args: Any, **arrays: Any) -> bytes:
    file = io.BytesIO()
    save(file, *args, **arrays)
    return file.getvalue()


EDGES = np.random.default_rng(0).integers(0, 40, (2, 300))
ROWS = np.bincount(EDGES[0], minlength=40).cumsum()
SCIPY = {"indptr": np.r_[0, ROWS], "indices": EDGES[1], "format": b"csr", "shape": [40, 40], "data": np.ones(300)}
CORPUS: dict[str, list[bytes]] = {
    ".npy": [saved(np.save, EDGES), saved(np.save, EDGES.T.astype(np.int32)), saved(np.save, EDGES.astype(np.uint8))],
    ".npz": [
        saved(np.savez, edge_index=EDGES, num_nodes=40),
        saved(np.savez_compressed, src=EDGES[0], dst=EDGES[1]),
        saved(np.savez, row=EDGES[0], col=EDGES[1], symmetric=True),
        saved(np.savez_compressed, **SCIPY),
    ],
    ".csv": [b"src,dst\n0,1\n1,2\n# no\n3,0\n", b"\xef\xbb\xbf0;1\r\n1;2\r\n", b"0 1\n1\t2\n" * 40],
}
NUMBERS = [b"-1", b"0", b"1e9", b"99999999999999999999", b"NaN", b"true", b"null", b'"x"', b"[]", b"{}", b"1" * 5000]


def mutated(draw: random.Random, files: list[bytes]) -> bytes:
    """One of `files` with bytes changed, cut, repeated, moved, or taken from another."""
    content = bytearray(draw.choice(files))
    for _ in range(draw.choice((1, 1, 2, 5, 20))):
        at, to = sorted(draw.randrange(len(content) + 1) for _ in range(2))
        how = draw.randrange(8)
        if how == 0 and content:
            content[at % len(content)] = draw.randrange(256)
        elif how == 1 and content:
            content[at % len(content)] ^= 1 << draw.randrange(8)
        elif how == 2:
            del content[at : min(to, at + 16)]
        elif how == 3:
            del content[to:]
        elif how == 4:
            content[at:at] = content[at : min(to, at + 64)] * draw.choice((1, 3))
        elif how == 5:
            other = draw.choice(files)
            content[at : at + 32] = other[at % max(len(other), 1) :][:32]
        elif how == 6:
            content[at : at + draw.choice((1, 2, 4, 8))] = draw.choice((b"\0", b"\xff", b"\x7f")) * draw.choice(
                (1, 4, 8)
            )
        else:
            content[at : at + draw.choice((0, 1, 4))] = draw.choice(NUMBERS)
    return bytes(content)


def remade(draw: random.Random, arrays: dict[str, Any]) -> bytes:
    """An archive of the same names with one array of another dtype, shape or value, or without it."""
    made = {k: np.asarray(v) for k, v in arrays.items()}
    for _ in range(draw.choice((1, 1, 2))):
        if not made:
            break
        name = draw.choice(sorted(made))
        a = made[name]
        how = draw.randrange(9)
        if how == 0:
            del made[name]
        elif how == 1 and a.dtype.kind in "iufb":
            made[name] = a.astype(draw.choice(("f8", "f2", "c16", "i1", "u8", "?", "S3", "U2")), casting="unsafe")
        elif how == 2:
            made[name] = a.reshape(*draw.choice(((1, *a.shape), (*a.shape, 1), (a.size,))))
        elif how == 3:
            made[name] = a[..., :-1] if a.ndim and a.shape[-1] else np.zeros(())
        elif how == 4:
            made[name] = np.zeros(draw.choice(((), (0,), (2, 0), (0, 2), (3, 3))), a.dtype)
        elif how == 5 and a.dtype.kind in "iuf" and a.size:
            a = a.copy()
            extremes = (
                [np.iinfo(a.dtype).max, np.iinfo(a.dtype).min] if a.dtype.kind in "iu" else [np.nan, np.inf, -1e300]
            )
            with np.errstate(over="ignore"):
                a.flat[draw.randrange(a.size)] = draw.choice(extremes)
            made[name] = a
        elif how == 6:
            made[draw.choice(("symmetric", "format", "num_nodes", "row", "col", "rowptr"))] = a
        elif how == 7 and a.dtype.kind in "iuf":
            made[name] = np.flip(a)
        else:
            made[name] = np.array(["no"])
    return saved(draw.choice((np.savez, np.savez_compressed)), **made)


@pytest.fixture(autouse=True)
def nothing_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something is being unpickled")

    for name in ("load", "loads", "Unpickler", "_load", "_loads", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)


@pytest.fixture(autouse=True)
def memory_stays() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MEMORY


def for_a_while(seed: int, step: Callable[[random.Random], bool], least: int = 100) -> None:
    """Runs `step` for `SECONDS`, which says whether a file was taken: some are, most are not."""
    taken, number, end = 0, 0, time.monotonic() + SECONDS
    while time.monotonic() < end or number < least:
        number += 1
        draw = random.Random(1_000_000 * seed + number)
        try:
            taken += step(draw)
        except Exception as e:
            raise AssertionError(f"seed {seed}, number {number}: {type(e).__name__}: {e}") from e
    assert 0 < taken < number


@pytest.mark.parametrize("suffix", CORPUS)
def test_edge_lists(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"edges{suffix}"
    archives = [dict(np.load(io.BytesIO(f))) for f in CORPUS[".npz"]]

    def step(draw: random.Random) -> bool:
        again = suffix == ".npz" and draw.random() < 0.6
        path.write_bytes(remade(draw, draw.choice(archives)) if again else mutated(draw, CORPUS[suffix]))
        try:
            edge_index, num_nodes = read_edges(path)
        except EdgeFileError as e:
            assert str(path) in str(e)
            return False
        assert edge_index.shape[0] == 2 and 0 <= int(edge_index.min()) and int(edge_index.max()) < num_nodes
        return True

    for_a_while(1, step)


def decider_arrays() -> dict[str, Any]:
    """A small one, as it is written."""
    return {
        "format": 2,
        "gpu": GPU.name,
        "version": KERNELS_VERSION,
        "names": np.array(INPUTS),
        "candidates": np.array(["rules", "csr", "W4.F1.V2.S0"]),
        "margin": 0.05,
        "implicit": False,
        "products": np.array(["a", "b"]),
        "scale": np.ones(len(INPUTS)),
        "points": np.zeros((2, len(INPUTS)), np.float32),
        "mean": np.zeros(3),
        "value": np.zeros((2, 3), np.float32),
    }


def test_deciders(tmp_path: Path) -> None:
    path = tmp_path / "decider_x.npz"
    good = decider_arrays()
    corpus = [saved(np.savez, **good), saved(np.savez_compressed, **good)]
    x = np.ones(len(INPUTS), np.float32)

    def step(draw: random.Random) -> bool:
        path.write_bytes(remade(draw, good) if draw.random() < 0.6 else mutated(draw, corpus))
        try:
            made = Decider.load(path)
        except ValueError as e:
            assert "decider_x.npz is no decider" in str(e)
            return False
        assert made.foresee(x).shape == (len(made.candidates),)
        return True

    for_a_while(2, step)


def tuned(**given: Any) -> Tuned:
    values: dict[str, Any] = {"graph": "abc", "width": 64, "dtype": "float32", "reduce": "sum", "gpu": "Test GPU"}
    values |= {"version": KERNELS_VERSION, "candidate": "csr.b2", "ms": 1.0, "rules_ms": 1.5}
    return Tuned(**{**values, "measured": {"rules": 1.5, "csr.b2": 1.0}, "complete": True, **given})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the result of `tuned()` is."""
    monkeypatch.setattr(tune.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    remember(tuned())
    (path,) = tune.cache_folder().iterdir()
    return path


def test_tuned_results(cache: Path) -> None:
    good = cache.read_bytes()
    odd: list[Any] = [None, True, -1, 1e400, 10**400, "", "x", [], {}, [[]], {"rules": None}, float("nan"), "csr.b2"]

    def step(draw: random.Random) -> bool:
        if draw.random() < 0.5:
            content = {"format": 1, **dataclasses.asdict(tuned())}
            content[draw.choice(sorted(content))] = draw.choice(odd)
            cache.write_text(json.dumps(content))
        else:
            cache.write_bytes(mutated(draw, [good]))
        found = recall(tuned().key())
        if found is None:
            return False
        assert found.key() == tuned().key()
        assert tune.decision(found).candidate.kernel in ("csr_dual", "pcsr")
        return True

    for_a_while(3, step)


def test_collections(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "collected.csv", graphs=3)
    good = path.read_bytes()

    def step(draw: random.Random) -> bool:
        path.write_bytes(mutated(draw, [good]))
        try:
            found = Collection.read(path)
            found.features()
            found.device()
        except ValueError:
            return False
        return True

    for_a_while(4, step)


class Bomb:
    """Writes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_objects_are_not_unpickled(tmp_path: Path) -> None:
    bomb = np.array([Bomb(tmp_path / "ran"), 1], dtype=object)
    (tmp_path / "raw.npy").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    (tmp_path / "raw.npz").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    np.save(tmp_path / "array.npy", bomb, allow_pickle=True)
    for name in ("raw.npy", "raw.npz", "array.npy"):
        with pytest.raises(EdgeFileError):
            read_edges(tmp_path / name)
    archives = [dict(np.load(io.BytesIO(f))) for f in CORPUS[".npz"]]
    for arrays in archives:
        for name in arrays:
            np.savez(tmp_path / "e.npz", **{**arrays, name: bomb})
            try:
                read_edges(tmp_path / "e.npz")
            except EdgeFileError as e:
                assert "pickled objects" in str(e)
            else:
                assert name in ("data", "shape")  # nobody reads them
    good = decider_arrays()
    for name in good:
        np.savez(tmp_path / "d.npz", **{**good, name: bomb})
        with pytest.raises(ValueError, match="is no decider"):
            Decider.load(tmp_path / "d.npz")
    assert not (tmp_path / "ran").exists()


def test_archives_that_unfold_beyond_all_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 MB out of 32 KB, where 1 MB is the most; the same in earnest would be 1 TB out of 1 GB."""
    monkeypatch.setattr(FILES, "UNFOLDED", 1 << 20)
    path = tmp_path / "decider_bomb.npz"
    for name in ("edge_index", "num_nodes", "value"):
        np.savez_compressed(path, **{name: np.zeros((2, 1 << 21), np.int64)})
        with pytest.raises(EdgeFileError, match=r"MiB unfold to 0\.03 GiB"):
            read_edges(path)
        with pytest.raises(ValueError, match=r"decider_bomb.npz is no decider: .*MiB unfold to 0\.03 GiB"):
            Decider.load(path)
    np.savez(path, edge_index=np.zeros((2, 1 << 21), np.int64))  # as large, but honestly
    assert read_edges(path)[1] == 1


def test_arrays_that_claim_to_be_large(tmp_path: Path) -> None:
    for suffix in (".npy", ".npz"):
        for count in (1 << 32, 1 << 44, 1 << 61, (1 << 63) - 1):
            file = io.BytesIO()
            np.lib.format.write_array_header_2_0(file, {"descr": "<i8", "fortran_order": False, "shape": (2, count)})
            path = tmp_path / f"large{suffix}"
            if suffix == ".npy":
                path.write_bytes(file.getvalue() + bytes(1000))
            else:
                with zipfile.ZipFile(path, "w") as z:
                    z.writestr("edge_index.npy", file.getvalue() + bytes(1000))
            with pytest.raises(EdgeFileError):
                read_edges(path)


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="no links here")
def test_links_and_files_of_others_in_the_cache(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = tuned().key()
    assert recall(key) == tuned()
    # somebody else's
    owner = os.getuid()
    monkeypatch.setattr(FILES, "_user", lambda: owner + 1)
    assert recall(key) is None and "belongs to another user" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(tune.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # a link, even to a good one
    cache.rename(tmp_path / "good.json")
    cache.symlink_to(tmp_path / "good.json")
    caplog.clear()
    assert recall(key) is None and "no regular file" in caplog.text
    remember(tuned())  # replaces the link, not what it leads to
    assert not cache.is_symlink() and recall(key) == tuned()
    # and what is larger than anything that we write
    caplog.clear()
    with open(cache, "r+b") as f:
        f.truncate(1 << 33)
    assert recall(key) is None and "bytes" in caplog.text


def test_the_cache_is_the_users_alone(cache: Path) -> None:
    assert cache.stat().st_mode & 0o077 == 0
    assert cache.parent.stat().st_mode & 0o077 == 0
