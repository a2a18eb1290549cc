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
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx.optimizers import SGD, AdaDelta, Adam, AdamW, Optimizer

from . import fusion
from .masters import (
    Dither,
    Encoded,
    Joined,
    Moments,
    Result,
    SixteenBit,
    Stored,
    is_own,
    spread,
    to_float32,
)

# The optimizers whose moments have codes. A subclass may use them in another way.
_CODED = (Adam, AdamW)
_T = math.sqrt(252)
# Below, the largest code of v stands for a gradient of less than 60.
_LEAST_EPS = 1e-12


class EightBit(SixteenBit):
    """How master weights and moments are stored in 8 bits."""

    dtypes = (mx.int8, mx.uint8)

    def split(self, master: mx.array, weight: mx.array) -> Stored:
        """Store the rounding error of a weight, rounded to the nearest code."""
        error = mx.nan_to_num(master.astype(mx.float32) - to_float32(weight), 0, 0, 0)
        _, unit = ulp(weight)
        return {"remainders": _remainder_of(error / _nonzero(unit), 0.5)}

    def _join(self, weight: mx.array, stored: Mapping[str, mx.array]) -> Joined:
        above, unit = ulp(weight)
        error = stored["remainders"].astype(mx.float32) / _T / _T * unit
        return Joined(to_float32(weight) + error, (above, error))

    def select(
        self, applied: mx.array, result: Result, dither: Dither
    ) -> tuple[mx.array, Stored]:
        """Select a weight, with the remainder of its master weight if it has one."""
        new, weight = result.new, result.parameter
        # In the order of the computation: the codes of m, which is the first of the two
        # moments, depend on v.
        others = [result.gradient, *reversed(result.decoded), *result.encoding]
        others += reversed(result.moments)
        if not result.stored:
            new = new.astype(weight.dtype)
            return fusion.select_in_tree(applied, new, weight, others), {}
        old = weight
        if _fits_one_kernel(result.optimizer, weight):
            # Only the end of the step reads the master weight. With these arrays first
            # instead of last, AdamW would be 12 kernels.
            others += result.old.intermediate
        else:
            others = [*result.old.intermediate, *others]
            new = fusion.select_in_tree(applied, new, to_float32(weight), others)
            new, old = fusion.end_kernel(new), fusion.separate(weight)
            others = [*ulp(old)]
        rounded, remainder, rounding = round_master(new, old, dither[0])
        remainder = mx.where(applied, remainder, result.stored["remainders"])
        others += [*rounding, remainder]
        weight = fusion.select_in_tree(applied, rounded, weight, others)
        return weight, {"remainders": remainder}

    def dither(self, count: mx.array) -> Dither:
        """Return a, b, and the factor for bfloat16 moments."""
        b, a = spread(count)
        spread_b = 1 - _T * mx.log1p(b * math.expm1(1 / _T))
        return a, spread_b, *super().dither(count)

    def decode(self, optimizer: Optimizer, moments: Moments) -> Moments:
        """Return the moments of Adam from their codes, and others in float32."""
        if type(optimizer) not in _CODED or moments["m"].dtype != mx.int8:
            return super().decode(optimizer, moments)
        return decode(moments, optimizer.eps)  # type: ignore[attr-defined]

    def encode(
        self,
        optimizer: Optimizer,
        shape: tuple[int, ...],
        moments: Moments,
        dither: Dither = (),
    ) -> Encoded:
        """Return codes for the moments of Adam, and others in bfloat16."""
        if type(optimizer) not in _CODED:
            return super().encode(optimizer, shape, moments, dither[2:])
        if not is_own(moments["m"], shape):
            return Encoded(moments)
        eps = optimizer.eps  # type: ignore[attr-defined]
        if not eps >= _LEAST_EPS:
            raise ValueError(
                f"state_bits=8 requires an eps of at least {_LEAST_EPS}, but "
                f"{type(optimizer).__name__} has eps={eps}. Use state_bits=16."
            )
        return encode(moments, eps, *dither[:2])


def _fits_one_kernel(optimizer: Optimizer, weight: mx.array) -> bool:
    """Return whether a step has at most 24 arrays, with its constants.

    Otherwise, it is one kernel for the moments and the new master weight, and one that
    rounds it, which moves 11 more bytes per parameter.
    """
    # The ulp of a float16 weight takes three more constants, and bias correction two.
    # With weight decay, the gradient of SGD depends on the master weight.
    is_corrected = getattr(optimizer, "bias_correction", False)
    is_larger = is_corrected or type(optimizer) in (SGD, AdaDelta)
    return weight.dtype == mx.bfloat16 and not is_larger


def round_master(
    master: mx.array, old: mx.array, a: mx.array
) -> tuple[mx.array, mx.array, tuple[mx.array, ...]]:
    """Return the dithered weight and remainder of a master; ``old`` is the weight.

    The third result is for :mod:`~mlx_gradscale.core.fusion`.
    """
    _, unit = ulp(old)
    d = master + a * unit / _T / _T
    weight = d.astype(old.dtype)
    above, unit = ulp(weight)
    error = (d - to_float32(weight)) / _nonzero(unit)
    return weight, _remainder_of(error), (d, above, error)


def _remainder_of(error: mx.array, offset: float = 0.0) -> mx.array:
    """Return the remainder that stands for an error in ulps."""
    steps = error * _T * _T
    return mx.floor(steps + offset if offset else steps).astype(mx.int8)


def _nonzero(unit: mx.array) -> mx.array:
    # The ulp of a bfloat16 zero is zero, and so is its rounding error.
    return mx.maximum(unit, 2.0**-126)


def ulp(weight: mx.array) -> tuple[mx.array, mx.array]:
    """Return the next value from each half-precision weight, and the distance to it.

    The first one is for :mod:`~mlx_gradscale.core.fusion`, too.
    """
    value = weight.astype(mx.float32)
    # The sum is 0.5 to 1.02 ulps further from zero, so it rounds to the next weight.
    # Extracting the exponent bits would take three kernels. T is no further constant.
    part = value / _T / _T
    if weight.dtype == mx.float16:
        part = part / 8
    above = (value + part).astype(weight.dtype).astype(mx.float32)
    unit = mx.abs(above - value)
    if weight.dtype == mx.float16:
        # Subnormal weights are evenly spaced, and there is no weight above 65504.
        unit = mx.clip(unit, 2.0**-24, 32.0)
    return above, unit


def encode(moments: Moments, eps: float, a: Any = 0.5, b: Any = 0.5) -> Encoded:
    """Return the codes of Adam's moments; by default, the nearest ones."""
    m, root = moments["m"], mx.sqrt(moments["v"])
    x = mx.sqrt(root / eps)
    # m / (root + eps), but at most T.
    y = mx.arcsinh(m / mx.maximum(root + eps, mx.abs(m) / _T) * _T)
    codes = {
        "m": mx.floor(y * _T + a).astype(mx.int8),
        "v": (mx.minimum(mx.log1p(x), _T) * _T + b).astype(mx.uint8),
    }
    return Encoded(codes, (m, x, y))


def decode(codes: Moments, eps: float) -> Stored:
    """Return Adam's moments from their codes."""
    root = mx.square(mx.expm1(codes["v"].astype(mx.float32) / _T)) * eps
    y = mx.sinh(codes["m"].astype(mx.float32) / _T) / _T
    return {"m": y * (root + eps), "v": mx.square(root)}
