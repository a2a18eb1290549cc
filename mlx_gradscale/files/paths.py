"""Where a run is written: what may be replaced there, and how in one step."""

import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .folders import (
    FILLING,
    hidden_start,
    hold,
    is_same,
    one_at_a_time,
    refuse_hidden,
    remove_left,
    replace_folder,
    sync,
)
from .locks import refuse_special


def check_folder(path: str | os.PathLike, overwrite: bool = False) -> Path:
    """Refuses a place where no folder can be written.

    Args:
        path: the folder; a symbolic link means the folder it points to.
        overwrite: whether files may be replaced.

    Returns:
        Path: the real folder.
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
        raise FileExistsError(_there(given))
    return path


def check_file(path: str | os.PathLike, overwrite: bool = False) -> Path:
    """Refuses a place where no file can be written; see :func:`check_folder`."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; one file is to be written.")
    if path.exists():
        refuse_special(path, path.stat().st_mode)
    if not overwrite and path.exists():
        raise FileExistsError(_there(path))
    if not path.resolve().parent.is_dir():
        raise FileNotFoundError(
            f"There is no folder {path.resolve().parent} to write {path.name} to: "
            "make it first."
        )
    return path


def check_name(name: object, what: str) -> str:
    """Refuses a name of a file that is more than one plain component of a path.

    Args:
        name: as a file gave it.
        what: which file that was, for the error.

    Example:
        >>> check_name("optimizer.bin", "training.json")
        'optimizer.bin'
        >>> check_name("../.bashrc", "training.json")
        Traceback (most recent call last):
        ...
        ValueError: training.json names the file '../.bashrc', which is no plain name.
    """
    signs = "/\\:" if os.name == "nt" else "/\\"
    is_plain = isinstance(name, str) and name not in ("", ".", "..")
    if not is_plain or not name.isprintable() or set(name) & set(signs):
        raise ValueError(f"{what} names the file {name!r}, which is no plain name.")
    return name


def contains(outer: Path, inner: Path) -> bool:
    """Whether a path is another one, or lies in it.

    Example:
        >>> contains(Path("run"), Path("run/a.pt")), contains(Path("a"), Path("ab"))
        (True, False)
    """
    outer, inner = outer.resolve(), inner.resolve()
    around = (inner, *inner.parents)
    if not outer.exists():
        return outer in around
    # samefile: on a Mac's disk "Run" is "run".
    return any(path.exists() and path.samefile(outer) for path in around)


@contextmanager
def new_folder(
    path: str | os.PathLike, ours: Collection[str], overwrite: bool = False
) -> Iterator[Path]:
    """A folder to fill, which takes its place when nothing was raised.

    The new folder is built beside the old one, under a hidden name
    (:func:`~mlx_gradscale.files.folders.hidden_start`), and exchanges its place with it
    when all of it is on the disk; then the files that are not ours move into it, and
    the old ones are deleted. If any step fails, all are undone. A kill or a power cut
    finds the old run or the new one in its place, whole, and the other, or a part of
    it, under the hidden name. The files that are not ours may be there too: the next
    writer brings them back and removes the rest
    (:func:`~mlx_gradscale.files.folders.remove_left`).
    Only where the system cannot exchange folders in one step (network disks, say) is
    there a moment between two renames when both runs are hidden; the next read or
    write then says how to take them back.

    Args:
        path: the folder; a symbolic link stays, the folder it points to is replaced.
        ours: names of the files that are replaced, or deleted if there is no new
            one; all others are kept.
        overwrite: whether there may be files already.
    """
    given, path = path, check_folder(path, overwrite)
    made = [parent for parent in path.parents if not parent.exists()]
    built = held = None
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with one_at_a_time(path.parent):
                remove_left(path, ours)
                prefix = hidden_start(path)
                temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
                built, held = temporary.stat(), hold(temporary)
                (temporary / FILLING).touch()
        except OSError as error:
            said = f"Cannot write to {path.parent}: {error.strerror}."
            raise OSError(said) from error
        with _shown_as(given, temporary):
            yield temporary
        temporary.chmod(_mode(path))  # mkdtemp gives 0700
        (temporary / FILLING).unlink()
        for written in (*temporary.iterdir(), temporary, *(p.parent for p in made)):
            sync(written)
        replace_folder(path, temporary, ours)
    except BaseException:
        # Where an exchange could not be undone, this name is the old folder's.
        if built is not None and is_same(temporary, built):
            shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        raise
    finally:
        if held is not None:
            os.close(held[0])


@contextmanager
def _shown_as(path: str | os.PathLike, temporary: Path) -> Iterator[None]:
    """Makes an error name the file in the folder that the user gave."""
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


def _there(path: str | os.PathLike) -> str:
    return f"{path} is there already: give --overwrite (overwrite=True)."
