"""The command ``mlx_gradscale.inspect``: what is in a checkpoint file or folder."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from .commands import run_command
from .convert.description import describe, render

__all__ = ["describe", "main", "render"]

_EXPECTED = (ValueError, TypeError, KeyError, OSError, RuntimeError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv (list): The arguments. Default: those of the process.

    Returns:
        int: 0, or 1 after an error, which is printed in one line.
    """
    return run_command(lambda: _inspect(argv), _EXPECTED)


def _inspect(argv: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(
        prog="mlx_gradscale.inspect",
        epilog="example: mlx_gradscale.inspect run.pt",
        description="Print what is in a PyTorch checkpoint, a safetensors file, a "
        "scaler's file or a converted folder. Nothing in a file is executed.",
    )
    parser.add_argument("path", metavar="FILE", type=Path, help="also a run's folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    found = describe(arguments.path)
    print(json.dumps(found, indent=1) if arguments.json else render(found))


if __name__ == "__main__":
    sys.exit(main())
