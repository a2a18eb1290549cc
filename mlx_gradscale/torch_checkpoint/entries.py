"""One placeholder as a pickle of its own, to be kept in another file."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .foreign import Placeholder
from .limits import Budget, CheckpointError
from .pickle_allowlist import storage_of
from .pickle_reader import PickleReader
from .pickle_writer import Array, PickleWriter
from .tensors import TensorRef
from .tree import TreeFinisher, written_limit


def dump(value: Placeholder) -> tuple[bytes, list[Array]]:
    """Return the pickle that makes the object again, and the arrays it refers to.

    Example:

        >>> color = Placeholder.named("paint", "Color").called(b"R", (3,))
        >>> str(parse(*dump(color)))
        'paint.Color(3)'
    """
    writer = PickleWriter()
    return writer.write(value), writer.arrays


def parse(data: bytes, arrays: Sequence[mx.array], budget: Budget | None = None) -> Any:
    """Return the placeholder of a pickle that :func:`dump` made, running nothing.

    Args:
        data (bytes): The pickle.
        arrays (sequence): Its arrays.
        budget (Budget, optional): What it may take.

    Raises:
        CheckpointError: It is not such a pickle, or asks for too much.
    """
    budget = budget or Budget()
    reader = PickleReader(data, 0, storage_of, budget)
    value = reader.read()
    if type(value) is not Placeholder or reader.position != len(data):
        raise CheckpointError("a kept object is damaged.")

    def array(ref: TensorRef) -> mx.array:
        key = ref.storage.key
        held = arrays[int(key)] if key.isdecimal() and int(key) < len(arrays) else None
        if (
            isinstance(held, mx.array)
            and held.dtype == ref.element.mlx
            and held.shape == ref.shape
            and ref.row_contiguous
        ):
            return held
        raise CheckpointError("a tensor of a kept object is missing.")

    limits = budget.limits
    written = written_limit(len(data), limits)
    return TreeFinisher(array, limits, reader.shared, written).finish(value)
