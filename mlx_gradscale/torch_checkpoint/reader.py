"""``load`` and ``shapes``: read the zip and legacy files of ``torch.save``."""

import io
import mmap
import os
import stat
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx

from .limits import Budget, CheckpointError, Limits
from .tensors import Record, TensorReader, check_sum
from .unpickler import Unpickler

_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
# Bytes of the zip directory that count as one operation.
_DIRECTORY = 5


def load(
    file: "str | os.PathLike[str] | bytes",
    limits: Limits | None = None,
    *,
    float64: mx.Dtype | None = None,
) -> Any:
    """Read a file that ``torch.save`` wrote, without PyTorch and without running it.

    Each tensor becomes an ``mx.array``. Tensors that share a storage share memory, and
    the same tensor twice is the same array twice. A ``Parameter``, or a tensor with
    ``requires_grad``, is a ``TorchTensor``; a ``torch.Size`` is a tuple; a dtype or
    device is its name. Other attributes of tensors are dropped. Objects of other
    classes become a ``Placeholder``.

    Args:
        file (str, PathLike or bytes): A path, or the contents of a file. Do not
            shorten a file while it is read: it is mapped into memory.
        limits (Limits, optional): How much the file may ask for.
        float64 (Dtype, optional): What double precision becomes. MLX computes it only
            on the CPU, so that it is an error by default; ``mx.float32`` rounds it
            (and complex128), ``mx.float64`` keeps it.

    Returns:
        The object in the file.

    Raises:
        CheckpointError: The file is damaged, hostile or unsupported.
        OSError: The file cannot be opened.

    Example:

        >>> import io
        >>> from mlx_gradscale import torch_checkpoint
        >>> file = io.BytesIO()
        >>> torch_checkpoint.save(file, {"weight": mx.ones((2, 2)), "epoch": 3})
        >>> torch_checkpoint.load(file.getvalue())["epoch"]
        3
    """
    # A Dtype cannot be compared with None.
    is_known = isinstance(float64, mx.Dtype) and float64 in (mx.float32, mx.float64)
    if float64 is not None and not is_known:
        raise ValueError(
            f"float64 must be None, mx.float32 or mx.float64, not {float64!r}."
        )
    budget = Budget(limits)
    return _read(_open(file), budget, float64=float64)


def shapes(file: "str | os.PathLike[str] | bytes", limits: Limits | None = None) -> Any:
    """Read a file as ``load`` does, but no tensor: each one is a ``TensorShape``.

    Args:
        file (str, PathLike or bytes): A path, or the contents of a file.
        limits (Limits, optional): How much the file may ask for.

    Example:

        >>> import io
        >>> from mlx_gradscale import torch_checkpoint
        >>> file = io.BytesIO()
        >>> torch_checkpoint.save(file, {"weight": mx.ones((2, 2)), "epoch": 3})
        >>> torch_checkpoint.shapes(file.getvalue())["weight"]
        TensorShape(shape=(2, 2), dtype='float32')
    """
    return _read(_open(file), Budget(limits), only_shapes=True)


def _open(file: "str | os.PathLike[str] | bytes") -> memoryview:
    """Return the contents of a regular file, mapped into memory."""
    if isinstance(file, (bytes, bytearray, memoryview)):
        return memoryview(file).cast("B")
    if not isinstance(file, (str, os.PathLike)):
        raise TypeError(f"file must be a path or bytes, not {type(file).__name__}.")
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(file, flags)
    try:
        found = os.fstat(descriptor)
        if os.path.exists(os.path.join(file, ".metadata")):
            raise CheckpointError(
                f"{os.fspath(file)} is a folder of torch.distributed.checkpoint. "
                "Make it one file with: python -m torch.distributed.checkpoint."
                f"format_utils dcp_to_torch {os.fspath(file)} FILE"
            )
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{os.fspath(file)} is not a regular file.")
        if not found.st_size:
            return memoryview(b"")
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
    return memoryview(mapped)


def _read(
    data: memoryview,
    budget: Budget,
    *,
    float64: mx.Dtype | None = None,
    only_shapes: bool = False,
) -> Any:
    head = bytes(data[:265])
    if head[:4] == b"PK\x03\x04":
        return _read_zip(data, budget, float64, only_shapes)
    if head[:1] == b"\x80":
        return _read_legacy(data, budget, float64, only_shapes)
    if head[257:262] == b"ustar":
        raise CheckpointError(
            "This is a tar file, PyTorch's format before 0.1.10. Load it in PyTorch "
            "and save it again."
        )
    if head[:2] == b"\x1f\x8b":
        raise CheckpointError("This file is compressed by gzip. Decompress it first.")
    raise CheckpointError("This is not a file that torch.save() wrote.")


def _unpickle(
    pickle: bytes, start: int, tensors: TensorReader, budget: Budget
) -> tuple[Any, int]:
    """Return the object of a pickle and where the pickle ends."""
    unpickler = Unpickler(pickle, start, tensors, budget)
    try:
        value = unpickler.read()
        tensors.finish()
    finally:
        tensors.close()
    return value, unpickler.position


def _read_zip(
    data: memoryview, budget: Budget, float64: mx.Dtype | None, only_shapes: bool
) -> Any:
    entries = _zip_entries(data, budget)
    # PyTorch takes the folder of the first record for that of all.
    folder = next(iter(entries), "").split("/", 1)[0] + "/"
    if folder + "constants.pkl" in entries:
        raise CheckpointError(
            "This is a TorchScript archive (torch.jit.save), which holds code. Save "
            "the state_dict() of the model with torch.save() instead."
        )
    if folder + "data.pkl" not in entries:
        raise CheckpointError("This zip file is not a PyTorch checkpoint: no data.pkl.")
    order = b"little"
    if folder + "byteorder" in entries:
        order = bytes(_record(data, entries[folder + "byteorder"]).data[:16])
        if order not in (b"little", b"big"):
            raise CheckpointError(f"The byte order {order!r} is unknown.")
    pickle, checksum = _record(data, entries[folder + "data.pkl"])
    if pickle.nbytes > budget.limits.pickle_bytes:
        raise CheckpointError(
            f"The pickle has {pickle.nbytes} bytes. If you trust the file, raise "
            "limits.pickle_bytes."
        )
    check_sum(pickle, checksum or 0)
    prefix = folder + "data/"
    records: dict[str, Callable[[], Record]] = {
        name.removeprefix(prefix): partial(_record, data, entry)
        for name, entry in entries.items()
        if name.startswith(prefix)
    }
    tensors = TensorReader(
        None if only_shapes else records,
        data.nbytes,
        budget.limits,
        order == b"big",
        float64,
    )
    value, end = _unpickle(bytes(pickle), 0, tensors, budget)
    if end != pickle.nbytes:
        raise CheckpointError("There is data after the end of the pickle.")
    return value


class _Directory(io.RawIOBase):
    """What ``zipfile`` reads from; pays for the directory before it is parsed."""

    def __init__(self, data: memoryview, budget: Budget) -> None:
        self._data, self._budget, self._at = data, budget, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}
        if base[whence] + offset < 0:
            raise OSError("seeks before the file")
        self._at = base[whence] + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        stop = len(self._data) if size < 0 else self._at + size
        part = self._data[self._at : stop]
        self._budget.spend(part.nbytes // _DIRECTORY)
        self._at += part.nbytes
        return bytes(part)


def _zip_entries(data: memoryview, budget: Budget) -> dict[str, zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(_Directory(data, budget)) as archive:
            infos = archive.infolist()
    except CheckpointError:
        raise
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
        raise CheckpointError(
            f"The zip directory is damaged or cut off ({error}). Copy the file again."
        ) from None
    except (struct.error, IndexError, OverflowError):
        raise CheckpointError("The zip directory is damaged.") from None
    entries = {info.filename: info for info in infos}
    if len(entries) != len(infos):
        raise CheckpointError("The zip file has two records of the same name.")
    return entries


def _record(data: memoryview, info: zipfile.ZipInfo) -> Record:
    """Return the bytes of a record, which PyTorch does not compress."""
    name = ascii(info.filename[:80])
    is_plain = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1
    if not is_plain or info.compress_size != info.file_size:
        raise CheckpointError(
            f"The record {name} is compressed or encrypted. Load the file in PyTorch "
            "and save it again."
        )
    header = bytes(data[info.header_offset : info.header_offset + _LOCAL_HEADER.size])
    if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
        raise CheckpointError(f"The record {name} has a damaged header.")
    *_, name_size, extra_size = _LOCAL_HEADER.unpack(header)
    start = info.header_offset + len(header) + name_size + extra_size
    found = data[start : start + info.file_size]
    if found.nbytes != info.file_size:
        raise CheckpointError(f"The record {name} is cut off. Copy the file again.")
    return Record(found, info.CRC)


def _read_legacy(
    data: memoryview, budget: Budget, float64: mx.Dtype | None, only_shapes: bool
) -> Any:
    """Read the format of before PyTorch 1.6.

    Five pickles (magic number, version, system, object, keys of the storages) precede
    the storages: eight bytes for the number of elements, then their bytes.
    """
    limits = budget.limits
    head = bytes(data[: limits.pickle_bytes])
    tensors = TensorReader(None, data.nbytes, limits)
    at = 0
    starts, values = [], []
    for expected in (_MAGIC, _VERSION, None, None, None):
        starts.append(at)
        value, at = _unpickle(head, at, tensors, budget)
        if expected is not None and value != expected:
            raise CheckpointError("This pickle is not a PyTorch checkpoint.")
        values.append(value)
    *_, value, keys = values
    if type(keys) is not list or not all(type(key) is str for key in keys):
        raise CheckpointError("The list of storages is damaged.")
    if len(keys) != len(tensors.storages) or set(keys) != tensors.storages.keys():
        raise CheckpointError("The list of storages is not that of the tensors.")
    if only_shapes:
        return value
    records: dict[str, Callable[[], Record]] = {}
    for key in keys:
        storage = tensors.storages[key]
        count = int.from_bytes(data[at : at + 8], "little", signed=True)
        found = data[at + 8 : at + 8 + storage.nbytes]
        if count != storage.numel or found.nbytes != storage.nbytes:
            raise CheckpointError("A storage has another size than its tensors say.")
        records[key] = partial(Record, found, None)
        at += 8 + storage.nbytes
    if at != data.nbytes:
        raise CheckpointError("There is data after the last storage.")
    # Where the storages are is known only now: read the object again, with arrays.
    del value, values
    tensors = TensorReader(records, data.nbytes, limits, float64=float64)
    value, _ = _unpickle(head, starts[3], tensors, Budget(limits))
    return value
