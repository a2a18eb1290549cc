"""Save a run that was born in MLX, and restore it in place."""

from .restore import restore_checkpoint
from .save import save_checkpoint

__all__ = ["restore_checkpoint", "save_checkpoint"]
