"""Cast a model for the forward pass, and restore it afterwards."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from operator import is_not
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

from .finite import all_finite
from .intercept import get_handlers, watch
from .trees import Writes, commit, is_floating, leaves, walk

# The compute_dtype of the running forward pass. A float32 layer that sees only integers
# and its own float32 parameters, such as an embedding, casts its outputs to this dtype.
compute_dtype: ContextVar[mx.Dtype | None] = ContextVar("compute_dtype", default=None)


class Casting(NamedTuple):
    """The casts for a forward pass; none without ``compute_dtype``."""

    compute_dtype: mx.Dtype | None = None
    keep: Callable[[str, mx.array], bool] | None = None
    cast_inputs: bool = True

    def check(self) -> None:
        """Raise if ``compute_dtype`` is invalid, or is missing where it is required."""
        dtype = self.compute_dtype
        if dtype is None and (self.keep is not None or not self.cast_inputs):
            raise ValueError("keep= and cast_inputs=False require compute_dtype=.")
        is_dtype = isinstance(dtype, mx.Dtype) and mx.issubdtype(dtype, mx.floating)
        if dtype is not None and not is_dtype:
            raise ValueError(f"compute_dtype must be a float mx.Dtype, got {dtype!r}.")

    def cast_parameters(self, model: nn.Module, parameters: Any) -> Any:
        """Return the trainable parameters in the dtypes of the forward pass."""
        if self.compute_dtype is None:
            return parameters
        float32_prefixes: tuple[str, ...] = ()
        for path, module in model.named_modules():
            # float32_layers() marks the layers that compute in float32. The prefix of
            # the model itself is "", with which every path starts.
            if any(getattr(h, "computes_in_float32", 0) for h in get_handlers(module)):
                float32_prefixes += (f"{path}." if path else "",)

        def cast_parameter(path: str, x: mx.array) -> Any:
            is_kept = self.keep is not None and self.keep(path, x)
            return x if is_kept or path.startswith(float32_prefixes) else self.cast(x)

        return tree_map_with_path(cast_parameter, parameters)

    def cast(self, x: Any) -> Any:
        """Return a floating-point array in the compute dtype, and others unchanged."""
        is_real = isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.floating)
        is_cast = is_real and x.dtype != self.compute_dtype
        return x.astype(self.compute_dtype) if is_cast else x


class Entrance:
    """Handler that casts the arguments of calls that enter a model from outside.

    Calls inside such a call are left alone, so that a layer may pass float32 to the
    next. A module without arrays of the compute dtype gets its arguments as they are.
    """

    def __init__(self, casting: Casting):
        self._casting = casting
        self._is_inside = False
        # The ids of modules that were called from outside in the forward pass. In the
        # backward pass, mx.checkpoint calls inner modules from outside too, so only
        # these cast.
        self._entered: set[int] = set()
        self.is_backward = False

    def __call__(
        self, module: nn.Module, function: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call the function with cast arguments if the call enters the model."""
        if self._is_inside:
            return function(*args, **kwargs)
        if not self.is_backward:
            self._entered.add(id(module))
        dtypes = {getattr(x, "dtype", None) for _, x in walk(module)}
        if id(module) in self._entered and self._casting.compute_dtype in dtypes:
            args, kwargs = rebuild((args, kwargs), self._casting.cast)
        self._is_inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self._is_inside = False


@contextmanager
def forward_pass(
    models: list[nn.Module],
    casting: Casting,
    store: Callable[[mx.array], mx.array] = lambda new: new,
) -> Iterator[Callable[[Iterable[mx.array]], None]]:
    """Cast what enters the models, and afterwards restore what was put into them.

    Yields a function to call at the end of the forward pass, with the arrays that stand
    in for parameters. Buffers that became non-finite are restored, because BatchNorm's
    running statistics would otherwise stay inf or NaN. What the backward pass changes,
    where ``mx.checkpoint`` computes a layer again, is restored too. ``store`` maps each
    array that the forward pass has stored in a model.
    """
    places = _places(models)
    trained = {
        id(x) for x in leaves([model.trainable_parameters() for model in models])
    }
    entrance = Entrance(casting)
    is_cast = casting.compute_dtype is not None
    modules = [m for x in models for m in x.modules()] if is_cast else []
    restored = list(places.values())

    def end_forward(stand_ins: Iterable[mx.array]) -> None:
        nonlocal restored
        entrance.is_backward = True
        ids = set(map(id, stand_ins))
        restored = []
        for place, (container, key, new) in _places(models).items():
            old = places[place][2] if place in places else None
            if new is not old:
                if old is not None and id(old) in trained:
                    new = old if is_cast or id(new) in ids else store(new)
                else:
                    new = store(_finite_or_old(new, old))
            restored.append((container, key, new))
        commit(restored)

    token = compute_dtype.set(casting.compute_dtype)
    try:
        with watch((m, entrance) for m in modules if casting.cast_inputs):
            yield end_forward
    except BaseException:
        restored = list(places.values())
        raise
    finally:
        compute_dtype.reset(token)
        # The forward pass may have shortened a list.
        commit(x for x in restored if isinstance(x[0], dict) or x[1] < len(x[0]))


def _places(models: list[nn.Module]) -> dict[tuple[int, Any], tuple[Any, Any, Any]]:
    """Return (container, key, array), by the id of the container and the key."""
    places = [place for model in models for place in writable_arrays(model)]
    return {(id(container), key): (container, key, x) for container, key, x in places}


def _finite_or_old(new: mx.array, old: mx.array | None) -> mx.array:
    if old is None or old.shape != new.shape or not is_floating(new):
        return new
    return mx.where(all_finite([new]), new, old.astype(new.dtype))


def writable_arrays(tree: Any) -> Writes:
    """Return (container, key, array) for each array that is not in a tuple."""
    return [
        (container, key, x)
        for (_, container, key), x in walk(tree)
        if isinstance(x, mx.array) and not isinstance(container, tuple)
    ]


def rebuild(tree: Any, new: Callable[[mx.array], Any]) -> Any:
    """Return a tree with new arrays, in new containers; other objects stay the same."""
    if is_opaque(tree):
        return new(tree) if isinstance(tree, mx.array) else tree
    values = list(tree.values()) if isinstance(tree, dict) else tree
    items = [rebuild(x, new) for x in values]
    if not any(map(is_not, items, values)):
        return tree  # the function may write to a container without such arrays
    if isinstance(tree, dict):
        return type(tree)(zip(tree, items, strict=True))
    return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)


def is_opaque(x: Any) -> bool:
    """Return whether ``x``, such as a model or a cache, is a leaf of the arguments."""
    is_named_tuple = isinstance(x, tuple) and hasattr(x, "_fields")
    return type(x) not in (dict, OrderedDict, list, tuple) and not is_named_tuple
