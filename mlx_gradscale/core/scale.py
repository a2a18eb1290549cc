"""The settings and update rule of the loss scale, and its state dict."""

import math
from typing import Any

import mlx.core as mx
import numpy as np

# Limit scales to half of float32's exponents; the gradients need the other half. The
# reciprocal of 2**127, PyTorch's limit, is subnormal, and Apple GPUs flush it to zero.
SMALLEST_SCALE = 2.0**-64
LARGEST_SCALE = 2.0**64

# Every setting with its dtype and default. Settings are stored in the state as arrays,
# so that a compiled step sees later changes.
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

# The values that the rule updates, and the counters.
VALUES: dict[str, tuple[mx.Dtype, Any]] = {
    "scale": (mx.float32, 65536.0),
    "growth_tracker": (mx.int32, 0),
    "backoff_tracker": (mx.int32, 0),
    "skipped_steps": (mx.int32, 0),
    "consecutive_skips": (mx.int32, 0),
    "skips_since_update": (mx.int32, 0),
    "last_step_applied": (mx.bool_, True),
}

FIELDS = {**VALUES, **SETTINGS}
DEFAULTS = {name: default for name, (_, default) in FIELDS.items()}
_SCALES = ("scale", "min_scale", "max_scale")
# Exclusive limits, checked in float32: there, 1 + 1e-9 is 1, and the scale would never
# grow.
_FACTORS = {"growth_factor": (1.0, math.inf), "backoff_factor": (0.0, 1.0)}
_MOST = 2**31 - 1
_TYPES: dict[mx.Dtype, tuple[Any, str]] = {
    mx.float32: ((int, float, np.number), "a number"),
    mx.int32: ((int, np.integer), "an integer"),
    mx.bool_: ((bool, np.bool_), "True or False"),
}

# PyTorch's five keys, in its order, with the corresponding fields.
TORCH_KEYS = {
    "scale": "scale",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
    "growth_interval": "growth_interval",
    "_growth_tracker": "growth_tracker",
}
_OWN_KEYS = [name for name in FIELDS if name not in TORCH_KEYS.values()]


def next_scale(state: dict[str, mx.array], finite: mx.array) -> dict[str, mx.array]:
    """Lazily compute the fields that one ``update()`` changes.

    ``finite`` is true if all gradients since the last update were finite. The rule::

        if not finite:
            growth_tracker = 0
            backoff_tracker += 1
            if backoff_tracker >= max(backoff_interval, hysteresis):
                scale = max(scale * backoff_factor, min_scale)
                if hysteresis == 1: backoff_tracker = 0
        else:
            if hysteresis == 1: backoff_tracker = 0
            growth_tracker += 1
            if growth_tracker >= growth_interval:
                growth_tracker = backoff_tracker = 0
                if scale * growth_factor <= max_scale:  # false for inf
                    scale = scale * growth_factor

    With ``hysteresis`` above 1, every overflow after the first ``hysteresis - 1``
    lowers the scale, until ``growth_interval`` finite steps in a row restart the count.
    If ``dynamic`` is false, the scale and both trackers are constant.
    ``consecutive_skips`` counts consecutive non-finite updates.
    """
    scale, overflows = state["scale"], state["backoff_tracker"]
    has_hysteresis = state["hysteresis"] > 1
    growth = mx.where(finite, state["growth_tracker"] + 1, 0)
    kept = mx.where(has_hysteresis, overflows, 0)
    overflows = mx.where(finite, kept, overflows + 1)
    grow = growth >= state["growth_interval"]
    allowed = mx.maximum(state["backoff_interval"], state["hysteresis"])
    back_off = mx.logical_not(finite) & (overflows >= allowed)
    grown = scale * state["growth_factor"]
    grown = mx.where(grow & (grown <= state["max_scale"]), grown, scale)
    backed_off = mx.maximum(scale * state["backoff_factor"], state["min_scale"])
    restart = mx.where(has_hysteresis, grow, back_off)
    if_dynamic = {
        "scale": mx.where(back_off, backed_off, grown),
        "growth_tracker": mx.where(grow, 0, growth),
        "backoff_tracker": mx.where(restart, 0, overflows),
    }
    skips = mx.minimum(state["consecutive_skips"], _MOST - 1) + 1
    return {
        **{k: mx.where(state["dynamic"], x, state[k]) for k, x in if_dynamic.items()},
        "consecutive_skips": mx.where(finite, 0, skips),
        "skips_since_update": mx.array(0),
    }


def count_step(state: dict[str, mx.array], applied: mx.array) -> dict[str, mx.array]:
    """Return the counters after one applied or skipped step."""
    skipped = mx.where(applied, 0, 1)
    return {
        "skipped_steps": mx.minimum(state["skipped_steps"], _MOST - 1) + skipped,
        "skips_since_update": state["skips_since_update"] + skipped,
        "last_step_applied": applied,
    }


def clamp(state: dict[str, mx.array], value: Any) -> mx.array:
    """Clamp a new scale. If it is invalid, raise or, for an array, keep the old one."""
    is_array = isinstance(value, mx.array) and value.size == 1
    if not is_array or value.dtype == mx.bool_:
        number = _clamp_number(_as_number(value))
        _check_field("scale", number, "new_scale")
        value = mx.array(float(number))
    scale = value.astype(mx.float32).reshape(())
    clamped = mx.clip(scale, state["min_scale"], state["max_scale"])
    return mx.where(mx.isfinite(scale) & (scale > 0), clamped, state["scale"])


def as_arrays(values: dict[str, Any]) -> dict[str, mx.array]:
    """Convert the values of fields to 0-d arrays."""
    arrays = {}
    for name, x in values.items():
        dtype = FIELDS[name][0]
        # MLX does not accept Python ints of 64 bits or more.
        arrays[name] = mx.array(float(x) if dtype == mx.float32 else x, dtype)
    return arrays


def read(state: dict[str, mx.array]) -> dict[str, Any]:
    """Read all fields from the device, as Python numbers."""
    return {name: read_field(name, state[name]) for name in FIELDS}


def read_field(name: str, value: mx.array) -> Any:
    """Read one field. A factor of 1.1 is read as 1.1, not as 1.100000023841858."""
    try:
        number: Any = value.item()
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"Cannot read this scaler's state: {error} Inside mx.compile, no value "
            "can be read. Read the state, and call init() of an optimizer with a "
            "group, outside the compiled function, and pass scaler.state or "
            "optimizer.state as inputs and outputs."
        ) from error
    if name in _FACTORS:
        return float(str(np.float32(number)))
    return number


def check(values: dict[str, Any], scale: str = "scale") -> None:
    """Raise if fields are invalid or conflict; ``scale`` names the scale in errors."""
    values = {name: _as_number(value) for name, value in values.items()}
    for name, value in values.items():
        _check_field(name, value, scale if name == "scale" else name)
    if not values["min_scale"] <= values["scale"] <= values["max_scale"]:
        raise ValueError(
            f"{scale} must be between min_scale {values['min_scale']} and max_scale "
            f"{values['max_scale']}, got {values['scale']}."
        )
    if values["hysteresis"] > 1 and values["backoff_interval"] > 1:
        raise ValueError(
            f"hysteresis={values['hysteresis']} and backoff_interval="
            f"{values['backoff_interval']} cannot be combined. Leave one of them at 1."
        )


def _check_field(name: str, value: Any, label: str) -> None:
    dtype = FIELDS[name][0]
    types, expected = _TYPES[dtype]
    if not isinstance(value, types) or (dtype != mx.bool_ and isinstance(value, bool)):
        raise TypeError(f"{label} must be {expected}, got {value!r}.")
    is_valid, limits = True, ""
    if name in _FACTORS:
        low, high = _FACTORS[name]
        is_valid = abs(value) < 2.0**128 and low < float(np.float32(value)) < high
        limits = f"above {low} and below {high} in float32"
    elif name in _SCALES:
        is_valid = SMALLEST_SCALE <= value <= LARGEST_SCALE
        limits = "between 2**-64 and 2**64"
    elif dtype == mx.int32:
        least = 1 if name in SETTINGS else 0
        is_valid, limits = least <= value <= _MOST, f"between {least} and 2**31 - 1"
    if not is_valid:
        raise ValueError(f"{label} must be {limits}, got {value}.")


def _clamp_number(x: Any) -> Any:
    # A scale from PyTorch may be as large as 2**127. Other values fail the check.
    is_number = isinstance(x, _TYPES[mx.float32][0]) and not isinstance(x, bool)
    is_valid = is_number and 0 < x < 2.0**128  # finite in float32
    return min(max(x, SMALLEST_SCALE), LARGEST_SCALE) if is_valid else x


def to_state_dict(values: dict[str, Any]) -> dict[str, Any]:
    """Return PyTorch's five keys, and other fields that differ from their defaults."""
    own = {k: values[k] for k in _OWN_KEYS if values[k] != DEFAULTS[k]}
    return {key: values[name] for key, name in TORCH_KEYS.items()} | own


def from_state_dict(state_dict: Any, current: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a state dict from this package or PyTorch; raise if invalid.

    Missing counters start at zero; missing settings keep their current values.
    """
    if not isinstance(state_dict, dict):
        raise TypeError(
            f"The state must be a dict, got {type(state_dict).__name__}. Pass the "
            "result of GradScaler.state_dict()."
        )
    if not state_dict:
        raise RuntimeError(
            "The state dict is empty, probably because a disabled GradScaler saved it. "
            "Create this scaler with enabled=False, or do not load the state."
        )
    missing = [key for key in TORCH_KEYS if key not in state_dict]
    if missing:
        raise KeyError(
            f"The state dict has no {', '.join(missing)}. If this is a whole "
            "checkpoint, pass only the scaler's part of it."
        )
    fresh = {name: DEFAULTS[name] for name in VALUES}
    given = {n: _as_number(state_dict[k]) for k, n in TORCH_KEYS.items()}
    own = {k: _as_number(state_dict[k]) for k in _OWN_KEYS if k in state_dict}
    values = current | fresh | given | own
    values |= {name: _clamp_number(values[name]) for name in _SCALES}
    check(values)
    # One more step must not wrap a tracker.
    trackers = ("growth_tracker", "backoff_tracker")
    return values | {name: min(values[name], _MOST - 1) for name in trackers}


def _as_number(value: Any) -> Any:
    # A saved scale may be a 0-d tensor or array.
    is_scalar = getattr(value, "shape", None) == () and hasattr(value, "item")
    return value.item() if is_scalar else value
