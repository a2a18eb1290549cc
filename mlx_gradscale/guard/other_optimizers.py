"""Step optimizers that are not MLX's own, whatever they keep in their state.

A step is skipped by a select on the device, so all that a step changes must be an array
that is there before it. Two steps on zeros, thrown away, show what is not:

- Python numbers that change in every step become 0-d arrays.
- What only the first step does, namely adding keys or changing a Python value once, is
  computed beside what later steps do, and a flag in the state selects.
- An optimizer inside that these steps do not touch is left alone.

What else changes is refused.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.optimizers import Optimizer
from mlx.utils import tree_map, tree_map_with_path

from ..state_tree import CONTAINERS, copies, dotted, items, restore
from .mlx_optimizers import NOT_SETTINGS, drop_schedules

# In the state of a parameter: whether its first step was applied.
STARTED = "has_started"
_PLAN = "_guarded_plan"
_OF_THE_BASE = (*NOT_SETTINGS, _PLAN)


@dataclass
class _Plan:
    structure: dict[tuple[Any, ...], str] = field(
        default_factory=dict
    )  # when it was made
    parameters: set[tuple[Any, ...]] = field(default_factory=set)
    numbers: set[tuple[Any, ...]] = field(default_factory=set)
    # What the first step finds otherwise than later ones: (value,), None for no key.
    first: dict[tuple[Any, ...], tuple[Any, ...] | None] = field(default_factory=dict)

    def owner(self, path: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the parameter that a path in the state belongs to, () for none."""
        starts = (path[:n] for n in range(len(path), 0, -1))
        return next((p for p in starts if p in self.parameters), ())


def prepare(optimizer: Optimizer, parameters: Any) -> None:
    """Bring the state of an initialised optimizer into a form that can be selected.

    Again only where the state looks otherwise than the last time.

    Args:
        optimizer (Optimizer): An optimizer of another's.
        parameters (Any): The tree that is to be stepped, in float32.
    """
    plan, state = vars(optimizer).get(_PLAN, _Plan()), optimizer.state
    paths = {path for path, _ in _leaves(parameters)}
    if plan.structure == _structure(state) and paths <= plan.parameters:
        return
    start, one, two, added = _trial(optimizer, parameters)
    # A copy, because it counts only when all is done.
    plan = deepcopy(plan)
    plan.parameters |= paths
    for path in two.keys() - one.keys():
        raise TypeError(
            f"{type(optimizer).__name__} added {dotted(path)} to its state in its "
            "second step, which a skipped step cannot take back. Make it in "
            "init_single."
        )
    for path, x in two.items():
        if isinstance(x, (int, float)) and path in one and _differ(x, one[path]):
            plan.numbers.add(path)
    for path in added:
        plan.first[path] = None
    once = {p for p in start.keys() & one.keys() if _differ(start[p], one[p])}
    for path in once - plan.numbers:
        plan.first[path] = (start[path],)
    owners = {plan.owner(path) for path in plan.first}
    for path in once & plan.numbers:
        if plan.owner(path) in owners:
            plan.first[path] = (start[path],)
    here = dict(_leaves(state))
    for path in plan.first.keys() & (start.keys() | added.keys()):
        _add_flag(optimizer, plan, path, here)
    for path, tree in added.items():
        if not any(p[: len(path)] == path for p in here):
            _put(state, path, tree_map(_placeholder, tree))
    for path in once & plan.first.keys() - plan.numbers:
        _put(state, path, one[path])
    _promote(state, plan.numbers)
    plan.structure = _structure(state)
    setattr(optimizer, _PLAN, plan)


def apply(optimizer: Optimizer, gradients: Any, parameters: Any) -> Any:
    """Return ``optimizer.apply_gradients``, with the same paths in the state after it.

    Args:
        optimizer (Optimizer): An optimizer that was prepared.
        gradients (Any): The gradients.
        parameters (Any): The parameters, at least those of the gradients.
    """
    plan: _Plan = vars(optimizer)[_PLAN]
    stepped = {path for path, _ in _leaves(gradients)}
    first = {
        path: x
        for path, x in plan.first.items()
        if plan.owner(path) in stepped or plan.owner(path) == ()
    }
    saved = list(copies(optimizer.state))
    flags = {
        plan.owner(path): _at(optimizer.state, plan.owner(path))[STARTED]
        for path in first
    }
    later = _step(optimizer, plan, gradients, parameters)
    if not first:
        return later
    later_state = dict(_leaves(optimizer.state))
    restore(saved)
    for path, x in first.items():
        box, key = _at(optimizer.state, path[:-1]), path[-1]
        if x is None:
            del box[key]
        else:
            box[key] = x[0]
    begun = _step(optimizer, plan, gradients, parameters)
    begun_state = dict(_leaves(optimizer.state))
    restore(saved)
    if begun_state.keys() != later_state.keys():
        path = next(iter(begun_state.keys() ^ later_state.keys()))
        raise TypeError(
            f"{type(optimizer).__name__} keeps {dotted(path)} in its state after some "
            "steps only. Make it in init_single."
        )
    for path, x in later_state.items():
        flag = flags.get(plan.owner(path), flags.get(()))
        if flag is not None and isinstance(x, mx.array):
            _put(optimizer.state, path, mx.where(flag, x, begun_state[path]))
        elif isinstance(x, mx.array):
            _put(optimizer.state, path, x)
    for owner in flags:
        _at(optimizer.state, owner)[STARTED] = mx.array(True)
    by_name = {dotted(owner): flag for owner, flag in flags.items()}

    def select(path: str, x: mx.array, y: mx.array) -> mx.array:
        flag = by_name.get(repr(path), flags.get(()))
        return x if flag is None else mx.where(flag, x, y)

    return tree_map_with_path(select, later, begun)


def _step(optimizer: Optimizer, plan: _Plan, gradients: Any, parameters: Any) -> Any:
    # Other objects of the same arrays, because x += 1 changes the one that it is given:
    # a first and a later step both start from here.
    state = optimizer.state
    for path, x in list(_leaves(state)):
        if isinstance(x, mx.array):
            _put(state, path, mx.array(x))
    try:
        new = optimizer.apply_gradients(gradients, tree_map(mx.array, parameters))
    except ValueError as error:
        if plan.numbers and "Attempting to eval an array" in str(error):
            raise TypeError(
                f"{type(optimizer).__name__} decides in Python by a number in its "
                f"state, such as {dotted(min(plan.numbers, key=str))}, and inside "
                "mx.compile there is none to read. Leave its step uncompiled."
            ) from error
        raise
    _promote(optimizer.state, plan.numbers)
    for path, x in _leaves(optimizer.state):
        if not isinstance(x, mx.array) and plan.structure.get(path) != repr(x):
            raise TypeError(
                f"{type(optimizer).__name__} changed {dotted(path)} in its state to "
                f"{x!r} in a step, which a skipped step cannot take back. Keep it as "
                "an mx.array, made in init_single."
            )
    return new


def _trial(optimizer: Optimizer, parameters: Any) -> tuple[Any, ...]:
    """Return a fresh state and those after two steps, by path, and what came new.

    No array is computed, and the optimizer comes out as it was.
    """
    inner = list(_hidden_optimizers(optimizer))
    everyone = [optimizer, *(x for _, x in inner)]
    saved = [pair for x in everyone for pair in copies(x.state)]
    attributes = [(x, dict(vars(x))) for x in everyone]
    before = [_identities(x.state) for _, x in inner]
    key = _random_key()
    seen: list[dict[Any, Any]] = []
    added: dict[tuple[Any, ...], Any] = {}
    touched = [True] * len(inner)
    try:
        for name in list(parameters):
            optimizer.state.pop(name, None)
        drop_schedules(optimizer)
        optimizer.init(parameters)
        seen.append(dict(_leaves(optimizer.state)))
        for step in range(2):
            zeros = tree_map(mx.zeros_like, parameters)
            optimizer.apply_gradients(zeros, tree_map(mx.array, parameters))
            seen.append(dict(_leaves(optimizer.state)))
            if step == 0:
                added = _new_parts(optimizer.state, *seen)
        touched = [
            _identities(x.state) != old
            for (_, x), old in zip(inner, before, strict=True)
        ]
    except Exception:
        # It cannot step on zeros. What its real steps do is checked one by one.
        seen, added = [{}, {}, {}], {}
    finally:
        changed = [_changed_attribute(x, old) for x, old in attributes]
        for x, old in attributes:
            vars(x).clear()
            vars(x).update(old)
        restore(saved)
        if key is not None:
            mx.random.seed(key)
    name = type(optimizer).__name__
    for (attribute, _), is_touched in zip(inner, touched, strict=True):
        if is_touched:
            raise TypeError(
                f"{name}.{attribute} is an optimizer whose state is not in the state "
                f"of {name}, so that a skipped step could not take it back. Put it "
                "there, or use a MultiOptimizer."
            )
    for attribute in filter(None, changed):
        raise TypeError(
            f"{name} changes its attribute {attribute} in a step, which a skipped step "
            "cannot take back: keep it in its state, as an mx.array."
        )
    return *seen, added


def _new_parts(
    state: Any, start: dict[Any, Any], one: dict[Any, Any]
) -> dict[tuple[Any, ...], Any]:
    # The outermost new keys: a whole dict may be new.
    known = {path[:n] for path in start for n in range(len(path) + 1)}
    parts = {}
    for path in one.keys() - start.keys():
        n = next(n for n in range(1, len(path) + 1) if path[:n] not in known)
        parts[path[:n]] = tree_map(lambda x: x, _at(state, path[:n]))
    return parts


def _add_flag(
    optimizer: Optimizer, plan: _Plan, path: tuple[Any, ...], here: dict[Any, Any]
) -> None:
    box = _at(optimizer.state, plan.owner(path))
    if not isinstance(box, dict):
        raise TypeError(
            f"{type(optimizer).__name__} changes {dotted(path)} of its state in the "
            "first step, in a list: use a dict."
        )
    if STARTED in box:
        return
    # It may have stepped before, without us.
    mine = [p for p in plan.first if plan.owner(p) == plan.owner(path)]
    box[STARTED] = mx.array(any(_has_stepped(here, p, plan.first[p]) for p in mine))


def _has_stepped(
    here: dict[Any, Any], path: tuple[Any, ...], first: tuple[Any, ...] | None
) -> bool:
    if first is None:
        return any(other[: len(path)] == path for other in here)
    return path in here and _differ(here[path], first[0])


def _hidden_optimizers(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    held = {id(box) for box, _ in copies(optimizer.state)}
    for attribute, value in vars(optimizer).items():
        for x in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(x, Optimizer) and id(x.state) not in held:
                yield attribute, x


def _changed_attribute(optimizer: Optimizer, before: dict[str, Any]) -> str | None:
    for name, x in vars(optimizer).items():
        old = before.get(name)
        if name in _OF_THE_BASE or x is old:
            continue
        if isinstance(x, mx.array) or (isinstance(x, (int, float)) and _differ(x, old)):
            return name
    return None


def _random_key() -> int | None:
    try:
        state: Any = mx.random.state
        high, low = map(int, state[0].tolist())
    except (RuntimeError, ValueError):
        # Inside of mx.compile: steps draw other numbers there, as good as these.
        return None
    return high << 32 | low


def _promote(state: Any, numbers: set[tuple[Any, ...]]) -> None:
    for path, x in list(_leaves(state)):
        if path in numbers and not isinstance(x, mx.array):
            _put(state, path, mx.array(x))


def _placeholder(x: Any) -> Any:
    return mx.zeros_like(x) if isinstance(x, mx.array) else x


def _leaves(
    tree: Any, path: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for key, value in items(tree):
        if isinstance(value, CONTAINERS):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _structure(state: Any) -> dict[tuple[Any, ...], str]:
    # By repr, because True, 1 and 1.0 are equal, and NaN is not.
    return {
        path: "array" if isinstance(x, mx.array) else repr(x)
        for path, x in _leaves(state)
    }


def _identities(state: Any) -> dict[tuple[Any, ...], int]:
    return {path: id(x) for path, x in _leaves(state)}


def _differ(x: Any, y: Any) -> bool:
    if isinstance(x, mx.array) or isinstance(y, mx.array):
        return False
    return repr(x) != repr(y)


def _at(state: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        state = state[key]
    return state


def _put(state: Any, path: tuple[Any, ...], value: Any) -> None:
    box = _at(state, path[:-1])
    if isinstance(box, tuple):
        raise TypeError(
            f"A step changes {dotted(path)} of the optimizer's state, in a tuple, "
            "which cannot be written to: use a list or a dict."
        )
    box[path[-1]] = value
