"""List a model's modules, and intercept calls to them.

An intercepted call goes through handlers, which implement float32 layers, measurements
and dtype reports. Python looks up ``__call__`` on the type, so each intercepted module
gets its own subclass; other modules keep their class.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..core.trees import restore, snapshot

# The methods to intercept. A tied embedding computes the logits with as_linear.
_METHODS = ("__call__", "as_linear")
# The modules that these methods return inherit the handlers.
_CONVERSIONS = ("to_quantized", "to_lora")
# Handlers are stored in a Python attribute, which is not part of parameter trees.
_HANDLERS = "_call_handlers"

# Called with the module, the function to call and its arguments; returns the outputs.
Handler = Callable[..., Any]


def ordered_modules(model: nn.Module, path: str = "") -> list[tuple[str, nn.Module]]:
    """Return (path, module) for a model and its submodules, in definition order."""
    found = [(path, model)]
    children = tree_flatten(model.children(), is_leaf=nn.Module.is_module)
    for name, child in children:
        if isinstance(child, nn.Module):
            found += ordered_modules(child, f"{path}.{name}" if path else name)
    return found


def is_inside(path: str, *outer: str) -> bool:
    """Return whether a path equals one of the outer paths or lies inside one."""
    return any(not each or f"{path}.".startswith(f"{each}.") for each in outer)


def owner_of(paths: Iterable[str], parameter: str) -> str:
    """Return the innermost of the given paths that contains a parameter or module."""
    return max((path for path in paths if is_inside(parameter, path)), key=len)


def get_handlers(module: nn.Module) -> tuple[Handler, ...]:
    """Return the handlers of a module, innermost first."""
    handlers: tuple[Handler, ...] = vars(module).get(_HANDLERS, ())
    return handlers


def set_handlers(module: nn.Module, handlers: tuple[Handler, ...]) -> None:
    """Route a module's calls through handlers; with no handlers, restore its class."""
    cls = _original(type(module))
    object.__setattr__(module, "__class__", _intercepted(cls) if handlers else cls)
    vars(module).pop(_HANDLERS, None)
    if handlers:
        vars(module)[_HANDLERS] = handlers


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Disable ``mx.compile``. On exit, restore it, the model and the random state."""
    saved = snapshot(model)
    attributes = [(m, type(m), dict(vars(m))) for _, m in ordered_modules(model)]
    random_state: Any = mx.random.state
    high, low = random_state[0].tolist()
    compiles = _is_compile_enabled()
    try:
        # A layer's values cannot be read inside a compiled function.
        mx.disable_compile()
        yield
    finally:
        if compiles:
            mx.enable_compile()
        # The random state holds the seed as two 32-bit halves.
        mx.random.seed(high << 32 | low)
        restore(saved)
        for module, cls, own in attributes:
            object.__setattr__(module, "__class__", cls)
            vars(module).clear()
            vars(module).update(own)


def _is_compile_enabled() -> bool:
    # MLX has no API for this, so check whether a second call runs the Python code.
    traces = iter(range(3))
    compiled = mx.compile(lambda x: x + next(traces))
    return [compiled(mx.array(0)).item() for _ in range(2)] == [0, 0]


class _Transparent(type):
    """Metaclass of the subclasses that intercept calls.

    A subclass compares equal to the original class, so that tables keyed by
    ``type(layer)``, as in mlx-lm's GPTQ, still work. Getting or setting ``__call__`` on
    it accesses the original class, because mlx-lm's ``grad_checkpoint`` replaces
    ``type(layer).__call__`` to reach every layer. Calls still go through the handlers.
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


def _intercepted(cls: type) -> type:
    """Return a new subclass of ``cls`` that routes calls through the handlers."""

    def intercept(name: str) -> Callable[..., Any]:
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            function = getattr(super(subclass, self), name)
            if name in _CONVERSIONS:
                module = function(*args, **kwargs)
                set_handlers(module, get_handlers(self))
                return module
            for handler in get_handlers(self):
                function = partial(handler, self, function)
            return function(*args, **kwargs)

        return method

    def is_float32(self: nn.Module) -> bool:
        # The core does not cast the parameters of such modules to compute_dtype.
        handlers = get_handlers(self)
        return any(getattr(h, "computes_in_float32", False) for h in handlers)

    # Not hasattr, which is always True for __call__: every metaclass defines it.
    defined = {name for each in cls.__mro__ for name in vars(each)}
    names = [name for name in _METHODS + _CONVERSIONS if name in defined]
    body: dict[str, Any] = {name: intercept(name) for name in names}
    body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    body |= {"__doc__": cls.__doc__, "computes_in_float32": property(is_float32)}
    # The metaclass must also derive from the original metaclass, such as ABCMeta.
    metaclass: Any = type("_Transparent", (_Transparent, type(cls)), {})
    subclass: type = metaclass(cls.__name__, (cls,), body)
    return subclass
