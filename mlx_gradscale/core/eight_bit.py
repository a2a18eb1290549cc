"""State in 8 bits: codes for master weights and for the two moments of Adam.

A half-precision weight stores one byte of what rounding it lost, and each moment takes
one byte. With S = 252 and T = sqrt(S)::

    weight w, remainder r   d = master + a / S * ulp(old w)
                            w = d, rounded to the nearest half-precision value
                            r = floor((d - w) * S / ulp(w))
                            master = w + r / S * ulp(w)
    second moment v         x = sqrt(sqrt(v) / eps)
                            code = floor(min(log(1 + x), T) * T + b)
    first moment m          y = m / (sqrt(v) + eps), between -T and T
                            code = floor(asinh(y * T) * T + a)

``eps`` is the optimizer's. To encode ``m``, ``v`` is the moment before it is encoded;
to decode it, the decoded one. The codes of exact zeros are zero.

``a`` and ``b`` are two numbers between 0 and 1 per step, evenly spread over the steps:
they dither the codes, so that a value is rounded up and down in proportion to its
distance from both neighbors. Small changes add up, which rounding to the nearest code
would lose. They depend only on the optimizer's step count, which a skipped step does
not advance, so skipped steps and resumed runs are bit-identical.

Each detail was measured against its alternatives:

- The master weight is dithered before it is rounded to the weight. If only the
  remainder is, weights get stuck halfway between two values with the remainder at its
  end, and constant updates lose a tenth of their sum.
- S is the largest number below 255 that is divisible by 4. So half an ulp is 126
  steps, and a quarter, the distance to the midpoint below a power of two, is 63. No
  code checks whether a weight was replaced: its master is at most half an ulp off.
- ``b`` is spread so that the fourth root of ``v`` is right on average. Then 1 / sqrt(v)
  is, too. If ``v`` is right on average, updates are 5 percent too large.
- ``y`` is at most 7.3 for the default betas, while ``m`` spans 42 octaves. Its codes
  are 6 percent apart, and those of sqrt(v) are 13 percent apart. With one number for
  both dithers, training is worse.
"""

import math
from typing import NamedTuple

import mlx.core as mx

_T = math.sqrt(252)
# The square root of 2 and the golden ratio, modulo 1, times 2**32. Multiples of a
# quadratic irrational are spread more evenly than random numbers.
_A, _B = 1779033703, 2654435769


class Dither(NamedTuple):
    """The numbers a and b of one step."""

    a: mx.array
    b: mx.array


# Without dither, codes are rounded to the nearest.
NEAREST = Dither(mx.array(0.5), mx.array(0.5))


def dither(step: mx.array) -> Dither:
    """Return the dither for an optimizer's step count."""
    step = step.astype(mx.uint32)
    # The products wrap around at 2**32, which leaves the fractions. With 23 bits and
    # half a bit, no fraction is rounded to 0 or 1, so zeros stay zero.
    a, b = (
        (((step * mx.array(n, mx.uint32)) >> 9).astype(mx.float32) + 0.5) * 2.0**-23
        for n in (_A, _B)
    )
    return Dither(a, 1 - _T * mx.log1p(b * math.expm1(1 / _T)))


def split(
    master: mx.array, old: mx.array, dither: Dither = NEAREST
) -> tuple[mx.array, mx.array]:
    """Return the weights and remainders of new masters; ``old`` are the old weights."""
    d = master + dither.a * _unit(old) / _T / _T
    weight = d.astype(old.dtype)
    # The unit of a bfloat16 zero is zero, and so is the difference.
    unit = mx.maximum(_unit(weight), 2.0**-126)
    r = (d - weight.astype(mx.float32)) / unit * _T * _T
    return weight, mx.floor(r).astype(mx.int8)


def join(weight: mx.array, remainder: mx.array) -> mx.array:
    """Return the float32 master weights of weights and remainders."""
    r = remainder.astype(mx.float32) / _T / _T
    return weight.astype(mx.float32) + r * _unit(weight)


def _unit(weight: mx.array) -> mx.array:
    """Return one ulp of each half-precision weight."""
    value = mx.abs(weight.astype(mx.float32))
    # The next weight: 0.5 to 1.02 ulps above the value, which rounds up. Extracting the
    # exponent bits would take three kernels.
    share = 252 if weight.dtype == mx.bfloat16 else 8 * 252
    above = (value + value / share).astype(weight.dtype).astype(mx.float32)
    # Subnormal float16 weights are evenly spaced.
    is_float16 = weight.dtype == mx.float16
    return mx.maximum(above - value, 2.0**-24) if is_float16 else above - value


def encode(
    m: mx.array, v: mx.array, eps: float, dither: Dither = NEAREST
) -> tuple[mx.array, mx.array]:
    """Return the codes of Adam's moments."""
    root = mx.sqrt(v)
    x = mx.log1p(mx.sqrt(root / eps))
    y = mx.clip(m / (root + eps), -_T, _T)
    return (
        mx.floor(mx.arcsinh(y * _T) * _T + dither.a).astype(mx.int8),
        mx.floor(mx.minimum(x, _T) * _T + dither.b).astype(mx.uint8),
    )


def decode(m: mx.array, v: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """Return Adam's moments from their codes."""
    root = mx.square(mx.expm1(v.astype(mx.float32) / _T)) * eps
    y = mx.sinh(m.astype(mx.float32) / _T) / _T
    return y * (root + eps), mx.square(root)
