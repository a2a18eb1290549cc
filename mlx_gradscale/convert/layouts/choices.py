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
        rename: PyTorch name -> MLX name, as a mapping, a function, or (regular
            expression, replacement) pairs tried in turn.
        conv: convolution weights.
        conv_transpose: weights of transposed convolutions.
        split_qkv: fused attention weights to split in query, key and value.
        transpose: weights of two dimensions, (in, out) in PyTorch.
        keep: tensors of 3 and more dimensions whose layout stays.
        drop: tensors the MLX model does not have; kept for the way back.
    """

    rename: Rename = None
    conv: tuple[str, ...] = ()
    conv_transpose: tuple[str, ...] = ()
    split_qkv: tuple[str, ...] = ()
    transpose: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()

    def named(self, name: str) -> str:
        """The MLX name the user gives a PyTorch name."""
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
        """The layout the user's patterns give a tensor; None where they say nothing."""
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
    """Whether a name fits one of some shell patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
