"""PyTorch checkpoints into live MLX runs and back, as functions and as a command."""

from .command import main
from .load import TorchRun, load_torch
from .options import Options
from .save import save_torch
from .template import Template, build_optimizer
from .tree import ConvertError

__all__ = [
    "ConvertError",
    "Options",
    "Template",
    "TorchRun",
    "build_optimizer",
    "load_torch",
    "main",
    "save_torch",
]
