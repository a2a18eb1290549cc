"""The flags that ``mlx_gradscale lora`` has beyond mlx-lm's."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.optimizers import Optimizer

from ..core.optimizer import GuardedOptimizer, LossScaleOptimizer
from ..core.scaler import GradScaler

_DTYPES = ("float16", "bfloat16", "float32")
_MASTERS = ("float32", "remainder")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add our flags to mlx-lm's, without defaults, so that a YAML file can set them."""
    ours = parser.add_argument_group("loss scaling (mlx_gradscale)")
    ours.add_argument("--dtype", choices=_DTYPES, help="Train in this dtype.")
    ours.add_argument(
        "--loss-scale",
        metavar="dynamic|NUMBER|off",
        help="How to scale the loss; off only skips bad steps. Default: dynamic, from "
        "a scale that is found on the first batch.",
    )
    ours.add_argument(
        "--max-grad-norm",
        type=float,
        metavar="NORM",
        help="Clip the global norm of the gradients to this.",
    )
    ours.add_argument(
        "--masters",
        choices=_MASTERS,
        help="How master weights are stored: in float32, or as the 16 bits that "
        "rounding lost, which takes less memory. Default: float32.",
    )
    ours.add_argument(
        "--float32-layers",
        metavar="FILE",
        help="The .json file of the layers that compute in float32.",
    )
    ours.add_argument(
        "--history",
        metavar="FILE",
        help="Write loss, scale and skipped steps to this .csv or .jsonl file, and a "
        "picture beside it.",
    )
    ours.add_argument(
        "--resume",
        action="store_true",
        default=None,
        help="Continue from the last checkpoint in the adapter path, bit-identically.",
    )


@dataclass(frozen=True)
class Options:
    """Our flags, checked.

    Attributes:
        dtype (Dtype or None): The dtype to train in, or None for the model's own.
        loss_scale (float or None): A fixed scale, 1.0 for none; None if dynamic.
        max_grad_norm (float or None): The norm to clip to.
        masters (str): How master weights are stored.
        float32_layers (Path or None): The file that names the layers.
        history (Path or None): The file to write.
        resume (bool): Whether to continue from a checkpoint.
    """

    dtype: mx.Dtype | None = None
    loss_scale: float | None = None
    max_grad_norm: float | None = None
    masters: str = "float32"
    float32_layers: Path | None = None
    history: Path | None = None
    resume: bool = False

    @classmethod
    def of(cls, arguments: Any) -> "Options":
        """Read them from mlx-lm's arguments, some of which come from a YAML file."""
        given = {name: getattr(arguments, name, None) for name in cls.__annotations__}
        norm, layers, history = (
            given[name] for name in ("max_grad_norm", "float32_layers", "history")
        )
        if history is not None and Path(history).suffix not in (".csv", ".jsonl"):
            raise ValueError(f"history must be a .csv or .jsonl file, not {history}.")
        if layers is not None and not Path(layers).is_file():
            raise ValueError(f"float32_layers: there is no file {layers}.")
        dtype = _choice("dtype", given["dtype"], _DTYPES)
        return cls(
            dtype=dtype and getattr(mx, dtype),
            loss_scale=_loss_scale(given["loss_scale"]),
            max_grad_norm=None if norm is None else _positive("max_grad_norm", norm),
            masters=_choice("masters", given["masters"] or "float32", _MASTERS),
            float32_layers=layers and Path(layers),
            history=history and Path(history),
            resume=bool(given["resume"]),
        )

    def wrap(self, optimizer: Optimizer) -> LossScaleOptimizer:
        """Return mlx-lm's optimizer with loss scaling and master weights."""
        arguments: dict[str, Any] = {
            "max_grad_norm": self.max_grad_norm,
            "masters": self.masters,
        }
        world = mx.distributed.init()
        if world.size() > 1:
            arguments |= {"group": world, "average": True}
        if self.loss_scale == 1.0:
            return GuardedOptimizer(optimizer, **arguments)
        scaler = GradScaler()
        if self.loss_scale is not None:
            scaler = GradScaler(self.loss_scale, dynamic=False)
        return LossScaleOptimizer(optimizer, scaler, **arguments)


def _choice(name: str, given: Any, choices: tuple[str, ...]) -> Any:
    if given is not None and given not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {given}.")
    return given


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
