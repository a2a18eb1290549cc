"""Read and write PyTorch checkpoints: files, and Trainer and Accelerate folders."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..core.trees import CONTAINERS
from ..files.arrays import read_arrays, write_arrays
from ..files.disk import atomic_folder, check_file, read_json
from ..files.text import list_some
from ..torch_checkpoint import CheckpointError, Tensor, plain_value, save, shapes

# Transformers' step and epoch counts. No other JSON file changes during training.
TRAINER = "trainer_state.json"
_SECTION = re.compile(
    r"((\w+_)?model|(lr_)?scheduler|optimizer|scaler|grad_scaler)(_\d+)?"
    r"\.(safetensors|bin|pt|pth|ckpt)"
)
_SHARD = re.compile(r"((\w+_)?model)-\d{1,6}-of-(\d{1,6})(\.safetensors|\.bin)")


class ConvertError(ValueError):
    """Raised if a run cannot be converted. The message says what to do."""


@dataclass
class Source:
    """A PyTorch checkpoint whose containers may be edited.

    Attributes:
        tree (Any): The object in a file, with a ``Tensor`` for every tensor; for a
            folder, a dict from file names to their objects, in which a sharded model
            has the name of a single file, and files to copy are a ``Path``.
        is_folder (bool): Whether it is a folder.
        notes (list): Notes on files that were left out.
    """

    tree: Any
    is_folder: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def trainer(self) -> dict[str, Any]:
        """The Trainer's state, or an empty dict."""
        state = self.tree.get(TRAINER) if self.is_folder else None
        return state if isinstance(state, dict) else {}


def number(value: Any) -> Any:
    """Convert tensors of one element and NumPy scalars to numbers."""
    if isinstance(value, Tensor) and value.shape in ((), (1,)):
        return value.read().item()
    return plain_value(value)


def items(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of a dict, or the indices and items of a sequence."""
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, CONTAINERS) else ()


def match_type(value: Any, old: Any) -> Any:
    """Convert a new value to the type of the tensor, tuple or number it replaces."""
    if isinstance(old, Tensor):
        if not isinstance(value, mx.array):
            value = mx.array(value).reshape(old.shape)
        # MLX supports float64 only on the CPU.
        value = value.astype(getattr(mx, old.dtype), stream=mx.cpu)
        mx.eval(value)  # a lazy array would be tied to this thread
        return old.replace(value)
    is_whole = type(old) is int and float(value).is_integer()
    is_kept = isinstance(old, (bool, float, tuple))
    return type(old)(value) if is_whole or is_kept else value


def read_source(path: str | os.PathLike[str]) -> Source:
    """Read a PyTorch checkpoint; tensors of ``.pt`` files are read when needed."""
    path = Path(path)
    # The reader refuses a torch.distributed.checkpoint folder and says what to do.
    if not path.is_dir() or (path / ".metadata").is_file():
        return Source(_read_file(path))
    tree: dict[str, Any] = {}
    left_out: list[str] = []
    totals: dict[str, list[int]] = {}  # by sharded model, one for each shard
    for file in sorted(path.iterdir()):
        shard = _SHARD.fullmatch(file.name)
        if shard:
            whole = shard[1] + shard[4]
            totals.setdefault(whole, []).append(int(shard[3]))
            tree.setdefault(whole, {}).update(_read_file(_inside(file)))
        elif _SECTION.fullmatch(file.name):
            tree.setdefault(file.name, _read_file(_inside(file)))
        elif file.name == TRAINER:
            tree[TRAINER] = read_json(_inside(file))
        elif file.name.removesuffix(".index.json") in totals:
            pass  # the model is written as one file
        elif file.is_file() and not file.is_symlink() and file.name[0] != ".":
            tree[file.name] = file
        else:
            left_out.append(file.name)
    if any({len(each)} != {*each} for each in totals.values()):
        raise ConvertError(
            f"{path} does not contain exactly the shards of one model. Add missing "
            "shards, and remove those of other checkpoints."
        )
    if all(name == TRAINER or isinstance(x, Path) for name, x in tree.items()):
        raise ConvertError(
            f"{path} contains no file with a name that Trainer or Accelerate uses, "
            "such as model.safetensors or optimizer.pt. Pass the path of a single file "
            "instead. For DeepSpeed ZeRO, run zero_to_fp32.py on the folder and "
            "convert the weights that it writes."
        )
    note = "These files or folders were left out, because only regular files that are "
    note += f"not hidden are copied: {list_some(left_out)}."
    return Source(tree, True, [note] if left_out else [])


def _read_file(path: Path) -> Any:
    if path.suffix.lower() == ".safetensors":
        return {name: Tensor.of(x) for name, x in sorted(read_arrays(path).items())}
    try:
        return shapes(path)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _inside(path: Path) -> Path:
    """Return a path, or raise if it is a symbolic link out of its folder."""
    if path.is_symlink() and path.parent.resolve() not in path.resolve().parents:
        raise ConvertError(
            f"{path} is a symbolic link that points outside its folder, and such links "
            "are not followed. Copy the files themselves with cp -rL."
        )
    return path


def check_target(path: Path, source: Source, overwrite: bool) -> None:
    """Raise if a path exists, unless ``overwrite`` and it can be replaced."""
    if source.is_folder:
        check_folder(path, source.tree.__contains__, overwrite)
    else:
        check_file(path, overwrite)


def check_folder(path: Path, is_own: Callable[[str], bool], overwrite: bool) -> None:
    """Raise if a folder exists, unless ``overwrite`` and it has only its own files."""
    if path.is_file() or os.path.ismount(path):  # neither can become a folder
        raise FileExistsError(f"{path} is a file or a mount point. Use another folder.")
    there = os.listdir(path) if path.exists() else []
    check_file(path, overwrite or not there)
    spare = [name for name in there if not is_own(name) and name != ".DS_Store"]
    if spare:
        raise FileExistsError(
            f"{path} contains files that are not part of this checkpoint: "
            f"{list_some(spare)}. Use another folder."
        )


def write_source(path: Path, source: Source) -> None:
    """Write a checkpoint. If that fails, an existing file or folder stays as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not source.is_folder:
        _write_file(path, source.tree)
        return
    with atomic_folder(path) as folder:
        for name, content in source.tree.items():
            _write_file(folder / name, content)


def _write_file(path: Path, content: Any) -> None:
    if isinstance(content, Path):
        shutil.copyfile(content, path)
    elif path.name == TRAINER:
        # This is the format of Transformers.
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    elif path.suffix.lower() != ".safetensors":
        save(path, content)
    elif isinstance(content, dict) and all(
        isinstance(x, Tensor) for x in content.values()
    ):
        # Transformers and Accelerate refuse a file without this metadata.
        arrays = {name: tensor.read() for name, tensor in content.items()}
        write_arrays(path, arrays, {"format": "pt"})
    else:
        raise ConvertError(
            f"{path.name} cannot store this checkpoint, because a safetensors file "
            "holds only named tensors. Use a path that ends in .pt."
        )
