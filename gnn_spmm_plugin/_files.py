"""Files that somebody else may have written: what they are is asked before they are read; nothing is unpickled."""

from __future__ import annotations

import os
import stat
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

#: An archive may unfold to this many bytes, or this many times its own size: deflate makes up to 1000 of 1.
UNFOLDED, TIMES = 1 << 30, 100


def open_npz(path: Path) -> Any:
    """An open ``.npz`` archive, to be closed; its arrays are read when they are asked for.

    Raises:
        ValueError: it is none, holds pickled objects, or would unfold beyond all measure.
        OSError: it cannot be read.
    """
    with zipfile.ZipFile(path) as z:  # a member is never read beyond the size that is written here
        unfolded = sum(member.file_size for member in z.infolist())
    if unfolded > max(UNFOLDED, TIMES * path.stat().st_size):
        raise ValueError(
            f"its {path.stat().st_size / 2**20:.2f} MiB unfold to {unfolded / 2**30:.2f} GiB, which is not believed; "
            "write it with numpy.savez, without compression"
        )
    return np.load(path, allow_pickle=False)


def read_own(path: Path, most: int) -> str:
    """The text of a file that this user wrote.

    Raises:
        ValueError: it is a link, a folder, a device, another user's, longer than `most` bytes, or no text.
        OSError: it cannot be read, or is not there.
    """
    if not stat.S_ISREG(os.lstat(path).st_mode):  # before it is opened: a pipe would wait
        raise ValueError("it is no regular file")
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with open(handle, encoding="utf-8") as f:
        facts = os.fstat(handle)  # of what was opened, whatever it was replaced by
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError("it is no regular file")
        if facts.st_uid != _user():
            raise ValueError("it belongs to another user")
        if facts.st_size > most:
            raise ValueError(f"it has {facts.st_size} bytes, expected {most} at most")
        return f.read(most + 1)


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0  # where there are no users, files say 0


__all__ = ["open_npz", "read_own"]
