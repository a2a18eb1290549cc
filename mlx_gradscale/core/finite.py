"""Check arrays for NaN and inf, and compute their global norm, on the device."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import mlx.core as mx

from .trees import flatten, leaves

# Read as integers, the bits of |x| are ordered like |x|, with inf above every finite
# number and NaN above inf, so one integer maximum detects both. Each row contains the
# signed and unsigned integer dtypes, the mask of the magnitude, and the bits of inf.
_BITS = {
    mx.float16: (mx.int16, mx.uint16, 0x7FFF, 0x7C00),
    mx.bfloat16: (mx.int16, mx.uint16, 0x7FFF, 0x7F80),
    mx.float32: (mx.int32, mx.uint32, 0x7FFFFFFF, 0x7F800000),
    mx.float64: (mx.int64, mx.uint64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
}
# Leaves of the same dtype and shape are joined elementwise, eight at a time, before a
# reduction. For 448 LoRA-sized leaves, this takes 0.3 times as long as not joining.
_JOIN = 8
Join = Callable[[mx.array, mx.array], mx.array]


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
            found = mx.max(_join(mx.maximum, [x.view(signed) & bits for x in group]))
        largest.setdefault(dtype, []).append(found)
    return [(dtype, _join_all(mx.maximum, found)) for dtype, found in largest.items()]


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
            if group[0].dtype in (mx.float16, mx.bfloat16):
                # Without the views, mx.compile would merge this cast with the one in
                # the update and create a float32 copy of every gradient.
                group = [x.view(mx.uint16).view(x.dtype) for x in group]
            group = [x.astype(mx.float32) for x in group]
            group = group if times is None else [x * times for x in group]
            sums.append(mx.sum(_join(mx.add, list(map(mx.square, group)))))
    return mx.sqrt(_join_all(mx.add, sums)) if sums else mx.array(0.0)


def _groups(values: list[mx.array]) -> list[list[mx.array]]:
    """Group non-empty floating-point arrays by dtype and shape, at most eight each."""
    alike: dict[Any, list[mx.array]] = {}
    for x in values:
        if is_floating(x) and x.size:
            if x.dtype == mx.complex64:
                x = x.reshape(-1).view(mx.float32)
            alike.setdefault((x.dtype, x.shape), []).append(x)
    starts = [(same, i) for same in alike.values() for i in range(0, len(same), _JOIN)]
    return [same[i : i + _JOIN] for same, i in starts]


def _join_all(operation: Join, values: list[mx.array]) -> mx.array:
    while len(values) > _JOIN:
        # mx.contiguous ends a fused kernel without a copy, so that every join has the
        # same kernel and MLX builds it only once.
        joined = mx.contiguous(_join(operation, values[:_JOIN]))
        values = [*values[_JOIN:], joined]
    return _join(operation, values)


def _join(operation: Join, values: list[mx.array]) -> mx.array:
    # Join in pairs, because a fused kernel is at most 11 operations deep.
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=False)
        values = [operation(a, b) for a, b in pairs] + values[len(values) & ~1 :]
    return values[0]


def arrays(tree: Any) -> list[mx.array]:
    """Return the leaves of ``tree``; raise if one is not an array."""
    for path, leaf in flatten(tree):
        if not isinstance(leaf, mx.array):
            what = f"{leaf!r} ({type(leaf).__name__}){f' at {path!r}' if path else ''}"
            raise TypeError(f"Expected a tree of mx.array, got {what}.")
    return leaves(tree)


def is_floating(x: mx.array) -> bool:
    """Return whether ``x`` is floating-point or complex, and so may be non-finite."""
    return mx.issubdtype(x.dtype, mx.inexact)
