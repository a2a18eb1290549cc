"""``mlx_gradscale run``: run an unmodified training script in :func:`everywhere`."""

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from unittest.mock import patch

import mlx.core as mx

from ..float32_layers.where import read_where
from .everywhere import everywhere

_NOTHING = (
    "No gradients were scaled. The script may do its own loss scaling, have no model "
    "in half precision (see --compute-dtype), or not use MLX's gradient functions."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script or a module with loss scaling and master weights.

    Args:
        argv (list, optional): The options, the script and its arguments. Default: the
            arguments of the process.

    Returns:
        int: 0. If the script exits or fails, its exception propagates after the
        summary is printed.
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
                max_grad_norm=options.max_grad_norm,
            )
            here = stack.enter_context(context)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        stack.callback(
            lambda: print(*here.report() or [_NOTHING], sep="\n", file=sys.stderr)
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


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_gradscale run",
        description="Run a training script with loss scaling and master weights.",
        epilog="example: mlx_gradscale run --max-grad-norm 1 train.py --epochs 3",
    )
    add = parser.add_argument
    add("--init-scale", type=float, help="initial loss scale (default: automatic)")
    add("--max-grad-norm", type=float, help="clip gradients to this global norm")
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
