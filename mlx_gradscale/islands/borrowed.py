"""Arrays of modules and arguments, in float32 for a while and then given back."""

import copy
import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..masters import HALF

# A cache is an object in a list, or has a list of such.
_DEEPEST = 4


class Changes:
    """Half arrays that were replaced in modules, dicts and lists, to be put back.

    Attributes:
        dtype (Dtype or None): Of the first half array that was met.
    """

    def __init__(self, cast: Callable[[mx.array], Any]):
        self.dtype: mx.Dtype | None = None
        self._cast = cast
        self._seen: set[int] = set()
        # Where, what was there, what was put there, whether a new value counts.
        self._done: list[tuple[Any, Any, Any, Any, bool]] = []

    def raise_module(self, module: nn.Module, deep: bool) -> None:
        """Raise what a module holds, with or without the modules in it."""
        self._raise_items(module, deep, lambda key: key in module._no_grad)

    def raised(self, value: Any) -> Any:
        """Return arguments with half arrays in float32; dicts and lists stay."""
        return self._raised(value, (dict, list), True, lambda _: True)

    def undo(self) -> None:
        """Put everything back, but what a forward pass has replaced on purpose."""
        for holder, key, old, new, keeps in reversed(self._done):
            now = _get(holder, key)
            if now is new or (now is not None and not keeps):
                _put(holder, key, old)
            elif isinstance(now, mx.array) and isinstance(old, mx.array):
                # Running statistics, as nn.BatchNorm's.
                _put(holder, key, now.astype(old.dtype))
        self._done.clear()

    def _raise_items(
        self, holder: Any, deep: bool, is_buffer: Callable[[str], bool]
    ) -> None:
        if id(holder) in self._seen:
            return
        self._seen.add(id(holder))
        for key, value in list(_items(holder)):
            if isinstance(value, nn.Module):
                if deep:
                    self.raise_module(value, deep)
                continue
            keeps = is_buffer(str(key)) or str(key).startswith("_")

            def of_item(inner: str, key: Any = key) -> bool:
                return is_buffer(f"{key}.{inner}")

            new = self._raised(value, (dict, list), deep, of_item)
            if new is not value:
                _put(holder, key, new)
                self._done.append((holder, key, value, new, keeps))

    def _raised(
        self,
        value: Any,
        kinds: tuple[Any, ...],
        deep: bool,
        is_buffer: Callable[[str], bool],
    ) -> Any:
        if isinstance(value, mx.array):
            if value.dtype not in HALF:
                return value
            self.dtype = self.dtype or value.dtype
            return self._cast(value)
        if type(value) in kinds:
            self._raise_items(value, deep, is_buffer)
        elif isinstance(value, tuple):
            new = [self._raised(x, kinds, deep, is_buffer) for x in value]
            if any(a is not b for a, b in zip(new, value, strict=True)):
                return _tuple_like(value, new)
        return value


class Borrowed:
    """The arguments of a call: lists, dicts and caches keep identity and dtypes.

    A module may write into what it is given. So nothing is copied: arrays in dicts
    and lists are replaced for the while, caches and other objects left alone; and
    what is new in any of them afterwards is lowered as the outputs are.
    """

    def __init__(self, arguments: tuple[tuple[Any, ...], dict[Any, Any]]):
        self._arguments = arguments
        self._before = {
            (id(holder), key): _dtypes(value)
            for holder in _holders(arguments)
            for key, value in _items(holder)
        }
        self._kept = list(_holders(arguments))
        self._changes: Changes | None = None

    @property
    def dtype(self) -> mx.Dtype | None:
        """The first half dtype among the arguments."""
        return self._changes.dtype if self._changes else None

    def raised(
        self, cast: Callable[[mx.array], mx.array]
    ) -> tuple[tuple[Any, ...], dict[Any, Any]]:
        """Return the arguments with half arrays in float32."""
        self._changes = Changes(cast)
        args, kwargs = self._arguments
        # The dict of keywords is the call's own.
        raised: tuple[tuple[Any, ...], dict[Any, Any]]
        raised = self._changes.raised((args, dict(kwargs)))
        return raised

    def give_back(self) -> None:
        """Put the arrays back into dicts and lists."""
        if self._changes:
            self._changes.undo()

    def lower_what_is_new(self, dtype: mx.Dtype) -> None:
        """Cast float32 arrays that were not there, or half, before the call."""
        for holder in list(_holders(self._arguments)):
            for key, value in list(_items(holder)):
                before = self._before.get((id(holder), key), [])
                new = _lowered_new(value, iter(before), dtype)
                if new is not value:
                    _put(holder, key, new)

    def lowered(self, outputs: Any, dtype: mx.Dtype) -> Any:
        """Return outputs in half precision; what was an argument is left alone."""
        return _lowered(outputs, dtype, {id(holder) for holder in self._kept})


def _lowered(x: Any, dtype: mx.Dtype, done: set[int]) -> Any:
    if isinstance(x, mx.array):
        return x.astype(dtype) if x.dtype == mx.float32 else x
    if id(x) in done or isinstance(x, (str, nn.Module, type)):
        return x

    def lower(value: Any) -> Any:
        return _lowered(value, dtype, done)

    if isinstance(x, tuple):
        return _tuple_like(x, [lower(value) for value in x])
    if isinstance(x, dict):
        # Of the same class, with whatever else it has.
        lowered: Any = copy.copy(x)
        lowered.update({key: lower(value) for key, value in x.items()})
        return lowered
    if type(x) is list:
        return [lower(value) for value in x]
    if dataclasses.is_dataclass(x):
        lowered = copy.copy(x)
        for each in dataclasses.fields(x):
            object.__setattr__(lowered, each.name, lower(getattr(x, each.name)))
        return lowered
    return x


def _lowered_new(value: Any, before: Iterator[Any], dtype: mx.Dtype) -> Any:
    if isinstance(value, mx.array):
        was = next(before, None)
        new = was is None or was in HALF
        return value.astype(dtype) if new and value.dtype == mx.float32 else value
    if isinstance(value, tuple):
        parts = [_lowered_new(x, before, dtype) for x in value]
        if any(a is not b for a, b in zip(parts, value, strict=True)):
            return _tuple_like(value, parts)
    return value


def _dtypes(value: Any) -> list[mx.Dtype]:
    if isinstance(value, mx.array):
        return [value.dtype]
    if isinstance(value, tuple):
        return [dtype for x in value for dtype in _dtypes(x)]
    return []


def _holders(x: Any, seen: set[int] | None = None, depth: int = 0) -> Iterator[Any]:
    """Yield every dict and list in arguments, and the attributes of objects."""
    seen = set() if seen is None else seen
    if isinstance(x, (mx.array, nn.Module, str, bytes, type, types.ModuleType)):
        return
    if isinstance(x, tuple):
        inner: Iterable[Any] = x
    elif type(x) in (dict, list):
        inner = x.values() if type(x) is dict else x
    elif hasattr(x, "__dict__") and not callable(x):
        x = vars(x)
        inner = x.values()
    else:
        return
    if id(x) in seen or depth > _DEEPEST:
        return
    seen.add(id(x))
    if not isinstance(x, tuple):
        yield x
    for value in list(inner):
        yield from _holders(value, seen, depth + 1)


def _items(holder: Any) -> Any:
    return holder.items() if isinstance(holder, dict) else enumerate(holder)


def _get(holder: Any, key: Any) -> Any:
    if isinstance(holder, dict):
        return holder.get(key)
    return holder[key] if key < len(holder) else None


def _put(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, dict):
        dict.__setitem__(holder, key, value)
    else:
        holder[key] = value


def _tuple_like(x: tuple[Any, ...], values: list[Any]) -> tuple[Any, ...]:
    return type(x)(*values) if hasattr(x, "_fields") else type(x)(values)
