"""What a file holds besides plain values and tensors: kept as it is, never run.

A pickle says how an object is made: a name, arguments, a state. Here these are kept
as data. Nothing is imported, looked up or called, and the writer says the same again,
so that the program that knows the class finds its own object.
"""

from typing import Any, NamedTuple

import mlx.core as mx

# Arguments and states are shown so deep, so many of them, and so long: a file can hold
# very many objects, and each other's arguments.
_DEEPEST, _MOST, _LONGEST = 2, 6, 200
_GETATTR = "builtins.getattr"
# Functions that make an object of the class that is their first argument.
_MAKERS = (
    "copyreg._reconstructor",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
)
# How protocol 2 writes them, for Python 2's sake.
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}


class Placeholder:
    """An object of a class, or a name, that only the file's own program knows.

    Attributes:
        module (str): Where the class or function is.
        name (str): Its name there.
        args (tuple or None): What it was called with; None if it is only named.
        kwargs (dict or None): The same by name.
        how (bytes): The pickle instruction that makes it.
        callee (Placeholder or None): What is called.
        steps (list): What is done with it then: instructions with their values.

    Example:

        >>> color = Placeholder.named("paint", "Color").called(b"R", (3,))
        >>> color.path, color.args, str(color)
        ('paint.Color', (3,), 'paint.Color(3)')
    """

    __slots__ = ("args", "callee", "how", "kwargs", "module", "name", "steps")

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name
        self.args: tuple[Any, ...] | None = None
        self.kwargs: dict[Any, Any] | None = None
        self.how = b"c"
        self.callee: Placeholder | None = None
        self.steps: list[tuple[bytes, list[Any]]] = []

    @classmethod
    def named(cls, module: str, name: str) -> "Placeholder":
        """Return the placeholder of a class or function by its name."""
        return cls(module, name)

    def called(
        self, how: bytes, args: tuple[Any, ...], kwargs: dict[Any, Any] | None = None
    ) -> "Placeholder":
        """Return what a pickle instruction makes of this one and arguments."""
        known = self
        if self.path in _MAKERS and args and type(args[0]) is Placeholder:
            known = args[0]
        made = Placeholder(known.module, known.name)
        if self._is_getattr and [type(arg) for arg in args] == [Placeholder, str]:
            # How protocol 2 names a class that is inside another.
            inner = f"{args[0].name}.{args[1][:_LONGEST]}"
            made.module, made.name = args[0].module, inner[: 5 * _LONGEST]
        made.callee, made.how, made.args, made.kwargs = self, how, args, kwargs
        return made

    @property
    def path(self) -> str:
        """Module and name as they are written in code."""
        return f"{_RENAMED.get(self.module, self.module)}.{self.name}"

    @property
    def state(self) -> Any:
        """What the object's attributes are set from; None if they are not."""
        return next((held[0] for step, held in self.steps[::-1] if step == b"b"), None)

    @property
    def is_name(self) -> bool:
        """Whether this stands for a class or function and not for an object."""
        return self.args is None or (
            self.callee is not None and self.callee._is_getattr
        )

    @property
    def _is_getattr(self) -> bool:
        return self.args is None and self.path == _GETATTR

    def __str__(self) -> str:
        text = _show(self, _DEEPEST)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."

    def __repr__(self) -> str:
        return f"<Placeholder {self}>"


class PlacedTensor(NamedTuple):
    """A tensor inside a placeholder, with what an array has no place for."""

    array: mx.array
    requires_grad: bool
    is_parameter: bool


class DefaultDict(dict[Any, Any]):
    """A ``collections.defaultdict`` whose ``factory`` is kept and not called."""

    __slots__ = ("factory",)

    def __init__(self, items: Any = (), factory: Any = None) -> None:
        super().__init__(items)
        self.factory = factory


class TorchName(str):
    """A ``torch.dtype`` or ``torch.device`` by its name, as in ``"torch.float16"``."""

    __slots__ = ()


class TorchSize(tuple[Any, ...]):
    """A ``torch.Size``."""

    __slots__ = ()


def _show(value: Any, depth: int) -> str:
    if isinstance(value, Placeholder):
        path = value.path[:_LONGEST]
        if value.is_name or not depth:
            return path if value.is_name else f"{path}(...)"
        is_made = value.callee is not None and value.callee.path in _MAKERS
        args = () if is_made else value.args or ()
        said = [_show(item, depth - 1) for item in args[:_MOST]]
        state = value.state
        if type(state) is tuple:  # a partial's function, for example
            said += [_show(item, depth - 1) for item in state[:_MOST]]
        named = dict(value.kwargs or {}) | (state if type(state) is dict else {})
        for key, item in list(named.items())[:_MOST]:
            said.append(f"{_show(key, 0).strip(chr(39))}={_show(item, depth - 1)}")
        return f"{path}({', '.join(said)})"
    if isinstance(value, (mx.array, PlacedTensor)):
        return "a tensor"
    if isinstance(value, (str, bytes, bytearray)):
        return repr(value if len(value) <= 40 else value[:40])
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return f"{type(value).__name__} of {len(value)}"
    return repr(value)
