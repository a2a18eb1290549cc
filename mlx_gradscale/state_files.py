"""Save and load a scaler's state, in the format that the file's suffix selects."""

import gzip
import io
import json
import os
import zlib
from typing import Any

import mlx.core as mx

from . import torch_checkpoint
from .files.arrays import read_arrays, write_arrays
from .files.disk import atomic_write, open_file

# A scaler's state takes about 300 bytes, so a file that unpacks to more than 1 MB must
# be something else.
_LARGEST = 2**20
_SUFFIXES = (".json", ".json.gz", ".safetensors", ".pt", ".pt.gz")


def save_state(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write the state of a scaler to a file, atomically."""
    suffix = _find_suffix(path)
    if suffix == ".safetensors":
        write_arrays(path, {name: mx.array(x) for name, x in state.items()})
        return
    buffer = io.BytesIO((json.dumps(state, indent=2) + "\n").encode())
    if suffix.startswith(".pt"):
        torch_checkpoint.save(buffer := io.BytesIO(), state)
    data = buffer.getvalue()
    with atomic_write(path) as file:
        file.write(gzip.compress(data, mtime=0) if suffix.endswith(".gz") else data)


def load_state(path: str | os.PathLike[str]) -> Any:
    """Read a scaler state written by :func:`save_state` or ``torch.save``.

    Raises:
        ValueError: If the file has an unknown suffix, cannot be decoded, or is too
            large to be the state of a scaler.
    """
    suffix = _find_suffix(path)
    with open(path, "rb", opener=open_file) as file:
        try:
            source: Any = file
            if suffix.endswith(".gz"):
                source = gzip.GzipFile(fileobj=file)
            data = source.read(_LARGEST + 1)
            if len(data) > _LARGEST:
                raise ValueError(
                    "the file is too large to be the state of a GradScaler. If it is a "
                    "PyTorch checkpoint, load its scaler with scaler.load_state_dict("
                    'mlx_gradscale.torch_checkpoint.load(path)["scaler"]).'
                )
            if suffix == ".safetensors":
                return {name: x.item() for name, x in read_arrays(path).items()}
            if suffix.startswith(".pt"):
                return torch_checkpoint.load(data)
            return json.loads(data)
        except (ValueError, RuntimeError, OSError, EOFError, zlib.error) as error:
            raise ValueError(f"Cannot read {os.fspath(path)}: {error}") from error


def _find_suffix(path: str | os.PathLike[str]) -> str:
    name = os.path.basename(path)
    for suffix in _SUFFIXES:
        if name.endswith(suffix):
            return suffix
    raise ValueError(
        f"{name!r} has an unknown suffix. Use one of {', '.join(_SUFFIXES)}."
    )
