"""The command ``mlx_gradscale lora``: mlx-lm's fine-tuning command, in float16."""

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

from ..commands import run_command
from ..files.text import printable
from .lora_options import add_options, read_options

_TESTED = "0.32.2"
_INSTALL = (
    f"This command was tested with mlx-lm {_TESTED}: pip install mlx-lm=={_TESTED}"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Fine-tune as ``mlx_lm.lora`` does, with loss scaling and master weights.

    Args:
        argv (list, optional): Default: the arguments of the process.

    Returns:
        int: 0, or 1 after an error, which is printed in one line. Wrong arguments exit
        with 2.
    """
    return run_command(lambda: _fine_tune(argv))


def _fine_tune(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        host = _import_host()
        build_parser, run = host.build_parser, host.run
        ours: dict[str, Any] = {
            "build_parser": lambda: _with_ours(build_parser()),
            "run": lambda args, *rest: _run(host, run, args, *rest),
        }
        with (
            patch.object(sys, "argv", ["mlx_gradscale lora", *arguments]),
            patch.multiple(host, **ours),
        ):
            host.main()
    except (ImportError, OSError, ValueError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        is_ours = str(frame.f_globals.get("__name__")).startswith("mlx_gradscale.")
        if isinstance(error, BrokenPipeError) or not is_ours:
            raise  # an error of mlx-lm keeps its traceback
        print(f"mlx_gradscale lora: {printable(error)}", file=sys.stderr)
        return 1
    return 0


def _import_host() -> Any:
    """Return ``mlx_lm.lora``, or raise an ``ImportError`` that says what to install."""
    try:
        host = import_module("mlx_lm.lora")
        import_module(f"{__package__}.lora_training")  # what it needs of mlx-lm
        for name in ("main", "build_parser", "run", "load", "train", "evaluate"):
            getattr(host, name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"mlx-lm is missing or has changed ({error}). {_INSTALL}"
        ) from None
    return host


def _with_ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add_options(parser)
    parser.description = f"{parser.description or ''} With loss scaling.".strip()
    parser.epilog = (
        "example: mlx_gradscale lora --model my-model --data my-data --train --dtype "
        f"float16. Tested with mlx-lm {_TESTED}; installed is "
        f"{metadata.version('mlx-lm')}."
    )
    return parser


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

    ours: dict[str, Any] = {
        "load": load_in_dtype,
        "evaluate": evaluate_in_float32,
        "train": training.train,
    }
    with patch.multiple(host, **ours):
        run(args, *rest)
    if args.train and not training.was_called:
        raise ImportError(f"mlx-lm did not call train() of this command. {_INSTALL}")
    if args.train and options.history and mx.distributed.init().rank() == 0:
        _draw(options.history)


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    # Some models of mlx-lm name weights that stay as they are, such as a router's.
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
    except ImportError as error:  # no reason to fail after all the training
        print(f"No picture of the history was drawn: {printable(error)}")
    else:
        print(f"The history is in {history}, and drawn in {picture}.")


if __name__ == "__main__":
    sys.exit(main())
