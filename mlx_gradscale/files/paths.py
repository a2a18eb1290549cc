"""Open only regular files, check untrusted file names, and limit the size of JSON."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The worst JSON text of this size takes 0.6 GB when parsed (single-key objects).
LONGEST_JSON = 2**24


def open_file(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file for ``open(..., opener=open_file)``; raise unless it is regular.

    Opening a pipe could block forever, and opening a device could have side effects.
    """
    _check_regular(path)
    return os.open(path, flags)


def open_inside(path: str | os.PathLike[str], flags: int) -> int:
    """Like ``open_file``, but refuse symbolic links."""
    if os.path.islink(path):
        raise OSError(
            f"{os.fspath(path)} is a symbolic link, which is not followed because it "
            "could point anywhere. Replace the link with a copy of the file."
        )
    return open_file(path, flags | os.O_NOFOLLOW)


def _check_regular(path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(
            f"{os.fspath(path)} is not a regular file. Pass the path of a file, not of "
            "a folder, a pipe or a device."
        )


def check_file(path: str | os.PathLike[str], overwrite: bool = False) -> None:
    """Raise if ``path`` exists, unless ``overwrite`` is True and it is a file."""
    if not os.path.exists(path):
        return
    _check_regular(path)
    if not overwrite:
        raise FileExistsError(
            f"{os.fspath(path)} already exists. Pass --overwrite (overwrite=True) to "
            "replace it."
        )


def check_name(name: object, what: str) -> str:
    """Return a name from an untrusted file; raise unless it is a plain file name.

    ``what`` identifies the untrusted file in the error.
    """
    text = name if isinstance(name, str) else ""
    if text in ("", ".", "..") or not text.isprintable() or {*text} & {*"/\\"}:
        raise ValueError(f"{what} refers to {name!r}, which is not a plain file name.")
    return text


def contains(outer: Path, inner: Path) -> bool:
    """Return whether ``outer`` contains ``inner`` or is the same path."""
    outer, inner = outer.resolve(), inner.resolve()
    candidates = (inner, *inner.parents)
    if not outer.exists():
        return outer in candidates
    # Use samefile, because macOS usually ignores case: "Run" is "run".
    return any(path.exists() and path.samefile(outer) for path in candidates)


def parse_json(data: bytes) -> Any:
    """Parse untrusted JSON text.

    Raises:
        ValueError: If the text is not JSON, is too long, or is nested too deeply.
    """
    if len(data) > LONGEST_JSON:
        raise ValueError(f"the JSON text is longer than {LONGEST_JSON:,} bytes.")
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("the JSON text is nested too deeply.") from None


def read_json(
    path: str | os.PathLike[str], opener: Callable[[str, int], int] = open_file
) -> Any:
    """Read a JSON file within the limits of :func:`parse_json`."""
    with open(path, "rb", opener=opener) as file:
        data = file.read(LONGEST_JSON + 1)
    try:
        return parse_json(data)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} cannot be read: {error}") from error
