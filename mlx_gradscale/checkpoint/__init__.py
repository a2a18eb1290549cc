"""Save training runs, and restore them so that they resume bit-identically."""

from .folder import Checkpoint, latest_checkpoint, read_checkpoint
from .run import restore_checkpoint, save_checkpoint

__all__ = [
    "Checkpoint",
    "latest_checkpoint",
    "read_checkpoint",
    "restore_checkpoint",
    "save_checkpoint",
]
