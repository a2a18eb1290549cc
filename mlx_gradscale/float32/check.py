"""Compare a batch in half precision with float32, and find what is bad besides."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from ..core.finite import all_finite
from ..core.forward import is_opaque
from ..core.trees import flatten, is_floating, leaves
from ..files.text import list_some
from .layers import float32_layers
from .trace import Fault, trace
from .trial import Trial, preserved
from .where import ordered_modules, owner_of

# Rounding in both passes affects gradients, so they may differ more than the loss, but
# never by as much as gradients that are all zero, whose relative distance is 1.
_GRADIENT_TOLERANCE, _FARTHEST = 10, 0.9


def find_bad_input(trial: Trial) -> tuple[str, Fault] | None:
    """Return the first NaN or inf in the batch or the parameters and its cause."""
    given = {f"args[{i}]": x for i, x in enumerate(trial.args)} | trial.kwargs
    flat = tree_flatten(given, is_leaf=is_opaque)  # a model is no part of the batch
    batch = {path: x for path, x in flat if isinstance(x, mx.array)}
    # Ignore -inf, because additive masks contain it.
    if found := _find(batch, lambda x: mx.isnan(x) | mx.isposinf(x)):
        text = f"The batch contains NaN or inf in {list_some(found)}."
        return "batch", Fault(None, f"{text} Fix or skip this batch.")
    parameters = trial.model.parameters()
    if not (found := _find(parameters, lambda x: ~mx.isfinite(x))):
        return None
    remedy = "Restore an earlier checkpoint."
    if not _find(parameters, mx.isnan):
        remedy = (
            "If a cast to float16 made them inf, train in bfloat16 or float32. "
            "Otherwise, restore an earlier checkpoint."
        )
    text = f"The parameters contain NaN or inf in {list_some(found)}. {remedy}"
    return "parameters", Fault(_owner(trial, found[0]), text)


def find_bad_gradient(trial: Trial, scale: float = 1.0) -> Fault | None:
    """Run a batch, and return its first non-finite gradient in order of computation."""
    traced = trace(trial, scale)
    found = _find(traced.gradients, lambda x: ~mx.isfinite(x))
    if traced.bad_gradient or not found:
        return traced.bad_gradient
    text = f"The gradient of the parameter {found[0]} is NaN or inf."
    return Fault(_owner(trial, found[0]), text)


def _find(tree: Any, is_bad: Callable[[mx.array], mx.array]) -> list[str]:
    """Return the paths of the floating-point leaves with bad elements."""
    found = [(path, x) for path, x in flatten(tree) if is_floating(x)]
    return [path for path, x in found if is_bad(x).any().item()]


def _owner(trial: Trial, parameter: str) -> str:
    return owner_of([path for path, _ in ordered_modules(trial.model)], parameter)


class Check(NamedTuple):
    """How a half-precision run compares with float32.

    ``distance`` is that of the gradients, relative to those in float32.
    """

    scale: float
    loss: float
    expected_loss: float
    distance: float
    is_loss_off: bool
    is_finite: bool
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
            is_finite = bool(all_finite(gradients).item())
            distance = _distance(exact_gradients, gradients)
            is_loss_off = is_off(float(loss), expected, tolerance)
            is_far = distance > min(_GRADIENT_TOLERANCE * tolerance, _FARTHEST)
            is_good = not is_loss_off and is_finite and not is_far
            if is_good or is_loss_off:
                break
    results = is_loss_off, is_finite, is_good
    return Check(scale, float(loss), expected, distance, *results)


def is_off(loss: float, expected: float, tolerance: float) -> bool:
    """Return whether a loss is non-finite, or too far from that in float32."""
    # Negated, because every comparison with NaN is False.
    return not abs(loss - expected) <= tolerance * max(abs(expected), 1e-6)


def _distance(exact: Any, half: Any) -> float:
    """Return the relative distance of gradients from those of float32."""
    pairs = list(zip(leaves(exact), leaves(half), strict=True))
    sizes = [float(mx.max(mx.abs(x))) for x, _ in pairs if x.size]
    largest = max(sizes, default=0.0) or 1.0
    sums = mx.zeros(2)
    for x, y in pairs:
        x, y = x / largest, y / largest  # so that no square overflows or underflows
        sums = sums + mx.stack([mx.square(y - x).sum(), mx.square(x).sum()])
        mx.eval(sums)  # so that one pair at a time is in memory
    off, size = map(float, sums)
    return float((off / max(size, 1e-30)) ** 0.5)
