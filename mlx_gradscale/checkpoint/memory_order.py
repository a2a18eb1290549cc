"""How an array lies in memory, which a file does not keep.

A matrix product rounds otherwise for a matrix that lies transposed, and a step leaves
weights and moments as their operands lay. So a run goes on bit for bit only from arrays
that lie as they did. Of 1 x n matrices this is the usual case: both ways are dense.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import mlx.core as mx

# A dimension of 1 may have any stride; no array has more elements than this.
_LARGEST = 2**40


def strides(arrays: Mapping[str, mx.array]) -> dict[str, list[int]]:
    """Return the strides, in elements, of those that are dense and not in row order.

    Example:
        >>> x = mx.zeros((2, 3))
        >>> strides({"x": x, "y": x.T})
        {'y': [1, 3]}
    """
    mx.eval(arrays)
    found = {}
    for name, x in arrays.items():
        if x.ndim > 1 and x.size > 1:
            view = memoryview(cast(Any, x))
            mine = [stride // view.itemsize for stride in view.strides or ()]
            if mine != _in_order(x.shape, range(x.ndim)) and is_dense(x.shape, mine):
                found[name] = mine
    return found


def arranged(x: mx.array, strides: Sequence[int] | None) -> mx.array:
    """Return an equal array that lies in memory as asked.

    Args:
        x (array): Any array.
        strides (list, optional): From :func:`strides`. Default: as it is.

    Raises:
        ValueError: An array of this shape cannot lie so.

    Example:
        >>> x = arranged(mx.array([[1, 2, 3], [4, 5, 6]]), [1, 2])
        >>> mx.eval(x)
        >>> memoryview(x).strides, x.tolist()
        ((4, 8), [[1, 2, 3], [4, 5, 6]])
    """
    if strides is None:
        return x
    # as_strided looks at no bounds: other strides would read foreign memory.
    if not is_dense(x.shape, strides):
        raise ValueError(f"An array of shape {x.shape} cannot have the strides in it.")
    flat = x.transpose(_order(strides)).reshape(-1)
    return mx.as_strided(flat, x.shape, list(strides))


def is_dense(shape: Sequence[int], strides: Any) -> bool:
    """Tell whether these strides visit every element of a block of memory once."""
    if not isinstance(strides, (list, tuple)) or len(strides) != len(shape):
        return False
    if any(type(s) is not int or not 0 <= s < _LARGEST for s in strides):
        return False
    expected = _in_order(shape, _order(strides))
    sizes = zip(shape, strides, expected, strict=True)
    return all(n == 1 or mine == wanted for n, mine, wanted in sizes)


def _order(strides: Sequence[int]) -> list[int]:
    return sorted(range(len(strides)), key=lambda axis: -strides[axis])


def _in_order(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    out, step = [0] * len(shape), 1
    for axis in reversed(order):
        out[axis] = step
        step *= shape[axis]
    return out
