"""The error of this package's readers, and the bounds they hold a file to."""

from dataclasses import dataclass


class CheckpointError(ValueError):
    """A file is not a PyTorch checkpoint that can be read, and why.

    Raised for damaged, hostile and unsupported files alike. Trouble with the file
    system (a missing file, no permission) stays an ``OSError``.
    """


class CutOffError(CheckpointError):
    """A pickle goes on beyond the bytes it was given."""


@dataclass(frozen=True)
class Limits:
    """How much a file may ask for; every bound is far above real checkpoints.

    Args:
        operations (int): Pickle instructions, values that are copied, and the work of
            finding a place for dict keys and set members (a 128th for each number or
            tuple there whose hash can be chosen to be in the way). One takes some 2
            microseconds. A tensor takes about 40, so the default is room for some
            200,000 tensors.
        memory (int): Bytes of all Python objects that the file makes, also of those
            that it lets go again. The tensors' own data is not among them.
        depth (int): Containers inside containers.
        pickle_bytes (int): Size of the pickle, and of the zip directory, which are
            held in memory. A text can take four times its bytes there.
        records (int): Records in the zip file; each storage is one.
        shared_bytes (int): With all that is shared written out wherever it is, the
            object may take 64 times the pickle's size and this much more. Forty
            lists, each holding the previous one twice, would be 2**40 values.
        extra_bytes (int): All tensors together may hold four times the file's size
            and this much more. Only views that repeat or overlap elements, such as
            expanded tensors, get near it.
    """

    operations: int = 10_000_000
    memory: int = 2**30
    depth: int = 128
    pickle_bytes: int = 2**26
    records: int = 1_000_000
    shared_bytes: int = 2**24
    extra_bytes: int = 2**30


DEFAULT_LIMITS = Limits()


class Budget:
    """What is left of a file's ``operations`` and ``memory``.

    There is one for a whole file, so that nothing can be had twice.
    """

    __slots__ = ("limits", "memory", "operations")

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self.limits = limits
        self.operations = limits.operations
        self.memory = limits.memory

    def take(self, memory: int = 0, operations: int = 0) -> None:
        """Pay for something before it is done; raises when too little is left."""
        self.memory -= memory
        self.operations -= operations
        if self.operations < 0:
            raise CheckpointError(
                f"the file takes more than {self.limits.operations} operations to "
                "read; if it is to be trusted, raise limits.operations."
            )
        if self.memory < 0:
            raise CheckpointError(
                f"the objects in the file take more than {self.limits.memory} bytes "
                "of memory; if it is to be trusted, raise limits.memory."
            )
