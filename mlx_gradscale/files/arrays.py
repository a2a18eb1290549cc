"""Named arrays in safetensors files, by MLX's own reader and writer."""

import os
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO, cast

import mlx.core as mx

from .atomic import atomic_write
from .bounded_json import parse
from .locks import open_file

_LENGTH = struct.Struct("<Q")
# As the safetensors library has it.
_LONGEST_HEADER = 100_000_000


def read_arrays(
    path: str | os.PathLike[str],
) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Read a safetensors file; its arrays are read when they are used.

    Args:
        path (str): The file, of any suffix.

    Returns:
        tuple: The arrays, and the metadata.

    Raises:
        ValueError: It is not a safetensors file, or its tensors overlap.
    """
    path = os.fspath(path)
    descriptor = open_file(path, os.O_RDONLY)
    try:
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            _check_apart(file)
        # MLX opens it again, at once, and takes only names that are UTF-8.
        plain = path.isascii() or _is_utf8(path)
        place = path if plain else f"/dev/fd/{descriptor}"
        loaded = mx.load(place, format="safetensors", return_metadata=True)
        return cast(tuple[dict[str, mx.array], dict[str, str]], loaded)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    finally:
        os.close(descriptor)


def write_arrays(
    path: str | os.PathLike[str],
    arrays: Mapping[str, mx.array],
    metadata: Mapping[str, str],
) -> None:
    """Write a safetensors file, whole or not at all.

    Args:
        path (str): The file; it is replaced.
        arrays (dict): By name.
        metadata (dict): Words for readers.

    Example:

        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "a.safetensors")
        >>> write_arrays(path, {"w": mx.zeros(2)}, {"format": "mlx"})
        >>> read_arrays(path)
        ({'w': array([0, 0], dtype=float32)}, {'format': 'mlx'})
    """
    with atomic_write(path) as file:
        # What MLX asks of a file is less than BinaryIO has.
        mx.save_safetensors(cast(BinaryIO, file), dict(arrays), dict(metadata))


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_apart(file: BinaryIO) -> None:
    """Raise if this is not a safetensors file, or if its tensors overlap.

    MLX checks that each tensor lies in the file, but not that they lie apart: a
    header can name the same 4 MB two thousand times, which are then 8 GB.

    Args:
        file (BinaryIO): The file, at its start.

    Raises:
        ValueError: Says which.
    """
    _check_places(_header(file, os.fstat(file.fileno()).st_size))


def _header(file: Any, size: int) -> Any:
    start = file.read(_LENGTH.size)
    length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else size
    if length > min(size - len(start), _LONGEST_HEADER):
        raise ValueError("its header reaches outside the file or is over 100 MB.")
    header = b""
    while len(header) < length:
        more = file.read(length - len(header))
        if not more:
            raise ValueError("it became shorter while read.")
        header += more
    return parse(header)


def _check_places(header: Any) -> None:
    places = []
    entries: Any = header if isinstance(header, dict) else {"": None}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        try:
            start, end = entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise ValueError("its header does not say where the tensors are.") from None
        if type(start) is not int or type(end) is not int or start < 0 or end < start:
            raise ValueError("its header does not say where the tensors are.")
        places.append((start, end))
    last = 0
    for start, end in sorted(places):
        if start < last and start != end:
            raise ValueError("its tensors overlap.")
        last = max(last, end)
