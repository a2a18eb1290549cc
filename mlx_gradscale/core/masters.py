"""How master weights and moments are stored: in float32, or in 16 bits.

A master weight is the float32 value that a half-precision parameter is rounded from. In
float32 (``state_bits=32``), it is stored along with the bits that the last step wrote
to the parameter. If the parameter's bits differ, the user has replaced the weight, and
the new value becomes the master weight: "the weight is its own master".

In 16 bits, a half-precision weight stores only what rounding it lost::

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
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.optimizers import Optimizer

from . import fusion

HALF = (mx.float16, mx.bfloat16)
# The dtypes differ, so that float16 bits are never mistaken for bfloat16 bits.
_BITS = {mx.float16: mx.int16, mx.bfloat16: mx.uint16}

# Steps per unit. The midpoint between two weights is half an ulp away, but only a
# quarter on the lower side of a power of two. A value short of the midpoint must not
# round past it. In bfloat16, where the unit is one ulp, both distances are whole
# numbers of steps. In float16, half an ulp is at most 32767.49 steps.
_STEPS = {mx.float16: 32767.49 * 2.0**11, mx.bfloat16: 65532.0}
# The golden ratio and the square root of 2, modulo 1, times 2**32. Multiples of a
# quadratic irrational are spread more evenly than random numbers.
_A, _B = 2654435769, 1779033703

# The arrays that store one master weight, by the names of a Storage.
Stored = dict[str, mx.array]
# The state of an optimizer for one parameter, such as {"m": ..., "v": ...}.
Moments = dict[str, Any]
# The scalars that round the state of one step; empty to round to the nearest.
Dither = tuple[mx.array, ...]


class Joined(NamedTuple):
    """A float32 master weight, and the intermediate results of a join, first to last.

    The intermediate results are only for :mod:`~mlx_gradscale.core.fusion`.
    """

    master: mx.array
    intermediate: tuple[mx.array, ...] = ()


class Encoded(NamedTuple):
    """Moments as they are stored, and the intermediate results of the encoding."""

    moments: Moments
    intermediate: tuple[mx.array, ...] = ()


class Result(NamedTuple):
    """What a step has computed for one parameter."""

    optimizer: Optimizer
    # The float32 result, and the master weight and parameter before the step.
    new: mx.array
    old: Joined
    parameter: mx.array
    stored: Stored
    # Other arrays of the same kernel, in the order of the computation: the gradient,
    # the decoded moments, how the new ones are encoded, and the selected ones.
    gradient: mx.array
    decoded: list[mx.array]
    encoding: tuple[mx.array, ...]
    moments: list[mx.array]


def to_float32(x: mx.array) -> mx.array:
    """Upcast a float16 or bfloat16 array to float32; return others unchanged."""
    return x.astype(mx.float32) if x.dtype in HALF else x


def half_bits(weight: mx.array) -> mx.array:
    """Return a half-precision array's bits, which a later ``+=`` does not change."""
    return mx.view(weight, _BITS[weight.dtype])


class Storage:
    """How master weights and moments are stored: in float32."""

    # The names of the arrays that store a master weight.
    names: tuple[str, ...] = ("masters", "written")
    # The dtypes by which bits_of() recognizes this kind.
    dtypes: tuple[mx.Dtype, ...] = ()

    def has(self, state: Mapping[str, Any], path: str) -> bool:
        """Return whether a wrapper's state has a master weight for a parameter."""
        return path in state[self.names[0]]

    def put(
        self, state: Mapping[str, Any], path: str, master: mx.array, weight: mx.array
    ) -> None:
        """Store a master weight; ``weight`` is its rounded value."""
        for name, x in self.split(master, weight).items():
            state[name][path] = x

    def get(self, state: Mapping[str, Any], path: str, weight: mx.array) -> Stored:
        """Return what stores a master weight, or raise; {} for float32 weights."""
        if weight.dtype not in HALF:
            return {}
        if path not in state[self.names[0]]:
            raise ValueError(
                f"{path!r} has no master weight, because it was frozen, missing or not "
                "in half precision when the optimizer was initialized. Call "
                "optimizer.init(model.trainable_parameters()) again; existing state is "
                "kept."
            )
        stored = {name: state[name][path] for name in self.names}
        was = stored[self.names[0]].shape
        if was != weight.shape:
            raise ValueError(
                f"{path!r} has shape {weight.shape}, but had shape {was} when the "
                "optimizer was initialized. Create a new optimizer for the changed "
                "model."
            )
        return stored

    def split(self, master: mx.array, weight: mx.array) -> Stored:
        """Return the arrays that store the master weight of a weight."""
        return {"masters": master.astype(mx.float32), "written": half_bits(weight)}

    def join(self, weight: mx.array, stored: Mapping[str, mx.array]) -> Joined:
        """Return a master weight; the weight's own value if none is stored."""
        return self._join(weight, stored) if stored else Joined(to_float32(weight))

    def _join(self, weight: mx.array, stored: Mapping[str, mx.array]) -> Joined:
        value = to_float32(weight)
        master, written = stored["masters"], stored["written"]
        if written.dtype == _BITS[weight.dtype]:
            unchanged = half_bits(weight) == written
        else:
            # The model was cast from one half-precision dtype to the other.
            unchanged = to_float32(master.astype(weight.dtype)) == value
        return Joined(mx.where(unchanged, master, value))

    def select(
        self, applied: mx.array, result: Result, dither: Dither
    ) -> tuple[mx.array, Stored]:
        """Return the new or, if not applied, the old weight, and what is stored."""
        new, parameter = result.new, result.parameter
        if result.stored:
            # Select in a skipped step too: a replaced weight is its own master.
            new = mx.where(applied, new, result.old.master)
        # The last moment is outermost because AdaDelta computes u from v.
        rounded = new.astype(parameter.dtype)
        weight = fusion.select(applied, rounded, parameter, result.moments)
        return weight, Storage.split(self, new, weight) if result.stored else {}

    def dither(self, count: mx.array) -> Dither:
        """Return the scalars that round the state of the step with this count."""
        return ()

    def decode(self, optimizer: Optimizer, moments: Moments) -> Moments:
        """Return stored moments in float32, for ``apply_single()``."""
        return moments

    def encode(
        self,
        optimizer: Optimizer,
        shape: tuple[int, ...],
        moments: Moments,
        dither: Dither = (),
    ) -> Encoded:
        """Return float32 moments as they are stored.

        Only moments of the parameter's own shape are stored in fewer bits.
        """
        return Encoded(moments)


def is_own(x: Any, shape: tuple[int, ...]) -> bool:
    """Return whether ``x`` is a float32 moment of the parameter's own shape."""
    return isinstance(x, mx.array) and (x.shape, x.dtype) == (shape, mx.float32)


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
