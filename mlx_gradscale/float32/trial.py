"""Run a batch forward and backward, and measure the values and gradients of layers."""

import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from ..core.backward import loss_of
from ..core.forward import Casting, is_opaque, rebuild
from ..core.intercept import Handler, get_handlers, set_handlers
from ..core.masters import HALF
from ..core.scaler import GradScaler
from ..core.trees import flatten, is_floating, leaves, restore, snapshot
from ..files.text import dtype_name
from ..nonfinite_leaves import count_nonfinite
from .layers import computes_in_float32, first_half, float32_layers
from .where import ordered_modules, owner_of

# Seconds before progress is printed: shorter work ends before anyone wonders.
_DELAY = 3.0
# 64 sums with random signs give the distance between two arrays to within about 20
# percent, without storing the arrays.
_SUMS = 64
# Rounding in both passes affects gradients, so they may differ more than the loss, but
# never by as much as gradients that are all zero, whose relative distance is 1.
_GRADIENT_TOLERANCE, _FARTHEST = 10, 0.9


class Progress:
    """Count the trial runs of a diagnostic, and print them if it takes long."""

    def __init__(self, name: str):
        self._name, self._count, self._start = name, 0, time.monotonic()

    def show(self, run: str) -> None:
        """Report the run that is about to start."""
        self._count += 1
        if time.monotonic() - self._start >= _DELAY:
            text = f"{self._name}, run {self._count}: {run}"
            print(text, file=sys.stderr, flush=True)


class Value:
    """Statistics of a layer's input or output, or of an unscaled gradient.

    ``path`` is that of the layer or the parameter. ``caller`` is the layer that made
    the call or owns the parameter, or None for the loss function. ``side`` is "input",
    "output", or one of the keys with "gradient" in ``faults._describe``. ``other`` is
    the same value in the reference run, if any.
    """

    def __init__(
        self, x: mx.array, path: str, caller: str | None, side: str, scale: float = 1.0
    ):
        self.path, self.caller, self.side = path, caller, side
        self.size, self.dtype = x.size, x.dtype
        self.has_gradient = self.is_gradient = side.endswith("gradient")
        self.measured = measure(x, scale)
        self.other: Value | None = None

    def read(self, row: np.ndarray) -> None:
        """Set the statistics from an evaluated result of :func:`measure`."""
        self.nan, self.positive_inf, self.negative_inf = map(int, row[:3])
        self.largest, self.maximum = map(float, row[3:5])
        self.sums = row[5:].astype(np.float64)
        del self.measured

    @property
    def is_finite(self) -> bool:
        """Whether all elements are finite."""
        return not (self.nan or self.positive_inf or self.negative_inf)

    @property
    def is_mask(self) -> bool:
        """Whether this looks like a mask: its maximum is 0, and it has no gradient."""
        return self.maximum == 0 and not self.has_gradient

    @property
    def magnitude(self) -> float:
        """The largest finite magnitude; 0 for a mask."""
        return 0.0 if self.is_mask else self.largest

    def __str__(self) -> str:
        counts = self.nan, self.positive_inf, self.negative_inf
        pairs = zip(counts, ("NaN", "+inf", "-inf"), strict=True)
        found = " and ".join(f"{n} {name}" for n, name in pairs if n)
        return f"{found} out of {self.size} {dtype_name(self.dtype)} values"


def relative_distance(values: Iterable[Value]) -> float:
    """Estimate the relative distance of some values from those of the reference run."""
    pairs = [(value.sums, value.other.sums) for value in values if value.other]
    norm = sum(float(np.square(b).sum()) for _, b in pairs)
    off = sum(float(np.square(a - b).sum()) for a, b in pairs)
    return (off / norm) ** 0.5 if norm else float(off > 0)


def measure(x: mx.array, scale: float) -> mx.array:
    """Return the unscaled statistics of an array as one lazy row for ``Value.read``."""
    if not x.size:
        return mx.zeros(5 + _SUMS)
    counts = count_nonfinite(x).astype(mx.float32)
    is_finite, x = mx.isfinite(x).reshape(-1), x.astype(mx.float32).reshape(-1)
    finite = mx.where(is_finite, x, 0.0)
    maximum = mx.max(mx.where(is_finite, x, -math.inf))
    largest = mx.stack([mx.max(mx.abs(finite)), maximum]) / scale
    # Hash the index to get the same signs in every run without storing them.
    bits = mx.arange(x.size, dtype=mx.uint32) * mx.array(2654435761, mx.uint32)
    bits = (bits ^ (bits >> 15)) * mx.array(2246822519, mx.uint32)
    signs = 1.0 - 2.0 * ((bits >> 16) & 1).astype(mx.float32)
    signed = mx.concatenate([finite * signs, mx.zeros(-x.size % _SUMS)])
    sums = signed.reshape(-1, _SUMS).sum(axis=0) / scale
    return mx.concatenate([counts, largest, sums])


@dataclass(eq=False)
class Call:
    """One call to a layer, or to the loss function if ``path`` is None.

    Attributes:
        parameters (Dtype or None): The dtype of the layer's own half-precision arrays.
        is_float32 (bool): Whether this is a float32 layer, or inside one.
    """

    path: str | None
    parameters: mx.Dtype | None = None
    is_float32: bool = False
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    children: list["Call"] = field(default_factory=list)


class Run:
    """The measurements of one forward and backward pass, with gradients unscaled.

    ``values`` has all values in the order of computation, with keys that are the same
    in every run. ``loss_call`` is the call to the loss function, which contains all
    other calls.
    """

    def __init__(self, paths: list[str], scale: float):
        self.paths, self.scale = paths, scale
        self.reference: Run | None = None
        self.values: dict[tuple[str, str, int], Value] = {}
        self.loss_call = Call(None)
        self.is_forward_done = False
        self._tolerance = 0.0
        self._running = [self.loss_call]
        self._seen: Counter[tuple[str, str]] = Counter()

    @property
    def is_loss_off(self) -> bool:
        """Whether the loss is non-finite, or too far from that of the reference run."""
        allowed = self._tolerance * max(abs(self.expected_loss), 1e-6)
        # Negated, because every comparison with NaN is False.
        return not abs(self.loss - self.expected_loss) <= allowed

    @property
    def is_good(self) -> bool:
        """Whether loss and gradients are finite and close to any reference run."""
        if self.is_loss_off or not self.has_finite_gradients:
            return False
        allowed = min(_GRADIENT_TOLERANCE * self._tolerance, _FARTHEST)
        return relative_distance(self.gradients) <= allowed

    def read(self, loss: mx.array, gradients: Any) -> None:
        """Add the parameter gradients, and evaluate the loss and all statistics."""
        for path, x in flatten(gradients):
            if is_floating(x):
                owner = owner_of(self.paths, path)
                self._add(Value(x, path, owner, "parameter gradient"))
        # Drop the references, so that each gradient is freed once it is measured.
        gradients.clear()
        rows = np.array(mx.stack([value.measured for value in self.values.values()]))
        for value, row in zip(self.values.values(), rows, strict=True):
            value.read(row)
        self.forward = [x for x in self.values.values() if not x.is_gradient]
        self.backward = [x for x in self.values.values() if x.is_gradient]
        self.gradients = [x for x in self.backward if x.side.startswith("parameter")]
        self.has_finite_gradients = all(x.is_finite for x in self.gradients)
        self.loss = self.expected_loss = float(loss)

    def compare(self, reference: "Run", tolerance: float) -> None:
        """Compare all values with those of a reference run from now on."""
        self.reference, self._tolerance = reference, tolerance
        self.expected_loss = reference.loss
        for key, value in self.values.items():
            value.other = reference.values.get(key)

    def _add(self, value: Value) -> None:
        place = value.path, value.side
        self.values[(*place, self._seen[place])] = value
        self._seen[place] += 1

    def make_handler(self, path: str) -> Handler:
        """Return the handler that measures the inputs and outputs of one layer."""

        def handle(module: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            outer = self._running[-1]
            caller = outer.path
            is_float32 = outer.is_float32 or computes_in_float32(module)
            call = Call(path, first_half(module.values()), is_float32)
            if not self.is_forward_done:
                outer.children.append(call)
            elif caller is None and path:
                # A checkpointed layer runs again in the backward pass, where its caller
                # is unknown: use the enclosing module.
                caller = owner_of([p for p in self.paths if p != path], path)
            self._running.append(call)
            tap = self._make_tap(call, caller, "input")
            try:
                args, kwargs = rebuild((args, kwargs), tap)
                outputs = function(*args, **kwargs)
            finally:
                self._running.pop()
            tap = self._make_tap(call, caller, "output")
            return tree_map(tap, outputs, is_leaf=is_opaque)

        return handle

    def _make_tap(self, call: Call, caller: str | None, side: str) -> Any:
        """Return a function that measures an array and its gradient."""

        def tap(x: Any) -> Any:
            if not isinstance(x, mx.array) or not mx.issubdtype(x.dtype, mx.floating):
                return x
            value = Value(x, call.path or "", caller, side)
            (call.inputs if side == "input" else call.outputs).append(value)
            if not self.is_forward_done:
                self._add(value)
            identity: Any = mx.custom_function(lambda x: x)
            identity.vjp(lambda _, cotangent, __: self._note(value, cotangent))
            return identity(x)

        return tap

    def _note(self, value: Value, gradient: mx.array) -> mx.array:
        value.has_gradient = True
        place = value.path, value.caller, f"{value.side} gradient"
        self._add(Value(gradient, *place, self.scale))
        return gradient


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


@dataclass(frozen=True)
class Trial:
    """A model, a loss and one batch, with the casts of ``value_and_grad``.

    If ``reference`` is a float32 run, all values are compared with that run, and the
    relative difference of the loss may be at most ``tolerance``, and that of the
    gradients ten times as much. ``name`` identifies the batch in messages.
    """

    model: nn.Module
    loss_fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    casting: Casting = field(default_factory=Casting)
    reference: Run | None = None
    tolerance: float = 0.0
    name: str = "The batch"

    @property
    def half(self) -> mx.Dtype | None:
        """The half-precision dtype of the pass; float16 if there are two."""
        own = {x.dtype for x in leaves(self.model.parameters())}
        dtypes = {self.casting.compute_dtype} if self.casting.compute_dtype else own
        return next((dtype for dtype in HALF if dtype in dtypes), None)

    def run(
        self,
        where: Sequence[str] | None = None,
        scale: float = 1.0,
        evaluate: bool = True,
    ) -> Run:
        """Measure a forward and backward pass of the batch, without changing the model.

        ``where`` replaces the model's float32 layers for this run; None keeps them.
        With ``evaluate=False``, only the calls and their dtypes are known.
        """
        if not flatten(self.model.trainable_parameters()):
            raise ValueError("The model has no trainable parameters. Unfreeze some.")
        modules = ordered_modules(self.model)
        result = Run([path for path, _ in modules], scale)

        def loss_fn(*args: Any, **kwargs: Any) -> Any:
            outputs = self.loss_fn(*args, **kwargs)
            result.is_forward_done = True
            return outputs

        # A module with several paths gets one handler, for its first path.
        first = {id(module): (path, module) for path, module in reversed(modules)}
        with preserved(self.model):
            for path, module in first.values():
                set_handlers(module, (*get_handlers(module), result.make_handler(path)))
            if where is not None:
                float32_layers(self.model, where)
            loss, gradients = replace(self, loss_fn=loss_fn).differentiate(scale)
            if evaluate:
                result.read(loss, gradients)
        if self.reference is not None:
            result.compare(self.reference, self.tolerance)
        return result

    def run_in_float32(self) -> Run:
        """Measure a float32 pass of the batch, without changing the model."""
        with preserved(self.model):
            self.model.set_dtype(mx.float32)
            given: Any = self.args, self.kwargs
            cast = Casting(mx.float32).cast
            args, kwargs = tree_map(cast, given, is_leaf=is_opaque)
            return Trial(self.model, self.loss_fn, args, kwargs).run([])

    def differentiate(self, scale: float = 1.0) -> tuple[mx.array, Any]:
        """Lazily compute the loss and its unscaled gradients; suppress warnings."""
        loss_and_grad = GradScaler(init_scale=scale, dynamic=False).value_and_grad(
            self.model, self.loss_fn, **self.casting._asdict()
        )
        with warnings.catch_warnings():
            # Warnings from trial runs would repeat what the reports say.
            warnings.simplefilter("ignore")
            outputs, grads = loss_and_grad(*self.args, **self.kwargs)
        return loss_of(outputs), grads
