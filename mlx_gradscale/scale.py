"""The rule: how a loss scale moves, as a pure function over 0-d arrays."""

import math
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import mlx.core as mx
import numpy as np

# Half of float32's exponents, so that the other half is left for what a scale or its
# reciprocal is multiplied with, gradients and the factor of clipping: Apple's GPUs
# flush subnormals to zero, and a gradient of zero is a finite one. The reciprocal of
# 2**127, where PyTorch stops, is a subnormal. No loss needs a scale near either.
SMALLEST_SCALE = 2.0**-64
LARGEST_SCALE = 2.0**64

# Each setting with its dtype and default. All of them live in the state as
# arrays, so that a compiled step sees every later change.
SETTINGS: dict[str, tuple[mx.Dtype, Any]] = {
    "growth_factor": (mx.float32, 2.0),
    "backoff_factor": (mx.float32, 0.5),
    "growth_interval": (mx.int32, 2000),
    "backoff_interval": (mx.int32, 1),
    "hysteresis": (mx.int32, 1),
    "dynamic": (mx.bool_, True),
    "min_scale": (mx.float32, SMALLEST_SCALE),
    "max_scale": (mx.float32, LARGEST_SCALE),
}

# What the rule moves, and the tallies kept beside it.
VALUES: dict[str, tuple[mx.Dtype, Any]] = {
    "scale": (mx.float32, 65536.0),
    "growth_tracker": (mx.int32, 0),
    "backoff_tracker": (mx.int32, 0),
    "skipped_steps": (mx.int32, 0),
    "skipped_losses": (mx.int32, 0),
    "consecutive_skips": (mx.int32, 0),
    "skips_since_update": (mx.int32, 0),
    "last_step_applied": (mx.bool_, True),
    # Whether every loss since the last update was finite.
    "loss_finite": (mx.bool_, True),
}

FIELDS = {**VALUES, **SETTINGS}

# PyTorch's five keys, in its order, and the fields behind them.
TORCH_KEYS = {
    "scale": "scale",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
    "growth_interval": "growth_interval",
    "_growth_tracker": "growth_tracker",
}


@mx.compile
def next_scale(
    state: dict[str, mx.array], finite: mx.array, after_one_step: bool = True
) -> dict[str, mx.array]:
    """Return what one ``update()`` changes, lazily.

    In words, with ``finite`` true if every gradient since the last update was::

        if not finite:
            growth_tracker = 0
            backoff_tracker += 1
            if backoff_tracker >= max(backoff_interval, hysteresis):
                backoff_tracker = 0
                scale = max(scale * backoff_factor, min_scale)
        else:
            backoff_tracker = 0
            growth_tracker += 1
            if growth_tracker >= growth_interval:
                growth_tracker = 0
                if scale * growth_factor <= max_scale:  # false for inf
                    scale = scale * growth_factor

    With a ``hysteresis`` above 1 the two ``backoff_tracker = 0`` go to where the scale
    grows, so that once the budget is used up every overflow backs off until then.

    Nothing of that changes where ``dynamic`` is false, or where gradients and a loss
    were not finite, which no scale cures. ``consecutive_skips`` counts updates in a row
    that are not finite.

    Args:
        state (dict): All fields.
        finite (array): A 0-d bool array.
        after_one_step (bool): Whether this is one kernel with the :func:`count_step`
            before it, if that is in the same trace. After several there would be too
            many arrays. Default: ``True``.
    """
    # A flag as a factor stands for mx.where(flag, x, 0). With count_step all of this is
    # one kernel, of no more than 24 arrays, and the constant 0 would be one of them.
    loss_finite = _not_fused(state["loss_finite"])
    scale = state["scale"]
    budget = state["hysteresis"] > 1
    allowed = mx.maximum(state["backoff_interval"], state["hysteresis"])
    overflow = mx.logical_not(finite)
    good = finite * (state["growth_tracker"] + 1)
    tracker = state["backoff_tracker"]
    bad = mx.where(finite, budget * tracker, tracker + 1)
    grow = good >= state["growth_interval"]
    back_off = overflow & (bad >= allowed)
    grown = scale * state["growth_factor"]
    backed_off = mx.maximum(scale * state["backoff_factor"], state["min_scale"])
    changed = {
        "scale": mx.where(
            back_off,
            backed_off,
            mx.where(grow & (grown <= state["max_scale"]), grown, scale),
        ),
        "growth_tracker": mx.logical_not(grow) * good,
        "backoff_tracker": mx.logical_not(mx.where(budget, grow, back_off)) * bad,
    }
    moves = state["dynamic"] & (loss_finite | finite)
    changed = {k: mx.where(moves, v, state[k]) for k, v in changed.items()}
    changed["consecutive_skips"] = overflow * _one_more(state["consecutive_skips"])
    counted = ("skipped_steps", "skipped_losses") if after_one_step else ()
    together = changed | {name: state[name] for name in counted}
    changed["scale"] = _in_one_kernel(together, "scale")["scale"]
    return changed | _reset(state)


def _reset(state: dict[str, mx.array]) -> dict[str, mx.array]:
    # As results of something, because MLX before 0.32 cannot compile what returns a
    # constant. Nothing is launched for it.
    constants = [mx.array(0), mx.array(True)]
    since, loss_finite = mx.depends(constants, [state["growth_interval"]])
    return {"skips_since_update": since, "loss_finite": loss_finite}


@mx.compile
def count_step(state: dict[str, mx.array], applied: mx.array) -> dict[str, mx.array]:
    """Return the tallies after one step that was, or was not, applied."""

    def count(name: str, condition: mx.array) -> mx.array:
        return mx.where(condition, _one_more(state[name]), state[name])

    skipped = mx.logical_not(applied)
    loss_finite = _not_fused(state["loss_finite"])
    tallies = {
        "skipped_steps": count("skipped_steps", skipped),
        "skipped_losses": count(
            "skipped_losses", skipped & mx.logical_not(loss_finite)
        ),
    }
    # One kernel without what an update in the same trace resets, and one with it.
    tallies = _in_one_kernel(tallies, "skipped_steps")
    tallies["skips_since_update"] = count("skips_since_update", skipped)
    return _in_one_kernel(tallies, "skips_since_update") | {
        "last_step_applied": applied
    }


def _not_fused(flag: mx.array) -> mx.array:
    # Neither fusible nor a copy: what it was computed from is no part of the kernel.
    return mx.contiguous(flag)


def _one_more(count: mx.array) -> mx.array:
    # It stops where int32 ends: a run of years stays loadable.
    return mx.minimum(count, 2**31 - 2) + 1


def _in_one_kernel(values: dict[str, mx.array], name: str) -> dict[str, mx.array]:
    # One value computed from all, bit for bit what it was: mx.compile makes one
    # kernel of what ends in one node, and a kernel for each node without.
    others = [x.astype(mx.bool_) for key, x in values.items() if key != name]
    either = reduce(mx.bitwise_or, others)
    return {**values, name: mx.where(either, values[name], values[name])}


def within_limits(state: dict[str, mx.array], scale: mx.array) -> mx.array:
    """Return ``scale`` clamped to the limits, or the old scale if it is no scale."""
    usable = mx.isfinite(scale) & (scale > 0)
    clamped = mx.clip(scale, state["min_scale"], state["max_scale"])
    return mx.where(usable, clamped, state["scale"])


def as_array(name: str, value: Any) -> mx.array:
    """Return a field of the state as the 0-d array that the state holds."""
    dtype = FIELDS[name][0]
    # MLX takes no int of 64 bits or more.
    return mx.array(float(value) if dtype == mx.float32 else value, dtype)


def read(state: dict[str, mx.array]) -> dict[str, Any]:
    """Read the whole state from the device, as Python numbers."""
    return {name: read_field(name, state[name]) for name in FIELDS if name in state}


def read_field(name: str, value: mx.array) -> Any:
    """Read one field from the device.

    A factor is the shortest number that gives its float32 value: 1.1 reads 1.1,
    not 1.100000023841858.
    """
    number: Any = value.item()
    if name in ("growth_factor", "backoff_factor"):
        return float(str(np.float32(number)))
    return number


def check(values: dict[str, Any]) -> None:
    """Raise if ``values``, a part of the fields, is not a state to train with."""
    for name, value in values.items():
        _CHECKS[name](name, value)
    low, high = values.get("min_scale"), values.get("max_scale")
    if low is not None and high is not None and low > high:
        raise ValueError(f"min_scale {low} is above max_scale {high}.")
    if values.get("hysteresis", 1) > 1 and values.get("backoff_interval", 1) > 1:
        raise ValueError(
            "hysteresis= and backoff_interval= are two rules of when to back off: set "
            "one of them."
        )
    scale = values.get("scale")
    if scale is not None and low is not None and scale < low:
        raise ValueError(f"The scale {scale} is below min_scale {low}.")
    if scale is not None and high is not None and scale > high:
        raise ValueError(f"The scale {scale} is above max_scale {high}.")


def clamped(values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` from elsewhere, with each scale brought into the limits.

    PyTorch's scale may be anything up to 2**127, where its gradients are all zero, say,
    or bfloat16; another framework's smallest is 2**-126. A run goes on with the nearest
    that can be used. What is no scale at all is left for :func:`check` to refuse.
    """
    return {
        name: min(max(value, SMALLEST_SCALE), LARGEST_SCALE)
        if _CHECKS.get(name) is _check_limits and _is_scale(value)
        else value
        for name, value in values.items()
    }


def check_scale(name: str, value: Any) -> None:
    """Raise unless ``value`` is a Python number that can be clamped to a loss scale."""
    if not _is_number(value):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    if not _is_scale(value):
        raise ValueError(f"{name} must be positive and finite in float32, got {value}.")


def _check_limits(name: str, value: Any) -> None:
    check_scale(name, value)
    if not SMALLEST_SCALE <= value <= LARGEST_SCALE:
        raise ValueError(f"{name} must be between 2**-64 and 2**64, got {value}.")


def _is_scale(value: Any) -> bool:
    return _is_number(value) and 0 < value <= float(np.finfo(np.float32).max)


def _is_number(value: Any, kinds: Iterable[type] = (int, float)) -> bool:
    return isinstance(value, (*kinds, np.number)) and not isinstance(value, bool)


def _check_factor(low: float, high: float) -> Callable[[str, Any], None]:
    def check_factor(name: str, value: Any) -> None:
        if not _is_number(value):
            raise TypeError(f"{name} must be a number, got {value!r}.")
        # Compared in float32, where 1 + 1e-9 is 1 and would never grow.
        if not low < np.float32(value) < high:
            bounds = f"above {low}" if high == math.inf else f"between {low} and {high}"
            raise ValueError(f"{name} must be {bounds} in float32, got {value}.")

    return check_factor


def _check_count(smallest: int) -> Callable[[str, Any], None]:
    def check_count(name: str, value: Any) -> None:
        if not _is_number(value, (int,)) or isinstance(value, np.floating):
            raise TypeError(f"{name} must be an integer, got {value!r}.")
        if not smallest <= value < 2**31:
            raise ValueError(
                f"{name} must be at least {smallest} and fit in int32, got {value}."
            )

    return check_count


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r}.")


_CHECKS = {
    "scale": _check_limits,
    "min_scale": _check_limits,
    "max_scale": _check_limits,
    "growth_factor": _check_factor(1.0, math.inf),
    "backoff_factor": _check_factor(0.0, 1.0),
    "growth_interval": _check_count(1),
    "backoff_interval": _check_count(1),
    "hysteresis": _check_count(1),
    "growth_tracker": _check_count(0),
    "backoff_tracker": _check_count(0),
    "skipped_steps": _check_count(0),
    "skipped_losses": _check_count(0),
    "consecutive_skips": _check_count(0),
    "skips_since_update": _check_count(0),
    "loss_finite": _check_bool,
    "dynamic": _check_bool,
    "last_step_applied": _check_bool,
}
