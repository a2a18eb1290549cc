"""Read and write arrays as safetensors, and trees of arrays as arrays and JSON."""

import math
import os
import zlib
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ..torch_checkpoint.tensors import bytes_of
from .disk import atomic_write, open_file
from .text import shorten

_TAGS = ({"array"}, {"tuple"}, {"dict"})


def open_arrays(path: str | os.PathLike[str]) -> dict[str, mx.array]:
    """Return the arrays of a safetensors file, whose data is read when it is used.

    Raises:
        ValueError: If the file is invalid.
    """
    name = os.fspath(path)
    with open(path, "rb", opener=open_file) as file:
        size = os.fstat(file.fileno()).st_size
    try:
        arrays: dict[str, mx.array] = mx.load(name, "safetensors", stream=mx.cpu)  # type: ignore[assignment]
        # MLX does not notice dimensions that overflow, or tensors that overlap.
        nbytes = sum(math.prod(x.shape) * x.itemsize for x in arrays.values())
        is_sound = all(
            x.ndim <= 32 and min(x.shape, default=0) >= 0 for x in arrays.values()
        )
        if not is_sound or nbytes > size:
            raise ValueError("its shapes do not match its size.")
    except Exception as error:  # MLX raises several types
        text = f"{name} cannot be read as safetensors: {error}"
        raise ValueError(text) from error
    return arrays


def read_arrays(path: str | os.PathLike[str]) -> dict[str, mx.array]:
    """Read the arrays of a safetensors file; the metadata is ignored.

    Raises:
        ValueError: If the file is invalid.
    """
    arrays = open_arrays(path)
    mx.eval(arrays)
    return arrays


def write_arrays(
    path: str | os.PathLike[str],
    arrays: Mapping[str, mx.array],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write arrays and metadata to a safetensors file, atomically."""
    with atomic_write(path) as file:
        mx.save_safetensors(file, dict(arrays), dict(metadata or {}))


def checksum(x: mx.array) -> int:
    """Return the CRC-32 of an array's bytes in row-major order."""
    return zlib.crc32(bytes_of(x))


def encode(tree: Any, arrays: dict[str, mx.array], path: tuple[str, ...] = ()) -> Any:
    """Convert a tree to JSON values, and add its arrays to ``arrays`` by path.

    Raises:
        TypeError: If a value has an unsupported type.

    Example:
        >>> encode({"step": 3, "order": (2, 1)}, {})
        {'step': 3, 'order': {'tuple': [2, 1]}}
    """
    if isinstance(tree, mx.array):
        name = ".".join(path)
        while name in arrays:  # for example, {"a.b": x, "a": {"b": y}}
            name += "_"
        arrays[name] = tree
        return {"array": name}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if isinstance(tree, (list, tuple)):
        items = [
            x if type(x) in (int, float) else encode(x, arrays, (*path, str(i)))
            for i, x in enumerate(tree)  # a fast path for millions of numbers
        ]
        return items if isinstance(tree, list) else {"tuple": items}
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        content = {key: encode(x, arrays, (*path, key)) for key, x in tree.items()}
        return {"dict": content} if content.keys() in _TAGS else content
    raise TypeError(
        f"{shorten(tree)} has the unsupported type {type(tree).__qualname__}. Use "
        "None, bool, int, float, str, list, tuple, a dict with string keys, or "
        "mx.array."
    )


def decode(encoded: Any, arrays: Mapping[str, mx.array]) -> Any:
    """Decode the result of :func:`encode`, given its arrays."""
    if isinstance(encoded, list):
        return [decode(x, arrays) for x in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if encoded.keys() == {"array"}:
        return arrays[encoded["array"]]
    if encoded.keys() == {"tuple"}:
        return tuple(decode(encoded["tuple"], arrays))
    content = encoded["dict"] if encoded.keys() == {"dict"} else encoded
    return {key: decode(x, arrays) for key, x in content.items()}
