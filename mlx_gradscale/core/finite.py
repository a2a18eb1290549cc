"""Check arrays for NaN and inf, and compute their global norm, on the device."""

from functools import reduce
from typing import Any

import mlx.core as mx

from .fusion import JOIN, join, join_all, separate_cast
from .trees import flatten, is_floating, leaves

# Read as integers, the bits of |x| are ordered like |x|, with inf above every finite
# number and NaN above inf, so one integer maximum detects both. Each row contains the
# signed and unsigned integer dtypes, the mask of the magnitude, and the bits of inf.
_BITS = {
    mx.float16: (mx.int16, mx.uint16, 0x7FFF, 0x7C00),
    mx.bfloat16: (mx.int16, mx.uint16, 0x7FFF, 0x7F80),
    mx.float32: (mx.int32, mx.uint32, 0x7FFFFFFF, 0x7F800000),
    mx.float64: (mx.int64, mx.uint64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
}


def all_finite(tree: Any) -> mx.array:
    """Return whether all values in ``tree`` are finite, as a lazy array.

    Args:
        tree (Any): A tree of arrays. Integer and boolean arrays, and empty trees, count
            as finite.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_gradscale import all_finite
        >>> all_finite({"w": mx.array([1.0, 2.0])})
        array(True, dtype=bool)
        >>> all_finite([mx.array(1.0), {"b": mx.array(float("nan"))}])
        array(False, dtype=bool)
    """
    return all_finite_times([], None, arrays(tree))


@mx.compile
def all_finite_times(
    scaled: list[mx.array], factor: mx.array | None, others: list[mx.array]
) -> mx.array:
    """Return whether ``scaled * factor`` (in float32) and ``others`` are all finite.

    If the factor is above 1, the product can overflow even if ``scaled`` is finite.
    Rounding is monotonic, so checking the largest magnitude of each dtype is enough.
    """
    flags = []
    for dtype, bits in _largest_bits(scaled):
        largest = bits.view(dtype).astype(mx.float32)
        largest = largest if factor is None else largest * factor
        flags.append(is_finite_magnitude(largest))
    for dtype, bits in _largest_bits(others):
        flags.append(bits < mx.array(_BITS[dtype][3], bits.dtype))
    return reduce(mx.logical_and, flags) if flags else mx.array(True)


def is_finite_magnitude(x: mx.array) -> mx.array:
    """Like ``mx.isfinite`` for non-negative float32 values, but safe with fast math."""
    return x.view(mx.uint32) < mx.array(_BITS[mx.float32][3], mx.uint32)


def _largest_bits(values: list[mx.array]) -> list[tuple[mx.Dtype, mx.array]]:
    largest: dict[mx.Dtype, list[mx.array]] = {}
    for group in _groups(values):
        dtype = group[0].dtype
        signed, unsigned, mask, _ = _BITS[dtype]
        bits = mx.array(mask, signed)
        if len(group) == 1:
            # Two reductions avoid a masked copy: negative numbers are the largest when
            # viewed as unsigned, positive numbers when viewed as signed.
            positive = mx.max(group[0].view(signed))
            negative = mx.max(group[0].view(unsigned)).view(signed) & bits
            found = mx.maximum(positive, negative)
        else:
            found = mx.max(join(mx.maximum, [x.view(signed) & bits for x in group]))
        largest.setdefault(dtype, []).append(found)
    return [(dtype, join_all(mx.maximum, found)) for dtype, found in largest.items()]


@mx.compile
def global_norm(
    scaled: list[mx.array], factor: mx.array | None, others: list[mx.array]
) -> mx.array:
    """Return the global L2 norm of ``scaled * factor`` and ``others``, in float32.

    The norm is non-finite if any value is, or if the sum of squares overflows float32.
    """
    sums = []
    for values, times in ((scaled, factor), (others, None)):
        for group in _groups(values):
            group = [separate_cast(x) for x in group]
            group = group if times is None else [x * times for x in group]
            sums.append(mx.sum(join(mx.add, list(map(mx.square, group)))))
    return mx.sqrt(join_all(mx.add, sums)) if sums else mx.array(0.0)


def _groups(values: list[mx.array]) -> list[list[mx.array]]:
    """Group non-empty floating-point arrays by dtype and shape, at most eight each."""
    alike: dict[Any, list[mx.array]] = {}
    for x in values:
        if is_floating(x) and x.size:
            if x.dtype == mx.complex64:
                x = x.reshape(-1).view(mx.float32)
            alike.setdefault((x.dtype, x.shape), []).append(x)
    starts = [(same, i) for same in alike.values() for i in range(0, len(same), JOIN)]
    return [same[i : i + JOIN] for same, i in starts]


def arrays(tree: Any) -> list[mx.array]:
    """Return the leaves of ``tree``; raise if one is not an array."""
    for path, leaf in flatten(tree):
        if not isinstance(leaf, mx.array):
            what = f"{leaf!r} ({type(leaf).__name__}){f' at {path!r}' if path else ''}"
            raise TypeError(f"Expected a tree of mx.array, got {what}.")
    return leaves(tree)
