"""Open only regular files, and limit the size of JSON."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..torch_checkpoint.disk import open_file as open_file

# The worst JSON text of this size takes 0.6 GB when parsed (single-key objects).
LONGEST_JSON = 2**24


def open_inside(path: str | os.PathLike[str], flags: int) -> int:
    """Like ``open_file``, but refuse symbolic links."""
    if os.path.islink(path):
        raise OSError(
            f"{os.fspath(path)} is a symbolic link, which is not followed because it "
            "could point anywhere. Replace the link with a copy of the file."
        )
    return open_file(path, flags | os.O_NOFOLLOW)


def check_file(path: str | os.PathLike[str], overwrite: bool = False) -> None:
    """Raise if ``path`` exists, unless ``overwrite`` is True."""
    if os.path.exists(path) and not overwrite:
        raise FileExistsError(
            f"{os.fspath(path)} already exists. Pass --overwrite (overwrite=True) to "
            "replace it."
        )


def contains(outer: Path, inner: Path) -> bool:
    """Return whether ``outer`` contains ``inner`` or is the same path."""
    outer, inner = outer.resolve(), inner.resolve()
    candidates = (inner, *inner.parents)
    if not outer.exists():
        return outer in candidates
    # Use samefile, because macOS usually ignores case: "Run" is "run".
    return any(path.exists() and path.samefile(outer) for path in candidates)


def read_json(
    path: str | os.PathLike[str], opener: Callable[[str, int], int] = open_file
) -> Any:
    """Read an untrusted JSON file.

    Raises:
        ValueError: If the text is not JSON, is too long, or is nested too deeply.
    """
    with open(path, "rb", opener=opener) as file:
        data = file.read(LONGEST_JSON + 1)
    try:
        if len(data) > LONGEST_JSON:
            raise ValueError(f"the JSON text is longer than {LONGEST_JSON:,} bytes.")
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        is_deep = isinstance(error, RecursionError)
        problem = "it is nested too deeply" if is_deep else error
        raise ValueError(f"{os.fspath(path)} cannot be read: {problem}") from error
