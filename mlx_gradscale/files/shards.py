"""A model in several files with an index, as Transformers and mlx-lm write it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .locks import open_file
from .paths import check_name

INDEX = ".index.json"
_SHARD = re.compile(r"(.+)-(\d{1,6})-of-(\d{1,6})(\.safetensors|\.bin)")
# An index has some 100 bytes for each tensor.
_LARGEST_INDEX = 2**26


def shard_sets(names: list[str]) -> dict[str, list[str]]:
    """Return the names of files that are shards of one model, by that of their index.

    Args:
        names (list): The files of a folder.

    Raises:
        ValueError: If one of a set is missing.

    Example:
        >>> shard_sets(["a-1-of-2.bin", "a-2-of-2.bin", "b.bin"])
        {'a.bin.index.json': ['a-1-of-2.bin', 'a-2-of-2.bin']}
    """
    found: dict[tuple[str, int], dict[int, str]] = {}
    for name in names:
        match = _SHARD.fullmatch(name)
        if match:
            key = (f"{match[1]}{match[4]}{INDEX}", int(match[3]))
            found.setdefault(key, {})[int(match[2])] = name
    out = {}
    for (index, count), shards in found.items():
        missing = [i for i in range(1, count + 1) if i not in shards]
        if missing or index in out:
            raise ValueError(
                f"{next(iter(shards.values()))} is one of {count} files, of which "
                f"{len(shards)} are there: copy the others into the folder, too."
            )
        out[index] = [shards[i] for i in sorted(shards)]
    return out


def is_shard(path: Path) -> bool:
    """Tell whether a file is one of several by its name.

    Example:
        >>> is_shard(Path("model-00001-of-00002.safetensors"))
        True
    """
    match = _SHARD.fullmatch(path.name)
    return match is not None and int(match[3]) > 1


def read_index(path: Path, held: Mapping[str, str]) -> dict[str, Any]:
    """Return the index of a model, checked against its files.

    Args:
        path (Path): Of the index; it need not be there.
        held (dict): Tensor -> the file that it was found in.

    Returns:
        dict: ``metadata`` and ``files``, which is ``held``.
    """
    if not path.exists():
        return {"metadata": {}, "files": dict(held)}
    try:
        with open(path, "rb", opener=open_file) as file:
            index = json.loads(file.read(_LARGEST_INDEX))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict):
        raise ValueError(f"{path} has no weight_map: it is no index of a model.")
    for name in files.values():
        check_name(name, str(path))
    if files != held:
        names = files.keys() | held.keys()
        differ = sorted(name for name in names if files.get(name) != held.get(name))
        raise ValueError(
            f"{path} and the files it names do not hold the same tensors: "
            f"{', '.join(differ[:3])}. They are of different models, or cut off."
        )
    metadata = index.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    return {"metadata": metadata, "files": dict(held)}


def check_shards(shards: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise on names in a record that are not those of an index and its files."""
    for index, held in shards.items():
        if not check_name(index, "The run's record").endswith(INDEX):
            raise ValueError(f"The run's record names {index!r}, no index of a model.")
        for name in held["files"].values():
            if not _SHARD.fullmatch(check_name(name, "The run's record")):
                raise ValueError(
                    f"The run's record names {name!r}, no shard of a model"
                )


def split(
    tensors: Mapping[str, Any], index: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], bytes]:
    """Return the files of a model as they were: content by name, and the index.

    Example:
        >>> split({"w": 1}, {"metadata": {}, "files": {"w": "a-1-of-1.bin"}})[0]
        {'a-1-of-1.bin': {'w': 1}}
    """
    out: dict[str, dict[str, Any]] = {}
    is_model = isinstance(tensors, Mapping)  # a file may say anything
    if not is_model or tensors.keys() != index["files"].keys():
        raise ValueError("The model has other tensors than the index of its files.")
    for name, tensor in tensors.items():
        out.setdefault(index["files"][name], {})[name] = tensor
    text = {"metadata": index["metadata"], "weight_map": index["files"]}
    return out, (json.dumps(text, indent=2, sort_keys=True) + "\n").encode()
