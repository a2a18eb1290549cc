"""Positioned reads from a path, bytes or a file object, checked against its size."""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from ..files.background import in_background
from ..files.locks import open_file
from .limits import CheckpointError

# What is rounded, or written, at a time.
CHUNK = 2**22
# From here on two threads read: the system takes as long to find fresh memory as to
# fill it, and does both for two at a time.
_SHARED = 2**20
# A single read takes at most 2 GiB on Linux, and less on a Mac.
_MOST = 2**30
_HAS_PREADV = hasattr(os, "preadv")


class Source:
    """A file of known size that is read at given places."""

    def __init__(self, file: BinaryIO) -> None:
        self._file: Any = file  # BinaryIO does not name readinto
        self._descriptor = _descriptor(file)
        self._start = file.tell()
        self.size = file.seek(0, os.SEEK_END) - self._start

    def check(self, offset: int, size: int, what: str) -> None:
        """Raise unless these bytes lie in the file."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise CheckpointError(
                f"{what} reaches outside the file ({self.size} bytes): "
                "the file is cut off or damaged; copy it again."
            )

    def read_into(self, offset: int, buffer: memoryview, what: str) -> None:
        """Fill a buffer with the bytes from ``offset`` on."""
        self.check(offset, buffer.nbytes, what)
        descriptor = self._descriptor
        if descriptor is None or buffer.nbytes < _SHARED:
            self._file.seek(self._start + offset)
            return _fill(buffer, self._file.readinto, what)
        half = buffer.nbytes // 2
        rest = in_background(
            self._read_at, descriptor, offset + half, buffer[half:], what
        )
        try:
            self._read_at(descriptor, offset, buffer[:half], what)
        finally:
            # Also after an error: the buffer is written to until then.
            rest.result()

    def _read_at(
        self, descriptor: int, offset: int, buffer: memoryview, what: str
    ) -> None:
        at = self._start + offset

        def read(part: memoryview) -> int:
            done = buffer.nbytes - part.nbytes
            return os.preadv(descriptor, [part[:_MOST]], at + done)

        _fill(buffer, read, what)

    def read(self, offset: int, size: int, what: str) -> bytes:
        """Return the bytes from ``offset`` on."""
        self.check(offset, size, what)
        self._file.seek(self._start + offset)
        data: bytes = self._file.read(size)
        while len(data) < size:
            more = self._file.read(size - len(data))
            if not more:
                raise CheckpointError(f"{what}: the file became shorter while read.")
            data += more
        return data


def _fill(
    buffer: memoryview, read: Callable[[memoryview], int | None], what: str
) -> None:
    done = 0
    while done < buffer.nbytes:
        got = read(buffer[done:])
        if not got:
            raise CheckpointError(f"{what}: the file became shorter while read.")
        done += got


def _descriptor(file: BinaryIO) -> int | None:
    """Return what several threads can read at given places, where that can be."""
    return file.fileno() if isinstance(file, io.FileIO) and _HAS_PREADV else None


@contextmanager
def open_source(file: "str | os.PathLike[str] | bytes | BinaryIO") -> Iterator[Source]:
    """Open a path, bytes or a file object to read from."""
    if isinstance(file, (bytes, bytearray, memoryview)):
        yield Source(io.BytesIO(file))
    elif isinstance(file, (str, os.PathLike)):
        # Unbuffered: storages go straight into the arrays, without a copy.
        with open(file, "rb", buffering=0, opener=open_file) as raw:
            yield Source(raw)
    elif hasattr(file, "readinto") and hasattr(file, "seek"):
        yield Source(file)
    else:
        raise TypeError(
            "load() takes a path, bytes or a seekable binary file object, "
            f"not {type(file).__name__}."
        )
