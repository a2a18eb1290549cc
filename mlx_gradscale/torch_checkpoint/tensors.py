"""Lazy tensors: views of storages, which are blocks of bytes in a file."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from .objects import CheckpointError, check
from .source import Record

Array = mx.array | np.ndarray[Any, Any]

# MLX stores a dimension as int32; numpy 1 supports at most 32 dimensions.
_MAX_DIM, _MAX_NDIM = 2**31 - 1, 32
# One thread takes 0.3 s for the checksum of 1 GB.
_THREADS = 4
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
# The dtypes of arrays that can be saved.
DTYPES = {*STORAGES.values(), "uint16", "uint32", "uint64"}
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def dtype_name(array: Any) -> str:
    """Return the name of the dtype of an MLX or numpy array."""
    name = getattr(array.dtype, "name", str(array.dtype))
    return name.removeprefix("mlx.core.").removesuffix("_")


def item_size(dtype: str) -> int:
    """Return the bytes per element; 1 for dtypes that neither MLX nor numpy has."""
    known = mlx_dtype(dtype)
    return known.size if known else 16 if dtype == "complex128" else 1


def mlx_dtype(dtype: str) -> mx.Dtype | None:
    """Return MLX's dtype of a name, or None if MLX does not have it."""
    found = getattr(mx, "bool_" if dtype == "bool" else dtype, None)
    return found if isinstance(found, mx.Dtype) else None


def row_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return row-major strides in elements; PyTorch counts an empty axis as 1."""
    return tuple(prod(n or 1 for n in shape[i:]) for i in range(1, len(shape) + 1))


@dataclass(eq=False, slots=True)
class Storage:
    """A block of bytes: a record in a file, or the bytes of an array.

    Attributes:
        dtype (str or None): The dtype of the elements; None if it is untyped.
        nbytes (int): The size.
        data (Record or array): The location in a file, or an array. A legacy file
            gives locations after its objects; until then, this is None.
    """

    dtype: str | None
    nbytes: int
    data: Any

    @property
    def numel(self) -> int:
        """The number of elements; of bytes if it is untyped."""
        return self.nbytes // item_size(self.dtype) if self.dtype else self.nbytes

    @property
    def is_array(self) -> bool:
        """Whether the bytes are those of an array."""
        return self.data is not None and not isinstance(self.data, Record)

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes, little-endian and row-major; check those of a file."""
        if isinstance(self.data, Record):
            yield from self.data.pieces()
        else:
            yield bytes_of(self.data)

    def fill(self, words: mx.array) -> None:
        """Read the bytes into the memory of an array."""
        target = np.asarray(memoryview(words)).reshape(-1).view(np.uint8)  # type: ignore[arg-type]
        self.data.read_into(target)
        is_bool = self.dtype == "bool"
        problem = "A bool tensor has bytes above 1. Save the file again."
        check(not is_bool or target.max(initial=0) <= 1, problem)


def bytes_of(array: Any) -> memoryview:
    """Return the bytes of an array in row-major order, little-endian."""
    if isinstance(array, mx.array):
        with mx.stream(mx.cpu):
            array = mx.contiguous(array)
            if array.dtype == mx.bfloat16:  # numpy has no bfloat16: view its bits
                array = array.view(mx.uint16)
        mx.eval(array)
        array = np.asarray(memoryview(array))
    else:
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    data: memoryview = array.reshape(-1).view(np.uint8).data
    return data


@dataclass(frozen=True, eq=False, slots=True)
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

        To read many tensors, use :func:`read_all`, which reads a shared storage once.

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
        return prod(self.shape) * item_size(self.dtype)

    @property
    def is_whole(self) -> bool:
        """Whether this is all of its storage, in row-major order."""
        is_all = self.nbytes == self.storage.nbytes
        return is_all and self.strides == row_strides(self.shape)

    def __repr__(self) -> str:
        return f"<Tensor {self.dtype} {'x'.join(map(str, self.shape)) or 'scalar'}>"


def check_view(tensor: Tensor) -> None:
    """Raise unless a tensor of a file fits its storage and MLX's limits."""
    shape, strides, offset = tensor.shape, tensor.strides, tensor.offset
    is_sound = len(shape) == len(strides) and len(shape) <= _MAX_NDIM
    check(
        is_sound and all(map(is_count, (offset, *shape, *strides))),
        "the offset, shape or strides of a tensor are invalid. Save the file again.",
    )
    fits = max(shape, default=0) <= _MAX_DIM and prod(n or 1 for n in shape) < 2**62
    check(fits, f"a tensor of shape {shape} is too large for MLX. Split it.")
    room = tensor.storage.nbytes // item_size(tensor.dtype)
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    check(
        0 in shape or last < room,
        f"a tensor of shape {shape} with strides {strides} and offset {offset} reaches "
        f"outside its storage of {room} elements. Save the file again.",
    )


def is_count(value: Any) -> bool:
    """Return whether a value is a non-negative integer that fits in 64 bits."""
    return type(value) is int and 0 <= value < 2**63


def read_all(tensors: Iterable[Tensor]) -> list[mx.array]:
    """Read tensors; those that share a storage share memory.

    Args:
        tensors (list of Tensor): The tensors. Equal ones become one array.

    Raises:
        CheckpointError: If the file is damaged, or MLX does not have a dtype.
    """
    tensors = [*tensors]
    wholes: dict[tuple[Storage, str], mx.array] = {}
    for tensor in tensors:
        if not tensor.storage.is_array and tensor.nbytes:
            key = tensor.storage, tensor.dtype
            wholes.setdefault(key, _empty(tensor))
    mx.eval(list(wholes.values()))
    with ThreadPoolExecutor(_THREADS) as threads:
        work = [(storage, words) for (storage, _), words in wholes.items()]
        list(threads.map(lambda pair: pair[0].fill(pair[1]), work))
    found: dict[Tensor, mx.array] = {}
    for tensor in tensors:
        if tensor not in found:
            found[tensor] = _view(tensor, wholes)
    mx.eval(list(found.values()))  # a lazy array would be tied to this thread
    return [found[tensor] for tensor in tensors]


def _empty(tensor: Tensor) -> mx.array:
    """Return an array for the bytes of a tensor's storage."""
    dtype = mlx_dtype(tensor.dtype)
    if dtype is None:
        raise CheckpointError(
            f"MLX does not have the dtype {f'torch.{tensor.dtype[:80]}'!a}. Convert "
            "the tensor in PyTorch and save again."
        )
    count = tensor.storage.nbytes // dtype.size
    check(
        tensor.is_whole or count <= _MAX_DIM,
        f"a tensor is part of a storage of over {_MAX_DIM} elements. Call .clone() on "
        "it in PyTorch and save again.",
    )
    shape = tensor.shape if tensor.is_whole else (count,)
    return mx.empty(shape, _BITS[dtype.size], stream=mx.cpu)


def _view(tensor: Tensor, wholes: dict[tuple[Storage, str], mx.array]) -> mx.array:
    if isinstance(tensor.storage.data, mx.array):
        return tensor.storage.data
    if tensor.storage.is_array:
        return mx.array(tensor.storage.data)
    with mx.stream(mx.cpu):
        dtype = mlx_dtype(tensor.dtype) or mx.float32
        if not tensor.nbytes:
            return mx.zeros(tensor.shape, dtype)
        values = wholes[tensor.storage, tensor.dtype].view(dtype)
        if tensor.is_whole:
            return values.reshape(tensor.shape)
        return mx.as_strided(values, tensor.shape, tensor.strides, tensor.offset)
