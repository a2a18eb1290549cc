"""A plan: where each tensor of a PyTorch model is in the MLX model, and how.

It is made once per checkpoint and then applied to the weights and to each of the
optimizer's moments alike, in both directions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import mlx.core as mx

from .hints import listed
from .kinds import LAYOUTS, LayoutError


@dataclass(frozen=True)
class Entry:
    """One PyTorch tensor: its MLX names and layout.

    A fused tensor has several names. So has a tied one whose names are parameters
    of their own in MLX: all get its values, and the first gives them back.
    """

    torch: str
    mlx: tuple[str, ...]
    layout: str = "same"

    @property
    def places(self) -> list[tuple[str, ...]]:
        """The MLX names of each copy; more than one where a tie is undone."""
        count = LAYOUTS[self.layout].count
        return [self.mlx[i : i + count] for i in range(0, len(self.mlx), count)]

    def to_mlx(self, tensor: mx.array) -> dict[str, mx.array]:
        """Return the MLX arrays of a PyTorch tensor, weight or moment."""
        arrays = LAYOUTS[self.layout].to_mlx(tensor)
        return dict(zip(self.mlx, arrays * len(self.places), strict=True))

    def to_torch(self, arrays: Mapping[str, mx.array]) -> mx.array:
        """Return the PyTorch tensor of the MLX arrays, weight or moment."""
        held = [arrays[name] for name in self.places[0]]
        try:
            return LAYOUTS[self.layout].to_torch(held)
        except (IndexError, ValueError) as error:
            raise LayoutError(
                f"{self.mlx[0]} has shape {held[0].shape}, which has no layout "
                f"{self.layout!r} to undo: {error}"
            ) from error


@dataclass(frozen=True)
class Plan:
    """All tensors of a PyTorch state dict.

    Attributes:
        entries (dict): By PyTorch name, in the state dict's order.
        tied (dict): Alias -> the name it shares its tensor with, whose entry it is in.
        unplaced (tuple): What MLX has no place for (BatchNorm's counters, dropped
            tensors, extra states of modules and other values that are not tensors).
    """

    entries: dict[str, Entry]
    tied: dict[str, str] = field(default_factory=dict)
    unplaced: tuple[str, ...] = ()

    def to_mlx(self, tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return the MLX weights of a PyTorch state dict."""
        out: dict[str, mx.array] = {}
        for name, entry in self.entries.items():
            out |= entry.to_mlx(tensors[name])
        return out

    def to_torch(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return the PyTorch tensors of MLX weights; aliases are the same object."""
        missing = [n for e in self.entries.values() for n in e.mlx if n not in weights]
        if missing:
            raise LayoutError(f"The MLX weights lack {listed(missing)}.")
        for entry in self.entries.values():
            _check_equal(entry, weights)
        out = {name: entry.to_torch(weights) for name, entry in self.entries.items()}
        return out | {alias: out[name] for alias, name in self.tied.items()}


def _check_equal(entry: Entry, weights: Mapping[str, mx.array]) -> None:
    first, *others = entry.places
    for other in others:
        for a, b in zip(first, other, strict=True):
            if not mx.array_equal(weights[a], weights[b], equal_nan=True).item():
                raise LayoutError(
                    f"{a} and {b} are one tensor in PyTorch ({entry.torch}) and have "
                    "different values in MLX, so there is no way back: tie them in "
                    "the MLX model (embedding.as_linear, say) before training on, or "
                    "give both the same values."
                )
