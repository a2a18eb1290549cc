"""``load`` and ``shapes``: read the zip and legacy formats of ``torch.save``."""

import io
import os
import struct
import zipfile
from typing import Any

from .objects import CheckpointError, check
from .tensors import MLX_DTYPES, Source, Storage, Tensor, read_all
from .tree import replace_tensors, show_path
from .unpickler import MAX_PICKLE, Unpickler

_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
# The lengths of the name and of the extra field, in the header of a zip record.
_LENGTHS = struct.Struct("<2H")
# Tensors may be this many times larger than the file, plus 1 MiB.
_MAX_FACTOR = 4
# zipfile takes about 15 times the size of a zip directory.
_MAX_DIRECTORY = 2**25
File = str | os.PathLike[str] | bytes


def load(file: File) -> Any:
    """Read a ``torch.save`` file without PyTorch and without executing its contents.

    Each tensor becomes an ``mx.array``. Tensors that share a storage share memory, and
    a tensor that appears twice becomes one array. float64 arrays can be used only on
    the CPU. Dtypes, devices and objects of other classes become a ``Placeholder``.

    Args:
        file (str, PathLike or bytes): A path, or the contents of a file.

    Returns:
        The object in the file.

    Raises:
        CheckpointError: If the file is damaged, hostile or unsupported, or a tensor has
            a dtype that MLX does not have.
        OSError: If the file cannot be opened.

    Example:

        >>> import io
        >>> import mlx.core as mx
        >>> from mlx_gradscale import torch_checkpoint
        >>> file = io.BytesIO()
        >>> torch_checkpoint.save(file, {"weight": mx.ones((2, 2)), "epoch": 3})
        >>> torch_checkpoint.load(file.getvalue())["epoch"]
        3
    """
    tree, tensors = _read(file)
    if any(tensor.dtype not in MLX_DTYPES for tensor in tensors):
        replace_tensors(tree, _check_dtype)
    arrays = dict(zip(tensors, read_all(tensors), strict=True))
    return replace_tensors(tree, lambda _, leaf: arrays[leaf])


def _check_dtype(path: tuple[Any, ...], tensor: Tensor) -> None:
    """Raise an error with the path of a tensor whose dtype MLX does not have."""
    check(
        tensor.dtype in MLX_DTYPES,
        f"{show_path(path)} has the dtype {f'torch.{tensor.dtype}'!a}, which MLX lacks",
        "Convert the tensor in PyTorch and save again, or read the rest of the file "
        "with shapes().",
    )


def shapes(file: File) -> Any:
    """Read a file like ``load``, but with a lazy ``Tensor`` in place of each tensor.

    A ``Tensor`` has a ``shape``, a ``dtype`` and flags, and its ``read()`` returns the
    ``mx.array``. ``save`` copies its bytes, whatever their dtype, and preserves shared
    storages, strides and flags; so this is also the way to edit a file without loss.

    Args:
        file (str, PathLike or bytes): A path, or the contents of a file. Do not
            change the file as long as tensors of it are used; replacing it is safe.

    Example:

        >>> import io
        >>> import mlx.core as mx
        >>> from mlx_gradscale import torch_checkpoint
        >>> file = io.BytesIO()
        >>> torch_checkpoint.save(file, {"weight": mx.ones((2, 2)), "epoch": 3})
        >>> torch_checkpoint.shapes(file.getvalue())["weight"].shape
        (2, 2)
    """
    return _read(file)[0]


def _read(file: File) -> tuple[Any, list[Tensor]]:
    """Return the object in a file, and its tensors."""
    source = Source(file)
    is_zip = source.read(0, 4) == b"PK\x03\x04"
    is_known = is_zip or source.read(0, 1) == b"\x80"
    check(is_known, "This is not a file that torch.save() wrote", "Check the path.")
    tree, unpickler = (_read_zip if is_zip else _read_legacy)(source)
    tensors = [*unpickler.tensors.values()]
    stored = sum([storage.nbytes for storage in unpickler.storages.values()])
    check(stored <= source.size, "The file is damaged: its records overlap")
    # Views may repeat elements, and a storage is read once for each dtype.
    read = {(x.storage, x.dtype): x.storage.nbytes for x in tensors}
    nbytes = max(sum(read.values()), sum([x.nbytes for x in tensors]))
    check(
        nbytes <= _MAX_FACTOR * source.size + 2**20,
        f"the tensors have {nbytes:,} bytes, more than {_MAX_FACTOR} times the file",
        "Call .contiguous() on expanded tensors in PyTorch and save again.",
    )
    return tree, tensors


def _read_zip(source: Source) -> tuple[Any, Unpickler]:
    entries = _zip_entries(source)
    # PyTorch assumes that all records are in the folder of the first one.
    folder = next(iter(entries), "").split("/", 1)[0] + "/"
    check(
        folder + "constants.pkl" not in entries,
        "This is a TorchScript archive (torch.jit.save), which holds code",
        "Save the state_dict() of the model with torch.save() instead.",
    )

    def find(name: str) -> Storage:
        check(folder + name in entries, f"The file has no record {name[:80]!a}")
        return _find_record(source, entries[folder + name])

    def read(name: str) -> bytes:
        record = find(name)
        check(
            record.nbytes <= MAX_PICKLE,
            f"The pickle has more than {MAX_PICKLE:,} bytes",
            "Save large values as tensors.",
        )
        return b"".join(record.pieces())

    check(
        folder + "byteorder" not in entries or read("byteorder") == b"little",
        "The file was written on a big-endian machine",
        "Load it in PyTorch on a little-endian machine and save it again.",
    )
    stream = io.BytesIO(read("data.pkl"))
    unpickler = Unpickler(stream, lambda key: find(f"data/{key}"))
    value = unpickler.load()
    check(not stream.read(1), "There is data after the end of the pickle")
    return value, unpickler


class _Capped(io.BufferedReader):
    """A file for zipfile, which reads the whole directory in one call."""

    def read(self, size: int | None = -1) -> bytes:
        # A longer directory is cut off, which zipfile reports.
        return super().read(min(-1 if size is None else size, _MAX_DIRECTORY))


def _zip_entries(source: Source) -> dict[str, zipfile.ZipInfo]:
    """Return the entries of a zip file by name."""
    try:
        with zipfile.ZipFile(_Capped(source.open())) as archive:
            infos = archive.infolist()
    except Exception as error:  # zipfile raises ten different types
        raise CheckpointError(
            f"The zip directory is damaged or cut off ({error}). Copy the file again."
        ) from error
    entries = {info.filename: info for info in infos}
    is_unique = len(entries) == len(infos)
    check(is_unique, "The zip directory has two records of the same name")
    return entries


def _find_record(source: Source, info: zipfile.ZipInfo) -> Storage:
    """Return the location of a zip record; raise if it is compressed or damaged."""
    name = ascii(info.filename[:80])
    is_plain = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1
    check(
        is_plain and info.compress_size == info.file_size,
        f"The record {name} is compressed or encrypted",
        "Load the file in PyTorch and save it again.",
    )
    is_inside = 0 <= info.header_offset <= source.size
    header = source.read(info.header_offset, 30) if is_inside else b""
    is_header = len(header) == 30 and header[:4] == b"PK\x03\x04"
    check(is_header, f"The record {name} has a damaged header")
    start = info.header_offset + 30 + sum(_LENGTHS.unpack_from(header, 26))
    check(start + info.file_size <= source.size, f"The record {name} is cut off")
    return Storage(None, info.file_size, source, start, info.CRC)


def _read_legacy(source: Source) -> tuple[Any, Unpickler]:
    """Read the format used before PyTorch 1.6.

    Five pickles (magic number, version, system, object, storage keys) precede the
    storages, each of which is an 8-byte element count followed by the data.
    """
    stream = io.BytesIO(source.read(0, MAX_PICKLE))
    unpickler = Unpickler(stream, lambda key: Storage(None, -1, source))
    for expected in (_MAGIC, _VERSION):
        found = unpickler.load()
        is_known = type(found) is int and found == expected
        check(is_known, "torch.save() did not write this pickle", "Check the path.")
    _system, value, keys = unpickler.load(), unpickler.load(), unpickler.load()
    storages = unpickler.storages
    is_list = type(keys) is list and {*map(type, keys)} <= {str}
    fits = is_list and sorted(keys) == sorted(storages)
    check(fits, "The file is damaged: its storages do not match its tensors")
    at = stream.tell()
    for key in keys:
        storage = storages[key]
        count = int.from_bytes(source.read(at, 8), "little", signed=True)
        storage.start, at = at + 8, at + 8 + storage.nbytes
        fits = count == storage.numel and at <= source.size
        check(fits, "The file is damaged: a storage has the wrong size")
    check(at == source.size, "The file has data after the last storage")
    return value, unpickler
