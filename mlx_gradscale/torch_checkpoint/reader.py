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

# What starts a legacy file.
_MAGIC = [0x1950A86A20F9469CFC6C, 1001]
# Tensors may be this many times larger than the file, plus 1 MiB.
_MAX_FACTOR = 4
# zipfile takes about 15 times the size of a zip directory.
_MAX_DIRECTORY = 2**24
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
    known = [tensor for tensor in tensors if tensor.dtype in MLX_DTYPES]
    arrays = dict(zip(known, read_all(known), strict=True))

    def find(path: tuple[Any, ...], leaf: Any) -> Any:
        check(
            leaf in arrays,
            f"{show_path(path)} has the dtype {leaf.dtype!a}, which MLX lacks",
            "Convert the tensor in PyTorch and save again, or read the rest of the "
            "file with shapes().",
        )
        return arrays[leaf]

    return replace_tensors(tree, find)


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
    tree, tensors = (_read_zip if is_zip else _read_legacy)(source)
    # Views may repeat elements, and a storage is read once for each dtype.
    read = {(x.storage, x.dtype): x.storage.nbytes for x in tensors}
    nbytes = max(sum(read.values()), sum([x.nbytes for x in tensors]))
    check(
        nbytes <= _MAX_FACTOR * source.size + 2**20,
        f"the tensors have {nbytes:,} bytes, more than {_MAX_FACTOR} times the file",
        "Call .contiguous() on expanded tensors in PyTorch and save again.",
    )
    return tree, tensors


def _read_zip(source: Source) -> tuple[Any, list[Tensor]]:
    try:
        with zipfile.ZipFile(_Capped(source.open())) as archive:
            entries = {info.filename: info for info in archive.infolist()}
    except Exception as error:  # zipfile raises ten different types
        raise CheckpointError(
            f"The zip directory is damaged or cut off ({error}). Copy the file again."
        ) from error
    # PyTorch assumes that all records are in the folder of the first one.
    folder = next(iter(entries), "").split("/", 1)[0] + "/"
    check(
        folder + "constants.pkl" not in entries,
        "This is a TorchScript archive (torch.jit.save), which holds code",
        "Save the state_dict() of the model with torch.save() instead.",
    )

    def find(name: str, most: int) -> Storage:
        check(folder + name in entries, f"The file has no record {name[:80]!a}")
        return _find_record(source, entries[folder + name], most)

    order = "byteorder"
    check(
        folder + order not in entries or bytes(find(order, 9).read()) == b"little",
        "The file was written on a big-endian machine",
        "Load it in PyTorch on a little-endian machine and save it again.",
    )
    unpickler = Unpickler(io.BytesIO(find("data.pkl", MAX_PICKLE).read()))
    value = unpickler.load()
    for key, storage in unpickler.storages.items():
        record = find(f"data/{key}", storage.nbytes)
        is_whole = record.nbytes == storage.nbytes
        check(is_whole, f"The record of {storage.nbytes} bytes has {record.nbytes}")
        storage.data, storage.start = source, record.start
        storage.checksum = record.checksum
    return value, [*unpickler.tensors]


class _Capped(io.BufferedReader):
    """A file for zipfile, which reads the whole directory in one call."""

    def read(self, size: int | None = -1) -> bytes:
        # A longer directory is cut off, which zipfile reports.
        return super().read(min(-1 if size is None else size, _MAX_DIRECTORY))


def _find_record(source: Source, info: zipfile.ZipInfo, most: int) -> Storage:
    """Return the location of a zip record; raise if it is compressed or damaged."""
    name = ascii(info.filename[:80])
    is_plain = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1
    check(
        is_plain and info.compress_size == info.file_size,
        f"The record {name} is compressed or encrypted",
        "Load the file in PyTorch and save it again.",
    )
    check(info.file_size <= most, f"The record {name} has more than {most:,} bytes")
    is_inside = 0 <= info.header_offset <= source.size
    header = source.read(info.header_offset, 30) if is_inside else b""
    is_header = len(header) == 30 and header[:4] == b"PK\x03\x04"
    check(is_header, f"The record {name} has a damaged header")
    # The header ends with the lengths of the name and of the extra field.
    start = info.header_offset + 30 + sum(struct.unpack_from("<2H", header, 26))
    check(start + info.file_size <= source.size, f"The record {name} is cut off")
    return Storage(None, info.file_size, source, start, info.CRC)


def _read_legacy(source: Source) -> tuple[Any, list[Tensor]]:
    """Read the format used before PyTorch 1.6.

    Five pickles (magic number, version, system, object, storage keys) precede the
    storages, each of which is an 8-byte element count followed by the data.
    """
    stream = io.BytesIO(source.read(0, MAX_PICKLE))
    unpickler = Unpickler(stream)
    for expected in _MAGIC:
        found = unpickler.load()
        is_known = type(found) is int and found == expected
        check(is_known, "torch.save() did not write this pickle", "Check the path.")
    _system, value, keys = unpickler.load(), unpickler.load(), unpickler.load()
    storages = unpickler.storages
    is_list = type(keys) is list and {*map(type, keys)} <= {str}
    fits = is_list and sorted(keys) == sorted(storages)
    check(fits, "The file is damaged: its storages do not match its tensors")
    at = stream.tell()
    for storage in map(storages.__getitem__, keys):
        count = int.from_bytes(source.read(at, 8), "little", signed=True)
        storage.data, storage.start, at = source, at + 8, at + 8 + storage.nbytes
        fits = count == storage.numel and at <= source.size
        check(fits, "The file is damaged: a storage has the wrong size")
    check(at == source.size, "The file has data after the last storage")
    return value, [*unpickler.tensors]
