"""Find the first bad value of a run, and the layer that computed it.

For ``explain_overflow``, non-finite values are bad. The search for float32 layers also
compares each value with a float32 run, and treats values that differ too much as bad.
"""

from collections.abc import Iterable
from typing import NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from ..core.forward import is_opaque
from ..files.text import list_some, power
from ..nonfinite_leaves import nonfinite
from .trial import Run, Trial, Value, relative_distance
from .where import owner_of

# Relative distances from float32. Rounding between two layers stays below the first; an
# overflow in a sum exceeds it. The second applies if the loss is off but no value
# exceeds the first.
_FAR, _SUSPICIOUS = 0.25, 0.05


class Fault(NamedTuple):
    """The cause of a bad run; ``text`` becomes the ``where`` of ``OverflowReport``."""

    cause: str
    layer: str | None = None
    text: str = ""


def find_fault(trial: Trial, run: Run) -> Fault | None:
    """Return the cause of a bad run, or None if the run is good."""
    if run.is_good:
        return None
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
    if leaves:
        names = list_some(leaf.path for leaf in leaves)
        remedy = "Restore an earlier checkpoint."
        if not any(leaf.nan for leaf in leaves):
            remedy = (
                "If a cast to float16 made them inf, train in bfloat16 or float32. "
                "Otherwise, restore an earlier checkpoint."
            )
        text = f"The parameters contain NaN or inf in {names}. {remedy}"
        return Fault("parameters", owner_of(run.paths, leaves[0].path), text)
    return _first_fault(run)


def _first_fault(run: Run) -> Fault:
    def first_bad(values: Iterable[Value], distance: float = _FAR) -> Value | None:
        return next((x for x in values if _is_bad(x, run, distance)), None)

    cause, found = "forward", first_bad(run.forward)
    if found is None and run.is_loss_off:
        # If no value is even somewhat off, the loss function itself is at fault.
        cause, found = "loss", first_bad(run.forward, _SUSPICIOUS)
    elif found is None:
        cause, found = "gradients", first_bad(run.backward)
    if found is None:
        return Fault(cause)
    what = f"contains {found}"
    if found.is_finite:
        what = f"differs from float32 by {min(relative_distance([found]), 9.99):.0%}"
    if run.reference and cause == "gradients":
        what += f", at a loss scale of {power(run.scale)}"
    layer = found.path if found.side in ("output", "input gradient") else found.caller
    return Fault(cause, layer, f"{_describe(found)} {what}.")


def _is_bad(value: Value, run: Run, distance: float) -> bool:
    other = value.other
    if run.reference and (other is None or not other.is_finite):
        return False
    if (other or value).is_mask:
        # A mask of float32's lowest number has no sums to compare: they overflow.
        is_bad = bool(value.nan or value.positive_inf)
    else:
        is_far = other is not None and relative_distance([value]) >= distance
        is_bad = not value.is_finite or is_far
    # Without a gradient, the value can only affect the loss.
    return is_bad and (value.has_gradient or run.is_loss_off)


def _describe(value: Value) -> str:
    names = {None: "the loss function", "": "the model"}
    path, caller = (names.get(x, x) for x in (value.path, value.caller))
    return {
        "input": f"The input of {path}, which the code of {caller} computes,",
        "output": f"The output of {path}",
        "input gradient": f"The gradient of the input of {path}",
        "output gradient": f"The gradient of the output of {path}, computed by "
        f"{caller},",
        "parameter gradient": f"The gradient of the parameter {path}",
    }[value.side]
