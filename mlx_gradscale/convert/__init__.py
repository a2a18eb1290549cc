"""Whole checkpoints between PyTorch and MLX, as functions and as a command."""

from .command import main
from .conversion import Options, Run, from_torch, to_torch
from .folder import read_run, write_run
from .layouts import Choices
from .record import RunError
from .resume import Resumed, build_optimizer, load_optimizer_state, load_run, save_run
from .several import from_several
from .torch_folder import read_torch, write_torch

__all__ = [
    "Choices",
    "Options",
    "Resumed",
    "Run",
    "RunError",
    "build_optimizer",
    "from_several",
    "from_torch",
    "load_optimizer_state",
    "load_run",
    "main",
    "read_run",
    "read_torch",
    "save_run",
    "to_torch",
    "write_run",
    "write_torch",
]
