"""Trace a batch: every call of a layer, its largest values, and its error in half."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from ..core.forward import is_opaque
from ..core.intercept import watch
from .layers import computes_in_float32, first_half
from .trial import Trial, preserved
from .where import ordered_modules


@dataclass(eq=False)
class Call:
    """One call to a layer, or to the loss function if ``path`` is None.

    Attributes:
        path (str or None): The path of the layer; "" is the whole model.
        parameters (Dtype or None): The dtype of its own half-precision parameters.
        inputs (tuple): The dtypes of its floating-point inputs.
        outputs (tuple): The dtypes of its floating-point outputs.
        is_float32 (bool): Whether it is a float32 layer, or is called inside one.
        largest_input (float): The largest magnitude of its inputs, except of masks.
        largest_output (float): The largest magnitude of its outputs.
        error (float): How far its outputs are off in half precision, relative to their
            size: that of the worst row.
        children (list): The calls that it makes.
    """

    path: str | None
    parameters: mx.Dtype | None = None
    inputs: tuple[mx.Dtype, ...] = ()
    outputs: tuple[mx.Dtype, ...] = ()
    is_float32: bool = False
    largest_input: Any = 0.0
    largest_output: Any = 0.0
    error: Any = 0.0
    children: list["Call"] = field(default_factory=list)

    @property
    def largest(self) -> float:
        """The largest magnitude of its inputs and outputs."""
        return float(max(self.largest_input, self.largest_output))

    def walk(self) -> Iterator["Call"]:
        """Yield all calls inside this one in order of return, then this one."""
        for call in self.children:
            yield from call.walk()
        yield self


def trace(trial: Trial, half: mx.Dtype | None = None) -> tuple[Call, mx.array]:
    """Run a batch forward; return the call of the loss function, and the loss.

    With ``half``, each layer also runs in half precision on the same inputs, so that
    its error is its own. A layer runs once more for each layer that contains it. The
    numbers are lazy arrays; :func:`measure` evaluates them.
    """
    root = Call(None)
    # None while a layer runs in half precision, and in the backward pass.
    running: Call | None = root

    def handle(
        path: str, module: nn.Module, function: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        nonlocal running
        caller = running
        if caller is None:
            return function(*args, **kwargs)
        call = Call(path, first_half(module.values()))
        call.is_float32 = caller.is_float32 or computes_in_float32(module)
        caller.children.append(call)
        given, in_half = floats((args, kwargs)), []
        if half is not None:
            running = None
            in_half = floats(_run_in(half, module, function, args, kwargs))
        running = call
        outputs = function(*args, **kwargs)
        running = caller
        found = floats(outputs)
        call.inputs, call.outputs = (tuple(x.dtype for x in y) for y in (given, found))
        call.largest_input, call.largest_output = magnitude(given), magnitude(found)
        call.error = _distance(found, in_half)
        return outputs

    def loss_fn(*args: Any, **kwargs: Any) -> Any:
        nonlocal running
        outputs = trial.loss_fn(*args, **kwargs)
        running = None
        return outputs

    # A module with several paths gets one handler, for its first path.
    modules = [*ordered_modules(trial.model)]
    first = {id(module): (module, path) for path, module in reversed(modules)}
    pairs = [(module, partial(handle, path)) for module, path in first.values()]
    with preserved(trial.model), watch(pairs):
        loss, _ = replace(trial, loss_fn=loss_fn).differentiate()
    return root, loss


def measure(trial: Trial) -> tuple[Call, float]:
    """Trace a batch in float32, beside half precision, and evaluate all numbers."""
    half = trial.half or mx.float16
    with trial.in_float32() as exact:
        root, loss = trace(exact, half)
        names = "largest_input", "largest_output", "error"
        fields = [(call, name) for call in root.walk() for name in names]
        mx.eval([getattr(*each) for each in fields], loss)
    for call, name in fields:
        number = float(getattr(call, name))
        setattr(call, name, math.inf if math.isnan(number) else number)
    return root, float(loss)


def _run_in(
    half: mx.Dtype, module: nn.Module, function: Any, args: Any, kwargs: Any
) -> Any:
    """Run a layer in half precision; Dropout drops the same values as in float32.

    Values outside the range are clipped, such as a mask of float32's lowest number.
    """
    limit = float(mx.finfo(half).max)

    def cast(x: Any) -> Any:
        return mx.clip(x, -limit, limit).astype(half) if _is_float(x) else x

    args, kwargs = tree_map(cast, (args, kwargs), is_leaf=is_opaque)
    with preserved(module):
        module.apply(cast)
        return function(*args, **kwargs)


def _is_float(x: Any) -> bool:
    return isinstance(x, mx.array) and bool(mx.issubdtype(x.dtype, mx.floating))


def floats(tree: Any) -> list[mx.array]:
    """Return the non-empty floating-point arrays of arguments or outputs."""
    found = [x for _, x in tree_flatten([tree], is_leaf=is_opaque)]
    return [x for x in found if _is_float(x) and x.size]


def magnitude(arrays: list[mx.array]) -> mx.array:
    """Lazily compute the largest magnitude of arrays, which are not masks.

    A mask contains 0, and -inf or the lowest number of its dtype.
    """
    found = [mx.array(0.0)]
    for x in arrays:
        x = x.astype(mx.float32)
        largest = mx.max(mx.where(x == -math.inf, 0.0, mx.abs(x)))
        found.append(mx.where(mx.max(x) == 0, 0.0, largest))
    return mx.max(mx.stack(found))


def _distance(exact: list[mx.array], half: list[mx.array]) -> mx.array:
    """Return how far the worst row is off, relative to its size or that of most rows.

    So a single row that overflows is seen, and one that rounds to zero is not.
    """
    found = [mx.array(0.0)]
    for a, b in zip(exact, half, strict=False):
        width = a.shape[-1] if a.ndim else 1
        a, b = (x.astype(mx.float32).reshape(-1, width) for x in (a, b))
        off = mx.max(mx.where(mx.isfinite(a), mx.abs(b - a), 0.0), axis=-1)
        size = mx.max(mx.where(mx.isfinite(a), mx.abs(a), 0.0), axis=-1)
        size = mx.maximum(size, mx.maximum(mx.mean(size), 1e-12))
        found.append(mx.max(off / size))
    return mx.max(mx.stack(found))
