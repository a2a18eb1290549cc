"""``save_checkpoint``: everything that a run needs to resume, whole or not at all."""

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer

from ..core.finite import all_finite, nonfinite
from ..core.optimizer import LossScaleOptimizer
from ..core.optimizers import single_optimizers
from ..core.scale import FIELDS
from ..core.scaler import GradScaler
from ..core.trees import flatten
from ..files.arrays import bytes_of
from ..files.text import dtype_name
from . import ranks
from .extra import encode_extra
from .folder import training_text, write_checkpoint
from .memory_order import memory_orders

# Python numbers that an optimizer may keep in its state besides arrays.
NUMBERS = (bool, int, float)
# Of a frozen weight that is not saved, so much is summed: another base model differs
# in every tensor, and reading 4 GB of weights would take seconds in each save.
_SAMPLE = 2**16


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler | None = None,
    *,
    keep: int = 1,
    frozen: bool | None = None,
    group: mx.distributed.Group | None = None,
    **extra: Any,
) -> None:
    """Save a run: model, optimizer, scaler, random state and anything else.

    A run that :func:`restore_checkpoint` restores continues bit for bit like this one.
    Each call adds a folder ``save-000001``, ``save-000002``, ... to ``path`` and then
    removes the oldest, so that the newest one is whole whenever the process is killed.
    Other files in ``path`` are left alone. ``model.safetensors`` in it can be loaded
    by ``mx.load`` and mlx-lm; see ``latest_checkpoint``. Learning rate schedules are
    Python code and are not saved, but the step count that they depend on is.

    On several ranks all must call this; rank 0 writes. Trainable parameters and states
    must be equal on all ranks. The random state is saved for every rank, ``extra`` and
    buffers such as BatchNorm's statistics are rank 0's.

    Args:
        path (str): The folder of the run. It is created if necessary.
        model (nn.Module): Its parameters are saved, including buffers.
        optimizer (Optimizer): Any optimizer, or a ``LossScaleOptimizer``.
        scaler (GradScaler, optional): The scaler of the training loop. That of a
            ``LossScaleOptimizer`` is saved with it.
        keep (int): How many checkpoints to keep in ``path``. Default: ``1``.
        frozen (bool, optional): Whether to save frozen parameters. If not, the model
            must have the same ones when it is restored. Default: ``True``, or
            ``False`` for a model with LoRA layers.
        group (mx.distributed.Group, optional): The ranks that train together. Default:
            that of the optimizer or scaler, otherwise the global group.
        **extra (Any): What else the loop needs, such as the step or the position in
            the data: None, bool, int, float, str, list, tuple, dict with string keys,
            and arrays, in any combination.

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
    if isinstance(optimizer, LossScaleOptimizer) and not optimizer._initialized:
        optimizer.init(model.trainable_parameters())
    states = {"optimizer": optimizer.state, "scaler": scaler.state if scaler else {}}
    error = None
    try:
        own = model_weights(model)
        names = _saved_names(model, own, frozen)
        _check_finite(model, optimizer)
        arrays = _training_arrays(own, optimizer, scaler)
        encoded, extra_arrays = encode_extra(extra)
        arrays |= {f"extra.{name}": x for name, x in extra_arrays.items()}
        weights = {name: own[name] for name in own if name in names}
        mx.eval(own, arrays)
        description = _describe(own, weights, arrays, optimizer, scaler)
        description["extra"] = encoded
    except Exception as problem:
        error = problem
    ranks.agree(error, group, "save_checkpoint")
    ranks.check_copies({"model": model.trainable_parameters(), **states}, group)
    description["random"] = ranks.random_keys(group)
    try:
        if group.rank() == 0:
            text = training_text(description)
            write_checkpoint(Path(path), weights, arrays, text, keep)
    except Exception as problem:
        error = problem
    ranks.agree(error, group, "save_checkpoint")


def check_arguments(
    model: nn.Module, optimizer: Optimizer, scaler: GradScaler | None
) -> GradScaler | None:
    """Raise for arguments of the wrong type; return the scaler of the run."""
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
                "A LossScaleOptimizer has its own scaler. Do not pass another one."
            )
        scaler = optimizer.scaler
    if scaler is not None and scaler._stages:
        raise RuntimeError(
            "Save and restore between iterations: call the scaler's update() first."
        )
    return scaler


def model_weights(model: nn.Module) -> dict[str, mx.array]:
    """Return all parameters of a model, frozen ones and buffers included, by path."""
    flat = flatten(model.parameters())
    found = dict(flat)
    if len(found) < len(flat):
        raise ValueError(
            "Two weights of the model have the same dotted path, as in {'a.b': x, 'a': "
            "{'b': y}}. Rename one of them."
        )
    return found


def batch_statistics(model: nn.Module) -> set[str]:
    """Return the paths of BatchNorm's statistics, which change though not trainable."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, nn.BatchNorm)
        for name in ("running_mean", "running_var")
    }


def describe_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return what must be equal in a restored optimizer, beside its state.

    Returns:
        dict: ``wrapped`` (whether it is a ``LossScaleOptimizer``), ``max_grad_norm``,
        and ``settings`` with class, schedules and plain attributes of each optimizer.

    Example:
        >>> import mlx.optimizers as optim
        >>> describe_optimizer(optim.SGD(0.1))["settings"][0]["values"]["momentum"]
        0.0
    """
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    settings = [
        {
            "class": type(single).__name__,
            "schedules": sorted(single._schedulers),
            "values": {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in sorted(vars(single).items())
                if not name.startswith("_") and _is_plain(value)
            },
        }
        for single in single_optimizers(inner)
    ]
    norm = getattr(optimizer, "max_grad_norm", None)
    is_wrapper = isinstance(optimizer, LossScaleOptimizer)
    return {"wrapped": is_wrapper, "max_grad_norm": norm, "settings": settings}


def sample_checksum(x: mx.array) -> int:
    """Return the CRC-32 of the first 64 kB of an array."""
    sample = x.reshape(-1)[: _SAMPLE // x.dtype.size]
    return zlib.crc32(bytes_of(sample)) if x.size else 0


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _saved_names(
    model: nn.Module, own: Mapping[str, mx.array], frozen: bool | None
) -> set[str]:
    if frozen is None:
        frozen = not any(name.split(".")[-1] == "lora_a" for name in own)
    if frozen:
        return set(own)
    trainable = {name for name, _ in flatten(model.trainable_parameters())}
    return trainable | batch_statistics(model)


def _check_finite(model: nn.Module, optimizer: Optimizer) -> None:
    state = dict(optimizer.state)
    # A skipped step leaves its infinite norm behind; inf is a valid max_grad_norm.
    for name in ("grad_norm", "max_grad_norm", "scaler"):
        state.pop(name, None)
    arrays = {path: x for path, x in flatten(state) if isinstance(x, mx.array)}
    values = {"model": model.trainable_parameters(), "optimizer": arrays}
    if not all_finite(values).item():
        raise ValueError(
            f"{nonfinite(values)[0].path} holds NaN or inf, so no run can resume from "
            "it. Nothing was saved, and the last checkpoint is unchanged."
        )


def _training_arrays(
    own: Mapping[str, mx.array], optimizer: Optimizer, scaler: GradScaler | None
) -> dict[str, mx.array]:
    arrays = {}
    is_wrapper = isinstance(optimizer, LossScaleOptimizer)
    for path, x in flatten(optimizer.state):
        part, _, rest = path.partition(".")
        if is_wrapper and (
            path == "max_grad_norm"
            or (part == "scaler" and rest not in FIELDS)
            or (part == "written" and _has_bits(own.get(rest), x))
        ):
            continue
        if isinstance(x, mx.array):
            arrays[f"optimizer.{path}"] = x
    if scaler is not None and not is_wrapper:
        arrays |= {f"scaler.{name}": scaler.state[name] for name in FIELDS}
    return arrays


def _has_bits(weight: mx.array | None, written: mx.array) -> bool:
    """Tell whether the bits that the last step wrote are still those of the weight."""
    if weight is None or weight.dtype.size != written.dtype.size:
        return False
    return bool(mx.array_equal(weight.view(written.dtype), written).item())


def _describe(
    own: Mapping[str, mx.array],
    weights: Mapping[str, mx.array],
    arrays: Mapping[str, mx.array],
    optimizer: Optimizer,
    scaler: GradScaler | None,
) -> dict[str, Any]:
    return {
        **describe_optimizer(optimizer),
        "enabled": scaler is not None and scaler.is_enabled(),
        "numbers": {
            path: x for path, x in flatten(optimizer.state) if isinstance(x, NUMBERS)
        },
        "frozen": {
            name: [dtype_name(x), list(x.shape), sample_checksum(x)]
            for name, x in own.items()
            if name not in weights
        },
        "orders": {"model": memory_orders(weights), "training": memory_orders(arrays)},
    }
