"""Find layers of a half-precision model that need float32, and run them in float32."""

from .layers import float32_layers
from .report import Float32Search, Row
from .search import find_float32_layers

__all__ = ["Float32Search", "Row", "find_float32_layers", "float32_layers"]
