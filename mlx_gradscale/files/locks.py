"""Old import path, until nobody uses it."""

from .atomic import is_there, lock
from .paths import open_file, refuse_special

__all__ = ["is_there", "lock", "open_file", "refuse_special"]
