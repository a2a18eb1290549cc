"""Run commands with one-line error messages and consistent exit codes."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from .files.text import printable

# Exceptions that files and users' models may cause.
EXPECTED = (
    *(ValueError, TypeError, KeyError, OSError, ImportError, RuntimeError),
    *(ArithmeticError, MemoryError),
)


def run_command(
    work: Callable[[], int | None],
    expected: tuple[type[Exception], ...] = (),
) -> int:
    """Run the work of a command and return its exit code.

    Args:
        work (Callable): Returns an exit code; None means 0.
        expected (tuple): The exceptions to print on one line.

    Returns:
        int: The exit code of ``work``, or 1 after an expected exception. As in a shell,
        the code is 130 after Ctrl-C, and 141 if the output pipe was closed.

    Example:
        >>> run_command(lambda: print("done"))
        done
        0
    """
    try:
        try:
            return work() or 0
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Otherwise Python would flush the remaining output at exit and report an error.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except expected as error:
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"error: {printable(text)}", file=sys.stderr)
        return 1
