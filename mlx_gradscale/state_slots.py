"""Where the arrays of an optimizer's state are, and how to put it back as it was."""

from collections.abc import Iterator
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


def copies(state: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container of a state with a copy of what it holds."""
    if isinstance(state, (dict, list)):
        yield state, state.copy()
    for _, value in items(state):
        if isinstance(value, CONTAINERS):
            yield from copies(value)


def restore(saved: list[tuple[Any, Any]]) -> None:
    """Put back what :func:`copies` found."""
    for container, copy in saved:
        container.clear()
        if isinstance(copy, dict):
            dict.update(container, copy)  # a Module's own takes only what it has
        else:
            container.extend(copy)


def dotted(path: tuple) -> str:
    """A path as it is shown in errors."""
    return repr(".".join(map(str, path)))
