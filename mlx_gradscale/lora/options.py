"""What ``mlx_gradscale.lora`` takes beyond what ``mlx_lm.lora`` does."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.optimizers import Optimizer

from ..masters import KINDS
from ..optimizer import GuardedOptimizer, LossScaleOptimizer
from ..scaler import GradScaler

DTYPES = ("float16", "bfloat16", "float32")
HISTORIES = (".csv", ".jsonl")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add our flags to mlx-lm's, with no default, so that a YAML file can set them."""
    ours = parser.add_argument_group("loss scaling (mlx_gradscale)")
    ours.add_argument(
        "--dtype",
        choices=DTYPES,
        help="Train in this dtype, whatever the model is stored in.",
    )
    ours.add_argument(
        "--loss-scale",
        metavar="dynamic|NUMBER|off",
        help="How to scale the loss; off only skips bad steps. Default: dynamic.",
    )
    ours.add_argument(
        "--max-grad-norm",
        type=float,
        metavar="NORM",
        help="Clip the global norm of the gradients to this.",
    )
    ours.add_argument(
        "--masters",
        choices=KINDS,
        help="What is kept beside half-precision weights: float32 masters, or only "
        "the 16 bits that rounding lost, in less memory. Default: float32.",
    )
    ours.add_argument(
        "--float32-layers",
        metavar="FILE",
        help="The .json file of the layers that compute in float32.",
    )
    ours.add_argument(
        "--history",
        metavar="FILE",
        help="Write loss, scale and skips of every step to this .csv or .jsonl file, "
        "and a picture of them beside it.",
    )
    ours.add_argument(
        "--resume",
        action="store_true",
        default=None,
        help="Go on from the last save in the adapter path, bit for bit.",
    )


@dataclass(frozen=True)
class Options:
    """Our flags, checked.

    Attributes:
        dtype (Dtype or None): The dtype to train in, or None for the model's own.
        loss_scale (float or None): The scale that stays, 1.0 for none, or None if it is
            dynamic.
        max_grad_norm (float or None): The norm to clip to, or None.
        masters (str): The kind of masters.
        float32_layers (Path or None): The file that names the layers, or None.
        history (Path or None): The file to write, or None.
        resume (bool): Whether to go on from a checkpoint.
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
        """Read them from mlx-lm's arguments, of which some come from a YAML file.

        Raises:
            ValueError: One of them has no meaning.
        """
        given = {name: getattr(arguments, name, None) for name in cls.__annotations__}
        dtype, norm, history = (given[n] for n in ("dtype", "max_grad_norm", "history"))
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype}.")
        if norm is not None:
            norm = _positive("max_grad_norm", norm)
        if history is not None and Path(history).suffix not in HISTORIES:
            raise ValueError(f"history must be a .csv or .jsonl file, not {history}.")
        masters = given["masters"] or "float32"
        if masters not in KINDS:
            raise ValueError(f"masters must be one of {', '.join(KINDS)}.")
        layers = given["float32_layers"]
        if layers is not None and not Path(layers).is_file():
            raise ValueError(f"float32_layers: there is no file {layers}.")
        return cls(
            dtype=dtype and getattr(mx, dtype),
            loss_scale=_loss_scale(given["loss_scale"]),
            max_grad_norm=norm,
            masters=masters,
            float32_layers=layers and Path(layers),
            history=history and Path(history),
            resume=bool(given["resume"]),
        )

    def wrap(self, optimizer: Optimizer) -> LossScaleOptimizer:
        """Return the optimizer of mlx-lm in ours."""
        world = mx.distributed.init()
        arguments: dict[str, Any] = {
            "max_grad_norm": self.max_grad_norm,
            "masters": self.masters,
        }
        if world.size() > 1:
            # mlx-lm has averaged the gradients, so each rank holds the same. Whether
            # a loss was finite is each rank's own, and all have to know.
            arguments |= {"group": world, "sharded": lambda path, gradient: False}
        if self.loss_scale == 1.0:
            return GuardedOptimizer(optimizer, **arguments)
        if self.loss_scale is None:
            scaler = GradScaler()
        else:
            scaler = GradScaler(self.loss_scale, dynamic=False)
        return LossScaleOptimizer(optimizer, scaler, **arguments)


def _loss_scale(given: Any) -> float | None:
    # In YAML, off is False.
    if given is False or given in ("off", 1, "1", "1.0"):
        return 1.0
    if given in (None, "dynamic"):
        return None
    scale = _positive("loss_scale", given, " dynamic, off or")
    GradScaler(scale, dynamic=False)  # tells what is out of range
    return scale


def _positive(name: str, given: Any, others: str = "") -> float:
    try:
        number = math.nan if isinstance(given, bool) else float(given)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be{others} a positive number, not {given}.")
    return number
