"""Initialize, compile and roll back MLX's optimizers.

No other file in the core uses private attributes of the optimizers that it steps. If
MLX renames one, tests/core/test_structure.py fails.
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.optimizers import MultiOptimizer, Optimizer
from mlx.utils import tree_map

from .masters import HALF, to_float32
from .trees import flatten, is_floating, restore, slots, snapshot

# Attributes of every optimizer that are not settings.
_NOT_SETTINGS = ("_state", "_initialized", "_schedulers")
_PLAIN = (type(None), bool, int, float, str, mx.Dtype, np.generic)


def check_supported(optimizer: Any) -> None:
    """Raise if ``optimizer`` is not an optimizer whose steps can be skipped."""
    kind = type(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"Expected an mlx.optimizers.Optimizer, got {optimizer!r}.")
    if is_wrapper(optimizer):
        raise TypeError(
            f"A {kind.__name__} cannot be wrapped, or be part of a MultiOptimizer. "
            f"Wrap the MultiOptimizer: {kind.__name__}(MultiOptimizer([...]))."
        )
    bypassed: dict[str, Any] = {"update": Optimizer.update}
    instead = "apply_gradients()"
    if isinstance(optimizer, MultiOptimizer):
        bypassed["apply_gradients"] = MultiOptimizer.apply_gradients
        instead = "apply_gradients() of its inner optimizers"
        for part in optimizer.optimizers:
            check_supported(part)
    for name, method in bypassed.items():
        if getattr(kind, name) is not method or name in vars(optimizer):
            raise TypeError(
                f"{kind.__name__} overrides {name}(), which mlx_gradscale does not "
                f"call. Implement the step in {instead} instead."
            )


def is_wrapper(optimizer: Any) -> bool:
    """Return whether an optimizer is a ``LossScaleOptimizer``."""
    return hasattr(type(optimizer), "_participant")


def refuse_multi_optimizer() -> None:
    """Raise if the function that calls this one was called by a ``MultiOptimizer``."""
    caller = sys._getframe(2).f_locals.get("self")
    if isinstance(caller, MultiOptimizer):
        check_supported(caller)  # raises, because a wrapper is part of it


def is_builtin(optimizer: Optimizer) -> bool:
    """Return whether an optimizer, or every one in a ``MultiOptimizer``, is MLX's own.

    MLX's own optimizers read only their settings and state, so they can be compiled.
    """
    for part in single_optimizers(optimizer):
        if not type(part).__module__.startswith("mlx.optimizers"):
            return False
    return True


def single_optimizers(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizer, or each one in a ``MultiOptimizer``."""
    if isinstance(optimizer, MultiOptimizer):
        for part in optimizer.optimizers:
            yield from single_optimizers(part)
    else:
        yield optimizer


def split(optimizer: Optimizer, tree: Any) -> Iterator[tuple[Optimizer, Any]]:
    """Yield each single optimizer with the part of a tree that it updates."""
    if isinstance(optimizer, MultiOptimizer):
        trees = optimizer._split_dictionary(tree)
        for inner, part in zip(optimizer.optimizers, trees, strict=True):
            yield from split(inner, part)
    else:
        yield optimizer, tree


def split_paths(optimizer: Optimizer, tree: Any) -> list[list[str]]:
    """List the paths that each part of a ``MultiOptimizer`` updates; [] for others."""
    if not isinstance(optimizer, MultiOptimizer):
        return []
    return [[path for path, _ in flatten(part)] for _, part in split(optimizer, tree)]


def needs_init(optimizer: Optimizer) -> bool:
    """Return whether an optimizer, or one in a ``MultiOptimizer``, is uninitialized."""
    return not all(part._initialized for part in single_optimizers(optimizer))


def initialize(
    optimizer: Optimizer, parameters: Any, moments: mx.Dtype = mx.float32
) -> None:
    """Create state for parameters that have none, and cast existing state.

    Arrays of their parameter's own shape are stored in ``moments``, others in float32.

    MLX initializes state in the dtype of the parameters. In float16, Adam's second
    moment would stay zero after a step with a gradient below 5e-3.
    """
    for part, tree in split(optimizer, parameters):
        if "step" not in part.state:
            part.state["step"] = mx.array(0, mx.uint64)
        part.init(tree_map(lambda p: to_float32(p) if is_floating(p) else {}, tree))
        for name in part._schedulers:
            # A schedule may return a Python number.
            part.state[name] = mx.array(part.state[name])
        shapes = {path: x.shape for path, x in flatten(tree)}
        for where, box, key in slots(part.state):
            path = [str(each) for each in where]
            if isinstance(box, tuple):
                raise TypeError(
                    f"{type(part).__name__} stores {'.'.join(path)!r} in a tuple, "
                    "which cannot be updated. Use a list or a dict in its state."
                )
            # The moment "layers.0.bias.m" belongs to the parameter "layers.0.bias".
            is_own = shapes.get(".".join(path[:-1])) == box[key].shape
            dtype = moments if is_own else mx.float32
            if box[key].dtype != dtype and box[key].dtype in (*HALF, mx.float32):
                box[key] = box[key].astype(dtype)


def scheduled_values(optimizer: Optimizer) -> list[dict[str, mx.array]]:
    """Return this step's scheduled values, such as learning rates, per optimizer.

    They are computed outside the compiled function, because a schedule is Python code
    and may depend on anything.
    """
    return [
        {k: mx.array(schedule(part.step)) for k, schedule in part._schedulers.items()}
        for part in single_optimizers(optimizer)
    ]


@contextmanager
def roll_back(
    optimizer: Optimizer, scheduled: list[dict[str, mx.array]]
) -> Iterator[None]:
    """Let an optimizer step with these scheduled values; roll it back on exit."""
    singles = list(single_optimizers(optimizer))
    private = [(part, part._state, part._schedulers) for part in singles]
    saved = snapshot(*(part.state for part in singles))
    try:
        for part, values in zip(singles, scheduled, strict=True):
            part._schedulers = {k: lambda _, x=x: x for k, x in values.items()}
        yield
    finally:
        # A step may have replaced the state dict itself, or containers in it.
        for part, state, schedulers in private:
            part._state, part._schedulers = state, schedulers
        restore(saved)


class _LastStep(NamedTuple):
    """The settings of an optimizer's last step, and the function compiled for them."""

    settings: Any
    # True if they differ from the previous step's, or this is the first step.
    is_changed: bool
    compiled: Callable[..., Any] | None
    # Weak: nothing here may keep an optimizer, or a model in its closures, alive.
    optimizer: Any


# By the id of the optimizer, because one that defines equality is unhashable.
_last_steps: dict[int, _LastStep] = {}


def autocompiled(
    make_run: Callable[[], Callable[..., Any]], optimizer: Optimizer, structure: Any
) -> Callable[..., Any]:
    """Return the function from ``make_run``, compiled if the settings allow it.

    The function is compiled from the first step on: a compiled step may round
    differently, and a resumed run must be bit-identical to an uninterrupted one. It is
    not compiled if a setting is not a plain value, or while settings change at every
    step, because compiling takes longer than a step. It is compiled again if the
    optimizer's settings or ``structure`` change.
    """
    settings = fingerprint(optimizer, structure)
    if settings is None:
        return partial(make_run(), optimizer)
    last = _last_steps.get(id(optimizer))
    is_changed = last is None or last.settings != settings
    compiled = None if last is None or is_changed else last.compiled
    keeps_changing = last is not None and last.is_changed and is_changed
    if compiled is None and not keeps_changing:
        owner, run = weakref.ref(optimizer), make_run()
        compiled = mx.compile(lambda *inputs: run(owner(), *inputs))
    if last is None or last.is_changed or is_changed:
        own = weakref.ref(optimizer, partial(_last_steps.pop, id(optimizer)))
        _last_steps[id(optimizer)] = _LastStep(settings, is_changed, compiled, own)
    return compiled or partial(make_run(), optimizer)


def fingerprint(optimizer: Optimizer, structure: Any) -> Any:
    """Return the settings that a trace depends on, or None if one is not plain."""
    settings: list[Any] = [structure]
    for part in single_optimizers(optimizer):
        own = {k: x for k, x in vars(part).items() if k not in _NOT_SETTINGS}
        if not all(map(_is_plain, own.values())):
            return None
        # Compare by repr, because True, 1 and 1.0 are equal.
        settings.append((type(part), repr(own)))
    return settings


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
