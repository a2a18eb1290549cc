"""Trace a batch: every call of a layer, its largest values, and its error in half."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from ..core.finite import all_finite
from ..core.forward import is_opaque, writable_arrays
from ..core.intercept import watch
from ..core.trees import commit, leaves, restore, snapshot
from ..files.text import dtype_name
from .layers import computes_in_float32, first_half, map_arguments
from .trial import Trial, preserved, read_random_key
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


class Fault(NamedTuple):
    """A bad value, and the layer that computed it; None is the loss function."""

    layer: str | None
    text: str


class Trace(NamedTuple):
    """A traced batch, its loss, and its first non-finite gradient of an activation."""

    call: Call
    loss: float
    gradients: Any
    bad_gradient: Fault | None


def trace(
    trial: Trial, scale: float = 1.0, *, errors: bool = False, evaluate: bool = True
) -> Trace:
    """Run a batch forward and backward, and trace the calls of its layers.

    With ``errors``, the batch runs in float32, and each layer also runs in half
    precision on the same inputs, so that its error is its own. Inputs outside the range
    are clipped, because another layer computed them. A layer runs once more for each
    layer that contains it. Without ``evaluate``, only the dtypes are known.
    """
    casting, own = trial.casting, trial.model.trainable_parameters()
    cast = casting.cast_parameters(trial.model, own) if casting.compute_dtype else own
    new = {id(x): y.dtype for x, y in zip(leaves(own), leaves(cast), strict=True)}
    dtypes: dict[tuple[int, Any], mx.Dtype] = {
        (id(box), key): new.get(id(x), x.dtype)
        for box, key, x in writable_arrays(trial.model)
    }
    tracer = _Tracer(dtypes, (trial.half or mx.float16) if errors else None)
    if errors:
        with trial.in_float32() as exact:
            return tracer.run(exact, scale, evaluate)
    with preserved(trial.model):
        return tracer.run(trial, scale, evaluate)


def find_wrong(call: Call, error: float) -> list[Call]:
    """Return the innermost calls whose error in half precision is this large."""
    inside = [x for child in call.children for x in find_wrong(child, error)]
    return inside or ([call] if call.error >= error else [])


def find_first(
    call: Call, dtype: mx.Dtype, error: float = math.inf, caller: str | None = None
) -> Fault | None:
    """Return the first value that a dtype cannot hold, or with this error, or None."""
    limit, name = float(mx.finfo(dtype).max), name_of(call.path)
    reaches = f"{name} reaches {{:.3g}}, above {limit:g}."
    if call.largest_input > limit:
        text = f"The input of {reaches}".format(call.largest_input)
        return Fault(caller, f"{text} The code of {name_of(caller)} computes it.")
    for child in call.children:
        if found := find_first(child, dtype, error, call.path):
            return found
    if call.largest_output > limit:
        return Fault(call.path, f"The output of {reaches}".format(call.largest_output))
    return (
        Fault(call.path, describe_error(call, dtype)) if call.error >= error else None
    )


def describe_error(call: Call, half: mx.Dtype) -> str:
    """Describe the error of a layer in half precision."""
    what = f"off by up to {min(call.error, 9.99):.0%}"
    what = what if call.error < math.inf else "non-finite"
    return f"The output of {name_of(call.path)} is {what} in {dtype_name(half)}."


def name_of(path: str | None) -> str:
    """Return the path of a layer, or what to call the model or the loss function."""
    return {None: "the loss function", "": "the model"}.get(path) or str(path)


class _Tracer:
    """The handlers that record calls.

    With ``half``, each layer also runs in half precision. ``dtypes`` are those that the
    model's arrays have there, by container and key.
    """

    def __init__(self, dtypes: dict[tuple[int, Any], mx.Dtype], half: mx.Dtype | None):
        self._dtypes, self._half = dtypes, half
        self._root = self._running = Call(None)
        self._is_forward_done = self._is_comparing = False
        self._backward: list[tuple[str, str, mx.array]] = []

    def run(self, trial: Trial, scale: float, evaluate: bool) -> Trace:
        """Run a batch forward and backward."""
        modules = ordered_modules(trial.model)
        # A module with several paths gets one handler, for its first path.
        first = {id(module): (module, path) for path, module in reversed(modules)}
        pairs = [(each, partial(self._handle, path)) for each, path in first.values()]

        def loss_fn(*args: Any, **kwargs: Any) -> Any:
            outputs = trial.loss_fn(*args, **kwargs)
            self._is_forward_done = True
            return outputs

        with watch(pairs):
            loss, gradients = replace(trial, loss_fn=loss_fn).differentiate(scale)
        if not evaluate:
            return Trace(self._root, math.nan, gradients, None)
        names = "largest_input", "largest_output", "error"
        fields = [(call, name) for call in self._root.walk() for name in names]
        backward = [is_finite for *_, is_finite in self._backward]
        mx.eval([getattr(*each) for each in fields], backward, loss)
        for call, name in fields:
            number = float(getattr(call, name))
            setattr(call, name, math.inf if math.isnan(number) else number)
        bad = (
            Fault(path, f"The gradient of the {side} of {name_of(path)} is NaN or inf.")
            for path, side, is_finite in self._backward
            if not is_finite.item()
        )
        return Trace(self._root, float(loss), gradients, next(bad, None))

    def _handle(
        self, path: str, module: nn.Module, function: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        if self._is_comparing:
            return function(*args, **kwargs)
        caller, call = self._running, Call(path, first_half(module.values()))
        call.is_float32 = caller.is_float32 or computes_in_float32(module)
        given, half = floats((args, kwargs)), None
        # mx.checkpoint calls layers again in the backward pass.
        if not self._is_forward_done:
            caller.children.append(call)
            if self._half is not None and not call.is_float32:
                half = self._run_in_half(module, function, args, kwargs)
        args, kwargs = map_arguments(self._tap(path, "input"), args, kwargs)
        self._running = call
        try:
            outputs = function(*args, **kwargs)
        finally:
            self._running = caller
        found = floats(outputs)
        call.inputs, call.outputs = (tuple(x.dtype for x in y) for y in (given, found))
        call.largest_input, call.largest_output = magnitude(given), magnitude(found)
        if half is not None:
            call.error = _distance(found, half)
        return tree_map(self._tap(path, "output"), outputs, is_leaf=is_opaque)

    def _run_in_half(
        self, module: nn.Module, function: Any, args: Any, kwargs: Any
    ) -> list[mx.array]:
        """Run a layer in half precision on the same inputs; return its outputs."""
        half: Any = self._half
        limit = float(mx.finfo(half).max)

        def cast(x: Any) -> Any:
            return mx.clip(x, -limit, limit).astype(half) if _is_float(x) else x

        args, kwargs = tree_map(cast, (args, kwargs), is_leaf=is_opaque)
        saved, random_key = snapshot(module), read_random_key()
        places = writable_arrays(module)
        dtypes = [self._dtypes.get((id(x[0]), x[1]), x[2].dtype) for x in places]
        self._is_comparing = True
        try:
            pairs = zip(places, dtypes, strict=True)
            commit((box, key, x.astype(dtype)) for (box, key, x), dtype in pairs)
            return floats(function(*args, **kwargs))
        finally:
            self._is_comparing = False
            restore(saved)
            mx.random.seed(random_key)  # so that Dropout drops the same values

    def _tap(self, path: str, side: str) -> Callable[[Any], Any]:
        """Return an identity that checks the gradients of arrays."""

        def note(_: Any, gradient: mx.array, __: Any) -> mx.array:
            self._backward.append((path, side, all_finite([gradient])))
            return gradient

        identity: Any = mx.custom_function(lambda x: x)
        identity.vjp(note)
        return lambda x: identity(x) if _is_float(x) else x


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
        off, a = (mx.where(mx.isfinite(a), x, 0.0) for x in (b - a, a))
        largest = mx.maximum(mx.max(mx.abs(a)), 1e-30)  # so that no square overflows
        wrong, size = (mx.square(x / largest).sum(axis=-1) for x in (off, a))
        size = mx.maximum(size, mx.maximum(mx.mean(size), 1e-12))
        found.append(mx.sqrt(mx.max(wrong / size)))
    return mx.max(mx.stack(found))
