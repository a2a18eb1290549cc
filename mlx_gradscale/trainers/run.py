"""``mlx_gradscale run``: run an unmodified training script in :func:`everywhere`."""

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
from mlx.optimizers import SGD

from ..core.optimizer import LossScaleOptimizer
from ..core.scaler import GradScaler
from .everywhere import everywhere


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script or a module with loss scaling and master weights.

    Args:
        argv (list, optional): Default: the arguments of the process.

    Returns:
        int: 0. A script that exits keeps its own exit code, after the summary.
    """
    options = _parse(argv)
    dtype, layers = options.compute_dtype, options.float32_layers
    exit_code: SystemExit | None = None
    with everywhere(
        options.init_scale and partial(GradScaler, options.init_scale),
        compute_dtype=dtype and getattr(mx, dtype),
        float32_layers=layers if layers in (None, "auto") else Path(layers),
        max_grad_norm=options.max_grad_norm,
    ) as here:
        try:
            _run(options)
        except SystemExit as error:
            exit_code = error
        finally:
            lines = here.report() or [
                "No gradients were scaled. Either the script does its own loss "
                "scaling, or no model is in half precision (see --compute-dtype)."
            ]
            print(*lines, sep="\n", file=sys.stderr)
    if exit_code is not None:
        raise exit_code
    return 0


def _run(options: argparse.Namespace) -> None:
    # Like Python, use the script's folder, or the current one for a module.
    folder = "" if options.module else os.path.dirname(options.script)
    path = [os.path.abspath(folder), *sys.path]
    with patch.multiple(sys, argv=[options.script, *options.arguments], path=path):
        if options.module:
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(options.script, run_name="__main__")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mlx_gradscale run",
        description="Run a training script with loss scaling and master weights.",
        epilog="example: mlx_gradscale run --max-grad-norm 1 train.py --epochs 3",
    )
    parser.add_argument(
        "--init-scale",
        type=float,
        metavar="SCALE",
        help="initial loss scale; default: found on the first batch",
    )
    parser.add_argument(
        "--max-grad-norm",
        type=float,
        metavar="NORM",
        help="clip gradients to this global norm",
    )
    parser.add_argument(
        "--compute-dtype",
        choices=("float16", "bfloat16"),
        help="compute in this dtype and keep the parameters in float32",
    )
    parser.add_argument(
        "--float32-layers",
        metavar="FILE|auto",
        help="JSON file that lists the layers to compute in float32, or auto to find "
        "them on the first batch",
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="run a module, as python -m does"
    )
    parser.add_argument("script", help="script to run, or module with -m")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="arguments of the script"
    )
    options = parser.parse_args(argv)
    scale, layers = options.init_scale, options.float32_layers
    try:
        scaler = None if scale is None else GradScaler(scale)
        LossScaleOptimizer(SGD(0.0), scaler, max_grad_norm=options.max_grad_norm)
    except ValueError as error:
        parser.error(str(error))
    if not options.module and not os.path.isfile(options.script):
        parser.error(f"the script {options.script} does not exist")
    if layers not in (None, "auto") and not os.path.isfile(layers):
        parser.error(f"the --float32-layers file {layers} does not exist")
    return options
