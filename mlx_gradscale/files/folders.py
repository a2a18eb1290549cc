"""Two folders exchange their places, so that a killed process loses neither."""

import ctypes
import os
import re
import shlex
import shutil
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .atomic import short_name
from .locks import lock

_EXCHANGE = 2  # Linux's RENAME_EXCHANGE, and macOS's RENAME_SWAP
_HERE = -100  # Linux's AT_FDCWD
_ASIDE = ".old"
# In a new folder until all of it is there: it never was anything else then.
FILLING = ".mlx_gradscale_filling"


def replace_folder(path: Path, new: Path, ours: Collection[str]) -> None:
    """Puts a folder in the place of another, or leaves both as they were.

    Args:
        path: the folder to replace; it need not be there.
        new: the folder that takes its place, beside it, with its files on the disk.
        ours: names of the files that go with the old folder; all others move into
            the new one.
    """
    with one_at_a_time(path.parent):
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
        if is_same(path, mine):
            if new.exists():
                _exchange(new, path)
            else:
                path.rename(new)
        raise


def hidden_start(path: Path) -> str:
    """How the hidden names beside a folder begin, under which it is replaced.

    Example:
        >>> hidden_start(Path("runs/a"))
        '.a.mlx_gradscale_'
    """
    return f".{short_name(path.name)}.mlx_gradscale_"


def refuse_hidden(path: str | os.PathLike) -> None:
    """Raises if a killed process left a folder under hidden names only.

    That can be only where the system cannot exchange two folders in one step.
    """
    path = Path(path).resolve()
    if path.exists() or not _left(path):
        return
    with one_at_a_time(path.parent):  # or a living process is just replacing it
        olds = [] if path.exists() else [p for p in _left(path) if p.suffix == _ASIDE]
    # A new folder is whole before the old one is put aside.
    places = [p for old in olds for p in (old, old.with_suffix("")) if p.exists()]
    if places:
        moves = (f"mv {shlex.quote(str(p))} {shlex.quote(str(path))}" for p in places)
        raise FileNotFoundError(
            f"{path} is hidden: a process was killed just as it replaced it. Nothing "
            f"is lost: take back the old ({_ASIDE}) or the new one with "
            f"{' or '.join(moves)}"
        )


def remove_left(path: Path, ours: Collection[str]) -> None:
    """Removes what killed processes left of their writes to a folder.

    Files that such a process did not get to move come back to the folder. A folder
    that a living process is filling is locked (:func:`hold`) and stays. To be called
    by :func:`one_at_a_time`.

    Args:
        path: the folder that was written to; it need not be there.
        ours: names of the files that were replaced; they do not come back.
    """
    left = [(hidden, held) for hidden in _left(path) if (held := hold(hidden))]
    is_hidden = not path.exists() and any(p.suffix == _ASIDE for p, _ in left)
    for hidden, (descriptor, is_mine) in left:
        try:
            # Only a run under hidden names is left: refuse_hidden tells of it.
            if is_mine and not is_hidden:
                if path.is_dir() and not (hidden / FILLING).exists():
                    _bring_back(hidden, path, ours)
                shutil.rmtree(hidden, ignore_errors=True)
        finally:
            os.close(descriptor)


def _bring_back(hidden: Path, path: Path, ours: Collection[str]) -> None:
    for entry in list(hidden.iterdir()):
        if entry.name not in ours and not os.path.lexists(path / entry.name):
            entry.rename(path / entry.name)


def hold(folder: Path) -> tuple[int, bool] | None:
    """Opens a folder and locks it; None where a folder cannot be opened.

    Returns:
        tuple: the descriptor, which keeps the lock until it is closed; and whether
        this process has the lock now.
    """
    try:
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(folder, flags)
    except OSError:  # Windows, or it is just being removed
        return None
    return descriptor, bool(lock(descriptor, wait=False))


def is_same(path: Path, known: os.stat_result) -> bool:
    """Whether a folder is the one that was known, perhaps under another name."""
    return path.exists() and os.path.samestat(path.stat(), known)


def sync(path: Path) -> None:
    """Returns when a file, or the names in a folder, are on the disk."""
    if os.name == "posix":  # Windows cannot open a folder
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def one_at_a_time(parent: Path) -> Iterator[None]:
    """Waits for other processes that replace a folder in the same place.

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
    aside, begun = a.with_name(a.name + _ASIDE), []
    try:
        for source, target in ((b, aside), (a, b), (aside, a)):
            begun.append((source, target))
            source.rename(target)
    except BaseException:
        for source, target in reversed(begun):
            _undo(source, target)
        raise


def _in_one_step(a: Path, b: Path) -> bool:
    """Exchanges two folders; False, and nothing done, where the system cannot."""
    first, second = os.fsencode(a), os.fsencode(b)
    try:
        system = ctypes.CDLL(None)
        if sys.platform == "darwin":
            return system.renamex_np(first, second, _EXCHANGE) == 0
        return system.renameat2(_HERE, first, _HERE, second, _EXCHANGE) == 0
    except (AttributeError, TypeError, OSError):  # it has no such function
        return False


def _undo(source: Path, target: Path) -> None:
    # The last rename that was begun may not have been done.
    if os.path.lexists(target) and not os.path.lexists(source):
        target.rename(source)


def _left(path: Path) -> list[Path]:
    """Folders beside a path that writes to it left behind, or are still filling."""
    start, end = re.escape(hidden_start(path)), re.escape(_ASIDE)
    pattern = re.compile(rf"{start}\w{{8}}({end})?")  # as tempfile.mkdtemp names them
    try:
        beside = sorted(path.parent.iterdir())
    except OSError:  # it is not there, or cannot be listed
        return []
    return [p for p in beside if pattern.fullmatch(p.name) and p.is_dir()]
