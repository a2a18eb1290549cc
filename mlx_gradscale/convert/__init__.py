"""Whole checkpoints between PyTorch and MLX, as functions and as a command."""

from ..run_folder.contents import RunError
from .command import main
from .conversion import from_torch, to_torch
from .folder import read_run, write_run
from .layouts import Choices
from .record import Record
from .resume import Resumed, build_optimizer, load_optimizer_state, load_run, save_run
from .run import Options, Run
from .several import from_several
from .torch_folder import read_torch, write_torch

__all__ = [
    "Choices",
    "Options",
    "Record",
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
