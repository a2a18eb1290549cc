"""Cast a model for the forward pass, and restore it afterwards."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from operator import is_not
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

from .finite import all_finite
from .intercept import get_handlers
from .trees import CONTAINERS, Writes, commit, is_floating, leaves, walk

# The compute_dtype of the running forward pass. A float32 layer that sees only integers
# and its own float32 parameters, such as an embedding, casts its outputs to this dtype.
compute_dtype: ContextVar[mx.Dtype | None] = ContextVar("compute_dtype", default=None)


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

    @contextmanager
    def announce(self) -> Iterator[None]:
        """Tell float32 layers the ``compute_dtype`` within a ``with`` block."""
        token = compute_dtype.set(self.compute_dtype)
        try:
            yield
        finally:
            compute_dtype.reset(token)

    def cast_parameters(self, model: nn.Module, parameters: Any) -> Any:
        """Return the trainable parameters in the dtypes of the forward pass."""
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
        is_entered = id(module) in self._entered
        is_cast = is_entered and self._casting.compute_dtype in dtypes
        cast = self._casting.cast if is_cast else lambda x: x
        self._is_inside = True
        try:
            with Substitution((args, kwargs), cast) as (args, kwargs):
                return function(*args, **kwargs)
        finally:
            self._is_inside = False


# How dicts and lists replace a value. Subclasses with a method of their own, such as
# immutable dicts, are left alone.
_REPLACES = (dict.__setitem__, OrderedDict.__setitem__, list.__setitem__)


class Derived(mx.array):
    """An array with a source that is not None until the array is changed in place."""

    source: Any = None


def forget_source(cls: type[Derived], method: str) -> None:
    """Make a method of ``mx.array`` clear the source of a derived array."""
    function = getattr(mx.array, method)

    def forget(self: Derived, *args: Any, **kwargs: Any) -> Any:
        self.source = None
        return function(self, *args, **kwargs)

    setattr(cls, method, forget)


for _method in (
    *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__"),
    *("__ipow__", "__imatmul__", "__iand__", "__ior__", "__ixor__", "__ilshift__"),
    *("__irshift__", "__setitem__"),
):
    if hasattr(mx.array, _method):
        forget_source(Derived, _method)


class Substitution:
    """A context in which the arrays in a tree of arguments are replaced.

    A module may write to its arguments. So dicts and lists stay the same objects:
    their arrays are replaced, and are restored on exit, wherever the module has moved
    them. Arrays that it has changed in place are changed on exit. Tuples are built
    anew; models and other objects are left alone.
    """

    def __init__(self, tree: Any, new: Callable[[mx.array], Any]):
        self._tree = tree
        self._new = new
        # Maps the id of each visited object to the object, which keeps the id unique,
        # and its replacement. What occurs twice is replaced once.
        self._known: dict[int, tuple[Any, Any]] = {}
        self._boxes: list[Any] = []

    def replace(self) -> Any:
        """Return the tree with its arrays replaced."""
        return self._visit(self._tree)

    __enter__ = replace

    def _visit(self, x: Any) -> Any:
        if id(x) in self._known:
            return self._known[id(x)][1]
        self._known[id(x)] = x, x  # before its contents, which may contain it
        if isinstance(x, mx.array):
            new = self._new(x)
            if new is not x:
                new = Derived(new)
                new.source = True  # not the array itself, to keep nothing alive
            self._known[id(x)] = x, new
        elif isinstance(x, tuple):
            new = tuple(map(self._visit, x))
            if any(map(is_not, new, x)):
                # tuple.__new__, because the class may have a constructor of its own.
                new = tuple.__new__(type(x), new)
                if hasattr(x, "__dict__"):
                    vars(new).update(vars(x))
                self._known[id(x)] = x, new
        elif not isinstance(x, nn.Module) and (
            getattr(type(x), "__setitem__", None) in _REPLACES
        ):
            self._boxes.append(x)
            for key, old in list(x.items() if isinstance(x, dict) else enumerate(x)):
                if isinstance(old, (mx.array, *CONTAINERS)):
                    new = self._visit(old)
                    if new is not old:
                        x[key] = new
        return self._known[id(x)][1]

    def __exit__(self, *_: Any) -> None:
        replaced = {}
        for old, new in self._known.values():
            if isinstance(new, Derived) and new.source is None:
                # Copy the result into the caller's array, in its dtype. Adding to zero
                # also adopts a new shape.
                old[...] = mx.zeros_like(old)
                old += new.astype(old.dtype)
            if new is not old:
                replaced[id(new)] = old
        for box in self._boxes:
            items = box.items() if isinstance(box, dict) else enumerate(box)
            for key, x in list(items):
                if id(x) in replaced:
                    box[key] = replaced[id(x)]


@contextmanager
def preserve(
    models: list[nn.Module], parameters: Any, restores_all: bool = False
) -> Iterator[tuple[dict[Any, tuple[Any, Any, mx.array]], list[mx.array]]]:
    """Restore parameters after a forward pass, and buffers that became non-finite.

    Yields the trainable parameters as (container, key, array), by the id of the
    container and the key, and a list to which the caller adds the arrays that replace
    them. An array that the forward pass itself assigns to a parameter stays, unless
    ``restores_all``. Non-finite buffers are restored because BatchNorm's running
    statistics would otherwise stay inf or NaN.
    """
    trained = set(map(id, leaves(parameters)))
    places = list(chain.from_iterable(map(writable_arrays, models)))
    substitutes: list[mx.array] = []
    try:
        yield {(id(x[0]), x[1]): x for x in places if id(x[2]) in trained}, substitutes
    except BaseException:
        commit(x for x in places if isinstance(x[0], dict) or x[1] < len(x[0]))
        raise
    ids = set(map(id, substitutes))
    writes: Writes = []
    for box, key, old in places:
        if isinstance(box, list) and key >= len(box):
            continue  # the forward pass has shortened the list
        new: Any = box.get(key) if isinstance(box, dict) else box[key]
        if id(old) in trained:
            if restores_all or id(new) in ids:
                writes.append((box, key, old))
            continue
        is_replaced = new is not old and isinstance(new, mx.array)
        if is_replaced and new.shape == old.shape and is_floating(new):
            safe = mx.where(all_finite([new]), new, old.astype(new.dtype))
            writes.append((box, key, safe))
    commit(writes)


def writable_arrays(tree: Any) -> Writes:
    """Return (container, key, array) for each array that is not in a tuple."""
    return [
        (container, key, x)
        for (_, container, key), x in walk(tree)
        if isinstance(x, mx.array) and not isinstance(container, tuple)
    ]


def is_opaque(x: Any) -> bool:
    """Return whether ``tree_map`` must treat ``x`` (a model, say) as a leaf."""
    is_named_tuple = isinstance(x, tuple) and hasattr(x, "_fields")
    return type(x) not in (dict, list, tuple) and not is_named_tuple
