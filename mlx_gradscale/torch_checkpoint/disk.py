"""Open only regular files, and write a file whole or not at all."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def open_file(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file for ``open(..., opener=open_file)``; raise unless it is regular.

    Opening a pipe could block forever, and opening a device could have side effects.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(
            f"{os.fspath(path)} is not a regular file. Pass the path of a file, not of "
            "a folder, a pipe or a device."
        )
    return os.open(path, flags)


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` at the end of the block.

    The data is synced to disk before the rename. If the block raises, the old file is
    kept. If the process is killed, a hidden file that ends in ``.tmp`` may be left.
    """
    target = Path(os.path.realpath(path))  # preserve a symbolic link
    if target.exists():
        os.close(open_file(target, os.O_RDONLY))
    temporary = hidden_path(target.parent)
    try:
        with open(temporary, "xb", buffering=2**20) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def hidden_path(parent: Path) -> Path:
    """Return a new path for a temporary file or folder."""
    return parent / f".mlx_gradscale-{secrets.token_hex(8)}.tmp"


def sync(*paths: Path) -> None:
    """Sync files, or the directory entries of folders, to disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
