"""At most one save at a time goes on beside the training."""

import atexit
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ..files.background import in_background

_running: list[Future[Any]] = []


def begin(function: Callable[..., Any], *arguments: Any) -> None:
    """Call the function in a thread of its own; :func:`finish` must come before."""
    _running.append(in_background(function, *arguments))


def finish() -> None:
    """Wait for what :func:`begin` began, and raise what it raised, once."""
    if _running:
        _running.pop().result()


@atexit.register
def _report_at_exit() -> None:
    # Threads have ended by now, and nobody will call finish().
    try:
        finish()
    except BaseException as error:
        print("The last save in the background failed:", file=sys.stderr)
        traceback.print_exception(type(error), error, error.__traceback__)
