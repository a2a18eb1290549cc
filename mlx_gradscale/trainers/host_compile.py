"""Functions that a trainer compiles, with our state listed where they need it.

What a first gradient or step creates must not be created in a trace. So a trace in
which something is missing is left, the function runs once as plain Python without
taking steps (a rehearsal), everything is restored, and the function is traced again.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

from ..compile_step import remember
from ..core.trees import restore, snapshot


class _Rehearse(BaseException):
    """Leaves a trace in which something is missing."""


class _Thread(threading.local):
    def __init__(self) -> None:
        #: Computes a gradient or takes a step of ours: what is called is MLX's own.
        self.is_busy = False
        self.is_rehearsing = False
        self.traces: list[HostCompiled] = []


thread = _Thread()


@contextmanager
def busy(name: str = "is_busy") -> Iterator[None]:
    """Set a flag of this thread."""
    before = getattr(thread, name)
    setattr(thread, name, True)
    try:
        yield
    finally:
        setattr(thread, name, before)


def leave_trace_unless(is_known: bool, context: Any) -> None:
    """Leave a trace unless everything exists and is listed; eagerly, do nothing.

    Args:
        is_known (bool): Whether everything exists.
        context (Everywhere): Its ``state`` is what has to be listed.
    """
    if is_known and all(trace.context is context for trace in thread.traces):
        return
    for trace in thread.traces:
        trace.list_state(context)
    if thread.traces:
        raise _Rehearse


class HostCompiled:
    """A function that a trainer compiled: what replaces ``mx.compile`` returns it."""

    def __init__(
        self,
        compile_fn: Callable[..., Callable[..., Any]],
        is_active: Callable[[], Any],
        function: Callable[..., Any],
        inputs: Any = None,
        outputs: Any = None,
        shapeless: bool = False,
    ):
        self.context: Any = None
        self._is_active = is_active
        self._function = function
        self._captured = [inputs or [], outputs or []]
        self._compile: Callable[..., Callable[..., Any]] = lambda inputs, outputs: (
            compile_fn(function, inputs, outputs, shapeless)
        )
        self._plain = self._compiled = self._compile(inputs, outputs)
        update_wrapper(self, function)

    def list_state(self, context: Any) -> None:
        """Compile the function again, with the state of ``everywhere()`` as well."""
        if self.context is not context:
            self.context = context
            self._compiled = self._compile(
                *([x, context.state] for x in self._captured)
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function: compiled, or in a rehearsal as it is."""
        if not self._is_active():
            return self._plain(*args, **kwargs)
        if thread.is_rehearsing:
            return self._function(*args, **kwargs)
        is_outermost = not thread.traces
        undo = remember(self._captured, self.context.state if self.context else [])
        thread.traces.append(self)
        is_complete = False
        try:
            result = self._compiled(*args, **kwargs)
            is_complete = True
        except BaseException as error:
            undo()
            if not isinstance(error, _Rehearse) or not is_outermost:
                raise
        finally:
            thread.traces.pop()
        if not is_complete:
            self._rehearse(undo, args, kwargs)
            return self(*args, **kwargs)
        if self.context is not None:
            # Old arrays that it holds could not be reused in the evaluation.
            del undo
            self.context.after_call(self.context.state)
        return result

    def _rehearse(self, undo: Callable[[], None], args: Any, kwargs: Any) -> None:
        try:
            with busy("is_rehearsing"):
                self._function(*args, **kwargs)
        finally:
            # What was created stays, also in a tree that the trainer listed.
            created = snapshot(self.context.state)
            undo()
            restore(created)
