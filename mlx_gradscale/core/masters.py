"""Master weights: the float32 values that half-precision parameters are rounded from.

There are two kinds. With ``state_bits=32``, the master weight is stored as an array,
along with the bits that the last step wrote to the parameter. If the parameter's bits
differ, the user has replaced the weight, and the new value becomes the master weight:
"the weight is its own master". ``state_bits=16`` stores only the rounding error::

    master    = weight + remainder / STEPS * unit(weight)
    remainder = (master - weight) * STEPS / unit(weight), rounded to an integer

The unit is computed from the weight by arithmetic alone; extracting its exponent bits
would take three kernels instead of one. Splitting and joining a master weight has this
error (tests try every weight):

- float16: zero from 2**-16 up, at most 2**-40 below. Half an ulp of a weight x is at
  most x / 2**11 and float32 resolves x / 2**24, so 15 bits with the sign are enough.
- bfloat16: at most one float32 ulp, usually zero, up to 2**110, where products
  overflow. Half a bfloat16 ulp is 2**15 float32 ulps, but has only 32,766 steps.

A joined master weight always rounds to its weight: if weight and remainder do not give
such a value, the weight is its own master. Otherwise, a weight that the user replaces
keeps its old remainder, so its master weight is at most half an ulp off.
"""

from typing import NamedTuple

import mlx.core as mx

HALF = (mx.float16, mx.bfloat16)
# The dtypes differ, so that float16 bits are never mistaken for bfloat16 bits.
_BITS = {mx.float16: mx.int16, mx.bfloat16: mx.uint16}
# Steps per unit. The midpoint between two weights is half an ulp away, but only a
# quarter on the lower side of a power of two. A value short of the midpoint must not
# round past it. In bfloat16, where the unit is one ulp, both distances are whole
# numbers of steps. In float16, half an ulp is at most 32767.49 steps.
_STEPS = {mx.float16: 32767.49 * 2.0**11, mx.bfloat16: 65532.0}


class Joined(NamedTuple):
    """A float32 master weight, and the intermediate results of a join, first to last.

    The intermediate results are only for :mod:`~mlx_gradscale.core.fusion`.
    """

    master: mx.array
    intermediate: tuple[mx.array, ...] = ()


def to_float32(x: mx.array) -> mx.array:
    """Upcast a float16 or bfloat16 array to float32; return others unchanged."""
    return x.astype(mx.float32) if x.dtype in HALF else x


def half_bits(weight: mx.array) -> mx.array:
    """Return a half-precision array's bits, which a later ``+=`` does not change."""
    return mx.view(weight, _BITS[weight.dtype])


def remainder_of(master: mx.array, weight: mx.array) -> mx.array:
    """Return the remainder of a weight; zero if the weight is not half precision."""
    if weight.dtype not in HALF:
        return mx.zeros(weight.shape, mx.int16)
    value = to_float32(weight)
    unit, _ = _unit(value, weight.dtype)
    steps = (master - value) * _STEPS[weight.dtype] / unit
    return mx.round(steps).astype(mx.int16)


def join(weight: mx.array, remainder: mx.array) -> Joined:
    """Reconstruct the float32 master weight from a weight and its remainder."""
    value = to_float32(weight)
    if weight.dtype not in HALF:
        return Joined(value)
    unit, start = _unit(value, weight.dtype)
    master = value + remainder.astype(mx.float32) / _STEPS[weight.dtype] * unit
    rounded = master.astype(weight.dtype)
    fits = to_float32(rounded) == value
    return Joined(mx.where(fits, master, value), (start, rounded))


def _unit(value: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Return the unit of a remainder, and the first of :attr:`Joined.intermediate`."""
    if dtype == mx.float16:
        return mx.maximum(mx.abs(value), 2.0**-14), value
    # The product is 0.75 to 1.5 ulps above the value, so it rounds to the neighbor, and
    # the difference is one ulp, with the weight's sign.
    above = (value * (1 + 0.75 * 2.0**-7)).astype(dtype)
    return to_float32(above) - value, above


def join_master(weight: mx.array, master: mx.array, written: mx.array) -> Joined:
    """Return a stored master weight, or the weight's value if it has been replaced.

    ``written`` are the bits of the weight that the last step wrote.
    """
    value = to_float32(weight)
    if weight.dtype not in HALF:
        return Joined(value)
    if written.dtype == _BITS[weight.dtype]:
        unchanged = half_bits(weight) == written
    else:
        # The model was cast from one half-precision dtype to the other.
        unchanged = to_float32(master.astype(weight.dtype)) == value
    return Joined(mx.where(unchanged, master, value))
