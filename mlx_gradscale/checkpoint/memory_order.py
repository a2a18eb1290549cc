"""Find and restore the memory order of arrays, which safetensors files do not store.

Matrix products may round differently if an operand is transposed in memory, and a
training step can leave weights and moments transposed. A resumed run is therefore
bit-identical only if the memory order is restored too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx


def find_orders(values: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return each non-row-major array's axes in memory order, outermost first.

    Example:
        >>> x = mx.zeros((2, 3))
        >>> find_orders({"x": x, "y": x.T})
        {'y': [1, 0]}
    """
    mx.eval(values)
    found = {}
    for name, x in values.items():
        if isinstance(x, mx.array) and x.ndim > 1 and x.size > 1:
            buffer: Any = x
            strides = memoryview(buffer).strides or ()
            # Strides can be equal if an axis has a single element. Sort that axis last.
            keys = [(-stride, -n) for stride, n in zip(strides, x.shape, strict=True)]
            order = sorted(range(x.ndim), key=keys.__getitem__)
            if order != [*range(x.ndim)]:
                found[name] = order
    return found


def arrange(x: Any, order: Sequence[int] | None) -> Any:
    """Return ``x`` with its axes in this order in memory; None leaves it unchanged."""
    if order is None:
        return x
    if sorted(order) != [*range(x.ndim)]:
        raise ValueError(f"memory order {order} is invalid for shape {x.shape}.")
    moved = x.transpose(order)
    # Two reshapes set even the strides of axes with a single element.
    inverse = sorted(range(x.ndim), key=order.__getitem__)
    return moved.reshape(-1).reshape(moved.shape).transpose(inverse)
