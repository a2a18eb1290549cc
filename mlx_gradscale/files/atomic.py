"""Write folders atomically: fill a hidden folder, then rename it to the target."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..torch_checkpoint.disk import atomic_write as atomic_write
from ..torch_checkpoint.disk import hidden_path, sync


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Create a temporary folder that replaces ``path`` at the end of the block.

    A rename cannot replace a folder with contents, so the old folder is renamed to
    ``NAME.old-...`` first and removed last. An incomplete folder is never visible.
    """
    target = Path(os.path.realpath(path))
    is_used = target.exists() and any(target.iterdir())
    old = target.with_name(f"{target.name}.old-{secrets.token_hex(4)}")
    folder = hidden_path(target.parent)
    folder.mkdir()
    try:
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
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sync(target.parent)
    if is_used:
        discard(old)


def discard(folder: Path) -> None:
    """Remove a folder, hiding it first so that it is never visible half-removed."""
    hidden = hidden_path(folder.parent)
    with suppress(FileNotFoundError):  # another writer has removed it
        folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Remove the hidden folders of writers that were killed."""
    for folder in parent.glob(f".mlx_gradscale-{'[0-9a-f]' * 16}.tmp"):
        if folder.is_dir():  # rmtree() would wait for a pipe, and refuses links
            shutil.rmtree(folder, ignore_errors=True)
