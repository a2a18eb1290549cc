"""Lazy tensors: views of storages, which are blocks of bytes in a file."""

import io
import os
import stat
import weakref
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from operator import mul
from typing import Any

import mlx.core as mx
import numpy as np

from .objects import check

Array = mx.array | np.ndarray[Any, Any]

# MLX stores a dimension as int32; numpy 1 supports at most 32 dimensions.
_MAX_DIM, _MAX_NDIM = 2**31 - 1, 32
# Data is copied and its checksum computed in pieces that fit in a cache, by this many
# threads: one thread takes 0.3 s for the checksum of 1 GB.
_PIECE, _THREADS = 2**18, 4
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
# The dtypes of arrays that can be saved, and MLX's dtypes of these names.
DTYPES = {*STORAGES.values(), "uint16", "uint32", "uint64"}
MLX_DTYPES: dict[str, mx.Dtype] = {
    name: getattr(mx, "bool_" if name == "bool" else name)
    for name in DTYPES - {"complex128"}
}
# The bytes per element. A dtype that is not here has an untyped storage.
SIZES = {"complex128": 16} | {name: x.size for name, x in MLX_DTYPES.items()}
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


class Source:
    """The bytes of a checkpoint. A file stays open as long as this object exists.

    Args:
        file (str, PathLike or bytes): A path, or the contents of a file.
    """

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
        # Opening a pipe would wait for a writer.
        is_file = stat.S_ISREG(os.stat(file).st_mode)
        check(is_file, f"{shown} is not a regular file", "Pass the path of a file.")
        self._descriptor = os.open(file, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size

    def open(self) -> Any:
        """Open the bytes as a file."""
        if self._data is not None:
            return io.BytesIO(self._data)
        return open(self._descriptor, "rb", closefd=False)

    def read(self, start: int, size: int) -> bytes:
        """Return up to ``size`` bytes."""
        if self._data is not None:
            return bytes(self._data[start : start + size])
        return os.pread(self._descriptor, size, start)

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill a memoryview of bytes."""
        if self._data is not None:
            target[:] = self._data[start : start + target.nbytes]
        else:
            size = os.preadv(self._descriptor, [target], start)
            check(size == target.nbytes, "The file became shorter while it was read")


@dataclass(eq=False)
class Storage:
    """A block of bytes: a record in a file, or the bytes of an array.

    Attributes:
        dtype (str or None): The dtype of the elements; None if it is untyped.
        nbytes (int): The size.
        data (Source or array): The file or the array.
        start (int): The position in the file.
        checksum (int or None): The CRC-32, if the file has one.
    """

    dtype: str | None
    nbytes: int
    data: Any
    start: int = 0
    checksum: int | None = None

    @property
    def numel(self) -> int:
        """The number of elements; of bytes if it is untyped."""
        return self.nbytes // SIZES[self.dtype] if self.dtype else self.nbytes

    def pieces(self, target: memoryview | None = None) -> Iterator[memoryview]:
        """Yield the bytes, and verify those of a file, which are read into ``target``.

        They are little-endian and row-major.
        """
        if not isinstance(self.data, Source):
            yield bytes_of(self.data)
            return
        found = 0
        for at in range(0, self.nbytes, _PIECE):
            end = min(at + _PIECE, self.nbytes)
            piece = target[at:end] if target else memoryview(bytearray(end - at))
            self.data.read_into(piece, self.start + at)
            found = zlib.crc32(piece, found)
            yield piece
        is_right = self.checksum in (None, found)
        check(is_right, "The file is damaged: the checksum of a record is wrong")


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


def dtype_name(array: Any) -> str:
    """Return the name of the dtype of an MLX or numpy array."""
    name: str = getattr(array.dtype, "name", str(array.dtype))
    return name.removeprefix("mlx.core.")


def row_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return row-major strides in elements; PyTorch counts an empty axis as 1."""
    strides = [1]
    for n in shape[:0:-1]:
        strides.append(strides[-1] * (n or 1))
    return tuple(strides[::-1]) if shape else ()


@dataclass(frozen=True, eq=False, repr=False)
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
        return cls(storage, dtype, 0, shape, row_strides(shape))

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
        return is_all and self.strides == row_strides(self.shape)

    def check(self) -> None:
        """Raise unless the view fits its storage and MLX's limits."""
        shape, strides = self.shape, self.strides
        numbers = (self.offset, *shape, *strides)
        is_sound = len(shape) == len(strides) <= _MAX_NDIM
        is_sound = is_sound and {*map(type, numbers)} == {int}
        is_sound = is_sound and min(numbers) >= 0 and max(numbers) < 2**63
        check(is_sound, "the offset, shape or strides of a tensor are invalid")
        fits = max(shape, default=0) <= _MAX_DIM and prod(filter(None, shape)) < 2**62
        check(fits, "a tensor is too large for MLX", f"It has shape {shape}.")
        room = self.storage.nbytes // SIZES.get(self.dtype, 1)
        last = self.offset + sum(map(mul, shape, strides)) - sum(strides)
        problem = "a tensor reaches outside its storage of"
        check(0 in shape or last < room, f"{problem} {room} elements")

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
    words: dict[tuple[Storage, str], mx.array] = {}
    for tensor in tensors:
        key = tensor.storage, tensor.dtype
        if key not in words and tensor.nbytes and isinstance(key[0].data, Source):
            words[key] = _make_words(tensor)
    mx.eval([*words.values()])

    def fill(storage: Storage, target: memoryview) -> None:
        for _ in storage.pieces(target):
            pass
        is_bool = storage.dtype == "bool"
        most = np.frombuffer(target, np.uint8).max() if is_bool else 0
        check(most <= 1, "a bool tensor has bytes above 1")

    with ThreadPoolExecutor(_THREADS) as threads:
        storages = [storage for storage, _ in words]
        [*threads.map(fill, storages, [*map(_view_bytes, words.values())])]
    found = {tensor: _make_array(tensor, words) for tensor in dict.fromkeys(tensors)}
    mx.eval([*found.values()])  # a lazy array would be tied to this thread
    return [found[tensor] for tensor in tensors]


def _make_words(tensor: Tensor) -> mx.array:
    """Return an array for the bytes of a tensor's storage."""
    name = f"{f'torch.{tensor.dtype}'!a}"
    problem = f"MLX does not have the dtype {name}"
    check(tensor.dtype in MLX_DTYPES, problem, "Convert the tensor in PyTorch.")
    size = SIZES[tensor.dtype]
    shape = tensor.shape if tensor._is_whole else (tensor.storage.nbytes // size,)
    check(
        max(shape, default=0) <= _MAX_DIM,
        f"a tensor is part of a storage of over {_MAX_DIM} elements",
        "Call .clone() on it in PyTorch and save again.",
    )
    return mx.empty(shape, _BITS[size], stream=mx.cpu)


def _make_array(tensor: Tensor, words: dict[tuple[Storage, str], mx.array]) -> mx.array:
    """Return an array that views the words of its storage."""
    if not isinstance(tensor.storage.data, Source):
        return mx.array(tensor.storage.data)
    with mx.stream(mx.cpu):
        dtype = MLX_DTYPES.get(tensor.dtype, mx.float32)
        if not tensor.nbytes:
            return mx.zeros(tensor.shape, dtype)
        values = words[tensor.storage, tensor.dtype].view(dtype)
        if tensor._is_whole:
            return values.reshape(tensor.shape)
        return mx.as_strided(values, tensor.shape, tensor.strides, tensor.offset)
