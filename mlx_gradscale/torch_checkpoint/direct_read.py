"""Read part of a file straight into memory that MLX has just allocated."""

import io
import os
import threading
import weakref
from typing import BinaryIO, cast

import mlx.core as mx
import numpy as np

from .source import Source


def read_array(
    source: Source, offset: int, dtype: str, shape: tuple[int, ...]
) -> mx.array:
    """Return the array whose bytes begin at ``offset``.

    ``mx.load`` is how MLX allocates without setting the memory to zero, which takes
    as long as reading into it (``mx.empty`` is ``mx.zeros``). It gets a file object
    of the ``.npy`` format whose data is that part of the source.

    Args:
        source (Source): The file.
        offset (int): Where the array's bytes begin.
        dtype (str): numpy's name of the elements, little-endian.
        shape (tuple): The shape of the array.
    """
    header = io.BytesIO()
    description = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, description)
    problems: list[BaseException] = []
    part = _Part(source, offset, header.getvalue(), problems)
    released = threading.Event()
    weakref.finalize(part, released.set)
    # What MLX asks of a file is less than BinaryIO has.
    array = mx.load(cast(BinaryIO, part), format="npy", stream=mx.cpu)
    # MLX's thread lets go of the file a moment later, with Python's lock: were the
    # process to end just then, it would abort.
    del part
    released.wait(timeout=10)
    if problems:
        raise problems[0]
    return cast(mx.array, array)


class _Part:
    """What ``mx.load`` needs of a file object: a header, then a part of the source.

    MLX reads the data in a thread where an exception would end the process, so it is
    left in ``problems``, for the caller to raise.
    """

    closed = False

    def __init__(
        self, source: Source, offset: int, header: bytes, problems: list[BaseException]
    ) -> None:
        self._source = source
        self._offset = offset - len(header)
        self._header = header
        self._problems = problems
        self._position = 0

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        # MLX seeks from the beginning only: the end is not known here.
        self._position = offset
        return offset

    def readinto(self, buffer: memoryview) -> int:
        at, size = self._position, buffer.nbytes
        self._position += size
        if at < len(self._header):
            buffer[:] = self._header[at : at + size]
            return size
        try:
            self._source.read_into(self._offset + at, buffer, "A tensor's data")
        except BaseException as problem:
            # Frames would keep this file object, also those of another problem that
            # this one came upon (both halves of a file that became shorter).
            problem.__context__ = problem.__cause__ = None
            self._problems.append(problem.with_traceback(None))
        return size
