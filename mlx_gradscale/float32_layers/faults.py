"""Find where the first bad value of a run was computed, and why it is non-finite.

Shared by ``explain_overflow`` and the search for float32 layers. The search also treats
values that are far from the float32 ones as bad.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
from mlx.utils import tree_flatten

from ..core.finite import NonFinite, nonfinite
from ..core.gradients import is_opaque
from ..files.text import dtype_name
from .calls import ordered_modules, owner_of
from .trial import Batch, Run, Setting, Value


@dataclass(frozen=True)
class Place:
    """Where a bad value was computed.

    Attributes:
        layer (str or None): The path of the layer; "" is the model, None the loss
            function.
        text (str): A description in words.
        value (Value): The value.
    """

    layer: str | None
    text: str
    value: Value


def first_forward(run: Run, is_bad: Callable[[Value], bool]) -> Place | None:
    """Return where the first bad value of the forward pass was computed."""
    value = next((value for value in run.forward if is_bad(value)), None)
    if value is None:
        return None
    if value.side == "output":
        return Place(value.path, f"the output of {_name(value.path)}", value)
    caller = _name(value.caller)
    text = f"what {caller} passes to {_name(value.path)}; {caller} computed it in its "
    return Place(value.caller, f"{text}own code", value)


def first_backward(run: Run, is_bad: Callable[[Value], bool]) -> Place | None:
    """Return where the first bad value of the backward pass was computed."""
    # The gradient of a weight is ready after the gradient of its layer's output.
    ready: dict[str, int] = {}
    first = end = len(run.backward)
    for i, value in enumerate(run.backward):
        if value.side == "output":
            ready.setdefault(value.path, i)
        if is_bad(value):
            first = i
            break
    bad = [value for value in run.gradients.values() if is_bad(value)]
    bad.sort(key=lambda value: ready.get(value.caller or "", first))
    if bad and (ready.get(bad[0].caller or "", first) < first or first == end):
        text = f"the gradient of the parameter {bad[0].path}"
        return Place(bad[0].caller, text, bad[0])
    if first == end:
        return None
    value = run.backward[first]
    if value.side == "input":
        text = f"the gradient that {_name(value.path)} returns"
        return Place(value.path, text, value)
    text = f"the gradient that {_name(value.caller)} returns to {_name(value.path)}"
    return Place(value.caller, text, value)


def _name(path: str | None) -> str:
    return "the loss function" if path is None else path or "the model"


@dataclass(frozen=True)
class Fault:
    """Why the loss or the gradients of a run are non-finite.

    Attributes:
        cause (str): "batch", "arguments", "parameters", "forward", "loss" or
            "gradients".
        layer (str or None): The path of the layer at fault, if any.
        text (str): The location of the first bad value, in words.
        leaves (list): The non-finite arguments, parameters or gradients.
    """

    cause: str
    layer: str | None = None
    text: str = ""
    leaves: list[NonFinite] = field(default_factory=list)


def find_fault(setting: Setting, batch: Batch, run: Run) -> Fault | None:
    """Return the first cause, in the order of computation, or None."""
    if run.is_finite:
        return None
    loss_is_finite = math.isfinite(run.loss)
    arguments = _named_arguments(batch)
    found = nonfinite(arguments)
    # Treat -inf as a mask.
    leaves = [leaf for leaf in found if leaf.nan or leaf.positive_inf]
    if leaves:
        return Fault("batch", leaves=leaves)
    large = {} if loss_is_finite else too_large_arguments(setting, batch)
    dtype = setting.compute_dtype
    if large and dtype is not None:
        leaves = nonfinite({path: arguments[path].astype(dtype) for path in large})
        reached = ", ".join(f"{path} reaches {x:.6g}" for path, x in large.items())
        limit = f"{dtype_name(dtype)} ends at {mx.finfo(dtype).max:.6g}"
        return Fault("arguments", None, f"{reached}; {limit}.", leaves)
    leaves = nonfinite(setting.model.parameters())
    if leaves:
        paths = [path for path, _ in ordered_modules(setting.model)]
        return Fault("parameters", owner_of(paths, leaves[0].path), leaves=leaves)
    leaves = [
        NonFinite(path, (x.count,), x.dtype, x.nan, x.positive_inf, x.negative_inf)
        for path, x in run.gradients.items()
        if not x.is_finite
    ]

    def is_bad(value: Value) -> bool:
        # If the loss is finite, only a value with a gradient can have made a gradient
        # non-finite, and -inf without a gradient is a mask.
        if value.has_gradient:
            return not value.is_finite
        return not loss_is_finite and bool(value.nan or value.positive_inf)

    cause, place = "forward", first_forward(run, is_bad)
    if place is None and not loss_is_finite:
        return Fault("loss", leaves=leaves)
    if place is None:
        cause, place = "gradients", first_backward(run, lambda v: not v.is_finite)
    if place is None:
        return Fault(cause, leaves=leaves)
    text = f"First in {place.text}: {place.value}."
    return Fault(cause, place.layer, text, leaves)


def too_large_arguments(setting: Setting, batch: Batch) -> dict[str, float]:
    """Return the extreme value of each argument that overflows ``compute_dtype``."""
    dtype = setting.compute_dtype
    if dtype is None or not setting.cast_inputs:
        return {}
    found = {}
    for path, x in _named_arguments(batch).items():
        if mx.issubdtype(x.dtype, mx.floating) and x.size:
            low, high = float(mx.min(x)), float(mx.max(x))
            reached = max(low, high, key=abs)
            # An additive mask may be -1e9 at masked positions, and is 0 elsewhere.
            if high != 0.0 and mx.isinf(mx.array(reached).astype(dtype)).item():
                found[path] = reached
    return found


def _named_arguments(batch: Batch) -> dict[str, mx.array]:
    """Return the arrays of a batch by names such as ``args[1].mask.0``."""
    tree = {f"args[{i}]": x for i, x in enumerate(batch.args)} | batch.kwargs
    leaves = tree_flatten(tree, is_leaf=is_opaque)
    return {path: x for path, x in leaves if isinstance(x, mx.array)}
