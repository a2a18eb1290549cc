"""The system's locks on open files: they end with the process that holds them."""

import os
import stat
from contextlib import suppress
from types import ModuleType

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def lock(descriptor: int, *, wait: bool) -> bool | None:
    """Lock an open file or folder until it is closed, and tell whether that is so.

    Args:
        descriptor (int): Of the file or folder.
        wait (bool): Whether to wait for another holder.

    Returns:
        bool: False if another holds it; None where the system has no locks
        (Windows, some network disks).

    Example:

        >>> import tempfile
        >>> with tempfile.TemporaryFile() as file:
        ...     lock(file.fileno(), wait=False)
        True
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_there(path: "str | os.PathLike[str]", descriptor: int) -> bool:
    """Tell whether a path still names the file that is open."""
    with suppress(OSError):
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    return False


def open_file(path: "str | os.PathLike[str]", flags: int) -> int:
    """Open a regular file, for ``open(..., opener=open_file)``.

    A pipe would keep the process waiting, for ever where nobody writes to it.

    Example:

        >>> open(".", "rb", opener=open_file)
        Traceback (most recent call last):
        ...
        IsADirectoryError: [Errno 21] Is a directory: '.'
    """
    flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags, 0o666)
    try:
        refuse_special(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def refuse_special(path: "str | os.PathLike[str]", mode: int) -> None:
    """Raise unless a mode is that of a regular file; a folder is left to others."""
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        kind = "a pipe" if stat.S_ISFIFO(mode) else "a device or socket"
        raise OSError(f"{os.fspath(path)} is {kind}, not a file: give another path.")
