"""What the user says about names and layouts."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from .kinds import LayoutError

Rename = Mapping[str, str] | Callable[[str], str] | Iterable[tuple[str, str]] | None


@dataclass(frozen=True)
class Choices:
    """What the user says about names and layouts.

    The patterns are shell patterns (``features.*.weight``, ``*``) on PyTorch
    names.

    Attributes:
        rename (dict, Callable or list): PyTorch name -> MLX name, as a mapping, a
            function, or (regular expression, replacement) pairs tried in turn.
        conv (tuple): Convolution weights.
        conv_transpose (tuple): Weights of transposed convolutions.
        split_qkv (tuple): Fused attention weights to split in query, key and value.
        transpose (tuple): Weights of two dimensions, (in, out) in PyTorch.
        keep (tuple): Tensors of 3 and more dimensions whose layout stays.
        drop (tuple): Tensors the MLX model does not have; kept for the way back.
    """

    rename: Rename = None
    conv: tuple[str, ...] = ()
    conv_transpose: tuple[str, ...] = ()
    split_qkv: tuple[str, ...] = ()
    transpose: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()

    def named(self, name: str) -> str:
        """Return the MLX name the user gives a PyTorch name."""
        if self.rename is None:
            return name
        if isinstance(self.rename, Mapping):
            return self.rename.get(name, name)
        if callable(self.rename):
            return self.rename(name)
        for pattern, replacement in self.rename:
            name = re.sub(pattern, replacement, name)
        return name

    def layout(self, name: str, ndim: int) -> str | None:
        """Return the layout by the user's patterns; None where they say nothing."""
        fits = [
            layout
            for layout, patterns, least in (
                ("conv", self.conv, 3),
                ("conv_transpose", self.conv_transpose, 3),
                ("split_qkv", self.split_qkv, 1),
                ("transpose", self.transpose, 2),
                ("same", self.keep, 0),
            )
            if ndim >= least and matches(name, patterns)
        ]
        if len(fits) > 1:
            raise LayoutError(
                f"{name} is matched by the patterns for {' and '.join(fits)}: make "
                "one of them narrower."
            )
        return fits[0] if fits else None


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether a name fits one of some shell patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
