"""Read the zip directory of a checkpoint, strictly: what is where, uncompressed.

Stricter than a general unzip tool on purpose. Every record has to be stored as it is,
lie inside the file, and overlap nothing, so that the file's own size bounds what can
be read from it.
"""

import struct
from collections.abc import Iterable
from typing import NamedTuple

from .limits import Budget, CheckpointError, Limits
from .pickle_allowlist import storage_of
from .pickle_reader import PickleReader
from .source import Source
from .storages import Contents, Extent

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s4B4HL2L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX32 = 0xFFFFFFFF
_FOLDER = 0x10


class _Entry(NamedTuple):
    """What the directory says of a record; ``header`` is where it begins."""

    header: int
    size: int
    is_stored: bool


# Bytes that a record takes in memory, besides its name.
_RECORD = 500


def read_zip(source: Source, budget: Budget) -> Contents:
    """Return the pickled object, and where its storages are."""
    records = _records(source, budget)
    folder = _folder(records)
    if folder + "data.pkl" not in records:
        raise CheckpointError("This zip file is not a PyTorch checkpoint: no data.pkl.")

    order = b"little"
    if folder + "byteorder" in records:
        offset, size = records[folder + "byteorder"]
        order = source.read(offset, min(size, 16), "byteorder")
        if order not in (b"little", b"big"):
            raise CheckpointError(f"The byte order {order!r} is unknown.")
    offset, size = records[folder + "data.pkl"]
    _check_size("data.pkl", size, budget.limits)
    pickle = source.read(offset, size, "data.pkl")
    reader = PickleReader(pickle, 0, storage_of, budget)
    value = reader.read()
    if reader.position != len(pickle):
        raise CheckpointError("There is data after the end of the pickle.")
    prefix = folder + "data/"
    extents = {
        name.removeprefix(prefix): extent
        for name, extent in records.items()
        if name.startswith(prefix)
    }
    return Contents(value, reader.shared, size, extents, order == b"big")


def _records(source: Source, budget: Budget) -> dict[str, Extent]:
    """Return where the data of each record is, in the order of the directory."""
    start, size, count = _find_directory(source)
    if count > budget.limits.records:
        raise CheckpointError(
            f"The zip file has more than {budget.limits.records} records; if the file "
            "is to be trusted, raise limits.records."
        )
    _check_size("The zip directory", size, budget.limits)
    budget.take(_RECORD * count)
    directory = source.read(start, size, "The zip directory")
    entries: dict[str, _Entry] = {}
    at = 0
    for _ in range(count):
        name, entry, at = _entry(directory, at)
        if name in entries:
            raise CheckpointError(f"The zip file has two records {_shown(name)}.")
        entries[name] = entry
    if at != len(directory):
        raise CheckpointError("The zip directory has more than it says.")
    if _folder(entries) + "constants.pkl" in entries:
        raise CheckpointError(
            "This is a TorchScript archive (torch.jit.save), which holds code; save "
            "the state_dict() of the model with torch.save() instead."
        )
    records = {name: _locate(source, name, entry) for name, entry in entries.items()}
    end = 0
    for name in sorted(entries, key=lambda name: entries[name].header):
        if entries[name].header < end or sum(records[name]) > start:
            raise CheckpointError("Records of the zip file overlap.")
        end = sum(records[name])
    return records


def _check_size(what: str, size: int, limits: Limits) -> None:
    if size > limits.pickle_bytes:
        raise CheckpointError(
            f"{what} has {size} bytes; if the file is to be trusted, raise "
            "limits.pickle_bytes."
        )


def _folder(names: Iterable[str]) -> str:
    """Return the folder of the first record, which PyTorch takes for that of all."""
    return next(iter(names), "").split("/", 1)[0] + "/"


def _find_directory(source: Source) -> tuple[int, int, int]:
    """Return start, size and number of entries of the central directory."""
    # The end record is last, after it only a comment of at most 65535 bytes.
    tail_at = max(0, source.size - _END.size - 0xFFFF)
    tail = source.read(tail_at, source.size - tail_at, "The zip end record")
    at = len(tail) - _END.size
    if tail[at : at + 4] != b"PK\x05\x06":
        at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size > len(tail):
        raise CheckpointError("The zip file has no directory: it is cut off.")
    _, disk, first, here, count, size, start, comment = _END.unpack_from(tail, at)
    if at + _END.size + comment != len(tail) or disk or first or here != count:
        raise CheckpointError("The zip file's end record does not fit.")
    locator_at = tail_at + at - _LOCATOR64.size
    if locator_at >= 0:
        data = source.read(locator_at, _LOCATOR64.size, "The zip64 locator")
        signature, disk, end64, disks = _LOCATOR64.unpack(data)
        if signature == b"PK\x06\x07":
            if disk or disks != 1:
                raise CheckpointError("The zip file is in several parts.")
            data = source.read(end64, _END64.size, "The zip64 end record")
            signature, _, _, _, disk, first, here, count, size, start = _END64.unpack(
                data
            )
            if signature != b"PK\x06\x06" or disk or first or here != count:
                raise CheckpointError("The zip64 end record does not fit.")
            if start + size > end64:
                raise CheckpointError("The zip directory overlaps its end record.")
            return start, size, count
    if start + size > tail_at + at:
        raise CheckpointError("The zip directory overlaps its end record.")
    return start, size, count


def _entry(directory: bytes, at: int) -> tuple[str, _Entry, int]:
    """Return the name and place of a record, and where the next entry begins."""
    if at + _CENTRAL.size > len(directory):
        raise CheckpointError("The zip directory is cut off.")
    fields = _CENTRAL.unpack_from(directory, at)
    flags, method = fields[5:7]
    packed, size, name_size, extra_size, comment_size, disk = fields[10:16]
    attributes, header = fields[17:19]
    at += _CENTRAL.size
    stop = at + name_size + extra_size + comment_size
    if fields[0] != b"PK\x01\x02" or stop > len(directory) or disk:
        raise CheckpointError("An entry of the zip directory is damaged.")
    name = directory[at : at + name_size].decode("utf-8", "surrogateescape")
    extra = directory[at + name_size : at + name_size + extra_size]
    size, packed, header = _wide(extra, [size, packed, header])
    if size and (attributes & _FOLDER or name.endswith("/")):
        raise CheckpointError(f"The record {_shown(name)} is a folder with data.")
    is_stored = not method and not flags & 1 and packed == size
    return name, _Entry(header, size, is_stored), stop


def _wide(extra: bytes, values: list[int]) -> list[int]:
    """Return a zip64 field's 64-bit values, for those that did not fit in 32."""
    at = 0
    wide = b""
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            wide = extra[at + 4 : at + 4 + size]
        at += 4 + size
    for i, value in enumerate(values):
        if value == _MAX32 and len(wide) >= 8:
            values[i] = int.from_bytes(wide[:8], "little")
            wide = wide[8:]
    return values


def _locate(source: Source, name: str, entry: _Entry) -> Extent:
    what = f"The record {_shown(name)}"
    if not entry.is_stored:
        raise CheckpointError(
            f"{what} is compressed or encrypted; PyTorch stores records as they are. "
            "Unpack the file and save its object again."
        )
    raw_name = name.encode("utf-8", "surrogateescape")
    data = source.read(entry.header, _LOCAL.size + len(raw_name), what)
    fields = _LOCAL.unpack_from(data)
    flags, method = fields[2:4]
    name_size, extra_size = fields[-2:]
    if fields[0] != b"PK\x03\x04" or method or flags & 1:
        raise CheckpointError(f"{what} has a damaged header.")
    if name_size != len(raw_name) or data[_LOCAL.size :] != raw_name:
        raise CheckpointError(f"{what} has two names.")
    extent = Extent(entry.header + len(data) + extra_size, entry.size)
    source.check(*extent, what)
    return extent


def _shown(name: str) -> str:
    return ascii(name[:80])
