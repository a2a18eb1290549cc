"""The ``mlx_gradscale lora`` command: ``mlx_lm.lora`` as good as in float32."""

import argparse
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ..commands import run_command
from ..files.text import printable

_TESTED = "0.32.2"
INSTALL = (
    f"Install the version this command is tested with: pip install mlx-lm=={_TESTED}"
)
# No defaults, because mlx-lm reads a value from YAML only if its flag is None.
FLAGS: dict[str, dict[str, Any]] = {
    "dtype": {
        "choices": ("float16", "bfloat16", "float32"),
        "help": "Train in this dtype. Default: the dtypes of the stored model.",
    },
    "loss-scale": {
        "metavar": "dynamic|NUMBER|off",
        "help": "Dynamic or fixed loss scale. With off, non-finite steps are still "
        "skipped. Default: in float16, dynamic, starting from a scale found on the "
        "first batch; otherwise off.",
    },
    "max-grad-norm": {
        "metavar": "NORM",
        "type": float,
        "help": "Clip gradients to this global norm.",
    },
    "state-bits": {
        "type": int,
        "choices": (32, 16, 8),
        "help": "Store master weights and moments in this many bits. With AdamW and "
        "half-precision weights, 16 takes 8 bytes per parameter instead of 14, and 8 "
        "takes 5. Default: 32.",
    },
    "float32-layers": {
        "metavar": "FILE",
        "help": "JSON file that lists the layers to compute in float32, written by "
        "mlx_gradscale float32-layers.",
    },
    "history": {
        "metavar": "FILE",
        "help": "Write the loss, scale and skipped steps to this .csv file, and a plot "
        "next to it.",
    },
    "resume": {
        "action": "store_true",
        "default": None,
        "help": "Resume from the last checkpoint in the adapter path. With the same "
        "options, the run is bit-identical to an uninterrupted one.",
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``mlx_gradscale lora`` and return the exit code.

    An error in this package is printed on one line. Errors in mlx-lm propagate.
    """
    return run_command(lambda: _fine_tune(sys.argv[1:] if argv is None else argv))


def _fine_tune(arguments: Sequence[str]) -> int:
    try:
        _import_training().run_mlx_lm(arguments)
    except (ImportError, OSError, ValueError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        is_ours = frame.f_globals.get("__name__", "").startswith("mlx_gradscale.")
        if isinstance(error, BrokenPipeError) or not is_ours:
            raise  # errors from mlx-lm keep their traceback
        print(f"error: {printable(error)}", file=sys.stderr)
        return 1
    return 0


def _import_training() -> ModuleType:
    try:
        from mlx_lm.lora import build_parser, evaluate, main, run, train  # noqa: F401

        from . import lora_training
    except ImportError as error:
        raise ImportError(
            f"mlx-lm is missing or incompatible ({error}). {INSTALL}"
        ) from None
    return lora_training


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of this package to mlx-lm's parser."""
    parser.description = (
        "Fine-tune with mlx-lm (LoRA, DoRA or all weights), with master weights and, "
        "in float16, loss scaling."
    )
    group = parser.add_argument_group("mlx_gradscale")
    for name, options in FLAGS.items():
        group.add_argument(f"--{name}", **options)
    parser.epilog = (
        "example: mlx_gradscale lora --model my-model --data my-data --train --dtype "
        f"float16. Tested with mlx-lm {_TESTED}."
    )
    return parser
