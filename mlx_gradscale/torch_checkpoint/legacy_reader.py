"""Read the sequential-pickle files that PyTorch wrote before 1.6.

Five pickles one after the other (magic number, version, system, object, storage keys)
and then the storages: eight bytes for the number of elements and their bytes. They
are little-endian whatever machine wrote them.
"""

from typing import Any

from .limits import Budget, CheckpointError, CutOffError
from .pickle_allowlist import storage_of
from .pickle_reader import PickleReader
from .source import Source
from .storages import Contents, Extent
from .tensors import StorageRef

MAGIC = 0x1950A86A20F9469CFC6C
VERSION = 1001


def read_legacy(source: Source, budget: Budget) -> Contents:
    """Return the pickled object, and where its storages are."""
    # How long the pickles are is not written anywhere: take more until they end.
    limits = budget.limits
    size = min(source.size, 2**20)
    while True:
        try:
            value, keys, known, end = _read_pickles(source, size, budget)
            break
        except CutOffError:
            if size == min(source.size, limits.pickle_bytes):
                raise
            size = min(source.size, limits.pickle_bytes, 16 * size)
            budget.memory = limits.memory  # what the shorter piece made is let go
    if type(keys) is not list or not all(type(key) is str for key in keys):
        raise CheckpointError("The list of storages is damaged.")
    if len(keys) != len(known) or set(keys) != set(known):
        raise CheckpointError("The list of storages is not that of the tensors.")
    extents = _storages(source, end, [known[key] for key in keys])
    return Contents(value.stack[0], value.shared, end, extents, big_endian=False)


def _read_pickles(
    source: Source, size: int, budget: Budget
) -> tuple[PickleReader, Any, dict[str, StorageRef], int]:
    """Return the reader of the object, the keys, the storages by key, and the end."""
    head = source.read(0, size, "The pickle")
    known: dict[str, StorageRef] = {}

    def load_storage(pid: Any) -> StorageRef:
        part = storage_of(pid)
        whole = StorageRef(part.key, part.element, part.total, 0, part.total)
        if known.setdefault(part.key, whole) != whole:
            raise CheckpointError("One storage is described in two ways.")
        return part

    at = 0
    for expected in (MAGIC, VERSION):
        reader = PickleReader(head, at, load_storage, budget)
        if reader.read() != expected:
            raise CheckpointError("This pickle is not a PyTorch checkpoint.")
        at = reader.position
    readers = []
    # The machine that wrote it, which changes nothing; the object; the storages' keys.
    for _ in range(3):
        readers.append(PickleReader(head, at, load_storage, budget))
        readers[-1].read()
        at = readers[-1].position
    _, value, keys = readers
    return value, keys.stack[0], known, at


def _storages(source: Source, at: int, storages: list[StorageRef]) -> dict[str, Extent]:
    extents = {}
    for storage in storages:
        count = int.from_bytes(source.read(at, 8, "A storage"), "little", signed=True)
        if count != storage.numel:
            raise CheckpointError("A storage has another size than its tensors say.")
        extent = Extent(at + 8, storage.numel * storage.itemsize)
        source.check(*extent, "A storage")
        extents[storage.key] = extent
        at = sum(extent)
    if at != source.size:
        raise CheckpointError("There is data after the last storage.")
    return extents
