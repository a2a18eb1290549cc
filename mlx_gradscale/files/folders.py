"""A folder is replaced in one step, so that a killed process loses neither.

The new one is built beside its place, and the two exchange their places.

Without it a kill or a full disk while the only checkpoint is overwritten would lose it,
or leave the weights of one step beside the optimizer of another, which trains on
without an error.
"""

import ctypes
import os
import re
import shlex
import shutil
import stat
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .atomic import short_name, sync
from .locks import lock
from .paths import already_there

_EXCHANGE = 2  # Linux's RENAME_EXCHANGE, and macOS's RENAME_SWAP
_HERE = -100  # Linux's AT_FDCWD
_OLD = ".old"
# In a new folder until all of it is there: it never was anything else then.
_FILLING = ".mlx_gradscale_filling"


def check_folder(path: str | os.PathLike[str], overwrite: bool = False) -> Path:
    """Refuse a place where no folder can be written.

    Args:
        path (str): The folder; a symbolic link means the folder it points to.
        overwrite (bool): Whether files may be replaced.

    Returns:
        Path: The real folder.
    """
    given, path = path, Path(path).resolve()
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{given} is a file, not a folder: give another path.")
    # The process would go on in a folder that was moved away.
    if path in (Path.cwd(), *Path.cwd().parents):
        raise ValueError(
            f"{given} is the folder you are in, or one around it, which cannot be "
            "replaced: give a folder inside it."
        )
    if path.is_mount():
        raise ValueError(
            f"{given} is where a disk is mounted, and cannot be replaced: give a "
            "folder inside it."
        )
    refuse_hidden(path)
    if path.is_dir() and not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(f"{given} is not yours to read and write.")
    if not overwrite and path.is_dir() and any(path.iterdir()):
        raise FileExistsError(already_there(given))
    return path


@contextmanager
def new_folder(
    path: str | os.PathLike[str], ours: Collection[str], overwrite: bool = False
) -> Iterator[Path]:
    """Yield a folder to fill, which takes its place when nothing was raised.

    The new folder is built beside the old one, under a hidden name
    (:func:`hidden_start`), and exchanges its place with it when all of it is on the
    disk; then the files that are not ours move into it, and the old ones are deleted.
    If any step fails, all are undone. A kill or a power cut finds the old run or the
    new one in its place, whole, and the other, or some of its files, under the hidden
    name. The files that are not ours may be there too: the next writer brings them
    back and removes the rest (:func:`_remove_left`).
    Only where the system cannot exchange folders in one step (network disks, say) is
    there a moment between two renames when both runs are hidden; the next read or
    write then says how to take them back.

    Args:
        path (str): The folder; a symbolic link stays, the folder it points to is
            replaced.
        ours (Collection): Names of the files that are replaced, or deleted if there is
            no new one; all others are kept.
        overwrite (bool): Whether there may be files already.
    """
    given, path = path, check_folder(path, overwrite)
    made = [parent for parent in path.parents if not parent.exists()]
    built = held = None
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _one_at_a_time(path.parent):
                _remove_left(path, ours)
                prefix = hidden_start(path)
                temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
                built, held = temporary.stat(), _hold(temporary)
                (temporary / _FILLING).touch()
        except OSError as error:
            said = f"Cannot write to {path.parent}: {error.strerror}."
            raise OSError(said) from error
        with _shown_as(given, temporary):
            yield temporary
        temporary.chmod(_mode(path))  # mkdtemp gives 0700
        (temporary / _FILLING).unlink()
        for written in (*temporary.iterdir(), temporary, *(p.parent for p in made)):
            sync(written)
        _replace_folder(path, temporary, ours)
    except BaseException:
        # Where an exchange could not be undone, this name is the old folder's.
        if built is not None and _is_same(temporary, built):
            shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        raise
    finally:
        if held is not None:
            os.close(held[0])


@contextmanager
def _shown_as(path: str | os.PathLike[str], temporary: Path) -> Iterator[None]:
    """Make an error name the file in the folder that the user gave."""
    try:
        yield
    except OSError as error:
        hidden = Path(os.fsdecode(error.filename or ""))
        if error.errno is None or temporary not in hidden.parents:
            raise
        shown = Path(path) / hidden.relative_to(temporary)
        raise OSError(error.errno, error.strerror, str(shown)) from error


def _mode(path: Path) -> int:
    if path.exists():
        return stat.S_IMODE(path.stat().st_mode)
    umask = os.umask(0)
    os.umask(umask)
    return 0o777 & ~umask


def _replace_folder(path: Path, new: Path, ours: Collection[str]) -> None:
    """Put a folder in the place of another, or leave both as they were.

    Args:
        path (Path): The folder to replace; it need not be there.
        new (Path): The folder that takes its place, beside it, with its files on the
            disk.
        ours (Collection): Names of the files that go with the old folder; all others
            move into the new one.
    """
    with _one_at_a_time(path.parent):
        _take_place(path, new, ours)
        try:
            shutil.rmtree(new, ignore_errors=True)
        except BaseException:  # an interrupt: the new folder is in its place already
            shutil.rmtree(new, ignore_errors=True)
            raise


def _take_place(path: Path, new: Path, ours: Collection[str]) -> None:
    mine, others = new.stat(), []
    try:
        if path.exists():
            _exchange(new, path)
            others = [entry.name for entry in new.iterdir() if entry.name not in ours]
            for name in others:
                (new / name).rename(path / name)
        else:
            new.rename(path)
        sync(path)
        sync(path.parent)
    except BaseException:
        for name in others:
            _undo(new / name, path / name)
        if _is_same(path, mine):
            if new.exists():
                _exchange(new, path)
            else:
                path.rename(new)
        raise


def hidden_start(path: Path) -> str:
    """Return how the hidden names begin under which a folder is replaced.

    Example:
        >>> hidden_start(Path("runs/a"))
        '.a.mlx_gradscale_'
    """
    return f".{short_name(path.name)}.mlx_gradscale_"


def refuse_hidden(path: str | os.PathLike[str]) -> None:
    """Raise if a killed process left a folder under hidden names only.

    That can be only where the system cannot exchange two folders in one step.
    """
    path = Path(path).resolve()
    if path.exists() or not _left(path):
        return
    with _one_at_a_time(path.parent):  # or a living process is just replacing it
        olds = [] if path.exists() else [p for p in _left(path) if p.suffix == _OLD]
    # A new folder is whole before the old one is moved away.
    places = [p for old in olds for p in (old, old.with_suffix("")) if p.exists()]
    if places:
        moves = (f"mv {shlex.quote(str(p))} {shlex.quote(str(path))}" for p in places)
        raise FileNotFoundError(
            f"{path} is hidden: a process was killed just as it replaced it. Nothing "
            f"is lost: take back the old ({_OLD}) or the new one with "
            f"{' or '.join(moves)}"
        )


def _remove_left(path: Path, ours: Collection[str]) -> None:
    """Remove what killed processes left of their writes to a folder.

    Files that such a process did not get to move come back to the folder. A folder
    that a living process is filling is locked (:func:`_hold`) and stays. To be called
    by :func:`_one_at_a_time`.

    Args:
        path (Path): The folder that was written to; it need not be there.
        ours (Collection): Names of the files that were replaced; they do not come back.
    """
    left = [(hidden, held) for hidden in _left(path) if (held := _hold(hidden))]
    is_hidden = not path.exists() and any(p.suffix == _OLD for p, _ in left)
    for hidden, (descriptor, is_mine) in left:
        try:
            # Only a run under hidden names is left: refuse_hidden reports it.
            if is_mine and not is_hidden:
                if path.is_dir() and not (hidden / _FILLING).exists():
                    _bring_back(hidden, path, ours)
                shutil.rmtree(hidden, ignore_errors=True)
        finally:
            os.close(descriptor)


def _bring_back(hidden: Path, path: Path, ours: Collection[str]) -> None:
    for entry in list(hidden.iterdir()):
        if entry.name not in ours and not os.path.lexists(path / entry.name):
            entry.rename(path / entry.name)


def _hold(folder: Path) -> tuple[int, bool] | None:
    """Open a folder and lock it; return None where a folder cannot be opened.

    Returns:
        tuple: The descriptor, which keeps the lock until it is closed; and whether
        this process has the lock now.
    """
    try:
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(folder, flags)
    except OSError:  # Windows, or it is just being removed
        return None
    return descriptor, bool(lock(descriptor, wait=False))


def _is_same(path: Path, known: os.stat_result) -> bool:
    """Tell whether a folder is the one that was known, perhaps under another name."""
    return path.exists() and os.path.samestat(path.stat(), known)


@contextmanager
def _one_at_a_time(parent: Path) -> Iterator[None]:
    """Wait for other processes that replace a folder in the same place.

    The lock is the system's, on the folder itself: it ends with the process.
    """
    descriptor = None
    try:
        with suppress(OSError):  # Windows cannot open a folder
            descriptor = os.open(parent, os.O_RDONLY)
            lock(descriptor, wait=True)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _exchange(a: Path, b: Path) -> None:
    if _in_one_step(a, b):
        return
    old, begun = a.with_name(a.name + _OLD), []
    try:
        for source, target in ((b, old), (a, b), (old, a)):
            begun.append((source, target))
            source.rename(target)
    except BaseException:
        for source, target in reversed(begun):
            _undo(source, target)
        raise


def _in_one_step(a: Path, b: Path) -> bool:
    """Exchange two folders; return False, with nothing done, if the system cannot."""
    first, second = os.fsencode(a), os.fsencode(b)
    try:
        system = ctypes.CDLL(None)
        if sys.platform == "darwin":
            return bool(system.renamex_np(first, second, _EXCHANGE) == 0)
        return bool(system.renameat2(_HERE, first, _HERE, second, _EXCHANGE) == 0)
    except (AttributeError, TypeError, OSError):  # it has no such function
        return False


def _undo(source: Path, target: Path) -> None:
    # The last rename that was begun may not have been done.
    if os.path.lexists(target) and not os.path.lexists(source):
        target.rename(source)


def _left(path: Path) -> list[Path]:
    """Return the folders beside a path that its writers left, or are still filling."""
    start, end = re.escape(hidden_start(path)), re.escape(_OLD)
    pattern = re.compile(rf"{start}\w{{8}}({end})?")  # as tempfile.mkdtemp names them
    try:
        beside = sorted(path.parent.iterdir())
    except OSError:  # it is not there, or cannot be listed
        return []
    return [p for p in beside if pattern.fullmatch(p.name) and p.is_dir()]
