"""``restore_checkpoint``: load a saved run into a live one, all or nothing."""

import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer

from ..core.finite import is_floating
from ..core.masters import HALF, half_bits, join, remainder_of
from ..core.optimizer import LossScaleOptimizer
from ..core.optimizers import single_optimizers
from ..core.scale import FIELDS, TORCH_KEYS
from ..core.scaler import GradScaler
from ..core.trees import commit, flatten, restore, snapshot
from ..distributed import from_rank_0
from ..files.text import dtype_name, list_some, shorten
from . import ranks
from .folder import UNEXPECTED, Checkpoint, describe_error, read_checkpoint
from .save import (
    STATE,
    UNSAVED,
    batch_statistics,
    check_arguments,
    describe_optimizer,
    fingerprint,
    places_in,
)
from .strides import arrange

_Places = dict[str, tuple[Any, Any]]


def restore_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler | None = None,
) -> dict[str, Any]:
    """Restore model, optimizer and scaler from :func:`save_checkpoint`.

    The resumed run is bit-identical to the saved one. All arrays are replaced in the
    containers that hold them, so a step that was compiled before uses the restored
    values.

    Build the model, optimizer and scaler as before, including schedules. The learning
    rate of an optimizer without a schedule is restored. Master weights may be of a
    different kind than before. In distributed training, all ranks must call this; only
    rank 0 reads. The number of ranks may differ from before.

    Args:
        path (str): The folder of the run, to restore its newest checkpoint, or one of
            the ``save-...`` folders in it.
        model (nn.Module): Names, shapes and dtypes of the weights must match, and
            frozen weights that were not saved must be the same.
        optimizer (Optimizer): Same classes and settings; initialised or not.
        scaler (GradScaler, optional): As for :func:`save_checkpoint`.

    Returns:
        dict: The ``extra`` of :func:`save_checkpoint`.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: It is damaged or does not match. Nothing was changed.

    Example:
        >>> import mlx.nn as nn, mlx.optimizers as optim, tempfile
        >>> from mlx_gradscale import restore_checkpoint, save_checkpoint
        >>> folder = tempfile.mkdtemp()
        >>> save_checkpoint(folder, nn.Linear(2, 1), optim.AdamW(1e-3), epoch=3)
        >>> restore_checkpoint(folder, nn.Linear(2, 1), optim.AdamW(1e-3))["epoch"]
        3
    """
    scaler = check_arguments(model, optimizer, scaler)
    group = ranks.group_of(optimizer, scaler)
    saved = Checkpoint(*from_rank_0(lambda: read_checkpoint(path), group))
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    owners = [optimizer, *single_optimizers(inner)]
    before = snapshot(model, *map(vars, owners), scaler.state if scaler else {})
    try:
        with ranks.together(group, "restore_checkpoint"):
            seed = ranks.seed_of(saved.description["random"], group)
            _restore_model(saved, model)
            _check_settings(saved.description, optimizer)
            _restore_scaler(saved.scaler, scaler)
        # All ranks now hold equal weights, which an optimizer may compare in init().
        with ranks.together(group, "restore_checkpoint"):
            _restore_optimizer(saved, model, optimizer)
    except BaseException as error:
        restore(before)
        if not isinstance(error, (ValueError, *UNEXPECTED)):
            raise
        text = f"Cannot restore {os.fspath(path)}: {describe_error(error)} "
        raise ValueError(f"{text}Nothing was changed.") from error
    mx.random.seed(seed)
    return saved.extra


def _restore_model(saved: Checkpoint, model: nn.Module) -> None:
    weights, frozen = saved.weights, saved.description["frozen"]
    own, statistics = dict(flatten(model.parameters())), batch_statistics(model)
    _check_names("the model", own, [*weights, *frozen])
    for name, x in weights.items():
        # A forward pass leaves statistics in the dtype of its input.
        _check_kind(name, own[name], x, is_free=name in statistics)
    for name, expected in frozen.items():
        if fingerprint(own[name]) != expected:
            raise ValueError(
                f"the frozen parameter {shorten(name)}, which checkpoints do not "
                "contain, differs from that of the saved run. Load the same base model "
                "first."
            )
    _write(places_in(model), weights, saved.description["strides"]["model"])


def _restore_scaler(
    saved: dict[str, mx.array] | None, scaler: GradScaler | None
) -> None:
    if saved is None and scaler is None:
        return
    if saved is None:
        raise ValueError("it was saved without a GradScaler. Do not pass a scaler.")
    if scaler is None:
        raise ValueError("it was saved with a GradScaler. Pass the scaler too.")
    _check_names("the scaler", FIELDS, saved)
    torch_keys = {key: saved[name] for key, name in TORCH_KEYS.items()}
    scaler.load_state_dict(saved | torch_keys)


def _restore_optimizer(
    saved: Checkpoint, model: nn.Module, optimizer: Optimizer
) -> None:
    state, weights = dict(saved.optimizer), dict(flatten(model.parameters()))
    is_wrapper = isinstance(optimizer, LossScaleOptimizer)
    if state.keys() - places_in(optimizer.state).keys():
        optimizer.init(model.trainable_parameters())  # keeps existing state
    places = places_in(optimizer.state)
    if is_wrapper:
        places = {k: x for k, x in places.items() if not k.startswith(UNSAVED)}
        _convert_masters(state, places, weights)
    _add_late_places(places, state, weights)
    _check_names("the optimizer", places, state)
    for path, (container, key) in places.items():
        value = state[path]
        own = container.get(key) if isinstance(container, dict) else container[key]
        if not isinstance(value, STATE):
            raise ValueError(f"{shorten(path)} is not an array or a number.")
        if isinstance(own, mx.array) and isinstance(value, mx.array):
            # MLX's optimizers may change the dtype of their state in the first steps;
            # a LossScaleOptimizer keeps it in float32.
            _check_kind(path, own, value, is_free=not is_wrapper)
    _write(places, state, saved.description["strides"]["optimizer"])
    written = optimizer.state["written"] if is_wrapper else {}
    for name in written.keys() & weights.keys():
        if weights[name].dtype in HALF:
            written[name] = half_bits(weights[name])


def _convert_masters(
    state: dict[str, Any], places: _Places, weights: Mapping[str, mx.array]
) -> None:
    """Convert a saved state to the optimizer's kind of master weights."""
    for path in places:
        part, _, name = path.partition(".")
        if part == "masters" and f"remainders.{name}" in state:
            state[path] = join(weights[name], state.pop(f"remainders.{name}")).master
        elif part == "remainders" and f"masters.{name}" in state:
            state[path] = remainder_of(state.pop(f"masters.{name}"), weights[name])


def _add_late_places(
    places: _Places, paths: Iterable[str], parameters: Iterable[str]
) -> None:
    """Add places for state that an optimizer creates only when it steps."""
    containers = {path.rpartition(".")[0]: box for path, (box, _) in places.items()}
    endings = tuple(f".{name}" for name in parameters)
    for path in set(paths) - places.keys():
        parent, _, key = path.rpartition(".")
        if f".{parent}".endswith(endings) and parent in containers:
            places[path] = containers[parent], key


def _write(
    places: _Places, values: Mapping[str, Any], strides: Mapping[str, Any]
) -> None:
    new = {
        name: arrange(x, strides.get(name)) if isinstance(x, mx.array) else x
        for name, x in values.items()
    }
    mx.eval([x for x in new.values() if isinstance(x, mx.array)])
    commit((*places[name], x) for name, x in new.items())


def _check_names(whose: str, own: Iterable[str], saved: Iterable[str]) -> None:
    own, saved = set(own), set(saved)
    missing = {whose: sorted(saved - own), "the checkpoint": sorted(own - saved)}
    problems = [f"{who} has no {list_some(n)}" for who, n in missing.items() if n]
    if problems:
        raise ValueError(
            f"it belongs to a different model or optimizer: {'; '.join(problems)}. "
            "Create the model and the optimizer as in the saved run, and freeze the "
            "same layers."
        )


def _check_kind(name: str, own: mx.array, x: mx.array, is_free: bool) -> None:
    """Raise if shape or dtype differ; if free, any floating-point dtype is allowed."""
    is_free = is_free and is_floating(own) and is_floating(x)
    if own.shape != x.shape or not (is_free or own.dtype == x.dtype):
        raise ValueError(
            f"{shorten(name)} is {dtype_name(x)} with shape {x.shape} in the "
            f"checkpoint, but {dtype_name(own)} with shape {own.shape} in this run. "
            "Create the model and the optimizer as in the saved run."
        )


def _check_settings(saved: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Raise if optimizer settings differ from the saved ones; warn about schedules."""
    own = describe_optimizer(optimizer)
    was, now = _optimizer_name(saved), _optimizer_name(own)
    if was != now:
        raise ValueError(
            f"the saved optimizer was {shorten(was)}, but this one is {now}."
        )
    pairs = [("max_grad_norm", saved["max_grad_norm"], own["max_grad_norm"])]
    for old, new in zip(saved["settings"], own["settings"], strict=True):
        names = new["values"].keys() & old["values"].keys()
        pairs += [(name, old["values"][name], new["values"][name]) for name in names]
        if old["schedules"] != new["schedules"]:
            was, now = shorten(old["schedules"]), new["schedules"]
            warnings.warn(
                f"The saved {new['class']} had schedules for {was}, but this one has "
                f"schedules for {now}. Checkpoints do not contain schedules.",
                stacklevel=3,
            )
    for name, old, new in pairs:
        if old != new:
            raise ValueError(
                f"the saved optimizer had {name}={shorten(old)}, but this one has "
                f"{name}={new!r}. To change it, restore first and then set it."
            )


def _optimizer_name(description: Mapping[str, Any]) -> str:
    names = ", ".join(part["class"] for part in description["settings"])
    return f"LossScaleOptimizer({names})" if description["wrapped"] else names
