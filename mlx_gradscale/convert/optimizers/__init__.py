"""Optimizer state between PyTorch and mlx.optimizers: a table and its rules."""

from .builder import Rate, build, scheduled_rate, settings
from .compare import (
    Difference,
    OptimizerMismatch,
    check,
    differences,
    mlx_differences,
    recognise,
)
from .table import ROWS, SCHEDULED, Row, number

__all__ = [
    "ROWS",
    "SCHEDULED",
    "Difference",
    "OptimizerMismatch",
    "Rate",
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
