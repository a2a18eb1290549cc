"""Runs as folders of files: MLX's on one side, PyTorch's file or folder on the other.

Every write is all or nothing: a folder is built beside its place and then takes it.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import files, torch_checkpoint
from .jsonable import decode, encode
from .parts import Unordered
from .whole import Run

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
SCALER, TRAINING, EXTRA = "scaler.json", "training.json", "extra.safetensors"
_FORMAT, _VERSION = "mlx_gradscale", 1
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")

Progress = Callable[[dict[str, mx.array]], None]


def write_run(
    folder: str | os.PathLike,
    run: Run,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Writes a run: weights, optimizer, scaler, and the rest in ``training.json``.

    Args:
        folder: is made; if it is there, ``overwrite`` must be True.
        run: what to write; parts that are None have no file.
        overwrite: replace the folder, and all that is in it.
        progress: called with each dict of arrays before it is written.

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
    record |= {key: encode(value, extra, key) for key, value in run.record.items()}
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    arrays = {MODEL: run.weights, OPTIMIZER: run.optimizer, EXTRA: extra or None}
    with new_folder(folder, overwrite) as place:
        for name, content in arrays.items():
            if content is not None:
                if progress is not None:
                    progress(content)
                mx.save_safetensors(str(place / name), content, {"format": "mlx"})
        if run.scaler is not None:
            files.save_state(place / SCALER, run.scaler)
        (place / TRAINING).write_text(text)


def read_run(folder: str | os.PathLike) -> Run:
    """Reads a folder that :func:`write_run` wrote, or one with the same files.

    Args:
        folder: without ``training.json`` the run has no ``record``, and only a
            PyTorch checkpoint of the same model can give it one.

    Returns:
        Run: its arrays are read when they are used.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder.")
    found = {name: _tensors(folder / name) for name in (MODEL, OPTIMIZER, EXTRA)}
    if found[MODEL] is None and not (folder / SCALER).exists():
        raise ValueError(f"{folder} has neither {MODEL} nor {SCALER}.")
    scaler = files.load_state(folder / SCALER) if (folder / SCALER).exists() else None
    run = Run(found[MODEL], found[OPTIMIZER], scaler)
    if (folder / TRAINING).exists():
        run.record = _read_record(folder / TRAINING, found[EXTRA] or {})
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
    if not path.is_dir():
        return _read_torch_file(path, float64), []
    content: dict[str, Any] = {}
    skipped = []
    for file in sorted(path.iterdir()):
        if file.suffix in (*_TORCH_SUFFIXES, ".safetensors"):
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
    if not is_folder:
        _refuse_existing(path, overwrite)
        torch_checkpoint.save(path, checkpoint)
        return
    with new_folder(path, overwrite) as place:
        for name, content in checkpoint.items():
            if name.endswith(".safetensors"):
                # Transformers and Accelerate refuse a file without this word.
                mx.save_safetensors(str(place / name), dict(content), {"format": "pt"})
            else:
                torch_checkpoint.save(place / name, content)


@contextmanager
def new_folder(path: str | os.PathLike, overwrite: bool = False) -> Iterator[Path]:
    """A folder to fill, which takes its place when nothing was raised."""
    path = Path(path)
    _refuse_existing(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    old = temporary.with_name(temporary.name + ".old")
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)  # mkdtemp gives 0700
        if path.exists():
            path.rename(old)
        try:
            temporary.rename(path)
        except BaseException:
            if old.exists():
                old.rename(path)
            raise
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _refuse_existing(path: Path, overwrite: bool) -> None:
    if not overwrite and (path.is_file() or (path.is_dir() and any(path.iterdir()))):
        raise FileExistsError(f"{path} is there already: give --overwrite.")


def _tensors(path: Path) -> dict[str, mx.array] | None:
    if not path.exists():
        return None
    try:
        return mx.load(str(path), format="safetensors")
    except RuntimeError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error


def _read_torch_file(path: Path, float64: mx.Dtype | None) -> Any:
    if path.suffix == ".safetensors":
        return Unordered(sorted(_tensors(path).items()))
    return torch_checkpoint.load(path, float64=float64)


def _read_record(path: Path, extra: dict[str, mx.array]) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        raise ValueError(f"{path} was not written by mlx_gradscale.")
    if record["version"] != _VERSION:
        raise ValueError(f"{path} has version {record['version']}, not {_VERSION}.")
    return {
        key: decode(value, extra)
        for key, value in record.items()
        if key not in ("format", "version")
    }
