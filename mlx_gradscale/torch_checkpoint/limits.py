"""The reader's error, and limits on the work that a file may cause."""

from dataclasses import dataclass


class CheckpointError(ValueError):
    """The file is damaged, hostile, or not a readable PyTorch checkpoint.

    File system errors (a missing file, no permission) remain an ``OSError``.
    """


@dataclass
class Limits:
    """Limits on the work and memory that reading may take.

    Every file that is read with this object uses up a part of it. To limit several
    files together, pass the same object to all calls; to limit each file separately,
    create a new object for each. The defaults are far above real checkpoints.

    Args:
        operations (int): Each pickle instruction is one operation. Each value in the
            result is six, and shared values count wherever they appear. The size of the
            pickle (8 bytes are one operation), objects, copies and hash collisions
            count as well. An operation takes about 1 microsecond and at most 100 bytes;
            a tensor takes about 110 operations.
        tensor_bytes (int): The tensors may hold four times the size of the file plus
            this many bytes. Only views that repeat elements come close.
    """

    operations: int = 10_000_000
    tensor_bytes: int = 2**29

    def spend(self, operations: int) -> None:
        """Pay for work before doing it. Raise if too little is left."""
        self.operations -= operations
        check(
            self.operations >= 0,
            "the file takes more operations to read than limits.operations allows "
            f"({Limits.operations:,} by default). If you trust it, raise the limit.",
        )

    def spend_bytes(self, tensor_bytes: int) -> None:
        """Pay for tensor memory beyond four times the size of the file."""
        self.tensor_bytes -= tensor_bytes
        check(
            self.tensor_bytes >= 0,
            "the tensors hold more than four times the size of the file. If you trust "
            "it, raise limits.tensor_bytes.",
        )


def check(condition: object, problem: str) -> None:
    """Raise a ``CheckpointError`` unless the condition holds."""
    if not condition:
        raise CheckpointError(problem)
