"""What an mlx-lm model's ``sanitize`` does to names and layouts, found by trying it.

``sanitize`` takes the weights as Transformers names them and gives them as the model
needs them. It is called with arrays that are marked, one number for each tensor and
then one for each index along an axis, so that what comes out shows where it came from.
The marks are broadcast, not stored.
"""

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

# Marks are far apart, so that a sum or product does not look like another mark.
_APART = 1009
_LAYOUTS = {
    **{tuple(range(n)): "same" for n in range(6)},
    (1, 0): "transpose",
    **{(0, *range(2, n), 1): "conv" for n in (3, 4, 5)},
    **{(*range(1, n), 0): "conv_transpose" for n in (3, 4, 5)},
}


def sanitized(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, str]]:
    """Find the new name and the layout of each tensor that ``sanitize`` keeps.

    Args:
        model (Module): With a ``sanitize`` method.
        shapes (dict): By name, as Transformers has them.

    Returns:
        dict: Name -> the model's name, and a key of ``LAYOUTS``. What
        ``sanitize`` drops is not in it.

    Raises:
        ValueError: It does more than to rename and to transpose.

    Example:
        >>> class Model(nn.Module):
        ...     def sanitize(self, weights):
        ...         return {f"model.{k}": v.T for k, v in weights.items()}
        >>> sanitized(Model(), {"w": (2, 3)})
        {'w': ('model.w', 'transpose')}
    """
    numbers = {name: _APART * (i + 1) for i, name in enumerate(shapes)}
    marked = {
        name: mx.broadcast_to(mx.array(numbers[name], mx.float32), shape)
        for name, shape in shapes.items()
    }
    names = {number: name for name, number in numbers.items()}
    out: dict[str, tuple[str, str]] = {}
    for new, array in _call(model, marked).items():
        first = _first(array)
        old = None if first is None else names.get(first)
        if old is None or array.size != marked[old].size or old in out:
            what = f"{old} becomes {new}" if old else f"{new} is computed"
            raise ValueError(
                f"The sanitize of {type(model).__name__} does more than to rename and "
                f"to transpose: {what}. Give names and layouts by hand (--rename, "
                "--transpose), with the model as MODULE:NAME."
            )
        out[old] = (new, "same")
    axes = _axes(model, {name: shapes[name] for name in out}, out)
    for name, (new, _) in out.items():
        if axes[name] not in _LAYOUTS:
            raise ValueError(f"{name} becomes {new} with its axes as {axes[name]}.")
        out[name] = (new, _LAYOUTS[axes[name]])
    return out


def _axes(
    model: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, tuple[str, str]],
) -> dict[str, tuple[int, ...]]:
    """Return where each axis of what comes out was in what went in."""
    found: dict[str, dict[int, int]] = {name: {} for name in shapes}
    for axis in range(max(map(len, shapes.values()), default=0)):
        results = _call(model, {n: _ramp(s, axis) for n, s in shapes.items()})
        for name, shape in shapes.items():
            # An axis of one index cannot be told apart, and need not be.
            if axis < len(shape) and shape[axis] > 1:
                array = results[names[name][0]]
                found[name][_varying(array)] = axis
    out = {}
    for name, shape in shapes.items():
        rest = iter([a for a in range(len(shape)) if a not in found[name].values()])
        out[name] = tuple(
            found[name][a] if a in found[name] else next(rest)
            for a in range(len(shape))
        )
    return out


def _ramp(shape: tuple[int, ...], axis: int) -> mx.array:
    if axis >= len(shape):
        return mx.broadcast_to(mx.array(0.0), shape)
    ramp = mx.arange(shape[axis]).astype(mx.float32)
    return mx.broadcast_to(
        ramp.reshape([-1 if a == axis else 1 for a in range(len(shape))]), shape
    )


def _varying(array: mx.array) -> int:
    for axis in range(array.ndim):
        if array.shape[axis] > 1:
            at = [0] * array.ndim
            at[axis] = 1
            if array[tuple(at)].item() != 0:
                return axis
    return -1


def _first(array: Any) -> int | None:
    if not isinstance(array, mx.array) or not array.size:
        return None
    value: Any = array.reshape(-1)[0].item() if array.ndim else array.item()
    return int(value) if value == int(value) else None


def _call(model: nn.Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    sanitize: Callable[[dict[Any, Any]], dict[Any, Any]] = model.sanitize
    try:
        return dict(sanitize(dict(weights)))
    except Exception as error:  # it is the model's own code
        kind = type(error).__name__
        raise ValueError(
            f"The sanitize of {type(model).__name__} raised {kind}: {error}"
        ) from error
