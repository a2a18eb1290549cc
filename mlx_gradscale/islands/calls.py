"""How a float32 island is called: arrays are raised, and what comes out is lowered."""

import dataclasses
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..masters import HALF
from ..scoped import Scoped
from .borrowed import Borrowed, Changes

# Where an island is kept in a module: an attribute, so that no tree of arrays has it.
ISLAND = "_float32_island"
_CLASS = "_float32_island_class"
# Modules are called by these; a tied embedding is also the output layer.
METHODS = ("__call__", "as_linear")
# What these return takes the module's place, and its island.
_CONVERSIONS = ("to_quantized", "to_lora")

_gradients_in_float32 = Scoped("gradients in float32", False)
_inside = Scoped("inside an island", False)
_compute_dtype: Scoped[mx.Dtype | None] = Scoped("compute dtype", None)


@dataclasses.dataclass(eq=False)
class Chain:
    """Modules that hand float32 to each other.

    Attributes:
        name (str or list): What ``float32_layers`` was given, or would have to be.
        dtype (Dtype or None): The half dtype that its first module met, for one that
            sees none itself.
    """

    name: str | Sequence[str]
    dtype: mx.Dtype | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # A Dtype can be neither pickled nor copied.
        return Chain, (self.name,)


@dataclasses.dataclass(eq=False)
class Island:
    """What a module needs to know of the island that it is in.

    Attributes:
        chain (Chain): The modules that it belongs to.
        first (bool): Whether it is the first of them.
        lowers (bool): Whether its outputs go back to half precision.
        deep (bool): Whether the modules in it are raised, too.
        before (Island or None): The island that the module was before, and still is as
            well.
    """

    chain: Chain
    first: bool = True
    lowers: bool = True
    deep: bool = True
    before: "Island | None" = None

    def all(self) -> "Iterator[Island]":
        """Yield this island and those that the module was made before."""
        island: Island | None = self
        while island is not None:
            yield island
            island = island.before


def computing_in(dtype: mx.Dtype | None) -> AbstractContextManager[None]:
    """Let islands cast back to ``dtype`` where nothing else says so, for the while.

    Args:
        dtype (Dtype, optional): What a model with float32 parameters is run in.
    """
    return _compute_dtype.set_to(dtype)


def is_inside_island() -> bool:
    """Tell whether what runs now is called by a float32 island."""
    return _inside.get()


def float32_gradients() -> AbstractContextManager[None]:
    """Let the gradients of parameters in islands stay float32, for the while.

    Otherwise they are cast to the parameter's dtype, as MLX does, where 65504 is the
    end once more; and a weight's gradient is a product with the values for whose size
    it is in an island. This is for those who take gradients of another dtype than
    their parameter: a bare optimizer of MLX makes the parameter float32 with them, and
    a parameter that was cast with ``astype`` refuses them.
    """
    return _gradients_in_float32.set_to(True)


@mx.custom_function
def _raise_with_float32_gradient(x: mx.array) -> mx.array:
    return x.astype(mx.float32)


@_raise_with_float32_gradient.vjp
def _raise_vjp(_: mx.array, cotangent: mx.array, __: mx.array) -> mx.array:
    return cotangent


def _raise(x: mx.array) -> mx.array:
    return x.astype(mx.float32)


def get_island(module: nn.Module) -> Island | None:
    """Return the island that a module is, or None."""
    return vars(module).get(ISLAND)


def set_island(module: nn.Module, island: Island | None) -> None:
    """Make a module an island, or an ordinary one again."""
    # A call is looked up on the type, so the module gets a class of its own. All else
    # stays: its parameters, their names, and what it is an instance of.
    if island is None:
        if vars(module).pop(ISLAND, None) is not None:
            object.__setattr__(module, "__class__", type(module).__base__)
        return
    if get_island(module) is None:
        object.__setattr__(module, "__class__", _island_class(type(module)))
    object.__setattr__(module, ISLAND, island)


def defines(cls: type, method: str) -> bool:
    """Tell whether a class of modules has a method; every class has a __call__."""
    return any(method in vars(each) for each in cls.__mro__)


def call_island(
    module: nn.Module,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[Any, Any],
) -> Any:
    """Call a module's function in float32."""
    island = get_island(module)
    # None: another instance of its class, made by type(module)(...).
    if island is None or _inside.get():
        return function(*args, **kwargs)
    # What is kept of a module's own has been cast beside it, with astype.
    keeps = _gradients_in_float32.get() and island.deep
    arguments = Borrowed((args, kwargs))
    parameters = Changes(_raise_with_float32_gradient if keeps else _raise)
    with _inside.set_to(island.deep), arguments, parameters:
        args, kwargs = arguments.raised(_raise)
        parameters.raise_module(module, island.deep)
        outputs = function(*args, **kwargs)
    dtype = arguments.dtype or parameters.dtype
    for each in island.all():
        if each.first:
            each.chain.dtype = dtype
        dtype = dtype or each.chain.dtype
    dtype = dtype or _compute_dtype.get()
    if dtype is None or dtype not in HALF:
        return outputs
    arguments.lower_what_is_new(dtype)
    # In two islands at once, it may be the last of only one.
    lowers = all(each.lowers for each in island.all())
    return arguments.lowered(outputs, dtype) if lowers else outputs


class _IslandType(type):
    """The class of islands' classes: ``type(module).__call__`` is the module's own.

    mlx-lm's ``grad_checkpoint`` replaces it, for all layers of that class. A call is
    looked up past this one.
    """

    def __getattribute__(cls, name: str) -> Any:
        if name == "__call__":
            return type.__getattribute__(cls, "__base__").__call__
        return super().__getattribute__(name)

    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "__call__":
            setattr(cls.__base__, name, value)
        else:
            super().__setattr__(name, value)


def _island_class(cls: type) -> type:
    """Return the class of islands of a class, which is made once."""
    # Kept with the class, and not in a table: a class may be made for a while only.
    if _CLASS not in vars(cls):
        type.__setattr__(cls, _CLASS, _make_class(cls))
    island_class: type = vars(cls)[_CLASS]
    return island_class


def _make_class(cls: type) -> type:
    def called(name: str) -> Callable[..., Any]:
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            function = getattr(super(island_class, self), name)
            return call_island(self, function, args, kwargs)

        return method

    def converted(name: str) -> Callable[..., Any]:
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            module = getattr(super(island_class, self), name)(*args, **kwargs)
            set_island(module, get_island(self))
            return module

        return method

    def reduced(self: Any, protocol: int) -> tuple[Any, ...]:
        # The class has no name to find it by.
        own: Any = super(island_class, self)
        make, args, *rest = own.__reduce_ex__(max(2, protocol))
        args = tuple(cls if arg is island_class else arg for arg in args)
        return (_made_island, (make, args), *rest)

    body: dict[str, Any] = {
        name: called(name) for name in METHODS if defines(cls, name)
    }
    body |= {name: converted(name) for name in _CONVERSIONS if defines(cls, name)}
    body |= {"__reduce_ex__": reduced, "__doc__": cls.__doc__}
    body |= {name: getattr(cls, name) for name in ("__module__", "__qualname__")}
    metaclass: type = _IslandType
    if type(cls) is not type:
        metaclass = type("IslandType", (_IslandType, type(cls)), {})
    island_class: type = types.new_class(
        cls.__name__, (cls,), {"metaclass": metaclass}, lambda ns: ns.update(body)
    )
    return island_class


def _made_island(make: Callable[..., Any], args: tuple[Any, ...]) -> nn.Module:
    module: nn.Module = make(*args)
    object.__setattr__(module, "__class__", _island_class(type(module)))
    return module
