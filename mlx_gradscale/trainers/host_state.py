"""What ``everywhere()`` keeps about each model and each optimizer of a trainer."""

import weakref
from typing import Any

import mlx.core as mx
from mlx.optimizers import Optimizer

from ..core.finite import all_finite
from ..core.optimizer import GuardedOptimizer
from ..core.optimizers import single_optimizers
from ..core.scale import count_step, next_scale
from ..core.scaler import GradScaler, SkipWatch
from ..core.trees import flatten


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
        self._counts = {"applied": mx.array(0), "skipped": mx.array(0)}
        # A twin with the same attributes: nothing of ours keeps the trainer's alive.
        twin = object.__new__(type(optimizer))
        twin.__dict__ = vars(optimizer)
        self._guarded: Any = GuardedOptimizer(twin, **arguments)
        self._prepared: list[Any] = []
        self._paths: set[str] = set()

    def is_ready(self, parameters: Any) -> bool:
        """Return whether there is state for these, and the trainer has not moved it."""
        states = _states(self._guarded.optimizer)
        paths = (path for path, _ in flatten(parameters))
        is_same = list(map(id, states)) == list(map(id, self._prepared))
        return is_same and self._paths.issuperset(paths)

    def prepare(self, parameters: Any) -> None:
        """Create what steps with these parameters need, and keep what there is."""
        self._guarded.init(parameters)
        self._prepared = _states(self._guarded.optimizer)
        self._paths.update(path for path, _ in flatten(parameters))

    def take(self, gradients: Any, parameters: Any) -> Any:
        """Return the new parameters, or the old ones, and count the step."""
        result = self._guarded.apply_gradients(gradients, parameters)
        applied, counts = self._guarded.scaler.last_step_applied, self._counts
        counts["applied"] = counts["applied"] + applied
        counts["skipped"] = counts["skipped"] + mx.logical_not(applied)
        return result

    @property
    def counters(self) -> list[Any]:
        """What a trainer does not evaluate, and would grow from step to step."""
        return [self._counts, self._guarded.scaler.state]

    @property
    def state(self) -> list[Any]:
        """What compiled functions have to list."""
        if self.owner() is None:
            # The counts stay, for the report.
            self._guarded, self._prepared = None, []
        return [self._counts, self._guarded.state if self._guarded else {}]

    def n_steps(self) -> tuple[int, int]:
        """Return how many steps were applied, and how many skipped."""
        counts: Any = mx.stack(list(self._counts.values())).tolist()
        return counts[0], counts[1]


def _states(optimizer: Optimizer) -> list[Any]:
    return [part.state for part in single_optimizers(optimizer)]
