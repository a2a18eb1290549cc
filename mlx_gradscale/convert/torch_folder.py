"""PyTorch's side of a run: one file, or a folder of them."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import torch_checkpoint
from ..array_files import read_arrays, write_arrays
from ..torch_checkpoint.locks import refuse_special
from .parts import Unordered
from .place import check_file, check_folder, check_name, new_folder
from .swap import refuse_hidden

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.\w+$")


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
    elif not isinstance(checkpoint, Mapping):
        raise ValueError("A folder is to be written, and its files have no names.")
    for name in checkpoint if is_folder else ():
        # Another suffix than PyTorch's: a hostile run would replace a train.py.
        if Path(check_name(name, "The run's record")).suffix not in _TORCH_SUFFIXES:
            raise ValueError(f"The run's record names {name!r}, no PyTorch file.")
    if is_folder and check_folder(path, overwrite).is_dir():
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


def _read_torch_file(path: Path, float64: mx.Dtype | None) -> Any:
    if not path.exists():
        raise FileNotFoundError(f"There is no {path}.")
    refuse_special(path, path.stat().st_mode)
    if path.suffix == ".safetensors":
        return Unordered(sorted(read_arrays(path)[0].items()))
    try:
        return torch_checkpoint.load(path, float64=float64)
    except torch_checkpoint.CheckpointError as error:
        raise torch_checkpoint.CheckpointError(f"{path}: {error}") from error


def _write_torch_file(path: Path, content: Any) -> None:
    if path.suffix.lower() == ".safetensors":
        # Transformers and Accelerate refuse a file without this word.
        write_arrays(path, content, {"format": "pt"})
    else:
        torch_checkpoint.save(path, content)


def _is_flat(content: Any) -> bool:
    return isinstance(content, Mapping) and all(
        isinstance(key, str) and isinstance(value, mx.array)
        for key, value in content.items()
    )
