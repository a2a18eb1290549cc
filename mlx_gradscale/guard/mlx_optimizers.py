"""What MLX's optimizers keep under private names: no other file knows these."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.optimizers import MultiOptimizer, Optimizer

#: Attributes of every optimizer that are no settings.
NOT_SETTINGS = ("_state", "_initialized", "_schedulers")


def is_mlx_own(optimizer: Optimizer) -> bool:
    """Tell whether MLX wrote this class: all that it remembers is arrays, from init."""
    return type(optimizer).__module__ == Optimizer.__module__


def is_initialized(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer, or each in it, has made its state."""
    if isinstance(optimizer, MultiOptimizer):
        return all(map(is_initialized, optimizer.optimizers))
    return bool(optimizer._initialized)


def is_emptied(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer has lost its state since it was initialised.

    As where a trace that raised was undone, in which it had been initialised.
    """
    return all(
        part._initialized
        and part.state.keys() <= {"step", "learning_rate", *part._schedulers}
        for part in single_optimizers(optimizer)
    )


def schedules(optimizer: Optimizer) -> dict[str, Callable[[mx.array], Any]]:
    """Return what an optimizer computes from the step count, by name."""
    found: dict[str, Callable[[mx.array], Any]] = optimizer._schedulers
    return found


def drop_schedules(optimizer: Optimizer) -> None:
    """Let an optimizer step with the values that are in its state."""
    optimizer._schedulers = {}


def single_optimizers(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizer, or each one in a ``MultiOptimizer``."""
    if isinstance(optimizer, MultiOptimizer):
        for part in optimizer.optimizers:
            yield from single_optimizers(part)
    else:
        yield optimizer


def parts(optimizer: Optimizer, tree: Any) -> Iterator[tuple[Optimizer, Any]]:
    """Yield each single optimizer with the part of a tree that it steps."""
    if isinstance(optimizer, MultiOptimizer):
        trees = optimizer._split_dictionary(tree)
        for inner, part in zip(optimizer.optimizers, trees, strict=True):
            # Before MLX 0.32 a part without leaves is a list.
            yield from parts(inner, part or {})
    else:
        yield optimizer, tree


def set_scheduled(
    optimizers: Iterable[Optimizer], values: Iterable[dict[str, mx.array]]
) -> None:
    """Have single optimizers step with these values instead of their schedules.

    Args:
        optimizers (list): Single optimizers.
        values (list): For each, the scheduled values by name.
    """
    for each, scheduled in zip(optimizers, values, strict=True):
        each._schedulers = {k: _constant(x) for k, x in scheduled.items()}


def restoring_insides(optimizer: Optimizer) -> list[Callable[[], Any]]:
    """Return calls, for ``at_once``, that give an optimizer its schedules back.

    And the dict that is its state now, whatever a step puts in its place.
    """
    return [
        partial(setattr, optimizer, "_state", optimizer._state),
        partial(setattr, optimizer, "_schedulers", optimizer._schedulers),
    ]


def _constant(value: mx.array) -> Callable[[mx.array], mx.array]:
    return lambda step: value
