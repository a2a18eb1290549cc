"""Write an object to a file that ``torch.load`` reads."""

import codecs
import fcntl
import io
import os
import pickle
import secrets
import shutil
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import mlx.core as mx
import numpy as np

from .foreign import (
    DefaultDict,
    Placeholder,
    TensorShape,
    TorchSize,
    TorchTensor,
    dtype_name,
)
from .limits import Limits
from .tensors import STORAGES, UNTYPED, Storage, bytes_of, row_strides
from .unpickler import TENSOR_SHAPE, check_tree

Array = mx.array | np.ndarray[Any, Any]

# torch.load(mmap=True) needs aligned storages.
_ALIGNMENT = 64
_CHUNK = 2**22
_TEMPORARY = f".torch_checkpoint-{'[0-9a-f]' * 16}.tmp"
_CLASSES = {dtype: f"torch.{kind}" for kind, dtype in STORAGES.items()}
_MARKED = (b"e", b"u", b"\x90")  # instructions that take all values above a mark


def save(file: "str | os.PathLike[str] | BinaryIO", obj: Any) -> None:
    """Write an object to a ``.pt`` file in the format of ``torch.save``.

    ``torch.load`` reads the file; types that PyTorch does not consider safe need
    ``weights_only=False``. Arrays become CPU tensors, and an array that appears twice
    is stored once. Only this library reads objects with ``TensorShape`` leaves.

    Args:
        file (str, PathLike or file): A path, where the new file atomically replaces an
            existing one and keeps its permissions, or a writable binary file.
        obj (Any): Dicts, lists, tuples and sets of arrays (``mx.array`` or
            ``numpy.ndarray``), numbers, strings, bytes and None; or results of ``load``
            and ``shapes``.

    Raises:
        TypeError: If ``obj`` contains a value of another type. The message says where.
        CheckpointError: If ``obj`` contains itself, is too deep, or contains an integer
            that is too long for ``load``.

    Example:

        >>> import os, tempfile
        >>> from mlx_gradscale import torch_checkpoint
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> torch_checkpoint.save(path, {"weight": mx.zeros((2, 3)), "epoch": 3})
        >>> torch_checkpoint.load(path)["weight"].shape
        (2, 3)
    """
    # Larger than the default, because obj may have been read with a raised limit.
    check_tree(obj, Limits(operations=10**8), TypeError)
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(obj)
    except RecursionError:  # chains of placeholders
        raise TypeError("obj is nested too deeply to be saved. Flatten it.") from None
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
            f"Expected a path or a writable binary file, got {type(file).__name__}. "
            "Call save(path, object)."
        )


@contextmanager
def _replace(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` at the end of the block.

    Meanwhile, a shared lock on the folder is held. If a writer gets an exclusive lock,
    no other writer is active, so it removes the files that killed writers left.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise OSError(f"{path} is not a regular file. Pass the path of a file.")
    temporary = target.with_name(f".torch_checkpoint-{secrets.token_hex(8)}.tmp")
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # another writer holds the lock
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for leftover in target.parent.glob(_TEMPORARY):
                leftover.unlink()
        with suppress(OSError):  # some network disks do not support locks
            fcntl.flock(folder, fcntl.LOCK_SH)
        with open(temporary, "xb") as file:
            with suppress(OSError):  # the target may not exist
                shutil.copymode(target, temporary)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        os.fsync(folder)
    finally:
        temporary.unlink(missing_ok=True)
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
        with mx.stream(mx.cpu):
            array = mx.contiguous(array)
            if array.dtype == mx.bfloat16:  # numpy has no bfloat16: write its bits
                array = array.view(mx.uint16)
        mx.eval(array)
    else:
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    data = bytes_of(array).data
    for start in range(0, len(data), _CHUNK):
        yield data[start : start + _CHUNK]


class _Name(Placeholder):
    """A name that Python's pickler accepts in place of a function."""

    def __call__(self) -> None:
        raise TypeError("A name is written to the pickle, never called.")


_PythonPickler: Any = pickle._Pickler


class _Pickler(_PythonPickler):  # type: ignore[misc]
    """Python's pickler, with names in place of PyTorch's functions and classes.

    Like ``torch.save``, it uses protocol 2, to write the same pickle if possible.
    """

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, 2)
        self.arrays: list[Array] = []
        self._names: dict[tuple[str, str], _Name] = {}

    def _name(self, module: str, name: str) -> _Name:
        """Return the same object for equal names, so that each name is written once."""
        return self._names.setdefault((module, name), _Name(module, name))

    def persistent_id(self, obj: Any) -> Any:
        """Return PyTorch's description of a storage, or None for other objects."""
        if type(obj) is not Storage:
            return None
        kind = _CLASSES.get(obj.dtype or "", UNTYPED[0])
        name = self._name(*kind.rsplit(".", 1))
        return "storage", name, obj.key, "cpu", obj.numel

    def reducer_override(self, obj: Any) -> Any:
        """Return the call that rebuilds an object, or NotImplemented by default."""
        kind = type(obj)
        if kind is TensorShape:
            return self._name(*TENSOR_SHAPE), tuple(vars(obj).values())
        if kind is TorchSize:
            return self._name("torch", "Size"), (tuple(obj),)
        if kind is DefaultDict:
            args = () if obj.factory is None else (obj.factory,)
            function = self._name("collections", "defaultdict")
            return function, args, None, None, iter(obj.items())
        if kind is bytes and not obj:
            # Python writes bytes(), which weights_only=True does not read.
            return codecs.encode, ("", "latin1")
        if kind is TorchTensor and obj.is_parameter:
            data = TorchTensor(obj, False, False)
            function = self._name("torch._utils", "_rebuild_parameter")
            return function, (data, obj.requires_grad, OrderedDict())
        if isinstance(obj, (mx.array, np.ndarray)):
            return self._reduce_tensor(obj)
        return NotImplemented

    def _reduce_tensor(self, array: Array) -> Any:
        dtype, key = dtype_name(array), str(len(self.arrays))
        self.arrays.append(array)
        shape, hooks = tuple(array.shape), OrderedDict()  # type: ignore[var-annotated]
        flag = getattr(array, "requires_grad", False)
        if dtype in _CLASSES:
            storage = Storage(key, dtype, array.size)
            args = storage, 0, shape, row_strides(shape), flag, hooks
            return self._name("torch._utils", "_rebuild_tensor_v2"), args
        storage, kind = Storage(key, None, array.nbytes), self._name("torch", dtype)
        more = storage, 0, shape, row_strides(shape), flag, hooks, kind
        return self._name("torch._utils", "_rebuild_tensor_v3"), more

    def _save_placeholder(self, obj: Placeholder) -> None:
        if obj.callee is None:
            return self.save(self._name(obj.module, obj.name))  # type: ignore[no-any-return]
        self.save(obj.callee)
        self.save(obj.args)
        self.write(obj.opcode)
        # An object in a cycle may have been written among its own arguments.
        if id(obj) in self.memo:
            self.write(b"0" + self.get(self.memo[id(obj)][0]))
        else:
            self.memoize(obj)
        for opcode, values in obj.edits:
            if opcode in _MARKED:
                self.write(b"(")
            for value in values:
                self.save(value)
            self.write(opcode)

    def _save_name(self, obj: _Name) -> None:
        if not obj.path.isprintable():
            raise TypeError(f"The name {obj.path!a:.160} is not printable. Change it.")
        outer, dot, inner = obj.name.rpartition(".")
        if dot:
            # Protocol 2 has no dotted names: Python gets the inner class by getattr.
            self.save_reduce(getattr, (self._name(obj.module, outer), inner), obj=obj)
        else:
            self.write(f"c{obj.module}\n{obj.name}\n".encode())
            self.memoize(obj)

    dispatch: ClassVar[dict[type, Any]] = _PythonPickler.dispatch | {
        Placeholder: _save_placeholder,
        _Name: _save_name,
    }
