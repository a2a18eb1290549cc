"""Element types, storages, and the tensors that view them."""

import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .foreign import Placeholder, TensorShape, flag
from .limits import Limits, check, is_count

# MLX stores a dimension as int32; numpy 1 supports at most 32 dimensions.
_MAX_DIM, _MAX_NDIM = 2**31 - 1, 32
_MIXED = (
    "tensors of different types share a storage. Call .clone() on one of them in "
    "PyTorch and save again."
)
# Starting at this size, checksums are computed in threads: zlib takes 0.3 s for 1 GB.
_LARGE = 2**20


class Element(NamedTuple):
    """An element type. ``storage`` is its class in files."""

    name: str
    storage: str | None
    mlx: mx.Dtype | None
    numpy: np.dtype[Any]


# PyTorch writes the last three as an UntypedStorage with a separate dtype.
_STORAGES = (
    "float32 Float, float16 Half, bfloat16 BFloat16, float64 Double, bool Bool, "
    "complex64 ComplexFloat, complex128 ComplexDouble, uint8 Byte, int8 Char, "
    "int16 Short, int32 Int, int64 Long, uint16, uint32, uint64"
)
# Types that MLX lacks. A file may name them, but only ``shapes`` reads their tensors.
_UNSUPPORTED = (
    "complex32 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e8m0fnu float4_e2m1fn_x2 qint8 quint8 qint32 quint4x2 quint2x4 bits8 "
    "bits16 bits1x8 bits2x4 bits4x2 uint1 uint2 uint3 uint4 uint5 uint6 uint7 "
    "int1 int2 int3 int4 int5 int6 int7"
)
BY_NAME = {x: Element(x, None, None, np.dtype("u1")) for x in _UNSUPPORTED.split()}
for _name, *_storage in map(str.split, _STORAGES.split(", ")):
    BY_NAME[_name] = Element(
        _name,
        f"{_storage[0]}Storage" if _storage else None,
        getattr(mx, "bool_" if _name == "bool" else _name, None),
        # numpy has no bfloat16, so the bits are read as uint16.
        np.dtype("uint16" if _name == "bfloat16" else _name).newbyteorder("<"),
    )
BY_STORAGE = {e.storage: e for e in BY_NAME.values() if e.storage}
UNTYPED = ("torch.storage.UntypedStorage", "torch.UntypedStorage")
_BY_MLX = {e.mlx: e for e in BY_NAME.values() if e.mlx is not None}
_ROUNDED = {"float64": "float32", "complex128": "complex64"}


def element_of(array: "mx.array | np.ndarray[Any, Any]") -> Element | None:
    """Return the element type of an array, or None if PyTorch has no equivalent."""
    if isinstance(array, mx.array):
        return _BY_MLX.get(array.dtype)
    return BY_NAME.get(array.dtype.name) if array.dtype.kind in "biufc" else None


class Storage(NamedTuple):
    """A storage as described in a pickle; the size of an untyped one is in bytes."""

    key: str
    element: Element | None
    numel: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * (self.element.numpy.itemsize if self.element else 1)


class TensorReader:
    """Build tensors, or only their shapes, from the storages in a file.

    Args:
        find (callable or None): Takes the key of a storage and returns its bytes, and
            their checksum if the file has one. None reads shapes only.
        file_size (int): Size of the file.
        limits (Limits): Limits the total size of all tensors.
        float64 (Dtype or None): The dtype to convert float64 to.
    """

    def __init__(
        self,
        find: Callable[[str], tuple[memoryview, int | None]] | None,
        file_size: int,
        limits: Limits,
        float64: mx.Dtype | None = None,
    ) -> None:
        self.storages: dict[str, Storage] = {}
        self._find = find
        self._unread = file_size
        self._room = 4 * file_size + limits.tensor_bytes
        self._float64 = float64
        self._arrays: dict[str, tuple[Element, mx.array]] = {}
        # Keys are strings, whose hashes a file cannot choose.
        self._tensors: dict[str, Any] = {}
        self._checks: list[Future[None]] = []
        self._threads = ThreadPoolExecutor(max_workers=4)

    def storage(self, pid: Any) -> Storage:
        """Return the storage that a persistent id describes."""
        # Compare types first: comparing an array raises an error.
        is_storage = type(pid) is tuple and len(pid) in (5, 6) and type(pid[0]) is str
        check(
            is_storage and pid[0] == "storage",
            "the file refers to something that is no storage, as whole models of old "
            "versions do. Save model.state_dict() in PyTorch and load that.",
        )
        _, kind, key, _location, numel, *views = pid
        path = kind.path if type(kind) is Placeholder and kind.args is None else ""
        element = BY_STORAGE.get(path.removeprefix("torch."))
        is_known = element or path in UNTYPED
        is_known = is_known and type(key) is str and len(key) <= 64 and is_count(numel)
        check(
            is_known and (not views or views[0] is None),
            "the file describes a storage in an unknown way. Load it in PyTorch and "
            "save it again.",
        )
        storage = Storage(key, element, numel)
        check(self.storages.setdefault(key, storage) == storage, _MIXED)
        return storage

    def tensor(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        strides: Any,
        requires_grad: Any = False,
        _hooks: Any = None,
        metadata: Any = None,
        *,
        dtype: Any = None,
    ) -> Any:
        """Return the checked view of a storage as an array, or its shape.

        The arguments are those of PyTorch's ``_rebuild_tensor_v2``.
        """
        element = _check_view(storage, offset, shape, strides, dtype)
        check(
            metadata is None or (type(metadata) is dict and not metadata),
            "the tensor is lazily conjugated or negated. Call .resolve_conj() and "
            ".resolve_neg() on it in PyTorch and save again.",
        )
        view = f"{element.name} {offset} {shape} {strides} {storage.key}"
        if view not in self._tensors:
            self._room -= prod(shape) * element.numpy.itemsize
            check(
                self._room >= 0,
                "the tensors hold more than four times the size of the file. If you "
                "trust it, raise limits.tensor_bytes.",
            )
            self._tensors[view] = (
                self._view(storage, element, offset, tuple(shape), strides)
                if self._find
                else TensorShape(tuple(shape), element.name)
            )
        return flag(self._tensors[view], requires_grad is True, False)

    def finish(self) -> None:
        """Evaluate the tensors and wait for the checksums."""
        # A lazy array would be tied to the thread that made it.
        mx.eval([x for x in self._tensors.values() if isinstance(x, mx.array)])
        for pending in self._checks:
            pending.result()

    def close(self) -> None:
        """Stop the threads that compute checksums."""
        self._threads.shutdown(cancel_futures=True)

    def _view(
        self,
        storage: Storage,
        element: Element,
        start: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
    ) -> mx.array:
        target = self._target(element)
        if 0 in shape:
            return mx.zeros(shape, target.mlx, stream=mx.cpu)
        stored = storage.nbytes // element.numpy.itemsize
        is_whole = prod(shape) == stored and strides == row_strides(shape)
        check(
            is_whole or stored <= _MAX_DIM,
            f"the tensor is part of a storage of over {_MAX_DIM} elements. Call "
            ".clone() on it in PyTorch and save again.",
        )
        if storage.key not in self._arrays:
            values = self._read(storage, element, target)
            values = values.reshape(shape if is_whole else stored)
            if target.mlx == mx.bfloat16:
                array = mx.array(values).view(mx.bfloat16, stream=mx.cpu)
            else:
                array = mx.array(values, target.mlx)
            self._arrays[storage.key] = element, array
        used, whole = self._arrays[storage.key]
        check(used is element, _MIXED)
        if not is_whole:
            return mx.as_strided(whole, shape, strides, start, stream=mx.cpu)
        if whole.shape == shape:
            return whole
        return mx.reshape(whole, shape, stream=mx.cpu)

    def _target(self, element: Element) -> Element:
        """Return the element type in MLX."""
        is_double = element.name in _ROUNDED
        if is_double and self._float64 is not None and self._float64 == mx.float32:
            return BY_NAME[_ROUNDED[element.name]]
        advice = "Convert it in PyTorch and save again"
        if is_double:
            advice = "Pass float64=mx.float32 to round such tensors"
        if element.name == "float64":
            advice += ", or float64=mx.float64 to keep them for the CPU"
        check(
            element.mlx is not None and (not is_double or self._float64 is not None),
            f"MLX does not compute with torch.{element.name}, the dtype of the tensor. "
            f"{advice}.",
        )
        return element

    def _read(
        self, storage: Storage, element: Element, target: Element
    ) -> np.ndarray[Any, Any]:
        """Return the elements of a storage, copied only if they need conversion."""
        assert self._find is not None
        data, checksum = self._find(storage.key)
        check(
            data.nbytes == storage.nbytes,
            f"a storage should have {storage.nbytes} bytes but has {data.nbytes}.",
        )
        self._unread -= data.nbytes
        check(self._unread >= 0, "records of the file overlap.")
        if checksum is not None:
            self._check_sum(data, checksum)
        values = np.frombuffer(data, element.numpy)
        if element.name == "bool":
            is_bool = values.view(np.uint8).max() <= 1
            check(is_bool, "a bool tensor has bytes other than 0 and 1.")
        with np.errstate(over="ignore", invalid="ignore"):
            values = values.astype(target.numpy, copy=False)
        return values if values.flags.aligned else values.copy()

    def _check_sum(self, data: memoryview, checksum: int) -> None:
        if data.nbytes >= _LARGE:
            with suppress(RuntimeError):  # the interpreter is shutting down
                self._checks.append(self._threads.submit(check_sum, data, checksum))
                return
        check_sum(data, checksum)


def check_sum(data: memoryview, checksum: int) -> None:
    """Raise unless the data has this CRC-32."""
    check(
        zlib.crc32(data) == checksum,
        "the checksum of a record is wrong: the file is damaged. Copy it again.",
    )


def row_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return row-major strides. PyTorch counts an empty dimension as 1."""
    return tuple(prod(n or 1 for n in shape[i:]) for i in range(1, len(shape) + 1))


def _check_view(
    storage: Any, offset: Any, shape: Any, strides: Any, dtype: Any
) -> Element:
    """Check a tensor's size, strides and offset; return its element type."""
    is_storage = isinstance(storage, Storage)
    check(is_storage, "a tensor is rebuilt from something that is no storage.")
    element: Element | None = storage.element
    if element is None or dtype is not None:
        name = dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
        check(name in BY_NAME, "a tensor is rebuilt without a known dtype.")
        element = BY_NAME[name]
    is_sound = is_count(offset) and isinstance(shape, tuple)
    is_sound = is_sound and isinstance(strides, tuple) and len(shape) == len(strides)
    check(
        is_sound and len(shape) <= _MAX_NDIM and all(map(is_count, shape + strides)),
        "the offset, shape or strides of a tensor are wrong.",
    )
    fits = max(shape, default=0) <= _MAX_DIM and prod(n or 1 for n in shape) < 2**62
    check(fits, f"a tensor of shape {tuple(shape)} is too large for MLX.")
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    room = storage.nbytes // element.numpy.itemsize
    check(
        0 in shape or last < room,
        f"a tensor of shape {tuple(shape)} with strides {tuple(strides)} and offset "
        f"{offset} reaches outside its storage of {room} elements.",
    )
    return element
