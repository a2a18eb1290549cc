"""Values of a checkpoint that neither Python nor MLX has a type for.

A pickle describes how to make an object: a name, arguments, a state. A ``Placeholder``
keeps this description as data. Nothing is imported or called, and the writer repeats
the description, so the program that knows the class finds its own object.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, Literal

import mlx.core as mx
import numpy as np

# str() of a placeholder shows arguments this deep, this many, and this long.
_MAX_DEPTH, _MAX_ITEMS, _MAX_TEXT = 2, 6, 200
# Functions that make an object of the class that is their first argument.
_CONSTRUCTORS = (
    "copyreg._reconstructor",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
)
# Protocol 2 writes the names of Python 2.
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}


class Placeholder:
    """A class, function or object that only the program behind the file knows.

    Attributes:
        module (str): The module of the class or function.
        name (str): Its name there.
        args (tuple or None): The arguments of the call; None for a bare name.
        kwargs (dict or None): The keyword arguments, if any.
        callee (Placeholder or None): What is called.
        opcode (bytes): The pickle instruction that makes the call.
        edits (list): The instructions that follow, each with its values.

    Example:

        >>> color = Placeholder.named("paint", "Color").called(b"R", (3,))
        >>> color.path, color.args, str(color)
        ('paint.Color', (3,), 'paint.Color(3)')
    """

    __slots__ = ("args", "callee", "edits", "kwargs", "module", "name", "opcode")

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name
        self.args: tuple[Any, ...] | None = None
        self.kwargs: dict[Any, Any] | None = None
        self.callee: Placeholder | None = None
        self.opcode = b"c"
        self.edits: list[tuple[bytes, list[Any]]] = []

    @classmethod
    def named(cls, module: str, name: str) -> "Placeholder":
        """Return the placeholder of a class or function."""
        return cls(module, name)

    def called(
        self, opcode: bytes, args: tuple[Any, ...], kwargs: dict[Any, Any] | None = None
    ) -> "Placeholder":
        """Return the object that a pickle instruction makes by calling this one."""
        known = self
        if self.path in _CONSTRUCTORS and args and type(args[0]) is Placeholder:
            known = args[0]
        made = Placeholder(known.module, known.name)
        if self.is_getattr and [type(arg) for arg in args] == [Placeholder, str]:
            # How protocol 2 refers to a class inside another class.
            made.module = args[0].module
            made.name = f"{args[0].name}.{args[1]}"[: 5 * _MAX_TEXT]
        made.callee, made.opcode, made.args, made.kwargs = self, opcode, args, kwargs
        return made

    @property
    def path(self) -> str:
        """Module and name, as in code."""
        return f"{_RENAMED.get(self.module, self.module)}.{self.name}"

    @property
    def state(self) -> Any:
        """The state that sets the object's attributes, usually a dict, or None."""
        return next((held[0] for code, held in self.edits[::-1] if code == b"b"), None)

    @property
    def is_name(self) -> bool:
        """Whether this is a class or function, not an object."""
        return self.args is None or (self.callee is not None and self.callee.is_getattr)

    @property
    def is_getattr(self) -> bool:
        """Whether this is Python's function ``getattr``."""
        return self.args is None and self.path == "builtins.getattr"

    def __str__(self) -> str:
        text = _show(self, _MAX_DEPTH)
        return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."

    def __repr__(self) -> str:
        return f"<Placeholder {self}>"


class DefaultDict(dict[Any, Any]):
    """A ``collections.defaultdict`` whose ``factory`` is kept but never called."""

    __slots__ = ("factory",)

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

    Results of arithmetic are plain arrays.

    Args:
        array (mx.array): The values.
        requires_grad (bool): PyTorch's attribute of this name.
        is_parameter (bool): Whether it is a ``torch.nn.Parameter``.
    """

    def __init__(
        self, array: mx.array, requires_grad: bool = True, is_parameter: bool = True
    ) -> None:
        super().__init__(array)
        self.requires_grad = requires_grad
        self.is_parameter = is_parameter


@dataclass(frozen=True)
class TensorShape:
    """A tensor without its data, as a leaf of ``shapes`` and of templates.

    Args:
        shape (tuple): The shape.
        dtype (str): PyTorch's name of the dtype, as in ``"float16"``.
        requires_grad (bool): PyTorch's attribute of this name.
        is_parameter (bool): Whether it is a ``torch.nn.Parameter``.

    Example:

        >>> TensorShape.of(mx.zeros((2, 3)))
        TensorShape(shape=(2, 3), dtype='float32')
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
        """Return the array with the flags of this leaf. Shapes are not compared."""
        if self.requires_grad or self.is_parameter:
            return TorchTensor(array, self.requires_grad, self.is_parameter)
        return array

    def __repr__(self) -> str:
        flags = "".join(
            f", {flag}=True"
            for flag in ("requires_grad", "is_parameter")
            if getattr(self, flag)
        )
        return f"TensorShape(shape={self.shape}, dtype={self.dtype!r}{flags})"


def is_count(value: Any) -> bool:
    """Return whether a value is a non-negative integer that fits in 64 bits."""
    return type(value) is int and 0 <= value < 2**63


def _show(value: Any, depth: int) -> str:
    if isinstance(value, Placeholder):
        path = value.path[:_MAX_TEXT]
        if value.is_name or not depth:
            return path if value.is_name else f"{path}(...)"
        constructed = value.callee is not None and value.callee.path in _CONSTRUCTORS
        args = () if constructed else value.args or ()
        shown = [_show(item, depth - 1) for item in args[:_MAX_ITEMS]]
        state = value.state
        if type(state) is tuple:  # the function of a functools.partial, for example
            shown += [_show(item, depth - 1) for item in state[:_MAX_ITEMS]]
        named = dict(value.kwargs or {}) | (state if type(state) is dict else {})
        for key, item in list(named.items())[:_MAX_ITEMS]:
            shown.append(f"{_show(key, 0).strip(chr(39))}={_show(item, depth - 1)}")
        return f"{path}({', '.join(shown)})"
    if isinstance(value, (mx.array, TensorShape)):
        return "a tensor"
    if isinstance(value, (str, bytes, bytearray)):
        return repr(value[:40])
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return f"{type(value).__name__} of {len(value)}"
    return repr(value)


def plain_value(value: Any) -> Any:
    """Return what a placeholder means, for classes whose meaning is fixed.

    A ``Namespace`` becomes its dict, a numpy scalar a number, a numpy array a numpy
    array, a path its text. Everything else is returned unchanged.

    Example:

        >>> path = Placeholder.named("pathlib", "PosixPath").called(b"R", ("/", "a"))
        >>> plain_value(path)
        '/a'
    """
    if not isinstance(value, Placeholder) or value.is_name or value.callee is None:
        return value
    interpret = _MEANINGS.get(value.callee.path)
    try:
        found = interpret(value) if interpret else None
    except (ValueError, TypeError):  # not what the class itself writes
        return value
    return value if found is None else found


def _namespace(value: Placeholder) -> dict[Any, Any] | None:
    return value.state if type(value.state) is dict and not value.args else None


def _path(value: Placeholder) -> str | None:
    args = value.args or ()
    if len(args) > 100 or not all(type(arg) is str for arg in args):
        return None
    is_windows = "Windows" in value.name
    return str(PureWindowsPath(*args) if is_windows else PurePosixPath(*args))


def _numpy_dtype(value: Any) -> np.dtype[Any] | None:
    is_dtype = isinstance(value, Placeholder) and value.path == "numpy.dtype"
    if not is_dtype or not value.args or type(value.args[0]) is not str:
        return None
    state = value.state
    order = state[1] if type(state) is tuple and len(state) > 1 else "="
    # Numbers, truth values, and text or bytes of a fixed length.
    is_plain = re.fullmatch(r"[biufcSU]\d{1,6}", value.args[0])
    if not is_plain or type(order) is not str or order not in ("<", ">", "=", "|"):
        return None
    return np.dtype(order + value.args[0])


def _numpy_scalar(value: Placeholder) -> Any:
    kind, data = value.args or ()
    dtype = _numpy_dtype(kind)
    if dtype is None or type(data) is not bytes or len(data) != dtype.itemsize:
        return None
    return np.frombuffer(data, dtype)[0].item()


def _numpy_array(
    kind: Any, shape: Any, data: Any, order: Literal["C", "F"]
) -> np.ndarray[Any, Any] | None:
    dtype = _numpy_dtype(kind)
    fits = type(shape) is tuple and len(shape) <= 32 and all(map(is_count, shape))
    if dtype is None or not fits or not isinstance(data, (bytes, bytearray)):
        return None
    if not dtype.itemsize or prod(shape) * dtype.itemsize != len(data):
        return None
    return np.frombuffer(bytes(data), dtype).reshape(shape, order=order)


def _numpy_reconstruct(value: Placeholder) -> np.ndarray[Any, Any] | None:
    _version, shape, dtype, is_fortran, data = value.state
    return _numpy_array(dtype, shape, data, "F" if is_fortran is True else "C")


def _numpy_frombuffer(value: Placeholder) -> np.ndarray[Any, Any] | None:
    data, dtype, shape, order = value.args or ()
    return _numpy_array(dtype, shape, data, "F" if order == "F" else "C")


_MEANINGS: dict[str, Callable[[Placeholder], Any]] = {
    "argparse.Namespace": _namespace,
    "types.SimpleNamespace": _namespace,
}
for _core in ("numpy.core", "numpy._core"):
    _MEANINGS[f"{_core}.multiarray.scalar"] = _numpy_scalar
    _MEANINGS[f"{_core}.multiarray._reconstruct"] = _numpy_reconstruct
    _MEANINGS[f"{_core}.numeric._frombuffer"] = _numpy_frombuffer
for _module in ("pathlib", "pathlib._local"):
    for _flavour in ("Path", "PosixPath", "WindowsPath"):
        _MEANINGS[f"{_module}.{_flavour}"] = _path
        _MEANINGS[f"{_module}.Pure{_flavour}"] = _path
