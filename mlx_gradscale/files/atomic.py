"""Write files and folders atomically, and clean up after killed writers.

A writer fills a hidden folder next to the target, then renames this folder, or the file
in it, to the target. Meanwhile, it holds a shared lock on the parent folder; the system
releases the lock if the process is killed. If a writer gets an exclusive lock, no
other writer is active, so it removes all hidden folders as leftovers.
"""

import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from .paths import check_file

_HIDDEN = f".mlx_gradscale-{'[0-9a-f]' * 16}.tmp"


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` at the end of the block.

    The new file has the permissions of the old one. The data is synced to disk before
    the rename. If the block raises, the old file is kept.
    """
    check_file(path, overwrite=True)
    target = Path(os.path.realpath(path))  # preserve a symbolic link
    with temporary_folder(target.parent) as folder:
        with open(folder / "new", "wb", buffering=2**20) as file:
            copy_modes(target, folder / "new")
            yield file
        sync(folder / "new")
        os.replace(folder / "new", target)
        sync(target.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Create a temporary folder that replaces ``path`` at the end of the block.

    A rename cannot replace a folder with contents, so the old folder is renamed to
    ``NAME.old-...`` first and removed last. An incomplete folder is never visible. The
    new folder and its files have the permissions of the old ones.
    """
    target = Path(os.path.realpath(path))
    is_used = target.exists() and any(target.iterdir())
    old = target.with_name(f"{target.name}.old-{secrets.token_hex(4)}")
    with temporary_folder(target.parent) as folder:
        copy_modes(target, folder)
        yield folder
        copy_modes(target, folder)
        sync(*folder.rglob("*"), folder)
        if is_used:
            target.rename(old)
        try:
            folder.rename(target)
        except OSError:
            if is_used:
                old.rename(target)
            raise
        sync(target.parent)
    if is_used:
        discard(old)


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Create a hidden folder; remove it after the block unless it was renamed."""
    descriptor, folder = os.open(parent, os.O_RDONLY), _hidden_path(parent)
    try:
        with suppress(OSError):  # another writer holds the lock
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for leftover in filter(Path.is_dir, parent.glob(_HIDDEN)):
                shutil.rmtree(leftover, ignore_errors=True)
        with suppress(OSError):  # some network disks do not support locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def copy_modes(old: Path, new: Path) -> None:
    """Copy the permissions of a file, or of a folder and its files, if they exist.

    The owner can always write to the new folder.
    """
    for path in (new, *new.glob("*")):
        # Another writer may remove the old one, and some disks have no permissions.
        with suppress(OSError):
            mode = stat.S_IMODE((old / path.relative_to(new)).stat().st_mode)
            path.chmod(mode | stat.S_IRWXU * path.is_dir())


def discard(folder: Path) -> None:
    """Remove a folder, hiding it first so that it is never visible half-removed."""
    hidden = _hidden_path(folder.parent)
    with suppress(FileNotFoundError):  # another writer has removed it
        folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def sync(*paths: Path) -> None:
    """Sync files, or the directory entries of folders, to disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _hidden_path(parent: Path) -> Path:
    return parent / f".mlx_gradscale-{secrets.token_hex(8)}.tmp"
