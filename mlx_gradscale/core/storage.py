"""How a wrapper stores master weights and moments: one set of functions per kind.

``state_bits`` selects a :class:`Storage` from :data:`STORAGES`. Nothing else in the
core depends on it. With 32 bits, master weights and moments are float32 arrays. With
16 bits, a master weight is stored as a remainder, and the moments that have their
parameter's own shape are bfloat16.

Rounding moments to the nearest bfloat16 would freeze them: with beta2 = 0.999, Adam's
second moment decays by 0.1 percent per step, but half an ulp of bfloat16 is 0.2 to 0.4
percent. So a step first multiplies the moments by a factor between 127/128 and 129/128,
one for all of them::

    dither = 1 + (frac(A * step) + frac(B * step) - 1) / 128

Over many steps, the fractions are evenly spread, so a value is rounded up and down in
proportion to its distance from the two neighbors. With one fraction, this would hold
only where an ulp is 1/128 or 1/256 of the value; with the sum of two, it nearly holds
everywhere. After 5,000 steps without gradients, in which Adam's second moment shrinks
to 1/150, its square root is off by 2.7 percent (rms).

A single factor needs no random bits, so the update stays one kernel. It depends only on
the optimizer's step count, which a skipped step does not advance, so skipped steps and
resumed runs are bit-identical.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.optimizers import Optimizer

from . import fusion
from .masters import (
    HALF,
    Joined,
    half_bits,
    join,
    join_master,
    remainder_of,
    to_float32,
)

# The arrays that store one master weight, by the names of a Storage.
Stored = dict[str, mx.array]
# The state of an optimizer for one parameter, such as {"m": ..., "v": ...}.
Moments = dict[str, Any]
# The scalars that round the state of one step.
Dither = tuple[mx.array, ...]
# The golden ratio and the square root of 2, modulo 1, times 2**32. Multiples of a
# quadratic irrational are spread more evenly than random numbers.
_A, _B = 2654435769, 1779033703


class Result(NamedTuple):
    """What a step has computed for one parameter."""

    # The float32 result, and the master weight and parameter before the step.
    new: mx.array
    old: Joined
    parameter: mx.array
    stored: Stored
    # Arrays that belong into the same kernel: the gradient, and the selected moments.
    gradient: mx.array
    moments: list[mx.array]


class Storage(NamedTuple):
    """The functions that store master weights and moments, and read them back."""

    # The names of the arrays that store a master weight.
    names: tuple[str, ...]
    # The dtypes of arrays that only this kind stores, apart from those of 32 bits.
    dtypes: tuple[mx.Dtype, ...]
    # (master, weight) -> the arrays that store a master weight.
    split: Callable[[mx.array, mx.array], Stored]
    # (weight, stored) -> the master weight; the weight's own value if none is stored.
    join: Callable[[mx.array, Mapping[str, mx.array]], Joined]
    # (applied, result, dither) -> the new or, if not applied, the old weight, and what
    # stores its master weight.
    select: Callable[[mx.array, Result, Dither], tuple[mx.array, Stored]]
    # (step count) -> the scalars that round the state of this step.
    dither: Callable[[mx.array], Dither]
    # (optimizer, shape of the parameter, float32 moments) -> stored moments.
    init: Callable[[Optimizer, tuple[int, ...], Moments], Moments]
    # (optimizer, stored moments) -> float32 moments for apply_single().
    decode: Callable[[Optimizer, Moments], Moments]
    # (optimizer, new float32 moments, old stored moments, dither) -> stored moments.
    encode: Callable[[Optimizer, Stored, Stored, Dither], Stored]


def split_float32(master: mx.array, weight: mx.array) -> Stored:
    """Store a master weight, and the bits of its weight."""
    return {"masters": master.astype(mx.float32), "written": half_bits(weight)}


def join_float32(weight: mx.array, stored: Mapping[str, mx.array]) -> Joined:
    """Return a master weight, unless its weight has been replaced."""
    if not stored:
        return Joined(to_float32(weight))
    return join_master(weight, stored["masters"], stored["written"])


def select_float32(
    applied: mx.array, result: Result, dither: Dither
) -> tuple[mx.array, Stored]:
    """Select a weight, with its float32 master weight if it has one."""
    new, parameter = result.new, result.parameter
    if result.stored:
        # Select in a skipped step too: a replaced weight is its own master.
        new = mx.where(applied, new, result.old.master)
    # The last moment is outermost because AdaDelta computes u from v.
    rounded = new.astype(parameter.dtype)
    weight = fusion.select(applied, rounded, parameter, result.moments)
    return weight, split_float32(new, weight) if result.stored else {}


def no_dither(count: mx.array) -> Dither:
    """Return no scalars: float32 moments are not rounded."""
    return ()


def init_float32(
    optimizer: Optimizer, shape: tuple[int, ...], moments: Moments
) -> Moments:
    """Return float32 moments unchanged, as :func:`decode_float32` does."""
    return moments


def decode_float32(optimizer: Optimizer, moments: Moments) -> Moments:
    """Return float32 moments unchanged."""
    return moments


def encode_float32(
    optimizer: Optimizer, new: Stored, old: Stored, dither: Dither
) -> Stored:
    """Return the new float32 moments unchanged."""
    return new


def split_remainder(master: mx.array, weight: mx.array) -> Stored:
    """Store the rounding error of a weight."""
    return {"remainders": remainder_of(master.astype(mx.float32), weight)}


def join_stored_remainder(weight: mx.array, stored: Mapping[str, mx.array]) -> Joined:
    """Return a master weight from its weight and the stored remainder."""
    if not stored:
        return Joined(to_float32(weight))
    return join(weight, stored["remainders"])


def select_remainder(
    applied: mx.array, result: Result, dither: Dither
) -> tuple[mx.array, Stored]:
    """Select a weight, with the remainder of its master weight if it has one."""
    if not result.stored:
        return select_float32(applied, result, dither)
    parameter, old = result.parameter, result.old
    rounded = result.new.astype(parameter.dtype)
    remainder = remainder_of(result.new, rounded)
    remainder = mx.where(applied, remainder, result.stored["remainders"])
    # The root has to reach the remainder, so it is an input of the new weight, in a
    # branch that is never taken either. From the new to the old weight, this graph is
    # about 25 deep, so all intermediate results are among the others. The gradient is
    # innermost because it counts as one array until it joins the kernel, and as two,
    # itself and its factor, afterwards: AdamW with bias correction has 23 of 24.
    both = mx.where(applied, rounded, remainder.astype(parameter.dtype))
    others = [result.gradient, *old.intermediate, old.master, *result.moments]
    weight = fusion.select(applied, both, parameter, [*others, to_float32(rounded)])
    return weight, {"remainders": remainder}


def bfloat16_dither(count: mx.array) -> Dither:
    """Return the factor for the moments of the step with this count."""
    count = count.astype(mx.uint32)
    # The products wrap around at 2**32, which leaves the fractions.
    a, b = ((count * mx.array(n, mx.uint32)).astype(mx.float32) for n in (_A, _B))
    return (1 + ((a + b) * 2.0**-32 - 1) / 128,)


def init_bfloat16(
    optimizer: Optimizer, shape: tuple[int, ...], moments: Moments
) -> Moments:
    """Cast the float32 moments of the parameter's own shape to bfloat16."""
    cast = {}
    for name, x in moments.items():
        is_own = isinstance(x, mx.array) and (x.shape, x.dtype) == (shape, mx.float32)
        cast[name] = x.astype(mx.bfloat16) if is_own else x
    return cast


def decode_bfloat16(optimizer: Optimizer, moments: Moments) -> Moments:
    """Upcast bfloat16 moments to float32."""
    return {name: to_float32(x) for name, x in moments.items()}


def encode_bfloat16(
    optimizer: Optimizer, new: Stored, old: Stored, dither: Dither
) -> Stored:
    """Round the moments that are stored in bfloat16, with the factor of this step."""
    rounded = dict(new)
    for name, x in old.items():
        if x.dtype == mx.bfloat16:
            rounded[name] = (new[name] * dither[0]).astype(mx.bfloat16)
    return rounded


STORAGES = {
    32: Storage(
        ("masters", "written"),
        dtypes=(),
        split=split_float32,
        join=join_float32,
        select=select_float32,
        dither=no_dither,
        init=init_float32,
        decode=decode_float32,
        encode=encode_float32,
    ),
    16: Storage(
        ("remainders",),
        dtypes=(mx.int16, mx.bfloat16),
        split=split_remainder,
        join=join_stored_remainder,
        select=select_remainder,
        dither=bfloat16_dither,
        init=init_bfloat16,
        decode=decode_bfloat16,
        encode=encode_bfloat16,
    ),
}


def bits_of(state: Mapping[str, mx.array]) -> int:
    """Return the ``state_bits`` of a state, whose arrays are given by path.

    In 32 bits if nothing in it tells: then all of its arrays are the same in both.
    """
    for bits, storage in sorted(STORAGES.items()):
        for path, x in state.items():
            name = path.split(".")[0]
            if name in ("optimizer", *storage.names) and x.dtype in storage.dtypes:
                return bits
    return 32


class Masters:
    """The master weights of one optimizer, by parameter path."""

    def __init__(self, state_bits: int):
        self.state_bits = state_bits
        # Steps write to these dicts in place, because mx.compile has captured them.
        self.state: dict[str, Stored] = {name: {} for name in self.storage.names}

    @property
    def storage(self) -> Storage:
        """How the master weights, and the moments of their optimizer, are stored."""
        return STORAGES[self.state_bits]

    def has(self, path: str) -> bool:
        """Return whether the parameter at this path has a master weight."""
        return path in self.state[self.storage.names[0]]

    def set(self, path: str, master: mx.array, weight: mx.array) -> None:
        """Replace the master weight of a parameter; ``weight`` is the rounded value."""
        for name, x in self.storage.split(master, weight).items():
            self.state[name][path] = x

    def stored(self, path: str, weight: mx.array) -> Stored:
        """Return what stores a master weight, or raise; {} for float32 weights."""
        if weight.dtype not in HALF:
            return {}
        if not self.has(path):
            raise ValueError(
                f"{path!r} has no master weight, because it was frozen, missing or not "
                "in half precision when the optimizer was initialized. Call optimizer."
                "init(model.trainable_parameters()) again; existing state is kept."
            )
        found = {name: arrays[path] for name, arrays in self.state.items()}
        for x in found.values():
            check_shape(path, x.shape, weight.shape)
        return found

    def master_of(self, path: str, weight: mx.array) -> mx.array:
        """Return a parameter's master weight, or its upcast value if it has none."""
        stored = self.stored(path, weight) if self.has(path) else {}
        return self.storage.join(weight, stored).master


def check_shape(path: str, old: tuple[int, ...], new: tuple[int, ...]) -> None:
    """Raise if the shape of a parameter or of an array in the state has changed."""
    if new != old:
        raise ValueError(
            f"{path!r} has shape {new}, but had shape {old} when the "
            "optimizer was initialized. Create a new optimizer for the changed model."
        )
