"""``mlx_gradscale run``: run an unmodified training script in :func:`everywhere`."""

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from unittest.mock import patch

import mlx.core as mx

from ..core import notices
from ..float32.where import read_where
from .everywhere import everywhere
from .lora import OPTIMIZER_FLAGS, optimizer_arguments

# What warnings say in Python, and what to say instead.
_FLAGS = {
    'float32_layers="auto"': "--float32-layers auto",
    "compute_dtype=mx.": "--compute-dtype ",
    "compute_dtype=": "--compute-dtype",
    "init_scale=": "--init-scale",
    "Inside everywhere()": "Inside the script",
}
_NOTHING = (
    "No gradients were scaled. The script may do its own loss scaling, have no model "
    "in half precision (see --compute-dtype), or not use MLX's gradient functions."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``mlx_gradscale run`` and return the exit code.

    If the script exits or fails, its exception propagates after the summary is printed.
    """
    parser = _make_parser()
    options = parser.parse_args(argv)
    script, layers, dtype = options.script, options.float32_layers, None
    if not options.module and not os.path.exists(script):
        parser.error(f"the file {script} does not exist")
    if options.compute_dtype is not None:
        dtype = getattr(mx, options.compute_dtype)
    with ExitStack() as stack:
        try:
            if layers not in (None, "auto"):
                layers = read_where(layers)
            context = everywhere(
                init_scale=options.init_scale,
                compute_dtype=dtype,
                float32_layers=layers,
                **optimizer_arguments(options),
            )
            here = stack.enter_context(context)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        # Once per text: finding the first scale creates several scalers that warn.
        here.warn = cache(_print_warning)
        # Warnings of the scalers, too, name the flags.
        stack.enter_context(patch.object(notices, "warn_user", here.warn))
        # The report starts with the layers, which were printed when they were found.
        stack.callback(
            lambda: _print(*here.report()[len(here.found_layers) :] or [_NOTHING])
        )
        # Like Python, search the script's folder first or, with -m, the current one.
        folder = os.path.abspath("" if options.module else os.path.dirname(script))
        arguments = [script, *options.arguments]
        stack.enter_context(patch.object(sys, "argv", arguments))
        stack.enter_context(patch.object(sys, "path", [folder, *sys.path]))
        if options.module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    return 0


def _print(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr)


def _print_warning(text: str) -> None:
    for argument, flag in _FLAGS.items():
        text = text.replace(argument, flag)
    _print(f"warning: {text}")


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_gradscale run",
        description="Run a training script with loss scaling and master weights.",
        epilog="example: mlx_gradscale run --max-grad-norm 1 train.py --epochs 3",
    )
    add = parser.add_argument
    add("--init-scale", type=float, help="initial loss scale (default: automatic)")
    for name, flag in OPTIMIZER_FLAGS.items():
        add(f"--{name}", **flag)
    add(
        "--compute-dtype",
        choices=("float16", "bfloat16"),
        help="compute in this dtype and keep the parameters in float32",
    )
    add(
        "--float32-layers",
        metavar="FILE|auto",
        help="JSON file that lists the layers to compute in float32, or auto to find "
        "them on the first batch",
    )
    add("-m", dest="module", action="store_true", help="run a module, like python -m")
    add("script", help="script to run, or module with -m")
    add("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser
