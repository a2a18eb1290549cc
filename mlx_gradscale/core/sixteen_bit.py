"""State in 16 bits: remainders of master weights, and bfloat16 moments.

A half-precision weight stores only what rounding it lost::

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

Moments that have their parameter's own shape are bfloat16. Rounding them to the nearest
bfloat16 would freeze them: with beta2 = 0.999, Adam's second moment decays by 0.1
percent per step, but half an ulp of bfloat16 is 0.2 to 0.4 percent. So a step first
multiplies the moments by a factor between 127/128 and 129/128, one for all of them::

    factor = 1 + (frac(A * step) + frac(B * step) - 1) / 128

Over many steps, the fractions are evenly spread, so a value is rounded up and down in
proportion to its distance from the two neighbors. With one fraction, this would hold
only where an ulp is 1/128 or 1/256 of the value; with the sum of two, it nearly holds
everywhere. After 5,000 steps without gradients, in which Adam's second moment shrinks
to 1/150, its square root is off by 2.7 percent (rms).

A single factor needs no random bits, so the update stays one kernel. It depends only on
the optimizer's step count, which a skipped step does not advance, so skipped steps and
resumed runs are bit-identical.
"""

from collections.abc import Mapping

import mlx.core as mx
from mlx.optimizers import Optimizer

from . import fusion
from .masters import (
    Dither,
    Encoded,
    Joined,
    Moments,
    Result,
    Storage,
    Stored,
    is_own,
    to_float32,
)

# Steps per unit. The midpoint between two weights is half an ulp away, but only a
# quarter on the lower side of a power of two. A value short of the midpoint must not
# round past it. In bfloat16, where the unit is one ulp, both distances are whole
# numbers of steps. In float16, half an ulp is at most 32767.49 steps.
_STEPS = {mx.float16: 32767.49 * 2.0**11, mx.bfloat16: 65532.0}
# The golden ratio and the square root of 2, modulo 1, times 2**32. Multiples of a
# quadratic irrational are spread more evenly than random numbers.
_A, _B = 2654435769, 1779033703


class SixteenBit(Storage):
    """How master weights and moments are stored in 16 bits."""

    names = ("remainders",)
    dtypes = (mx.int16, mx.bfloat16)

    def split(self, master: mx.array, weight: mx.array) -> Stored:
        """Store the rounding error of a weight."""
        return {"remainders": _remainder_of(master.astype(mx.float32), weight)}

    def _join(self, weight: mx.array, stored: Mapping[str, mx.array]) -> Joined:
        value = to_float32(weight)
        unit, start = _unit(value, weight.dtype)
        steps = stored["remainders"].astype(mx.float32) / _STEPS[weight.dtype]
        master = value + steps * unit
        rounded = master.astype(weight.dtype)
        fits = to_float32(rounded) == value
        return Joined(mx.where(fits, master, value), (start, rounded))

    def select(
        self, applied: mx.array, result: Result, dither: Dither
    ) -> tuple[mx.array, Stored]:
        """Select a weight, with the remainder of its master weight if it has one."""
        if not result.stored:
            return super().select(applied, result, dither)
        parameter, old = result.parameter, result.old
        rounded = result.new.astype(parameter.dtype)
        remainder = _remainder_of(result.new, rounded)
        remainder = mx.where(applied, remainder, result.stored["remainders"])
        # The root has to reach the remainder, so it is an input of the new weight, in a
        # branch that is never taken either. From the new to the old weight, this graph
        # is about 25 deep, so all intermediate results are among the others. The
        # gradient is innermost because it counts as one array until it joins the
        # kernel, and as two, itself and its factor, afterwards: AdamW with bias
        # correction has 23 of 24.
        both = mx.where(applied, rounded, remainder.astype(parameter.dtype))
        others = [result.gradient, *old.intermediate, old.master, *result.moments]
        others.append(to_float32(rounded))
        weight = fusion.select(applied, both, parameter, others)
        return weight, {"remainders": remainder}

    def dither(self, count: mx.array) -> Dither:
        """Return the factor for the moments of the step with this count."""
        a, b = spread(count)
        return (1 + (a + b - 1) / 128,)

    def decode(self, optimizer: Optimizer, moments: Moments) -> Moments:
        """Upcast bfloat16 moments to float32."""
        return {name: to_float32(x) for name, x in moments.items()}

    def encode(
        self,
        optimizer: Optimizer,
        shape: tuple[int, ...],
        moments: Moments,
        dither: Dither = (),
    ) -> Encoded:
        """Round moments to bfloat16, with the factor of a step if there is one."""
        own = {name: x for name, x in moments.items() if is_own(x, shape)}
        encoded = {
            name: (x * dither[0] if dither else x).astype(mx.bfloat16)
            for name, x in own.items()
        }
        return Encoded(moments | encoded, tuple(own.values()))


def spread(count: mx.array) -> tuple[mx.array, mx.array]:
    """Return two numbers between 0 and 1, evenly spread over the step counts."""
    count = count.astype(mx.uint32)
    # The products wrap around at 2**32, which leaves the fractions. With 23 bits and
    # half a bit, none is rounded to 0 or 1.
    a, b = (
        (((count * mx.array(n, mx.uint32)) >> 9).astype(mx.float32) + 0.5) * 2.0**-23
        for n in (_A, _B)
    )
    return a, b


def _remainder_of(master: mx.array, weight: mx.array) -> mx.array:
    value = to_float32(weight)
    unit, _ = _unit(value, weight.dtype)
    steps = (master - value) * _STEPS[weight.dtype] / unit
    return mx.round(steps).astype(mx.int16)


def _unit(value: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Return the unit of a remainder, and the first of :attr:`Joined.intermediate`."""
    if dtype == mx.float16:
        return mx.maximum(mx.abs(value), 2.0**-14), value
    # The product is 0.75 to 1.5 ulps above the value, so it rounds to the neighbor, and
    # the difference is one ulp, with the weight's sign.
    above = (value * (1 + 0.75 * 2.0**-7)).astype(dtype)
    return to_float32(above) - value, above
