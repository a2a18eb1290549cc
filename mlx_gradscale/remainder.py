"""Float32 masters as the half-precision weight and 16 bits of what rounding it lost.

    master    = weight + remainder / STEPS * unit(weight)
    remainder = (master - weight) * STEPS / unit(weight), rounded to an integer

The unit follows from the weight: arithmetic alone, where taking the bits apart would
be three kernels instead of one, and 16 bytes more for each parameter.

How far a master is from the one that was split, of which the tests try all weights:

- float16: not at all from 2**-16 on, below at most 2**-40. Of a weight of size x, half
  an ulp is at most x / 2**11 and float32 resolves x / 2**24, so that 15 bits beside the
  sign count in steps below half of what float32 resolves: adding rounds to the master.
- bfloat16: at most one ulp of float32, 2**-23 of it, and mostly not at all. Half an ulp
  has 2**15 of float32's, which the 32,766 steps to either side just miss. Beyond 2**110
  the products overflow, and half an ulp may be lost.

It always rounds to the weight. A remainder with which it would not is that of another
weight, which was replaced since: then the weight is its own master. One that fits by
chance counts on. So a replaced weight has a master within half its ulp, and what is set
to zero stays: its master is zero in bfloat16 and within 2**-25 in float16, which still
counts what adds up to more from there.
"""

from typing import NamedTuple

import mlx.core as mx

from .masters import HALF, to_float32

DTYPE = mx.int16
# To the unit. Chosen for the midpoint between two weights, which is half a unit at most
# and, where the ulp below a power of two is half of that above, a quarter: nothing
# short of it may be rounded beyond it. In bfloat16 both are whole numbers of steps, in
# float16, where the master may be as near as it likes, half the smallest ulp is
# 32767.49 of them.
_STEPS = {mx.float16: 32767.49 * 2.0**11, mx.bfloat16: 65532.0}


class Joined(NamedTuple):
    """A master in float32, and the steps on the way to it, last ones first."""

    master: mx.array
    parts: tuple[mx.array, ...] = ()


def no_remainder(weight: mx.array) -> mx.array:
    """Return the remainder of a weight that is its own master."""
    return mx.zeros(weight.shape, DTYPE)


def remainder_of(master: mx.array, weight: mx.array) -> mx.array:
    """Return what a weight lacks of the master that it was rounded from.

    Args:
        master (array): In float32.
        weight (array): ``master`` in float16 or bfloat16, where it is finite; of
            another dtype it lacks nothing.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_gradscale.remainder import join, remainder_of
        >>> master = mx.array([0.1, 1e-3])
        >>> weight = master.astype(mx.float16)
        >>> remainder = remainder_of(master, weight)
        >>> remainder.dtype, mx.array_equal(join(weight, remainder).master, master)
        (mlx.core.int16, array(True, dtype=bool))
    """
    if weight.dtype not in HALF:
        return no_remainder(weight)
    return _count(master, to_float32(weight), weight.dtype)


def join(weight: mx.array, remainder: mx.array) -> Joined:
    """Return the float32 master of a weight, which is itself if it is no half.

    Args:
        weight (array): Any.
        remainder (array): From :func:`remainder_of`, for this or an earlier weight.
    """
    value = to_float32(weight)
    if weight.dtype not in HALF:
        return Joined(value)
    unit, parts = _unit(value, weight.dtype)
    master = value + remainder.astype(mx.float32) / _STEPS[weight.dtype] * unit
    fits = to_float32(master.astype(weight.dtype)) == value
    return Joined(mx.where(fits, master, value), (master, *parts, value))


def select_step(
    weight: mx.array,
    remainder: mx.array,
    old: Joined,
    new: mx.array,
    apply: mx.array,
    others: list[mx.array],
) -> tuple[mx.array, mx.array]:
    """Return weight and remainder of a new master, or both as they were.

    One kernel with all that the optimizer computed for it. ``mx.compile`` fuses from
    the outermost node inwards, up to 11 deep, and takes a node once all that use it are
    in. This is deeper, so what lies far inside gets a short way of its own, which is
    walked after the long one: an operand of a select that never takes it, and of which
    compilers leave nothing.

    Args:
        weight (array): Before the step, in float16 or bfloat16.
        remainder (array): That of the weight.
        old (Joined): Weight and remainder together.
        new (array): The new master, in float32.
        apply (array): A 0-d bool array.
        others (list): What else belongs to the kernel: new moments, last ones first,
            then the gradient.
    """
    rounded = new.astype(weight.dtype)
    value = to_float32(rounded)
    now = mx.where(apply, _count(new, value, weight.dtype), remainder)
    never = mx.array(False)

    def in_order(arrays: list[mx.array]) -> mx.array:
        first, *rest = arrays
        # The last one behind a node too, or it would be reached before its turn.
        return mx.where(never, first, in_order(rest)) if rest else -first

    others = [x for x in others if x.shape == weight.shape]
    inside = mx.where(never, in_order(others), in_order([old.master, *old.parts]))
    inside = mx.where(never, value, inside)
    applied = mx.where(never, now.astype(weight.dtype), rounded)
    # In the weight's own dtype: a cast there and back flushes bfloat16 subnormals on
    # Apple's GPUs, and changes the bits of a float16 NaN.
    skipped = mx.where(never, inside.astype(weight.dtype), weight)
    return mx.where(apply, applied, skipped), now


def _count(master: mx.array, value: mx.array, dtype: mx.Dtype) -> mx.array:
    unit, _ = _unit(value, dtype)
    return mx.round((master - value) * _STEPS[dtype] / unit).astype(DTYPE)


def _unit(value: mx.array, dtype: mx.Dtype) -> tuple[mx.array, tuple[mx.array, ...]]:
    """Return what the remainder of a weight is a fraction of, and its inner steps."""
    if dtype == mx.float16:
        return mx.maximum(mx.abs(value), 2.0**-14), ()
    # One ulp, with the sign of the weight: 0.75 to 1.5 of it above is its neighbour.
    above = to_float32((value * (1 + 0.75 * 2.0**-7)).astype(dtype))
    return above - value, (above,)
