"""A run's folder: one numbered subfolder per checkpoint, renamed into place.

    run/
      save-000007/
        model.safetensors       the model's weights, for mx.load and mlx-lm
        training.safetensors    optimizer, scaler and arrays of extra
        training.json           settings, random state and extra
        checksums.json          size and CRC-32 of the three files

A folder cannot replace another atomically, so a save never replaces anything: it fills
a hidden folder, renames it to the next free number, and then removes the oldest. The
newest checkpoint is complete even if a process is killed, old ones are neither read nor
modified, and two writers use different numbers. A single file could be replaced
atomically, but mlx-lm could not load the weights from it.
"""

import io
import json
import os
import re
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from ..files.arrays import dump_arrays, load_arrays
from ..files.atomic import discard, naming, sync, temporary_folder
from ..files.paths import LONGEST_JSON, open_inside, parse_json
from ..files.text import list_some, shorten
from .encoding import decode_extra

_MODEL, _ARRAYS = "model.safetensors", "training.safetensors"
_TRAINING = "training.json"
_CHECKSUMS = "checksums.json"
_SAVE = re.compile(r"save-([0-9]{6,})")
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
    found = _saves(Path(path))
    if not found:
        raise FileNotFoundError(f"There is no checkpoint in {os.fspath(path)}.")
    return found[-1]


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
        is_save = (run / _CHECKSUMS).exists()
        save = run if is_save else latest_checkpoint(run)
        try:
            return _read_save(save)
        except FileNotFoundError as error:
            # A writer may have just removed it after saving a newer one.
            if is_save or save == latest_checkpoint(run):
                raise ValueError(f"{save} is incomplete: {error}.") from error
        except (ValueError, *UNEXPECTED) as error:
            older = [other.name for other in _saves(run) if other != save]
            advice = f" Older checkpoints: {list_some(older)}." if older else ""
            text = f"{save} is damaged: {describe_error(error)}{advice}"
            raise ValueError(text) from error


def describe_error(error: Exception) -> str:
    """Return an error's message, with its type if a damaged file caused it."""
    kind = f"{type(error).__name__}: " if isinstance(error, UNEXPECTED) else ""
    return shorten(f"{kind}{error}", 400)


def write_checkpoint(
    run: Path,
    weights: Mapping[str, mx.array],
    arrays: Mapping[str, mx.array],
    description: Mapping[str, Any],
    keep: int,
) -> None:
    """Add a checkpoint to a run's folder, then remove all but the newest."""
    text = training_text(description)
    run.mkdir(parents=True, exist_ok=True)
    beside = run / "save"
    with naming(run), temporary_folder(beside) as folder:
        checksums = {}
        for name, content in ((_MODEL, weights), (_ARRAYS, arrays), (_TRAINING, text)):
            with open(folder / name, "xb", buffering=2**20) as file:
                summed: Any = _Summed(file)
                if isinstance(content, bytes):
                    summed.write(content)
                else:
                    dump_arrays(summed, content, {"format": "mlx"})
            checksums[name] = summed.checksum
        (folder / _CHECKSUMS).write_text(json.dumps(checksums, indent=1) + "\n")
        for path in (*folder.iterdir(), folder):
            sync(path)
        _rename_to_next(folder, run)
        sync(run)
    for old in _saves(run)[:-keep]:
        discard(old, beside)


def training_text(description: Mapping[str, Any]) -> bytes:
    """Return the content of ``training.json``, or raise if it could not be read."""
    try:
        text = json.dumps(_FORMAT | dict(description), indent=1, ensure_ascii=False)
        data = text.encode() + b"\n"
        parse_json(data)
    except ValueError as error:
        raise ValueError(
            f"training.json could not be read again: {str(error).rstrip('.')}. Shorten "
            "extra, or save its long values as mx.array."
        ) from error
    return data


def _saves(run: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first. Links are not followed."""
    try:
        with os.scandir(run) as entries:
            names = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [run / name for name in sorted(filter(_SAVE.fullmatch, names), key=_number)]


def _number(name: str) -> int:
    return int(name.partition("-")[2])


def _rename_to_next(folder: Path, run: Path) -> None:
    number = max((_number(save.name) for save in _saves(run)), default=0)
    while True:
        number += 1
        target = run / f"save-{number:06}"
        try:
            folder.rename(target)
        except OSError:
            if not os.path.lexists(target):
                raise
            continue  # another writer took the number, or a file has this name
        return


def _read_save(folder: Path) -> Checkpoint:
    found: list[Any] = []
    with ExitStack() as stack:
        # Open all files first, so that they can be read even if they are removed.
        opened = {
            name: stack.enter_context(open(folder / name, "rb", opener=open_inside))
            for name in (_CHECKSUMS, _MODEL, _ARRAYS, _TRAINING)
        }
        checksums = parse_json(opened.pop(_CHECKSUMS).read(4096))
        for name, file in opened.items():
            summed = _Summed(file)
            if name == _TRAINING:
                found.append(parse_json(summed.read(LONGEST_JSON + 1)))
            else:
                size = os.fstat(file.fileno()).st_size
                found.append(load_arrays(summed, size)[0])
            if summed.checksum != checksums[name]:
                raise ValueError(f"the checksum of {name} does not match.")
    return _build_checkpoint(*found)


def _build_checkpoint(
    weights: dict[str, mx.array], arrays: dict[str, mx.array], description: Any
) -> Checkpoint:
    if not isinstance(description, dict) or description | _FORMAT != description:
        raise ValueError("training.json is not of this version of mlx_gradscale.")
    parts: dict[str, dict[str, Any]] = {"optimizer": {}, "scaler": {}, "extra": {}}
    for name, x in arrays.items():
        part, _, rest = name.partition(".")
        parts[part][rest] = x
    optimizer, scaler = parts["optimizer"] | description.pop("numbers"), parts["scaler"]
    if description["wrapped"]:
        scaler = {
            name.removeprefix("scaler."): x
            for name, x in optimizer.items()
            if name.startswith("scaler.")
        }
    extra = decode_extra(description.pop("extra"), parts["extra"])
    kinds = {"class": str, "schedules": list, "values": dict}
    for row in description["settings"]:
        if any(type(row[name]) is not kind for name, kind in kinds.items()):
            raise ValueError("training.json does not describe an optimizer.")
    return Checkpoint(weights, optimizer, scaler or None, extra, description)


class _Summed(io.RawIOBase):
    """A file read or written sequentially, computing its checksum on the way."""

    def __init__(self, file: Any):
        self._file = file
        self.checksum = {"bytes": 0, "crc32": 0}

    def write(self, data: Any) -> int:
        self._add(data)
        return int(self._file.write(data))

    def readinto(self, view: Any) -> int:
        count = int(self._file.readinto(view))
        self._add(memoryview(view)[:count])
        return count

    def _add(self, data: Any) -> None:
        crc32 = zlib.crc32(data, self.checksum["crc32"])
        self.checksum = {"bytes": self.checksum["bytes"] + len(data), "crc32": crc32}
