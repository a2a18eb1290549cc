"""Intercept the calls of single modules; their classes stay as they are.

Python looks a call up on the type, so an intercepted module gets a subclass of its own.
Float32 layers, probes and dtype reports are handlers on top of this one mechanism.
"""

import types
from collections.abc import Callable
from typing import Any

import mlx.nn as nn

# How modules are called; a tied embedding is also the output layer.
METHODS = ("__call__", "as_linear")
# The module that these return takes over the handlers.
_CONVERSIONS = ("to_quantized", "to_lora")
# Where a module keeps its handlers: an attribute, so that no tree of arrays has it.
_HANDLERS = "_call_handlers"

# Is given the module, the function to call and its arguments; returns the outputs.
Handler = Callable[
    [nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any
]


def get_handlers(module: nn.Module) -> tuple[Handler, ...]:
    """Return the handlers of a module, the innermost first."""
    handlers: tuple[Handler, ...] = vars(module).get(_HANDLERS, ())
    return handlers


def set_handlers(module: nn.Module, handlers: tuple[Handler, ...]) -> None:
    """Let each call of a module go through handlers; none restores its class."""
    is_intercepted = isinstance(type(module), _Transparent)
    if handlers and not is_intercepted:
        object.__setattr__(module, "__class__", _intercepted(type(module)))
    elif is_intercepted and not handlers:
        object.__setattr__(module, "__class__", _original(type(module)))
    vars(module).pop(_HANDLERS, None)
    if handlers:
        object.__setattr__(module, _HANDLERS, handlers)


def has_call(cls: type) -> bool:
    """Tell whether a class of modules defines ``__call__``."""
    return _defines(cls, "__call__")


class _Transparent(type):
    """Makes the class of an intercepted module pass for the original class.

    It compares equal to the original, for code that looks ``type(layer)`` up in a table
    (mlx-lm's GPTQ). Its ``__call__`` reads and writes the original's, because mlx-lm's
    ``grad_checkpoint`` replaces ``type(layer).__call__`` to reach every layer of a
    class. Python itself calls the intercepting method all the same.
    """

    def __eq__(cls, other: object) -> bool:
        return _original(cls) is _original(other)

    def __hash__(cls) -> int:
        return hash(_original(cls))

    def __getattribute__(cls, name: str) -> Any:
        return type.__getattribute__(
            _original(cls) if name == "__call__" else cls, name
        )

    def __setattr__(cls, name: str, value: Any) -> None:
        type.__setattr__(_original(cls) if name == "__call__" else cls, name, value)


def _original(cls: Any) -> Any:
    if isinstance(cls, _Transparent):
        return type.__getattribute__(cls, "__base__")
    return cls


def _defines(cls: type, method: str) -> bool:
    # Not hasattr: every class has a __call__, that of its metaclass.
    return any(method in vars(each) for each in cls.__mro__)


def _intercepted(cls: type) -> type:
    """Return a new subclass of ``cls`` whose calls go through the handlers."""

    def intercept(name: str) -> Callable[..., Any]:
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            function = getattr(super(subclass, self), name)
            for handler in get_handlers(self):
                function = _bind(handler, self, function)
            return function(*args, **kwargs)

        return method

    def convert(name: str) -> Callable[..., Any]:
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            module = getattr(super(subclass, self), name)(*args, **kwargs)
            set_handlers(module, get_handlers(self))
            return module

        return method

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        # A subclass without a name of its own cannot be pickled: rebuild it.
        own: Any = super(subclass, self)
        make, args, *rest = own.__reduce_ex__(max(2, protocol))
        args = tuple(cls if arg is subclass else arg for arg in args)
        return (_rebuild, (make, args), *rest)

    body: dict[str, Any] = {m: intercept(m) for m in METHODS if _defines(cls, m)}
    body |= {m: convert(m) for m in _CONVERSIONS if _defines(cls, m)}
    body |= {"__reduce_ex__": reduce, "__doc__": cls.__doc__}
    body["computes_in_float32"] = property(_computes_in_float32)
    body |= {name: getattr(cls, name) for name in ("__module__", "__qualname__")}
    metaclass: type = _Transparent
    if type(cls) is not type:
        metaclass = type("_Transparent", (_Transparent, type(cls)), {})
    subclass: type = types.new_class(
        cls.__name__, (cls,), {"metaclass": metaclass}, lambda ns: ns.update(body)
    )
    return subclass


def _computes_in_float32(module: nn.Module) -> bool:
    # The core asks modules for this: it leaves their parameters in float32.
    return any(getattr(h, "computes_in_float32", False) for h in get_handlers(module))


def _bind(
    handler: Handler, module: nn.Module, function: Callable[..., Any]
) -> Callable[..., Any]:
    return lambda *args, **kwargs: handler(module, function, args, kwargs)


def _rebuild(make: Callable[..., Any], args: tuple[Any, ...]) -> nn.Module:
    module: nn.Module = make(*args)
    object.__setattr__(module, "__class__", _intercepted(type(module)))
    return module
