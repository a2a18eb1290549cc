"""Read JSON of bounded size, and write folders atomically.

``torch_checkpoint``, which stands alone, has the functions for single files.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..torch_checkpoint.disk import atomic_write as atomic_write
from ..torch_checkpoint.disk import hidden_path, sync
from ..torch_checkpoint.disk import open_file as open_file

# The worst JSON text of this size takes 0.6 GB when parsed (single-key objects).
LONGEST_JSON = 2**24


def check_file(path: str | os.PathLike[str], overwrite: bool = False) -> None:
    """Raise if ``path`` exists, unless ``overwrite`` is True."""
    if os.path.exists(path) and not overwrite:
        raise FileExistsError(
            f"{os.fspath(path)} already exists. Pass --overwrite (overwrite=True) to "
            "replace it."
        )


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read an untrusted JSON file.

    Raises:
        ValueError: If the text is not JSON, is too long, or is nested too deeply.
    """
    with open(path, "rb", opener=open_file) as file:
        data = file.read(LONGEST_JSON + 1)
    try:
        if len(data) > LONGEST_JSON:
            raise ValueError(f"the JSON text is longer than {LONGEST_JSON:,} bytes.")
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        is_deep = isinstance(error, RecursionError)
        problem = "it is nested too deeply" if is_deep else error
        raise ValueError(f"{os.fspath(path)} cannot be read: {problem}") from error


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
