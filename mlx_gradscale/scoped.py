"""A value for the while of a ``with``, in this thread, that Ctrl-C cannot leave on."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")


class _Held(Generic[T]):
    def __init__(self, value: T):
        self.value = value


class Scoped(Generic[T]):
    """What code below this frame is to know.

    A ``ContextVar`` that is set in one line and reset in another stays set for good if
    Ctrl-C comes between this line and the ``try``. So only the frame holds the value,
    and it goes with the frame.

    Args:
        name (str): For whoever debugs.
        default (Any): What it is outside.

    Example:
        >>> depth = Scoped("depth", 0)
        >>> with depth.set_to(1):
        ...     depth.get()
        1
        >>> depth.get()
        0
    """

    def __init__(self, name: str, default: T):
        self._default = default
        self._stack: ContextVar[tuple[weakref.ref[_Held[T]], ...]] = ContextVar(
            name, default=()
        )

    def get(self) -> T:
        """Return the value of the innermost ``with``."""
        for reference in reversed(self._stack.get()):
            held = reference()
            if held is not None:
                return held.value
        return self._default

    @contextmanager
    def set_to(self, value: T) -> Iterator[None]:
        """Let it be ``value`` inside."""
        held = _Held(value)
        before = self._stack.get()
        self._stack.set((*before, weakref.ref(held)))
        try:
            yield
        finally:
            self._stack.set(before)
