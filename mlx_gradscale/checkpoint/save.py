"""``save_checkpoint``: atomically save the state that a run needs to resume."""

import os
from collections import ChainMap
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import FullyShardedModule
from mlx.optimizers import Optimizer

from ..core.finite import all_finite
from ..core.optimizer import LossScaleOptimizer, MasterWeightOptimizer
from ..core.optimizers import needs_init, single_optimizers
from ..core.ranks import Group, Ranks, gather
from ..core.scaler import GradScaler
from ..core.trees import flatten, walk
from ..distributed import compare, raise_together, share
from ..files.arrays import checksum
from ..files.text import dtype_name
from .folder import (
    Checkpoint,
    add_checkpoint,
    encode_checkpoint,
    name_part,
    write_checksums,
    write_files,
)

# The wrappers, whose names checkpoints also use for their subclasses.
WRAPPERS = {kind.__name__: kind for kind in (LossScaleOptimizer, MasterWeightOptimizer)}
# Types of optimizer state that checkpoints support.
STATE = (mx.array, bool, int, float)
# BatchNorm's statistics, which change although they are not trainable.
STATISTICS = ("running_mean", "running_var")
# Entries of a wrapper's state that are not saved with it: the scaler is saved
# separately, max_grad_norm is a setting, and "written" repeats the weights.
_UNSAVED = ("scaler.", "max_grad_norm", "written.")
# How many bytes of each unsaved frozen weight to checksum. A sample is enough to detect
# a different base model, and reading all of 4 GB would take seconds per save.
_SAMPLE = 2**16


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler | None = None,
    *,
    keep: int = 1,
    frozen: bool | None = None,
    **extra: Any,
) -> None:
    """Save a run: model, optimizer, scaler, random state and any extra values.

    A run resumed with :func:`restore_checkpoint` is bit-identical to one that was not
    interrupted. Each call adds a folder ``save-000001``, ``save-000002``, ... to
    ``path`` and then removes all but the newest ``keep`` checkpoints. The newest one is
    complete even if a save is interrupted. Files that no save has written are never
    removed. ``mx.load`` reads the weights from ``model.safetensors`` in each folder;
    see ``latest_checkpoint``. Learning rate schedules are Python code and are not
    saved, but the step count that they depend on is.

    In distributed training, all ranks must call this, and the random state of every
    rank is saved. Rank 0 writes everything else: trainable parameters and states must
    be equal on all ranks; ``extra``, frozen parameters and buffers, such as BatchNorm's
    statistics, are taken from rank 0. If the optimizer was created with ``sharded=``,
    or the model has a layer from ``nn.fully_shard``, each rank writes its own values
    instead, so all ranks must have access to ``path``.

    Args:
        path (str): The folder of the run. It is created if necessary.
        model (nn.Module): The model, saved with its buffers.
        optimizer (Optimizer): The optimizer.
        scaler (GradScaler, optional): The scaler of the training loop. Omit it for a
            ``LossScaleOptimizer``, whose scaler is always saved.
        keep (int): How many checkpoints to keep in ``path``. Default: ``1``.
        frozen (bool, optional): Whether to save frozen parameters. If not, load the
            same values into the model before restoring. Default: ``True``, or ``False``
            for a model with LoRA layers.
        **extra (Any): Other values that the loop needs, such as the step or the
            position in the data. They may be None, bool, int, float, str, arrays, and
            lists, tuples and dicts of these; dict keys must be strings.

    Raises:
        ValueError: If a trainable parameter or the optimizer state contains NaN or inf.
            Nothing is saved.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim, tempfile
        >>> from mlx_gradscale import restore_checkpoint, save_checkpoint
        >>> model, optimizer = nn.Linear(2, 1), optim.AdamW(1e-3)
        >>> folder = tempfile.mkdtemp()
        >>> save_checkpoint(folder, model, optimizer, step=180)
        >>> saved = mx.array(model.weight)
        >>> model.weight = mx.zeros((1, 2))
        >>> restore_checkpoint(folder, model, optimizer)
        {'step': 180}
        >>> mx.array_equal(model.weight, saved)
        array(True, dtype=bool)
    """
    scaler = find_scaler(optimizer, scaler)
    if type(keep) is not int or keep < 1:
        raise ValueError(f"keep must be 1 or more, got {keep!r}.")
    group, call = find_group(optimizer, scaler), "save_checkpoint"
    if isinstance(optimizer, MasterWeightOptimizer) and needs_init(optimizer.optimizer):
        optimizer.init(model.trainable_parameters())
    with raise_together(group, call):
        saved = capture(model, optimizer, scaler, frozen)._replace(extra=extra)
        shards = None if group.size() == 1 else find_shards(model, optimizer)
        copies = _check_values(saved, model, shards or set())
    compare(copies | {"scaler": scaler.state if scaler else {}}, group, call)
    key = cast(list[mx.array], mx.random.state)[0][None]
    keys = mx.distributed.all_gather(key, group=group)
    mx.eval(keys)  # on every rank
    saved.description["random"] = keys if shards is None else key
    rank, run, checksums = group.rank(), Path(path), dict[str, int]()
    part = name_part(None if shards is None else rank)
    with raise_together(group, call):
        files = encode_checkpoint(saved) if part or rank == 0 else None
    with raise_together(group, call), ExitStack() as stack:
        hidden = add_checkpoint(run, keep)
        folder = run / share(lambda: stack.enter_context(hidden).name, group, call)
        with raise_together(group, call):
            if files is not None:
                checksums = write_files(folder, part, files)
        found = gather(checksums, group, call)
        if rank == 0:
            write_checksums(folder, dict(ChainMap(*found)))


def capture(
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler | None,
    frozen: bool | None = True,
) -> Checkpoint:
    """Return the state of a run, except for the random state and extra values."""
    weights, others = _split_weights(model, frozen)
    places = optimizer_places(optimizer)
    state = {path: box[key] for path, (box, key) in places.items()}
    if isinstance(optimizer, MasterWeightOptimizer):
        state = {path: x for path, x in state.items() if not path.startswith(_UNSAVED)}
        for name, master in flatten(optimizer.masters(model.parameters())):
            if f"masters.{name}" in state:  # a replaced weight is its own master
                state[f"masters.{name}"] = master
    description = {
        "settings": describe_optimizer(optimizer),
        "next_rates": _next_rates(optimizer),
        "frozen": {name: fingerprint(x) for name, x in others.items()},
    }
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


def find_group(optimizer: Optimizer, scaler: GradScaler | None) -> Group:
    """Return the distributed group of the optimizer or scaler, or the global one."""
    groups = (getattr(owner, "group", None) for owner in (optimizer, scaler))
    return next(filter(None, groups), None) or mx.distributed.init()


def find_shards(model: nn.Module, optimizer: Optimizer) -> set[str] | None:
    """Return the paths of the parameters that are shards, or None without sharding."""
    ranks = getattr(optimizer, "_ranks", Ranks())
    prefixes = tuple(
        f"{path}." if path else ""
        for path, module in model.named_modules()
        if isinstance(module, FullyShardedModule)
    )
    if not ranks.sharded and not prefixes:
        return None
    parameters = flatten(model.parameters())
    return {p for p, x in parameters if p.startswith(prefixes) or ranks.is_shard(p, x)}


def _check_values(
    saved: Checkpoint, model: nn.Module, shards: set[str]
) -> dict[str, dict[str, mx.array]]:
    """Raise if a value is non-finite; return those that all ranks should agree on."""
    state = {k: x for k, x in saved.optimizer.items() if isinstance(x, mx.array)}
    state.pop("grad_norm", None)  # non-finite after a skipped step
    values = {"model": dict(flatten(model.trainable_parameters())), "optimizer": state}
    if not all_finite(values).item():
        path = next(p for p, x in flatten(values) if not all_finite([x]).item())
        raise ValueError(
            f"{path} contains NaN or inf, so nothing was saved. "
            "Restore an earlier checkpoint, if there is one, to continue."
        )
    return {
        part: {path: x for path, x in arrays.items() if not _is_of(path, shards)}
        for part, arrays in values.items()
    }


def _is_of(path: str, parameters: set[str]) -> bool:
    """Return whether ``path`` is that of a parameter or of state that belongs to it."""
    keys, ends = path.split("."), range(path.count(".") + 2)
    return any(".".join(keys[i:j]) in parameters for j in ends for i in range(j))


def optimizer_places(optimizer: Optimizer) -> dict[str, tuple[Any, Any]]:
    """Return the container and key of each value of an optimizer, by dotted path."""
    places = {}
    for (path, container, key), value in walk(optimizer.state):
        name = ".".join(map(str, path))
        if isinstance(container, tuple):
            if isinstance(value, mx.array):
                raise TypeError(
                    f"The optimizer keeps {name!r} in a tuple, which cannot be "
                    "restored. Use a list or a dict in its state."
                )
        elif isinstance(value, STATE):
            places[name] = container, key
    return places


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


def _next_rates(optimizer: Optimizer) -> list[float | None]:
    """Return the learning rate that each schedule gives for the next step.

    MLX's state holds the rate of the last step, but PyTorch's holds the next one.
    ``mlx_gradscale convert`` cannot compute it without the schedule. The result is None
    for an optimizer without a schedule, or if the schedule cannot be evaluated.
    """
    rates: list[float | None] = []
    for single in single_optimizers(getattr(optimizer, "optimizer", optimizer)):
        rates.append(None)
        with suppress(Exception):  # a schedule may have no value after the last step
            rates[-1] = float(single._schedulers["learning_rate"](single.step))
    return rates


def fingerprint(x: mx.array) -> str:
    """Return an array's dtype, its shape and the CRC-32 of its first 64 KiB."""
    sample = x.reshape(-1)[: _SAMPLE // x.dtype.size]
    return f"{dtype_name(x)} {x.shape} {checksum(sample):08x}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _split_weights(
    model: nn.Module, frozen: bool | None
) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """Return the weights to save, and the frozen weights to fingerprint instead."""
    own = dict(flatten(model.parameters()))
    if frozen is None:
        frozen = not any(name.split(".")[-1] == "lora_a" for name in own)
    if frozen:
        return own, {}
    trainable = {name for name, _ in flatten(model.trainable_parameters())}
    saved = {
        name: x
        for name, x in own.items()
        if name in trainable or name.endswith(STATISTICS)
    }
    return saved, {name: x for name, x in own.items() if name not in saved}
