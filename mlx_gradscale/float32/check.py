"""Compare a batch in half precision with float32."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from ..core.forward import is_opaque
from ..core.trees import flatten, is_floating, leaves
from ..files.text import list_some
from .layers import float32_layers
from .trial import Trial, preserved

# Rounding in both passes affects gradients, so they may differ more than the loss, but
# never by as much as gradients that are all zero, whose relative distance is 1.
_GRADIENT_TOLERANCE, _FARTHEST = 10, 0.9


class Check(NamedTuple):
    """How a half-precision run compares with float32.

    Attributes:
        scale (float): The loss scale.
        loss (float): The loss.
        expected_loss (float): The loss in float32.
        distance (float): The relative distance of the gradients from float32.
        bad_gradients (list): The paths of gradients with NaN or inf.
        is_loss_off (bool): Whether the loss is non-finite, or too far from float32.
        is_good (bool): Whether loss and gradients are finite and close to float32.
    """

    scale: float
    loss: float
    expected_loss: float
    distance: float
    bad_gradients: list[str]
    is_loss_off: bool
    is_good: bool


def check(
    trial: Trial, where: Any, scales: Iterable[float | None], tolerance: float
) -> Check:
    """Compare a batch with float32 at each scale until one is good; return the last.

    ``where`` replaces the model's float32 layers, unless it is None. A scale of None is
    the calibrated one, at which the gradients can double before they overflow.
    """
    with trial.in_float32() as exact:
        loss, exact_gradients = exact.differentiate()
        mx.eval(loss, exact_gradients)
        expected = float(loss)
    with preserved(trial.model):
        if where is not None:
            float32_layers(trial.model, where)
        for each in scales:
            scale = each or (trial.largest_scale() or 2.0) / 2
            with preserved(trial.model):
                loss, gradients = trial.differentiate(scale)
            bad = find_bad(gradients)
            distance = _distance(exact_gradients, gradients)
            is_off = is_loss_off(float(loss), expected, tolerance)
            is_near = distance <= min(_GRADIENT_TOLERANCE * tolerance, _FARTHEST)
            is_good = is_near and not is_off and not bad
            if is_good or is_off:
                break
    return Check(scale, float(loss), expected, distance, bad, is_off, is_good)


def is_loss_off(loss: float, expected: float, tolerance: float) -> bool:
    """Return whether a loss is non-finite, or too far from that in float32."""
    # Negated, because every comparison with NaN is False.
    return not abs(loss - expected) <= tolerance * max(abs(expected), 1e-6)


def _distance(exact: Any, half: Any) -> float:
    """Return the relative distance of gradients from those in float32."""
    off = size = 0.0
    for x, y in zip(leaves(exact), leaves(half), strict=True):
        off += float(mx.square(y - x).sum())
        size += float(mx.square(x).sum())
    return (off / size) ** 0.5 if size else off


def find_bad(
    tree: Any, is_bad: Callable[[mx.array], mx.array] = lambda x: ~mx.isfinite(x)
) -> list[str]:
    """Return the paths of floating-point leaves with NaN or inf."""
    found = [(path, x) for path, x in flatten(tree) if is_floating(x)]
    return [path for path, x in found if is_bad(x).any().item()]


def find_bad_input(trial: Trial) -> tuple[str, list[str], str]:
    """Return the cause, its parameters and a text if batch or weights are bad."""
    given = {f"args[{i}]": x for i, x in enumerate(trial.args)} | trial.kwargs
    flat = tree_flatten(given, is_leaf=is_opaque)  # a model is no part of the batch
    batch = {path: x for path, x in flat if isinstance(x, mx.array)}
    # Ignore -inf, because additive masks contain it.
    if found := find_bad(batch, lambda x: mx.isnan(x) | mx.isposinf(x)):
        text = f"The batch contains NaN or inf in {list_some(found)}."
        return "batch", [], f"{text} Fix or skip this batch."
    parameters = trial.model.parameters()
    if not (found := find_bad(parameters)):
        return "", [], ""
    text = f"The parameters contain NaN or inf in {list_some(found)}. "
    if not find_bad(parameters, mx.isnan):
        text += "If a cast to float16 made them inf, train in bfloat16 or float32. "
        text += "Otherwise, restore an earlier checkpoint."
    else:
        text += "Restore an earlier checkpoint."
    return "parameters", found, text
