"""The containers of a checkpoint: walk them, address them, fill them for a moment."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx

from ..files import text
from ..torch_checkpoint import Placeholder, TensorShape, plain_value

Path = tuple[Any, ...]

# As the value of a Write: take the key out.
REMOVED = object()
_CONTAINERS = (dict, list, tuple)
_FOUND = (*_CONTAINERS, mx.array, TensorShape, Placeholder)


class ConvertError(ValueError):
    """A checkpoint that cannot be converted as it is; the message says what to do."""


class Unordered(dict[Any, Any]):
    """A state dict from a file that does not keep the model's order (safetensors)."""


class Write(NamedTuple):
    """A value to put at a key of a dict or an index of a list."""

    container: Any
    key: Any
    value: Any


def is_tensor(value: Any) -> bool:
    """Tell whether a value is a tensor, or the shape of one that is elsewhere."""
    return isinstance(value, (mx.array, TensorShape))


def number(value: Any) -> Any:
    """Return a Python number from a number, a one-element array or a numpy scalar.

    Example:
        >>> number(mx.array([2.5])), number(3)
        (2.5, 3)
    """
    if isinstance(value, mx.array):
        return value.item() if value.size == 1 else value
    return plain_value(value)


def walk(tree: Any, deepest: int = 6) -> Iterator[tuple[Path, Any]]:
    """Yield the path and value of each container, tensor and placeholder.

    Containers come before their contents, and only once if they are shared.

    Example:
        >>> [path for path, _ in walk({"a": [{}, 3], "b": mx.zeros(2)})]
        [(), ('a',), ('a', 0), ('b',)]
    """
    seen: set[int] = set()
    left: list[tuple[Path, Any]] = [((), tree)]
    while left:
        path, value = left.pop()
        if isinstance(value, _CONTAINERS):
            if id(value) in seen:
                continue
            seen.add(id(value))
        yield path, value
        if isinstance(value, _CONTAINERS) and len(path) < deepest:
            inner: Iterable[tuple[Any, Any]] = enumerate(value)
            if isinstance(value, dict):
                inner = value.items()
            found = [((*path, k), x) for k, x in inner if isinstance(x, _FOUND)]
            left += reversed(found)


def get(tree: Any, path: Path) -> Any:
    """Return the value at a path.

    Example:
        >>> get({"optimizers": [{"lr": 1}]}, ("optimizers", 0, "lr"))
        1
    """
    for key in path:
        tree = tree[key]
    return tree


def show(path: Path) -> str:
    """Return a path as users write it: ``optimizer_states/0``."""
    return "/".join(str(key)[:80] for key in path)


def find_key(tree: Any, key: str) -> Path:
    """Return the path that a user's ``KEY/KEY`` means.

    A key may itself hold slashes, as a file in a subfolder does.

    Example:
        >>> find_key({"states": [{"a/b": 1}]}, "states/0/a/b")
        ('states', 0, 'a/b')
    """
    path: Path = ()
    words = key.split("/")
    while words:
        for count in range(len(words), 0, -1):
            word: str | int = "/".join(words[:count])
            if isinstance(tree, (list, tuple)) and words[0].isdigit():
                word, count = int(words[0][:9]), 1
            if _has(tree, word):
                tree, path, words = tree[word], (*path, word), words[count:]
                break
        else:
            there = list_some(tree) if isinstance(tree, Mapping) else "no keys"
            raise ConvertError(
                f"The checkpoint has no {'/'.join(words)!r} in {show(path) or 'it'}, "
                f"which has {there}."
            )
    return path


def _has(tree: Any, key: str | int) -> bool:
    if isinstance(tree, Mapping):
        return key in tree
    is_list = isinstance(tree, (list, tuple))
    return is_list and isinstance(key, int) and key < len(tree)


def list_some(names: Iterable[Any], count: int = 6) -> str:
    """Return names for a sentence, the first few of many.

    Example:
        >>> list_some("abc", 2)
        'a, b and 1 more'
    """
    # Cut first: a hostile name may have millions of characters.
    return text.list_some([str(name)[:100] for name in names], count)


@contextmanager
def filled(writes: Iterable[Write]) -> Iterator[None]:
    """Put values into containers, and take them out again at the end.

    Example:
        >>> tree = {"a": 1}
        >>> with filled([Write(tree, "a", 2), Write(tree, "b", 3)]):
        ...     print(tree)
        {'a': 2, 'b': 3}
        >>> tree
        {'a': 1}
    """
    touched: dict[int, tuple[Any, list[Any]]] = {}
    try:
        for container, key, value in writes:
            if id(container) not in touched:
                is_dict = isinstance(container, dict)
                before = list(container.items()) if is_dict else list(container)
                touched[id(container)] = container, before
            if value is REMOVED:
                del container[key]
            else:
                container[key] = value
        yield
    finally:
        for container, before in touched.values():
            container.clear()
            if isinstance(container, dict):
                for key, value in before:
                    container[key] = value
            else:
                container.extend(before)


def as_leaf(array: mx.array, leaf: Any) -> mx.array:
    """Return an array in a leaf's dtype, and as a Parameter if that was one."""
    if not is_tensor(leaf):
        return array
    name = str(leaf.dtype).rpartition(".")[2]
    dtype = getattr(mx, name, None)
    if isinstance(dtype, mx.Dtype) and name != "float64" and array.dtype != dtype:
        array = array.astype(dtype)
    shape = leaf if isinstance(leaf, TensorShape) else TensorShape.of(leaf)
    return shape.fill(array)
