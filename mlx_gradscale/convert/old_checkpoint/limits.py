"""The reader's exception, and limits on the work and memory that a file may take."""

from dataclasses import dataclass

# The number of characters of text that count as one operation.
TEXT = 32


class CheckpointError(ValueError):
    """Raised if a file is damaged, hostile or unsupported, or an object is too deep.

    File system errors (a missing file, no permission) raise an ``OSError`` instead.
    """


@dataclass
class Limits:
    """Limits on the work and memory that reading may take.

    Every file that is read with this object uses up part of it. To limit several
    files together, pass the same object to all calls; to limit each file separately,
    create a new object for each. With the defaults, a hostile file takes at most about
    30 s of CPU time, and 1 GB of memory in addition to the data of its tensors. They
    allow about 90,000 tensors or a million other values; raise them for a larger
    checkpoint that you trust.

    Args:
        operations (int): The maximum number of operations. Each pickle instruction
            counts as one, and each value in the result as eight each time it appears.
            The size of the pickle (one operation per 8 bytes), objects, names, copies
            and hash collisions count as well. A tensor costs about 110 operations. An
            operation takes about 1 microsecond and 100 bytes. Default: ``10_000_000``.
        tensor_bytes (int): How many bytes copies of all tensors may take beyond the
            data that they view. Only overlapping views, and views that repeat elements,
            take any: they share memory until they are copied or saved. Only ``load``
            uses this limit. Default: ``2**29``.
    """

    operations: int = 10_000_000
    tensor_bytes: int = 2**29

    def spend(self, operations: int) -> None:
        """Deduct the cost of work that follows; raise if it exceeds the limit."""
        check(
            operations <= self.operations,
            "the file takes more operations to read than limits.operations allows "
            f"({Limits.operations:,} by default). If you trust it, raise the limit.",
        )
        self.operations -= operations

    def spend_bytes(self, tensor_bytes: int) -> None:
        """Deduct the size of tensors beyond their data; raise if it exceeds the limit.

        A negative size deducts nothing.
        """
        check(
            tensor_bytes <= self.tensor_bytes,
            f"Copies of the tensors would take {tensor_bytes:,} bytes more than the "
            "data that they view, which is more than limits.tensor_bytes allows. If "
            "you trust the file, raise the limit.",
        )
        self.tensor_bytes -= max(0, tensor_bytes)


def check(condition: object, problem: str) -> None:
    """Raise a ``CheckpointError`` unless the condition holds."""
    if not condition:
        raise CheckpointError(problem)
