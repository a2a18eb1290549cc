"""Which layers of a model cannot compute in float16, and how near the others are."""

from .command import main
from .report import Float32Search, Reason, Row
from .search import find_float32_layers

__all__ = ["Float32Search", "Reason", "Row", "find_float32_layers", "main"]
