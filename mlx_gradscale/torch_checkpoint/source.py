"""Read blocks of bytes from a file that may be damaged or hostile."""

import io
import os
import stat
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from .objects import check

# Data is copied and its checksum computed in pieces that fit in a cache.
_PIECE = 2**18


class Source:
    """The bytes of a checkpoint. A file stays open as long as this object exists.

    Args:
        file (str, PathLike or bytes): A path, or the contents of a file.
    """

    def __init__(self, file: "str | os.PathLike[str] | bytes") -> None:
        if isinstance(file, (bytes, bytearray)):
            self.data: memoryview | None = memoryview(bytes(file))
            self.size = len(file)
            return
        shown = os.fspath(file)
        check(
            not os.path.exists(os.path.join(file, ".metadata")),
            f"{shown} is a folder of torch.distributed.checkpoint. Convert it to a "
            "file with: python -m torch.distributed.checkpoint.format_utils "
            f"dcp_to_torch {shown} FILE",
        )
        # Opening a pipe would wait for a writer.
        check(
            stat.S_ISREG(os.stat(file).st_mode),
            f"{shown} is not a regular file. Pass the path of a file that torch.save() "
            "wrote.",
        )
        self.data = None
        self.descriptor = os.open(file, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)
        self.size = os.fstat(self.descriptor).st_size

    def read(self, start: int, size: int) -> bytes:
        """Return up to ``size`` bytes."""
        if self.data is not None:
            return bytes(self.data[start : start + size])
        return os.pread(self.descriptor, size, start)

    def open(self) -> BinaryIO:
        """Open the bytes as a file."""
        if self.data is not None:
            return io.BytesIO(self.data)
        return open(self.descriptor, "rb", closefd=False)

    def read_into(self, target: np.ndarray[Any, Any], start: int) -> None:
        """Fill a uint8 array."""
        if self.data is not None:
            target[:] = self.data[start : start + target.nbytes]
            return
        n_read = os.preadv(self.descriptor, [target.data], start)
        problem = "The file became shorter while it was read. Try again."
        check(n_read == target.nbytes, problem)


@dataclass(frozen=True, slots=True)
class Record:
    """A block of bytes in a file, and its CRC-32 if the file has one."""

    source: Source
    start: int
    nbytes: int
    checksum: int | None

    def read_into(self, target: np.ndarray[Any, Any]) -> None:
        """Fill a uint8 array of the same size; raise if the checksum is wrong."""
        found = 0
        for at in range(0, self.nbytes, _PIECE):
            piece = target[at : at + _PIECE]
            self.source.read_into(piece, self.start + at)
            found = zlib.crc32(piece.data, found)
        check(
            self.checksum is None or found == self.checksum,
            "The file is damaged: the checksum of a record is wrong. Copy it again.",
        )

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes in pieces; raise at the end if the checksum is wrong."""
        found = 0
        for at in range(0, self.nbytes, 16 * _PIECE):
            piece = np.empty(min(16 * _PIECE, self.nbytes - at), np.uint8)
            self.source.read_into(piece, self.start + at)
            found = zlib.crc32(piece.data, found)
            yield piece.data
        check(
            self.checksum is None or found == self.checksum,
            "The file is damaged: the checksum of a record is wrong. Copy it again.",
        )
