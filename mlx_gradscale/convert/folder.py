"""Runs as folders of files: MLX's on one side, PyTorch's file or folder on the other.

Every write is all or nothing: a folder is built beside its place and then takes it.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

import mlx.core as mx

from .. import files, torch_checkpoint
from ..torch_checkpoint.atomic import atomic_write
from .jsonable import decode, encode
from .parts import Unordered
from .passed import remember, settle
from .place import check_file, check_folder, new_folder
from .swap import bring_back, refuse_hidden
from .whole import Run

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
SCALER, TRAINING, EXTRA = "scaler.json", "training.json", "extra.safetensors"
OURS = (MODEL, OPTIMIZER, SCALER, TRAINING, EXTRA)
# In a record: what save_checkpoint adds, for restore_checkpoint only.
RESUME = "resume"
_FORMAT, _VERSION = "mlx_gradscale", 1
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.\w+$")

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
    extra: dict[str, mx.array] = {}
    record = {"format": _FORMAT, "version": _VERSION}
    settled = settle(run.record, run.optimizer)
    record |= {key: encode(value, extra, key) for key, value in settled.items()}
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    arrays = {MODEL: run.weights, OPTIMIZER: run.optimizer, EXTRA: extra or None}
    check_run(run)
    check_folder(folder, overwrite)
    bring_back(folder, OURS)
    with new_folder(folder, OURS, overwrite) as place:
        for name, content in arrays.items():
            if content is not None:
                if progress is not None:
                    progress(content)
                mx.save_safetensors(str(place / name), content, {"format": "mlx"})
        if run.scaler is not None:
            files.save_state(place / SCALER, run.scaler)
        (place / TRAINING).write_text(text)
        if before is not None:
            before()


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
    """
    folder = Path(folder)
    refuse_hidden(folder)
    if folder.is_file():
        target = folder.with_suffix("") if folder.suffix else f"{folder}-mlx"
        paths = f"--torch-path {quote(str(folder))} --mlx-path {quote(str(target))}"
        raise ValueError(
            f"{folder} is a file, not the folder of an MLX run. Convert a PyTorch "
            f"checkpoint first: mlx_gradscale.convert {paths} --model MODULE:NAME"
        )
    while True:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder.")
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
    found = {name: read_weights(folder / name) for name in (MODEL, OPTIMIZER, EXTRA)}
    if found[MODEL] is None and not (folder / SCALER).exists():
        refuse_shards(folder)
        raise ValueError(f"{folder} has neither {MODEL} nor {SCALER}.")
    scaler = files.load_state(folder / SCALER) if (folder / SCALER).exists() else None
    run = Run(found[MODEL], found[OPTIMIZER], scaler)
    if (folder / TRAINING).exists():
        run.record = _read_record(folder / TRAINING, found[EXTRA] or {})
        remember(run.record)
    return run


def read_torch(
    path: str | os.PathLike, float64: mx.Dtype | None = None
) -> tuple[Any, list[str]]:
    """Reads a PyTorch checkpoint: a file, or a folder of them (Accelerate's).

    A folder becomes a dict from file name to content.

    Args:
        path: the file or folder.
        float64: what double precision becomes, as in ``torch_checkpoint.load``.

    Returns:
        tuple: the checkpoint, and sentences for the user.
    """
    path = Path(path)
    refuse_hidden(path)
    if not path.is_dir():
        return _read_torch_file(path, float64), []
    content: dict[str, Any] = {}
    skipped = []
    for file in sorted(path.iterdir()):
        if file.suffix in _TORCH_SUFFIXES:
            content[file.name] = _read_torch_file(file, float64)
        else:
            skipped.append(file.name)
    if not content:
        raise ValueError(f"{path} holds no PyTorch files.")
    note = f"Left out, as no checkpoint files: {', '.join(skipped)}."
    return content, [note] if skipped else []


def write_torch(
    path: str | os.PathLike,
    checkpoint: Any,
    is_folder: bool = False,
    overwrite: bool = False,
) -> None:
    """Writes a PyTorch checkpoint: a file, or a folder of them.

    Args:
        path: the file or folder; if it is there, ``overwrite`` must be True.
        checkpoint: for a folder, a dict from file name to content.
        is_folder: whether to write a folder.
        overwrite: replace what is there.
    """
    path = Path(path)
    check_torch(path, checkpoint, is_folder, overwrite)
    if not is_folder:
        _write_torch_file(path, checkpoint)
        return
    with new_folder(path, checkpoint.keys(), overwrite) as place:
        for name, content in checkpoint.items():
            _write_torch_file(place / name, content)


def check_torch(
    path: str | os.PathLike,
    checkpoint: Any,
    is_folder: bool = False,
    overwrite: bool = False,
) -> None:
    """Raises what :func:`write_torch` would, before anything is written."""
    path = Path(path)
    if not is_folder:
        check_file(path, overwrite)
        checkpoint = {path.name: checkpoint}
    elif check_folder(path, overwrite).is_dir():
        found = {p.name for p in path.iterdir() if p.suffix in _TORCH_SUFFIXES}
        spare = sorted(found - checkpoint.keys())
        if spare:
            raise FileExistsError(
                f"{path} holds {', '.join(spare)}, which this run has not: it would "
                "be taken for a part of it. Remove it, or give another folder."
            )
    for name, content in checkpoint.items():
        if name.lower().endswith(".safetensors") and not _is_flat(content):
            raise ValueError(
                f"{name}: a safetensors file holds named tensors and nothing else, "
                "this checkpoint holds more. Give a path that ends in .pt."
            )


def refuse_shards(path: str | os.PathLike) -> None:
    """Raises on a model in several files, in a folder or as one of them."""
    path = Path(path)
    names = [p.name for p in path.iterdir()] if path.is_dir() else [path.name]
    for name in sorted(names):
        found = _SHARD.search(name)
        if found and int(found[2]) > 1:
            raise ValueError(
                f"{path} has a model in {int(found[2])} files, as {name}: merge them "
                "into one first (load it in PyTorch and save its state_dict)."
            )


def read_weights(path: Path) -> dict[str, mx.array] | None:
    """The arrays of a safetensors file; None if it is not there."""
    if not path.exists():
        return None
    try:
        return mx.load(str(path), format="safetensors")
    except RuntimeError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error


def _read_torch_file(path: Path, float64: mx.Dtype | None) -> Any:
    if path.suffix == ".safetensors":
        if not path.exists():
            raise FileNotFoundError(f"There is no {path}.")
        return Unordered(sorted(read_weights(path).items()))
    try:
        return torch_checkpoint.load(path, float64=float64)
    except torch_checkpoint.CheckpointError as error:
        raise torch_checkpoint.CheckpointError(f"{path}: {error}") from error


def _write_torch_file(path: Path, content: Any) -> None:
    try:
        if path.suffix.lower() == ".safetensors":
            with atomic_write(path) as file:
                # Transformers and Accelerate refuse a file without this word.
                mx.save_safetensors(file, dict(content), {"format": "pt"})
        else:
            torch_checkpoint.save(path, content)
    except OSError as error:  # it names a hidden temporary file
        raise OSError(f"Cannot write {path}: {error.strerror or error}.") from error


def _is_flat(content: Any) -> bool:
    return isinstance(content, Mapping) and all(
        isinstance(key, str) and isinstance(value, mx.array)
        for key, value in content.items()
    )


def _read_record(path: Path, extra: dict[str, mx.array]) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        raise ValueError(f"{path} was not written by mlx_gradscale.")
    if record.get("version") != _VERSION:
        raise ValueError(f"{path} has version {record.get('version')}, not {_VERSION}.")
    try:
        return {
            key: decode(value, extra)
            for key, value in record.items()
            if key not in ("format", "version")
        }
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
