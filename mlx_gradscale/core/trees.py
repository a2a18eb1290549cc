"""Walk trees of arrays, match gradients to parameters, and replace arrays."""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial, reduce
from itertools import starmap
from operator import getitem, itemgetter, setitem
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map, tree_map_with_path

CONTAINERS = (dict, list, tuple)
# The dtypes whose values may be non-finite.
FLOATING = {mx.float16, mx.bfloat16, mx.float32, mx.float64, mx.complex64}
# The location of an array: its path, its container, and its key in the container.
Slot = tuple[tuple[Any, ...], Any, Any]
# (container, key, value) for each array to replace.
Writes = list[tuple[Any, Any, Any]]


# Called with a path of keys and a tree; returns the subtree there.
get_at: Callable[[tuple[Any, ...], Any], Any] = partial(reduce, getitem)


class Leaf(NamedTuple):
    """A gradient and its parameter, which is ``container[key]``."""

    path: str
    container: Any
    key: Any
    parameter: mx.array
    gradient: mx.array


# A recursive closure would be a reference cycle, which keeps gradients alive until the
# garbage collector runs.
def walk(
    tree: Any, path: tuple[Any, ...] = (), found: list[tuple[Slot, Any]] | None = None
) -> list[tuple[Slot, Any]]:
    """List every leaf and its location, except in private containers of a model.

    A model's private arrays are listed, because they may be buffers.
    """
    found = [] if found is None else found
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if not isinstance(value, CONTAINERS):
            found.append((((*path, key), tree, key), value))
        elif not (isinstance(tree, nn.Module) and str(key).startswith("_")):
            walk(value, (*path, key), found)
    return found


def slots(tree: Any) -> list[Slot]:
    """List the location of every array in a tree or model."""
    found = []
    for slot, value in walk(tree):
        if isinstance(value, mx.array):
            found.append(slot)
    return found


def flatten(tree: Any) -> list[tuple[str, Any]]:
    """Return (dotted path, leaf) pairs, like MLX's ``tree_flatten``, but faster."""
    # In a list, the tree may also be a single array.
    return [(".".join(map(str, path[1:])), x) for (path, _, _), x in walk([tree])]


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree without their paths."""
    return list(map(itemgetter(1), walk([tree])))


def tree_of(values: dict[str, Any], structure: Any) -> Any:
    """Build a tree of this structure from values by path.

    Where a path has no value, the tree has an empty dict, as MLX's own trees have for
    frozen parameters.
    """
    return tree_map_with_path(lambda path, _: values.get(path, {}), structure)


def tree_like(tree: Any, values: Iterable[Any]) -> Any:
    """Build a tree of this structure from values in the order of its leaves."""
    # tree_map calls next() with the old leaf, its default, which it never returns.
    return tree_map(partial(next, iter(values)), tree)


def is_floating(x: mx.array) -> bool:
    """Return whether ``x`` is floating-point or complex, and so may be non-finite."""
    return x.dtype in FLOATING


def dtype_name(x: mx.array) -> str:
    """Return an array's dtype as text, such as "float16"."""
    return str(x.dtype).removeprefix("mlx.core.")


def read(x: mx.array) -> Any:
    """Read a 0-d array; return None if it is a tracer from ``mx.compile``."""
    with suppress(RuntimeError, ValueError):
        return x.item()
    return None


def match(gradients: Any, parameters: Any, what: str = "gradient") -> list[Leaf]:
    """Pair every gradient with its parameter in a tree or model, or raise."""
    if not isinstance(gradients, dict) or isinstance(gradients, nn.Module):
        raise TypeError(
            f"The {what}s must be a dict with the structure of model.parameters(), got "
            f"{type(gradients).__name__}."
        )
    found: dict[str, Leaf] = {}
    # Empty containers have no leaves: frozen modules, or lists of strings in a model.
    for (keys, _, key), gradient in walk(gradients):
        path, parameter = ".".join(map(str, keys)), None
        with suppress(KeyError, IndexError, TypeError, ValueError):
            container = get_at(keys[:-1], parameters)
            parameter = container[key]
        if not isinstance(parameter, mx.array):
            raise ValueError(
                f"There is a {what} for {path!r}, but no such parameter. Pass the "
                f"{what}s and parameters of the same model."
            )
        if not isinstance(gradient, mx.array):
            raise TypeError(
                f"The {what} of {path!r} must be an mx.array, got {gradient!r}."
            )
        if gradient.shape != parameter.shape:
            raise ValueError(
                f"The {what} of {path!r} has shape {gradient.shape}, but the parameter "
                f"has shape {parameter.shape}. Pass the {what}s and parameters of the "
                "same model."
            )
        if path in found:
            raise ValueError(
                f"Two {what}s have the path {path!r}, as in "
                "{'a.b': x, 'a': {'b': y}}. Rename one of the parameters."
            )
        found[path] = Leaf(path, container, key, parameter, gradient)
    return list(found.values())


def commit(writes: Iterable[tuple[Any, Any, Any]]) -> None:
    """Write all triples in one C call, so that Ctrl-C cannot fall between two writes.

    This holds for plain containers; the ``State`` of a wrapper is written first.
    """
    deque(starmap(setitem, list(writes)), maxlen=0)


Snapshot = list[tuple[Any, Any]]


def snapshot(*trees: Any) -> Snapshot:
    """Record the contents of each dict and list in the trees, for :func:`restore`."""
    saved: Snapshot = []
    for tree in trees:
        if isinstance(tree, (dict, list)):
            saved.append((tree, dict(tree) if isinstance(tree, dict) else list(tree)))
        values = tree.values() if isinstance(tree, dict) else tree
        saved += snapshot(*(x for x in values if isinstance(x, CONTAINERS)))
    return saved


def restore(saved: Snapshot) -> None:
    """Restore the contents that :func:`snapshot` recorded for each container."""
    for container, copy in saved:
        if isinstance(copy, dict):
            # Use dict's own methods, because a model's update() does something else.
            dict.clear(container)
            dict.update(container, copy)
        else:
            container[:] = copy
