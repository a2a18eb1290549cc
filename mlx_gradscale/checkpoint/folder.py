"""Read and write the folder of a run, which has one subfolder per checkpoint.

    run/
      save-000007/
        model.safetensors       the model's weights
        training.safetensors    all other arrays
        training.json           all other values
        checksums.json          CRC-32 of the three files above

If the parameters are sharded, each rank has a subfolder ``rank-0``, ``rank-1``, ...
with these four files, and ``checksums.json`` beside them has a CRC-32 of each rank's.

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
from ..files.atomic import discard, sync, temporary_folder
from ..files.paths import LONGEST_JSON, open_inside, read_json
from ..files.text import list_some, shorten
from ..files.trees import decode, encode

_MODEL, _ARRAYS, _JSON = "model.safetensors", "training.safetensors", "training.json"
_CHECKSUMS = "checksums.json"
_RANK = "rank-{}"  # the folder of a rank in a sharded checkpoint
_PREFIX = "optimizer."  # added to the names of the optimizer's arrays
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
            a single checkpoint, or of one rank in a sharded checkpoint.

    Returns:
        Checkpoint: The contents.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: If the checkpoint is damaged, cannot be read or is sharded.
    """
    return Checkpoint(*_read(Path(path), None))


def read_on_ranks(path: str | os.PathLike[str], group: Group, call: str) -> Checkpoint:
    """Read a checkpoint on all ranks; only a sharded one on disks that all share."""
    found = share(lambda: _read(Path(path), group.size()), group, call)
    if not isinstance(found, str):
        return Checkpoint(*found)
    with raise_together(group, call):
        return read_checkpoint(Path(path) / found / _RANK.format(group.rank()))


def _read(run: Path, n_ranks: int | None) -> Checkpoint | str:
    """Read the newest checkpoint, or return its name if this many ranks share it."""
    saves = _list_saves(run)
    is_save = not saves and (run / _CHECKSUMS).exists()
    save = run if is_save else latest_checkpoint(run)
    try:
        n_shards = _verify(save)
        if not n_shards:
            return _read_files(save)
        if n_shards != n_ranks:
            raise ValueError(
                f"it has the shards of {n_shards} ranks, but this run has "
                f"{n_ranks or 1}. Restore it on {n_shards} ranks, or read the shards "
                f"of one rank from {save / _RANK.format(0)}."
            )
        return "" if is_save else save.name
    except Exception as error:
        if not save.exists():  # removed by a writer that saved a newer one
            return _read(run, n_ranks)
        older = [x.name for x in saves if x != save]
        advice = ""
        if older:
            advice = f" To use an older checkpoint, pass its path: {list_some(older)}."
        text = f"Cannot read {save}: {describe_error(error)}{advice}"
        raise ValueError(text) from error


def describe_error(error: Exception) -> str:
    """Return an error's message, with its type unless it is a ValueError or OSError."""
    is_clear = isinstance(error, (ValueError, OSError))
    return shorten(f"{'' if is_clear else f'{type(error).__name__}: '}{error}", 400)


def encode_checkpoint(saved: Checkpoint) -> Files:
    """Return the contents of a checkpoint's files; raise if a value is unsupported."""
    numbers, arrays = {}, {}
    for path, x in saved.optimizer.items():
        if isinstance(x, mx.array):
            arrays[_PREFIX + path] = x
        else:
            numbers[path] = x
    content = {"scaler": saved.scaler, "numbers": numbers, "extra": saved.extra}
    content = _FORMAT | content | saved.description
    text = json.dumps(encode(content, arrays)).encode()
    if len(text) > LONGEST_JSON:
        raise ValueError(
            f"The checkpoint needs more than {LONGEST_JSON:,} bytes of JSON. Pass long "
            "lists to save_checkpoint() as mx.array."
        )
    return saved.weights, arrays, text


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
    with temporary_folder(run) as folder:
        yield folder
        _seal(folder)
        last = ["save-000000", *_list_names(run)][-1]
        folder.rename(run / f"save-{int(last[5:]) + 1:06}")
        sync(run)
    for old in [save for save in _list_saves(run) if _is_ours(save)][:-keep]:
        discard(old)


def write_files(folder: Path, files: Files, rank: int | None = None) -> None:
    """Write the files of a checkpoint, or those of one rank if it is sharded."""
    if rank is not None:
        folder /= _RANK.format(rank)
        folder.mkdir()
    model, arrays, text = files
    write_arrays(folder / _MODEL, model, {"format": "mlx"})
    write_arrays(folder / _ARRAYS, arrays)
    (folder / _JSON).write_bytes(text)
    if rank is not None:
        _seal(folder)


def _seal(folder: Path) -> None:
    """Write the checksums of a folder's files, and sync them to disk."""
    n_ranks = len(list(folder.glob(_RANK.format("*"))))
    sums = _compute_checksums(folder, _list_parts(n_ranks))
    (folder / _CHECKSUMS).write_text(json.dumps(sums))
    sync(*folder.glob("*.json"), folder)


def _verify(folder: Path) -> int:
    """Return how many ranks have shards in a checkpoint, or raise if it is damaged."""
    saved = read_json(folder / _CHECKSUMS, open_inside)
    n_ranks = _count_ranks(saved)
    if saved != _compute_checksums(folder, _list_parts(n_ranks)):
        raise ValueError(
            "its files do not match their checksums, so the checkpoint is damaged."
        )
    return n_ranks


def _count_ranks(checksums: Any) -> int:
    """Return how many ranks have shards in a checkpoint with these checksums."""
    return 0 if _MODEL in checksums else len(checksums)


def _list_parts(n_ranks: int) -> list[str]:
    """Return the names of the files that the checksums of a checkpoint cover."""
    ranks = [f"{_RANK.format(rank)}/{_CHECKSUMS}" for rank in range(n_ranks)]
    return ranks or [_MODEL, _ARRAYS, _JSON]


def _compute_checksums(folder: Path, names: list[str]) -> dict[str, int]:
    found = {}
    for name in names:
        with (
            open(folder / name, "rb", opener=open_inside) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            found[name] = zlib.crc32(data)
    return found


def _is_ours(folder: Path) -> bool:
    """Return whether a folder contains a checkpoint, and no files of the user."""
    try:
        parts = {*read_json(folder / _CHECKSUMS, open_inside)}
    except (OSError, ValueError, TypeError):
        return False
    n_ranks = _count_ranks(parts)
    return parts == {*_list_parts(n_ranks)} and all(
        path.name in (*parts, _CHECKSUMS)
        or path.name.startswith(_LITTER)
        or (n_ranks > 0 and path.is_dir() and _is_ours(path))
        for path in folder.iterdir()
    )


def _list_names(run: Path) -> list[str]:
    names = os.listdir(run) if run.is_dir() else []
    return sorted(filter(_SAVE.fullmatch, names), key=lambda name: int(name[5:]))


def _list_saves(run: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first, ignoring files and links."""
    paths = [run / name for name in _list_names(run)]
    return [path for path in paths if path.is_dir() and not path.is_symlink()]


def _read_files(folder: Path) -> Checkpoint:
    arrays = read_arrays(folder / _ARRAYS, open_inside)
    content = decode(read_json(folder / _JSON, open_inside), arrays)
    if content | _FORMAT != content:
        raise ValueError(
            "training.json has an unknown format or version. If a newer version of "
            "mlx_gradscale wrote it, upgrade the package."
        )
    state = {
        name.removeprefix(_PREFIX): x
        for name, x in arrays.items()
        if name.startswith(_PREFIX)
    }
    return Checkpoint(
        read_arrays(folder / _MODEL, open_inside),
        state | content.pop("numbers"),
        content.pop("scaler"),
        dict(content.pop("extra")),
        content,
    )
