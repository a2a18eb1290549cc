"""See in which dtype each layer computes, and where half precision is lost."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..files.text import dtype_name
from ..islands.calls import ISLAND, METHODS, is_inside_island
from ..islands.layers import half_statistics
from ..masters import HALF
from ..state_tree import at_once
from .differentiation import is_leaf


@dataclass(frozen=True)
class LayerDtypes:
    """One call of a layer.

    Attributes:
        path (str): The layer's; "" is the whole model.
        parameters (Dtype or None): The dtype of its own half-precision parameters, None
            without.
        inputs (tuple): The dtypes of the floating arrays that it was given.
        outputs (tuple): The dtypes of the floating arrays that it returned.
        argument (str or None): The name of the loss function's argument that it was
            given, if it was.
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
    """The layers that were called, in order, but for those in float32 islands.

    Attributes:
        are_seen (bool): Not where somebody else watches already.
    """

    are_seen: bool = False
    layers: list[LayerDtypes] = field(default_factory=list)
    arguments: dict[int, str] = field(default_factory=dict)
    _running: list[nn.Module] = field(default_factory=list)

    def is_running(self, module: nn.Module) -> bool:
        """Tell whether a call of this module is on its way."""
        return any(module is each for each in self._running)

    def first_wider(self) -> LayerDtypes | None:
        """Return the first layer that returned float32 though its own are halves."""
        return next((layer for layer in self.layers if layer.is_wider), None)

    def names(
        self,
        loss_fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Learn which array is which argument."""
        try:
            bound = inspect.signature(loss_fn).bind(*args, **kwargs).arguments
        except (TypeError, ValueError):
            return
        for path, x in tree_flatten(dict(bound), is_leaf=is_leaf):
            self.arguments[id(x)] = path

    def call(
        self,
        path: str,
        module: nn.Module,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Call a layer, and note the dtypes of what goes in and comes out."""
        given = _floating((args, kwargs))
        self._running.append(module)
        try:
            outputs = function(module, *args, **kwargs)
        finally:
            self._running.pop()
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


# Only the first one watches: it is classes that are watched, and others may use them.
_watchers: dict[int, Calls] = {}


@contextmanager
def watched_dtypes(*models: nn.Module) -> Iterator[Calls]:
    """Watch the layers of models as they are called; nothing is computed for it.

    The methods of their classes are replaced for the while, not the classes of the
    layers: a model may ask for the type of a layer, or copy it. While somebody else
    watches, nothing is seen.
    """
    calls = Calls()
    undo: list[Callable[[], Any]] = [partial(_watchers.pop, id(calls), None)]
    put_back = at_once(undo)
    try:
        _watchers[id(calls)] = calls
        calls.are_seen = [*_watchers].index(id(calls)) == 0
        watching = _watching(models, calls) if calls.are_seen else []
        undo[:0] = [partial(setattr, *place, old) for place, old, _ in watching]
        for place, _, new in watching:
            setattr(*place, new)
        yield calls
        # What somebody else has put there stays.
        undo[:-1] = [
            partial(setattr, *place, old)
            for place, old, new in watching
            if vars(place[0])[place[1]] is new
        ]
    finally:
        put_back()


def _watching(
    models: Iterable[nn.Module], calls: Calls
) -> list[tuple[tuple[type, str], Any, Any]]:
    """Return the class and name of each method, as it is and as it is watched."""
    paths: dict[int, str] = {}
    methods: dict[tuple[type, str], Callable[..., Any]] = {}
    for model in models:
        for path, module in sorted(model.named_modules(), key=lambda item: item[0]):
            if hasattr(module, ISLAND):
                continue
            paths.setdefault(id(module), path)
            for name in METHODS:
                owner = next((c for c in type(module).__mro__ if name in vars(c)), None)
                if owner is not None:
                    methods[owner, name] = vars(owner)[name]
    return [
        (place, method, _watched(method, paths, calls))
        for place, method in methods.items()
    ]


def _watched(
    method: Callable[..., Any], paths: dict[int, str], calls: Calls
) -> Callable[..., Any]:
    @wraps(method)
    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(id(self))
        # Not again for what a class inherits and calls itself.
        if path is None or is_inside_island() or calls.is_running(self):
            return method(self, *args, **kwargs)
        return calls.call(path, self, method, args, kwargs)

    return watched


def warned_once(
    loss_fn: Callable[..., Any],
    models_of: Callable[[tuple[Any, ...], dict[str, Any]], list[nn.Module]],
    warn: Callable[[str], None],
) -> Callable[..., Any]:
    """Return ``loss_fn``; its first call warns where half precision is lost.

    Args:
        loss_fn (Callable): As for ``nn.value_and_grad``.
        models_of (Callable): Returns the models, given a call's arguments.
        warn (Callable): Is given the sentence.
    """
    seen = False

    @wraps(loss_fn)
    def watched_loss_fn(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        if seen:
            return loss_fn(*args, **kwargs)
        models = models_of(args, kwargs)
        with watched_dtypes(*models) as calls:
            calls.names(loss_fn, args, kwargs)
            outputs = loss_fn(*args, **kwargs)
        seen = calls.are_seen
        layer = calls.first_wider()
        if layer is not None:
            warn(sentence(layer))
        for path in _with_half_statistics(models):
            warn(
                f"{path!r} keeps its running statistics in half precision, where small "
                "changes are lost and a variance above 65504 is inf. Before training: "
                "mlx_gradscale.float32_layers(model, lambda path, layer: "
                "isinstance(layer, nn.BatchNorm))."
            )
            break
        return outputs

    return watched_loss_fn


def _with_half_statistics(models: list[nn.Module]) -> list[str]:
    return [
        path
        for model in models
        for path, module in model.named_modules()
        if module.training and half_statistics(module)
    ]


def sentence(layer: LayerDtypes) -> str:
    """Say where half precision is lost, and what to do.

    Args:
        layer (LayerDtypes): One that ``is_wider``.
    """
    half = dtype_name(cast(mx.Dtype, layer.parameters))
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
        f"{name} has {half} parameters and computes in float32, {why} "
        f"{dtype_name(other)}; so does all that follows, which takes more time and "
        f"memory. {remedy} "
        "compute_dtypes() of mlx_gradscale.diagnostics shows every layer."
    )
