"""Master weights: the float32 values that half-precision parameters are rounded from.

:class:`Storage` keeps master weights and moments in float32 (``state_bits=32``), along
with the bits that the last step wrote to each parameter. If the parameter's bits
differ, the user has replaced the weight, and the new value becomes the master weight:
"the weight is its own master". The kinds with fewer bits are subclasses.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.optimizers import Optimizer

from . import fusion

HALF = (mx.float16, mx.bfloat16)
# The dtypes differ, so that float16 bits are never mistaken for bfloat16 bits.
_BITS = {mx.float16: mx.int16, mx.bfloat16: mx.uint16}

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
