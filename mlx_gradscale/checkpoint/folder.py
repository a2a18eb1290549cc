"""Read and write the folder of a run, which has one subfolder per checkpoint.

    run/
      save-000007/
        model.safetensors       the model's weights
        training.safetensors    all other arrays
        training.json           all other values
        checksums.json          CRC-32 of each of the other files

If the parameters are sharded, each rank has its first three files in a subfolder
``rank-0``, ``rank-1``, ...

A folder cannot replace another atomically, so a save never replaces anything: it fills
a hidden folder, renames it to the next free number, and then removes old checkpoints.
The newest checkpoint is complete even if a process is killed, and a damaged checkpoint
does not prevent the next save. A single file could be replaced atomically, but mlx-lm
could not load its weights.

A save removes a folder only if it contains exactly the files that ``checksums.json``
in it lists. A folder of the user's own, or a checkpoint with files that the user has
added, is never removed; the next save takes a higher number.
"""

import json
import mmap
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from ..core.ranks import Group
from ..distributed import raise_together, share
from ..files.arrays import read_arrays, write_arrays
from ..files.atomic import (
    atomic_write,
    discard,
    remove_leftovers,
    sync,
    temporary_folder,
)
from ..files.paths import LONGEST_JSON, open_inside, read_json
from ..files.text import list_some, shorten
from ..files.trees import decode, encode

_MODEL, _ARRAYS, _JSON = "model.safetensors", "training.safetensors", "training.json"
_FILES = (_MODEL, _ARRAYS, _JSON)
_CHECKSUMS = "checksums.json"
_SAVE = re.compile("save-[0-9]{6,}")
# How the names of files start that the user has not written: one of macOS's Finder, and
# temporary files that a save could not remove.
_LITTER = (".DS_Store", ".mlx_gradscale-")
_FORMAT: dict[str, Any] = {"format": "mlx_gradscale", "version": 1}
# The contents of the first three files above.
Files = tuple[dict[str, mx.array], dict[str, mx.array], bytes]


class Checkpoint(NamedTuple):
    """The state of a training run, as dicts of arrays and plain values.

    Attributes:
        weights (dict): The model's weights by path.
        optimizer (dict): The saved leaves of ``optimizer.state`` by path.
        scaler (dict): The scaler's ``state_dict()``, or None without a scaler.
        extra (dict): The ``extra`` arguments of ``save_checkpoint``.
        description (dict): Other entries of ``training.json``, such as ``settings``.
    """

    weights: dict[str, mx.array]
    optimizer: dict[str, Any]
    scaler: dict[str, Any] | None
    extra: dict[str, Any]
    description: dict[str, Any]


def latest_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Return the folder of a run's newest checkpoint.

    Args:
        path (str): The folder of the run, as passed to ``save_checkpoint``.

    Raises:
        FileNotFoundError: If the folder contains no checkpoint.

    Example:
        >>> import mlx.nn as nn, mlx.optimizers as optim, tempfile
        >>> from mlx_gradscale.checkpoint import latest_checkpoint, save_checkpoint
        >>> folder = tempfile.mkdtemp()
        >>> save_checkpoint(folder, nn.Linear(2, 1), optim.SGD(0.1))
        >>> latest_checkpoint(folder).name
        'save-000001'
    """
    saves = _list_saves(Path(path))
    if not saves:
        raise FileNotFoundError(f"There is no checkpoint in {os.fspath(path)}.")
    return saves[-1]


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint and verify its checksums.

    Args:
        path (str): The folder of a run, to read its newest checkpoint, or the folder of
            a single checkpoint.

    Returns:
        Checkpoint: The contents.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: If the checkpoint is damaged, cannot be read or is sharded.
    """
    return Checkpoint(*_read(Path(path), 1, 0))


def read_on_ranks(path: str | os.PathLike[str], group: Group, call: str) -> Checkpoint:
    """Read a checkpoint on all ranks; only a sharded one on disks that all share."""
    n_ranks = group.size()
    found = share(lambda: _read(Path(path), n_ranks), group, call)
    if isinstance(found, str):
        with raise_together(group, call):
            found = _read(Path(path) / found, n_ranks, group.rank())
    return Checkpoint(*found)


def _read(run: Path, n_ranks: int, rank: int | None = None) -> Checkpoint | str:
    """Read the newest checkpoint, or return its name if this many ranks share it."""
    saves = _list_saves(run)
    is_save = not saves and (run / _CHECKSUMS).exists()
    save = run if is_save else latest_checkpoint(run)
    try:
        checksums = read_json(save / _CHECKSUMS, open_inside)
        n_shards = _count_shards(checksums)
        if n_shards not in (0, n_ranks):
            raise ValueError(
                f"it has the shards of {n_shards} ranks, but this run has {n_ranks}. "
                f"Restore it on {n_shards} ranks, or read each rank's files with "
                "mx.load()."
            )
        if n_shards and rank is None:
            return "" if is_save else save.name
        return _read_files(save, name_part(rank if n_shards else None), checksums)
    except Exception as error:
        if not save.exists():  # removed by a writer that saved a newer one
            return _read(run, n_ranks, rank)
        older = [x.name for x in saves if x != save]
        advice = ""
        if older:
            advice = f" To use an older checkpoint, pass its path: {list_some(older)}."
        text = f"Cannot read {save}: {describe_error(error)}{advice}"
        raise ValueError(text) from error


def _read_files(save: Path, part: str, checksums: dict[str, int]) -> Checkpoint:
    """Read the files of a checkpoint, or of one rank's part of it."""
    for name in _FILES:
        if _checksum(save / part / name) != checksums[part + name]:
            raise _damaged()
    arrays = read_arrays(save / part / _ARRAYS)
    content = decode(read_json(save / part / _JSON), arrays)
    if content | _FORMAT != content:
        raise ValueError(
            "training.json has an unknown format or version. If a newer version of "
            "mlx_gradscale wrote it, upgrade the package."
        )
    optimizer, scaler, extra = map(content.pop, ("optimizer", "scaler", "extra"))
    weights = read_arrays(save / part / _MODEL)
    return Checkpoint(weights, dict(optimizer), scaler, dict(extra), content)


def describe_error(error: Exception) -> str:
    """Return an error's message, with its type unless it is a ValueError or OSError."""
    is_clear = isinstance(error, (ValueError, OSError))
    return shorten(f"{'' if is_clear else f'{type(error).__name__}: '}{error}", 400)


def encode_checkpoint(saved: Checkpoint) -> Files:
    """Return the contents of a checkpoint's files; raise if a value is unsupported."""
    values = saved._asdict()
    weights, description = values.pop("weights"), values.pop("description")
    arrays: dict[str, mx.array] = {}
    text = json.dumps(encode(_FORMAT | description | values, arrays)).encode()
    if len(text) > LONGEST_JSON:
        raise ValueError(
            f"The checkpoint needs more than {LONGEST_JSON:,} bytes of JSON. Pass long "
            "lists to save_checkpoint() as mx.array."
        )
    return weights, arrays, text


@contextmanager
def add_checkpoint(run: Path, keep: int) -> Iterator[Path]:
    """Yield a hidden folder, and make it the newest checkpoint after the block.

    Then remove all checkpoints but the newest ``keep``. If the block raises, nothing
    changes.
    """
    if (run / _CHECKSUMS).exists():
        raise ValueError(
            f"{run} is a single checkpoint. Pass the folder of the run, {run.parent}."
        )
    run.mkdir(parents=True, exist_ok=True)
    remove_leftovers(run)  # a run has one writer at a time
    with temporary_folder(run) as folder:
        yield folder
        last = ["save-000000", *_list_names(run)][-1]
        folder.rename(run / f"save-{int(last[5:]) + 1:06}")
        sync(run)
    for old in [save for save in _list_saves(run) if _is_ours(save)][:-keep]:
        discard(old)


def name_part(rank: int | None) -> str:
    """Return how the paths of a rank's files start; None stands for no shards."""
    return "" if rank is None else f"rank-{rank}/"


def write_files(folder: Path, part: str, files: Files) -> dict[str, int]:
    """Write the files of a checkpoint, or of a rank's part; return their checksums."""
    (folder / part).mkdir(exist_ok=True)
    weights, arrays, text = files
    write_arrays(folder / part / _MODEL, weights, {"format": "mlx"})
    write_arrays(folder / part / _ARRAYS, arrays)
    _write(folder / part / _JSON, text)
    return {part + name: _checksum(folder / part / name) for name in _FILES}


def write_checksums(folder: Path, checksums: dict[str, int]) -> None:
    """Write the checksums of all files of a checkpoint."""
    _write(folder / _CHECKSUMS, json.dumps(checksums).encode())


def _write(path: Path, data: bytes) -> None:
    with atomic_write(path) as file:  # syncs it to disk
        file.write(data)


def _checksum(path: Path) -> int:
    with (
        open(path, "rb", opener=open_inside) as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        return zlib.crc32(data)


def _count_shards(checksums: Any) -> int:
    """Return how many ranks have a part of a checkpoint, or 0 without shards."""
    n_shards = 0 if _MODEL in checksums else len(checksums) // 3
    parts = [*map(name_part, range(n_shards))] or [""]
    names = {part + name for part in parts for name in _FILES}
    if not isinstance(checksums, dict) or checksums.keys() != names:
        raise _damaged()
    return n_shards


def _damaged() -> ValueError:
    return ValueError(
        "its files do not match their checksums, so the checkpoint is damaged."
    )


def _is_ours(folder: Path) -> bool:
    """Return whether a folder contains a checkpoint, and no files of the user."""
    try:
        checksums = read_json(folder / _CHECKSUMS, open_inside)
        _count_shards(checksums)
    except (OSError, ValueError, TypeError):
        return False
    ours = {_CHECKSUMS, *checksums, *map(os.path.dirname, checksums)}
    there = [x for x in folder.rglob("*") if not x.name.startswith(_LITTER)]
    return all(x.relative_to(folder).as_posix() in ours for x in there)


def _list_names(run: Path) -> list[str]:
    names = os.listdir(run) if run.is_dir() else []
    return sorted(filter(_SAVE.fullmatch, names), key=lambda name: int(name[5:]))


def _list_saves(run: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first, ignoring files and links."""
    paths = [run / name for name in _list_names(run)]
    return [path for path in paths if path.is_dir() and not path.is_symlink()]
