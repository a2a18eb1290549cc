"""Options for what cannot be inferred from a checkpoint."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import mlx.core as mx

from ..torch_checkpoint import Limits
from .layouts import AXES
from .tree import ConvertError, list_some

Rename = Mapping[str, str] | Callable[[str], str] | Iterable[tuple[str, str]] | None


@dataclass(frozen=True)
class Options:
    """Settings that cannot be inferred from a checkpoint. All are optional.

    Patterns are shell patterns (``features.*.weight``, ``*``) on PyTorch names.

    Args:
        rename (dict, Callable or list): PyTorch name -> MLX name, as a mapping, a
            function, or (regular expression, replacement) pairs tried in turn.
        layouts (dict): Pattern -> the layout of these tensors: ``"conv"`` and
            ``"conv_transpose"`` for weights of convolutions, ``"transpose"`` for
            weights that are (in, out) in PyTorch, ``"same"`` to leave them unchanged.
            The first pattern that matches a name counts.
        drop (tuple): Patterns of tensors that the MLX model does not have.
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
    layouts: Mapping[str, str] = field(default_factory=dict)
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
        """Return the layout that the user gave for a tensor, or None."""
        for pattern, layout in self.layouts.items():
            if ndim >= AXES[layout][0] and fnmatchcase(name, pattern):
                return layout
        return None

    def is_dropped(self, name: str) -> bool:
        """Return whether the user leaves a tensor out."""
        return any(fnmatchcase(name, pattern) for pattern in self.drop)

    def check_patterns(self, names: Iterable[str]) -> None:
        """Raise if a layout is unknown or a pattern matches no name."""
        names = list(names)
        for layout in self.layouts.values():
            if layout not in AXES:
                raise ConvertError(
                    f"{layout!r} is not a layout. Use one of {', '.join(AXES)}."
                )
        for pattern in (*self.layouts, *self.drop):
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConvertError(
                    f"The pattern {pattern!r} matches no tensor. The checkpoint has "
                    f"{list_some(names)}."
                )
