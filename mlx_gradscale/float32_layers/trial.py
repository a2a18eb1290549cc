"""Run a batch forward and backward, and measure inputs and outputs of every layer."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from ..core.finite import is_floating
from ..core.gradients import is_opaque, loss_of
from ..core.masters import to_float32
from ..core.scaler import GradScaler
from ..core.trees import commit, flatten, slots
from ..files.text import dtype_name
from .calls import Handler, handled, ordered_modules, owner_of
from .layers import float32_layers

# Sums with random signs: 64 of them give the distance between two arrays to about 20
# percent, without storing the arrays.
_SUMS = 64


@dataclass(eq=False)
class Value:
    """Statistics of a layer's input or output, or of its gradient.

    Attributes:
        path (str): The path of the layer; "" is the whole model.
        caller (str or None): The layer that called it; None for the loss function.
        side (str): "input" or "output".
        dtype (Dtype): The dtype of the array.
        count (int): The number of elements.
        measured (array): The result of :func:`measure`, lazy until :meth:`read`.
        has_gradient (bool): Whether it received a gradient.
        nan, positive_inf, negative_inf (int): The number of non-finite elements.
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
        """Fill in the measured values, divided by the loss scale."""
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
        """The largest magnitude that matters, ignoring masks such as -1e9."""
        return self.largest if self.has_gradient else self.maximum

    def distance(self, other: "Value") -> float:
        """Return the relative distance to ``other``, estimated from the sums."""
        return relative_distance([(self, other)])

    def __str__(self) -> str:
        counts = {"NaN": self.nan, "+inf": self.positive_inf, "-inf": self.negative_inf}
        found = ", ".join(f"{n} {name}" for name, n in counts.items() if n)
        return f"{found} of {self.count}, {dtype_name(self.dtype)}"


def relative_distance(pairs: list[tuple[Value, Value]]) -> float:
    """Return the joint relative distance between the two values of all pairs."""
    norm = sum(float(np.square(b.sums).sum()) for _, b in pairs)
    off = sum(float(np.square(a.sums - b.sums).sum()) for a, b in pairs)
    return (off / norm) ** 0.5 if norm else float(off > 0)


def measure(x: mx.array) -> mx.array:
    """Lazily compute counts of NaN and inf, the largest values and the sums."""
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
    # Hash the index: random numbers would have to be stored for the next run.
    bits = mx.arange(count, dtype=mx.uint32) * mx.array(2654435761, mx.uint32)
    bits = (bits ^ (bits >> 15)) * mx.array(2246822519, mx.uint32)
    return 1.0 - 2.0 * ((bits >> 16) & 1).astype(mx.float32)


@dataclass(eq=False)
class Call:
    """One call of a layer, or of the loss function, which has path None."""

    path: str | None
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    children: list["Call"] = field(default_factory=list)

    def largest_made(self) -> float:
        """Return the largest magnitude that this call computed itself.

        Arguments, and values passed on from one call to the next, do not count.
        """
        own = [value.magnitude for value in self.outputs]
        known = [value.magnitude for value in self.inputs]
        for child in self.children:
            inputs = [value.magnitude for value in child.inputs]
            own += [x for x in inputs if not is_one_of(x, known)]
            known += [value.magnitude for value in child.outputs]
        return max(own, default=0.0)

    def descendants(self) -> "Iterator[Call]":
        """Yield all calls nested in this one."""
        for child in self.children:
            yield child
            yield from child.descendants()


def is_one_of(x: float, others: list[float]) -> bool:
    """Return whether a magnitude matches that of another array, passed on."""
    return any(abs(x - other) <= 1e-3 * abs(other) for other in others)


class Run:
    """One forward and backward pass, with all values unscaled.

    Attributes:
        loss (float): The loss.
        scale (float): The loss scale of the backward pass.
        forward (list): The inputs and outputs of layers, in call order.
        backward (list): Their gradients, in the order of the backward pass.
        gradients (dict): The gradients of parameters by path; their ``caller`` is the
            module of the parameter.
        loss_call (Call): The call of the loss function, containing all others.
    """

    def __init__(self, paths: list[str], scale: float = 1.0):
        self.loss = math.nan
        self.scale = scale
        self.forward: list[Value] = []
        self.backward: list[Value] = []
        self.gradients: dict[str, Value] = {}
        self.loss_call = Call(None)
        self._paths = paths
        self._running = [self.loss_call]
        self._is_forward_done = False

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
        unscaled = [*self.forward, *self.gradients.values()]
        values = unscaled + self.backward
        rows = np.array(mx.stack([value.measured for value in values]))
        for i, (value, row) in enumerate(zip(values, rows, strict=True)):
            value.read(row, 1.0 if i < len(unscaled) else self.scale)
        self.loss = float(loss)

    def mark_end_of_forward(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the loss function to record when the forward pass ends."""

        def marked_loss_fn(*args: Any, **kwargs: Any) -> Any:
            outputs = loss_fn(*args, **kwargs)
            self._is_forward_done = True
            return outputs

        return marked_loss_fn

    def make_handler(self, path: str) -> Handler:
        """Return the handler that measures the inputs and outputs of one layer."""

        def handle(_: Any, function: Any, args: Any, kwargs: Any) -> Any:
            call, caller = Call(path), self._running[-1].path
            if not self._is_forward_done:
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
def probed(model: nn.Module, scale: float = 1.0) -> Iterator[Run]:
    """Measure the layers of a model, and restore it on exit."""
    run = Run([path for path, _ in ordered_modules(model)], scale)
    with handled(model, lambda path, _: run.make_handler(path)):
        yield run


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

    Args:
        setting (Setting): The model, loss function and options.
        batch (Batch): The arguments of the loss function.
        where (list, optional): The float32 layers. Default: the model's current ones.
        scale (float): The loss scale. Default: ``1.0``.
        in_float32 (bool): Run the whole model in float32. Default: ``False``.
    """
    if not flatten(setting.model.trainable_parameters()):
        raise ValueError("The model has no trainable parameters: unfreeze some.")
    with probed(setting.model, scale) as result:
        if in_float32:
            setting, where = Setting(setting.model, setting.loss_fn), []
            arguments = (batch.args, batch.kwargs)
            batch = Batch(*tree_map(_to_float32, arguments, is_leaf=is_opaque))
            commit(
                (container, key, to_float32(container[key]))
                for _, container, key in slots(setting.model)
                if not isinstance(container, tuple)
            )
        if where is not None:
            float32_layers(setting.model, where)
        loss_fn = result.mark_end_of_forward(setting.loss_fn)
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


def _to_float32(x: Any) -> Any:
    return to_float32(x) if isinstance(x, mx.array) else x
