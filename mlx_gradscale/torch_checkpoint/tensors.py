"""Lazy tensors: views of storages, which are blocks of bytes in a file."""

import io
import os
import weakref
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from .disk import open_file
from .objects import check

Array = mx.array | np.ndarray[Any, Any]

# PyTorch's classes of storages, and the dtypes of their elements. Tensors of other
# dtypes have an untyped storage and record their own dtype.
STORAGES = {
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "DoubleStorage": "float64",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
}
MLX_DTYPES: dict[str, mx.Dtype] = {
    name: getattr(mx, "bool_" if name == "bool" else name)
    for name in {*STORAGES.values(), "uint16", "uint32", "uint64"} - {"complex128"}
}
# The bytes per element of the dtypes that can be saved. MLX lacks complex128.
SIZES = {"complex128": 16} | {name: x.size for name, x in MLX_DTYPES.items()}
_WORDS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
# MLX stores a dimension as int32.
MAX_DIM = 2**31 - 1
# Data is read and its checksum computed in pieces that fit in a cache, by this many
# threads: one thread takes 0.3 s for the checksum of 1 GB.
_PIECE, _THREADS = 2**18, 4


class Source:
    """The bytes of a checkpoint. A file stays open as long as this object exists."""

    def __init__(self, file: "str | os.PathLike[str] | bytes") -> None:
        self._data: memoryview | None = None
        if isinstance(file, (bytes, bytearray)):
            self._data, self.size = memoryview(bytes(file)), len(file)
            return
        shown = os.fspath(file)
        check(
            not os.path.exists(os.path.join(file, ".metadata")),
            f"{shown} is a folder of torch.distributed.checkpoint",
            "Convert it to a file with: python -m torch.distributed.checkpoint."
            f"format_utils dcp_to_torch {shown} FILE",
        )
        self._descriptor = open_file(file, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size

    def open(self) -> Any:
        """Open the bytes as a file."""
        if self._data is not None:
            return io.BytesIO(self._data)
        return open(self._descriptor, "rb", closefd=False)

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill a memoryview of bytes."""
        if self._data is not None:
            target[:] = self._data[start : start + target.nbytes]
        else:
            size = os.preadv(self._descriptor, [target], start)
            check(size == target.nbytes, "The file became shorter while it was read")

    def read(self, start: int, size: int) -> bytes:
        """Return up to ``size`` bytes."""
        target = bytearray(min(size, max(0, self.size - start)))
        self.read_into(memoryview(target), start)
        return bytes(target)


@dataclass(eq=False)
class Storage:
    """A block of bytes: a record in a file, or the bytes of an array."""

    dtype: str | None  # of the elements; None if it is untyped
    nbytes: int
    data: Any = None  # a Source or an array
    start: int = 0  # in the file
    checksum: int | None = None  # CRC-32

    @property
    def numel(self) -> int:
        """The number of elements; of bytes if it is untyped."""
        return self.nbytes // SIZES[self.dtype] if self.dtype else self.nbytes

    def read(self, target: memoryview | None = None) -> memoryview:
        """Return the bytes; those of a file are read into ``target`` and verified.

        They are little-endian and row-major.
        """
        if not isinstance(self.data, Source):
            data = bytes_of(self.data)
            if target is not None:
                target[:] = data
            return data
        if target is None:
            target = memoryview(bytearray(self.nbytes))
        found = 0
        for at in range(0, self.nbytes, _PIECE):
            piece = target[at : min(at + _PIECE, self.nbytes)]
            self.data.read_into(piece, self.start + at)
            found = zlib.crc32(piece, found)
        is_right = self.checksum in (None, found)
        check(is_right, "The file is damaged: the checksum of a record is wrong")
        return target


def bytes_of(array: Array) -> memoryview:
    """Return the bytes of an array in row-major order, little-endian."""
    if not isinstance(array, mx.array):
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        return _view_bytes(array)
    with mx.stream(mx.cpu):
        array = mx.contiguous(array)
        if array.dtype == mx.bfloat16:  # numpy has no bfloat16: view its bits
            array = array.view(mx.uint16)
    mx.eval(array)
    return _view_bytes(array)


def _view_bytes(array: Any) -> memoryview:
    return np.asarray(memoryview(array)).reshape(-1).view(np.uint8).data


def dtype_name(of: Any) -> str:
    """Return the name of a dtype of MLX or numpy, or of an array's dtype."""
    dtype = getattr(of, "dtype", of)
    return str(getattr(dtype, "name", dtype)).rpartition(".")[2]


def _row_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return row-major strides in elements; PyTorch counts an empty axis as 1."""
    strides = [1]
    for n in shape[:0:-1]:
        strides.append(strides[-1] * (n or 1))
    return tuple(strides[::-1]) if shape else ()


@dataclass(frozen=True, repr=False)
class Tensor:
    """A tensor in a checkpoint, which is read only on demand.

    Attributes:
        shape (tuple): The shape.
        dtype (str): PyTorch's name for the dtype, such as ``"float16"``.
        requires_grad (bool): As in PyTorch.
        is_parameter (bool): Whether it is a ``torch.nn.Parameter``.
    """

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool = False
    is_parameter: bool = False

    @classmethod
    def of(cls, array: Array) -> "Tensor":
        """Return a tensor with the values of an array."""
        dtype, shape = dtype_name(array), tuple(array.shape)
        is_typed = dtype in STORAGES.values()
        storage = Storage(dtype if is_typed else None, array.nbytes, array)
        return cls(storage, dtype, 0, shape, _row_strides(shape))

    def read(self) -> mx.array:
        """Read the values.

        To read many tensors, use ``read_all``, which reads a shared storage once.

        Raises:
            CheckpointError: If the file is damaged, or MLX does not have the dtype.
        """
        return read_all([self])[0]

    def replace(self, array: Array) -> "Tensor":
        """Return a tensor with the values of an array and the flags of this one."""
        new = Tensor.of(array)
        grad, is_parameter = self.requires_grad, self.is_parameter
        return replace(new, requires_grad=grad, is_parameter=is_parameter)

    @property
    def nbytes(self) -> int:
        """Size in bytes of the values."""
        return prod(self.shape) * SIZES.get(self.dtype, 1)

    @property
    def _is_whole(self) -> bool:
        """Whether this is all of its storage, in row-major order."""
        is_all = self.nbytes == self.storage.nbytes
        return is_all and self.strides == _row_strides(self.shape)

    def __repr__(self) -> str:
        return f"<Tensor {self.dtype} {'x'.join(map(str, self.shape)) or 'scalar'}>"


def read_all(tensors: Iterable[Tensor]) -> list[mx.array]:
    """Read tensors; those that share a storage share memory.

    Args:
        tensors (list of Tensor): The tensors. Equal ones become one array.

    Raises:
        CheckpointError: If the file is damaged, or MLX does not have a dtype.
    """
    tensors = [*tensors]
    # A storage without a dtype is read once for each dtype of its tensors.
    first: dict[tuple[Storage, str], Tensor] = {}
    for tensor in tensors:
        name = f"torch.{tensor.dtype}"
        problem = f"MLX does not have the dtype {name!a}"
        check(tensor.dtype in MLX_DTYPES, problem, "Convert the tensor in PyTorch.")
        count = tensor.storage.nbytes // SIZES[tensor.dtype]
        check(
            tensor._is_whole or count <= MAX_DIM,
            f"a tensor is part of a storage of over {MAX_DIM} elements",
            "Call .clone() on it in PyTorch and save again.",
        )
        first.setdefault((tensor.storage, tensor.dtype), tensor)
    with ThreadPoolExecutor(_THREADS) as threads:
        blocks = dict(zip(first, threads.map(_read_block, first.values()), strict=True))
    found = {x: _view(x, blocks[x.storage, x.dtype]) for x in dict.fromkeys(tensors)}
    mx.eval([*found.values()])  # a lazy array would be tied to this thread
    return [found[tensor] for tensor in tensors]


def _read_block(tensor: Tensor) -> mx.array:
    """Return the storage of a tensor as an array of words of the tensor's size."""
    storage, size = tensor.storage, SIZES[tensor.dtype]
    shape = tensor.shape if tensor._is_whole else (storage.nbytes // size,)
    words = mx.empty(shape, _WORDS[size], stream=mx.cpu)
    mx.eval(words)
    target = _view_bytes(words)
    storage.read(target)
    most = np.frombuffer(target, np.uint8).max() if tensor.dtype == "bool" else 0
    check(most <= 1, "a bool tensor has bytes above 1")
    return words


def _view(tensor: Tensor, words: mx.array) -> mx.array:
    with mx.stream(mx.cpu):
        values = words.view(MLX_DTYPES[tensor.dtype])
        if tensor._is_whole:
            return values.reshape(tensor.shape)
        return mx.as_strided(values, tensor.shape, tensor.strides, tensor.offset)
