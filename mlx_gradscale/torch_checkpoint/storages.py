"""Read storages from the file into arrays, each once, and tensors as views of them."""

from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .dtypes import BY_NAME, Element
from .limits import CheckpointError, Limits
from .source import CHUNK, Source
from .tensors import MAX_DIM, StorageRef, TensorRef

_BATCH = 2**24
_WIDE = {"torch.float64": "torch.float32", "torch.complex128": "torch.complex64"}


class Extent(NamedTuple):
    """Where the bytes of a storage are in the file."""

    offset: int
    size: int


class _Unread(NamedTuple):
    """An array whose memory is still to be allocated and filled."""

    array: mx.array
    element: Element
    target: Element
    offset: int


class StorageReader:
    """Makes arrays of tensor references, and fills them when all are known.

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
        self._storages: dict[str, tuple[Element, mx.array]] = {}
        self._unread: list[_Unread] = []
        self._tensors: dict[str, mx.array] = {}

    def tensor(self, ref: TensorRef) -> mx.array:
        """The tensor's array; the same view of the same bytes is the same array."""
        identity = ref.identity
        if identity not in self._tensors:
            self._room -= ref.numel * ref.element.size
            if self._room < 0:
                raise CheckpointError(
                    "the tensors of this file hold over four times its size; if the "
                    "file is to be trusted, raise limits.extra_bytes."
                )
            self._tensors[identity] = self._make(ref)
        return self._tensors[identity]

    def fill(self) -> None:
        """Read the data; nothing is allocated before the whole object is checked."""
        batches = _batches(self._unread)
        for i, batch in enumerate(batches):
            # MLX allocates the next arrays in its own thread while these are read.
            for ahead in batches[i : i + 2]:
                mx.async_eval([unread.array for unread in ahead])
            mx.eval([unread.array for unread in batch])
            for unread in batch:
                self._fill(unread)
        # A lazy array belongs to the thread that made it, so make the views now.
        mx.eval(list(self._tensors.values()))

    def _make(self, ref: TensorRef) -> mx.array:
        target = self._target(ref.element)
        stored = self._stored(ref.storage, ref.element)
        if ref.numel == 0:
            return mx.zeros(ref.shape, target.mlx, stream=mx.cpu)
        array = self._view(ref, target, stored)
        if ref.conj:
            array = mx.conjugate(array, stream=mx.cpu)
        return mx.negative(array, stream=mx.cpu) if ref.neg else array

    def _target(self, element: Element) -> Element:
        """What the elements become; an error for those MLX cannot hold."""
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

    def _view(self, ref: TensorRef, target: Element, stored: int) -> mx.array:
        start = ref.offset + ref.storage.start
        whole = ref.row_contiguous and start == 0 and ref.numel == stored
        if stored > MAX_DIM and not whole:
            raise CheckpointError(
                f"the tensor is part of a storage of over {MAX_DIM} elements; call "
                ".clone() on it in PyTorch and save again."
            )
        array = self._storage(ref, target, ref.shape if whole else (stored,))
        if whole and array.shape == ref.shape:
            return array
        if whole:
            return mx.reshape(array, ref.shape, stream=mx.cpu)
        return mx.as_strided(array, ref.shape, ref.strides, start, stream=mx.cpu)

    def _stored(self, storage: StorageRef, element: Element) -> int:
        """Elements in the whole storage, as the file's own size has it."""
        extent = self._extents.get(storage.key)
        if extent is None:
            raise CheckpointError("the file does not hold the tensor's data.")
        if storage.total * storage.itemsize != extent.size:
            raise CheckpointError(
                f"the tensor's storage should have {storage.total} elements but the "
                f"file has {extent.size} bytes of it."
            )
        return extent.size // element.size

    def _storage(
        self, ref: TensorRef, target: Element, shape: tuple[int, ...]
    ) -> mx.array:
        key = ref.storage.key
        if key in self._storages:
            element, array = self._storages[key]
            if element is ref.element:
                return array
            # PyTorch writes one storage under two dtypes only for uint16 to uint64.
            raise CheckpointError(
                f"the tensor's storage is used as {element.name} and as "
                f"{ref.element.name}; call .clone() on one and save again."
            )
        array = self._allocate(self._extents[key].offset, ref.element, target, shape)
        self._storages[key] = ref.element, array
        return array

    def _allocate(
        self, offset: int, element: Element, target: Element, shape: tuple[int, ...]
    ) -> mx.array:
        # Allocated by MLX and filled in place, so that there is one copy in memory.
        # (MLX 0.32.4 still sets an empty array to zero: 0.1 s and more for 1 GB.)
        # bfloat16 is filled as uint16, because a buffer cannot name it.
        is_bfloat = target.mlx == mx.bfloat16
        array = mx.empty(shape, mx.uint16 if is_bfloat else target.mlx, stream=mx.cpu)
        self._unread.append(_Unread(array, element, target, offset))
        return array.view(mx.bfloat16, stream=mx.cpu) if is_bfloat else array

    def _fill(self, unread: _Unread) -> None:
        values = np.asarray(memoryview(unread.array)).reshape(-1)
        element, what = unread.element, "A tensor's data"
        if unread.target is not element:
            return self._fill_rounded(values, unread.offset, element)
        data = values.view(np.uint8)
        self._source.read_into(unread.offset, memoryview(data), what)
        if self._big_endian and element.size > 1:
            # A complex number is two floats, each swapped by itself.
            parts = values.view("<f4") if element.numpy == "<c8" else values
            parts.byteswap(inplace=True)
        if element.name == "torch.bool" and data.max() > 1:
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


def _batches(unread: list[_Unread]) -> list[list[_Unread]]:
    """In groups of some 16 MiB: waiting for MLX costs 0.1 ms, as much as 1 MiB."""
    batches: list[list[_Unread]] = []
    size = _BATCH
    for item in unread:
        if size >= _BATCH:
            batches.append([])
            size = 0
        batches[-1].append(item)
        size += item.array.nbytes
    return batches
