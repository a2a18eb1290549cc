"""Finish what the pickle built: check its shape, and put arrays for tensors."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from .foreign import DefaultDict, PlacedTensor, Placeholder, TorchName, TorchSize
from .limits import CheckpointError, Limits
from .pickle_allowlist import Name
from .tensors import StorageRef, TensorRef

_TEXTS = frozenset({str, bytes, bytearray, TorchName})
_NUMBERS = frozenset({int, float, bool, type(None), complex})
_DICTS = frozenset({dict, OrderedDict, Counter, DefaultDict})
_SEQUENCES = frozenset({list, tuple, TorchSize})
_SETS = frozenset({set, frozenset})
# What a value counts in an object that is written out, besides its text, and what
# each byte of a pickle allows: an instruction that makes a value is one at least.
_VALUE = 64


def show_key(key: Any) -> str:
    """Return a key as it is shown in errors: short, on one line."""
    if type(key) in (str, bytes) and len(key) > 80:
        return f"[{key[:80]!a}...]"
    return f"[{key!a}]" if type(key) in (str, bytes, int, float, bool) else "[...]"


class TreeFinisher:
    """Walk an object once per container, however often it is shared.

    Args:
        make_array (callable): Reads the tensor of a ``TensorRef``.
        limits (Limits): How deep the object may be.
        shared (dict): What the object can hold more than once, by id. It keeps these
            alive, so that no other object can get the id while the walk lasts.
        written (int): How much the object may take with all that is shared written
            out wherever it is.
        is_check (bool): Whether ``make_array`` only checks, and nothing is changed.
    """

    def __init__(
        self,
        make_array: Callable[[TensorRef], Any],
        limits: Limits,
        shared: Mapping[int, Any],
        written: int,
        is_check: bool = False,
    ) -> None:
        self._make_array = make_array
        self._limits = limits
        self._shared = shared
        self._written = written
        self._done: dict[int, tuple[Any, int, int]] = {}
        self._open: set[int] = set()
        self._path: list[Any] = []
        self._is_check = is_check
        # Placeholders are finished after all else, so that a container that is also
        # outside of them gets plain arrays; and each once, as they may form rings.
        self._placeholders: dict[int, tuple[Placeholder, int, list[Any]]] = {}
        self._level = 0
        self._names: dict[str, Placeholder] = {}

    def finish(self, root: Any) -> Any:
        """Return the object with arrays; dicts and lists are filled in place."""
        root, _, size = self._visit(root)
        waiting = 0
        while waiting < len(self._placeholders):
            found = list(self._placeholders.values())[waiting:]
            waiting += len(found)
            for placeholder, self._level, self._path in found:
                size += self._finish_placeholder(placeholder)
                self._check_size(size)
        return root

    def _finish_placeholder(self, value: Placeholder) -> int:
        value.callee, _, size = self._visit(value.callee)
        value.args, _, more = self._visit(value.args)
        size += more
        if value.kwargs is not None:
            value.kwargs, _, more = self._visit(value.kwargs)
            size += more
        for _, held in value.steps:
            for i, item in enumerate(held):
                held[i], _, more = self._visit(item)
                size += more
        return size

    def _fail(self, text: str) -> CheckpointError:
        path = "".join(show_key(key) for key in self._path[:20])
        return CheckpointError(f"At object{path}: {text}")

    def _visit(self, value: Any) -> tuple[Any, int, int]:
        """Return the finished value, its height and what it takes when written out."""
        kind = type(value)
        if kind in _NUMBERS:
            return value, 0, _VALUE
        if kind in _TEXTS:
            return value, 0, _VALUE + len(value)
        if kind is Placeholder:
            return self._defer(value), 0, _VALUE + len(value.name)
        if kind is Name:
            return self._named(value), 0, _VALUE
        if id(value) in self._done:
            return self._done[id(value)]
        if kind is TensorRef:
            result = self._array(value), 0, _VALUE
        elif kind in _SETS:
            result = value, 0, _VALUE + sum(map(self._visit_key, value))
        else:
            result = self._visit_container(value)
        if id(value) in self._shared:
            self._done[id(value)] = result
        return result

    def _visit_container(self, value: Any) -> tuple[Any, int, int]:
        if type(value) not in _DICTS and type(value) not in _SEQUENCES:
            raise self._fail(_what_is(value))
        if id(value) in self._open:
            raise self._fail("the object contains itself, which is not supported.")
        if self._level + len(self._open) >= self._limits.depth:
            raise self._fail(f"containers are nested over {self._limits.depth} deep.")
        self._open.add(id(value))
        result = self._visit_items(value)
        self._open.discard(id(value))
        return result

    def _defer(self, value: Placeholder) -> Placeholder:
        if id(value) not in self._placeholders:
            level = self._level + len(self._open) + 1
            if level > self._limits.depth:
                raise self._fail(f"objects are nested over {self._limits.depth} deep.")
            self._placeholders[id(value)] = value, level, self._path[:20]
        return value

    def _named(self, name: Name) -> Any:
        """Return a class or function of the table that is only named."""
        if self._is_check:
            return name
        module, _, attribute = name.path.rpartition(".")
        module = "__builtin__" if module == "builtins" else module
        new = Placeholder.named(module, attribute)
        return self._names.setdefault(name.path, new)

    def _array(self, ref: TensorRef) -> Any:
        try:
            array = self._make_array(ref)
        except CheckpointError as error:
            raise self._fail(str(error)) from None
        if self._level and not self._is_check:
            return PlacedTensor(array, ref.requires_grad, ref.is_parameter)
        return array

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
                size += self._visit_key(key)
            self._check_size(size)
        if type(value) is DefaultDict:
            value.factory = self._visit(value.factory)[0]
        if type(value) is OrderedDict and hasattr(value, "_metadata"):
            self._path.append("_metadata")
            metadata, item_height, item_size = self._visit(value._metadata)
            self._path.pop()
            value._metadata = metadata
            height, size = max(height, item_height), size + item_size
            self._check_size(size)
        # A shared container was visited at another depth: its height tells.
        if self._level + len(self._open) + height > self._limits.depth:
            raise self._fail(f"containers are nested over {self._limits.depth} deep.")
        if changed and type(value) is tuple:
            value = tuple(changed.get(i, item) for i, item in enumerate(value))
        for key, item in changed.items() if type(value) is not tuple else ():
            value[key] = item
        return value, height + 1, size

    def _visit_key(self, key: Any) -> int:
        parts = key if type(key) in _SEQUENCES else (key,)
        for part in parts:
            if type(part) is Placeholder:
                self._defer(part)
        return _VALUE + sum(len(part) for part in parts if type(part) in _TEXTS)

    def _check_size(self, size: int) -> None:
        if size > self._written:
            raise self._fail(
                f"the object takes over {self._written} bytes when what is shared is "
                "written out; if the file is to be trusted, raise limits.shared_bytes."
            )


def written_limit(pickle_size: int, limits: Limits) -> int:
    """Return how much the object of such a pickle may take when it is written out."""
    return _VALUE * pickle_size + limits.shared_bytes


def _what_is(value: Any) -> str:
    if isinstance(value, StorageRef):
        return "a bare storage is stored; save the tensor instead."
    return f"a {type(value).__name__} is stored, which is not supported."
