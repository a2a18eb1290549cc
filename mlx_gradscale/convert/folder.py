"""MLX's side of a run: a folder of files.

Every write is all or nothing: a folder is built beside its place and then takes it.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Any

import mlx.core as mx

from .. import state_files as files
from ..files.arrays import read_arrays, write_arrays
from ..files.atomic import atomic_write
from ..files.bounded_json import parse
from ..files.folders import check_folder, new_folder, refuse_hidden
from ..files.locks import open_file
from ..run_folder.values import decode, encode
from ..scale import FIELDS, TORCH_KEYS, check
from .conversion import Run
from .passthrough import remember, settle
from .record import RunError, check_record
from .shards import INDEX, shard_sets

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
SCALER, TRAINING, EXTRA = "scaler.json", "training.json", "extra.safetensors"
OURS = (MODEL, OPTIMIZER, SCALER, TRAINING, EXTRA)
# In a record: what save_checkpoint adds, for restore_checkpoint only.
RESUME = "resume"
_FORMAT, _VERSION = "mlx_gradscale", 1
# What decoding a damaged record may raise; RuntimeError is MLX's std::bad_cast.
_DAMAGE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OverflowError,
    RuntimeError,
)
_SCALER_KEYS = {*TORCH_KEYS, *(k for k in FIELDS if k not in TORCH_KEYS.values())}

Progress = Callable[[dict[str, mx.array]], None]


def write_run(
    folder: str | os.PathLike,
    run: Run,
    overwrite: bool = False,
    progress: Progress | None = None,
    before: Callable[[], None] | None = None,
) -> None:
    """Writes a run: weights, optimizer, scaler, and the rest in ``training.json``.

    Args:
        folder: is made; if it is there, ``overwrite`` must be True.
        run: what to write; parts that are None have no file.
        overwrite: replace the run that is there; other files in the folder stay.
        progress: called with each dict of arrays before it is written.
        before: called when all is written, before it takes its place.

    Example:
        >>> import os, tempfile
        >>> from mlx_gradscale.convert import from_torch, read_run, write_run
        >>> run = from_torch({"model": {"fc.weight": mx.ones((1, 2))}, "epoch": 3})
        >>> with tempfile.TemporaryDirectory() as place:
        ...     write_run(os.path.join(place, "run"), run)
        ...     print(sorted(os.listdir(os.path.join(place, "run"))))
        ...     read_run(os.path.join(place, "run")).record["checkpoint"]["epoch"]
        ['model.safetensors', 'training.json']
        3
    """
    contents = {None: _contents(run)}
    contents |= {name: _contents(each) for name, each in run.runs.items()}
    check_folder(folder, overwrite)
    with new_folder(folder, {*OURS, *run.runs}, overwrite) as place:
        for name, content in contents.items():
            inside = place / name if name else place
            inside.mkdir(exist_ok=True)
            _write_contents(inside, content, progress)
        if before is not None:
            before()


def _write_contents(
    place: Path, contents: dict[str, Any], progress: Progress | None
) -> None:
    for name, content in contents.items():
        if name == SCALER:
            files.save_state(place / name, content)
        elif name == TRAINING:
            with atomic_write(place / name) as file:
                file.write(content)
        else:
            if progress is not None:
                progress(content)
            write_arrays(place / name, content, {"format": "mlx"})


def run_files(run: Run) -> list[str]:
    """The names of the files that :func:`write_run` writes.

    Example:
        >>> run_files(Run(weights={"w": mx.ones(2)}))
        ['model.safetensors', 'training.json']
    """
    inside = [f"{n}/{f}" for n, each in run.runs.items() for f in run_files(each)]
    return [*_contents(run), *inside]


def _contents(run: Run) -> dict[str, Any]:
    """What goes into each file, in the order in which they are written."""
    check_run(run)
    extra: dict[str, mx.array] = {}
    record = {"format": _FORMAT, "version": _VERSION}
    settled = settle(run.record, run.optimizer)
    record |= {key: encode(value, extra, key) for key, value in settled.items()}
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    found = {
        MODEL: run.weights,
        OPTIMIZER: run.optimizer,
        EXTRA: extra or None,
        SCALER: run.scaler,
        TRAINING: text.encode(),
    }
    return {name: content for name, content in found.items() if content is not None}


def check_run(run: Run) -> None:
    """Raises on a run that :func:`write_run` has no format for."""
    for arrays in (run.weights, run.optimizer):
        for name, array in (arrays or {}).items():
            if array.dtype == mx.float64:
                raise ValueError(
                    f"{name} is float64, which MLX's safetensors files cannot hold: "
                    "read the checkpoint with float64=mx.float32."
                )


def read_run(folder: str | os.PathLike) -> Run:
    """Reads a folder that :func:`write_run` wrote, or one with the same files.

    Args:
        folder: without ``training.json`` the run has no ``record``, and only a
            PyTorch checkpoint of the same model can give it one.

    Returns:
        Run: its arrays are read when they are used.

    Raises:
        RunError: it is no such folder, or its files are damaged.
    """
    folder = Path(folder)
    refuse_hidden(folder)
    if folder.exists() and not folder.is_dir():
        target = folder.with_suffix("") if folder.suffix else f"{folder}-mlx"
        paths = f"--torch-path {quote(str(folder))} --mlx-path {quote(str(target))}"
        raise RunError(
            f"{folder} is a file, not the folder of an MLX run. Convert a PyTorch "
            f"checkpoint first: mlx_gradscale.convert {paths} --model MODULE:NAME"
        )
    while True:
        if not folder.is_dir():
            raise RunError(f"{folder} is not a folder.")
        before = _version(folder)
        try:
            run = _read_files(folder)
        except (OSError, ValueError):
            if _version(folder) == before:
                raise
        else:
            # Another process may have replaced the folder between two files.
            if _version(folder) == before:
                return run
        refuse_hidden(folder)


def _version(folder: Path) -> tuple[int, int] | None:
    try:
        state = folder.stat()
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns


def _read_files(folder: Path) -> Run:
    several = _read_several(folder)
    return several if several is not None else _read_one(folder)


def _read_one(folder: Path) -> Run:
    found = {name: _read_part(folder / name) for name in (MODEL, OPTIMIZER, EXTRA)}
    if found[MODEL] is None:
        found[MODEL] = _read_shards(folder)
    if found[MODEL] is None and not (folder / SCALER).exists():
        raise RunError(f"{folder} has neither {MODEL} nor {SCALER}.")
    run = Run(found[MODEL], found[OPTIMIZER], _read_scaler(folder / SCALER))
    if (folder / TRAINING).exists():
        run.record = _read_record(folder / TRAINING, found[EXTRA] or {})
        remember(run.record)
    return run


def _read_several(folder: Path) -> Run | None:
    """The runs in a folder of several; None where it is a run itself."""
    if (folder / MODEL).exists() or not (folder / TRAINING).exists():
        return None
    record = _read_record(folder / TRAINING, _read_part(folder / EXTRA) or {})
    if not record.get("several"):
        return None
    runs = {name: _read_one(folder / name) for name in record["several"]}
    remember(record)
    return Run(record=record, runs=runs)


def read_weights(path: Path) -> dict[str, mx.array] | None:
    """The arrays of a safetensors file; None if it is not there."""
    return read_arrays(path)[0] if path.exists() else None


def _read_shards(folder: Path) -> dict[str, mx.array] | None:
    """A model in several files, as mlx-lm writes it."""
    try:
        names = shard_sets([path.name for path in folder.iterdir()])
    except ValueError as error:
        raise RunError(f"{folder}: {error}") from error
    found = [_read_part(folder / n) for n in names.get(f"{MODEL}{INDEX}", ())]
    return {k: v for each in found for k, v in each.items()} or None


def _read_part(path: Path) -> dict[str, mx.array] | None:
    try:
        return read_weights(path)
    except ValueError as error:
        raise RunError(str(error)) from error


def _read_scaler(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        state = files.load_state(path)
        check({TORCH_KEYS.get(k, k): v for k, v in state.items() if k in _SCALER_KEYS})
    except _DAMAGE as error:
        raise RunError(f"{path} is damaged: {error}") from error
    return state


def _read_record(path: Path, extra: dict[str, mx.array]) -> dict[str, Any]:
    try:
        with open(path, "rb", opener=open_file) as file:
            record = parse(file.read())
    except ValueError as error:
        raise RunError(f"{path} is not JSON: {error}") from error
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        raise RunError(f"{path} was not written by mlx_gradscale.")
    if record.get("version") != _VERSION:
        raise RunError(f"{path} has version {record.get('version')}, not {_VERSION}.")
    try:
        decoded = {
            key: decode(value, extra)
            for key, value in record.items()
            if key not in ("format", "version")
        }
        check_record(decoded)
    except _DAMAGE as error:
        said = f"a value in it cannot be read ({error!r})"
        said = str(error) if isinstance(error, ValueError) and str(error) else said
        raise RunError(f"{path} is damaged: {said.rstrip('.')}.") from error
    return decoded
