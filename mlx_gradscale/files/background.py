"""Do something in a thread of its own, or at once where there can be none."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


def in_background(function: Callable[..., T], *arguments: Any) -> Future[T]:
    """Begin to call the function; the future gives its result.

    Not by an executor: those take no work once the main thread has ended, when
    another thread may still be saving. Nor can a thread be begun in ``atexit``.

    Example:

        >>> in_background(max, 1, 2).result()
        2
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as problem:
            future.set_exception(problem)

    try:
        Thread(target=run).start()
    except RuntimeError:
        run()
    return future
