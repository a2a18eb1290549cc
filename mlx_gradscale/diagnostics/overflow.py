"""A table of the parameters that overflowed."""

import math
from typing import Any

from ..core.finite import NonFinite, nonfinite
from ..files.text import align, dtype_name


def overflow_table(grads: Any, limit: int | None = 20) -> str:
    """Return a table of the leaves that hold NaN or inf, and how many.

    This reads from the device, once for the whole tree: call it after a skipped step,
    not in every step.

    Args:
        grads (Any): A tree of arrays, scaled or not, or what
            :func:`mlx_gradscale.nonfinite` returned.
        limit (int, optional): Show this many rows; None for all. Default: ``20``.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_gradscale.diagnostics import overflow_table
        >>> inf = float("inf")
        >>> grads = {"a": mx.ones(3), "b": {"weight": mx.array([inf, -inf, 1.0, inf])}}
        >>> print(overflow_table(grads))
        parameter    dtype  nan  +inf  -inf  of
        b.weight   float32    0     2     1   4
    """
    leaves = grads if _are_nonfinite(grads) else nonfinite(grads)
    return nonfinite_table(leaves, "parameter", limit)


def nonfinite_table(leaves: list[NonFinite], what: str, limit: int | None = 20) -> str:
    """Return the table of :func:`overflow_table` with ``what`` as its heading."""
    if not leaves:
        return "Every value is finite."
    rows: list[tuple[Any, ...]] = [(what, "dtype", "nan", "+inf", "-inf", "of")]
    for r in leaves[:limit]:
        dtype = dtype_name(r.dtype)
        size = math.prod(r.shape)
        rows.append((r.path, dtype, r.nan, r.positive_inf, r.negative_inf, size))
    table = align(rows)
    more = len(leaves) - len(leaves[:limit])
    return f"{table}\n... and {more} more" if more else table


def _are_nonfinite(grads: Any) -> bool:
    return isinstance(grads, list) and all(isinstance(r, NonFinite) for r in grads)
