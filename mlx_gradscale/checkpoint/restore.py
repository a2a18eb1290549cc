"""``restore_checkpoint``: put a saved run into a live one, all of it or nothing."""

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer

from ..core.masters import join, remainder_of, to_float32
from ..core.optimizer import LossScaleOptimizer
from ..core.optimizers import single_optimizers
from ..core.scale import FIELDS, from_state_dict, to_state_dict
from ..core.scaler import GradScaler
from ..core.trees import CONTAINERS, commit, items, restore, snapshot
from ..distributed import from_rank_0
from ..files.text import dtype_name, dtype_named, list_some, shorten
from . import ranks
from .folder import Checkpoint, build_checkpoint, read_files
from .memory_order import arrange
from .save import (
    NUMBERS,
    batch_statistics,
    check_arguments,
    describe_optimizer,
    model_weights,
    sample_checksum,
)

# What a text that save_checkpoint did not write leads to.
_UNEXPECTED = (KeyError, TypeError, AttributeError, IndexError, RecursionError)


def restore_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler | None = None,
    *,
    group: mx.distributed.Group | None = None,
) -> dict[str, Any]:
    """Restore what :func:`save_checkpoint` saved into model, optimizer and scaler.

    The run continues bit for bit like the one that was saved. All arrays are replaced
    in the containers that hold them, so a step that was compiled before continues with
    the restored values.

    Build model, optimizer and scaler as before, schedules included. The learning rate
    of an optimizer without a schedule is restored. Master weights may be of another
    kind than before. On several ranks, as many as before or not, all must call this;
    only rank 0 reads.

    Args:
        path (str): The folder of the run, of which the newest checkpoint is restored,
            or one of the ``save-...`` folders in it.
        model (nn.Module): Names, shapes and dtypes of the weights must match, and
            frozen ones that were not saved must be the same.
        optimizer (Optimizer): With the same classes and settings; initialised or not.
        scaler (GradScaler, optional): As for :func:`save_checkpoint`.
        group (mx.distributed.Group, optional): As for :func:`save_checkpoint`.

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
    group = ranks.group_of(group, optimizer, scaler)
    weights, arrays, text = from_rank_0(lambda: read_files(path), group)
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    owners = [optimizer, *single_optimizers(inner)]
    states = [] if scaler is None else [scaler.state]
    before = snapshot(model, *map(vars, owners), *states)
    try:
        with _agreed(path, group):
            saved = build_checkpoint(weights, arrays, text)
            seed = ranks.seed_of(saved.description["random"], group)
            _restore_model(saved, model)
            _check_settings(saved.description, optimizer)
            _restore_scaler(saved, scaler)
        # The ranks hold equal weights now, which an optimizer may compare in init().
        with _agreed(path, group):
            _restore_optimizer(saved, model, optimizer)
    except BaseException:
        restore(before)
        raise
    mx.random.seed(seed)
    return saved.extra


@contextmanager
def _agreed(
    path: str | os.PathLike[str], group: mx.distributed.Group
) -> Iterator[None]:
    """Raise an error of this block on every rank, as one about the checkpoint."""
    error = None
    try:
        yield
    except Exception as problem:
        error = _explain(problem, path)
    ranks.agree(error, group, "restore_checkpoint")


def _explain(problem: Exception, path: str | os.PathLike[str]) -> Exception:
    text = shorten(str(problem), 400)
    if isinstance(problem, _UNEXPECTED):
        text = f"it is damaged: {type(problem).__name__}: {text}."
    elif not isinstance(problem, ValueError):
        return problem
    error = ValueError(f"Cannot restore {os.fspath(path)}: {text} Nothing was changed.")
    error.__cause__ = problem
    return error


def _restore_model(saved: Checkpoint, model: nn.Module) -> None:
    weights, frozen = saved.weights, saved.description["frozen"]
    own, statistics = model_weights(model), batch_statistics(model)
    _check_names("the model", own, [*weights, *frozen])
    for name, x in weights.items():
        # A forward pass leaves statistics in the dtype of its input.
        _check_kind(name, own[name], x.shape, x.dtype, is_free=name in statistics)
    for name, (dtype, shape, checksum) in frozen.items():
        _check_kind(name, own[name], tuple(shape), dtype_named(dtype))
        if sample_checksum(own[name]) != checksum:
            raise ValueError(
                f"{shorten(name)} is frozen and was not saved, and its values differ "
                "from those of the saved run. Load the same base model first."
            )
    places, orders = _places(model), saved.description["orders"]["model"]
    new = {name: arrange(x, orders.get(name)) for name, x in weights.items()}
    mx.eval(new)
    commit((*places[name], x) for name, x in new.items())


def _restore_scaler(saved: Checkpoint, scaler: GradScaler | None) -> None:
    if saved.scaler is None and scaler is None:
        return
    if scaler is None:
        raise ValueError("it holds the state of a GradScaler. Pass the scaler too.")
    if saved.scaler is None:
        raise ValueError("it holds no state of a GradScaler. Do not pass a scaler.")
    if scaler.is_enabled() != saved.description["enabled"]:
        was = "enabled" if saved.description["enabled"] else "disabled"
        raise ValueError(f"the saved scaler was {was}. Build this one the same way.")
    _check_names("the scaler", FIELDS, saved.scaler)
    for name, x in saved.scaler.items():
        own = scaler.state[name]
        _check_kind(f"scaler.{name}", own, x.shape, x.dtype)
    values = {name: x.item() for name, x in saved.scaler.items()}
    from_state_dict(to_state_dict(values), values)  # raises if a value is not valid
    scaler.state.update(saved.scaler)
    # What the scaler derives from its state is brought up to date.
    scaler.load_state_dict(scaler.state_dict())


def _restore_optimizer(
    saved: Checkpoint, model: nn.Module, optimizer: Optimizer
) -> None:
    orders = saved.description["orders"]["training"]
    state = {
        path: arrange(x, orders.get(f"optimizer.{path}"))
        if isinstance(x, mx.array)
        else x
        for path, x in saved.optimizer.items()
    }
    places = _places(optimizer.state)
    is_wrapper = isinstance(optimizer, LossScaleOptimizer)
    if state.keys() - places.keys():
        optimizer.init(model.trainable_parameters())  # keeps the state that is there
        places = _places(optimizer.state)
    if is_wrapper:
        state = _convert_masters(state, places, model_weights(model))
        others = ("scaler.", "max_grad_norm")  # restored already, and a setting
        places = {k: x for k, x in places.items() if not k.startswith(others)}
        state = {k: x for k, x in state.items() if not k.startswith(others)}
    places |= _late_places(optimizer, state.keys() - places.keys(), places)
    _check_names("the optimizer", places, state)
    for path, (container, key) in places.items():
        value, own = state[path], None
        if isinstance(container, (list, tuple)) or key in container:
            own = container[key]
        if not isinstance(value, (mx.array, *NUMBERS)):
            raise ValueError(f"{shorten(path)} is not an array or a number.")
        if isinstance(own, mx.array) and isinstance(value, mx.array):
            # MLX's optimizers change the precision of their state in the first steps;
            # a LossScaleOptimizer keeps it in float32.
            _check_kind(path, own, value.shape, value.dtype, is_free=not is_wrapper)
        if isinstance(container, tuple) and (isinstance(own, mx.array) or own != value):
            raise ValueError(f"{shorten(path)} is in a tuple, which cannot be changed.")
    mx.eval([x for x in state.values() if isinstance(x, mx.array)])
    commit(
        (container, key, state[path])
        for path, (container, key) in places.items()
        if not isinstance(container, tuple)
    )


def _late_places(
    optimizer: Optimizer, paths: Iterable[str], places: Mapping[str, tuple[Any, Any]]
) -> dict[str, tuple[Any, Any]]:
    """Return places for what an optimizer adds to a parameter's state in its steps."""
    containers = {path.rpartition(".")[0]: box for path, (box, _) in places.items()}
    inner = getattr(optimizer, "optimizer", optimizer)
    others = {id(single.state) for single in single_optimizers(inner)}
    if inner is not optimizer:  # masters and so on are there from the start
        others |= {id(value) for value in optimizer.state.values()}
    found = {}
    for path in paths:
        parent, _, key = path.rpartition(".")
        container = containers.get(parent)
        if isinstance(container, dict) and id(container) not in others:
            found[path] = container, key
    return found


def _places(tree: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Return container and key of each array and number of a tree, by dotted path."""
    found: dict[str, tuple[Any, Any]] = {}
    for key, value in items(tree):
        if isinstance(value, CONTAINERS):
            found |= _places(value, f"{prefix}{key}.")
        elif isinstance(value, (mx.array, *NUMBERS)):
            found[f"{prefix}{key}"] = tree, key
    return found


def _convert_masters(
    saved: Mapping[str, Any],
    live: Mapping[str, tuple[Any, Any]],
    weights: Mapping[str, mx.array],
) -> dict[str, Any]:
    """Return a saved state with the kind of master weights that the optimizer has."""
    found = dict(saved)
    for path, (container, key) in live.items():
        part, _, name = path.partition(".")
        if part == "written" and path not in found:
            # Saved only where it is not the bits of the weight.
            found[path] = weights[name].view(container[key].dtype)
        if part == "masters" and f"remainders.{name}" in found:
            found[path] = join(weights[name], found.pop(f"remainders.{name}")).master
        if part == "remainders" and f"masters.{name}" in found:
            master, weight = found.pop(f"masters.{name}"), weights[name]
            written = found.pop(f"written.{name}", None)
            if written is not None:
                is_unchanged = weight.view(written.dtype) == written
                master = mx.where(is_unchanged, master, to_float32(weight))
            found[path] = remainder_of(master, weight)
    return found


def _check_names(whose: str, own: Iterable[str], saved: Iterable[str]) -> None:
    own, saved = set(own), set(saved)
    missing = {whose: sorted(saved - own), "the checkpoint": sorted(own - saved)}
    problems = [f"{who} has no {list_some(n)}" for who, n in missing.items() if n]
    if problems:
        raise ValueError(
            f"it is of another model or optimizer: {'; '.join(problems)}. Build them, "
            "and freeze layers, as before."
        )


def _check_kind(
    name: str,
    own: mx.array,
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    is_free: bool = False,
) -> None:
    """Raise for another shape or dtype; a free one may be another floating dtype."""
    is_floating = mx.issubdtype(own.dtype, mx.floating)
    is_free = is_free and is_floating and mx.issubdtype(dtype, mx.floating)
    if own.shape != shape or not (is_free or own.dtype == dtype):
        raise ValueError(
            f"{shorten(name)} is {dtype_name(dtype)} of shape {shape} in the "
            f"checkpoint, {dtype_name(own)} of shape {own.shape} here."
        )


def _check_settings(saved: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Raise unless the optimizer is built like the saved one; warn about schedules."""
    own = describe_optimizer(optimizer)
    was, now = _optimizer_name(saved), _optimizer_name(own)
    if was != now:
        raise ValueError(f"the saved optimizer was {shorten(was)}, this one is {now}.")
    pairs = [("max_grad_norm", saved["max_grad_norm"], own["max_grad_norm"])]
    for old, new in zip(saved["settings"], own["settings"], strict=True):
        names = new["values"].keys() & old["values"].keys()
        pairs += [(name, old["values"][name], new["values"][name]) for name in names]
        if old["schedules"] != new["schedules"]:
            was, now = (list_some(x["schedules"]) or "nothing" for x in (old, new))
            warnings.warn(
                f"The saved {new['class']} had a schedule for {was}, this one for "
                f"{now}. Schedules are not saved.",
                stacklevel=3,
            )
    for name, old, new in pairs:
        if old != new:
            raise ValueError(
                f"the saved optimizer had {name}={shorten(old)}, this one has {new!r}. "
                "To change it, restore first and set it afterwards."
            )


def _optimizer_name(description: Mapping[str, Any]) -> str:
    names = ", ".join(part["class"] for part in description["settings"])
    return f"LossScaleOptimizer({names})" if description["wrapped"] else names
