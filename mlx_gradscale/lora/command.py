"""The command ``mlx_gradscale.lora``: mlx-lm's, with its names replaced for a while."""

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

from ..commands import run_command
from ..files.text import printable
from ..replaced import replaced
from . import host
from .float32 import compute_in_float32
from .options import Options, add_options
from .training import Training


def main(argv: Sequence[str] | None = None) -> int:
    """Fine-tune as ``mlx_lm.lora`` does, with loss scaling and float32 masters.

    Args:
        argv (list): The arguments. Default: those of the process.

    Returns:
        int: 0, or 1 if it cannot run, which is said. Wrong arguments exit with 2.
    """
    return run_command(lambda: _fine_tune(argv))


def _fine_tune(argv: Sequence[str] | None) -> int:
    try:
        mlx_lm = host.command()
        build_parser, run = mlx_lm.build_parser, mlx_lm.run
        ours = {
            "build_parser": lambda: _with_ours(build_parser()),
            "run": lambda args, *rest: _run(mlx_lm, run, args, *rest),
        }
        arguments = list(sys.argv[1:] if argv is None else argv)
        with (
            replaced(sys, argv=["mlx_gradscale.lora", *arguments]),
            replaced(mlx_lm, **ours),
        ):
            mlx_lm.main()
    except (ImportError, OSError, ValueError) as error:
        if isinstance(error, BrokenPipeError) or not _is_ours(error):
            raise
        print(f"mlx_gradscale.lora: {printable(error)}", file=sys.stderr)
        return 1
    return 0


def _is_ours(error: Exception) -> bool:
    """Tell whether this is a sentence of ours; what mlx-lm raises, it shows itself."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).startswith("mlx_gradscale.")


def _with_ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add_options(parser)
    tested = ", ".join(host.TESTED)
    parser.description = f"{parser.description or ''} With loss scaling.".strip()
    parser.epilog = (
        "example: mlx_gradscale.lora --model my-model --data my-data --train --dtype "
        f"float16. Tested with mlx-lm {tested}; installed is {host.version()}."
    )

    def error(message: str) -> None:
        parser.print_help(sys.stderr)
        parser.exit(2, f"\n{parser.prog}: error: {message}\n")

    parser.error = error  # type: ignore[method-assign, assignment]
    return parser


def _run(
    mlx_lm: ModuleType, run: Callable[..., Any], arguments: Any, *rest: Any
) -> None:
    options = Options.of(arguments)
    training = Training(options, arguments)
    load, evaluate = mlx_lm.load, mlx_lm.evaluate

    def load_in_dtype(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        model, *others = load(*args, **kwargs)
        _cast(model, options.dtype)
        return model, *others

    def evaluate_in_float32(*args: Any, model: nn.Module, **kwargs: Any) -> Any:
        if not training.was_called:
            compute_in_float32(model, options.float32_layers)
        return evaluate(*args, model=model, **kwargs)

    ours = {
        "load": load_in_dtype,
        "evaluate": evaluate_in_float32,
        "train": training.train,
    }
    with replaced(mlx_lm, **ours):
        run(arguments, *rest)
    if arguments.train:
        if not training.was_called:
            raise ImportError(host.CHANGED)
        _draw(options)


def _cast(model: nn.Module, dtype: mx.Dtype | None) -> None:
    if dtype is None:
        return
    # Some models of mlx-lm name weights that stay as they are: a router's, say.
    is_cast = getattr(model, "cast_predicate", lambda path: True)

    def cast(path: str, x: mx.array) -> mx.array:
        floating = mx.issubdtype(x.dtype, mx.floating)
        return x.astype(dtype) if floating and is_cast(path) else x

    model.update(tree_map_with_path(cast, model.parameters()))
    mx.eval(model.parameters())


def _draw(options: Options) -> None:
    if options.history is None or mx.distributed.init().rank() != 0:
        return
    from ..plot import plot_history

    picture = options.history.with_suffix(".png")
    try:
        plot_history(options.history, picture)
    except ImportError as error:  # no reason to fail, after all the training
        print(f"There is no picture of the history: {printable(error)}")
    else:
        print(f"The history is in {options.history}, and drawn in {picture}.")
