"""Cast a model for the forward pass, and restore it afterwards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import is_not
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map, tree_map_with_path

from .finite import all_finite
from .trees import Writes, commit, is_floating, leaves, walk


class Casting(NamedTuple):
    """The casts that ``value_and_grad`` applies for the forward pass."""

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
        float32: tuple[str, ...] = ()
        for path, module in model.named_modules():
            # float32_layers() marks the layers that compute in float32.
            if getattr(module, "computes_in_float32", False):
                float32 += (f"{path}." if path else "",)

        def cast_parameter(path: str, x: mx.array) -> Any:
            is_kept = self.keep is not None and self.keep(path, x)
            return x if is_kept or path.startswith(float32) else self.cast(x)

        return tree_map_with_path(cast_parameter, parameters)

    def cast(self, x: Any) -> Any:
        """Return a floating-point array in the compute dtype, and others unchanged."""
        is_floating = isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.floating)
        is_cast = is_floating and x.dtype != self.compute_dtype
        return x.astype(self.compute_dtype) if is_cast else x

    def cast_argument(self, x: Any) -> Any:
        """Cast an array, or those in a plain container.

        A container without arrays to cast is returned as is: a module may write to it.
        """
        if isinstance(x, mx.array):
            return self.cast(x)
        new = tree_map(self.cast, x, is_leaf=is_opaque)
        return new if any(map(is_not, leaves(new), leaves(x))) else x


class Entrance:
    """Casts the arguments of calls that enter a model from outside.

    While a loss is computed, each module has a subclass of its class, whose calls cast
    their arguments if the module has arrays of the compute dtype. Inside such a call,
    all modules have their own classes, so that a layer may pass float32 to the next.
    """

    def __init__(self, casting: Casting):
        self._casting = casting
        # Each class and its subclass, by id: those of float32_layers() compare equal.
        self._classes: dict[int, tuple[type, type]] = {}
        # Each module, its class and its subclass, while a loss is computed.
        self._modules: list[tuple[nn.Module, type, type]] = []
        # The ids of modules called from outside. In the backward pass, where
        # mx.checkpoint calls inner modules from outside too, only these cast.
        self._entered: set[int] = set()
        self.is_backward = False

    @contextmanager
    def open(self, model: nn.Module) -> Iterator[None]:
        """Intercept calls of the model's modules within a ``with`` block."""
        modules = []
        for module in model.modules():
            cls = type(module)
            if id(cls) not in self._classes:
                self._classes[id(cls)] = cls, self._make_subclass(cls, module)
            modules.append((module, *self._classes[id(cls)]))
        # The loss may compute gradients of the same function.
        outer = self._modules, self._entered, self.is_backward
        self._modules, self._entered, self.is_backward = modules, set(), False
        try:
            self._set_classes(intercepted=True)
            yield
        finally:
            self._set_classes(intercepted=False)
            self._modules, self._entered, self.is_backward = outer

    def _set_classes(self, intercepted: bool) -> None:
        for module, own, subclass in self._modules:
            object.__setattr__(module, "__class__", subclass if intercepted else own)

    def _make_subclass(self, cls: Any, module: nn.Module) -> Any:
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            function = super(subclass, module).__call__  # type: ignore[misc]
            if not self.is_backward:
                self._entered.add(id(module))
            is_entered = id(module) in self._entered
            self._set_classes(intercepted=False)
            try:
                dtypes = {getattr(x, "dtype", None) for _, x in walk(module)}
                if is_entered and self._casting.compute_dtype in dtypes:
                    cast = self._casting.cast_argument
                    args = tuple(map(cast, args))
                    kwargs = dict(zip(kwargs, map(cast, kwargs.values()), strict=True))
                return function(*args, **kwargs)
            finally:
                self._set_classes(intercepted=True)

        body = {"__call__": call, "__module__": cls.__module__}
        bases = (cls,) if issubclass(cls, _Hidden) else (_Hidden, cls)
        try:
            # type.__new__ skips what a metaclass does with a new class.
            subclass: Any = type.__new__(type(cls), cls.__name__, bases, body)
            # Find out now whether the class of such a module can be replaced.
            object.__setattr__(module, "__class__", subclass)
            object.__setattr__(module, "__class__", cls)
        except (AttributeError, TypeError) as error:
            raise TypeError(
                f"The inputs of {cls.__name__} cannot be cast, because its class "
                "cannot be replaced. Pass cast_inputs=False, and cast the inputs in "
                "the loss function."
            ) from error
        return subclass


class _Hidden:
    """Hides a subclass from ``__init_subclass__``, where a class may register it."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        pass


@contextmanager
def preserve(
    models: list[nn.Module], parameters: Any, is_cast: bool = False
) -> Iterator[tuple[dict[Any, tuple[Any, Any, mx.array]], list[mx.array]]]:
    """Restore parameters after a forward pass, and buffers that became non-finite.

    Yields the trainable parameters as (container, key, array), by the id of the
    container and the key, and a list for the arrays that replace them. An array that
    the forward pass itself assigns to a parameter stays, unless ``is_cast``. Non-finite
    buffers are restored because BatchNorm's running statistics would otherwise stay inf
    or NaN.
    """
    places = list(chain.from_iterable(map(writable_arrays, models)))
    trained = set(map(id, leaves(parameters)))
    substitutes: list[mx.array] = []
    try:
        yield {(id(x[0]), x[1]): x for x in places if id(x[2]) in trained}, substitutes
    except BaseException:
        commit(x for x in places if isinstance(x[0], dict) or x[1] < len(x[0]))
        raise
    ids = set(map(id, substitutes))
    writes: Writes = []
    for box, key, old in places:
        # The forward pass may have removed a key or shortened a list.
        is_there = key in box if isinstance(box, dict) else key < len(box)
        new: Any = box[key] if is_there else None
        if id(old) in trained:
            if is_cast or id(new) in ids:
                writes.append((box, key, old))
            continue
        is_replaced = new is not old and isinstance(new, mx.array)
        if is_replaced and new.shape == old.shape and is_floating(new):
            safe = mx.where(all_finite([new]), new, old.astype(new.dtype))
            writes.append((box, key, safe))
    commit(writes)


def writable_arrays(model: nn.Module) -> Writes:
    """Return (container, key, array) for each model array that is not in a tuple."""
    return [
        (container, key, x)
        for (_, container, key), x in walk(model)
        if isinstance(x, mx.array) and not isinstance(container, tuple)
    ]


def is_opaque(x: Any) -> bool:
    """Return whether ``tree_map`` must treat ``x`` (a model, say) as a leaf."""
    return type(x) not in (dict, list, tuple) and not hasattr(x, "_fields")
