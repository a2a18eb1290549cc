"""Element types, storages, and the tensors that view them."""

import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .foreign import Placeholder, TensorShape, TorchTensor, is_count
from .limits import CheckpointError, Limits

# MLX keeps a dimension in an int32; numpy 1 has at most 32 dimensions.
_MAX_DIM, _MAX_NDIM = 2**31 - 1, 32
# From this size on, checksums are computed in a second thread.
_LARGE = 2**20


class Element(NamedTuple):
    """An element type. ``storage`` is its class in files, ``numpy`` its layout."""

    name: str
    storage: str | None
    mlx: mx.Dtype | None
    numpy: str
    size: int


# The last three have no storage class of their own: PyTorch writes their bytes as an
# UntypedStorage and names the dtype beside it. numpy has no bfloat16, so that its bits
# are read as uint16.
_ELEMENTS = (
    Element("float32", "FloatStorage", mx.float32, "<f4", 4),
    Element("float16", "HalfStorage", mx.float16, "<f2", 2),
    Element("bfloat16", "BFloat16Storage", mx.bfloat16, "<u2", 2),
    Element("float64", "DoubleStorage", mx.float64, "<f8", 8),
    Element("complex64", "ComplexFloatStorage", mx.complex64, "<c8", 8),
    Element("complex128", "ComplexDoubleStorage", None, "<c16", 16),
    Element("bool", "BoolStorage", mx.bool_, "|b1", 1),
    Element("uint8", "ByteStorage", mx.uint8, "|u1", 1),
    Element("int8", "CharStorage", mx.int8, "|i1", 1),
    Element("int16", "ShortStorage", mx.int16, "<i2", 2),
    Element("int32", "IntStorage", mx.int32, "<i4", 4),
    Element("int64", "LongStorage", mx.int64, "<i8", 8),
    Element("uint16", None, mx.uint16, "<u2", 2),
    Element("uint32", None, mx.uint32, "<u4", 4),
    Element("uint64", None, mx.uint64, "<u8", 8),
)
# Types that MLX lacks. A file may name them; only ``shapes`` reads tensors of them.
_UNSUPPORTED = (
    "complex32 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e8m0fnu float4_e2m1fn_x2 qint8 quint8 qint32 quint4x2 quint2x4 bits8 "
    "bits16 bits1x8 bits2x4 bits4x2 uint1 uint2 uint3 uint4 uint5 uint6 uint7 "
    "int1 int2 int3 int4 int5 int6 int7"
)
BY_NAME = {name: Element(name, None, None, "", 1) for name in _UNSUPPORTED.split()}
BY_NAME |= {element.name: element for element in _ELEMENTS}
BY_STORAGE = {e.storage: e for e in _ELEMENTS if e.storage}
_BY_MLX = {e.mlx: e for e in _ELEMENTS if e.mlx is not None}
_BY_NUMPY = {e.numpy: e for e in _ELEMENTS if e.name != "bfloat16"}
_ROUNDED = {"float64": "float32", "complex128": "complex64"}


def element_of(array: "mx.array | np.ndarray[Any, Any]") -> Element | None:
    """Return the element type of an array, or None if PyTorch has none like it."""
    if isinstance(array, mx.array):
        return _BY_MLX.get(array.dtype)
    return _BY_NUMPY.get(array.dtype.newbyteorder("<").str)


class Storage(NamedTuple):
    """A storage as the pickle describes it.

    ``element`` is None for an UntypedStorage, which is counted in bytes. The part that
    is meant, ``count`` elements from ``start``, is the whole storage except for the
    storage views of legacy files.
    """

    key: str
    element: Element | None
    numel: int
    start: int
    count: int

    @property
    def nbytes(self) -> int:
        """Size of the whole storage in bytes."""
        return self.numel * self.itemsize

    @property
    def itemsize(self) -> int:
        """Size of one element in bytes."""
        return self.element.size if self.element else 1


class Record(NamedTuple):
    """The bytes of a storage, and their checksum if the file has one."""

    data: memoryview
    checksum: int | None


class TensorReader:
    """Make tensors of the storages in a file; or only their shapes.

    Args:
        records (mapping or None): The storages by key. None reads shapes only.
        file_size (int): Size of the file.
        limits (Limits): The bound on the size of all tensors.
        big_endian (bool): Whether the file has big-endian elements.
        float64 (Dtype or None): What double precision becomes.
    """

    def __init__(
        self,
        records: Mapping[str, Callable[[], Record]] | None,
        file_size: int,
        limits: Limits,
        big_endian: bool = False,
        float64: mx.Dtype | None = None,
    ) -> None:
        self.storages: dict[str, Storage] = {}
        self._records = records
        self._unread = file_size
        self._room = 4 * file_size + limits.tensor_bytes
        self._order = ">" if big_endian else "<"
        self._float64 = float64
        self._arrays: dict[str, tuple[Element, mx.array]] = {}
        self._tensors: dict[str, Any] = {}
        self._flagged: dict[str, Any] = {}
        self._checks: list[Future[None]] = []
        self._thread: ThreadPoolExecutor | None = None

    def storage(self, pid: Any) -> Storage:
        """Return the storage that a persistent id describes."""
        if type(pid) is tuple and pid and pid[0] == "module":
            raise CheckpointError(
                "the file holds a whole model with its source code. Save "
                "model.state_dict() in PyTorch and load that."
            )
        if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage":
            raise CheckpointError("the file refers to something that is no storage.")
        _, kind, key, _location, numel, *views = pid
        path = kind.path if type(kind) is Placeholder and kind.args is None else ""
        element = BY_STORAGE.get(path.removeprefix("torch."))
        is_known = element or path in (
            "torch.storage.UntypedStorage",
            "torch.UntypedStorage",
        )
        if not is_known or type(key) is not str or len(key) > 64 or not is_count(numel):
            raise CheckpointError("the file describes a storage in an unknown way.")
        start, count = 0, numel
        if views and views[0] is not None:
            start, count = _storage_view(views[0], numel)
        whole = Storage(key, element, numel, 0, numel)
        if self.storages.setdefault(key, whole) != whole and self._records is None:
            raise CheckpointError("the file describes one storage in two ways.")
        return Storage(key, element, numel, start, count)

    def tensor(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        strides: Any,
        requires_grad: Any = False,
        dtype: Any = None,
        metadata: Any = None,
    ) -> Any:
        """Return the checked view of a storage as an array, or its shape."""
        element = _check_view(storage, offset, shape, strides, dtype)
        conj, neg = _lazy_bits(metadata)
        if neg and element.name == "bool":
            raise CheckpointError("a bool tensor is marked as negative.")
        # Equal for equal views. The hashes of strings cannot be chosen by a file.
        view = f"{storage.start} {element.name} {offset} {shape} {strides} {conj} {neg}"
        identity = f"{view} {storage.key}"
        found = self._tensors.get(identity)
        if found is None:
            self._room -= prod(shape) * element.size
            if self._room < 0:
                raise CheckpointError(
                    "the tensors hold more than four times the size of the file. If "
                    "you trust it, raise limits.tensor_bytes."
                )
            if self._records is None:
                found = TensorShape(tuple(shape), element.name)
            else:
                found = self._view(storage, element, offset, tuple(shape), strides)
                found = mx.conjugate(found, stream=mx.cpu) if conj else found
                found = mx.negative(found, stream=mx.cpu) if neg else found
            self._tensors[identity] = found
        return self.flag(found, requires_grad is True, False)

    def flag(self, data: Any, requires_grad: bool, is_parameter: bool) -> Any:
        """Return the tensor as a ``Parameter`` or with ``requires_grad``."""
        if not requires_grad and not is_parameter:
            return data
        # The tensors live as long as this reader, so that an id is never used twice.
        key = f"{id(data)} {requires_grad} {is_parameter}"
        if key not in self._flagged:
            flags = requires_grad, is_parameter
            self._flagged[key] = (
                TensorShape(data.shape, data.dtype, *flags)
                if isinstance(data, TensorShape)
                else TorchTensor(data, *flags)
            )
        return self._flagged[key]

    def finish(self) -> None:
        """Evaluate the tensors and wait for the checksums."""
        if self._records is not None:
            # A lazy array would belong to the thread that made it.
            mx.eval([x for x in self._tensors.values() if isinstance(x, mx.array)])
        for check in self._checks:
            check.result()

    def close(self) -> None:
        """End the thread that computes checksums."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _view(
        self,
        storage: Storage,
        element: Element,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
    ) -> mx.array:
        target = self._target(element)
        start, stored = offset + storage.start, storage.nbytes // element.size
        is_whole = start == 0 and prod(shape) == stored
        is_whole = is_whole and _is_contiguous(shape, strides)
        if 0 in shape:
            return mx.zeros(shape, target.mlx, stream=mx.cpu)
        if stored > _MAX_DIM and not is_whole:
            raise CheckpointError(
                f"the tensor is part of a storage of over {_MAX_DIM} elements. Call "
                ".clone() on it in PyTorch and save again."
            )
        if storage.key not in self._arrays:
            read = shape if is_whole else (stored,)
            array = self._read(storage, element, target, read)
            self._arrays[storage.key] = element, array
        used, array = self._arrays[storage.key]
        if used is not element:
            raise CheckpointError(
                f"a storage is used as {used.name} and as {element.name}. Call "
                ".clone() on one of the tensors in PyTorch and save again."
            )
        if not is_whole:
            return mx.as_strided(array, shape, strides, start, stream=mx.cpu)
        if array.shape == shape:
            return array
        return mx.reshape(array, shape, stream=mx.cpu)

    def _target(self, element: Element) -> Element:
        """Return the element type in MLX."""
        is_double = element.name in _ROUNDED
        if is_double and self._float64 is not None and self._float64 == mx.float32:
            return BY_NAME[_ROUNDED[element.name]]
        if element.mlx is None:
            advice = "pass float64=mx.float32 to round it, or " if is_double else ""
            raise CheckpointError(
                f"the tensor has dtype torch.{element.name}, which MLX does not have: "
                f"{advice}convert it in PyTorch and save again."
            )
        if is_double and self._float64 is None:
            raise CheckpointError(
                "the tensor has dtype torch.float64, which MLX computes only on the "
                "CPU. Pass float64=mx.float32 to round such tensors, or "
                "float64=mx.float64 to keep them."
            )
        return element

    def _read(
        self,
        storage: Storage,
        element: Element,
        target: Element,
        shape: tuple[int, ...],
    ) -> mx.array:
        assert self._records is not None
        if storage.key not in self._records:
            raise CheckpointError("the file does not hold the data of the tensor.")
        data, checksum = self._records[storage.key]()
        if storage.nbytes != data.nbytes:
            raise CheckpointError(
                f"a storage should have {storage.nbytes} bytes but has {data.nbytes}."
            )
        self._unread -= data.nbytes
        if self._unread < 0:
            raise CheckpointError("records of the file overlap.")
        if checksum is not None:
            self._check(data, checksum)
        dtype = np.dtype(element.numpy).newbyteorder(self._order)
        values = np.frombuffer(data, dtype).reshape(shape)
        if element.name == "bool" and values.view(np.uint8).max() > 1:
            raise CheckpointError("a bool tensor has bytes other than 0 and 1.")
        if dtype != target.numpy:
            with np.errstate(over="ignore", invalid="ignore"):
                values = values.astype(target.numpy)
        if not values.flags.aligned:
            values = values.copy()
        if target.mlx == mx.bfloat16:
            return mx.array(values).view(mx.bfloat16, stream=mx.cpu)
        return mx.array(values, target.mlx)

    def _check(self, data: memoryview, checksum: int) -> None:
        if data.nbytes < _LARGE:
            return check_sum(data, checksum)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1)
        self._checks.append(self._thread.submit(check_sum, data, checksum))


def check_sum(data: "memoryview | bytes", checksum: int) -> None:
    """Raise unless the data has this CRC-32."""
    if zlib.crc32(data) != checksum:
        raise CheckpointError(
            "the checksum of a record is wrong: the file is damaged. Copy it again."
        )


def _storage_view(view: Any, numel: int) -> tuple[int, int]:
    if type(view) is not tuple or len(view) != 3 or not all(map(is_count, view[1:])):
        raise CheckpointError("the file describes a storage view in an unknown way.")
    _, start, count = view
    if start + count > numel:
        raise CheckpointError("a storage view reaches outside its storage.")
    return start, count


def _check_view(
    storage: Any, offset: Any, shape: Any, strides: Any, dtype: Any
) -> Element:
    """Return the element type of a tensor whose numbers are sound."""
    if not isinstance(storage, Storage):
        raise CheckpointError("a tensor is rebuilt from something that is no storage.")
    element = storage.element
    if element is None or dtype is not None:
        name = dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
        element = BY_NAME.get(name)
    if element is None:
        raise CheckpointError("a tensor is rebuilt without a known dtype.")
    for sizes in (shape, strides):
        if not isinstance(sizes, tuple):
            raise CheckpointError("the shape or strides of a tensor are no tuple.")
        if len(sizes) > _MAX_NDIM:
            raise CheckpointError(f"a tensor has more than {_MAX_NDIM} dimensions.")
        if not all(map(is_count, sizes)):
            raise CheckpointError("the shape or strides of a tensor are no sizes.")
    if not is_count(offset) or len(shape) != len(strides):
        raise CheckpointError("the offset, shape and strides of a tensor do not match.")
    if any(size > _MAX_DIM for size in shape) or prod(s or 1 for s in shape) >= 2**62:
        raise CheckpointError(f"a tensor of shape {shape} is too large for MLX.")
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    room = storage.count * storage.itemsize // element.size
    if 0 not in shape and last >= room:
        raise CheckpointError(
            f"a tensor of shape {tuple(shape)} with strides {tuple(strides)} and "
            f"offset {offset} reaches outside its storage of {room} elements."
        )
    return element


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(shape[::-1], strides[::-1], strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _lazy_bits(metadata: Any) -> tuple[bool, bool]:
    """Return PyTorch's conjugate and negative bits."""
    if metadata is None:
        return False, False
    if type(metadata) is not dict or not all(
        key in ("conj", "neg") and bit is True for key, bit in metadata.items()
    ):
        raise CheckpointError("a tensor has metadata other than conj and neg.")
    return "conj" in metadata, "neg" in metadata
