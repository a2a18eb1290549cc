"""Layers of an MLX model that compute something else than PyTorch's of that name."""

import mlx.nn as nn
from mlx.utils import tree_flatten

_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


def model_notes(model: nn.Module) -> list[str]:
    """Return sentences on layers whose weights fit and whose results may not.

    Args:
        model (Module): The MLX model that a PyTorch model is converted for.

    Example:
        >>> model_notes(nn.Sequential(nn.GroupNorm(2, 8)))[0][:30]
        'layers.0: a GroupNorm without '
    """
    leaves = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    leaves = [
        (name, module) for name, module in leaves if isinstance(module, nn.Module)
    ]
    return [*_groups(leaves), *_flattened(leaves)]


def _groups(leaves: list[tuple[str, nn.Module]]) -> list[str]:
    # With one group, or one channel in each, the groups are the same.
    found = [
        name
        for name, module in leaves
        if isinstance(module, nn.GroupNorm)
        and not module.pytorch_compatible
        and 1 < module.num_groups < module.dims
    ]
    if not found:
        return []
    return [
        f"{', '.join(found)}: a GroupNorm without pytorch_compatible=True puts other "
        "channels together than PyTorch's: build it with that."
    ]


def _flattened(leaves: list[tuple[str, nn.Module]]) -> list[str]:
    """Return a word on each Linear that may take a convolution's flattened output."""
    notes, before = [], None
    for name, module in leaves:
        if isinstance(module, _CONVOLUTIONS):
            before = (name, module.weight.shape[0])
        elif isinstance(module, nn.Linear):
            inputs = module.weight.shape[1]
            if before and inputs > before[1] and inputs % before[1] == 0:
                notes.append(
                    f"{name} has {inputs} inputs, and {before[0]} before it "
                    f"{before[1]} channels: if its input is flattened in between, "
                    "PyTorch flattens with the channels first and MLX with the "
                    "channels last. In the MLX model move them first: "
                    "mx.moveaxis(x, -1, 1).flatten(1)."
                )
            before = None
    return notes
