"""Write folders atomically, and clean up after killed writers.

A writer fills a hidden folder next to the target, then renames it to the target.
Meanwhile, it holds a shared lock on the parent folder; the system releases the lock if
the process is killed. If a writer gets an exclusive lock, no other writer is active, so
it removes all hidden folders as leftovers.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..torch_checkpoint.disk import atomic_write, hidden_path, sync

__all__ = ["atomic_folder", "atomic_write", "discard", "sync", "temporary_folder"]

_HIDDEN = f".mlx_gradscale-{'[0-9a-f]' * 16}.tmp"


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Create a temporary folder that replaces ``path`` at the end of the block.

    A rename cannot replace a folder with contents, so the old folder is renamed to
    ``NAME.old-...`` first and removed last. An incomplete folder is never visible.
    """
    target = Path(os.path.realpath(path))
    is_used = target.exists() and any(target.iterdir())
    old = target.with_name(f"{target.name}.old-{secrets.token_hex(4)}")
    with temporary_folder(target.parent) as folder:
        yield folder
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
    descriptor, folder = os.open(parent, os.O_RDONLY), hidden_path(parent)
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


def discard(folder: Path) -> None:
    """Remove a folder, hiding it first so that it is never visible half-removed."""
    hidden = hidden_path(folder.parent)
    with suppress(FileNotFoundError):  # another writer has removed it
        folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
