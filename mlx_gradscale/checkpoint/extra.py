"""The user's own values in a checkpoint: plain JSON, with arrays in a tensor file.

Beside the JSON value stand the paths at which an array or a tuple belongs, so that no
value of the user's can be mistaken for a tag.
"""

from typing import Any

import mlx.core as mx

_DEEPEST = 100
_MOST_VALUES = 2**20
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
    encoder = _Encoder()
    value = encoder.encode(extra, [])
    arrays = {str(i): x for i, (_, x) in enumerate(encoder.arrays)}
    paths = [path for path, _ in encoder.arrays]
    return {"value": value, "arrays": paths, "tuples": encoder.tuples}, arrays


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


class _Encoder:
    """Encodes one value, and collects the paths of its arrays and tuples."""

    def __init__(self) -> None:
        self.arrays: list[tuple[list[Any], mx.array]] = []
        self.tuples: list[list[Any]] = []
        self._n_values = 0

    def encode(self, value: Any, path: list[Any]) -> Any:
        kind = type(value)
        if kind is mx.array:
            self.arrays.append((path, value))
            return None
        if kind in (dict, list, tuple):
            return self._encode_container(value, path)
        if kind is int and value.bit_length() > _MOST_BITS:
            raise ValueError(f"{_name(path)} has more than {_MOST_BITS:,} bits.")
        if kind is str:
            _check_text(value, path)
        elif value is not None and kind not in (bool, int, float):
            raise TypeError(
                f"{_name(path)} is a {kind.__module__}.{kind.__qualname__}. Convert it "
                "to None, bool, int, float, str, list, tuple, dict or mx.array."
            )
        return value

    def _encode_container(self, value: Any, path: list[Any]) -> Any:
        self._n_values += len(value)
        if self._n_values > _MOST_VALUES:
            raise ValueError(
                f"{_name(path)} brings extra to more than {_MOST_VALUES:,} values. "
                "Save long lists as mx.array."
            )
        if len(path) > _DEEPEST:
            raise ValueError(f"extra {path[0]!r} is nested more than {_DEEPEST} deep.")
        if type(value) is dict:
            for key in value:
                if type(key) is not str:
                    raise TypeError(
                        f"{_name(path)} has the key {key!r:.40}. Keys must be strings."
                    )
                _check_text(key, path)
            return {key: self.encode(x, [*path, key]) for key, x in value.items()}
        items = [self.encode(x, [*path, i]) for i, x in enumerate(value)]
        if type(value) is tuple:
            self.tuples.append(path)
        return items


def _check_text(text: str, path: list[Any]) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{_name(path)} is text with half of a character.") from None


def _name(path: list[Any]) -> str:
    return "extra" + "".join(f"[{key!r:.40}]" for key in path)
