"""The memory order of arrays, which a file does not keep.

Matrix products round differently for transposed operands, and a step leaves weights
and moments in the order of its operands. So a run resumes bit for bit only if that
order is restored too; for matrices of 1 x n it is often not the row order.
"""

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any, cast

import mlx.core as mx

_MOST_AXES = 5  # 120 orders to try; more axes are left in row order


def memory_orders(arrays: Mapping[str, mx.array]) -> dict[str, list[int]]:
    """Return the axes from slowest to fastest of arrays that are not in row order.

    Example:
        >>> x = mx.zeros((2, 3))
        >>> memory_orders({"x": x, "y": x.T})
        {'y': [1, 0]}
    """
    mx.eval(arrays)
    found = {}
    for name, x in arrays.items():
        if 1 < x.ndim <= _MOST_AXES and x.size > 1:
            view = memoryview(cast(Any, x))
            actual = [stride // view.itemsize for stride in view.strides or ()]
            # The first of all orders is the row order.
            for order in permutations(range(x.ndim)):
                if _strides(x.shape, order) == actual:
                    if [*order] != sorted(order):
                        found[name] = [*order]
                    break
    return found


def arrange(x: mx.array, order: Sequence[int] | None) -> mx.array:
    """Return an equal array in another memory order.

    Example:
        >>> x = arrange(mx.array([[1, 2, 3], [4, 5, 6]]), [1, 0])
        >>> mx.eval(x)
        >>> memoryview(x).strides, x.tolist()
        ((4, 8), [[1, 2, 3], [4, 5, 6]])
    """
    if order is None:
        return x
    # as_strided checks no bounds; strides of a permutation stay inside.
    if sorted(order) != [*range(x.ndim)]:
        raise ValueError(f"an array of shape {x.shape} has no such memory order.")
    flat = x.transpose(*order).reshape(-1)
    return mx.as_strided(flat, x.shape, _strides(x.shape, order))


def _strides(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return strides
