"""See in which dtype each layer computes, and where half precision is lost."""

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .half import HALF
from .islands.calls import ISLAND, METHODS
from .precision import is_leaf


@dataclass(frozen=True)
class LayerDtypes:
    """One call of a layer.

    Attributes:
        path: the layer's; "" is the whole model.
        parameters: the dtype of its own half-precision parameters, None without.
        inputs: the dtypes of the floating arrays that it was given.
        outputs: the dtypes of the floating arrays that it returned.
        argument: the name of the loss function's argument that it was given, if it was.
    """

    path: str
    parameters: mx.Dtype | None
    inputs: tuple[mx.Dtype, ...]
    outputs: tuple[mx.Dtype, ...]
    argument: str | None = None

    @property
    def is_wider(self) -> bool:
        """Whether it returned float32 although its parameters are halves."""
        return self.parameters is not None and mx.float32 in self.outputs


@dataclass
class Calls:
    """The layers that were called, in order, but for those in float32 islands."""

    layers: list[LayerDtypes] = field(default_factory=list)
    arguments: dict[int, str] = field(default_factory=dict)
    _islands: int = 0

    def first_wider(self) -> LayerDtypes | None:
        return next((layer for layer in self.layers if layer.is_wider), None)

    def names(self, loss_fn: Callable, args: tuple, kwargs: dict) -> None:
        """Learn which array is which argument."""
        try:
            bound = inspect.signature(loss_fn).bind(*args, **kwargs).arguments
        except (TypeError, ValueError):
            return
        for path, x in tree_flatten(dict(bound), is_leaf=is_leaf):
            self.arguments[id(x)] = path

    def call(
        self, path: str, module: nn.Module, function: Callable, args: Any, kwargs: Any
    ) -> Any:
        is_island = hasattr(module, ISLAND)
        given = _floating((args, kwargs))
        self._islands += is_island
        try:
            outputs = function(*args, **kwargs)
        finally:
            self._islands -= is_island
        if not self._islands and not is_island:
            own = [x.dtype for x in module.values() if isinstance(x, mx.array)]
            named = [self.arguments[id(x)] for x in given if id(x) in self.arguments]
            self.layers.append(
                LayerDtypes(
                    path,
                    next((dtype for dtype in own if dtype in HALF), None),
                    tuple(x.dtype for x in given),
                    tuple(x.dtype for x in _floating(outputs)),
                    named[0] if named else None,
                )
            )
        return outputs


def _floating(tree: Any) -> list[mx.array]:
    leaves = [x for _, x in tree_flatten(tree, is_leaf=is_leaf)]
    arrays = [x for x in leaves if isinstance(x, mx.array)]
    return [x for x in arrays if mx.issubdtype(x.dtype, mx.floating)]


@contextmanager
def watched_dtypes(*models: nn.Module) -> Iterator[Calls]:
    """Watch the layers of models as they are called; nothing is computed for it."""
    calls = Calls()
    paths: dict[int, str] = {}
    classes: list[tuple[nn.Module, type]] = []
    for model in models:
        for path, module in sorted(model.named_modules(), key=lambda item: item[0]):
            if id(module) not in paths:
                paths[id(module)] = path
                classes.append((module, type(module)))
    # A call is looked up on the type, so each layer gets another one for the while.
    watching = {cls: _watching(cls, paths, calls) for _, cls in classes}
    try:
        for module, cls in classes:
            object.__setattr__(module, "__class__", watching[cls])
        yield calls
    finally:
        for module, cls in classes:
            object.__setattr__(module, "__class__", cls)


def _watching(cls: type, paths: dict[int, str], calls: Calls) -> type:
    def watch(name: str) -> Callable:
        def method(self, *args, **kwargs):
            function = getattr(super(watching, self), name)
            path = paths.get(id(self))
            if path is None:
                return function(*args, **kwargs)
            return calls.call(path, self, function, args, kwargs)

        return method

    body = {name: watch(name) for name in METHODS if hasattr(cls, name)}
    watching = types.new_class(
        cls.__name__, (cls,), exec_body=lambda namespace: namespace.update(body)
    )
    return watching


def warned_once(
    loss_fn: Callable,
    models_of: Callable[[tuple, dict], list[nn.Module]],
    warn: Callable[[str], None],
) -> Callable:
    """Return ``loss_fn``; its first call warns where half precision is lost.

    Args:
        loss_fn (Callable): As for ``nn.value_and_grad``.
        models_of (Callable): Returns the models, given a call's arguments.
        warn (Callable): Is given the sentence.
    """
    seen = False

    @wraps(loss_fn)
    def watched_loss_fn(*args, **kwargs):
        nonlocal seen
        if seen:
            return loss_fn(*args, **kwargs)
        with watched_dtypes(*models_of(args, kwargs)) as calls:
            calls.names(loss_fn, args, kwargs)
            outputs = loss_fn(*args, **kwargs)
        seen = True
        layer = calls.first_wider()
        if layer is not None:
            warn(sentence(layer))
        return outputs

    return watched_loss_fn


def sentence(layer: LayerDtypes) -> str:
    """Say where half precision is lost, and what to do."""
    half = _name(layer.parameters)
    name = repr(layer.path) if layer.path else "the model"
    other = next((x for x in layer.inputs if x != layer.parameters), None)
    if layer.argument is not None and other is not None:
        why = f"because argument {layer.argument!r} of the loss function is"
        remedy = f"Cast it: {layer.argument}.astype(mx.{half})."
    elif other is not None:
        why = "because what it is given is"
        remedy = (
            f"Cast what comes before it to {half}: masks, positions, frozen layers, "
            "the output of a layer that is kept in float32."
        )
    else:
        why, other = "by itself, without being given", mx.float32
        remedy = f"Return {half} from it."
    return (
        f"{name} has {half} parameters and computes in float32, {why} {_name(other)}; "
        f"so does all that follows, which takes more time and memory. {remedy} "
        "compute_dtypes() of mlx_gradscale.diagnostics shows every layer."
    )


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
