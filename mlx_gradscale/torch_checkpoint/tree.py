"""Replace the tensors of an object, in one recursion."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from .objects import CheckpointError, Placeholder, check
from .tensors import Storage

DICTS = frozenset({dict, OrderedDict, Counter})
_PLAIN = {int, float, bool, complex, type(None), str, bytes}
_COPIED = {*_PLAIN, bytearray, Storage}


def replace_tensors(tree: Any, function: Callable[[tuple[Any, ...], Any], Any]) -> Any:
    """Return a copy of an object with each tensor replaced.

    Values that are shared stay shared, and only containers and placeholders are copied.

    Args:
        tree (Any): The object.
        function (Callable): Takes the path of a tensor (a tuple of keys and indices)
            and the ``Tensor`` or ``mx.array``, and returns its replacement, or the
            tensor itself. It is called once for each object, and also for values of
            types that a checkpoint cannot hold.

    Raises:
        CheckpointError: If the object is nested too deeply.
    """
    done: dict[int, Any] = {}

    def visit(value: Any, path: tuple[Any, ...]) -> Any:
        kind: Any = type(value)
        new: Any
        if kind in _COPIED:
            return value
        if id(value) in done:
            return done[id(value)]
        # A list, dict or placeholder may contain itself, so note it before its items.
        if kind in DICTS:
            new = done[id(value)] = kind()
            if kind is OrderedDict and vars(value):  # state_dict() sets _metadata
                vars(new).update(visit(vars(value), path))
            for key, item in value.items():
                if type(key) not in _PLAIN:
                    check_key(key)
                    key = visit(key, path)
                new[key] = item if type(item) in _COPIED else visit(item, (*path, key))
        elif kind is list:
            new = done[id(value)] = []
            new += [visit(x, (*path, i)) for i, x in enumerate(value)]
        elif kind in (tuple, set, frozenset):
            items = [visit(x, (*path, i)) for i, x in enumerate(value)]
            done.setdefault(id(value), kind(items))
        elif kind is Placeholder:
            new = done[id(value)] = value
            if value.callee:
                new = done[id(value)] = Placeholder(value.module, value.name)
                new.args, new.opcode = visit(value.args, path), value.opcode
                new.callee = visit(value.callee, path)
                new.edits = [(code, visit(items, path)) for code, items in value.edits]
        else:
            done[id(value)] = function(path, value)
        return done[id(value)]

    try:
        return visit(tree, ())
    except RecursionError:
        raise CheckpointError("values are nested too deeply. Flatten them.") from None


def check_key(key: Any) -> None:
    """Raise unless a dict key is flat: hashing a doubled tuple would take forever."""
    parts = key if type(key) is tuple and len(key) <= 64 else (key,)
    check(
        {*map(type, parts)} <= {*_PLAIN, Placeholder},
        f"a dict key or set member has type {type(key).__name__}",
        "It must be a plain value or a flat tuple of plain values.",
    )


def show_path(path: tuple[Any, ...]) -> str:
    """Return the place of a value in an object, for errors."""
    return "obj" + "".join(f"[{key!a:.80}]" for key in path[:20])
