"""Cast a model for the forward pass, and restore it afterwards."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from itertools import chain, repeat
from operator import is_not
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

from .finite import all_finite
from .intercept import Handler, get_handlers, watch
from .trees import Writes, commit, is_floating, walk

# The compute_dtype of the running forward pass. A float32 layer that sees only integers
# and its own float32 parameters, such as an embedding, casts its outputs to this dtype.
compute_dtype: ContextVar[mx.Dtype | None] = ContextVar("compute_dtype", default=None)


class Alias(mx.array):
    """An array with a source that is not None until the array is changed in place."""

    source: Any = None


def aliases(
    arrays: Iterable[mx.array], sources: Iterable[Any], cls: type[Alias] = Alias
) -> list[Alias]:
    """Return new array objects of a class, which share the memory of ``arrays``."""
    found = []
    for x, source in zip(arrays, sources, strict=True):
        # The constructor would copy x. Assigning all of an array makes it share the
        # other's memory, and the zeros are never evaluated.
        alias = cls(mx.zeros(x.shape, x.dtype))
        mx.array.__setitem__(alias, ..., x)
        alias.source = source
        found.append(alias)
    return found


def _forget_source(method: str) -> None:
    function = getattr(mx.array, method)

    def forget(self: Alias, *args: Any, **kwargs: Any) -> Any:
        self.source = None
        return function(self, *args, **kwargs)

    setattr(Alias, method, forget)


# Methods that change the array, or expose its memory. Before Python 3.12, a class
# cannot see that its buffer is exported, so writes through a NumPy view stay unseen.
for _method in (
    *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__"),
    *("__ipow__", "__imatmul__", "__iand__", "__ior__", "__ixor__", "__ilshift__"),
    *("__irshift__", "__setitem__", "__dlpack__", "__buffer__"),
):
    if hasattr(mx.array, _method):
        _forget_source(_method)


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
            for handler in get_handlers(module):
                if getattr(handler, "computes_in_float32", False):
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
        is_cast = False
        for _, x in walk(module):
            is_cast |= getattr(x, "dtype", None) == self._casting.compute_dtype
        if is_cast and id(module) in self._entered:
            args, kwargs = rebuild((args, kwargs), self._casting.cast)
        self._is_inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self._is_inside = False


@contextmanager
def forward_pass(
    models: list[nn.Module],
    parameters: list[mx.array],
    casting: Casting,
    store: Callable[[mx.array], mx.array] = lambda new: new,
) -> Iterator[Callable[[], None]]:
    """Cast what enters the models, and restore what the forward pass has not changed.

    The caller puts aliases of ``parameters`` into the models, and calls the function
    that this yields at the end of the forward pass. An alias that is still in a model
    is restored to its source. What a layer has assigned or changed in place stays, as
    in MLX, after ``store`` has mapped it; but with a compute dtype, parameters are
    always restored. Buffers that became non-finite are restored, because BatchNorm's
    running statistics would otherwise stay inf or NaN. So is what the backward pass
    changes, where ``mx.checkpoint`` computes a layer again.
    """
    before = _places(models)
    trained = set(map(id, parameters))
    is_cast = casting.compute_dtype is not None
    entrance = Entrance(casting)
    watched: list[tuple[nn.Module, Handler]] = []
    if is_cast and casting.cast_inputs:
        modules = chain.from_iterable(map(nn.Module.modules, models))
        watched = list(zip(modules, repeat(entrance), strict=False))
    restored = list(before.values())

    def end_forward() -> None:
        nonlocal restored
        entrance.is_backward = True
        restored = []
        for place, (container, key, new) in _places(models).items():
            old = before[place][2] if place in before else None
            source = new.source if type(new) is Alias else None
            if source is not None:
                new = source
            elif is_cast and id(old) in trained:
                new = old
            elif new is not old:
                if old is not None and id(old) not in trained:
                    new = _finite_or_old(new, old)
                new = store(new)
            restored.append((container, key, new))
        commit(restored)

    token = compute_dtype.set(casting.compute_dtype)
    try:
        others = []
        for found in before.values():
            if id(found[2]) not in trained:
                others.append(found)
        if others:
            containers, keys, old = zip(*others, strict=True)
            commit(zip(containers, keys, aliases(old, old), strict=True))
        with watch(watched) if watched else nullcontext():
            yield end_forward
    except BaseException:
        for place, (container, key, _) in _places(models).items():
            if place not in before and isinstance(container, dict):
                del container[key]
        restored = list(before.values())
        raise
    finally:
        compute_dtype.reset(token)
        # The forward pass may have shortened a list.
        commit([x for x in restored if isinstance(x[0], dict) or x[1] < len(x[0])])


def _places(tree: Any) -> dict[tuple[int, Any], tuple[Any, Any, Any]]:
    """Return each (container, key, array), by the id of the container and the key."""
    places = {}
    for (_, container, key), x in walk(tree):
        if isinstance(x, mx.array) and not isinstance(container, tuple):
            places[id(container), key] = container, key, x
    return places


def _finite_or_old(new: mx.array, old: mx.array) -> mx.array:
    if old.shape != new.shape or not is_floating(new):
        return new
    return mx.where(all_finite([new]), new, old.astype(new.dtype))


def writable_arrays(tree: Any) -> Writes:
    """Return (container, key, array) for each array that is not in a tuple."""
    return list(_places(tree).values())


def rebuild(tree: Any, new: Callable[[mx.array], Any]) -> Any:
    """Return a tree with new arrays, in new containers; other objects stay the same."""
    if is_opaque(tree):
        return new(tree) if isinstance(tree, mx.array) else tree
    values = list(tree.values()) if isinstance(tree, dict) else tree
    items = list(map(partial(rebuild, new=new), values))
    if not any(map(is_not, items, values)):
        return tree  # the function may write to a container without such arrays
    if isinstance(tree, dict):
        return type(tree)(zip(tree, items, strict=True))
    return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)


def is_opaque(x: Any) -> bool:
    """Return whether ``x``, such as a model or a cache, is a leaf of the arguments."""
    is_named_tuple = isinstance(x, tuple) and hasattr(x, "_fields")
    return type(x) not in (dict, OrderedDict, list, tuple) and not is_named_tuple
