"""Cast the parameters and arguments of one call to float32, and back afterwards."""

import copy
import dataclasses
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..core.masters import HALF
from ..core.trees import Writes, commit, leaves, slots

# A cache is an object in a list, or has a list of such objects.
_MAX_DEPTH = 4


@contextmanager
def upcast_parameters(module: nn.Module) -> Iterator[mx.Dtype | None]:
    """Hold all half-precision arrays of a module in float32 within a ``with`` block.

    Yields the first half-precision dtype found, or None.
    """
    trainable = {id(x) for x in leaves(module.trainable_parameters())}
    # A tuple cannot be written to; its arrays stay as they are.
    places = [
        (container, key, container[key])
        for _, container, key in slots(module)
        if container[key].dtype in HALF and not isinstance(container, tuple)
    ]
    # By id: a tied weight is one array in several places, and is cast once.
    new = {id(old): old for _, _, old in places}
    parameters = [old for old in new.values() if id(old) in trainable]
    if parameters:
        restored = _restore_in_backward(parameters, places)
        new |= {id(x): y for x, y in zip(parameters, restored, strict=True)}
    new = {key: x.astype(mx.float32) for key, x in new.items()}
    commit([(container, key, new[id(old)]) for container, key, old in places])
    try:
        yield places[0][2].dtype if places else None
    finally:
        writes = []
        for container, key, old in places:
            now = _get(container, key)
            # A forward pass may update buffers, such as BatchNorm's statistics. If it
            # replaced a parameter, that was mx.checkpoint, which updates the model.
            is_buffer = id(old) not in trainable and isinstance(now, mx.array)
            is_updated = is_buffer and now is not new[id(old)]
            value = now.astype(old.dtype) if is_updated else old
            writes.append((container, key, value))
        commit(writes)


def _restore_in_backward(parameters: list[mx.array], places: Writes) -> list[mx.array]:
    """Return the parameters; their gradients restore the module on their way out.

    A checkpointed layer runs again in the backward pass and leaves its float32
    parameters in the model, long after the forward pass has restored it.
    """

    @mx.custom_function
    def identity(*parameters: mx.array) -> tuple[mx.array, ...]:
        return parameters

    @identity.vjp
    def identity_vjp(_: Any, cotangents: Any, __: Any) -> Any:
        commit([p for p in places if p[0][p[1]].dtype != p[2].dtype])
        return cotangents

    outputs: Any = identity(*parameters)
    return list(outputs)


class ArgumentCast:
    """The arguments of one call, with half-precision arrays in float32.

    A module may write to the lists, dicts and caches that it receives, so these are
    not copied. Arrays in lists and dicts are replaced during the call; caches and other
    objects are left alone. Float32 arrays that the call stored in any of them are cast
    down by :meth:`downcast_stored`.

    Attributes:
        args (tuple): The positional arguments for the call.
        kwargs (dict): The keyword arguments for the call.
        dtype (Dtype or None): The first half-precision dtype among the arguments.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.dtype: mx.Dtype | None = None
        self._given = (args, dict(kwargs))
        self._before = {
            id(holder): (holder, dict(_items(holder)))
            for holder in _holders(self._given)
        }
        self._upcast_items: list[tuple[Any, Any, mx.array]] = []
        self.args, self.kwargs = self._upcast(self._given, set())

    def restore(self) -> None:
        """Put the original arrays back into lists and dicts."""
        for holder, key, new in self._upcast_items:
            if _get(holder, key) is new:
                holder[key] = self._before[id(holder)][1][key]

    def downcast_stored(self, dtype: mx.Dtype) -> None:
        """Cast float32 arrays that the call stored in its arguments."""
        for holder in list(_holders(self._given)):
            _, before = self._before.get(id(holder), (None, {}))
            for key, value in list(_items(holder)):
                new = _downcast_stored(value, before.get(key), dtype)
                if new is not value:
                    holder[key] = new

    def downcast(self, outputs: Any, dtype: mx.Dtype) -> Any:
        """Return the outputs of the call with float32 arrays in ``dtype``."""
        return _downcast(outputs, dtype, set(self._before))

    def _upcast(self, value: Any, seen: set[int]) -> Any:
        if isinstance(value, mx.array):
            if value.dtype not in HALF:
                return value
            self.dtype = self.dtype or value.dtype
            return value.astype(mx.float32)
        if isinstance(value, tuple):
            return _tuple_like(value, [self._upcast(x, seen) for x in value])
        if type(value) in (list, dict) and id(value) not in seen:
            seen.add(id(value))
            for key, item in list(_items(value)):
                new = self._upcast(item, seen)
                if new is not item:
                    value[key] = new
                    self._upcast_items.append((value, key, new))
        return value


def _downcast(x: Any, dtype: mx.Dtype, arguments: set[int]) -> Any:
    def downcast(value: Any) -> Any:
        return _downcast(value, dtype, arguments)

    if isinstance(x, mx.array):
        return x.astype(dtype) if x.dtype == mx.float32 else x
    if id(x) in arguments or isinstance(x, (nn.Module, type)):
        return x
    if isinstance(x, tuple):
        return _tuple_like(x, [downcast(value) for value in x])
    if type(x) is list:
        return [downcast(value) for value in x]
    if isinstance(x, dict):
        # copy.copy keeps the class and its attributes.
        result: Any = copy.copy(x)
        result.update({key: downcast(value) for key, value in x.items()})
        return result
    if dataclasses.is_dataclass(x):
        result = copy.copy(x)
        for field in dataclasses.fields(x):
            value = downcast(getattr(x, field.name))
            # A frozen dataclass refuses setattr.
            object.__setattr__(result, field.name, value)
        return result
    return x


def _downcast_stored(value: Any, before: Any, dtype: mx.Dtype) -> Any:
    if isinstance(value, mx.array):
        was_float32 = isinstance(before, mx.array) and before.dtype == mx.float32
        is_new = value.dtype == mx.float32 and not was_float32
        return value.astype(dtype) if is_new else value
    if isinstance(value, tuple) and value is not before:
        same = isinstance(before, tuple) and len(before) == len(value)
        others = before if same else [None] * len(value)
        pairs = zip(value, others, strict=True)
        return _tuple_like(value, [_downcast_stored(x, y, dtype) for x, y in pairs])
    return value


def _holders(x: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the lists and dicts in arguments, and the attributes of objects."""
    if isinstance(x, (mx.array, nn.Module, str, bytes, type, types.ModuleType)):
        return
    if type(x) not in (dict, list) and not isinstance(x, tuple):
        if callable(x) or not hasattr(x, "__dict__"):
            return
        x = vars(x)
    if not isinstance(x, tuple):
        yield x
    if depth < _MAX_DEPTH:
        for _, value in list(_items(x)):
            yield from _holders(value, depth + 1)


def _items(holder: Any) -> Any:
    return holder.items() if isinstance(holder, dict) else enumerate(holder)


def _get(holder: Any, key: Any) -> Any:
    if isinstance(holder, dict):
        return holder.get(key)
    return holder[key] if key < len(holder) else None


def _tuple_like(x: tuple[Any, ...], values: list[Any]) -> tuple[Any, ...]:
    return type(x)(*values) if hasattr(x, "_fields") else type(x)(values)
