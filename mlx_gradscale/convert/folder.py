"""Read and write PyTorch checkpoint files, and Trainer and Accelerate folders."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..files.arrays import read_arrays, write_arrays
from ..files.atomic import atomic_folder, temporary_folder
from ..files.paths import LONGEST_JSON, check_file, open_file, read_json
from ..files.text import list_some
from . import old_checkpoint as torch_checkpoint
from .old_checkpoint import Limits
from .tree import ConvertError, is_tensor

# Transformers' step and epoch counts. No other JSON file changes during training.
TRAINER = "trainer_state.json"
# Operations per comma, colon and bracket: a million take ten seconds to convert.
_PER_MARK = 7
_SECTION = re.compile(
    r"((\w+_)?model|(lr_)?scheduler|optimizer|scaler|grad_scaler)(_\d+)?"
    r"\.(safetensors|bin|pt|pth|ckpt)"
)
_SHARD = re.compile(r"((\w+_)?model)-\d{1,6}-of-(\d{1,6})\.(safetensors|bin)")


def read_torch(
    path: str | os.PathLike[str], limits: Limits | None = None
) -> tuple[Any, dict[str, Path] | None, list[str]]:
    """Read a PyTorch checkpoint: a file, or a Trainer or Accelerate folder.

    The first result is the object in the file or, for a folder, a dict that maps file
    names to their contents. A sharded model has the name that a single file would have.
    The second result is None for a file; for a folder, it maps the names of other files
    (random states, arguments, tokenizers) to their paths. The third result lists notes
    on files that were left out.
    """
    path = Path(path)
    # All files share one copy of the limits; the user's object does not change.
    limits = replace(limits or Limits())
    shard = _SHARD.fullmatch(path.name)
    if shard and int(shard[3]) > 1:
        raise ConvertError(
            f"{path} is one shard of a model. Pass the folder {path.parent} instead."
        )
    # The reader refuses a torch.distributed.checkpoint folder and says what to do.
    if not path.is_dir() or (path / ".metadata").is_file():
        return _read_file(path, limits), None, []
    names = sorted(entry.name for entry in path.iterdir())
    shards: dict[str, list[re.Match[str]]] = {}
    for match in filter(None, map(_SHARD.fullmatch, names)):
        shards.setdefault(f"{match[1]}.{match[4]}", []).append(match)
    content = {w: _read_shards(path, parts, limits) for w, parts in shards.items()}
    for name in filter(_SECTION.fullmatch, names):
        content.setdefault(name, _read_file(_inside(path / name), limits))
    if not content:
        raise ConvertError(
            f"{path} contains no file with a name that Trainer or Accelerate uses, "
            "such as model.safetensors or optimizer.pt. Pass the path of a single file "
            "instead. For DeepSpeed ZeRO, run zero_to_fp32.py on the folder and "
            "convert the weights that it writes."
        )
    if TRAINER in names:
        content[TRAINER] = _read_trainer_state(_inside(path / TRAINER), limits)
    read = {*content, *(part[0] for parts in shards.values() for part in parts)}
    read |= {f"{whole}.index.json" for whole in shards}
    others = [name for name in names if name not in read]
    files = {name: path / name for name in others if _is_plain(path / name)}
    left = [name for name in others if name not in files]
    notes = [
        f"These files or folders were left out: {list_some(left)}. Only regular files "
        "that are not hidden are copied."
    ]
    return dict(sorted(content.items())), files, notes if left else []


def _read_shards(
    path: Path, parts: list[re.Match[str]], limits: Limits
) -> dict[str, Any]:
    if len(parts) != int(parts[0][3]):
        raise ConvertError(
            f"{parts[0][0]} is one of {parts[0][3]} shards, but {path} contains "
            f"{len(parts)}. Add missing shards, and remove those of other checkpoints."
        )
    tensors: dict[str, Any] = {}
    for part in parts:
        content = _read_file(_inside(path / part[0]), limits)
        if not _has_only_tensors(content):
            raise ConvertError(
                f"The shard {part[0]} contains a value that is not a named tensor. "
                "Save the model's state dict again."
            )
        twice = tensors.keys() & content.keys()
        if twice:
            raise ConvertError(
                f"The shard {part[0]} and another shard both contain "
                f"{list_some(sorted(twice))}. Save the model again."
            )
        tensors |= content
    return tensors


def _is_plain(file: Path) -> bool:
    is_shown = file.name.isprintable() and not file.name.startswith(".")
    return is_shown and file.is_file() and not file.is_symlink()


def _inside(path: Path) -> Path:
    """Return a path, or raise if it is a symbolic link out of its folder."""
    folder = os.path.realpath(path.parent)
    if not os.path.realpath(path).startswith(os.path.join(folder, "")):
        raise ConvertError(
            f"{path} is a symbolic link that points outside its folder, and such links "
            "are not followed. Copy the files themselves with cp -rL."
        )
    return path


def _read_trainer_state(path: Path, limits: Limits) -> Any:
    with open(path, "rb", opener=open_file) as file:
        data = file.read(LONGEST_JSON)
    limits.spend(_PER_MARK * sum(map(data.count, (b",", b":", b"{", b"["))))
    return read_json(path)


def _read_file(path: Path, limits: Limits) -> Any:
    if path.suffix == ".safetensors":
        return dict(sorted(read_arrays(path).items()))
    try:
        return torch_checkpoint.load(path, limits, float64=mx.float64)
    except torch_checkpoint.CheckpointError as error:
        raise torch_checkpoint.CheckpointError(f"{path}: {error}") from error


def trainer_state(checkpoint: Any) -> dict[str, Any]:
    """Return the contents of ``trainer_state.json``, or an empty dict."""
    state = checkpoint.get(TRAINER) if isinstance(checkpoint, dict) else None
    return state if isinstance(state, dict) else {}


def check_folder(path: Path, is_own: Callable[[str], bool], overwrite: bool) -> None:
    """Raise if a folder exists, unless ``overwrite`` and it has only its own files."""
    if path.is_file() or path.is_mount():  # neither can be replaced by a folder
        kind = "file" if path.is_file() else "mount point"
        raise FileExistsError(f"{path} is a {kind}. Use another folder.")
    there = [file.name for file in path.iterdir()] if path.is_dir() else []
    if there and not overwrite:
        raise FileExistsError(
            f"{path} already exists. Pass --overwrite (overwrite=True) to replace it."
        )
    spare = [name for name in there if not is_own(name) and name != ".DS_Store"]
    if spare:
        raise FileExistsError(
            f"{path} contains files that are not part of this checkpoint: "
            f"{list_some(spare)}. Use another folder."
        )


def check_writable(path: Path) -> None:
    """Raise if a path cannot be written, before the work. Its parents may not exist."""
    parent = next(x for x in Path(os.path.realpath(path)).parents if x.exists())
    try:
        with temporary_folder(parent):
            pass
    except OSError as error:
        raise OSError(
            f"Cannot write {path}: {error.strerror} ({parent}). Use another path."
        ) from error


def check_torch(
    path: Path, checkpoint: Any, files: dict[str, Path] | None, overwrite: bool
) -> None:
    """Raise if :func:`write_torch` could not write a checkpoint to this path."""
    check_writable(path)
    if files is None:
        check_file(path, overwrite)
        return
    for name in checkpoint:  # a hostile template could write a train.py
        if name != TRAINER and not _SECTION.fullmatch(str(name)):
            raise ConvertError(
                f"The template refers to {name!r}, which is not the name of a file in "
                "a PyTorch checkpoint folder. Use another template."
            )
    check_folder(path, {*checkpoint, *files}.__contains__, overwrite)


def write_torch(path: Path, checkpoint: Any, files: dict[str, Path] | None) -> None:
    """Write a checkpoint given as :func:`read_torch` returns it.

    If writing fails, an existing file or folder stays unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if files is None:
        _write_file(path, checkpoint)
        return
    with atomic_folder(path) as folder:
        for name, content in checkpoint.items():
            _write_file(folder / name, content)
        for name, source in files.items():
            shutil.copyfile(source, folder / name)


def _write_file(path: Path, content: Any) -> None:
    if path.name == TRAINER:
        # This is the format of Transformers.
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    elif path.suffix.lower() == ".safetensors":
        if not _has_only_tensors(content):
            raise ConvertError(
                f"{path.name} cannot store this checkpoint, because a safetensors file "
                "holds only named tensors. Use a path that ends in .pt."
            )
        # Transformers and Accelerate refuse a file without this key.
        write_arrays(path, content, {"format": "pt"})
    else:
        torch_checkpoint.save(path, content)


def _has_only_tensors(content: Any) -> bool:
    return isinstance(content, dict) and all(
        isinstance(key, str) and is_tensor(value) for key, value in content.items()
    )
