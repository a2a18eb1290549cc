"""Optimizer state between PyTorch and mlx.optimizers: a table and its rules."""

from .builder import build, scheduled_rate, settings
from .compare import (
    Difference,
    OptimizerMismatch,
    check,
    differences,
    mlx_differences,
    recognise,
)
from .table import ROWS, Row, number

__all__ = [
    "ROWS",
    "Difference",
    "OptimizerMismatch",
    "Row",
    "build",
    "check",
    "differences",
    "mlx_differences",
    "number",
    "recognise",
    "scheduled_rate",
    "settings",
]
