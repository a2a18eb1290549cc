"""Safe float16 training for MLX: loss scaling, master weights, PyTorch checkpoints."""

from . import uninterrupted  # noqa: F401 - first: it imports MLX
from ._version import __version__
from .checkpoint import restore_checkpoint, save_checkpoint
from .core.finite import NonFinite, all_finite, nonfinite
from .core.optimizer import GuardedOptimizer, LossScaleOptimizer
from .core.scaler import GradScaler
from .float32_layers import find_float32_layers, float32_layers

__all__ = [
    "GradScaler",
    "GuardedOptimizer",
    "LossScaleOptimizer",
    "NonFinite",
    "__version__",
    "all_finite",
    "find_float32_layers",
    "float32_layers",
    "nonfinite",
    "restore_checkpoint",
    "save_checkpoint",
]
