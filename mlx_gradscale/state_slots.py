"""Where the arrays of an optimizer's state are, and how to put it back as it was."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import starmap
from operator import setitem
from typing import Any

import mlx.core as mx

CONTAINERS = (dict, list, tuple)


def items(tree: Any) -> Any:
    """Yield (key, value) of a dict, or (index, value) of a list or tuple."""
    return tree.items() if isinstance(tree, dict) else enumerate(tree)


def slots(state: Any, path: tuple = ()) -> Iterator[tuple[tuple, Any, Any]]:
    """Yield (path, container, key) for every array in an optimizer's state."""
    for key, value in items(state):
        if isinstance(value, mx.array):
            yield (*path, key), state, key
        elif isinstance(value, CONTAINERS):
            yield from slots(value, (*path, key))


def write_all(writes: Iterable[tuple[Any, Any, Any]]) -> None:
    """Write each (container, key, value), all of them or, interrupted, none.

    No bytecode of Python runs in between, so that no Ctrl-C comes in between either:
    a state that is ahead of its weights would train on wrongly.
    """
    deque(starmap(setitem, list(writes)), maxlen=0)


def copies(state: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container of a state with a copy of what it holds."""
    if isinstance(state, (dict, list)):
        yield state, dict(state) if isinstance(state, dict) else list(state)
    for _, value in items(state):
        if isinstance(value, CONTAINERS):
            yield from copies(value)


def restore(saved: list[tuple[Any, Any]]) -> None:
    """Put back what :func:`copies` found."""
    for container, copy in saved:
        if isinstance(copy, dict):
            # The dict's own: a model's update() is another thing.
            dict.clear(container)
            dict.update(container, copy)
        else:
            container[:] = copy


def dotted(path: tuple) -> str:
    """Return a path as it is shown in errors."""
    return repr(".".join(map(str, path)))
