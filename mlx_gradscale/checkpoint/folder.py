"""Read and write the folder of a run, which has one subfolder per checkpoint.

    run/
      save-000007/
        model.safetensors       the model's weights
        training.safetensors    all other arrays
        training.json           all other values
        checksums.json          CRC-32 of the three files above

A folder cannot replace another atomically, so a save never replaces anything: it fills
a hidden folder, renames it to the next free number, and then removes old checkpoints.
The newest checkpoint is complete even if a process is killed, a damaged checkpoint does
not prevent the next save, and simultaneous writers get different numbers. A single file
could be replaced atomically, but mlx-lm could not load its weights.
"""

import errno
import json
import mmap
import os
import re
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from ..files.arrays import read_arrays, write_arrays
from ..files.atomic import copy_modes, discard, sync, temporary_folder
from ..files.paths import LONGEST_JSON, open_inside, read_json
from ..files.text import list_some, shorten
from ..files.trees import decode, encode

_MODEL, _ARRAYS, _JSON = "model.safetensors", "training.safetensors", "training.json"
_CHECKSUMS = "checksums.json"
_PREFIX = "optimizer."  # added to the names of the optimizer's arrays
_SAVE = re.compile("save-[0-9]{6,}")
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
        ValueError: If the checkpoint is damaged or cannot be read.
    """
    run = Path(path)
    saves = _list_saves(run)
    is_save = not saves and (run / _CHECKSUMS).exists()
    save = run if is_save else latest_checkpoint(run)
    try:
        return _read_save(save)
    except Exception as error:
        if not save.exists():  # removed by a writer that saved a newer one
            return read_checkpoint(path)
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


def write_checkpoint(run: Path, saved: Checkpoint, keep: int) -> None:
    """Add a checkpoint to a run's folder, then remove all but the newest ``keep``."""
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
    if (run / _CHECKSUMS).exists():
        raise ValueError(
            f"{run} is a single checkpoint. Pass the folder of the run, {run.parent}."
        )
    run.mkdir(parents=True, exist_ok=True)
    with temporary_folder(run) as folder:
        # Keep the permissions of the newest checkpoint, if there is one.
        last = (_list_saves(run) or [folder])[-1]
        copy_modes(last, folder)
        write_arrays(folder / _MODEL, saved.weights, {"format": "mlx"})
        write_arrays(folder / _ARRAYS, arrays)
        (folder / _JSON).write_bytes(text)
        (folder / _CHECKSUMS).write_text(json.dumps(_compute_checksums(folder)))
        copy_modes(last, folder)
        sync(folder / _JSON, folder / _CHECKSUMS, folder)
        _rename_to_next(folder, run)
        sync(run)
    for old in _list_saves(run)[:-keep]:
        discard(old)


def _list_names(run: Path) -> list[str]:
    names = os.listdir(run) if run.is_dir() else []
    return sorted(filter(_SAVE.fullmatch, names), key=lambda name: int(name[5:]))


def _list_saves(run: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first, ignoring files and links."""
    paths = [run / name for name in _list_names(run)]
    return [path for path in paths if path.is_dir() and not path.is_symlink()]


def _rename_to_next(folder: Path, run: Path) -> None:
    last = ["save-000000", *_list_names(run)][-1]
    try:
        folder.rename(run / f"save-{int(last[5:]) + 1:06}")
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        _rename_to_next(folder, run)  # another writer took the number


def _read_save(folder: Path) -> Checkpoint:
    if _compute_checksums(folder) != read_json(folder / _CHECKSUMS, open_inside):
        raise ValueError(
            "its files do not match their checksums, so the checkpoint is damaged."
        )
    arrays = read_arrays(folder / _ARRAYS, open_inside)
    content = decode(read_json(folder / _JSON, open_inside), arrays)
    if content | _FORMAT != content:
        raise ValueError(
            "training.json has an unknown format or version. If a newer version of "
            "mlx_gradscale wrote it, upgrade the package."
        )
    for row in content["settings"]:
        if [*map(type, row.values())] != [str, list, dict]:
            raise ValueError("the optimizer settings in training.json are damaged.")
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


def _compute_checksums(folder: Path) -> dict[str, int]:
    found = {}
    for name in (_MODEL, _ARRAYS, _JSON):
        with (
            open(folder / name, "rb", opener=open_inside) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            found[name] = zlib.crc32(data)
    return found
