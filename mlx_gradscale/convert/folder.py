"""MLX's side of a run: a folder of files, all written or none."""

import os
from collections.abc import Callable
from pathlib import Path
from shlex import quote

import mlx.core as mx

from ..run_folder.contents import (
    DAMAGE,
    TRAINING,
    Contents,
    Files,
    RunError,
    check_arrays,
    damaged,
    file_contents,
    read_contents,
    write_files,
)
from .record import Record
from .run import Run


def write_run(
    folder: str | os.PathLike[str],
    run: Run,
    overwrite: bool = False,
    progress: Callable[[dict[str, mx.array]], None] | None = None,
) -> None:
    """Write a run: weights, optimizer, scaler, and the rest in ``training.json``.

    Args:
        folder (str): Is made; if it is there, ``overwrite`` must be True.
        run (Run): What to write; what is None has no file.
        overwrite (bool): Replace the run that is there; other files in the folder stay.
        progress (Callable, optional): Called with each dict of arrays before it is
            written.

    Example:
        >>> import os, tempfile
        >>> from mlx_gradscale.convert import from_torch, read_run, write_run
        >>> run = from_torch({"model": {"fc.weight": mx.ones((1, 2))}, "epoch": 3})
        >>> with tempfile.TemporaryDirectory() as place:
        ...     write_run(os.path.join(place, "run"), run)
        ...     print(sorted(os.listdir(os.path.join(place, "run"))))
        ...     read_run(os.path.join(place, "run")).record.checkpoint["epoch"]
        ['model.safetensors', 'training.json']
        3
    """
    write_files(folder, run_files(run), overwrite, progress)


def run_files(run: Run) -> Files:
    """Return what :func:`write_run` writes, by the name of the file.

    Example:
        >>> list(run_files(Run(weights={"w": mx.ones(2)})))
        ['model.safetensors', 'training.json']
    """
    return file_contents(_contents(run))


def _contents(run: Run) -> Contents:
    runs = {name: _contents(each) for name, each in run.runs.items()}
    training = run.record.to_training()
    contents = Contents(run.weights, run.optimizer, run.scaler, training, runs)
    check_arrays(contents)
    return contents


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Read a folder that :func:`write_run` wrote, or one with the same files.

    Args:
        folder (str): Without ``training.json`` the run's ``record`` is empty, and only
            a PyTorch checkpoint of the same model can give it one.

    Returns:
        Run: Its arrays are read when they are used.

    Raises:
        RunError: It is not such a folder, or its files are damaged.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        target = folder.with_suffix("") if folder.suffix else f"{folder}-mlx"
        paths = f"--torch-path {quote(str(folder))} --mlx-path {quote(str(target))}"
        raise RunError(
            f"{folder} is a file, not the folder of an MLX run. Convert a PyTorch "
            f"checkpoint first: mlx_gradscale.convert {paths} --model MODULE:NAME"
        )
    return _run(folder, read_contents(folder))


def _run(folder: Path, contents: Contents) -> Run:
    try:
        record = Record.of_training(contents.training, len(contents.runs))
    except DAMAGE as error:
        raise damaged(folder / TRAINING, error) from error
    runs = {name: _run(folder / name, each) for name, each in contents.runs.items()}
    return Run(contents.weights, contents.optimizer, contents.scaler, record, runs=runs)
