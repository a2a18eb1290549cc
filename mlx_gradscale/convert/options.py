"""The ``Options`` of a conversion."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..torch_checkpoint import Limits


@dataclass(frozen=True)
class Options:
    """Settings that cannot be inferred from a checkpoint. All are optional.

    Patterns are shell patterns (``features.*.weight``, ``*``) on PyTorch names.

    Args:
        rename (Callable): A function from PyTorch names to MLX names, such as
            ``lambda name: name.removeprefix("net.")``.
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
        limits (Limits): Limits on the resource use of reading, shared by all files of
            the checkpoint.

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
