"""The files of a run's folder: what is in them, written and read, whole or not.

``training.json`` holds values of any plain kind, by name, which belong to who writes
them. Who does not know one hands it on as it is.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import state_files
from ..files.arrays import read_arrays, write_arrays
from ..files.atomic import atomic_write
from ..files.bounded_json import parse
from ..files.folders import new_folder, refuse_hidden
from ..files.locks import open_file
from ..files.paths import check_name
from ..files.shards import INDEX, shard_sets
from ..scale import FIELDS, TORCH_KEYS, check
from .values import decode, each_value, encode

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
SCALER, TRAINING, EXTRA = "scaler.json", "training.json", "extra.safetensors"
OURS = (MODEL, OPTIMIZER, SCALER, TRAINING, EXTRA)
_HEADER = {"format": "mlx_gradscale", "version": 1}
# In training.json: the folders of several runs.
_SEVERAL = "several"
# What decoding a damaged file may raise; RuntimeError is MLX's std::bad_cast.
DAMAGE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OverflowError,
    RuntimeError,
)
_SCALER_KEYS = {*TORCH_KEYS, *(k for k in FIELDS if k not in TORCH_KEYS.values())}

Arrays = dict[str, mx.array]
# By path below the run's folder: arrays of a safetensors file, or any other's bytes.
Files = dict[str, Arrays | bytes]


class RunError(ValueError):
    """A folder that is not a run, or whose files are damaged, and why."""


@dataclass
class Contents:
    """What is in the folder of a run.

    Attributes:
        weights (dict or None): MLX's flat weights; None where there is no model.
        optimizer (dict or None): ``tree_flatten(optimizer.state)`` as a dict, or
            None.
        scaler (dict or None): A ``GradScaler.state_dict``, or None.
        training (dict): What ``training.json`` holds, by name.
        runs (dict): Where the folder holds several runs, each by the name of its
            folder; then only ``training`` is there beside it.
    """

    weights: Arrays | None = None
    optimizer: Arrays | None = None
    scaler: dict[str, Any] | None = None
    training: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, "Contents"] = field(default_factory=dict)


def file_contents(contents: Contents) -> Files:
    """Return what goes into each file, in the order in which they are written.

    Example:
        >>> list(file_contents(Contents(weights={"w": mx.ones(2)})))
        ['model.safetensors', 'training.json']
    """
    extra: Arrays = {}
    named = {_SEVERAL: list(contents.runs)} if contents.runs else {}
    training = contents.training | named
    training = _HEADER | {k: encode(v, extra, k) for k, v in training.items()}
    scaler = None if contents.scaler is None else _as_json(contents.scaler)
    found = {
        MODEL: contents.weights,
        OPTIMIZER: contents.optimizer,
        EXTRA: extra or None,
        SCALER: scaler,
        TRAINING: _as_json(training),
    }
    files = {name: content for name, content in found.items() if content is not None}
    for folder, each in contents.runs.items():
        check_name(folder, "The run")
        files |= {f"{folder}/{name}": x for name, x in file_contents(each).items()}
    return files


def check_arrays(contents: Contents) -> None:
    """Raise for arrays that the files have no format for; before they are written."""
    for arrays in (contents.weights, contents.optimizer):
        for name, array in (arrays or {}).items():
            if array.dtype == mx.float64:
                raise ValueError(
                    f"{name} is float64, which MLX's safetensors files cannot hold: "
                    "read the checkpoint with float64=mx.float32."
                )


def write_files(
    folder: str | os.PathLike[str],
    files: Files,
    overwrite: bool = False,
    progress: Callable[[Arrays], None] | None = None,
    before: Callable[[], None] | None = None,
) -> None:
    """Write the files of a run: all of them take their place, or none.

    Args:
        folder (str): Is made; if it is there, ``overwrite`` must be True.
        files (dict): From :func:`file_contents`.
        overwrite (bool): Replace the run that is there; other files in it stay.
        progress (Callable, optional): Called with the arrays of each file before they
            are written.
        before (Callable, optional): Called when all is written, before it takes its
            place.
    """
    tops = {name.partition("/")[0] for name in files}
    with new_folder(folder, {*OURS, *tops}, overwrite) as place:
        for name, content in files.items():
            (place / name).parent.mkdir(exist_ok=True)
            if isinstance(content, bytes):
                with atomic_write(place / name) as file:
                    file.write(content)
            else:
                if progress is not None:
                    progress(content)
                write_arrays(place / name, content, {"format": "mlx"})
        if before is not None:
            before()


def _as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def read_contents(folder: str | os.PathLike[str]) -> Contents:
    """Read a folder that :func:`write_files` wrote, or one with the same files.

    Args:
        folder (str): It need not have a ``training.json``.

    Returns:
        Contents: Its arrays are read when they are used.

    Raises:
        RunError: It is not such a folder, or its files are damaged.
    """
    folder = Path(folder)
    refuse_hidden(folder)
    while True:
        if not folder.is_dir():
            raise RunError(f"There is no folder {folder}.")
        before = _version(folder)
        try:
            contents = _read_files(folder)
        except (OSError, ValueError):
            if _version(folder) == before:
                raise
        else:
            # Another process may have replaced the folder between two files.
            if _version(folder) == before:
                return contents
        refuse_hidden(folder)


def _version(folder: Path) -> tuple[int, int] | None:
    try:
        state = folder.stat()
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns


def _read_files(folder: Path, inside: bool = False) -> Contents:
    weights, extra = _read_arrays(folder / MODEL), _read_arrays(folder / EXTRA)
    training = _read_training(folder / TRAINING, extra or {})
    several = training.pop(_SEVERAL, None)
    if several and weights is None and not inside:
        names = _checked_names(folder / TRAINING, several)
        runs = {name: _read_files(folder / name, inside=True) for name in names}
        return Contents(training=training, runs=runs)
    if weights is None:
        weights = _read_shards(folder)
    if weights is None and not (folder / SCALER).exists():
        raise RunError(f"{folder} has neither {MODEL} nor {SCALER}.")
    optimizer, scaler = _read_arrays(folder / OPTIMIZER), _read_scaler(folder / SCALER)
    return Contents(weights, optimizer, scaler, training)


def _checked_names(path: Path, names: Any) -> list[str]:
    try:
        if not isinstance(names, (list, tuple)):
            raise ValueError(f"{_SEVERAL} must be a list")
        return [check_name(name, "it") for name in names]
    except ValueError as error:
        raise damaged(path, error) from error


def _read_shards(folder: Path) -> Arrays | None:
    """Read a model in several files, as mlx-lm writes it."""
    try:
        names = shard_sets([path.name for path in folder.iterdir()])
    except ValueError as error:
        raise RunError(f"{folder}: {error}") from error
    found: Arrays = {}
    for name in names.get(f"{MODEL}{INDEX}", ()):
        arrays = _read_arrays(folder / name)
        if arrays is None:
            raise RunError(f"{folder / name} is a link to a file that is not there.")
        found |= arrays
    return found or None


def _read_arrays(path: Path) -> Arrays | None:
    try:
        return read_arrays(path)[0] if path.exists() else None
    except ValueError as error:
        raise RunError(str(error)) from error


def _read_scaler(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        state = state_files.load_state(path)
        check({TORCH_KEYS.get(k, k): v for k, v in state.items() if k in _SCALER_KEYS})
    except DAMAGE as error:
        raise damaged(path, error) from error
    return state


def _read_training(path: Path, extra: Arrays) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        with open(path, "rb", opener=open_file) as file:
            held = parse(file.read())
    except ValueError as error:
        raise RunError(f"{path} is not JSON: {error}") from error
    if not isinstance(held, dict) or held.get("format") != _HEADER["format"]:
        raise RunError(f"{path} was not written by mlx_gradscale.")
    version = held.get("version")
    if version != _HEADER["version"]:
        raise RunError(f"{path} has version {version}, not {_HEADER['version']}.")
    try:
        found = {k: decode(v, extra) for k, v in held.items() if k not in _HEADER}
        for _ in each_value(found):
            pass  # the depth is checked: not all that follows is without recursion
        return found
    except DAMAGE as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> RunError:
    """Return the error to raise for a file in which another was met."""
    said = f"a value in it cannot be read ({error!r})"
    said = str(error) if isinstance(error, ValueError) and str(error) else said
    return RunError(f"{path} is damaged: {said.rstrip('.')}.")
