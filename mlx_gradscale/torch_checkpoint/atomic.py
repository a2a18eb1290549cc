"""Write a file so that it is there whole or not at all."""

import os
import secrets
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from io import FileIO
from typing import Any

from .aside import start_aside

# So much is written before the disk is set to work on it.
_FLUSH_EVERY = 2**26


class _FlushingFile(FileIO):
    """Sends long files to the disk while they are written, not at the end."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb")
        self._unsent = 0
        self._flush: Future | None = None

    def write(self, data: Any) -> int:
        written = super().write(data)
        self._unsent += written
        if self._unsent >= _FLUSH_EVERY and (not self._flush or self._flush.done()):
            self._flush = start_aside(os.fsync, self.fileno())
            self._unsent = 0
        return written

    def sync(self) -> None:
        if self._flush:
            self._flush.result()
        os.fsync(self.fileno())

    def close(self) -> None:
        if self._flush:
            wait([self._flush])
        super().close()


@contextmanager
def atomic_write(path: "str | os.PathLike[str]") -> Iterator[FileIO]:
    """Open a temporary file beside ``path`` that takes its place at the end.

    It replaces ``path`` in one step, after its bytes are on the disk. When anything
    is raised, the old file stays as it was and the temporary one is removed.

    Example:

        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "scale.bin")
        >>> with atomic_write(path) as file:
        ...     _ = file.write(b"65536")
        >>> os.listdir(os.path.dirname(path))
        ['scale.bin']
    """
    # A symbolic link keeps pointing: its target is replaced.
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    # os.open, not tempfile: the file gets the mode that the umask says, not 0600.
    temporary = os.path.join(folder, f".{name[:64]}.{secrets.token_hex(8)}.tmp")
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0)
    try:
        with _FlushingFile(os.open(temporary, flags, 0o666)) as file:
            yield file
            file.sync()
        os.replace(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(folder)


def _sync_folder(folder: str) -> None:
    # So that the new name survives a power cut; Windows cannot open a folder.
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
