"""Read and write the folder of a run, which has one subfolder per checkpoint.

    run/
      save-000007/
        model.safetensors       the model's weights
        training.safetensors    all other arrays
        training.json           all other values
        checksums.json          CRC-32 of each of the other files

If the parameters are sharded, each rank has its own four files, in a subfolder
``rank-0-of-2``, ``rank-1-of-2``, ...

A folder cannot replace another atomically, so a save never replaces anything: it fills
a hidden folder, renames it to the next free number, and then removes old checkpoints,
but only folders that contain exactly the files above. (A single file could be replaced
atomically, but mlx-lm could not load its weights.)
"""

import json
import mmap
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from ..core.ranks import Group
from ..distributed import raise_together, share
from ..files.arrays import decode, encode, read_arrays, write_arrays
from ..files.disk import (
    LONGEST_JSON,
    atomic_folder,
    discard,
    open_file,
    read_json,
    remove_leftovers,
)
from ..files.text import shorten

_MODEL, _ARRAYS, _JSON = "model.safetensors", "training.safetensors", "training.json"
_FILES = (_MODEL, _ARRAYS, _JSON)
_CHECKSUMS = "checksums.json"
_SAVE = re.compile("save-[0-9]{6,}")
# How the names of files start that the user has not written: one of macOS's Finder, and
# temporary files that a save could not remove.
_LITTER = (".DS_Store", ".mlx_gradscale-")
# The name of the folder with the shards of a rank.
_PART = "rank-{}-of-{}"
_FORMAT: dict[str, Any] = {"format": "mlx_gradscale", "version": 1}


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
    saves = [save for save in _list_saves(Path(path)) if save.is_dir()]
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
    found = share(lambda: _read(Path(path), group.size()), group, call)
    if isinstance(found, str):
        with raise_together(group, call):
            found = _read(Path(path) / found, group.size(), group.rank())
    return Checkpoint(*found)


def write_on_ranks(
    path: str | os.PathLike[str],
    saved: Checkpoint,
    keep: int,
    is_sharded: bool,
    group: Group,
    call: str,
) -> None:
    """Add rank 0's checkpoint to a run or, if it is sharded, the shards of all ranks.

    Then remove all checkpoints but the newest ``keep``. If a rank raises, nothing
    changes.
    """
    values, arrays = saved._asdict(), dict[str, mx.array]()
    weights, description = values.pop("weights"), values.pop("description")
    with raise_together(group, call):
        text = json.dumps(encode(_FORMAT | description | values, arrays)).encode()
        if len(text) > LONGEST_JSON:
            raise ValueError(
                f"The checkpoint needs more than {LONGEST_JSON:,} bytes of JSON. Pass "
                "long lists to save_checkpoint() as mx.array."
            )
    part = _PART.format(group.rank(), group.size()) if is_sharded else ""
    with raise_together(group, call), ExitStack() as stack:
        new = _add_checkpoint(Path(path), keep)
        folder = Path(path, share(lambda: stack.enter_context(new).name, group, call))
        with raise_together(group, call):
            if is_sharded or group.rank() == 0:
                (folder / part).mkdir(exist_ok=True)
                write_arrays(folder / part / _MODEL, weights, {"format": "mlx"})
                write_arrays(folder / part / _ARRAYS, arrays)
                (folder / part / _JSON).write_bytes(text)
                checksums = json.dumps(_compute_checksums(folder / part))
                (folder / part / _CHECKSUMS).write_text(checksums)


@contextmanager
def _add_checkpoint(run: Path, keep: int) -> Iterator[Path]:
    """Yield a hidden folder, and make it the newest checkpoint after the block."""
    if _is_checkpoint(run):
        raise ValueError(
            f"{run} is a single checkpoint. Pass the folder of the run, {run.parent}."
        )
    run.mkdir(parents=True, exist_ok=True)
    remove_leftovers(run)  # a run has one writer at a time
    last = [Path("save-000000"), *_list_saves(run)][-1]
    with atomic_folder(run / f"save-{int(last.name[5:]) + 1:06}") as folder:
        yield folder
    for old in [save for save in _list_saves(run) if _is_ours(save)][:-keep]:
        discard(old)


def _read(path: Path, n_ranks: int, rank: int | None = None) -> Checkpoint | str:
    """Read a checkpoint, or return its name if it has shards and ``rank`` is None."""
    save = path if _is_checkpoint(path) else latest_checkpoint(path)
    try:
        part = _find_part(save, rank or 0, n_ranks)
        if part != save and rank is None:
            return os.path.relpath(save, path)
        return _read_files(part)
    except Exception as error:
        if not save.exists():  # removed by a writer that saved a newer one
            return _read(path, n_ranks, rank)
        text = f"Cannot read {save}: {describe_error(error)} "
        text += "To restore an older checkpoint, if there is one, pass its path."
        raise ValueError(text) from error


def _read_files(folder: Path) -> Checkpoint:
    """Read the files of a checkpoint, or of a rank."""
    if read_json(folder / _CHECKSUMS) != _compute_checksums(folder):
        raise ValueError(
            "its files do not match their checksums, so the checkpoint is damaged."
        )
    arrays = read_arrays(folder / _ARRAYS)
    content = decode(read_json(folder / _JSON), arrays)
    if content | _FORMAT != content:
        raise ValueError(
            "training.json has an unknown format or version. If a newer version of "
            "mlx_gradscale wrote it, upgrade the package."
        )
    optimizer, scaler, extra = map(content.pop, ("optimizer", "scaler", "extra"))
    weights = read_arrays(folder / _MODEL)
    return Checkpoint(weights, dict(optimizer), scaler, dict(extra), content)


def describe_error(error: Exception) -> str:
    """Return an error's message, with its type unless it is a ValueError or OSError."""
    is_clear = isinstance(error, (ValueError, OSError))
    return shorten(f"{'' if is_clear else f'{type(error).__name__}: '}{error}", 400)


def _compute_checksums(folder: Path) -> dict[str, int]:
    checksums = {}
    for name in _FILES:
        with (
            open(folder / name, "rb", opener=open_file) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            checksums[name] = zlib.crc32(data)
    return checksums


def _list_saves(run: Path) -> list[Path]:
    """Return everything in a run that has a checkpoint's name, oldest first."""
    names = filter(_SAVE.fullmatch, os.listdir(run) if run.is_dir() else [])
    return [run / name for name in sorted(names, key=lambda name: int(name[5:]))]


def _list_parts(save: Path) -> list[Path]:
    """Return the folders with the ranks' shards; without any, the checkpoint itself."""
    return [*save.glob(_PART.format("*", "*"))] or [save]


def _find_part(save: Path, rank: int, n_ranks: int) -> Path:
    """Return the folder to read on a rank."""
    part = _list_parts(save)[0]
    if part == save:
        return save
    n_shards = part.name.rpartition("-")[2]
    if n_shards != str(n_ranks):
        raise ValueError(
            f"it has the shards of {n_shards} ranks, but this run has {n_ranks}. "
            f"Restore it on {n_shards} ranks, or read each rank's files with mx.load()."
        )
    return save / _PART.format(rank, n_ranks)


def _is_checkpoint(path: Path) -> bool:
    return any((part / _CHECKSUMS).exists() for part in _list_parts(path))


def _is_ours(save: Path) -> bool:
    """Return whether a folder contains a checkpoint, and no files of the user."""
    parts = _list_parts(save)
    ours = {part / name for part in parts for name in (*_FILES, _CHECKSUMS)}
    there = {x for x in save.rglob("*") if not x.name.startswith(_LITTER)}
    return not save.is_symlink() and {save, *there} == {save, *parts, *ours}
