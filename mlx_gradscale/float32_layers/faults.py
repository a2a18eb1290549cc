"""Find where the first bad value of a run was computed, and why.

``explain_overflow`` and the search for float32 layers share this. The search compares
the run with one in float32, and also treats values far from float32 as bad.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
from mlx.utils import tree_flatten

from ..core.gradients import is_opaque
from ..files.text import dtype_name, power
from ..nonfinite import NonFinite, nonfinite
from .calls import ordered_modules, owner_of
from .trial import Batch, Run, Setting, Value, relative_distance

# Relative distance from float32. Rounding of a value between two layers causes less, a
# sum that overflowed causes more.
FAR = 0.25
# Additive masks have magnitudes like this.
_MASK = 1e4


@dataclass(frozen=True)
class Fault:
    """Why the loss or the gradients of a run are non-finite or inaccurate.

    Attributes:
        cause (str): "batch", "arguments", "parameters", "forward", "loss" or
            "gradients".
        layer (str or None): The path of the layer at fault; "" is the model, None the
            loss function or no layer.
        text (str): The location of the first bad value, in words.
        leaves (list): The non-finite arguments, parameters or gradients.
        detail (str): The first bad value without its location.
    """

    cause: str
    layer: str | None = None
    text: str = ""
    leaves: list[NonFinite] = field(default_factory=list)
    detail: str = ""


def find_fault(setting: Setting, batch: Batch, run: Run) -> Fault | None:
    """Return why a run is non-finite, in the order of computation, or None."""
    if run.is_finite:
        return None
    arguments = _named_arguments(batch)
    # Treat -inf as a mask.
    leaves = [x for x in nonfinite(arguments) if x.nan or x.positive_inf]
    if leaves:
        return Fault("batch", leaves=leaves)
    dtype = setting.compute_dtype if setting.cast_inputs else None
    if dtype is not None and not math.isfinite(run.loss):
        large = {p: x for p, x in arguments.items() if _is_too_large(x, dtype)}
        if large:
            leaves = nonfinite({path: x.astype(dtype) for path, x in large.items()})
            reached = (f"{path} reaches {_extreme(x):.6g}" for path, x in large.items())
            limit = f"the {dtype_name(dtype)} maximum of {mx.finfo(dtype).max:.6g}"
            text = f"{', '.join(reached)}, beyond {limit}."
            return Fault("arguments", None, text, leaves)
    leaves = nonfinite(setting.model.parameters())
    if leaves:
        paths = [path for path, _ in ordered_modules(setting.model)]
        return Fault("parameters", owner_of(paths, leaves[0].path), leaves=leaves)
    return first_fault(run)


def first_fault(
    run: Run,
    reference: Run | None = None,
    loss_is_off: bool | None = None,
    distance: float = FAR,
) -> Fault:
    """Return where the first bad value of a run was computed.

    Bad values are non-finite, or at least ``distance`` away from a run in float32.
    """
    if loss_is_off is None:
        loss_is_off = not math.isfinite(run.loss)
    references = {} if reference is None else _pair(run, reference)

    def is_bad(value: Value) -> bool:
        other = references.get(id(value))
        if reference is not None and (other is None or not other.is_finite):
            return False
        is_far = other is not None and relative_distance([(value, other)]) >= distance
        if value.has_gradient:
            return not value.is_finite or is_far
        # Only the loss depends on it, and -inf or -1e9 is a mask.
        is_mask = other is not None and other.largest > _MASK > other.maximum
        is_nan_or_inf = bool(value.nan or value.positive_inf)
        return bool(loss_is_off) and (is_nan_or_inf or (is_far and not is_mask))

    leaves = [
        NonFinite(path, (x.count,), x.dtype, x.nan, x.positive_inf, x.negative_inf)
        for path, x in run.gradients.items()
        if not x.is_finite
    ]
    cause = "forward"
    found = next((value for value in run.forward if is_bad(value)), None)
    if found is None and loss_is_off:
        return Fault("loss", leaves=leaves)
    if found is None:
        cause, found = "gradients", _first_backward(run, is_bad)
    if found is None:
        return Fault(cause, leaves=leaves)
    layer, place = _origin(found, cause)
    what = str(found)
    if found.is_finite:
        off = relative_distance([(found, references[id(found)])])
        what = f"differs from float32 by {min(off, 9.99):.0%}"
    if reference is not None and cause == "gradients":
        what += f", at a loss scale of {power(run.scale)}"
    return Fault(cause, layer, f"It starts in {place}: {what}.", leaves, what)


def _first_backward(run: Run, is_bad: Callable[[Value], bool]) -> Value | None:
    # The gradient of a weight is ready after the gradient of its layer's output.
    ready: dict[str | None, int] = {}
    for i, value in enumerate(run.backward):
        if value.side == "output":
            ready.setdefault(value.path, i)
    values: list[tuple[float, Value]] = [*enumerate(run.backward)]
    end = len(values)
    values += [(ready.get(x.caller, end) + 0.5, x) for x in run.gradients.values()]
    values.sort(key=lambda pair: pair[0])
    return next((value for _, value in values if is_bad(value)), None)


def _origin(value: Value, cause: str) -> tuple[str | None, str]:
    """Return the layer that computed a value, and a description of the value."""
    path, caller = _name(value.path), _name(value.caller)
    if value.side == "gradient":
        return value.caller, f"the gradient of the parameter {value.path}"
    if cause == "gradients" and value.side == "input":
        return value.path, f"the gradient that {path} returns"
    if cause == "gradients":
        return value.caller, f"the gradient that {caller} returns to {path}"
    if value.side == "output":
        return value.path, f"the output of {path}"
    text = f"the input of {path}, which the code of {caller} computes"
    return value.caller, text


def _name(path: str | None) -> str:
    return "the loss function" if path is None else path or "the model"


def _pair(run: Run, reference: Run) -> dict[int, Value]:
    """Return the value in the reference run for each value, by id."""
    pairs = {id(x): reference.gradients[path] for path, x in run.gradients.items()}
    for values, others in (
        (run.forward, reference.forward),
        (run.backward, reference.backward),
    ):
        waiting: dict[tuple[str, str], list[Value]] = {}
        for value in others:
            waiting.setdefault((value.path, value.side), []).append(value)
        for value in values:
            same = waiting.get((value.path, value.side))
            if same:
                pairs[id(value)] = same.pop(0)
    return pairs


def _named_arguments(batch: Batch) -> dict[str, mx.array]:
    """Return the arrays of a batch by names such as ``args[1].mask.0``."""
    tree = {f"args[{i}]": x for i, x in enumerate(batch.args)} | batch.kwargs
    leaves = tree_flatten(tree, is_leaf=is_opaque)
    return {path: x for path, x in leaves if isinstance(x, mx.array)}


def _is_too_large(x: mx.array, dtype: mx.Dtype) -> bool:
    if not mx.issubdtype(x.dtype, mx.floating) or not x.size:
        return False
    # An additive mask may be -1e9 at masked positions, and is 0 elsewhere.
    is_mask = mx.max(x).item() == 0
    return not is_mask and bool(mx.isinf(x.astype(dtype)).any().item())


def _extreme(x: mx.array) -> float:
    return max(float(mx.min(x)), float(mx.max(x)), key=abs)
