"""Old import path, until nobody uses it."""

import os
from contextlib import suppress
from pathlib import Path

from .atomic import lock
from .paths import open_file, refuse_special

__all__ = ["is_there", "lock", "open_file", "refuse_special"]


def is_there(path: Path, descriptor: int) -> bool:
    """Tell whether a path still names the file or folder that is open."""
    with suppress(OSError):
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    return False
