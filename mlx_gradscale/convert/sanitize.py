"""Find out what a model's ``sanitize`` does to names and layouts, by calling it.

The models of mlx-lm have a ``sanitize`` that converts weights from Transformers. It is
called with marked arrays, so that each output shows which input it came from.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .layouts import AXES, Entry, Shape, known_names
from .tree import ConvertError

# Marks are odd multiples of this, so that a sum or a double is not taken for a mark.
_APART = 101


def try_sanitize(
    model: nn.Module, shapes: Mapping[str, Shape]
) -> tuple[dict[str, tuple[str, str]], dict[str, Entry]]:
    """Probe ``sanitize``, and undo its changes to the model.

    Also return the names that the model accepts afterwards: Gemma 3 removes its
    ``lm_head`` if the checkpoint has none.
    """
    before = [(m, dict(m), dict(vars(m))) for m in model.modules()]
    try:
        return probe_sanitize(model, shapes), known_names(model)
    finally:
        for module, children, attributes in before:
            dict.clear(module)
            dict.update(module, children)
            vars(module).clear()
            vars(module).update(attributes)


def probe_sanitize(
    model: nn.Module, shapes: Mapping[str, Shape]
) -> dict[str, tuple[str, str]]:
    """Return the new name and layout of each tensor that ``sanitize`` keeps.

    Raise if it does more than rename and transpose.

    Example:
        >>> class Model(nn.Module):
        ...     def sanitize(self, weights):
        ...         return {f"model.{k}": v.T for k, v in weights.items()}
        >>> probe_sanitize(Model(), {"w": (2, 3)})
        {'w': ('model.w', 'transpose')}
    """
    marks = {name: _APART * (2 * i + 1) for i, name in enumerate(shapes)}
    names = {mark: name for name, mark in marks.items()}
    marked = {name: _mark(marks[name], shape) for name, shape in shapes.items()}
    found: dict[str, tuple[str, str]] = {}
    for new, array in _sanitize(model, marked).items():
        is_array = isinstance(array, mx.array) and array.size > 0
        old = names.get(array[(0,) * array.ndim].item()) if is_array else None
        layout = old and _find_layout(array, marks[old], shapes[old])
        if not old or not layout or old in found:
            what = f"{old} becomes {new}" if old else f"{new} is computed"
            raise ConvertError(
                f"{type(model).__name__}.sanitize does more than rename and transpose: "
                f"{what}. Pass the model as MODULE:NAME, and names and layouts with "
                "--rename and --layout."
            )
        found[old] = (new, layout)
    return found


def _mark(mark: int, shape: Shape) -> mx.array:
    """Return an array with ``mark`` at 0 and ``mark + a + 1`` at 1 along axis a.

    It is a view of a small buffer: the steps along the axes are 1, 2, 3 and so on.
    """
    if 0 in shape:
        return mx.zeros(shape)
    size = sum((n - 1) * (axis + 1) for axis, n in enumerate(shape)) + 1
    buffer = mx.arange(size).astype(mx.float32) + mark
    return mx.as_strided(buffer, shape, [axis + 1 for axis in range(len(shape))])


def _find_layout(array: mx.array, mark: int, shape: Shape) -> str | None:
    """Return the layout that moves the axes of a marked array as ``sanitize`` did."""
    ones = {
        axis: array[tuple(int(axis == i) for i in range(array.ndim))].item()
        for axis, size in enumerate(array.shape)
        if size > 1
    }
    for layout, (least, get_axes) in AXES.items():
        if len(shape) >= least:
            axes = get_axes(len(shape))
            is_moved = array.shape == tuple(shape[axis] for axis in axes)
            wanted = {axis: mark + axes[axis] + 1 for axis in ones if is_moved}
            if is_moved and ones == wanted:
                return layout
    return None


def _sanitize(model: nn.Module, weights: dict[str, mx.array]) -> dict[str, Any]:
    try:
        try:
            return dict(model.sanitize(dict(weights)))
        except KeyError as error:
            # Gemma 3 removes a child that an earlier call has already removed.
            child = error.args[0]
            if not isinstance(child, str) or child in model or child in weights:
                raise
            dict.__setitem__(model, child, nn.Module())
            return dict(model.sanitize(dict(weights)))
    except Exception as error:  # this is the model's own code
        raise ConvertError(
            f"{type(model).__name__}.sanitize raised {type(error).__name__}: {error}"
        ) from error
