"""Options for converting between PyTorch and MLX."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .old_checkpoint import Limits


@dataclass(frozen=True)
class Options:
    """Conversion settings, for checkpoints that the defaults do not fit.

    Patterns are shell patterns (``features.*.weight``, ``*``) for PyTorch names.

    Args:
        rename (Callable): A function from PyTorch names to MLX names, such as
            ``lambda name: name.removeprefix("net.")``.
        layouts (dict): Maps patterns to layouts: ``"conv"`` and ``"conv_transpose"``
            for the weights of convolutions, ``"transpose"`` for weights that are
            (in, out) in PyTorch, and ``"same"`` for tensors to leave unchanged. The
            first matching pattern applies, but layouts that need more dimensions than
            the tensor has are skipped.
        drop (tuple): Patterns for tensors to ignore because the MLX model lacks them.
        keys (dict): Maps ``"model"``, ``"optimizer"`` and ``"scaler"`` to their paths
            in the checkpoint, such as ``"optimizer_states/0"``. Separate the paths of
            several optimizers with commas. ``""`` omits the optimizer or the scaler.
        names (tuple): The PyTorch names of the optimizer's parameters, in the order of
            its parameter groups.
        optimizer (str): The optimizer's class, such as ``"AdamW"``. By default, it is
            inferred from the optimizer's state dict.
        accept (tuple): Names of optimizer settings to ignore although PyTorch and MLX
            differ in them. The error about a difference names the setting.
        limits (Limits): Limits on memory and work, shared by all files of the
            checkpoint.

    Example:
        >>> Options(rename=lambda name: f"net.{name}").rename("fc.weight")
        'net.fc.weight'
    """

    rename: Callable[[str], str] = str
    layouts: Mapping[str, str] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] | None = None
    optimizer: str | None = None
    accept: tuple[str, ...] = ()
    limits: Limits | None = None
