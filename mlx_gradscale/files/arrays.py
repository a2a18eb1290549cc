"""Read and write safetensors files without MLX's reader and writer.

MLX's reader does not check that shapes match the data (products that wrap around 2**64
cause a segmentation fault) or that tensors do not overlap. Its writer does not support
float64 arrays.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

import mlx.core as mx
import numpy as np

from .atomic import atomic_write
from .paths import LONGEST_JSON, open_file, parse_json
from .text import shorten

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
    path: str | os.PathLike[str], opener: Callable[[str, int], int] = open_file
) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Read a safetensors file and return its arrays and metadata.

    Raises:
        ValueError: It is not a valid safetensors file.
    """
    with open(path, "rb", opener=opener) as file:
        places, metadata = _load_header(file)
        arrays = {}
        for name, place in places.items():
            # Use integers as wide as the elements: MLX cannot hold 2**31 single bytes.
            width = place.dtype.size
            data = np.fromfile(file, f"u{width}", (place.end - place.start) // width)
            words = mx.array(data).view(place.dtype, stream=mx.cpu)
            arrays[name] = words.reshape(place.shape)
            mx.eval(arrays[name])
        return arrays, metadata


def read_header(path: str | os.PathLike[str]) -> dict[str, TensorPlace]:
    """Return the dtype and shape of each tensor in a safetensors file from its header.

    Raises:
        ValueError: It is not a valid safetensors file.
    """
    with open(path, "rb", opener=open_file) as file:
        return _load_header(file)[0]


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
    if "__metadata__" in arrays:
        raise ValueError("A safetensors file cannot store an array as '__metadata__'.")
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, x in arrays.items():
        start, end = end, end + x.nbytes
        place = {"shape": list(x.shape), "data_offsets": [start, end]}
        header[name] = {"dtype": _CODES[x.dtype], **place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with atomic_write(path) as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for x in arrays.values():
            file.write(bytes_of(x))


def bytes_of(x: mx.array) -> memoryview:
    """Return the bytes of an array in row-major order."""
    flat = mx.contiguous(x, stream=mx.cpu).reshape(-1, stream=mx.cpu)
    words: Any = flat.view(_WORDS[x.dtype.size], stream=mx.cpu)
    mx.eval(words)
    return memoryview(words).cast("B") if x.size else memoryview(b"")


def _load_header(file: BinaryIO) -> tuple[dict[str, TensorPlace], dict[str, str]]:
    """Return the places of the tensors, in file order, and the metadata."""
    try:
        return _parse_header(file)
    except ValueError as error:
        text = f"{os.fspath(file.name)} is not a valid safetensors file: {error}"
        raise ValueError(text) from error


def _parse_header(file: BinaryIO) -> tuple[dict[str, TensorPlace], dict[str, str]]:
    size = os.fstat(file.fileno()).st_size - _LENGTH.size
    length = _LENGTH.unpack(file.read(_LENGTH.size))[0] if size > 0 else 1
    if length > size:
        raise ValueError("the header extends past the end of the file.")
    header = parse_json(file.read(min(length, LONGEST_JSON + 1)))
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object.")
    metadata = header.pop("__metadata__", None) or {}  # MLX writes null for none
    if not isinstance(metadata, dict) or {*map(type, metadata.values())} - {str}:
        raise ValueError("the metadata does not map strings to strings.")
    found = [(name, _place(name, entry)) for name, entry in header.items()]
    places = dict(sorted(found, key=lambda item: item[1][2:]))
    end = 0
    for name, place in places.items():
        if place.start != end:
            raise ValueError(f"there is a gap or an overlap before {name!r:.80}.")
        end = place.end
    if end != size - length:
        raise ValueError("the tensors do not end at the end of the file.")
    return places, metadata


def _place(name: str, entry: Any) -> TensorPlace:
    """Parse one header entry, checking it with Python's unbounded integers."""
    with suppress(TypeError, KeyError, ValueError):
        place = TensorPlace(
            _DTYPES[entry["dtype"]], tuple(entry["shape"]), *entry["data_offsets"]
        )
        numbers = (*place.shape, place.start, place.end)
        if (
            all(type(number) is int and number >= 0 for number in numbers)
            # MLX stores a dimension in 32 bits.
            and all(number < 2**31 for number in place.shape)
            and len(place.shape) <= 32
            and place.end - place.start == math.prod(place.shape) * place.dtype.size
        ):
            return place
    raise ValueError(f"{name!r:.80} is not a valid MLX array: {shorten(entry)}.")
