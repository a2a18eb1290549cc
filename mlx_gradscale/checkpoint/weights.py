"""The weights of a model by path, and which of them move though they are frozen."""

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten


def weights(model: nn.Module) -> dict[str, mx.array]:
    """Return the parameters of a model, buffers and frozen ones too, by path.

    Raises:
        ValueError: Two have the same path.
    """
    flat = tree_flatten(model.parameters())
    found = dict(flat)
    if len(found) < len(flat):
        raise ValueError(
            "Two weights of the model have the same path when it is written with dots, "
            "as those of {'a.b': x, 'a': {'b': y}}. Rename one of them."
        )
    return found


def statistics(model: nn.Module) -> set[str]:
    """Return the paths of what BatchNorm writes, which moves though it is frozen."""
    names = ("running_mean", "running_var")
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, nn.BatchNorm)
        for name in names
    }
