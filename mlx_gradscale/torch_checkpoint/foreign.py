"""Checkpoint values without a Python or MLX type.

A pickle describes how to make an object: a name, arguments, a state. A ``Placeholder``
keeps this description as data. Nothing is imported or called, and the writer emits the
same description, so a program that knows the class can load the object.
"""

import re
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import mlx.core as mx
import numpy as np

from .limits import is_count, require

# Maximum number of arguments and characters in the str() of a placeholder.
_MAX_ITEMS, _MAX_TEXT = 6, 200
# Functions that make an instance of their first argument.
_CONSTRUCTORS = (
    "copyreg._reconstructor",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
)
# Protocol 2 writes Python 2 names.
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}


class Placeholder:
    """A class, function or object known only to the program that wrote the file.

    Attributes:
        module (str): The module of the class or function.
        name (str): Its name in the module.
        args (tuple or None): The arguments of the call; None for a bare name.
        callee (Placeholder or None): The class or function called.
        opcode (bytes): The pickle instruction that makes the call.
        edits (list): The instructions that follow, with their values.

    Example:

        >>> color = Placeholder.named("paint", "Color").called(b"R", (3,))
        >>> color.path, color.args, str(color)
        ('paint.Color', (3,), 'paint.Color(3)')
    """

    __slots__ = ("args", "callee", "edits", "module", "name", "opcode")

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name
        self.args: tuple[Any, ...] | None = None
        self.callee: Placeholder | None = None
        self.opcode = b"c"
        self.edits: list[tuple[bytes, list[Any]]] = []

    @classmethod
    def named(cls, module: str, name: str) -> "Placeholder":
        """Return the placeholder of a class or function."""
        return cls(module, name)

    def called(self, opcode: bytes, args: tuple[Any, ...]) -> "Placeholder":
        """Return the object that a pickle instruction makes by calling this."""
        known = self
        if self.path in _CONSTRUCTORS and args and type(args[0]) is Placeholder:
            known = args[0]
        made = Placeholder(known.module, known.name)
        if self.is_getattr and [type(arg) for arg in args] == [Placeholder, str]:
            # Protocol 2 refers to nested classes this way.
            made.module = args[0].module
            made.name = f"{args[0].name}.{args[1][:_MAX_TEXT]}"[:_MAX_TEXT]
        made.callee, made.opcode, made.args = self, opcode, args
        return made

    @property
    def path(self) -> str:
        """The qualified name, as in code."""
        return f"{_RENAMED.get(self.module, self.module)}.{self.name}"

    @property
    def state(self) -> Any:
        """The state that sets the object's attributes: usually a dict, or None."""
        return next((held[0] for code, held in self.edits[::-1] if code == b"b"), None)

    @property
    def is_name(self) -> bool:
        """Whether this is a class or function, not an object."""
        return self.args is None or (self.callee is not None and self.callee.is_getattr)

    @property
    def is_getattr(self) -> bool:
        """Whether this is Python's ``getattr`` function."""
        return self.args is None and self.path == "builtins.getattr"

    def __str__(self) -> str:
        path = self.path[:_MAX_TEXT]
        if self.is_name:
            return path
        is_constructed = self.callee is not None and self.callee.path in _CONSTRUCTORS
        args = () if is_constructed else self.args or ()
        state = self.state if type(self.state) is dict else {}
        shown = [_show(item) for item in args[:_MAX_ITEMS]]
        for key, item in islice(state.items(), _MAX_ITEMS):
            name = key[:40] if type(key) is str else _show(key)
            shown.append(f"{name}={_show(item)}")
        text = f"{path}({', '.join(shown)})"
        return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."

    def __repr__(self) -> str:
        return f"<Placeholder {self}>"


class DefaultDict(dict[Any, Any]):
    """A ``collections.defaultdict`` whose ``factory`` is kept but never called."""

    def __init__(self, items: Any = (), factory: Any = None) -> None:
        super().__init__(items)
        self.factory = factory


class TorchName(str):
    """A ``torch.dtype`` or ``torch.device`` by name: "torch.float16", "cuda:0"."""

    __slots__ = ()


class TorchSize(tuple[Any, ...]):
    """A ``torch.Size``."""

    __slots__ = ()


class TorchTensor(mx.array):
    """An array that remembers being a ``Parameter`` or having ``requires_grad``.

    It shares memory with the array. Results of arithmetic are plain arrays.

    Args:
        array (mx.array): The values.
        requires_grad (bool): PyTorch's attribute of this name.
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
    """A tensor without its data, as a leaf of ``shapes`` and of templates.

    Args:
        shape (tuple): The shape.
        dtype (str): PyTorch's name for the dtype, such as ``"float16"``.
        requires_grad (bool): PyTorch's attribute of this name.
        is_parameter (bool): Whether it is a ``torch.nn.Parameter``.

    Example:

        >>> TensorShape.of(mx.zeros((2, 3))).dtype
        'float32'
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False
    is_parameter: bool = False

    @classmethod
    def of(cls, array: mx.array) -> "TensorShape":
        """Return the shape, dtype and flags of an array."""
        dtype = str(array.dtype).removeprefix("mlx.core.").removesuffix("_")
        if isinstance(array, TorchTensor):
            return cls(array.shape, dtype, array.requires_grad, array.is_parameter)
        return cls(array.shape, dtype)

    def fill(self, array: mx.array) -> mx.array:
        """Return the array with this leaf's flags. Shapes are not compared."""
        filled: mx.array = flag(array, self.requires_grad, self.is_parameter)
        return filled


def flag(tensor: Any, requires_grad: bool, is_parameter: bool) -> Any:
    """Return an array or a leaf as a ``Parameter`` or with ``requires_grad``."""
    if not requires_grad and not is_parameter:
        return tensor
    if isinstance(tensor, TensorShape):
        return TensorShape(tensor.shape, tensor.dtype, requires_grad, is_parameter)
    return TorchTensor(tensor, requires_grad, is_parameter)


def _show(value: Any) -> str:
    if isinstance(value, Placeholder):
        return value.path[:_MAX_TEXT] + ("" if value.is_name else "(...)")
    if isinstance(value, (mx.array, TensorShape)):
        return "a tensor"
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return f"{type(value).__name__} of {len(value)}"
    if type(value) is int and value.bit_length() > 256:
        return "a long int"  # Python refuses to print more than 4300 digits
    return repr(value[:40] if isinstance(value, (str, bytes, bytearray)) else value)


def plain_value(value: Any) -> Any:
    """Convert a placeholder of a well-known class to a plain value.

    A ``Namespace`` becomes a dict, a numpy scalar a number, a numpy array a numpy
    array, and a path a string. Everything else is returned unchanged.

    Example:

        >>> path = Placeholder.named("pathlib", "PosixPath").called(b"R", ("/", "a"))
        >>> plain_value(path)
        '/a'
    """
    if not isinstance(value, Placeholder) or value.is_name or value.callee is None:
        return value
    try:
        return _meaning(value, value.callee.path)
    except (TypeError, ValueError):  # not written by the class itself
        return value


def _meaning(value: Placeholder, path: str) -> Any:
    args, state = value.args or (), value.state
    if path in ("argparse.Namespace", "types.SimpleNamespace"):
        require(type(state) is dict and not args)
        return state
    if re.fullmatch(r"pathlib\.(_local\.)?(Pure)?(Posix|Windows)?Path", path):
        require(len(args) < 100 and all(type(arg) is str for arg in args))
        return str((PureWindowsPath if "Windows" in path else PurePosixPath)(*args))
    function = path.replace("numpy._core.", "numpy.core.")
    if function == "numpy.core.multiarray.scalar":
        dtype, data = args
        return _numpy_array(dtype, (), data).item()
    if function == "numpy.core.multiarray._reconstruct":
        _version, shape, dtype, is_fortran, data = state
        return _numpy_array(dtype, shape, data, "F" if is_fortran is True else "C")
    if function == "numpy.core.numeric._frombuffer":
        data, dtype, shape, order = args
        return _numpy_array(dtype, shape, data, order)
    return value


def _numpy_array(kind: Any, shape: Any, data: Any, order: Any = "C") -> Any:
    require(isinstance(kind, Placeholder) and kind.path == "numpy.dtype" and kind.args)
    code, state = kind.args[0], kind.state
    # Numbers, booleans, and fixed-length strings or bytes.
    require(type(code) is str and re.fullmatch(r"[biufcSU][1-9]\d{0,5}", code))
    endian = state[1] if type(state) is tuple and len(state) > 1 else "="
    require(endian in ("<", ">", "=", "|"))
    dtype = np.dtype(endian + code)
    require(type(shape) is tuple and len(shape) <= 32 and all(map(is_count, shape)))
    require(isinstance(data, (bytes, bytearray)) and order in ("C", "F"))
    require(prod(shape) * dtype.itemsize == len(data))
    return np.frombuffer(bytes(data), dtype).reshape(shape, order=order)
