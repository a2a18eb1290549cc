"""``torch.json``: the PyTorch checkpoint that a run came from, and the conversion."""

import json
import os
import zlib
from pathlib import Path
from typing import Any

from ..files.disk import open_file, read_json
from .files import ConvertError
from .layouts import Row
from .rows import Options
from .run import Plan

ORIGIN = "torch.json"  # in the folder of the run
_CHUNK = 2**24


def write_origin(
    folder: Path, run: Path, original: Path, plan: Plan, options: Options
) -> None:
    """Write ``torch.json`` to a folder that will become the folder of a run."""
    content = {
        "original": os.path.relpath(original.resolve(), run.resolve()),
        "files": _digest(original),
        "rows": {n: [row.torch, *row.mlx] for n, row in plan.table.rows.items()},
        "layouts": {n: row.layout for n, row in plan.table.rows.items()},
        "keys": dict(options.keys),
        "names": plan.names or None,
        "accept": [*options.accept],
    }
    (folder / ORIGIN).write_text(json.dumps(content))


def read_origin(folder: Path, given: Options) -> tuple[Path, dict[str, Row], Options]:
    """Return the path of a run's original, its rows, and the options with ``accept``.

    Raises:
        ConvertError: If there is no ``torch.json``, it is damaged, or options other
            than ``accept`` were ``given``, since it contains them.
    """
    path = folder / ORIGIN
    if not path.exists():
        raise ConvertError(
            f"{folder} has no {ORIGIN}, so its PyTorch checkpoint is unknown. Pass an "
            "existing PyTorch checkpoint of the same model with --like, and the model "
            "with --model."
        )
    if given != Options(accept=given.accept):
        raise ConvertError(
            f"{path} already contains all options except --accept. Omit the others, or "
            "pass --like and --model too."
        )
    held = read_json(path)
    try:
        rows = {
            name: Row(torch, tuple(mlx), held["layouts"][name])
            for name, (torch, *mlx) in held["rows"].items()
        }
        accept = (*held["accept"], *given.accept)
        options = Options(keys=held["keys"], names=held["names"], accept=accept)
        return Path(os.path.normpath(folder / held["original"])), rows, options
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConvertError(f"{path} is damaged: {error!r}. {_LIKE}") from error


def check_original(folder: Path, original: Path) -> None:
    """Raise if a run's original is missing, changed, or not a regular file."""
    try:
        found = _digest(original)
    except OSError as error:
        raise ConvertError(
            f"The original of this run, {original}, cannot be read: {error}. {_LIKE}"
        ) from error
    if found != read_json(folder / ORIGIN)["files"]:
        raise ConvertError(
            f"The original of this run, {original}, has changed since. {_LIKE}"
        )


def _digest(original: Path) -> dict[str, Any]:
    """Return the size and the CRC-32 of each file."""
    files = [original]
    if original.is_dir():
        files = sorted(file for file in original.iterdir() if file.is_file())
    found = {}
    for path in files:
        size = crc = 0
        with open(path, "rb", opener=open_file) as file:
            while chunk := file.read(_CHUNK):
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        found[path.name if original.is_dir() else ""] = [size, crc]
    return found


_LIKE = (
    "Pass the PyTorch checkpoint that the run came from, or another of the same model, "
    "with --like."
)
