"""Scaler states of other frameworks, as one table of keys.

Every format is read into PyTorch's five keys, plus this package's own keys
(``backoff_interval``, ``dynamic``, ``min_scale`` and so on) where the format has
more to say. What a format cannot carry is named in a :class:`FormatWarning`,
never lost silently.
"""

import gzip
import os
import struct
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .scale import FIELDS, check
from .torch_checkpoint.atomic import atomic_write

# PyTorch's five keys, in its order, and the field of a scaler's state each one is.
TORCH_KEYS = {
    "scale": "scale",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
    "growth_interval": "growth_interval",
    "_growth_tracker": "growth_tracker",
}
# This package's own keys, with the value at which they say nothing.
OWN_DEFAULTS = {
    key: default
    for key, (_, default) in FIELDS.items()
    if key not in TORCH_KEYS.values()
}
_TYPES = {key: type(FIELDS[field][1]) for key, field in TORCH_KEYS.items()} | {
    key: type(default) for key, default in OWN_DEFAULTS.items()
}
_FLODL = struct.Struct("<dq")


class FormatWarning(UserWarning):
    """Something of a scaler's state that a format cannot carry."""


def _deepspeed(state: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    # DeepSpeed grows where (cur_iter - last_overflow_iter - 1) is a positive
    # multiple of the window: window + 1 finite steps after an overflow, then
    # every window steps. The tracker is what PyTorch's rule needs to grow next at
    # the same step; right after an overflow that would be -1, so 0.
    factor, window = found["growth_factor"], found["growth_interval"]
    since = int(state["cur_iter"]) - int(state.get("last_overflow_iter", -1)) - 1
    return {
        "backoff_factor": 1.0 / factor,
        "_growth_tracker": (since - 1) % window if since > 0 else 0,
    }


@dataclass(frozen=True)
class Format:
    """One row of the table.

    Attributes:
        marks: the keys that tell this format from the others.
        fields: our key -> its key.
        assumed: our key -> the framework's default, for what its state does not
            (or need not) carry.
        lost: its key -> why that key has no counterpart here.
        after: computes the keys that are not a plain copy.
        writes: whether :func:`write_state` can write it.
        shape: shape of the written ``scale`` array; None for a Python float.
    """

    marks: frozenset[str]
    fields: dict[str, str]
    assumed: dict[str, Any] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    after: Callable[[dict, dict], dict] | None = None
    writes: bool = False
    shape: tuple[int, ...] | None = None


_USUAL = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
_HYSTERESIS = (
    "delays a backoff until it is spent and is refilled in another way than this "
    "package's backoff_interval; set backoff_interval to delay backoffs"
)

FORMATS: dict[str, Format] = {
    "torch": Format(
        frozenset(TORCH_KEYS),
        {key: key for key in (*TORCH_KEYS, *OWN_DEFAULTS)},
        lost={
            "_hysteresis_tracker": _HYSTERESIS,  # NeMo's, on top of PyTorch's five
            "_hysterisis_tracker": _HYSTERESIS,
        },
        writes=True,
    ),
    "paddle": Format(
        frozenset({"scale", "incr_ratio", "decr_ratio", "incr_count", "decr_count"}),
        {
            "scale": "scale",
            "growth_factor": "incr_ratio",
            "backoff_factor": "decr_ratio",
            "growth_interval": "incr_every_n_steps",
            "_growth_tracker": "incr_count",
            "backoff_interval": "decr_every_n_nan_or_inf",
            "backoff_tracker": "decr_count",
            "dynamic": "use_dynamic_loss_scaling",
        },
        writes=True,
        shape=(1,),
    ),
    "flodl": Format(
        frozenset({"scale", "steps_since_growth"}),
        {"scale": "scale", "_growth_tracker": "steps_since_growth"},
        assumed=_USUAL,
        writes=True,
    ),
    "keras": Format(
        frozenset({"dynamic_scale", "step_counter"}),
        {"scale": "dynamic_scale", "_growth_tracker": "step_counter"},
        assumed=_USUAL,
    ),
    "tf-keras": Format(
        frozenset({"current_loss_scale", "good_steps"}),
        {"scale": "current_loss_scale", "_growth_tracker": "good_steps"},
        assumed=_USUAL | {"min_scale": 1.0},
    ),
    "flax": Format(
        frozenset({"fin_steps", "scale"}),
        {
            "scale": "scale",
            "growth_factor": "growth_factor",
            "backoff_factor": "backoff_factor",
            "growth_interval": "growth_interval",
            "_growth_tracker": "fin_steps",
            "min_scale": "minimum_scale",
        },
        assumed=_USUAL,
        # flax grows on the (interval + 1)-th finite step, PyTorch on the
        # interval-th: one more gives the same trajectory.
        after=lambda state, found: {"growth_interval": found["growth_interval"] + 1},
    ),
    "jmp": Format(
        frozenset({"loss_scale", "counter"}),
        {
            "scale": "loss_scale",
            "growth_factor": "factor",
            "growth_interval": "period",
            "_growth_tracker": "counter",
            "min_scale": "min_loss_scale",
        },
        assumed={"growth_factor": 2.0, "growth_interval": 2000, "min_scale": 1.0},
        after=lambda state, found: {"backoff_factor": 1.0 / found["growth_factor"]},
    ),
    "megatron": Format(
        frozenset({"scale", "growth_tracker", "hysteresis_tracker"}),
        {"scale": "scale", "_growth_tracker": "growth_tracker"},
        assumed=_USUAL | {"growth_interval": 1000, "min_scale": 1.0},
        lost={"hysteresis_tracker": _HYSTERESIS},
    ),
    "apex": Format(
        frozenset({"loss_scale", "unskipped"}),
        {"scale": "loss_scale", "_growth_tracker": "unskipped"},
        assumed=_USUAL | {"max_scale": 2.0**24},
    ),
    "deepspeed": Format(
        frozenset({"cur_scale", "cur_iter"}),
        {
            "scale": "cur_scale",
            "growth_factor": "scale_factor",
            "growth_interval": "scale_window",
            "dynamic": "dynamic_loss_scale",
        },
        assumed={
            "growth_factor": 2.0,
            "growth_interval": 1000,
            "dynamic": True,
            "min_scale": 1.0,
        },
        lost={
            "cur_hysteresis": _HYSTERESIS,
            "last_overflow_iter": "makes the first growth after an overflow come one "
            "step later there than here",
        },
        after=_deepspeed,
    ),
}


def recognise(state: Mapping[str, Any] | object) -> str:
    """Names the format of a scaler state by its keys.

    Args:
        state: a state dict, or an object whose attributes are the state (a
            ``flax`` DynamicScale, a ``jmp`` DynamicLossScale).

    Returns:
        str: a key of :data:`FORMATS`.

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
    """Reads another framework's scaler state into PyTorch's five keys.

    Args:
        state: the state, as :func:`recognise` takes it; numbers may be Python's,
            or one-element arrays of any kind.
        format: a key of :data:`FORMATS`; by default recognised by the keys.
        settings: values for what the format does not carry, such as
            ``growth_interval=500``. What is neither carried nor given is taken
            from the framework's defaults, with a :class:`FormatWarning`.

    Returns:
        dict: for ``GradScaler.load_state_dict``; own keys only where they differ
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
    unknown = set(settings) - set(_TYPES)
    if unknown:
        raise TypeError(
            f"Unknown settings {sorted(unknown)}: give some of {', '.join(_TYPES)}."
        )
    found = {
        ours: _number(values[theirs], _TYPES[ours], theirs)
        for ours, theirs in row.fields.items()
        if values.get(theirs) is not None
    }
    guessed = {
        key: value
        for key, value in row.assumed.items()
        if key not in found and key not in settings
    }
    found = {**row.assumed, **found}
    if row.after is not None:
        found |= row.after(values, found)
    found |= {key: _number(value, _TYPES[key], key) for key, value in settings.items()}
    for key in TORCH_KEYS:
        if key not in found:
            raise ValueError(
                f"This {name} scaler state has no {row.fields.get(key, key)!r}: give "
                f"{key}=..."
            )
    _check(found)
    if guessed:
        said = ", ".join(f"{key}={value!r}" for key, value in guessed.items())
        _warn(f"{name} does not carry {said}: its defaults are taken; give them if "
              "the run had others.")  # fmt: skip
    for key, why in row.lost.items():
        if values.get(key) is not None:
            _warn(f"{key}={values[key]!r} of {name} is not taken over: it {why}.")
    own = {k: found[k] for k, v in OWN_DEFAULTS.items() if found.get(k, v) != v}
    return {key: found[key] for key in TORCH_KEYS} | own


def write_state(state: Mapping[str, Any], format: str) -> dict[str, Any] | bytes:
    """Writes a scaler state (PyTorch's keys and ours) as another framework's.

    Args:
        state: what ``GradScaler.state_dict`` or :func:`read_state` gives.
        format: ``"torch"``, ``"paddle"`` or ``"flodl"``.

    Returns:
        dict or bytes: a dict for the framework's ``load_state_dict``; for flodl
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
    full = OWN_DEFAULTS | {
        key: _number(values[key], _TYPES[key], key) for key in values if key in _TYPES
    }
    for key in TORCH_KEYS:
        if key not in full:
            raise ValueError(f"The scaler state has no {key!r}.")
    _check(full)
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
        return _FLODL.pack(full["scale"], full["_growth_tracker"])
    out = {row.fields[key]: full[key] for key in row.fields if key in kept}
    if row.shape is not None:
        out["scale"] = np.full(row.shape, out["scale"], np.float32)
    return out


def load_flodl(path: str | os.PathLike) -> dict[str, Any]:
    """Reads flodl's 16-byte scaler file; gzip by the suffix ``.gz``.

    Args:
        path: the file.

    Returns:
        dict: as :func:`read_state` gives. flodl's factors are fixed (2, 0.5, 2000),
        so nothing is guessed.
    """
    data = Path(path).read_bytes()
    if Path(path).suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError) as error:
            raise ValueError(f"{path} is not a gzip file: {error}.") from error
    if len(data) != _FLODL.size:
        raise ValueError(
            f"{path} has {len(data)} bytes; a flodl scaler file has {_FLODL.size}."
        )
    scale, steps = _FLODL.unpack(data)
    state = {"scale": scale, "steps_since_growth": steps}
    return read_state(state, "flodl", **_USUAL)


def save_flodl(path: str | os.PathLike, state: Mapping[str, Any]) -> None:
    """Writes flodl's 16-byte scaler file, atomically; gzip by the suffix ``.gz``.

    Args:
        path: the file.
        state: what ``GradScaler.state_dict`` gives.

    Example:
        >>> import os, tempfile
        >>> from mlx_gradscale.formats import load_flodl, save_flodl
        >>> state = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5,
        ...          "growth_interval": 2000, "_growth_tracker": 7}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_flodl(os.path.join(folder, "scaler.bin.gz"), state)
        ...     load_flodl(os.path.join(folder, "scaler.bin.gz")) == state
        True
    """
    data = write_state(state, "flodl")
    target = Path(path)
    if target.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    with atomic_write(target) as file:
        file.write(data)


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
    """A flat dict of the state; apex nests one dict per loss."""
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
    if kind is not float and number != kind(number):
        raise ValueError(f"{key} must be of type {kind.__name__}, not {number!r}.")
    return kind(number)


def _check(state: Mapping[str, Any]) -> None:
    check({TORCH_KEYS.get(key, key): value for key, value in state.items()})


def _warn(text: str) -> None:
    warnings.warn(text, FormatWarning, stacklevel=3)
