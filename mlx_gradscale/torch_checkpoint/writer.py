"""Write an object to a file that ``torch.load`` reads."""

import codecs
import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import mlx.core as mx
import numpy as np

from .disk import atomic_write
from .objects import (
    CheckpointError,
    Placeholder,
    Storage,
    check,
    replace_tensors,
    show_path,
)
from .tensors import SIZES, STORAGES, Tensor, dtype_name
from .unpickler import MARKED, UNTYPED

# torch.load(mmap=True) needs aligned storages.
_ALIGNMENT = 64
_CLASSES: dict[str | None, str] = {None: UNTYPED[0]}
_CLASSES |= {dtype: f"torch.{kind}" for kind, dtype in STORAGES.items()}


def save(file: "str | os.PathLike[str] | BinaryIO", obj: Any) -> None:
    """Write an object to a ``.pt`` file in the format of ``torch.save``.

    ``torch.load`` reads the file; types that PyTorch does not consider safe need
    ``weights_only=False``. Arrays become CPU tensors, and an array that appears twice
    is stored once.

    Args:
        file (str, PathLike or file): A path, where the new file atomically replaces an
            existing one, or a writable binary file.
        obj (Any): Dicts, lists, tuples and sets of arrays (``mx.array`` or
            ``numpy.ndarray``), numbers, strings, bytes and None; or results of ``load``
            and ``shapes``.

    Raises:
        TypeError: If ``obj`` contains a value of another type. The message says where.
        CheckpointError: If ``obj`` is nested too deeply.

    Example:

        >>> import os, tempfile
        >>> from mlx_gradscale import torch_checkpoint
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> torch_checkpoint.save(path, {"weight": mx.zeros((2, 3)), "epoch": 3})
        >>> torch_checkpoint.load(path)["weight"].shape
        (2, 3)
    """
    obj, buffer = replace_tensors(obj, _to_tensor), io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(obj)
    except RecursionError:
        problem = "obj is nested too deeply to be saved. Flatten it."
        raise CheckpointError(problem) from None
    if isinstance(file, (str, os.PathLike)):
        # PyTorch names the folder in the zip file after the file if the name is ASCII.
        stem = Path(file).stem
        folder = stem if stem and stem.isascii() else "archive"
        with atomic_write(file) as raw:
            _write_zip(raw, folder, buffer.getvalue(), pickler.storages)
    elif hasattr(file, "write"):
        _write_zip(file, "archive", buffer.getvalue(), pickler.storages)
    else:
        raise TypeError(
            f"Expected a path or a writable binary file, got {type(file).__name__}. "
            "Call save(path, object)."
        )


def _to_tensor(path: tuple[Any, ...], leaf: Any) -> Tensor:
    is_array = isinstance(leaf, (mx.array, np.ndarray))
    if is_array and dtype_name(leaf) in SIZES:
        return Tensor.of(leaf)
    if isinstance(leaf, Tensor):
        return leaf
    kind, dtype = type(leaf).__name__, f" of dtype {leaf.dtype}" if is_array else ""
    advice = " Save its .item()." if isinstance(leaf, np.generic) else ""
    raise TypeError(
        f"{show_path(path)} has type {kind}{dtype}, which a checkpoint cannot hold."
        f"{advice} Only arrays, dicts, lists, tuples, sets, numbers, strings, bytes "
        "and None can be saved."
    )


def _write_zip(
    file: BinaryIO, folder: str, data: bytes, storages: Iterable[Storage]
) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:

        def add(name: str, size: int, chunks: Iterable[bytes | memoryview]) -> None:
            info = zipfile.ZipInfo(f"{folder}/{name}")
            is_wide = size >= 2**30
            # An extra field fills the gap before the data, as in PyTorch.
            header = 30 + len(info.filename) + 20 * is_wide + 4
            gap = -(archive.start_dir + header) % _ALIGNMENT
            info.extra = b"FB" + struct.pack("<H", gap) + b"Z" * gap
            with archive.open(info, "w", force_zip64=is_wide) as record:
                written = sum([record.write(chunk) for chunk in chunks])
            check(written == size, "The file became shorter while it was read")

        add("data.pkl", len(data), [data])
        add(".format_version", 1, [b"1"])
        add(".storage_alignment", 2, [b"%d" % _ALIGNMENT])
        add("byteorder", 6, [b"little"])
        for number, storage in enumerate(storages):
            add(f"data/{number}", storage.nbytes, storage.chunks())
        add("version", 2, [b"3\n"])


_Python: Any = pickle._Pickler


class _Pickler(_Python):  # type: ignore[misc]
    """Python's pickler, with placeholders for PyTorch's functions and classes.

    Like ``torch.save``, it uses protocol 2, to write the same pickle if possible.
    """

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, 2)
        # Storages in the order of their keys, which are numbers.
        self.storages: dict[Storage, str] = {}
        self._find_name = cache(Placeholder)  # each name is written once

    def _name(self, path: str) -> Placeholder:
        module, _, name = path.rpartition(".")
        return self._find_name(module, name)

    def _save_storage(self, storage: Storage) -> None:
        key = self.storages.setdefault(storage, str(len(self.storages)))
        kind = self._name(_CLASSES[storage.dtype])
        numel = storage.nbytes // SIZES[storage.dtype]
        self.save(("storage", kind, key, "cpu", numel))
        self.write(pickle.BINPERSID)

    def _save_tensor(self, tensor: Tensor) -> None:
        hooks: OrderedDict[Any, Any] = OrderedDict()
        if tensor.is_parameter:
            data = replace(tensor, requires_grad=False, is_parameter=False)
            args: tuple[Any, ...] = (data, tensor.requires_grad, hooks)
            function = "_rebuild_parameter"
        else:
            view = tensor.storage, tensor.offset, tensor.shape, tensor.strides
            args, function = (*view, tensor.requires_grad, hooks), "_rebuild_tensor_v2"
            if not tensor.storage.dtype:
                args = *args, self._name(f"torch.{tensor.dtype}")
                function = "_rebuild_tensor_v3"
        self._save_call(tensor, self._name(f"torch._utils.{function}"), args)

    def _save_call(
        self, obj: Any, callee: Placeholder, args: Any, opcode: bytes = pickle.REDUCE
    ) -> None:
        self.save(callee)
        self.save(args)
        self.write(opcode)
        # An object in a cycle may have been written among its own arguments.
        if id(obj) in self.memo:
            self.write(pickle.POP + self.get(self.memo[id(obj)][0]))
        else:
            self.memoize(obj)

    def _save_placeholder(self, obj: Placeholder) -> None:
        if obj.callee is None:
            self._save_name(self._find_name(obj.module, obj.name))
            return
        self._save_call(obj, obj.callee, obj.args, obj.opcode)
        for opcode, values in obj.edits:
            if opcode in MARKED:
                self.write(pickle.MARK)
            for value in values:
                self.save(value)
            self.write(opcode)

    def _save_name(self, name: Placeholder) -> None:
        outer, dot, inner = name.name.rpartition(".")
        if id(name) in self.memo:
            self.write(self.get(self.memo[id(name)][0]))
        elif dot:
            # Protocol 2 has no dotted names: Python gets the inner class by getattr.
            getter = self._name("__builtin__.getattr")
            self._save_call(name, getter, (Placeholder(name.module, outer), inner))
        else:
            self.write(f"c{name.module}\n{name.name}\n".encode())
            self.memoize(name)

    def _save_bytes(self, data: bytes) -> None:
        if data:
            _Python.dispatch[bytes](self, data)
        else:  # Python writes bytes(), which weights_only=True does not read
            self.save_reduce(codecs.encode, ("", "latin1"), obj=data)

    dispatch: ClassVar[dict[type, Any]] = _Python.dispatch | {
        Placeholder: _save_placeholder,
        Storage: _save_storage,
        Tensor: _save_tensor,
        bytes: _save_bytes,
    }
