"""What of a live run goes to its folder."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten

from ..files.text import dtype_name
from ..finite import all_finite, nonfinite
from ..optimizer import LossScaleOptimizer
from ..run_folder.contents import TRAINING, Contents, check_arrays, read_contents
from ..run_folder.leaves import NUMBERS
from ..run_folder.live import live_contents
from ..run_folder.settings import settings
from ..run_folder.values import encode
from ..scale import FIELDS
from ..scaler import GradScaler
from .checksum import bits, checksum
from .memory_order import strides
from .weights import statistics, weights

# In training.json: what restore_checkpoint needs.
RESUME = "resume"
# Of a LossScaleOptimizer's state, what other files of the folder hold.
_ELSEWHERE = (
    "optimizer",
    "masters",
    "written",
    "remainders",
    "scaler",
    "max_grad_norm",
)


def gather(
    place: Path,
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler | None,
    frozen: bool | None,
    extra: Mapping[str, Any],
) -> tuple[Contents, dict[str, mx.array]]:
    """Return what is to be written, evaluated, and the model's own weights.

    For a thread: arrays are handles of their own on the same memory, because
    ``weight += 1`` changes an array object, and the rest is copied. What takes a look
    at the numbers is left to :func:`complete`.

    Args:
        place (Path): The folder.
        model (nn.Module): See ``save_checkpoint``.
        optimizer (Optimizer): See ``save_checkpoint``.
        scaler (GradScaler, optional): That of the run.
        frozen (bool, optional): See ``save_checkpoint``.
        extra (dict): See ``save_checkpoint``.
    """
    own = weights(model)
    encode(dict(extra), {}, "extra")  # what cannot be written is refused now
    inner = optimizer
    if isinstance(optimizer, LossScaleOptimizer):
        inner = optimizer.optimizer
        _refuse_nonfinite(optimizer, own)
    run = live_contents(place, model, optimizer, scaler)
    check_arrays(run)  # now, not in a thread
    run.training = _of_others(place) | run.training
    saved = _saved_names(model, own, frozen)
    all_weights = run.weights or {}
    run.weights = {name: all_weights[name] for name in own if name in saved}
    state = {} if inner is optimizer else optimizer.state
    rest = {k: v for k, v in state.items() if k not in _ELSEWHERE}
    flat = tree_flatten(inner.state)
    run.training[RESUME] = {
        "wrapped": inner is not optimizer,
        "max_grad_norm": getattr(optimizer, "max_grad_norm", None),
        "settings": settings(inner),
        "numbers": {name: x for name, x in flat if isinstance(x, NUMBERS)},
        "dtypes": {name: dtype_name(own[name]) for name in run.weights},
        "strides": _strides(own, optimizer, flat),
        "scaler": None if scaler is None else {k: scaler.state[k] for k in FIELDS},
        "enabled": scaler is not None and scaler.is_enabled(),
        "state": dict(tree_flatten(rest)),
        "extra": extra,
    }
    run, own = copy.deepcopy((run, own))
    arrays = [run.weights, run.optimizer, run.training, own]
    mx.eval([x for _, x in tree_flatten(arrays) if isinstance(x, mx.array)])
    return run, own


def complete(run: Contents, own: Mapping[str, mx.array]) -> None:
    """Add what restores every bit, or shows that a weight is another.

    Args:
        run (Contents): From :func:`gather`.
        own (dict): The model's weights, with it.
    """
    saved = run.weights or {}
    run.training[RESUME] |= {
        "exact": _lost_in_cast(saved, own),
        "frozen": {
            name: [dtype_name(x), list(x.shape), checksum(x)]
            for name, x in own.items()
            if name not in saved
        },
    }


def _strides(
    own: Mapping[str, mx.array], optimizer: Optimizer, flat: list[tuple[str, Any]]
) -> dict[str, dict[str, list[int]]]:
    wrapped = isinstance(optimizer, LossScaleOptimizer)
    state = optimizer.state if wrapped else {"masters": {}, "remainders": {}}
    return {
        "model": strides(own),
        "masters": strides(state["masters"] | state["remainders"]),
        "optimizer": strides({k: x for k, x in flat if isinstance(x, mx.array)}),
    }


def _refuse_nonfinite(
    optimizer: LossScaleOptimizer, own: Mapping[str, mx.array]
) -> None:
    # The overflow of a skipped step leaves its norm behind.
    # To clip to inf is to clip nothing.
    norms = ("grad_norm", "max_grad_norm")
    state = {k: x for k, x in optimizer.state.items() if k not in norms}
    # Of masters that are weight and remainder, the weight says so.
    split = state["remainders"].keys() & own.keys()
    state["masters"] = state["masters"] | {name: own[name] for name in sorted(split)}
    if all_finite(state).item():
        return
    [first, *_] = nonfinite(state)
    raise ValueError(
        f"{first.path!r} holds NaN or inf, and no run can go on from there: nothing "
        "was saved, and the last checkpoint is as it was."
    )


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


def _of_others(place: Path) -> dict[str, Any]:
    """Return what the run that is there says of PyTorch, which stays as it is."""
    if not (place / TRAINING).exists():
        return {}
    found = read_contents(place)
    if found.runs:  # of several models, and this is one
        return {}
    return {key: value for key, value in found.training.items() if key != RESUME}
