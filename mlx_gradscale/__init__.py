"""Safe float16 training for MLX: loss scaling, master weights, PyTorch checkpoints."""

from ._version import __version__
from .finite import NonFinite, all_finite, nonfinite
from .float16 import find_float32_layers
from .islands import float32_layers
from .optimizer import LossScaleOptimizer
from .scaler import GradScaler

__all__ = [
    "GradScaler",
    "LossScaleOptimizer",
    "NonFinite",
    "__version__",
    "all_finite",
    "find_float32_layers",
    "float32_layers",
    "nonfinite",
]
