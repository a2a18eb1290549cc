"""Where a run is written: what may be replaced there, and how in one step."""

import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


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

    The new folder is built beside the old one and takes its name by two renames;
    then the files that are not ours move into it, and the old ones are deleted. If
    any step fails, all are undone. A power cut finds the old run or the new one
    whole, never some files of each; between the renames both are there under hidden
    names (``.<name>.*``), and so may be the files that are not ours.

    Args:
        path: the folder; a symbolic link stays, the folder it points to is replaced.
        ours: names of the files that are replaced, or deleted if there is no new
            one; all others are kept.
        overwrite: whether there may be files already.
    """
    path = check_folder(path, overwrite)
    made = [parent for parent in path.parents if not parent.exists()]
    temporary = None
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        except OSError as error:
            said = f"Cannot write to {path.parent}: {error.strerror}."
            raise OSError(said) from error
        yield temporary
        temporary.chmod(_mode(path))  # mkdtemp gives 0700
        _swap(temporary, path, ours)
    except BaseException:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        raise


def _swap(new: Path, path: Path, ours: Collection[str]) -> None:
    old = new.with_name(new.name + ".old")
    moves = [(new, path)]
    if path.exists():
        others = [entry.name for entry in path.iterdir() if entry.name not in ours]
        moves = [(path, old), *moves, *((old / n, path / n) for n in others)]
    begun = []
    try:
        for source, target in moves:
            begun.append((source, target))
            source.rename(target)
    except BaseException:
        for source, target in reversed(begun):
            # The last one may not have been done.
            if os.path.lexists(target) and not os.path.lexists(source):
                target.rename(source)
        raise
    try:
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:  # an interrupt: the new run is in its place already
        shutil.rmtree(old, ignore_errors=True)
        raise


def _mode(path: Path) -> int:
    if path.exists():
        return stat.S_IMODE(path.stat().st_mode)
    umask = os.umask(0)
    os.umask(umask)
    return 0o777 & ~umask


def _there(path: str | os.PathLike) -> str:
    return f"{path} is there already: give --overwrite (overwrite=True)."
