"""From a converted folder into a live MLX run, and from the run into the folder."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from ..half import HALF, half_bits
from ..optimizer import LossScaleOptimizer
from ..run_folder.rounding import ROUNDED, cast_weights, lost, unrounded
from ..scaler import GradScaler
from . import optimizers
from .conversion import Run, plan_of
from .folder import RESUME, SCALER, TRAINING, read_run, write_run
from .optimizers import Rate
from .optimizers.builder import Divided
from .optimizers.frozen import without_frozen
from .record import RunError


@dataclass
class Resumed:
    """What goes on training.

    Attributes:
        optimizer: built with PyTorch's settings, its state filled; or None. With
            ``loss_scaling`` it is a ``LossScaleOptimizer`` around that.
        scaler: filled; or None.
        record: the run's, with PyTorch's own ``record["checkpoint"]`` (epoch and so
            on).
    """

    optimizer: optim.Optimizer | None
    scaler: GradScaler | None
    record: dict[str, Any]


def load_run(
    folder: str | os.PathLike,
    model: nn.Module,
    *,
    learning_rate: Rate | Sequence[Rate] | None = None,
    loss_scaling: bool = False,
    max_grad_norm: float | None = None,
) -> Resumed:
    """Puts a converted run into an MLX model, and makes its optimizer and scaler.

    Args:
        folder: written by the command or by :func:`save_run`.
        model: gets the weights; every name and shape must fit.
        learning_rate: a number or a schedule, as ``mlx.optimizers`` take it, in the
            place of the rate in the run. A schedule is called with the step count,
            which goes on from the loaded one. PyTorch's parameter groups share it if
            they share a rate, else it must be a list with one for each. Files hold no
            schedule: give it at each load.
        loss_scaling: wrap the optimizer in a ``LossScaleOptimizer``. The weights
            are then cast to the model's own dtypes, and its masters are the
            uncast ones: ``model.set_dtype(mx.float16)`` first. A weight that the
            cast would make infinite is an error.
        max_grad_norm: for the ``LossScaleOptimizer``.

    Returns:
        Resumed: the optimizer computes what PyTorch's computed (bias correction
        and schedule included). If anything does not fit, nothing was changed.

    Example:
        >>> import tempfile
        >>> from mlx_gradscale.convert import from_torch, load_run, write_run
        >>> tensors = {"weight": mx.ones((1, 2)), "bias": mx.zeros(1)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_run(folder, from_torch({"model": tensors, "epoch": 3}))
        ...     model = nn.Linear(2, 1)
        ...     load_run(folder, model).record["checkpoint"]["epoch"]
        3
        >>> model.weight
        array([[1, 1]], dtype=float32)
    """
    run = read_run(folder)
    if run.runs:
        raise RunError(
            f"{folder} holds several runs, {', '.join(run.runs)}: load each from the "
            "folder of that name in it."
        )
    weights = run.weights or {}
    _check_model(folder, weights, model)
    optimizer = scaler = None
    if run.scaler is not None:
        scaler = GradScaler()
        try:
            scaler.load_state_dict(run.scaler)
        except (ValueError, TypeError, KeyError) as error:
            said = error.args[0] if error.args else error
            raise RunError(f"{Path(folder) / SCALER}: {said}") from error
    if run.optimizer is not None:
        if "optimizer" not in run.record:
            raise ValueError(
                f"{folder} has an optimizer state, but was not converted, and so does "
                "not tell how to build the optimizer: build it as it was, call init, "
                "and give it to load_optimizer_state with read_run(folder).optimizer."
            )
        now = run.record["optimizer"] | {"groups": current_groups(run)}
        optimizer = build_optimizer(run.record | {"optimizer": now}, learning_rate)
        for part, used in zip(
            _parts(optimizer), run.record.get("used") or [], strict=False
        ):
            for name in optimizers.ROWS[now["name"]].fixed.keys() & used.keys():
                setattr(part, name, used[name])
        optimizer.init(model.trainable_parameters())
        given = [part.learning_rate for part in _parts(optimizer)]
        state, suspects = without_frozen(
            run.optimizer,
            run.record["optimizer"],
            plan_of(run.record).entries,
            dict(tree_flatten(model.trainable_parameters())),
        )
        load_optimizer_state(optimizer, state)
        _warn_of_frozen(suspects)
        if learning_rate is None:
            _warn_of_lost_schedule(run)
        else:
            for part, rate in zip(_parts(optimizer), given, strict=True):
                part.learning_rate = rate
                part.learning_rate = _next_rate(part)
    elif loss_scaling or learning_rate is not None:
        what = "a learning rate" if learning_rate is not None else "loss scaling"
        raise ValueError(f"{folder} has no optimizer state: {what} has no use.")
    if loss_scaling:
        dtypes = {name: x.dtype for name, x in tree_flatten(model.parameters())}
        cast = cast_weights(weights, dtypes)
        optimizer = LossScaleOptimizer(optimizer, scaler, max_grad_norm=max_grad_norm)
        model.load_weights(list(cast.items()), strict=True)
        optimizer.init(model.trainable_parameters())
        masters = optimizer.state["masters"]
        masters.update({name: weights[name].astype(mx.float32) for name in masters})
        scaler = optimizer.scaler
        run.record[ROUNDED] = {
            "folder": str(Path(folder).resolve()),
            "names": [name for name in lost(weights, cast) if name not in masters],
        }
    elif weights:
        model.load_weights(list(weights.items()), strict=True)
    # Arrays of a file are read when used: now, before the file can change.
    mx.eval(model.parameters(), optimizer.state if optimizer else [])
    return Resumed(optimizer, scaler, run.record)


def save_run(
    folder: str | os.PathLike,
    model: nn.Module,
    optimizer: optim.Optimizer | None = None,
    scaler: GradScaler | None = None,
    record: Mapping[str, Any] | None = None,
) -> None:
    """Writes a live MLX run to a folder, for the command to take back to PyTorch.

    Args:
        folder: the run in it is replaced; other files in it stay.
        model: its parameters are saved.
        optimizer: its state and settings are saved; of a ``LossScaleOptimizer`` the
            inner one's, its scaler's, and its masters in the place of the weights.
            Weights that have no master (frozen ones, BatchNorm's statistics) are
            then saved as they were before :func:`load_run` rounded them, if they
            have not changed since: from where they were loaded, or ``folder``.
        scaler: its state is saved.
        record: from :func:`load_run`; by default that of the folder, if it is there.
            What of its ``"checkpoint"`` was changed since it was read is taken to be
            of this step; of the rest, the way to PyTorch says how old it is.
    """
    run = live_run(folder, model, optimizer, scaler, record)
    write_run(folder, run, overwrite=True)


def live_run(
    folder: str | os.PathLike,
    model: nn.Module,
    optimizer: optim.Optimizer | None = None,
    scaler: GradScaler | None = None,
    record: Mapping[str, Any] | None = None,
    settings: Callable[[optim.Optimizer], list[dict[str, Any]]] | None = None,
) -> Run:
    """What :func:`save_run` writes, evaluated.

    Args:
        folder: see :func:`save_run`.
        model: see :func:`save_run`.
        optimizer: see :func:`save_run`.
        scaler: see :func:`save_run`.
        record: see :func:`save_run`.
        settings: what tells the optimizer's settings; by default
            :func:`optimizer_settings`, which refuses what PyTorch has not.
    """
    folder = Path(folder)
    if record is None and (folder / TRAINING).exists():
        record = read_run(folder).record
    run = Run(weights=dict(tree_flatten(model.parameters())), record=dict(record or {}))
    run.record.pop(RESUME, None)  # of an earlier step
    rounded = run.record.pop(ROUNDED, None)
    if isinstance(optimizer, LossScaleOptimizer):
        if not optimizer._initialized:
            # It may hold a state that was set and waits for the parameters.
            optimizer.init(model.trainable_parameters())
        masters = _masters(optimizer, model)
        run.weights = unrounded(run.weights, masters, folder, rounded) | masters
        scaler = optimizer.scaler if scaler is None else scaler
        optimizer = optimizer.optimizer
    if optimizer is not None:
        run.optimizer = {
            # A schedule of Python numbers leaves one in the state.
            name: x if isinstance(x, mx.array) else mx.array(x)
            for name, x in tree_flatten(optimizer.state)
            if isinstance(x, (mx.array, int, float))
        }
        run.record["used"] = (settings or optimizer_settings)(optimizer)
    if scaler is not None and scaler.is_enabled():
        run.scaler = scaler.state_dict()
    mx.eval(run.weights, run.optimizer or {})
    return run


def _masters(optimizer: LossScaleOptimizer, model: nn.Module) -> dict[str, mx.array]:
    """The masters, and in the place of one the weight that the user put there since."""
    own, state = dict(tree_flatten(model.parameters())), optimizer.state
    masters = {name: x for name, x in state["masters"].items() if name in own}
    replaced = {
        name: own[name]
        for name in masters
        if own[name].dtype not in HALF
        or not _equal(half_bits(own[name]), state["written"][name])
    }
    # Only for those: it makes a copy of each.
    return masters | optimizer.masters(replaced)


def _equal(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and mx.array_equal(a, b).item()


def current_groups(run: Run) -> list[dict[str, Any]]:
    """PyTorch's parameter groups as the run would write them now.

    Args:
        run: with an optimizer state, and its record.

    Returns:
        list: with the current learning rate and settings, not the recorded ones.
    """
    groups, _, _ = optimizers.state.torch_groups(
        run.optimizer, run.record["optimizer"], run.record.get("used")
    )
    return groups


def build_optimizer(
    record: Mapping[str, Any], learning_rate: Rate | Sequence[Rate] | None = None
) -> optim.Optimizer:
    """The MLX optimizer of a run's record, without its state.

    Args:
        record: a run's; see :func:`load_run`.
        learning_rate: see :func:`load_run`.

    Returns:
        optim.Optimizer: a ``MultiOptimizer`` where PyTorch's groups differ.
    """
    mine, entries = record["optimizer"], plan_of(record).entries
    groups = mine["groups"][:1] if mine["joined"] else mine["groups"]
    members = [[n for t in names for n in entries[t].mlx] for names in mine["names"]]
    return optimizers.build(mine["name"], groups, members, learning_rate)


def load_optimizer_state(
    optimizer: optim.Optimizer, flat: Mapping[str, mx.array]
) -> None:
    """Writes a flat state into an optimizer's own dicts, or changes nothing.

    Replacing ``optimizer.state`` would detach it from a step that is already
    compiled; this does not.

    Args:
        optimizer: after ``init``.
        flat: ``tree_flatten(optimizer.state)`` as a dict.

    Raises:
        ValueError: if a name or shape does not fit.

    Example:
        >>> first, second = optim.Adam(0.1), optim.Adam(0.1)
        >>> first.init({"w": mx.ones(2)}), second.init({"w": mx.ones(2)})
        (None, None)
        >>> first.state["w"]["m"] = mx.array([1.0, 2.0])
        >>> load_optimizer_state(second, dict(tree_flatten(first.state)))
        >>> second.state["w"]["m"]
        array([1, 2], dtype=float32)
    """
    state = optimizer.state
    own = dict(tree_flatten(state))
    missing, spare = sorted(own.keys() - flat.keys()), sorted(flat.keys() - own.keys())
    if missing or spare:
        raise ValueError(
            f"The optimizer state lacks {missing[:4] or 'nothing'} and has "
            f"{spare[:4] or 'nothing'} too much for this optimizer and model: unfreeze "
            "a parameter that was trained, freeze one that was not, or give the model "
            "and optimizer that the state was saved from."
        )
    for key, array in own.items():
        if array.shape != flat[key].shape:
            raise ValueError(
                f"{key} has shape {flat[key].shape}, the optimizer needs {array.shape}."
            )
    for key, array in flat.items():
        *path, leaf = key.split(".")
        place = state
        for word in path:
            place = (
                place[int(word)] if isinstance(place, (list, tuple)) else place[word]
            )
        place[leaf] = array


def optimizer_settings(optimizer: optim.Optimizer) -> list[dict[str, Any]]:
    """What an MLX optimizer runs with, one dict per part of a ``MultiOptimizer``.

    Example:
        >>> optimizer_settings(optim.Lion(0.1, betas=[0.8, 0.9]))
        [{'class': 'Lion', 'betas': [0.8, 0.9], 'weight_decay': 0.0, 'schedule': False}]
    """
    if isinstance(optimizer, optim.MultiOptimizer):
        return [s for part in _parts(optimizer) for s in optimizer_settings(part)]
    rows = [r for r in optimizers.ROWS.values() if type(optimizer) is r.mlx]
    if not rows:
        known = ", ".join(row.mlx.__name__ for row in optimizers.ROWS.values())
        raise ValueError(
            f"{type(optimizer).__name__} has no PyTorch counterpart here: {known} do."
        )
    names = {*rows[0].settings.values(), *rows[0].fixed} - {"learning_rate"}
    used = {name: getattr(optimizer, name) for name in sorted(names)}
    used |= {k: list(v) for k, v in used.items() if isinstance(v, (list, tuple))}
    schedule = optimizer._schedulers.get("learning_rate")
    if schedule:  # the state holds that of the last step, PyTorch that of the next
        used["learning_rate"] = _next_rate(optimizer).item()
        is_divided = isinstance(schedule, Divided)
        used["constant"] = is_divided and not callable(schedule.rate)
    used["schedule"] = schedule is not None
    return [{"class": type(optimizer).__name__, **used}]


def _warn_of_frozen(names: list[str]) -> None:
    if names:
        some = ", ".join(names[:3]) + (", ..." if names[3:] else "")
        warnings.warn(
            f"{some} had no optimizer state in PyTorch, as frozen parameters have, and "
            "will be trained here: if they were frozen, freeze them in the model "
            "before load_run.",
            stacklevel=3,
        )


def _parts(optimizer: optim.Optimizer) -> list[optim.Optimizer]:
    is_several = isinstance(optimizer, optim.MultiOptimizer)
    return optimizer.optimizers if is_several else [optimizer]


def _next_rate(optimizer: optim.Optimizer) -> mx.array:
    schedule = optimizer._schedulers.get("learning_rate")
    return mx.array(schedule(optimizer.step)) if schedule else optimizer.learning_rate


def _warn_of_lost_schedule(run: Run) -> None:
    record, used = run.record["optimizer"], run.record.get("used") or []
    if any(
        optimizers.state.has_schedule(record["name"], group, part)
        for group, part in zip(record["groups"], used, strict=False)
    ):
        warnings.warn(
            "The run was saved with a learning rate schedule, which no file holds: "
            "give it again, load_run(..., learning_rate=...), or the rate stays what "
            "it was at the last step.",
            stacklevel=3,
        )


def _check_model(
    folder: str | os.PathLike, weights: Mapping[str, mx.array], model: nn.Module
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
