"""``restore_checkpoint``: put a saved run into a live one, all of it or nothing."""

import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer

from ..convert.folder import RESUME, read_run
from ..convert.jsonable import decode, encode
from ..convert.text import printable
from ..distributed import from_rank_0
from ..finite import is_floating
from ..half import HALF, half_bits
from ..optimizer import LossScaleOptimizer
from ..optimizer_state import check_loaded
from ..scaler import GradScaler
from ..state_slots import copies, restore
from . import ranks
from .background import finish
from .checksum import checksum
from .layout import arranged
from .leaves import parts, places, settings, weights
from .save import check_arguments

Flat = Mapping[str, Any]
_LISTED = 4
_NUMBERS = (bool, int, float, type(None))
# What code meets in a file that is not as save_checkpoint writes it.
_UNEXPECTED = (KeyError, TypeError, AttributeError, IndexError, RecursionError)


def restore_checkpoint(
    folder: str | os.PathLike,
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
            extra, seed = _write(found, model, optimizer, scaler, group)
        except Exception as problem:
            error = _told(problem, folder)
        ranks.agree(error, group, "restore_checkpoint")
    except BaseException:
        restore(before)
        raise
    mx.random.seed(seed)
    return extra


def _told(problem: Exception, folder: str | os.PathLike) -> Exception:
    if isinstance(problem, _UNEXPECTED):
        kind = type(problem).__name__
        problem = ValueError(f"The checkpoint is damaged: {kind}: {problem}.")
    if not isinstance(problem, ValueError):
        return problem
    told = ValueError(f"{folder}: {problem} Nothing was changed.")
    told.__cause__ = problem
    return told


def _read(folder: str | os.PathLike) -> dict[str, Any]:
    run = read_run(folder)
    if RESUME not in run.record:
        raise ValueError(
            f"{folder} was not written by save_checkpoint(): load it with "
            "mlx_gradscale.convert.load_run."
        )
    tensors: dict[str, mx.array] = {}
    # As JSON, in which it can be sent to other ranks.
    resume = encode(run.record[RESUME], tensors)
    found = {
        "weights": run.weights or {},
        "optimizer": run.optimizer or {},
        "tensors": tensors,
    }
    try:
        # Arrays of a file are read when used: now, before the file can change.
        mx.eval(found)
    except RuntimeError as error:
        raise ValueError(f"{folder} is damaged: {error}") from error
    return {**found, "resume": resume}


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
    new, wider = _fitting_weights(resume, found["weights"], weights(model))
    _check_scaler(resume, scaler)
    _check_settings(resume, optimizer)
    _write_optimizer(optimizer, model, found["optimizer"], resume, new, wider)
    held = places(model)
    for name, value in new.items():
        box, key = held[name]
        box[key] = value
    if scaler is not None:
        scaler.state.update(resume["scaler"])
    return extra, seed


def _fitting_weights(
    resume: Flat, saved: Flat, own: Mapping[str, mx.array]
) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """Return the model's new weights, and those of them that have a wider original."""
    frozen, dtypes, exact = resume["frozen"], resume["dtypes"], resume["exact"]
    _check_names("the model", own, {**saved, **frozen})
    for name, x in saved.items():
        _check_kind(name, own[name], x.shape, dtypes[name])
    for name, (dtype, shape, known) in frozen.items():
        _check_kind(name, own[name], tuple(shape), dtype)
        if checksum(own[name]) != known:
            raise ValueError(
                f"{_short(name)} is frozen and was not saved, and the model has other "
                "values than when it was: load the same base model first."
            )
    cast = {name: x.astype(own[name].dtype) for name, x in saved.items()}
    for name, x in exact.items():
        _check_kind(name, own[name], x.shape, _dtype(x))
    lie = resume["strides"]["model"]
    new = {name: arranged(x, lie.get(name)) for name, x in (cast | exact).items()}
    wider = {name: x for name, x in saved.items() if x.dtype != own[name].dtype}
    mx.eval(new)
    return new, wider


def _check_names(whose: str, own: Iterable[str], saved: Iterable[str]) -> None:
    own, saved = set(own), set(saved)
    lacks = sorted(saved - own), sorted(own - saved)
    said = [
        f"{who} has no {', '.join(map(_short, names[:_LISTED]))}"
        + (f" and {len(names) - _LISTED} more" if names[_LISTED:] else "")
        for who, names in zip((whose, "the checkpoint"), lacks, strict=True)
        if names
    ]
    if said:
        raise ValueError(
            f"It is of another model or optimizer: {'; '.join(said)}. Build them, and "
            "freeze layers, as they were."
        )


def _check_kind(name: str, own: mx.array, shape: tuple[int, ...], dtype: str) -> None:
    if (own.shape, _dtype(own)) != (shape, dtype):
        raise ValueError(
            f"{_short(name)} is {str(dtype)[:16]} of shape {shape} in the checkpoint, "
            f"{_dtype(own)} of shape {own.shape} here."
        )


def _check_scaler(resume: Flat, scaler: GradScaler | None) -> None:
    saved = resume["scaler"]
    if saved is None and scaler is None:
        return
    if scaler is None:
        raise ValueError("It holds a GradScaler's state: give the scaler too.")
    if saved is None:
        raise ValueError("It holds no GradScaler's state: leave out the scaler.")
    if scaler.is_enabled() != resume["enabled"]:
        was = "enabled" if resume["enabled"] else "not enabled"
        raise ValueError(f"The saved scaler was {was}: build this one so too.")
    check_loaded({f"scaler.{name}": x for name, x in saved.items()}, scaler.state)


def _check_settings(resume: Flat, optimizer: Optimizer) -> None:
    wrapped = isinstance(optimizer, LossScaleOptimizer)
    if wrapped != resume["wrapped"]:
        was, now = ("", " not") if resume["wrapped"] else (" not", "")
        raise ValueError(
            f"The saved optimizer was{was} a LossScaleOptimizer, this one is{now}."
        )
    saved = resume["settings"]
    own = settings(optimizer.optimizer if wrapped else optimizer)
    was, now = ([part["class"] for part in s] for s in (saved, own))
    if was != now:
        raise ValueError(
            f"The saved optimizer was {_short(', '.join(was))}, this is "
            f"{', '.join(now)}."
        )
    for old, new in zip(saved, own, strict=True):
        for name in [n for n in new["values"] if n in old["values"]]:
            was, now = old["values"][name], new["values"][name]
            if was != now:
                raise ValueError(
                    f"The saved {new['class']} had {name}={_short(was)}, this one has "
                    f"{now!r}. To go on with another value, restore first and set it "
                    "then."
                )
        if old["schedules"] != new["schedules"]:
            had = _short(", ".join(old["schedules"]) or "nothing")
            _warn(
                f"The saved {new['class']} had a schedule for {had}, this one for "
                f"{', '.join(new['schedules']) or 'nothing'}: schedules are not saved."
            )
    norm = getattr(optimizer, "max_grad_norm", None)
    if norm != resume["max_grad_norm"]:
        _warn(
            f"max_grad_norm was {_short(resume['max_grad_norm'])}, and is {norm} now."
        )


def _write_optimizer(
    optimizer: Optimizer,
    model: nn.Module,
    saved: Flat,
    resume: Flat,
    new: Mapping[str, mx.array],
    wider: Mapping[str, mx.array],
) -> None:
    wrapped = isinstance(optimizer, LossScaleOptimizer)
    inner = optimizer.optimizer if wrapped else optimizer
    lie = resume["strides"]
    saved = {path: arranged(x, lie["optimizer"].get(path)) for path, x in saved.items()}
    saved |= resume["numbers"]
    lacks = wrapped or saved.keys() - places(inner.state).keys()
    if lacks and not optimizer._initialized:
        optimizer.init(model.trainable_parameters())
    mx.eval(saved)
    if not wrapped:
        _write_state(inner, saved)
        return
    state = {f"optimizer.{path}": x for path, x in saved.items()}
    for name in optimizer.state["masters"]:
        full = wider.get(name, new[name]).astype(mx.float32)
        state[f"masters.{name}"] = arranged(full, lie["masters"].get(name))
        if new[name].dtype in HALF:
            state[f"written.{name}"] = half_bits(new[name])
    state |= {f"scaler.{name}": x for name, x in resume["scaler"].items()}
    optimizer.state = state | resume["state"]


def _write_state(optimizer: Optimizer, saved: Flat) -> None:
    state = optimizer.state
    held = places(state)
    # Some optimizers make a part of a parameter's state in the first step only.
    roots = {id(part.state) for part in parts(optimizer)}
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
    _check_names("the optimizer", held, saved)
    for path, (box, key) in held.items():
        here, there = None if path in late else box[key], saved[path]
        if not isinstance(there, (mx.array, *_NUMBERS)):
            raise ValueError(f"{_short(path)} is no array and no number.")
        if isinstance(here, mx.array) and isinstance(there, mx.array):
            _check_moment(path, here, there)
    for path, (box, key) in held.items():
        box[key] = saved[path]


def _check_moment(path: str, here: mx.array, there: mx.array) -> None:
    # MLX's optimizers change the precision of their state in the first steps.
    same = here.dtype == there.dtype or (is_floating(here) and is_floating(there))
    if here.shape != there.shape or not same:
        _check_kind(path, here, there.shape, _dtype(there))


def _all(optimizer: Optimizer) -> Iterable[Optimizer]:
    yield optimizer
    for inside in (getattr(optimizer, "optimizer", None), *_several(optimizer)):
        if isinstance(inside, Optimizer):
            yield from _all(inside)


def _several(optimizer: Optimizer) -> Iterable[Any]:
    return getattr(optimizer, "optimizers", ())


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=5)


def _short(value: Any) -> str:
    text = printable(value if isinstance(value, str) else repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."


def _dtype(x: mx.array) -> str:
    return str(x.dtype).removeprefix("mlx.core.")
