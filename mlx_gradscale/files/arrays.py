"""Named arrays in safetensors files, by MLX's own reader and writer."""

import os
from collections.abc import Mapping

import mlx.core as mx

from .atomic import atomic_write
from .locks import open_file
from .safetensors import check_apart


def read_arrays(
    path: str | os.PathLike,
) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Read a safetensors file; its arrays are read when they are used.

    Args:
        path (str): The file, of any suffix.

    Returns:
        tuple: The arrays, and the metadata.

    Raises:
        ValueError: It is not a safetensors file, or its tensors overlap.
    """
    path = os.fspath(path)
    descriptor = open_file(path, os.O_RDONLY)
    try:
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            check_apart(file)
        # MLX opens it again, at once, and takes only names that are UTF-8.
        plain = path.isascii() or _is_utf8(path)
        place = path if plain else f"/dev/fd/{descriptor}"
        return mx.load(place, format="safetensors", return_metadata=True)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    finally:
        os.close(descriptor)


def write_arrays(
    path: str | os.PathLike,
    arrays: Mapping[str, mx.array],
    metadata: Mapping[str, str],
) -> None:
    """Write a safetensors file, whole or not at all.

    Args:
        path (str): The file; it is replaced.
        arrays (dict): By name.
        metadata (dict): Words for readers.

    Example:

        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "a.safetensors")
        >>> write_arrays(path, {"w": mx.zeros(2)}, {"format": "mlx"})
        >>> read_arrays(path)
        ({'w': array([0, 0], dtype=float32)}, {'format': 'mlx'})
    """
    with atomic_write(path) as file:
        mx.save_safetensors(file, dict(arrays), dict(metadata))


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
