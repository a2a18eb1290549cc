"""The parts of a run: what is captured of each, and how it is restored.

The functions come in pairs: ``_capture_model`` and ``restore_model``,
``_capture_optimizer`` and ``restore_optimizer``, ``describe_optimizer`` and
``check_settings``. A scaler captures itself, in ``state_dict``.
"""

import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer

from ..core.masters import half_bits
from ..core.optimizer import LossScaleOptimizer, MasterWeightOptimizer
from ..core.optimizers import single_optimizers
from ..core.ranks import Group
from ..core.scale import SETTINGS
from ..core.scaler import GradScaler
from ..core.trees import commit, flatten, walk
from ..files.arrays import checksum
from ..files.text import dtype_name, list_some, shorten
from .folder import Checkpoint

# The wrappers, whose names checkpoints also use for their subclasses.
WRAPPERS = {kind.__name__: kind for kind in (LossScaleOptimizer, MasterWeightOptimizer)}
# Types of values that checkpoints support in the state of an optimizer.
_VALUES = (mx.array, bool, int, float)
# BatchNorm's statistics, which change although they are not trainable, and take the
# dtype of the input in a forward pass.
_STATISTICS = ("running_mean", "running_var")
# Entries of a wrapper's state that are not saved with it: the scaler is saved
# separately, max_grad_norm is a setting, and "written" repeats the weights.
_UNSAVED = ("scaler.", "max_grad_norm", "written.")
# How many bytes of each unsaved frozen weight to checksum. A sample is enough to detect
# a different base model, and reading all of 4 GB would take seconds per save.
_SAMPLE = 2**16
# The container and the key of a value.
Place = tuple[Any, Any]


def capture(
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler | None,
    frozen: bool | None = True,
) -> Checkpoint:
    """Return the state of a run, except for the random state and extra values."""
    weights, fingerprints = _capture_model(model, frozen)
    description = {
        "settings": describe_optimizer(optimizer),
        "next_rates": _next_rates(optimizer),
        "frozen": fingerprints,
    }
    state = _capture_optimizer(model, optimizer)
    numbers = None if scaler is None else scaler.state_dict()
    return Checkpoint(weights, state, numbers, {}, description)


def find_scaler(optimizer: Optimizer, scaler: GradScaler | None) -> GradScaler | None:
    """Check the ``scaler`` argument, and return the run's scaler or None."""
    if not isinstance(scaler, GradScaler | None):
        raise TypeError(
            f"scaler must be a GradScaler, got {scaler!r}. Pass other values by name, "
            "such as step=5."
        )
    if isinstance(optimizer, MasterWeightOptimizer):
        if scaler not in (None, optimizer.scaler):
            raise ValueError(
                f"A {type(optimizer).__name__} has its own scaler. Do not pass one."
            )
        scaler = optimizer.scaler
    if scaler is not None and scaler._stages:
        raise RuntimeError(
            "A checkpoint can only be saved or restored between iterations. Call the "
            "scaler's update() first."
        )
    return scaler


def _capture_model(
    model: nn.Module, frozen: bool | None
) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Return the weights to save, and fingerprints of the frozen ones to leave out."""
    weights = dict(flatten(model.parameters()))
    if frozen is None:
        frozen = not any(name.split(".")[-1] == "lora_a" for name in weights)
    kept = dict(flatten(model.trainable_parameters()))
    others = [n for n in weights if n not in kept and not n.endswith(_STATISTICS)]
    left_out = [] if frozen else others
    return weights, {name: _fingerprint(weights.pop(name)) for name in left_out}


def restore_model(
    model: nn.Module, weights: dict[str, mx.array], fingerprints: dict[str, str]
) -> None:
    """Write saved weights to the model; the others must match their fingerprints."""
    own = dict(flatten(model.parameters()))
    for name, expected in fingerprints.items():
        if name not in own or _fingerprint(own[name]) != expected:
            raise ValueError(
                f"the frozen parameter {shorten(name)} is not in the checkpoint, and "
                "this model's differs from the saved run's. Load the same base model."
            )
    values = weights | {name: own[name] for name in fingerprints}
    places = {name: place for name, place in _places(model).items() if name in own}
    _replace(places, values, [name for name in own if name.endswith(_STATISTICS)])


def restore_scaler(scaler: GradScaler | None, saved: dict[str, Any] | None) -> None:
    """Load a saved state dict into the scaler, if there is one."""
    if scaler is not None and saved is not None:
        # A state dict omits settings that have their default values.
        usual = {name: default for name, (_, default) in SETTINGS.items()}
        scaler.load_state_dict(saved and usual | saved)
    elif scaler is not None:
        raise ValueError("it was saved without a GradScaler. Do not pass a scaler.")
    elif saved is not None:
        raise ValueError("it was saved with a GradScaler. Pass the scaler too.")


def _capture_optimizer(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the values of an optimizer's state by path."""
    for (path, box, _), value in walk(optimizer.state):
        if isinstance(box, tuple) and isinstance(value, mx.array):
            raise TypeError(
                f"The optimizer keeps {'.'.join(map(str, path))!r} in a tuple, which "
                "cannot be restored. Use a list or a dict in its state."
            )
    state = {path: box[key] for path, (box, key) in _places(optimizer.state).items()}
    if isinstance(optimizer, MasterWeightOptimizer):
        state = {path: x for path, x in state.items() if not path.startswith(_UNSAVED)}
        for name, master in flatten(optimizer.masters(model.parameters())):
            if f"masters.{name}" in state:  # a replaced weight is its own master
                state[f"masters.{name}"] = master
    return state


def restore_optimizer(
    model: nn.Module, optimizer: Optimizer, saved: dict[str, Any]
) -> None:
    """Write saved values to an optimizer's state, which is created if necessary."""
    state, parameters = dict(saved), model.trainable_parameters()
    if isinstance(optimizer, MasterWeightOptimizer):
        optimizer.init(parameters)
        for path, (box, key) in _places(optimizer.state).items():
            # A schedule may have replaced an array by a number.
            if type(state.get(path)) is float and isinstance(box[key], mx.array):
                state[path] = mx.array(state[path])
        state |= {f"scaler.{name}": x for name, x in optimizer.scaler.state.items()}
        for name, x in flatten(parameters):
            if f"masters.{name}" in state:
                state[f"written.{name}"] = half_bits(x)
        optimizer.state = state
        optimizer.init(parameters)  # completes the state, and decodes other state_bits
        return
    if state.keys() - _places(optimizer.state).keys():
        optimizer.init(parameters)  # keeps existing state
    own = _places(optimizer.state)
    # Some optimizers add values to their state in a step.
    boxes = {path.rpartition(".")[0]: box for path, (box, _) in own.items()}
    for path in state.keys() - own.keys():
        parent, _, key = path.rpartition(".")
        if isinstance(boxes.get(parent), dict):
            boxes[parent][key] = state[path]
    # The first steps of an MLX optimizer may change the dtypes of its state.
    _replace(_places(optimizer.state), state, free=state)


def describe_optimizer(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the class, schedules and settings of each optimizer, any wrapper first."""
    rows: list[dict[str, Any]] = []
    if isinstance(optimizer, MasterWeightOptimizer):
        values: dict[str, Any] = {
            "max_grad_norm": optimizer.max_grad_norm,
            "state_bits": optimizer._state_bits,
        }
        kind = next(x.__name__ for x in type(optimizer).mro() if x.__name__ in WRAPPERS)
        rows = [{"class": kind, "schedules": [], "values": values}]
        optimizer = optimizer.optimizer
    for single in single_optimizers(optimizer):
        values = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in sorted(vars(single).items())
            if not name.startswith("_") and _is_plain(value)
        }
        kind, schedules = type(single).__name__, sorted(single._schedulers)
        rows.append({"class": kind, "schedules": schedules, "values": values})
    return rows


def check_settings(optimizer: Optimizer, saved: list[dict[str, Any]]) -> None:
    """Raise if the optimizer's class or settings differ; warn if its schedules do."""
    own = describe_optimizer(optimizer)
    was, now = (", ".join(row["class"] for row in rows) for rows in (saved, own))
    if was != now:
        raise ValueError(
            f"it was saved with {shorten(was)}, but the optimizer is {now}. Create the "
            "optimizer as in the saved run, or load only the weights, with "
            "model.load_weights()."
        )
    for old, new in zip(saved, own, strict=True):
        for name, value in new["values"].items():
            before = old["values"].get(name, value)
            if before != value and name != "state_bits":  # see optimizer.state
                raise ValueError(
                    f"the saved {new['class']} had {name}={shorten(before)}, but this "
                    f"one has {name}={value}. Create the optimizer as in the saved "
                    "run, and change its settings after restoring."
                )
        # A run that mlx_gradscale convert wrote has no schedule until it is resumed.
        missing = [name for name in old["schedules"] if name not in new["schedules"]]
        if missing:
            warnings.warn(
                f"The saved {new['class']} had a schedule for {list_some(missing)}, "
                "but this optimizer does not. Checkpoints do not contain schedules, so "
                "create the optimizer with the same schedules.",
                stacklevel=3,
            )


def find_seed(keys: mx.array, group: Group) -> int:
    """Return the seed that restores this rank's ``mx.random`` key.

    A rank without a saved key gets the same key as the others if all saved keys are
    equal, and a new key otherwise.
    """
    rank, count = group.rank(), len(keys)
    key = keys[rank % count]
    if rank >= count and mx.any(keys != keys[0]).item():
        key = mx.random.split(key, rank + 1)[rank]
    high, low = cast(list[int], key.tolist())
    return high << 32 | low


def _places(tree: Any) -> dict[str, Place]:
    """Return the container and key of each value by path; tuples are constants."""
    return {
        ".".join(map(str, path)): (box, key)
        for (path, box, key), value in walk(tree)
        if isinstance(value, _VALUES) and not isinstance(box, tuple)
    }


def _replace(
    places: Mapping[str, Place], values: Mapping[str, Any], free: Collection[str]
) -> None:
    """Check all values, then write them; only paths in ``free`` may change dtype."""
    for path in sorted(places.keys() | values.keys()):
        box, key = places.get(path, ([None], 0))
        was, now = (_describe(x, path in free) for x in (values.get(path), box[key]))
        if was != now:
            raise ValueError(
                f"{shorten(path)} is {was} in the checkpoint, but {now} in this run. "
                "Create the model and the optimizer as in the saved run, and freeze "
                "the same layers."
            )
    commit((*place, values[path]) for path, place in places.items())


def _describe(x: Any, is_free: bool) -> str:
    """Describe what a value must have in common with its replacement."""
    if not isinstance(x, _VALUES):
        return "missing" if x is None else shorten(x)
    shape = getattr(x, "shape", ())
    if is_free:  # a schedule may replace an array by a Python number
        return f"an array of shape {shape}" if shape else "a number"
    return f"{dtype_name(x)} with shape {shape}"


def _next_rates(optimizer: Optimizer) -> list[float | None]:
    """Return the learning rate that each schedule gives for the next step, or None.

    MLX saves the rate of the last step, and ``convert`` needs the next one, as PyTorch
    does, without the schedule.
    """
    rates: list[float | None] = []
    for single in single_optimizers(getattr(optimizer, "optimizer", optimizer)):
        rates.append(None)
        with suppress(Exception):  # a schedule may have no value after the last step
            rates[-1] = float(single._schedulers["learning_rate"](single.step))
    return rates


def _fingerprint(x: mx.array) -> str:
    """Return an array's dtype, its shape and the CRC-32 of its first 64 KiB."""
    sample = x.reshape(-1)[: _SAMPLE // x.dtype.size]
    return f"{dtype_name(x)} {x.shape} {checksum(sample):08x}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
