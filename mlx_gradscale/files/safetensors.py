"""Check a safetensors file, which MLX trusts not to hold a byte twice."""

import os
import struct
from typing import Any, BinaryIO

from .bounded_json import parse

_LENGTH = struct.Struct("<Q")
# As the safetensors library has it.
_LONGEST_HEADER = 100_000_000


def check_apart(file: BinaryIO) -> None:
    """Raise if this is no safetensors file, or if its tensors overlap.

    MLX checks that each tensor lies in the file, but not that they lie apart: a
    header can name the same 4 MB two thousand times, which are then 8 GB.

    Args:
        file (BinaryIO): The file, at its start.

    Raises:
        ValueError: Says which.
    """
    _check(_header(file, os.fstat(file.fileno()).st_size))


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


def _check(header: Any) -> None:
    places = []
    for name, entry in header.items() if isinstance(header, dict) else [("", None)]:
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
