"""Cast a layer's parameters and arguments to float32 for one call, and cast back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from ..core.forward import is_opaque, writable_arrays
from ..core.masters import HALF, to_float32
from ..core.trees import Writes, commit, leaves


@contextmanager
def upcast_parameters(module: nn.Module) -> Iterator[mx.Dtype | None]:
    """Upcast a module's half-precision arrays to float32 within a ``with`` block.

    Yields the dtype of the first half-precision array, or None if there is none.
    """
    trainable = {id(x) for x in leaves(module.trainable_parameters())}
    places = [place for place in writable_arrays(module) if place[2].dtype in HALF]
    # Keyed by id, so that a tied weight (one array in several places) is cast once.
    new = {id(old): old for _, _, old in places}
    parameters = [old for old in new.values() if id(old) in trainable]
    if parameters:
        restored = _restore_in_backward(parameters, places)
        new |= {id(x): y for x, y in zip(parameters, restored, strict=True)}
    new = {key: to_float32(x) for key, x in new.items()}
    commit([(container, key, new[id(old)]) for container, key, old in places])
    try:
        yield places[0][2].dtype if places else None
    finally:
        writes = []
        for container, key, old in places:
            now = container[key]
            # Keep buffers that the forward pass updated, such as a running mean.
            # Restore parameters, which only mx.checkpoint replaces.
            is_buffer = id(old) not in trainable and isinstance(now, mx.array)
            is_updated = is_buffer and now is not new[id(old)]
            writes.append(
                (container, key, now.astype(old.dtype) if is_updated else old)
            )
        commit(writes)


def _restore_in_backward(parameters: list[mx.array], places: Writes) -> list[mx.array]:
    """Pass parameters through an identity whose backward pass restores the module.

    A checkpointed layer runs again in the backward pass. Without this function, the
    second run would leave float32 parameters in the module.
    """

    def restore(_: Any, cotangents: Any, __: Any) -> Any:
        commit([p for p in places if p[0][p[1]].dtype != p[2].dtype])
        return cotangents

    identity: Any = mx.custom_function(lambda *parameters: parameters)
    identity.vjp(restore)
    return list(identity(*parameters))


def upcast(value: Any) -> Any:
    """Upcast an array, or the arrays in a tuple, from half precision to float32.

    Lists, dicts and caches are returned unchanged, because a module may write to them.
    """
    if isinstance(value, mx.array):
        return to_float32(value)
    if isinstance(value, tuple) and not is_opaque(value):
        return tree_map(upcast, value, is_leaf=lambda x: x is not value)
    return value


def downcast(dtype: mx.Dtype, outputs: Any) -> Any:
    """Cast the float32 arrays in a call's outputs to ``dtype``."""

    def cast(x: Any) -> Any:
        is_float32 = isinstance(x, mx.array) and x.dtype == mx.float32
        return x.astype(dtype) if is_float32 else x

    return tree_map(cast, outputs, is_leaf=is_opaque)
