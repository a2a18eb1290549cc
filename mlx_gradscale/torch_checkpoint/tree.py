"""Finish what the pickle built: check its shape, and put arrays for tensors."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from .limits import CheckpointError, Limits
from .names import Name
from .tensors import StorageRef, TensorRef

_TEXTS = frozenset({str, bytes, bytearray})
_NUMBERS = frozenset({int, float, bool, type(None), complex})
_DICTS = frozenset({dict, OrderedDict, Counter})
_SETS = frozenset({set, frozenset})
# What a value counts in an object that is written out, besides its text, and what
# each byte of a pickle allows: an instruction that makes a value is one at least.
_VALUE = 64


def show_key(key: Any) -> str:
    """A key as it is shown in errors: short, on one line."""
    if type(key) in (str, bytes) and len(key) > 80:
        return f"[{key[:80]!a}...]"
    return f"[{key!a}]" if type(key) in (str, bytes, int, float, bool) else "[...]"


class TreeFinisher:
    """Walks an object once per container, however often it is shared.

    Args:
        make_array (callable): Reads the tensor of a ``TensorRef``.
        limits (Limits): How deep the object may be.
        shared (dict): What the object can hold more than once, by id. It keeps these
            alive, so that no other object can get the id while the walk lasts.
        written (int): How much the object may take with all that is shared written
            out wherever it is.
    """

    def __init__(
        self,
        make_array: Callable[[TensorRef], mx.array],
        limits: Limits,
        shared: Mapping[int, Any],
        written: int,
    ) -> None:
        self._make_array = make_array
        self._limits = limits
        self._shared = shared
        self._written = written
        self._done: dict[int, tuple[Any, int, int]] = {}
        self._open: set[int] = set()
        self._path: list[Any] = []

    def finish(self, root: Any) -> Any:
        """The object with arrays; dicts and lists are filled in place."""
        return self._visit(root)[0]

    def _fail(self, text: str) -> CheckpointError:
        path = "".join(show_key(key) for key in self._path[:20])
        return CheckpointError(f"At object{path}: {text}")

    def _visit(self, value: Any) -> tuple[Any, int, int]:
        """The finished value, its height and what it takes when written out."""
        kind = type(value)
        if kind in _NUMBERS:
            return value, 0, _VALUE
        if kind in _TEXTS:
            return value, 0, _VALUE + len(value)
        if id(value) in self._done:
            return self._done[id(value)]
        if kind is TensorRef:
            result = self._array(value), 0, _VALUE
        elif kind in _SETS:
            result = value, 0, _VALUE + sum(map(_key_size, value))
        else:
            result = self._visit_container(value)
        if id(value) in self._shared:
            self._done[id(value)] = result
        return result

    def _visit_container(self, value: Any) -> tuple[Any, int, int]:
        if type(value) not in _DICTS and type(value) not in (list, tuple):
            raise self._fail(_what_is(value))
        if id(value) in self._open:
            raise self._fail("the object contains itself, which is not supported.")
        if len(self._open) >= self._limits.depth:
            raise self._fail(f"containers are nested over {self._limits.depth} deep.")
        self._open.add(id(value))
        result = self._visit_items(value)
        self._open.discard(id(value))
        return result

    def _array(self, ref: TensorRef) -> mx.array:
        try:
            return self._make_array(ref)
        except CheckpointError as error:
            raise self._fail(str(error)) from None

    def _visit_items(self, value: Any) -> tuple[Any, int, int]:
        height, size = 0, _VALUE
        # Only what changes is kept beside the container: it may be a long one.
        changed: dict[Any, Any] = {}
        is_dict = type(value) in _DICTS
        for key, item in value.items() if is_dict else enumerate(value):
            self._path.append(key)
            finished, item_height, item_size = self._visit(item)
            self._path.pop()
            if finished is not item:
                changed[key] = finished
            height, size = max(height, item_height), size + item_size
            if is_dict:
                size += _key_size(key)
            self._check_size(size)
        if type(value) is OrderedDict and hasattr(value, "_metadata"):
            self._path.append("_metadata")
            metadata, item_height, item_size = self._visit(value._metadata)
            self._path.pop()
            value._metadata = metadata
            height, size = max(height, item_height), size + item_size
            self._check_size(size)
        # A shared container was visited at another depth: its height tells.
        if len(self._open) + height > self._limits.depth:
            raise self._fail(f"containers are nested over {self._limits.depth} deep.")
        if changed and type(value) is tuple:
            value = tuple(changed.get(i, item) for i, item in enumerate(value))
        for key, item in changed.items() if type(value) is not tuple else ():
            value[key] = item
        return value, height + 1, size

    def _check_size(self, size: int) -> None:
        if size > self._written:
            raise self._fail(
                f"the object takes over {self._written} bytes when what is shared is "
                "written out; if the file is to be trusted, raise limits.shared_bytes."
            )


def written_limit(pickle_size: int, limits: Limits) -> int:
    """How much the object of such a pickle may take when it is written out."""
    return _VALUE * pickle_size + limits.shared_bytes


def _key_size(key: Any) -> int:
    parts = key if type(key) is tuple else (key,)
    return _VALUE + sum(len(part) for part in parts if type(part) in _TEXTS)


def _what_is(value: Any) -> str:
    if isinstance(value, Name):
        return f"{value.path} itself is stored, where a value was expected."
    if isinstance(value, StorageRef):
        return "a bare storage is stored; save the tensor instead."
    return f"a {type(value).__name__} is stored, which is not supported."
