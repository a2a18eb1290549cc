"""``save_checkpoint``: all that a run needs to go on, in one folder, whole or not."""

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten

from ..convert.folder import OURS, RESUME, check_run, write_run
from ..convert.jsonable import encode
from ..convert.place import check_folder
from ..convert.resume import live_run, optimizer_settings
from ..convert.whole import Run
from ..optimizer import LossScaleOptimizer
from ..optimizer_state import check_loaded
from ..scaler import GradScaler
from . import ranks
from .background import begin, finish
from .checksum import bits, checksum
from .keep import is_run, keep_last
from .layout import strides
from .leaves import dtype_name, settings, statistics, weights

# Of a LossScaleOptimizer's state, what other files of the folder hold.
_ELSEWHERE = ("optimizer", "masters", "written", "scaler")


def save_checkpoint(
    folder: str | os.PathLike,
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler | None = None,
    *,
    keep: int = 1,
    background: bool = False,
    frozen: bool | None = None,
    group: mx.distributed.Group | None = None,
    **extra: Any,
) -> None:
    """Write a run to a folder: weights, optimizer, scaler, random state and extra.

    What :func:`restore_checkpoint` makes of it goes on bit for bit as this run would.
    The folder is there whole or as it was before, whenever the process is killed; it
    is also one that ``mlx_gradscale.convert`` takes to PyTorch (``--like``).
    Schedules are Python code and are not saved; the step that they are asked with is.

    On several ranks all must call this: rank 0 writes, the others wait. Weights and
    states must be copies of each other; shards are refused. The random state of every
    rank is saved, of extra and of BatchNorm's statistics rank 0's.

    Args:
        folder (str): A checkpoint in it is replaced; other files in it stay.
        model (nn.Module): All its parameters are saved, buffers too.
        optimizer (Optimizer): Any, or a ``LossScaleOptimizer``, with its masters.
        scaler (GradScaler, optional): That of the loop. A ``LossScaleOptimizer`` has
            its own, which is saved with it.
        keep (int): How many to keep: the one before this is then
            ``folder.earlier-1``, the one before that ``folder.earlier-2``.
            Default: ``1``.
        background (bool): Write in a thread and return at once. The arrays are not
            copied, only held: until they are written, the next step cannot reuse
            their memory and takes as much again. The next call waits for the thread
            and raises what it raised. Default: ``False``.
        frozen (bool, optional): Whether to save frozen weights. Without them the
            folder holds the trainable ones, BatchNorm's statistics, and checksums of
            the others, which must be in the model again when it is restored. Default:
            ``True``, but ``False`` for a model with LoRA layers.
        group (mx.distributed.Group, optional): The ranks that train together.
            Default: the optimizer's or the scaler's, else all.
        **extra (Any): Whatever else the loop needs: step, epoch, position in the
            data. Plain Python values, containers of them, and arrays.

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
    scaler = check_arguments(model, optimizer, scaler)
    if type(keep) is not int or keep < 1:
        raise ValueError(f"keep must be 1 or more, got {keep!r}.")
    group = ranks.group_of(group, optimizer, scaler)
    error, run = None, None
    try:
        finish()
        if isinstance(optimizer, LossScaleOptimizer) and not optimizer._initialized:
            optimizer.init(model.trainable_parameters())
        if group.rank() == 0:
            place = _check_place(folder)
            run = _gather_run(place, model, optimizer, scaler, frozen, extra)
    except Exception as problem:
        error = problem
    ranks.agree(error, group, "save_checkpoint")
    held = [optimizer, *([] if scaler is None else [scaler])]
    copies = {type(part).__name__: part.state for part in held}
    ranks.check_copies({"model": _shared(model), **copies}, group)
    keys = ranks.random_keys(group)
    if run is not None:
        run.record[RESUME]["random"] = keys
        try:
            if background:
                begin(_write, place, run, keep)
            else:
                _write(place, run, keep)
        except Exception as problem:
            error = problem
    ranks.agree(error, group, "save_checkpoint")


def check_arguments(
    model: nn.Module, optimizer: Optimizer, scaler: GradScaler | None
) -> GradScaler | None:
    """Raise for what is no run; return its scaler."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected an mlx.nn.Module, got {type(model).__name__}.")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"Expected an optimizer of mlx.optimizers, got {type(optimizer).__name__}."
        )
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"Expected a GradScaler, got {type(scaler).__name__}.")
    if isinstance(optimizer, LossScaleOptimizer):
        if scaler not in (None, optimizer.scaler):
            raise ValueError(
                "A LossScaleOptimizer has a scaler of its own: leave out the other."
            )
        scaler = optimizer.scaler
    if getattr(scaler, "_records", None):
        raise RuntimeError(
            "Save and restore between iterations: the scaler's update() is to come."
        )
    return scaler


def _gather_run(
    place: Path,
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler | None,
    frozen: bool | None,
    extra: Mapping[str, Any],
) -> Run:
    own = weights(model)
    encode(dict(extra), {}, "extra")  # what cannot be written is told now
    wrapped = isinstance(optimizer, LossScaleOptimizer)
    inner = optimizer.optimizer if wrapped else optimizer
    if wrapped:
        _refuse_nonfinite(optimizer)
    run = live_run(place, model, optimizer, scaler, settings=_torch_settings)
    check_run(run)
    saved = _saved_names(model, own, frozen)
    run.weights = {name: run.weights[name] for name in own if name in saved}
    state = optimizer.state if wrapped else {}
    rest = {k: v for k, v in state.items() if k not in _ELSEWHERE}
    flat = tree_flatten(inner.state)
    run.record[RESUME] = {
        "wrapped": wrapped,
        "max_grad_norm": getattr(optimizer, "max_grad_norm", None),
        "settings": settings(inner),
        "numbers": {name: x for name, x in flat if not isinstance(x, mx.array)},
        "dtypes": {name: dtype_name(own[name]) for name in run.weights},
        "strides": _strides(own, optimizer, flat),
        "exact": _lost_in_cast(run.weights, own),
        "frozen": {
            name: [dtype_name(x), list(x.shape), checksum(x)]
            for name, x in own.items()
            if name not in saved
        },
        "scaler": None if scaler is None else dict(scaler.state),
        "enabled": scaler is not None and scaler.is_enabled(),
        "state": dict(tree_flatten(rest)),
        "extra": extra,
    }
    # Handles of its own on the same memory: ``weight += 1`` changes an array object,
    # and a list in extra may be appended to, while a thread writes.
    run = copy.deepcopy(run)
    arrays = [run.weights, run.optimizer, run.record]
    mx.eval([x for _, x in tree_flatten(arrays) if isinstance(x, mx.array)])
    return run


def _shared(model: nn.Module) -> dict[str, mx.array]:
    own_of_each = statistics(model)
    return {name: x for name, x in weights(model).items() if name not in own_of_each}


def _strides(
    own: Mapping[str, mx.array], optimizer: Optimizer, flat: list[tuple[str, Any]]
) -> dict[str, dict[str, list[int]]]:
    wrapped = isinstance(optimizer, LossScaleOptimizer)
    return {
        "model": strides(own),
        "masters": strides(optimizer.state["masters"] if wrapped else {}),
        "optimizer": strides({k: x for k, x in flat if isinstance(x, mx.array)}),
    }


def _refuse_nonfinite(optimizer: LossScaleOptimizer) -> None:
    try:
        check_loaded(dict(tree_flatten(optimizer.state)), optimizer.scaler.state)
    except ValueError as error:
        raise ValueError(
            f"{error} No run can go on from there: nothing was saved, and the last "
            "checkpoint is as it was."
        ) from None


def _saved_names(
    model: nn.Module, own: Mapping[str, mx.array], frozen: bool | None
) -> set[str]:
    if frozen is None:
        frozen = not any(name.split(".")[-1] == "lora_a" for name in own)
    if frozen:
        return set(own)
    saved = {name for name, _ in tree_flatten(model.trainable_parameters())}
    return (saved | statistics(model)) & own.keys()


def _lost_in_cast(
    saved: Mapping[str, mx.array], own: Mapping[str, mx.array]
) -> dict[str, mx.array]:
    """Return those of the model's weights that the saved ones, cast, are not."""
    return {
        name: own[name]
        for name, x in saved.items()
        if x is not own[name]
        and not mx.array_equal(bits(x.astype(own[name].dtype)), bits(own[name])).item()
    }


def _torch_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    try:
        return optimizer_settings(optimizer)
    except ValueError:
        # PyTorch has no such optimizer: the way there names and refuses it.
        return [{"class": part["class"]} for part in settings(optimizer)]


def _check_place(folder: str | os.PathLike) -> Path:
    place = check_folder(folder, overwrite=True)
    there = [name for name in OURS if (place / name).exists()]
    if there and not is_run(place):
        raise FileExistsError(
            f"{folder} holds {', '.join(there)} that no checkpoint of ours left, and "
            "that would be replaced: give another folder."
        )
    return place


def _write(place: Path, run: Run, keep: int) -> None:
    write_run(place, run, overwrite=True, before=lambda: keep_last(place, keep))
