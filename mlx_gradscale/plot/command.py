"""The command ``mlx_gradscale plot``: draw a run from the file of its history."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..commands import run_command
from .history import plot_history


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the history in a file: ``mlx_gradscale plot run.csv -o run.png``.

    Args:
        arguments (list, optional): Default: the arguments of the process.

    Returns:
        int: 0, or 1 after an error, which is printed.
    """
    expected = (OSError, ValueError, ImportError)
    return run_command(lambda: _plot(arguments), expected, "mlx_gradscale plot: ")


def _plot(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(
        prog="mlx_gradscale plot",
        description="Draw the history of a run: loss, loss scale with a mark on every "
        "skipped step, and gradient norm.",
        epilog="example: mlx_gradscale plot run.csv -o run.svg --dark",
    )
    parser.add_argument("history", help="a .csv or .jsonl file of a ScaleHistory")
    parser.add_argument(
        "-o", "--output", help="picture to write (default: HISTORY with .png)"
    )
    parser.add_argument("--dark", action="store_true", help="for a dark page")
    parser.add_argument("--title", help="title of the picture")
    options = parser.parse_args(arguments)
    output = options.output or Path(options.history).with_suffix(".png")
    plot_history(options.history, output, dark=options.dark, title=options.title)
    print(output)
