"""Positioned reads from a path, bytes or a file object, checked against its size."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from .limits import CheckpointError

# What is rounded, or written, at a time.
CHUNK = 2**22


class Source:
    """A file of known size that is read at given places."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._start = file.tell()
        self.size = file.seek(0, os.SEEK_END) - self._start

    def check(self, offset: int, size: int, what: str) -> None:
        if offset < 0 or size < 0 or offset + size > self.size:
            raise CheckpointError(
                f"{what} reaches outside the file ({self.size} bytes): "
                "the file is cut off or damaged; copy it again."
            )

    def read_into(self, offset: int, buffer: memoryview, what: str) -> None:
        self.check(offset, buffer.nbytes, what)
        self._file.seek(self._start + offset)
        done = 0
        while done < buffer.nbytes:
            got = self._file.readinto(buffer[done:])
            if not got:
                raise CheckpointError(f"{what}: the file became shorter while read.")
            done += got

    def read(self, offset: int, size: int, what: str) -> bytes:
        self.check(offset, size, what)
        self._file.seek(self._start + offset)
        data = self._file.read(size)
        while len(data) < size:
            more = self._file.read(size - len(data))
            if not more:
                raise CheckpointError(f"{what}: the file became shorter while read.")
            data += more
        return data


@contextmanager
def open_source(file: "str | os.PathLike[str] | bytes | BinaryIO") -> Iterator[Source]:
    if isinstance(file, (bytes, bytearray, memoryview)):
        yield Source(io.BytesIO(file))
    elif isinstance(file, (str, os.PathLike)):
        # Unbuffered: storages go straight into the arrays, without a copy.
        with open(file, "rb", buffering=0) as raw:
            yield Source(raw)
    elif hasattr(file, "readinto") and hasattr(file, "seek"):
        yield Source(file)
    else:
        raise TypeError(
            "load() takes a path, bytes or a seekable binary file object, "
            f"not {type(file).__name__}."
        )
