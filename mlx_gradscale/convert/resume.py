"""From a converted folder into a live MLX run, and from the run into the folder."""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from ..guard import single_optimizers
from ..optimizer import LossScaleOptimizer
from ..run_folder.contents import SCALER, TRAINING, RunError
from ..run_folder.leaves import places, write_leaves
from ..run_folder.live import USED, live_contents
from ..run_folder.rounding import Rounded, cast_weights, lost
from ..run_folder.settings import next_rate
from ..scaler import GradScaler
from . import optimizers
from .folder import read_run, write_run
from .optimizers import Rate
from .optimizers.frozen import without_frozen
from .optimizers.groups import has_schedule, torch_groups
from .record import Record
from .run import Run


@dataclass
class Resumed:
    """What goes on training.

    Attributes:
        optimizer (Optimizer or None): Built with PyTorch's settings, its state filled;
            or None. With ``loss_scaling`` it is a ``LossScaleOptimizer`` around that.
        scaler (GradScaler or None): Filled; or None.
        record (Record): The run's, with PyTorch's own ``record.checkpoint`` (epoch and
            so on).
    """

    optimizer: optim.Optimizer | None
    scaler: GradScaler | None
    record: Record


def load_run(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    learning_rate: Rate | Sequence[Rate] | None = None,
    loss_scaling: bool = False,
    max_grad_norm: float | None = None,
    masters: str = "float32",
) -> Resumed:
    """Put a converted run into an MLX model, and make its optimizer and scaler.

    Args:
        folder (str): Written by the command or by :func:`save_run`.
        model (nn.Module): Gets the weights; every name and shape must fit.
        learning_rate (float, Callable or list, optional): A number or a schedule, as
            ``mlx.optimizers`` take it, instead of the rate in the run. A schedule
            is called with the step count, which goes on from the loaded one. PyTorch's
            parameter groups share it if they share a rate, else it must be a list with
            one for each. Files hold no schedule: give it at each load.
        loss_scaling (bool): Wrap the optimizer in a ``LossScaleOptimizer``. The weights
            are then cast to the model's own dtypes, and its masters are the uncast
            ones: ``model.set_dtype(mx.float16)`` first. A weight that the cast would
            make infinite is an error.
        max_grad_norm (float, optional): For the ``LossScaleOptimizer``.
        masters (str): For the ``LossScaleOptimizer``.

    Returns:
        Resumed: The optimizer computes what PyTorch's computed (bias correction
        and schedule included). If anything does not fit, nothing was changed.

    Example:
        >>> import tempfile
        >>> from mlx_gradscale.convert import from_torch, load_run, write_run
        >>> tensors = {"weight": mx.ones((1, 2)), "bias": mx.zeros(1)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_run(folder, from_torch({"model": tensors, "epoch": 3}))
        ...     model = nn.Linear(2, 1)
        ...     load_run(folder, model).record.checkpoint["epoch"]
        3
        >>> model.weight
        array([[1, 1]], dtype=float32)
    """
    folder = Path(folder)
    run = read_run(folder)
    if run.runs:
        raise RunError(
            f"{folder} holds several runs, {', '.join(run.runs)}: load each from the "
            "folder of that name in it."
        )
    weights = run.weights or {}
    _check_model(folder, weights, model)
    scaler = _make_scaler(folder, run.scaler)
    optimizer: optim.Optimizer | None = None
    if run.optimizer is not None:
        optimizer = _make_optimizer(folder, run, model, learning_rate)
    elif loss_scaling or learning_rate is not None:
        what = "a learning rate" if learning_rate is not None else "loss scaling"
        raise ValueError(f"{folder} has no optimizer state: {what} has no use.")
    if loss_scaling and optimizer is not None:
        wrapped = LossScaleOptimizer(
            optimizer, scaler, max_grad_norm=max_grad_norm, masters=masters
        )
        optimizer, scaler = wrapped, wrapped.scaler
        names = _load_rounded(model, weights, wrapped)
        run.record.rounded = Rounded(folder.resolve(), tuple(names))
    elif weights:
        model.load_weights(list(weights.items()), strict=True)
    # Arrays of a file are read when used: now, before the file can change.
    mx.eval(model.parameters(), optimizer.state if optimizer else [])
    return Resumed(optimizer, scaler, run.record)


def _make_scaler(folder: Path, state: dict[str, Any] | None) -> GradScaler | None:
    if state is None:
        return None
    scaler = GradScaler()
    try:
        scaler.load_state_dict(state)
    except (ValueError, TypeError, KeyError) as error:
        said = error.args[0] if error.args else error
        raise RunError(f"{folder / SCALER}: {said}") from error
    return scaler


def _make_optimizer(
    folder: Path,
    run: Run,
    model: nn.Module,
    learning_rate: Rate | Sequence[Rate] | None,
) -> optim.Optimizer:
    """Return the optimizer that goes on, with its state."""
    record, flat = run.record, run.optimizer
    if record.optimizer is None or record.model is None or flat is None:
        raise ValueError(
            f"{folder} has an optimizer state, but was not converted, and so does "
            "not tell how to build the optimizer: build it as it was, call init, "
            "and give it to load_optimizer_state with read_run(folder).optimizer."
        )
    now = replace(record.optimizer, groups=current_groups(run))
    optimizer = build_optimizer(replace(record, optimizer=now), learning_rate)
    parts = list(single_optimizers(optimizer))
    for part, used in zip(parts, record.used or [], strict=False):
        for name in optimizers.ROWS[now.name].fixed.keys() & used.keys():
            setattr(part, name, used[name])
    trainable = model.trainable_parameters()
    optimizer.init(trainable)
    given = [part.learning_rate for part in parts]
    state, suspects = without_frozen(
        flat,
        record.optimizer,
        record.model.entries,
        dict(tree_flatten(trainable)),
    )
    load_optimizer_state(optimizer, state)
    _warn_of_frozen(suspects)
    if learning_rate is None:
        _warn_of_lost_schedule(record)
    else:
        for part, rate in zip(parts, given, strict=True):
            part.learning_rate = rate
            part.learning_rate = next_rate(part)
    return optimizer


def _load_rounded(
    model: nn.Module, weights: Mapping[str, mx.array], optimizer: LossScaleOptimizer
) -> list[str]:
    """Load weights in the model's dtypes; return those rounded without a master."""
    dtypes = {name: x.dtype for name, x in tree_flatten(model.parameters())}
    cast = cast_weights(weights, dtypes)
    model.load_weights(list(cast.items()), strict=True)
    optimizer.init(model.trainable_parameters())
    masters = optimizer.kept_masters
    for name in masters:
        masters.set(name, weights[name].astype(mx.float32), cast[name])
    return [name for name in lost(weights, cast) if name not in set(masters)]


def save_run(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: optim.Optimizer | None = None,
    scaler: GradScaler | None = None,
    record: Record | None = None,
) -> None:
    """Write a live MLX run to a folder, for the command to take back to PyTorch.

    Args:
        folder (str): The run in it is replaced; other files in it stay.
        model (nn.Module): Its parameters are saved.
        optimizer (Optimizer, optional): Its state and settings are saved; of a
            ``LossScaleOptimizer`` the inner one's, its scaler's, and its masters in the
            place of the weights. Weights that have no master (frozen ones, BatchNorm's
            statistics) are then saved as they were before :func:`load_run` rounded
            them, if they have not changed since: from where they were loaded, or
            ``folder``.
        scaler (GradScaler, optional): Its state is saved.
        record (Record, optional): From :func:`load_run`; by default that of the folder,
            if it is there. What of its ``checkpoint`` counts steps, you set: the way to
            PyTorch says how old it may be.
    """
    folder = Path(folder)
    if record is None:
        record = read_run(folder).record if (folder / TRAINING).exists() else Record()
    if optimizer is not None:
        _refuse_unknown(optimizer)
    live = live_contents(folder, model, optimizer, scaler, record.rounded)
    record = replace(record, used=live.training.get(USED, record.used))
    run = Run(live.weights, live.optimizer, live.scaler, record)
    write_run(folder, run, overwrite=True)


def _refuse_unknown(optimizer: optim.Optimizer) -> None:
    if isinstance(optimizer, LossScaleOptimizer):
        optimizer = optimizer.optimizer
    classes = [row.mlx for row in optimizers.ROWS.values()]
    for part in single_optimizers(optimizer):
        if type(part) not in classes:
            known = ", ".join(each.__name__ for each in classes)
            raise ValueError(
                f"{type(part).__name__} has no PyTorch counterpart here: {known} do."
            )


def current_groups(run: Run) -> list[dict[str, Any]]:
    """Return PyTorch's parameter groups as the run would write them now.

    Args:
        run (Run): With an optimizer state, and its record.

    Returns:
        list: With the current learning rate and settings, not the recorded ones.
    """
    flat, record = run.optimizer, run.record.optimizer
    if flat is None or record is None:
        raise ValueError("The run has no optimizer state, or no record of PyTorch's.")
    return torch_groups(flat, record, run.record.used)[0]


def build_optimizer(
    record: Record, learning_rate: Rate | Sequence[Rate] | None = None
) -> optim.Optimizer:
    """Return the MLX optimizer of a run's record, without its state.

    Args:
        record (Record): A run's; see :func:`load_run`.
        learning_rate (float, Callable or list, optional): See :func:`load_run`.

    Returns:
        optim.Optimizer: A ``MultiOptimizer`` where PyTorch's groups differ.
    """
    mine, model = record.optimizer, record.model
    if mine is None or model is None:
        raise ValueError("The record does not tell how PyTorch's optimizer looked.")
    entries = model.entries
    groups = mine.groups[:1] if mine.joined else mine.groups
    members = [[n for t in names for n in entries[t].mlx] for names in mine.names]
    return optimizers.build(mine.name, groups, members, learning_rate)


def load_optimizer_state(
    optimizer: optim.Optimizer, flat: Mapping[str, mx.array]
) -> None:
    """Write a flat state into an optimizer's own dicts, or change nothing.

    Replacing ``optimizer.state`` would detach it from a step that is already
    compiled; this does not.

    Args:
        optimizer (Optimizer): After ``init``.
        flat (dict): ``tree_flatten(optimizer.state)`` as a dict.

    Raises:
        ValueError: If a name or shape does not fit.

    Example:
        >>> first, second = optim.Adam(0.1), optim.Adam(0.1)
        >>> first.init({"w": mx.ones(2)}), second.init({"w": mx.ones(2)})
        (None, None)
        >>> first.state["w"]["m"] = mx.array([1.0, 2.0])
        >>> load_optimizer_state(second, dict(tree_flatten(first.state)))
        >>> second.state["w"]["m"]
        array([1, 2], dtype=float32)
    """
    own = places(optimizer.state)
    missing, spare = sorted(own.keys() - flat.keys()), sorted(flat.keys() - own.keys())
    if missing or spare:
        raise ValueError(
            f"The optimizer state lacks {missing[:4] or 'nothing'} and has "
            f"{spare[:4] or 'nothing'} too much for this optimizer and model: unfreeze "
            "a parameter that was trained, freeze one that was not, or give the model "
            "and optimizer that the state was saved from."
        )
    for path, (box, key) in own.items():
        shape = getattr(box[key], "shape", ())
        if shape != flat[path].shape:
            raise ValueError(
                f"{path} has shape {flat[path].shape}, the optimizer needs {shape}."
            )
        if isinstance(box, tuple):
            raise ValueError(f"{path} is in a tuple, which cannot be written to.")
    write_leaves(own, flat)


def _warn_of_frozen(names: list[str]) -> None:
    if names:
        some = ", ".join(names[:3]) + (", ..." if names[3:] else "")
        warnings.warn(
            f"{some} had no optimizer state in PyTorch, as frozen parameters have, and "
            "will be trained here: if they were frozen, freeze them in the model "
            "before load_run.",
            stacklevel=4,
        )


def _warn_of_lost_schedule(record: Record) -> None:
    if any(map(has_schedule, record.used or [])):
        warnings.warn(
            "The run was saved with a learning rate schedule, which no file holds: "
            "give it again, load_run(..., learning_rate=...), or the rate stays what "
            "it was at the last step.",
            stacklevel=4,
        )


def _check_model(
    folder: str | os.PathLike[str], weights: Mapping[str, mx.array], model: nn.Module
) -> None:
    own = dict(tree_flatten(model.parameters()))
    if not weights:
        return
    said = [
        f"{who} has no {', '.join(lacks[:3])}{', ...' if lacks[3:] else ''}"
        for who, lacks in (
            ("the model", sorted(weights.keys() - own.keys())),
            ("the run", [name for name in own if name not in weights]),
        )
        if lacks
    ]
    said += [
        f"{name} has shape {own[name].shape} in the model, {x.shape} in the run"
        for name, x in weights.items()
        if name in own and own[name].shape != x.shape
    ][:3]
    if said:
        raise ValueError(
            f"{folder} holds another model than this one: {'; '.join(said)}. Give the "
            "model that was converted, or convert again for this one (--model)."
        )
