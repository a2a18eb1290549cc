"""Options for what cannot be inferred from a checkpoint."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import mlx.core as mx

from ..torch_checkpoint import Limits
from .tree import ConvertError, list_some

Rename = Mapping[str, str] | Callable[[str], str] | Iterable[tuple[str, str]] | None

# Layout -> the option with its patterns, and the minimum number of dimensions.
_LAYOUT_OPTIONS = {
    "conv": ("conv", 3),
    "conv_transpose": ("conv_transpose", 3),
    "split_qkv": ("split_qkv", 1),
    "transpose": ("transpose", 2),
    "same": ("keep_layout", 0),
}


@dataclass(frozen=True)
class Options:
    """Settings that cannot be inferred from a checkpoint. All are optional.

    Patterns are shell patterns (``features.*.weight``, ``*``) on PyTorch names.

    Args:
        rename (dict, Callable or list): PyTorch name -> MLX name, as a mapping, a
            function, or (regular expression, replacement) pairs tried in turn.
        conv (tuple): Convolution weights.
        conv_transpose (tuple): Weights of transposed convolutions.
        split_qkv (tuple): Fused attention weights to split into query, key and value.
        transpose (tuple): Two-dimensional weights that are (in, out) in PyTorch.
        keep_layout (tuple): Tensors with 3 or more dimensions to leave unchanged.
        drop (tuple): Tensors that the MLX model does not have.
        keys (dict): ``"model"``, ``"optimizer"``, ``"scaler"`` -> its path in the
            checkpoint, such as ``"optimizer_states/0"``; ``""`` leaves it out.
        names (tuple): The PyTorch names of the optimizer's parameters, in order.
        optimizer (str): The optimizer's class; by default inferred from its keys.
        accept (tuple): Differences between PyTorch and MLX to accept.
        step (int): The step count, for optimizers that keep none (SGD, Lion).
        scaler_format (str): A key of :data:`mlx_gradscale.formats.FORMATS`.
        float64 (Dtype): The dtype to convert float64 to; by default it is an error.
        limits (Limits): For reading the file.

    Example:
        >>> Options(rename=[("^net[.]", "")]).renamed("net.fc.weight")
        'fc.weight'
    """

    rename: Rename = None
    conv: tuple[str, ...] = ()
    conv_transpose: tuple[str, ...] = ()
    split_qkv: tuple[str, ...] = ()
    transpose: tuple[str, ...] = ()
    keep_layout: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    keys: Mapping[str, str | None] = field(default_factory=dict)
    names: tuple[str, ...] | None = None
    optimizer: str | None = None
    accept: tuple[str, ...] = ()
    step: int | None = None
    scaler_format: str | None = None
    float64: mx.Dtype | None = None
    limits: Limits | None = None

    def renamed(self, name: str) -> str:
        """Return the user's MLX name for a PyTorch name."""
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
        """Return the layout given by the user's patterns, or None."""
        fits = [
            layout
            for layout, (option, least) in _LAYOUT_OPTIONS.items()
            if ndim >= least and matches(name, getattr(self, option))
        ]
        if len(fits) > 1:
            raise ConvertError(
                f"{name} is matched by the patterns for {' and '.join(fits)}: make "
                "one of them narrower."
            )
        return fits[0] if fits else None

    def check_patterns(self, names: Iterable[str]) -> None:
        """Raise on a pattern that matches nothing."""
        names = list(names)
        for option in ("drop", *(option for option, _ in _LAYOUT_OPTIONS.values())):
            for pattern in getattr(self, option):
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise ConvertError(
                        f"The pattern {pattern!r} for {option} matches no tensor; the "
                        f"names are {list_some(names)}."
                    )


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches any of the shell patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
