"""Walk, address, and temporarily change the containers of a checkpoint."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from ..files.text import dtype_name, list_some
from .old_checkpoint import Placeholder, TensorShape, plain_value

Path = tuple[Any, ...]

CONTAINERS = (dict, list, tuple)
_FOUND = (*CONTAINERS, mx.array, TensorShape, Placeholder)


class ConvertError(ValueError):
    """Raised if a run cannot be converted. The message says what to do."""


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor or the shape of one."""
    return isinstance(value, (mx.array, TensorShape))


def number(value: Any) -> Any:
    """Convert one-element arrays to numbers; apply ``plain_value`` to other values."""
    if isinstance(value, mx.array):
        return value.item() if value.size == 1 else value
    return plain_value(value)


def items(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of a dict, or the indices and items of a sequence."""
    return value.items() if isinstance(value, dict) else enumerate(value)


def walk(
    tree: Any, deepest: int = 6, seen: set[int] | None = None
) -> Iterator[tuple[Path, Any]]:
    """Yield the path and value of each container, tensor and placeholder.

    Containers come before their contents, and shared ones only once. Containers whose
    ``id`` the caller adds to ``seen`` are skipped.
    """
    seen = set() if seen is None else seen
    left: list[tuple[Path, Any]] = [((), tree)]
    while left:
        path, value = left.pop()
        if isinstance(value, CONTAINERS):
            if id(value) in seen:
                continue
            seen.add(id(value))
        yield path, value
        if isinstance(value, CONTAINERS) and len(path) < deepest:
            pairs = [((*path, k), x) for k, x in items(value) if isinstance(x, _FOUND)]
            left += reversed(pairs)


def get(tree: Any, path: Path) -> Any:
    """Return the value at a path."""
    for key in path:
        tree = tree[key]
    return tree


def show(path: Path) -> str:
    """Return a path as users write it: ``optimizer_states/0``."""
    return "/".join(str(key)[:80] for key in path)


def find_key(tree: Any, key: str) -> Path:
    """Return the path that a user wrote as ``KEY/KEY``, or raise if it is missing."""
    path: Path = ()
    for word in key.split("/"):
        is_list = isinstance(tree, (list, tuple))
        keys = [*range(len(tree))] if is_list else [*tree] * isinstance(tree, dict)
        names = {str(name): name for name in keys}
        if word not in names:
            raise ConvertError(
                f"{show(path) or 'The checkpoint'} has no key {word!r}. Its keys are "
                f"{list_some(keys) or 'none'}."
            )
        tree, path = tree[names[word]], (*path, names[word])
    return path


@contextmanager
def unchanged(tree: Any) -> Iterator[None]:
    """Undo all changes to the dicts and lists of a checkpoint on exit."""
    before = [
        (held, dict(held) if isinstance(held, dict) else list(held))
        for _, held in walk(tree, deepest=1000)
        if isinstance(held, (dict, list))
    ]
    try:
        yield
    finally:
        for held, items in before:
            held.clear()
            held.update(items) if isinstance(held, dict) else held.extend(items)


def match_type(value: Any, old: Any) -> Any:
    """Convert a new value to the type of the old tensor, tuple or number."""
    if is_tensor(old):
        dtype = getattr(mx, dtype_name(old), None)
        if not isinstance(value, mx.array):
            value = mx.array(value).reshape(old.shape)
        if isinstance(dtype, mx.Dtype) and dtype != value.dtype:
            stream = mx.cpu if dtype == mx.float64 else None
            value = value.astype(dtype, stream=stream)
        shape = old if isinstance(old, TensorShape) else TensorShape.of(old)
        return shape.fill(value)
    is_whole = type(old) is int and float(value).is_integer()
    is_kept = isinstance(old, (bool, float, tuple))
    return type(old)(value) if is_whole or is_kept else value
