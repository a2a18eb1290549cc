"""Read and write safetensors files without MLX's reader and writer.

MLX's reader does not check that shapes match the data (products that wrap around 2**64
cause a segmentation fault) or that tensors do not overlap. Its writer does not support
empty or float64 arrays.
"""

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import mlx.core as mx
import numpy as np

from .atomic import atomic_write
from .paths import LONGEST_JSON, open_file, parse_json

_LENGTH = struct.Struct("<Q")
_DTYPES = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "U64": mx.uint64,
    "I64": mx.int64,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "F32": mx.float32,
    "F64": mx.float64,
    "C64": mx.complex64,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_WORDS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


class TensorPlace(NamedTuple):
    """A tensor in a safetensors file: its dtype and its byte range after the header."""

    dtype: mx.Dtype
    shape: tuple[int, ...]
    start: int
    end: int


def read_arrays(
    path: str | os.PathLike[str],
) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Read a safetensors file and return its arrays and metadata.

    Raises:
        ValueError: It is not a valid safetensors file.
    """
    with _opened(path) as file:
        return load_arrays(file, os.fstat(file.fileno()).st_size)


def read_header(path: str | os.PathLike[str]) -> dict[str, TensorPlace]:
    """Return the dtype and shape of each tensor in a safetensors file from its header.

    Raises:
        ValueError: It is not a valid safetensors file.
    """
    with _opened(path) as file:
        return _load_header(file, os.fstat(file.fileno()).st_size)[0]


def write_arrays(
    path: str | os.PathLike[str],
    arrays: Mapping[str, mx.array],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file atomically.

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
    """Read a safetensors file of known size sequentially."""
    places, metadata = _load_header(file, size)
    arrays = {}
    for name, place in places.items():
        # Use integers as wide as the elements: MLX cannot hold 2**31 single bytes.
        width = place.dtype.size
        data: Any = np.empty((place.end - place.start) // width, f"u{width}")
        view, done = memoryview(data.view(np.uint8)), 0
        while done < len(view):
            count = file.readinto(view[done:])
            if not count:
                raise ValueError("the file is cut off.")
            done += count
        words = mx.array(data)
        arrays[name] = words.view(place.dtype, stream=mx.cpu).reshape(place.shape)
        mx.eval(arrays[name])
    return arrays, metadata


def dump_arrays(
    file: BinaryIO,
    arrays: Mapping[str, mx.array],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file to an open file sequentially."""
    if "__metadata__" in arrays:
        raise ValueError("No array can be named '__metadata__' in a safetensors file.")
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, x in arrays.items():
        start, end = end, end + x.nbytes
        header[name] = {
            "dtype": _CODES[x.dtype],
            "shape": list(x.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(_LENGTH.pack(len(text)) + text)
    for x in arrays.values():
        if x.size:
            file.write(bytes_of(x))


def bytes_of(x: mx.array) -> memoryview:
    """Return the bytes of a non-empty array in row-major order."""
    flat = mx.contiguous(x, stream=mx.cpu).reshape(-1, stream=mx.cpu)
    words: Any = flat.view(_WORDS[x.dtype.size], stream=mx.cpu)
    mx.eval(words)
    return memoryview(words).cast("B")


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    with open(path, "rb", opener=open_file) as file:
        try:
            yield file
        except ValueError as error:
            text = f"{os.fspath(path)} is not a safetensors file: {error}"
            raise ValueError(text) from error


def _load_header(file: Any, size: int) -> tuple[dict[str, TensorPlace], dict[str, str]]:
    """Return the places of the tensors, in file order, and the metadata."""
    start = file.read(_LENGTH.size)
    length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else size
    if length > size - len(start):
        raise ValueError("its header reaches outside the file.")
    header = parse_json(file.read(min(length, LONGEST_JSON + 1)))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object.")
    metadata = header.pop("__metadata__", None) or {}  # MLX writes null for none
    if not isinstance(metadata, dict) or not all(
        isinstance(x, str) for x in metadata.values()
    ):
        raise ValueError("its metadata is not a dict of texts.")
    found = [(name, _place(name, entry)) for name, entry in header.items()]
    places = dict(sorted(found, key=lambda item: item[1][2:]))
    end = 0
    for name, place in places.items():
        if place.start != end:
            raise ValueError(f"{name!r:.80} overlaps another tensor, or leaves a gap.")
        end = place.end
    if end != size - len(start) - length:
        raise ValueError("its tensors do not end where the file does.")
    return places, metadata


def _place(name: str, entry: Any) -> TensorPlace:
    """Parse one header entry, checking it with Python's unbounded integers."""
    try:
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        start, end = entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ValueError(
            f"its entry {name!r:.80} is incomplete, or has a dtype unknown to MLX."
        ) from None
    if any(type(number) is not int or number < 0 for number in (*shape, start, end)):
        raise ValueError(f"{name!r:.80} has a shape or place that is not a number.")
    # MLX stores a dimension in 32 bits.
    if len(shape) > 32 or any(n >= 2**31 for n in shape):
        raise ValueError(f"{name!r:.80} has a shape that MLX cannot hold.")
    if end - start != math.prod(shape) * dtype.size:
        raise ValueError(f"{name!r:.80} has another size than its shape.")
    return TensorPlace(dtype, shape, start, end)
