"""Save and load a scaler's state, in the format that the file's suffix selects."""

import gzip
import io
import json
import os
import zlib
from pathlib import Path
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
    """Write the state of a scaler to a file, atomically.

    Args:
        path (str): The file to write, which must end in ``.json``, ``.json.gz``,
            ``.safetensors``, ``.pt`` or ``.pt.gz``.
        state (dict): The result of ``GradScaler.state_dict``.
    """
    kind, is_packed = _parse_suffix(path)
    if kind == ".safetensors":
        write_arrays(path, {name: mx.array(x) for name, x in state.items()})
        return
    buffer = io.BytesIO((json.dumps(state, indent=2) + "\n").encode())
    if kind == ".pt":
        torch_checkpoint.save(buffer := io.BytesIO(), state)
    data = buffer.getvalue()
    with atomic_write(path) as file:
        file.write(gzip.compress(data, mtime=0) if is_packed else data)


def load_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a scaler state written by :func:`save_state` or ``torch.save``.

    Raises:
        ValueError: If the file has an unknown suffix, cannot be decoded, is too large
            to be the state of a scaler, or does not contain a dict.
    """
    kind, is_packed = _parse_suffix(path)
    with open(path, "rb", opener=open_file) as file:
        try:
            source: Any = gzip.GzipFile(fileobj=file) if is_packed else file
            data = source.read(_LARGEST + 1)
            if len(data) > _LARGEST:
                raise ValueError(
                    "the file is too large to be the state of a GradScaler. If it is a "
                    "PyTorch checkpoint, load its scaler with scaler.load_state_dict("
                    'mlx_gradscale.torch_checkpoint.load(path)["scaler"]).'
                )
            if kind == ".safetensors":
                state = {name: x.item() for name, x in read_arrays(path).items()}
            else:
                load: Any = json.loads if kind == ".json" else torch_checkpoint.load
                state = load(data)
            if not isinstance(state, dict):
                raise ValueError(
                    f"it contains a value of type {type(state).__name__}, not a dict. "
                    "Save the result of scaler.state_dict()."
                )
        except (ValueError, RuntimeError, OSError, EOFError, zlib.error) as error:
            raise ValueError(f"Cannot read {os.fspath(path)}: {error}") from error
    return state


def _parse_suffix(path: str | os.PathLike[str]) -> tuple[str, bool]:
    """Return the suffix of a path without ``.gz``, and whether it had one."""
    name = Path(path).name
    for suffix in _SUFFIXES:
        if name.endswith(suffix):
            return suffix.removesuffix(".gz"), suffix.endswith(".gz")
    raise ValueError(
        f"{name!r} has an unknown suffix. Use one of {', '.join(_SUFFIXES)}."
    )
