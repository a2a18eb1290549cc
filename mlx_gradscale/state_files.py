"""Small dicts of numbers in files, by suffix; every write is atomic."""

import gzip
import io
import json
import os
import zlib
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from . import torch_checkpoint
from .files.atomic import atomic_write
from .files.locks import open_file

# A scaler's state is some 300 bytes. Whatever unpacks to more is another file.
_LARGEST = 2**20


def save_state(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write ``state`` to one file, in the format that the suffix names.

    Args:
        path (str): Ends in ``.json``, ``.json.gz``, ``.safetensors``, ``.pt`` or
            ``.pt.gz``.
        state (dict): Names and Python numbers.
    """
    encode, _ = _format(path)
    data = encode(state)
    if _is_gzip(path):
        data = gzip.compress(data, mtime=0)
    with atomic_write(path) as file:
        file.write(data)


def load_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what :func:`save_state`, or ``torch.save``, wrote.

    Args:
        path (str): As for :func:`save_state`.

    Raises:
        ValueError: The file is not what its suffix says.
    """
    _, decode = _format(path)
    with open(path, "rb", opener=open_file) as file:
        try:
            source = gzip.GzipFile(fileobj=file) if _is_gzip(path) else file
            state = decode(_read(source))
        except (ValueError, RuntimeError, OSError, EOFError, zlib.error) as error:
            raise ValueError(f"Cannot read {os.fspath(path)}: {error}") from error
    if not isinstance(state, dict):
        raise ValueError(
            f"{os.fspath(path)} holds a {type(state).__name__}, not a state dict."
        )
    return state


def _read(file: Any) -> bytes:
    data: bytes = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError(
            "it holds more than the state of a GradScaler. Of a whole checkpoint, load "
            'the part: load_state_dict(torch_checkpoint.load(path)["scaler"])'
        )
    return data


def _encode_json(state: dict[str, Any]) -> bytes:
    return (json.dumps(state, indent=2) + "\n").encode()


def _encode_safetensors(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    arrays = {name: mx.array(value) for name, value in state.items()}
    mx.save_safetensors(file, arrays, {"format": "mlx_gradscale"})
    return file.getvalue()


def _decode_safetensors(data: bytes) -> dict[str, Any]:
    loaded = mx.load(io.BytesIO(data), format="safetensors")
    arrays = cast(dict[str, mx.array], loaded)
    if any(array.size != 1 for array in arrays.values()):
        raise ValueError("it holds tensors, not the numbers of a GradScaler")
    return {name: array.item() for name, array in arrays.items()}


def _encode_torch(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch_checkpoint.save(file, state)
    return file.getvalue()


_FORMATS = {
    ".json": (_encode_json, json.loads),
    ".safetensors": (_encode_safetensors, _decode_safetensors),
    ".pt": (_encode_torch, torch_checkpoint.load),
}


def _is_gzip(path: str | os.PathLike[str]) -> bool:
    return Path(path).name.endswith((".json.gz", ".pt.gz"))


def _format(path: str | os.PathLike[str]) -> Any:
    suffix = Path(path).with_suffix("").suffix if _is_gzip(path) else Path(path).suffix
    if suffix not in _FORMATS:
        raise ValueError(
            f"Cannot tell the format of {Path(path).name!r}: use .json, .json.gz, "
            ".safetensors, .pt or .pt.gz."
        )
    return _FORMATS[suffix]
