"""Where the arrays of an optimizer's state are, and how to put it back as it was."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import starmap
from operator import methodcaller, setitem
from typing import Any

import mlx.core as mx

CONTAINERS = (dict, list, tuple)
# Where an array is: its path, its container, and the key in that.
Slot = tuple[tuple[Any, ...], Any, Any]
# What a step writes: (container, key, value) for each.
Writes = list[tuple[Any, Any, Any]]


def items(tree: Any) -> Any:
    """Yield (key, value) of a dict, or (index, value) of a list or tuple."""
    return tree.items() if isinstance(tree, dict) else enumerate(tree)


# The functions below walk with a function of their own each: one inside another that
# calls itself is a cycle, which would keep gradients alive until it is collected.


def slots(state: Any) -> list[Slot]:
    """Return (path, container, key) for every array in an optimizer's state."""
    found: list[Slot] = []
    _collect_slots(state, (), found)
    return found


def _collect_slots(box: Any, path: tuple[Any, ...], found: list[Slot]) -> None:
    for key, value in box.items() if isinstance(box, dict) else enumerate(box):
        if isinstance(value, mx.array):
            found.append(((*path, key), box, key))
        elif isinstance(value, CONTAINERS):
            _collect_slots(value, (*path, key), found)


def flatten(tree: Any) -> list[tuple[str, Any]]:
    """Return what ``tree_flatten`` of MLX does, with a call only for each container."""
    if not isinstance(tree, CONTAINERS):
        return [("", tree)]
    found: list[tuple[str, Any]] = []
    _collect_items(tree, "", found)
    return found


def _collect_items(box: Any, prefix: str, found: list[tuple[str, Any]]) -> None:
    for key, value in box.items() if isinstance(box, dict) else enumerate(box):
        if type(value) is not mx.array and isinstance(value, CONTAINERS):
            _collect_items(value, f"{prefix}{key}.", found)
        else:
            found.append((f"{prefix}{key}", value))


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of a tree without their paths, in a quarter of the time."""
    if not isinstance(tree, CONTAINERS):
        return [tree]
    found: list[Any] = []
    _collect_leaves(tree, found)
    return found


def _collect_leaves(box: Any, found: list[Any]) -> None:
    for value in box.values() if isinstance(box, dict) else box:
        if type(value) is not mx.array and isinstance(value, CONTAINERS):
            _collect_leaves(value, found)
        else:
            found.append(value)


def write_all(writes: Iterable[tuple[Any, Any, Any]]) -> None:
    """Write each (container, key, value), all of them or, interrupted, none.

    No bytecode of Python runs in between, so that no Ctrl-C comes in between either:
    a state that is ahead of its weights would train on wrongly.
    """
    writing(list(writes))()


def writing(writes: Writes) -> Callable[[], Any]:
    """Return a function that does, once, what :func:`write_all` would.

    It writes what is in the list by then. In a ``finally`` no Ctrl-C comes until all
    is written: no bytecode of Python runs before it, either.
    """
    return partial(deque, starmap(setitem, writes), 0)


def copies(state: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container of a state with a copy of what it holds."""
    if isinstance(state, (dict, list)):
        yield state, dict(state) if isinstance(state, dict) else list(state)
    for _, value in items(state):
        if isinstance(value, CONTAINERS):
            yield from copies(value)


def restoring(saved: Iterable[tuple[Any, Any]]) -> list[Callable[[], Any]]:
    """Return calls, for :func:`at_once`, that put back what :func:`copies` found."""
    calls: list[Callable[[], Any]] = []
    for container, copy in saved:
        if isinstance(copy, dict):
            # The dict's own: a model's update() is another thing.
            calls.append(partial(dict.clear, container))
            calls.append(partial(dict.update, container, copy))
        else:
            calls.append(partial(setitem, container, slice(None), copy))
    return calls


def at_once(calls: list[Callable[[], Any]]) -> Callable[[], Any]:
    """Return a function that makes those calls of C that are then in the list, once.

    For a ``finally``, as :func:`writing`.
    """
    return partial(deque, map(methodcaller("__call__"), calls), 0)


def restore(saved: Iterable[tuple[Any, Any]]) -> None:
    """Put back what :func:`copies` found, all of it at once."""
    at_once(restoring(saved))()


def dotted(path: tuple[Any, ...]) -> str:
    """Return a path as it is shown in errors."""
    return repr(".".join(map(str, path)))
