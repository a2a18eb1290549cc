"""flodl's scaler file: 16 bytes, gzip by suffix."""

import gzip
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ..files.atomic import atomic_write
from ..files.locks import open_file
from .state import FLODL, read_state, write_state
from .table import USUAL


def load_flodl(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read flodl's 16-byte scaler file; gzip by the suffix ``.gz``.

    Args:
        path (str): The file.

    Returns:
        dict: As :func:`read_state` gives. flodl's factors are fixed (2, 0.5, 2000),
        so nothing is guessed.
    """
    with open(path, "rb", opener=open_file) as file:
        source = gzip.GzipFile(fileobj=file) if Path(path).suffix == ".gz" else file
        try:
            # No more than tells it from another file: some are gigabytes long.
            data = source.read(FLODL.size + 1)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is not a gzip file: {error}.") from error
    if len(data) != FLODL.size:
        has = "more" if len(data) > FLODL.size else f"{len(data)} bytes"
        raise ValueError(
            f"{path} has {has}; a flodl scaler file has {FLODL.size} bytes."
        )
    scale, steps = FLODL.unpack(data)
    state = {"scale": scale, "steps_since_growth": steps}
    return read_state(state, "flodl", **USUAL)


def save_flodl(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write flodl's 16-byte scaler file, atomically; gzip by the suffix ``.gz``.

    Args:
        path (str): The file.
        state (dict): What ``GradScaler.state_dict`` gives.

    Example:
        >>> import os, tempfile
        >>> from mlx_gradscale.formats import load_flodl, save_flodl
        >>> state = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5,
        ...          "growth_interval": 2000, "_growth_tracker": 7}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_flodl(os.path.join(folder, "scaler.bin.gz"), state)
        ...     load_flodl(os.path.join(folder, "scaler.bin.gz")) == state
        True
    """
    data = cast(bytes, write_state(state, "flodl"))
    target = Path(path)
    if target.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    with atomic_write(target) as file:
        file.write(data)
