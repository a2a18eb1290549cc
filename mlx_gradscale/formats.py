"""Convert the scaler states of other frameworks.

Apex, DeepSpeed, Megatron and Paddle save the states of their own scalers. A converted
state has PyTorch's five keys, and those of this package's own fields (``hysteresis``,
``min_scale`` and so on) that differ from their defaults. A :class:`FormatWarning` lists
the defaults that are assumed for missing settings.
"""

import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .core.scale import FIELDS, SETTINGS, TORCH_KEYS, from_state_dict, to_state_dict

__all__ = ["FORMATS", "Format", "FormatWarning", "read_state", "recognize"]

_OWN_KEYS = {name: name for name in FIELDS if name not in TORCH_KEYS.values()}
_TYPES = {key: type(FIELDS[name][1]) for key, name in (TORCH_KEYS | _OWN_KEYS).items()}


class FormatWarning(UserWarning):
    """A warning about defaults assumed for settings missing from a scaler state."""


class Format(NamedTuple):
    """The keys of one framework's scaler state, and the defaults of its settings.

    Attributes:
        required (set): The keys by which the format is recognized.
        fields (dict): Maps this package's keys to the framework's keys.
        assumed (dict): Maps this package's keys to the framework's defaults, for
            settings that a state may lack.
    """

    required: set[str]
    fields: dict[str, str]
    assumed: dict[str, Any]


_USUAL: dict[str, Any] = {"growth_factor": 2.0, "growth_interval": 1000}
_USUAL |= {"min_scale": 1.0, "hysteresis": 2}

FORMATS: dict[str, Format] = {
    "torch": Format(
        {*TORCH_KEYS}, {key: key for key in TORCH_KEYS} | _OWN_KEYS, assumed={}
    ),
    "paddle": Format(
        {"incr_ratio", "decr_ratio", "incr_count", "decr_count"},
        {
            "scale": "scale",
            "growth_factor": "incr_ratio",
            "growth_interval": "incr_every_n_steps",
            "_growth_tracker": "incr_count",
            "backoff_factor": "decr_ratio",
            "backoff_interval": "decr_every_n_nan_or_inf",
            "backoff_tracker": "decr_count",
            "dynamic": "use_dynamic_loss_scaling",
        },
        assumed={},
    ),
    "megatron": Format(
        {"scale", "growth_tracker", "hysteresis_tracker"},
        {"scale": "scale", "_growth_tracker": "growth_tracker"},
        _USUAL | {"backoff_factor": 0.5},
    ),
    "apex": Format(
        {"loss_scale", "unskipped"},
        {"scale": "loss_scale", "_growth_tracker": "unskipped"},
        {
            "growth_factor": 2.0,
            "growth_interval": 2000,
            "backoff_factor": 0.5,
            "max_scale": 2.0**24,
        },
    ),
    "deepspeed": Format(
        {"cur_scale", "cur_iter"},
        {
            "scale": "cur_scale",
            "growth_factor": "scale_factor",
            "growth_interval": "scale_window",
            "dynamic": "dynamic_loss_scale",
        },
        _USUAL | {"dynamic": True},
    ),
}


def _compute(name: str, state: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Compute the values that are not stored under any key of the framework's state."""
    computed: dict[str, Any] = {}
    if name in ("megatron", "deepspeed"):
        # Both count down the overflows left before a backoff; this package counts up.
        left = state.get("hysteresis_tracker", state.get("cur_hysteresis"))
        if left is None:
            computed["hysteresis"] = 1
        else:
            used = found["hysteresis"] - _number(left, int, "the hysteresis")
            computed["backoff_tracker"] = min(max(used, 0), found["hysteresis"])
    if name == "deepspeed":
        # DeepSpeed grows when (cur_iter - last_overflow_iter - 1) is a positive
        # multiple of the window: window + 1 finite steps after an overflow, then every
        # window steps. Set the tracker so that PyTorch's rule next grows at the same
        # step; right after an overflow that would be -1, so use 0.
        window, factor = found["growth_interval"], found["growth_factor"]
        last = state.get("last_overflow_iter")
        last = -1 if last is None else _number(last, int, "last_overflow_iter")
        since = _number(state.get("cur_iter"), int, "cur_iter") - last - 1
        is_counting = since > 0 and window > 0
        computed["_growth_tracker"] = (since - 1) % window if is_counting else 0
        computed["backoff_factor"] = 1.0 / factor if factor else 0.0
    return computed


def recognize(state: Mapping[str, Any]) -> str:
    """Identify the format of a scaler state by its keys.

    Args:
        state (dict): The scaler state.

    Returns:
        str: A key of :data:`FORMATS`.

    Raises:
        ValueError: If the state is empty, or has several scalers or an unknown format.

    Example:
        >>> recognize({"loss_scale": 2.0, "unskipped": 3})
        'apex'
    """
    keys = _flat(state).keys()
    if not keys:
        raise ValueError(
            "The scaler state is empty: a disabled scaler saved it. Use a new scaler."
        )
    for name, row in FORMATS.items():
        if row.required <= keys:
            return name
    raise ValueError(
        f"Cannot identify the scaler format from the keys {sorted(keys)[:20]}. Pass "
        f"format=... to formats.read_state(), one of {', '.join(FORMATS)}."
    )


def read_state(state: Mapping[str, Any], format: str | None = None) -> dict[str, Any]:
    """Convert a scaler state in one of :data:`FORMATS` to PyTorch's format.

    Settings that the state does not contain get the framework's defaults, with a
    :class:`FormatWarning`. If the run used other values, assign them to the result.

    Args:
        state (dict): The state, with Python numbers or one-element arrays.
        format (str, optional): A key of :data:`FORMATS`. Default: the result of
            :func:`recognize`.

    Returns:
        dict: A state for ``GradScaler.load_state_dict``, with PyTorch's five keys, and
        this package's own fields that differ from their defaults.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("ignore", FormatWarning)
        >>> state = read_state({"loss_scale": 1024.0, "unskipped": 7})
        >>> state["growth_interval"] = 500
        >>> state["scale"], state["_growth_tracker"]
        (1024.0, 7)
    """
    values = _flat(state)
    name = recognize(values) if format is None or not values else format
    if name not in FORMATS:
        raise ValueError(
            f"{name!r} is not a scaler format. Use one of {', '.join(FORMATS)}."
        )
    row = FORMATS[name]
    held = {
        ours: _number(values[theirs], _TYPES[ours], theirs)
        for ours, theirs in row.fields.items()
        if values.get(theirs) is not None
    }
    found = row.assumed | held
    found |= _compute(name, values, found)
    for key in TORCH_KEYS.keys() - found.keys():
        missing = row.fields[key]
        raise ValueError(f"This {name} scaler state has no {missing!r}. Add its value.")
    guessed = [
        f"{key}={value!r}"
        for key, value in row.assumed.items()
        if key not in held and found[key] == value
    ]
    if guessed:
        warnings.warn(
            f"This {name} scaler state does not contain all settings, so {name}'s "
            f"defaults are used: {', '.join(guessed)}. If the run used other values, "
            "set them in the state dict of the GradScaler.",
            FormatWarning,
            stacklevel=2,
        )
    defaults = {key: FIELDS[key][1] for key in SETTINGS}
    return to_state_dict(from_state_dict(found, defaults))


def _flat(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Convert keys to strings, or take the state out of Apex's dict of scalers."""
    flat = {str(key): value for key, value in state.items()}
    losses = [key for key in flat if key.startswith("loss_scaler")]
    if losses and all(isinstance(flat[key], Mapping) for key in losses):
        if len(losses) > 1:
            raise ValueError(
                f"The apex state contains {len(losses)} scalers: "
                f"{', '.join(losses[:8])}. Pass one of them, such as "
                f"state[{losses[0]!r}]."
            )
        return dict(flat[losses[0]])
    return flat


def _number(value: Any, kind: type, key: str) -> Any:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise ValueError(f"{key} must be a single number, got {str(value)[:60]!r}.")
    number = array.reshape(()).item()
    is_exact = kind is float or (math.isfinite(number) and number == kind(number))
    if not is_exact:
        raise ValueError(f"{key} must be of type {kind.__name__}, got {number!r}.")
    return kind(number)
