"""``save``: plain Python values and arrays as a file that ``torch.load`` reads."""

import io
import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, cast

import mlx.core as mx
import numpy as np

from ..files.atomic import WholeFile, atomic_write
from .pickle_writer import Array, PickleWriter
from .source import CHUNK
from .zip_writer import ALIGNMENT, ZipWriter


def save(file: "str | os.PathLike[str] | BinaryIO", obj: Any) -> None:
    """Write a ``.pt`` file that ``torch.load(weights_only=True)`` reads.

    The layout is ``torch.save``'s own. Arrays become tensors on the CPU; an array
    that comes twice is stored once and comes back as one tensor. They are written one
    at a time, without a second copy of them in memory.

    Args:
        file (str, PathLike or file): A path, which is replaced in one step when
            everything is written, or anything with a ``write`` method.
        obj (Any): Dicts, OrderedDicts, Counters, lists, tuples and sets of arrays
            (``mx.array`` or ``numpy.ndarray``), numbers, text, bytes and None.

    Raises:
        TypeError: ``obj`` holds something else; the error says where. The file is
            then as it was before.

    Example:

        >>> import mlx.core as mx
        >>> from mlx_gradscale import torch_checkpoint
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> torch_checkpoint.save(path, {"weight": mx.zeros((2, 3)), "epoch": 3})
        >>> torch_checkpoint.load(path)["weight"].shape
        (2, 3)
    """
    writer = PickleWriter()
    pickle = writer.write(obj)
    if isinstance(file, (str, os.PathLike)):
        # PyTorch names the folder in the zip file after the file, if it is ASCII.
        stem = Path(file).stem
        folder = stem if stem and stem.isascii() else "archive"
        with atomic_write(file) as raw:
            _write(raw, folder, pickle, writer.arrays)
    elif hasattr(file, "write"):
        _write(file, "archive", pickle, writer.arrays)
    else:
        raise TypeError(
            "save() takes a path or a writable binary file object first and the "
            f"object second, not a {type(file).__name__} first."
        )


def save_bytes(obj: Any) -> bytes:
    """Return what ``save`` writes, as bytes.

    Example:

        >>> from mlx_gradscale import torch_checkpoint
        >>> torch_checkpoint.load(torch_checkpoint.save_bytes({"epoch": 3}))
        {'epoch': 3}
    """
    buffer = io.BytesIO()
    save(buffer, obj)
    return buffer.getvalue()


def _write(
    file: BinaryIO | WholeFile, folder: str, pickle: bytes, arrays: list[Array]
) -> None:
    with ZipWriter(file, folder) as archive:

        def add(name: str, data: bytes) -> None:
            archive.add(name, len(data), [data])

        add("data.pkl", pickle)
        add(".format_version", b"1")
        add(".storage_alignment", str(ALIGNMENT).encode())
        add("byteorder", b"little")
        for number, array in enumerate(arrays):
            archive.add(f"data/{number}", array.nbytes, _chunks(array))
        add("version", b"3\n")
        add(".data/serialization_id", _serialization_id(archive.checksums))


def _chunks(array: Array) -> Iterator[memoryview]:
    """Yield the array's bytes in row order, little-endian, copying a chunk at most."""
    values = _as_numpy(array)
    if not values.size:
        return
    if values.flags.c_contiguous:
        data = values.reshape(-1).view(np.uint8).data
        for start in range(0, len(data), CHUNK):
            yield data[start : start + CHUNK]
        return
    # nditer copies a buffer at a time, also where no axis is short.
    for part in np.nditer(
        values,
        flags=["external_loop", "buffered"],
        order="C",
        buffersize=CHUNK // values.itemsize,
    ):
        yield np.ascontiguousarray(part).view(np.uint8).data


def _as_numpy(array: Array) -> np.ndarray:
    if isinstance(array, mx.array):
        if array.dtype == mx.bfloat16:  # numpy has none; its bits are a uint16's
            array = array.view(mx.uint16, stream=mx.cpu)
        mx.eval(array)
        return np.asarray(memoryview(cast(Any, array)))
    little = array.dtype.newbyteorder("<")
    return array if array.dtype == little else array.astype(little)


def _serialization_id(checksums: dict[str, int]) -> bytes:
    """Return forty digits, as PyTorch's: from the records' names and contents."""
    names = sha256("\n".join(checksums).encode()).digest()
    contents = sha256(repr(sorted(checksums.items())).encode()).digest()
    return b"".join(
        b"%020d" % int.from_bytes(half[:8], "little") for half in (names, contents)
    )
