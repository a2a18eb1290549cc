"""State of ``everywhere()`` for a trainer: gradients, optimizers, compiled functions.

The first gradient or step creates state, which must not happen in a trace. If state is
missing, the trace is aborted, and that one call runs as plain Python.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

import mlx.core as mx
from mlx.optimizers import Optimizer

from ..compile_step import remember
from ..core.finite import all_finite
from ..core.optimizer import GuardedOptimizer
from ..core.optimizers import single_optimizers
from ..core.scale import count_step, next_scale
from ..core.scaler import GradScaler, SkipWatch
from ..core.trees import flatten


class _Thread(threading.local):
    def __init__(self) -> None:
        #: Whether our own gradient or step is running, which needs MLX's own functions.
        self.is_busy = False
        self.traces: list[Compiled] = []


thread = _Thread()
#: The stack of entered ``Everywhere`` contexts; the last one is active.
entered: list[Any] = []


def current() -> Any:
    """Return the active ``Everywhere``, or None."""
    return entered[-1] if entered and not thread.is_busy else None


@contextmanager
def busy() -> Iterator[None]:
    """Use MLX's own functions in this thread within a ``with`` block."""
    before, thread.is_busy = thread.is_busy, True
    try:
        yield
    finally:
        thread.is_busy = before


class Gradients:
    """The scaler of one model, with a count of the gradients computed with it."""

    def __init__(self, owner: Any, scaler: GradScaler):
        self.owner = weakref.ref(owner)
        self.scaler = scaler
        self.watch = SkipWatch()
        self.state: dict[str, Any] = {"scaler": scaler.state, "count": mx.array(0)}

    def count(self, gradients: Any) -> None:
        """Update the scale according to whether the gradients are finite."""
        finite, state = all_finite(gradients), self.scaler.state
        state.update(count_step(state, finite))
        state.update(next_scale(state, finite))
        self.state["count"] = self.state["count"] + 1

    def report(self) -> str:
        """Return one line about the scale."""
        scale, bad = self.scaler.get_scale(), self.scaler.skipped_steps.item()
        count = self.state["count"].item()
        return f"loss scale {scale:g}, {bad} of {count} gradients overflowed"


class Steps:
    """The guard of one optimizer, with a count of the steps taken with it."""

    def __init__(self, optimizer: Optimizer, arguments: dict[str, Any]):
        self.owner = weakref.ref(optimizer)
        self.name = type(optimizer).__name__
        # A twin that shares all attributes, so that we do not keep the trainer's alive.
        twin = object.__new__(type(optimizer))
        twin.__dict__ = vars(optimizer)
        self._guarded: Any = GuardedOptimizer(twin, **arguments)
        self._scaler: GradScaler = self._guarded.scaler
        self._count = {"count": mx.array(0)}
        self._prepared: list[Any] = []
        self._paths: set[str] = set()

    def is_ready(self, parameters: Any) -> bool:
        """Return whether these have state that the trainer has not replaced."""
        is_same = list(map(id, self._states())) == list(map(id, self._prepared))
        return is_same and self._paths.issuperset(dict(flatten(parameters)))

    def prepare(self, parameters: Any) -> None:
        """Create the state for steps with these parameters; existing state is kept."""
        self._guarded.init(parameters)
        self._prepared = self._states()
        self._paths.update(dict(flatten(parameters)))

    def _states(self) -> list[Any]:
        return [part.state for part in single_optimizers(self._guarded.optimizer)]

    def take(self, gradients: Any, parameters: Any) -> Any:
        """Count the step; return the new parameters, or the old ones if skipped."""
        self._count["count"] = self._count["count"] + 1
        return self._guarded.apply_gradients(gradients, parameters)

    @property
    def state(self) -> list[Any]:
        """The state that compiled functions have to capture."""
        if self.owner() is None:
            # Keep the counts for the report.
            self._guarded, self._prepared = None, []
        return [self._count, self._guarded.state if self._guarded else {}]

    def n_steps(self) -> tuple[int, int]:
        """Return the numbers of applied and skipped steps."""
        skipped: Any = self._scaler.skipped_steps.item()
        total: Any = self._count["count"].item()
        return total - skipped, skipped


class _LeaveTrace(BaseException):
    """Raised to abort a trace that lacks state."""


def leave_trace_unless(is_known: bool, context: Any) -> None:
    """Abort a trace if state is missing or is not captured by the trace."""
    if is_known and all(trace.context is context for trace in thread.traces):
        return
    for trace in thread.traces:
        trace.list_state(context)
    if thread.traces:
        raise _LeaveTrace


class Compiled:
    """A function compiled by a trainer; the replaced ``mx.compile`` returns it."""

    def __init__(
        self,
        compile_fn: Callable[..., Callable[..., Any]],
        function: Callable[..., Any],
        inputs: Any = None,
        outputs: Any = None,
        shapeless: bool = False,
    ):
        self.context: Any = None
        self._function = function
        self._captured = [[] if x is None else x for x in (inputs, outputs)]
        self._compile: Callable[..., Callable[..., Any]] = lambda inputs, outputs: (
            compile_fn(function, inputs, outputs, shapeless)
        )
        self._plain = self._compiled = self._compile(inputs, outputs)
        update_wrapper(self, function)

    def list_state(self, context: Any) -> None:
        """Recompile the function with the state of ``everywhere()`` as well."""
        if self.context is not context:
            self.context = context
            captured = [[each, context.state] for each in self._captured]
            self._compiled = self._compile(*captured)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled function, or the original if its trace was aborted."""
        if current() is None:
            return self._plain(*args, **kwargs)
        undo = remember(self._captured, self.context.state if self.context else [])
        thread.traces.append(self)
        try:
            result = self._compiled(*args, **kwargs)
        except BaseException as error:
            undo()
            if not isinstance(error, _LeaveTrace) or len(thread.traces) > 1:
                raise
            is_traced = False
        else:
            is_traced = True
        finally:
            thread.traces.pop()
        # MLX could not reuse the memory of the old arrays that it references.
        del undo
        if not is_traced:
            return self._function(*args, **kwargs)
        if self.context is not None:
            self.context.after_call(self.context.state)
        return result
