"""Named arrays in safetensors files, without MLX's reader and writer.

MLX's reader checks neither that shapes fit the data (products that wrap around 2**64
end in a segmentation fault) nor that tensors lie apart; its writer takes neither empty
nor float64 arrays.
"""

import json
import math
import os
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

import mlx.core as mx
import numpy as np

from .atomic import atomic_write
from .paths import open_file, parse_json
from .text import dtype_name

_LENGTH = struct.Struct("<Q")
_NAMES = {
    **{"bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16"},
    **{"uint32": "U32", "int32": "I32", "uint64": "U64", "int64": "I64"},
    **{"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"},
    "complex64": "C64",
}
_DTYPES = {
    code: getattr(mx, "bool_" if name == "bool" else name)
    for name, code in _NAMES.items()
}
_WORDS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
# MLX holds a dimension in 32 bits.
_LARGEST_DIMENSION = 2**31 - 1


class TensorPlace(NamedTuple):
    """A tensor in a safetensors file: its dtype, and its bytes after the header."""

    dtype: mx.Dtype
    shape: tuple[int, ...]
    start: int
    end: int


def read_arrays(
    path: str | os.PathLike[str],
) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Read a safetensors file, and return its arrays and metadata.

    Raises:
        ValueError: It is not a valid safetensors file.
    """
    with open(path, "rb", opener=open_file) as file:
        try:
            return load_arrays(file, os.fstat(file.fileno()).st_size)
        except ValueError as error:
            raise ValueError(
                f"{os.fspath(path)} is not a safetensors file: {error}"
            ) from error


def read_header(path: str | os.PathLike[str]) -> dict[str, TensorPlace]:
    """Return dtype and shape of each tensor of a safetensors file, without reading it.

    Raises:
        ValueError: It is not a valid safetensors file.
    """
    with open(path, "rb", opener=open_file) as file:
        try:
            return _load_header(file, os.fstat(file.fileno()).st_size)[0]
        except ValueError as error:
            raise ValueError(
                f"{os.fspath(path)} is not a safetensors file: {error}"
            ) from error


def write_arrays(
    path: str | os.PathLike[str],
    arrays: Mapping[str, mx.array],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file, whole or not at all.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "a.safetensors")
        >>> write_arrays(path, {"w": mx.zeros(2)}, {"format": "mlx"})
        >>> read_arrays(path)
        ({'w': array([0, 0], dtype=float32)}, {'format': 'mlx'})
    """
    with atomic_write(path) as file:
        dump_arrays(file, arrays, metadata)


def load_arrays(file: Any, size: int) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Read a safetensors file of a known size from its start to its end."""
    places, metadata = _load_header(file, size)
    arrays = {}
    for name, place in sorted(places.items(), key=lambda item: item[1][2:]):
        # Numbers as wide as the array's: MLX cannot hold 2**31 bytes as bytes.
        width = place.dtype.size
        data = np.empty((place.end - place.start) // width, f"u{width}")
        _read_into(file, data)
        words = mx.array(data)
        arrays[name] = words.view(place.dtype, stream=mx.cpu).reshape(place.shape)
        mx.eval(arrays[name])
    return {name: arrays[name] for name in places}, metadata


def dump_arrays(
    file: BinaryIO,
    arrays: Mapping[str, mx.array],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file to an open file, front to back."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    if "__metadata__" in arrays:
        raise ValueError("No array can be named '__metadata__' in a safetensors file.")
    end = 0
    for name, x in arrays.items():
        start, end = end, end + x.nbytes
        code = _NAMES[dtype_name(x)]
        entry = {"dtype": code, "shape": list(x.shape), "data_offsets": [start, end]}
        header[name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(_LENGTH.pack(len(text)) + text)
    for x in arrays.values():
        if x.size:
            file.write(bytes_of(x))


def bytes_of(x: mx.array) -> memoryview:
    """Return the bytes of an array that is not empty, in row order."""
    flat = mx.contiguous(x, stream=mx.cpu).reshape(-1, stream=mx.cpu)
    words = flat.view(_WORDS[x.dtype.size], stream=mx.cpu)
    mx.eval(words)
    view: Any = words
    return memoryview(view).cast("B")


def _read_into(file: Any, data: Any) -> None:
    view, done = memoryview(data), 0
    view = view.cast("B") if view.nbytes else view
    while done < view.nbytes:
        count = file.readinto(view[done:])
        if not count:
            raise ValueError("the file is cut off.")
        done += count


def _load_header(file: Any, size: int) -> tuple[dict[str, TensorPlace], dict[str, str]]:
    start = file.read(_LENGTH.size)
    length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else size
    if length > size - len(start):
        raise ValueError("its header reaches outside the file.")
    # One byte above the limit of parse_json is enough for its error.
    header = parse_json(file.read(min(length, 2**24 + 1)))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object.")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(x, str) for x in metadata.values()
    ):
        raise ValueError("its metadata is not a dict of texts.")
    places = {name: _place(name, entry) for name, entry in header.items()}
    end = 0
    for name, place in sorted(places.items(), key=lambda item: item[1][2:]):
        if place.start != end:
            raise ValueError(f"{name!r:.80} overlaps another tensor, or leaves a gap.")
        end = place.end
    if end != size - len(start) - length:
        raise ValueError("its tensors do not end where the file does.")
    return places, metadata


def _place(name: str, entry: Any) -> TensorPlace:
    """Return one entry of a header, checked in Python's integers."""
    try:
        code, shape = entry["dtype"], entry["shape"]
        start, end = entry["data_offsets"]
        numbers = [*shape, start, end]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"its entry {name!r:.80} is incomplete.") from None
    if not isinstance(code, str) or code not in _DTYPES:
        raise ValueError(f"{name!r:.80} has the dtype {code!r:.20}, unknown to MLX.")
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{name!r:.80} has a shape or place that is not a number.")
    if len(shape) > 32 or any(n > _LARGEST_DIMENSION for n in shape):
        raise ValueError(f"{name!r:.80} has a shape that MLX cannot hold.")
    if end - start != math.prod(shape) * _DTYPES[code].size:
        raise ValueError(f"{name!r:.80} has another size than its shape.")
    return TensorPlace(_DTYPES[code], tuple(shape), start, end)
