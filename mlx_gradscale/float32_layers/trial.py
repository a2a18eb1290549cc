"""Run a batch forward and backward, and measure inputs and outputs of every layer."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from ..core.finite import is_floating
from ..core.gradients import is_opaque, loss_of
from ..core.scaler import GradScaler
from ..core.trees import flatten
from ..files.text import dtype_name
from .calls import Handler, handled, ordered_modules, owner_of
from .layers import float32_layers

# Sums with random signs: 64 of them give the distance between two arrays to about 20
# percent, without storing the arrays.
_SUMS = 64


@dataclass(eq=False)
class Value:
    """Statistics of a layer's input or output, or of its unscaled gradient.

    Attributes:
        caller (str or None): The layer that called it; None for the loss function.
        side (str): "input", "output", or "gradient" for a parameter's gradient.
        measured (array): The result of :func:`measure`, lazy until :meth:`read`.
        largest (float): The largest finite magnitude.
        maximum (float): The largest finite value; a mask of -1e9 has none.
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

    def read(self, row: np.ndarray) -> None:
        """Fill in the measured values."""
        self.nan, self.positive_inf, self.negative_inf = map(int, row[:3])
        self.largest, self.maximum = map(float, row[3:5])
        self.sums = row[5:].astype(np.float64)
        self.measured = mx.array(0)

    @property
    def is_finite(self) -> bool:
        """Whether no element is NaN or infinite."""
        return not (self.nan or self.positive_inf or self.negative_inf)

    @property
    def magnitude(self) -> float:
        """The largest magnitude that matters, ignoring masks such as -1e9."""
        return self.largest if self.has_gradient else self.maximum

    def __str__(self) -> str:
        counts = {"NaN": self.nan, "+inf": self.positive_inf, "-inf": self.negative_inf}
        found = ", ".join(f"{n} {name}" for name, n in counts.items() if n)
        return f"{found} of {self.count}, {dtype_name(self.dtype)}"


def relative_distance(pairs: Sequence[tuple[Value, Value]]) -> float:
    """Return the joint relative distance between the two values of all pairs."""
    norm = sum(float(np.square(b.sums).sum()) for _, b in pairs)
    off = sum(float(np.square(a.sums - b.sums).sum()) for a, b in pairs)
    return (off / norm) ** 0.5 if norm else float(off > 0)


def measure(x: mx.array, scale: float = 1.0) -> mx.array:
    """Lazily compute counts of NaN and inf, the largest unscaled values, and sums."""
    if not x.size:
        return mx.zeros(5 + _SUMS)
    nan, positive, negative = mx.isnan(x), mx.isposinf(x), mx.isneginf(x)
    finite = mx.where(nan | positive | negative, 0, x).astype(mx.float32).reshape(-1)
    counts = [mx.sum(each).astype(mx.float32) for each in (nan, positive, negative)]
    largest = mx.stack([mx.max(mx.abs(finite)), mx.max(finite)]) / scale
    # Hash the index: random signs would have to be stored for the next run.
    bits = mx.arange(x.size, dtype=mx.uint32) * mx.array(2654435761, mx.uint32)
    bits = (bits ^ (bits >> 15)) * mx.array(2246822519, mx.uint32)
    signs = 1.0 - 2.0 * ((bits >> 16) & 1).astype(mx.float32)
    signed = mx.concatenate([finite * signs, mx.zeros(-x.size % _SUMS)])
    sums = signed.reshape(-1, _SUMS).sum(axis=0) / scale
    return mx.concatenate([mx.stack(counts), largest, sums])


@dataclass(eq=False)
class Call:
    """One call of a layer, or of the loss function, which has path None."""

    path: str | None
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    children: list["Call"] = field(default_factory=list)


class Run:
    """One forward and backward pass, with all values unscaled.

    Attributes:
        forward (list): The inputs and outputs of layers, in call order.
        backward (list): Their gradients, in the order of the backward pass.
        gradients (dict): The gradients of parameters by path; their ``caller`` is the
            module of the parameter.
        loss_call (Call): The call of the loss function, containing all others.
    """

    def __init__(self, paths: list[str], scale: float):
        self.loss = math.nan
        self.scale = scale
        self.forward: list[Value] = []
        self.backward: list[Value] = []
        self.gradients: dict[str, Value] = {}
        self.loss_call = Call(None)
        self._paths = paths
        self._running = [self.loss_call]
        self.is_forward_done = False

    @property
    def has_finite_gradients(self) -> bool:
        """Whether the gradients of all parameters are finite."""
        return all(value.is_finite for value in self.gradients.values())

    @property
    def is_finite(self) -> bool:
        """Whether the loss and all gradients are finite."""
        return math.isfinite(self.loss) and self.has_finite_gradients

    def gradient_distance(self, other: "Run") -> float:
        """Return the joint relative distance of all gradients to another run's."""
        return relative_distance(
            [(value, other.gradients[path]) for path, value in self.gradients.items()]
        )

    def read(self, loss: mx.array, gradients: Any) -> None:
        """Evaluate everything, and keep the statistics of the unscaled gradients."""
        for path, x in flatten(gradients):
            if is_floating(x):
                owner, size = owner_of(self._paths, path), measure(x)
                value = Value(path, owner, "gradient", x.dtype, x.size, size, True)
                self.gradients[path] = value
        # Free the gradients early.
        gradients.clear()
        values = [*self.forward, *self.backward, *self.gradients.values()]
        rows = np.array(mx.stack([value.measured for value in values]))
        for value, row in zip(values, rows, strict=True):
            value.read(row)
        self.loss = float(loss)

    def make_handler(self, path: str) -> Handler:
        """Return the handler that measures the inputs and outputs of one layer."""

        def handle(_: Any, function: Any, args: Any, kwargs: Any) -> Any:
            call, caller = Call(path), self._running[-1].path
            if not self.is_forward_done:
                self._running[-1].children.append(call)
            elif caller is None and path:
                # A checkpointed layer runs again in the backward pass, where its caller
                # is unknown: use the enclosing module.
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
            if not self.is_forward_done:
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
            measured = measure(cotangent, self.scale)
            self.backward.append(
                replace(value, dtype=cotangent.dtype, measured=measured)
            )
            return cotangent

        return cast(mx.array, identity(x))


@dataclass
class Batch:
    """The arguments of a loss function."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """The model and loss to run, with the options of ``GradScaler.value_and_grad``."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    compute_dtype: mx.Dtype | None = None
    cast_inputs: bool = True
    keep: Callable[[str, mx.array], bool] | None = None


def run(
    setting: Setting,
    batch: Batch,
    where: Sequence[str] | None = None,
    *,
    scale: float = 1.0,
    in_float32: bool = False,
) -> Run:
    """Run a batch forward and backward without changing the model.

    The float32 layers are ``where``, or else the model's current ones.
    """
    if not flatten(setting.model.trainable_parameters()):
        raise ValueError("The model has no trainable parameters. Unfreeze some.")
    result = Run([path for path, _ in ordered_modules(setting.model)], scale)
    with handled(setting.model, lambda path, _: result.make_handler(path)):
        if in_float32:
            # Frozen parameters as well, which compute_dtype leaves alone.
            setting.model.set_dtype(mx.float32)
            setting, where = Setting(setting.model, setting.loss_fn, mx.float32), []
        if where is not None:
            float32_layers(setting.model, where)

        def loss_fn(*args: Any, **kwargs: Any) -> Any:
            outputs = setting.loss_fn(*args, **kwargs)
            result.is_forward_done = True
            return outputs

        result.read(*differentiate(replace(setting, loss_fn=loss_fn), batch, scale))
    return result


def differentiate(
    setting: Setting, batch: Batch, scale: float = 1.0
) -> tuple[mx.array, Any]:
    """Lazily compute the loss and its unscaled gradients, without warnings."""
    loss_and_grad = GradScaler(init_scale=scale, dynamic=False).value_and_grad(
        setting.model,
        setting.loss_fn,
        setting.compute_dtype,
        keep=setting.keep,
        cast_inputs=setting.cast_inputs,
    )
    with warnings.catch_warnings():
        # The reports say what is wrong; warnings from trial runs would repeat it.
        warnings.simplefilter("ignore")
        outputs, grads = loss_and_grad(*batch.args, **batch.kwargs)
    return loss_of(outputs), grads
