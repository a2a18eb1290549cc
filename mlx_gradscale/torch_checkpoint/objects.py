"""Errors, objects whose classes are not imported, and the walk over all objects."""

import copy
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

# Maximum number of arguments and characters in the str() of a placeholder.
_MAX_ITEMS, _MAX_TEXT = 6, 200
# Pickle protocol 2 uses the names of Python 2.
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}
DICTS = frozenset({dict, OrderedDict, Counter})
_PLAIN = {int, float, bool, complex, type(None), str, bytes}


class CheckpointError(ValueError):
    """Raised if a file is damaged, hostile or unsupported, or an object is too deep.

    File system errors (a missing file, no permission) raise an ``OSError`` instead.
    """


def check(
    condition: object,
    problem: str,
    advice: str = "Copy the file, or save it in PyTorch, again.",
) -> None:
    """Raise a ``CheckpointError`` unless the condition holds."""
    if not condition:
        raise CheckpointError(f"{problem}. {advice}")


@dataclass(eq=False)
class Storage:
    """A block of bytes: a record in a file, or the values of an array."""

    dtype: str | None  # of the elements; None if it is untyped
    nbytes: int
    # Yields the bytes, little-endian and row-major; those of a zip file are verified.
    chunks: Callable[[], Iterable[bytes | memoryview]] = tuple
    array: Any = None


@dataclass(eq=False, repr=False)
class Placeholder:
    """A class, function or object in a file, stored as data and never executed.

    A pickle describes how to create an object: a name, arguments and a state. The
    writer writes the same description, so a program that knows the class can load it.

    Attributes:
        module (str): The module of the class or function.
        name (str): Its name in the module.
        args (tuple or None): The arguments of the call; None for a bare name.
        callee (Placeholder or None): The class or function called, or None.
        opcode (bytes): The pickle instruction that makes the call.
        edits (list): Later instructions that change the object, with their values.

    Example:

        >>> color = Placeholder("paint", "Color").called(b"R", (3,))
        >>> color.path, color.args, str(color)
        ('paint.Color', (3,), 'paint.Color(3)')
    """

    module: str
    name: str
    args: tuple[Any, ...] | None = None
    callee: "Placeholder | None" = None
    opcode: bytes = b"c"
    edits: list[tuple[bytes, list[Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        path = self.path
        is_name = len(path) < 1000 and path.isprintable()
        check(is_name, f"{path[:120]!a} is not a class or function name")

    @property
    def path(self) -> str:
        """The qualified name, such as ``torch.float16``."""
        # Made on demand: stored, a million objects with a long name took 4 GB.
        return f"{_RENAMED.get(self.module, self.module)}.{self.name}"

    def called(self, opcode: bytes, args: tuple[Any, ...]) -> "Placeholder":
        """Return a placeholder for the object made by calling this one."""
        return Placeholder(self.module, self.name, args, self, opcode)

    @property
    def state(self) -> Any:
        """The state that sets the object's attributes, usually a dict, or None."""
        # Python writes the state last.
        opcode, values = self.edits[-1] if self.edits else (b"", [])
        return values[0] if opcode == b"b" else None

    def __str__(self) -> str:
        text = self.path
        if self.args is not None:
            state = self.state if type(self.state) is dict else {}
            shown = [_show(x) for x in self.args[:_MAX_ITEMS]]
            for key, item in islice(state.items(), _MAX_ITEMS):
                shown.append(f"{_show(key).strip(chr(39))}={_show(item)}")
            text += f"({', '.join(shown)})"
        return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."

    def __repr__(self) -> str:
        return f"<Placeholder {self}>"


def _show(value: Any) -> str:
    """Return the repr of a short plain value, and the type of any other."""
    if isinstance(value, Placeholder):
        return value.path
    is_short = type(value) in _PLAIN and sys.getsizeof(value) < _MAX_TEXT
    return repr(value) if is_short else type(value).__name__


def plain_value(value: Any) -> Any:
    """Convert placeholders of well-known classes to plain values.

    A namespace or defaultdict becomes a dict, a ``torch.Size`` a tuple, and a numpy
    scalar a number. Other values are returned unchanged.

    Example:

        >>> args = Placeholder("argparse", "Namespace").called(b"R", ())
        >>> args.edits.append((b"b", [{"lr": 0.1}]))
        >>> plain_value(args)
        {'lr': 0.1}
    """
    if not isinstance(value, Placeholder) or value.args is None:
        return value
    path = value.path.replace("numpy._core.", "numpy.core.")
    is_namespace = path in ("argparse.Namespace", "types.SimpleNamespace")
    if is_namespace and type(value.state) is dict:
        return value.state
    if path == "torch.Size" and [*map(type, value.args)] == [tuple]:
        return value.args[0]
    with suppress(AttributeError, IndexError, TypeError, ValueError):
        if path == "collections.defaultdict":
            edits = [items for opcode, items in value.edits if opcode in b"su"]
            return {k: x for s in edits for k, x in zip(s[::2], s[1::2], strict=True)}
        if path == "numpy.core.multiarray.scalar":
            dtype, data = value.args
            # Byte order and type code, such as "<f8".
            code = dtype.state[1] + dtype.args[0]
            if re.fullmatch(r"[<>=|](b1|[iu][1248]|f[248]|c8|c16)", code):
                return np.frombuffer(data, code).item()
    return value


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
        is_name = kind is Placeholder and value.callee is None
        if kind in _PLAIN or kind in (bytearray, Storage) or is_name:
            return value
        if id(value) in done:
            return done[id(value)]
        # A list, dict or placeholder may contain itself, so note it before its items.
        if kind in DICTS:
            check_keys(value)
            new = done[id(value)] = kind()
            if kind is OrderedDict and vars(value):  # state_dict() sets _metadata
                vars(new).update(visit(vars(value), path))
            for key, item in value.items():
                new[visit(key, path)] = visit(item, (*path, key))
        elif kind is list:
            new = done[id(value)] = []
            new += [visit(x, (*path, i)) for i, x in enumerate(value)]
        elif kind in (tuple, set, frozenset):
            items = [visit(x, (*path, i)) for i, x in enumerate(value)]
            done.setdefault(id(value), kind(items))
        elif kind is Placeholder:
            new = done[id(value)] = copy.copy(value)
            new.args, new.callee = visit(value.args, path), visit(value.callee, path)
            new.edits = [(code, visit(items, path)) for code, items in value.edits]
        else:
            done[id(value)] = function(path, value)
        return done[id(value)]

    try:
        return visit(tree, ())
    except RecursionError:
        raise CheckpointError("values are nested too deeply. Flatten them.") from None


def check_keys(keys: Iterable[Any]) -> None:
    """Raise unless dict keys are flat: hashing a doubled tuple would take forever."""
    for key in keys:
        parts = key if type(key) is tuple and len(key) <= 64 else (key,)
        check(
            {*map(type, parts)} <= {*_PLAIN, Placeholder},
            f"a dict key or set member has type {type(key).__name__}",
            "It must be a plain value or a flat tuple of plain values.",
        )


def show_path(path: tuple[Any, ...]) -> str:
    """Return the place of a value in an object, for errors."""
    return "obj" + "".join(f"[{key!a:.80}]" for key in path[:20])
