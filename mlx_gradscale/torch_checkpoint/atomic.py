"""Write a file whole or not at all."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` at the end of the block.

    The data is synced to disk before the rename. If the block raises, the old file is
    kept. If the process is killed, a hidden file that ends in ``.tmp`` may be left.
    """
    target = Path(os.path.realpath(path))  # preserve a symbolic link
    if target.exists() and not stat.S_ISREG(target.stat().st_mode):
        raise OSError(
            f"{os.fspath(path)} is not a regular file. Pass the path of a file, not of "
            "a folder, a pipe or a device."
        )
    temporary = target.with_name(f".mlx_gradscale-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb", buffering=2**20) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        temporary.unlink(missing_ok=True)
