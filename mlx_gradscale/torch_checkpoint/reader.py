"""``load`` and ``shapes``: read the zip and legacy formats of ``torch.save``."""

import io
import os
import weakref
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

from .disk import open_file
from .objects import CheckpointError, check, replace_tensors, show_path
from .tensors import MLX_DTYPES, SIZES, Tensor, read_all
from .unpickler import MAX_PICKLE, Unpickler

# What starts a legacy file.
_MAGIC = [0x1950A86A20F9469CFC6C, 1001]
# Tensors may be this many times larger than the file, plus 1 MiB.
_MAX_FACTOR = 4
# zipfile takes about 15 times the size of a zip directory.
_MAX_DIRECTORY = 2**24
# Data is read and verified in chunks that fit in a cache.
_CHUNK = 2**20
_LOCK = Lock()
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
    source = _open(file)
    start = source.read(4)
    is_zip = start == b"PK\x03\x04"
    is_known = is_zip or start[:1] == b"\x80"
    check(is_known, "This is not a file that torch.save() wrote", "Check the path.")
    tree, tensors = (_read_zip if is_zip else _read_legacy)(source)
    # Views may repeat elements, and a storage is read once for each dtype.
    read = {(x.storage, x.dtype): x.storage.nbytes for x in tensors}
    nbytes = max(sum(read.values()), sum([x.nbytes for x in tensors]))
    check(
        nbytes <= _MAX_FACTOR * source.seek(0, os.SEEK_END) + 2**20,
        f"the tensors have {nbytes:,} bytes, more than {_MAX_FACTOR} times the file",
        "Call .contiguous() on expanded tensors in PyTorch and save again.",
    )
    return tree, tensors


class _File(io.BufferedReader):
    """A file that limits what zipfile reads in one call: a whole directory."""

    def read(self, size: int | None = None) -> bytes:
        # A longer directory is cut off, which zipfile reports.
        is_short = size is not None and 0 <= size < _MAX_DIRECTORY
        return super().read(size if is_short else _MAX_DIRECTORY)


def _open(file: File) -> _File:
    """Open a file that is closed as soon as nothing refers to it, without a warning."""
    if isinstance(file, (bytes, bytearray)):
        return _File(io.BytesIO(file))
    shown = os.fspath(file)
    check(
        not os.path.exists(os.path.join(file, ".metadata")),
        f"{shown} is a folder of torch.distributed.checkpoint",
        "Convert it to a file with: python -m torch.distributed.checkpoint."
        f"format_utils dcp_to_torch {shown} FILE",
    )
    descriptor = open_file(file, os.O_RDONLY)
    source = _File(io.FileIO(descriptor, closefd=False))
    weakref.finalize(source, os.close, descriptor)
    return source


def _read_zip(source: _File) -> tuple[Any, list[Tensor]]:
    with _explain_damage():
        archive = zipfile.ZipFile(source)
    entries = {info.filename: info for info in archive.infolist()}
    # PyTorch assumes that all records are in the folder of the first one.
    folder = next(iter(entries), "").split("/", 1)[0] + "/"
    check(
        folder + "constants.pkl" not in entries,
        "This is a TorchScript archive (torch.jit.save), which holds code",
        "Save the state_dict() of the model with torch.save() instead.",
    )

    def find(name: str, most: int) -> zipfile.ZipInfo:
        shown = f"The record {name[:80]!a}"
        check(folder + name in entries, f"{shown} is missing")
        info = entries[folder + name]
        # Compressed data could expand without bound.
        is_stored = info.compress_type == zipfile.ZIP_STORED
        check(is_stored, f"{shown} is compressed")
        check(info.file_size <= most, f"{shown} has more than {most:,} bytes")
        return info

    def read(name: str) -> bytes:
        return b"".join(_read_record(archive, find(name, MAX_PICKLE)))

    is_little = folder + "byteorder" not in entries or read("byteorder") == b"little"
    check(is_little, "The file was written on a big-endian machine")
    unpickler = Unpickler(io.BytesIO(read("data.pkl")))
    value = unpickler.load()
    for key, storage in unpickler.storages.items():
        info = find(f"data/{key}", storage.nbytes)
        is_whole = info.file_size == storage.nbytes
        check(is_whole, f"A record has {info.file_size} bytes, not {storage.nbytes}")
        storage.chunks = partial(_read_record, archive, info)
    return value, [*unpickler.tensors]


def _read_record(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
    """Yield the bytes of a record, whose checksum zipfile verifies."""
    with _explain_damage():
        # open() asks for the position of the file, which reads in other threads move.
        with archive._lock:  # type: ignore[attr-defined]
            record = archive.open(info)
        with record:
            while chunk := record.read(_CHUNK):
                yield chunk


@contextmanager
def _explain_damage() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # zipfile raises ten different types
        problem = f"The zip directory or a record is damaged ({error!a:.120})"
        raise CheckpointError(f"{problem}. Copy the file again.") from error


def _read_legacy(source: _File) -> tuple[Any, list[Tensor]]:
    """Read the format used before PyTorch 1.6.

    Five pickles (magic number, version, system, object, storage keys) precede the
    storages, each of which is an 8-byte element count followed by the data.
    """
    stream = io.BytesIO(b"".join(_read_part(source, 0, MAX_PICKLE)))
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
    at, size = stream.tell(), source.seek(0, os.SEEK_END)
    for storage in map(storages.__getitem__, keys):
        count = b"".join(_read_part(source, at, 8))
        storage.chunks = partial(_read_part, source, at + 8, storage.nbytes)
        at += 8 + storage.nbytes
        numel = storage.nbytes // SIZES[storage.dtype]
        fits = int.from_bytes(count, "little") == numel and at <= size
        check(fits, "The file is damaged: a storage has the wrong size")
    check(at == size, "The file has data after the last storage")
    return value, [*unpickler.tensors]


def _read_part(source: _File, start: int, size: int) -> Iterator[bytes]:
    """Yield up to ``size`` bytes of a file."""
    for at in range(start, start + size, _CHUNK):
        with _LOCK:  # reading moves the position
            source.seek(at)
            chunk = source.read(min(_CHUNK, start + size - at))
        yield chunk
