"""Read and write safetensors files without MLX's reader and writer.

In MLX's reader, a shape whose size overflows 64 bits passes the check, and using the
array can cause a segmentation fault; tensors may overlap. Its writer does not support
float64 arrays.
"""

import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from .atomic import atomic_write
from .paths import LONGEST_JSON, open_file, parse_json
from .text import shorten

_LENGTH = struct.Struct("<Q")
DTYPES = {
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
CODES = {dtype: code for code, dtype in DTYPES.items()}
# The dtype and shape of an array.
Shape = tuple[mx.Dtype, tuple[int, ...]]
_WORDS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def read_arrays(
    path: str | os.PathLike[str], opener: Callable[[str, int], int] = open_file
) -> dict[str, mx.array]:
    """Read the arrays of a safetensors file; the metadata is ignored.

    Raises:
        ValueError: If the file is invalid or has an unsupported dtype.
    """
    with open(path, "rb", opener=opener) as file:
        arrays = {}
        for name, (dtype, shape) in _read_header(file).items():
            # Use integers as wide as the elements: an axis of 2**31 bytes is too long.
            data = np.fromfile(file, f"u{dtype.size}", math.prod(shape))
            arrays[name] = mx.array(data).view(dtype, stream=mx.cpu).reshape(shape)
            mx.eval(arrays[name])
        return arrays


def read_shapes(path: str | os.PathLike[str]) -> dict[str, Shape]:
    """Return the dtype and shape of each array in a safetensors file.

    Raises:
        ValueError: If the file is invalid or has an unsupported dtype.
    """
    with open(path, "rb", opener=open_file) as file:
        return _read_header(file)


def write_arrays(
    path: str | os.PathLike[str],
    arrays: Mapping[str, mx.array],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write arrays and metadata to a safetensors file, atomically."""
    if "__metadata__" in arrays:
        raise ValueError(
            "A safetensors file cannot contain an array named '__metadata__'. Rename "
            "the array."
        )
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, x in arrays.items():
        start, end = end, end + x.nbytes
        place = {"shape": list(x.shape), "data_offsets": [start, end]}
        header[name] = {"dtype": CODES[x.dtype], **place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with atomic_write(path) as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for x in arrays.values():
            file.write(_bytes_of(x))


def checksum(x: mx.array) -> int:
    """Return the CRC-32 of an array's bytes in row-major order."""
    return zlib.crc32(_bytes_of(x))


def _bytes_of(x: mx.array) -> memoryview:
    flat = mx.contiguous(x, stream=mx.cpu).reshape(-1, stream=mx.cpu)
    words: Any = flat.view(_WORDS[x.dtype.size], stream=mx.cpu)
    mx.eval(words)
    return memoryview(words).cast("B") if x.size else memoryview(b"")


def _read_header(file: BinaryIO) -> dict[str, Shape]:
    """Return the dtype and shape of each array, in the order of the data, or raise."""
    try:
        size = os.fstat(file.fileno()).st_size - _LENGTH.size
        length = _LENGTH.unpack(file.read(_LENGTH.size))[0]
        header = parse_json(file.read(min(length, LONGEST_JSON + 1)))
        header.pop("__metadata__", None)
        found: dict[str, Shape] = {}
        end = 0
        for name, entry in sorted(header.items(), key=lambda x: x[1]["data_offsets"]):
            dtype: Any = DTYPES.get(entry["dtype"])
            shape = tuple(entry["shape"])
            # Dimensions are int32 in MLX. Python's integers do not overflow in prod().
            is_shape = len(shape) <= 32 and all(
                type(n) is int and 0 <= n < 2**31 for n in shape
            )
            n_bytes = math.prod(shape) * dtype.size if dtype and is_shape else -1
            start, end = end, end + n_bytes
            if n_bytes < 0 or entry["data_offsets"] != [start, end]:
                text = f"{name!r:.80} has an unsupported dtype, shape or offset"
                raise ValueError(f"{text}: {shorten(entry)}.")
            found[name] = dtype, shape
        if length + end != size:
            raise ValueError("its size does not match its header. Copy it again.")
        return found
    except (ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        text = f"{os.fspath(file.name)} cannot be read as safetensors: {kind}{error}"
        raise ValueError(text) from error
