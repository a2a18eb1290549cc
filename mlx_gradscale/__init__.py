"""Safe float16 training for MLX: loss scaling, master weights, PyTorch checkpoints."""

from ._version import __version__
from .checkpoint import restore_checkpoint, save_checkpoint
from .finite import NonFinite, all_finite, nonfinite
from .optimizer import LossScaleOptimizer
from .scaler import GradScaler

__all__ = [
    "GradScaler",
    "LossScaleOptimizer",
    "NonFinite",
    "__version__",
    "all_finite",
    "nonfinite",
    "restore_checkpoint",
    "save_checkpoint",
]
