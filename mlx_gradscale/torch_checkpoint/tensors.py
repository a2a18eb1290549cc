"""Lazy tensors: views of storages, which are blocks of bytes in a file."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from .objects import Storage, check

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
# The bytes per element of an untyped storage, and of the dtypes that can be saved.
SIZES: dict[str | None, int] = {None: 1, "complex128": 16}
SIZES |= {name: x.size for name, x in MLX_DTYPES.items()}
_WORDS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
# MLX stores a dimension as int32; mx.as_strided() aborts the process at a larger one.
MAX_DIM = 2**31 - 1
# One thread takes 0.3 s for the checksum of 1 GB.
_THREADS = 4


def bytes_of(array: Array) -> memoryview:
    """Return the bytes of an array in row-major order, little-endian."""
    if not isinstance(array, mx.array):
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        return _view_bytes(array).data
    with mx.stream(mx.cpu):  # as words, because NumPy has no bfloat16
        words = mx.contiguous(array).view(_WORDS[array.itemsize])
    mx.eval(words)
    return _view_bytes(words).data


def _view_bytes(array: Any) -> np.ndarray[Any, Any]:
    return np.asarray(memoryview(array)).reshape(-1).view(np.uint8)


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
        kind = dtype if is_typed else None
        storage = Storage(kind, array.nbytes, lambda: [bytes_of(array)], array)
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
    # A storage is read once for each dtype of its tensors.
    some = {(x.storage, x.dtype): x for x in tensors}
    with ThreadPoolExecutor(_THREADS) as threads:
        blocks = dict(zip(some, threads.map(_read_block, some.values()), strict=True))
    arrays = {x: _view(x, blocks[x.storage, x.dtype]) for x in tensors}
    mx.eval([*arrays.values()])  # a lazy array would be tied to this thread
    return [arrays[x] for x in tensors]


def _read_block(tensor: Tensor) -> mx.array:
    """Return the storage of a tensor, as words of the tensor's size if in a file."""
    storage = tensor.storage
    problem = f"MLX does not have the dtype {f'torch.{tensor.dtype}'!a}"
    check(tensor.dtype in MLX_DTYPES, problem, "Convert the tensor in PyTorch.")
    if isinstance(storage.array, mx.array):
        return storage.array
    size = SIZES[tensor.dtype]
    shape = tensor.shape if tensor._is_whole else (storage.nbytes // size,)
    check(
        max((0, *shape)) <= MAX_DIM,
        f"a tensor is part of a storage of over {MAX_DIM} elements",
        "Call .clone() on it in PyTorch and save again.",
    )
    words = mx.empty(shape, _WORDS[size], stream=mx.cpu)
    mx.eval(words)
    target, at = _view_bytes(words), 0
    for chunk in storage.chunks():
        part = target[at : at + len(chunk)]
        # A storage may end with a part of an element.
        part[:] = np.frombuffer(chunk, np.uint8)[: len(part)]
        at += len(chunk)
    check(at == storage.nbytes, "The file became shorter while it was read")
    return words


def _view(tensor: Tensor, block: mx.array) -> mx.array:
    dtype = MLX_DTYPES[tensor.dtype]
    with mx.stream(mx.cpu):
        # Any byte but 0 is True, as in PyTorch.
        values = block.astype(dtype) if dtype == mx.bool_ else block.view(dtype)
        if tensor._is_whole:
            return values.reshape(tensor.shape)
        return mx.as_strided(values, tensor.shape, tensor.strides, tensor.offset)
