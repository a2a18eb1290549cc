"""Read and write safetensors files of untrusted origin with MLX."""

import math
import os
import zlib
from collections.abc import Mapping

import mlx.core as mx

from ..torch_checkpoint.tensors import bytes_of
from .atomic import atomic_write
from .paths import open_file


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
    """Write arrays and metadata to a safetensors file, atomically.

    Raises:
        ValueError: If MLX cannot write an array, for example of dtype float64.
    """
    kinds = sorted({str(x.dtype) for x in arrays.values()})
    if "__metadata__" in arrays or str(mx.float64) in kinds:
        raise ValueError(
            f"A safetensors file cannot hold these arrays ({', '.join(kinds)}). Cast "
            "float64 arrays to float32, and rename an array named '__metadata__'."
        )
    with atomic_write(path) as file:
        mx.save_safetensors(file, dict(arrays), dict(metadata or {}))


def checksum(x: mx.array) -> int:
    """Return the CRC-32 of an array's bytes in row-major order."""
    return zlib.crc32(bytes_of(x))
