"""Rows that map a PyTorch tensor to MLX, and the rows that a model accepts.

Names and layouts come from the model's layers or, for most mlx-lm models, from its
``sanitize`` method, which is called with marked arrays to trace outputs to inputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..core.trees import restore, snapshot
from ..files.text import dtype_name
from ..torch_checkpoint import Tensor
from .files import ConvertError, match_type

Shape = tuple[int, ...]

# Layout -> its minimum number of dimensions, and a function that takes the number of
# dimensions and returns the PyTorch axis for each MLX axis.
AXES: dict[str, tuple[int, Callable[[int], Shape]]] = {
    "same": (0, lambda n: tuple(range(n))),
    # (in, out) <-> (out, in): Transformers' Conv1D, PEFT's LoRA
    "transpose": (2, lambda n: (1, 0, *range(2, n))),
    # (out, in, *kernel) <-> (out, *kernel, in); nn.Bilinear: (out, in1, in2)
    "conv": (3, lambda n: (0, *range(2, n), 1)),
    # (in, out, *kernel) <-> (out, *kernel, in)
    "conv_transpose": (3, lambda n: (*range(1, n), 0)),
}
# What nn.MultiheadAttention fuses into one tensor, in_proj.
_FUSED_PARTS = ("query_proj", "key_proj", "value_proj")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Bilinear)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# Marks are odd multiples of this, so that the sum of two marks is not a mark.
_APART = 101


@dataclass(frozen=True)
class Row:
    """The MLX names (several if fused) and the layout of a PyTorch tensor."""

    torch: str
    mlx: tuple[str, ...]
    layout: str = "same"

    def to_mlx(self, tensor: mx.array) -> dict[str, mx.array]:
        """Convert a PyTorch weight or moment to MLX arrays."""
        if tensor.dtype == mx.float64:  # supported only on the CPU
            tensor = tensor.astype(mx.float32, stream=mx.cpu)
        moved = mx.transpose(tensor, AXES[self.layout][1](tensor.ndim))
        parts = mx.split(moved, len(self.mlx)) if len(self.mlx) > 1 else [moved]
        return dict(zip(self.mlx, parts, strict=True))

    def to_torch(self, arrays: Mapping[str, mx.array]) -> mx.array:
        """Convert MLX weights or moments to the PyTorch tensor."""
        parts = [arrays[name] for name in self.mlx]
        moved = mx.concatenate(parts) if len(parts) > 1 else parts[0]
        axes = AXES[self.layout][1](moved.ndim)
        return mx.transpose(moved, np.argsort(axes).tolist())

    def mlx_shapes(self, shape: Shape) -> dict[str, Shape]:
        """Return the MLX shapes, or the PyTorch shape if the layout does not apply."""
        least, get_axes = AXES[self.layout]
        axes = get_axes(len(shape)) if len(shape) >= least else range(len(shape))
        count, moved = len(self.mlx), [shape[axis] for axis in axes]
        if count > 1 and moved and moved[0] % count == 0:
            moved[0] //= count
        return dict.fromkeys(self.mlx, tuple(moved))

    def write(
        self, held: dict[Any, Any], arrays: Mapping[str, mx.array], like: Tensor
    ) -> None:
        """Replace the tensor in a dict by MLX's values, or add one typed as ``like``.

        A tensor that MLX only rounded is kept, and zeros are not added.
        """
        old, new, same = held.get(self.torch), self.to_torch(arrays), None
        if old is None:
            same = mx.zeros_like(new)
        elif old.dtype != dtype_name(new):
            same = old.read().astype(new.dtype, stream=mx.cpu)
        if same is None or not mx.array_equal(same, new, equal_nan=True).item():
            held[self.torch] = match_type(new, like if old is None else old)


def known_rows(model: nn.Module) -> dict[str, Row]:
    """Return a row for each PyTorch name that a model accepts.

    The layout of parameters with three or more dimensions is ``""`` (unknown), except
    for the weights of MLX's convolutions and of ``nn.Bilinear``.
    """
    modules = dict(model.named_modules())
    rows = []
    for name, array in tree_flatten(model.parameters()):
        path, _, leaf = name.rpartition(".")
        layout = "" if array.ndim > 2 else "same"
        if leaf == "weight" and isinstance(modules.get(path), _CONVOLUTIONS):
            layout = "conv"
        elif leaf == "weight" and isinstance(modules.get(path), _TRANSPOSED):
            layout = "conv_transpose"
        rows.append(Row(name, (name,), layout))
    for path, module in modules.items():
        if isinstance(module, nn.MultiHeadAttention):
            prefix = f"{path}." if path else ""
            rows += [
                Row(
                    f"{prefix}in_proj_{leaf}",
                    tuple(f"{prefix}{part}.{leaf}" for part in _FUSED_PARTS),
                )
                for leaf in ("weight", "bias")
                if all(leaf in module[part] for part in _FUSED_PARTS)
            ]
    known = {row.torch: row for row in rows}
    for row in rows:
        known.setdefault(_torch_spelling(row.torch, modules), row)
    return known


def _torch_spelling(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Drop the "layers" that MLX's nn.Sequential adds before its indices."""
    words = name.split(".")
    for i in reversed(range(len(words))):
        owner = modules.get(".".join(words[:i])) if words[i] == "layers" else None
        if isinstance(owner, nn.Sequential):
            del words[i]
    return ".".join(words)


def try_sanitize(
    model: nn.Module, shapes: Mapping[str, Shape]
) -> tuple[dict[str, tuple[str, str]], dict[str, Row]]:
    """Call :func:`probe_sanitize`, and undo the changes that it makes to the model.

    Also return the rows that the changed model accepts: Gemma 3 removes its
    ``lm_head`` if the checkpoint has none.
    """
    before = snapshot(model, *map(vars, model.modules()))
    try:
        return probe_sanitize(model, shapes), known_rows(model)
    finally:
        restore(before)


def probe_sanitize(
    model: nn.Module, shapes: Mapping[str, Shape]
) -> dict[str, tuple[str, str]]:
    """Return the names and layouts that ``sanitize`` assigns; raise if it does more."""
    names = {_APART * (2 * i + 1): name for i, name in enumerate(shapes)}
    marked = {name: _mark(mark, shapes[name]) for mark, name in names.items()}
    found: dict[str, tuple[str, str]] = {}
    for new, array in _sanitize(model, marked).items():
        is_array = isinstance(array, mx.array) and array.size > 0
        old = names.get(array[(0,) * array.ndim].item()) if is_array else None
        layout = old and _find_layout(array, marked[old])
        if not old or not layout or old in found:
            made = f"it copies or alters {old} to make {new}"
            what = made if old else f"it computes {new}"
            raise ConvertError(
                f"{type(model).__name__}.sanitize does more than rename and transpose: "
                f"{what}. Use a model without sanitize (on the command line, --model "
                "MODULE:NAME), and pass names and layouts with rename=... (--rename) "
                "and layouts=... (--layout)."
            )
        found[old] = (new, layout)
    return found


def _mark(mark: int, shape: Shape) -> mx.array:
    """Return an array whose elements reveal its origin and how its axes were moved.

    The first element is ``mark``, and the next along axis ``a`` is ``mark + a + 1``.
    The array is a view of a small buffer, with strides 1, 2, 3 and so on.
    """
    if 0 in shape:
        return mx.zeros(shape)
    size = sum((n - 1) * (axis + 1) for axis, n in enumerate(shape)) + 1
    buffer = mx.arange(size).astype(mx.float32) + mark
    return mx.as_strided(buffer, shape, [axis + 1 for axis in range(len(shape))])


def _find_layout(array: mx.array, marked: mx.array) -> str | None:
    """Return the layout that moves the axes as ``sanitize`` did, or None."""
    corner = (slice(2),) * marked.ndim  # contains the marks of all axes
    for layout, (least, get_axes) in AXES.items():
        if marked.ndim >= least:
            moved = mx.transpose(marked, get_axes(marked.ndim))
            is_moved = array.shape == moved.shape
            if is_moved and mx.array_equal(array[corner], moved[corner]):
                return layout
    return None


def _sanitize(model: nn.Module, weights: dict[str, mx.array]) -> dict[str, Any]:
    try:
        try:
            return dict(model.sanitize(dict(weights)))
        except KeyError as error:
            # Gemma 3 deletes a child module and fails if an earlier call deleted it.
            child = error.args[0]
            if not isinstance(child, str) or child in model or child in weights:
                raise
            dict.__setitem__(model, child, nn.Module())
            return dict(model.sanitize(dict(weights)))
    except Exception as error:  # the model's code may raise anything
        raise ConvertError(
            f"{type(model).__name__}.sanitize raised {type(error).__name__}: {error}. "
            "Check that the checkpoint belongs to this model."
        ) from error
