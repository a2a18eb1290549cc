"""The reader's error, and limits on the work that a file may cause."""

from dataclasses import dataclass


class CheckpointError(ValueError):
    """The file is damaged, hostile, or not a readable PyTorch checkpoint.

    File system errors (a missing file, no permission) remain an ``OSError``.
    """


@dataclass(frozen=True)
class Limits:
    """Limits on a file's resource use. The defaults are far above real checkpoints.

    Args:
        operations (int): Pickle instructions and the values that they make, counting
            shared ones wherever they appear. The size of the pickle (8 bytes are one
            operation), objects, copies and hash collisions count as well. An operation
            takes about 1 microsecond and at most 100 bytes; a tensor is about 50.
        tensor_bytes (int): The tensors may hold four times the size of the file plus
            this many bytes. Only views that repeat elements come close.
    """

    operations: int = 10_000_000
    tensor_bytes: int = 2**29


class Budget:
    """The operations that a file has left."""

    __slots__ = ("limits", "operations")

    def __init__(self, limits: Limits | None) -> None:
        self.limits = limits or Limits()
        self.operations = self.limits.operations

    def spend(self, operations: int) -> None:
        """Pay for work before doing it. Raise if too little is left."""
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
