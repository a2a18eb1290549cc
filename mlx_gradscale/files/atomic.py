"""Write a file so that it is there whole or not at all."""

import errno
import os
import re
import secrets
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import Any

from .background import in_background
from .locks import is_there, lock, refuse_special

# So much is written before the disk is set to work on it.
_FLUSH_EVERY = 2**26
# A name is at most 255 bytes long on most disks, and ours add some 40 to the user's.
_LONGEST = 96


class WholeFile:
    """A new file that takes all it is given, or raises an error that names its target.

    It has no ``fileno``, and is not an ``io`` class: a writer could bypass ``write``,
    and a raw file's own may take less than it is given, and say so in a number that
    is easily overlooked.
    """

    def __init__(self, descriptor: int, target: str) -> None:
        self._descriptor = descriptor
        self._target = target
        self._unsent = 0
        self._flush: Future[Any] | None = None
        self.closed = False

    def writable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Write all of ``data``."""
        view = memoryview(data).cast("B")
        with naming(self._target):
            done = 0
            while done < len(view):
                done += os.write(self._descriptor, view[done:])
        self._unsent += done
        if self._unsent >= _FLUSH_EVERY and (not self._flush or self._flush.done()):
            self._flush = in_background(os.fsync, self._descriptor)
            self._unsent = 0
        return done

    def tell(self) -> int:
        """Return the position in the file."""
        return os.lseek(self._descriptor, 0, os.SEEK_CUR)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position in the file, and return it."""
        return os.lseek(self._descriptor, offset, whence)

    def flush(self) -> None:
        """Do nothing: nothing is held back."""

    def sync(self) -> None:
        """Return when all that was written is on the disk."""
        with naming(self._target):
            if self._flush:
                self._flush.result()
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file, after what is still being brought to the disk."""
        if not self.closed:
            self.closed = True
            if self._flush:
                wait([self._flush])
            with naming(self._target):
                os.close(self._descriptor)


@contextmanager
def naming(target: "str | os.PathLike[str]") -> Iterator[None]:
    """Make an ``OSError`` on the way name the file that the user asked for.

    Example:

        >>> with naming("run.pt"):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
        ...
        OSError: [Errno 28] No space left on device: 'run.pt'
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(target)) from error


@contextmanager
def atomic_write(path: "str | os.PathLike[str]") -> Iterator[WholeFile]:
    """Open a temporary file beside ``path`` that takes its place at the end.

    It replaces ``path`` in one step, after its bytes are on the disk. When anything
    is raised, the old file stays as it was and the temporary one is removed. What
    killed processes left of their writes to the same path is removed, too.

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
    _check_target(path, target)
    with naming(path):
        _remove_left(target)
        temporary, descriptor = _begin(target)
    file = WholeFile(descriptor, os.fspath(path))
    try:
        try:
            yield file
            file.sync()
            with naming(path):
                if os.name != "posix":  # an open file has no other name on Windows
                    file.close()
                # The lock goes with the file: it is still open, or the next writer
                # would take it for a dead one's.
                os.replace(temporary, target)
        finally:
            file.close()
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    with naming(path):  # so that the new name survives a power cut
        sync(os.path.dirname(target))


def short_name(name: str) -> str:
    """Leave room in a name for more: cut a long one, and end it in its hash.

    Example:

        >>> short_name("run.pt"), len(short_name("x" * 240))
        ('run.pt', 96)
    """
    data = os.fsencode(name)
    if len(data) <= _LONGEST:
        return name
    mark = "~" + sha256(data).hexdigest()[:16]
    return data[: _LONGEST - len(mark)].decode(errors="ignore") + mark


def _check_target(path: "str | os.PathLike[str]", target: str) -> None:
    with suppress(FileNotFoundError, NotADirectoryError):
        mode = os.stat(target).st_mode
        # Nothing would be left of /dev/null.
        refuse_special(path, mode)
        if os.path.isdir(target):
            raise IsADirectoryError(
                errno.EISDIR, "It is a folder; one file is to be written", str(path)
            )


def _begin(target: str) -> tuple[str, int]:
    folder, name = os.path.split(target)
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0)
    while True:
        # os.open, not tempfile: the file gets the mode that the umask says, not 0600.
        mark = secrets.token_hex(8)
        temporary = os.path.join(folder, f".{short_name(name)}.{mark}.tmp")
        descriptor = os.open(temporary, flags, 0o666)
        # Between these two lines another process may have taken it for a dead one's.
        if not lock(descriptor, wait=True) or is_there(temporary, descriptor):
            return temporary, descriptor
        os.close(descriptor)


def _remove_left(target: str) -> None:
    """Remove the temporary files of the same target that no living process holds."""
    folder, name = os.path.split(target)
    ours = re.compile(re.escape(f".{short_name(name)}.") + r"[0-9a-f]{16}\.tmp")
    try:
        left = [each for each in os.listdir(folder) if ours.fullmatch(each)]
    except OSError:  # a folder that can be written to but not listed
        return
    for each in left:
        path = os.path.join(folder, each)
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
            try:
                if lock(descriptor, wait=False) and is_there(path, descriptor):
                    os.unlink(path)
            finally:
                os.close(descriptor)


def sync(path: "str | os.PathLike[str]") -> None:
    """Return when a file, or the names in a folder, are on the disk."""
    if os.name == "posix":  # Windows cannot open a folder
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
