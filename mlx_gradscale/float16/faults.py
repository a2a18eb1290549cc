"""Where a run in half precision leaves the one in float32, and which layer did it."""

import math
from collections.abc import Iterator

from .calls import is_bad
from .measure import Run, Value


def first_bad(
    values: list[Value], references: list[Value], own: str, distance: float
) -> tuple[str | None, str] | None:
    """Return the layer that made the first value that is bad.

    Args:
        values (list): Those in half precision.
        references (list): Those in float32.
        own (str): The side of a layer where what it made comes out: "output", or
            "input" in the backward pass.
        distance (float): How far from its reference a value is bad.
    """
    for value, reference in _pairs(values, references):
        if is_bad(value, reference, distance):
            return _maker(value, own), _how_far(value, reference)
    return None


def largest_jump(
    values: list[Value], references: list[Value], own: str
) -> tuple[str | None, str] | None:
    """Return the layer where the distance jumps most, and what is there in words."""
    most, place, so_far = 4.0, None, 1e-3
    for value, reference in _pairs(values, references):
        if not reference.event.differentiated:
            continue
        distance = value.distance(reference)
        if distance > most * so_far:
            most, place = distance / so_far, (value, reference)
        so_far = max(so_far, distance)
    return (_maker(place[0], own), _how_far(*place)) if place else None


def worst_gradient(half: Run, reference: Run) -> tuple[str, str]:
    """Return the layer whose gradient is furthest off, and which one in words."""

    def off(path: str) -> float:
        value, other = half.gradients[path], reference.gradients[path]
        if not value.is_finite:
            return math.inf
        return float(((value.sums - other.sums) ** 2).sum())

    path = max(half.gradients, key=off)
    what = _how_far(half.gradients[path], reference.gradients[path])
    return path.rpartition(".")[0], f"the gradient of {path}: {what}"


def _pairs(
    values: list[Value], references: list[Value]
) -> Iterator[tuple[Value, Value]]:
    """Yield values with the same place in two runs, in the order of the first."""
    waiting: dict[tuple[str, str], list[Value]] = {}
    for value in references:
        waiting.setdefault((value.event.path, value.event.side), []).append(value)
    for value in values:
        same = waiting.get((value.event.path, value.event.side))
        if same:
            yield value, same.pop(0)


def _maker(value: Value, own: str) -> str | None:
    return value.event.path if value.event.side == own else value.event.caller


def _how_far(value: Value, reference: Value) -> str:
    if not value.is_finite:
        return str(value.event)
    return f"{min(value.distance(reference), 9.99):.0%} away from float32"


def caller_of(reference: Run, path: str) -> str:
    """Return the path of the layer that calls this one."""
    callers = [v.event.caller for v in reference.forward if v.event.path == path]
    caller = callers[0] if callers else path.rpartition(".")[0]
    return caller or ""
