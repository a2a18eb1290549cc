"""Make selected layers of a half-precision model compute in float32."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from ..core.forward import compute_dtype, is_opaque, writable_arrays
from ..core.intercept import get_handlers, set_handlers
from ..core.masters import HALF, to_float32
from ..core.trees import Writes, commit, leaves
from ..files.text import dtype_name
from .where import TO_THE_LOSS, is_inside, ordered_modules, resolve

# Whether the current code runs inside the call of a float32 layer.
_is_inside_layer: ContextVar[bool] = ContextVar("is_inside_layer", default=False)


@dataclass(eq=False)
class Float32Call:
    """Handler that makes a layer compute in float32.

    Attributes:
        casts_back (bool): Whether to cast outputs back to half precision.
        half (str): The dtype of the model's parameters, for a layer that sees no other
            dtype than float32. A name, because a ``Dtype`` cannot be copied.
    """

    casts_back: bool
    half: str
    computes_in_float32 = True

    def __call__(
        self, module: nn.Module, function: Any, /, *args: Any, **kw: Any
    ) -> Any:
        """Call the function in float32; inside another float32 layer, just call it."""
        if _is_inside_layer.get():
            return function(*args, **kw)
        token = _is_inside_layer.set(True)
        try:
            with _upcast_parameters(module) as parameter_dtype:
                named = {name: _upcast(x) for name, x in kw.items()}
                outputs = function(*_upcast(args), **named)
        finally:
            _is_inside_layer.reset(token)
        if not self.casts_back:
            return outputs
        given = (x for _, x in tree_flatten((args, kw), is_leaf=is_opaque))
        dtype = first_half(given) or parameter_dtype or compute_dtype.get()
        dtype = dtype or getattr(mx, self.half)

        def downcast(x: Any) -> Any:
            is_float32 = isinstance(x, mx.array) and x.dtype == mx.float32
            return x.astype(dtype) if is_float32 else x

        return tree_map(downcast, outputs, is_leaf=is_opaque)


def computes_in_float32(module: nn.Module) -> bool:
    """Return whether a module is a float32 layer."""
    return any(isinstance(handler, Float32Call) for handler in get_handlers(module))


def first_half(arrays: Iterable[Any]) -> mx.Dtype | None:
    """Return the dtype of the first half-precision array, or None."""
    dtypes = (x.dtype for x in arrays if isinstance(x, mx.array))
    return next((dtype for dtype in dtypes if dtype in HALF), None)


def float32_layers(model: nn.Module, where: Any) -> list[str]:
    """Make selected layers of a half-precision model compute in float32.

    These layers cast their arguments and parameters to float32 for the duration of each
    call, and cast their outputs back. Parameters keep their names and dtypes, so
    saving, loading, freezing, copying, pickling and gradient checkpointing work as
    before. In a float32 model, this has an effect only with ``compute_dtype``: the
    parameters of these layers then stay in float32.

    Each call replaces the earlier selection, and ``float32_layers(model, [])`` undoes
    it. Only the running statistics of a selected BatchNorm become float32, and stay so.
    After a call, compile the step again. If you replace layers later, with
    ``nn.quantize`` or LoRA for example, call this function again.

    If a value too large for float16 passes from layer to layer, as in a residual
    stream, name the first and the last layer of a chain: ``"layers.3 to norm"`` selects
    these two and every layer that the model defines between them. They pass float32 to
    each other, and only the last one casts back. ``"head to the loss"`` does not cast
    back at all, so that the loss is computed in float32.

    The class of each layer is replaced with a subclass. Only calls, and ``as_linear``
    of a tied embedding, run in float32; other methods run in half precision. Arrays in
    lists, dicts and caches are not cast, because a layer may write to these containers.

    Args:
        model (nn.Module): The model. It is modified in place.
        where (str, list, Callable or Path): A path such as ``"layers.3.mlp"``, a glob
            such as ``"*.mlp"``, a chain as above, or a list of these; a function that
            receives a path and a module and returns whether to select the module; the
            result of :func:`find_float32_layers`; or a ``.json`` file that contains
            this result.

    Returns:
        list: The paths of the selected modules.

    Raises:
        ValueError: If an entry matches no module, or a module without ``__call__``, or
            if the search found that no layers help. The model is unchanged.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn
        >>> from mlx_gradscale import float32_layers
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> model.set_dtype(mx.float16)
        >>> model.layers[0].weight *= 30000
        >>> model.layers[1].weight *= 0
        >>> x = mx.full((1, 2), 1000, mx.float16)
        >>> mx.isfinite(model(x)).all().item()
        False
        >>> float32_layers(model, "layers.0 to layers.1")
        ['layers.0', 'layers.1']
        >>> mx.isfinite(model(x)).all().item(), model(x).dtype
        (True, mlx.core.float16)
    """
    chains = resolve(model, where)
    modules = dict(ordered_modules(model))
    paths = list(dict.fromkeys(path for chain in chains.values() for path in chain))
    # Modules are compared by id, because one module may have several paths. The last
    # layer of a chain may pass float32 on in another chain.
    selected = {id(modules[path]) for path in paths}
    half = dtype_name(first_half(leaves(model.parameters())) or mx.float32)
    passing = {
        id(modules[path])
        for entry, chain in chains.items()
        for path in chain[: None if entry.endswith(TO_THE_LOSS) else -1]
    }
    for path, module in modules.items():
        handlers = [h for h in get_handlers(module) if not isinstance(h, Float32Call)]
        if id(module) in selected:
            # Innermost, so that handlers that measure see half precision.
            handlers.insert(0, Float32Call(id(module) not in passing, half))
        set_handlers(module, tuple(handlers))
        if isinstance(module, nn.BatchNorm) and is_inside(path, *paths):
            for name in {"running_mean", "running_var"} & module.keys():
                module[name] = to_float32(module[name])
    return paths


def _upcast(argument: Any) -> Any:
    """Upcast an array, or the arrays in a tuple, from half precision to float32.

    Lists, dicts and caches stay as they are, because a module may write to them.
    """
    return tree_map(
        lambda x: to_float32(x) if isinstance(x, mx.array) else x,
        argument,
        is_leaf=lambda x: not isinstance(x, tuple) or is_opaque(x),
    )


@contextmanager
def _upcast_parameters(module: nn.Module) -> Iterator[mx.Dtype | None]:
    """Upcast a module's half-precision arrays to float32 within a ``with`` block.

    Yields the dtype of the first half-precision array, or None if there is none.
    """
    trainable = {id(x) for x in leaves(module.trainable_parameters())}
    places = [place for place in writable_arrays(module) if place[2].dtype in HALF]
    # By id, so that a tied weight (one array in several places) is cast once.
    halves = {id(old): old for _, _, old in places}
    weights = [old for key, old in halves.items() if key in trainable]
    if weights:
        restored = _restore_in_backward(weights, places)
        halves |= {id(x): y for x, y in zip(weights, restored, strict=True)}
    upcast = {key: to_float32(x) for key, x in halves.items()}
    commit([(container, key, upcast[id(old)]) for container, key, old in places])
    try:
        yield places[0][2].dtype if places else None
    finally:
        writes = []
        for container, key, old in places:
            now = container[key]
            # Keep buffers that the forward pass updated, such as a running mean.
            # Restore weights, which only mx.checkpoint replaces.
            is_buffer = id(old) not in trainable and isinstance(now, mx.array)
            is_updated = is_buffer and now is not upcast[id(old)]
            kept = now.astype(old.dtype) if is_updated else old
            writes.append((container, key, kept))
        commit(writes)


def _restore_in_backward(weights: list[mx.array], places: Writes) -> list[mx.array]:
    """Pass weights through an identity whose backward pass restores the module.

    A checkpointed layer runs again in the backward pass. Without this function, the
    second run would leave float32 weights in the module.
    """

    def restore(_: Any, cotangents: Any, __: Any) -> Any:
        commit([p for p in places if p[0][p[1]].dtype != p[2].dtype])
        return cotangents

    identity: Any = mx.custom_function(lambda *weights: weights)
    identity.vjp(restore)
    return list(identity(*weights))
