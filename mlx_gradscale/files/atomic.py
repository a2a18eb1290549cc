"""Write files and folders atomically, and clean up after killed writers.

A writer fills a hidden folder next to its target and holds a lock on it, which ends
with the process. The next writer removes hidden folders that are not locked.
"""

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from .paths import check_file

_HIDDEN = re.compile(r"\.mlx_gradscale-[0-9a-f]{16}\.tmp")


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make an ``OSError`` with no file name, or a hidden one, name ``path``.

    Example:
        >>> with naming("run.pt"):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
        ...
        OSError: [Errno 28] No space left on device: 'run.pt'
    """
    try:
        yield
    except OSError as error:
        is_named = error.filename and not _HIDDEN.search(os.fsdecode(error.filename))
        if error.errno is None or is_named:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` at the end of the block.

    The data is synced to disk before the rename. If the block raises, the old file is
    kept.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "scale.bin")
        >>> with atomic_write(path) as file:
        ...     _ = file.write(b"65536")
        >>> os.listdir(os.path.dirname(path))
        ['scale.bin']
    """
    check_file(path, overwrite=True)
    target = Path(os.path.realpath(path))  # preserve a symbolic link
    with naming(path), temporary_folder(target) as folder:
        with open(folder / "new", "wb", buffering=2**20) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(folder / "new", target)
        sync(target.parent)


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Open a hidden folder that is renamed to ``path`` at the end of the block.

    Raises:
        FileExistsError: ``path`` exists and is not an empty folder.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(f"{os.fspath(path)} already exists: give another path.")
    with naming(path), temporary_folder(target) as folder:
        yield folder
        for file in folder.rglob("*"):
            sync(file)
        sync(folder)
        folder.rename(target)
        sync(target.parent)


@contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """Make a hidden folder next to ``target``, and remove it unless it was renamed."""
    _remove_leftovers(target.parent)
    folder, descriptor = _make_locked(target)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def discard(folder: Path, target: Path) -> None:
    """Hide a folder before removing it, so that a partial one is never visible."""
    hidden = _hidden_path(target)
    with suppress(FileNotFoundError):  # another writer was faster
        folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def sync(path: str | os.PathLike[str]) -> None:
    """Sync a file, or the directory entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hidden_path(target: Path) -> Path:
    return target.with_name(f".mlx_gradscale-{secrets.token_hex(8)}.tmp")


def _make_locked(target: Path) -> tuple[Path, int]:
    while True:
        folder = _hidden_path(target)
        folder.mkdir()
        # Until it is locked, another writer may mistake it for a leftover.
        with suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY)
            with suppress(OSError):  # some network disks do not support locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists():
                return folder, descriptor
            os.close(descriptor)


def _remove_leftovers(parent: Path) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY
    with suppress(OSError):  # a folder may be writable but not listable
        for name in filter(_HIDDEN.fullmatch, os.listdir(parent)):
            with suppress(OSError):
                descriptor = os.open(parent / name, flags)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(parent / name)
                finally:
                    os.close(descriptor)
