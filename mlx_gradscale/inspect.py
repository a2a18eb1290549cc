"""The ``mlx_gradscale inspect`` command, which lists the contents of a checkpoint.

It reads the shapes and dtypes of tensors, but not their data.
"""

import argparse
import math
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import torch_checkpoint
from .checkpoint import latest_checkpoint
from .commands import EXPECTED, run_command
from .files.arrays import open_arrays
from .files.disk import read_json
from .files.text import align, dtype_name, plural, printable, shorten
from .torch_checkpoint import Tensor, plain_value, replace_tensors

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar", ".safetensors", ".json")
_PLAIN = {type(None), bool, int, float, str, bytes}
_CONTAINERS = (dict, list, tuple, set, frozenset)
_SHORT_LIST, _MAX_ROWS, _MAX_DEPTH = 8, 20_000, 12


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``mlx_gradscale inspect`` and return its exit code."""
    return run_command(lambda: _inspect(argv), EXPECTED)


def _inspect(argv: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(
        prog="mlx_gradscale inspect",
        epilog="example: mlx_gradscale inspect run.pt",
        description="List the contents of a PyTorch checkpoint, a safetensors or JSON "
        "file, or a folder of them. Does not execute code or read tensor data.",
    )
    parser.add_argument(
        "path", metavar="PATH", type=Path, help="file or folder to read"
    )
    text, errors = describe(parser.parse_args(argv).path)
    print(text)
    if errors:
        name, why = errors[0]
        number = plural(len(errors), "file")
        raise ValueError(f"{number} could not be read. {name}: {why}")


def describe(path: Path) -> tuple[str, list[tuple[str, str]]]:
    """Describe a file, or the files in a folder, as a table.

    Also return the name of each file in a folder that cannot be read, and the reason.
    """
    errors: list[tuple[str, str]] = []
    is_folder = path.is_dir() and not (path / ".metadata").is_file()
    content = _read_folder(path, errors) if is_folder else _read(path)
    sizes: list[int] = []
    replace_tensors(content, lambda _, leaf: sizes.append(math.prod(leaf.shape)))
    rows = [("name", "value"), *islice(_rows(content, ()), _MAX_ROWS + 1)]
    if len(rows) > _MAX_ROWS + 1:
        rows[-1] = ("...", f"only {_MAX_ROWS:,} values are listed")
    rows += [(name, f"cannot be read: {why}") for name, why in errors]
    numbers = f"{plural(len(sizes), 'tensor')}, {plural(sum(sizes), 'element')}"
    return f"{printable(path)}: {numbers}\n\n{align(rows, left=2)}", errors


def _read_folder(path: Path, errors: list[tuple[str, str]]) -> dict[str, Any]:
    """Read the files in a folder or, if it holds checkpoints, in the newest one."""
    folder, found = path, dict[str, Any]()
    with suppress(FileNotFoundError):
        folder = latest_checkpoint(path)
    for file in sorted([*folder.glob("*.*"), *folder.glob("rank-*/*.*")]):
        if file.suffix in _SUFFIXES and not file.is_dir():
            name = str(file.relative_to(path))
            try:
                found[name] = _read(file)
            except EXPECTED as error:
                errors.append((name, shorten(str(error), 400)))
    if not found and not errors:
        raise ValueError(f"{path} contains no files of type {', '.join(_SUFFIXES)}.")
    return found


def _read(path: Path) -> Any:
    if path.suffix == ".json":
        return read_json(path)
    if path.suffix == ".safetensors":
        return dict(sorted(open_arrays(path).items()))
    return torch_checkpoint.shapes(path)


def _rows(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each value."""
    value = plain_value(value)
    pairs: Any = ()
    if isinstance(value, dict):
        if [*value] == ["array"]:  # in training.json: the name of an array
            return
        pairs = value.items()
    elif isinstance(value, (list, tuple)) and not _is_plain(value[:1000]):
        pairs = enumerate(value)
    if not pairs or len(path) == _MAX_DEPTH:
        yield "/".join(path) or "the file itself", _text(value)
    else:
        for key, item in pairs:
            yield from _rows(item, (*path, _text(key)))


def _is_plain(values: Collection[Any]) -> bool:
    return {*map(type, values)} <= _PLAIN


def _text(value: Any) -> str:
    if isinstance(value, (Tensor, mx.array)):
        return f"{dtype_name(value)} {'x'.join(map(str, value.shape)) or 'scalar'}"
    if isinstance(value, (bytes, bytearray)):
        return plural(len(value), "byte")
    if isinstance(value, int) and value.bit_length() > 256:
        return f"int of {value.bit_length()} bits"
    if isinstance(value, _CONTAINERS) and value:
        is_short = len(value) <= _SHORT_LIST and not isinstance(value, dict)
        if not (is_short and _is_plain(value)):
            return f"{type(value).__name__} of {len(value)}"
    return shorten(str(value))


if __name__ == "__main__":
    sys.exit(main())
