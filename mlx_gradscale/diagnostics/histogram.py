"""Count gradients by power of two, to show how many float16 can represent."""

import math
from bisect import bisect
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ..core.finite import arrays
from ..core.scale import LARGEST_SCALE, SMALLEST_SCALE
from ..core.trees import is_floating
from ..files.text import align, percent, plural, power
from .reading import scale_of

# Exponents in float16: values above 2**-25 do not round to zero, values from 2**-14 up
# have all 11 bits, and 2**15 is the largest power of two.
ROUNDS_UP, NORMAL, LARGEST = -25, -14, 15
# Bins: zero, the exponents of float32, inf and NaN. All subnormals of float32 share the
# first power, because they underflow in float16 at any scale. Rounding to 11 bits takes
# numbers just below 2**128 to the last power.
_FIRST, _LAST = -127, 128
_INF = _LAST - _FIRST + 2
_BINS = _INF + 2
# Gradients fill about twenty bins. With 64 copies of each bin, atomic additions on a
# GPU rarely collide. On a CPU, the copies make counting a sixth slower.
_LANES = 64


class Shares(NamedTuple):
    """The share of gradients in each range of float16 at one loss scale.

    Attributes:
        zero (float): Zero before the cast.
        underflow (float): Rounded to zero by the cast.
        subnormal (float): Represented with fewer than float16's 11 bits.
        normal (float): Represented with all 11 bits.
        overflow (float): Infinite after the cast.
        nonfinite (float): Inf or NaN before the cast.
    """

    zero: float
    underflow: float
    subnormal: float
    normal: float
    overflow: float
    nonfinite: float


@dataclass(frozen=True, eq=False)
class GradientHistogram:
    """Counts of gradients by power of two, from :func:`gradient_histogram`.

    Attributes:
        bins (np.ndarray): The number of zeros, then the number of values for each power
            of two from 2**-127 up, then the numbers of infs and NaNs.
        leaves (dict): Maps the path of each leaf to its histogram.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_gradscale.diagnostics import gradient_histogram
        >>> grads = {"a": mx.full((3,), 1e-9), "b": mx.ones(1)}
        >>> print(gradient_histogram(grads))
        4 values in float16  zero  underflow  subnormal  normal  overflow  nonfinite
        without scaling         0     75.00%          0  25.00%         0          0
        at the best, 2^15       0          0     75.00%  25.00%         0          0
    """

    bins: np.ndarray
    leaves: dict[str, "GradientHistogram"] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of counted values."""
        return int(self.bins.sum())

    def by_power(self, scale: float = 1.0) -> dict[int, int]:
        """Return the number of magnitudes in [2**p, 2**(p + 1)), as ``{p: count}``.

        Magnitudes are rounded to float16's 11 bits, so every value that overflows has
        a power of at least 16. Float32 subnormals count as 2**-127 before rescaling.

        Args:
            scale (float): The loss scale, rounded to a power of two. Default: ``1.0``,
                for unscaled gradients.
        """
        shift = round(math.log2(scale_of(scale)))
        powers = self.bins[1:_INF]
        found = np.flatnonzero(powers)
        return {int(i) + _FIRST + shift: int(powers[i]) for i in found}

    def at(self, scale: float) -> Shares:
        """Return the share of values in each range of float16 at a loss scale.

        Args:
            scale (float): The loss scale, rounded as in :meth:`by_power`.
        """
        size = max(self.size, 1)
        counts = [0, 0, 0, 0]
        for p, count in self.by_power(scale).items():
            counts[bisect((ROUNDS_UP, NORMAL, LARGEST + 1), p)] += count
        every = (self.bins[0], *counts, self.bins[_INF:].sum())
        return Shares(*(float(count / size) for count in every))

    @property
    def best_scale(self) -> float | None:
        """The best loss scale for float16, as a power of two, or None.

        This is the middle of the scales at which no value overflows, underflows or
        loses bits. If there is none, it is the largest scale without an overflow,
        because one overflow skips the whole step; if values overflow at every scale, it
        is the smallest. Values that are non-finite already do not count. If all values
        are zero or non-finite, it is None.
        """
        powers = self.by_power()
        if not powers:
            return None
        smallest, largest = map(math.log2, (SMALLEST_SCALE, LARGEST_SCALE))
        top = max(min(LARGEST - max(powers), largest), smallest)
        low = max(min(NORMAL - min(powers), top), smallest)
        return math.ldexp(1.0, int((low + top) // 2))

    def __str__(self) -> str:
        rows = [[f"{plural(self.size, 'value')} in float16", *Shares._fields]]
        rows.append(["without scaling", *map(percent, self.at(1.0))])
        if self.best_scale is not None:
            name = f"at the best, {power(self.best_scale)}"
            rows.append([name, *map(percent, self.at(self.best_scale))])
        return align(rows)


def gradient_histogram(grads: Any) -> GradientHistogram:
    """Count gradients by power of two, over all leaves and per leaf.

    The device counts the gradients in one pass. Reading the counts waits for the
    device, so do not call this function on every step.

    A gradient that underflowed in float16 counts as zero. To see the full range,
    compute the gradients of one batch in float32.

    Args:
        grads (Any): A tree of unscaled gradients; integer and boolean leaves are
            ignored.

    Returns:
        GradientHistogram: The counts; print it for a table.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_gradscale.diagnostics import gradient_histogram
        >>> grads = {"w": mx.array([0.0, 2.0**-30, 2.0**-20, 1.0])}
        >>> histogram = gradient_histogram(grads)
        >>> histogram.at(1.0).underflow, histogram.at(2.0**15).underflow
        (0.25, 0.0)
        >>> histogram.best_scale
        32768.0
    """
    arrays(grads)
    leaves = [(path, x) for path, x in tree_flatten(grads) if is_floating(x) and x.size]
    if not leaves:
        return GradientHistogram(np.zeros(_BINS, np.int64))
    table = np.array(_count([x for _, x in leaves])).astype(np.int64)
    pairs = zip(leaves, table, strict=True)
    parts = {path: GradientHistogram(row) for (path, _), row in pairs}
    return GradientHistogram(table.sum(axis=0), parts)


@mx.compile
def _count(leaves: list[mx.array]) -> mx.array:
    return mx.stack([_count_leaf(x) for x in leaves])


def _count_leaf(x: mx.array) -> mx.array:
    if x.dtype == mx.complex64:
        x = x.reshape(-1).view(mx.float32)
    x = x.reshape(1) if x.ndim == 0 else x
    # Compare bits as integers, because a GPU may flush subnormals to zero.
    bits = x.astype(mx.float32).view(mx.uint32) & 0x7FFFFFFF
    infinite = 0x7F800000
    # Adding half of the last bit rounds to float16's 10 mantissa bits: values from
    # 65520 up become 2**16, where float16 overflows.
    index = ((bits + (1 << 12)) >> 23) + 1
    index = mx.where(bits >= infinite, _INF + (bits > infinite), index)
    index = mx.where(bits == 0, 0, index)
    lanes = mx.arange(x.shape[-1], dtype=mx.uint32) & (_LANES - 1)
    bins = mx.zeros((_LANES * _BINS,), mx.int32)
    bins = bins.at[index + lanes * _BINS].add(mx.array(1, mx.int32))
    return bins.reshape(_LANES, _BINS).sum(axis=0)
