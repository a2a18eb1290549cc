"""Errors, and the values of a checkpoint that Python cannot represent."""

import re
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

# Maximum number of arguments and characters in the str() of a placeholder.
_MAX_ITEMS, _MAX_TEXT = 6, 200
# Pickle protocol 2 uses the names of Python 2.
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}


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


@dataclass(eq=False, repr=False)
class Placeholder:
    """A class, function or object in a file, stored as data and never executed.

    A pickle describes how to create an object: a name, arguments and a state. The
    writer writes the same description, so a program that knows the class can load it.

    Attributes:
        module (str): The module of the class or function.
        name (str): Its name in the module.
        path (str): The qualified name, such as ``torch.float16``.
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
        self.path = f"{_RENAMED.get(self.module, self.module)}.{self.name}"
        is_name = len(self.path) < 1000 and self.path.isprintable()
        check(
            is_name and "" not in self.path.split("."),
            f"{self.path[:120]!a} is not a class or function name",
        )

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
        text = self.path[:_MAX_TEXT]
        if self.args is not None:
            state = self.state if type(self.state) is dict else {}
            shown = [_show(x) for x in self.args[:_MAX_ITEMS]]
            for key, item in islice(state.items(), _MAX_ITEMS):
                shown.append(f"{_show(key).strip(chr(39))}={_show(item)}")
            text = f"{text}({', '.join(shown)})"
        return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."

    def __repr__(self) -> str:
        return f"<Placeholder {self}>"


def _show(value: Any) -> str:
    if isinstance(value, (str, bytes, bytearray)):
        return repr(value[:40])
    # Python refuses to print an int of more than 4300 digits.
    is_short = type(value) is int and value.bit_length() < 256
    if is_short or value is None or isinstance(value, (bool, float, complex)):
        return repr(value)
    return value.path[:80] if isinstance(value, Placeholder) else type(value).__name__


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
    if is_namespace and type(value.state) is dict and not value.args:
        return value.state
    if path == "collections.defaultdict":
        items = [x for opcode, values in value.edits if opcode in b"su" for x in values]
        return dict(zip(items[::2], items[1::2], strict=False))
    if path == "torch.Size" and [*map(type, value.args)] == [tuple]:
        return value.args[0]
    if path == "numpy.core.multiarray.scalar":
        with suppress(AttributeError, IndexError, TypeError, ValueError):
            dtype, data = value.args
            # Byte order and type code, such as "<f8".
            code = dtype.state[1] + dtype.args[0]
            if re.fullmatch(r"[<>=|](b1|[iu][1248]|f[248]|c8|c16)", code):
                return np.frombuffer(data, code).item()
    return value
