"""The error that the reader raises, and how much work a file may ask for."""

from dataclasses import dataclass
from typing import Any


class CheckpointError(ValueError):
    """A file is damaged, hostile, or not a PyTorch checkpoint that can be read.

    File system errors (a missing file, no permission) stay an ``OSError``.
    """


@dataclass(frozen=True)
class Limits:
    """How much a file may ask for. The defaults are far above real checkpoints.

    Args:
        operations (int): Pickle instructions, including the cost of objects, copies,
            long texts and hash collisions. One takes about 1 microsecond and at most
            100 bytes; a tensor takes about 50. After reading, the object may also not
            contain more values than this, counting shared ones wherever they appear.
        depth (int): Nesting of containers, at most 400.
        pickle_bytes (int): Size of the pickle, which is read into memory.
        tensor_bytes (int): The tensors may hold four times the size of the file and
            this much more. Only views that repeat elements come near it.
    """

    operations: int = 10_000_000
    depth: int = 128
    pickle_bytes: int = 2**26
    tensor_bytes: int = 2**29


class Budget:
    """The operations that a file has left."""

    __slots__ = ("limits", "operations")

    def __init__(self, limits: Limits | None) -> None:
        self.limits = limits or Limits()
        self.operations = self.limits.operations

    def spend(self, operations: int) -> None:
        """Pay for work before doing it. Raises if too little is left."""
        self.operations -= operations
        if self.operations < 0:
            raise CheckpointError(
                f"the file takes more than {self.limits.operations} operations to "
                "read. If you trust it, raise limits.operations."
            )


def check(condition: object, problem: str) -> None:
    """Raise a ``CheckpointError`` unless the condition holds."""
    if not condition:
        raise CheckpointError(problem)


def require(condition: object) -> None:
    """Raise a ``TypeError`` unless the condition holds."""
    if not condition:
        raise TypeError


def is_count(value: Any) -> bool:
    """Return whether a value is a non-negative integer that fits in 64 bits."""
    return type(value) is int and 0 <= value < 2**63
