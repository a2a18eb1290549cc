"""Watch every layer of a model, forward and backward, and put all back after."""

import contextlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from ..files.text import dtype_name
from ..islands.calls import METHODS, defines
from ..precision import is_leaf
from ..state_tree import at_once, restoring


@dataclass
class Event:
    """An array that entered or left a layer, or its gradient.

    Attributes:
        path (str): The layer's; "" is the whole model.
        caller (str or None): The path of the layer that called it; None for the loss
            function.
        side (str): "input" or "output".
        call (int): The number of the call, and ``within`` that of the one around it.
        dtype (Dtype): Of the array.
        size (int): Of the array.
        counts (Any): Of NaN, +inf and -inf, or what else the probes measure; lazily
            until :meth:`Probes.read`.
        differentiated (bool): Whether a gradient came back through it.
    """

    path: str
    caller: str | None
    side: str
    call: int
    within: int | None
    dtype: mx.Dtype
    size: int
    counts: Any
    differentiated: bool = False

    def __str__(self) -> str:
        counts = zip(("NaN", "+inf", "-inf"), self.counts, strict=False)
        found = ", ".join(f"{n:.0f} {name}" for name, n in counts if n)
        return f"{found} of {self.size}, {dtype_name(self.dtype)}"


@dataclass
class Probes:
    """What happened in one forward and backward pass, in the order it did."""

    paths: list[str]
    measure: Callable[[mx.array], mx.array]
    forward: list[Event] = field(default_factory=list)
    backward: list[Event] = field(default_factory=list)
    forward_done: bool = False
    calls: int = 0
    _running: list[tuple[str, int]] = field(default_factory=list)

    def call(
        self,
        path: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[Any, Any],
    ) -> Any:
        """Call a layer's function with probes on what goes in and comes out."""
        within = self._running[-1][1] if self._running else None
        here = (path, self._caller(path), self.calls, within)
        self.calls += 1
        args, kwargs = self._tap((args, kwargs), here, "input")
        self._running.append((path, here[2]))
        try:
            outputs = function(*args, **kwargs)
        finally:
            self._running.pop()
        return self._tap(outputs, here, "output")

    def ends_with(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the loss function: where it returns, the forward pass is done."""

        @wraps(loss_fn)
        def watched(*args: Any, **kwargs: Any) -> Any:
            outputs = loss_fn(*args, **kwargs)
            self.forward_done = True
            return outputs

        return watched

    def read(self) -> None:
        """Read the counts of all events from the device, at once."""
        events = self.forward + self.backward
        if events:
            table = np.array(mx.stack([event.counts for event in events]))
            for event, row in zip(events, table.tolist(), strict=True):
                event.counts = row

    def _caller(self, path: str) -> str | None:
        if self._running:
            return self._running[-1][0]
        if self.forward_done and path:
            # A checkpointed layer runs again in the backward pass, where nothing
            # shows who called it: take the module that it is in.
            above = [p for p in self.paths if not p or path.startswith(f"{p}.")]
            return max(above, key=len)
        return None

    def _tap(self, tree: Any, here: tuple[Any, ...], side: str) -> Any:
        path, caller, call, within = here

        def tap(x: Any) -> Any:
            if not isinstance(x, mx.array) or not mx.issubdtype(x.dtype, mx.floating):
                return x
            where = (path, caller, side, call, within)
            event = Event(*where, x.dtype, x.size, self.measure(x))
            if not self.forward_done:
                self.forward.append(event)
            return self._watch_gradient(x, event)

        return tree_map(tap, tree, is_leaf=is_leaf)

    def _watch_gradient(self, x: mx.array, event: Event) -> mx.array:
        @mx.custom_function
        def identity(x: mx.array) -> mx.array:
            return x

        @identity.vjp
        def identity_vjp(_: Any, cotangent: mx.array, __: Any) -> mx.array:
            event.differentiated = True
            counts = self.measure(cotangent)
            self.backward.append(replace(event, dtype=cotangent.dtype, counts=counts))
            return cotangent

        return cast(mx.array, identity(x))


@contextlib.contextmanager
def probed(
    model: nn.Module, measure: Callable[[mx.array], mx.array] | None = None
) -> Iterator[Probes]:
    """Watch the layers of ``model``, which comes out as it was.

    Args:
        model (nn.Module): The model.
        measure (Callable, optional): What to note of each array, lazily: a vector.
            Default: how often it holds NaN, +inf and -inf.
    """
    # A call is looked up on the type, so each layer gets a class of its own for
    # the while. Shared layers go by their first name.
    layers: dict[int, tuple[str, nn.Module]] = {}
    for path, layer in sorted(model.named_modules(), key=lambda item: item[0]):
        layers.setdefault(id(layer), (path, layer))
    probes = Probes([path for path, _ in layers.values()], measure or _count)
    with unchanged(model):
        for path, layer in layers.values():
            object.__setattr__(layer, "__class__", _watched(type(layer), path, probes))
        yield probes


def _watched(cls: type, path: str, probes: Probes) -> type:
    def watch(name: str) -> Callable[..., Any]:
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Not that of the class: an island's is found only by calling it.
            function = getattr(super(watched, self), name)
            return probes.call(path, function, args, kwargs)

        return method

    body = {name: watch(name) for name in METHODS if defines(cls, name)}
    watched = types.new_class(
        cls.__name__, (cls,), exec_body=lambda ns: ns.update(body)
    )
    return watched


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Undo whatever happens to a model, the random state and compilation."""
    containers = list(_containers(model))
    saved = [(x, dict(x) if isinstance(x, dict) else list(x)) for x in containers]
    attributes = [
        (x, type(x), dict(vars(x))) for x in containers if isinstance(x, nn.Module)
    ]
    random_state: Any = mx.random.state
    high, low = random_state[0].tolist()
    # A key is its seed in two halves.
    undo: list[Callable[[], Any]] = [partial(mx.random.seed, high << 32 | low)]
    if _compiles():
        undo.append(mx.enable_compile)
    undo += restoring(saved)
    for module, cls, own in attributes:
        undo.append(partial(object.__setattr__, module, "__class__", cls))
        undo += restoring([(vars(module), own)])
    put_back = at_once(undo)
    try:
        # Inside a compiled function a layer's values cannot be seen.
        mx.disable_compile()
        yield
    finally:
        put_back()


def _containers(tree: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Yield every dict, module and list in a tree, once."""
    seen = set() if seen is None else seen
    if not isinstance(tree, (dict, list, tuple)) or id(tree) in seen:
        return
    seen.add(id(tree))
    if not isinstance(tree, tuple):
        yield tree
    for value in tree.values() if isinstance(tree, dict) else tree:
        yield from _containers(value, seen)


def _compiles() -> bool:
    """Tell whether ``mx.compile`` is on, which MLX does not say."""
    calls = []

    def function(x: mx.array) -> mx.array:
        calls.append(1)
        return x + 1

    compiled = mx.compile(function)
    for _ in range(2):
        compiled(mx.array(0))
    return len(calls) == 1


def _count(x: mx.array) -> mx.array:
    """Count NaN, +inf and -inf, lazily."""
    return mx.stack([mx.sum(f(x)) for f in (mx.isnan, mx.isposinf, mx.isneginf)])
