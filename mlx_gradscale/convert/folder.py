"""Read and write PyTorch checkpoints: a file, or a Trainer or Accelerate folder."""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .. import torch_checkpoint
from ..files.arrays import read_arrays, write_arrays
from ..files.atomic import atomic_write, discard, new_folder
from ..files.paths import check_file, check_name, open_inside, read_json
from .options import Options
from .tree import ConvertError, is_tensor, list_some

# Transformers' step and epoch counts: the only JSON that changes during training.
TRAINER = "trainer_state.json"
_SUFFIXES = r"\.(safetensors|bin|pt|pth|ckpt)"
_MODEL = re.compile(rf"(\w+_)?model(_\d+)?{_SUFFIXES}")
_SHARD = re.compile(r"(\w+_)?(model)-(\d{1,6})-of-(\d{1,6})\.(safetensors|bin)")
_OTHERS = re.compile(
    rf"((lr_)?scheduler|optimizer|scaler|grad_scaler)(_\d+)?{_SUFFIXES}"
)
_ZERO = re.compile(r".*(zero_pp_rank|optim_states).*\.pt")
# Limits on other files in a folder to carry along: bytes each, total bytes, and count.
_LARGEST_FILE, _MOST_BYTES, _MOST_FILES = 2**26, 2**28, 1000


@dataclass
class TorchFiles:
    """A PyTorch checkpoint as it was read.

    ``checkpoint`` is the object in the file or, for a folder, a dict by file name.
    ``files`` holds the bytes of a folder's other files.
    """

    checkpoint: Any
    is_folder: bool = False
    files: dict[str, mx.array] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_torch(path: str | os.PathLike[str], options: Options) -> TorchFiles:
    """Read a file, or a Trainer or Accelerate folder.

    A sharded model is listed under the name of the unsharded file. Program-specific
    files (random states, arguments, tokenizers) are kept as bytes.
    """
    path = Path(path)
    shard = _SHARD.fullmatch(path.name)
    if shard and int(shard[4]) > 1:
        raise ConvertError(
            f"{path} is one of several files of a model: give its folder, "
            f"{path.parent}."
        )
    # The reader refuses a torch.distributed.checkpoint folder and says what to do.
    if not path.is_dir() or (path / ".metadata").is_file():
        return TorchFiles(_read_file(path, options))
    return _read_folder(path, options)


def _read_folder(path: Path, options: Options) -> TorchFiles:
    names = sorted(entry.name for entry in path.iterdir())
    shards = _shard_sets(names)
    content = {
        whole: _merge({n: _read_part(path / n, options) for n in files})
        for whole, files in shards.items()
    }
    for name in names:
        if _MODEL.fullmatch(name) or _OTHERS.fullmatch(name):
            content.setdefault(name, _read_part(path / name, options))
    if not content:
        raise ConvertError(_nothing_in(path, names))
    if TRAINER in names:
        content[TRAINER] = read_json(path / TRAINER)
    found = TorchFiles(dict(sorted(content.items())), is_folder=True)
    parts = {part for files in shards.values() for part in files}
    indices = {f"{whole}.index.json" for whole in shards}
    left = _carry(
        path, [n for n in names if n not in {*content, *parts, *indices}], found
    )
    if left:
        found.notes.append(
            f"Left out, as too large or no plain files: {list_some(left)}."
        )
    return found


def _nothing_in(path: Path, names: list[str]) -> str:
    if any(map(_ZERO.fullmatch, names)):
        return (
            f"{path} holds the parts of DeepSpeed's ZeRO, one for each rank: make one "
            "file of the weights with the zero_to_fp32.py beside it, and convert that. "
            "The optimizer's parts are not converted."
        )
    files = [n for n in names if re.search(_SUFFIXES + "$", n)]
    if files:
        return (
            f"{path} holds {list_some(files)}, and no file that is named as Trainer's "
            "or Accelerate's are (model.safetensors, optimizer.pt): give one file."
        )
    return f"{path} holds no PyTorch files."


def _carry(path: Path, names: list[str], found: TorchFiles) -> list[str]:
    """Keep other files as bytes; return the names of the files left out."""
    left, room = [], _MOST_BYTES
    for name in names:
        file = path / name
        is_plain = file.is_file() and not file.is_symlink() and name.isprintable()
        is_small = is_plain and file.stat().st_size <= min(_LARGEST_FILE, room)
        if name.startswith(".") or not is_small or len(found.files) == _MOST_FILES:
            left.append(name)
            continue
        with open(file, "rb", opener=open_inside) as source:
            data = np.frombuffer(source.read(_LARGEST_FILE), np.uint8)
        found.files[name] = mx.array(data)
        room -= data.size
    return left


def _shard_sets(names: list[str]) -> dict[str, list[str]]:
    """Return the shards of each model, by the name of the unsharded file."""
    found: dict[str, dict[int, str]] = {}
    counts: dict[str, set[int]] = {}
    for match in filter(None, map(_SHARD.fullmatch, names)):
        whole = f"{match[1] or ''}model.{match[5]}"
        found.setdefault(whole, {})[int(match[3])] = match[0]
        counts.setdefault(whole, set()).add(int(match[4]))
    for whole, parts in found.items():
        count = max(counts[whole])
        if len(counts[whole]) > 1 or len(parts) != count or max(parts) > count:
            raise ConvertError(
                f"{next(iter(parts.values()))} is one of {count} files, of which "
                f"{len(parts)} are there: copy the others into the folder, too."
            )
    return {whole: [parts[i] for i in sorted(parts)] for whole, parts in found.items()}


def _merge(shards: dict[str, Any]) -> dict[str, Any]:
    for name, content in shards.items():
        if not _is_flat(content):
            raise ConvertError(f"{name} is one of several files, and not of tensors.")
    tensors = {key: x for each in shards.values() for key, x in each.items()}
    if len(tensors) != sum(map(len, shards.values())):
        raise ConvertError(f"{list_some(shards)} hold a tensor more than once.")
    return tensors


def _read_part(path: Path, options: Options) -> Any:
    """Read a file in a folder; links may not lead outside the folder."""
    folder = os.path.realpath(path.parent)
    if not os.path.realpath(path).startswith(os.path.join(folder, "")):
        raise ConvertError(
            f"{path} is a link out of its folder, which is not followed: copy the "
            "files themselves (cp -rL)."
        )
    return _read_file(path, options)


def _read_file(path: Path, options: Options) -> Any:
    if path.suffix == ".safetensors":
        return dict(sorted(read_arrays(path)[0].items()))
    try:
        return torch_checkpoint.load(path, options.limits, float64=options.float64)
    except torch_checkpoint.CheckpointError as error:
        place = "" if str(path) in str(error) else f"{path}: "
        raise torch_checkpoint.CheckpointError(f"{place}{error}") from error


def write_torch(
    path: str | os.PathLike[str],
    checkpoint: Any,
    files: dict[str, mx.array] | None = None,
    is_folder: bool = False,
    overwrite: bool = False,
) -> None:
    """Write a PyTorch checkpoint, a file or a folder, all or nothing."""
    path = Path(path)
    if not is_folder:
        check_file(path, overwrite)
        _write_file(path, checkpoint)
        return
    files = files or {}
    _check_names(checkpoint)
    is_there = _check_target(path, {*checkpoint, *files}, overwrite)
    new = path.with_name(f"{path.name}.new") if is_there else path
    with new_folder(new) as folder:
        for name, content in checkpoint.items():
            _write_file(folder / name, content)
        for name, data in files.items():
            with atomic_write(folder / check_name(name, "The template")) as file:
                file.write(np.array(data).tobytes())
    if is_there:
        # A folder cannot replace another atomically, so keep both complete throughout.
        old = path.with_name(f"{path.name}.old")
        path.rename(old)
        new.rename(path)
        discard(old, path)


def _check_names(checkpoint: Any) -> None:
    if not isinstance(checkpoint, dict):
        raise ConvertError("A folder is to be written, and its files have no names.")
    for name in checkpoint:
        check_name(name, "The template")
        known = name == TRAINER or _MODEL.fullmatch(name) or _OTHERS.fullmatch(name)
        if not known:  # a hostile template could write a train.py
            raise ConvertError(
                f"The template names {name!r}, which is not a PyTorch file."
            )


def _check_target(path: Path, names: set[str], overwrite: bool) -> bool:
    """Return whether a folder will be replaced; raise if it must not be."""
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file, and a folder is to be written.")
    there = [file.name for file in path.iterdir()] if path.is_dir() else []
    if there and not overwrite:
        raise FileExistsError(
            f"{path} already exists: pass --overwrite (overwrite=True)."
        )
    spare = [name for name in there if name not in names and name[0] != "."]
    if spare:
        raise FileExistsError(
            f"{path} holds {list_some(spare)}, which is not of this checkpoint: give "
            "another folder."
        )
    return bool(there)


def _write_file(path: Path, content: Any) -> None:
    if path.name == TRAINER:
        # Same format as Transformers.
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        with atomic_write(path) as file:
            file.write(text.encode())
    elif path.suffix.lower() == ".safetensors":
        if not _is_flat(content):
            raise ConvertError(
                f"{path.name}: a safetensors file holds named tensors and nothing "
                "else, this checkpoint holds more. Give a path that ends in .pt."
            )
        # Transformers and Accelerate refuse a file without this key.
        write_arrays(path, content, {"format": "pt"})
    else:
        torch_checkpoint.save(path, content)


def _is_flat(content: Any) -> bool:
    return isinstance(content, dict) and all(
        isinstance(key, str) and is_tensor(value) for key, value in content.items()
    )
