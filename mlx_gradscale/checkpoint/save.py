"""``save_checkpoint``: all that a run needs to go on, in one folder, whole or not."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer

from ..files.folders import check_folder
from ..guard import is_initialized
from ..optimizer import LossScaleOptimizer
from ..run_folder.contents import OURS, Contents, file_contents, write_files
from ..scaler import GradScaler
from . import ranks
from .gather import RESUME, complete, gather
from .keep import is_run, keep_last
from .pending_save import begin, finish
from .weights import statistics, weights


def save_checkpoint(
    folder: str | os.PathLike[str],
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
    error, gathered = None, None
    try:
        finish()
        if isinstance(optimizer, LossScaleOptimizer) and not is_initialized(optimizer):
            optimizer.init(model.trainable_parameters())
        if group.rank() == 0:
            place = _check_place(folder)
            gathered = gather(place, model, optimizer, scaler, frozen, extra)
    except Exception as problem:
        error = problem
    ranks.agree(error, group, "save_checkpoint")
    held: list[Any] = [optimizer, *([] if scaler is None else [scaler])]
    copies = {type(part).__name__: part.state for part in held}
    ranks.check_copies({"model": _shared(model), **copies}, group)
    keys = ranks.random_keys(group)
    if gathered is not None:
        run, own = gathered
        run.training[RESUME]["random"] = keys
        try:
            if background:
                begin(_write, place, run, own, keep)
            else:
                _write(place, run, own, keep)
        except Exception as problem:
            error = problem
    ranks.agree(error, group, "save_checkpoint")


def check_arguments(
    model: nn.Module, optimizer: Optimizer, scaler: GradScaler | None
) -> GradScaler | None:
    """Raise if this is not a run; return its scaler."""
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
    if scaler is not None and not scaler.is_between_iterations:
        raise RuntimeError(
            "Save and restore between iterations: the scaler's update() is to come."
        )
    return scaler


def _shared(model: nn.Module) -> dict[str, mx.array]:
    own_of_each = statistics(model)
    return {name: x for name, x in weights(model).items() if name not in own_of_each}


def _check_place(folder: str | os.PathLike[str]) -> Path:
    place = check_folder(folder, overwrite=True)
    there = [name for name in OURS if (place / name).exists()]
    if there and not is_run(place):
        raise FileExistsError(
            f"{folder} holds {', '.join(there)} that no checkpoint of ours left, and "
            "that would be replaced: give another folder."
        )
    return place


def _write(place: Path, run: Contents, own: Mapping[str, mx.array], keep: int) -> None:
    complete(run, own)
    files = file_contents(run)
    write_files(place, files, overwrite=True, before=lambda: keep_last(place, keep))
