"""The command ``mlx_gradscale.plot``: draw a run from its file."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..convert.text import printable
from .history import plot_history


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the history in a file: ``mlx_gradscale.plot run.csv -o run.png``.

    Args:
        arguments (list): Default: those of the process.

    Returns:
        int: 0, or 1 if there is nothing that can be drawn, which is said.

    Example:
        >>> import contextlib, os, tempfile
        >>> from mlx_gradscale import GradScaler
        >>> from mlx_gradscale.diagnostics import ScaleHistory
        >>> from mlx_gradscale.plot import main
        >>> history = ScaleHistory()
        >>> history.record(GradScaler(), loss=0.5)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "run.csv")
        ...     history.save(path)
        ...     with contextlib.redirect_stdout(None):
        ...         code = main([path, "--dark"])
        ...     sorted(os.listdir(folder))
        ['run.csv', 'run.png']
    """
    parser = argparse.ArgumentParser(
        prog="mlx_gradscale.plot",
        description="Draw a run that a ScaleHistory has written: loss, loss scale with "
        "a mark on every skipped step, and gradient norm.",
        epilog="example: mlx_gradscale.plot run.csv -o run.svg --dark",
    )
    parser.add_argument("history", help="a .csv or .jsonl file of a ScaleHistory")
    parser.add_argument(
        "-o", "--output", help="the picture to write; default: beside it, as .png"
    )
    parser.add_argument("--dark", action="store_true", help="for a dark page")
    parser.add_argument("--title", help="above the picture")
    options = parser.parse_args(arguments)
    try:
        output = options.output or Path(options.history).with_suffix(".png")
        plot_history(options.history, output, dark=options.dark, title=options.title)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (OSError, ValueError, ImportError) as error:
        print(f"mlx_gradscale.plot: {printable(error)}", file=sys.stderr)
        return 1
    print(printable(output))
    return 0
