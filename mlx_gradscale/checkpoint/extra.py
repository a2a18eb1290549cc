"""The user's own values in a checkpoint: plain JSON, with arrays in a tensor file.

Beside the JSON value stand the paths at which an array or a tuple belongs, so that no
value of the user's can be mistaken for a tag.
"""

from typing import Any

import mlx.core as mx

_DEEPEST = 100
_MOST_BITS = 10_000  # Python's own limit of 4,300 digits is 14,284 bits


def encode_extra(extra: dict[str, Any]) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Return what goes into ``training.json``, and the arrays by number.

    Raises:
        TypeError: A value is of a type that could not come back equal.
        ValueError: A value is too large or nested too deeply.

    Example:
        >>> encode_extra({"step": 3, "order": (2, 1)})[0]
        {'value': {'step': 3, 'order': [2, 1]}, 'arrays': [], 'tuples': [['order']]}
    """
    arrays: list[tuple[list[Any], mx.array]] = []
    tuples: list[list[Any]] = []
    value = _encode(extra, [], arrays, tuples)
    encoded = {"value": value, "arrays": [path for path, _ in arrays], "tuples": tuples}
    return encoded, {str(i): x for i, (_, x) in enumerate(arrays)}


def decode_extra(encoded: Any, arrays: dict[str, mx.array]) -> dict[str, Any]:
    """Return the values that :func:`encode_extra` encoded.

    Raises:
        KeyError, IndexError, TypeError: The text was not written by it.

    Example:
        >>> decode_extra(*encode_extra({"order": (2, [1])}))
        {'order': (2, [1])}
    """
    value: dict[str, Any] = encoded["value"]
    for i, path in enumerate(encoded["arrays"]):
        _container(value, path)[path[-1]] = arrays[str(i)]
    # Inner tuples come first: an outer one can still be written to as a list.
    for path in encoded["tuples"]:
        container = _container(value, path)
        container[path[-1]] = tuple(container[path[-1]])
    return dict(value)


def _container(value: Any, path: list[Any]) -> Any:
    for key in path[:-1]:
        value = value[key]
    return value


def _encode(
    value: Any,
    path: list[Any],
    arrays: list[tuple[list[Any], mx.array]],
    tuples: list[list[Any]],
) -> Any:
    kind = type(value)
    if len(path) > _DEEPEST:
        raise ValueError(f"extra {path[0]!r} is nested more than {_DEEPEST} deep.")
    if kind is mx.array:
        arrays.append((path, value))
        return None
    if kind is int and value.bit_length() > _MOST_BITS:
        raise ValueError(f"{_name(path)} is a number of more than {_MOST_BITS:,} bits.")
    if kind is str:
        _check_text(value, path)
    if kind is dict:
        for key in value:
            if type(key) is not str:
                raise TypeError(
                    f"{_name(path)} has the key {key!r:.40}. Keys must be strings."
                )
            _check_text(key, path)
        return {
            key: _encode(x, [*path, key], arrays, tuples) for key, x in value.items()
        }
    if kind in (list, tuple):
        encoded = [_encode(x, [*path, i], arrays, tuples) for i, x in enumerate(value)]
        if kind is tuple:
            tuples.append(path)
        return encoded
    if value is not None and kind not in (bool, int, float, str):
        raise TypeError(
            f"{_name(path)} is a {kind.__module__}.{kind.__qualname__}. Convert it to "
            "None, bool, int, float, str, list, tuple, dict or mx.array."
        )
    return value


def _check_text(text: str, path: list[Any]) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{_name(path)} is text with half of a character.") from None


def _name(path: list[Any]) -> str:
    return "extra" + "".join(f"[{key!r:.40}]" for key in path)
