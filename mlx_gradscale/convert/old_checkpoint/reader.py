"""``load`` and ``shapes``: read the zip and legacy formats of ``torch.save``."""

import io
import mmap
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .limits import CheckpointError, Limits, check
from .tensors import Record, TensorReader, check_sum
from .unpickler import Unpickler

_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
# Bytes of the pickle, and of the zip directory, that count as one operation.
_PICKLE, _DIRECTORY = 8, 5
File = str | os.PathLike[str] | bytes
_Find = Callable[[str], Record]


def load(
    file: File, limits: Limits | None = None, *, float64: mx.Dtype | None = None
) -> Any:
    """Read a ``torch.save`` file without PyTorch and without executing its contents.

    Each tensor becomes an ``mx.array``. Tensors that share a storage share memory, and
    a tensor that appears twice becomes one array. A ``Parameter``, or a tensor
    with ``requires_grad``, becomes a ``TorchTensor``; other tensor attributes are
    dropped. Dtypes, devices and objects of other classes become a ``Placeholder``.

    Args:
        file (str, PathLike or bytes): A path, or the contents of a file. Do not
            truncate the file while it is read.
        limits (Limits, optional): Limits on memory and work.
        float64 (Dtype, optional): The dtype to convert float64 tensors to. MLX supports
            float64 only on the CPU, so such tensors are an error by default.
            ``mx.float32`` rounds them, and ``mx.float64`` keeps them. complex128
            tensors are always an error.

    Returns:
        The object in the file.

    Raises:
        CheckpointError: If the file is damaged, hostile or unsupported.
        OSError: If the file cannot be opened.

    Example:

        >>> import io
        >>> from mlx_gradscale import torch_checkpoint
        >>> file = io.BytesIO()
        >>> torch_checkpoint.save(file, {"weight": mx.ones((2, 2)), "epoch": 3})
        >>> torch_checkpoint.load(file.getvalue())["epoch"]
        3
    """
    return _read(file, limits, float64=float64, only_shapes=False)


def shapes(file: File, limits: Limits | None = None) -> Any:
    """Read a file like ``load``, but with a ``TensorShape`` in place of each tensor.

    Args:
        file (str, PathLike or bytes): A path, or the contents of a file.
        limits (Limits, optional): Limits on memory and work.

    Example:

        >>> import io
        >>> from mlx_gradscale import torch_checkpoint
        >>> file = io.BytesIO()
        >>> torch_checkpoint.save(file, {"weight": mx.ones((2, 2)), "epoch": 3})
        >>> torch_checkpoint.shapes(file.getvalue())["weight"].shape
        (2, 2)
    """
    return _read(file, limits, float64=None, only_shapes=True)


def _read(file: File, limits: Limits | None, **options: Any) -> Any:
    limits = limits or Limits()
    if isinstance(file, (bytes, bytearray)):
        return _read_data(
            TensorReader(memoryview(bytes(file)), None, limits, **options)
        )
    shown = os.fspath(file)
    check(
        not os.path.exists(os.path.join(file, ".metadata")),
        f"{shown} is a folder of torch.distributed.checkpoint. Convert it to a file "
        "with: python -m torch.distributed.checkpoint.format_utils dcp_to_torch "
        f"{shown} FILE",
    )
    # Opening a pipe would wait for a writer.
    check(
        stat.S_ISREG(os.stat(file).st_mode),
        f"{shown} is not a regular file. Pass the path of a file that torch.save() "
        "wrote.",
    )
    with open(file, "rb") as opened:
        descriptor, data = opened.fileno(), memoryview(b"")
        if os.fstat(descriptor).st_size:  # an empty file cannot be mapped
            data = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
        return _read_data(TensorReader(data, descriptor, limits, **options))


def _read_data(tensors: TensorReader) -> Any:
    is_zip = bytes(tensors.data[:4]) == b"PK\x03\x04"
    is_known = is_zip or bytes(tensors.data[:1]) == b"\x80"
    check(is_known, "This is not a file that torch.save() wrote. Check the path.")
    value, find = (_read_zip if is_zip else _read_legacy)(tensors)
    tensors.read(find)
    return value


def _read_zip(tensors: TensorReader) -> tuple[Any, _Find]:
    data, entries = tensors.data, _zip_entries(tensors.data, tensors.limits)
    # PyTorch assumes that all records are in the folder of the first one.
    folder = next(iter(entries), "").split("/", 1)[0] + "/"
    check(
        folder + "constants.pkl" not in entries,
        "This is a TorchScript archive (torch.jit.save), which holds code. Save the "
        "state_dict() of the model with torch.save() instead.",
    )

    def find(name: str) -> Record:
        problem = f"The file has no record {name[:80]!a}. Copy or save it again."
        check(folder + name in entries, problem)
        return _record(data, entries[folder + name])

    def read(name: str) -> bytes:
        start, size, checksum = find(name)
        tensors.limits.spend(size // _PICKLE)
        content = bytes(data[start : start + size])
        check_sum(zlib.crc32(content), checksum)
        return content

    check(
        folder + "byteorder" not in entries or read("byteorder") == b"little",
        "The file was written on a big-endian machine. Load it in PyTorch on a "
        "little-endian machine and save it again.",
    )
    stream = io.BytesIO(read("data.pkl"))
    value = Unpickler(stream, tensors).read()
    problem = "There is data after the end of the pickle. Copy the file again."
    check(not stream.read(1), problem)
    return value, lambda key: find(f"data/{key}")


class _Counted:
    """Wrap a file, to count the bytes that are read before reading them."""

    def __init__(self, file: Any, limits: Limits, per_operation: int) -> None:
        self._file, self._limits, self._per_operation = file, limits, per_operation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, *size: int) -> bytes:
        self._limits.spend(sum(size) // self._per_operation)
        return self._file.read(*size)  # type: ignore[no-any-return]


def _zip_entries(data: memoryview, limits: Limits) -> dict[str, zipfile.ZipInfo]:
    file = data.obj if isinstance(data.obj, mmap.mmap) else io.BytesIO(data)
    try:
        with zipfile.ZipFile(_Counted(file, limits, _DIRECTORY)) as archive:
            infos = archive.infolist()
    except CheckpointError:
        raise
    except Exception as error:  # zipfile raises ten different types
        raise CheckpointError(
            f"The zip directory is damaged or cut off ({error}). Copy the file again."
        ) from None
    entries = {info.filename: info for info in infos}
    is_unique = len(entries) == len(infos)
    check(is_unique, "The file has two records of the same name. Save it again.")
    return entries


def _record(data: memoryview, info: zipfile.ZipInfo) -> Record:
    """Return the location of a zip record; raise if it is compressed or damaged."""
    name = ascii(info.filename[:80])
    is_plain = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1
    check(
        is_plain and info.compress_size == info.file_size,
        f"The record {name} is compressed or encrypted. Load the file in PyTorch and "
        "save it again.",
    )
    header = bytes(data[info.header_offset :][: _LOCAL_HEADER.size])
    is_header = len(header) == _LOCAL_HEADER.size and header[:4] == b"PK\x03\x04"
    check(
        is_header and info.header_offset >= 0,
        f"The record {name} has a damaged header. Copy the file again.",
    )
    *_, name_size, extra_size = _LOCAL_HEADER.unpack(header)
    start = info.header_offset + len(header) + name_size + extra_size
    is_whole = start + info.file_size <= data.nbytes
    check(is_whole, f"The record {name} is cut off. Copy the file again.")
    return Record(start, info.file_size, info.CRC)


def _read_legacy(tensors: TensorReader) -> tuple[Any, _Find]:
    """Read the format used before PyTorch 1.6.

    Five pickles (magic number, version, system, object, storage keys) precede the
    storages, each of which is an 8-byte element count followed by the data.
    """
    data, values = tensors.data, []
    most = _PICKLE * max(0, tensors.limits.operations)
    # The lengths of the pickles are not known, so count what is read.
    stream: Any = _Counted(io.BytesIO(data[:most]), tensors.limits, _PICKLE)
    for expected in (_MAGIC, _VERSION, None, None, None):
        values.append(Unpickler(stream, tensors).read())
        is_known = type(values[-1]) is int and values[-1] == expected
        check(is_known or not expected, "torch.save() did not write this pickle.")
    *_, value, keys = values
    is_list = type(keys) is list and all(type(key) is str for key in keys)
    check(
        is_list and sorted(keys) == sorted(tensors.storages),
        "The file is damaged: its storages do not match its tensors. Copy it again.",
    )
    records, at = {}, stream.tell()
    for key in keys:
        storage = tensors.storages[key]
        count = int.from_bytes(data[at : at + 8], "little", signed=True)
        records[key] = Record(at + 8, storage.nbytes, None)
        fits = count == storage.numel and at + 8 + storage.nbytes <= data.nbytes
        check(fits, "The file is damaged: a storage has the wrong size. Copy it again.")
        at += 8 + storage.nbytes
    check(at == data.nbytes, "The file has data after the last storage. Copy it again.")
    return value, records.__getitem__
