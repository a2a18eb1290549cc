"""Walk an object of containers, placeholders and tensors."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from .objects import CheckpointError, Placeholder, check
from .tensors import DTYPES, Storage, Tensor, dtype_name

# Maximum nesting of containers. Python's recursion limit is 1000.
_MAX_DEPTH = 128
# Maximum number of values, where shared values count each time they appear.
_MAX_VALUES = 50_000_000
_DICTS = (dict, OrderedDict, Counter)
_CONTAINERS = (*_DICTS, list, tuple, set, frozenset)
_KEYS = (int, float, bool, complex, type(None), str, bytes, Placeholder)
_LEAVES = (int, float, bool, complex, type(None), str, bytes, bytearray, Storage)


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
        is_leaf = isinstance(value, (Tensor, mx.array, np.ndarray))
        if not is_leaf and kind is not Placeholder and kind not in _CONTAINERS:
            return value
        if id(value) not in done:
            # A container or placeholder may contain itself, so note it first.
            if is_leaf:
                done[id(value)] = function(path, value)
            elif kind is Placeholder:
                copy_placeholder(value, path)
            elif kind in _DICTS:
                new = done[id(value)] = kind()
                vars_of(new).update(vars_of(value))
                for key, item in value.items():
                    new[visit(key, path)] = visit(item, (*path, key))
            elif kind is list:
                new = done[id(value)] = []
                new.extend(visit(x, (*path, i)) for i, x in enumerate(value))
            else:
                items = [visit(x, (*path, i)) for i, x in enumerate(value)]
                done.setdefault(id(value), kind(items))
        return done[id(value)]

    def copy_placeholder(value: Placeholder, path: tuple[Any, ...]) -> None:
        if value.callee is None:
            done[id(value)] = value
            return
        new = done[id(value)] = Placeholder(value.module, value.name)
        new.args, new.opcode = visit(value.args, path), value.opcode
        new.callee = visit(value.callee, path)
        new.edits = [
            (opcode, [visit(item, path) for item in items])
            for opcode, items in value.edits
        ]

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
    if not all(type(part) in _KEYS for part in parts):
        raise unknown(
            f"a dict key or set member has type {type(key).__name__}. It must be a "
            "plain value or a flat tuple of plain values."
        )


def check_tree(root: Any, unknown: type[Exception] = CheckpointError) -> None:
    """Raise unless an object's types, depth and size are supported.

    Containers may be nested 128 deep, and contain themselves only inside placeholders,
    so code that walks the object later is safe. ``unknown`` is raised for bad types.
    """
    problem = f"values are nested over {_MAX_DEPTH} deep, or one contains itself."
    # The depth of each finished container and its number of values; None until then.
    sizes: dict[int, tuple[int, int] | None] = {}
    placeholders, queue = set[int](), [root]

    def visit(value: Any, path: tuple[Any, ...]) -> tuple[int, int]:
        kind = type(value)
        if kind is Placeholder:
            if id(value) not in placeholders:
                placeholders.add(id(value))
                queue.extend(
                    [value.callee, value.args, *(x for _, y in value.edits for x in y)]
                )
        elif kind in _CONTAINERS:
            if id(value) not in sizes:
                check(len(path) < _MAX_DEPTH, problem)
                sizes[id(value)] = None
                sizes[id(value)] = measure(value, path)
            found = sizes[id(value)]
            if found is None:
                raise CheckpointError(problem)
            return found
        elif kind not in _LEAVES and not is_tensor(value):
            place = "".join(f"[{key!a:.80}]" for key in path[:20])
            advice = " Save its .item()." if isinstance(value, np.generic) else ""
            dtype = f" of dtype {value.dtype}" if isinstance(value, np.ndarray) else ""
            raise unknown(
                f"obj{place} has type {kind.__name__}{dtype}, which a checkpoint "
                f"cannot hold.{advice} Only arrays, dicts, lists, tuples, sets, "
                "numbers, strings, bytes and None can be saved."
            )
        return 0, 1

    def measure(value: Any, path: tuple[Any, ...]) -> tuple[int, int]:
        items: Any = value.items() if isinstance(value, dict) else enumerate(value)
        depth, size = 0, 1
        for key in value if isinstance(value, (dict, set, frozenset)) else ():
            check_key(key, unknown)
        if isinstance(value, dict):
            is_known = vars_of(value).keys() <= {"_metadata"}
            check(is_known, "a dict has attributes other than _metadata.")
            items = [*items, *vars_of(value).items(), *((key, key) for key in value)]
        for key, item in items:
            below = visit(item, (*path, key))
            depth, size = max(depth, below[0]), size + below[1]
        check(depth < _MAX_DEPTH, problem)
        check(size <= _MAX_VALUES, "values are repeated too often.")
        return depth + 1, size

    for value in queue:
        visit(value, ())


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor or an array that can be saved."""
    is_array = isinstance(value, (mx.array, np.ndarray))
    return type(value) is Tensor or (is_array and dtype_name(value) in DTYPES)
