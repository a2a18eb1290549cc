"""Encode what JSON and safetensors lose: tuples, arrays in ``extra``, memory order."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any

import mlx.core as mx

_DEEPEST = 100
_LONGEST = 2**22  # a longer list would exceed 16 MB of JSON in any case
_MOST_AXES = 5  # 120 orders to try; arrays with more axes stay row-major


def encode_extra(extra: dict[str, Any]) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Return the value to store in ``training.json``, and the arrays by number.

    The paths of arrays and tuples are listed separately from the value, so that no
    value can be mistaken for a tag.

    Raises:
        TypeError: A value has a type that would not be restored equal.
        ValueError: A value is nested too deeply.

    Example:
        >>> encode_extra({"step": 3, "order": (2, 1)})[0]
        {'value': {'step': 3, 'order': [2, 1]}, 'arrays': [], 'tuples': [['order']]}
    """
    arrays: list[tuple[list[Any], mx.array]] = []
    tuples: list[list[Any]] = []
    value = _encode(extra, [], arrays, tuples)
    encoded = {"value": value, "arrays": [path for path, _ in arrays], "tuples": tuples}
    return encoded, {str(i): x for i, (_, x) in enumerate(arrays)}


def decode_extra(encoded: Any, arrays: Mapping[str, mx.array]) -> dict[str, Any]:
    """Decode the result of :func:`encode_extra`."""
    value = encoded["value"]
    for i, (container, key) in enumerate(_places(value, encoded["arrays"])):
        container[key] = arrays[str(i)]
    # Convert inner tuples first, while the outer ones are still mutable lists.
    for container, key in _places(value, encoded["tuples"]):
        container[key] = tuple(container[key])
    return dict(value)


def _encode(value: Any, path: list[Any], arrays: list[Any], tuples: list[Any]) -> Any:
    kind = type(value)
    if kind is mx.array:
        arrays.append((path, value))
        return None
    if len(path) > _DEEPEST:
        raise ValueError(f"{_name(path)} is nested more than {_DEEPEST} deep.")
    if kind in (dict, list, tuple) and len(value) > _LONGEST:
        raise ValueError(f"{_name(path)} has {len(value):,} values: use an mx.array.")
    if kind is dict:
        for key in value:
            if type(key) is not str:
                raise TypeError(
                    f"Keys must be strings, but {_name(path)} has {key!r:.40}."
                )
        return {k: _encode(x, [*path, k], arrays, tuples) for k, x in value.items()}
    if kind in (list, tuple):
        items = [_encode(x, [*path, i], arrays, tuples) for i, x in enumerate(value)]
        if kind is tuple:
            tuples.append(path)
        return items
    if value is not None and kind not in (bool, int, float, str):
        raise TypeError(
            f"{_name(path)} is a {kind.__module__}.{kind.__qualname__}. Convert it to "
            "None, bool, int, float, str, list, tuple, dict or mx.array."
        )
    return value


def _name(path: list[Any]) -> str:
    return "extra" + "".join(f"[{key!r:.40}]" for key in path[:4])


def _places(value: Any, paths: Any) -> Iterator[tuple[Any, Any]]:
    for *parents, key in paths:
        container = value
        for parent in parents:
            container = container[parent]
        yield container, key


def memory_orders(arrays: Mapping[str, mx.array]) -> dict[str, list[int]]:
    """Return the axes, slowest to fastest, of arrays that are not row-major.

    Matrix products round differently for transposed operands, and a step leaves weights
    and moments in the order of its operands. So a resumed run is bit-identical only if
    that order is restored too; 1 x n matrices are often not row-major.

    Example:
        >>> x = mx.zeros((2, 3))
        >>> memory_orders({"x": x, "y": x.T})
        {'y': [1, 0]}
    """
    mx.eval(arrays)
    found = {}
    for name, x in arrays.items():
        if 1 < x.ndim <= _MOST_AXES and x.size > 1:
            buffer: Any = x
            view = memoryview(buffer)
            strides = [stride // view.itemsize for stride in view.strides or ()]
            # The first permutation is the row-major order.
            orders = permutations(range(x.ndim))
            order = next((o for o in orders if _strides(x.shape, o) == strides), ())
            if [*order] != sorted(order):
                found[name] = [*order]
    return found


def arrange(x: mx.array, order: Sequence[int] | None) -> mx.array:
    """Return an equal array in another memory order.

    Example:
        >>> x = arrange(mx.array([[1, 2, 3], [4, 5, 6]]), [1, 0])
        >>> mx.eval(x)
        >>> memoryview(x).strides, x.tolist()
        ((4, 8), [[1, 2, 3], [4, 5, 6]])
    """
    if order is None:
        return x
    # as_strided does not check bounds, but strides of a permutation stay in bounds.
    if sorted(order) != [*range(x.ndim)]:
        raise ValueError(f"an array of shape {x.shape} has no such memory order.")
    flat = x.transpose(*order).reshape(-1)
    return mx.as_strided(flat, x.shape, _strides(x.shape, order))


def _strides(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return strides
