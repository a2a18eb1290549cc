"""Convert training runs between PyTorch and MLX, in Python or on the command line."""

from .files import ConvertError
from .run import TorchRun, build_optimizer, load_torch, save_torch

__all__ = [
    "ConvertError",
    "TorchRun",
    "build_optimizer",
    "load_torch",
    "save_torch",
]
