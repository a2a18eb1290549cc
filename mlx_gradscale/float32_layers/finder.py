"""Find the layer that made the first bad value of a run.

``explain_overflow`` and the search for float32 layers share this: for the first, a bad
value is one that is not finite; for the second, one that is far from float32's.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .probes import Value
from .trial import Run


@dataclass(frozen=True)
class Place:
    """Where a bad value was made.

    Attributes:
        layer (str or None): The path of the layer; "" is the model, None the loss
            function.
        text (str): The same in words.
        value (Value): The value.
    """

    layer: str | None
    text: str
    value: Value


def first_forward(run: Run, is_bad: Callable[[Value], bool]) -> Place | None:
    """Return where the first bad value of the forward pass was made."""
    for value in run.forward:
        if is_bad(value):
            if value.side == "output":
                return Place(value.path, f"the output of {_name(value.path)}", value)
            caller = _name(value.caller)
            return Place(
                value.caller,
                f"what {caller} passes to {_name(value.path)}; {caller} computed it in "
                "its own code",
                value,
            )
    return None


def first_backward(run: Run, is_bad: Callable[[Value], bool]) -> Place | None:
    """Return where the first bad value of the backward pass was made."""
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


def is_nonfinite(value: Value, loss_is_finite: bool) -> bool:
    """Tell whether a value of the forward pass is not finite and spoils the loss."""
    if value.has_gradient:
        return not value.is_finite
    # If the loss is finite, only a value with a gradient can have spoiled one; and
    # -inf without a gradient is a mask.
    return not loss_is_finite and bool(value.nan or value.positive_inf)


def _name(path: str | None) -> str:
    return "the loss function" if path is None else path or "the model"
