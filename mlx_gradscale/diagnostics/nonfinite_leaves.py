"""Report which leaves of a tree contain NaN or inf."""

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..core.finite import arrays
from ..core.trees import flatten, is_floating


class NonFinite(NamedTuple):
    """A leaf that contains NaN or inf, as reported by :func:`nonfinite`.

    Attributes:
        path (str): The dotted path of the leaf.
        shape (tuple): Its shape.
        dtype (Dtype): Its dtype.
        nan (int): The number of NaN values.
        positive_inf (int): The number of inf values.
        negative_inf (int): The number of -inf values.
    """

    path: str
    shape: tuple[int, ...]
    dtype: mx.Dtype
    nan: int
    positive_inf: int
    negative_inf: int


def nonfinite(tree: Any) -> list[NonFinite]:
    """List the leaves of ``tree`` that contain NaN or inf, with counts.

    This waits for the device. Call it after a skipped step, not on every step.

    Args:
        tree (Any): A tree of arrays, such as gradients, scaled or not.

    Returns:
        list: A :class:`NonFinite` for each leaf that contains NaN or inf.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_gradscale.diagnostics import nonfinite
        >>> grads = {"a": mx.ones(3), "b": [mx.array([float("inf"), 1.0])]}
        >>> [(r.path, r.nan, r.positive_inf) for r in nonfinite(grads)]
        [('b.0', 0, 1)]
    """
    arrays(tree)  # raises if a leaf is no array
    found = [(path, x) for path, x in flatten(tree) if is_floating(x)]
    if not found:
        return []
    rows = np.array(mx.stack([_count(x) for _, x in found]))
    return [
        NonFinite(path, x.shape, x.dtype, *map(int, row))
        for (path, x), row in zip(found, rows, strict=True)
        if row.any()
    ]


def _count(x: mx.array) -> mx.array:
    if x.dtype == mx.complex64:
        return _count(mx.real(x)) + _count(mx.imag(x))
    kinds = (mx.isnan(x), mx.isposinf(x), mx.isneginf(x))
    return mx.stack([mx.sum(kind) for kind in kinds])
