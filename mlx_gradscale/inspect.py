"""The ``mlx_gradscale inspect`` command, which lists the contents of a checkpoint.

It reads the shapes and dtypes of tensors, but not their data.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from . import torch_checkpoint
from .checkpoint import latest_checkpoint
from .commands import EXPECTED, read_limits, run_command
from .files.arrays import read_shapes
from .files.paths import LONGEST_JSON, open_file, read_json
from .files.text import align, dtype_name, plural, printable, shorten
from .torch_checkpoint import Limits, TensorShape, plain_value

__all__ = ["describe", "main", "render"]

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar", ".safetensors", ".json")
_SHORT_LIST, _MOST_ROWS, _DEEPEST = 8, 20_000, 12
# Bytes of JSON, such as the header of a safetensors file, that count as one operation.
_JSON_BYTES = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``mlx_gradscale inspect``.

    Args:
        argv (list, optional): The arguments of the command. Default: the arguments of
            the process.

    Returns:
        int: The exit code: 0 on success, 1 after an error; see :func:`run_command`.
    """
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
    parser.add_argument(
        "--json", action="store_true", help="print the contents as JSON"
    )
    parser.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="set a limit of the reader, such as operations=1e8",
    )
    arguments = parser.parse_args(argv)
    found = describe(arguments.path, read_limits(arguments.limit))
    print(json.dumps(found, indent=1) if arguments.json else render(found))
    if found["errors"]:
        number = plural(len(found["errors"]), "file")
        name, why = next(iter(found["errors"].items()))
        raise ValueError(f"{number} could not be read. {name}: {why}")


def describe(path: Path | str, limits: Limits | None = None) -> dict[str, Any]:
    """Describe the contents of a file or folder, as plain values.

    Args:
        path (Path): A PyTorch, safetensors or JSON file, or a folder.
        limits (Limits, optional): Limits on memory and work. Default: ``Limits()``.

    Returns:
        dict: ``path``; the numbers of ``tensors`` and of their ``elements``;
        ``entries``, the first 20,000 values, each a dict with the ``name`` and the
        ``value`` or, for a tensor, the ``shape`` and ``dtype``; and ``errors``, which
        maps each file of a folder that cannot be read to the reason.
    """
    path = Path(path)
    is_folder = path.is_dir() and not (path / ".metadata").is_file()
    limits = limits or Limits()  # shared by all files of a folder
    errors: dict[str, str] = {}
    content = _read_folder(path, limits, errors) if is_folder else _read(path, limits)
    entries = list(islice(_entries(content, ()), _MOST_ROWS + 1))
    if len(entries) > _MOST_ROWS:
        entries[-1] = {"name": "...", "value": f"only {_MOST_ROWS:,} values are listed"}
    sizes = _sizes(content)
    numbers = {"tensors": len(sizes), "elements": sum(sizes)}
    return {"path": str(path), **numbers, "entries": entries, "errors": errors}


def _read_folder(path: Path, limits: Limits, errors: dict[str, str]) -> dict[str, Any]:
    """Read the files in a folder or, if it holds checkpoints, in the newest one."""
    folder, found = path, dict[str, Any]()
    with suppress(FileNotFoundError):
        folder = latest_checkpoint(path)
    for file in sorted(folder.iterdir()):
        name = str(file.relative_to(path))
        if file.suffix not in _SUFFIXES or file.is_dir():
            continue
        if file.is_symlink():
            found[name] = "symbolic link, not followed"
            continue
        try:
            found[name] = _read(file, limits)
        except EXPECTED as error:
            errors[name] = shorten(str(error).removeprefix(f"{file}: "), 400)
    if not found and not errors:
        raise ValueError(f"{path} contains no files of type {', '.join(_SUFFIXES)}.")
    return found


def _read(path: Path, limits: Limits) -> Any:
    try:
        if path.suffix == ".json":
            _spend_json(path.stat().st_size, limits)
            return read_json(path)
        if path.suffix == ".safetensors":
            with open(path, "rb", opener=open_file) as file:
                _spend_json(int.from_bytes(file.read(8), "little"), limits)
            found = sorted(read_shapes(path).items())
            return {n: TensorShape(shape, dtype_name(x)) for n, (x, shape) in found}
        return torch_checkpoint.shapes(path, limits)
    except torch_checkpoint.CheckpointError as error:
        raise torch_checkpoint.CheckpointError(f"{path}: {error}") from error


def _spend_json(size: int, limits: Limits) -> None:
    if size <= LONGEST_JSON:  # longer text is refused before it is parsed
        limits.spend(size // _JSON_BYTES)


def _entries(value: Any, path: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    name = "/".join(path) or "the file itself"
    if isinstance(value, TensorShape):
        yield {"name": name, "shape": list(value.shape), "dtype": value.dtype}
        return
    plain = plain_value(value)
    pairs: Any = ()
    if isinstance(plain, dict):
        pairs = plain.items()
    elif isinstance(plain, (list, tuple)) and not all(map(_is_plain, plain[:1000])):
        pairs = enumerate(plain)
    if not pairs or len(path) == _DEEPEST:
        yield {"name": name, "value": _shown(plain)}
    else:
        for key, item in pairs:
            yield from _entries(item, (*path, str(_shown(key))))


def _sizes(content: Any) -> list[int]:
    """Return the number of elements of each tensor, each time that it appears."""
    sizes, pending, seen = [], [content], set()
    for value in pending:
        plain = plain_value(value)
        if isinstance(value, TensorShape):
            sizes.append(math.prod(value.shape))
        elif isinstance(plain, (dict, list, tuple)) and id(value) not in seen:
            pending += plain.values() if isinstance(plain, dict) else plain
            # A namespace may contain itself. Other containers cannot.
            if plain is not value:
                seen.add(id(value))
    return sizes


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, bytes))


def _shown(value: Any) -> Any:
    """Shorten a value for JSON and for tables, without reading all of a long one."""
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        is_short = len(value) <= _SHORT_LIST and all(map(_is_plain, value))
        if value and (isinstance(value, dict) or not is_short):
            return f"{type(value).__name__} of {len(value)}"
        value = str(type(value)(map(_shown, value)))
    if isinstance(value, (bytes, bytearray)):
        return plural(len(value), "byte")
    if isinstance(value, int) and value.bit_length() > 256:
        return f"int of {value.bit_length()} bits"
    if isinstance(value, float) and math.isfinite(value):  # JSON has no inf or NaN
        return value
    is_number = value is None or isinstance(value, int)
    return value if is_number else shorten(str(value)[:200])


def render(found: dict[str, Any]) -> str:
    """Format the result of :func:`describe` as text.

    Example:
        >>> entry = {"name": "fc.weight", "shape": [2, 3], "dtype": "float32"}
        >>> found = {"path": "a.pt", "tensors": 1, "elements": 6, "entries": [entry]}
        >>> print(render(found))
        a.pt: 1 tensor, 6 elements
        <BLANKLINE>
        name       value
        fc.weight  float32 2x3
    """
    rows = [("name", "value")]
    for entry in found["entries"]:
        value = entry.get("value")
        if "shape" in entry:
            value = f"{entry['dtype']} {'x'.join(map(str, entry['shape'])) or 'scalar'}"
        rows.append((entry["name"], value))
    for name, why in found.get("errors", {}).items():
        rows.append((name, f"cannot be read: {why}"))
    tensors, elements = (plural(found[x + "s"], x) for x in ("tensor", "element"))
    head = f"{found['path']}: {tensors}, {elements}"
    return "\n".join([printable(head), "", align(rows, left=2)])


if __name__ == "__main__":
    sys.exit(main())
