"""Find the first bad value of a batch, and the layer that computed it."""

from collections.abc import Iterator
from typing import NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from ..core.forward import is_opaque
from ..files.text import dtype_name, list_some
from ..nonfinite_leaves import nonfinite
from .trace import Call, Trace, Value
from .trial import Trial
from .where import ordered_modules, owner_of

# Errors of a layer in half precision. Rounding stays below the first; an overflow in a
# sum exceeds it. The second applies if the loss is off but no error exceeds the first.
FAR, SUSPICIOUS = 0.25, 0.05


class Fault(NamedTuple):
    """The cause of a bad run; ``text`` becomes the ``where`` of ``OverflowReport``."""

    cause: str
    layer: str | None = None
    text: str = ""


def find_bad_input(trial: Trial) -> Fault | None:
    """Return the first NaN or inf in the batch or the parameters, or None."""
    given = {f"args[{i}]": x for i, x in enumerate(trial.args)} | trial.kwargs
    flat = tree_flatten(given, is_leaf=is_opaque)  # a model is no part of the batch
    arguments = {path: x for path, x in flat if isinstance(x, mx.array)}
    # Ignore -inf, because additive masks contain it.
    leaves = [x for x in nonfinite(arguments) if x.nan or x.positive_inf]
    if leaves:
        names = list_some(leaf.path for leaf in leaves)
        text = f"The batch contains NaN or inf in {names}. Fix or skip this batch."
        return Fault("batch", None, text)
    leaves = nonfinite(trial.model.parameters())
    if not leaves:
        return None
    remedy = "Restore an earlier checkpoint."
    if not any(leaf.nan for leaf in leaves):
        remedy = (
            "If a cast to float16 made them inf, train in bfloat16 or float32. "
            "Otherwise, restore an earlier checkpoint."
        )
    names = list_some(leaf.path for leaf in leaves)
    text = f"The parameters contain NaN or inf in {names}. {remedy}"
    paths = [path for path, _ in ordered_modules(trial.model)]
    return Fault("parameters", owner_of(paths, leaves[0].path), text)


def find_wrong_layers(call: Call, error: float) -> list[Call]:
    """Return the innermost calls whose error in half precision is this large."""
    inside = [
        wrong for child in call.children for wrong in find_wrong_layers(child, error)
    ]
    return inside or ([call] if call.error >= error else [])


def describe_error(call: Call, half: mx.Dtype) -> str:
    """Describe the error of a layer in half precision."""
    what = f"off by up to {min(call.error, 9.99):.0%}"
    if call.error == float("inf"):
        what = "non-finite"
    return f"The output of {name_of(call.path)} is {what} in {dtype_name(half)}."


def find_first(call: Call, half: mx.Dtype, error: float) -> Fault | None:
    """Return the first value that half precision cannot hold or compute, or None."""
    wrong = find_wrong_layers(call, error)
    limit = float(mx.finfo(half).max)
    for place, side, value in values_of(call):
        owner = place.caller if side == "input" else place.path
        if value.magnitude > limit:
            what = f"reaches {value.largest:.3g}, above {limit:g}"
            return Fault("forward", owner, f"{_describe(place, side)} {what}.")
        if side == "output" and place in wrong:
            return Fault("forward", owner, describe_error(place, half))
    return None


def find_nonfinite(traced: Trace) -> Fault | None:
    """Return the first non-finite value of the forward or backward pass, or None."""
    forward = ((*x, "forward") for x in values_of(traced.call))
    backward = ((*x, "gradients") for x in traced.backward)
    for call, side, value, cause in (*forward, *backward):
        if value.nonfinite and not value.is_mask:
            # A layer computes its output, and the gradient of its input.
            is_own = (side == "output") == (cause == "forward")
            what = _describe(call, side, gradient=cause == "gradients")
            count = f"contains {value.nonfinite:.0f} non-finite values"
            layer = call.path if is_own else call.caller
            return Fault(cause, layer, f"{what} {count}.")
    found = nonfinite(traced.gradients)
    if not found:
        return None
    paths = [x.path for x in traced.call.walk() if x.path is not None]
    layer = owner_of(["", *paths], found[0].path)
    what = f"The gradient of the parameter {found[0].path} contains"
    return Fault("gradients", layer, f"{what} {found[0].count} non-finite values.")


def values_of(call: Call) -> Iterator[tuple[Call, str, Value]]:
    """Yield the inputs and outputs of all calls in order of computation."""
    yield from ((call, "input", value) for value in call.inputs)
    for child in call.children:
        yield from values_of(child)
    yield from ((call, "output", value) for value in call.outputs)


def name_of(path: str | None) -> str:
    """Return the path of a layer, or what to call the model or the loss function."""
    return {None: "the loss function", "": "the model"}.get(path) or str(path)


def _describe(call: Call, side: str, gradient: bool = False) -> str:
    text = f"the {side} of {name_of(call.path)}"
    text = f"the gradient of {text}" if gradient else text
    if (side == "input") != gradient:
        text += f", which the code of {name_of(call.caller)} computes,"
    return text[0].upper() + text[1:]
