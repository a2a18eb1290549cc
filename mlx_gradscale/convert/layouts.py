"""Layouts of PyTorch tensors in MLX, and those that the layers of a model expect."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

Shape = tuple[int, ...]

# Layout -> its minimum number of dimensions n, and the PyTorch axis behind each of
# MLX's n axes.
AXES: dict[str, tuple[int, Callable[[int], Shape]]] = {
    "same": (0, lambda n: tuple(range(n))),
    # (in, out) <-> (out, in): Transformers' Conv1D, PEFT's LoRA
    "transpose": (2, lambda n: (1, 0, *range(2, n))),
    # (out, in, *kernel) <-> (out, *kernel, in); nn.Bilinear: (out, in1, in2)
    "conv": (3, lambda n: (0, *range(2, n), 1)),
    # (in, out, *kernel) <-> (out, *kernel, in)
    "conv_transpose": (3, lambda n: (*range(1, n), 0)),
}
# nn.MultiheadAttention's in_proj: query, key and value fused in one tensor.
FUSED = "split_qkv"
_FUSED_PARTS = ("query_proj", "key_proj", "value_proj")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Bilinear)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Entry:
    """One PyTorch tensor: its MLX names (several if it is fused) and layout."""

    torch: str
    mlx: tuple[str, ...]
    layout: str = "same"

    def to_mlx(self, tensor: mx.array) -> dict[str, mx.array]:
        """Convert a PyTorch tensor, weight or moment, to MLX arrays."""
        if self.layout == FUSED:
            return dict(zip(self.mlx, mx.split(tensor, 3), strict=True))
        axes = AXES[self.layout][1](tensor.ndim)
        return {self.mlx[0]: mx.transpose(tensor, axes)}

    def to_torch(self, arrays: Mapping[str, mx.array]) -> mx.array:
        """Convert MLX arrays, weights or moments, to the PyTorch tensor."""
        held = [arrays[name] for name in self.mlx]
        if self.layout == FUSED:
            return mx.concatenate(held)
        axes = AXES[self.layout][1](held[0].ndim)
        return mx.transpose(held[0], np.argsort(axes).tolist())

    def mlx_shapes(self, shape: Shape) -> list[Shape]:
        """Return the shapes in MLX, or the shape itself if the layout does not fit."""
        if self.layout == FUSED:
            is_fused = shape and shape[0] % 3 == 0
            return [(shape[0] // 3, *shape[1:])] * 3 if is_fused else [shape]
        least, get_axes = AXES[self.layout]
        axes = get_axes(len(shape)) if len(shape) >= least else range(len(shape))
        return [tuple(shape[axis] for axis in axes)]


def known_names(model: nn.Module) -> dict[str, Entry]:
    """Return the entries of a model by each PyTorch name that it accepts.

    The layout is ``""`` if the parameter does not belong to one of MLX's own layers.
    """
    modules = dict(model.named_modules())
    entries = []
    for name, array in tree_flatten(model.parameters()):
        path, _, leaf = name.rpartition(".")
        layout = "" if array.ndim > 2 else "same"
        if leaf == "weight" and isinstance(modules.get(path), _CONVOLUTIONS):
            layout = "conv"
        elif leaf == "weight" and isinstance(modules.get(path), _TRANSPOSED):
            layout = "conv_transpose"
        entries.append(Entry(name, (name,), layout))
    for path, module in modules.items():
        if isinstance(module, nn.MultiHeadAttention):
            prefix = f"{path}." if path else ""
            entries += [
                Entry(
                    f"{prefix}in_proj_{leaf}",
                    tuple(f"{prefix}{part}.{leaf}" for part in _FUSED_PARTS),
                    FUSED,
                )
                for leaf in ("weight", "bias")
                if all(leaf in module[part] for part in _FUSED_PARTS)
            ]
    known = {entry.torch: entry for entry in entries}
    for entry in entries:
        known.setdefault(_torch_spelling(entry.torch, modules), entry)
    return known


def _torch_spelling(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Drop the "layers" that MLX's nn.Sequential adds before its indices."""
    words = name.split(".")
    return ".".join(
        word
        for i, word in enumerate(words)
        if word != "layers"
        or not isinstance(modules.get(".".join(words[:i])), nn.Sequential)
    )
