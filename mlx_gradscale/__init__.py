"""Safe float16 training for MLX: loss scaling, master weights, PyTorch checkpoints."""

from . import uninterrupted  # noqa: F401 - first: it imports MLX
from ._version import __version__
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
]
