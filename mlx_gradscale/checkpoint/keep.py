"""The checkpoints before the last: ``run.earlier-1``, ``run.earlier-2``, beside it."""

import os
import re
import shutil
import tempfile
from pathlib import Path

from ..files.atomic import sync
from ..files.folders import hidden_start
from ..run_folder.contents import OURS, TRAINING


def keep_last(folder: Path, keep: int) -> None:
    """Make a folder's run the first of those before it, and drop the oldest.

    The folder itself is left as it is: its files get second names, which take no
    space where the disk can do that. Whatever is killed in between, the folder is
    there, and at most the oldest of the others is gone.

    Args:
        folder (Path): With or without a run.
        keep (int): How many there may be, with the one that will replace the folder's.
    """
    if not is_run(folder):
        return
    earlier = keep - 1
    # A process that was killed may have left a gap in the numbers.
    for place, number in reversed([*enumerate(_numbers(folder), start=2)]):
        there = _numbered(folder, number)
        if place > earlier:
            shutil.rmtree(there)
        elif place != number:
            there.rename(_numbered(folder, place))
    if earlier:
        _link(folder, _numbered(folder, 1))


def is_run(folder: Path) -> bool:
    """Tell whether there is a run in a folder, as this package writes them."""
    try:
        with open(folder / TRAINING, "rb") as file:
            return b'"format": "mlx_gradscale"' in file.read(64)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _numbers(folder: Path) -> list[int]:
    pattern = re.compile(re.escape(f"{folder.name}.earlier-") + r"([1-9]\d{0,5})")
    names = (pattern.fullmatch(path.name) for path in folder.parent.iterdir())
    numbers = sorted(int(match[1]) for match in names if match)
    return [n for n in numbers if is_run(_numbered(folder, n))]


def _numbered(folder: Path, number: int) -> Path:
    return folder.with_name(f"{folder.name}.earlier-{number}")


def _link(folder: Path, target: Path) -> None:
    if target.exists():
        raise FileExistsError(
            f"{target} is there and is no checkpoint: keep= needs its name. Move it."
        )
    made = Path(tempfile.mkdtemp(prefix=hidden_start(target), dir=folder.parent))
    try:
        made.chmod(folder.stat().st_mode & 0o777)
        for name in OURS:
            if (folder / name).exists():
                _second_name(folder / name, made / name)
        sync(made)
        made.rename(target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _second_name(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # the disk has no second names
        shutil.copy2(file, target)
        sync(target)
