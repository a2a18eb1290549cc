"""Which names of PyTorch's an MLX model answers to, and in which layout."""

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.nn as nn
from mlx.utils import tree_flatten

_LAYER_LAYOUTS = {
    (nn.Conv1d, nn.Conv2d, nn.Conv3d): "conv",
    (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d): "conv_transpose",
    (nn.Bilinear,): "bilinear",
}


@dataclass(frozen=True)
class Target:
    """Parameters of the model: their names, shapes, and layout."""

    mlx: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layout: str | None  # None: the layer is not one of MLX's own


def known_names(model: nn.Module) -> dict[str, Target]:
    """Return what PyTorch names, in either spelling, stand for in the model.

    Example:
        >>> sorted(known_names(nn.Sequential(nn.Linear(2, 3, bias=False))))
        ['0.weight', 'layers.0.weight']
    """
    modules = dict(model.named_modules())
    known: dict[str, Target] = {}
    for name, array in tree_flatten(model.parameters()):
        words = name.split(".")
        owner = modules.get(".".join(words[:-1]))
        layout = None if array.ndim > 2 else "same"
        for kinds, special in _LAYER_LAYOUTS.items():
            if isinstance(owner, kinds) and words[-1] == "weight":
                layout = special
        target = Target((name,), (array.shape,), layout)
        known[name] = target
        known.setdefault(_torch_spelling(words, modules), target)
    for path, module in modules.items():
        if isinstance(module, nn.MultiHeadAttention):
            known |= _fused(path, module, modules)
    return known


def _torch_spelling(words: list[str], modules: Mapping[str, nn.Module]) -> str:
    """Drop the "layers" that MLX's nn.Sequential puts before its numbers."""
    return ".".join(
        word
        for i, word in enumerate(words)
        if not (
            word == "layers"
            and isinstance(modules.get(".".join(words[:i])), nn.Sequential)
        )
    )


def _fused(
    path: str, module: nn.Module, modules: Mapping[str, nn.Module]
) -> dict[str, Target]:
    """Return the names in_proj_weight and in_proj_bias of PyTorch's attention."""
    prefix = f"{path}." if path else ""
    known = {}
    for leaf in ("weight", "bias"):
        projections = ("query_proj", "key_proj", "value_proj")
        if all(leaf in module[projection] for projection in projections):
            names = tuple(f"{prefix}{projection}.{leaf}" for projection in projections)
            shapes = tuple(module[p][leaf].shape for p in projections)
            target = Target(names, shapes, "split_qkv")
            fused = f"{prefix}in_proj_{leaf}"
            known[fused] = target
            known[_torch_spelling(fused.split("."), modules)] = target
    return known
