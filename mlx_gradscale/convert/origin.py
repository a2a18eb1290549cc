"""``torch.json``: the PyTorch checkpoint that a run came from, and the conversion."""

import json
import os
import zlib
from functools import partial
from pathlib import Path
from typing import Any

from ..files.disk import open_file, read_json
from .files import ConvertError
from .layouts import Row
from .rows import Options
from .run import Plan

ORIGIN = "torch.json"  # in the folder of the run


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


def read_origin(
    folder: Path, given: Options, like: Path | None
) -> tuple[Path, dict[str, Row], Options]:
    """Return the original of a run (or ``like``), its rows, and all options.

    Raises:
        ConvertError: If the original is missing or has changed, if there is no
            ``torch.json`` or it is damaged, or if options other than ``accept`` were
            given, since it contains them.
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
    try:
        held = read_json(path)
        rows = {
            name: Row(torch, tuple(mlx), held["layouts"][name])
            for name, (torch, *mlx) in held["rows"].items()
        }
        accept = (*held["accept"], *given.accept)
        options = Options(keys=held["keys"], names=held["names"], accept=accept)
        original = Path(os.path.normpath(folder / held["original"]))
        if like is None and _digest(original) != held["files"]:
            raise ValueError(f"{original} has changed since")
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise ConvertError(
            f"The original in {path} cannot be used: {type(error).__name__}: {error}. "
            "Pass the PyTorch checkpoint that the run came from, or another of the "
            "same model, with --like."
        ) from error
    return like or original, rows, options


def _digest(original: Path) -> dict[str, Any]:
    """Return the size and the CRC-32 of each file."""
    files = [original]
    if original.is_dir():
        files = sorted(file for file in original.iterdir() if file.is_file())
    found = {}
    for path in files:
        crc = 0
        with open(path, "rb", opener=open_file) as file:
            for chunk in iter(partial(file.read, 2**24), b""):
                crc = zlib.crc32(chunk, crc)
            found[path.name if original.is_dir() else ""] = [file.tell(), crc]
    return found
