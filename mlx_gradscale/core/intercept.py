"""Intercept the calls of single modules.

Python looks up ``__call__`` on the type. So while a module has handlers, its class is a
subclass, made once per class, that passes each call through them. The class itself, and
every other module that has it, stay as they are.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import mlx.nn as nn

# Called with the module, the function to call and its arguments; returns the outputs.
Handler = Callable[..., Any]

# The methods to intercept. A tied embedding computes the logits with as_linear.
_METHODS = ("__call__", "as_linear")
# A Python attribute of the module, so not one of its parameters. Copies have it too.
_HANDLERS = "_call_handlers"
# An attribute of the subclasses that are made here.
_MARK = "_is_intercepting"
# The handlers of watch(), by the id of the module. Copies do not have them.
_watching: defaultdict[int, list[Handler]] = defaultdict(list)


def get_handlers(module: nn.Module) -> tuple[Handler, ...]:
    """Return the permanent handlers of a module, innermost first."""
    handlers: tuple[Handler, ...] = vars(module).get(_HANDLERS, ())
    return handlers


def set_handlers(module: nn.Module, handlers: tuple[Handler, ...]) -> None:
    """Replace the permanent handlers of a module; ``()`` restores its class."""
    vars(module).pop(_HANDLERS, None)
    if handlers:
        vars(module)[_HANDLERS] = handlers
    _set_class(module)


@contextmanager
def watch(pairs: Iterable[tuple[nn.Module, Handler]]) -> Iterator[None]:
    """Add handlers outside those that modules have, within a ``with`` block."""
    watched: list[tuple[nn.Module, Handler]] = []
    try:
        for module, handler in pairs:
            if callable(module):
                watched.append((module, handler))
                _watching[id(module)].append(handler)
                _set_class(module)
        yield
    finally:
        for module, handler in watched:
            if handler in _watching[id(module)]:
                _watching[id(module)].remove(handler)
            if not _watching[id(module)]:
                del _watching[id(module)]
            _set_class(module)


def _set_class(module: nn.Module) -> None:
    """Give a module the class that its handlers require."""
    cls = type(module)
    is_handled = _HANDLERS in vars(module) or id(module) in _watching
    if is_handled != (_MARK in vars(cls)):
        new = _subclass_of(cls) if is_handled else cls.__base__
        # A module's own __setattr__ stores an attribute.
        object.__setattr__(module, "__class__", new)


class _Quiet:
    """Keeps a class's own ``__init_subclass__`` from seeing the subclass."""

    __slots__ = ()

    def __init_subclass__(cls, **_: Any) -> None:
        pass


def _subclass_of(cls: Any) -> type:
    """Return the subclass of a class whose instances pass calls through handlers."""
    # Python lists a class's subclasses by weak references.
    for known in type.__subclasses__(cls):
        if _MARK in vars(known):
            return known
    body: dict[str, Any] = {"__reduce_ex__": _reduce, _MARK: True}
    for name in ("__module__", "__qualname__", "__doc__"):
        body[name] = getattr(cls, name)
    # Not hasattr(), which is true of __call__ for every class: its metaclass has it.
    defined = {name for each in cls.__mro__ for name in vars(each)}
    body |= {name: _intercept(cls, name) for name in _METHODS if name in defined}
    # type.__new__ skips what a metaclass does with a new class, and _Quiet what the
    # class itself does with a new subclass.
    subclass: type = type.__new__(type(cls), cls.__name__, (_Quiet, cls), body)
    return subclass


def _intercept(cls: type, name: str) -> Callable[..., Any]:
    @wraps(getattr(cls, name))
    def method(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        # Looked up in each call, because mlx-lm's grad_checkpoint replaces it.
        function = partial(getattr(cls, name), self)
        permanent = vars(self).get(_HANDLERS, ())
        for handler in (*permanent, *_watching.get(id(self), ())):
            function = partial(handler, self, function)
        return function(*args, **kwargs)

    return method


def _reduce(self: nn.Module, protocol: Any) -> Any:
    """Describe a module to pickle and copy, which cannot find the subclass."""
    subclass = type(self)
    object.__setattr__(self, "__class__", subclass.__base__)
    try:
        reduced: Any = self.__reduce_ex__(protocol)
    finally:
        object.__setattr__(self, "__class__", subclass)
    function, args, *rest = reduced
    return (_build, (bool(get_handlers(self)), function, args), *rest)


def _build(is_handled: bool, function: Callable[..., Any], args: Any) -> Any:
    module = function(*args)
    if is_handled:
        object.__setattr__(module, "__class__", _subclass_of(type(module)))
    return module
