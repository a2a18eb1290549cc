"""What ``everywhere()`` keeps of a trainer: gradients, optimizers, compiled functions.

What a first gradient or step creates must not be created in a trace. So a trace in
which something is missing is left, and that one call runs as plain Python.
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
        #: Computes a gradient or takes a step of ours: what is called is MLX's own.
        self.is_busy = False
        self.traces: list[Compiled] = []


thread = _Thread()
#: Every ``Everywhere`` that is entered; the last one counts.
entered: list[Any] = []


def current() -> Any:
    """Return the ``Everywhere`` that is in force, or None."""
    return entered[-1] if entered and not thread.is_busy else None


@contextmanager
def busy() -> Iterator[None]:
    """Call MLX's own functions in this thread."""
    before, thread.is_busy = thread.is_busy, True
    try:
        yield
    finally:
        thread.is_busy = before


class Gradients:
    """The scaler of one model, and how many gradients were computed with it."""

    def __init__(self, owner: Any, scaler: GradScaler):
        self.owner = weakref.ref(owner)
        self.scaler = scaler
        self.watch = SkipWatch()
        self.state: dict[str, Any] = {"scaler": scaler.state, "count": mx.array(0)}

    def count(self, gradients: Any) -> None:
        """Move the scale by whether the gradients are finite."""
        finite, state = all_finite(gradients), self.scaler.state
        state.update(count_step(state, finite))
        state.update(next_scale(state, finite))
        self.state["count"] = self.state["count"] + 1

    def report(self) -> str:
        """Return a line about the scale."""
        scale, bad = self.scaler.get_scale(), self.scaler.skipped_steps.item()
        count = self.state["count"].item()
        return f"loss scale {scale:g}, {bad} of {count} gradients overflowed"


class Steps:
    """The guard of one optimizer, and how many steps were taken with it."""

    def __init__(self, optimizer: Optimizer, arguments: dict[str, Any]):
        self.owner = weakref.ref(optimizer)
        self.name = type(optimizer).__name__
        # A twin with the same attributes: nothing of ours keeps the trainer's alive.
        twin = object.__new__(type(optimizer))
        twin.__dict__ = vars(optimizer)
        self._guarded: Any = GuardedOptimizer(twin, **arguments)
        self._scaler: GradScaler = self._guarded.scaler
        self._count = {"count": mx.array(0)}
        self._prepared: list[Any] = []
        self._paths: set[str] = set()

    def is_ready(self, parameters: Any) -> bool:
        """Return whether there is state for these, and the trainer has not moved it."""
        is_same = list(map(id, self._states())) == list(map(id, self._prepared))
        return is_same and self._paths.issuperset(dict(flatten(parameters)))

    def prepare(self, parameters: Any) -> None:
        """Create what steps with these parameters need, and keep what there is."""
        self._guarded.init(parameters)
        self._prepared = self._states()
        self._paths.update(dict(flatten(parameters)))

    def _states(self) -> list[Any]:
        return [part.state for part in single_optimizers(self._guarded.optimizer)]

    def take(self, gradients: Any, parameters: Any) -> Any:
        """Return the new parameters, or the old ones, and count the step."""
        self._count["count"] = self._count["count"] + 1
        return self._guarded.apply_gradients(gradients, parameters)

    @property
    def state(self) -> list[Any]:
        """What compiled functions have to list."""
        if self.owner() is None:
            # The counts stay, for the report.
            self._guarded, self._prepared = None, []
        return [self._count, self._guarded.state if self._guarded else {}]

    def n_steps(self) -> tuple[int, int]:
        """Return how many steps were applied, and how many skipped."""
        skipped: Any = self._scaler.skipped_steps.item()
        total: Any = self._count["count"].item()
        return total - skipped, skipped


class _LeaveTrace(BaseException):
    """Something is missing in a trace."""


def leave_trace_unless(is_known: bool, context: Any) -> None:
    """Leave a trace in which something is not known, or our state is not listed."""
    if is_known and all(trace.context is context for trace in thread.traces):
        return
    for trace in thread.traces:
        trace.list_state(context)
    if thread.traces:
        raise _LeaveTrace


class Compiled:
    """A function that a trainer compiled: what replaces ``mx.compile`` returns it."""

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
            captured = [[each, context.state] for each in self._captured]
            self._compiled = self._compile(*captured)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled function, or the function if its trace was left."""
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
        # Old arrays that it holds could not be reused in the evaluation.
        del undo
        if not is_traced:
            return self._function(*args, **kwargs)
        if self.context is not None:
            self.context.after_call(self.context.state)
        return result
