"""Convert training runs between PyTorch and MLX, in Python or on the command line."""

from .command import main
from .load import TorchRun, load_torch
from .options import Options
from .save import save_torch
from .template import Template
from .template_file import build_optimizer
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
