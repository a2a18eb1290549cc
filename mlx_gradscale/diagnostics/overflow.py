"""Which parameters overflowed, as a table."""

import math
from typing import Any

from ..core.finite import NonFinite, nonfinite
from ..files.text import align, dtype_name


def overflow_table(grads: Any, limit: int | None = 20) -> str:
    """Say which leaves hold NaN or inf, and how many, as a table.

    This reads from the device, once for the whole tree: call it after a skipped
    step, not on every step.

    Args:
        grads (Any): A tree of arrays, scaled or not, or what
            :func:`mlx_gradscale.nonfinite` returned.
        limit (int, optional): Show this many rows and count the others; None for
            all. Default: ``20``.

    Returns:
        str: The table, or a sentence if all is finite.

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
    """Return the table of :func:`overflow_table` for leaves that are a ``what``."""
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
