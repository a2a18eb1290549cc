"""A run's folder: one numbered subfolder per checkpoint, renamed into place.

    run/
      save-000007/
        model.safetensors       the model's weights, for mx.load and mlx-lm
        training.safetensors    optimizer, scaler and arrays of extra
        training.json           settings, random state, extra, and checksums

A folder cannot replace another atomically, so a save never replaces anything: it fills
a hidden folder, renames it to the next free number, and then removes the oldest. The
newest checkpoint is complete even if a process is killed, old ones are neither read nor
modified, and two writers use different numbers. A single file could be replaced
atomically, but mlx-lm could not load the weights from it.
"""

import json
import mmap
import os
import re
import zlib
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from ..files.arrays import read_arrays, write_arrays
from ..files.atomic import atomic_write, discard, sync, temporary_folder
from ..files.paths import LONGEST_JSON, open_inside, read_json
from ..files.text import list_some, shorten
from ..files.trees import decode, encode

_MODEL, _ARRAYS, _JSON = "model.safetensors", "training.safetensors", "training.json"
_SAVE = re.compile("save-([0-9]{6,})")
_FORMAT = {"format": "mlx_gradscale", "version": 1}
# Errors caused by JSON that save_checkpoint did not write.
UNEXPECTED = (KeyError, TypeError, AttributeError, IndexError, RecursionError)


class Checkpoint(NamedTuple):
    """The contents of a checkpoint, independent of a model.

    Attributes:
        weights (dict): The model's weights by path.
        optimizer (dict): The leaves of ``optimizer.state`` by path.
        scaler (dict, optional): ``scaler.state``.
        extra (dict): Additional values saved by the user.
        description (dict): The other entries of ``training.json``.
    """

    weights: dict[str, mx.array]
    optimizer: dict[str, Any]
    scaler: dict[str, mx.array] | None
    extra: dict[str, Any]
    description: dict[str, Any]


def latest_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Return the newest checkpoint in a run's folder.

    Args:
        path (str): As for ``save_checkpoint``.

    Raises:
        FileNotFoundError: There is none.

    Example:
        >>> import mlx.nn as nn, mlx.optimizers as optim, tempfile
        >>> from mlx_gradscale.checkpoint import latest_checkpoint, save_checkpoint
        >>> folder = tempfile.mkdtemp()
        >>> save_checkpoint(folder, nn.Linear(2, 1), optim.SGD(0.1))
        >>> latest_checkpoint(folder).name
        'save-000001'
    """
    saves = [*_saves(Path(path)).values()]
    if not saves:
        raise FileNotFoundError(f"There is no checkpoint in {os.fspath(path)}.")
    return saves[-1]


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint and verify its checksums.

    Args:
        path (str): The folder of a run, to read its newest checkpoint, or the folder of
            a single checkpoint.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: It is damaged.
    """
    run = Path(path)
    while True:
        is_save = not _saves(run) and (run / _JSON).exists()
        save = run if is_save else latest_checkpoint(run)
        try:
            return _read_save(save)
        except FileNotFoundError as error:
            # A writer may have just removed it after saving a newer one.
            if is_save or save == latest_checkpoint(run):
                raise ValueError(f"{save} is incomplete: {error}.") from error
        except (ValueError, *UNEXPECTED) as error:
            older = [x.name for x in _saves(run).values() if x != save]
            advice = f" Older checkpoints are {list_some(older)}." if older else ""
            text = f"{save} is damaged: {describe_error(error)}{advice}"
            raise ValueError(text) from error


def describe_error(error: Exception) -> str:
    """Return an error's message, with its type if a damaged file caused it."""
    kind = f"{type(error).__name__}: " if isinstance(error, UNEXPECTED) else ""
    return shorten(f"{kind}{error}", 400)


def encode_extra(extra: Mapping[str, Any]) -> tuple[Any, dict[str, mx.array]]:
    """Return the values for ``training.json``, and the arrays in them by number."""
    arrays: list[mx.array] = []
    # from_rank_0() encodes the tuple around it, too.
    encoded = encode(extra, arrays, depth=1)
    if len(json.dumps(encoded)) > LONGEST_JSON // 2:
        raise ValueError(
            f"The extra values take more than {LONGEST_JSON // 2:,} bytes of JSON. "
            "Save long ones as mx.array."
        )
    return encoded, {f"extra.{i}": x for i, x in enumerate(arrays)}


def write_checkpoint(
    run: Path,
    weights: Mapping[str, mx.array],
    arrays: Mapping[str, mx.array],
    description: dict[str, Any],
    keep: int,
) -> None:
    """Add a checkpoint to a run's folder, then remove all but the newest."""
    run.mkdir(parents=True, exist_ok=True)
    with temporary_folder(run) as folder:
        write_arrays(folder / _MODEL, weights, {"format": "mlx"})
        write_arrays(folder / _ARRAYS, arrays)
        checksums = {name: _checksum(folder / name) for name in (_MODEL, _ARRAYS)}
        description = description | {"checksums": checksums}
        content = {"crc32": _json_checksum(description), "run": description}
        with atomic_write(folder / _JSON) as file:
            file.write(json.dumps(_FORMAT | content).encode())
        _rename_to_next(folder, run)
        sync(run)
    for old in [*_saves(run).values()][:-keep]:
        discard(old)


def _saves(run: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by number, oldest first, without links."""
    found = {}
    for entry in os.scandir(run) if run.is_dir() else ():
        match = _SAVE.fullmatch(entry.name)
        if match and entry.is_dir(follow_symlinks=False):
            found[int(match[1])] = run / entry.name
    return dict(sorted(found.items()))


def _rename_to_next(folder: Path, run: Path) -> None:
    for number in count(max(_saves(run), default=0) + 1):
        target = run / f"save-{number:06}"
        try:
            folder.rename(target)
            return
        except OSError:
            if not os.path.lexists(target):
                raise
            # Another writer took the number, or a file has this name.


def _read_save(folder: Path) -> Checkpoint:
    found = read_json(folder / _JSON, open_inside)
    if not isinstance(found, dict) or found | _FORMAT != found:
        raise ValueError("training.json has an unknown format or version.")
    description = found["run"]
    if _json_checksum(description) != found["crc32"]:
        raise ValueError("the checksum of training.json does not match.")
    checksums = description.pop("checksums")
    for name in (_MODEL, _ARRAYS):
        if _checksum(folder / name) != checksums[name]:
            raise ValueError(f"the checksum of {name} does not match.")
    parts: dict[str, dict[str, Any]] = {"optimizer": {}, "scaler": {}, "extra": {}}
    for name, x in read_arrays(folder / _ARRAYS, open_inside)[0].items():
        part, _, rest = name.partition(".")
        parts[part][rest] = x
    for row in description["settings"]:
        if [*map(type, row.values())] != [str, list, dict]:
            raise ValueError("training.json does not describe an optimizer.")
    return Checkpoint(
        read_arrays(folder / _MODEL, open_inside)[0],
        parts["optimizer"] | description.pop("numbers"),
        parts["scaler"] or None,
        dict(decode(description.pop("extra"), parts["extra"])),
        description,
    )


def _json_checksum(value: Any) -> int:
    # The text does not change when it is parsed and written again.
    return zlib.crc32(json.dumps(value).encode())


def _checksum(path: Path) -> int:
    with (
        open(path, "rb", opener=open_inside) as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        return zlib.crc32(data)
