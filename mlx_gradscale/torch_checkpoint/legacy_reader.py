"""Read the sequential-pickle files that PyTorch wrote before 1.6.

Five pickles one after the other (magic number, version, system, object, storage keys)
and then the storages: eight bytes for the number of elements and their bytes. They
are little-endian whatever machine wrote them.
"""

from dataclasses import replace
from typing import Any

from .limits import CheckpointError, CutOffError, Limits
from .names import storage_of
from .pickle_reader import PickleReader
from .source import Source
from .storages import Extent
from .tensors import StorageRef

# A header takes one to thirty instructions.
_FEW = 100
MAGIC = 0x1950A86A20F9469CFC6C
VERSION = 1001


def read_legacy(source: Source, limits: Limits) -> tuple[Any, dict[str, Extent], bool]:
    """The pickled object, where its storages are, and False for little-endian."""
    # How long the pickles are is not written anywhere: take more until they end.
    size = min(source.size, 2**20)
    while True:
        try:
            value, keys, known, end = _read_pickles(source, size, limits)
            break
        except CutOffError:
            if size == min(source.size, limits.pickle_bytes):
                raise
            size = min(source.size, limits.pickle_bytes, 16 * size)
    if type(keys) is not list or not all(type(key) is str for key in keys):
        raise CheckpointError("The list of storages is damaged.")
    if len(keys) != len(known) or set(keys) != set(known):
        raise CheckpointError("The list of storages is not that of the tensors.")
    return value, _storages(source, end, [known[key] for key in keys]), False


def _read_pickles(
    source: Source, size: int, limits: Limits
) -> tuple[Any, Any, dict[str, StorageRef], int]:
    head = source.read(0, size, "The pickle")
    known: dict[str, StorageRef] = {}
    at = 0

    def load_storage(pid: Any) -> StorageRef:
        part = storage_of(pid)
        whole = StorageRef(part.key, part.element, part.total, 0, part.total)
        if known.setdefault(part.key, whole) != whole:
            raise CheckpointError("One storage is described in two ways.")
        return part

    def read_next(opcodes: int) -> Any:
        nonlocal at
        few = replace(limits, opcodes=min(opcodes, limits.opcodes))
        reader = PickleReader(head, at, load_storage, few)
        value = reader.read()
        at = reader.position
        return value

    if read_next(_FEW) != MAGIC or read_next(_FEW) != VERSION:
        raise CheckpointError("This pickle is not a PyTorch checkpoint.")
    read_next(_FEW)  # the machine that wrote it, which changes nothing
    value = read_next(limits.opcodes)
    # A key and its number in the memo are two instructions.
    keys = read_next(_FEW + 3 * len(known))
    return value, keys, known, at


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
