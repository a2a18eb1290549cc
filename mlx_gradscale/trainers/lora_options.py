"""The flags that ``mlx_gradscale lora`` has beyond mlx-lm's."""

import argparse
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx.optimizers import Optimizer

from ..core.optimizer import GuardedOptimizer, LossScaleOptimizer
from ..core.scaler import GradScaler

_DTYPES = ("float16", "bfloat16", "float32")
_MASTERS = ("float32", "remainder")
# No defaults, so that a YAML file can set them.
_FLAGS: dict[str, dict[str, Any]] = {
    "dtype": {"choices": _DTYPES, "help": "Train in this dtype."},
    "loss-scale": {
        "metavar": "dynamic|NUMBER|off",
        "help": "How to scale the loss; off only skips bad steps. Default: dynamic, "
        "from a scale that is found on the first batch.",
    },
    "max-grad-norm": {
        "metavar": "NORM",
        "type": float,
        "help": "Clip the global norm of the gradients to this.",
    },
    "masters": {
        "choices": _MASTERS,
        "help": "How master weights are stored: in float32, or as the 16 bits that "
        "rounding lost, which takes less memory. Default: float32.",
    },
    "float32-layers": {
        "metavar": "FILE",
        "help": "The .json file of the layers that compute in float32.",
    },
    "history": {
        "metavar": "FILE",
        "help": "Write loss, scale and skipped steps to this .csv or .jsonl file, and "
        "a picture beside it.",
    },
    "resume": {
        "action": "store_true",
        "default": None,
        "help": "Continue from the last checkpoint in the adapter path, "
        "bit-identically.",
    },
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add our flags to mlx-lm's."""
    group = parser.add_argument_group("loss scaling (mlx_gradscale)")
    for name, options in _FLAGS.items():
        group.add_argument(f"--{name}", **options)


def read_options(arguments: Any) -> SimpleNamespace:
    """Return our options, checked. Some may come from a YAML file.

    Returns:
        SimpleNamespace: ``dtype``, ``max_grad_norm``, ``float32_layers`` and
        ``history`` may be None. ``loss_scale`` is None if dynamic, and 1.0 if off.
    """
    given = {name.replace("-", "_"): None for name in _FLAGS}
    given = {name: getattr(arguments, name, None) for name in given}
    dtype, layers, history = (given[x] for x in ("dtype", "float32_layers", "history"))
    for name, choices in (("dtype", _DTYPES), ("masters", _MASTERS)):
        if given[name] not in (None, *choices):
            raise ValueError(
                f"{name} must be one of {', '.join(choices)}, not {given[name]}."
            )
    if history is not None and Path(history).suffix not in (".csv", ".jsonl"):
        raise ValueError(f"history must be a .csv or .jsonl file, not {history}.")
    if layers is not None and not Path(layers).is_file():
        raise ValueError(f"float32_layers: there is no file {layers}.")
    norm = given["max_grad_norm"]
    return SimpleNamespace(
        dtype=dtype and getattr(mx, dtype),
        loss_scale=_loss_scale(given["loss_scale"]),
        max_grad_norm=None if norm is None else _positive("max_grad_norm", norm),
        masters=given["masters"] or "float32",
        float32_layers=layers and Path(layers),
        history=history and Path(history),
        resume=bool(given["resume"]),
    )


def wrap_optimizer(
    optimizer: Optimizer, options: SimpleNamespace
) -> LossScaleOptimizer:
    """Return mlx-lm's optimizer with loss scaling and master weights."""
    names = ("max_grad_norm", "masters")
    arguments = {name: getattr(options, name) for name in names}
    world = mx.distributed.init()
    if world.size() > 1:
        arguments |= {"group": world, "average": True}
    if options.loss_scale == 1.0:
        return GuardedOptimizer(optimizer, **arguments)
    scaler = GradScaler()
    if options.loss_scale is not None:
        scaler = GradScaler(options.loss_scale, dynamic=False)
    return LossScaleOptimizer(optimizer, scaler, **arguments)


def _loss_scale(given: Any) -> float | None:
    # In YAML, off is False.
    if given is False or given in ("off", 1, "1", "1.0"):
        return 1.0
    if given in (None, "dynamic"):
        return None
    scale = _positive("loss_scale", given, " dynamic, off or")
    GradScaler(scale, dynamic=False)  # raises if it is out of range
    return scale


def _positive(name: str, given: Any, others: str = "") -> float:
    try:
        number = math.nan if isinstance(given, bool) else float(given)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be{others} a positive number, not {given}.")
    return number
