"""Measure the values at the edges of every layer, forward and backward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from ..core.gradients import is_opaque
from ..files.text import dtype_name
from .calls import Handler, handled, ordered_modules, owner_of

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
        return relative_distance([(self, other)])

    def __str__(self) -> str:
        counts = {"NaN": self.nan, "+inf": self.positive_inf, "-inf": self.negative_inf}
        found = ", ".join(f"{n} {name}" for name, n in counts.items() if n)
        return f"{found} of {self.count}, {dtype_name(self.dtype)}"


def relative_distance(pairs: list[tuple[Value, Value]]) -> float:
    """Return how far the first values of pairs are from the second, all together."""
    norm = sum(float(np.square(b.sums).sum()) for _, b in pairs)
    off = sum(float(np.square(a.sums - b.sums).sum()) for a, b in pairs)
    return (off / norm) ** 0.5 if norm else float(off > 0)


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


@dataclass(eq=False)
class Call:
    """One call of a layer, or of the loss function, whose path is None."""

    path: str | None
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    children: list["Call"] = field(default_factory=list)

    def largest_made(self) -> float:
        """Return the largest magnitude that this call computed itself.

        Its arguments, and what it passes from one call to the next, are not its own.
        """
        own = [value.magnitude for value in self.outputs]
        known = [value.magnitude for value in self.inputs]
        for child in self.children:
            inputs = [value.magnitude for value in child.inputs]
            own += [x for x in inputs if not is_one_of(x, known)]
            known += [value.magnitude for value in child.outputs]
        return max(own, default=0.0)

    def descendants(self) -> "Iterator[Call]":
        """Yield all calls within this one."""
        for child in self.children:
            yield child
            yield from child.descendants()


def is_one_of(x: float, others: list[float]) -> bool:
    """Tell whether a magnitude is that of another array, passed on."""
    return any(abs(x - other) <= 1e-3 * abs(other) for other in others)


class Probes:
    """The values of one pass, in the order in which they were computed.

    Attributes:
        forward (list): The values at the edges of layers.
        backward (list): Their gradients.
        loss_call (Call): The call of the loss function, with all others in it.
    """

    def __init__(self, paths: list[str]):
        self.forward: list[Value] = []
        self.backward: list[Value] = []
        self.loss_call = Call(None)
        self._paths = paths
        self._running = [self.loss_call]
        self._is_forward_done = False

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
            call, caller = Call(path), self._running[-1].path
            if not self._is_forward_done:
                self._running[-1].children.append(call)
            elif caller is None and path:
                # A checkpointed layer runs again in the backward pass, where its caller
                # is unknown: take the module around it.
                caller = owner_of([p for p in self._paths if p != path], path)
            args, kwargs = self._tap((args, kwargs), call, caller, "input")
            self._running.append(call)
            try:
                outputs = function(*args, **kwargs)
            finally:
                self._running.pop()
            return self._tap(outputs, call, caller, "output")

        return handle

    def _tap(self, tree: Any, call: Call, caller: str | None, side: str) -> Any:
        def tap(x: Any) -> Any:
            if not isinstance(x, mx.array) or not mx.issubdtype(x.dtype, mx.floating):
                return x
            value = Value(call.path or "", caller, side, x.dtype, x.size, measure(x))
            (call.inputs if side == "input" else call.outputs).append(value)
            if not self._is_forward_done:
                self.forward.append(value)
            return self._tap_gradient(x, value)

        return tree_map(tap, tree, is_leaf=is_opaque)

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


@contextmanager
def probed(model: nn.Module) -> Iterator[Probes]:
    """Measure the layers of a model, which is unchanged afterwards."""
    probes = Probes([path for path, _ in ordered_modules(model)])
    with handled(model, lambda path, _: probes.make_handler(path)):
        yield probes
