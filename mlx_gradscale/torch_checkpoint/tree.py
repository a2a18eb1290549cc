"""Walk an object of containers, placeholders and tensors."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from .objects import CheckpointError, Placeholder
from .tensors import DTYPES, Storage, Tensor, dtype_name

# Maximum nesting of containers. Python's recursion limit is 1000.
_MAX_DEPTH = 128
# Maximum number of values, where shared values count each time they appear.
_MAX_VALUES = 50_000_000
_TENSORS = {Tensor, mx.array, np.ndarray}
_DICTS = {dict, OrderedDict, Counter}
_CONTAINERS = {*_DICTS, list, tuple, set, frozenset}
_PLAIN = {int, float, bool, complex, type(None), str, bytes}
_LEAVES = {*_PLAIN, bytearray, Storage, Tensor}


def replace_tensors(tree: Any, function: Callable[[tuple[Any, ...], Any], Any]) -> Any:
    """Return a copy of an object with each tensor replaced.

    Values that are shared stay shared, and only containers and placeholders are copied.

    Args:
        tree (Any): The object.
        function (Callable): Takes the path of a tensor (a tuple of keys and indices)
            and the ``Tensor`` or ``mx.array``, and returns its replacement, or the
            tensor itself. It is called once for each object.
    """
    done: dict[int, Any] = {}

    def visit(value: Any, path: tuple[Any, ...]) -> Any:
        kind: Any = type(value)
        new: Any
        if kind in _PLAIN:
            return value
        if id(value) in done:
            return done[id(value)]
        # A list, dict or placeholder may contain itself, so note it before its items.
        if kind in _TENSORS:
            done[id(value)] = function(path, value)
        elif kind in _DICTS:
            new = done[id(value)] = kind()
            vars_of(new).update(vars_of(value))
            for key, item in value.items():
                new[visit(key, path)] = visit(item, (*path, key))
        elif kind is list:
            new = done[id(value)] = []
            new.extend([visit(x, (*path, i)) for i, x in enumerate(value)])
        elif kind in _CONTAINERS:
            items = [visit(x, (*path, i)) for i, x in enumerate(value)]
            done.setdefault(id(value), kind(items))
        elif kind is Placeholder and value.callee:
            new = done[id(value)] = Placeholder(value.module, value.name)
            new.args, new.opcode = visit(value.args, path), value.opcode
            new.callee = visit(value.callee, path)
            new.edits = [(code, visit(items, path)) for code, items in value.edits]
        else:
            return value
        return done[id(value)]

    try:
        return visit(tree, ())
    except RecursionError:  # chains of placeholders
        raise CheckpointError("objects are nested too deeply.") from None


def vars_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an OrderedDict, of which only _metadata is allowed."""
    return getattr(value, "__dict__", {})


def check_key(key: Any, unknown: type[Exception] = CheckpointError) -> None:
    """Raise unless a dict key is flat: hashing a doubled tuple would take forever."""
    parts = key if type(key) is tuple and len(key) <= 64 else (key,)
    if not {*map(type, parts)} <= {*_PLAIN, Placeholder}:
        raise unknown(
            f"a dict key or set member has type {type(key).__name__}. It must be a "
            "plain value or a flat tuple of plain values."
        )


def check_tree(root: Any, unknown: type[Exception] = CheckpointError) -> None:
    """Raise unless an object's types, depth and size are supported.

    Containers may be nested 128 deep, and contain themselves only inside placeholders,
    so code that walks the object later is safe. ``unknown`` is raised for bad types.
    """
    # The depth of each finished container and its number of values; None until then.
    sizes: dict[int, tuple[int, int] | None] = {}
    placeholders, queue = set[int](), [root]

    def visit(value: Any, path: tuple[Any, ...]) -> tuple[int, int]:
        kind = type(value)
        if kind is Placeholder:
            if id(value) not in placeholders:
                placeholders.add(id(value))
                queue.extend([value.callee, value.args])
                queue.extend(items for _, items in value.edits)
        elif kind not in _CONTAINERS:
            _check_type(value, path, unknown)
        else:
            found = sizes.get(id(value), ())
            if found == () and len(path) < _MAX_DEPTH:
                sizes[id(value)] = None
                found = sizes[id(value)] = measure(value, path)
            if not found or len(path) + found[0] > _MAX_DEPTH:
                raise CheckpointError(
                    f"values are nested over {_MAX_DEPTH} deep, or one contains itself."
                )
            return found
        return 0, 1

    def measure(value: Any, path: tuple[Any, ...]) -> tuple[int, int]:
        depth, size = 0, 1
        items: Any = enumerate(value)
        if type(value) in _DICTS:
            items = value.items()
            if vars_of(value):
                if vars_of(value).keys() != {"_metadata"}:
                    problem = "a dict has attributes other than _metadata."
                    raise CheckpointError(problem)
                items = [*items, *vars_of(value).items()]
        if type(value) not in (list, tuple):
            for key in value:
                if type(key) not in _PLAIN:
                    check_key(key, unknown)
                    visit(key, (*path, key))
        for key, item in items:
            size += 1
            if type(item) not in _LEAVES:
                below = visit(item, (*path, key))
                depth, size = max(depth, below[0]), size + below[1]
        if size > _MAX_VALUES:
            raise CheckpointError("values are repeated too often.")
        return depth + 1, size

    for value in queue:
        visit(value, ())


def _check_type(value: Any, path: tuple[Any, ...], unknown: type[Exception]) -> None:
    kind = type(value)
    is_array = kind in _TENSORS and kind is not Tensor
    if kind in _LEAVES or (is_array and dtype_name(value) in DTYPES):
        return
    place = "".join(f"[{key!a:.80}]" for key in path[:20])
    advice = " Save its .item()." if isinstance(value, np.generic) else ""
    dtype = f" of dtype {value.dtype}" if is_array else ""
    raise unknown(
        f"obj{place} has type {kind.__name__}{dtype}, which a checkpoint cannot hold."
        f"{advice} Only arrays, dicts, lists, tuples, sets, numbers, strings, bytes "
        "and None can be saved."
    )
