"""Measure the values at the edges of every layer, forward and backward."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from ..core.trees import restore, snapshot
from ..files.text import dtype_name
from .calls import Handler, get_handlers, set_handlers
from .where import ordered_modules

# Sums with random signs: from 64 of them the distance of two arrays is known to some
# 20 percent, without the arrays.
_SUMS = 64


@dataclass(eq=False)
class Value:
    """An array that entered or left a layer, or its gradient: its size, not itself.

    Attributes:
        path (str): The path of the layer; "" is the whole model.
        caller (str or None): The layer that called it; None for the loss function.
        side (str): "input" or "output".
        call (int): The number of the call; ``within`` is that of the call around it.
        dtype (Dtype): Of the array.
        count (int): The number of elements.
        measured (array): What :func:`measure` returned, lazy until :meth:`read`.
        has_gradient (bool): Whether a gradient came back through it.
        nan (int): How many elements are NaN.
        positive_inf (int): How many are +inf.
        negative_inf (int): How many are -inf.
        largest (float): The largest finite magnitude.
        maximum (float): The largest finite value; a mask of -1e9 has none.
        sums (np.ndarray): Sums of the finite elements with random signs.
    """

    path: str
    caller: str | None
    side: str
    call: int
    within: int | None
    dtype: mx.Dtype
    count: int
    measured: mx.array
    has_gradient: bool = False
    nan: int = 0
    positive_inf: int = 0
    negative_inf: int = 0
    largest: float = 0.0
    maximum: float = 0.0
    sums: np.ndarray = field(default_factory=lambda: np.zeros(_SUMS))

    def read(self, row: np.ndarray, scale: float = 1.0) -> None:
        """Fill in what was measured, with the loss scale taken out."""
        self.nan, self.positive_inf, self.negative_inf = map(int, row[:3])
        self.largest, self.maximum = float(row[3]) / scale, float(row[4]) / scale
        self.sums = row[5:].astype(np.float64) / scale
        self.measured = mx.array(0)

    @property
    def is_finite(self) -> bool:
        """Whether no element is NaN or infinite."""
        return not (self.nan or self.positive_inf or self.negative_inf)

    @property
    def magnitude(self) -> float:
        """The largest magnitude that matters: a mask of -1e9 does not."""
        return self.largest if self.has_gradient else self.maximum

    def distance(self, other: "Value") -> float:
        """Return the relative distance to ``other``, estimated from the sums."""
        norm = float(np.linalg.norm(other.sums))
        off = float(np.linalg.norm(self.sums - other.sums))
        return off / norm if norm else float(off > 0)

    def __str__(self) -> str:
        counts = {"NaN": self.nan, "+inf": self.positive_inf, "-inf": self.negative_inf}
        found = ", ".join(f"{n} {name}" for name, n in counts.items() if n)
        return f"{found} of {self.count}, {dtype_name(self.dtype)}"


def measure(x: mx.array) -> mx.array:
    """Return counts of NaN and inf, the largest values and the sums, lazily."""
    if not x.size:
        return mx.zeros(5 + _SUMS)
    nan, positive, negative = mx.isnan(x), mx.isposinf(x), mx.isneginf(x)
    finite = mx.where(nan | positive | negative, 0, x).astype(mx.float32).reshape(-1)
    counts = [mx.sum(each).astype(mx.float32) for each in (nan, positive, negative)]
    largest = [mx.max(mx.abs(finite)), mx.max(finite)]
    signed = mx.concatenate([finite * _signs(x.size), mx.zeros(-x.size % _SUMS)])
    sums = signed.reshape(-1, _SUMS).sum(axis=0)
    return mx.concatenate([mx.stack(counts + largest), sums])


def _signs(count: int) -> mx.array:
    # A hash of the index: random numbers would have to be stored for the next run.
    bits = mx.arange(count, dtype=mx.uint32) * mx.array(2654435761, mx.uint32)
    bits = (bits ^ (bits >> 15)) * mx.array(2246822519, mx.uint32)
    return 1.0 - 2.0 * ((bits >> 16) & 1).astype(mx.float32)


class Probes:
    """The values of one forward and backward pass, in the order they were computed."""

    def __init__(self, paths: list[str]):
        self.forward: list[Value] = []
        self.backward: list[Value] = []
        self._paths = paths
        self._is_forward_done = False
        self._n_calls = 0
        self._running: list[tuple[str, int]] = []

    def mark_end_of_forward(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the loss function: the forward pass ends where it returns."""

        def marked_loss_fn(*args: Any, **kwargs: Any) -> Any:
            outputs = loss_fn(*args, **kwargs)
            self._is_forward_done = True
            return outputs

        return marked_loss_fn

    def make_handler(self, path: str) -> Handler:
        """Return the handler that measures what goes in and out of one layer."""

        def handle(_: Any, function: Any, args: Any, kwargs: Any) -> Any:
            within = self._running[-1][1] if self._running else None
            here = (path, self._caller(path), self._n_calls, within)
            self._n_calls += 1
            args, kwargs = self._tap((args, kwargs), here, "input")
            self._running.append((path, here[2]))
            try:
                outputs = function(*args, **kwargs)
            finally:
                self._running.pop()
            return self._tap(outputs, here, "output")

        return handle

    def _caller(self, path: str) -> str | None:
        if self._running:
            return self._running[-1][0]
        if self._is_forward_done and path:
            # A checkpointed layer runs again in the backward pass, where its caller is
            # unknown: take the module around it.
            around = [p for p in self._paths if not p or path.startswith(f"{p}.")]
            return max(around, key=len)
        return None

    def _tap(self, tree: Any, here: tuple[Any, ...], side: str) -> Any:
        path, caller, call, within = here

        def tap(x: Any) -> Any:
            if not isinstance(x, mx.array) or not mx.issubdtype(x.dtype, mx.floating):
                return x
            where = (path, caller, side, call, within)
            value = Value(*where, x.dtype, x.size, measure(x))
            if not self._is_forward_done:
                self.forward.append(value)
            return self._tap_gradient(x, value)

        return tree_map(tap, tree, is_leaf=is_module)

    def _tap_gradient(self, x: mx.array, value: Value) -> mx.array:
        @mx.custom_function
        def identity(x: mx.array) -> mx.array:
            return x

        @identity.vjp
        def identity_vjp(_: Any, cotangent: mx.array, __: Any) -> mx.array:
            value.has_gradient = True
            self.backward.append(
                replace(value, dtype=cotangent.dtype, measured=measure(cotangent))
            )
            return cotangent

        return cast(mx.array, identity(x))


def is_module(x: Any) -> bool:
    """Tell whether a tree of arguments ends here, although a module is a dict."""
    return isinstance(x, nn.Module)


@contextlib.contextmanager
def probed(model: nn.Module) -> Iterator[Probes]:
    """Measure the layers of a model, which is unchanged afterwards."""
    probes = Probes([path for path, _ in ordered_modules(model)])
    with handled(model, lambda path, _: probes.make_handler(path)):
        yield probes


@contextlib.contextmanager
def handled(
    model: nn.Module, make_handler: Callable[[str, nn.Module], Handler]
) -> Iterator[None]:
    """Let every layer of a model go through a handler within a ``with`` block.

    The model, its modules' classes and the random state are restored afterwards.

    Args:
        model (nn.Module): The model.
        make_handler (Callable): Is given path and module; a shared module has the first
            of its paths.
    """
    modules: dict[int, tuple[str, nn.Module]] = {}
    for path, module in ordered_modules(model):
        modules.setdefault(id(module), (path, module))
    with preserved(model):
        for path, module in modules.values():
            handler = make_handler(path, module)
            set_handlers(module, (*get_handlers(module), handler))
        yield


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore a model and the random state afterwards; run without ``mx.compile``."""
    saved = snapshot(model)
    attributes = [(m, type(m), dict(vars(m))) for _, m in ordered_modules(model)]
    random_state: Any = mx.random.state
    high, low = random_state[0].tolist()
    compiles = _is_compile_enabled()
    try:
        # Inside of a compiled function a layer's values cannot be seen.
        mx.disable_compile()
        yield
    finally:
        if compiles:
            mx.enable_compile()
        # A key is its seed in two halves.
        mx.random.seed(high << 32 | low)
        restore(saved)
        for module, cls, own in attributes:
            object.__setattr__(module, "__class__", cls)
            vars(module).clear()
            vars(module).update(own)


def _is_compile_enabled() -> bool:
    """Tell whether ``mx.compile`` compiles; MLX has no function for that."""
    calls = []

    def count(x: mx.array) -> mx.array:
        calls.append(1)
        return x + 1

    compiled = mx.compile(count)
    for _ in range(2):
        compiled(mx.array(0))
    return len(calls) == 1
