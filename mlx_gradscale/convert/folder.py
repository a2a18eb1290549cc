"""PyTorch's side of a conversion: one file, or a folder of Trainer or Accelerate."""

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
from .tree import ConvertError, Unordered, is_tensor, list_some

# Transformers' counts of steps and epochs: the only JSON that changes in training.
TRAINER = "trainer_state.json"
_SUFFIXES = r"\.(safetensors|bin|pt|pth|ckpt)"
_MODEL = re.compile(rf"(\w+_)?model(_\d+)?{_SUFFIXES}")
_SHARD = re.compile(r"(\w+_)?(model)-(\d{1,6})-of-(\d{1,6})\.(safetensors|bin)")
_OTHERS = re.compile(
    rf"((lr_)?scheduler|optimizer|scaler|grad_scaler)(_\d+)?{_SUFFIXES}"
)
_ZERO = re.compile(r".*(zero_pp_rank|optim_states).*\.pt")
# Other files of a folder are carried along up to this size each, and together.
_LARGEST_FILE, _MOST_BYTES, _MOST_FILES = 2**26, 2**28, 1000


@dataclass
class TorchFiles:
    """A PyTorch checkpoint as it was read.

    Attributes:
        checkpoint (Any): The object in a file; of a folder, a dict by file name.
        is_folder (bool): Whether it goes back as a folder.
        files (dict): The bytes of a folder's other files.
        notes (list): Sentences for the user.
    """

    checkpoint: Any
    is_folder: bool = False
    files: dict[str, mx.array] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_torch(path: str | os.PathLike[str], options: Options) -> TorchFiles:
    """Read a file, or a folder of Trainer or Accelerate.

    A model in several files has the name of one. Files that only their program knows
    (random states, arguments, tokenizers) are kept as bytes.
    """
    path = Path(path)
    shard = _SHARD.fullmatch(path.name)
    if shard and int(shard[4]) > 1:
        raise ConvertError(
            f"{path} is one of several files of a model: give its folder, "
            f"{path.parent}."
        )
    # A folder of torch.distributed.checkpoint is refused by the reader, with advice.
    if not path.is_dir() or (path / ".metadata").is_file():
        return TorchFiles(_read_file(path, options))
    return _read_folder(path, options)


def _read_folder(path: Path, options: Options) -> TorchFiles:
    names = sorted(entry.name for entry in path.iterdir())
    shards = _shard_sets(names)
    parts = {part for files in shards.values() for part in files}
    found = TorchFiles({}, is_folder=True)
    for whole, files in shards.items():
        found.checkpoint[whole] = _merge(
            {n: _read_part(path / n, options) for n in files}
        )
    for name in names:
        if _MODEL.fullmatch(name) or _OTHERS.fullmatch(name):
            found.checkpoint.setdefault(name, _read_part(path / name, options))
    if not any(map(_MODEL.fullmatch, found.checkpoint)):
        for file in sorted(path.glob("*/*")):  # diffusers': unet/...
            if _MODEL.fullmatch(file.name) and file.is_file():
                key = f"{file.parent.name}/{file.name}"
                found.checkpoint[key] = _read_part(file, options)
    if not found.checkpoint:
        raise ConvertError(_nothing_in(path, names))
    if TRAINER in names:
        found.checkpoint[TRAINER] = read_json(path / TRAINER)
    found.checkpoint = dict(sorted(found.checkpoint.items()))
    indices = {f"{whole}.index.json" for whole in shards}
    rest = [n for n in names if n not in {*found.checkpoint, *parts, *indices}]
    left = _carry(path, rest, found)
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
    """Keep other files as bytes; return the names of those that are left out."""
    left, room = [], _MOST_BYTES
    for name in names:
        file = path / name
        is_plain = file.is_file() and not file.is_symlink() and name.isprintable()
        size = file.stat().st_size if is_plain else 0
        is_begun = name.startswith(".")
        is_small = size <= min(_LARGEST_FILE, room) and len(found.files) < _MOST_FILES
        if not is_plain or not is_small or is_begun:
            left.append(name)
            continue
        with open(file, "rb", opener=open_inside) as source:
            data = np.frombuffer(source.read(_LARGEST_FILE), np.uint8)
        found.files[name] = mx.array(data)
        room -= data.size
    return left


def _shard_sets(names: list[str]) -> dict[str, list[str]]:
    """Return the files that are parts of one model, by the name of the whole.

    Example:
        >>> _shard_sets(["model-1-of-2.bin", "model-2-of-2.bin"])
        {'model.bin': ['model-1-of-2.bin', 'model-2-of-2.bin']}
    """
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
    is_ordered = not any(isinstance(each, Unordered) for each in shards.values())
    return tensors if is_ordered else Unordered(sorted(tensors.items()))


def _read_part(path: Path, options: Options) -> Any:
    """Read a file of a folder; a link may not lead out of it."""
    folder = os.path.realpath(path.parent)
    if not os.path.realpath(path).startswith(os.path.join(folder, "")):
        raise ConvertError(
            f"{path} is a link out of its folder, which is not followed: copy the "
            "files themselves (cp -rL)."
        )
    return _read_file(path, options)


def _read_file(path: Path, options: Options) -> Any:
    if path.suffix == ".safetensors":
        return Unordered(sorted(read_arrays(path)[0].items()))
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
    """Write a PyTorch checkpoint: a file, or a folder of them; whole or not at all."""
    path = Path(path)
    if not is_folder:
        check_file(path, overwrite)
        _write_file(path, checkpoint)
        return
    check_folder(path, checkpoint, overwrite)
    is_there = path.is_dir() and any(path.iterdir())
    new = path.with_name(f"{path.name}.new") if is_there else path
    with new_folder(new) as folder:
        for name, content in checkpoint.items():
            (folder / name).parent.mkdir(exist_ok=True)
            _write_file(folder / name, content)
        for name, data in (files or {}).items():
            with atomic_write(folder / check_name(name, "The template")) as file:
                file.write(np.array(data).tobytes())
    if is_there:
        # A folder cannot replace another one at once: both are whole at any moment.
        old = path.with_name(f"{path.name}.old")
        path.rename(old)
        new.rename(path)
        discard(old, path)


def check_folder(path: Path, checkpoint: Any, overwrite: bool) -> None:
    """Raise where a folder cannot be written, or must not be replaced."""
    if not isinstance(checkpoint, dict):
        raise ConvertError("A folder is to be written, and its files have no names.")
    for name in checkpoint:
        folder, slash, file = str(name).rpartition("/")
        check_name(file, "The template")
        if slash:
            check_name(folder, "The template")
        known = file == TRAINER or _MODEL.fullmatch(file) or _OTHERS.fullmatch(file)
        if not known:  # a hostile template would write a train.py
            raise ConvertError(
                f"The template names {name!r}, which is no PyTorch file."
            )
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file, and a folder is to be written.")
    if path.is_dir() and any(path.iterdir()):
        if not overwrite:
            raise FileExistsError(
                f"{path} already exists: pass --overwrite (overwrite=True)."
            )
        spare = [p.name for p in path.iterdir() if not _may_replace(p, checkpoint)]
        if spare:
            raise FileExistsError(
                f"{path} holds {list_some(spare)}, which is not of this checkpoint: "
                "give another folder."
            )


def _may_replace(path: Path, checkpoint: dict[str, Any]) -> bool:
    """Tell whether a file in a folder that is replaced is a checkpoint's."""
    if path.is_dir():
        return any(str(name).startswith(f"{path.name}/") for name in checkpoint)
    is_torch = re.search(_SUFFIXES + "$", path.name) is not None
    return path.name in checkpoint or not is_torch or _is_side_file(path.name)


def _is_side_file(name: str) -> bool:
    """Tell whether Trainer or Accelerate write such a file beside the sections."""
    pattern = r"rng_state(_\d+)?\.pth|training_args\.bin|(sampler|dl_state_dict).*\.bin"
    return re.fullmatch(pattern, name) is not None


def _write_file(path: Path, content: Any) -> None:
    if path.name == TRAINER:
        # As Transformers writes it.
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        with atomic_write(path) as file:
            file.write(text.encode())
    elif path.suffix.lower() == ".safetensors":
        if not _is_flat(content):
            raise ConvertError(
                f"{path.name}: a safetensors file holds named tensors and nothing "
                "else, this checkpoint holds more. Give a path that ends in .pt."
            )
        # Transformers and Accelerate refuse a file without this word.
        write_arrays(path, content, {"format": "pt"})
    else:
        torch_checkpoint.save(path, content)


def _is_flat(content: Any) -> bool:
    return isinstance(content, dict) and all(
        isinstance(key, str) and is_tensor(value) for key, value in content.items()
    )
