"""The folder of a run: one numbered folder per checkpoint, renamed into place.

    run/
      save-000007/
        model.safetensors       the model's weights, for mx.load and mlx-lm
        training.safetensors    optimizer, scaler and arrays of extra
        training.json           settings, random state and extra
        checksums.json          size and CRC-32 of the three files

A folder cannot replace another in one step, so a save never replaces anything: it fills
a hidden folder, renames it to the next free number, and then removes the oldest. The
newest checkpoint is whole whenever a process is killed, old ones are neither read nor
changed, and two writers take different numbers. A single file could be replaced in one
step, but mlx-lm could not load the weights from it.
"""

import json
import os
import re
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx

from ..files.arrays import dump_arrays, load_arrays
from ..files.atomic import discard, naming, sync, temporary_folder
from ..files.paths import open_inside, parse_json
from ..files.text import list_some
from .extra import decode_extra

MODEL, ARRAYS, TRAINING = "model.safetensors", "training.safetensors", "training.json"
_CHECKSUMS = "checksums.json"
_SAVE = re.compile(r"save-([0-9]{6,})")
_FORMAT = {"format": "mlx_gradscale", "version": 1}


@dataclass
class Checkpoint:
    """What a checkpoint holds, without a model to put it into.

    Attributes:
        weights (dict): The model's weights by path.
        optimizer (dict): The leaves of ``optimizer.state`` by path.
        scaler (dict, optional): ``scaler.state``.
        extra (dict): What the user saved besides.
        description (dict): The other entries of ``training.json``.
    """

    weights: dict[str, mx.array]
    optimizer: dict[str, Any]
    scaler: dict[str, mx.array] | None
    extra: dict[str, Any]
    description: dict[str, Any]


def latest_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Return the newest checkpoint in the folder of a run.

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
        path (str): The folder of a run, of which the newest checkpoint is read, or that
            of one checkpoint.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: It is damaged.
    """
    return build_checkpoint(*read_files(path))


def build_checkpoint(
    weights: dict[str, mx.array], arrays: Mapping[str, mx.array], text: str
) -> Checkpoint:
    """Return the checkpoint of what :func:`read_files` returned."""
    found = parse_json(text.encode())
    if not isinstance(found, dict) or found | _FORMAT != found:
        raise ValueError("training.json is not of this version of mlx_gradscale.")
    parts: dict[str, dict[str, Any]] = {"optimizer": {}, "scaler": {}, "extra": {}}
    try:
        for name, x in arrays.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = x
        optimizer, scaler = parts["optimizer"] | found.pop("numbers"), parts["scaler"]
        if found["wrapped"]:
            split = [(*name.partition("."), x) for name, x in optimizer.items()]
            scaler = {rest: x for part, _, rest, x in split if part == "scaler"}
        extra = decode_extra(found.pop("extra"), parts["extra"])
        kinds = {"class": str, "schedules": list, "values": dict}
        for row in found["settings"]:
            if any(type(row[name]) is not kind for name, kind in kinds.items()):
                raise ValueError("training.json does not describe an optimizer.")
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        kind = type(error).__name__
        raise ValueError(f"training.json is damaged: {kind}: {error}.") from error
    return Checkpoint(weights, optimizer, scaler or None, extra, found)


def read_files(
    path: str | os.PathLike[str],
) -> tuple[dict[str, mx.array], dict[str, mx.array], str]:
    """Return weights, other arrays and the text of the newest or the given checkpoint.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: It is damaged.
    """
    given = Path(path)
    if (given / _CHECKSUMS).exists():
        return _read_save(given)
    while True:
        newest = latest_checkpoint(given)
        try:
            return _read_save(newest)
        except FileNotFoundError as error:
            # A writer may have removed it just now, after it saved a newer one.
            if newest == latest_checkpoint(given):
                raise ValueError(f"{newest} is incomplete: {error}.") from error
        except ValueError as error:
            older = [save.name for save in _saves(given) if save != newest]
            advice = f" Older checkpoints: {list_some(older)}." if older else ""
            raise ValueError(f"{error}{advice}") from error


def write_checkpoint(
    run: Path,
    weights: Mapping[str, mx.array],
    arrays: Mapping[str, mx.array],
    text: bytes,
    keep: int,
) -> None:
    """Add a checkpoint to the folder of a run, then remove all but the newest.

    Args:
        run (Path): Made if it is not there.
        weights (dict): The content of ``model.safetensors``.
        arrays (dict): The content of ``training.safetensors``.
        text (bytes): From :func:`training_text`.
        keep (int): How many to keep.
    """
    files: dict[str, Callable[[Any], Any]] = {
        MODEL: lambda file: dump_arrays(file, weights, {"format": "mlx"}),
        ARRAYS: lambda file: dump_arrays(file, arrays, {"format": "mlx"}),
        TRAINING: lambda file: file.write(text),
    }
    run.mkdir(parents=True, exist_ok=True)
    temporary = run / "save"
    with naming(run), temporary_folder(temporary) as folder:
        checksums = {}
        for name, write in files.items():
            with open(folder / name, "xb", buffering=2**20) as file:
                summed = _Summed(file)
                write(summed)
                file.flush()
                os.fsync(file.fileno())
            checksums[name] = summed.checksum
        (folder / _CHECKSUMS).write_text(json.dumps(checksums, indent=1) + "\n")
        sync(folder / _CHECKSUMS)
        sync(folder)
        _rename_to_next(folder, run)
        sync(run)
    for old in _saves(run)[:-keep]:
        discard(old, temporary)


def training_text(description: Mapping[str, Any]) -> bytes:
    """Return the content of ``training.json``, or raise if it could not be read."""
    text = json.dumps(_FORMAT | dict(description), indent=1).encode() + b"\n"
    try:
        parse_json(text)
    except ValueError as error:
        raise ValueError(
            f"The checkpoint could not be read again: {error} Shorten extra, or save "
            "its long values as mx.array."
        ) from error
    return text


def _saves(run: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first. Links are not followed."""
    try:
        with os.scandir(run) as entries:
            names = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    numbered = [(int(m[1]), m[0]) for m in map(_SAVE.fullmatch, names) if m]
    return [run / name for _, name in sorted(numbered)]


def _rename_to_next(folder: Path, run: Path) -> None:
    newest = [int(save.name.partition("-")[2]) for save in _saves(run)[-1:]]
    number = sum(newest)
    while True:
        number += 1
        target = run / f"save-{number:06}"
        try:
            folder.rename(target)
        except OSError:
            if not os.path.lexists(target):
                raise
            continue  # another writer took the number, or it is the name of a file
        return


def _read_save(folder: Path) -> tuple[dict[str, mx.array], dict[str, mx.array], str]:
    with ExitStack() as stack:
        # All are opened first: a checkpoint that is removed now can still be read.
        opened = {
            name: stack.enter_context(open(folder / name, "rb", opener=open_inside))
            for name in (MODEL, ARRAYS, TRAINING, _CHECKSUMS)
        }
        try:
            checksums = parse_json(opened.pop(_CHECKSUMS).read(4096))
            found: list[Any] = []
            for name, file in opened.items():
                size = os.fstat(file.fileno()).st_size
                if size != checksums[name]["bytes"]:
                    raise ValueError(f"{name} does not have its saved size.")
                summed = _Summed(file)
                if name == TRAINING:
                    found.append(summed.read(size).decode())
                else:
                    found.append(load_arrays(summed, size)[0])
                if summed.checksum != checksums[name]:
                    raise ValueError(f"the checksum of {name} does not match.")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder} is damaged: {error}") from error
    weights, arrays, text = found
    return weights, arrays, text


class _Summed:
    """A file that is read or written front to back, with its checksum on the way."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._bytes = self._crc32 = 0

    @property
    def checksum(self) -> dict[str, int]:
        return {"bytes": self._bytes, "crc32": self._crc32}

    def write(self, data: Any) -> int:
        self._add(data)
        return self._file.write(data)

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._add(data)
        return data

    def readinto(self, view: memoryview) -> int:
        reader: Any = self._file
        count: int = reader.readinto(view)
        self._add(view[:count])
        return count

    def _add(self, data: Any) -> None:
        self._crc32 = zlib.crc32(data, self._crc32)
        self._bytes += len(data)
