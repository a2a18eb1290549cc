"""Read storages from the file into arrays, each once, and tensors as views of them."""

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np

from .direct_read import read_array
from .dtypes import BY_NAME, BY_NUMPY, Element
from .limits import CheckpointError, Limits
from .source import CHUNK, Source
from .tensors import MAX_DIM, StorageRef, TensorRef

# Below this, a copy is cheaper than MLX's own way to read a file.
LARGE = 2**20
_WIDE = {"torch.float64": "torch.float32", "torch.complex128": "torch.complex64"}


class Extent(NamedTuple):
    """Where the bytes of a storage are in the file."""

    offset: int
    size: int


class Contents(NamedTuple):
    """What a file says before its tensors are read.

    ``shared`` is what ``value`` can hold more than once, by id.
    """

    value: Any
    shared: Mapping[int, Any]
    pickle_size: int
    extents: Mapping[str, Extent]
    big_endian: bool


class _Storage(NamedTuple):
    """A storage to be read: where it is, what it holds, what its array will be."""

    offset: int
    element: Element
    target: Element
    shape: tuple[int, ...]


class StorageReader:
    """Check all tensors of an object, then read what they need, then make them.

    Args:
        source (Source): The file.
        extents (mapping): Where each storage is, by key.
        big_endian (bool): Whether the bytes of elements are swapped.
        float64 (Dtype or None): What double precision becomes: ``mx.float32``,
            ``mx.float64``, or None for an error.
        limits (Limits): How many bytes all tensors together may hold.
    """

    def __init__(
        self,
        source: Source,
        extents: Mapping[str, Extent],
        big_endian: bool,
        float64: mx.Dtype | None,
        limits: Limits,
    ) -> None:
        self._source = source
        self._extents = extents
        self._big_endian = big_endian
        self._keep_wide = float64 is not None and float64 == mx.float64
        self._round_wide = float64 is not None and float64 == mx.float32
        self._room = 4 * source.size + limits.extra_bytes
        self._checked: set[str] = set()
        self._storages: dict[str, _Storage] = {}
        self._arrays: dict[str, mx.array] = {}
        self._tensors: dict[str, mx.array] = {}

    def check(self, ref: TensorRef) -> TensorRef:
        """Return the tensor as it is, or raise if it cannot be made."""
        if ref.identity in self._checked:
            return ref
        self._checked.add(ref.identity)
        self._room -= ref.numel * ref.element.size
        if self._room < 0:
            raise CheckpointError(
                "the tensors of this file hold over four times its size; if the "
                "file is to be trusted, raise limits.extra_bytes."
            )
        target = self._target(ref.element)
        stored = self._stored(ref.storage, ref.element)
        if ref.numel:
            self._check_storage(ref, target, stored)
        return ref

    def read(self) -> None:
        """Read the storages of all tensors that were checked."""
        self._arrays = {key: self._read(x) for key, x in self._storages.items()}

    def tensor(self, ref: TensorRef) -> mx.array:
        """Return the tensor's array; the same view of the same bytes is one array."""
        identity = ref.identity
        if identity not in self._tensors:
            self._tensors[identity] = self._make(ref)
        return self._tensors[identity]

    def evaluate(self) -> None:
        """Make the views now: a lazy array belongs to the thread that made it."""
        mx.eval(list(self._tensors.values()))

    def _make(self, ref: TensorRef) -> mx.array:
        if ref.numel == 0:
            target = self._target(ref.element)
            return mx.zeros(ref.shape, target.mlx, stream=mx.cpu)
        array = self._view(ref, self._arrays[ref.storage.key])
        if ref.conj:
            array = mx.conjugate(array, stream=mx.cpu)
        return mx.negative(array, stream=mx.cpu) if ref.neg else array

    def _target(self, element: Element) -> Element:
        """Return what the elements become, or raise if MLX cannot hold them."""
        if element.name not in _WIDE and element.mlx is not None:
            return element
        if element.name in _WIDE and self._round_wide:
            return BY_NAME[_WIDE[element.name]]
        if element.mlx is not None and self._keep_wide:
            return element
        if element.mlx is not None:
            raise CheckpointError(
                f"the tensor has dtype {element.name}, which MLX computes only on the "
                "CPU; pass float64=mx.float32 to round such tensors, or "
                "float64=mx.float64 to keep them."
            )
        raise CheckpointError(
            f"the tensor has dtype {element.name}, which MLX does not have; "
            + ("pass float64=mx.float32 to round it, or " * (element.name in _WIDE))
            + "convert it in PyTorch and save again."
        )

    def _view(self, ref: TensorRef, array: mx.array) -> mx.array:
        if not _is_whole(ref, array.size):
            start = ref.offset + ref.storage.start
            return mx.as_strided(array, ref.shape, ref.strides, start, stream=mx.cpu)
        if array.shape == ref.shape:
            return array
        return mx.reshape(array, ref.shape, stream=mx.cpu)

    def _stored(self, storage: StorageRef, element: Element) -> int:
        """Count elements in the whole storage, as the file's own size has it."""
        extent = self._extents.get(storage.key)
        if extent is None:
            raise CheckpointError("the file does not hold the tensor's data.")
        if storage.total * storage.itemsize != extent.size:
            raise CheckpointError(
                f"the tensor's storage should have {storage.total} elements but the "
                f"file has {extent.size} bytes of it."
            )
        return extent.size // element.size

    def _check_storage(self, ref: TensorRef, target: Element, stored: int) -> None:
        is_whole = _is_whole(ref, stored)
        if stored > MAX_DIM and not is_whole:
            raise CheckpointError(
                f"the tensor is part of a storage of over {MAX_DIM} elements; call "
                ".clone() on it in PyTorch and save again."
            )
        key = ref.storage.key
        if key not in self._storages:
            shape = ref.shape if is_whole else (stored,)
            offset = self._extents[key].offset
            self._storages[key] = _Storage(offset, ref.element, target, shape)
        elif self._storages[key].element is not ref.element:
            # PyTorch writes one storage under two dtypes only for uint16 to uint64.
            raise CheckpointError(
                f"the tensor's storage is used as {self._storages[key].element.name} "
                f"and as {ref.element.name}; call .clone() on one and save again."
            )

    def _read(self, storage: _Storage) -> mx.array:
        offset, element, target, shape = storage
        if target is not element:
            # Filled in place, so that there is one copy in memory.
            array = mx.zeros(shape, target.mlx, stream=mx.cpu)
            mx.eval(array)
            self._fill_rounded(_values_of(array), offset, element)
            return array
        if prod(shape) * element.size < LARGE:
            data = bytearray(prod(shape) * element.size)
            self._source.read_into(offset, memoryview(data), "A tensor's data")
            values = np.frombuffer(data, element.numpy)
            self._put_right(values, element)
            array = mx.array(values.reshape(shape), BY_NUMPY[element.numpy].mlx)
        else:
            array = read_array(self._source, offset, element.numpy, shape)
            self._put_right(_values_of(array), element)
        if target.mlx == mx.bfloat16:
            array = array.view(mx.bfloat16, stream=mx.cpu)
        return array

    def _put_right(self, values: np.ndarray, element: Element) -> None:
        if self._big_endian and element.size > 1:
            # A complex number is two floats, each swapped by itself.
            parts = values.view("<f4") if element.numpy == "<c8" else values
            parts.byteswap(inplace=True)
        if element.name == "torch.bool" and values.view(np.uint8).max() > 1:
            raise CheckpointError("A bool tensor has bytes other than 0 and 1.")

    def _fill_rounded(self, values: np.ndarray, offset: int, element: Element) -> None:
        stored = np.dtype(element.numpy)
        if self._big_endian:
            stored = stored.newbyteorder(">")
        step = CHUNK // element.size
        for i in range(0, values.size, step):
            count = min(step, values.size - i)
            data = self._source.read(
                offset + i * element.size, count * element.size, "A tensor's data"
            )
            # Beyond float32's range becomes inf, as PyTorch's .float() has it.
            with np.errstate(over="ignore", invalid="ignore"):
                values[i : i + count] = np.frombuffer(data, stored)


def _is_whole(ref: TensorRef, stored: int) -> bool:
    start = ref.offset + ref.storage.start
    return ref.row_contiguous and start == 0 and ref.numel == stored


def _values_of(array: mx.array) -> np.ndarray:
    """Return the array's memory, to write to."""
    return np.asarray(memoryview(cast(Any, array))).reshape(-1)
