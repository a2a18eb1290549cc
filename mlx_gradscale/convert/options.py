"""The ``Options`` of a conversion."""

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
            function, or (regular expression, replacement) pairs, all of which are
            applied in turn. Names that are not in the mapping do not change.
        layouts (dict): Pattern -> the layout of these tensors: ``"conv"`` and
            ``"conv_transpose"`` for weights of convolutions, ``"transpose"`` for
            weights that are (in, out) in PyTorch, ``"same"`` to leave them unchanged.
            The first pattern that matches a name counts, except that layouts which need
            more dimensions than the tensor has are skipped.
        drop (tuple): Patterns of tensors to ignore because the MLX model does not have
            them.
        keys (dict): ``"model"``, ``"optimizer"`` or ``"scaler"`` -> its path in the
            checkpoint, such as ``"optimizer_states/0"``. Separate several optimizers by
            commas. ``""`` leaves out the optimizer or the scaler.
        names (tuple): The PyTorch names of the optimizer's parameters, in the order of
            its parameter groups.
        optimizer (str): The optimizer's class, such as ``"AdamW"``; by default inferred
            from its keys.
        accept (tuple): Names of optimizer settings to ignore although PyTorch and MLX
            differ in them. The error about the difference lists them.
        step (int): The step count, for optimizers that do not save one (SGD, Lion).
        scaler_format (str): A key of :data:`mlx_gradscale.formats.FORMATS`; by default
            inferred from the keys of the scaler state.
        float64 (Dtype): The dtype to convert float64 tensors to. By default, such
            tensors are an error.
        limits (Limits): Limits on the resource use of reading, shared by all files of
            the checkpoint.

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
