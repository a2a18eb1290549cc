"""Encode a tree of arrays and plain values as JSON, and decode it."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from .text import shorten

_DEEPEST = 100  # so that neither json nor decode() can exceed Python's recursion limit
_TAGS = ({"array"}, {"tuple"}, {"dict"})


def encode(tree: Any, arrays: dict[str, mx.array], path: tuple[str, ...] = ()) -> Any:
    """Convert a tree to JSON values, and add its arrays to ``arrays`` by path.

    Raises:
        TypeError: If a value has an unsupported type.
        ValueError: If the tree is nested too deeply.

    Example:
        >>> encode({"step": 3, "order": (2, 1)}, {})
        {'step': 3, 'order': {'tuple': [2, 1]}}
    """
    if isinstance(tree, mx.array):
        name = ".".join(path)
        while name in arrays:  # for example, {"a.b": x, "a": {"b": y}}
            name += "_"
        arrays[name] = tree
        return {"array": name}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if len(path) == _DEEPEST:
        raise ValueError(
            f"A value is nested more than {_DEEPEST} levels deep. Flatten it."
        )
    if isinstance(tree, (list, tuple)):
        items = [
            x if type(x) in (int, float) else encode(x, arrays, (*path, str(i)))
            for i, x in enumerate(tree)  # a fast path for millions of numbers
        ]
        return items if isinstance(tree, list) else {"tuple": items}
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        content = {key: encode(x, arrays, (*path, key)) for key, x in tree.items()}
        return {"dict": content} if content.keys() in _TAGS else content
    raise TypeError(
        f"{shorten(tree)} has the unsupported type {type(tree).__qualname__}. Use "
        "None, bool, int, float, str, list, tuple, a dict with string keys, or "
        "mx.array."
    )


def decode(encoded: Any, arrays: Mapping[str, mx.array]) -> Any:
    """Decode the result of :func:`encode`, given its arrays."""
    if isinstance(encoded, list):
        return [decode(x, arrays) for x in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if encoded.keys() == {"array"}:
        return arrays[encoded["array"]]
    if encoded.keys() == {"tuple"}:
        return tuple(decode(encoded["tuple"], arrays))
    content = encoded["dict"] if encoded.keys() == {"dict"} else encoded
    return {key: decode(x, arrays) for key, x in content.items()}
