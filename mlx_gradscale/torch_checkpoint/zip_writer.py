"""Write the zip file of a checkpoint as PyTorch lays it out, in one forward pass.

Records are stored as they are, each begins at a multiple of 64 bytes (an extra field
``FB`` of Zs fills the gap), and sizes and checksums follow the data, so that nothing
has to be known or kept before it is written. Beyond 4 GiB come zip64 fields.
"""

import struct
import zlib
from collections.abc import Iterable
from types import TracebackType
from typing import BinaryIO

from ..files.atomic import WholeFile
from ..files.background import in_background

ALIGNMENT = 64
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
_UTF8, _SIZES_FOLLOW = 0x0800, 0x0008


# From here on a checksum is worth handing to a thread (1 MiB takes about 0.3 ms).
_LONG = 2**20


class ZipWriter:
    """Write records one after the other to anything that has ``write``.

    A context manager: its end writes the directory, always with its zip64 form, as
    PyTorch does, unless something was raised.
    """

    def __init__(self, file: BinaryIO | WholeFile, folder: str) -> None:
        self._file = file
        self._folder = folder
        self._at = 0
        self._directory = bytearray()
        self._count = 0
        self.checksums: dict[str, int] = {}

    def __enter__(self) -> "ZipWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            start = self._at
            self._write(self._directory)
            self._write(end_records(start, len(self._directory), self._count))

    def add(self, name: str, size: int, chunks: Iterable[memoryview | bytes]) -> None:
        """Write a record of ``size`` bytes that come in ``chunks``."""
        start = self._at
        path = f"{self._folder}/{name}".encode()
        self._write(local_header(path, size, start))
        checksum = written = 0
        for chunk in chunks:
            checksum = self._write_summed(chunk, checksum)
            written += len(chunk)
        if written != size:
            raise ValueError(f"{name} has {written} bytes where {size} were announced.")
        self._write(sizes_after(size, start, checksum))
        self._directory += directory_entry(path, size, start, checksum)
        self._count += 1
        self.checksums[name] = checksum

    def _write_summed(self, chunk: memoryview | bytes, checksum: int) -> int:
        if len(chunk) < _LONG:
            self._write(chunk)
            return zlib.crc32(chunk, checksum)
        # Both release the interpreter's lock: the sum costs no time of its own.
        pending = in_background(zlib.crc32, chunk, checksum)
        self._write(chunk)
        return pending.result()

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        self._at += view.nbytes
        while view.nbytes:
            # A raw file may take less than it is given.
            done = self._file.write(view)
            view = view[view.nbytes if done is None else done :]


def local_header(path: bytes, size: int, start: int) -> bytes:
    """Return what precedes a record that begins at ``start``; zip64 if it has to be."""
    wide = _wide_field(size, 0, start)
    gap = -(start + 30 + len(path) + len(wide) + 4) % ALIGNMENT
    extra = wide + b"FB" + struct.pack("<H", gap) + b"Z" * gap
    return (
        b"PK\x03\x04"
        + struct.pack("<5H3L", 0, _flags(size), 0, 0, 0, 0, 0, 0)
        + struct.pack("<2H", len(path), len(extra))
        + path
        + extra
    )


def sizes_after(size: int, start: int, checksum: int) -> bytes:
    """Return what follows a record; PyTorch writes nothing after an empty one."""
    if not size:
        return b""
    form = "<2Q" if size >= _MAX32 or start >= _MAX32 else "<2L"
    return b"PK\x07\x08" + struct.pack("<L", checksum) + struct.pack(form, size, size)


def directory_entry(path: bytes, size: int, start: int, checksum: int) -> bytes:
    """Return a record's entry in the directory."""
    wide = _wide_field(size, size, start)
    shown = min(size, _MAX32)
    return (
        b"PK\x01\x02"
        + struct.pack("<6H3L", 0, 0, _flags(size), 0, 0, 0, checksum, shown, shown)
        + struct.pack("<5H2L", len(path), len(wide), 0, 0, 0, 0, min(start, _MAX32))
        + path
        + wide
    )


def end_records(start: int, size: int, count: int) -> bytes:
    """Return the file's end, for a directory at ``start``; always in both forms."""
    return (
        b"PK\x06\x06"
        + struct.pack("<Q2H2L", 44, 0x031E, 45, 0, 0)
        + struct.pack("<4Q", count, count, size, start)
        + b"PK\x06\x07"
        + struct.pack("<LQL", 0, start + size, 1)
        + b"PK\x05\x06"
        + struct.pack("<4H", 0, 0, min(count, _MAX16), min(count, _MAX16))
        + struct.pack("<2LH", min(size, _MAX32), min(start, _MAX32), 0)
    )


def _flags(size: int) -> int:
    return _UTF8 | _SIZES_FOLLOW if size else _UTF8


def _wide_field(size: int, packed: int, start: int) -> bytes:
    """Return the zip64 field for what does not fit in 32 bits."""
    wide = b""
    if size >= _MAX32:
        wide += struct.pack("<2Q", size, packed)
    if start >= _MAX32:
        wide += struct.pack("<Q", start)
    return struct.pack("<2H", 1, len(wide)) + wide if wide else b""
