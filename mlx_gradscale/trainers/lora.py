"""The command ``mlx_gradscale lora``: mlx-lm's fine-tuning command, in float16."""

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import SGD, Optimizer
from mlx.utils import tree_map_with_path

from ..commands import run_command
from ..core.optimizer import LossScaleOptimizer
from ..core.scaler import GradScaler
from ..files.text import printable

_TESTED = "0.32.2"
_INSTALL = (
    f"Install the version this command is tested with: pip install mlx-lm=={_TESTED}"
)
_DTYPES = ("float16", "bfloat16", "float32")
# No defaults here, so that a YAML file can set them.
_FLAGS: dict[str, dict[str, Any]] = {
    "dtype": {"choices": _DTYPES, "help": "Train in this dtype."},
    "loss-scale": {
        "metavar": "dynamic|NUMBER|off",
        "help": "Dynamic or fixed loss scale; off only skips non-finite steps. "
        "Default: dynamic, starting from a scale found on the first batch.",
    },
    "max-grad-norm": {
        "metavar": "NORM",
        "type": float,
        "help": "Clip gradients to this global norm.",
    },
    "masters": {
        "choices": ("float32", "remainder"),
        "help": "Store master weights in float32, or only the 16 bits lost by rounding "
        "(remainder), which takes less memory. Default: float32.",
    },
    "float32-layers": {
        "metavar": "FILE",
        "help": "JSON file that lists the layers to compute in float32.",
    },
    "history": {
        "metavar": "FILE",
        "help": "Write loss, scale and skipped steps to this .csv or .jsonl file, and "
        "a plot next to it.",
    },
    "resume": {
        "action": "store_true",
        "default": None,
        "help": "Resume from the last checkpoint in the adapter path, with "
        "bit-identical results.",
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Fine-tune like ``mlx_lm.lora``, with loss scaling and master weights.

    Args:
        argv (list, optional): Default: the arguments of the process.

    Returns:
        int: 0, or 1 after an error, which is printed on one line. Invalid arguments
        exit with 2.
    """
    return run_command(lambda: _fine_tune(argv))


def _fine_tune(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        host = _import_host()
        build_parser, run = host.build_parser, host.run
        with (
            patch.object(sys, "argv", ["mlx_gradscale lora", *arguments]),
            patch.object(host, "build_parser", lambda: _add_flags(build_parser())),
            patch.object(host, "run", partial(_run, host, run)),
        ):
            host.main()
    except (ImportError, OSError, ValueError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        is_ours = str(frame.f_globals.get("__name__")).startswith("mlx_gradscale.")
        if isinstance(error, BrokenPipeError) or not is_ours:
            raise  # errors from mlx-lm keep their traceback
        print(f"mlx_gradscale lora: {printable(error)}", file=sys.stderr)
        return 1
    return 0


def _import_host() -> Any:
    """Return ``mlx_lm.lora``, or raise an ``ImportError`` that says what to install."""
    try:
        from mlx_lm import lora
        from mlx_lm.lora import build_parser, evaluate, load, main, run, train  # noqa: F401

        from . import lora_training  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"mlx-lm is missing or incompatible ({error}). {_INSTALL}"
        ) from None
    return lora


def _add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("loss scaling (mlx_gradscale)")
    for name, options in _FLAGS.items():
        group.add_argument(f"--{name}", **options)
    parser.description = f"{parser.description or ''} With loss scaling.".strip()
    parser.epilog = (
        "example: mlx_gradscale lora --model my-model --data my-data --train --dtype "
        f"float16. Tested with mlx-lm {_TESTED}; version "
        f"{metadata.version('mlx-lm')} is installed."
    )
    return parser


def read_options(arguments: Any) -> SimpleNamespace:
    """Return our validated options, some of which may come from a YAML file.

    Returns:
        SimpleNamespace: The flags by name. ``loss_scale`` is ``"dynamic"`` or a number,
        1.0 if it is off.
    """
    names = [name.replace("-", "_") for name in _FLAGS]
    options = SimpleNamespace(**{x: getattr(arguments, x, None) for x in names})
    if options.dtype not in (None, *_DTYPES):
        choices = ", ".join(_DTYPES)
        raise ValueError(f"dtype must be one of {choices}, got {options.dtype}.")
    options.dtype = options.dtype and getattr(mx, options.dtype)
    options.masters = options.masters or "float32"
    options.history = history = options.history and Path(options.history)
    if history and history.suffix not in (".csv", ".jsonl"):
        raise ValueError(f"history must be a .csv or .jsonl file, got {history}.")
    options.float32_layers = layers = options.float32_layers and Path(
        options.float32_layers
    )
    if layers and not layers.is_file():
        raise ValueError(f"The float32_layers file {layers} does not exist.")
    options.loss_scale = _loss_scale(options.loss_scale)
    wrap_optimizer(SGD(0.0), options)  # raises if another value is invalid
    return options


def _loss_scale(given: Any) -> str | float:
    # YAML reads off as False and on as True.
    name = str(given).lower()
    if name in ("none", "dynamic", "true"):
        return "dynamic"
    try:
        return 1.0 if name in ("off", "false") else float(given)
    except ValueError:
        raise ValueError(
            f"loss_scale must be dynamic, off or a positive number, got {given}."
        ) from None


def wrap_optimizer(
    optimizer: Optimizer, options: SimpleNamespace
) -> LossScaleOptimizer:
    """Wrap mlx-lm's optimizer with loss scaling and master weights."""
    scale, world = options.loss_scale, mx.distributed.init()
    is_group = world.size() > 1
    return LossScaleOptimizer(
        optimizer,
        GradScaler() if scale == "dynamic" else GradScaler(scale, dynamic=False),
        max_grad_norm=options.max_grad_norm,
        masters=options.masters,
        group=world if is_group else None,
        average=is_group,
    )


def _run(host: Any, run: Callable[..., Any], args: Any, *rest: Any) -> None:
    from .lora_training import Training

    options = read_options(args)
    training = Training(options, args)
    load, evaluate = host.load, host.evaluate

    def load_in_dtype(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        model, *others = load(*args, **kwargs)
        if options.dtype is not None:
            _cast(model, options.dtype)
        return model, *others

    def evaluate_in_float32(*args: Any, model: nn.Module, **kwargs: Any) -> Any:
        if not training.was_called:
            training.choose_float32_layers(model)
        return evaluate(*args, model=model, **kwargs)

    with (
        patch.object(host, "load", load_in_dtype),
        patch.object(host, "evaluate", evaluate_in_float32),
        patch.object(host, "train", training.train),
    ):
        run(args, *rest)
    if args.train and not training.was_called:
        raise ImportError(f"This version of mlx-lm is incompatible. {_INSTALL}")
    if args.train and options.history and mx.distributed.init().rank() == 0:
        _draw(options.history)


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    # Some mlx-lm models exclude weights from casting, such as those of a router.
    is_cast = getattr(model, "cast_predicate", lambda path: True)

    def cast(path: str, x: mx.array) -> mx.array:
        floating = mx.issubdtype(x.dtype, mx.floating)
        return x.astype(dtype) if floating and is_cast(path) else x

    model.update(tree_map_with_path(cast, model.parameters()))
    mx.eval(model.parameters())


def _draw(history: Path) -> None:
    from ..plot import plot_history

    picture = history.with_suffix(".png")
    try:
        plot_history(history, picture)
    except ImportError as error:  # not a reason to fail after training
        print(f"The history was not plotted: {printable(error)}")
    else:
        print(f"Saved the history to {history} and its plot to {picture}.")
