"""``load`` and ``shapes``: read the zip and legacy formats of ``torch.save``."""

import io
import os
import struct
import zipfile
from typing import Any

from .objects import CheckpointError, check
from .source import Record, Source
from .tensors import Tensor, mlx_dtype, read_all
from .tree import check_tree, replace_tensors
from .unpickler import MAX_PICKLE, Unpickler

_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
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
        >>> from mlx_gradscale import torch_checkpoint
        >>> file = io.BytesIO()
        >>> torch_checkpoint.save(file, {"weight": mx.ones((2, 2)), "epoch": 3})
        >>> torch_checkpoint.load(file.getvalue())["epoch"]
        3
    """
    tree = shapes(file)
    leaves: dict[Tensor, tuple[Any, ...]] = {}
    replace_tensors(tree, lambda path, leaf: leaves.setdefault(leaf, path))
    for leaf, path in leaves.items():
        if mlx_dtype(leaf.dtype) is None:
            place = "".join(f"[{key!a:.80}]" for key in path[:20])
            raise CheckpointError(
                f"obj{place} has the dtype {f'torch.{leaf.dtype}'!a}, which MLX does "
                "not have. Convert the tensor in PyTorch and save again, or read the "
                "rest of the file with shapes()."
            )
    arrays = dict(zip(leaves, read_all(leaves), strict=True))
    return replace_tensors(tree, lambda path, leaf: arrays[leaf])


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
        >>> from mlx_gradscale import torch_checkpoint
        >>> file = io.BytesIO()
        >>> torch_checkpoint.save(file, {"weight": mx.ones((2, 2)), "epoch": 3})
        >>> torch_checkpoint.shapes(file.getvalue())["weight"].shape
        (2, 2)
    """
    source = Source(file)
    is_zip = source.read(0, 4) == b"PK\x03\x04"
    is_known = is_zip or source.read(0, 1) == b"\x80"
    check(is_known, "This is not a file that torch.save() wrote. Check the path.")
    value, unpickler = (_read_zip if is_zip else _read_legacy)(source)
    check_tree(value)
    stored = sum(x.nbytes for x in unpickler.storages.values())
    check(stored <= source.size, "The file is damaged: its records overlap.")
    viewed = {
        (x.storage, x.dtype): x.storage.nbytes for x in unpickler.tensors.values()
    }
    # Views may repeat elements, and a storage is read once for each dtype.
    for nbytes in (
        sum(x.nbytes for x in unpickler.tensors.values()),
        sum(viewed.values()),
    ):
        check(
            nbytes <= _MAX_FACTOR * source.size + 2**20,
            f"the tensors have {nbytes:,} bytes, which is more than {_MAX_FACTOR} "
            "times the size of the file. Call .contiguous() on expanded tensors in "
            "PyTorch and save again.",
        )
    return value


def _read_zip(source: Source) -> tuple[Any, Unpickler]:
    entries = _zip_entries(source)
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
        return _record(source, entries[folder + name])

    def read(name: str) -> bytes:
        record = find(name)
        check(
            record.nbytes <= MAX_PICKLE,
            f"The pickle has more than {MAX_PICKLE:,} bytes. Save large values as "
            "tensors.",
        )
        return b"".join(record.pieces())

    check(
        folder + "byteorder" not in entries or read("byteorder") == b"little",
        "The file was written on a big-endian machine. Load it in PyTorch on a "
        "little-endian machine and save it again.",
    )
    stream = io.BytesIO(read("data.pkl"))
    unpickler = Unpickler(stream, lambda key: find(f"data/{key}"))
    value = unpickler.read_pickle()
    problem = "There is data after the end of the pickle. Copy the file again."
    check(not stream.read(1), problem)
    return value, unpickler


class _Limited:
    """A file for zipfile, which reads the whole directory in one call."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int = -1) -> Any:
        # A longer directory is cut off, which zipfile reports.
        return self._file.read(
            min(size, _MAX_DIRECTORY) if size >= 0 else _MAX_DIRECTORY
        )


def _zip_entries(source: Source) -> dict[str, zipfile.ZipInfo]:
    try:
        with source.open() as file, zipfile.ZipFile(_Limited(file)) as archive:
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


def _record(source: Source, info: zipfile.ZipInfo) -> Record:
    """Return the location of a zip record; raise if it is compressed or damaged."""
    name = ascii(info.filename[:80])
    is_plain = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1
    check(
        is_plain and info.compress_size == info.file_size,
        f"The record {name} is compressed or encrypted. Load the file in PyTorch and "
        "save it again.",
    )
    is_inside = 0 <= info.header_offset <= source.size
    header = source.read(info.header_offset, _LOCAL_HEADER.size) if is_inside else b""
    is_header = len(header) == _LOCAL_HEADER.size and header[:4] == b"PK\x03\x04"
    check(is_header, f"The record {name} has a damaged header. Copy the file again.")
    *_, name_size, extra_size = _LOCAL_HEADER.unpack(header)
    start = info.header_offset + len(header) + name_size + extra_size
    is_whole = start + info.file_size <= source.size
    check(is_whole, f"The record {name} is cut off. Copy the file again.")
    return Record(source, start, info.file_size, info.CRC)


def _read_legacy(source: Source) -> tuple[Any, Unpickler]:
    """Read the format used before PyTorch 1.6.

    Five pickles (magic number, version, system, object, storage keys) precede the
    storages, each of which is an 8-byte element count followed by the data.
    """
    stream, values = io.BytesIO(source.read(0, MAX_PICKLE)), []
    unpickler = Unpickler(stream, lambda key: None)
    for expected in (_MAGIC, _VERSION, None, None, None):
        values.append(unpickler.read_pickle())
        is_known = type(values[-1]) is int and values[-1] == expected
        check(is_known or not expected, "torch.save() did not write this pickle.")
    *_, value, keys = values
    storages = unpickler.storages
    is_list = type(keys) is list and all(type(key) is str for key in keys)
    check(
        is_list and sorted(keys) == sorted(storages),
        "The file is damaged: its storages do not match its tensors. Copy it again.",
    )
    at = stream.tell()
    for key in keys:
        storage = storages[key]
        count = int.from_bytes(source.read(at, 8), "little", signed=True)
        storage.data = Record(source, at + 8, storage.nbytes, None)
        at += 8 + storage.nbytes
        fits = count == storage.numel and at <= source.size
        check(fits, "The file is damaged: a storage has the wrong size. Copy it again.")
    check(at == source.size, "The file has data after the last storage. Copy it again.")
    return value, unpickler
