"""Finish what the pickle built: check its shape, and put arrays for tensors."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .limits import CheckpointError, Limits
from .names import Name
from .tensors import StorageRef, TensorRef

_LEAVES = frozenset(
    {str, int, float, bool, type(None), bytes, bytearray, complex, set, frozenset}
)


def show_key(key: Any) -> str:
    """A key as it is shown in errors: short, on one line."""
    if type(key) in (str, bytes) and len(key) > 80:
        return f"[{key[:80]!a}...]"
    return f"[{key!a}]" if type(key) in (str, bytes, int, float, bool) else "[...]"


class TreeFinisher:
    """Walks an object once per container, however often it is shared.

    Args:
        make_array (callable): Reads the tensor of a ``TensorRef``.
        limits (Limits): How deep and how large the object may be.
    """

    def __init__(
        self, make_array: Callable[[TensorRef], mx.array], limits: Limits
    ) -> None:
        self._make_array = make_array
        self._limits = limits
        self._done: dict[int, tuple[Any, int, int]] = {}
        self._keep: list[Any] = []
        self._open: set[int] = set()
        self._path: list[Any] = []

    def finish(self, root: Any) -> Any:
        """The object with arrays; dicts and lists are filled in place."""
        return self._visit(root)[0]

    def _fail(self, text: str) -> CheckpointError:
        path = "".join(show_key(key) for key in self._path[:20])
        return CheckpointError(f"At object{path}: {text}")

    def _visit(self, value: Any) -> tuple[Any, int, int]:
        """The finished value, its height and its number of values."""
        kind = type(value)
        if kind in _LEAVES:
            return value, 0, 1
        if id(value) in self._done:
            return self._done[id(value)]
        # Kept, so that no other object can get the id while the walk lasts.
        self._keep.append(value)
        if kind is TensorRef:
            self._done[id(value)] = self._array(value), 0, 1
            return self._done[id(value)]
        if kind not in (dict, OrderedDict, Counter, list, tuple):
            raise self._fail(_what_is(value))
        if id(value) in self._open:
            raise self._fail("the object contains itself, which is not supported.")
        if len(self._open) >= self._limits.depth:
            raise self._fail(f"containers are nested over {self._limits.depth} deep.")
        self._open.add(id(value))
        result = self._visit_items(value)
        self._open.discard(id(value))
        self._done[id(value)] = result
        return result

    def _array(self, ref: TensorRef) -> mx.array:
        try:
            return self._make_array(ref)
        except CheckpointError as error:
            raise self._fail(str(error)) from None

    def _visit_items(self, value: Any) -> tuple[Any, int, int]:
        height, count = 0, 1
        finished = []
        is_sequence = isinstance(value, (list, tuple))
        items = list(enumerate(value) if is_sequence else value.items())
        if type(value) is OrderedDict and hasattr(value, "_metadata"):
            items.append(("_metadata", value._metadata))
        for key, item in items:
            self._path.append(key)
            item, item_height, item_count = self._visit(item)
            self._path.pop()
            finished.append(item)
            height, count = max(height, item_height), count + item_count
        # A shared container was visited at another depth: its height tells.
        if len(self._open) + height > self._limits.depth:
            raise self._fail(f"containers are nested over {self._limits.depth} deep.")
        if count > self._limits.nodes:
            raise self._fail(
                f"the object has over {self._limits.nodes} values when shared ones "
                "are written out."
            )
        if type(value) is OrderedDict and hasattr(value, "_metadata"):
            value._metadata = finished.pop()
        if type(value) is tuple:
            changed = any(a is not b for a, b in zip(value, finished, strict=True))
            return (tuple(finished) if changed else value), height + 1, count
        if type(value) is list:
            value[:] = finished
        else:
            for (key, _), item in zip(items, finished, strict=False):
                value[key] = item
        return value, height + 1, count


def _what_is(value: Any) -> str:
    if isinstance(value, Name):
        return f"{value.path} itself is stored, where a value was expected."
    if isinstance(value, StorageRef):
        return "a bare storage is stored; save the tensor instead."
    return f"a {type(value).__name__} is stored, which is not supported."
