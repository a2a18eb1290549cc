"""Small dicts of numbers in files, by suffix; every write is atomic."""

import contextlib
import gzip
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

# A scaler's state is some 300 bytes. Whatever unpacks to more is another file.
_LARGEST = 2**20


def save_state(path: str | os.PathLike, state: dict[str, Any]) -> None:
    """Write ``state`` to one file, in the format that the suffix names.

    Args:
        path (str): Ends in ``.json``, ``.json.gz``, ``.safetensors``, ``.pt`` or
            ``.pt.gz``.
        state (dict): Names and Python numbers.
    """
    path = Path(path)
    writer = _format(path)[0]
    with atomic_path(path) as temporary:
        writer(temporary, state)


def load_state(path: str | os.PathLike) -> dict[str, Any]:
    """Read what :func:`save_state`, or ``torch.save``, wrote.

    Args:
        path (str): As for :func:`save_state`.

    Raises:
        ValueError: The file is not what its suffix says.
    """
    path = Path(path)
    reader = _format(path)[1]
    if path.stat().st_size > _LARGEST:
        raise ValueError(f"{path} is too large to be the state of a GradScaler.")
    try:
        state = reader(path)
    except (ValueError, RuntimeError, OSError, EOFError) as error:
        raise ValueError(
            f"{path} is not a readable {''.join(path.suffixes)} file: {error}"
        ) from error
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__}, not a state dict.")
    return state


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a path beside ``path`` that takes its place if nothing was raised."""
    # The suffix stays: mx.save_safetensors appends its own to any other.
    handle, name = tempfile.mkstemp(
        prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent
    )
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        # mkstemp gives 0600; a new file should be as readable as any other.
        umask = os.umask(0)
        os.umask(umask)
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~umask
        temporary.chmod(mode)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_json(path: Path, state: dict[str, Any]) -> None:
    path.write_text(json.dumps(state, indent=2) + "\n")


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def _write_json_gz(path: Path, state: dict[str, Any]) -> None:
    path.write_bytes(gzip.compress(json.dumps(state).encode(), mtime=0))


def _read_json_gz(path: Path) -> Any:
    return json.loads(_gunzip(path))


def _gunzip(path: Path) -> bytes:
    with gzip.open(path) as file:
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError("it unpacks to more than a GradScaler's state")
    return data


def _write_safetensors(path: Path, state: dict[str, Any]) -> None:
    arrays = {name: mx.array(value) for name, value in state.items()}
    mx.save_safetensors(str(path), arrays, {"format": "mlx_gradscale"})


def _read_safetensors(path: Path) -> Any:
    arrays = mx.load(str(path), format="safetensors")
    if any(array.size != 1 for array in arrays.values()):
        raise ValueError("it holds tensors, not the numbers of a GradScaler")
    return {name: array.item() for name, array in arrays.items()}


_FORMATS = {
    ".json": (_write_json, _read_json),
    ".json.gz": (_write_json_gz, _read_json_gz),
    ".safetensors": (_write_safetensors, _read_safetensors),
}


def _format(path: Path) -> Any:
    for suffix, functions in _FORMATS.items():
        if path.name.endswith(suffix):
            return functions
    raise ValueError(
        f"Cannot tell the format of {path.name!r}: use one of {', '.join(_FORMATS)}."
    )
