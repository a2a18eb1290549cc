"""Write files and folders whole or not at all, and remove what killed writers left."""

import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from .paths import refuse_special

try:
    import fcntl
except ImportError:  # Windows has no flock; leftovers are then left alone
    fcntl = None  # type: ignore[assignment]

_BUFFER = 2**20
WholeFile = BinaryIO  # old name, until nobody uses it


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make an ``OSError`` that names no file name this one.

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
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` at the end of the block.

    The bytes are on the disk before the name changes. If anything raises, the old file
    stays and the temporary one is removed; the temporary files of killed writers are
    removed by the next write to the same path.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "scale.bin")
        >>> with atomic_write(path) as file:
        ...     _ = file.write(b"65536")
        >>> os.listdir(os.path.dirname(path))
        ['scale.bin']
    """
    target = Path(os.path.realpath(path))  # a symbolic link keeps pointing there
    if target.is_dir():
        raise IsADirectoryError(f"{os.fspath(path)} is a folder, not a file.")
    with suppress(FileNotFoundError, NotADirectoryError):
        refuse_special(path, os.stat(target).st_mode)
    with naming(path):
        temporary, descriptor = _create(target, _new_file)
        try:
            # The lock lasts until the file is closed, which is after the rename.
            with open(descriptor, "wb", buffering=_BUFFER) as file:
                yield file
                file.flush()
                os.fsync(descriptor)
                os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync(target.parent)


@contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """Make a hidden folder beside ``target``, and remove it unless it was renamed.

    The temporary folders that killed writers left beside the target are removed first.
    """
    temporary, descriptor = _create(target, _new_folder)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(descriptor)


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Fill a hidden folder that gets the name ``path`` at the end of the block.

    Raises:
        FileExistsError: ``path`` is there and is not an empty folder.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "run"
        >>> with new_folder(path) as folder:
        ...     _ = (folder / "notes.txt").write_text("step 3")
        >>> (path / "notes.txt").read_text()
        'step 3'
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(f"{os.fspath(path)} already exists: give another path.")
    with temporary_folder(target) as temporary:
        yield temporary
        for file in temporary.rglob("*"):
            sync(file)
        sync(temporary)
        temporary.rename(target)
        sync(target.parent)


def discard(folder: Path, target: Path) -> None:
    """Remove a folder so that no one ever sees a part of it under its name.

    If the process is killed, the next :func:`temporary_folder` of ``target``, which
    lies beside the folder, removes the rest.
    """
    hidden = target.with_name(_hidden_name(target))
    with suppress(FileNotFoundError):  # another writer was faster
        folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def sync(path: str | os.PathLike[str]) -> None:
    """Return when a file, or the list of names in a folder, is on the disk."""
    if os.name == "posix":  # Windows cannot open a folder
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _hidden_start(target: Path) -> str:
    # Long names are cut, because most disks allow 255 bytes.
    return f".{target.name[:40]}-{zlib.crc32(os.fsencode(target.name)):08x}."


def _hidden_name(target: Path) -> str:
    return f"{_hidden_start(target)}{secrets.token_hex(8)}.tmp"


def _new_file(path: Path) -> int:
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0)
    return os.open(path, flags, 0o666)  # the mode that the umask says


def _new_folder(path: Path) -> int:
    while True:
        path.mkdir()
        # Another writer may have taken it for a leftover, as below.
        with suppress(FileNotFoundError):
            return os.open(path, os.O_RDONLY)


def _create(target: Path, make: Callable[[Path], int]) -> tuple[Path, int]:
    """Make a hidden file or folder beside the target that is locked while open."""
    if not target.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {target.parent}: create it first.")
    _remove_leftovers(target)
    while True:
        path = target.with_name(_hidden_name(target))
        descriptor = make(path)
        # Until it was locked, another writer may have taken it for a leftover.
        if lock(descriptor, wait=True) is None or is_there(path, descriptor):
            return path, descriptor
        os.close(descriptor)


def _remove_leftovers(target: Path) -> None:
    """Remove hidden files and folders of the target that no living process has open."""
    if fcntl is None:
        return
    start = re.escape(_hidden_start(target))
    pattern = re.compile(start + r"[0-9a-f]{16}\.tmp")
    with suppress(OSError):  # a folder that can be written to but not listed
        for name in filter(pattern.fullmatch, os.listdir(target.parent)):
            path = target.with_name(name)
            is_folder = path.is_dir()
            flags = os.O_RDONLY if is_folder else os.O_RDWR | os.O_NONBLOCK
            with suppress(OSError):
                descriptor = os.open(path, flags | os.O_NOFOLLOW)
                try:
                    if lock(descriptor, wait=False) and is_there(path, descriptor):
                        shutil.rmtree(path) if is_folder else path.unlink()
                finally:
                    os.close(descriptor)


def lock(descriptor: int, *, wait: bool) -> bool | None:
    """Lock an open file or folder until it is closed.

    Returns:
        bool: False if another process holds it; None where there are no such locks.

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
    except OSError:  # some network disks
        return None
    return True


def is_there(path: Path, descriptor: int) -> bool:
    """Tell whether a path still names the file or folder that is open."""
    with suppress(OSError):
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    return False
