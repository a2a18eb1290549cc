"""Read the zip directory of a checkpoint, strictly: what is where, uncompressed.

Stricter than a general unzip tool on purpose. Every record has to be stored as it is,
lie inside the file, and overlap nothing, so that the file's own size bounds what can
be read from it.
"""

import struct
from typing import Any

from .limits import CheckpointError, Limits
from .names import storage_of
from .pickle_reader import PickleReader
from .source import Source
from .storages import Extent

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s4B4HL2L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX32 = 0xFFFFFFFF


def read_zip(source: Source, limits: Limits) -> tuple[Any, dict[str, Extent], bool]:
    """The pickled object, where its storages are, and whether it is big-endian."""
    records = _records(source, limits)
    folder = next(iter(records), "").split("/", 1)[0] + "/"
    if folder + "constants.pkl" in records:
        raise CheckpointError(
            "This is a TorchScript archive (torch.jit.save), which holds code; save "
            "the state_dict() of the model with torch.save() instead."
        )
    if folder + "data.pkl" not in records:
        raise CheckpointError("This zip file is not a PyTorch checkpoint: no data.pkl.")

    def read(name: str, at_most: int) -> bytes:
        offset, size = records[folder + name]
        if size > at_most:
            raise CheckpointError(f"{name} has {size} bytes; {at_most} is the limit.")
        return source.read(offset, size, name)

    order = b"little"
    if folder + "byteorder" in records:
        order = read("byteorder", 16)
        if order not in (b"little", b"big"):
            raise CheckpointError(f"The byte order {order!r} is unknown.")
    pickle = read("data.pkl", limits.pickle_bytes)
    reader = PickleReader(pickle, 0, storage_of, limits)
    value = reader.read()
    if reader.position != len(pickle):
        raise CheckpointError("There is data after the end of the pickle.")
    prefix = folder + "data/"
    extents = {
        name.removeprefix(prefix): extent
        for name, extent in records.items()
        if name.startswith(prefix)
    }
    return value, extents, order == b"big"


def _records(source: Source, limits: Limits) -> dict[str, Extent]:
    """Where the data of each record is, in the order of the directory."""
    start, size, count = _find_directory(source)
    if count > limits.records or size > limits.pickle_bytes:
        raise CheckpointError(
            f"The zip file has more than {limits.records} records; if the file is to "
            "be trusted, raise limits.records."
        )
    directory = source.read(start, size, "The zip directory")
    records: dict[str, Extent] = {}
    taken = []
    at = 0
    for _ in range(count):
        name, header, stored, at = _entry(directory, at)
        if name in records:
            raise CheckpointError(f"The zip file has two records {_shown(name)}.")
        records[name] = _locate(source, name, header, stored)
        taken.append((header, sum(records[name])))
    if at != len(directory):
        raise CheckpointError("The zip directory has more than it says.")
    end = 0
    for header, stop in sorted(taken):
        if header < end or stop > start:
            raise CheckpointError("Records of the zip file overlap.")
        end = stop
    return records


def _find_directory(source: Source) -> tuple[int, int, int]:
    """Start, size and number of entries of the central directory."""
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


def _entry(directory: bytes, at: int) -> tuple[str, int, int, int]:
    """Name, place of the local header, stored size, and where the next entry is."""
    if at + _CENTRAL.size > len(directory):
        raise CheckpointError("The zip directory is cut off.")
    fields = _CENTRAL.unpack_from(directory, at)
    flags, method = fields[5:7]
    packed, size, name_size, extra_size, comment_size, disk = fields[10:16]
    header = fields[18]
    at += _CENTRAL.size
    stop = at + name_size + extra_size + comment_size
    if fields[0] != b"PK\x01\x02" or stop > len(directory) or disk:
        raise CheckpointError("An entry of the zip directory is damaged.")
    name = directory[at : at + name_size].decode("utf-8", "surrogateescape")
    extra = directory[at + name_size : at + name_size + extra_size]
    size, packed, header = _wide(extra, [size, packed, header])
    if method or flags & 1 or packed != size:
        raise CheckpointError(
            f"The record {_shown(name)} is compressed or encrypted; PyTorch stores "
            "records as they are. Unpack and save again."
        )
    return name, header, size, stop


def _wide(extra: bytes, values: list[int]) -> list[int]:
    """The 64-bit values of a zip64 extra field, for those that did not fit in 32."""
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


def _locate(source: Source, name: str, header: int, size: int) -> Extent:
    what = f"The record {_shown(name)}"
    raw_name = name.encode("utf-8", "surrogateescape")
    data = source.read(header, _LOCAL.size + len(raw_name), what)
    fields = _LOCAL.unpack_from(data)
    flags, method = fields[2:4]
    name_size, extra_size = fields[-2:]
    if fields[0] != b"PK\x03\x04" or method or flags & 1:
        raise CheckpointError(f"{what} has a damaged header.")
    if name_size != len(raw_name) or data[_LOCAL.size :] != raw_name:
        raise CheckpointError(f"{what} has two names.")
    extent = Extent(header + len(data) + extra_size, size)
    source.check(*extent, what)
    return extent


def _shown(name: str) -> str:
    return ascii(name[:80])
