"""PyTorch's side of a run: one file, or a folder of them."""

import json
import os
import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from .. import torch_checkpoint
from ..files.arrays import read_arrays, write_arrays
from ..files.atomic import atomic_write
from ..files.folders import check_folder, new_folder, refuse_hidden
from ..files.locks import open_file, refuse_special
from ..files.paths import check_file, check_name
from ..files.shards import is_shard, read_index, shard_sets, split
from .layouts.hints import listed
from .record import Record
from .sections import Unordered

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
# Transformers' count of steps and epochs: the only JSON that changes in training.
TRAINER = "trainer_state.json"
# What Transformers and Accelerate write beside the sections: objects of their own.
_OTHERS = re.compile(
    r"rng_state(_\d+)?\.pth|training_args\.bin|(sampler|dl_state_dict)(_\d+)?\.bin"
)
_AS_FILE = (
    "A folder of torch.distributed.checkpoint comes back as one file, of which PyTorch "
    "makes a folder: python -m torch.distributed.checkpoint.format_utils torch_to_dcp "
    "FILE FOLDER."
)
# Files that are not sections are carried along up to this size each, and together.
_LARGEST_CARRIED, _MOST_CARRIED, _MOST_FILES = 2**26, 2**28, 1000


class _Raw(bytes):
    """All of a file, as it is to be written."""


def read_torch(
    path: str | os.PathLike[str], float64: mx.Dtype | None = None
) -> tuple[Any, list[str]]:
    """Read a PyTorch checkpoint: a file, or a folder of them.

    A folder, as Transformers' Trainer and Accelerate write it, becomes a dict from
    file name to content. A model in several files has the name of its index. A folder
    of torch.distributed.checkpoint is one checkpoint.

    Args:
        path (str): The file or folder.
        float64 (Dtype, optional): What double precision becomes, as in
            ``torch_checkpoint.load``.

    Returns:
        tuple: The checkpoint, and sentences for the user.
    """
    path = Path(path)
    refuse_hidden(path)
    if not path.is_dir():
        if is_shard(path):
            raise ValueError(
                f"{path} is one of several files of a model: give the folder that "
                f"holds them all, {path.parent}."
            )
        return _read_file(path, float64), []
    if torch_checkpoint.is_distributed(path):
        try:
            return torch_checkpoint.load_distributed(path, float64=float64), [_AS_FILE]
        except torch_checkpoint.CheckpointError as error:
            raise torch_checkpoint.CheckpointError(f"{path}: {error}") from error
    names = _section_names(path)
    sets = shard_sets(names)
    content: dict[str, Any] = {}
    for index, files in sets.items():
        content[index] = _merged({n: _read_file(path / n, float64) for n in files})
    sharded = {name for files in sets.values() for name in files}
    for name in names:
        if name not in sharded:
            content[name] = _read_file(path / name, float64)
    if not content:
        raise ValueError(f"{path} holds no PyTorch files.")
    if (path / TRAINER).is_file():
        content[TRAINER] = _read_json(path / TRAINER)
    return dict(sorted(content.items())), []


def read_rest(
    path: str | os.PathLike[str], checkpoint: Any, record: Record
) -> list[str]:
    """Note in a run's record what a folder holds besides, for the way back.

    Args:
        path (str): The folder; of a file there is nothing.
        checkpoint (Any): What :func:`read_torch` gave.
        record (Record): Of the run; gets ``is_folder``, ``carried`` and ``shards``.

    Returns:
        list: Sentences for the user.
    """
    path = Path(path)
    record.is_folder = path.is_dir() and not torch_checkpoint.is_distributed(path)
    if not record.is_folder:
        return []
    names = _section_names(path)
    shards = {
        name: read_index(path / name, content.files)
        for name, content in checkpoint.items()
        if hasattr(content, "files")
    }
    carried: dict[str, mx.array] = {}
    left, room = [], _MOST_CARRIED
    for file in sorted(path.iterdir()):
        if file.name in (*names, *shards, TRAINER):
            continue
        if not _can_carry(file, room) or len(carried) == _MOST_FILES:
            left.append(file.name)
            continue
        with open(file, "rb", opener=open_file) as source:
            data = np.frombuffer(source.read(_LARGEST_CARRIED), np.uint8)
        carried[file.name] = mx.array(data)
        room -= data.size
    notes = []
    if carried:
        notes.append(f"Kept for the way back, as they are: {listed(carried)}.")
    if left:
        notes.append(f"Left out, as no files of a checkpoint: {listed(left)}.")
    record.carried, record.shards = carried, shards
    return notes


def write_torch(
    path: str | os.PathLike[str],
    checkpoint: Any,
    is_folder: bool = False,
    overwrite: bool = False,
    record: Record | None = None,
) -> None:
    """Write a PyTorch checkpoint: a file, or a folder of them.

    Args:
        path (str): The file or folder; if it is there, ``overwrite`` must be True.
        checkpoint (Any): For a folder, a dict from file name to content.
        is_folder (bool): Whether to write a folder.
        overwrite (bool): Replace what is there.
        record (Record, optional): With what :func:`read_rest` put there. Files that are
            carried along do not replace others.
    """
    files = torch_files(path, checkpoint, is_folder, overwrite, record or Record())
    write_torch_files(path, files, is_folder, overwrite)


def write_torch_files(
    path: str | os.PathLike[str],
    files: dict[str, Any],
    is_folder: bool,
    overwrite: bool,
) -> None:
    """Write what :func:`torch_files` gave."""
    path = Path(path)
    if not is_folder:
        check_file(path, overwrite)  # it may have come since, as new_folder checks too
        _write_file(path, files[path.name])
        return
    # What is carried along and there already stays as it is.
    with new_folder(path, files.keys(), overwrite) as place:
        for name, content in files.items():
            _write_file(place / name, content)


def torch_files(
    path: str | os.PathLike[str],
    checkpoint: Any,
    is_folder: bool,
    overwrite: bool,
    record: Record,
) -> dict[str, Any]:
    """Return what :func:`write_torch` writes, by file name; raise what it would."""
    path = Path(path)
    if not is_folder:
        check_file(path, overwrite)
        _check_flat(path.name, checkpoint)
        return {path.name: checkpoint}
    if not isinstance(checkpoint, Mapping):
        raise ValueError("A folder is to be written, and its files have no names.")
    files: dict[str, Any] = {}
    for name, content in checkpoint.items():
        index = record.shards.get(check_name(name, "The run's record"))
        if index is not None:
            shards, text = split(content, index)
            files |= shards | {name: _Raw(text)}
        elif name == TRAINER:
            files[name] = _as_json(content)
        elif Path(name).suffix in _TORCH_SUFFIXES:
            files[name] = content
        else:  # a hostile run would replace a train.py
            raise ValueError(f"The run's record names {name!r}, no PyTorch file.")
    for name, content in files.items():
        _check_flat(name, content)
    is_there = check_folder(path, overwrite).is_dir()
    there = {p.name for p in path.iterdir()} if is_there else set()
    for name, data in record.carried.items():
        if name not in there:
            raw = _Raw(np.array(data).tobytes())
            files.setdefault(check_name(name, "The run's record"), raw)
    spare = {n for n in there if Path(n).suffix in _TORCH_SUFFIXES}
    spare -= {*files, *record.carried}
    if spare:
        raise FileExistsError(
            f"{path} holds {', '.join(sorted(spare))}, which this run does not "
            "have: it would be taken for a part of it. Remove it, or give another "
            "folder."
        )
    return files


def _can_carry(file: Path, room: int) -> bool:
    try:
        check_name(file.name, "it")
    except ValueError:  # nor could it be written
        return False
    is_begun = file.name.startswith(".") and file.suffix == ".tmp"
    fits = file.is_file() and file.stat().st_size <= min(_LARGEST_CARRIED, room)
    return fits and not is_begun


def _section_names(path: Path) -> list[str]:
    """Return the files of a folder that may hold a section."""
    return sorted(
        file.name
        for file in path.iterdir()
        if file.suffix in _TORCH_SUFFIXES
        and not _OTHERS.fullmatch(file.name)
        and not file.is_dir()
    )


def _merged(shards: Mapping[str, Any]) -> dict[str, Any]:
    for name, content in shards.items():
        if not _is_flat(content):
            raise ValueError(f"{name} is one of several files, and not of tensors.")
    kept = OrderedDict((k, v) for each in shards.values() for k, v in each.items())
    tensors: Any = kept
    if any(isinstance(each, Unordered) for each in shards.values()):
        tensors = Unordered(sorted(kept.items()))
    if len(tensors) != sum(map(len, shards.values())):
        raise ValueError(f"{', '.join(shards)} hold a tensor more than once.")
    tensors.files = {name: file for file, each in shards.items() for name in each}
    return cast(dict[str, Any], tensors)


def _read_file(path: Path, float64: mx.Dtype | None) -> Any:
    if not path.exists():
        raise FileNotFoundError(f"There is no {path}.")
    refuse_special(path, path.stat().st_mode)
    if path.suffix == ".safetensors":
        return Unordered(sorted(read_arrays(path)[0].items()))
    try:
        return torch_checkpoint.load(path, float64=float64)
    except torch_checkpoint.CheckpointError as error:
        raise torch_checkpoint.CheckpointError(f"{path}: {error}") from error


def _read_json(path: Path) -> Any:
    try:
        with open(path, "rb", opener=open_file) as file:
            return json.loads(file.read(_LARGEST_CARRIED))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def _as_json(content: Any) -> _Raw:
    """Return JSON as Transformers writes it."""
    try:
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"{TRAINER} cannot be written as JSON: {error}.") from error
    return _Raw(text.encode())


def _write_file(path: Path, content: Any) -> None:
    if isinstance(content, _Raw):
        with atomic_write(path) as file:
            file.write(content)
    elif path.suffix.lower() == ".safetensors":
        # Transformers and Accelerate refuse a file without this word.
        write_arrays(path, content, {"format": "pt"})
    else:
        torch_checkpoint.save(path, content)


def _check_flat(name: str, content: Any) -> None:
    if name.lower().endswith(".safetensors") and not _is_flat(content):
        raise ValueError(
            f"{name}: a safetensors file holds named tensors and nothing else, "
            "this checkpoint holds more. Give a path that ends in .pt."
        )


def _is_flat(content: Any) -> bool:
    return isinstance(content, Mapping) and all(
        isinstance(key, str) and isinstance(value, mx.array)
        for key, value in content.items()
    )
