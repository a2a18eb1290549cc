"""The command ``mlx_gradscale inspect``: show the contents of a checkpoint.

It reads shapes and dtypes, not the tensors themselves.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import torch_checkpoint
from .checkpoint import latest_checkpoint
from .commands import run_command
from .convert.command import LIMIT_FLAGS, read_limits
from .files.arrays import read_header
from .files.paths import read_json
from .files.text import dtype_name, printable, shorten, size, table
from .torch_checkpoint import Limits, Placeholder, TensorShape, plain_value

__all__ = ["describe", "main", "render"]

_EXPECTED = (ValueError, TypeError, KeyError, OSError, RuntimeError, MemoryError)
_TORCH = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_SHORT_LIST, _MOST_ROWS, _DEEPEST = 8, 20_000, 12


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv (list): Default: the arguments of the process.

    Returns:
        int: 0, or 1 after an error, which is printed on one line.
    """
    return run_command(lambda: _inspect(argv), _EXPECTED, flags=LIMIT_FLAGS)


def _inspect(argv: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(
        prog="mlx_gradscale inspect",
        epilog="example: mlx_gradscale inspect run.pt",
        description="Print what is in a PyTorch checkpoint, a safetensors or JSON file "
        "or a folder of them. Nothing in a file is executed, and no tensor is read.",
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="a file or folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="raise a limit of the reader that an error names",
    )
    arguments = parser.parse_args(argv)
    found = describe(arguments.path, read_limits(arguments.limit))
    print(json.dumps(found, indent=1) if arguments.json else render(found))


def describe(path: Path | str, limits: Limits | None = None) -> dict[str, Any]:
    """Describe the contents of a file or folder, as plain values.

    Args:
        path (Path): A PyTorch, safetensors or JSON file, or a folder.
        limits (Limits, optional): Limits for reading PyTorch files.

    Returns:
        dict: ``path``, and ``entries`` with one entry for each value: its ``name``, and
        either ``shape``, ``dtype`` and ``bytes`` of a tensor, or its ``value``.
    """
    path = Path(path)
    entries: list[dict[str, Any]] = []
    for name, value in _contents(path, limits).items():
        for entry in _entries(value, (name,) if name else (), 0):
            if len(entries) == _MOST_ROWS:
                entries.append({"name": "...", "value": "and more"})
                return {"path": str(path), "entries": entries}
            entries.append(entry)
    return {"path": str(path), "entries": entries}


def _contents(path: Path, limits: Limits | None) -> dict[str, Any]:
    """Return the values in a file, or in each file of a folder."""
    if not path.is_dir():
        return {"": _read(path, limits)}
    if (path / ".metadata").is_file():
        return {"": torch_checkpoint.shapes(path, limits)}
    found = {}
    if any(path.glob("save-*")):
        newest = latest_checkpoint(path)
        found = {f"{newest.name}/{f.name}": f for f in sorted(newest.iterdir())}
    found |= {f.name: f for f in sorted(path.iterdir()) if f.is_file()}
    known = {
        n: f for n, f in found.items() if f.suffix in (*_TORCH, ".safetensors", ".json")
    }
    if not known:
        raise ValueError(f"{path} holds no PyTorch, safetensors or JSON file.")
    return {name: _read(file, limits) for name, file in known.items()}


def _read(path: Path, limits: Limits | None) -> Any:
    if path.suffix == ".json":
        return read_json(path)
    if path.suffix == ".safetensors":
        header = sorted(read_header(path).items())
        return {n: TensorShape(x.shape, dtype_name(x.dtype)) for n, x in header}
    try:
        return torch_checkpoint.shapes(path, limits)
    except torch_checkpoint.CheckpointError as error:
        raise torch_checkpoint.CheckpointError(f"{path}: {error}") from error


def _entries(value: Any, path: tuple[Any, ...], depth: int) -> Iterator[dict[str, Any]]:
    name = "/".join(shorten(str(key)[:200]) for key in path) or "the file itself"
    if isinstance(value, TensorShape):
        total = math.prod(value.shape) * _item_size(value.dtype)
        shape = list(value.shape)
        yield {"name": name, "shape": shape, "dtype": value.dtype, "bytes": total}
        return
    plain = plain_value(value)
    if isinstance(plain, dict) and plain and depth < _DEEPEST:
        for key, item in plain.items():
            yield from _entries(item, (*path, key), depth + 1)
    elif isinstance(plain, (list, tuple)) and depth < _DEEPEST and _is_nested(plain):
        for i, item in enumerate(plain):
            yield from _entries(item, (*path, i), depth + 1)
    else:
        yield {"name": name, "value": _shown(plain)}


def _is_nested(value: Sequence[Any]) -> bool:
    kinds = (dict, list, tuple, TensorShape, Placeholder)
    return any(isinstance(item, kinds) for item in value)


def _item_size(dtype: str) -> int:
    """Return the bytes per element, from the number of bits in a dtype's name."""
    bits = re.search(r"\d+", dtype)
    return max(int(bits[0]) // 8, 1) if bits else 1


def _shown(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON cannot represent it
    if isinstance(value, (bool, int, float, type(None))):
        return value
    if isinstance(value, (list, tuple, set, frozenset)) and len(value) > _SHORT_LIST:
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value)} bytes"
    return shorten(value[:200] if isinstance(value, str) else str(value)[:200])


def render(found: dict[str, Any]) -> str:
    """Format the description as text.

    Example:
        >>> entry = {"name": "fc.weight", "shape": [2, 3], "dtype": "float32",
        ...          "bytes": 24}
        >>> print(render({"path": "a.pt", "entries": [entry]}))
        a.pt: 1 tensors, 24 B
        <BLANKLINE>
        name       value
        fc.weight  float32 2x3
    """
    tensors = [entry for entry in found["entries"] if "shape" in entry]
    total = size(sum(entry["bytes"] for entry in tensors))
    rows = [
        (
            entry["name"],
            f"{entry['dtype']} {'x'.join(map(str, entry['shape'])) or 'scalar'}"
            if "shape" in entry
            else entry["value"],
        )
        for entry in found["entries"]
    ]
    head = printable(f"{found['path']}: {len(tensors)} tensors, {total}")
    return "\n".join([head, "", table(("name", "value"), rows)])


if __name__ == "__main__":
    sys.exit(main())
