"""``restore_checkpoint``: restore a saved run in place, completely or not at all."""

import os
import warnings
from collections.abc import Collection, Mapping
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer

from ..core.masters import half_bits
from ..core.optimizer import MasterWeightOptimizer
from ..core.optimizers import single_optimizers
from ..core.ranks import Group
from ..core.scale import SETTINGS
from ..core.scaler import GradScaler
from ..core.trees import commit, flatten, is_floating, restore, slots, snapshot
from ..distributed import raise_together
from ..files.text import dtype_name, list_some, shorten
from .folder import Checkpoint, describe_error, read_on_ranks
from .save import (
    STATE,
    STATISTICS,
    describe_optimizer,
    find_group,
    find_scaler,
    fingerprint,
    optimizer_places,
)


def restore_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler | None = None,
) -> dict[str, Any]:
    """Restore, in place, a run that :func:`save_checkpoint` saved.

    The model, the optimizer, the scaler and the random state are restored. Arrays are
    replaced in the containers that hold them, so a step that is already compiled uses
    the new values.

    First create the model, the optimizer and the scaler as in the saved run, including
    schedules; the resumed run is then bit-identical to an uninterrupted one. Without a
    schedule, the learning rate is restored too. In distributed training, all ranks must
    call this; only rank 0 reads. Another number of ranks can restore the run, but its
    results may differ. A sharded run needs the same number of ranks, each of which
    reads its own shards.

    Args:
        path (str): The folder of the run, to restore its newest checkpoint, or one of
            the ``save-...`` folders in it.
        model (nn.Module): A model whose weights have the saved names, shapes and
            dtypes. Frozen weights that were not saved must have the same values.
        optimizer (Optimizer): An optimizer of the same class and with the same settings
            as the saved one. It does not have to be initialized.
        scaler (GradScaler, optional): Same as in :func:`save_checkpoint`.

    Returns:
        dict: The ``extra`` values passed to :func:`save_checkpoint`.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: If the checkpoint is damaged or does not match the model, the
            optimizer or the scaler. Nothing is changed.

    Example:
        >>> import mlx.nn as nn, mlx.optimizers as optim, tempfile
        >>> from mlx_gradscale import restore_checkpoint, save_checkpoint
        >>> folder = tempfile.mkdtemp()
        >>> save_checkpoint(folder, nn.Linear(2, 1), optim.AdamW(1e-3), epoch=3)
        >>> restore_checkpoint(folder, nn.Linear(2, 1), optim.AdamW(1e-3))["epoch"]
        3
    """
    scaler = find_scaler(optimizer, scaler)
    group, call = find_group(optimizer, scaler), "restore_checkpoint"
    saved = read_on_ranks(path, group, call)
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    owners = [optimizer, *single_optimizers(inner)]
    before = snapshot(model, *map(vars, owners), scaler.state if scaler else {})
    try:
        with raise_together(group, call):
            seed = _find_seed(saved.description["random"], group)
            _restore_model(saved, model)
            _check_settings(saved.description["settings"], optimizer)
            _restore_scaler(saved.scaler, scaler)
        # The ranks now have equal weights, which init() of the optimizer may compare.
        with raise_together(group, call):
            _restore_optimizer(saved, model, optimizer)
    except BaseException as error:
        restore(before)
        if not isinstance(error, Exception):
            raise
        text = f"Cannot restore {os.fspath(path)}: {describe_error(error)} "
        raise ValueError(f"{text}Nothing was changed.") from error
    mx.random.seed(seed)
    return saved.extra


def _restore_model(saved: Checkpoint, model: nn.Module) -> None:
    own = dict(flatten(model.parameters()))
    values: dict[str, Any] = dict(saved.weights)
    for name, expected in saved.description["frozen"].items():
        values[name] = own.get(name)
        if name in own and fingerprint(own[name]) != expected:
            raise ValueError(
                f"the frozen parameter {shorten(name)} is not in the checkpoint, and "
                "this model's differs from the saved run's. Load the same base model."
            )
    places = {".".join(map(str, path)): (box, k) for path, box, k in slots(model)}
    # BatchNorm's statistics take the dtype of the input in a forward pass.
    free = {name for name in own if name.endswith(STATISTICS)}
    _replace("the model", {name: places[name] for name in own}, values, free)


def _restore_scaler(saved: dict[str, Any] | None, scaler: GradScaler | None) -> None:
    if scaler is not None and saved is not None:
        # A state dict omits settings that have their default values.
        usual = {name: default for name, (_, default) in SETTINGS.items()}
        scaler.load_state_dict(saved and usual | saved)
    elif scaler is not None:
        raise ValueError("it was saved without a GradScaler. Do not pass a scaler.")
    elif saved is not None:
        raise ValueError("it was saved with a GradScaler. Pass the scaler too.")


def _restore_optimizer(
    saved: Checkpoint, model: nn.Module, optimizer: Optimizer
) -> None:
    state, parameters = dict(saved.optimizer), model.trainable_parameters()
    if isinstance(optimizer, MasterWeightOptimizer):
        optimizer.init(parameters)
        for path, (box, key) in optimizer_places(optimizer).items():
            # A schedule may have replaced an array by a number.
            if type(state.get(path)) is float and isinstance(box[key], mx.array):
                state[path] = mx.array(state[path])
        state |= {f"scaler.{name}": x for name, x in optimizer.scaler.state.items()}
        for name, x in flatten(parameters):
            if f"masters.{name}" in state:
                state[f"written.{name}"] = half_bits(x)
        optimizer.state = state
        optimizer.init(parameters)
        return
    if state.keys() - optimizer_places(optimizer).keys():
        optimizer.init(parameters)  # keeps existing state
    places = optimizer_places(optimizer)
    # Some optimizers add values to their state in a step.
    containers = {path.rpartition(".")[0]: box for path, (box, _) in places.items()}
    for path in state.keys() - places.keys():
        parent, _, key = path.rpartition(".")
        if isinstance(containers.get(parent), dict):
            places[path] = containers[parent], key
    # The first steps of an MLX optimizer may change the dtypes of its state.
    _replace("the optimizer", places, state, free=places)


def _replace(
    whose: str,
    places: dict[str, tuple[Any, Any]],
    values: Mapping[str, Any],
    free: Collection[str],
) -> None:
    """Check all values, then write them; only paths in ``free`` may change dtype."""
    missing = {
        whose: sorted(values.keys() - places.keys()),
        "the checkpoint": sorted(places.keys() - values.keys()),
    }
    problems = [f"{who} has no {list_some(n)}" for who, n in missing.items() if n]
    if problems:
        raise ValueError(
            f"it belongs to a different model or optimizer: {'; '.join(problems)}. "
            "Create the model and the optimizer as in the saved run, and freeze the "
            "same layers."
        )
    for path, (container, key) in places.items():
        old = container.get(key) if isinstance(container, dict) else container[key]
        new = values[path]
        if not isinstance(new, STATE):
            raise ValueError(f"the saved {shorten(path)} is damaged: {new!r:.80}.")
        is_match = getattr(new, "shape", ()) == getattr(old, "shape", ())
        if isinstance(new, mx.array) and isinstance(old, mx.array):
            is_free = path in free and is_floating(old) and is_floating(new)
            is_match &= is_free or old.dtype == new.dtype
        if old is not None and not is_match:
            raise ValueError(
                f"{shorten(path)} is {_describe(new)} in the checkpoint, but "
                f"{_describe(old)} in this run. Create the model and the optimizer as "
                "in the saved run."
            )
    mx.eval(values)
    commit((*place, values[path]) for path, place in places.items())


def _describe(x: Any) -> str:
    if isinstance(x, mx.array):
        return f"{dtype_name(x)} with shape {x.shape}"
    return f"the number {x}"


def _check_settings(saved: list[dict[str, Any]], optimizer: Optimizer) -> None:
    """Raise if the optimizer's class or settings differ; warn if its schedules do."""
    own = describe_optimizer(optimizer)
    was, now = (", ".join(row["class"] for row in rows) for rows in (saved, own))
    if was != now:
        raise ValueError(
            f"it was saved with {shorten(was)}, but the optimizer is {now}. Create the "
            "optimizer as in the saved run, or load only the weights: "
            "model.load_weights([*mlx_gradscale.checkpoint.read_checkpoint(path)"
            ".weights.items()])."
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


def _find_seed(keys: mx.array, group: Group) -> int:
    """Return the seed that restores this rank's ``mx.random`` key.

    A rank without a saved key gets the same key as the others if all saved keys are
    equal, and a new key otherwise.
    """
    rank, count = group.rank(), len(keys)
    if keys.dtype != mx.uint32 or keys.shape != (count, 2):
        raise ValueError("the saved random state is damaged. Use another checkpoint.")
    key = keys[rank % count]
    if rank >= count and mx.any(keys != keys[0]).item():
        key = mx.random.split(key, rank + 1)[rank]
    high, low = cast(list[int], key.tolist())
    return high << 32 | low
