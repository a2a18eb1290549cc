"""``save``: write an object to a file that ``torch.load`` reads."""

import io
import os
import pickle
import secrets
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

import mlx.core as mx
import numpy as np

from .builders import TENSOR_SHAPE
from .foreign import (
    DefaultDict,
    Placeholder,
    TensorShape,
    TorchName,
    TorchSize,
    TorchTensor,
)
from .limits import Limits
from .tensors import Element, element_of, row_strides
from .unpickler import check_tree

Array = mx.array | np.ndarray[Any, Any]

# torch.load(mmap=True) needs aligned storages.
_ALIGNMENT = 64
_CHUNK = 2**22
_BATCH = 1000  # items per batch in Python's pickler
_MARKED = (b"e", b"u", b"\x90")  # instructions that take all values above a mark


def save(file: "str | os.PathLike[str] | BinaryIO", obj: Any) -> None:
    """Write a ``.pt`` file with the layout and pickle of ``torch.save``.

    ``torch.load(weights_only=True)`` reads it if the object is plain. Arrays become
    CPU tensors, and an array that appears twice is stored once. Results of ``load`` are
    written back unchanged. Only this library reads objects with ``TensorShape`` leaves.

    Args:
        file (str, PathLike or file): A path, which is replaced atomically when
            everything is written, or a writable binary file.
        obj (Any): Dicts, lists, tuples and sets of arrays (``mx.array`` or
            ``numpy.ndarray``), numbers, strings, bytes and None; or results of ``load``
            and ``shapes``.

    Raises:
        TypeError: ``obj`` holds something else. The message says where.
        CheckpointError: ``obj`` contains itself or is too deep for ``load``.

    Example:

        >>> import os, tempfile
        >>> from mlx_gradscale import torch_checkpoint
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> torch_checkpoint.save(path, {"weight": mx.zeros((2, 3)), "epoch": 3})
        >>> torch_checkpoint.load(path)["weight"].shape
        (2, 3)
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(obj)
    check_tree(obj, Limits())
    if isinstance(file, (str, os.PathLike)):
        # PyTorch names the folder in the zip file after the file if the name is ASCII.
        stem = Path(file).stem
        with _replace(Path(file)) as raw:
            folder = stem if stem and stem.isascii() else "archive"
            _write_zip(raw, folder, buffer.getvalue(), pickler.arrays)
    elif hasattr(file, "write"):
        _write_zip(file, "archive", buffer.getvalue(), pickler.arrays)
    else:
        raise TypeError(
            "save() takes a path or a writable binary file first and the object "
            f"second, not a {type(file).__name__} first."
        )


@contextmanager
def _replace(path: Path) -> Iterator[BinaryIO]:
    """Replace a file atomically once the new one is on disk."""
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name[:80]}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _write_zip(file: BinaryIO, folder: str, data: bytes, arrays: list[Array]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:

        def add(name: str, size: int, chunks: Iterable[bytes | memoryview]) -> None:
            info = zipfile.ZipInfo(f"{folder}/{name}")
            is_wide = size >= 2**30
            # An extra field fills the gap before the data, as in PyTorch.
            header = 30 + len(info.filename) + 20 * is_wide + 4
            gap = -(archive.start_dir + header) % _ALIGNMENT
            info.extra = b"FB" + struct.pack("<H", gap) + b"Z" * gap
            with archive.open(info, "w", force_zip64=is_wide) as record:
                for chunk in chunks:
                    record.write(chunk)

        add("data.pkl", len(data), [data])
        add(".format_version", 1, [b"1"])
        add(".storage_alignment", 2, [b"%d" % _ALIGNMENT])
        add("byteorder", 6, [b"little"])
        for number, array in enumerate(arrays):
            add(f"data/{number}", array.nbytes, _chunks(array))
        add("version", 2, [b"3\n"])


def _chunks(array: Array) -> Iterator[memoryview]:
    """Yield the bytes of an array in row-major order, little-endian."""
    if isinstance(array, mx.array):
        if array.dtype == mx.bfloat16:  # numpy has no bfloat16: write its bits
            array = array.view(mx.uint16, stream=mx.cpu)
        mx.eval(array)
        values = np.asarray(memoryview(array))  # type: ignore[arg-type]
    else:
        values = array.astype(array.dtype.newbyteorder("<"), copy=False)
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    for start in range(0, len(data), _CHUNK):
        yield data[start : start + _CHUNK]


class _Data(NamedTuple):
    """The tensor of a ``Parameter``, which is written as a separate object."""

    array: Array


class _Storage(NamedTuple):
    number: int
    element: Element
    array: Array


_PythonPickler: Any = pickle._Pickler


class _Pickler(_PythonPickler):  # type: ignore[misc]
    """Python's pickler, with names in place of PyTorch's functions and classes.

    It uses protocol 2 like ``torch.save``, so equal objects give PyTorch's own bytes.
    """

    dispatch: ClassVar[dict[type, Callable[..., None]]] = {}

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, 2)
        self.arrays: list[Array] = []
        self._names: dict[tuple[str, str], Placeholder] = {}
        self._path: list[Any] = []
        self._objects = 0  # open placeholders

    def dump(self, obj: Any) -> None:
        """Write the pickle of an object."""
        try:
            super().dump(obj)
        except RecursionError:
            raise TypeError("obj is nested too deep to be saved.") from None

    def reducer_override(self, obj: Any) -> Any:
        """Refuse all types without a method in this class."""
        if type(obj) not in self.dispatch:
            advice = " Save .item() of it." if isinstance(obj, np.generic) else ""
            raise self._error(
                f"is a {type(obj).__name__}, which cannot be saved.{advice} Arrays, "
                "dicts, lists, tuples, sets, numbers, text, bytes and None can."
            )
        return NotImplemented

    def _error(self, problem: str) -> TypeError:
        place = "".join(f"[{key!a:.80}]" for key in self._path[:20])
        return TypeError(f"obj{place} {problem}")

    def _name(self, module: str, name: str) -> Placeholder:
        """Return one placeholder per name, so that each name is written once."""
        key = module, name
        return self._names.setdefault(key, Placeholder.named(module, name))

    def _reduce(self, module: str, name: str, args: Any, obj: Any) -> None:
        self.save(self._name(module, name))
        self.save(args)
        self.write(b"R")
        self._remember(obj)

    def _remember(self, obj: Any) -> None:
        # An object in a cycle may have been written among its own arguments.
        if id(obj) in self.memo:
            self.write(b"0" + self.get(self.memo[id(obj)][0]))
        else:
            self.memoize(obj)

    def _save_call(self, obj: Any) -> None:
        self._reduce(*_CALLS[type(obj)](obj), obj)

    def _save_bytes(self, obj: bytes) -> None:
        # Python calls bytes() for empty ones, which weights_only=True does not read.
        if not obj and self._objects:
            self._reduce("__builtin__", "bytes", (), obj)
        else:
            # Protocol 2 has no bytes: they become a string with the same code points.
            self._reduce("_codecs", "encode", (obj.decode("latin1"), "latin1"), obj)

    def _save_list(self, obj: list[Any]) -> None:
        self.write(b"]")
        self.memoize(obj)
        for start in range(0, len(obj), _BATCH):
            pairs = enumerate(obj[start : start + _BATCH], start)
            self._batch(pairs, b"a" if len(obj) == 1 else b"e")

    def _save_dict(self, obj: dict[Any, Any]) -> None:
        self.write(b"}")
        self.memoize(obj)
        rest = iter(obj.items())
        # A dict whose last batch is full ends with an empty one.
        for _ in range(len(obj) // _BATCH + 1 if obj else 0):
            self._batch(islice(rest, _BATCH), b"s" if len(obj) == 1 else b"u")

    def _batch(self, items: Iterable[tuple[Any, Any]], opcode: bytes) -> None:
        if opcode in _MARKED:
            self.write(b"(")
        for key, item in items:
            self._path.append(key)
            if opcode in b"su":
                self.save(key)
            self.save(item)
            self._path.pop()
        self.write(opcode)

    def _save_subclass(self, obj: OrderedDict[Any, Any] | DefaultDict) -> None:
        self._save_call(obj)
        # Python batches the items of a dict subclass differently.
        rest = iter(obj.items())
        while batch := list(islice(rest, _BATCH)):
            self._batch(batch, b"s" if len(batch) == 1 else b"u")
        attributes = dict(vars(obj)) if isinstance(obj, OrderedDict) else {}
        if attributes.keys() - {"_metadata"}:
            raise self._error("has attributes other than _metadata.")
        if attributes:
            self.save(attributes)
            self.write(b"b")

    def _save_torch_name(self, obj: TorchName) -> None:
        if obj.startswith("torch."):
            self.save(self._name("torch", obj.removeprefix("torch.")))
        else:
            kind, *index = obj.split(":")
            self._reduce("torch", "device", (kind, *map(int, index)), obj)

    def _save_placeholder(self, obj: Placeholder) -> None:
        if obj.callee is None:
            return self._save_name(obj)
        self._objects += 1
        self.save(obj.callee)
        self.save(obj.args)
        self.write(obj.opcode)
        self._remember(obj)
        for opcode, values in obj.edits:
            if opcode in _MARKED:
                self.write(b"(")
            for value in values:
                self.save(value)
            self.write(opcode)
        self._objects -= 1

    def _save_name(self, obj: Placeholder) -> None:
        module, name = obj.module, obj.name
        if obj is not self._name(module, name):
            self.save(self._name(module, name))
            return
        if not f"{module}{name}".isprintable():
            raise self._error(f"has no printable name: {module!a:.80} {name!a:.80}.")
        outer, dot, inner = name.rpartition(".")
        if dot:
            # Protocol 2 has no dotted names: Python gets the inner class by getattr.
            args = self._name(module, outer), inner
            return self._reduce("__builtin__", "getattr", args, obj)
        self.write(f"c{module}\n{name}\n".encode())
        self.memoize(obj)

    def _save_array(self, obj: Array) -> None:
        if not isinstance(obj, TorchTensor) or not obj.is_parameter:
            return self._save_tensor(obj, getattr(obj, "requires_grad", False), obj)
        hooks: OrderedDict[Any, Any] = OrderedDict()
        args = _Data(obj), obj.requires_grad, hooks
        self._reduce("torch._utils", "_rebuild_parameter", args, obj)

    def _save_data(self, obj: _Data) -> None:
        self._save_tensor(obj.array, False, obj)

    def _save_tensor(self, array: Array, requires_grad: bool, obj: Any) -> None:
        element = element_of(array)
        if element is None:
            raise self._error(f"has a dtype that PyTorch lacks: {array.dtype}.")
        storage = _Storage(len(self.arrays), element, array)
        self.arrays.append(array)
        hooks: OrderedDict[Any, Any] = OrderedDict()
        shape = tuple(array.shape)
        view = storage, 0, shape, row_strides(shape), requires_grad, hooks
        if element.storage:
            self._reduce("torch._utils", "_rebuild_tensor_v2", view, obj)
        else:
            args = *view, TorchName(f"torch.{element.name}")
            self._reduce("torch._utils", "_rebuild_tensor_v3", args, obj)

    def _save_storage(self, obj: _Storage) -> None:
        if obj.element.storage:
            kind, size = self._name("torch", obj.element.storage), obj.array.size
        else:
            kind, size = self._name("torch.storage", "UntypedStorage"), obj.array.nbytes
        self.save(("storage", kind, str(obj.number), "cpu", size))
        self.write(b"Q")


# The calls that rebuild objects of these types: module, name and arguments.
_CALLS: dict[type, Callable[[Any], tuple[str, str, tuple[Any, ...]]]] = {
    bytearray: lambda x: ("__builtin__", "bytearray", (bytes(x),) if x else ()),
    complex: lambda x: ("__builtin__", "complex", (x.real, x.imag)),
    set: lambda x: ("__builtin__", "set", (list(x),)),
    frozenset: lambda x: ("__builtin__", "frozenset", (list(x),)),
    Counter: lambda x: ("collections", "Counter", (dict(x),)),
    OrderedDict: lambda x: ("collections", "OrderedDict", ()),
    DefaultDict: lambda x: (
        "collections",
        "defaultdict",
        () if x.factory is None else (x.factory,),
    ),
    TorchSize: lambda x: ("torch", "Size", (tuple(x),)),
    TensorShape: lambda x: (*TENSOR_SHAPE, tuple(vars(x).values())),
}
for _kind in (type(None), bool, int, float, str, tuple):
    _Pickler.dispatch[_kind] = _PythonPickler.dispatch[_kind]
_Pickler.dispatch |= dict.fromkeys(_CALLS, _Pickler._save_call) | {
    OrderedDict: _Pickler._save_subclass,
    DefaultDict: _Pickler._save_subclass,
    bytes: _Pickler._save_bytes,
    list: _Pickler._save_list,
    dict: _Pickler._save_dict,
    TorchName: _Pickler._save_torch_name,
    Placeholder: _Pickler._save_placeholder,
    TorchTensor: _Pickler._save_array,
    mx.array: _Pickler._save_array,
    np.ndarray: _Pickler._save_array,
    np.memmap: _Pickler._save_array,
    _Data: _Pickler._save_data,
    _Storage: _Pickler._save_storage,
}
