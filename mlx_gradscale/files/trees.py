"""Encode a tree of arrays and plain values as JSON, and decode it."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from .text import shorten

_DEEPEST = 100  # so that neither json nor decode() can exceed Python's recursion limit


def encode(tree: Any, arrays: list[mx.array], depth: int = 0) -> Any:
    """Return a tree in JSON form; its arrays are appended to ``arrays``.

    Raises:
        TypeError: A value has a type that would not be decoded to an equal value.
        ValueError: The tree is nested too deeply.

    Example:
        >>> encode({"step": 3, "order": (2, 1)}, [])
        {'dict': {'step': 3, 'order': {'tuple': [2, 1]}}}
    """
    if isinstance(tree, mx.array):
        arrays.append(tree)
        return {"array": str(len(arrays) - 1)}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if depth == _DEEPEST:
        raise ValueError(
            f"A value is nested more than {_DEEPEST} levels deep. Flatten it."
        )
    if isinstance(tree, (list, tuple)):
        items = [encode(x, arrays, depth + 1) for x in tree]
        return items if isinstance(tree, list) else {"tuple": items}
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        return {"dict": {key: encode(x, arrays, depth + 1) for key, x in tree.items()}}
    raise TypeError(
        f"{shorten(tree)} has the unsupported type {type(tree).__qualname__}. Use "
        "None, bool, int, float, str, list, tuple, a dict with string keys, or "
        "mx.array."
    )


def decode(encoded: Any, arrays: Mapping[str, mx.array]) -> Any:
    """Decode the result of :func:`encode`, given its arrays by number."""
    if isinstance(encoded, list):
        return [decode(x, arrays) for x in encoded]
    if not isinstance(encoded, dict):
        return encoded
    [(kind, content)] = encoded.items()
    if kind == "array":
        return arrays[content]
    if kind == "tuple":
        return tuple(decode(content, arrays))
    return {key: decode(x, arrays) for key, x in content.items()}
