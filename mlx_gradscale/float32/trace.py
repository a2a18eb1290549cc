"""Trace one batch: the calls of all layers, their values, and their errors in half."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map

from ..core.forward import is_opaque, writable_arrays
from ..core.intercept import Handler, watch
from ..core.trees import commit, leaves, restore, snapshot
from .layers import computes_in_float32, first_half, map_arguments
from .trial import Trial, preserved, read_random_key
from .where import ordered_modules, owner_of


@dataclass(eq=False)
class Value:
    """A floating-point input or output of a layer, or the gradient of one.

    Attributes:
        dtype (Dtype): The dtype.
        nonfinite (int): The number of elements that are NaN, inf or -inf.
        largest (float): The largest finite magnitude.
        maximum (float): The largest finite element.
        has_gradient (bool): Whether a gradient reaches the value.
    """

    dtype: mx.Dtype
    nonfinite: int = 0
    largest: float = 0.0
    maximum: float = 0.0
    has_gradient: bool = False

    @property
    def is_mask(self) -> bool:
        """Whether this looks like a mask: its maximum is 0, and it has no gradient.

        The other elements of a mask are -inf, or the lowest number of its dtype.
        """
        return self.maximum == 0 and not self.has_gradient

    @property
    def magnitude(self) -> float:
        """The largest finite magnitude; 0 for a mask."""
        return 0.0 if self.is_mask else self.largest


@dataclass(eq=False)
class Call:
    """One call to a layer, or to the loss function if ``path`` is None.

    Attributes:
        path (str or None): The path of the layer.
        caller (str or None): The path of the layer that makes the call.
        parameters (Dtype or None): The dtype of its own half-precision parameters.
        is_float32 (bool): Whether it is a float32 layer, or is called inside one.
        inputs, outputs (list): A :class:`Value` for each floating-point array.
        children (list): The calls that it makes.
        error (float): The distance of its outputs from float32 if it computes in half
            precision, relative to their size; that of the worst row.
    """

    path: str | None
    caller: str | None = None
    parameters: mx.Dtype | None = None
    is_float32: bool = False
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    children: list["Call"] = field(default_factory=list)
    error: float = 0.0

    def walk(self) -> Iterator["Call"]:
        """Yield all calls inside this one in order of return, then this one."""
        for call in self.children:
            yield from call.walk()
        yield self


@dataclass
class Trace:
    """A traced batch.

    Attributes:
        call (Call): The call of the loss function.
        loss (float): The loss; NaN if it was not evaluated.
        gradients (Any): The unscaled gradients, not evaluated.
        backward (list): The gradient of each input and output in order of computation,
            with its call and its side, "input" or "output".
    """

    call: Call
    loss: float
    gradients: Any
    backward: list[tuple[Call, str, Value]]


def trace(trial: Trial, scale: float = 1.0, evaluate: bool = True) -> Trace:
    """Trace a batch as it trains. Without ``evaluate``, only the dtypes are known."""
    with preserved(trial.model):
        return _Tracer({}, mx.float32).run(trial, scale, evaluate)


def trace_errors(trial: Trial) -> Trace:
    """Trace a batch in float32, where each layer also runs in half precision.

    Both runs of a layer have the same inputs, so the error is that of the layer. Inputs
    outside the range are clipped, because another layer computed them. A layer runs
    once more for each layer that contains it.
    """
    casting, own = trial.casting, trial.model.trainable_parameters()
    cast = casting.cast_parameters(trial.model, own) if casting.compute_dtype else own
    new = {id(x): y.dtype for x, y in zip(leaves(own), leaves(cast), strict=True)}
    dtypes: dict[tuple[int, Any], mx.Dtype] = {
        (id(box), key): new.get(id(x), x.dtype)
        for box, key, x in writable_arrays(trial.model)
    }
    tracer = _Tracer(dtypes, trial.half or mx.float16)
    with trial.in_float32() as exact:
        return tracer.run(exact)


class _Tracer:
    """The handlers that record calls.

    ``dtypes`` are those of arrays in half precision, by container and key. If there are
    none, nothing is compared.
    """

    def __init__(self, dtypes: dict[tuple[int, Any], mx.Dtype], half: mx.Dtype):
        self._dtypes, self._half = dtypes, half
        self._limit = float(mx.finfo(half).max)
        self._root = self._running = Call(None)
        self._is_forward_done = self._is_comparing = False
        self._backward: list[tuple[Call, str, Value]] = []
        self._values: list[tuple[Value, mx.array]] = []
        self._errors: list[tuple[Call, mx.array]] = []

    def run(self, trial: Trial, scale: float = 1.0, evaluate: bool = True) -> Trace:
        """Run a batch forward and backward."""
        modules = ordered_modules(trial.model)
        self._paths = [path for path, _ in modules]
        # A module with several paths gets one handler, for its first path.
        first = {id(module): (module, path) for path, module in reversed(modules)}
        pairs = [(module, self._make_handler(path)) for module, path in first.values()]

        def loss_fn(*args: Any, **kwargs: Any) -> Any:
            outputs = trial.loss_fn(*args, **kwargs)
            self._is_forward_done = True
            return outputs

        with watch(pairs):
            loss, gradients = replace(trial, loss_fn=loss_fn).differentiate(scale)
        if evaluate:
            rows, errors = ([x for _, x in y] for y in (self._values, self._errors))
            mx.eval(loss, rows, errors)
            for value, row in self._values:
                numbers = np.array(row).tolist()
                value.nonfinite, value.largest, value.maximum = numbers
            for call, error in self._errors:
                number = float(error)
                number = math.inf if math.isnan(number) else number
                call.error = max(number, call.error)
        number = float(loss) if evaluate else math.nan
        return Trace(self._root, number, gradients, self._backward)

    def _make_handler(self, path: str) -> Handler:
        def handle(module: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self._is_comparing:
                return function(*args, **kwargs)
            caller = self._running
            call = Call(path, caller.path, first_half(module.values()))
            call.is_float32 = caller.is_float32 or computes_in_float32(module)
            if not self._is_forward_done:
                caller.children.append(call)
            elif caller.path is None and path:
                # mx.checkpoint calls the layer again in the backward pass.
                call.caller = owner_of([p for p in self._paths if p != path], path)
            run_half = None
            if self._dtypes and not self._is_forward_done and not call.is_float32:
                run_half = self._in_half(module, function, args, kwargs)
            tap = partial(self._tap, call, "input")
            args, kwargs = map_arguments(tap, args, kwargs)
            self._running = call
            try:
                outputs = function(*args, **kwargs)
            finally:
                self._running = caller
            if run_half is not None:
                pairs = zip(_floats(outputs), _floats(run_half()), strict=False)
                self._errors += [(call, _distance(*pair)) for pair in pairs]
            tap = partial(self._tap, call, "output")
            return tree_map(tap, outputs, is_leaf=is_opaque)

        return handle

    def _tap(self, call: Call, side: str, x: mx.array) -> Any:
        """Measure an array now, and its gradient in the backward pass."""
        if not mx.issubdtype(x.dtype, mx.floating):
            return x
        value = Value(x.dtype)
        (call.inputs if side == "input" else call.outputs).append(value)
        if not self._is_forward_done:
            self._values.append((value, _measure(x)))

        def note(_: Any, gradient: mx.array, __: Any) -> mx.array:
            value.has_gradient = True
            self._values.append((Value(gradient.dtype), _measure(gradient)))
            self._backward.append((call, side, self._values[-1][0]))
            return gradient

        identity: Any = mx.custom_function(lambda x: x)
        identity.vjp(note)
        return identity(x)

    def _in_half(
        self, module: nn.Module, function: Any, args: Any, kwargs: Any
    ) -> Callable[[], Any]:
        """Cast the inputs of a layer, and return a function that runs it on them."""

        def cast(x: Any) -> Any:
            if not isinstance(x, mx.array) or not mx.issubdtype(x.dtype, mx.floating):
                return x
            return mx.clip(x, -self._limit, self._limit).astype(self._half)

        # Cast now, because the layer may modify its arguments in place.
        given: Any = tree_map(cast, (args, kwargs), is_leaf=is_opaque)
        before = read_random_key()

        def run() -> Any:
            saved, after = snapshot(module), read_random_key()
            writes = [
                (box, key, x.astype(self._dtypes.get((id(box), key), x.dtype)))
                for box, key, x in writable_arrays(module)
            ]
            self._is_comparing = True
            try:
                commit(writes)
                mx.random.seed(before)  # so that Dropout drops the same values
                return function(*given[0], **given[1])
            finally:
                self._is_comparing = False
                restore(saved)
                mx.random.seed(after)

        return run


def _floats(outputs: Any) -> list[mx.array]:
    found = [x for _, x in tree_flatten([outputs], is_leaf=is_opaque)]
    arrays = [x for x in found if isinstance(x, mx.array)]
    return [x for x in arrays if x.size and mx.issubdtype(x.dtype, mx.floating)]


def _measure(x: mx.array) -> mx.array:
    """Return the statistics of a :class:`Value` as one lazy row."""
    if not x.size:
        return mx.zeros(3)
    is_finite, x = mx.isfinite(x), x.astype(mx.float32)
    count = mx.sum(~is_finite).astype(mx.float32)
    largest = mx.max(mx.abs(mx.where(is_finite, x, 0.0)))
    return mx.stack([count, largest, mx.max(mx.where(is_finite, x, -math.inf))])


def _distance(exact: mx.array, half: mx.array) -> mx.array:
    """Return how far the worst row is off, relative to its size or that of most rows.

    So a single row that overflows is seen, and one that rounds to zero is not.
    """
    width = exact.shape[-1] if exact.ndim else 1
    exact, half = (x.astype(mx.float32).reshape(-1, width) for x in (exact, half))
    is_finite = mx.isfinite(exact)
    off, exact = mx.where(is_finite, half - exact, 0), mx.where(is_finite, exact, 0)
    largest = mx.maximum(mx.max(mx.abs(exact)), 1e-30)  # so that no square overflows
    squares = [mx.square(x / largest).sum(axis=-1) for x in (off, exact)]
    sizes = mx.maximum(squares[1], mx.maximum(mx.mean(squares[1]), 1e-12))
    return mx.sqrt(mx.max(squares[0] / sizes))
