"""The master weights of an optimizer, and the kinds of storage for its state.

``state_bits`` selects a :class:`Storage`, which has methods to store master weights and
moments and to read them back. A step depends on ``state_bits`` only through them.
"""

from collections.abc import Mapping

import mlx.core as mx

from .eight_bit import EightBit
from .masters import HALF, Storage, Stored
from .sixteen_bit import SixteenBit

STORAGES = {32: Storage(), 16: SixteenBit(), 8: EightBit()}


def bits_of(state: Mapping[str, mx.array]) -> int:
    """Return the ``state_bits`` of a state, whose arrays are given by path.

    The most bits if several kinds store the same arrays.
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
        found = {}
        for name, arrays in self.state.items():
            if path not in arrays:
                raise ValueError(
                    f"{path!r} has no master weight, because it was frozen, missing or "
                    "not in half precision when the optimizer was initialized. Call "
                    "optimizer.init(model.trainable_parameters()) again; existing "
                    "state is kept."
                )
            found[name] = arrays[path]
            if found[name].shape != weight.shape:
                raise ValueError(
                    f"{path!r} has shape {weight.shape}, but had shape "
                    f"{found[name].shape} when the optimizer was initialized. Create a "
                    "new optimizer for the changed model."
                )
        return found

    def master_of(self, path: str, weight: mx.array) -> mx.array:
        """Return a parameter's master weight, or its upcast value if it has none."""
        stored = self.stored(path, weight) if self.has(path) else {}
        return self.storage.join(weight, stored).master
