"""Pickle plain values and arrays the way ``torch.save`` does, byte for byte.

Protocol 2, with the opcodes that ``torch.load(weights_only=True)`` accepts. Objects
are remembered by identity, as Python's pickler does it, so that an equal object gives
PyTorch's own bytes and an array that comes twice is stored once.
"""

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import mlx.core as mx
import numpy as np

from .dtypes import BY_MLX, BY_NUMPY, Element
from .foreign import DefaultDict, PlacedTensor, Placeholder, TorchName, TorchSize
from .foreign_writer import ForeignSavers
from .keys import check_key
from .limits import DEFAULT_LIMITS, CheckpointError
from .tree import show_key

Array = mx.array | np.ndarray

_BATCH = 1000  # how many items Python's pickler writes at once
# Names, so that each is one object and is remembered.
_LATIN1, _STORAGE, _CPU = "latin1", "storage", "cpu"


class PickleWriter(ForeignSavers):
    """Write one object; afterwards ``arrays`` are its storages, by number."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self._data = bytearray()
        # Values are kept beside their number: a freed one's id could come again.
        self._memo: dict[int, tuple[int, Any]] = {}
        self._names: dict[str, int] = {}
        self._count = 0
        self._open: set[int] = set()
        self._inside = 0  # how many placeholders are open
        self._path: list[Any] = []

    def write(self, value: Any) -> bytes:
        """Return the pickle of a value."""
        self._data += b"\x80\x02"
        self._save(value)
        self._data += b"."
        return bytes(self._data)

    def _fail(self, text: str) -> TypeError:
        path = "".join(show_key(key) for key in self._path[:20])
        return TypeError(f"obj{path} {text}")

    def _save(self, value: Any) -> None:
        save = _SAVERS.get(type(value))
        if save is None:
            raise self._fail(_refusal(value))
        # Inside of a placeholder there may be rings, as Python's pickler writes them.
        if id(value) in self._memo and (self._inside or id(value) not in self._open):
            self._get(self._memo[id(value)][0])
        elif id(value) in self._open:
            raise self._fail("contains itself, which cannot be saved.")
        elif type(value) in _NESTING:
            if len(self._open) >= DEFAULT_LIMITS.depth:
                raise self._fail(f"is nested over {DEFAULT_LIMITS.depth} deep.")
            self._open.add(id(value))
            save(self, value)
            self._open.discard(id(value))
        else:
            save(self, value)

    def _emit(self, opcode: bytes, form: str = "", *values: Any) -> None:
        self._data += opcode + struct.pack(form, *values)

    def _get(self, number: int) -> None:
        self._emit(*((b"h", "B") if number < 256 else (b"j", "<I")), number)

    def _put(self, *value: Any) -> None:
        """Number what was just written, as ``value`` if it can come again."""
        number, self._count = self._count, self._count + 1
        if value:
            self._memo[id(value[0])] = number, value[0]
        self._emit(*((b"q", "B") if number < 256 else (b"r", "<I")), number)

    def _name(self, path: str) -> None:
        module, _, name = path.rpartition(".")
        self._global(module, name)

    def _global(self, module: str, name: str) -> None:
        line = f"c{module}\n{name}\n"
        if line in self._names:
            return self._get(self._names[line])
        self._names[line] = self._count
        self._emit(line.encode())
        self._put()

    # Plain values.

    def _none(self, value: None) -> None:
        self._emit(b"N")

    def _bool(self, value: bool) -> None:
        self._emit(b"\x88" if value else b"\x89")

    def _int(self, value: int) -> None:
        if 0 <= value < 2**8:
            self._emit(b"K", "B", value)
        elif 0 <= value < 2**16:
            self._emit(b"M", "<H", value)
        elif -(2**31) <= value < 2**31:
            self._emit(b"J", "<i", value)
        else:
            # The shortest two's complement: -2**39 takes 5 bytes, 2**39 takes 6.
            size = (value if value >= 0 else ~value).bit_length() // 8 + 1
            if size > 255:
                raise self._fail("is an integer of over 255 bytes.")
            self._emit(b"\x8a", "B", size)
            self._emit(value.to_bytes(size, "little", signed=True))

    def _float(self, value: float) -> None:
        self._emit(b"G", ">d", value)

    def _str(self, value: str) -> None:
        text = value.encode("utf-8", "surrogatepass")
        if len(text) >= 2**32:
            raise self._fail("is a text of over 4 GiB.")
        self._emit(b"X", "<I", len(text))
        self._emit(text)
        self._put(value)

    def _bytes(self, value: bytes) -> None:
        # Protocol 2 has no bytes: they travel as text of the same code points. Python
        # writes empty ones otherwise, which weights_only=True does not read.
        if not value and self._inside:
            self._name("__builtin__.bytes")
            self._emit(b")R")
            return self._put(value)
        self._name("_codecs.encode")
        self._save(value.decode("latin1"))
        self._save(_LATIN1)
        self._call(b"\x86", value)

    def _bytearray(self, value: bytearray) -> None:
        self._name("__builtin__.bytearray")
        if value:
            self._save(bytes(value))
            self._call(b"\x85", value)
        else:
            self._emit(b")R")
            self._put(value)

    def _complex(self, value: complex) -> None:
        self._name("__builtin__.complex")
        self._float(value.real)
        self._float(value.imag)
        self._call(b"\x86", value)

    def _call(self, tuple_opcode: bytes, value: Any) -> None:
        """Close the arguments, call what was named before them, number the result."""
        self._emit(tuple_opcode)
        self._put()
        self._emit(b"R")
        self._put(value)

    # Containers.

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if not value:
            return self._emit(b")")
        if len(value) > 3:
            self._emit(b"(")
        self._items(enumerate(value))
        self._emit((b"\x85", b"\x86", b"\x87", b"t")[min(len(value), 4) - 1])
        self._put(value)

    def _list(self, value: list[Any]) -> None:
        self._emit(b"]")
        self._put(value)
        if len(value) == 1:
            self._items(enumerate(value))
            self._emit(b"a")
        elif value:
            self._batches(enumerate(value), len(value), b"e", self._items)

    def _dict(self, value: dict[Any, Any]) -> None:
        self._emit(b"}")
        self._put(value)
        if len(value) == 1:
            self._pairs(value.items())
            self._emit(b"s")
        elif value:
            # Python ends a dict whose last batch is full with an empty batch.
            extra = len(value) % _BATCH == 0
            self._batches(value.items(), len(value) + extra, b"u", self._pairs)

    def _ordered_dict(self, value: OrderedDict[Any, Any]) -> None:
        self._name("collections.OrderedDict")
        self._emit(b")R")
        self._put(value)
        self._entries(value)
        if set(vars(value)) - {"_metadata"}:
            raise self._fail("is an OrderedDict with attributes besides _metadata.")
        if vars(value):
            self._save(dict(vars(value)))
            self._emit(b"b")

    def _entries(self, value: dict[Any, Any]) -> None:
        """Write the items of an object that is more than a dict."""
        whole, last = divmod(len(value), _BATCH)
        if last == 1:
            self._batches(value.items(), whole * _BATCH, b"u", self._pairs)
            self._pairs(islice(value.items(), whole * _BATCH, None))
            self._emit(b"s")
        else:
            self._batches(value.items(), len(value), b"u", self._pairs)

    def _counter(self, value: Counter[Any]) -> None:
        self._name("collections.Counter")
        self._save(dict(value))
        self._call(b"\x85", value)

    def _set(self, value: set[Any]) -> None:
        for member in value:
            self._check_key(member)
        self._name("__builtin__.set")
        self._save(list(value))
        self._call(b"\x85", value)

    def _batches(
        self,
        items: Iterable[Any],
        count: int,
        opcode: bytes,
        write: Callable[[Iterable[Any]], None],
    ) -> None:
        rest = iter(items)
        for _ in range(0, count, _BATCH):
            self._emit(b"(")
            write(islice(rest, _BATCH))
            self._emit(opcode)

    def _items(self, items: Iterable[tuple[int, Any]]) -> None:
        for index, item in items:
            self._path.append(index)
            self._save(item)
            self._path.pop()

    def _pairs(self, items: Iterable[tuple[Any, Any]]) -> None:
        for key, item in items:
            self._path.append(key)
            self._check_key(key)
            self._save(key)
            self._save(item)
            self._path.pop()

    def _check_key(self, key: Any) -> None:
        try:
            check_key(key)
        except CheckpointError as error:
            raise self._fail(f"cannot be saved: {error}") from None

    # Arrays.

    def _array(
        self, value: Array, requires_grad: bool = False, remembered: Any = None
    ) -> None:
        element = _element(value)
        if element is None:
            raise self._fail(
                f"is an array of {value.dtype}, which PyTorch does not have."
            )
        self._name(f"torch._utils._rebuild_tensor_{'v2' if element.storage else 'v3'}")
        self._emit(b"(")
        self._storage(value, element)
        self._int(0)
        self._sizes(value.shape)
        self._sizes(_strides(value.shape))
        self._emit(b"\x88" if requires_grad else b"\x89")
        self._name("collections.OrderedDict")
        self._emit(b")R")
        self._put()
        if not element.storage:
            self._name(element.name)
        self._call(b"t", value if remembered is None else remembered)

    def _storage(self, value: Array, element: Element) -> None:
        self._emit(b"(")
        self._save(_STORAGE)
        if element.storage:
            self._name(f"torch.{element.storage}")
        else:
            self._name("torch.storage.UntypedStorage")
        self._save(str(len(self.arrays)))
        self._save(_CPU)
        self._int(value.size * (1 if element.storage else element.size))
        self._emit(b"t")
        self._put()
        self._emit(b"Q")
        self.arrays.append(value)

    def _sizes(self, sizes: tuple[int, ...]) -> None:
        if not sizes:
            return self._emit(b")")
        if len(sizes) > 3:
            self._emit(b"(")
        for size in sizes:
            self._int(size)
        self._emit((b"\x85", b"\x86", b"\x87", b"t")[min(len(sizes), 4) - 1])
        self._put()


def _element(value: Array) -> Element | None:
    if isinstance(value, mx.array):
        return BY_MLX.get(value.dtype)
    return BY_NUMPY.get(value.dtype.newbyteorder("<").str)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return those of a tensor in row order; PyTorch counts an empty dimension as 1."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * max(size, 1))
    return tuple(strides[::-1]) if shape else ()


def _refusal(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, np.generic):
        return f"is a numpy {kind}; save .item() of it."
    if isinstance(value, tuple):
        return f"is a {kind}, a named tuple; save tuple() or ._asdict() of it."
    if hasattr(value, "parameters"):
        return f"is a {kind}; save its parameters as a dict of arrays."
    return (
        f"is a {kind}, which cannot be saved; only arrays, dicts, lists, tuples, sets, "
        "numbers, text, bytes and None can."
    )


_SAVERS: dict[type, Callable[[PickleWriter, Any], None]] = {
    type(None): PickleWriter._none,
    bool: PickleWriter._bool,
    int: PickleWriter._int,
    float: PickleWriter._float,
    complex: PickleWriter._complex,
    str: PickleWriter._str,
    bytes: PickleWriter._bytes,
    bytearray: PickleWriter._bytearray,
    tuple: PickleWriter._tuple,
    list: PickleWriter._list,
    dict: PickleWriter._dict,
    OrderedDict: PickleWriter._ordered_dict,
    Counter: PickleWriter._counter,
    set: PickleWriter._set,
    frozenset: PickleWriter._frozenset,
    DefaultDict: PickleWriter._default_dict,
    TorchName: PickleWriter._torch_name,
    TorchSize: PickleWriter._torch_size,
    Placeholder: PickleWriter._placeholder,
    PlacedTensor: PickleWriter._placed_tensor,
    mx.array: PickleWriter._array,
    np.ndarray: PickleWriter._array,
    np.memmap: PickleWriter._array,
}
_NESTING = frozenset(
    {tuple, list, dict, OrderedDict, Counter, DefaultDict, Placeholder}
)
