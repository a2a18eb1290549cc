"""How every command ends: its exit code, and one line for an error."""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress

from .files.text import printable

# As a shell reports Ctrl-C and a closed pipe: 128 plus the signal.
_INTERRUPTED, _PIPE_CLOSED = 130, 141


def run_command(
    work: Callable[[], int | None],
    expected: tuple[type[Exception], ...] = (),
    prefix: str = "error: ",
    flags: Mapping[str, str] | None = None,
) -> int:
    """Run what a command does, and return its exit code.

    Args:
        work (Callable): Returns a code; None is 0.
        expected (tuple): Errors that are printed in one line; others are raised.
        prefix (str): Comes before that line. Default: ``"error: "``.
        flags (dict, optional): Names of arguments in errors, and the flags for them.

    Returns:
        int: The code of ``work``; 1 after an error that was printed, 130 after Ctrl-C,
        141 if nobody reads the output any more (``| head``).

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
        return _INTERRUPTED
    except BrokenPipeError:
        # Python would try to flush the rest at exit, and complain.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    except expected as error:
        text = " ".join(str(error).split()) or type(error).__name__
        for argument, flag in (flags or {}).items():
            text = text.replace(argument, flag)
        print(f"{prefix}{printable(text)}", file=sys.stderr)
        return 1
