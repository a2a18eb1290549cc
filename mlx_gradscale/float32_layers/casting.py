"""Cast the parameters and arguments of a call to float32, and cast back afterwards."""

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from ..core.gradients import is_opaque
from ..core.masters import HALF
from ..core.trees import Writes, commit, items, leaves, slots


@contextmanager
def upcast_parameters(module: nn.Module) -> Iterator[mx.Dtype | None]:
    """Upcast all half-precision arrays of a module to float32 in a ``with`` block.

    Yields the first half-precision dtype found, or None.
    """
    trainable = {id(x) for x in leaves(module.trainable_parameters())}
    # A tuple is immutable, so its arrays are not cast.
    places = [
        (container, key, container[key])
        for _, container, key in slots(module)
        if container[key].dtype in HALF and not isinstance(container, tuple)
    ]
    # Keyed by id: a tied weight is one array in several places and is cast once.
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
            now = container[key]
            # A forward pass may update buffers, such as a running mean. Only
            # mx.checkpoint, which updates the model, replaces a parameter.
            is_buffer = id(old) not in trainable and isinstance(now, mx.array)
            is_updated = is_buffer and now is not new[id(old)]
            writes.append(
                (container, key, now.astype(old.dtype) if is_updated else old)
            )
        commit(writes)


def _restore_in_backward(parameters: list[mx.array], places: Writes) -> list[mx.array]:
    """Return the parameters; computing their gradients restores the module.

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
    """The arguments of one call, with half-precision arrays upcast to float32.

    A module may write to the lists, dicts and caches that it receives, so they are not
    copied: arrays in lists and dicts are replaced during the call, and other objects
    are left unchanged. Arrays that the call stores in any of them stay float32.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        # The first half-precision dtype among the arguments.
        self.dtype: mx.Dtype | None = None
        self._replaced: list[tuple[Any, Any, Any, Any]] = []
        self.args, self.kwargs = self._upcast(args), self._upcast(kwargs)

    def _upcast(self, value: Any) -> Any:
        if isinstance(value, mx.array) and value.dtype in HALF:
            self.dtype = self.dtype or value.dtype
            return value.astype(mx.float32)
        if isinstance(value, tuple) and not is_opaque(value):
            # Map over this tuple only: a list inside it must not be copied.
            return tree_map(self._upcast, value, is_leaf=lambda x: x is not value)
        if type(value) in (list, dict):
            for key, old in list(items(value)):
                new = self._upcast(old)
                if new is not old:
                    value[key] = new
                    self._replaced.append((value, key, old, new))
        return value

    def restore(self) -> None:
        """Restore the original arrays in lists and dicts."""
        for holder, key, old, new in self._replaced:
            if any(k == key and x is new for k, x in items(holder)):
                holder[key] = old


def downcast(outputs: Any, dtype: mx.Dtype) -> Any:
    """Downcast the float32 arrays among the outputs of a call to ``dtype``."""
    return tree_map(partial(_downcast_leaf, dtype), outputs, is_leaf=is_opaque)


def _downcast_leaf(dtype: mx.Dtype, x: Any) -> Any:
    if isinstance(x, mx.array):
        return x.astype(dtype) if x.dtype == mx.float32 else x
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        result: Any = copy.copy(x)
        for field in dataclasses.fields(x):
            value = downcast(getattr(x, field.name), dtype)
            # A frozen dataclass does not allow setattr.
            object.__setattr__(result, field.name, value)
        return result
    return x
