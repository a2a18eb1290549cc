"""The file that float32 layers are written to: JSON, read with distrust."""

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

from ..files.atomic import atomic_write

_FORMAT = "mlx_gradscale.float32_layers"
_VERSION = 1
# A thousand layers with their table are some 200 kB.
_LARGEST_FILE = 2**22
_MOST_LAYERS = 10_000
_LONGEST_NAME = 1000


def save_float32_layers(
    path: str | os.PathLike[str],
    layers: Iterable[str | Sequence[str]],
    table: Sequence[dict[str, Any]] = (),
) -> None:
    """Write layers to a file that ``float32_layers`` takes.

    Args:
        path (str): Ends in ``.json``.
        layers (list): Paths, globs, ranges and chains, as for ``float32_layers``.
        table (list): Rows with what was measured, for people to read.
    """
    if not os.fspath(path).endswith(".json"):
        raise ValueError(f"The file must end in .json, got {os.fspath(path)!r}.")
    content = {"format": _FORMAT, "version": _VERSION, "layers": list(layers)}
    if table:
        content["table"] = list(table)
    _check(content)
    data = (json.dumps(content, indent=2) + "\n").encode()
    with atomic_write(path) as file:
        file.write(data)


def load_float32_layers(path: str | os.PathLike[str]) -> list[str | list[str]]:
    """Read the layers that :func:`save_float32_layers` wrote.

    Args:
        path (str): The file.

    Raises:
        ValueError: The file is another one.

    Example:
        >>> import os, tempfile
        >>> from mlx_gradscale.islands import load_float32_layers, save_float32_layers
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "float32.json")
        ...     save_float32_layers(path, ["layers.3 to norm"])
        ...     load_float32_layers(path)
        ['layers.3 to norm']
    """
    name = os.fspath(path)
    with open(path, "rb") as file:
        data = file.read(_LARGEST_FILE + 1)
    try:
        if len(data) > _LARGEST_FILE:
            raise ValueError(f"it is larger than {_LARGEST_FILE} bytes")
        content = json.loads(data)
        _check(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no list of float32 layers: {error}.") from error
    layers: list[str | list[str]] = content["layers"]
    return layers


def _check(content: Any) -> None:
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f'it does not say "format": "{_FORMAT}"')
    if content.get("version") != _VERSION:
        raise ValueError(f"its version is {content.get('version')!r}, not {_VERSION}")
    layers = content.get("layers")
    if not isinstance(layers, list):
        raise ValueError("it has no list of layers")
    names = [x for e in layers for x in (e if isinstance(e, (list, tuple)) else [e])]
    if len(layers) > _MOST_LAYERS or len(names) > _MOST_LAYERS:
        raise ValueError(f"it names more than {_MOST_LAYERS} layers")
    for name in names:
        if not isinstance(name, str) or len(name) > _LONGEST_NAME:
            raise ValueError(f"{str(name)[:80]!r} is no name of a layer")
