"""``python -m mlx_gradscale run``: a training script, inside ``everywhere()``."""

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

import mlx.core as mx
from mlx.optimizers import SGD

from ..optimizer import LossScaleOptimizer
from ..replaced import replaced
from ..scaler import GradScaler
from .context import everywhere


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script or a module with loss scaling, without a change to any file.

    Args:
        argv (list): ``[--init-scale S] [--max-grad-norm N] [--compute-dtype D] SCRIPT
            ARGS...``, or ``-m MODULE ARGS...``. Default: those of the process.

    Returns:
        int: 0; a script that exits does so with its own code.
    """
    parser = argparse.ArgumentParser(
        prog="mlx_gradscale run",
        description="Run a training script with loss scaling and float32 masters.",
        epilog="example: mlx_gradscale run --max-grad-norm 1 train.py --epochs 3",
    )
    parser.add_argument("--init-scale", type=float, default=65536.0, metavar="SCALE")
    parser.add_argument("--max-grad-norm", type=float, metavar="NORM")
    parser.add_argument(
        "--compute-dtype",
        choices=("float16", "bfloat16"),
        help="compute in it, with a model that the script keeps in float32",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="a module")
    parser.add_argument("script", help="the script, or with -m the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own")
    options = parser.parse_args(argv)
    try:
        # Before the script has loaded its model.
        LossScaleOptimizer(
            SGD(0.1),
            GradScaler(options.init_scale),
            max_grad_norm=options.max_grad_norm,
        )
    except ValueError as error:
        parser.error(str(error))
    if not options.module and not os.path.isfile(options.script):
        parser.error(f"there is no script {options.script}")

    scalers: list[GradScaler] = []

    def make_scaler() -> GradScaler:
        # Held here: at the end of a script its own variables are gone.
        scalers.append(GradScaler(options.init_scale))
        return scalers[-1]

    # As Python does: the script's folder, or for a module the current one.
    folder = os.getcwd() if options.module else os.path.dirname(options.script)
    given = [options.script, *options.arguments]
    dtype = options.compute_dtype
    with (
        replaced(sys, argv=given, path=[os.path.abspath(folder), *sys.path]),
        everywhere(
            make_scaler,
            compute_dtype=dtype and getattr(mx, dtype),
            max_grad_norm=options.max_grad_norm,
        ),
    ):
        if options.module:
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(options.script, run_name="__main__")
    if not scalers:
        print("The script made no optimizer: nothing was scaled.", file=sys.stderr)
    for scaler in scalers:
        skipped, scale = scaler.skipped_steps.item(), scaler.get_scale()
        print(f"loss scale {scale:g}, {skipped} steps skipped", file=sys.stderr)
    return 0
