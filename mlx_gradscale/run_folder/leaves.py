"""Every leaf of a live tree and where it is held, so that it can be replaced there."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ..state_tree import CONTAINERS, items, write_all

Place = tuple[Any, Any]
# What an optimizer may keep in its state besides arrays; text and so on is its own.
NUMBERS = (bool, int, float)


def places(tree: Any, path: str = "") -> dict[str, Place]:
    """Return, by path as ``tree_flatten`` writes it, where each array and number is.

    Returns:
        dict: Container and key, by path.

    Example:
        >>> tree = {"a": [1, {"b": 2, "c": "text"}]}
        >>> {path: key for path, (_, key) in places(tree).items()}
        {'a.0': 0, 'a.1.b': 'b'}
    """
    found: dict[str, Place] = {}
    for key, value in items(tree):
        where = f"{path}.{key}" if path else str(key)
        if isinstance(value, CONTAINERS):
            found |= places(value, where)
        elif isinstance(value, (mx.array, *NUMBERS)):
            found[where] = tree, key
    return found


def write_leaves(held: Mapping[str, Place], values: Mapping[str, Any]) -> None:
    """Write values to their places: all of them or, interrupted, none.

    Args:
        held (dict): Of :func:`places`, without those in a tuple.
        values (dict): By the same paths.

    Example:
        >>> tree = {"a": [1, {"b": 2}]}
        >>> write_leaves(places(tree), {"a.0": 3, "a.1.b": 4})
        >>> tree
        {'a': [3, {'b': 4}]}
    """
    write_all((box, key, values[path]) for path, (box, key) in held.items())
