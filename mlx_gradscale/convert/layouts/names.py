"""The MLX name of each PyTorch tensor, and its layout where the name tells it."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import mlx.nn as nn

from .peft import from_peft
from .sanitized import sanitized
from .wrappers import unwrapping, ways

DROPPED = "dropped"  # instead of a layout: the model's sanitize has no use for it


def names_and_layouts(
    shapes: Mapping[str, tuple[int, ...]],
    rename: Callable[[str], str],
    model: nn.Module | None = None,
    known: Collection[str] | None = None,
    prefix: str = "",
) -> dict[str, tuple[str, str | None]]:
    """Find new names: by the user's renames, without wrappers, by the model itself.

    Args:
        shapes (dict): By PyTorch name.
        rename (Callable): What the user makes of a name.
        model (Module, optional): If it has a ``sanitize``, as mlx-lm's models have,
            that is asked.
        known (Collection, optional): The names that the model knows.
        prefix (str): See :func:`~mlx_gradscale.convert.layouts.wrappers.unwrapping`.

    Returns:
        dict: PyTorch name -> MLX name, and a layout, or None where only the model's
        layers can tell it.

    Example:
        >>> names_and_layouts({"module.fc.weight": (2, 3)}, str)
        {'module.fc.weight': ('fc.weight', None)}
    """
    if model is None or not hasattr(model, "sanitize"):
        new = unwrapping(shapes, rename, known, prefix)
        return {name: from_peft(new(name)) for name in shapes}
    best: dict[str, tuple[str, str | None]] = {}
    for way in ways(rename):
        found = sanitized(model, {way(name): shape for name, shape in shapes.items()})
        out: dict[str, tuple[str, str | None]] = {
            name: found.get(way(name), (way(name), DROPPED)) for name in shapes
        }
        if not best or _hits(out, known or ()) > _hits(best, known or ()):
            best = out
    return best


def _hits(found: Mapping[str, tuple[Any, ...]], known: Collection[str]) -> int:
    return sum(new in known for new, _ in found.values())
