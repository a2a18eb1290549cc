"""``restore_checkpoint``: put a saved run into a live one, all of it or nothing."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer

from ..distributed import from_rank_0
from ..distributed.agreement import agreed_already
from ..guard import is_initialized, single_optimizers
from ..optimizer import LossScaleOptimizer
from ..run_folder.contents import read_contents
from ..run_folder.leaves import NUMBERS, places, write_leaves
from ..run_folder.values import decode, encode
from ..scaler import GradScaler
from ..state_tree import copies, restore
from . import ranks
from .fit import (
    Flat,
    check_moment,
    check_names,
    check_scaler,
    check_settings,
    fitting_weights,
    short,
)
from .gather import RESUME
from .memory_order import arranged
from .pending_save import finish
from .save import check_arguments

# What code meets in a file that is not as save_checkpoint writes it.
_UNEXPECTED = (KeyError, TypeError, AttributeError, IndexError, RecursionError)


def restore_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler | None = None,
    *,
    group: mx.distributed.Group | None = None,
) -> dict[str, Any]:
    """Put what :func:`save_checkpoint` wrote into model, optimizer and scaler.

    The next steps are bit for bit those that the saved run took. Everything is written
    into the containers that are there, so that a step that was compiled before goes on
    with it; replacing ``optimizer.state`` would leave such a step with the old one.

    Build model, optimizer and scaler as they were, schedules included; the learning
    rate of an optimizer without a schedule is the saved one. On several ranks, as many
    or others than before, all must call this; only rank 0 needs the folder.

    Args:
        folder (str): Written by :func:`save_checkpoint`, or one of those it kept.
        model (nn.Module): Gets the weights; names, shapes and dtypes must fit, and
            frozen weights that were not saved must be the same.
        optimizer (Optimizer): Of the same classes and settings, before or after
            ``init``.
        scaler (GradScaler, optional): As for :func:`save_checkpoint`.
        group (mx.distributed.Group, optional): As for :func:`save_checkpoint`.

    Returns:
        dict: The ``extra`` that was saved.

    Raises:
        ValueError: Something does not fit, and nothing was changed.

    Example:
        >>> import mlx.nn as nn, mlx.optimizers as optim, tempfile
        >>> from mlx_gradscale import restore_checkpoint, save_checkpoint
        >>> folder = tempfile.mkdtemp()
        >>> save_checkpoint(folder, nn.Linear(2, 1), optim.AdamW(1e-3), epoch=3)
        >>> restore_checkpoint(folder, nn.Linear(2, 1), optim.AdamW(1e-3))["epoch"]
        3
    """
    scaler = check_arguments(model, optimizer, scaler)
    group = ranks.group_of(group, optimizer, scaler)
    error = None
    try:
        finish()
    except Exception as problem:
        error = problem
    ranks.agree(error, group, "restore_checkpoint")
    found = from_rank_0(lambda: _read(folder), group)
    trees = [model, *(vars(part) for part in _all(optimizer))]
    trees += [] if scaler is None else [scaler.state]
    before = [pair for tree in trees for pair in copies(tree)]
    try:
        try:
            with agreed_already():
                extra, seed = _write(found, model, optimizer, scaler, group)
        except Exception as problem:
            error = _with_folder(problem, folder)
        ranks.agree(error, group, "restore_checkpoint")
    except BaseException:
        restore(before)
        raise
    mx.random.seed(seed)
    return extra


def _with_folder(problem: Exception, folder: str | os.PathLike[str]) -> Exception:
    if isinstance(problem, _UNEXPECTED):
        kind = type(problem).__name__
        problem = ValueError(f"The checkpoint is damaged: {kind}: {problem}.")
    if not isinstance(problem, ValueError):
        return problem
    named = ValueError(f"{folder}: {problem} Nothing was changed.")
    named.__cause__ = problem
    return named


def _read(folder: str | os.PathLike[str]) -> dict[str, Any]:
    tensors: dict[str, mx.array] = {}
    try:
        run = read_contents(folder)
        if RESUME not in run.training:
            raise ValueError(
                f"{folder} was not written by save_checkpoint(): load it with "
                "mlx_gradscale.convert.load_run."
            )
        # As JSON, in which it can be sent to other ranks.
        resume = encode(run.training[RESUME], tensors)
        found = {"weights": run.weights or {}, "optimizer": run.optimizer or {}}
        # Arrays of a file are read when used: now, before the file can change.
        mx.eval(found, tensors)
    except RuntimeError as error:  # a file that ends too early, or a nest too deep
        raise ValueError(f"{folder} is damaged: {error}") from error
    return {**found, "tensors": tensors, "resume": resume}


def _write(
    found: Flat,
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler | None,
    group: mx.distributed.Group,
) -> tuple[dict[str, Any], int]:
    """Check all, then write all; return the extra and the random seed."""
    resume = decode(found["resume"], found["tensors"])
    extra, seed = dict(resume["extra"]), ranks.seed_of(resume["random"], group)
    new, wider = fitting_weights(resume, found["weights"], model)
    check_scaler(resume, scaler)
    check_settings(resume, optimizer)
    _write_optimizer(optimizer, model, found["optimizer"], resume, new, wider)
    held = places(model)
    write_leaves({name: held[name] for name in new}, new)
    if scaler is not None:
        scaler.state.update(resume["scaler"])
    return extra, seed


def _write_optimizer(
    optimizer: Optimizer,
    model: nn.Module,
    saved: Flat,
    resume: Flat,
    new: Mapping[str, mx.array],
    wider: Mapping[str, mx.array],
) -> None:
    is_wrapper = isinstance(optimizer, LossScaleOptimizer)
    lie = resume["strides"]
    saved = {path: arranged(x, lie["optimizer"].get(path)) for path, x in saved.items()}
    saved |= resume["numbers"]
    lacks = is_wrapper or saved.keys() - places(optimizer.state).keys()
    if lacks and not is_initialized(optimizer):
        optimizer.init(model.trainable_parameters())
    mx.eval(saved)
    if not isinstance(optimizer, LossScaleOptimizer):
        _write_state(optimizer, saved)
        return
    state = {f"optimizer.{path}": x for path, x in saved.items()}
    for name in optimizer.kept_masters:
        full = wider.get(name, new[name]).astype(mx.float32)
        parts = optimizer.kept_masters.leaves_for(name, full, new[name])
        # What was written lies as the weight does.
        state |= {
            path: x
            if path.startswith("written.")
            else arranged(x, lie["masters"].get(name))
            for path, x in parts.items()
        }
    state |= {f"scaler.{name}": x for name, x in resume["scaler"].items()}
    optimizer.state = state | resume["state"]


def _write_state(optimizer: Optimizer, saved: Flat) -> None:
    state = optimizer.state
    held = places(state)
    # Some optimizers make a part of a parameter's state in the first step only.
    roots = {id(part.state) for part in single_optimizers(optimizer)}
    boxes = {
        path.rpartition(".")[0]: box
        for path, (box, _) in held.items()
        if isinstance(box, dict) and id(box) not in roots
    }
    late = {
        path: (boxes[owner], key)
        for path in saved.keys() - held.keys()
        for owner, _, key in [path.rpartition(".")]
        if owner in boxes
    }
    held |= late
    check_names("the optimizer", held, saved)
    for path, (box, key) in held.items():
        here, there = None if path in late else box[key], saved[path]
        if not isinstance(there, (mx.array, *NUMBERS)):
            raise ValueError(f"{short(path)} is no array and no number.")
        if isinstance(here, mx.array) and isinstance(there, mx.array):
            check_moment(path, here, there)
        if isinstance(box, tuple) and (isinstance(here, mx.array) or here != there):
            raise ValueError(
                f"{short(path)} is in a tuple, which cannot be written to."
            )
    # What is in a tuple is equal, as was just checked.
    held = {path: at for path, at in held.items() if not isinstance(at[0], tuple)}
    write_leaves(held, saved)


def _all(optimizer: Optimizer) -> Iterable[Optimizer]:
    yield optimizer
    for inside in (getattr(optimizer, "optimizer", None), *_several(optimizer)):
        if isinstance(inside, Optimizer):
            yield from _all(inside)


def _several(optimizer: Optimizer) -> Iterable[Any]:
    return getattr(optimizer, "optimizers", ())
