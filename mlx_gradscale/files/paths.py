"""What may be written where, and which names a file may give to another."""

import os
from pathlib import Path

from .locks import refuse_special


def check_file(path: str | os.PathLike[str], overwrite: bool = False) -> Path:
    """Refuse a place where no file can be written; see ``folders.check_folder``."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; one file is to be written.")
    if path.exists():
        refuse_special(path, path.stat().st_mode)
    if not overwrite and path.exists():
        raise FileExistsError(already_there(path))
    if not path.resolve().parent.is_dir():
        raise FileNotFoundError(
            f"There is no folder {path.resolve().parent} to write {path.name} to: "
            "make it first."
        )
    return path


def check_name(name: object, what: str) -> str:
    """Refuse a name of a file that is more than one plain component of a path.

    Args:
        name (object): As a file gave it.
        what (str): Which file that was, for the error.

    Example:
        >>> check_name("optimizer.bin", "training.json")
        'optimizer.bin'
        >>> check_name("../.bashrc", "training.json")
        Traceback (most recent call last):
        ...
        ValueError: training.json names the file '../.bashrc', which is no plain name.
    """
    signs = "/\\:" if os.name == "nt" else "/\\"
    if (
        not isinstance(name, str)
        or name in ("", ".", "..")
        or not name.isprintable()
        or set(name) & set(signs)
    ):
        raise ValueError(f"{what} names the file {name!r}, which is no plain name.")
    return name


def contains(outer: Path, inner: Path) -> bool:
    """Tell whether a path is another one, or lies in it.

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


def already_there(path: str | os.PathLike[str]) -> str:
    """Return the error's sentence for a path that exists."""
    return f"{path} is there already: give --overwrite (overwrite=True)."
