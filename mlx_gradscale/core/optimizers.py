"""Initialize, advance and compile MLX's optimizers.

No other file in the core uses private attributes of the optimizers that it steps. If
MLX renames one, tests/core/test_structure.py fails.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import mlx.core as mx
import numpy as np
from mlx.optimizers import MultiOptimizer, Optimizer
from mlx.utils import tree_map

from .masters import Storage, to_float32
from .trees import CONTAINERS, get_at, is_floating, slots, walk

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
    """Return whether this is a ``MasterWeightOptimizer``, or of a subclass."""
    return hasattr(type(optimizer), "_participant")


def is_builtin(optimizer: Optimizer) -> bool:
    """Return whether an optimizer, or every one in a ``MultiOptimizer``, is MLX's own.

    MLX's own optimizers read only their settings and state, so they can be compiled.
    """
    for part in single_optimizers(optimizer):
        if not type(part).__module__.startswith("mlx.optimizers"):
            return False
    return True


def single_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizer, or all in a ``MultiOptimizer``, in a list."""
    if not isinstance(optimizer, MultiOptimizer):
        return [optimizer]
    return [x for part in optimizer.optimizers for x in single_optimizers(part)]


def split(optimizer: Optimizer, tree: Any) -> Iterator[tuple[Optimizer, Any]]:
    """Yield each single optimizer with the part of a tree that it updates."""
    if isinstance(optimizer, MultiOptimizer):
        trees = optimizer._split_dictionary(tree)
        for inner, part in zip(optimizer.optimizers, trees, strict=True):
            yield from split(inner, part)
    else:
        yield optimizer, tree


def needs_init(optimizer: Optimizer) -> bool:
    """Return whether an optimizer, or one in a ``MultiOptimizer``, is uninitialized."""
    return any(not part._initialized for part in single_optimizers(optimizer))


def initialize(optimizer: Optimizer, parameters: Any, storage: Storage) -> None:
    """Create state for parameters that have none, and store all of it in ``storage``.

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
        for where, box, key in slots(part.state):
            if isinstance(box, tuple):
                path = ".".join(map(str, where))
                raise TypeError(
                    f"{type(part).__name__} stores {path!r} in a tuple, "
                    "which cannot be updated. Use a list or a dict in its state."
                )
            box[key] = to_float32(box[key])
        for (where, _, _), parameter in walk(tree):
            moments = get_at(where, part.state)
            if is_floating(parameter) and isinstance(moments, dict):
                moments.update(storage.encode(part, parameter.shape, moments).moments)


def scheduled_values(optimizer: Optimizer) -> dict[str, mx.array]:
    """Return this step's scheduled values, such as the learning rate.

    They are computed outside the compiled function, because a schedule is Python code
    and may depend on anything.
    """
    schedules = optimizer._schedulers.items()
    return {name: mx.array(schedule(optimizer.step)) for name, schedule in schedules}


def own_values(optimizer: Optimizer) -> dict[str, Any]:
    """Return the part of an optimizer's state that belongs to no parameter."""
    state = optimizer.state.items()
    return {key: x for key, x in state if not isinstance(x, CONTAINERS)}


@contextmanager
def advance(optimizer: Optimizer, values: dict[str, Any]) -> Iterator[None]:
    """Give an optimizer other values, and the next step count, within a block.

    Its own state does not change. ``Optimizer.apply_gradients`` does the same for good,
    before it calls ``apply_single`` for each parameter.
    """
    own = optimizer._state
    optimizer._state = own | values | {"step": values["step"] + 1}
    try:
        yield
    finally:
        optimizer._state = own


def overrides_apply_gradients(optimizer: Optimizer) -> bool:
    """Return whether a step of this optimizer is more than ``apply_single`` calls."""
    method = getattr(optimizer.apply_gradients, "__func__", None)
    return method is not Optimizer.apply_gradients


# The settings of the last step of each optimizer, whether they differed from those of
# the step before, and the function compiled for them.
_last_steps: WeakKeyDictionary[Optimizer, tuple[Any, bool, Any]] = WeakKeyDictionary()


def autocompiled(
    run: Callable[..., Any], optimizer: Optimizer, structure: Any
) -> Callable[..., Any]:
    """Return ``run`` for one of MLX's optimizers, compiled if its settings allow it.

    The function is compiled from the first step on: a compiled step may round
    differently, and a resumed run must be bit-identical to an uninterrupted one. It is
    not compiled if a setting is not a plain value, or while settings change at every
    step, because compiling takes longer than a step. It is compiled again if the
    optimizer's settings or ``structure`` change.
    """
    settings = fingerprint(optimizer, structure)
    if settings is None:
        return partial(run, optimizer)
    old, was_changed, compiled = _last_steps.get(optimizer, (None, False, None))
    is_changed = settings != old
    if is_changed or compiled is None:
        compiled = None
        if not (is_changed and was_changed):
            # Weak, because the cache must not keep the optimizer alive.
            owner = ref(optimizer)
            compiled = mx.compile(lambda *inputs: run(owner(), *inputs))
    _last_steps[optimizer] = settings, is_changed, compiled
    return compiled or partial(run, optimizer)


def fingerprint(optimizer: Optimizer, structure: Any) -> Any:
    """Return the settings that a trace depends on, or None if one is not plain."""
    settings: list[Any] = [structure]
    for part in single_optimizers(optimizer):
        own = dict(vars(part))
        for name in _NOT_SETTINGS:
            own.pop(name, None)
        if not all(map(_is_plain, own.values())):
            return None
        # Compare by repr, because True, 1 and 1.0 are equal.
        settings.append((type(part), repr(own)))
    return settings


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
