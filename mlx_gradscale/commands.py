"""How every command of the package ends: its exit codes, and a line for an error."""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress

from .files.text import printable

# What a shell gives a command that Ctrl-C or a closed pipe ended: 128 and the signal.
INTERRUPTED, PIPE_CLOSED = 130, 141


def run_command(
    work: Callable[[], int | None],
    expected: tuple[type[Exception], ...] = (),
    prefix: str = "error: ",
    flags: Mapping[str, str] | None = None,
) -> int:
    """Do what a command does, from its arguments on, and return its exit code.

    Args:
        work (Callable): Returns a code; None is 0.
        expected (tuple): Errors that are reported in one line; others are raised.
        prefix (str): What comes before that line. Default: ``"error: "``.
        flags (dict, optional): Arguments that functions name in their errors, and the
            command's flags for them.

    Returns:
        int: The code of ``work``; 1 after an error that was reported, 130 after Ctrl-C.
        Where nobody reads the output any more (``| head``), 141, and no word.

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
        return INTERRUPTED
    except BrokenPipeError:
        # Python would write what is left when it ends, and tell that it could not.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except expected as error:
        text = " ".join(str(error).split()) or type(error).__name__
        for argument, flag in (flags or {}).items():
            text = text.replace(argument, flag)
        print(f"{prefix}{printable(text)}", file=sys.stderr)
        return 1
