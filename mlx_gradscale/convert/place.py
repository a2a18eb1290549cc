"""Where a run is written: what may be replaced there, and how in one step."""

import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .swap import hidden_start, is_same, refuse_hidden, replace_folder, sync


def check_folder(path: str | os.PathLike, overwrite: bool = False) -> Path:
    """Refuses a place where no folder can be written.

    Args:
        path: the folder; a symbolic link means the folder it points to.
        overwrite: whether files may be replaced.

    Returns:
        Path: the real folder.
    """
    given, path = path, Path(path).resolve()
    if path.is_file():
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
    if not overwrite and path.exists():
        raise FileExistsError(_there(path))
    if not path.resolve().parent.is_dir():
        raise FileNotFoundError(
            f"There is no folder {path.resolve().parent} to write {path.name} to: "
            "make it first."
        )
    return path


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
    (:func:`~mlx_gradscale.convert.swap.hidden_start`), and exchanges its place with it
    when all of it is on the disk; then the files that are not ours move into it, and
    the old ones are deleted. If any step fails, all are undone. A kill or a power cut
    finds the old run or the new one in its place, whole, and the other, or a part of
    it, under the hidden name. The files that are not ours may be there too: see
    :func:`~mlx_gradscale.convert.swap.bring_back`.
    Only where the system cannot exchange folders in one step (network disks, say) is
    there a moment between two renames when both runs are hidden; the next read or
    write then says how to take them back.

    Args:
        path: the folder; a symbolic link stays, the folder it points to is replaced.
        ours: names of the files that are replaced, or deleted if there is no new
            one; all others are kept.
        overwrite: whether there may be files already.
    """
    path = check_folder(path, overwrite)
    made = [parent for parent in path.parents if not parent.exists()]
    built = None
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            prefix = hidden_start(path)
            temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
            built = temporary.stat()
        except OSError as error:
            said = f"Cannot write to {path.parent}: {error.strerror}."
            raise OSError(said) from error
        yield temporary
        temporary.chmod(_mode(path))  # mkdtemp gives 0700
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


def _mode(path: Path) -> int:
    if path.exists():
        return stat.S_IMODE(path.stat().st_mode)
    umask = os.umask(0)
    os.umask(umask)
    return 0o777 & ~umask


def _there(path: str | os.PathLike) -> str:
    return f"{path} is there already: give --overwrite (overwrite=True)."
