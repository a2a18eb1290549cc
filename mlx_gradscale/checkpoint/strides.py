"""Save and restore the memory order of arrays, which safetensors files lose.

Matrix products round differently for transposed operands, and a step leaves weights and
moments in the order of its operands. So a resumed run is bit-identical only if that
order is restored too.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx


def find_strides(arrays: Mapping[str, mx.array]) -> dict[str, list[int]]:
    """Return the strides of arrays that are neither row-major nor have gaps.

    Example:
        >>> x = mx.zeros((2, 3))
        >>> find_strides({"x": x, "y": x.T})
        {'y': [1, 3]}
    """
    mx.eval(arrays)
    found = {}
    for name, x in arrays.items():
        if x.ndim > 1 and x.size > 1:
            buffer: Any = x
            view = memoryview(buffer)
            strides = [stride // view.itemsize for stride in view.strides or ()]
            row_major = [math.prod(x.shape[axis + 1 :]) for axis in range(x.ndim)]
            if strides != row_major and _is_dense(x.shape, strides):
                found[name] = strides
    return found


def arrange(x: mx.array, strides: Sequence[int] | None) -> mx.array:
    """Return an equal array with other strides.

    Example:
        >>> x = arrange(mx.array([[1, 2, 3], [4, 5, 6]]), [1, 2])
        >>> mx.eval(x)
        >>> memoryview(x).strides, x.tolist()
        ((4, 8), [[1, 2, 3], [4, 5, 6]])
    """
    if strides is None:
        return x
    # as_strided does not check bounds.
    if not _is_dense(x.shape, strides):
        raise ValueError(f"the strides do not match an array of shape {x.shape}.")
    order = sorted(range(x.ndim), key=lambda axis: -strides[axis])
    return mx.as_strided(x.transpose(*order).reshape(-1), x.shape, strides)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether the elements fill their memory; an axis of 1 has any stride."""
    step = 1
    pairs = zip(strides, shape, strict=True)
    for stride, size in sorted(pair for pair in pairs if pair[1] > 1):
        if stride != step:
            return False
        step *= size
    return True
