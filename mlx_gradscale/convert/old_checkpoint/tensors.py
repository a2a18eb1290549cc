"""Read the storages in a checkpoint, and build the tensors that view them."""

import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .foreign import Placeholder, TensorShape, flag
from .limits import TEXT, CheckpointError, Limits, check

# MLX stores a dimension as int32; numpy 1 supports at most 32 dimensions.
_MAX_DIM, _MAX_NDIM = 2**31 - 1, 32
# Data is copied and its checksum computed in pieces that fit in a cache, by this many
# threads: a single thread takes 0.3 s for the checksum of 1 GB.
_PIECE, _THREADS = 2**18, 4
# PyTorch's classes of storages, and the dtypes of their elements.
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
# Tensors of other dtypes have an untyped storage and record their own dtype.
UNTYPED = ("torch.storage.UntypedStorage", "torch.UntypedStorage")
DTYPES = {*STORAGES.values(), "uint16", "uint32", "uint64"}
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def _mlx_dtype(name: str) -> mx.Dtype | None:
    dtype = getattr(mx, "bool_" if name == "bool" else name, None)
    return dtype if isinstance(dtype, mx.Dtype) else None


def _item_size(name: str) -> int:
    """Return the bytes per element of a dtype, or 1 if it is not in ``DTYPES``."""
    dtype = _mlx_dtype(name)
    return dtype.size if dtype else 16 if name == "complex128" else 1


def bytes_of(array: Any) -> np.ndarray[Any, Any]:
    """Return a uint8 view of the memory of an evaluated, row-contiguous array."""
    return np.asarray(memoryview(array)).reshape(-1).view(np.uint8)


class Record(NamedTuple):
    """The location of a block of data in a file, and its CRC-32 if the file has one."""

    start: int
    nbytes: int
    checksum: int | None


class Storage(NamedTuple):
    """A storage as described in a pickle; without a dtype, ``numel`` counts bytes."""

    key: str
    dtype: str | None
    numel: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * (_item_size(self.dtype) if self.dtype else 1)


class TensorReader:
    """Build tensors, or only their shapes, from the storages in a file.

    Args:
        data (memoryview): The contents of the file.
        descriptor (int or None): The descriptor of the file, if there is one.
        limits (Limits): Limits on memory and work.
        float64 (Dtype or None): The dtype to convert float64 to. None raises an error.
        only_shapes (bool): Whether to build shapes instead of arrays.
    """

    def __init__(
        self,
        data: memoryview,
        descriptor: int | None,
        limits: Limits,
        float64: mx.Dtype | None,
        only_shapes: bool,
    ) -> None:
        self.storages: dict[str, Storage] = {}
        self.limits = limits
        # The size of the arrays in the result, whether they are views or not.
        self.result_bytes = 0
        self.data, self._descriptor = data, descriptor
        self._float64, self._only_shapes = float64, only_shapes
        # Keys are strings, whose hashes a file cannot choose.
        self._arrays: dict[str, tuple[Storage, mx.array, mx.array]] = {}
        self._tensors: dict[str, Any] = {}

    def storage(self, pid: Any) -> Storage:
        """Return the storage that a persistent id describes."""
        # Check the type first: comparing an array with a string raises an error.
        is_storage = type(pid) is tuple and len(pid) in (5, 6) and type(pid[0]) is str
        check(
            is_storage and pid[0] == "storage",
            "the file refers to something that is not a storage, as whole models saved "
            "by old PyTorch versions do. Save model.state_dict() in PyTorch instead.",
        )
        _, kind, key, _location, numel, *views = pid
        path = kind.path if type(kind) is Placeholder and kind.is_name else ""
        dtype = STORAGES.get(path.removeprefix("torch."))
        is_known = (dtype or path in UNTYPED) and (not views or views[0] is None)
        is_known = is_known and type(key) is str and len(key) <= 64 and is_count(numel)
        check(
            is_known,
            f"a storage of type {path!a} is described in an unknown way. Convert its "
            "tensor in PyTorch with .dequantize() or .cpu(), and save again.",
        )
        storage = Storage(key, dtype, numel)
        is_same = self.storages.setdefault(key, storage) == storage
        check(is_same, "tensors of different types share a storage. Clone them first.")
        return storage

    def tensor(
        self,
        storage: Storage,
        offset: int,
        shape: tuple[Any, ...],
        strides: tuple[Any, ...],
        requires_grad: bool = False,
        _hooks: Any = None,
        *rest: Any,
    ) -> Any:
        """Check a view of a storage, and return it as an array or a ``TensorShape``.

        The arguments are those of PyTorch's ``_rebuild_tensor_v2``, or of ``_v3``,
        which has a dtype before the metadata.
        """
        dtype, metadata = storage.dtype, rest[-1] if rest else {}
        if rest and isinstance(rest[0], Placeholder):
            is_dtype = rest[0].module == "torch" and rest[0].is_name
            dtype, metadata = rest[0].name if is_dtype else None, rest[1:] and rest[1]
        if dtype is None or len(dtype) > 40:
            raise CheckpointError("a tensor has no known dtype. Save the file again.")
        size = _item_size(dtype)
        _check_view(storage.nbytes // size, offset, shape, strides)
        advice = "Call .resolve_conj() and .resolve_neg() in PyTorch and save again."
        check(not metadata, f"the tensor is lazily conjugated or negated. {advice}")
        view = f"{dtype} {offset} {shape} {strides} {storage.key}"
        if view not in self._tensors:
            self.limits.spend(len(view) // TEXT)
            self._tensors[view] = TensorShape(shape, dtype)
            if not self._only_shapes:
                array = self._view(storage, dtype, offset, shape, strides)
                self._tensors[view] = array
        return flag(self._tensors[view], requires_grad, False)

    def _view(self, storage: Storage, name: str, *view: Any) -> mx.array:
        """Return a view of a storage; ``read`` fills in the storage's data later."""
        start, shape, strides = view
        dtype = target = _mlx_dtype(name)
        problem = "MLX does not support. Convert the tensor in PyTorch and save again."
        if name == "float64":
            target = self._float64
            problem = "MLX supports only on the CPU. Pass float64=mx.float32 to round "
            problem += "such tensors, or float64=mx.float64 to keep them for the CPU."
        if dtype is None or target is None:
            raise CheckpointError(
                f"the tensor has the dtype {f'torch.{name[:80]}'!a}, which {problem}"
            )
        if 0 in shape:
            return mx.zeros(shape, target, stream=mx.cpu)
        stored = storage.nbytes // dtype.size
        is_whole = prod(shape) == stored and strides == row_strides(shape)
        check(
            is_whole or stored <= _MAX_DIM,
            f"the tensor is part of a storage of over {_MAX_DIM} elements. Call "
            ".clone() on it in PyTorch and save again.",
        )
        # Tensors of several dtypes may share an untyped storage. Read it once for each.
        key = f"{name} {storage.key}"
        with mx.stream(mx.cpu):
            if key not in self._arrays:
                whole = shape if is_whole else (stored,)
                bits = mx.empty(whole, _BITS[dtype.size])
                self._arrays[key] = storage, bits, bits.view(dtype).astype(target)
            values = self._arrays[key][2]
            if is_whole:
                return values.reshape(shape)
            return mx.as_strided(values, shape, strides, start)

    def read(self, find: Callable[[str], Record]) -> None:
        """Fill in the data of all tensors, unless only shapes are needed.

        ``find`` returns the location of a storage, given its key.
        """
        if self._only_shapes:
            return
        copies, total = [], 0
        for storage, bits, values in self._arrays.values():
            record, size = find(storage.key), storage.nbytes
            found = f"a storage should have {size} bytes but has {record.nbytes}"
            check(record.nbytes == size, f"The file is damaged: {found}.")
            total += size
            copies.append((bits, record, values.dtype == mx.bool_))
        check(total <= self.data.nbytes, "The file is damaged: its records overlap.")
        self.limits.spend_bytes(self.result_bytes - total)
        mx.eval([bits for bits, *_ in copies])
        parts = [copies[i::_THREADS] for i in range(_THREADS)]
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(self._copy, parts))
        # A lazy array would be tied to the thread that made it.
        mx.eval(list(self._tensors.values()))

    def _copy(self, copies: list[tuple[mx.array, Record, bool]]) -> None:
        """Read storages into their arrays, and verify checksums and bool values."""
        for bits, record, is_bool in copies:
            target, found = bytes_of(bits), 0
            for at in range(0, record.nbytes, _PIECE):
                piece, start = target[at : at + _PIECE], record.start + at
                if self._descriptor is None:
                    piece[:] = self.data[start : start + piece.nbytes]
                else:
                    # Copying from the mapped file would also keep its pages in memory.
                    n_read = os.preadv(self._descriptor, [piece.data], start)
                    problem = "The file became shorter while it was read. Try again."
                    check(n_read == piece.nbytes, problem)
                found = zlib.crc32(piece.data, found)
            check_sum(found, record.checksum)
            is_valid = not is_bool or target.max() <= 1
            check(is_valid, "A bool tensor has bytes above 1. Save the file again.")


def is_count(value: Any) -> bool:
    """Return whether a value is a non-negative integer that fits in 64 bits."""
    return type(value) is int and 0 <= value < 2**63


def check_sum(found: int, expected: int | None) -> None:
    """Raise if a CRC-32 differs from ``expected``, which is None if it is unknown."""
    check(
        expected is None or found == expected,
        "The file is damaged: the checksum of a record is wrong. Copy it again.",
    )


def row_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return row-major strides in elements; PyTorch counts an empty axis as 1."""
    return tuple(prod(n or 1 for n in shape[i:]) for i in range(1, len(shape) + 1))


def _check_view(
    room: int, offset: int, shape: tuple[Any, ...], strides: tuple[Any, ...]
) -> None:
    """Raise unless a view fits a storage of ``room`` elements and MLX's limits."""
    is_sound = len(shape) == len(strides) and len(shape) <= _MAX_NDIM
    check(
        is_sound and all(map(is_count, (offset, *shape, *strides))),
        "the offset, shape or strides of a tensor are invalid. Save the file again.",
    )
    fits = max(shape, default=0) <= _MAX_DIM and prod(n or 1 for n in shape) < 2**62
    check(fits, f"a tensor of shape {shape} is too large for MLX. Split it.")
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    check(
        0 in shape or last < room,
        f"a tensor of shape {shape} with strides {strides} and offset {offset} reaches "
        f"outside its storage of {room} elements. Save the file again.",
    )
