"""Types for checkpoint values that Python's and MLX's types cannot represent.

A pickle describes how to create an object: a name, arguments and a state. A
``Placeholder`` stores this description as data; nothing is imported or called. The
writer writes the same description, so a program that knows the class can load it.
"""

import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import mlx.core as mx
import numpy as np

# Maximum number of arguments and characters in the str() of a placeholder.
_MAX_ITEMS, _MAX_TEXT = 6, 200
# Pickle protocol 2 uses the names of Python 2.
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}


@dataclass(eq=False, repr=False, slots=True)
class Placeholder:
    """A class, function or object in a file, stored as data and never executed.

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

    def called(self, opcode: bytes, args: tuple[Any, ...]) -> "Placeholder":
        """Return a placeholder for the object made by calling this one."""
        return Placeholder(self.module, self.name, args, self, opcode)

    @property
    def path(self) -> str:
        """The qualified name, such as ``torch.float16``."""
        return f"{_RENAMED.get(self.module, self.module)}.{self.name}"

    @property
    def state(self) -> Any:
        """The state that sets the object's attributes, usually a dict, or None."""
        # Python writes the state last.
        opcode, values = self.edits[-1] if self.edits else (b"", [])
        return values[0] if opcode == b"b" else None

    @property
    def is_name(self) -> bool:
        """Whether this is a class or function, not an object."""
        return self.args is None

    def __str__(self) -> str:
        if self.args is None:
            return self.path[:_MAX_TEXT]
        state = self.state if type(self.state) is dict else {}
        shown = [_show(item) for item in self.args[:_MAX_ITEMS]]
        for key, item in islice(state.items(), _MAX_ITEMS):
            shown += [f"{key[:40]}={_show(item)}"] if type(key) is str else []
        text = f"{self.path[:_MAX_TEXT]}({', '.join(shown)})"
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


class DefaultDict(dict[Any, Any]):
    """A ``collections.defaultdict`` whose ``factory`` is kept but never called."""

    def __init__(self, items: Any = (), factory: Any = None) -> None:
        super().__init__(items)
        self.factory = factory


class TorchSize(tuple[int, ...]):
    """A ``torch.Size``: a tuple that ``save`` writes as a ``torch.Size``."""


class TorchTensor(mx.array):
    """An array with the flags ``requires_grad`` and ``is_parameter``.

    It shares memory with ``array``. Results of arithmetic are plain arrays.

    Args:
        array (mx.array): The values.
        requires_grad (bool): As in PyTorch.
        is_parameter (bool): Whether it is a ``torch.nn.Parameter``.
    """

    def __init__(
        self, array: mx.array, requires_grad: bool = True, is_parameter: bool = True
    ) -> None:
        # MLX would copy an array here. These zeros are never computed, and the
        # assignment replaces them with the array itself.
        super().__init__(mx.zeros(array.shape, array.dtype, stream=mx.cpu))
        self[...] = array
        self.requires_grad = requires_grad
        self.is_parameter = is_parameter


@dataclass(frozen=True)
class TensorShape:
    """The shape, dtype and flags of a tensor, without its data.

    Args:
        shape (tuple): The shape.
        dtype (str): PyTorch's name for the dtype, such as ``"float16"``.
        requires_grad (bool): As in PyTorch.
        is_parameter (bool): Whether it is a ``torch.nn.Parameter``.
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False
    is_parameter: bool = False

    @classmethod
    def of(cls, array: mx.array) -> "TensorShape":
        """Return the shape, dtype and flags of an array."""
        flags = (getattr(array, x, False) for x in ("requires_grad", "is_parameter"))
        return cls(array.shape, dtype_name(array), *flags)

    def fill(self, array: mx.array) -> mx.array:
        """Return the array with this leaf's flags. Shapes are not compared."""
        filled: mx.array = flag(array, self.requires_grad, self.is_parameter)
        return filled


def dtype_name(array: Any) -> str:
    """Return the name of the dtype of an MLX or numpy array."""
    name = getattr(array.dtype, "name", str(array.dtype))
    return name.removeprefix("mlx.core.").removesuffix("_")


def flag(tensor: Any, requires_grad: bool, is_parameter: bool) -> Any:
    """Return a tensor or ``TensorShape`` with flags, unchanged if both are False."""
    if not requires_grad and not is_parameter:
        return tensor
    if isinstance(tensor, TensorShape):
        return replace(tensor, requires_grad=requires_grad, is_parameter=is_parameter)
    return TorchTensor(tensor, requires_grad, is_parameter)


def plain_value(value: Any) -> Any:
    """Convert placeholders: a namespace to a dict, and a numpy scalar to a number.

    Other values are returned unchanged.

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
    if path == "numpy.core.multiarray.scalar":
        with suppress(AttributeError, IndexError, TypeError, ValueError):
            dtype, data = value.args
            # Byte order and type code, such as "<f8".
            code = dtype.state[1] + dtype.args[0]
            if re.fullmatch(r"[<>=|](b1|[iu][1248]|f[248]|c8|c16)", code):
                return np.frombuffer(data, code).item()
    return value
