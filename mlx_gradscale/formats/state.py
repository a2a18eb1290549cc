"""Scaler states read from the table's formats into PyTorch's keys, and written."""

import math
import struct
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..scale import FIELDS, SETTINGS, TORCH_KEYS
from ..state_dict import from_state_dict, to_state_dict
from .table import FORMATS, OWN_DEFAULTS, TYPES, Format

# Scale and steps since growth, little endian: all of flodl's file.
FLODL = struct.Struct("<dq")


class FormatWarning(UserWarning):
    """Something of a scaler's state that a format cannot carry."""


def recognise(state: Mapping[str, Any] | object) -> str:
    """Name the format of a scaler state by its keys.

    Args:
        state (dict or object): A state dict, or an object whose attributes are the
            state (a ``flax`` DynamicScale, a ``jmp`` DynamicLossScale).

    Returns:
        str: A key of :data:`FORMATS`.

    Example:
        >>> recognise({"loss_scale": 2.0, "unskipped": 3})
        'apex'
    """
    keys = set(_as_dict(state))
    if not keys:
        raise ValueError(
            "The scaler state is empty: it was saved from a disabled scaler. Leave "
            "the scaler out, or make a new one."
        )
    fits = [name for name, row in FORMATS.items() if row.marks <= keys]
    if not fits:
        raise ValueError(
            f"No known scaler state has the keys {sorted(map(str, keys))}. Name the "
            f"format: one of {', '.join(FORMATS)}."
        )
    # Only paddle's and flax's marks can both be there by chance: most marks win.
    return max(fits, key=lambda name: len(FORMATS[name].marks))


def read_state(
    state: Mapping[str, Any] | object, format: str | None = None, **settings: Any
) -> dict[str, Any]:
    """Read another framework's scaler state into PyTorch's five keys.

    Args:
        state (dict or object): The state, as :func:`recognise` takes it; numbers may be
            Python's, or one-element arrays of any kind.
        format (str, optional): A key of :data:`FORMATS`; by default recognised by the
            keys.
        **settings (Any): Values for what the format does not carry, such as
            ``growth_interval=500``. What is neither carried nor given is taken from the
            framework's defaults, with a :class:`FormatWarning`.

    Returns:
        dict: For ``GradScaler.load_state_dict``; own keys only where they differ
        from their defaults.

    Example:
        >>> from mlx_gradscale.formats import read_state
        >>> state = {"loss_scale": 1024.0, "counter": 7, "period": 100, "factor": 2,
        ...          "min_loss_scale": 2.0**-126}
        >>> read_state(state)  # doctest: +NORMALIZE_WHITESPACE
        {'scale': 1024.0, 'growth_factor': 2.0, 'backoff_factor': 0.5,
         'growth_interval': 100, '_growth_tracker': 7}
    """
    row, name, values = _row(state, format)
    unknown = set(settings) - set(TYPES)
    if unknown:
        raise TypeError(
            f"Unknown settings {sorted(unknown)}: give some of {', '.join(TYPES)}."
        )
    found = {
        ours: _number(values[theirs], TYPES[ours], theirs)
        for ours, theirs in row.fields.items()
        if values.get(theirs) is not None
    }
    guessed = {
        key: value
        for key, value in row.assumed.items()
        if key not in found and key not in settings
    }
    given = {key: _number(value, TYPES[key], key) for key, value in settings.items()}
    found = {**row.assumed, **found}
    if row.after is not None:
        found |= row.after(values, found | given)
    found |= given
    guessed = {key: value for key, value in guessed.items() if found[key] == value}
    for key in TORCH_KEYS:
        if key not in found:
            raise ValueError(
                f"This {name} scaler state has no {row.fields.get(key, key)!r}: give "
                f"{key}=..."
            )
    state_dict = _checked(found)
    if guessed:
        said = ", ".join(f"{key}={value!r}" for key, value in guessed.items())
        _warn(f"{name} does not carry {said}: its defaults are taken; give them if "
              "the run had others.")  # fmt: skip
    for key, why in row.lost.items():
        if values.get(key) is not None:
            _warn(f"{key}={values[key]!r} of {name} is not taken over: it {why}.")
    return state_dict


def write_state(state: Mapping[str, Any], format: str) -> dict[str, Any] | bytes:
    """Write a scaler state (PyTorch's keys and ours) as another framework's.

    Args:
        state (dict): What ``GradScaler.state_dict`` or :func:`read_state` gives.
        format (str): ``"torch"``, ``"paddle"`` or ``"flodl"``.

    Returns:
        dict or bytes: A dict for the framework's ``load_state_dict``; for flodl
        the 16 bytes of its file.

    Example:
        >>> from mlx_gradscale.formats import write_state
        >>> state = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5,
        ...          "growth_interval": 2000, "_growth_tracker": 7}
        >>> write_state(state, "flodl").hex()
        '00000000000090400700000000000000'
    """
    if format not in FORMATS or not FORMATS[format].writes:
        names = ", ".join(name for name, row in FORMATS.items() if row.writes)
        raise ValueError(f"Cannot write format {format!r}: choose one of {names}.")
    row, _, values = _row(state, "torch")
    full = {
        key: _number(values[key], TYPES[key], key) for key in values if key in TYPES
    }
    for key in TORCH_KEYS:
        if key not in full:
            raise ValueError(f"The scaler state has no {key!r}.")
    full = OWN_DEFAULTS | _checked(full)
    row = FORMATS[format]
    kept = set(TORCH_KEYS) if format == "torch" else set(row.fields)
    neutral = OWN_DEFAULTS | row.assumed
    dropped = {
        key: value
        for key, value in full.items()
        if key not in kept and value != neutral.get(key)
    }
    if dropped:
        said = ", ".join(f"{key}={value!r}" for key, value in dropped.items())
        _warn(f"{format} cannot carry {said}: set it again where the state is loaded.")
    if format == "flodl":
        return FLODL.pack(full["scale"], full["_growth_tracker"])
    out = {row.fields[key]: full[key] for key in row.fields if key in kept}
    if row.shape is not None:
        out["scale"] = np.full(row.shape, out["scale"], np.float32)
    return out


def _row(state: object, format: str | None) -> tuple[Format, str, dict[str, Any]]:
    values = _as_dict(state)
    name = format or recognise(values)
    if name not in FORMATS:
        raise ValueError(
            f"Unknown scaler format {name!r}: one of {', '.join(FORMATS)}."
        )
    if not values:
        recognise(values)  # raises the sentence for an empty state
    return FORMATS[name], name, values


def _as_dict(state: object) -> dict[str, Any]:
    """Return a flat dict of the state; apex nests one dict per loss."""
    if not isinstance(state, Mapping):
        names = {theirs for row in FORMATS.values() for theirs in row.fields.values()}
        state = {name: getattr(state, name) for name in names if hasattr(state, name)}
    # Keras names variables by path ("loss_scale_optimizer/dynamic_scale").
    flat = {str(key).rsplit("/", 1)[-1]: value for key, value in state.items()}
    losses = [key for key in flat if key.startswith("loss_scaler")]
    if losses and all(isinstance(flat[key], Mapping) for key in losses):
        if len(losses) > 1:
            raise ValueError(
                f"The apex state holds {len(losses)} scalers ({', '.join(losses)}): "
                f"give the one you want, as state[{losses[0]!r}]."
            )
        return dict(flat[losses[0]])
    return flat


def _number(value: Any, kind: type, key: str) -> Any:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise ValueError(f"{key} must be one number, not {value!r}.")
    number = array.reshape(()).item()
    if kind is not float and not math.isfinite(number):
        raise ValueError(f"{key} must be finite, not {number!r}.")
    if kind is not float and number != kind(number):
        raise ValueError(f"{key} must be of type {kind.__name__}, not {number!r}.")
    return kind(number)


def _checked(state: dict[str, Any]) -> dict[str, Any]:
    """Return it within the limits, own keys only where not at their defaults."""
    settings = {key: FIELDS[key][1] for key in SETTINGS}
    return to_state_dict(from_state_dict(state, settings))


def _warn(text: str) -> None:
    warnings.warn(text, FormatWarning, stacklevel=3)
